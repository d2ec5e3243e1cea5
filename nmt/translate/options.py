"""Keyword arguments of the methods of `Translator`, and how they are checked."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_origin, get_type_hints

from nmt.config import (
    RerankConfig,
    RerankOptions,
    RerankScore,
    SearchConfig,
    SearchOptions,
    TooLong,
    choose,
    require_valid,
)
from nmt.data.languages import Tags
from nmt.errors import ConfigError, suggest_names

MAX_SOURCE_LENGTH = 256
"""Maximum number of tokens of a source, including EOS. Models rarely see longer sources in
training, since `nmt-preprocess` drops them by default."""
# Even one character can need six tokens: a space, four bytes and EOS.
_MIN_SOURCE_LENGTH = 8


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
    and EOS: split, truncate or error. `recase` converts lines in capitals or in title case to
    ordinary case before translation, and converts their translations back. `copy_symbols` copies
    web and e-mail addresses, emoji and other symbols: lines that consist of them, and emoji and
    addresses at the ends of lines. `unk_replacement` replaces each unknown token of a translation
    with the source word that it attends to most. `window_lines` is the number of lines that are
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

    `Translator` makes these from `TranslateOptions` and from the settings of its model. The best
    translation of a line of at most `max_source_length` tokens depends on `recase`, `copy_symbols`,
    `protect`, `hints`, `unk_replacement`, `rerank`, `tags` and `context`. The other options change
    how longer lines are split, how batches are made, and which results are returned.
    """

    n_best: int = 1
    """Maximum number of translations per line, at most `SearchConfig.max_results`."""
    with_scores: bool = True
    """Whether scores are needed. If False, an engine may return empty lists and nan instead."""
    max_tokens: int | None = None
    """Maximum number of tokens of a batch: segments * beam size * tokens of the longest source,
    including EOS. None selects the default of the engine."""
    too_long: TooLong = TooLong.split
    max_source_length: int = MAX_SOURCE_LENGTH
    """Maximum number of tokens of a source, including tags and EOS."""
    recase: bool = True
    """Whether to convert lines in capitals or in title case to ordinary case before translation,
    and their translations back. Lines with a prefix are translated as they are."""
    copy_symbols: bool = True
    """Whether to copy lines of web and e-mail addresses, emoji and other symbols. Of other lines,
    emoji at both ends and addresses at the end are copied."""
    protect: bool = False
    """Whether search keeps placeholders, tags and addresses, see `SearchConfig.protect`. A line is
    not split inside of these."""
    hints: tuple[str, ...] = ()
    """Lines of a glossary with `glossary_mode=soft`: its terms become hints in the source, see
    `SearchConfig.hints`. A line is not split inside of a term."""
    required_terms: tuple[str, ...] = ()
    """Lines of a glossary with `glossary_mode=hard`: search requires its terms, see
    `SearchConfig.required_terms`. Here they only keep a line from being split inside of a term."""
    unk_replacement: bool = False
    """Whether to replace each unknown token of a translation with the source word that it attends
    to most."""
    rerank: RerankConfig | None = None
    """How to choose among candidates. None chooses by the score of search."""
    tags: Tags = field(default=Tags())
    """The tags of the direction, which precede each source and each target."""
    context: int = 0
    """Maximum number of preceding lines that the model reads with a line."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            require_valid(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be at least 1")
        if self.rerank is not None and self.rerank.candidates is not None:
            require_valid(
                self.rerank.candidates >= self.n_best,
                "candidates",
                self.rerank.candidates,
                "must be at least n_best",
            )
        if self.context:
            self._check_context()
        replaces_unknown_words_in_hints = self.unk_replacement and len(self.hints) > 0
        require_valid(
            not replaces_unknown_words_in_hints,
            "unk_replacement",
            self.unk_replacement,
            "does not work with glossary_mode=soft",
        )
        require_valid(
            self.max_source_length >= _MIN_SOURCE_LENGTH,
            "max_source_length",
            self.max_source_length,
            f"must be at least {_MIN_SOURCE_LENGTH}",
        )

    def _check_context(self) -> None:
        """Raise a `ConfigError` for options that do not work with `context`."""
        if self.n_best != 1:
            problem = "only works with one translation per line"
        elif self.tags.src_choices:
            # Each line would begin with its own tag. The model reads several lines as one text, in
            # which only the first tag counts.
            problem = (
                "needs one direction for all lines; give tgt_lang=..., or src_tag=... or "
                "tgt_tag=..."
            )
        elif self.rerank is not None:
            problem = "does not work with rerank"
        else:
            return
        raise ConfigError(f"context={self.context}: {problem}")


def add_search_settings(options: LineOptions, config: SearchConfig) -> LineOptions:
    """Return the options of lines with the settings of a search that they depend on."""
    return replace(
        options,
        protect=config.protect,
        hints=tuple(config.hints),
        required_terms=tuple(config.required_terms),
    )


def make_line_options(
    checked_options: Mapping[str, Any], config: SearchConfig, tags: Tags, *, best_only: bool
) -> LineOptions:
    """Return the options of lines, given the options of a call after `check_options`.

    With `best_only`, lines get one translation, without scores. Otherwise, lines get as many
    translations as search can find, with scores.
    """
    rerank = None
    rerank_options = select_options(checked_options, RerankOptions)
    if rerank_options:
        rerank_config = RerankConfig(**rerank_options)
        if rerank_config.rerank is not RerankScore.none:
            rerank = rerank_config
    if best_only:
        n_best = 1
    elif rerank is None:
        n_best = config.max_results
    else:
        n_best = rerank.count_candidates(config)
    return LineOptions(
        n_best=n_best,
        with_scores=not best_only,
        max_tokens=checked_options.get("max_tokens"),
        too_long=choose(TooLong, "too_long", checked_options.get("too_long", TooLong.split)),
        max_source_length=checked_options.get("max_source_length", MAX_SOURCE_LENGTH),
        recase=checked_options.get("recase", True),
        copy_symbols=checked_options.get("copy_symbols", True),
        unk_replacement=checked_options.get("unk_replacement", False),
        rerank=rerank,
        tags=tags,
        context=checked_options.get("context", 0),
    )


def select_options(checked_options: Mapping[str, Any], option_class: type) -> dict[str, Any]:
    """Return those options that the typed dictionary `option_class` defines."""
    names = option_class.__annotations__.keys() & checked_options.keys()
    return {name: checked_options[name] for name in names}


def check_options(options: Mapping[str, Any], option_class: type) -> dict[str, Any]:
    """Check the names and types of options; return the options that are not None.

    `option_class` is a typed dictionary such as `TranslateOptions`. Raises a `ConfigError` for an
    unknown option, and a `TypeError` for a value of another type.
    """
    type_hints = _read_type_hints(option_class)
    for name, value in options.items():
        if name not in type_hints:
            raise ConfigError(f"{name}: no such option here; {suggest_names(name, type_hints)}")
        expected_type = get_args(type_hints[name])[0]  # `int` for the type hint `int | None`
        if value is not None and not _has_type(value, expected_type):
            raise TypeError(f"{name}={value!r}: must be of type {expected_type.__name__}")
    return {name: value for name, value in options.items() if value is not None}


# cached, since one call of `get_type_hints` takes as long as several steps of a search
_read_type_hints = functools.cache(get_type_hints)


def _has_type(value: Any, expected_type: Any) -> bool:
    """Return whether a value has the expected type; numbers of NumPy count as int or float.

    Texts in an `Iterable[str]` are not checked here, but when `nmt.translate.windows.check_lines`
    reads them. For a `list[str]`, only a single text is refused, whose items would be characters.
    """
    generic_type = get_origin(expected_type)  # such as `list` for `list[str]`, else None
    if generic_type is list:
        return not isinstance(value, str)
    if generic_type is not None:
        return True
    if isinstance(value, bool):  # bool is a subclass of int
        return expected_type is bool
    if expected_type is int:
        return isinstance(value, numbers.Integral)
    if expected_type is float:
        return isinstance(value, numbers.Real)
    return isinstance(value, expected_type)
