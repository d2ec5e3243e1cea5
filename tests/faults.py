"""Training runs with faults: a signal at a call of a function, or losses that are not finite."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from toy import train

from nmt.data.batching import UpdatePlan
from nmt.runtime import files
from nmt.training import checkpoints
from nmt.training.batches import Batch, BatchMaker, ChangedPair
from nmt.training.learner import Learner
from nmt.training.validation import Validation

# calls at which a process can die: between updates, while a checkpoint is written, in validation
CALLS: dict[str, tuple[Any, str]] = {
    "update": (Learner, "update"),
    "save": (files, "make_readable_and_sync"),
    "rename": (os, "rename"),
    "link": (checkpoints, "replace_link"),
    "remove": (checkpoints.Saver, "_remove_old"),
    "validation": (Validation, "compute_loss"),
}


def signal_at(call: str, number: int, signal_number: signal.Signals) -> None:
    """Send this process a signal at call `number` of one of `CALLS`."""
    owner, name = CALLS[call]
    original = getattr(owner, name)
    calls = itertools.count(1)

    def signalled(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal_number)
        return original(*arguments, **named)

    setattr(owner, name, signalled)


def train_and_signal(
    signal_number: signal.Signals,
    call: str,
    number: int,
    victim: str,
    data_dir: Path,
    run_dir: Path,
    *arguments: Any,
) -> int:
    """Run nmt-train; the rank `victim` gets a signal at call `number` of one of `CALLS`."""
    if os.environ.get("RANK", "0") == victim:
        signal_at(call, number, signal_number)
    return train(data_dir, run_dir, arguments)


def train_and_die(
    call: str, number: int, victim: str, data_dir: Path, run_dir: Path, *arguments: Any
) -> int:
    """Run nmt-train; the rank `victim` is killed at call `number` of one of `CALLS`."""
    return train_and_signal(signal.SIGKILL, call, number, victim, data_dir, run_dir, arguments)


def train_and_record(record: Path, data_dir: Path, run_dir: Path, *arguments: Any) -> int:
    """Run nmt-train and append the pairs of each update of each rank to `record`, as JSON lines."""
    original = Learner.update
    path = record.with_suffix(f".{os.environ.get('RANK', '0')}")

    def recording(learner: Learner, update: UpdatePlan, *args: Any, **named: Any) -> Any:
        pairs: list[int] = []
        for rows in update.batches:
            pairs += rows.tolist()
        with path.open("a") as stream:
            print(json.dumps(pairs), file=stream)
        return original(learner, update, *args, **named)

    Learner.update = recording  # type: ignore[method-assign]
    return train(data_dir, run_dir, arguments)


def poison(pair: int, factor: float) -> None:
    """Multiply the loss of every batch that holds the pair by `factor`, in this process."""
    original = Learner.compute_loss
    pack_pairs = BatchMaker.pack_pairs
    poisonous: list[Batch] = []

    def watching(batch_maker: BatchMaker, pairs: Sequence[ChangedPair]) -> Batch:
        batch = pack_pairs(batch_maker, pairs)
        if pair in [changed_pair.row for changed_pair in pairs]:
            poisonous.append(batch)
        return batch

    def poisoned(learner: Learner, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, nll = original(learner, batch)
        if any(batch is poisonous_batch for poisonous_batch in poisonous):
            loss = loss * factor
        return loss, nll

    BatchMaker.pack_pairs = watching  # type: ignore[method-assign]
    Learner.compute_loss = poisoned  # type: ignore[method-assign]


def train_poisoned(
    pair: int, call: str, number: int, data_dir: Path, run_dir: Path, *arguments: Any
) -> int:
    """Run nmt-train with a pair whose loss is NaN; kill it at call `number` of one of `CALLS`."""
    poison(pair, float("nan"))
    return train_and_die(call, number, "0", data_dir, run_dir, arguments)
