"""Watches the health of a run: what is not finite never reaches the weights, and what is far off is
logged with its sentences.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from nmt.data import Rows
from nmt.errors import NmtError

_WINDOW = 100  # updates that a loss is compared with
_SPIKE = 6.0  # standard deviations above their mean, and
_SPIKE_SHARE = 0.1  # this share of the mean, since a smooth curve deviates by next to nothing
_SHOWN = 20  # pair numbers in a message


@dataclass(frozen=True)
class BatchLoss:
    """What one batch of an update came to."""

    rows: Rows
    loss: float  # nats a target token

    @property
    def is_finite(self) -> bool:
        """Whether the loss is a number."""
        return math.isfinite(self.loss)


def describe_batches(batches: list[BatchLoss]) -> str:
    """Name the pairs to blame: of all batches without a finite loss, else of the highest one."""
    guilty = [b for b in batches if not b.is_finite] or [max(batches, key=lambda b: b.loss)]
    rows = np.concatenate([batch.rows for batch in guilty]).tolist()
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    numbers = ", ".join(map(str, rows[:_SHOWN]))
    return f"loss {guilty[0].loss:.4g} for pairs {numbers}{more} of the training set, from 0"


class SpikeDetector:
    """Says which losses stand far above those before them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Judge the loss of an update, in nats a token, and remember it."""
        spike = False
        if len(self._losses) == _WINDOW:
            mean = fmean(self._losses)
            spike = loss > mean + max(_SPIKE * stdev(self._losses), _SPIKE_SHARE * mean)
        self._losses.append(loss)
        return spike


def stop_after(num_bad: int, most: int, update: int, reason: str) -> None:
    """Raise an `NmtError` when `num_bad` updates in a row, of at most `most`, were not finite."""
    if num_bad >= most:
        raise NmtError(
            f"update {update}: {num_bad} times in a row the loss or the gradient was not finite; "
            f"last: {reason}. The weights are as after update {update - 1}; lower the learning "
            "rate, set optimizer.max_grad_norm=1, or use dtype=float32 or bfloat16"
        )
