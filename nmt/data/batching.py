"""Which sentences go through the model together: token-bucket batches, grouped into updates.

The order is a pure function of (seed, epoch), so that a run can start again anywhere without
replay.
"""

# N pairs; lengths are in tokens and count EOS

from __future__ import annotations

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


class TokenBatchSampler:
    """Plans the updates of every epoch for one rank.

    Args:
        lengths: source and target tokens of every pair (N, 2).
        max_tokens: bound on `batch_cost` of one batch.
        tokens_per_update: real target tokens of one update over all ranks; its batches are
            accumulated, and none is larger than a rank's share of the update.
        seed: of the order; the same on all ranks.
        rank: takes every `world_size`-th batch of an update.
        world_size: number of ranks.
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
        self.max_tokens = min(max_tokens, max(longest, tokens_per_update // world_size))
        self.tokens_per_update = tokens_per_update
        self.seed = seed
        self.rank = rank
        self.world_size = world_size

    def updates(self, epoch: int) -> list[list[Rows]]:
        """Return the updates of an epoch, each a list of this rank's batches, each a vector of pair
        numbers.

        Every pair comes once an epoch. The number of updates, at least one, is the same on every
        rank.
        """
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(len(self.lengths))
        batches = bucket(self.lengths, self.max_tokens, order)
        batches = [batches[i] for i in generator.permutation(len(batches))]
        tokens = np.array([int(self.lengths[rows, 1].sum()) for rows in batches])
        groups = self._group(tokens)
        return [
            batches[start:end][self.rank :: self.world_size]
            for start, end in zip(groups[:-1], groups[1:], strict=True)
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
