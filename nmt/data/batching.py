"""Which sentences go through the model together: token-bucket batches, grouped into updates.

The order is a pure function of (seed, epoch, mix), so that a run can start again anywhere without
replay. The pairs of an epoch are planned in pools of a few million, each when it is first needed.
"""

# N pairs; lengths are in tokens and count EOS

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from nmt.data import Lengths, Rows
from nmt.data.batch import batch_cost, bucket
from nmt.data.mixing import CorpusRange, Mix, make_mix
from nmt.errors import ConfigError

_POOL_PAIRS = 5_000_000  # most pairs that are sorted together


@dataclass(frozen=True)
class Update:
    """One update of the weights: the batches of this rank, and the size of the whole."""

    batches: list[Rows]  # of this rank; none when the update has fewer pairs than there are ranks
    num_tokens: int  # real target tokens over all ranks
    num_src_tokens: int  # real source tokens over all ranks


class Updates(Sequence[Update]):
    """The updates of an epoch of `num_pairs`; `plan` makes those of one pool of pairs, when one of
    them is asked for. `starts` holds the number of the first of each pool, and the end.
    """

    def __init__(
        self, plan: Callable[[int], list[Update]], starts: list[int], num_pairs: int
    ) -> None:
        self._plan, self._starts, self.num_pairs = plan, starts, num_pairs

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Update:  # type: ignore[override]  # no slices
        index = range(len(self))[index]
        return self.pool_of(index)[index - self._starts[bisect_right(self._starts, index) - 1]]

    def pool_of(self, index: int) -> list[Update]:
        """Return the updates that are planned together with one: of a small corpus, all."""
        return self._plan(bisect_right(self._starts, index) - 1)


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
        self.mix = mix or make_mix([CorpusRange("", 0, len(lengths), 1.0)], {})
        self._longest_rows = [
            c.start + int(np.maximum(*lengths[c.start : c.end].T).argmax()) for c in self.mix.drawn
        ]
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
        starts = self._pool_starts(sizes, num_pools) if num_pools > 1 else []

        def plan(pool: int) -> list[Update]:
            num_updates = starts[pool + 1] - starts[pool] if starts else None
            return self._plan(epoch, pool, num_pools, num_updates)

        # a single pool makes as many updates as come out
        return Updates(plan, starts or [0, len(plan(0))], sum(sizes))

    def rows_to_try(self) -> Rows:
        """Return pairs among which are the largest batches: a sample with the longest pairs."""
        return np.union1d(self.mix.sample(_POOL_PAIRS), self._longest_rows)

    def _pool_starts(self, sizes: list[int], num_pools: int) -> list[int]:
        """Decide how many updates each pool makes, without planning any; return where they start,
        and the end.

        The pools have equal shares of every corpus, so they make equally many; the tokens of an
        update differ between pools as far as the means of millions of pairs do.
        """
        means = [  # target tokens of a pair
            float(self.lengths[c.start : c.end, 1].mean()) if size else 0.0
            for c, size in zip(self.mix.corpora, sizes, strict=True)
        ]
        most = num_pools * sum(size // num_pools for size in sizes)  # a pair each
        wanted = round(float(np.dot(sizes, means)) / self.tokens_per_update)
        num_updates = max(num_pools, min(wanted, most))
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
            for start, end in itertools.pairwise(cuts)
        ]

    def _group(
        self, tokens: np.ndarray[Any, np.dtype[np.int64]], num_updates: int | None
    ) -> list[int]:
        """Cut batches of `tokens` into updates as equal as can be, `num_updates` if it is given;
        return where each starts, and the end. A batch belongs where its middle lies.
        """
        ends, total = np.cumsum(tokens), int(tokens.sum())
        wanted = min(max(1, round(total / self.tokens_per_update)), len(tokens))
        places = np.arange(1, num_updates or wanted)
        cuts = np.searchsorted(ends - tokens / 2, total * places / (num_updates or wanted))
        if num_updates:  # each has a batch
            cuts = np.maximum.accumulate(cuts - places) + places
            cuts = np.clip(cuts, places, len(tokens) - places[::-1])
        return [0, *sorted({int(cut) for cut in cuts} - {0, len(tokens)}), len(tokens)]

    def _share(self, batches: list[Rows]) -> list[Rows]:
        """Return this rank's part of an update: the batches laid in a line, by cost, and the line
        cut into `world_size` equal pieces. A cut that would leave a sliver moves to the edge of the
        batch.
        """
        if self.world_size == 1:
            return batches
        costs = [batch_cost(self.lengths[rows]) for rows in batches]
        starts = np.cumsum([0, *costs])  # of the batches in the line, and the end
        firsts = np.cumsum([0, *map(len, batches)])  # their first rows, and the end
        share = starts[-1] / self.world_size

        def first_row(rank: int) -> int:
            """Return the row, of all in the line, where the part of a rank starts."""
            if rank == self.world_size:
                return int(firsts[-1])
            batch = min(int(np.searchsorted(starts, rank * share, side="right")), len(batches)) - 1
            offset = rank * share - starts[batch]
            if offset < share / 8:
                return int(firsts[batch])
            if costs[batch] - offset < share / 8:
                return int(firsts[batch + 1])
            return int(firsts[batch]) + round(len(batches[batch]) * float(offset / costs[batch]))

        start, end = first_row(self.rank), first_row(self.rank + 1)
        pieces = [
            rows[max(start - first, 0) : max(end - first, 0)]
            for first, rows in zip(firsts, batches, strict=False)
        ]
        return [rows for rows in pieces if len(rows)]
