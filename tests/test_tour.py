"""The code tour explains lines that exist, in the order of the Annotated Transformer."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import ROOT, fenced_blocks, import_script

# files of which every function is shown or linked
WHOLE_FILES = [
    "nmt/model/transformer.py",
    "nmt/model/attention.py",
    "nmt/model/layers.py",
    "nmt/model/alignment.py",
    "nmt/training/loss.py",
    "nmt/data/batching.py",
    "nmt/search/search.py",
]
# titles of the Annotated Transformer, without its table of contents
SECTIONS = [
    "Prelims",
    "Background",
    "Part 1: Model architecture",
    "Encoder and decoder stacks",
    "Decoder",
    "Attention",
    "Applications of attention",
    "Position-wise feed-forward networks",
    "Embeddings and softmax",
    "Positional encoding",
    "Full model",
    "Inference",
    "Part 2: Model training",
    "Batches and masking",
    "Training loop",
    "Training data and batching",
    "Hardware and schedule",
    "Optimizer",
    "Regularization: label smoothing",
    "A first example",
    "Synthetic data",
    "Loss computation",
    "Greedy decoding",
    "Part 3: A real-world example",
    "Data loading",
    "Iterators",
    "Training the system",
    "Additional components: BPE, search, averaging",
    "Results",
    "Attention visualization",
    "Conclusion",
]


@pytest.fixture
def tour() -> ModuleType:
    """The script, imported again."""
    return import_script("tour")


def read_pages(tour: ModuleType) -> list[str]:
    return [page.read_text(encoding="utf-8") for page in tour.PAGES]


def test_the_links_lead_to_the_current_lines(tour: ModuleType) -> None:
    for text in read_pages(tour):
        assert tour.set_line_numbers(text) == text, "run python scripts/tour.py"
        for code, file, line in re.findall(r"\[`([^`]+)`\]\(../([^#]+)#L(\d+)\)", text):
            assert code in tour.read_lines(file)[int(line) - 1]


@pytest.mark.parametrize("file", WHOLE_FILES)
def test_every_function_is_shown_or_linked(tour: ModuleType, file: str) -> None:
    linked = [lines for text in read_pages(tour) for lines in tour.find_linked(text)]
    for name, lines in tour.find_definitions(file).items():
        is_function = tour.read_lines(file)[lines.start - 1].lstrip().startswith(("def ", "@"))
        covering = [x for x in linked if x.file == file and x.start <= lines.start <= x.end]
        assert covering or not is_function, name


def test_the_sections_are_those_of_the_annotated_transformer_in_its_order(
    tour: ModuleType,
) -> None:
    titles = [title for text in read_pages(tour) for title in re.findall(r"^##+ (.+)", text, re.M)]
    assert [title for title in titles if title in SECTIONS] == SECTIONS


@pytest.fixture
def small_tour(tour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tour of one file, in a folder that a test may change."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "nmt/model/attention.py", tmp_path / "code.py")
    page = tmp_path / "docs/tour.md"
    page.write_text(
        "## Attention\n\nCode: [`attend`](../code.py)\n\n- [`value_weights @ v`](../code.py)"
    )
    monkeypatch.setattr(tour, "ROOT", tmp_path)
    monkeypatch.setattr(tour, "PAGES", [page])
    monkeypatch.setattr(sys, "argv", ["tour.py"])
    assert tour.main() == 0
    monkeypatch.setattr(sys, "argv", ["tour.py", "--check"])
    assert tour.main() == 0
    tour.find_definitions.cache_clear()
    tour.read_lines.cache_clear()
    return tour


def test_a_line_that_moves_fails_the_check(small_tour: Any, tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("\n" + code.read_text("utf-8"), "utf-8")
    assert small_tour.main() == 1


@pytest.mark.parametrize(
    ("removed", "message"),
    [("value_weights @ v", "0 lines of its section"), ("def attend(", "does not define attend")],
)
def test_a_line_that_goes_fails_the_check(
    small_tour: Any, tmp_path: Path, removed: str, message: str
) -> None:
    code = tmp_path / "code.py"
    code.write_text(code.read_text("utf-8").replace(removed, removed.replace("v", "w")), "utf-8")
    if removed.startswith("def"):
        code.write_text(code.read_text("utf-8").replace("def attend(", "def renamed("), "utf-8")
    with pytest.raises(LookupError, match=message):
        small_tour.main()


def test_the_site_shows_the_code_with_the_explained_lines_highlighted(tour: ModuleType) -> None:
    text = read_pages(tour)[0]
    page = tour.with_code(text)
    assert "Code: " not in page
    section = page[page.index("### Attention") : page.index("### Multi-head attention")]
    blocks = re.findall(
        r'```python .*? linenums="\d+" hl_lines="([\d ]+)"\n(.*?)\n```', section, re.S
    )
    assert len(blocks) == 2
    for numbers, code in blocks:
        for number in numbers.split():
            line = code.split("\n")[int(number) - 1]
            assert any(quoted in line for quoted in re.findall(r"\[`(.+?)`\]", section))


def test_the_model_of_the_tour_gives_the_shapes_that_it_states(tour: ModuleType) -> None:
    [example] = fenced_blocks(read_pages(tour)[0], "python")
    scope: dict[str, Any] = {}
    exec(example, scope)  # noqa: S102
    assert scope["hidden"].shape == (2, 5, 512)
    assert scope["logits"].shape == (2, 5, 8000)
