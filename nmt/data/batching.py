"""Token-bucket batches of training pairs, grouped into updates.

The order of an epoch is a pure function of (seed, epoch, mix), so that a resumed run can start at
any update without replaying the earlier ones. Epochs of more than 5 million pairs are planned in
pools: each pool is planned like an epoch of its own when its first update is needed.
"""

# N pairs; lengths are in tokens and count EOS

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nmt.data import Lengths, Rows
from nmt.data.batch import batch_cost, bucket
from nmt.data.mixing import CorpusRange, Mix, make_mix
from nmt.errors import ConfigError

Ints = np.ndarray[Any, np.dtype[np.int64]]

_POOL_PAIRS = 5_000_000  # maximum number of pairs that are sorted together
_MAX_CACHED_POOLS = 2  # the thread that prepares updates may be one pool ahead of the training loop
_MIN_SLICE = 1 / 8  # of a rank's share: smaller slices of a batch are not cut off


@dataclass(frozen=True)
class Update:
    """One update of the weights: the batches of this rank, and the token counts of all ranks."""

    batches: list[Rows]  # of this rank; empty if the update has fewer pairs than there are ranks
    num_tokens: int  # non-padding target tokens over all ranks
    num_src_tokens: int  # non-padding source tokens over all ranks


class TokenBatchSampler:
    """Plans the updates of every epoch for one rank.

    Args:
        lengths: number of source and target tokens of every pair (N, 2).
        max_tokens: maximum `batch_cost` of one batch.
        tokens_per_update: target tokens of one update over all ranks, without padding; its batches
            are accumulated.
        seed: seed of the order; the same on all ranks.
        mix: the pairs that an epoch draws from each corpus; by default every pair once.
        rank: number of this process, from 0. It gets its share of the batches of each update.
        world_size: number of ranks. The pairs of an update do not depend on it.
    """

    def __init__(
        self,
        lengths: Lengths,
        max_tokens: int,
        *,
        tokens_per_update: int,
        seed: int,
        mix: Mix | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.lengths = lengths
        self.mix = mix or make_mix([CorpusRange("", 0, len(lengths), 1.0)], {})
        self._longest_rows = [_find_longest_row(lengths, corpus) for corpus in self.mix.drawn]
        self.longest = int(lengths[self._longest_rows].max())
        if self.longest > max_tokens:
            raise ConfigError(
                f"max_tokens={max_tokens} is less than the longest sentence, {self.longest} "
                f"tokens; set max_tokens={self.longest} or more, or preprocess with a smaller "
                "max_length"
            )
        self.max_tokens = min(max_tokens, max(self.longest, tokens_per_update))
        self.tokens_per_update = tokens_per_update
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._pools: dict[tuple[int, int], list[Update]] = {}  # by epoch and number of the pool

    def updates(self, epoch: int) -> Updates:
        """Return the updates of an epoch: at least one, and the same number on every rank."""
        return Updates(self, epoch)

    def rows_to_try(self) -> Rows:
        """Return a sample of the pairs that includes the longest ones, to try the largest batch."""
        return np.union1d(self.mix.sample(_POOL_PAIRS), self._longest_rows)

    def count_pools(self, epoch: int) -> int:
        """Return the number of pools in which an epoch is planned."""
        return -(-sum(self.mix.sizes(epoch)) // _POOL_PAIRS)

    def pool_starts(self, epoch: int) -> list[int]:
        """Return the index of the first update of each pool, and the number of updates.

        A single pool is planned for this. Of several pools none is planned: they have equal shares
        of every corpus, so that they make equally many updates of nearly equal size.
        """
        num_pools = self.count_pools(epoch)
        if num_pools == 1:
            return [0, len(self.pool(epoch, 0))]
        sizes = self.mix.sizes(epoch)
        num_tokens = 0.0  # target tokens of the epoch
        for corpus, size in zip(self.mix.corpora, sizes, strict=True):
            if size:
                num_tokens += size * float(self.lengths[corpus.start : corpus.end, 1].mean())
        max_updates = num_pools * sum(size // num_pools for size in sizes)  # of one pair each
        num_updates = min(round(num_tokens / self.tokens_per_update), max_updates)
        num_updates = max(num_pools, num_updates)
        return [num_updates * pool // num_pools for pool in range(num_pools + 1)]

    def pool(self, epoch: int, pool: int) -> list[Update]:
        """Return the updates of one pool of an epoch; the last two pools are cached."""
        updates = self._pools.get((epoch, pool))
        if updates is None:
            updates = self.plan_epoch(epoch, pool)
            while len(self._pools) >= _MAX_CACHED_POOLS:
                self._pools.pop(next(iter(self._pools)), None)
            self._pools[epoch, pool] = updates
        return updates

    def plan_epoch(self, epoch: int, pool: int = 0) -> list[Update]:
        """Plan all updates of an epoch, or of one pool of a large epoch."""
        num_pools = self.count_pools(epoch)
        generator = np.random.default_rng((self.seed, epoch, pool))
        rows = self.mix.rows(self.seed, epoch, pool, num_pools)
        batches = bucket(self.lengths, self.max_tokens, rows[generator.permutation(len(rows))])
        num_updates = 0
        if num_pools > 1:  # the number of updates was promised by `pool_starts`
            starts = self.pool_starts(epoch)
            num_updates = starts[pool + 1] - starts[pool]
            batches = _split_batches(batches, num_updates)
        batches = [batches[i] for i in generator.permutation(len(batches))]
        tokens = np.array([self.lengths[rows].sum(axis=0) for rows in batches])  # (batches, 2)
        if num_pools > 1:
            cuts = _group_exactly(tokens[:, 1], num_updates)
        else:
            cuts = _group_batches(tokens[:, 1], self.tokens_per_update)
        return [
            Update(
                self._select_share(batches[start:end]),
                num_tokens=int(tokens[start:end, 1].sum()),
                num_src_tokens=int(tokens[start:end, 0].sum()),
            )
            for start, end in itertools.pairwise(cuts)
        ]

    def _select_share(self, batches: list[Rows]) -> list[Rows]:
        """Return this rank's share of the batches of an update.

        The batches are laid end to end by cost, and the line is cut into `world_size` equal
        intervals. A cut that would leave a thin slice of a batch moves to the edge of the batch.
        """
        if self.world_size == 1:
            return batches
        costs = [batch_cost(self.lengths[rows]) for rows in batches]
        cost_starts = np.cumsum([0, *costs])  # where each batch starts in the line, and the end
        row_starts = np.cumsum([0, *map(len, batches)])  # the same, counted in rows
        share = cost_starts[-1] / self.world_size

        def first_row(rank: int) -> int:
            """Return the first row of a rank, counted over all batches."""
            if rank == self.world_size:
                return int(row_starts[-1])
            start = rank * share
            index = int(np.searchsorted(cost_starts, start, side="right"))
            batch = min(index, len(batches)) - 1
            offset = start - cost_starts[batch]
            if offset < share * _MIN_SLICE:
                return int(row_starts[batch])
            if costs[batch] - offset < share * _MIN_SLICE:
                return int(row_starts[batch + 1])
            return int(row_starts[batch]) + round(
                len(batches[batch]) * float(offset / costs[batch])
            )

        start = first_row(self.rank)
        end = first_row(self.rank + 1)
        slices = []
        for row_start, rows in zip(row_starts[:-1], batches, strict=True):
            selected = rows[max(start - row_start, 0) : max(end - row_start, 0)]
            if len(selected):
                slices.append(selected)
        return slices


class Updates(Sequence[Update]):
    """The updates of one epoch. A pool is planned when one of its updates is read."""

    def __init__(self, sampler: TokenBatchSampler, epoch: int) -> None:
        self._sampler = sampler
        self._epoch = epoch
        self._starts = sampler.pool_starts(epoch)
        self.num_pairs = sum(sampler.mix.sizes(epoch))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Update:  # type: ignore[override]  # no slices
        index = range(len(self))[index]
        pool = bisect_right(self._starts, index) - 1
        return self._sampler.pool(self._epoch, pool)[index - self._starts[pool]]

    def pool_of(self, index: int) -> list[Update]:
        """Return the updates of the pool that contains update `index`; in a small epoch, all."""
        return self._sampler.pool(self._epoch, bisect_right(self._starts, index) - 1)


def _find_longest_row(lengths: Lengths, corpus: CorpusRange) -> int:
    """Return the pair of a corpus with the longest side."""
    return corpus.start + int(lengths[corpus.start : corpus.end].max(axis=1).argmax())


def _split_batches(batches: list[Rows], num_updates: int) -> list[Rows]:
    """Halve all batches until there is one for every update; there are enough pairs."""
    while len(batches) < num_updates:
        halves = []
        for rows in batches:
            halves += np.array_split(rows, 2)
        batches = [rows for rows in halves if len(rows)]
    return batches


def _group_batches(tokens: Ints, tokens_per_update: int) -> list[int]:
    """Return the first batch of each update, and the number of batches.

    `tokens` are the target tokens of each batch. Updates are as equal as possible. A batch belongs
    to the update that contains its middle.
    """
    num_updates = max(1, round(int(tokens.sum()) / tokens_per_update))
    cuts = _cut_at_middles(tokens, min(num_updates, len(tokens)))
    return [0, *sorted(set(cuts.tolist()) - {0, len(tokens)}), len(tokens)]


def _group_exactly(tokens: Ints, num_updates: int) -> list[int]:
    """Like `_group_batches`, with exactly `num_updates` updates of at least one batch each."""
    numbers = np.arange(1, num_updates)
    cuts = _cut_at_middles(tokens, num_updates)
    cuts = np.maximum.accumulate(cuts - numbers) + numbers
    cuts = np.clip(cuts, numbers, len(tokens) - numbers[::-1])
    return [0, *cuts.tolist(), len(tokens)]


def _cut_at_middles(tokens: Ints, num_updates: int) -> Ints:
    """Return the first batch of every update but the first, (num_updates - 1,)."""
    middles = np.cumsum(tokens) - tokens / 2
    ends = tokens.sum() * np.arange(1, num_updates) / num_updates
    cuts: Ints = np.searchsorted(middles, ends)
    return cuts
