"""Which pairs an epoch draws from each corpus, by weight and temperature.

The pairs of an epoch are a pure function of (seed, epoch, weights): a corpus is a stream of passes
over its pairs, each in an order of its own, and an epoch takes the next piece of that stream. So no
pair comes again before all others of its corpus have come, over as many epochs as that takes. It
knows nothing of lengths, batches or files.
"""

# N pairs of a corpus

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nmt.data import Rows
from nmt.errors import ConfigError, nearest

_MOST_BLOCKS = 1 << 20  # of a pass: larger corpora are shuffled in blocks of neighboring pairs


@dataclass(frozen=True)
class CorpusRange:
    """One corpus: the pairs `start` to `start + num_pairs` of the split."""

    name: str  # "" when the split has one without a name
    start: int
    num_pairs: int
    weight: float


@dataclass(frozen=True)
class Share:
    """The part of one corpus in every epoch."""

    corpus: CorpusRange
    drawn: float  # pairs an epoch; one epoch rounds down and another up

    def cuts(self, epoch: int) -> tuple[int, int]:
        """Return from where to where an epoch takes the stream of passes."""
        return round(epoch * self.drawn), round((epoch + 1) * self.drawn)


@dataclass(frozen=True)
class Mix:
    """The corpora of a run."""

    shares: Sequence[Share]

    @property
    def drawn(self) -> list[Share]:
        """The shares of the corpora that are not left out."""
        return [share for share in self.shares if share.drawn > 0]

    def sizes(self, epoch: int) -> list[int]:
        """Return how many pairs of each corpus an epoch draws."""
        return [end - start for start, end in (share.cuts(epoch) for share in self.shares)]

    def rows(self, seed: int, epoch: int, pool: int = 0, num_pools: int = 1) -> Rows:
        """Return the pairs of one of `num_pools` equal parts of an epoch; each has its share of
        every corpus. Their order means nothing.
        """
        pieces = []
        for number, share in enumerate(self.shares):
            start, end = share.cuts(epoch)
            size = end - start
            first, last = (start + size * p // num_pools for p in (pool, pool + 1))
            rows = _take(share.corpus.num_pairs, first, last, (seed, number))
            pieces.append(rows + share.corpus.start)
        return np.concatenate(pieces)

    def sample(self, most: int) -> Rows:
        """Return the pairs that any epoch draws, evenly spaced ones when they are over `most`."""
        corpora = [share.corpus for share in self.drawn]
        step = -(-sum(corpus.num_pairs for corpus in corpora) // most)
        return np.concatenate([np.arange(c.start, c.start + c.num_pairs, step) for c in corpora])

    def __str__(self) -> str:
        if all(share.drawn == share.corpus.num_pairs for share in self.shares):
            return "every pair once"
        parts = (
            f"{share.drawn:.9g} of {share.corpus.num_pairs} pairs of {share.corpus.name or 'train'}"
            for share in self.shares
        )
        return " + ".join(parts)


def pairs_an_epoch(
    sizes: Sequence[int], weights: Sequence[float], temperature: float
) -> list[float]:
    """Return how many pairs of each corpus an epoch draws: weight * size at temperature 1.

    At T above 1 shares are proportional to weight * size^(1/T), and the epoch is as long as at 1.
    Arivazhagan et al., 2019, "Massively Multilingual Neural Machine Translation in the Wild", mix
    languages so.
    """
    amounts = [weight * size for size, weight in zip(sizes, weights, strict=True)]
    if temperature == 1 or len(sizes) == 1:
        return amounts
    shares = [w * size ** (1 / temperature) for size, w in zip(sizes, weights, strict=True)]
    return [sum(amounts) * share / (sum(shares) or 1) for share in shares]


def make_mix(
    corpora: Sequence[CorpusRange], weights: Mapping[str, float], temperature: float = 1.0
) -> Mix:
    """Decide how many pairs of each corpus an epoch draws; `weights`, by name, take the place of
    the corpora's own.

    Raises `ConfigError` for a name that is none of the corpora, and when nothing is left.
    """
    names = [corpus.name for corpus in corpora]
    for name in weights:
        if name not in names:
            named = [name for name in names if name]
            hint = "the folder was made from data.train, without names"
            hint = nearest(name, named) if named else hint
            raise ConfigError(f"mix.{name}: no corpus of data_dir has this name; {hint}")
    sizes = [corpus.num_pairs for corpus in corpora]
    chosen = [weights.get(corpus.name, corpus.weight) for corpus in corpora]
    amounts = pairs_an_epoch(sizes, chosen, temperature)
    if max(amounts) < 1:
        raise ConfigError("the weights of mix leave no pair an epoch; give a corpus a larger one")
    return Mix([Share(c, amount) for c, amount in zip(corpora, amounts, strict=True)])


def whole(num_pairs: int) -> Mix:
    """Draw every pair once an epoch."""
    return make_mix([CorpusRange("", 0, num_pairs, 1.0)], {})


def _take(num_pairs: int, start: int, end: int, key: tuple[int, int]) -> Rows:
    """Return the pairs at places `start` to `end` of the endless stream of passes."""
    pieces = [np.empty(0, dtype=np.int64)]
    while start < end:
        number, first = divmod(start, num_pairs)
        last = min(first + end - start, num_pairs)
        pieces.append(_part_of_pass(num_pairs, number, first, last, key))
        start += last - first
    return np.concatenate(pieces)


def _part_of_pass(num_pairs: int, number: int, start: int, end: int, key: tuple[int, int]) -> Rows:
    """Return the pairs at places `start` to `end` of one pass, whose blocks are shuffled."""
    if end - start == num_pairs:
        return np.arange(num_pairs)
    seed, corpus = key
    width = -(-num_pairs // _MOST_BLOCKS)
    num_blocks = -(-num_pairs // width)
    draw = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(corpus, number)))
    blocks = draw.permutation(num_blocks)
    missing = num_blocks * width - num_pairs  # of the last block
    end_of_short = (int(np.flatnonzero(blocks == num_blocks - 1)[0]) + 1) * width - missing
    places = np.arange(start, end)
    places[places >= end_of_short] += missing
    return blocks[places // width] * width + places % width
