"""Functions of workers, for the tests of the pool. Each worker imports this small module."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from nmt.errors import DataError


def sleeper() -> Callable[[float], float]:
    """Return a function that sleeps for the seconds it gets."""
    return _sleep


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def refuser() -> Callable[[int], int]:
    """Return a function that refuses 3, fails at 5, and ends its process at negative numbers."""
    return _refuse


def _refuse(number: int) -> int:
    if number == 3:
        raise DataError("3 is no good")
    if number == 5:
        raise ValueError("a bug")
    if number < 0:
        os.kill(os.getpid(), -number)
    return number
