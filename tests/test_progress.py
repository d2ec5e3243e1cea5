"""The progress of a long job, on a terminal and in a log."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import sys
import termios
import time

import pytest

from nmt.runtime import progress
from nmt.runtime.progress import Progress


@pytest.fixture(autouse=True)
def _log_all(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_INTERVAL_SECONDS", 0.0)


def test_without_a_terminal_lines_have_count_speed_and_remaining_time(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [
        ({"total": 200}, "job: 50 of 200 lines, 25.0 lines/s, 0:00:06 left"),
        ({"total_bytes": 2000}, "job: 50 of about 400 lines, 25.0 lines/s, 0:00:14 left"),
        ({}, "job: 50 lines, 25.0 lines/s"),
    ]
    seconds = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    for size, line in cases:
        with Progress("job", "lines", **size) as bar:
            seconds += 2.0
            bar.update(50, read_bytes=250)
            bar.finish()
        assert caplog.messages[-2:] == [line, "job: 50 lines in 0:00:02, 25.0 lines/s"], size
    job = Progress("encode", "pairs", total_bytes=40_000, done=10_000)  # by an earlier process
    seconds += 5.0
    job.update(5000, read_bytes=15_000, text_bytes=10_000_000)
    line = "encode: 15,000 of about 40,000 pairs, 1,000.0 pairs/s, 2.0 MB/s, 0:00:25 left"
    assert caplog.messages[-1] == line
    seconds += 3600.0
    job.finish()
    assert caplog.messages[-1] == "encode: 15,000 pairs in 1:00:05, 1.4 pairs/s, 0.0 MB/s"
    assert len(caplog.messages) == 2 * len(cases) + 2
    assert capsys.readouterr() == ("", "")


def test_a_line_comes_when_enough_time_has_passed_and_with_each_new_figure(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_SECONDS", 30.0)
    seconds = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    job = Progress("train", "updates", total=100)
    for _ in range(50):
        seconds += 1.0
        job.update()
    job.show("loss 2.5")
    job.note("validated")
    seconds += 29.0
    job.update()
    assert caplog.messages == [
        "train: 30 of 100 updates, 1.0 updates/s, 0:01:10 left",
        "train: 50 of 100 updates, 1.0 updates/s, loss 2.5, 0:00:50 left",
        "validated",
    ]
    seconds += 1.0
    job.update()
    assert "52 of 100 updates, 0.7 updates/s, loss 2.5" in caplog.messages[-1]


def test_a_terminal_shows_a_bar_with_notes_above_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = {}
    for has_bar in (True, False):
        reader, writer = os.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        with open(writer, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            with Progress("train", "updates", total=40, done=10, has_bar=has_bar) as bar:
                bar.show("loss 2.5")
                bar.update(10)
                bar.note("saved")
            terminal.write("END")
            terminal.flush()
            content = b""
            while not content.endswith(b"END"):  # a read may return less
                content += os.read(reader, 1 << 16)
        os.close(reader)
        outputs[has_bar] = content.decode()
        assert has_bar is not bool(caplog.messages)
    lines = re.split(r"[\r\n]+", outputs[True])
    assert re.match(r"train:\s+25%\|.*\| 10/40 \[", lines[1])
    assert re.match(r"train:\s+50%\|.*\| 20/40 \[.* updates/s, loss 2.5\]", lines[-2])
    assert re.search(r"[\r\n]saved\r?\n", outputs[True])
    assert outputs[False] == "END"
    assert "train: 20 of 40 updates" in "".join(caplog.messages)
