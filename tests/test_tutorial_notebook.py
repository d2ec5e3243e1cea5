"""docs/tutorial.ipynb runs from top to bottom, and its outputs are the stated ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytestmark = pytest.mark.long

NUM_UPDATES = 20  # in place of the notebook's MAX_UPDATES, the only cell that the test changes


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The outputs of the notebook's cells, by their code."""
    notebook = nbformat.read(ROOT / "docs/tutorial.ipynb", as_version=4)
    nbformat.validate(notebook)
    codes = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    [setting] = [cell for cell in notebook.cells if cell.source.startswith("MAX_UPDATES = ")]
    setting.source = f"MAX_UPDATES = {NUM_UPDATES}"
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as monkeypatch:
        scripts = Path(sys.executable).parent
        monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        client = nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute()
    results = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return dict(zip(codes, results, strict=True))


def find_outputs(outputs: dict[str, list[Any]], code: str) -> list[Any]:
    """Return the outputs of the only cell that contains `code`."""
    [result] = [result for source, result in outputs.items() if code in source]
    return result


def test_no_cell_warns_or_fails(outputs: dict[str, list[Any]]) -> None:
    for results in outputs.values():
        for result in results:
            assert result.output_type != "error"
            assert "Error" not in result.get("text", ""), result.text


def test_the_copy_task_is_learned(outputs: dict[str, list[Any]]) -> None:
    result = find_outputs(outputs, "for step in range(1, 201)")[-1]
    numbers = result.data["text/plain"].replace(" ", "").replace("\n", "")
    assert numbers == "tensor([[1,2,3,4,5,6,7,8,9,10]])"


def test_attention_finds_the_value_of_the_nearest_key(outputs: dict[str, list[Any]]) -> None:
    [result] = find_outputs(outputs, "attend(query")
    assert "20." in result.text


def test_pictures_and_tables_are_shown(outputs: dict[str, list[Any]]) -> None:
    for name in ("mask", "p", "schedule", "smoothing"):
        result = find_outputs(outputs, f'Image("{name}.png")')[-1]
        assert "image/png" in result.data
    for code in ("candidates", "pair"):
        result = find_outputs(outputs, f"\n{code}")[-1]
        assert "<table>" in result.data["text/html"]
