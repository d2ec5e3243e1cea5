"""Signals: a run finishes its update, saves, exits with 75, and goes on with the same bits."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from faults import train_and_signal
from ranks import child, ranks, run_ranks
from toy import assert_same_weights, command, read_records, train, write_corpus

from nmt.errors import EXIT_STOPPED
from nmt.training.checks import listen

# dropout, accumulation and several epochs
PLAIN = ["valid_bleu=false", "max_updates=20", "ema_decay=0.9"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data folder and a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("signals")
    assert command("preprocess", *write_corpus(folder)) == 0
    assert train(folder / "data", folder / "run", *PLAIN) == 0
    return folder


@pytest.mark.parametrize(
    ("number", "place", "call", "saved"),
    [
        (signal.SIGTERM, "update", 6, 7),  # it was asked before the signal came, and after update 7
        (signal.SIGUSR1, "update", 9, 10),  # when a validation is due
        (signal.SIGTERM, "validation", 1, 11),
        (signal.SIGUSR1, "save", 2, None),  # in the thread that writes, while updates go on
    ],
)
def test_a_signal_saves_and_the_same_command_goes_on(
    root: Path, tmp_path: Path, number: signal.Signals, place: str, call: int, saved: int | None
) -> None:
    places = (root / "data", tmp_path / "run", *PLAIN)
    with child(tmp_path / "log", train_and_signal, number, place, call, "0", *places) as one:
        assert one.wait() == EXIT_STOPPED == 75
        last = one.stderr.splitlines()[-1]
    assert f"nmt-train: stopped by {number.name} after update" in last
    assert last.endswith("which is saved; the same command goes on")
    newest = (tmp_path / "run/checkpoints/latest").resolve().name
    assert f"after update {int(newest[5:])}," in last
    assert saved is None or newest == f"step-{saved:08d}"
    if saved == 10:  # it may take long, and who sent the signal may not wait
        assert not read_records(tmp_path / "run", "valid_loss")
    assert train(*places) == 0
    assert_same_weights(root / "run", tmp_path / "run")
    found = [read_records(run, "valid_loss") for run in (root / "run", tmp_path / "run")]
    assert [r["valid_loss"] for r in found[0]] == [r["valid_loss"] for r in found[1]]


def test_a_signal_to_one_rank_stops_both(root: Path, tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, train, root / "data", tmp_path / "whole", *PLAIN)
    places = (root / "data", tmp_path / "run", *PLAIN)
    with ranks(tmp_path, 2, train_and_signal, signal.SIGTERM, "update", 6, "1", *places) as both:
        assert [one.wait() for one in both] == [EXIT_STOPPED] * 2
        texts = [one.stderr.splitlines()[-1] for one in both]
    assert "stopped by a signal to another rank after update 7" in texts[0]
    assert "stopped by SIGTERM after update 7" in texts[1]
    run_ranks(tmp_path, 2, train, *places)
    assert_same_weights(tmp_path / "whole", tmp_path / "run")


def test_a_signal_at_the_last_update_is_no_stop(root: Path, tmp_path: Path) -> None:
    places = (root / "data", tmp_path / "run", *PLAIN)
    task = (train_and_signal, signal.SIGTERM, "update", 20, "0")
    with child(tmp_path / "log", *task, *places) as one:
        assert one.wait() == 0
        assert re.search("done after 20 updates", one.stderr)
    assert_same_weights(root / "run", tmp_path / "run")
    assert len(read_records(tmp_path / "run", "valid_loss")) == 2


def test_ctrl_c_ends_a_run_at_once_with_130(root: Path, tmp_path: Path) -> None:
    places = (root / "data", tmp_path / "run", *PLAIN)
    task = (train_and_signal, signal.SIGINT, "update", 7, "0")
    with child(tmp_path / "log", *task, *places) as one:
        assert one.wait() == 130
        assert one.stderr.endswith("nmt-train: interrupted\n")
    assert train(*places) == 0
    assert_same_weights(root / "run", tmp_path / "run")


def test_signals_are_noted_in_their_order_and_handlers_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with listen() as received:
        assert not received
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGUSR1, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
