"""SIGTERM and SIGUSR1, by which schedulers announce the end: noted, and obeyed after the update."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether the process was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Be the handler of a signal; later ones change nothing."""
        self.signal = self.signal or signal.Signals(number)


@contextlib.contextmanager
def listen() -> Iterator[StopRequest]:
    """Note the signals that come during the block, in the main thread."""
    request = StopRequest()
    before = {number: signal.signal(number, request.note) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
