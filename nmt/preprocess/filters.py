"""The named filters of training pairs, in a fixed order; the first that applies counts.

On text: NUL, empty side, identical sides, foreign script, language; then duplicates, which others
find. On numbers of tokens: empty, too long, ratio, unknown. Held-out pairs never come here but for
NUL, which becomes a space.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nmt.config import PreprocessConfig
from nmt.preprocess.cleaned import Cleaned, Mask
from nmt.preprocess.language import check_language, is_other_language
from nmt.preprocess.scripts import check_scripts, foreign_shares, scripts_of

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
    if config.filter.max_foreign < 1:
        cleaned.drop(FOREIGN, *_foreign(cleaned, config))
    if config.filter.language:
        codes = [check_language(language, key) for language, key in _languages(config)]
        sides = zip(_sides(cleaned), codes, strict=True)
        cleaned.drop(LANGUAGE, *(is_other_language(texts, code) for texts, code in sides))


def check_filters(config: PreprocessConfig) -> None:
    """Raise a `ConfigError` for settings that no line could be judged by."""
    if config.filter.max_foreign < 1:
        _scripts(config)
    if config.filter.language:
        for language, key in _languages(config):
            check_language(language, key)


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


def _foreign(cleaned: Cleaned, config: PreprocessConfig) -> list[Mask]:
    sides = zip(_sides(cleaned), _scripts(config), strict=True)
    return [foreign_shares(texts, names) > config.filter.max_foreign for texts, names in sides]


def _scripts(config: PreprocessConfig) -> list[Sequence[str]]:
    """Return the scripts of source and target."""
    given = (config.filter.src_scripts, config.filter.tgt_scripts)
    scripts: list[Sequence[str]] = []
    for names, side, (language, _) in zip(given, ("src", "tgt"), _languages(config), strict=True):
        key = f"filter.{side}_scripts"
        check_scripts(names, key)
        scripts.append(names or scripts_of(language, key))
    return scripts


def _languages(config: PreprocessConfig) -> list[tuple[str, str]]:
    """Return language and key of source and target."""
    return [(config.data.src_lang, "data.src_lang"), (config.data.tgt_lang, "data.tgt_lang")]


def _sides(cleaned: Cleaned) -> tuple[list[str], list[str]]:
    return cleaned.src, cleaned.tgt


def _is_empty(texts: list[str]) -> Mask:
    return np.array([not text or text.isspace() for text in texts], bool)
