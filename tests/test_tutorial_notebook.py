"""docs/tutorial.ipynb runs from top to bottom and gives its stored outputs."""

from __future__ import annotations

import base64
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, import_script

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

NUM_UPDATES = 20  # in place of the notebook's MAX_UPDATES, the only cell that the test changes
MAX_CHARACTERS = 300_000
UNTRAINED = "model = Transformer(small, vocab_size=12).eval()"  # its output depends on the CPU

Outputs = dict[str, list[Any]]  # of the cells, by their code


def list_outputs(notebook: Any) -> Outputs:
    """Return the outputs of the notebook's cells that contain code."""
    return {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


@pytest.fixture(scope="module")
def stored() -> Outputs:
    """The outputs in the file."""
    return list_outputs(nbformat.read(ROOT / "docs/tutorial.ipynb", as_version=4))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """The outputs of a run with `NUM_UPDATES`."""
    script = import_script("notebook")
    return list_outputs(script.run_notebook(tmp_path_factory.mktemp("notebook"), NUM_UPDATES))


def find_outputs(outputs: Outputs, code: str) -> list[Any]:
    """Return the outputs of the only cell that contains `code`."""
    [result] = [result for source, result in outputs.items() if code in source]
    return result


def read_text(results: list[Any]) -> str:
    """Return the printed text of a cell and the text of its value."""
    return "".join(
        result.get("text", result.get("data", {}).get("text/plain", "")) for result in results
    )


@pytest.mark.long
def test_the_stored_outputs_are_those_of_the_cells(outputs: Outputs, stored: Outputs) -> None:
    is_trained = False
    for (code, results), (_, stored_results) in zip(outputs.items(), stored.items(), strict=True):
        assert [sorted(result.get("data", {})) for result in results] == [
            sorted(result.get("data", {})) for result in stored_results
        ], code
        for result, stored_result in zip(results, stored_results, strict=True):
            assert result.output_type == stored_result.output_type != "error"
            assert "Error" not in result.get("text", ""), result.text
            assert picture_size(result) == picture_size(stored_result), code
        is_trained |= "nmt-train" in code
        if not is_trained and "loss" not in code and UNTRAINED not in code:
            assert read_text(results) == read_text(stored_results), code


def picture_size(result: Any) -> tuple[int, int] | None:
    """Return width and height of an output that is a picture."""
    data = result.get("data", {}).get("image/png")
    if data is None:
        return None
    width, height = struct.unpack(">II", base64.b64decode(data)[16:24])  # of the PNG's header
    return width, height


@pytest.mark.long
def test_the_copy_task_is_learned(outputs: Outputs, stored: Outputs) -> None:
    losses = []
    for results in (outputs, stored):
        text = read_text(find_outputs(results, "for step in range(1, 201)"))
        assert re.sub(r"\s", "", text).endswith("tensor([[1,2,3,4,5,6,7,8,9,10]])")
        losses.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", text)])
    assert losses[0] == pytest.approx(losses[1], abs=0.15)
    assert losses[0][-1] < 0.1


@pytest.mark.long
def test_attention_finds_the_value_of_the_nearest_key(outputs: Outputs) -> None:
    assert "20." in read_text(find_outputs(outputs, "attend(query"))


@pytest.mark.long
def test_results_are_tables(outputs: Outputs) -> None:
    for code in ("candidates", "pair"):
        assert "<table>" in find_outputs(outputs, f"\n{code}")[-1].data["text/html"]


def test_the_stored_model_translates(stored: Outputs) -> None:
    assert "halb vier" in read_text(find_outputs(stored, "\ncandidates"))
    assert "<table>" in find_outputs(stored, "\npair")[-1].data["text/html"]


def test_the_file_is_small_and_names_no_folder_of_a_machine() -> None:
    text = Path(ROOT / "docs/tutorial.ipynb").read_text(encoding="utf-8")
    assert len(text) < MAX_CHARACTERS
    assert not re.search(r"/(tmp|home|root|work)/", text)
