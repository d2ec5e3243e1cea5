"""Choose the pairs that an epoch draws from each corpus, by weight and temperature.

The pairs of an epoch are a pure function of (seed, epoch, weights). Each corpus is an endless
stream of passes over its pairs, each pass in another order. An epoch draws the next pairs of the
stream. So all pairs of a corpus are drawn before one is repeated, even over several epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nmt.data import Rows
from nmt.errors import ConfigError, suggest_names

_MAX_BLOCKS = 1 << 20  # a corpus of more pairs is shuffled in blocks of neighboring pairs


@dataclass(frozen=True)
class CorpusRange:
    """The pairs of one corpus in a split, from the index `start` up to `end`."""

    name: str  # "" for the only corpus of a split
    start: int
    num_pairs: int
    weight: float
    is_reversed: bool = False  # whether source and target are exchanged

    @property
    def end(self) -> int:
        """Index of the first pair after the corpus."""
        return self.start + self.num_pairs


@dataclass(frozen=True)
class Mix:
    """The corpora of a run, and the number of pairs that an epoch draws from each.

    A fractional number is rounded down in some epochs and up in others.
    """

    corpora: Sequence[CorpusRange]
    pairs_per_epoch: Sequence[float]  # one number for each corpus

    @property
    def drawn_corpora(self) -> list[CorpusRange]:
        """The corpora from which epochs draw pairs, those with a weight above 0."""
        corpora = []
        for corpus, num_pairs in zip(self.corpora, self.pairs_per_epoch, strict=True):
            if num_pairs > 0:
                corpora.append(corpus)
        return corpora

    def count_pairs(self, epoch: int) -> list[int]:
        """Return the number of pairs that an epoch draws from each corpus."""
        counts = []
        for num_pairs in self.pairs_per_epoch:
            start = round(epoch * num_pairs)  # number of pairs in earlier epochs
            end = round((epoch + 1) * num_pairs)
            counts.append(end - start)
        return counts

    def draw_rows(self, seed: int, epoch: int, pool_index: int = 0, num_pools: int = 1) -> Rows:
        """Return the row numbers of the pairs of an epoch, in no particular order.

        The epoch is divided into `num_pools` equal pools, which are prepared one after the other.
        Only the rows of the pool `pool_index` are returned.
        """
        selected = []
        for corpus_index, num_pairs in enumerate(self.count_pairs(epoch)):
            corpus = self.corpora[corpus_index]
            # positions in the stream of the corpus
            epoch_start = round(epoch * self.pairs_per_epoch[corpus_index])
            position = epoch_start + num_pairs * pool_index // num_pools
            end = epoch_start + num_pairs * (pool_index + 1) // num_pools
            while position < end:
                # the pass over the corpus that contains the position, and the position in this pass
                pass_index, start_in_pass = divmod(position, corpus.num_pairs)
                num_remaining = end - position
                end_in_pass = min(start_in_pass + num_remaining, corpus.num_pairs)
                seed_sequence = np.random.SeedSequence(seed, spawn_key=(corpus_index, pass_index))
                rows = _draw_from_pass(corpus.num_pairs, start_in_pass, end_in_pass, seed_sequence)
                selected.append(corpus.start + rows)
                position += end_in_pass - start_in_pass
        return np.concatenate(selected)

    def sample_rows(self, max_pairs: int) -> Rows:
        """Return the rows of about `max_pairs` pairs, evenly spaced in the drawn corpora."""
        num_pairs = sum(corpus.num_pairs for corpus in self.drawn_corpora)
        step = math.ceil(num_pairs / max_pairs)
        selected = [np.arange(corpus.start, corpus.end, step) for corpus in self.drawn_corpora]
        return np.concatenate(selected)

    def __str__(self) -> str:
        if list(self.pairs_per_epoch) == [corpus.num_pairs for corpus in self.corpora]:
            if any(corpus.is_reversed for corpus in self.corpora):
                return "every pair once in each direction"
            return "every pair once"
        terms = []
        for corpus, num_pairs in zip(self.corpora, self.pairs_per_epoch, strict=True):
            name = corpus.name or "train"
            if corpus.is_reversed:
                name += ", reversed"
            terms.append(f"{num_pairs:.9g} of {corpus.num_pairs} pairs of {name}")
        return " + ".join(terms)


def compute_pairs_per_epoch(
    sizes: Sequence[int], weights: Sequence[float], temperature: float
) -> list[float]:
    """Return the number of pairs that an epoch draws from each corpus: weight * size.

    At a temperature T above 1, the numbers are proportional to weight * size^(1/T), and their sum
    is the same as at T = 1. Source: Arivazhagan et al. (2019), "Massively Multilingual Neural
    Machine Translation in the Wild".
    """
    num_pairs = []
    scaled = []
    for size, weight in zip(sizes, weights, strict=True):
        num_pairs.append(weight * size)
        scaled.append(weight * size ** (1 / temperature))
    if temperature == 1 or len(sizes) == 1:
        return num_pairs
    total = sum(num_pairs)
    scaled_total = sum(scaled) or 1  # all weights may be 0
    return [total * value / scaled_total for value in scaled]


def make_mix(
    corpora: Sequence[CorpusRange], weights: Mapping[str, float], temperature: float = 1.0
) -> Mix:
    """Decide how many pairs an epoch draws from each corpus.

    `weights` replaces the weights of the corpora that it names. Raises `ConfigError` for an unknown
    name, and if an epoch would be empty.
    """
    names = list(dict.fromkeys(corpus.name for corpus in corpora))  # no name twice
    for name in weights:
        if name not in names:
            hint = suggest_names(name, names)
            if names == [""]:
                hint = "the folder was made from data.train, without names"
            raise ConfigError(f"mix.{name}: no corpus of data_dir has this name; {hint}")
    sizes = [corpus.num_pairs for corpus in corpora]
    corpus_weights = [weights.get(corpus.name, corpus.weight) for corpus in corpora]
    pairs_per_epoch = compute_pairs_per_epoch(sizes, corpus_weights, temperature)
    if max(pairs_per_epoch) < 1:
        raise ConfigError(
            "mix: every weight is 0 or too small, so an epoch would be empty; increase one"
        )
    return Mix(corpora, pairs_per_epoch)


def _draw_from_pass(num_pairs: int, start: int, end: int, seed: np.random.SeedSequence) -> Rows:
    """Return the rows at the positions from `start` up to `end` of one pass over a corpus.

    A pass visits the blocks of the corpus in an order drawn with `seed`. The pairs of a whole pass
    are in ascending order, since callers shuffle them anyway.
    """
    if end - start == num_pairs:
        return np.arange(num_pairs)
    block_size = math.ceil(num_pairs / _MAX_BLOCKS)
    num_blocks = math.ceil(num_pairs / block_size)
    blocks = np.random.default_rng(seed).permutation(num_blocks)  # in the order of the pass
    # The last block of the corpus may be shorter than the others. The division by `block_size`
    # below needs blocks of one size, so positions after the short block skip the missing pairs.
    num_missing = num_blocks * block_size - num_pairs
    # the place of the short block in the order of the pass, and the position of its end
    [short_block_index] = np.flatnonzero(blocks == num_blocks - 1).tolist()
    short_block_end = (short_block_index + 1) * block_size - num_missing
    positions = np.arange(start, end)  # (end - start,)
    positions[positions >= short_block_end] += num_missing
    block_starts = blocks[positions // block_size] * block_size  # the first row of each block
    positions_in_block = positions % block_size
    return block_starts + positions_in_block
