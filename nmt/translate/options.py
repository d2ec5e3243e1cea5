"""Keyword arguments of the methods of `Translator`, and how they are checked."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, get_args, get_origin, get_type_hints

from nmt.config import TooLong, require_valid
from nmt.data.languages import Tags
from nmt.errors import ConfigError, suggest_names

MAX_SOURCE_LENGTH = 256
"""Tokens with EOS: the longest training text that `nmt-preprocess` keeps by default."""
_MIN_SOURCE_LENGTH = 8  # two characters of at most 4 bytes, with a token for each byte


class SearchOptions(TypedDict, total=False):
    """The settings of `SearchConfig` as keyword arguments; None keeps the value of the model."""

    beam_size: int | None
    length_penalty: float | None
    normalization: str | None
    word_reward: float | None
    coverage_penalty: float | None
    stop: str | None
    max_length_a: float | None
    max_length_b: int | None
    min_length: int | None
    sampling: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    alignment: bool | None


class ScoreOptions(SearchOptions, total=False):
    """Keyword arguments for scoring; None selects the default.

    `max_tokens` bounds a batch. `src_lang` and `tgt_lang` select the direction of a model with
    several directions; `src_tag` and `tgt_tag` select it by the symbols before each source and
    each target.
    """

    max_tokens: int | None
    src_lang: str | None
    tgt_lang: str | None
    src_tag: str | None
    tgt_tag: str | None


class TranslateOptions(ScoreOptions, total=False):
    """Keyword arguments for translation; None selects the default.

    `prefixes` holds the text that each translation starts with; an empty text forces nothing.
    `too_long` says what happens to a line of more than `max_source_length` tokens, EOS included:
    split, truncate or error. `window_lines` is the number of lines that are sorted by length and
    translated together.
    """

    prefixes: Iterable[str] | None
    too_long: str | None
    max_source_length: int | None
    window_lines: int | None


@dataclass(frozen=True, kw_only=True)
class LineOptions:
    """How lines are encoded, batched and translated.

    Only `tags` and `context` change the translation of a line of at most `max_source_length`
    tokens.
    """

    n_best: int = 1
    """Maximum number of translations per line, at most the beam size."""
    with_scores: bool = True
    """Whether scores are needed; if not, an engine may leave them out (empty lists and nan)."""
    max_tokens: int | None = None
    """Batch size: segments * beam size * longest source, EOS included; None: the engine's."""
    too_long: TooLong = TooLong.split
    max_source_length: int = MAX_SOURCE_LENGTH
    """Maximum number of tokens of a segment, EOS and tag included."""
    tags: Tags = Tags()  # noqa: RUF009  # immutable
    context: int = 0
    """Maximum number of preceding lines that a line is translated with."""

    def __post_init__(self) -> None:
        is_valid = self.max_tokens is None or self.max_tokens >= 1
        require_valid(is_valid, "max_tokens", self.max_tokens, "must be at least 1")
        is_valid = self.max_source_length >= _MIN_SOURCE_LENGTH
        rule = f"must be at least {_MIN_SOURCE_LENGTH}"
        require_valid(is_valid, "max_source_length", self.max_source_length, rule)


def check_options(options: Mapping[str, Any], accepted: type) -> dict[str, Any]:
    """Check the names and types of options; return those that are not None.

    `accepted` is one of the typed dictionaries above. Raises a `ConfigError` for an unknown option,
    which suggests the nearest one, and a `TypeError` for a value of another type.
    """
    hints = _read_hints(accepted)
    for name, value in options.items():
        if name not in hints:
            raise ConfigError(f"{name}: no such option here; {suggest_names(name, hints)}")
        expected = get_args(hints[name])[0]
        if value is not None and not _has_type(value, expected):
            raise TypeError(f"{name}={value!r}: must be of type {expected.__name__}")
    return {name: value for name, value in options.items() if value is not None}


_read_hints = functools.cache(get_type_hints)  # takes as long as several steps of a search


def _has_type(value: Any, expected: Any) -> bool:
    """Return whether `value` has the type `expected`; numbers of NumPy count as int or float."""
    if get_origin(expected) is not None:  # Iterable[str]: `check_lines` checks the prefixes
        return True
    if isinstance(value, bool):
        return expected is bool
    if expected is int:
        return isinstance(value, numbers.Integral)
    if expected is float:
        return isinstance(value, numbers.Real)
    return isinstance(value, expected)
