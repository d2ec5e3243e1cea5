"""The number of threads follows the cores that are idle, unless the user chose."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from toy import train

from nmt.runtime import cores


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_threads_are_the_idle_cores_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_seconds = 0.0
    num_idle = 0.0

    def sleep(seconds: float) -> None:
        nonlocal clock_seconds
        clock_seconds += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock_seconds)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(cores, "read_idle_seconds", lambda: num_idle * clock_seconds)
    for num_idle, max_threads, expected in (
        (2.0, 2, 2),
        (1.6, 2, 2),
        (1.4, 2, 1),
        (0.0, 2, 1),
        (8.0, 4, 4),
        (3.0, 4, 3),
    ):
        assert cores.choose_num_threads(max_threads) == expected, (num_idle, max_threads)
    num_idle = 0.0
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert cores.choose_num_threads(2) == 2  # torch reads the variable


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_a_resumed_run_uses_the_number_of_threads_of_the_environment(
    toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "read_idle_seconds", lambda: 2 * time.monotonic())
    once = ["max_updates=1", "valid_bleu=false"]
    for variable, num_threads, expected in ((None, 2, 2), (None, 1, 2), ("1", 1, 1)):
        if variable is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", variable)
        torch.set_num_threads(num_threads)
        try:
            assert train(toy_data, tmp_path, once, "num_threads=0") == 0
            assert torch.get_num_threads() == expected, (variable, num_threads)
        finally:
            torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/stat")
def test_a_busy_process_occupies_a_core() -> None:
    start_seconds = time.monotonic()
    start_idle_seconds = cores.read_idle_seconds()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.5)
        process.kill()
    idle_seconds = cores.read_idle_seconds() - start_idle_seconds
    elapsed_seconds = time.monotonic() - start_seconds
    num_cores = len(os.sched_getaffinity(0))
    # Linux may also count down the time of waiting for I/O, see proc(5)
    assert -0.4 * elapsed_seconds <= idle_seconds <= (num_cores - 0.4) * elapsed_seconds
