"""The checkpoints of a run: their content besides the model, reading them, and writing them.

A checkpoint is a model folder (`nmt.checkpoint`) with one more file, `trainer.pt`, which holds only
tensors and primitives. No state of random generators is saved: `seed_update` computes it.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor

from nmt.checkpoint import (
    ModelInfo,
    checkpoint_dir,
    checkpoint_update,
    list_checkpoints,
    load_weights,
    save_model,
)
from nmt.config import require_valid
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ModelError, NmtError
from nmt.runtime.files import remove_folder, replace_link
from nmt.runtime.manifest import verify
from nmt.runtime.metadata import pop_version, to_dataclass
from nmt.runtime.reading import open_regular

log = logging.getLogger(__name__)
FORMAT_VERSION = 3
FILE = "trainer.pt"
_COUNTERS = (
    "num_updates",
    "epoch",
    "epoch_position",
    "bad_validations",
    "bad_updates",
    "validated_update",
)


@dataclass
class BestCheckpoint:
    """A validated checkpoint among the best ones."""

    badness: float  # of the metric: smaller is better
    update: int


@dataclass
class TrainerState:
    """Counters and scores of a run."""

    num_updates: int = 0  # changes of the weights
    epoch: int = 0  # from 0
    epoch_position: int = 0  # updates of this epoch that were made or left out
    best: list[BestCheckpoint] = field(default_factory=list)  # best first
    best_metric: str = ""  # of the badness in `best`
    bad_validations: int = 0  # since the best one
    bad_updates: int = 0  # left out in a row because they were not finite
    validated_update: int = 0  # number of updates at the last validation
    flops: float = 0.0  # of the model, without padding, since the start

    def __post_init__(self) -> None:
        for key in _COUNTERS:
            count = getattr(self, key)
            require_valid(0 <= count < 1 << 32, key, count, "must be from 0 to 4,294,967,295")
        require_valid(self.flops >= 0, "flops", self.flops, "must not be negative")
        has_best = bool(self.best) or self.bad_validations == 0
        require_valid(
            has_best, "bad_validations", self.bad_validations, "must be 0 without a best one"
        )

    @property
    def position(self) -> tuple[int, int, int]:
        """The position in training: it changes whenever weights or data position change."""
        return self.num_updates, self.epoch, self.epoch_position


def seed_update(seed: int, state: TrainerState, rank: int) -> None:
    """Seed the dropout of one update on one rank, whatever was drawn before."""
    key = (seed, state.epoch, state.epoch_position, rank)
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))


# --- reading


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint."""

    folder: str
    weights: dict[str, Any]  # tensors
    state: TrainerState
    learner: dict[str, Any]  # of `Learner.state_dict`
    fingerprint: dict[str, Any]
    world_size: int
    num_threads: int


def load_newest(run_dir: Path) -> Checkpoint | None:
    """Read the newest intact checkpoint of a run; None if it has no checkpoints."""
    folders = list_checkpoints(run_dir)
    for folder in reversed(folders):
        try:
            return load_checkpoint(folder)
        except ModelError as error:
            log.warning("%s; trying the checkpoint before", error)
    if folders:
        raise ModelError(f"no checkpoint in {run_dir} can be read; choose another run_dir")
    return None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint; raise `ModelError` if a file is missing, damaged or of another version."""
    path = folder / FILE
    verify(folder, FILE)
    damaged = ModelError(f"{path} is damaged; remove {folder} to resume an older one")
    try:
        with open_regular(path) as file:
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; it cannot be resumed") from None
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError):
        raise damaged from None
    if not isinstance(content, dict):
        raise damaged
    if pop_version(content, path, FORMAT_VERSION) < FORMAT_VERSION:
        raise ModelError(f"{path} was written by an older nmt and cannot be resumed")
    content |= {"folder": str(folder), "weights": load_weights(folder)}
    return to_dataclass(Checkpoint, content, path)


# --- writing


class Saver:
    """Writes, links and removes checkpoints in a thread.

    Training waits only for the copy to host memory. A failed write is logged and leaves older
    checkpoints in place; the run goes on.
    """

    def __init__(self, run_dir: Path, *, update: int, keep_last: int) -> None:
        """Continue after the checkpoint of `update`; all newer ones are damaged."""
        self.run_dir = run_dir
        self.update = update  # of the newest intact checkpoint
        self.keep_last = keep_last
        self.failure: str | None = None  # of the newest checkpoint
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self._pending: Future[None] = self._thread.submit(lambda: None)
        folder = checkpoint_dir(run_dir, update)
        if folder.is_dir():  # a run killed before the link was moved
            replace_link(run_dir / "checkpoints/latest", folder.name)

    def save(
        self,
        weights: dict[str, Tensor],
        info: ModelInfo,
        tokenizer: Tokenizers,
        *,
        training: dict[str, Any],
        best: list[int],
    ) -> None:
        """Start to write a checkpoint with `training` as `trainer.pt`, once the last is written.

        Then remove older checkpoints, except for the newest ones and the updates `best`.
        """
        self._pending.result()
        folder = checkpoint_dir(self.run_dir, info.updates)
        weights = to_host(weights)
        content = {"format_version": FORMAT_VERSION, **to_host(training)}

        def write_trainer(temporary: Path) -> None:
            torch.save(content, temporary / FILE)

        def write() -> None:
            save_model(folder, weights, info, tokenizer, write_more=write_trainer)
            self.update = info.updates
            replace_link(self.run_dir / "checkpoints/latest", folder.name)
            self._remove_old(best)

        self._pending = self._thread.submit(self._try, write, info.updates)

    def mark_best(self, best: list[int]) -> None:
        """Link `best` to the first of these updates, and keep the checkpoints of all of them."""

        def mark() -> None:
            folder = checkpoint_dir(self.run_dir, best[0])
            if folder.exists():
                replace_link(self.run_dir / "checkpoints/best", folder.name)
            self._remove_old(best)

        self._pending.result()
        self._pending = self._thread.submit(self._try, mark, None)

    def finish(self) -> None:
        """Wait for the pending write; raise an `NmtError` if the newest checkpoint failed."""
        self._pending.result()
        self._thread.shutdown()
        if self.failure is not None:
            raise NmtError(f"{self.failure}; free space or permissions, then start it again")

    def _try(self, task: Callable[[], None], update: int | None) -> None:
        """Run a task, which writes the checkpoint of `update` or, with None, links."""
        failure = None
        try:
            task()
        except (OSError, safetensors.SafetensorError, RuntimeError, NmtError) as error:
            failure = self._describe_failure(error, update)
            log.warning("%s; the run goes on", failure)
        if update is not None:
            self.failure = failure

    def _describe_failure(self, error: Exception, update: int | None) -> str:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        checkpoints = list_checkpoints(self.run_dir)
        newest = "there is none before it"
        if checkpoints:
            newest = f"{checkpoints[-1].name} is the newest"
        name = "links" if update is None else f"checkpoint of update {update}"
        return f"{name} in {self.run_dir} not written: {reason}; {newest}"

    def _remove_old(self, best: list[int]) -> None:
        folders = {checkpoint_update(f): f for f in list_checkpoints(self.run_dir)}
        intact = [update for update in folders if update <= self.update]
        updates_to_keep = {*best, *intact[-self.keep_last :]}
        for update, folder in folders.items():
            if update not in updates_to_keep:
                remove_folder(folder)


def to_host(tree: Any) -> Any:
    """Copy every tensor of nested dicts and lists to host memory."""
    return map_tensors(copy_to_host, tree)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory, even if it is already there."""
    return torch.empty_like(tensor, device="cpu").copy_(tensor.detach())


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Replace every tensor of nested dicts and lists by the result of `function`."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_tensors(function, value) for value in tree]
    return tree
