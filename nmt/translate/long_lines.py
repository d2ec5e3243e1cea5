"""Cuts a line that is too long for the model into parts, and joins their translations.

It cuts at sentence ends; a sentence that is still too long at the marks between clauses, then at
spaces, then anywhere. It knows text and a function that encodes it; nothing of models or files.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

Encode = Callable[[Sequence[str]], list[list[int]]]

_CLOSING = "[\"'”’»)\\]}」』）】》›]*"
_SENTENCE_END = re.compile(
    rf"[.!?…؟۔।॥።၊။។．]{_CLOSING}\s+"  # scripts with spaces; every search is linear in the text
    rf"|[。！？｡]+{_CLOSING}\s*"  # scripts without
)
_CLAUSE_END = re.compile(rf"[,;:،؛፣፤–—]{_CLOSING}\s+|[、，；：､]{_CLOSING}\s*")
_SPACE = re.compile(r"\s+")
# Han, kana, and the punctuation and full-width forms that go with them: written without spaces
_UNSPACED = re.compile(
    "[\u2e80-\u303f\u3040-\u30ff\u3100-\u312f\u31a0-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\ufe30-\ufe4f\uff00-\uffdc\U00020000-\U0003ffff]"
)
_JOINERS = "\u200d\u200c\ufe0e\ufe0f"
_MAX_JOINED = 16  # characters that may belong to one


def split_line(text: str, max_tokens: int, encode: Encode) -> list[list[int]]:
    """Return the ids of the parts of `text`, in order, each of 1 to `max_tokens` tokens.

    A sentence that fits is a part of its own: that is what a model of sentences was trained on.
    Within a longer one, parts are as long as they may be.
    """
    return [ids for ids in _fit(_cut(text, sentence_ends(text)), max_tokens, encode) if ids]


def join_parts(texts: Iterable[str]) -> str:
    """Join translated parts to a line, with a space but between Chinese or Japanese."""
    line = ""
    for text in filter(None, texts):
        unspaced = line and _UNSPACED.match(line[-1]) and _UNSPACED.match(text[0])
        line += text if unspaced or not line else " " + text
    return line


def sentence_ends(text: str) -> Iterator[int]:
    """Yield where a sentence ends; before a small letter none does, as after "e.g."."""
    for match in _SENTENCE_END.finditer(text):
        following = text[match.end() : match.end() + 1]
        if not following.islower():
            yield match.end()


def _fit(pieces: list[str], max_tokens: int, encode: Encode) -> Iterator[list[int]]:
    """Yield the ids of each piece, or of the parts of one that is too long."""
    for ids, piece in zip(encode(pieces), pieces, strict=True):
        smaller = [] if len(ids) <= max_tokens else _divide(piece, len(ids), max_tokens, encode)
        if len(smaller) > 1:
            yield from _fit(smaller, max_tokens, encode)
        elif smaller:  # one character of more bytes than max_tokens
            yield encode(smaller)[0][:max_tokens]
        else:
            yield ids


def _divide(text: str, num_tokens: int, max_tokens: int, encode: Encode) -> list[str]:
    """Cut a text of `num_tokens`, too many, at clauses, or else at spaces, or else anywhere."""
    for end_of in (_CLAUSE_END, _SPACE):
        pieces = _cut(text, (match.end() for match in end_of.finditer(text)))
        if len(pieces) > 1 and len(packed := _pack(pieces, max_tokens, encode)) > 1:
            return packed
    step = max(1, len(text) * max_tokens // num_tokens - 1)
    reach = min(step - 1, _MAX_JOINED)
    return _cut(text, (_character_start(text, i, reach) for i in range(step, len(text), step)))


def _pack(pieces: list[str], max_tokens: int, encode: Encode) -> list[str]:
    """Put neighbours together as long as their tokens fit."""
    packed: list[str] = []
    room = 0
    for ids, piece in zip(encode(pieces), pieces, strict=True):
        if packed and len(ids) <= room:
            packed[-1] += piece
            room -= len(ids)
        else:
            packed.append(piece)
            room = max_tokens - len(ids)
    return packed


def _cut(text: str, places: Iterable[int]) -> list[str]:
    """Cut `text` at these places; nothing of it is lost but pieces without any character."""
    starts = [0, *places, len(text)]
    pieces = [text[start:end] for start, end in zip(starts, starts[1:], strict=False)]
    return [piece for piece in pieces if piece.strip()]


def _character_start(text: str, place: int, reach: int) -> int:
    """Move `place` back by at most `reach`, to where no accent or joined emoji is cut apart."""
    for start in range(place, place - reach - 1, -1):
        joined = unicodedata.combining(text[start]) or text[start] in _JOINERS
        if not joined and text[start - 1] != "\u200d":
            return start
    return place
