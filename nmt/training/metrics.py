"""Collect the metrics of a run, and write them to `metrics.jsonl` and to trackers."""

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
from nmt.training.checkpoints import TrainerState
from nmt.training.learner import UpdateResult
from nmt.training.run_folder import run_dir_errors
from nmt.training.trackers import Feed, installed_trackers

log = logging.getLogger(__name__)


class Meter:
    """Collects the results of updates between two records of `metrics.jsonl`."""

    def __init__(self) -> None:
        self.start_seconds = time.perf_counter()
        self.results: list[UpdateResult] = []

    def record(self, flops_per_second: float) -> dict[str, Any]:
        """Return the means since the start: nats per target token, and tokens per second.

        Utilization is relative to `flops_per_second`, the peak throughput of all devices.
        """
        seconds = time.perf_counter() - self.start_seconds
        num_tgt_tokens = sum(result.num_tokens for result in self.results)
        num_tokens = num_tgt_tokens + sum(result.num_src_tokens for result in self.results)
        num_positions = sum(result.num_positions for result in self.results)
        flops = sum(result.flops for result in self.results)
        return {
            "loss": sum(result.loss_sum for result in self.results) / num_tgt_tokens,
            "nll": sum(result.nll_sum for result in self.results) / num_tgt_tokens,
            "target_tokens_per_second": num_tgt_tokens / seconds,
            "tokens_per_second": num_tokens / seconds,
            "padding_share": 1 - num_tokens / num_positions,
            "model_flops_per_second": flops / seconds,
            "model_flops_utilisation": flops / seconds / flops_per_second,
        }


class RunLog:
    """Writes the figures of a run to `metrics.jsonl`, one object a line, and to trackers.

    Rank 0 writes; on other ranks all methods do nothing. A failed write, as on a full disk, does
    not end the run.
    """

    def __init__(
        self, run_dir: Path, state: TrainerState, config: TrainConfig, *, is_main: bool
    ) -> None:
        """Open the log of a run that continues from `state`; remove later lines."""
        trackers = installed_trackers(config.tracker)
        self.is_main = is_main
        self.lost_validation = False  # of the newest checkpoint, which must be repeated
        if not is_main:
            return
        self._path = run_dir / "metrics.jsonl"
        with run_dir_errors(run_dir):
            if self._path.exists():
                self.lost_validation = _remove_later_records(self._path, state)
            self._file = self._path.open("ab", buffering=0)
        self._feeds = [Feed(name, run_dir) for name in trackers]

    def write(self, record: dict[str, Any]) -> None:
        """Write one record, which has the key `update`."""
        if not self.is_main:
            return
        line = _render(record)
        try:
            end = os.fstat(self._file.fileno()).st_size
            if self._file.write(line) < len(line):  # the disk is full
                self._file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            log.warning("%s: %s; this line of metrics is lost", self._path, error.strerror)
        for feed in self._feeds:
            feed.notify()

    def close(self) -> None:
        """Close the file and send the remaining records to the trackers."""
        if self.is_main:
            self._file.close()
            for feed in self._feeds:
                feed.close()


def _remove_later_records(path: Path, state: TrainerState) -> bool:
    """Remove records of updates after `state`, and of a validation after its checkpoint was saved.

    Return whether there was such a validation, which must be repeated.
    """
    records = [r for r in read_metrics_log(path) if r["update"] <= state.num_updates]
    is_validated = state.validated_update == state.num_updates
    remaining = []
    for record in records:
        is_validation = "valid_loss" in record
        if is_validated or not is_validation or record["update"] < state.num_updates:
            remaining.append(record)
    with replace_file(path) as temporary:
        temporary.write_bytes(b"".join(map(_render, remaining)))
    return len(remaining) < len(records)


def _render(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"
