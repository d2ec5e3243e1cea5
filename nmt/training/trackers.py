"""Trackers of experiments, which show the figures of a run elsewhere: TensorBoard, Weights and
Biases, MLflow, trackio.

Each has a thread that reads `metrics.jsonl` as it grows, so that no tracker can stop or slow a run,
and what was sent is known after a kill.
"""

from __future__ import annotations

import contextlib
import functools
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nmt.config import TrackerName
from nmt.errors import DamagedError, NmtError
from nmt.runtime.files import write_json
from nmt.runtime.manifest import read_config
from nmt.runtime.metadata import read_json
from nmt.runtime.metrics_log import parse_record

log = logging.getLogger(__name__)
CLOSE_SECONDS = 20.0  # that a run waits at its end for a tracker
DRAW_SECONDS = 100.0  # more where it draws pictures
_MODULES = {TrackerName.tensorboard: "tensorboard"}  # others are named as their module
_DRAWING = threading.Lock()
Place = tuple[int, int]
"""An update, and 1 for its validation, 0 before that: where a record of `metrics.jsonl` belongs."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run, once."""

    folder: Path
    id: str  # the same after a kill, a letter and hexadecimal digits
    config: dict[str, Any]  # flat names of settings, with the commit of the code
    sent: Place  # of the newest record that is known to be sent, (0, 0) without any


@dataclass(frozen=True)
class TrackedPicture:
    """A PNG file that belongs to an update."""

    update: int
    name: str
    path: Path


class Tracker(Protocol):
    """A library that shows figures; any method may raise anything."""

    is_durable: bool  # what was written outlives a kill, also before `close`

    def newest(self) -> Place:
        """Return the place after which records are to be sent."""

    def write(self, place: Place, figures: dict[str, float]) -> None:
        """Show the figures of a record."""

    def show(self, picture: TrackedPicture) -> None:
        """Show a picture."""

    def close(self) -> None:
        """Send the rest."""


class _TensorBoard:
    is_durable = True

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # a kill may have cut the next record: what its step has goes, and comes again
        step = sum(run.sent)
        folder = str(run.folder / "tensorboard")
        self._board: Any = SummaryWriter(folder, purge_step=step or None)
        self._newest = (step - 1, 1) if step else (0, 0)

    def newest(self) -> Place:
        return self._newest

    def write(self, place: Place, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._board.add_scalar(name, value, place[0])
        self._board.flush()

    def show(self, picture: TrackedPicture) -> None:
        image = importlib.import_module("PIL.Image").open(picture.path).convert("RGB")
        pixels = np.asarray(image)  # (height, width, 3)
        self._board.add_image(picture.name, pixels, picture.update, dataformats="HWC")

    def close(self) -> None:
        self._board.close()


class _Wandb:
    is_durable = False  # its writer keeps records in memory

    def __init__(self, run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nmt"),
            id=run.id,
            name=run.folder.name,
            dir=str(run.folder),
            config=run.config,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="update")
        self._sent = run.sent
        self._step = self._number(run.sent)

    def newest(self) -> Place:
        return self._sent

    @staticmethod
    def _number(place: Place) -> int:
        """Return a number for each record, since what comes twice or late is dropped there, with
        room for pictures between.
        """
        return 2000 * place[0] + 1000 * place[1]

    def write(self, place: Place, figures: dict[str, float]) -> None:
        self._step = self._number(place)
        self._run.log({"update": place[0], **figures}, step=self._step)

    def show(self, picture: TrackedPicture) -> None:
        image = importlib.import_module("wandb").Image(str(picture.path))
        self._step += 1
        self._run.log({"update": picture.update, picture.name: image}, step=self._step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    is_durable = True

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # for the folder of the run
        mlflow = importlib.import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI", (run.folder / "mlflow").as_uri())
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "nmt")
        there = self._client.get_experiment_by_name(title)
        number = there.experiment_id if there else self._client.create_experiment(title)
        found = self._client.search_runs([number], f"tags.nmt_run = '{run.id}'", max_results=1)
        name, tags = run.folder.name, {"nmt_run": run.id}
        one = found[0] if found else self._client.create_run(number, run_name=name, tags=tags)
        self._id = one.info.run_id
        if not found:
            for key, value in run.config.items():
                self._client.log_param(self._id, key, value)
        names = self._client.get_run(self._id).data.metrics
        histories = [self._client.get_metric_history(self._id, name) for name in names]
        self._has = {(metric.key, metric.step) for history in histories for metric in history}

    def newest(self) -> Place:
        places = ((step, int(name.startswith("valid"))) for name, step in self._has)
        step, is_validation = max(places, default=(1, 0))
        return (step, 0) if is_validation else (step - 1, 1)  # that one may have come in part

    def write(self, place: Place, figures: dict[str, float]) -> None:
        entities = importlib.import_module("mlflow.entities")
        now = int(1000 * time.time())
        missing = [name for name in figures if (name, place[0]) not in self._has]
        metrics = [entities.Metric(name, figures[name], now, place[0]) for name in missing]
        self._client.log_batch(self._id, metrics=metrics)

    def show(self, picture: TrackedPicture) -> None:
        self._client.log_artifact(self._id, str(picture.path), picture.name)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _Trackio:
    is_durable = True

    def __init__(self, run: TrackedRun) -> None:
        trackio = importlib.import_module("trackio")
        self._project = os.environ.get("TRACKIO_PROJECT", "nmt")
        self._name = f"{run.folder.name}-{run.id[-6:]}"
        how = {"resume": "allow", "auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
        with contextlib.redirect_stdout(sys.stderr):  # it prints
            self._run: Any = trackio.init(self._project, name=self._name, config=run.config, **how)

    def newest(self) -> Place | None:
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        logs: Any = storage.get_logs(self._project, self._name)
        places = [(int(entry["step"]), int("valid_loss" in entry)) for entry in logs]
        return max(places, default=(0, 0))

    def write(self, place: Place, figures: dict[str, float]) -> None:
        self._run.log(figures, step=place[0])

    def show(self, picture: TrackedPicture) -> None:
        image = importlib.import_module("trackio").Image(str(picture.path))
        self._run.log({picture.name: image}, step=picture.update)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


_OPEN: dict[TrackerName, type[Any]] = {
    TrackerName.tensorboard: _TensorBoard,
    TrackerName.wandb: _Wandb,
    TrackerName.mlflow: _Mlflow,
    TrackerName.trackio: _Trackio,
}


def check_trackers(names: list[TrackerName]) -> list[TrackerName]:
    """Return those that can be used: TensorBoard where it is installed, and all others; one of them
    that is not installed is an `NmtError`.
    """
    missing = [n for n in names if importlib.util.find_spec(_MODULES.get(n, n.value)) is None]
    for name in missing:
        if name is not TrackerName.tensorboard:
            raise NmtError(f"tracker={name.value}: install it with: pip install nmt[{name.value}]")
    return [name for name in names if name not in missing]


class Feed:
    """Gives the lines of a run's `metrics.jsonl` to one tracker, in a thread, as they come.

    `trackers/NAME.json` in the run folder holds the run's id, the place of the newest line that was
    sent, and the update of the newest picture. What is not after them is not sent again.
    """

    def __init__(self, name: TrackerName, run_dir: Path, *, num_sentences: int = 0) -> None:
        """Begin; the attention of so many validation pairs is shown too, of each checkpoint that
        was validated.
        """
        self.is_done = False  # all is sent
        self._has_failed = False  # to draw
        self._name, self._run_dir, self._num_sentences = name, run_dir, num_sentences
        self._marker = run_dir / "trackers" / f"{name.value}.json"
        self._wake, self._is_closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name.value, daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Say that there are new lines."""
        self._wake.set()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Send the rest, but give up after some time."""
        timeout_seconds = timeout_seconds or CLOSE_SECONDS + DRAW_SECONDS * bool(
            self._num_sentences
        )
        self._is_closing.set()
        self._wake.set()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._warn(f"no answer for {timeout_seconds:g} seconds")

    def _warn(self, reason: object) -> None:
        text = "tracker %s: %s; nmt-visualize what=upload sends what is missing"
        log.warning(text, self._name.value, " ".join(str(reason).split())[:300])

    def _run(self) -> None:
        try:
            self._send_lines()
            self.is_done = not self._has_failed
        except Exception as error:  # of any kind: a tracker does not end a run
            self._warn(error or type(error).__name__)

    def _send_lines(self) -> None:
        self._marker.parent.mkdir(exist_ok=True)
        marked: dict[str, Any] = {"id": f"n{uuid.uuid4().hex[:15]}", "sent": [0, 0], "shown": 0}
        try:
            marked |= read_json(self._marker)
        except FileNotFoundError:
            pass
        except (OSError, DamagedError) as error:
            text = "%s is damaged (%s); all figures are sent again, to a new run"
            log.warning(text, self._marker, error)
        self._mark(marked)
        sent: Place = (marked["sent"][0], marked["sent"][1])
        run = TrackedRun(self._run_dir, marked["id"], _read_settings(self._run_dir), sent)
        tracker: Tracker = _OPEN[self._name](run)
        sent = tracker.newest()
        with (self._run_dir / "metrics.jsonl").open("rb") as file:
            for record in self._records(file):
                place = (record["update"], int("valid_loss" in record))
                is_number = {k: isinstance(v, int | float) for k, v in record.items()}
                figures = {k: float(v) for k, v in record.items() if is_number[k] and k != "update"}
                if place > sent and figures:
                    tracker.write(place, figures)
                    sent = place
                    marked["sent"] = list(sent)
                    if tracker.is_durable:
                        self._mark(marked)
                    if place[1] and self._num_sentences:
                        self._show(tracker, marked)
        if self._num_sentences:
            self._show(tracker, marked)  # of what was not written yet at its validation
        tracker.close()
        self._mark(marked)

    def _show(self, tracker: Tracker, marked: dict[str, Any]) -> None:
        try:
            pictures = draw_checkpoints(self._run_dir, self._num_sentences)
        except NmtError as error:  # the figures go on
            self._warn(error)
            self._num_sentences, self._has_failed = 0, True
            return
        for picture in [p for p in pictures if p.update > marked["shown"]]:
            tracker.show(picture)
        marked["shown"] = max([marked["shown"], *(picture.update for picture in pictures)])

    def _mark(self, marked: dict[str, Any]) -> None:
        temporary = self._marker.with_suffix(".tmp")
        write_json(temporary, marked)
        os.replace(temporary, self._marker)

    def _records(self, file: Any) -> Iterator[dict[str, Any]]:
        """Yield the records in the file, and those that are added, until `close` is called."""
        rest = b""
        while True:
            is_last = self._is_closing.is_set()
            self._wake.clear()
            *lines, rest = (rest + file.read()).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # one that a full disk cut
                    yield parse_record(line)
            if is_last:
                return
            self._wake.wait()


def draw_checkpoints(run_dir: Path, num_sentences: int) -> list[TrackedPicture]:
    """Return the pictures of a run's checkpoints, by update; those that are missing are drawn by
    `nmt-visualize what=checkpoints` in a process of its own, so that they do not slow a run.
    """
    settings = [f"run_dir={run_dir}", f"num_sentences={num_sentences}", "num_threads=1"]
    line = [sys.executable, "-m", "nmt", "visualize", "what=checkpoints", "device=cpu", *settings]
    with _DRAWING:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise NmtError(done.stderr.strip().rpartition("\n")[2])
    found = []
    for path in sorted((run_dir / "pictures").glob("update-*.png")):
        _, update, number = path.stem.split("-")
        found.append(TrackedPicture(int(update), f"attention-{number}", path))
    return found


def _read_settings(run_dir: Path) -> dict[str, Any]:
    """Return the settings of a run by flat names, and the commit of the code if git knows it."""
    with contextlib.suppress(OSError):
        return {**_flat(read_config(run_dir), ""), "commit": _commit()}
    return {}


def _flat(tree: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    return {k: v for key, part in tree.items() for k, v in _flat(part, f"{prefix}{key}.").items()}


@functools.cache
def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(git, capture_output=True, text=True, timeout=5).stdout.strip()
    return ""
