"""Which sentences go through the model together: token-bucket batches, grouped into updates.

The order is a pure function of (seed, epoch), so that a run can start again anywhere without
replay.
"""

# N pairs; lengths are in tokens and count EOS

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nmt.errors import ConfigError

Lengths = np.ndarray[Any, np.dtype[np.int32]]
Rows = np.ndarray[Any, np.dtype[np.int64]]


def batch_cost(lengths: Lengths) -> int:
    """Cost of rows with `lengths` (B, 2) as one batch: rows * longest side, padding included."""
    return len(lengths) * int(lengths.max())


def padding_share(lengths: Lengths, batches: list[Rows]) -> float:
    """Share of all source and target positions in `batches` that hold padding (0 to 1)."""
    real = sum(int(lengths[rows].sum()) for rows in batches)
    padded = sum(len(rows) * int(lengths[rows].max(axis=0).sum()) for rows in batches)
    return 1 - real / padded


def bucket(lengths: Lengths, max_tokens: int, order: Rows) -> list[Rows]:
    """Cut the pairs into batches of similar length, each of at most `max_tokens` by `batch_cost`.

    `order` (N,) breaks ties between pairs of the same lengths.
    """
    longest = lengths.max(axis=1)
    keys = (lengths[order, 0], lengths[order, 1], longest[order])
    rows = order[np.lexsort(keys)]  # by longest side, then target, then source
    batches = []
    start = 0
    while start < len(rows):
        most = max_tokens // int(longest[rows[start]])  # no batch from here can have more rows
        costs = np.arange(1, most + 1)[: len(rows) - start] * longest[rows[start : start + most]]
        num_rows = int(np.searchsorted(costs, max_tokens, side="right"))
        batches.append(rows[start : start + num_rows])
        start += num_rows
    return batches


@dataclass(frozen=True)
class Update:
    """One update of the weights: the batches of this rank, and the size of the whole."""

    batches: list[Rows]  # of this rank; none when the update has fewer pairs than there are ranks
    num_tokens: int  # real target tokens over all ranks
    num_src_tokens: int  # real source tokens over all ranks


class TokenBatchSampler:
    """Plans the updates of every epoch for one rank.

    Args:
        lengths: source and target tokens of every pair (N, 2).
        max_tokens: bound on `batch_cost` of one batch.
        tokens_per_update: real target tokens of one update over all ranks; its batches are
            accumulated.
        seed: of the order; the same on all ranks.
        rank: takes its part of the batches of each update.
        world_size: number of ranks. Which pairs form an update does not depend on it.
    """

    def __init__(
        self,
        lengths: Lengths,
        max_tokens: int,
        *,
        tokens_per_update: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        longest = int(lengths.max())
        if longest > max_tokens:
            raise ConfigError(
                f"max_tokens={max_tokens} is less than the longest sentence, {longest} tokens; "
                f"set max_tokens={longest} or more, or preprocess with a smaller max_length"
            )
        self.lengths = lengths
        self.max_tokens = min(max_tokens, max(longest, tokens_per_update))
        self.tokens_per_update = tokens_per_update
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._planned: tuple[int, list[Update]] | None = None  # the newest epoch's

    def updates(self, epoch: int) -> list[Update]:
        """Return the updates of an epoch, at least one and as many on every rank.

        Every pair comes once an epoch.
        """
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, self._plan(epoch)
        return self._planned[1]

    def _plan(self, epoch: int) -> list[Update]:
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(len(self.lengths))
        batches = bucket(self.lengths, self.max_tokens, order)
        batches = [batches[i] for i in generator.permutation(len(batches))]
        tokens = np.array([self.lengths[rows].sum(axis=0) for rows in batches])  # (batches, 2)
        cuts = self._group(tokens[:, 1])
        return [
            Update(
                self._share(batches[start:end]),
                num_tokens=int(tokens[start:end, 1].sum()),
                num_src_tokens=int(tokens[start:end, 0].sum()),
            )
            for start, end in zip(cuts[:-1], cuts[1:], strict=True)
        ]

    def _group(self, tokens: np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
        """Cut batches of `tokens` into updates as equal as can be; return where each starts, and
        the end.
        """
        total = int(tokens.sum())
        num_updates = min(max(1, round(total / self.tokens_per_update)), len(tokens))
        ends = np.cumsum(tokens)
        goals = total * np.arange(1, num_updates) / num_updates
        cuts = np.searchsorted(ends - tokens / 2, goals)  # a batch belongs where its middle lies
        return [0, *sorted({int(cut) for cut in cuts} - {0, len(tokens)}), len(tokens)]

    def _share(self, batches: list[Rows]) -> list[Rows]:
        """Return this rank's part of an update: the batches laid in a line, by cost, and the line
        cut into `world_size` equal pieces.
        """
        if self.world_size == 1:
            return batches
        costs = [batch_cost(self.lengths[rows]) for rows in batches]
        ends = np.cumsum(costs)
        start = self._cut(batches, ends, self.rank)
        end = self._cut(batches, ends, self.rank + 1)
        pieces = [
            rows[start[1] if i == start[0] else 0 : end[1] if i == end[0] else len(rows)]
            for i, rows in enumerate(batches)
            if start[0] <= i <= end[0]
        ]
        return [rows for rows in pieces if len(rows)]

    def _cut(
        self, batches: list[Rows], ends: np.ndarray[Any, np.dtype[np.int64]], rank: int
    ) -> tuple[int, int]:
        """Return (batch, row) where the part of `rank` starts; a cut that would leave a sliver
        moves to the edge of the batch.
        """
        if rank == self.world_size:
            return len(batches), 0
        share = ends[-1] / self.world_size
        goal = rank * share
        batch = int(np.searchsorted(ends, goal, side="right"))
        num_rows = len(batches[batch])
        width = ends[batch] - (ends[batch - 1] if batch else 0)
        offset = goal - (ends[batch] - width)
        if offset < share / 8:
            return batch, 0
        if width - offset < share / 8:
            return batch + 1, 0
        return batch, round(num_rows * float(offset / width))
