"""Word alignment of training pairs by IBM model 1 (Brown et al., 1993).

A link joins a source token and a target token of the same pair. The model estimates p(target id |
source id) for all ids that are linked in the training pairs.
"""

# Estimation: N links, U distinct links (source id, target id), M target tokens of all pairs
# Model: K distinct links, which are the U links except the links of the null id
# Alignment: B pairs, S source tokens, T target tokens, P distinct pairs of ids, L best links

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from nmt.data.batch import Ids
from nmt.data.shuffle import Pairs, shuffle_pairs

MAX_LINKS = 20_000_000  # number of links of all sampled pairs; they take 1 GB of memory
NUM_ITERATIONS = 4  # number of steps of expectation maximization
_DIAGONAL_TENSION = 4.0  # lambda of Dyer et al. (2013): penalty for links off the diagonal
_NULL_PROB = 0.08  # probability that a token has no counterpart
_MAX_CELLS = 1 << 16  # number of possible links that are compared at once, with padding
_MIN_COPY_PROB = 0.5  # lowest probability of a link of equal ids, such as names and numbers

Array = np.ndarray[Any, np.dtype[Any]]


class Links(NamedTuple):
    """All possible links of pairs. The links of a target token are consecutive."""

    src: Array  # (N,), source ids; each target token also has a link to the null id
    tgt: Array  # (N,), target ids
    links_per_tgt: Array  # (M,), the number of links of each target token


class Translations(NamedTuple):
    """The probabilities p(target id | source id) of distinct links, sorted by source and target."""

    src: Array  # (U,)
    tgt: Array  # (U,)
    probs: Array  # (U,)


def draw_pairs(pairs: Pairs) -> list[tuple[Ids, Ids]]:
    """Draw pairs at random, each at most once, until they have `MAX_LINKS` links."""
    sampled: list[tuple[Ids, Ids]] = []
    num_links = 0
    for src_ids, tgt_ids in shuffle_pairs(pairs):
        sampled.append((src_ids, tgt_ids))
        num_links += (len(src_ids) + 1) * len(tgt_ids)
        if num_links >= MAX_LINKS:
            break
    return sampled


def make_links(pairs: Iterable[tuple[Ids, Ids]], null_id: int) -> Links:
    """Return all possible links of `pairs`. Each source gets an additional token, `null_id`."""
    src = []
    tgt = []
    links_per_tgt = []
    for src_ids, tgt_ids in pairs:
        src_array = np.append(src_ids, null_id).astype(np.int64)
        tgt_array = np.asarray(tgt_ids, dtype=np.int64)
        num_src = len(src_array)
        num_tgt = len(tgt_array)
        # the links of the first target token with all source tokens, then of the second one, ...
        src.append(np.tile(src_array, num_tgt))
        tgt.append(np.repeat(tgt_array, num_src))
        links_per_tgt.append(np.full(num_tgt, num_src))
    return Links(np.concatenate(src), np.concatenate(tgt), np.concatenate(links_per_tgt))


def estimate_translations(links: Links, num_src_ids: int, num_tgt_ids: int) -> Translations:
    """Estimate IBM model 1 with expectation maximization.

    `num_src_ids` and `num_tgt_ids` are the sizes of the vocabularies; the null id counts as a
    source id.
    """
    link_keys = links.src * num_tgt_ids + links.tgt  # (N,), a number for each pair of ids
    distinct_keys, key_indices = np.unique(link_keys, return_inverse=True)  # (U,), (N,)
    src, tgt = np.divmod(distinct_keys, num_tgt_ids)  # (U,) each
    probs = np.ones(len(distinct_keys))  # uniform at first, not normalized
    link_ends = np.cumsum(links.links_per_tgt)  # (M,)
    link_starts = link_ends - links.links_per_tgt  # (M,), the first link of each target token
    for _ in range(NUM_ITERATIONS):
        # expectation: p(source position | target token), (N,), then the expected counts, (U,)
        weights = probs[key_indices]
        # for each target token, the sum from its first link up to the first link of the next token
        totals = np.add.reduceat(weights, link_starts)  # (M,)
        weights /= np.repeat(totals, links.links_per_tgt)
        counts = np.bincount(key_indices, weights, minlength=len(distinct_keys))
        # maximization: p(target id | source id), (U,)
        src_totals = np.bincount(src, counts, minlength=num_src_ids)  # (num_src_ids,)
        probs = counts / src_totals[src]
    return Translations(src, tgt, probs)


class WordAligner:
    """Aligns the tokens of pairs with IBM model 1, estimated from training pairs.

    Every process estimates the same model.
    """

    def __init__(self, pairs: Pairs, *, src_vocab_size: int, tgt_vocab_size: int) -> None:
        """Estimate the probabilities of both directions.

        Args:
            pairs: training pairs of source and target ids.
            src_vocab_size: number of source ids.
            tgt_vocab_size: number of target ids.
        """
        sampled_pairs = draw_pairs(pairs)
        links = make_links(sampled_pairs, null_id=src_vocab_size)
        forward = estimate_translations(links, src_vocab_size + 1, tgt_vocab_size)
        reversed_pairs = [(tgt_ids, src_ids) for src_ids, tgt_ids in sampled_pairs]
        reversed_links = make_links(reversed_pairs, null_id=tgt_vocab_size)
        backward = estimate_translations(reversed_links, tgt_vocab_size + 1, src_vocab_size)
        self._tgt_vocab_size = tgt_vocab_size
        # Both models have the same K links without the null id. These links come first, since the
        # null id is the highest id. `forward` sorts them by source id, and `backward` by target id.
        null_start = int(np.searchsorted(forward.src, src_vocab_size))  # K
        # in `backward`, the target ids are in `src`, and the source ids in `tgt`
        backward_src_ids = backward.tgt
        backward_tgt_ids = backward.src
        forward_keys = forward.src * tgt_vocab_size + forward.tgt  # a number for each pair of ids
        backward_keys = backward_src_ids * tgt_vocab_size + backward_tgt_ids
        # For each of the K links in the order of `forward`, its index in `backward`. The keys of
        # `forward` ascend, so this is the order that sorts the keys of `backward`.
        backward_indices = np.argsort(backward_keys[:null_start])
        self._keys = forward_keys[:null_start]  # (K,), ascending
        self._tgt_probs = forward.probs[:null_start]  # (K,), p(target id | source id)
        self._src_probs = backward.probs[backward_indices]  # (K,), p(source id | target id)
        self._null_tgt_probs = np.zeros(tgt_vocab_size)  # p(target id | null id)
        self._null_tgt_probs[forward.tgt[null_start:]] = forward.probs[null_start:]
        self._null_src_probs = np.zeros(src_vocab_size)  # p(source id | null id)
        self._null_src_probs[backward_src_ids[null_start:]] = backward.probs[null_start:]

    def align(self, pairs: Sequence[tuple[Ids, Ids]], *, has_joint_ids: bool) -> Array:
        """Return the best links of pairs, (L, 3): pair, target position and source position.

        A link must be the best for its source token and for its target token, so that a token has
        at most one link. With `has_joint_ids`, equal ids on both sides are the same text. The links
        of a pair do not depend on the other pairs.
        """
        all_links = [np.empty((0, 3), dtype=np.int64)]
        for indices in _divide_pairs(pairs):
            links = self._align_padded([pairs[i] for i in indices], has_joint_ids)
            # column 0 has indices in the group; replace them by the indices in `pairs`
            pair_indices = np.array(indices)
            links[:, 0] = pair_indices[links[:, 0]]
            all_links.append(links)
        joined = np.concatenate(all_links)
        order = np.argsort(joined[:, 0], kind="stable")
        return joined[order]

    def _align_padded(self, pairs: Sequence[tuple[Ids, Ids]], has_joint_ids: bool) -> Array:
        """Align pairs in arrays of all their possible links, see `align`."""
        # Padding has the id -1, and a lookup at -1 returns the last value of an array. This value
        # has no effect, since links with padding have the prior 0.
        src, src_relative = _pad([src_ids for src_ids, _ in pairs])  # (B, S) each
        tgt, tgt_relative = _pad([tgt_ids for _, tgt_ids in pairs])  # (B, T) each
        src_column = src[:, :, None]  # (B, S, 1)
        tgt_row = tgt[:, None, :]  # (B, 1, T)
        is_unpadded = (src_column >= 0) & (tgt_row >= 0)  # (B, S, T), False for padding
        keys = src_column * self._tgt_vocab_size + tgt_row  # (B, S, T)
        # The search for keys takes most of the time. Sorted and distinct keys make it faster.
        # `distinct_keys[inverse_indices]` are the keys of all links again.
        distinct_keys, inverse_indices = np.unique(keys[is_unpadded], return_inverse=True)
        distinct_tgt_probs, distinct_src_probs = self._look_up_probs(distinct_keys)  # (P,) each
        tgt_probs = np.zeros(keys.shape)
        src_probs = np.zeros(keys.shape)
        tgt_probs[is_unpadded] = distinct_tgt_probs[inverse_indices]
        src_probs[is_unpadded] = distinct_src_probs[inverse_indices]
        if has_joint_ids:
            copy_prob = np.where(src_column == tgt_row, _MIN_COPY_PROB, 0.0)
            tgt_probs = np.maximum(tgt_probs, copy_prob)
            src_probs = np.maximum(src_probs, copy_prob)
        # (B, S, T): distances of links from the diagonal
        distances = np.abs(src_relative[:, :, None] - tgt_relative[:, None, :])
        prior = np.where(is_unpadded, np.exp(-_DIAGONAL_TENSION * distances), 0.0)  # (B, S, T)
        null_tgt_probs = self._null_tgt_probs[tgt][:, None, :]  # (B, 1, T)
        null_src_probs = self._null_src_probs[src][:, :, None]  # (B, S, 1)
        # (B, S, T) each: the best source position of each target token, and the reverse
        is_best_for_tgt = _mark_best(tgt_probs, prior, null_tgt_probs, axis=1)
        is_best_for_src = _mark_best(src_probs, prior, null_src_probs, axis=2)
        is_best = is_best_for_tgt & is_best_for_src
        pair_indices, src_positions, tgt_positions = is_best.nonzero()  # (L,) each
        return np.stack([pair_indices, tgt_positions, src_positions], axis=1)

    def _look_up_probs(self, keys: Array) -> tuple[Array, Array]:
        """Return p(target id | source id) and p(source id | target id) for the keys of links (P,).

        Both are 0 for a link that the model does not have.
        """
        # a key that the model lacks gets the index of the next higher key, or the last index
        indices = np.searchsorted(self._keys, keys)  # (P,)
        indices = indices.clip(max=len(self._keys) - 1)
        is_in_model = self._keys[indices] == keys
        tgt_probs = np.where(is_in_model, self._tgt_probs[indices], 0.0)
        src_probs = np.where(is_in_model, self._src_probs[indices], 0.0)
        return tgt_probs, src_probs


def link_words(
    src_pieces: Sequence[str], tgt_pieces: Sequence[str], positions: Sequence[int]
) -> list[tuple[int, int]]:
    """Convert links of pieces to links of words: (source word, target word), counted from 0.

    A word begins at a piece with a space. `positions` has the linked source position of each target
    piece. A target piece that is linked to EOS, after the last source piece, gives no link.
    """
    src_words = number_words(src_pieces)
    tgt_words = number_words(tgt_pieces)
    word_links = set()
    for tgt_word, position in zip(tgt_words, positions, strict=True):
        if position < len(src_pieces):
            word_links.add((src_words[position], tgt_word))
    return sorted(word_links)


def number_words(pieces: Sequence[str]) -> list[int]:
    """Return for each piece the number of its word, from 0."""
    numbers = []
    number = -1
    for piece in pieces:
        if piece.startswith("▁"):
            number += 1
        numbers.append(max(number, 0))  # the first word may begin without a space
    return numbers


def _divide_pairs(pairs: Sequence[tuple[Ids, Ids]]) -> list[list[int]]:
    """Divide pairs into groups of similar length, whose arrays have at most `_MAX_CELLS` cells.

    Returns the indices of the pairs of each group. A pair that exceeds the limit gets a group of
    its own. Leaves out pairs with an empty side.
    """
    groups: list[list[int]] = []
    max_src = 0  # lengths of the longest sides of the last group
    max_tgt = 0
    src_lengths = [len(src_ids) for src_ids, _ in pairs]
    for index in np.argsort(src_lengths, kind="stable").tolist():
        src_ids, tgt_ids = pairs[index]
        if len(src_ids) == 0 or len(tgt_ids) == 0:
            continue
        new_max_src = max(max_src, len(src_ids))  # if the pair joins the last group
        new_max_tgt = max(max_tgt, len(tgt_ids))
        fits_in_group = False
        if groups:
            num_pairs = len(groups[-1]) + 1
            fits_in_group = num_pairs * new_max_src * new_max_tgt <= _MAX_CELLS
        if fits_in_group:
            groups[-1].append(index)
            max_src = new_max_src
            max_tgt = new_max_tgt
        else:
            groups.append([index])
            max_src = len(src_ids)
            max_tgt = len(tgt_ids)
    return groups


def _pad(rows: Sequence[Ids]) -> tuple[Array, Array]:
    """Return ids, padded with -1, and their relative positions in the row, from 0 to 1.

    The shape of both is (B, length of the longest row).
    """
    lengths = np.array([len(ids) for ids in rows])[:, None]  # (B, 1)
    positions = np.arange(lengths.max())
    is_token = positions < lengths
    padded = np.full(is_token.shape, -1)
    padded[is_token] = np.concatenate(rows)
    return padded, (positions + 0.5) / lengths.clip(min=1)


def _mark_best(probs: Array, prior: Array, null_probs: Array, *, axis: int) -> Array:
    """Return a mask (B, S, T) of the best link of each token on one side.

    With `axis` 1, marks the best source position of each target token; with `axis` 2, the best
    target position of each source token. Marks no position for a token if the null id is better
    than all positions. The shape of the arguments is (B, S, T), except that `null_probs` has size 1
    along `axis`.
    """
    # The last cumulative sum is the sum of all values. It adds them from the first to the last, so
    # that padding, which comes last, does not change it. `sum` adds them in an order that depends
    # on the padded length, so its rounding errors would differ.
    cumulative = np.cumsum(prior, axis)
    totals = np.take(cumulative, [-1], axis)  # size 1 along `axis`
    totals[totals == 0] = 1.0  # for padding
    # with these factors, the priors of all positions of a token have the sum 1 - _NULL_PROB
    prior_factors = (1 - _NULL_PROB) / totals
    scores = probs * prior * prior_factors
    highest = scores.max(axis, keepdims=True)
    null_scores = _NULL_PROB * null_probs  # size 1 along `axis`
    has_link = (highest > 0) & (highest >= null_scores)
    best_positions = scores.argmax(axis, keepdims=True)  # size 1 along `axis`
    is_best = np.zeros(scores.shape, dtype=bool)
    # copies `has_link` to the best positions, in place; all other positions stay False
    np.put_along_axis(is_best, best_positions, has_link, axis)
    return is_best
