"""The number of threads follows the cores that are free, unless the user chose."""

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


def test_threads_are_the_free_cores_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for idle, own, expected in ((20, 0, 2), (0, 10, 1), (10, 10, 2), (0, 3, 1), (4, 10, 1),
                                (6, 10, 2), (0, 0, 1), (80, 0, 4)):  # fmt: skip
        now = (10.0, float(idle), float(own))
        monkeypatch.setattr(cores, "_START", (0.0, 0.0, 0.0))
        monkeypatch.setattr(cores, "_sample", lambda now=now: now)
        most = 4 if expected == 4 else 2
        assert cores.choose_threads(most) == expected, (idle, own)
    monkeypatch.setattr(cores, "_START", (9.8, 0.0, 0.0))
    assert cores.choose_threads(2) == 2  # too short a time
    monkeypatch.setattr(cores, "_START", None)
    assert cores.choose_threads(2) == 2
    monkeypatch.setattr(cores, "_START", (0.0, 0.0, 0.0))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert cores.choose_threads(2) == 2  # which torch knows


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_a_resumed_run_takes_the_threads_that_the_environment_names(
    toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, before, after in ((None, 2, 2), (None, 1, 2), ("1", 1, 1)):
        monkeypatch.setattr(cores, "_START", None)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        torch.set_num_threads(before)
        try:
            assert train(toy_data, tmp_path, "num_threads=0", "max_updates=1") == 0
            assert torch.get_num_threads() == after, (given, before)
        finally:
            torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/stat")
def test_a_busy_process_takes_a_core_from_what_is_free() -> None:
    before, start = cores._sample(), time.monotonic()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.5)
        process.kill()
    elapsed, idle, own = (b - a for a, b in zip(before, cores._sample(), strict=True))
    assert elapsed == pytest.approx(time.monotonic() - start, abs=0.1)
    assert 0 <= idle <= (len(os.sched_getaffinity(0)) - 0.4) * elapsed
    assert 0 <= own < 0.2
