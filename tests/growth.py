"""How the time of a function grows with the size of its input."""

from __future__ import annotations

import time
from collections.abc import Callable


def assert_linear_time(
    work: Callable[[int], object], size: int, case: object = "", *, slack_seconds: float = 0.05
) -> None:
    """Check that the time of `work(n)` grows as n does, and not as its square.

    Times are CPU times of this thread. They are measured again if they are too long, since other
    processes and the collection of garbage may slow a measurement.
    """
    for _ in range(5):
        seconds_small = measure_seconds(work, size // 8)
        seconds = measure_seconds(work, size)
        if seconds < 24 * seconds_small + slack_seconds:  # 64 times if it were the square
            return
    raise AssertionError((case, seconds_small, seconds))


def measure_seconds(work: Callable[[int], object], size: int) -> float:
    """Return the CPU time of a call."""
    start = time.thread_time()
    work(size)
    return time.thread_time() - start
