"""`nmt-train devices=2`: its own launcher, and what happens when a process of the run is lost."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import Child, child, run_ranks
from toy import assert_same_weights, train

from nmt.cli.launch import raise_first_cause
from nmt.errors import RankError

ENDLESS = ["valid_bleu=false", "max_updates=1000000", "log_every_updates=1000000"]
TWO = [*ENDLESS, "devices=2"]


@contextmanager
def launched(folder: Path, *arguments: object) -> Iterator[Child]:
    """Run nmt-train until the block ends, and no process of it longer."""
    with child(folder / "log", train, *arguments) as process:
        process.log.write_text("")
        yield process
    deadline = time.monotonic() + 600
    while any(map(is_alive, rank_pids(folder))):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rank_pids(folder: Path) -> list[int]:
    """Return the ranks of a run that the launcher started, by their config in the run folder."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
            if b"nmt.cli.rank" in arguments:
                config = Path(os.fsdecode(arguments[-3])).read_text(encoding="utf-8")
                if f"run_dir: {folder}" in config:
                    pids.append(int(path.parent.name))
        except OSError:  # it ended just now
            continue
    return sorted(pids)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def has_torch(pid: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def last_update(run_dir: Path) -> int:
    """Return the update of the newest checkpoint; 0 without checkpoints."""
    steps = [int(path.name[5:]) for path in run_dir.glob("checkpoints/step-*")]
    return max(steps, default=0)


def trains_on(process: Child, run_dir: Path) -> None:
    """Wait until there are checkpoints of eight more updates."""
    goal = last_update(run_dir) + 8
    process.wait_until(lambda: last_update(run_dir) >= goal)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_which_names_it(toy_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with launched(tmp_path, toy_data, run, TWO) as process:
        trains_on(process, run)
        pids = rank_pids(tmp_path)
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        assert process.wait() == 1
        last_line = process.stderr.splitlines()[-1]
        assert re.match(
            rf"nmt-train: rank [01]: process {pids[1]} was killed by SIGKILL", last_line
        )
        assert not any(map(is_alive, pids))


@pytest.mark.long
def test_a_signal_to_the_launcher_saves_and_ranks_end_with_a_killed_one(
    toy_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    old_pids = []
    for number, code in (
        (signal.SIGTERM, 75),
        (signal.SIGKILL, -9),
        (signal.SIGUSR1, 75),  # while the old ranks may live
    ):
        with launched(tmp_path, toy_data, run, TWO) as process:
            trains_on(process, run)
            assert not any(map(is_alive, old_pids))
            old_pids = rank_pids(tmp_path)
            process.send(number)
            assert process.wait() == code
            text = rf"nmt-train: stopped by {number.name} after update \d+, which"
            assert code < 0 or re.match(text, process.stderr.splitlines()[-1])
    # bit-identical to an undisturbed run on two ranks
    end = f"max_updates={last_update(run)}"
    run_ranks(tmp_path, 2, train, toy_data, tmp_path / "whole", ENDLESS, end)
    assert_same_weights(tmp_path / "whole", run)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ranks_that_still_import_end_quietly_with_ctrl_c_and_with_a_killed_launcher(
    number: signal.Signals, code: int, toy_data: Path, tmp_path: Path
) -> None:
    with launched(tmp_path, toy_data, tmp_path / "run", TWO) as process:
        process.wait_until(lambda: sum(map(has_torch, rank_pids(tmp_path))) == 2)
        if number == signal.SIGINT:  # as a terminal does
            for pid in rank_pids(tmp_path):
                os.kill(pid, number)
        process.send(number)
        assert process.wait() == code
    assert "Traceback" not in process.stderr
    assert "frame #" not in process.stderr  # of C++, when the launcher does not answer


@pytest.mark.long
def test_a_rank_that_hangs_ends_the_run_within_the_timeout(toy_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with launched(tmp_path, toy_data, run, TWO, "timeout_seconds=5") as process:
        trains_on(process, run)
        pids = rank_pids(tmp_path)
        os.kill(pids[1], signal.SIGSTOP)
        start = time.monotonic()
        assert process.wait() == 1
        assert time.monotonic() - start < 5 + 30 + 20  # torch gives the hanging one 30 to end
        last_line = process.stderr.splitlines()[-1]
        assert re.match(r"nmt-train: rank \d: no answer from another rank within", last_line)
        assert not any(map(is_alive, pids))


@pytest.mark.long
def test_a_mistake_of_the_user_is_one_line_from_all_ranks(toy_data: Path, tmp_path: Path) -> None:
    options = [*TWO, "max_tokens=3"]
    with launched(tmp_path, toy_data, tmp_path / "run", options) as process:
        assert process.wait() == 2
        lines = process.stderr.splitlines()
    last_line = r"nmt-train: rank \d: max_tokens=3 is less than the longest sentence"
    assert re.match(last_line, lines[-1])
    assert "Traceback" not in process.stderr


def test_of_several_failures_the_one_nearest_to_the_cause_is_named() -> None:
    texts = [  # from the cause outwards
        "ValueError: a mistake",
        "PeerError: no answer from another rank",
        "PeerError: lost another rank",
    ]
    failures: list[Any] = []
    for rank, text in enumerate(texts):
        message = {"message": text}
        failure = SimpleNamespace(exitcode=1, message=message, timestamp=-rank, local_rank=rank)
        failures.append(failure)  # each is earlier than the one before
    for rank, text in enumerate(texts):
        with pytest.raises(RankError, match=rf"rank {rank}: .*{text.partition(': ')[2]}"):
            raise_first_cause(failures[rank:])
