"""How many CPU cores other processes leave to this one, from Linux's /proc/stat.

OpenMP's threads wait for each other by spinning. When another process holds the core of one of
them, all others spin in vain, and training on two cores takes three times as long beside one busy
process. With a thread fewer it takes as long as that thread.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_LEAST_SECONDS = 0.3  # that are measured; the kernel counts in hundredths
_OWN = ("OMP_", "GOMP_", "KMP_", "MKL_")  # variables with which users choose


def _sample() -> tuple[float, float, float]:
    """Return the time, that of idle cores, and that which this process used, in seconds."""
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    rows = map(str.split, Path("/proc/stat").read_text(encoding="ascii").splitlines())
    ticks = sum(int(row[4]) + int(row[5]) for row in rows if row[0] in cores)  # idle and iowait
    idle_seconds: float = ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), idle_seconds, time.process_time()


try:
    _START: tuple[float, float, float] | None = _sample()
except (AttributeError, OSError, ValueError, IndexError):  # another system
    _START = None


def choose_threads(most: int) -> int:
    """Return a number of threads up to `most`: the cores that were free since this module was
    imported, rounded; `most` when that cannot be known, or when the environment of OpenMP is set.
    """
    if _START is None or any(name.startswith(_OWN) for name in os.environ):
        return most
    elapsed, idle, own = (now - then for now, then in zip(_sample(), _START, strict=True))
    if elapsed < _LEAST_SECONDS:
        return most
    return max(1, min(most, round((idle + own) / elapsed)))
