"""Choose the pairs that an epoch draws from each corpus, by weight and temperature.

The pairs of an epoch are a pure function of (seed, epoch, weights). A corpus is an endless stream
of passes over its pairs, each pass shuffled with its own seed, and an epoch draws the next pairs of
that stream. So all pairs of a corpus are drawn before one is repeated, even over several epochs.
"""

# N pairs of a corpus

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nmt.data import Rows
from nmt.errors import ConfigError, nearest

_MAX_BLOCKS = 1 << 20  # of a pass: larger corpora are shuffled in blocks of neighboring pairs


@dataclass(frozen=True)
class CorpusRange:
    """The pairs of one corpus, from `start` up to `end`, in a split."""

    name: str  # "" for the only corpus of a split
    start: int
    num_pairs: int
    weight: float

    @property
    def end(self) -> int:
        """The first pair after the corpus."""
        return self.start + self.num_pairs


@dataclass(frozen=True)
class Mix:
    """The corpora of a run, and the number of pairs that an epoch draws from each.

    A fractional number is rounded down in some epochs and up in others.
    """

    corpora: Sequence[CorpusRange]
    amounts: Sequence[float]  # pairs an epoch, by corpus

    @property
    def drawn(self) -> list[CorpusRange]:
        """The corpora with an amount above 0."""
        corpora = []
        for corpus, amount in zip(self.corpora, self.amounts, strict=True):
            if amount > 0:
                corpora.append(corpus)
        return corpora

    def sizes(self, epoch: int) -> list[int]:
        """Return the number of pairs that an epoch draws from each corpus."""
        return [round((epoch + 1) * a) - round(epoch * a) for a in self.amounts]

    def rows(self, seed: int, epoch: int, pool: int = 0, num_pools: int = 1) -> Rows:
        """Return the pairs of one of the equal pools of an epoch, in no particular order."""
        selected = []
        for number, size in enumerate(self.sizes(epoch)):
            corpus = self.corpora[number]
            epoch_start = round(epoch * self.amounts[number])  # in the stream of passes
            position = epoch_start + size * pool // num_pools
            end = epoch_start + size * (pool + 1) // num_pools
            while position < end:
                pass_number, first = divmod(position, corpus.num_pairs)
                stop = min(first + end - position, corpus.num_pairs)
                rows = _shuffled_rows(corpus.num_pairs, first, stop, (seed, number, pass_number))
                selected.append(corpus.start + rows)
                position += stop - first
        return np.concatenate(selected)

    def sample(self, max_pairs: int) -> Rows:
        """Return about `max_pairs` evenly spaced pairs of the corpora that epochs draw from."""
        step = -(-sum(corpus.num_pairs for corpus in self.drawn) // max_pairs)
        return np.concatenate([np.arange(c.start, c.end, step) for c in self.drawn])

    def __str__(self) -> str:
        if list(self.amounts) == [corpus.num_pairs for corpus in self.corpora]:
            return "every pair once"
        terms = []
        for corpus, amount in zip(self.corpora, self.amounts, strict=True):
            name = corpus.name or "train"
            terms.append(f"{amount:.9g} of {corpus.num_pairs} pairs of {name}")
        return " + ".join(terms)


def pairs_an_epoch(
    sizes: Sequence[int], weights: Sequence[float], temperature: float
) -> list[float]:
    """Return the number of pairs that an epoch draws from each corpus: weight * size.

    At a temperature T above 1 the shares of the corpora are proportional to weight * size^(1/T),
    and the epoch is as long as at 1 (Arivazhagan et al., 2019, "Massively Multilingual Neural
    Machine Translation in the Wild").
    """
    amounts = [weight * size for size, weight in zip(sizes, weights, strict=True)]
    if temperature == 1 or len(sizes) == 1:
        return amounts
    shares = [w * size ** (1 / temperature) for size, w in zip(sizes, weights, strict=True)]
    return [sum(amounts) * share / (sum(shares) or 1) for share in shares]


def make_mix(
    corpora: Sequence[CorpusRange], weights: Mapping[str, float], temperature: float = 1.0
) -> Mix:
    """Decide how many pairs an epoch draws from each corpus.

    `weights`, by name, override the weights of the corpora. Raises `ConfigError` for an unknown
    name, and if an epoch would be empty.
    """
    names = [corpus.name for corpus in corpora]
    for name in weights:
        if name not in names:
            hint = nearest(name, names)
            if names == [""]:
                hint = "the folder was made from data.train, without names"
            raise ConfigError(f"mix.{name}: no corpus of data_dir has this name; {hint}")
    sizes = [corpus.num_pairs for corpus in corpora]
    mixed_weights = [weights.get(corpus.name, corpus.weight) for corpus in corpora]
    amounts = pairs_an_epoch(sizes, mixed_weights, temperature)
    if max(amounts) < 1:
        raise ConfigError(
            "mix: every weight is 0 or too small, so an epoch would be empty; increase one"
        )
    return Mix(corpora, amounts)


def _shuffled_rows(num_pairs: int, start: int, end: int, key: tuple[int, int, int]) -> Rows:
    """Return the pairs from position `start` up to `end` of one pass, whose blocks are shuffled.

    `key` holds the seed, the number of the corpus and the number of the pass.
    """
    if end - start == num_pairs:
        return np.arange(num_pairs)
    width = -(-num_pairs // _MAX_BLOCKS)  # pairs of a block
    num_blocks = -(-num_pairs // width)
    generator = np.random.default_rng(np.random.SeedSequence(key[0], spawn_key=key[1:]))
    blocks = generator.permutation(num_blocks)
    num_missing = num_blocks * width - num_pairs  # in the last block, which is shorter
    short_block = int(np.flatnonzero(blocks == num_blocks - 1)[0])
    short_block_end = (short_block + 1) * width - num_missing
    positions = np.arange(start, end)
    positions[positions >= short_block_end] += num_missing
    return blocks[positions // width] * width + positions % width
