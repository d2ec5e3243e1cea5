"""Which sentences go through the model together: token-bucket batches, grouped into updates.

The order is a pure function of (seed, epoch, mix), so that a run can start again anywhere without
replay. The pairs of an epoch are planned in pools of a few million, each when it is first needed.
"""

# N pairs; lengths are in tokens and count EOS

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, overload

import numpy as np

from nmt.data import Lengths, Rows
from nmt.data.batch import batch_cost, bucket
from nmt.data.mixing import CorpusRange, Mix, whole
from nmt.errors import ConfigError

_POOL_PAIRS = 5_000_000  # most pairs that are sorted together


@dataclass(frozen=True)
class Update:
    """One update of the weights: the batches of this rank, and the size of the whole."""

    batches: list[Rows]  # of this rank; none when the update has fewer pairs than there are ranks
    num_tokens: int  # real target tokens over all ranks
    num_src_tokens: int  # real source tokens over all ranks


class Updates(Sequence[Update]):
    """The updates of an epoch, or of a part of it; those of a pool of pairs are planned together,
    when one of them is asked for.

    Args:
        plan: returns the updates of a pool.
        starts: number of the first update of each pool, and the end.
        num_pairs: of the whole epoch.
        places: numbers of the updates that are meant; all by default.
    """

    def __init__(
        self,
        plan: Callable[[int], list[Update]],
        starts: list[int],
        num_pairs: int,
        places: range | None = None,
    ) -> None:
        self._plan, self._starts = plan, starts
        self.num_pairs = num_pairs
        self._places = range(starts[-1]) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Update: ...
    @overload
    def __getitem__(self, index: slice) -> Updates: ...
    def __getitem__(self, index: int | slice) -> Update | Updates:
        """Return an update, or some of them without planning them."""
        if isinstance(index, slice):
            return Updates(self._plan, self._starts, self.num_pairs, self._places[index])
        place = self._places[index]
        pool = bisect_right(self._starts, place) - 1
        return self._plan(pool)[place - self._starts[pool]]

    def pool_of(self, index: int) -> list[Update]:
        """Return the updates that are planned together with one: of a small corpus, all."""
        return self._plan(bisect_right(self._starts, self._places[index]) - 1)


class TokenBatchSampler:
    """Plans the updates of every epoch for one rank.

    Args:
        lengths: source and target tokens of every pair (N, 2).
        max_tokens: bound on `batch_cost` of one batch.
        tokens_per_update: real target tokens of one update over all ranks; its batches are
            accumulated.
        seed: of the order; the same on all ranks.
        mix: which pairs an epoch draws; all of them by default.
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
        mix: Mix | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.lengths = lengths
        self.mix = whole(len(lengths)) if mix is None else mix
        self._longest_rows = [self._longest_row(share.corpus) for share in self.mix.drawn]
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
        # two, since those who prepare the next updates are ahead of those who make them
        self._plan = lru_cache(maxsize=2)(self._plan_pool)

    def updates(self, epoch: int) -> Updates:
        """Return the updates of an epoch, at least one and as many on every rank.

        Every pair comes once an epoch, unless the mix wants it otherwise.
        """
        sizes = self.mix.sizes(epoch)
        num_pools = -(-sum(sizes) // _POOL_PAIRS)

        def plan(pool: int) -> list[Update]:
            num_updates = starts[pool + 1] - starts[pool] if num_pools > 1 else None
            return self._plan(epoch, pool, num_pools, num_updates)

        if num_pools > 1:
            starts = self._pool_starts(sizes, num_pools)
        else:  # as many updates as come out
            starts = [0, len(self._plan(epoch, 0, 1, None))]
        return Updates(plan, starts, sum(sizes))

    def rows_to_try(self) -> Rows:
        """Return pairs among which are the largest batches: all of a small corpus, else a sample
        with the longest pairs.
        """
        rows = self.mix.sample(_POOL_PAIRS)
        is_whole = len(rows) == sum(share.corpus.num_pairs for share in self.mix.drawn)
        return rows if is_whole else np.concatenate([rows, self._longest_rows])

    def _longest_row(self, corpus: CorpusRange) -> int:
        lengths = self.lengths[corpus.start : corpus.start + corpus.num_pairs]
        parts = range(0, len(lengths), 1 << 20)  # numpy's argmax copies what is read-only
        start = max(parts, key=lambda start: int(lengths[start : start + parts.step].max()))
        part = lengths[start : start + parts.step]
        return corpus.start + start + int(part.max(axis=1).argmax())

    @cached_property
    def _mean_tokens(self) -> list[float]:
        """Target tokens of the mean pair of each corpus; 0 for those that are left out."""
        means = []
        for share in self.mix.shares:
            start, end = share.corpus.start, share.corpus.start + share.corpus.num_pairs
            means.append(float(self.lengths[start:end, 1].mean()) if share.drawn > 0 else 0.0)
        return means

    def _pool_starts(self, sizes: list[int], num_pools: int) -> list[int]:
        """Decide how many updates each pool makes, without planning any; return where they start,
        and the end.

        The pools have equal shares of every corpus, so they make equally many; the tokens of an
        update differ between pools as far as the means of millions of pairs do.
        """
        num_tokens = float(np.dot(sizes, self._mean_tokens))
        most = num_pools * sum(size // num_pools for size in sizes)  # a pair each
        num_updates = max(num_pools, min(round(num_tokens / self.tokens_per_update), most))
        return [num_updates * pool // num_pools for pool in range(num_pools + 1)]

    def _plan_pool(
        self, epoch: int, pool: int, num_pools: int, num_updates: int | None
    ) -> list[Update]:
        """Plan one of the pools of an epoch, with the number of its updates if that is given."""
        generator = np.random.default_rng((self.seed, epoch, pool))
        rows = self.mix.rows(self.seed, epoch, pool, num_pools)
        batches = bucket(self.lengths, self.max_tokens, rows[generator.permutation(len(rows))])
        while len(batches) < (num_updates or 0):  # there are as many pairs
            batches = [half for b in batches for half in np.array_split(b, 2) if len(half)]
        batches = [batches[i] for i in generator.permutation(len(batches))]
        tokens = np.array([self.lengths[rows].sum(axis=0) for rows in batches])  # (batches, 2)
        cuts = self._group(tokens[:, 1], num_updates)
        return [
            Update(
                self._share(batches[start:end]),
                num_tokens=int(tokens[start:end, 1].sum()),
                num_src_tokens=int(tokens[start:end, 0].sum()),
            )
            for start, end in zip(cuts[:-1], cuts[1:], strict=True)
        ]

    def _group(
        self, tokens: np.ndarray[Any, np.dtype[np.int64]], num_updates: int | None
    ) -> list[int]:
        """Cut batches of `tokens` into updates as equal as can be, `num_updates` if it is given;
        return where each starts, and the end. A batch belongs where its middle lies.
        """
        ends, is_fixed = np.cumsum(tokens), num_updates is not None
        if num_updates is None:
            wanted = max(1, round(int(ends[-1]) / self.tokens_per_update))
            num_updates = min(wanted, len(tokens))
        places = np.arange(1, num_updates)
        cuts = np.searchsorted(ends - tokens / 2, int(ends[-1]) * places / num_updates)
        if is_fixed:  # each has a batch
            cuts = np.maximum.accumulate(cuts - places) + places
            cuts = np.clip(cuts, places, len(tokens) - places[::-1])
        return [0, *sorted({int(cut) for cut in cuts} - {0, len(tokens)}), len(tokens)]

    def _share(self, batches: list[Rows]) -> list[Rows]:
        """Return this rank's part of an update: the batches laid in a line, by cost, and the line
        cut into `world_size` equal pieces.
        """
        if self.world_size == 1:
            return batches
        ends = np.cumsum([batch_cost(self.lengths[rows]) for rows in batches])
        start, end = (self._cut(batches, ends, rank) for rank in (self.rank, self.rank + 1))
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
