"""Split a line that is too long for the model, and join the translations of its parts.

A line is split at the ends of sentences. A sentence that is still too long is split at the ends of
clauses, else at spaces, else anywhere.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

Encode = Callable[[Sequence[str]], list[list[int]]]
"""Maps texts to their token ids."""
FindSpans = Callable[[str], Sequence[range]]
"""Returns the spans of a text that should not be cut, such as terms: sorted, without overlap."""

_CLOSING = "[\"'”’»)\\]}」』）】》›]*"
_SENTENCE_END = re.compile(
    # scripts with spaces between sentences; a `+` after the marks would take quadratic time
    rf"[.!?…؟۔।॥።၊။។．]{_CLOSING}\s+"
    rf"|[。！？｡]+{_CLOSING}\s*"  # scripts without spaces
)
_CLAUSE_END = re.compile(rf"[,;:،؛፣፤–—]{_CLOSING}\s+|[、，；：､]{_CLOSING}\s*")
_SPACE = re.compile(r"\s+")
# Han, kana, and their punctuation and full-width forms, which are written without spaces. `re`
# compiles the pattern at its first use: this takes 2 ms, and few texts need it.
_UNSPACED = (
    "[\u2e80-\u303f\u3040-\u30ff\u3100-\u312f\u31a0-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\ufe30-\ufe4f\uff00-\uffdc\U00020000-\U0003ffff]"
)
_ZERO_WIDTH_JOINER = "\u200d"  # joins the emoji before and after it
_JOINERS = f"{_ZERO_WIDTH_JOINER}\u200c\ufe0e\ufe0f"  # also the non-joiner, variation selectors
_MAX_CHARACTER_LENGTH = 16  # largest number of code points of a visible character


def split_line(
    text: str, max_tokens: int, encode: Encode, find_spans: FindSpans = lambda text: ()
) -> list[list[int]]:
    """Return the ids of the fragments of `text` in order, each of 1 to `max_tokens` tokens.

    A sentence of at most `max_tokens` tokens becomes one fragment, since models are trained on
    sentences. A longer sentence is divided into fragments that are as long as possible. A span of
    `find_spans` is only divided if it is too long itself.
    """
    sentences = _cut(text, sentence_ends(text), find_spans(text))
    fragments = _encode_fragments(sentences, max_tokens, encode, find_spans)
    return [ids for ids in fragments if ids]


def join_parts(texts: Iterable[str]) -> str:
    """Join texts with spaces, except between Chinese or Japanese characters."""
    line = ""
    for text in texts:
        line += space_between(line, text) + text
    return line


def space_between(previous: str, text: str) -> str:
    """Return the space between two texts, or "" if one is empty or if they need no space."""
    if not previous or not text:
        return ""
    is_unspaced = re.match(_UNSPACED, previous[-1]) and re.match(_UNSPACED, text[0])
    return "" if is_unspaced else " "


def sentence_ends(text: str) -> Iterator[int]:
    """Yield the position after each sentence.

    A period before a lower-case letter, as in "e.g. this", does not end a sentence.
    """
    for match in _SENTENCE_END.finditer(text):
        end = match.end()
        next_character = text[end : end + 1]  # "" at the end of the text
        if not next_character.islower():
            yield end


def _encode_fragments(
    fragments: list[str], max_tokens: int, encode: Encode, find_spans: FindSpans
) -> Iterator[list[int]]:
    """Yield the ids of each fragment; fragments that are too long are divided further."""
    for ids, fragment in zip(encode(fragments), fragments, strict=True):
        if len(ids) <= max_tokens:
            yield ids
            continue
        fragment = fragment.strip()  # otherwise, a cut could separate only the space at an end
        subfragments = _divide(fragment, len(ids), max_tokens, encode, find_spans(fragment))
        if len(subfragments) == 1:  # a span is too long
            subfragments = _divide(fragment, len(ids), max_tokens, encode, ())
        if len(subfragments) > 1:
            yield from _encode_fragments(subfragments, max_tokens, encode, find_spans)
        else:  # a single visible character, such as a joined emoji in bytes, with too many tokens
            character_ids = encode(subfragments)[0]
            yield character_ids[:max_tokens]


def _divide(
    text: str, num_tokens: int, max_tokens: int, encode: Encode, spans: Sequence[range]
) -> list[str]:
    """Divide a text of too many tokens at the ends of clauses, else at spaces, else anywhere.

    No cut divides one of `spans`.
    """
    for pattern in (_CLAUSE_END, _SPACE):
        ends = (match.end() for match in pattern.finditer(text))
        fragments = _merge(_cut(text, ends, spans), max_tokens, encode)
        if len(fragments) > 1:
            return fragments
    mean_length = len(text) * max_tokens // num_tokens  # mean characters of `max_tokens` tokens
    step = max(1, mean_length - 1)  # one less than the mean, so that most fragments fit
    max_shift = min(step - 1, _MAX_CHARACTER_LENGTH)  # below `step`, so that positions increase
    positions = [0]
    for step_end in range(step, len(text), step):
        position = _character_start(text, step_end, max_shift)
        span = _find_span(spans, position)
        if span is not None and span.start > positions[-1]:
            position = span.start
        elif span is not None:  # the last cut is at the start of the span
            position = span.stop
        if position > positions[-1]:
            positions.append(position)
    return _cut(text, positions)


def _merge(fragments: list[str], max_tokens: int, encode: Encode) -> list[str]:
    """Merge neighboring fragments as long as the result has at most `max_tokens` tokens."""
    merged: list[str] = []
    num_free = 0  # number of tokens that still fit in the last merged fragment
    for ids, fragment in zip(encode(fragments), fragments, strict=True):
        if merged and len(ids) <= num_free:
            merged[-1] += fragment
            num_free -= len(ids)
        else:
            merged.append(fragment)
            num_free = max_tokens - len(ids)
    return merged


def _cut(text: str, positions: Iterable[int], spans: Sequence[range] = ()) -> list[str]:
    """Cut `text` at `positions` outside of `spans`; drop fragments without visible characters."""
    bounds = [0]
    for position in positions:
        if _find_span(spans, position) is None:
            bounds.append(position)
    bounds.append(len(text))
    fragments = []
    for start, end in pairwise(bounds):
        if text[start:end].strip():
            fragments.append(text[start:end])
    return fragments


def _find_span(spans: Sequence[range], position: int) -> range | None:
    """Return the span that a cut at `position` would divide, if any; `spans` are sorted."""
    # the last span that starts before the position
    index = bisect_left(spans, position, key=lambda span: span.start) - 1
    if index >= 0 and position < spans[index].stop:
        return spans[index]
    return None


def _character_start(text: str, position: int, max_shift: int) -> int:
    """Move a position back, by at most `max_shift`, to where a visible character starts.

    Otherwise a cut could separate an accent from its letter, or split a joined emoji.
    """
    for start in range(position, position - max_shift - 1, -1):
        is_joined = unicodedata.combining(text[start]) or text[start] in _JOINERS
        if not is_joined and text[start - 1] != _ZERO_WIDTH_JOINER:
            return start
    return position
