"""A short form of `make torture`, which has more cases: kills, flipped bits, extreme numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module")
def torture() -> Iterator[Any]:
    """The script as a module, with all modules of nmt imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        module = __import__("torture")
        module.import_everything()
        yield module


@pytest.fixture(scope="module")
def workspace(torture: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return torture.Workspace(tmp_path_factory.mktemp("torture"), has_second=False)


@pytest.mark.long
def test_a_killed_command_leaves_old_or_new_output_and_no_files_after_another_run(
    torture: Any, workspace: Any
) -> None:
    kills = torture.Kills(workspace)
    assert min(kills.num_calls.values()) > 5  # they were counted
    for output, num_calls in kills.num_calls.items():
        call = max(1, num_calls - 8)  # the old output is being replaced
        assert kills.find_failure(output, call) == ""


@pytest.mark.slow
def test_a_flipped_bit_of_any_file_is_refused_in_one_line_or_harmless(
    torture: Any, workspace: Any
) -> None:
    rng = random.Random(3)
    tally = torture.Tally()
    for folder, number in (("run", 1), ("data", 2), ("export", 0)):
        copy = workspace.copy()
        expected = torture.run_reader(copy, workspace.readers(copy)[folder][number]).output
        for _ in range(2):
            copy = workspace.copy()
            path = rng.choice(torture.list_files(copy / folder))
            torture.flip(path, rng)
            command = workspace.readers(copy)[folder][number]
            torture.check_reader(tally, copy, path, command, expected)
    assert tally.failures == []
    assert tally.refused > 0


@pytest.mark.slow
def test_extreme_numbers_are_refused_in_one_line_or_work(torture: Any, workspace: Any) -> None:
    """The long form tries every setting; these values once ended badly or might."""
    tally = torture.Tally()
    for name, key, value in (
        ("translate", "length_penalty", "-1"),
        ("evaluate", "seed", "-1"),
        ("train", "seed", "inf"),
    ):
        torture.check_setting(tally, workspace, name, key, value)
    assert tally.failures == []
    assert min(tally.refused, tally.harmless) > 0
