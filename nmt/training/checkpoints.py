"""Write, read and remove the checkpoints of a run.

A checkpoint is a model folder (`nmt.checkpoint`) with one more file, `trainer.pt`, which holds only
tensors and primitives. States of random generators are not saved: `seed_update` seeds every update.
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
    list_checkpoints,
    load_weights,
    parse_checkpoint_update,
    save_model,
)
from nmt.config import require_valid
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ModelError, NmtError, to_one_line
from nmt.runtime.files import remove_folder, replace_link
from nmt.runtime.manifest import verify_checksums
from nmt.runtime.metadata import pop_version, to_dataclass
from nmt.runtime.torch_files import load_torch_file

log = logging.getLogger(__name__)
FORMAT_VERSION = 3
TRAINER_FILE = "trainer.pt"
_MAX_COUNT = (1 << 32) - 1
_COUNTERS = (  # fields of `TrainerState` that count something
    "num_updates",
    "epoch",
    "epoch_position",
    "bad_validations",
    "bad_updates",
    "validated_update",
)


@dataclass
class BestCheckpoint:
    """One of the best validated checkpoints."""

    badness: float  # the metric of the run, negated for BLEU: lower is better
    update: int  # number of updates at the checkpoint


@dataclass
class TrainerState:
    """How far a run has come, and its best validations.

    An update is one change of the weights. Checkpoints are identified by the number of updates.
    """

    num_updates: int = 0  # number of changes of the weights
    epoch: int = 0  # number of the current epoch, from 0
    epoch_position: int = 0  # number of updates of this epoch, including those that were skipped
    best: list[BestCheckpoint] = field(default_factory=list)  # best first
    best_metric: str = ""  # the metric by which `best` is sorted
    bad_validations: int = 0  # number of validations in a row without improvement
    bad_updates: int = 0  # number of updates in a row that were not finite, and so were skipped
    validated_update: int = 0  # number of updates at the newest validation
    flops: float = 0.0  # operations of the model on non-padding tokens since the start

    def __post_init__(self) -> None:
        for key in _COUNTERS:
            count = getattr(self, key)
            require_valid(0 <= count <= _MAX_COUNT, key, count, f"must be from 0 to {_MAX_COUNT:,}")
        require_valid(self.flops >= 0, "flops", self.flops, "must not be negative")
        if not self.best:
            require_valid(
                self.bad_validations == 0,
                "bad_validations",
                self.bad_validations,
                "must be 0 without a best checkpoint",
            )

    @property
    def position(self) -> tuple[int, int, int]:
        """The point that the run has reached. It is equal for two states at the same point."""
        return self.num_updates, self.epoch, self.epoch_position


def seed_update(seed: int, state: TrainerState, rank: int) -> None:
    """Seed torch for the dropout of the next update on one rank.

    The seed depends only on the arguments, so that a resumed run gets the same dropout.
    """
    key = (seed, state.epoch, state.epoch_position, rank)
    torch_seed = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(torch_seed))


# --- reading


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint, without the tokenizer."""

    folder: str
    weights: dict[str, Any]  # tensors, keyed by name
    state: TrainerState
    learner: dict[str, Any]  # result of `Learner.state_dict`
    fingerprint: dict[str, Any]  # result of `make_fingerprint`: the data and settings of the run
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
    path = folder / TRAINER_FILE
    verify_checksums(folder, TRAINER_FILE)
    try:
        content = load_torch_file(path)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist, so this checkpoint cannot be resumed") from None
    except (OSError, ValueError, pickle.UnpicklingError):
        raise ModelError(f"{path} is damaged; remove {folder} to resume an older one") from None
    if pop_version(content, path, FORMAT_VERSION) < FORMAT_VERSION:
        raise ModelError(f"{path} was written by an older nmt and cannot be resumed")
    content |= {"folder": str(folder), "weights": load_weights(folder)}
    return to_dataclass(Checkpoint, content, path)


# --- writing


class Saver:
    """Writes, links and removes checkpoints in a thread, while training continues.

    Training only waits until the previous checkpoint is written and the tensors are copied to host
    memory. If a write fails, the thread logs the error and keeps older checkpoints, and the run
    goes on.
    """

    def __init__(self, run_dir: Path, *, update: int, keep_last: int) -> None:
        """Continue a run from the checkpoint of `update`, the newest one that could be read.

        Any newer checkpoints are damaged. The next `save` removes or overwrites them.
        """
        self.run_dir = run_dir
        self.keep_last = keep_last
        self.damaged_updates = set()  # updates whose checkpoints cannot be read
        for checkpoint in list_checkpoints(run_dir):
            checkpoint_update = parse_checkpoint_update(checkpoint)
            if checkpoint_update > update:
                self.damaged_updates.add(checkpoint_update)
        self.failure: str | None = None  # why the newest checkpoint could not be written
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        # the newest task of the thread, for which `save` waits; at first a task that does nothing
        self._pending: Future[None] = self._thread.submit(lambda: None)
        folder = checkpoint_dir(run_dir, update)
        if folder.is_dir():
            # a run that was killed right after writing the folder has not linked it yet
            replace_link(run_dir / "checkpoints/latest", folder.name)

    def save(
        self,
        weights: dict[str, Tensor],
        info: ModelInfo,
        tokenizers: Tokenizers,
        *,
        trainer_content: dict[str, Any],
        best_updates: list[int],
    ) -> None:
        """Start to write a checkpoint, after waiting for the previous one.

        `trainer_content` is written to `trainer.pt`. Then all checkpoints are removed except for
        the newest `keep_last` and the checkpoints of `best_updates`.
        """
        self._pending.result()
        folder = checkpoint_dir(self.run_dir, info.updates)
        weights = copy_tree_to_host(weights)
        content = {"format_version": FORMAT_VERSION, **copy_tree_to_host(trainer_content)}

        def write_trainer_file(temporary: Path) -> None:
            torch.save(content, temporary / TRAINER_FILE)

        def write_checkpoint() -> None:
            save_model(folder, weights, info, tokenizers, write_extra_files=write_trainer_file)
            self.damaged_updates.discard(info.updates)
            replace_link(self.run_dir / "checkpoints/latest", folder.name)
            self._remove_old(best_updates)

        self._pending = self._thread.submit(self._run_task, write_checkpoint, info.updates)

    def link_best(self, best_updates: list[int]) -> None:
        """Link `best` to the checkpoint of the first of `best_updates`, and remove old ones."""

        def link_and_remove() -> None:
            folder = checkpoint_dir(self.run_dir, best_updates[0])
            if folder.exists():
                replace_link(self.run_dir / "checkpoints/best", folder.name)
            self._remove_old(best_updates)

        self._pending.result()
        self._pending = self._thread.submit(self._run_task, link_and_remove, None)

    def finish(self) -> None:
        """Wait for the pending write; raise an `NmtError` if the newest checkpoint failed."""
        self._pending.result()
        self._thread.shutdown()
        if self.failure is not None:
            raise NmtError(
                f"{self.failure}; free disk space or correct the permissions, and start the run "
                "again"
            )

    def _run_task(self, task: Callable[[], None], update: int | None) -> None:
        """Run `task` in the thread; log an error instead of raising it.

        `update` is the update whose checkpoint the task writes; None if it only links.
        """
        failure = None
        try:
            task()
        except (OSError, safetensors.SafetensorError, RuntimeError, NmtError) as error:
            failure = self._describe_failure(error, update)
            log.warning("%s; the run goes on", failure)
        if update is not None:  # None again if a later checkpoint is written
            self.failure = failure

    def _describe_failure(self, error: Exception, update: int | None) -> str:
        """Return a sentence about a task that failed; see `_run_task` for `update`."""
        # the text of an OSError would repeat the path, its `strerror` does not
        message = getattr(error, "strerror", None) or error
        reason = to_one_line(message)
        checkpoints = list_checkpoints(self.run_dir)
        fallback = "there is no older checkpoint"
        if checkpoints:
            fallback = f"{checkpoints[-1].name} is the newest"
        missing_output = "links" if update is None else f"checkpoint of update {update}"
        return f"{missing_output} in {self.run_dir} not written: {reason}; {fallback}"

    def _remove_old(self, best_updates: list[int]) -> None:
        """Remove all checkpoints except for `best_updates` and the newest intact ones."""
        folders = {
            parse_checkpoint_update(folder): folder for folder in list_checkpoints(self.run_dir)
        }
        # in ascending order, as in `list_checkpoints`
        intact_updates = [update for update in folders if update not in self.damaged_updates]
        newest_updates = intact_updates[-self.keep_last :]
        updates_to_keep = {*best_updates, *newest_updates}
        for update, folder in folders.items():
            if update not in updates_to_keep:
                remove_folder(folder)


def copy_tree_to_host(tree: Any) -> Any:
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
