"""Word alignments that come with the text, and their conversion to links of pieces.

A link joins a word of the source and a word of the target. Words are separated by spaces, and
counted from 0. In a data folder, a language tag counts as a word. In any segmentation, a word
begins at a piece with a space.
"""

# L links of words, N source pieces, M target pieces, K links of pieces

from __future__ import annotations

from typing import Any

import numpy as np

from nmt.data.tokenizer import Tokenizer
from nmt.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]


def mark_word_starts(tokenizer: Tokenizer) -> Array:
    """Return which pieces of the vocabulary begin a word, (V,)."""
    return np.array([piece.startswith("▁") for piece in tokenizer.all_pieces()])


def parse_links(line: str) -> Array:
    """Read an alignment such as "0-0 1-2": source and target words, (L, 2)."""
    links = [link.split("-") for link in line.split()]
    return np.array(links, dtype=np.int64).reshape(-1, 2)


def link_pieces(links: Array, src_starts: Array, tgt_starts: Array) -> Array:
    """Return the links (K, 2) of pieces: target position and source position.

    A link of two words gives a link for each piece of the target word. The linked source piece has
    the same relative position in the source word, rounded down. Raises `DataError` for a word that
    the pair does not have.

    Args:
        links: source and target words (L, 2).
        src_starts: which source pieces begin a word (N,).
        tgt_starts: which target pieces begin a word (M,).
    """
    # the position of the first piece of each word, followed by the number of pieces
    src_bounds = np.append(np.flatnonzero(src_starts), len(src_starts))
    tgt_bounds = np.append(np.flatnonzero(tgt_starts), len(tgt_starts))
    src_words = links[:, 0].astype(np.int64)  # (L,)
    tgt_words = links[:, 1].astype(np.int64)
    num_words = (len(src_bounds) - 1, len(tgt_bounds) - 1)
    if (links < 0).any() or (links >= num_words).any():
        raise DataError(
            f"an alignment refers to words beyond the {num_words[0]} source and {num_words[1]} "
            "target words of its pair; run nmt-preprocess again"
        )
    # (L,): number of pieces of each linked word
    src_lengths = src_bounds[src_words + 1] - src_bounds[src_words]
    tgt_lengths = tgt_bounds[tgt_words + 1] - tgt_bounds[tgt_words]
    # (K,) from here: for each link of pieces, the index of its link of words
    link_indices = np.repeat(np.arange(len(links)), tgt_lengths)
    first_links = np.cumsum(tgt_lengths) - tgt_lengths  # (L,), first of the K links of pieces
    # positions of the pieces, counted from the start of their words
    tgt_offsets = np.arange(len(link_indices)) - first_links[link_indices]
    src_offsets = tgt_offsets * src_lengths[link_indices] // tgt_lengths[link_indices]
    tgt_positions = tgt_bounds[tgt_words][link_indices] + tgt_offsets
    src_positions = src_bounds[src_words][link_indices] + src_offsets
    return np.stack([tgt_positions, src_positions], axis=1)
