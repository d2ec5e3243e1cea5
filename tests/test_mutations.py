"""The breaks of scripts/mutate.py can be made: each text occurs once, and names do not repeat."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_break_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of the code, update the texts in scripts/mutations/*.yaml."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    breaks = __import__("mutate").read_breaks()
    num_names = 0
    for path in (ROOT / "scripts" / "mutations").glob("*.yaml"):
        num_names += len(re.findall(r"^  \S+:$", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(breaks) > 100
    assert len(breaks) == num_names  # of two equal names in a file, YAML would keep the last
    problems = {name: candidate.problem(ROOT) for name, candidate in breaks.items()}
    assert {name: problem for name, problem in problems.items() if problem} == {}
