"""A short form of `make torture`, which has more cases: kills, flipped bits, extreme numbers."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts/torture.py"


@pytest.fixture(scope="module")
def torture() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("torture", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torture"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def place(torture: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    torture.import_everything()
    return torture.Place(tmp_path_factory.mktemp("torture"), has_other=False)


def test_a_command_that_is_killed_leaves_the_old_or_the_new_and_nothing_after_another_run(
    torture: Any, place: Any
) -> None:
    kills = torture.Kills(place)
    assert min(kills.num_calls.values()) > 5  # they were counted
    for what, number in kills.num_calls.items():
        assert not kills.failure(what, max(1, number - 8))  # the old output is being replaced


def test_a_flipped_bit_of_any_file_is_one_line_or_without_effect(torture: Any, place: Any) -> None:
    draw, tally = random.Random(3), torture.Tally()
    for folder, number in (("run", 1), ("data", 2), ("export", 0)):
        expected = torture.result(place.copy(), place.uses(place.root / "case")[folder][number])[1]
        for _ in range(2):
            at = place.copy()
            found = (p for p in (at / folder).rglob("*") if p.is_file() and not p.is_symlink())
            path = draw.choice(sorted(found))
            torture.flip(path, path, draw)
            torture.judge(tally, at, path, place.uses(at)[folder][number], expected)
    assert tally.failures == []
    assert tally.noticed > 0


def test_extreme_numbers_are_refused_in_one_line_or_work(torture: Any, place: Any) -> None:
    """All of them are in the long form; these are accepted, and once ended badly or might."""
    tally = torture.Tally()
    for name, key, value in (
        ("translate", "length_penalty", "-1"),
        ("evaluate", "seed", "-1"),
        ("train", "seed", "inf"),
    ):
        torture.set_number(tally, place, name, key, value)
    assert tally.failures == []
    assert min(tally.noticed, tally.harmless) > 0
