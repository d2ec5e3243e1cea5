"""Plan the batches and the updates of every epoch of training.

The order of an epoch is a pure function of (seed, epoch, mix), so that a resumed run can start at
any update without replaying the earlier ones. An epoch of more than 5 million pairs is divided into
equal pools. Each pool is planned when its first update is needed.
"""

# N pairs; lengths are in tokens and count EOS. A row is the index of a pair in `lengths`, and a
# batch is an array of rows.

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nmt.data import Lengths, Rows
from nmt.data.batch import batch_cost, bucket_by_length
from nmt.data.mixing import CorpusRange, Mix, make_mix
from nmt.errors import ConfigError

Ints = np.ndarray[Any, np.dtype[np.int64]]

_POOL_PAIRS = 5_000_000  # maximum number of pairs that are sorted together
_MAX_CACHED_POOLS = 2  # the thread that prepares updates may be one pool ahead of the training loop
# A batch may be cut between two ranks. Each slice has at least this fraction of the cost of a rank
# in the update.
_MIN_SLICE_FRACTION = 1 / 8


@dataclass(frozen=True)
class UpdatePlan:
    """One update of the weights: the batches of this rank, and the token counts of all ranks."""

    batches: list[Rows]  # this rank's batches; can be empty if there are fewer pairs than ranks
    num_tokens: int  # number of non-padding target tokens over all ranks
    num_src_tokens: int  # number of non-padding source tokens over all ranks


class TokenBatchSampler:
    """Plans the updates of every epoch for one rank.

    Args:
        lengths: number of source and target tokens of every pair (N, 2).
        max_tokens: maximum `batch_cost` of one batch. If None, an update may be a single batch.
        tokens_per_update: target tokens of one update over all ranks, without padding. Gradients
            are accumulated over its batches.
        seed: seed of the order; the same on all ranks.
        mix: how many pairs an epoch draws from each corpus; by default every pair once.
        rank: index of this process, which gets its share of the batches of each update.
        world_size: number of ranks. The pairs of an update do not depend on it.
    """

    def __init__(
        self,
        lengths: Lengths,
        max_tokens: int | None,
        *,
        tokens_per_update: int,
        seed: int,
        mix: Mix | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.lengths = lengths
        if mix is None:
            all_pairs = CorpusRange(name="", start=0, num_pairs=len(lengths), weight=1.0)
            mix = make_mix([all_pairs], {})
        self.mix = mix
        self._longest_rows = [
            _find_longest_row(lengths, corpus) for corpus in self.mix.drawn_corpora
        ]
        self.max_length = int(lengths[self._longest_rows].max())
        # a batch is at most a whole update, and at least one pair
        max_useful_tokens = max(self.max_length, tokens_per_update)
        if max_tokens is None:
            max_tokens = max_useful_tokens
        if self.max_length > max_tokens:
            raise ConfigError(
                f"max_tokens={max_tokens} is less than the longest sentence, {self.max_length} "
                f"tokens; set max_tokens={self.max_length} or more, or preprocess with a smaller "
                "max_length"
            )
        self.max_tokens = min(max_tokens, max_useful_tokens)
        self.tokens_per_update = tokens_per_update
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._pools: dict[tuple[int, int], list[UpdatePlan]] = {}  # keyed by epoch and pool index

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """Return the updates of an epoch: at least one, and the same number on every rank."""
        return EpochPlan(self, epoch)

    def memory_test_rows(self) -> Rows:
        """Return the rows of a sample of pairs, to test whether its largest batch fits into memory.

        The sample has at most about 5 million pairs, and includes the longest pair of each corpus.
        """
        return np.union1d(self.mix.sample_rows(_POOL_PAIRS), self._longest_rows)

    def count_pools(self, epoch: int) -> int:
        """Return the number of pools in which an epoch is planned."""
        num_pairs = sum(self.mix.count_pairs(epoch))
        return math.ceil(num_pairs / _POOL_PAIRS)

    def pool_starts(self, epoch: int) -> list[int]:
        """Return the index of the first update of each pool, followed by the number of updates.

        If the epoch has one pool, its updates are planned and counted. Several pools are not
        planned here. Each has the same share of every corpus, so that the expected number of
        updates is divided evenly among them.
        """
        num_pools = self.count_pools(epoch)
        if num_pools == 1:
            return [0, len(self.get_pool_updates(epoch, 0))]
        num_tokens = 0.0  # expected number of target tokens of the epoch
        pairs_per_pool = 0
        for corpus, num_pairs in zip(self.mix.corpora, self.mix.count_pairs(epoch), strict=True):
            pairs_per_pool += num_pairs // num_pools
            if num_pairs:
                mean_length = float(self.lengths[corpus.start : corpus.end, 1].mean())
                num_tokens += num_pairs * mean_length
        num_updates = round(num_tokens / self.tokens_per_update)
        max_updates = num_pools * pairs_per_pool  # if each update has a single pair
        min_updates = num_pools  # if each pool has a single update
        num_updates = max(min(num_updates, max_updates), min_updates)
        return [num_updates * pool_index // num_pools for pool_index in range(num_pools + 1)]

    def get_pool_updates(self, epoch: int, pool_index: int) -> list[UpdatePlan]:
        """Return the updates of one pool of an epoch. The last two pools are cached."""
        updates = self._pools.get((epoch, pool_index))
        if updates is None:
            updates = self._plan_pool(epoch, pool_index)
            while len(self._pools) >= _MAX_CACHED_POOLS:
                oldest = next(iter(self._pools))  # a dictionary keeps the order of insertion
                # with None, no error is raised if another thread has just removed this pool
                self._pools.pop(oldest, None)
            self._pools[epoch, pool_index] = updates
        return updates

    def _plan_pool(self, epoch: int, pool_index: int) -> list[UpdatePlan]:
        """Plan the updates of one pool of an epoch, which may be its only pool."""
        num_pools = self.count_pools(epoch)
        rng = np.random.default_rng((self.seed, epoch, pool_index))
        rows = self.mix.draw_rows(self.seed, epoch, pool_index, num_pools)
        # `bucket_by_length` keeps pairs of equal length in this order, which is new in each epoch
        rows = rng.permutation(rows)
        batches = bucket_by_length(self.lengths, self.max_tokens, rows)
        fixed_num_updates = None
        if num_pools > 1:  # `pool_starts` has fixed the number of updates
            starts = self.pool_starts(epoch)
            fixed_num_updates = starts[pool_index + 1] - starts[pool_index]
            batches = _split_batches(batches, fixed_num_updates)
        batches = [batches[i] for i in rng.permutation(len(batches))]
        # the numbers of source and target tokens of each batch, (batches, 2)
        token_counts = np.array([self.lengths[batch].sum(axis=0) for batch in batches])
        if fixed_num_updates is None:
            bounds = _group_batches(token_counts[:, 1], self.tokens_per_update)
        else:
            bounds = _group_exactly(token_counts[:, 1], fixed_num_updates)
        updates = []
        for start, end in itertools.pairwise(bounds):
            update = UpdatePlan(
                batches=self._select_rank_batches(batches[start:end]),
                num_tokens=int(token_counts[start:end, 1].sum()),
                num_src_tokens=int(token_counts[start:end, 0].sum()),
            )
            updates.append(update)
        return updates

    def _select_rank_batches(self, batches: list[Rows]) -> list[Rows]:
        """Return the batches and slices of batches that this rank computes in an update.

        The batches are laid end to end on an axis, where the length of a batch is its cost. The
        axis is cut into `world_size` equal intervals, one for each rank. A cut close to the start
        or the end of a batch moves there, so that no slice is tiny.
        """
        if self.world_size == 1:
            return batches
        costs = [batch_cost(self.lengths[rows]) for rows in batches]
        sizes = [len(rows) for rows in batches]
        # starts of all batches, and the end of the last one
        cost_starts = np.cumsum([0, *costs])  # on the axis
        row_starts = np.cumsum([0, *sizes])  # in rows, counted over all batches
        cost_per_rank = cost_starts[-1] / self.world_size
        min_slice_cost = cost_per_rank * _MIN_SLICE_FRACTION

        def find_first_row(rank: int) -> int:
            """Return the first row of a rank, counted over all batches."""
            if rank == self.world_size:
                return int(row_starts[-1])
            cut = rank * cost_per_rank
            # the number of batches that start at or before the cut
            num_started = int(np.searchsorted(cost_starts, cut, side="right"))
            i = min(num_started, len(batches)) - 1  # the last of them, which is cut
            cost_before_cut = cut - cost_starts[i]
            if cost_before_cut < min_slice_cost:
                return int(row_starts[i])
            if costs[i] - cost_before_cut < min_slice_cost:
                return int(row_starts[i + 1])
            fraction_before_cut = float(cost_before_cut / costs[i])
            return int(row_starts[i]) + round(len(batches[i]) * fraction_before_cut)

        start = find_first_row(self.rank)
        end = find_first_row(self.rank + 1)
        slices = []
        for row_start, rows in zip(row_starts[:-1], batches, strict=True):
            # the part of the batch between `start` and `end`, counted from the start of the batch
            slice_start = max(start - row_start, 0)
            slice_end = min(end - row_start, len(rows))
            if slice_start < slice_end:
                slices.append(rows[slice_start:slice_end])
        return slices


class EpochPlan(Sequence[UpdatePlan]):
    """The updates of one epoch. A pool is planned when one of its updates is read."""

    def __init__(self, sampler: TokenBatchSampler, epoch: int) -> None:
        self._sampler = sampler
        self._epoch = epoch
        self._pool_starts = sampler.pool_starts(epoch)
        self.num_pairs = sum(sampler.mix.count_pairs(epoch))

    def __len__(self) -> int:
        return self._pool_starts[-1]

    def __getitem__(self, index: int) -> UpdatePlan:  # type: ignore[override]  # no slices
        index = range(len(self))[index]  # negative indices count from the end
        pool_index = bisect_right(self._pool_starts, index) - 1  # the last that has started
        updates = self._sampler.get_pool_updates(self._epoch, pool_index)
        return updates[index - self._pool_starts[pool_index]]

    def pool_of(self, index: int) -> list[UpdatePlan]:
        """Return all updates of the pool that contains update `index`."""
        pool_index = bisect_right(self._pool_starts, index) - 1  # as in `__getitem__`
        return self._sampler.get_pool_updates(self._epoch, pool_index)


def _find_longest_row(lengths: Lengths, corpus: CorpusRange) -> int:
    """Return the row of the pair that has the longest side of all pairs in a corpus."""
    longest_sides = lengths[corpus.start : corpus.end].max(axis=1)
    return corpus.start + int(longest_sides.argmax())


def _split_batches(batches: list[Rows], num_updates: int) -> list[Rows]:
    """Halve all batches until there are at least `num_updates`.

    The batches must have at least `num_updates` pairs.
    """
    while len(batches) < num_updates:
        halves = []
        for rows in batches:
            halves += np.array_split(rows, 2)
        batches = [rows for rows in halves if len(rows)]
    return batches


def _group_batches(token_counts: Ints, tokens_per_update: int) -> list[int]:
    """Group batches into updates of about `tokens_per_update` target tokens.

    `token_counts` has the target tokens of each batch. Returns the index of the first batch of each
    update, followed by the number of batches.
    """
    num_batches = len(token_counts)
    num_tokens = int(token_counts.sum())
    num_updates = max(1, round(num_tokens / tokens_per_update))
    num_updates = min(num_updates, num_batches)
    cuts = _cut_evenly(token_counts, num_updates)
    # `union1d` removes duplicates, which would give updates without batches
    bounds: list[int] = np.union1d(cuts, [0, num_batches]).tolist()
    return bounds


def _group_exactly(token_counts: Ints, num_updates: int) -> list[int]:
    """Group batches into `num_updates` updates of at least one batch each.

    See `_group_batches` for `token_counts` and for the result.
    """
    num_batches = len(token_counts)
    indices = np.arange(1, num_updates)  # all updates except the first begin at a cut
    cuts = _cut_evenly(token_counts, num_updates)
    # Equal cuts would make an update without batches. Make each cut larger than the one before. For
    # example, with the indices [1, 2, 3], the cuts [3, 3, 3] become [3, 4, 5]:
    #   [3, 3, 3] - [1, 2, 3] = [2, 1, 0], with the running maximum [2, 2, 2]
    #   [2, 2, 2] + [1, 2, 3] = [3, 4, 5]
    cuts = np.maximum.accumulate(cuts - indices) + indices
    # each earlier and each later update needs a batch
    num_earlier_updates = indices
    num_later_updates = num_updates - indices
    cuts = np.clip(cuts, num_earlier_updates, num_batches - num_later_updates)
    return [0, *cuts.tolist(), num_batches]


def _cut_evenly(token_counts: Ints, num_updates: int) -> Ints:
    """Return the index of the first batch of each update after the first, (num_updates - 1,).

    Divides the tokens into equal intervals, one per update. A batch belongs to the update whose
    interval contains the middle of the batch.
    """
    middles = np.cumsum(token_counts) - token_counts / 2  # counted in tokens, as `update_ends`
    update_ends = token_counts.sum() * np.arange(1, num_updates) / num_updates
    cuts: Ints = np.searchsorted(middles, update_ends)
    return cuts
