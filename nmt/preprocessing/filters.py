"""The named filters of training pairs, in a fixed order; the first that applies counts.

On text: NUL, empty side, identical sides, foreign script, language; then duplicates, which others
find. On numbers of tokens: empty, too long, ratio, unknown. Held-out pairs never come here but for
NUL, which becomes a space.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmt.config import PreprocessConfig
from nmt.preprocessing.cleaned import Cleaned, Mask

NUL = "NUL character"
EMPTY = "empty side"
IDENTICAL = "identical sides"
FOREIGN = "foreign script"
LANGUAGE = "wrong language"
DUPLICATE = "duplicate"
TOO_LONG = "too long"
RATIO = "length ratio"
UNKNOWN = "unknown tokens"
Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]


def settle_nul(cleaned: Cleaned, *, mend: bool) -> None:
    """Drop pairs with a NUL character, or put a space there and count it."""
    at_src, at_tgt = (np.array(["\0" in text for text in side], bool) for side in _sides(cleaned))
    if not mend:
        cleaned.drop(NUL, at_src, at_tgt)
        return
    for place, side, mask in zip(cleaned.places, _sides(cleaned), (at_src, at_tgt), strict=True):
        if rows := np.flatnonzero(mask).tolist():
            number = sum(side[row].count("\0") for row in rows)
            places = [place.place(int(cleaned.rows[row])) for row in rows]
            cleaned.counts.replace("NUL", number, places)
            for row in rows:
                side[row] = side[row].replace("\0", " ")


def drop_by_text(cleaned: Cleaned, config: PreprocessConfig) -> None:
    """Apply the filters on text, but for duplicates."""
    cleaned.drop(EMPTY, *(_is_empty(side) for side in _sides(cleaned)))
    if config.filter.identical:
        pairs = zip(cleaned.src, cleaned.tgt, strict=True)
        same = [src.strip() == tgt.strip() for src, tgt in pairs]
        cleaned.drop(IDENTICAL, np.array(same, bool))


def drop_by_tokens(
    cleaned: Cleaned,
    lengths: tuple[Ints, Ints],
    unknown: tuple[Ints, Ints],
    config: PreprocessConfig,
) -> Mask:
    """Apply the filters on tokens; return which pairs stay.

    `lengths` of source and target (N,) do not count EOS; `unknown` (N,) counts tokens that are the
    unknown one or a byte.
    """
    src, tgt = lengths
    limit = config.filter.max_ratio
    filters = [
        (EMPTY, src == 0, tgt == 0),
        (TOO_LONG, src + 1 > config.max_length, tgt + 1 > config.max_length),
    ]
    if limit:
        filters.append((RATIO, src > limit * tgt, tgt > limit * src))
    share = config.filter.max_unknown
    if share < 1:
        filters.append((UNKNOWN, unknown[0] > share * src, unknown[1] > share * tgt))
    stay = np.arange(len(src))
    for reason, at_src, at_tgt in filters:
        stay = stay[cleaned.drop(reason, at_src[stay], at_tgt[stay])]
    keep = np.zeros(len(src), bool)
    keep[stay] = True
    return keep


def _sides(cleaned: Cleaned) -> tuple[list[str], list[str]]:
    return cleaned.src, cleaned.tgt


def _is_empty(texts: list[str]) -> Mask:
    return np.array([not text or text.isspace() for text in texts], bool)
