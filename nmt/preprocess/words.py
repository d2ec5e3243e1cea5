"""Encodes lines by their words, of which few are new: each is cut once and then looked up.

The ids are those that SentencePiece gives for the whole line. That holds for BPE models whose
pieces do not reach over a space and whose normalisation treats spaces as SentencePiece's own rules
do; `cuts_at_spaces` tells them from others.
"""

# N lines, W words of all lines, U different words

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from nmt.config import NORMALIZATIONS
from nmt.data.tokenizer import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
_SPACE = "▁"  # stands for a space in pieces; text that holds one is not cut at spaces alone
_MOST_WORDS = 1 << 17  # kept, some 25 MB
_END_OF_LINE = "\n"  # its number is 0, and it has no ids


@dataclass(frozen=True)
class Ids:
    """The ids of N lines, without BOS and EOS: those of line i are `flat[offsets[i] :
    offsets[i + 1]]`.
    """

    flat: Array
    offsets: Array  # (N + 1,)

    @property
    def lengths(self) -> Array:
        """Number of ids of each line, (N,)."""
        return np.diff(self.offsets)

    def select(self, keep: Array) -> Ids:
        """Return the ids of the lines that `keep` (N,) marks."""
        if keep.all():
            return self
        return Ids(self.flat[np.repeat(keep, self.lengths)], cumulate(self.lengths[keep]))


class LineEncoder:
    """Encodes lines of one language with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
        self._has_words = cuts_at_spaces(tokenizer)
        self._words = _Words(self._encode_lines([""]))

    def encode(self, lines: list[str]) -> Ids:
        """Return the ids of N lines, none of which holds a line break."""
        text = f" {_END_OF_LINE} ".join(lines)
        if not lines or not self._has_words or _SPACE in text:
            return self._encode_lines(lines)
        words = text.split(" ")
        if new := set(words).difference(self._words.numbers):
            self._words.add(list(new), self._encode_lines(list(new)))
        ids = self._words.look_up(words)
        self._words.forget_rare()
        return ids

    def _encode_lines(self, lines: list[str]) -> Ids:
        ids = self._tokenizer.encode_batch(lines, 1)
        offsets = cumulate(np.fromiter(map(len, ids), np.int64, len(ids)))
        return Ids(np.fromiter(chain.from_iterable(ids), self._dtype, offsets[-1]), offsets)


class _Words:
    """The ids of words; word number i is row i of `_ids`, and 0 is the end of a line."""

    def __init__(self, end_of_line: Ids) -> None:
        self.numbers = {_END_OF_LINE: 0}
        self._ids = end_of_line
        self._uses = np.zeros(1, dtype=np.int64)  # (U,)

    def add(self, words: list[str], ids: Ids) -> None:
        first = len(self.numbers)
        self.numbers.update(zip(words, range(first, first + len(words)), strict=True))
        lengths = np.concatenate([self._ids.lengths, ids.lengths])
        self._ids = Ids(np.concatenate([self._ids.flat, ids.flat]), cumulate(lengths))
        self._uses = np.concatenate([self._uses, np.zeros(len(words), dtype=np.int64)])

    def look_up(self, words: list[str]) -> Ids:
        numbers = np.fromiter(map(self.numbers.__getitem__, words), np.int64, len(words))  # (W,)
        self._uses += np.bincount(numbers, minlength=len(self._uses))
        ends = cumulate(self._ids.lengths[numbers])  # (W + 1,)
        shift = self._ids.offsets[numbers] - ends[:-1]  # from places in the lines to those in _ids
        flat = self._ids.flat[np.arange(ends[-1]) + np.repeat(shift, np.diff(ends))]
        line_ends = ends[:-1][numbers == 0]
        return Ids(flat, np.concatenate([[0], line_ends, ends[-1:]]))

    def forget_rare(self) -> None:
        """Keep the half that was used most when there are too many."""
        if len(self.numbers) <= _MOST_WORDS:
            return
        keep = np.zeros(len(self.numbers), dtype=bool)
        keep[np.argpartition(self._uses, -_MOST_WORDS // 2)[-_MOST_WORDS // 2 :]] = True
        keep[0] = True
        stay = [word for word, is_kept in zip(self.numbers, keep.tolist(), strict=True) if is_kept]
        self.numbers = {word: number for number, word in enumerate(stay)}
        self._ids, self._uses = self._ids.select(keep), self._uses[keep]


def cumulate(lengths: Array) -> Array:
    """Return where each of N parts of a row begins, and the end, (N + 1,)."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    """Say whether the words of a line can be encoded one by one.

    So it is for BPE, where merges of one word do not look at the next. Not for unigram models,
    whose sums of scores may round another way.
    """
    trainer, normalizer = _part(tokenizer.model, 2), _part(tokenizer.model, 3)
    bpe, yes, no = 2, 1, 0
    name = bytes(normalizer.get(1, b"")).decode("utf-8")
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    return (
        trainer.get(3) == bpe
        and trainer.get(24, no) == no  # treat_whitespace_as_suffix
        and name in NORMALIZATIONS
        and all(normalizer.get(field, yes) == yes for field in (3, 4, 5))  # of spaces
        and _SPACE in pieces
        and not any(_SPACE in piece[1:] for piece in pieces)
    )


def _part(model: bytes, number: int) -> dict[int, Any]:
    """Return the fields of a message in the model; parts of it that come later add to it."""
    parts = [value for field, value in _fields(model) if field == number]
    return dict(_fields(b"".join(parts)))


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """Yield number and value of the fields of a message of protocol buffers.

    A model is a `ModelProto` (sentencepiece_model.proto), whose classes need another package.
    """
    view, place = memoryview(message), 0
    while place < len(view):
        key, place = _varint(view, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(view, place)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            size, place = _varint(view, place)
        yield key >> 3, view[place : place + size]
        place += size


def _varint(view: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place
