"""Foresees the batches and updates of an epoch from the counts of lengths alone, without the pairs.

Batches are those of nmt/data/batching.py to the pair, but for lengths of 256 tokens and more, which
are known by bin, and for epochs of millions of pairs, which are planned in pools. The order of
batches, which is another every epoch, decides a little over the number of updates.
"""

# K kinds of pairs, by source and target length

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nmt.preprocess.statistics import NUM_BINS, Statistics, bin_starts
from nmt.preprocess.tally import Ints, Tally

Shape = tuple[int, int, int]  # rows, source and target positions of a batch
_MOST_SHUFFLED = 1_000_000  # batches; those of more are planned in pools, where no cut is lost


@dataclass(frozen=True)
class LengthCounts:
    """Pairs by length: `lengths` (K, 2) in tokens, EOS included, and `counts` (K,)."""

    lengths: Ints
    counts: Ints

    @property
    def longest(self) -> int:
        """The tokens of the longest side of any pair."""
        return int(self.lengths.max())


@dataclass(frozen=True)
class EpochForecast:
    """An epoch of one process; a batch is at most as large as `max_tokens`."""

    num_pairs: int
    num_updates: int
    num_batches: int
    num_src_tokens: int
    num_tgt_tokens: int
    num_positions: int  # of both sides, padding included
    largest: Shape  # the batch of most positions
    widest: Shape  # the batch of most pairs of positions, which attention computes

    @property
    def padding_share(self) -> float:
        """Share of all positions that hold padding (0 to 1)."""
        return 1 - (self.num_src_tokens + self.num_tgt_tokens) / self.num_positions


def length_counts(parts: list[tuple[Statistics, float]]) -> LengthCounts:
    """Join the lengths of corpora, each with how often an epoch has each of its pairs."""
    total = Tally()
    for statistics, times in parts:
        sums = np.rint(np.cumsum(statistics.lengths.counts) * times)  # rounded sums add up
        total.add(Tally(statistics.lengths.keys, np.diff(sums, prepend=0).astype(np.int64)))
    keys = total.keys[total.counts > 0]
    starts = bin_starts()
    middles = (starts[:-1] + starts[1:] - 1) // 2
    lengths = np.stack([middles[keys // NUM_BINS], middles[keys % NUM_BINS]], axis=1)  # (K, 2)
    longest = [max((s.sides[side].longest for s, _ in parts), default=0) for side in (0, 1)]
    return LengthCounts(np.minimum(lengths, longest), total.counts[total.counts > 0])


def forecast_epoch(
    pairs: LengthCounts, *, max_tokens: int, tokens_per_update: int
) -> EpochForecast:
    """Plan as `TokenBatchSampler` does; no pair may be longer than `max_tokens`."""
    max_tokens = min(max_tokens, max(pairs.longest, tokens_per_update))
    batches = _Batches(max_tokens)
    longest = pairs.lengths.max(axis=1)
    for i in np.lexsort((pairs.lengths[:, 0], pairs.lengths[:, 1], longest)).tolist():
        batches.add(int(pairs.lengths[i, 0]), int(pairs.lengths[i, 1]), int(pairs.counts[i]))
    batches.close()
    src, tgt = (int(total) for total in pairs.counts @ pairs.lengths)
    return EpochForecast(
        num_pairs=int(pairs.counts.sum()),
        num_updates=batches.num_updates(tokens_per_update),
        num_batches=batches.number,
        num_src_tokens=src,
        num_tgt_tokens=tgt,
        num_positions=batches.num_positions,
        largest=batches.largest,
        widest=batches.widest,
    )


def _positions(batch: Shape) -> int:
    return batch[0] * (batch[1] + batch[2])


def _squares(batch: Shape) -> int:
    rows, src, tgt = batch
    return rows * (src * src + src * tgt + tgt * tgt)


class _Batches:
    """Fills batches with pairs that come in the order of their lengths."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.number = 0
        self.num_positions = 0
        self.largest: Shape = (0, 0, 0)
        self.widest: Shape = (0, 0, 0)
        self._open: Shape = (0, 0, 0)  # the batch being filled
        self._open_tokens = 0  # of its target, padding aside
        self._tokens: list[tuple[int, int]] = []  # of finished batches, and how many are alike

    def add(self, src: int, tgt: int, count: int) -> None:
        """Add `count` pairs of these lengths."""
        most = self.max_tokens // max(src, tgt)
        if self._open[0] >= most:
            self.close()
        if self._open[0] > 0:
            taken = min(most - self._open[0], count)
            self._extend(src, tgt, taken)
            count -= taken
        if self._open[0] == most:
            self.close()
        if count >= most:  # batches of nothing else, all at once
            self._extend(src, tgt, most)
            self.close(times=count // most)
            count %= most
        if count > 0:
            self._extend(src, tgt, count)

    def _extend(self, src: int, tgt: int, rows: int) -> None:
        old_rows, old_src, old_tgt = self._open
        self._open = old_rows + rows, max(old_src, src), max(old_tgt, tgt)
        self._open_tokens += rows * tgt

    def close(self, times: int = 1) -> None:
        """Finish the batch being filled, and more of the same shape."""
        rows, src, tgt = self._open
        if rows > 0:
            self.number += times
            self.num_positions += times * rows * (src + tgt)
            self.largest = max(self.largest, self._open, key=_positions)
            self.widest = max(self.widest, self._open, key=_squares)
            self._tokens.append((self._open_tokens, times))
        self._open, self._open_tokens = (0, 0, 0), 0

    def num_updates(self, tokens_per_update: int) -> int:
        """Count the updates that the batches make, in some order.

        Where batches are about as large as updates, two cuts fall on one place now and then.
        """
        total = sum(tokens * times for tokens, times in self._tokens)
        num_updates = min(max(1, round(total / tokens_per_update)), self.number)
        if self.number > _MOST_SHUFFLED:
            return num_updates
        tokens, times = (np.array(column, np.int64) for column in zip(*self._tokens, strict=True))
        shuffled = np.random.default_rng(0).permutation(np.repeat(tokens, times))  # (batches,)
        goals = total * np.arange(1, num_updates) / num_updates
        cuts = np.searchsorted(np.cumsum(shuffled) - shuffled / 2, goals)
        return len({int(cut) for cut in cuts} - {0, self.number}) + 1
