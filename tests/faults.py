"""Runs with something done to them on purpose: signals at a certain call, bad losses, a record."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

from torch import Tensor
from toy import train

from nmt.data import Rows
from nmt.data.batching import Update
from nmt.runtime import files
from nmt.training import checkpoints
from nmt.training.batches import Batch, BatchMaker
from nmt.training.learner import Learner
from nmt.training.validation import Validation

# where a process can die: between updates, in the write of a checkpoint, in validation
PLACES: dict[str, tuple[Any, str]] = {
    "update": (Learner, "update"),
    "save": (files, "share_and_sync"),
    "rename": (os, "rename"),
    "link": (checkpoints, "replace_link"),
    "remove": (checkpoints.Saver, "_remove_old"),
    "validation": (Validation, "loss"),
}


def signal_at(place: str, number: int, what: signal.Signals) -> None:
    """Let this process get a signal at call `number` of a place."""
    owner, name = PLACES[place]
    original, calls = getattr(owner, name), itertools.count(1)

    def signalled(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), what)
        return original(*arguments, **named)

    setattr(owner, name, signalled)


def train_and_signal(
    what: signal.Signals,
    place: str,
    number: int,
    victim: str,
    data_dir: Path,
    run_dir: Path,
    *arguments: Any,
) -> int:
    """Run nmt-train; the rank `victim` gets a signal at call `number` of a place."""
    if os.environ.get("RANK", "0") == victim:
        signal_at(place, number, what)
    return train(data_dir, run_dir, arguments)


def train_and_die(place: str, number: int, victim: str, *arguments: Any) -> int:
    """Run nmt-train; the rank `victim` is killed at call `number` of a place."""
    return train_and_signal(signal.SIGKILL, place, number, victim, *arguments)


def train_and_record(record: Path, data_dir: Path, run_dir: Path, *arguments: Any) -> int:
    """Run nmt-train and append the pairs of each update of each rank to `record`, as JSON lines."""
    original = Learner.update
    path = record.with_suffix(f".{os.environ.get('RANK', '0')}")

    def recording(learner: Learner, update: Update, *rest: Any, **named: Any) -> Any:
        with path.open("a") as stream:
            print(json.dumps([int(i) for rows in update.batches for i in rows]), file=stream)
        return original(learner, update, *rest, **named)

    Learner.update = recording  # type: ignore[method-assign]
    return train(data_dir, run_dir, arguments)


def poison(pair: int, factor: float) -> None:
    """Multiply the loss of every batch that holds the pair by `factor`, in this process."""
    original, make = Learner.losses, BatchMaker.make_micro_batch
    poisonous: list[Batch] = []

    def watching(batch_maker: BatchMaker, rows: Rows, draw: int = 0) -> Batch:
        batch = make(batch_maker, rows, draw)
        if pair in rows.tolist():
            poisonous.append(batch)
        return batch

    def poisoned(learner: Learner, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, nll = original(learner, batch)
        return (loss * factor, nll) if any(batch is other for other in poisonous) else (loss, nll)

    BatchMaker.make_micro_batch = watching  # type: ignore[method-assign]
    Learner.losses = poisoned  # type: ignore[method-assign]


def train_poisoned(pair: int, place: str, number: int, *arguments: Any) -> int:
    """Run nmt-train with a pair whose loss is NaN; be killed at call `number` of a place."""
    poison(pair, float("nan"))
    return train_and_die(place, number, "0", *arguments)
