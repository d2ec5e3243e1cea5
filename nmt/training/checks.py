"""Watch a run: describe batches with bad losses, detect loss spikes, and receive stop signals."""

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
from nmt.errors import list_first

_NUM_PREVIOUS = 100  # the loss of an update is compared with this number of losses before it
# A spike exceeds the mean of the previous losses by both of these limits. The second one matters if
# losses hardly change, so that their standard deviation is very small.
_MIN_DEVIATIONS = 6.0  # standard deviations
_MIN_MEAN_SHARE = 0.1  # share of the mean
_MAX_LISTED_PAIRS = 20


def describe_batches(batches: list[tuple[Rows, float]]) -> str:
    """Describe the batches that may have caused a bad loss, by their loss and their pairs.

    `batches` holds the rows of each batch and its loss in nats per target token. If losses are not
    finite, describes all batches with such losses, and gives the first one. Otherwise describes the
    batch with the highest loss.
    """
    suspects = [(rows, loss) for rows, loss in batches if not math.isfinite(loss)]
    if not suspects:
        suspects = [max(batches, key=lambda batch: batch[1])]
    pairs = np.concatenate([rows for rows, _ in suspects]).tolist()
    listed_pairs = list_first(pairs, _MAX_LISTED_PAIRS)
    _, first_loss = suspects[0]
    return f"loss {first_loss:.4g} for pairs {listed_pairs} of the training set, from 0"


class SpikeDetector:
    """Detects losses that are far above the previous ones."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_NUM_PREVIOUS)

    def is_spike(self, loss: float) -> bool:
        """Return whether the loss of an update, in nats per token, is a spike; remember the loss.

        The first losses are never spikes.
        """
        previous_losses = list(self._losses)
        self._losses.append(loss)
        if len(previous_losses) < _NUM_PREVIOUS:
            return False
        mean = fmean(previous_losses)
        min_excess = max(_MIN_DEVIATIONS * stdev(previous_losses), _MIN_MEAN_SHARE * mean)
        return loss > mean + min_excess


@contextlib.contextmanager
def stop_signals() -> Iterator[list[signal.Signals]]:
    """Receive SIGTERM and SIGUSR1 during the block: yield a list to which they are appended.

    Job schedulers send them before they kill a process. Works only in the main thread.
    """
    received: list[signal.Signals] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    stop_numbers = {signal.SIGTERM}
    if hasattr(signal, "SIGUSR1"):  # not on Windows
        stop_numbers.add(signal.SIGUSR1)
    previous_handlers = {number: signal.signal(number, receive) for number in stop_numbers}
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
