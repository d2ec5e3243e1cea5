"""Where the figures of a run go: `metrics.jsonl` and trackers."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from nmt.config import TrainConfig
from nmt.runtime.files import replace_file
from nmt.runtime.metrics_log import read_metrics_log
from nmt.training.checkpoints import TrainerState, writing
from nmt.training.learner import Outcome
from nmt.training.trackers import Feed, installed_trackers

log = logging.getLogger(__name__)


class Meter:
    """The updates between two lines of metrics."""

    def __init__(self) -> None:
        self.start_seconds = time.perf_counter()
        self.done: list[Outcome] = []

    def record(self, flops_per_second: float) -> dict[str, Any]:
        """Return the means since the start, in nats a target token and tokens a second; utilisation
        is relative to `flops_per_second`, the peak throughput of all devices.
        """
        seconds = time.perf_counter() - self.start_seconds
        num_tokens = sum(outcome.num_tokens for outcome in self.done)
        real = num_tokens + sum(outcome.num_src_tokens for outcome in self.done)
        flops = sum(outcome.flops for outcome in self.done)
        return {
            "loss": sum(outcome.loss_sum for outcome in self.done) / num_tokens,
            "nll": sum(outcome.nll_sum for outcome in self.done) / num_tokens,
            "target_tokens_per_second": num_tokens / seconds,
            "tokens_per_second": real / seconds,
            "padding_share": 1 - real / sum(outcome.num_positions for outcome in self.done),
            "model_flops_per_second": flops / seconds,
            "model_flops_utilisation": flops / seconds / flops_per_second,
        }


class RunLog:
    """Writes a run's figures to files; on rank 0, elsewhere it does nothing.

    `metrics.jsonl` has one object a line. A file that can no longer be written, for example on a
    full disk, does not end the run.
    """

    def __init__(
        self, run_dir: Path, state: TrainerState, config: TrainConfig, *, is_main: bool
    ) -> None:
        """Open the log of a run that goes on from `state`; remove later lines."""
        trackers = installed_trackers(config.tracker)
        self.is_main = is_main
        self.lost_validation = False
        if not is_main:
            return
        self._path = run_dir / "metrics.jsonl"
        with writing(run_dir):
            if self._path.exists():
                self.lost_validation = _truncate(self._path, state)
            self._file = self._path.open("ab", buffering=0)
        self._feeds = [Feed(name, run_dir) for name in trackers]

    def write(self, record: dict[str, Any]) -> None:
        """Write one record to the files; it has the key `update`."""
        if not self.is_main:
            return
        line = _render(record)
        try:
            place = os.fstat(self._file.fileno()).st_size
            if self._file.write(line) < len(line):  # the disk is full now
                self._file.truncate(place)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            log.warning("%s: %s; this line of metrics is lost", self._path, error.strerror)
        for feed in self._feeds:
            feed.notify()

    def close(self) -> None:
        """Send trackers the rest."""
        if self.is_main:
            self._file.close()
            for feed in self._feeds:
                feed.close()


def _truncate(path: Path, state: TrainerState) -> bool:
    """Remove what was logged after an update, and its validation; return whether there was one.

    A checkpoint is older than the validation of its update, which must therefore be done again,
    unless the checkpoint says that it is validated.
    """
    records = [record for record in read_metrics_log(path) if record["update"] <= state.update]
    is_validated = state.validated == state.update
    kept = [
        record
        for record in records
        if is_validated or "valid_loss" not in record or record["update"] < state.update
    ]
    with replace_file(path) as temporary:
        temporary.write_bytes(b"".join(map(_render, kept)))
    return len(kept) < len(records)


def _render(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"
