"""Counts of whole numbers, kept as two short arrays: code points and lengths are counted with it.

It knows nothing of text.
"""

# K different keys

from __future__ import annotations

from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Tally:
    """How often each of some whole numbers (not negative) came; `keys` (K,) rise."""

    def __init__(self, keys: Ints | None = None, counts: Ints | None = None) -> None:
        self.keys: Ints = np.zeros(0, np.int64) if keys is None else keys
        self.counts: Ints = np.zeros(0, np.int64) if counts is None else counts

    @classmethod
    def of(cls, values: Ints) -> Tally:
        """Count `values`, of any shape."""
        keys, counts = np.unique(values, return_counts=True)
        return cls(keys.astype(np.int64), counts.astype(np.int64))

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return int(self.counts.sum())

    def add(self, other: Tally) -> None:
        """Add the counts of `other`."""
        both = np.concatenate([self.keys, other.keys])
        keys, places = np.unique(both, return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, places, np.concatenate([self.counts, other.counts]))
        self.keys, self.counts = keys, counts

    def to_json(self) -> list[list[int]]:
        """Return keys and counts as lists."""
        return [self.keys.tolist(), self.counts.tolist()]

    @classmethod
    def from_json(cls, content: list[list[int]]) -> Tally:
        """Read what `to_json` returned."""
        return cls(*(np.array(part, np.int64) for part in content))
