"""Keyword arguments of the methods of `Translator`, and how they are checked."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

from nmt.config import (
    RerankConfig,
    Reranking,
    RerankOptions,
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
_MIN_SOURCE_LENGTH = 8  # tokens; always holds one character: at most a space, four bytes and EOS


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
    lines without words: web and e-mail addresses, emoji, other symbols. `unk_replacement` replaces
    each unknown token of a translation with the source word that it attends to most. `window_lines`
    is the number of lines that are sorted by length and translated together. `context` is the
    number of preceding lines that a model of documents (`data.context`) reads with each line.
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

    `Translator` makes these from `TranslateOptions` and from the settings of its model. Only
    `recase`, `copy_symbols`, `protect`, `hints`, `unk_replacement`, `rerank`, `tags` and `context`
    change the best translation of a line of at most `max_source_length` tokens.
    """

    n_best: int = 1
    """Maximum number of translations per line, at most `SearchConfig.max_results`."""
    with_scores: bool = True
    """Whether scores are needed. If False, an engine may return empty lists and nan instead."""
    max_tokens: int | None = None
    """Maximum size of a batch: its number of segments times the beam size times the number of
    tokens of its longest source, including EOS. None selects the default of the engine."""
    too_long: TooLong = TooLong.split
    max_source_length: int = MAX_SOURCE_LENGTH
    """Maximum number of tokens of a source, including tags and EOS."""
    recase: bool = True
    """Whether to convert lines in capitals or in title case to ordinary case before translation,
    and their translations back. Lines with a prefix are translated as they are."""
    copy_symbols: bool = True
    """Whether to copy lines without words: web and e-mail addresses, emoji, other symbols."""
    protect: bool = False
    """Whether search keeps placeholders, tags and addresses, see `SearchConfig.protect`. A line is
    not split inside of these."""
    hints: tuple[str, ...] = ()
    """Lines of a glossary whose terms become hints in the source, see `SearchConfig.hints`. A line
    is not split inside of a term."""
    required_terms: tuple[str, ...] = ()
    """Lines of a glossary whose terms search requires, see `SearchConfig.required_terms`. A line is
    not split inside of a term."""
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
            num_candidates = self.rerank.candidates
            problem = "must be at least n_best"
            require_valid(num_candidates >= self.n_best, "candidates", num_candidates, problem)
        if self.context:
            problem = "only works with one translation per line"
            require_valid(self.n_best == 1, "context", self.context, problem)
            # lines are joined, and only a tag at the start of the joined text counts as a tag
            problem = (
                "needs one direction for all lines; give tgt_lang=..., or src_tag=... or "
                "tgt_tag=..."
            )
            require_valid(not self.tags.choices, "context", self.context, problem)
            is_valid = self.rerank is None
            require_valid(is_valid, "context", self.context, "does not work with rerank")
        if self.unk_replacement:
            problem = "does not work with glossary_mode=soft"
            require_valid(not self.hints, "unk_replacement", self.unk_replacement, problem)
        is_valid = self.max_source_length >= _MIN_SOURCE_LENGTH
        problem = f"must be at least {_MIN_SOURCE_LENGTH}"
        require_valid(is_valid, "max_source_length", self.max_source_length, problem)


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
        if rerank_config.rerank is not Reranking.none:
            rerank = rerank_config
    n_best = 1
    if not best_only:
        n_best = config.max_results if rerank is None else rerank.count_candidates(config)
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
        expected_type = get_args(type_hints[name])[0]  # every option has a hint `type | None`
        if value is not None and not _has_type(value, expected_type):
            raise TypeError(f"{name}={value!r}: must be of type {expected_type.__name__}")
    return {name: value for name, value in options.items() if value is not None}


# cached, since one call of `get_type_hints` takes as long as several steps of a search
_read_type_hints = functools.cache(get_type_hints)


def _has_type(value: Any, expected_type: Any) -> bool:
    """Return whether a value has the expected type; numbers of NumPy count as int or float.

    Returns True for `Iterable[str]`: `nmt.translate.windows.check_lines` checks each text when it
    is read. A `list[str]` must not be a single text.
    """
    origin = get_origin(expected_type)
    if origin is not None:
        return origin is not list or not isinstance(value, str)
    if isinstance(value, bool):  # bool is a subclass of int
        return expected_type is bool
    if expected_type is int:
        return isinstance(value, numbers.Integral)
    if expected_type is float:
        return isinstance(value, numbers.Real)
    return isinstance(value, expected_type)
