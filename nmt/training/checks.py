"""Checks while a run goes on: losses that are not finite, loss spikes, and signals to stop."""

from __future__ import annotations

import contextlib
import math
import signal
from collections import deque
from collections.abc import Iterator
from statistics import fmean, stdev
from types import FrameType

import numpy as np

from nmt.data import Rows
from nmt.errors import first_of

_NUM_COMPARED = 100  # losses before, which a loss is compared with
_NUM_DEVIATIONS = 6.0  # a spike is this many standard deviations above their mean, and at least
_MIN_EXCESS = 0.1  # this share of the mean, since a smooth curve hardly deviates
_NUM_LISTED = 20  # pair numbers in a message


def describe_batches(batches: list[tuple[Rows, float]]) -> str:
    """Name the pairs of all batches without a finite loss, else of the batch with the highest.

    Each batch is given as its rows and its loss in nats per target token.
    """
    suspects = [(rows, loss) for rows, loss in batches if not math.isfinite(loss)]
    if not suspects:
        suspects = [max(batches, key=lambda batch: batch[1])]
    pairs = np.concatenate([rows for rows, _ in suspects]).tolist()
    listed = first_of(pairs, _NUM_LISTED)
    return f"loss {suspects[0][1]:.4g} for pairs {listed} of the training set, from 0"


class SpikeDetector:
    """Detects losses far above the losses before them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_NUM_COMPARED)

    def is_spike(self, loss: float) -> bool:
        """Judge the loss of an update, in nats per token, and remember it."""
        previous = list(self._losses)
        self._losses.append(loss)
        if len(previous) < _NUM_COMPARED:
            return False
        mean = fmean(previous)
        return loss > mean + max(_NUM_DEVIATIONS * stdev(previous), _MIN_EXCESS * mean)


@contextlib.contextmanager
def stop_signals() -> Iterator[list[signal.Signals]]:
    """Yield a list to which SIGTERM and SIGUSR1 are added during the block, in the main thread.

    Schedulers announce the end with them; the run stops after the current update.
    """
    received: list[signal.Signals] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    numbers = {signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)}  # Windows has SIGTERM
    previous = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
