"""docs/settings/ has every setting of every command, as the code declares it."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from pages import ROOT

from nmt.cli.commands import COMMANDS
from nmt.config import Range


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The script that writes the pages."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_a_command_is_current_and_names_every_setting(
    reference: ModuleType, name: str
) -> None:
    page = (ROOT / f"docs/settings/{name}.md").read_text(encoding="utf-8")
    for setting in COMMANDS[name].settings:
        assert page.count(f"| `{setting.key}` |") == 1
    assert page == reference.render_page(COMMANDS[name]), "run python scripts/reference.py"


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (Range(low=0, below=1), "≥ 0, &lt; 1"),
        (Range(above=0), "> 0"),
        (Range(low=1, high=1000), "≥ 1, ≤ 1,000"),
        (Range(), ""),
    ],
)
def test_ranges_are_shown_as_signs(reference: ModuleType, bounds: Range, text: str) -> None:
    assert reference.describe_range(bounds) == text
