"""Functions of workers, for the tests of the pool. Each worker imports this small module."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from nmt.errors import DataError


def sleeper() -> Callable[[float], float]:
    """Return a function that sleeps for the seconds it gets."""
    return _sleep


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


gate = threading.Event()
"""What the function of `waiter` waits for, in workers that are threads."""


def waiter() -> Callable[[int], int]:
    """Return a function that waits for `gate`, except for 0."""
    return _wait


def _wait(number: int) -> int:
    if number:
        gate.wait(600)
    return number


def refuser() -> Callable[[int], int]:
    """Return a function that refuses 3, fails at 5 and at 110 (the errno of ETIMEDOUT), and ends
    its process at negative numbers.
    """
    return _refuse


def _refuse(number: int) -> int:
    if number == 3:
        raise DataError("3 is no good")
    if number == 5:
        raise ValueError("a bug")
    if number == 110:
        raise TimeoutError(number, "the disk does not answer")
    if number < 0:
        os.kill(os.getpid(), -number)
    return number


def half_sender() -> Callable[[object], bytes]:
    """Return a function whose process is killed when half of the result is sent."""
    return die_while_sending


def die_while_sending(*_: object) -> bytes:
    """Return a result that kills this process when half of it is sent."""

    def send_half(connection: Connection, data: bytes) -> None:
        os.write(connection.fileno(), bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    Connection._send = send_half  # type: ignore[attr-defined]
    return b"result" * 100
