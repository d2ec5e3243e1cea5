"""Pairs with the lines before them, which a model of documents reads and writes on both sides.

Line i gets i mod (context + 1) lines, so that the model knows every number of them. They are lines
that follow each other in a chunk, without an empty line or one that was left out between them.
"""

# N pairs of a chunk

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nmt.config import PreprocessConfig
from nmt.data import Lengths
from nmt.data.languages import SEPARATOR, tag_lines
from nmt.data.tokenizer import Tokenizer
from nmt.preprocess.clean import Cleaned

Array = np.ndarray[Any, np.dtype[Any]]


class Contexts:
    """The lines that each pair of a chunk begins with: those from `starts[i]` on, before line i.

    Args:
        cleaned: the pairs that are kept.
        lengths: their tokens on both sides, tags included, EOS not (N, 2).
        tokenizers: of source and target.
    """

    def __init__(
        self,
        cleaned: Cleaned,
        lengths: Lengths,
        tokenizers: tuple[Tokenizer, Tokenizer],
        config: PreprocessConfig,
    ) -> None:
        tags = cleaned.chunk.source.tags
        self.tags = (tags.src, tags.tgt)
        self.tag_sizes = [len(t.encode(tag)) for t, tag in zip(tokenizers, self.tags, strict=True)]
        self.separators = [tokenizer.encode(SEPARATOR) for tokenizer in tokenizers]
        bare = lengths - self.tag_sizes  # (N, 2)
        added = bare + [len(separator) for separator in self.separators]
        self.starts: list[int] = []
        lines = cleaned.lines.tolist()
        for i, line in enumerate(lines):
            start, sizes = i, lengths[i] + 1  # with EOS
            for j in range(i - 1, max(i - line % (config.data.context + 1), 0) - 1, -1):
                sizes = sizes + added[j]
                is_apart = lines[j] + 1 != lines[j + 1] or 0 in bare[j : j + 2]
                if is_apart or sizes.max() > config.max_length:
                    break
                start = j
            self.starts.append(start)

    def join_ids(self, flat: Array, offsets: Array, side: int) -> tuple[Array, Array]:
        """Return the ids of all lines with their contexts, and where each begins (N + 1,)."""
        lines = [flat[start:end] for start, end in zip(offsets, offsets[1:], strict=False)]
        separator = np.array(self.separators[side], dtype=flat.dtype)
        joined = []
        for i, start in enumerate(self.starts):
            others = (lines[j][self.tag_sizes[side] :] for j in range(start + 1, i + 1))
            joined.append([lines[start], *(part for one in others for part in (separator, one))])
        sizes = [sum(map(len, parts)) for parts in joined]
        every = [part for parts in joined for part in parts]
        return np.concatenate([flat[:0], *every]), np.cumsum([0, *sizes])

    def join_texts(self, lines: Sequence[str], side: int) -> list[str]:
        """Return the texts of all lines with their contexts; `lines` have no tags."""
        joined = [f" {SEPARATOR} ".join(lines[s : i + 1]) for i, s in enumerate(self.starts)]
        return tag_lines(joined, self.tags[side])
