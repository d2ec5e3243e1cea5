"""Compute the metrics of a run, and write them to `metrics.jsonl` and to trackers."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from nmt.config import TrainConfig
from nmt.runtime.distributed import gather
from nmt.runtime.files import replace_file
from nmt.runtime.metrics_log import read_metrics_log
from nmt.training.checkpoints import TrainerState
from nmt.training.learner import UpdateResult
from nmt.training.run_folder import run_dir_errors
from nmt.training.trackers import TrackerThread, close_trackers, installed_trackers

log = logging.getLogger(__name__)


class Meter:
    """Collects the results of updates in the list `results`, and summarizes them."""

    def __init__(self) -> None:
        self.start_seconds = time.perf_counter()
        self.results: list[UpdateResult] = []

    def summarize(self, peak_flops_per_second: float) -> dict[str, Any]:
        """Return the loss per target token, the speed and the utilization in the collected updates.

        `peak_flops_per_second` is the peak throughput of all devices.
        """
        seconds = time.perf_counter() - self.start_seconds
        num_tgt_tokens = sum(result.num_tokens for result in self.results)
        num_tokens = num_tgt_tokens + sum(result.num_src_tokens for result in self.results)
        num_positions = sum(result.num_positions for result in self.results)
        flops_per_second = sum(result.flops for result in self.results) / seconds
        return {
            "loss": sum(result.loss_sum for result in self.results) / num_tgt_tokens,
            "nll": sum(result.nll_sum for result in self.results) / num_tgt_tokens,
            "target_tokens_per_second": num_tgt_tokens / seconds,
            "tokens_per_second": num_tokens / seconds,
            "padding_share": 1 - num_tokens / num_positions,
            "model_flops_per_second": flops_per_second,
            "model_flops_utilisation": flops_per_second / peak_flops_per_second,
        }


class RunClock:
    """Measures the time of a run, with the time of earlier processes that trained it.

    The CPU time is the sum over all threads of all ranks. The time to load the data and the model
    does not count. Nor does the time that an earlier process ran after its newest record.
    """

    def __init__(self, records: list[dict[str, Any]]) -> None:
        """Start to measure. `records` are the metrics of the run so far."""
        self._earlier_wall_seconds = 0.0
        self._earlier_cpu_seconds = 0.0
        for record in records:
            if "cpu_seconds" in record:
                self._earlier_wall_seconds = record["wall_seconds"]
                self._earlier_cpu_seconds = record["cpu_seconds"]
        self._start_wall_seconds = time.perf_counter()
        self._start_cpu_seconds = time.process_time()

    def read(self) -> dict[str, float]:
        """Return `wall_seconds` and `cpu_seconds` for a record. All ranks must call it."""
        wall_seconds = time.perf_counter() - self._start_wall_seconds
        rank_cpu_seconds = gather(time.process_time() - self._start_cpu_seconds)
        return {
            "wall_seconds": self._earlier_wall_seconds + wall_seconds,
            "cpu_seconds": self._earlier_cpu_seconds + sum(rank_cpu_seconds),
        }


class MetricsWriter:
    """Writes the metrics of a run to `metrics.jsonl`, one JSON object a line, and to trackers.

    On ranks other than 0, nothing is written. If a write fails, for example because the disk is
    full, the run goes on.
    """

    def __init__(
        self, run_dir: Path, state: TrainerState, config: TrainConfig, *, is_main: bool
    ) -> None:
        """Open `metrics.jsonl` to continue from `state`, and remove the records after it."""
        tracker_names = installed_trackers(config.tracker)  # on all ranks, so that all raise
        self.is_main = is_main
        self.lost_validation = False  # whether to repeat the validation of the newest checkpoint
        self.clock = RunClock([])
        if not is_main:
            return
        self._path = run_dir / "metrics.jsonl"
        with run_dir_errors(run_dir):
            if self._path.exists():
                records, self.lost_validation = _remove_later_records(self._path, state)
                self.clock = RunClock(records)  # rank 0 has the time of all ranks so far
            self._file = self._path.open("ab", buffering=0)
        self._trackers = [TrackerThread(name, run_dir) for name in tracker_names]

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, which must have the key `update`."""
        if not self.is_main:
            return
        line = _render_line(record)
        try:
            old_size = os.fstat(self._file.fileno()).st_size
            if self._file.write(line) < len(line):  # a full disk takes only a part
                self._file.truncate(old_size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            log.warning("%s: %s; this line of metrics is lost", self._path, error.strerror)
        for tracker in self._trackers:
            tracker.notify()

    def close(self) -> None:
        """Close the file and send the remaining records to the trackers."""
        if self.is_main:
            self._file.close()
            close_trackers(self._trackers)


def _remove_later_records(path: Path, state: TrainerState) -> tuple[list[dict[str, Any]], bool]:
    """Remove the records after `state` from `metrics.jsonl`, and return the remaining ones.

    If `state` was saved before the validation of its update, the run will repeat this validation,
    so its record is removed, too. The second value is True if there was such a record.
    """
    last_update = state.num_updates
    records = [record for record in read_metrics_log(path) if record["update"] <= last_update]
    remaining = records
    if state.validated_update != last_update:
        remaining = []
        for record in records:
            is_validation = "valid_loss" in record
            if record["update"] < last_update or not is_validation:
                remaining.append(record)
    with replace_file(path) as temporary:
        temporary.write_bytes(b"".join(map(_render_line, remaining)))
    return remaining, len(remaining) < len(records)


def _render_line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"
