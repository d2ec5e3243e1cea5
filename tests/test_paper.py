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


def test_every_row_names_the_file_of_one_of_its_names() -> None:
    for line in TEXT.splitlines():
        names = re.findall(r"`(nmt\.[\w.]+)`", line)
        if names and line.startswith("| "):
            files = re.findall(r"`(nmt/[\w./]+)`", line)
            paths = set()
            for name in names:
                module = getattr(find(name), "__module__", "").replace(".", "/")
                paths |= {f"{module}.py", f"{module}/__init__.py"}
            assert set(files) & paths or "AttentionWeights" in line, line
