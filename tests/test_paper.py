"""docs/paper.md leads to code that exists; docs/how-to/reproduce-table-3.md states true sizes."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from pages import ROOT, shell_lines

from nmt.config import ModelConfig, Positions
from nmt.model.transformer import Transformer, count_parameters

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


@pytest.mark.slow
def test_the_rows_of_table_3_have_the_stated_numbers_of_parameters_and_are_trained() -> None:
    page = ROOT / "docs/how-to/reproduce-table-3.md"
    commands = "\n".join(shell_lines(page))
    table = page.read_text(encoding="utf-8").split("\n| row |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
    assert len(rows) == 20
    for name, settings, num_parameters in rows:
        changes: dict[str, Any] = {}
        if name == "big":
            changes = {"d_model": 1024, "d_ff": 4096, "num_heads": 16}
        for key, value in re.findall(r"model\.(\w+)=([\w.]+)", settings):
            changes[key] = Positions(value) if key == "positions" else float(value)
            if value.isdigit():
                changes[key] = int(value)
            assert re.search(rf"model\.{key}=(\$|\S*\b{value}\b)", commands), settings
        with torch.device("meta"):
            model = Transformer(ModelConfig(**changes), vocab_size=37_000)
        assert f"{count_parameters(model):,}" == num_parameters, name
