"""Split a line that is too long for the model, and join the translations of its parts.

A line is split at sentence ends; a sentence that is still too long at clause ends, then at spaces,
then anywhere. This module depends on text and a function that encodes it, not on models or files.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

Encode = Callable[[Sequence[str]], list[list[int]]]

_CLOSING = "[\"'”’»)\\]}」』）】》›]*"
_SENTENCE_END = re.compile(
    rf"[.!?…؟۔।॥።၊။។．]{_CLOSING}\s+"  # scripts with spaces; the search takes linear time
    rf"|[。！？｡]+{_CLOSING}\s*"  # scripts without
)
_CLAUSE_END = re.compile(rf"[,;:،؛፣፤–—]{_CLOSING}\s+|[、，；：､]{_CLOSING}\s*")
_SPACE = re.compile(r"\s+")
# Han, kana, and their punctuation and full-width forms, which are written without spaces
_UNSPACED = re.compile(
    "[\u2e80-\u303f\u3040-\u30ff\u3100-\u312f\u31a0-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\ufe30-\ufe4f\uff00-\uffdc\U00020000-\U0003ffff]"
)
# Zero-width joiners and variation selectors
_JOINERS = "\u200d\u200c\ufe0e\ufe0f"
_MAX_JOINED = 16  # code points that may form one character


def split_line(text: str, max_tokens: int, encode: Encode) -> list[list[int]]:
    """Return the ids of the parts of `text` in order, each of 1 to `max_tokens` tokens.

    A sentence that fits becomes one part, since models are trained on sentences. Parts of a longer
    sentence are as long as possible.
    """
    rows = _encode_parts(_cut(text, sentence_ends(text)), max_tokens, encode)
    return [ids for ids in rows if ids]


def join_parts(texts: Iterable[str]) -> str:
    """Join translated parts with spaces, except between Chinese or Japanese characters."""
    line = ""
    for text in filter(None, texts):
        is_unspaced = line and _UNSPACED.match(line[-1]) and _UNSPACED.match(text[0])
        line += text if is_unspaced or not line else " " + text
    return line


def sentence_ends(text: str) -> Iterator[int]:
    """Yield the ends of sentences. A lower-case letter does not begin one, as after "e.g."."""
    for match in _SENTENCE_END.finditer(text):
        following = text[match.end() : match.end() + 1]
        if not following.islower():
            yield match.end()


def _encode_parts(parts: list[str], max_tokens: int, encode: Encode) -> Iterator[list[int]]:
    """Yield the ids of each part; parts that are too long are divided further."""
    for ids, part in zip(encode(parts), parts, strict=True):
        if len(ids) <= max_tokens:
            yield ids
            continue
        smaller_parts = _divide(part, len(ids), max_tokens, encode)
        if len(smaller_parts) > 1:
            yield from _encode_parts(smaller_parts, max_tokens, encode)
        else:  # one character of more bytes than max_tokens
            yield encode(smaller_parts)[0][:max_tokens]


def _divide(text: str, num_tokens: int, max_tokens: int, encode: Encode) -> list[str]:
    """Divide a text of too many tokens at clause ends, else at spaces, else anywhere."""
    for pattern in (_CLAUSE_END, _SPACE):
        ends = (match.end() for match in pattern.finditer(text))
        parts = _merge(_cut(text, ends), max_tokens, encode)
        if len(parts) > 1:
            return parts
    step = max(1, len(text) * max_tokens // num_tokens - 1)
    max_shift = min(step - 1, _MAX_JOINED)
    positions = range(step, len(text), step)
    return _cut(text, (_character_start(text, position, max_shift) for position in positions))


def _merge(parts: list[str], max_tokens: int, encode: Encode) -> list[str]:
    """Merge neighboring parts as long as their tokens fit."""
    merged: list[str] = []
    num_free = 0  # tokens that still fit in the last merged part
    for ids, part in zip(encode(parts), parts, strict=True):
        if merged and len(ids) <= num_free:
            merged[-1] += part
            num_free -= len(ids)
        else:
            merged.append(part)
            num_free = max_tokens - len(ids)
    return merged


def _cut(text: str, positions: Iterable[int]) -> list[str]:
    """Cut `text` at these positions; parts without any character are dropped."""
    bounds = [0, *positions, len(text)]
    parts = [text[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    return [part for part in parts if part.strip()]


def _character_start(text: str, position: int, max_shift: int) -> int:
    """Move a position back by at most `max_shift`, so that it splits no accent or joined emoji."""
    for start in range(position, position - max_shift - 1, -1):
        is_joined = unicodedata.combining(text[start]) or text[start] in _JOINERS
        if not is_joined and text[start - 1] != "\u200d":
            return start
    return position
