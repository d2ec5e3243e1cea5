"""Trackers: each library's own files hold what metrics.jsonl holds, after kills too, and none can
slow or stop a run.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import sqlite3
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import train_and_die
from ranks import child
from serving import eventually
from toy import call_before, command, read_records, read_values, train

from nmt.config import TrackerName
from nmt.errors import EXIT_DONE, EXIT_USER
from nmt.training import trackers
from nmt.training.trackers import RunInfo, TrackerThread

Point = tuple[int, str, float]  # update, name, value
CONFIG = "seed: 1\nmodel:\n  d_model: 16\n"


def records(last_update: int) -> list[dict[str, Any]]:
    """Return lines as a run writes them, with validations and events among them."""
    lines: list[dict[str, Any]] = []
    for update in range(2, last_update + 1, 2):
        lines.append({"update": update, "loss": 9.0 / update, "learning_rate": update * 1e-4})
        if update % 4 == 0:
            lines.append({"update": update, "valid_loss": 8.0 / update, "valid_bleu": 3.0 * update})
            lines.append({"update": update, "event": "loss spike", "batch": "lines 1 to 3"})
    return lines


def points(lines: list[dict[str, Any]]) -> list[Point]:
    figures = []
    for line in lines:
        for name, value in line.items():
            if name not in ("update", "event", "batch"):
                figures.append((line["update"], name, pytest.approx(value, rel=1e-6)))
    return sorted(figures)


def read_tensorboard(run_dir: Path) -> list[Point]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run_dir / "tensorboard"))
    board.Reload()
    points_read = []
    for name in board.Tags()["scalars"]:
        for event in board.Scalars(name):
            points_read.append((event.step, name, event.value))
    return sorted(points_read)


def read_mlflow(run_dir: Path) -> list[Point]:
    [metrics] = (run_dir / "mlflow").glob("*/*/metrics")  # of one run
    points_read = []
    for path in metrics.iterdir():
        for line in path.read_text().splitlines():
            _, value, step = line.split()
            points_read.append((int(step), path.name, float(value)))
    return sorted(points_read)


def read_trackio(run_dir: Path) -> list[Point]:
    with sqlite3.connect(run_dir / "trackio" / "nmt.db") as connection:
        [(num_runs,)] = connection.execute("select count(distinct run_name) from metrics")
        rows = list(connection.execute("select step, metrics from metrics"))
    assert num_runs == 1
    points_read = []
    for step, text in rows:
        for name, value in json.loads(text).items():
            points_read.append((step, name, value))
    return sorted(points_read)


def read_wandb(run_dir: Path) -> list[Point]:
    from wandb.proto import wandb_internal_pb2 as protocol

    points_read = []
    ids = set()
    for path in (run_dir / "wandb").glob("offline-run-*/*.wandb"):
        for content in leveldb_records(path.read_bytes()):
            record = protocol.Record()
            record.ParseFromString(content)
            ids |= {record.run.run_id} - {""}
            row = {}
            for item in record.history.item:
                row[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            for name, value in row.items():
                if not name.startswith(("_", "update")):
                    points_read.append((row["update"], name, value))
    assert len(ids) <= 1
    return sorted(set(points_read))  # wandb drops repeated records of a step


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log of LevelDB's format, which begins with 7 bytes of wandb's own."""
    position = 7
    record = b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


READ: dict[str, Callable[[Path], list[Point]]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
    "wandb": read_wandb,
}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder whose trackers write into it, and to no network."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "run" / "trackio"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(CONFIG)
    return tmp_path / "run"


def write_lines(run_dir: Path, lines: list[dict[str, Any]], mode: str = "w") -> None:
    with (run_dir / "metrics.jsonl").open(mode) as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def sent(run_dir: Path, name: str) -> int:
    """Return the update of the newest line that was sent."""
    path = run_dir / "trackers" / f"{name}.json"
    return int(json.loads(path.read_text())["sent"]) // 2 if path.exists() else 0


def assert_holds(name: str, run_dir: Path, lines: list[dict[str, Any]]) -> None:
    """Compare; wandb's own process may still be writing."""
    until = time.monotonic() + 600 * (name == "wandb")
    while time.monotonic() < until and len(READ[name](run_dir)) < len(points(lines)):
        time.sleep(0.1)
    assert READ[name](run_dir) == points(lines), name


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)  # each needs a library of its own
def test_a_tracker_holds_each_line_once_whatever_was_killed(name: str, run_dir: Path) -> None:
    pytest.importorskip(name)
    lines = records(24)
    write_lines(run_dir, [])
    feed = TrackerThread(TrackerName(name), run_dir)
    for line in lines[:20]:  # while a run goes on
        write_lines(run_dir, [line], "a")
        feed.notify()
    with (run_dir / "metrics.jsonl").open("a") as file:  # a line that is being written
        half = json.dumps(lines[20])[:9]
        remainder = json.dumps(lines[20])[9:]
        file.write(half)
        file.flush()
        until = time.monotonic() + 600
        while sent(run_dir, name) < lines[19]["update"] and time.monotonic() < until:
            time.sleep(0.05)
        feed.notify()
        time.sleep(0.1)
        file.write(remainder + "\n")
    trackers.close_trackers([feed], 600)
    assert feed.is_complete
    assert_holds(name, run_dir, lines[:21])
    # a kill: the run goes on from update 8, and makes the lines after it again
    if name == "tensorboard":  # it orders its files by the second in which they are opened
        time.sleep(1.1)
    lines_before_kill = records(8)
    write_lines(run_dir, lines_before_kill)
    feed = TrackerThread(TrackerName(name), run_dir)
    write_lines(run_dir, lines[len(lines_before_kill) :], "a")
    trackers.close_trackers([feed], 600)
    assert_holds(name, run_dir, lines)
    if name != "wandb":  # which is marked when it is closed; a kill may come before the mark
        marker = run_dir / "trackers" / f"{name}.json"
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"sent": 8}))
    assert command("visualize", "what=upload", f"run_dir={run_dir}", f"tracker={name}") == EXIT_DONE
    assert_holds(name, run_dir, lines)


@pytest.mark.long
@pytest.mark.parametrize("name", READ)  # each needs a library of its own
def test_a_killed_and_resumed_run_is_one_run_without_doubled_steps(
    name: str, toy_data: Path, run_dir: Path
) -> None:
    pytest.importorskip(name)
    shutil.rmtree(run_dir)
    # in processes of their own: trackio reads its folder's name only when it is imported
    env = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(run_dir / "trackio")}
    small = ["valid_bleu=false", "max_updates=20", "log_every_updates=1", f"tracker={name}"]
    small += ["validate_every_updates=10"]
    log = run_dir.parent / "log"
    with child(log, train_and_die, "update", 15, "0", toy_data, run_dir, small, env=env) as process:
        assert process.wait() == -9, process.stderr
    with child(log, train, toy_data, run_dir, small, env=env) as process:
        assert process.wait() == 0, process.stderr
    assert read_values(run_dir, "loss") == [*range(1, 21)]
    expected_points = points(read_records(run_dir, "update"))
    for point, expected in zip(READ[name](run_dir), expected_points, strict=True):
        assert point[:2] == expected[:2]
        # 13 and 14 came twice, with the same figures at another speed
        is_speed = re.search("second|memory_bytes|utilisation", point[1])
        if not (is_speed and point[0] in (13, 14)):
            assert point == expected
    if name == "mlflow":
        [parameter] = (run_dir / "mlflow").glob("*/*/params/max_updates")
        assert parameter.read_text() == "20"


@pytest.mark.slow
def test_a_tracker_that_never_answers_costs_a_run_nothing(
    toy_data: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.3)
    spent: list[float] = []
    notify = TrackerThread.notify

    def timed(feed: TrackerThread) -> None:
        start = time.perf_counter()
        notify(feed)
        spent.append(time.perf_counter() - start)

    monkeypatch.setattr(TrackerThread, "notify", timed)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and says nothing
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        small = ["valid_bleu=false", "max_updates=12", "log_every_updates=1", "tracker=mlflow"]
        with caplog.at_level(logging.WARNING, "nmt"):
            start = time.monotonic()
            assert train(toy_data, run_dir, small) == EXIT_DONE
            seconds = time.monotonic() - start
    for thread in threading.enumerate():  # refused now, so it would warn in a later test
        if thread.name == "mlflow":
            thread.join(600)
            assert not thread.is_alive()
    assert len(spent) >= 12
    assert statistics.median(spent) < 0.01 * seconds / len(spent)
    assert len(read_records(run_dir, "loss")) == 12


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, float]]]:
    """The positions and metrics in a tracker in memory, in place of TensorBoard and MLflow."""
    records_in_memory: list[tuple[int, dict[str, float]]] = []

    class Memory:
        is_durable = True

        def __init__(self, run: RunInfo) -> None:
            """Open the tracker; all runs are one."""

        def newest_position(self) -> int:
            return records_in_memory[-1][0] if records_in_memory else 0

        def write(self, position: int, metrics: dict[str, float]) -> None:
            records_in_memory.append((position, metrics))

        def close(self) -> None:
            """Do nothing: nothing is buffered."""

    for name in (TrackerName.tensorboard, TrackerName.mlflow):
        monkeypatch.setitem(trackers._TRACKERS, name, Memory)
    return records_in_memory


def test_each_record_is_sent_once_whatever_the_marker_and_the_tracker_hold(
    run_dir: Path, stored: list[tuple[int, dict[str, float]]]
) -> None:
    lines = records(8)
    expected = []
    for line in lines:
        metrics = {name: line[name] for name in line if name not in ("update", "event", "batch")}
        if metrics:
            expected.append((2 * line["update"] + ("valid_loss" in line), metrics))
    marker_path = run_dir / "trackers" / "tensorboard.json"
    write_lines(run_dir, lines)
    # all is new; the process was killed before the marker was written; the tracker lost records
    for num_stored, marked_position in ((0, 0), (4, 0), (3, 99)):
        del stored[num_stored:]
        if num_stored:
            marker = json.loads(marker_path.read_text()) | {"sent": marked_position}
            marker_path.write_text(json.dumps(marker))
        feed = TrackerThread(TrackerName.tensorboard, run_dir)
        trackers.close_trackers([feed], 600)
        assert feed.is_complete, num_stored
        assert stored == expected, num_stored
        assert json.loads(marker_path.read_text())["sent"] == expected[-1][0], num_stored


def test_a_line_that_is_being_written_is_sent_when_it_is_complete(
    run_dir: Path, stored: list[tuple[int, dict[str, float]]]
) -> None:
    lines = records(2)
    write_lines(run_dir, [*lines, {"update": 3, "loss": 1.5}])
    content = (run_dir / "metrics.jsonl").read_bytes()
    (run_dir / "metrics.jsonl").write_bytes(content[:-9])
    feed = TrackerThread(TrackerName.tensorboard, run_dir)
    eventually(lambda: len(stored) == 1)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(content[-9:])
    trackers.close_trackers([feed], 600)
    assert [position for position, _ in stored] == [4, 6]


@pytest.mark.usefixtures("stored")
def test_the_end_of_a_run_reaches_all_trackers(run_dir: Path) -> None:
    write_lines(run_dir, records(4))
    names = (TrackerName.tensorboard, TrackerName.mlflow)
    threads = [TrackerThread(name, run_dir) for name in names]
    trackers.close_trackers(threads, 120)
    assert [thread.is_complete for thread in threads] == [True, True]


def test_trackers_are_closed_at_the_same_time_and_the_log_names_those_waited_for(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    monkeypatch.setattr(TrackerThread, "_run", lambda self: release.wait(60))
    monkeypatch.setattr(trackers, "_QUIET_SECONDS", 0.1)
    names = [TrackerName.tensorboard, TrackerName.wandb, TrackerName.mlflow]
    threads = [TrackerThread(name, run_dir) for name in names]
    deadlines: list[float] = []
    call_before(
        monkeypatch, TrackerThread, "wait_closed", lambda _, deadline: deadlines.append(deadline)
    )
    with caplog.at_level(logging.INFO, "nmt"):
        trackers.close_trackers(threads, timeout_seconds=0.5)
    # and not 0.5 seconds each
    assert deadlines == pytest.approx([deadlines[0]] * 3 + [deadlines[0] + 0.4] * 3)
    assert "waiting up to 0.5 seconds for tensorboard, wandb, mlflow to take" in caplog.text
    assert caplog.text.count("no answer for 0.5 seconds") == 3
    assert "ends when wandb's own process has" in caplog.text
    release.set()
    caplog.clear()
    with caplog.at_level(logging.INFO, "nmt"):
        trackers.close_trackers(threads)
    assert not caplog.records


def test_a_tracker_notices_the_end_of_a_run_at_any_moment(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrackerThread, "_run", lambda self: None)
    feed = TrackerThread(TrackerName.mlflow, run_dir)

    class EndsAfterTheCheck(threading.Event):
        """Ends the run as soon as the thread has checked that it has not ended."""

        def is_set(self) -> bool:
            has_ended = super().is_set()
            feed.start_closing()
            return has_ended

    feed._is_closing = EndsAfterTheCheck()
    lines = records(4)
    write_lines(run_dir, lines)
    lines_read: list[dict[str, Any]] = []
    with (run_dir / "metrics.jsonl").open("rb") as file:
        reader = threading.Thread(
            target=lambda: lines_read.extend(feed._read_records(file)), daemon=True
        )
        reader.start()
        reader.join(10)
        assert not reader.is_alive()
    assert lines_read == lines


def test_wandb_writes_where_its_variable_says(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    write_lines(run_dir, records(4))
    trackers.close_trackers([TrackerThread(TrackerName.wandb, run_dir)], 60)
    assert list((tmp_path / "elsewhere" / "wandb").glob("offline-run-*"))
    assert not (run_dir / "wandb").exists()


@pytest.mark.slow
def test_a_tracker_that_fails_is_one_warning(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    write_lines(run_dir, records(8))
    with caplog.at_level(logging.WARNING, "nmt.training.trackers"):
        feed = TrackerThread(TrackerName.mlflow, run_dir)
        trackers.close_trackers([feed], 600)
    assert not feed.is_complete
    assert [r.name for r in caplog.records].count("nmt.training.trackers") == 1
    assert "tracker mlflow: " in caplog.text


def test_a_library_that_is_missing_is_named_at_once(
    toy_data: Path,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = trackers.importlib.util.find_spec
    hidden = lambda name: None if name in ("wandb", "tensorboard") else find(name)  # noqa: E731
    monkeypatch.setattr(trackers.importlib.util, "find_spec", hidden)
    assert train(toy_data, run_dir, "max_updates=2", "tracker=wandb") == EXIT_USER
    assert "tracker=wandb: install it with: pip install nmt[wandb]" in capsys.readouterr().err
    assert trackers.installed_trackers([TrackerName.tensorboard]) == []
