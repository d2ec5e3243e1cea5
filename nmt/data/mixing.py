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
    """One corpus: the pairs `start` to `end` of the split."""

    name: str  # "" when the split has one without a name
    start: int
    num_pairs: int
    weight: float

    @property
    def end(self) -> int:
        """The first pair after it."""
        return self.start + self.num_pairs


@dataclass(frozen=True)
class Mix:
    """The corpora of a run, and how many pairs of each an epoch draws. Where that is no whole
    number, one epoch rounds down and another up.
    """

    corpora: Sequence[CorpusRange]
    amounts: Sequence[float]

    @property
    def drawn(self) -> list[CorpusRange]:
        """The corpora that are not left out."""
        both = zip(self.corpora, self.amounts, strict=True)
        return [corpus for corpus, amount in both if amount > 0]

    def sizes(self, epoch: int) -> list[int]:
        """Return how many pairs of each corpus an epoch draws."""
        return [round((epoch + 1) * a) - round(epoch * a) for a in self.amounts]

    def rows(self, seed: int, epoch: int, pool: int = 0, num_pools: int = 1) -> Rows:
        """Return the pairs of a part of an epoch, with its share of every corpus, in no order."""
        pieces = []
        sizes = self.sizes(epoch)
        for number, (corpus, amount) in enumerate(zip(self.corpora, self.amounts, strict=True)):
            place, end = (  # in the endless stream of passes
                round(epoch * amount) + sizes[number] * p // num_pools for p in (pool, pool + 1)
            )
            while place < end:
                passes, first = divmod(place, corpus.num_pairs)
                last = min(first + end - place, corpus.num_pairs)
                rows = _part_of_pass(corpus.num_pairs, first, last, (seed, number, passes))
                pieces.append(corpus.start + rows)
                place += last - first
        return np.concatenate(pieces)

    def sample(self, most: int) -> Rows:
        """Return the pairs that any epoch draws, evenly spaced ones when they are over `most`."""
        step = -(-sum(corpus.num_pairs for corpus in self.drawn) // most)
        return np.concatenate([np.arange(c.start, c.end, step) for c in self.drawn])

    def __str__(self) -> str:
        if all(a == c.num_pairs for c, a in zip(self.corpora, self.amounts, strict=True)):
            return "every pair once"
        return " + ".join(
            f"{amount:.9g} of {corpus.num_pairs} pairs of {corpus.name or 'train'}"
            for corpus, amount in zip(self.corpora, self.amounts, strict=True)
        )


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
            hint = "the folder was made from data.train, without names"
            hint = hint if names == [""] else nearest(name, names)
            raise ConfigError(f"mix.{name}: no corpus of data_dir has this name; {hint}")
    sizes = [corpus.num_pairs for corpus in corpora]
    chosen = [weights.get(corpus.name, corpus.weight) for corpus in corpora]
    amounts = pairs_an_epoch(sizes, chosen, temperature)
    if max(amounts) < 1:
        raise ConfigError("the weights of mix leave no pair an epoch; give a corpus a larger one")
    return Mix(corpora, amounts)


def _part_of_pass(num_pairs: int, start: int, end: int, key: tuple[int, int, int]) -> Rows:
    """Return the pairs at places `start` to `end` of one pass, whose blocks are shuffled; `key` is
    the seed and the numbers of corpus and pass.
    """
    if end - start == num_pairs:
        return np.arange(num_pairs)
    width = -(-num_pairs // _MOST_BLOCKS)
    num_blocks = -(-num_pairs // width)
    draw = np.random.default_rng(np.random.SeedSequence(key[0], spawn_key=key[1:]))
    blocks = draw.permutation(num_blocks)
    missing = num_blocks * width - num_pairs  # of the last block
    end_of_short = (int(np.flatnonzero(blocks == num_blocks - 1)[0]) + 1) * width - missing
    places = np.arange(start, end)
    places[places >= end_of_short] += missing
    return blocks[places // width] * width + places % width
