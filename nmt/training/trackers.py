"""Experiment trackers: TensorBoard, Weights and Biases, MLflow and trackio.

One thread for each tracker reads `metrics.jsonl` as it grows and sends its records, so that no
tracker can slow down or stop a run. A marker file in the run folder stores which records were sent.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from nmt.config import TrackerName
from nmt.errors import DamagedError, NmtError, to_one_line
from nmt.runtime.files import replace_json
from nmt.runtime.manifest import read_run_config
from nmt.runtime.metadata import read_json, to_dataclass
from nmt.runtime.metrics_log import parse_record
from nmt.runtime.reading import open_regular

log = logging.getLogger(__name__)
CLOSE_SECONDS = 20.0  # how long the end of a run waits for its trackers
_QUIET_SECONDS = 1.0  # a wait at the end of a run is logged if it is longer

# For each update, `metrics.jsonl` has up to two records with metrics: first of training, then of
# validation. Each has a position, from which its update can be computed: 2 * update for training,
# and 2 * update + 1 for validation.


def _record_position(update: int, *, is_validation: bool) -> int:
    """Return the position of a record."""
    return 2 * update + 1 if is_validation else 2 * update


def _update_at(position: int) -> int:
    """Return the update of the record at a position."""
    return position // 2


@dataclass
class SentMarker:
    """The content of `trackers/NAME.json`: which records of a run were sent to one tracker."""

    id: str  # id of the run in the tracker: a letter and hexadecimal digits
    sent: int = 0  # position of the newest record that was sent


@dataclass(frozen=True)
class RunInfo:
    """A run, as a tracker needs to know it."""

    folder: Path
    id: str  # id from the marker file, with which the tracker continues a resumed run
    settings: dict[str, Any]  # values by dotted keys, such as model.d_model, and the git commit
    sent: int  # position of the newest record that was certainly sent; 0 if there is none


class Tracker(Protocol):
    """The interface to a tracking library. Its methods may raise any exception."""

    is_durable: bool  # whether written metrics survive a kill without `close`

    def newest_position(self) -> int:
        """Return the position of the newest record that need not be sent again."""

    def write(self, position: int, metrics: dict[str, float]) -> None:
        """Send the metrics of the record at `position`."""

    def close(self) -> None:
        """Send all buffered metrics, and mark the run as finished."""


class _TensorBoard:
    """Writes event files of TensorBoard. See `Tracker` for the methods."""

    is_durable = True

    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A killed process may have written only some metrics of the record after `run.sent`. So
        # TensorBoard purges all metrics from the update of that record on, and they are sent again.
        self._purged_update = _update_at(run.sent + 1)
        self._writer: Any = SummaryWriter(
            str(run.folder / "tensorboard"),
            purge_step=self._purged_update or None,  # None: purge nothing
        )

    def newest_position(self) -> int:
        # the last record before the update that was purged
        return _record_position(self._purged_update - 1, is_validation=True)

    def write(self, position: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, _update_at(position))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Sends metrics to Weights and Biases. See `Tracker` for the methods."""

    is_durable = False  # its writer buffers records in memory

    def __init__(self, run: RunInfo) -> None:
        wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nmt"),
            id=run.id,
            name=run.folder.name,
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            config=run.settings,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="update")
        self._sent = run.sent

    def newest_position(self) -> int:
        return self._sent

    def write(self, position: int, metrics: dict[str, float]) -> None:
        # `step` must increase, so it is the position; `update` is the axis of the plots
        self._run.log({"update": _update_at(position), **metrics}, step=position)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """Sends metrics to a server or a local folder of MLflow. See `Tracker` for the methods."""

    is_durable = True

    def __init__(self, run: RunInfo) -> None:
        # MLflow refuses to use a local folder without this variable
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = importlib.import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI", (run.folder / "mlflow").as_uri())
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        self._run_id = self._find_run(run) or self._create_run(run)
        self._sent_metrics: set[tuple[str, int]] = set()  # names and updates of metrics in MLflow
        for name in self._client.get_run(self._run_id).data.metrics:
            history = self._client.get_metric_history(self._run_id, name)
            self._sent_metrics.update((name, metric.step) for metric in history)

    def _experiment_id(self) -> str:
        """Return the id of the experiment of MLflow, which is created if it is missing."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "nmt")
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            return str(self._client.create_experiment(name))
        return str(experiment.experiment_id)

    def _find_run(self, run: RunInfo) -> str | None:
        """Return the id that MLflow gave the run when it was created, or None for a new run."""
        query = f"tags.nmt_run = '{run.id}'"
        matches = self._client.search_runs([self._experiment_id()], query, max_results=1)
        return matches[0].info.run_id if matches else None

    def _create_run(self, run: RunInfo) -> str:
        """Create a run with the settings as parameters; return its id in MLflow."""
        created_run = self._client.create_run(
            self._experiment_id(), run_name=run.folder.name, tags={"nmt_run": run.id}
        )
        run_id = str(created_run.info.run_id)
        for key, value in run.settings.items():
            self._client.log_param(run_id, key, value)
        return run_id

    def newest_position(self) -> int:
        newest = 0
        for name, update in self._sent_metrics:
            newest = max(newest, _record_position(update, is_validation=name.startswith("valid")))
        return max(newest - 1, 0)  # only some metrics of the newest record may have been sent

    def write(self, position: int, metrics: dict[str, float]) -> None:
        entities = importlib.import_module("mlflow.entities")
        milliseconds = int(1000 * time.time())
        update = _update_at(position)
        unsent_metrics = [
            entities.Metric(name, value, milliseconds, update)
            for name, value in metrics.items()
            if (name, update) not in self._sent_metrics
        ]
        self._client.log_batch(self._run_id, metrics=unsent_metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class _Trackio:
    """Writes metrics to the database of trackio. See `Tracker` for the methods."""

    is_durable = True

    def __init__(self, run: RunInfo) -> None:
        trackio = importlib.import_module("trackio")
        self._project = os.environ.get("TRACKIO_PROJECT", "nmt")
        # the folders of two runs may have the same name, but their ids differ
        self._name = f"{run.folder.name}-{run.id[-6:]}"
        with contextlib.redirect_stdout(sys.stderr):  # trackio prints, and stdout is for results
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
        newest = 0
        for record in storage.get_logs(self._project, self._name):
            position = _record_position(int(record["step"]), is_validation="valid_loss" in record)
            newest = max(newest, position)
        return newest

    def write(self, position: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=_update_at(position))

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
    """Return `names`, without TensorBoard if it is not installed.

    Raises `NmtError` if any other tracker is not installed.
    """
    installed_names = []
    for name in names:
        if importlib.util.find_spec(name.value) is not None:
            installed_names.append(name)
        elif name is not TrackerName.tensorboard:
            raise NmtError(f"tracker={name.value}: install it with: pip install nmt[{name.value}]")
    return installed_names


class TrackerThread:
    """Sends the records of a run's `metrics.jsonl` to one tracker, in a thread, as they come."""

    def __init__(self, name: TrackerName, run_dir: Path) -> None:
        """Start the thread. It first sends the records that the tracker does not have yet."""
        self.is_complete = False  # whether all records were sent; set when the thread ends
        self.name = name
        self._run_dir = run_dir
        self._marker_path = run_dir / "trackers" / f"{name.value}.json"
        self._wake = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name.value, daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Wake the thread, which then reads the new records."""
        self._wake.set()

    def start_closing(self) -> None:
        """Let the thread end as soon as it has sent the remaining records."""
        self._is_closing.set()
        self._wake.set()

    def wait_closed(self, deadline: float) -> bool:
        """Wait until the thread ends or `time.monotonic()` reaches `deadline`.

        Returns whether the thread has ended.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def warn(self, reason: object) -> None:
        """Log a warning: why records were not sent, and how to send them."""
        message = "tracker %s: %s; nmt-visualize what=upload sends the rest"
        log.warning(message, self.name.value, to_one_line(reason, 300))

    def _run(self) -> None:
        """Do the work of the thread; log any exception as a warning."""
        try:
            self._send_records()
            self.is_complete = True
        except Exception as error:  # a tracker may raise anything and must not end the run
            self.warn(error or type(error).__name__)

    def _send_records(self) -> None:
        """Send each record that the tracker does not have, until `start_closing` is called."""
        marker = self._read_marker()
        self._write_marker(marker)
        run = RunInfo(
            folder=self._run_dir,
            id=marker.id,
            settings=_read_settings(self._run_dir),
            sent=marker.sent,
        )
        tracker: Tracker = _TRACKERS[self.name](run)
        marker.sent = tracker.newest_position()
        with open_regular(self._run_dir / "metrics.jsonl") as file:
            for record in self._read_records(file):
                update = record.pop("update")
                position = _record_position(update, is_validation="valid_loss" in record)
                metrics = {
                    key: float(value) for key, value in record.items() if not isinstance(value, str)
                }
                if position <= marker.sent or not metrics:
                    continue
                tracker.write(position, metrics)
                marker.sent = position
                if tracker.is_durable:
                    self._write_marker(marker)
        tracker.close()
        self._write_marker(marker)

    def _read_marker(self) -> SentMarker:
        """Read the marker file; if it is missing or damaged, return a marker with a new id."""
        try:
            return to_dataclass(SentMarker, read_json(self._marker_path), self._marker_path)
        except FileNotFoundError:
            pass  # the run was never sent
        except (OSError, DamagedError) as error:
            log.warning("%s; all records are sent again, as a new run", error)
        return SentMarker(id=f"n{uuid.uuid4().hex[:15]}")

    def _write_marker(self, marker: SentMarker) -> None:
        self._marker_path.parent.mkdir(exist_ok=True)
        replace_json(self._marker_path, asdict(marker))

    def _read_records(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        """Yield the records of the file as it grows, until `start_closing` is called."""
        incomplete_line = b""
        while True:
            # Cleared before the file is read, so that `wait` returns at once if another record or
            # `start_closing` comes in between.
            self._wake.clear()
            is_closing = self._is_closing.is_set()
            new_text = incomplete_line + file.read()
            lines = new_text.split(b"\n")
            incomplete_line = lines.pop()
            for line in lines:
                with contextlib.suppress(ValueError):  # skip a damaged line
                    yield parse_record(line)
            if is_closing:
                return
            self._wake.wait()


def close_trackers(threads: Sequence[TrackerThread], timeout_seconds: float | None = None) -> None:
    """Send the remaining records to all trackers at the same time.

    Gives up after `timeout_seconds`, by default `CLOSE_SECONDS`, with a warning for each tracker
    that has not taken all records.
    """
    if timeout_seconds is None:
        timeout_seconds = CLOSE_SECONDS
    start_time = time.monotonic()
    for thread in threads:
        thread.start_closing()
    quiet_end = start_time + _QUIET_SECONDS
    open_threads = [thread for thread in threads if not thread.wait_closed(quiet_end)]
    if open_threads:
        names = ", ".join(thread.name.value for thread in open_threads)
        log.info("waiting up to %g seconds for %s to take all metrics", timeout_seconds, names)
    for thread in open_threads:
        if not thread.wait_closed(start_time + timeout_seconds):
            thread.warn(f"no answer for {timeout_seconds:g} seconds")
            if thread.name is TrackerName.wandb:  # wandb waits for its own process at exit
                log.warning("this command ends when wandb's own process has ended")


def _read_settings(run_dir: Path) -> dict[str, Any]:
    """Return the settings of a run by dotted keys, and the git commit of nmt as `commit`.

    Returns an empty dictionary if the run has no config.
    """
    try:
        config = read_run_config(run_dir)
    except OSError:
        return {}
    return {**flatten_keys(config), "commit": _current_commit()}


def flatten_keys(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries: {"a": {"b": 1}} becomes {"a.b": 1}. Keys get `prefix`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten_keys(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _current_commit() -> str:
    """Return the git commit of nmt, or an empty string if it is not in a git repository."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(git, capture_output=True, text=True, timeout=5).stdout.strip()
    return ""
