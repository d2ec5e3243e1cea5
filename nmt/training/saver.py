"""Checkpoints of a run: written by a thread, while the run waits for the copy to host memory alone.

A write that fails leaves the checkpoints before it and is reported; the run goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from nmt import checkpoint
from nmt.data.tokenizer import Tokenizers
from nmt.errors import NmtError
from nmt.files import remove_folder, replace_link
from nmt.training.state import save_state

log = logging.getLogger(__name__)
# what a full disk or a read-only folder raises: Python's files, safetensors', torch's
WRITE_ERRORS = (OSError, safetensors.SafetensorError, RuntimeError, NmtError)


class Saver:
    """Writes, links and removes the checkpoints of one run, in the order in which it is told."""

    def __init__(self, run_dir: Path, *, update: int, keep_last: int) -> None:
        """Follow on the checkpoint of `update`; any newer one is damaged."""
        self.run_dir = run_dir
        self.update = update  # of the newest good checkpoint
        self.keep_last = keep_last
        self.failure: str | None = None  # of the newest checkpoint
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self._pending: Future[None] | None = None

    def save(
        self,
        update: int,
        weights: dict[str, Tensor],
        info: checkpoint.ModelInfo,
        tokenizer: Tokenizers,
        *,
        training: dict[str, Any],
        best: Iterable[int],
    ) -> None:
        """Copy `weights` and the state in `training` to host memory and begin to write them.

        Waits for the checkpoint before this one. Older checkpoints are removed afterwards, but for
        the newest and those of the updates `best`.
        """
        self._wait()
        folder = checkpoint.checkpoint_dir(self.run_dir, update)
        weights, training = to_host(weights), to_host(training)

        def write() -> None:
            checkpoint.save_model(
                folder, weights, info, tokenizer, extra=lambda place: save_state(place, training)
            )
            self.update = update
            replace_link(self.run_dir / "checkpoints/latest", folder.name)
            self._remove_old(best)

        self._pending = self._thread.submit(self._try, write, update)

    def mark_best(self, best: list[int]) -> None:
        """Let the link `best` lead to the first of these updates, and keep them all."""

        def mark() -> None:
            folder = checkpoint.checkpoint_dir(self.run_dir, best[0])
            if folder.exists():
                replace_link(self.run_dir / "checkpoints/best", folder.name)
            self._remove_old(best)

        self._wait()
        self._pending = self._thread.submit(self._try, mark, None)

    def finish(self) -> None:
        """Wait for what is being written; raise an `NmtError` when the last checkpoint failed."""
        self._wait()
        self._thread.shutdown()
        if self.failure is not None:
            raise NmtError(f"{self.failure}; free space or permissions, then start it again")

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _try(self, task: Callable[[], None], update: int | None) -> None:
        failure = None
        try:
            task()
        except WRITE_ERRORS as error:
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())
            newest = checkpoint.list_checkpoints(self.run_dir)
            good = f"{newest[-1].name} is the newest" if newest else "there is none before it"
            name = "links" if update is None else f"checkpoint of update {update}"
            failure = f"{name} in {self.run_dir} not written: {reason}; {good}"
            log.warning("%s; the run goes on", failure)
        if update is not None:
            self.failure = failure

    def _remove_old(self, best: Iterable[int]) -> None:
        keep = {checkpoint.checkpoint_dir(self.run_dir, update) for update in best}
        folders = checkpoint.list_checkpoints(self.run_dir)
        good = [f for f in folders if checkpoint.checkpoint_update(f) <= self.update]
        keep |= set(good[-self.keep_last :])
        for folder in folders:
            if folder not in keep:
                remove_folder(folder)


def to_host(tree: Any) -> Any:
    """Copy every tensor of nested dicts and lists to host memory."""
    if isinstance(tree, Tensor):
        return torch.empty_like(tree, device="cpu").copy_(tree.detach())
    if isinstance(tree, dict):
        return {key: to_host(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [to_host(value) for value in tree]
    return tree
