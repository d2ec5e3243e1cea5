"""docs/paper.md leads to code that exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")


def find(name: str) -> Any:
    """Import the module of a dotted name and return its attribute."""
    names = name.split(".")
    for cut in range(len(names), 0, -1):
        try:
            target = importlib.import_module(".".join(names[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in names[cut:]:
            target = getattr(target, attribute)
        return target
    raise ModuleNotFoundError(name)


def test_every_name_and_file_exists() -> None:
    names = re.findall(r"`(nmt\.[\w.]+)`", TEXT)
    assert len(names) > 30
    for name in names:
        assert find(name) is not None, name
    for file in re.findall(r"`((?:nmt|configs|tests)/[\w./]+)`", TEXT):
        assert (ROOT / file).is_file(), file


def test_every_row_has_a_command_or_a_link_and_every_link_leads_to_a_page() -> None:
    num_rows = 0
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[2] != "computed by" and cells[0] != "---":
            num_rows += 1
            assert "`nmt-" in cells[1] or "](" in cells[1], line
    assert num_rows > 60
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        if "://" not in target:
            assert (ROOT / "docs" / target).exists(), target
