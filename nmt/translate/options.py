"""Keyword arguments of the methods of `Translator`, and how they are checked."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

from nmt.config import RerankConfig, RerankOptions, SearchOptions, TooLong, require_valid
from nmt.data.languages import Tags
from nmt.errors import ConfigError, suggest_names

MAX_SOURCE_LENGTH = 256
"""Maximum number of tokens of a source, including EOS. Models rarely see longer sources in
training, since `nmt-preprocess` drops them by default."""
_MIN_SOURCE_LENGTH = 8  # enough for two characters of 4 byte tokens each


class ScoreOptions(SearchOptions, total=False):
    """Keyword arguments for scoring; None selects the default.

    `max_tokens` bounds a batch. A model with several directions needs the direction: either its
    languages, `src_lang` and `tgt_lang`, or its tags, `src_tag` and `tgt_tag`, which precede
    each source and each target.
    """

    max_tokens: int | None
    src_lang: str | None
    tgt_lang: str | None
    src_tag: str | None
    tgt_tag: str | None


class TranslateOptions(ScoreOptions, RerankOptions, total=False):
    """Keyword arguments for translation; None selects the default.

    `prefixes` holds the text that each translation starts with; an empty text forces nothing.
    `too_long` says what happens to a line of more than `max_source_length` tokens, including tags
    and EOS: split, truncate or error. `recase` translates lines in capitals or in title case as
    sentences in ordinary case. `copy_symbols` copies lines without words: web and e-mail addresses,
    emoji, other symbols. `unk_replacement` replaces each unknown token of a translation by the
    source word that has the highest attention. `window_lines` is the number of lines that are
    sorted by length and translated together. `context` is the number of preceding lines that a
    model of documents (`data.context`) reads with each line.
    """

    prefixes: Iterable[str] | None
    too_long: str | None
    max_source_length: int | None
    recase: bool | None
    copy_symbols: bool | None
    unk_replacement: bool | None
    window_lines: int | None
    context: int | None


@dataclass(frozen=True, kw_only=True)
class LineOptions:
    """How lines are encoded, batched and translated.

    `Translator` makes these from `TranslateOptions` and from the settings of its model. They do not
    change the translation of a line that is short enough, except for `recase`, `copy_symbols`,
    `protect`, `hints`, `unk_replacement`, `rerank`, `tags` and `context`. A line that is split is
    not cut inside of a term or, with `protect`, a placeholder.
    """

    n_best: int = 1
    """Maximum number of translations per line, at most `SearchConfig.max_results`."""
    with_scores: bool = True
    """Whether scores are needed. If not, an engine may return empty lists and nan for them."""
    max_tokens: int | None = None
    """Maximum size of a batch: its number of segments times the beam size times the number of
    tokens of its longest source, including EOS. None selects the default of the engine."""
    too_long: TooLong = TooLong.split
    max_source_length: int = MAX_SOURCE_LENGTH
    """Maximum number of tokens of a source, including tags and EOS."""
    recase: bool = True
    """Whether to translate lines in capitals or in title case in ordinary case, and to change the
    case of their translations. Lines with a prefix are translated as they are."""
    copy_symbols: bool = True
    """Whether to copy lines without words: web and e-mail addresses, emoji, other symbols."""
    protect: bool = False
    """Whether search keeps placeholders, tags and addresses, see `SearchConfig.protect`."""
    hints: tuple[str, ...] = ()
    """Lines of a glossary whose terms become hints in the source, see `SearchConfig.hints`."""
    required_terms: tuple[str, ...] = ()
    """Lines of a glossary whose terms search requires, see `SearchConfig.required_terms`."""
    unk_replacement: bool = False
    """Whether to replace each unknown token of a translation by the source word with the highest
    attention."""
    rerank: RerankConfig | None = None
    """How to choose among candidates; None: by the score of search."""
    tags: Tags = field(default=Tags())
    """The tags of the direction, which precede each source and each target."""
    context: int = 0
    """Maximum number of preceding lines that the model reads with a line."""

    def __post_init__(self) -> None:
        is_valid = self.max_tokens is None or self.max_tokens >= 1
        require_valid(is_valid, "max_tokens", self.max_tokens, "must be at least 1")
        num_candidates = None if self.rerank is None else self.rerank.candidates
        is_valid = num_candidates is None or num_candidates >= self.n_best
        require_valid(is_valid, "candidates", num_candidates, "must be at least n_best")
        rule = "only works with one translation per line"
        require_valid(self.context == 0 or self.n_best == 1, "context", self.context, rule)
        is_valid = not (self.tags.choices and self.context)  # only the first line has its tag
        rule = "needs one direction for all lines; give tgt_lang=..., or src_tag=... or tgt_tag=..."
        require_valid(is_valid, "context", self.context, rule)
        is_valid = self.rerank is None or self.context == 0
        require_valid(is_valid, "context", self.context, "does not work with rerank")
        is_valid = not (self.hints and self.unk_replacement)
        rule = "does not work with glossary_mode=soft"
        require_valid(is_valid, "unk_replacement", self.unk_replacement, rule)
        is_valid = self.max_source_length >= _MIN_SOURCE_LENGTH
        rule = f"must be at least {_MIN_SOURCE_LENGTH}"
        require_valid(is_valid, "max_source_length", self.max_source_length, rule)


def check_options(options: Mapping[str, Any], option_class: type) -> dict[str, Any]:
    """Check the names and types of options; return the options that are not None.

    `option_class` is one of the typed dictionaries above. Raises a `ConfigError` for an unknown
    option, which suggests the nearest one, and a `TypeError` for a value of another type.
    """
    type_hints = _read_type_hints(option_class)
    for name, value in options.items():
        if name not in type_hints:
            raise ConfigError(f"{name}: no such option here; {suggest_names(name, type_hints)}")
        expected_type = get_args(type_hints[name])[0]  # every option has a hint `type | None`
        if value is not None and not _has_type(value, expected_type):
            raise TypeError(f"{name}={value!r}: must be of type {expected_type.__name__}")
    return {name: value for name, value in options.items() if value is not None}


# cached, since each call of `get_type_hints` takes as long as several steps of a search
_read_type_hints = functools.cache(get_type_hints)


def _has_type(value: Any, expected_type: Any) -> bool:
    """Return whether a value has the expected type; numbers of NumPy count as int or float.

    Returns True for `Iterable[str]`: `nmt.translate.windows.check_lines` checks each text when it
    is read.
    """
    if get_origin(expected_type) is not None:
        return True
    if isinstance(value, bool):  # bool is a subclass of int
        return expected_type is bool
    if expected_type is int:
        return isinstance(value, numbers.Integral)
    if expected_type is float:
        return isinstance(value, numbers.Real)
    return isinstance(value, expected_type)
