"""Word alignment of training pairs by IBM model 1 (Brown et al., 1993).

A link joins a source token and a target token of the same pair. The model estimates how probable a
target token is for a source token, from all links of the training pairs.
"""

# In shapes, N is the number of links, U the number of distinct ones, and M the number of target
# tokens. S and T are the lengths of a pair.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from nmt.data.batch import Ids
from nmt.data.binary import ParallelData

MAX_LINKS = 20_000_000  # of the pairs to learn from, drawn at random; 1 GB of memory
NUM_ITERATIONS = 4  # of expectation maximization
_SEED = 1
_DIAGONAL_TENSION = 4.0  # how much links far from the diagonal of a pair cost (Dyer et al., 2013)
_NULL_PROB = 0.08  # that a token has no counterpart
_COPY_PROB = 0.5  # least probability of a link between equal ids, which are names and numbers

Array = np.ndarray[Any, np.dtype[Any]]
Pairs = Sequence[tuple[Ids, Ids]] | ParallelData


class Links(NamedTuple):
    """The links of pairs; links of one target token follow each other."""

    src: Array  # (N,), source ids; each target token is also linked to the null id
    tgt: Array  # (N,), target ids
    src_lengths: Array  # (M,), the number of links of each target token


class Translations(NamedTuple):
    """The probabilities p(target id | source id) of distinct links, sorted by source and target."""

    src: Array  # (U,)
    tgt: Array  # (U,)
    probs: Array  # (U,)


def draw_pairs(pairs: Pairs) -> list[tuple[Ids, Ids]]:
    """Return pairs drawn at random, until they have `MAX_LINKS`."""
    sampled: list[tuple[Ids, Ids]] = []
    num_links = 0
    for index in np.random.default_rng(_SEED).permutation(len(pairs)):
        src_ids, tgt_ids = pairs[index]
        sampled.append((src_ids, tgt_ids))
        num_links += (len(src_ids) + 1) * len(tgt_ids)
        if num_links >= MAX_LINKS:
            break
    return sampled


def make_links(pairs: Iterable[tuple[Ids, Ids]], null_id: int) -> Links:
    """Return the links of `pairs`; `null_id` is added to each source."""
    src = []
    tgt = []
    src_lengths = []
    for src_ids, tgt_ids in pairs:
        linked = np.append(src_ids, null_id).astype(np.int64)
        src.append(np.tile(linked, len(tgt_ids)))
        tgt.append(np.repeat(np.asarray(tgt_ids, dtype=np.int64), len(linked)))
        src_lengths.append(np.full(len(tgt_ids), len(linked)))
    return Links(np.concatenate(src), np.concatenate(tgt), np.concatenate(src_lengths))


def estimate_translations(links: Links, num_src: int, num_tgt: int) -> Translations:
    """Estimate IBM model 1; `num_src` and `num_tgt` are the numbers of ids, with the null id."""
    distinct, link_index = np.unique(links.src * num_tgt + links.tgt, return_inverse=True)
    src, tgt = np.divmod(distinct, num_tgt)  # (U,)
    probs = np.ones(len(distinct))  # up to a factor at first
    starts = np.cumsum(links.src_lengths) - links.src_lengths  # (M,)
    for _ in range(NUM_ITERATIONS):
        weights = probs[link_index]  # (N,)
        totals = np.add.reduceat(weights, starts)  # (M,)
        weights /= np.repeat(totals, links.src_lengths)  # p(source position | target token)
        counts = np.bincount(link_index, weights, minlength=len(distinct))  # (U,), expected
        probs = counts / np.bincount(src, counts, minlength=num_src)[src]
    return Translations(src, tgt, probs)


class WordAligner:
    """Aligns the tokens of pairs; estimated from training pairs, the same in every process."""

    def __init__(self, pairs: Pairs, *, src_vocab_size: int, tgt_vocab_size: int) -> None:
        """Estimate the probabilities of both directions.

        Args:
            pairs: training pairs of source and target ids.
            src_vocab_size: number of source ids.
            tgt_vocab_size: number of target ids.
        """
        sampled_pairs = draw_pairs(pairs)
        reversed_pairs = [(tgt_ids, src_ids) for src_ids, tgt_ids in sampled_pairs]
        self._forward = _ProbabilityTable(sampled_pairs, src_vocab_size, tgt_vocab_size)
        self._backward = _ProbabilityTable(reversed_pairs, tgt_vocab_size, src_vocab_size)

    def align(self, src: Ids, tgt: Ids, *, has_joint_ids: bool) -> Array:
        """Return the links (L, 2) of a pair: positions in the source and in the target.

        A link is the best for both of its tokens, so that each token has at most one.
        With `has_joint_ids`, equal ids on both sides are the same text.
        """
        if not len(src) or not len(tgt):
            return np.zeros((0, 2), dtype=np.int64)
        src_ids = np.asarray(src, dtype=np.int64)
        tgt_ids = np.asarray(tgt, dtype=np.int64)
        src_of_tgt = self._forward.best_positions(src_ids, tgt_ids, has_joint_ids)  # (T,)
        tgt_of_src = self._backward.best_positions(tgt_ids, src_ids, has_joint_ids)  # (S,)
        tgt_positions = np.flatnonzero(src_of_tgt >= 0)
        src_positions = src_of_tgt[tgt_positions]
        is_mutual = tgt_of_src[src_positions] == tgt_positions
        return np.stack([src_positions[is_mutual], tgt_positions[is_mutual]], axis=1)


class _ProbabilityTable:
    """IBM model 1 of one direction."""

    def __init__(self, pairs: list[tuple[Ids, Ids]], num_src: int, num_tgt: int) -> None:
        links = make_links(pairs, null_id=num_src)
        translations = estimate_translations(links, num_src + 1, num_tgt)
        self._num_tgt = num_tgt
        self._null_id = num_src
        self._keys = translations.src * num_tgt + translations.tgt  # (U,), ascending
        self._probs = translations.probs  # (U,)

    def best_positions(self, src: Array, tgt: Array, has_joint_ids: bool) -> Array:
        """Return the source position of each target token, (T,); -1 for none."""
        linked = np.append(src, self._null_id)
        keys = linked[:, None] * self._num_tgt + tgt  # (S + 1, T)
        indices = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        probs = np.where(self._keys[indices] == keys, self._probs[indices], 0.0)  # (S + 1, T)
        if has_joint_ids:
            is_copy = linked[:, None] == tgt  # (S + 1, T)
            probs = np.where(is_copy, probs.clip(min=_COPY_PROB), probs)
        src_fractions = (np.arange(len(src)) + 0.5) / len(src)  # (S,), of the sentence
        tgt_fractions = (np.arange(len(tgt)) + 0.5) / len(tgt)  # (T,)
        distances = np.abs(src_fractions[:, None] - tgt_fractions)  # (S, T), from the diagonal
        prior = np.exp(-_DIAGONAL_TENSION * distances)  # (S, T)
        prior *= (1 - _NULL_PROB) / prior.sum(axis=0)
        probs[:-1] *= prior
        probs[-1] *= _NULL_PROB
        best = probs.argmax(axis=0)  # (T,)
        has_source = (probs.max(axis=0) > 0) & (best < len(src))
        return np.where(has_source, best, -1)
