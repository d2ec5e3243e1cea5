"""Measure how many CPU cores other processes leave idle, from Linux's /proc/stat.

OpenMP threads spin while they wait for each other. If another process occupies the core of one
thread, all other threads wait for this thread. On two cores, one busy process makes training with
two threads three times slower, but does not slow down training with one thread.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_SAMPLE_SECONDS = 0.2  # long enough, since the kernel counts in hundredths of a second
_OPENMP_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_")  # these variables set numbers of threads


def choose_num_threads(max_threads: int) -> int:
    """Return the number of threads to use: one per idle core, at least 1, at most `max_threads`.

    Measures for a fifth of a second. Returns `max_threads` on systems other than Linux, and if a
    variable of OpenMP or MKL is set.
    """
    if max_threads == 1 or any(name.startswith(_OPENMP_PREFIXES) for name in os.environ):
        return max_threads
    try:
        start_time = time.monotonic()
        start_idle_seconds = read_idle_seconds()
        time.sleep(_SAMPLE_SECONDS)
        idle_seconds = read_idle_seconds() - start_idle_seconds
    except (AttributeError, OSError):  # not Linux: no affinity, or no /proc
        return max_threads
    elapsed_seconds = time.monotonic() - start_time
    num_idle = round(idle_seconds / elapsed_seconds)
    return max(1, min(max_threads, num_idle))


def read_idle_seconds() -> float:
    """Read the idle time since boot, summed over the cores that this process may use."""
    core_names = {f"cpu{index}" for index in os.sched_getaffinity(0)}
    idle_ticks = 0
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        fields = line.split()
        if fields[0] in core_names:
            idle_ticks += int(fields[4]) + int(fields[5])  # idle, and waiting for I/O
    return idle_ticks / os.sysconf("SC_CLK_TCK")
