"""Experiment trackers: TensorBoard, Weights and Biases, MLflow and trackio.

A thread for each tracker reads `metrics.jsonl` as it grows and sends its records, so that no
tracker can slow down or stop a run. The run folder records the newest record that was sent.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from nmt.config import TrackerName
from nmt.errors import DamagedError, NmtError
from nmt.runtime.files import replace_json
from nmt.runtime.manifest import read_config
from nmt.runtime.metadata import read_json, to_dataclass
from nmt.runtime.metrics_log import parse_record
from nmt.runtime.reading import open_regular

log = logging.getLogger(__name__)
CLOSE_SECONDS = 20.0  # how long the end of a run waits for a tracker

# A position orders the records of `metrics.jsonl`: twice the update, plus 1 for a validation.


@dataclass
class SentMarker:
    """The content of `trackers/NAME.json`."""

    id: str  # of the run in the tracker, a letter and hexadecimal digits
    sent: int = 0  # position of the newest record that was sent


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run that a tracker receives when it is opened."""

    folder: Path
    id: str  # the same before and after a kill
    settings: dict[str, Any]  # by dotted keys, with the commit of the code
    sent: int  # position of the newest record that is known to be sent, or 0


class Tracker(Protocol):
    """A library that shows figures. Every method may raise any exception."""

    is_durable: bool  # whether written figures survive a kill without `close`

    def newest_position(self) -> int:
        """Return the position of the newest record that the tracker has."""

    def write(self, position: int, figures: dict[str, float]) -> None:
        """Show the figures of a record."""

    def close(self) -> None:
        """Send everything that is still buffered."""


class _TensorBoard:
    is_durable = True

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A kill may have truncated the record after the newest one, which is inside this step or
        # the next: TensorBoard drops everything from this step on, and it is sent again.
        self._purged_step = (run.sent + 1) // 2
        self._writer: Any = SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=self._purged_step or None
        )

    def newest_position(self) -> int:
        return 2 * self._purged_step - 1

    def write(self, position: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, position // 2)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    is_durable = False  # its writer buffers records in memory

    def __init__(self, run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nmt"),
            id=run.id,
            name=run.folder.name,
            dir=str(run.folder),
            config=run.settings,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="update")
        self._sent = run.sent

    def newest_position(self) -> int:
        return self._sent

    def write(self, position: int, figures: dict[str, float]) -> None:
        # wandb drops a record whose step is not above the previous one
        self._run.log({"update": position // 2, **figures}, step=position)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    is_durable = True

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # for the folder of the run
        mlflow = importlib.import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI", (run.folder / "mlflow").as_uri())
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        self._run_id = self._find_run(run) or self._create_run(run)
        self._sent: set[tuple[str, int]] = set()  # metrics and steps
        for name in self._client.get_run(self._run_id).data.metrics:
            history = self._client.get_metric_history(self._run_id, name)
            self._sent.update((name, metric.step) for metric in history)

    def _experiment_id(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "nmt")
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            return str(self._client.create_experiment(name))
        return str(experiment.experiment_id)

    def _find_run(self, run: TrackedRun) -> str | None:
        query = f"tags.nmt_run = '{run.id}'"
        runs = self._client.search_runs([self._experiment_id()], query, max_results=1)
        return runs[0].info.run_id if runs else None

    def _create_run(self, run: TrackedRun) -> str:
        tags = {"nmt_run": run.id}
        created = self._client.create_run(
            self._experiment_id(), run_name=run.folder.name, tags=tags
        )
        for key, value in run.settings.items():
            self._client.log_param(created.info.run_id, key, value)
        return str(created.info.run_id)

    def newest_position(self) -> int:
        positions = (2 * step + name.startswith("valid") for name, step in self._sent)
        # the newest record may have been sent in part, so it is written again
        return max(positions, default=1) - 1

    def write(self, position: int, figures: dict[str, float]) -> None:
        entities = importlib.import_module("mlflow.entities")
        milliseconds = int(1000 * time.time())
        update = position // 2
        metrics = [
            entities.Metric(name, value, milliseconds, update)
            for name, value in figures.items()
            if (name, update) not in self._sent
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class _Trackio:
    is_durable = True

    def __init__(self, run: TrackedRun) -> None:
        trackio = importlib.import_module("trackio")
        self._project = os.environ.get("TRACKIO_PROJECT", "nmt")
        self._name = f"{run.folder.name}-{run.id[-6:]}"
        with contextlib.redirect_stdout(sys.stderr):  # stdout belongs to results
            self._run: Any = trackio.init(
                self._project,
                name=self._name,
                config=run.settings,
                resume="allow",
                auto_log_gpu=False,
                auto_log_cpu=False,
                embed=False,
            )

    def newest_position(self) -> int:
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        entries: Any = storage.get_logs(self._project, self._name)
        positions = (2 * int(entry["step"]) + ("valid_loss" in entry) for entry in entries)
        return max(positions, default=0)

    def write(self, position: int, figures: dict[str, float]) -> None:
        self._run.log(figures, step=position // 2)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


_TRACKERS: dict[TrackerName, type[Any]] = {
    TrackerName.tensorboard: _TensorBoard,
    TrackerName.wandb: _Wandb,
    TrackerName.mlflow: _Mlflow,
    TrackerName.trackio: _Trackio,
}


def installed_trackers(names: list[TrackerName]) -> list[TrackerName]:
    """Return the trackers of `names` that are installed.

    Raises `NmtError` if any but TensorBoard, which is optional, is missing.
    """
    installed = []
    for name in names:
        if importlib.util.find_spec(name.value) is not None:
            installed.append(name)
        elif name is not TrackerName.tensorboard:
            raise NmtError(f"tracker={name.value}: install it with: pip install nmt[{name.value}]")
    return installed


class Feed:
    """Sends the records of a run's `metrics.jsonl` to one tracker, in a thread, as they come."""

    def __init__(self, name: TrackerName, run_dir: Path) -> None:
        """Start the thread. It sends the records after the newest one that the tracker has."""
        self.is_done = False  # whether all records were sent
        self._name = name
        self._run_dir = run_dir
        self._marker_path = run_dir / "trackers" / f"{name.value}.json"
        self._wake = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name.value, daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Let the thread read new records."""
        self._wake.set()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Send the remaining records; give up after `timeout_seconds` (`CLOSE_SECONDS`)."""
        timeout_seconds = timeout_seconds or CLOSE_SECONDS
        self._is_closing.set()
        self._wake.set()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._warn(f"no answer for {timeout_seconds:g} seconds")

    def _warn(self, reason: object) -> None:
        message = "tracker %s: %s; nmt-visualize what=upload sends the rest"
        log.warning(message, self._name.value, " ".join(str(reason).split())[:300])

    def _run(self) -> None:
        try:
            self._send_records()
            self.is_done = True
        except Exception as error:  # a tracker may raise anything and must not end the run
            self._warn(error or type(error).__name__)

    def _send_records(self) -> None:
        marker = self._read_marker()
        self._write_marker(marker)
        settings = _read_settings(self._run_dir)
        run = TrackedRun(self._run_dir, marker.id, settings, marker.sent)
        tracker: Tracker = _TRACKERS[self._name](run)
        marker.sent = tracker.newest_position()
        with open_regular(self._run_dir / "metrics.jsonl") as file:
            for record in self._read_records(file):
                position = 2 * record.pop("update") + ("valid_loss" in record)
                figures = {k: float(v) for k, v in record.items() if not isinstance(v, str)}
                if position > marker.sent and figures:
                    tracker.write(position, figures)
                    marker.sent = position
                    if tracker.is_durable:
                        self._write_marker(marker)
        tracker.close()
        self._write_marker(marker)

    def _read_marker(self) -> SentMarker:
        try:
            return to_dataclass(SentMarker, read_json(self._marker_path), self._marker_path)
        except FileNotFoundError:
            pass
        except (OSError, DamagedError) as error:
            log.warning("%s; all figures are sent again, as a new run", error)
        return SentMarker(id=f"n{uuid.uuid4().hex[:15]}")

    def _write_marker(self, marker: SentMarker) -> None:
        self._marker_path.parent.mkdir(exist_ok=True)
        replace_json(self._marker_path, asdict(marker))

    def _read_records(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        """Yield the records in the file and those that are appended, until `close` is called."""
        incomplete = b""
        while True:
            is_closing = self._is_closing.is_set()
            self._wake.clear()
            *lines, incomplete = (incomplete + file.read()).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # a damaged line
                    yield parse_record(line)
            if is_closing:
                return
            self._wake.wait()


def _read_settings(run_dir: Path) -> dict[str, Any]:
    """Return the settings of a run by dotted keys, and the commit of the code if git knows it."""
    try:
        return {**_flatten(read_config(run_dir), ""), "commit": _read_commit()}
    except OSError:
        return {}


def _flatten(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _read_commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(git, capture_output=True, text=True, timeout=5).stdout.strip()
    return ""
