"""Options of a request to /v1/translate: search settings and glossaries, within limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from nmt.config import GlossaryMode, Normalization, Stop, choose
from nmt.documents.texts import parse_plain_text
from nmt.errors import ConfigError, suggest_names
from nmt.search.glossary import Glossary, parse_entry
from nmt.serve.http_errors import InvalidRequestError
from nmt.serve.models import TranslationOptions
from nmt.serve.parameters import ApiRequest, Parameters

_PARAMETERS = {
    "alignment",
    "api_key",
    "format",
    "glossary",
    "n_best",
    "prefix",
    "scores",
    "search",
    "source",
    "split_sentences",
    "stream",
    "target",
    "text",
}
_MAX_SAMPLED_SENTENCES = 64  # limit for a request, whose sentences are sampled in one batch
_MAX_FORBIDDEN_PHRASES = 100
_MAX_GLOSSARY_PAIRS = 10_000


class _NumberRange(NamedTuple):
    """The type of a number, and its inclusive bounds."""

    number_type: type
    minimum: float
    maximum: float


# often narrower than the ranges of `SearchConfig`, so that the cost of a request is bounded
_SEARCH_RANGES = {
    "beam_groups": _NumberRange(int, 1, 1000),
    "diversity_penalty": _NumberRange(float, 0, 1000),
    "length_penalty": _NumberRange(float, -10, 10),
    "word_reward": _NumberRange(float, -100, 100),
    "coverage_penalty": _NumberRange(float, 0, 100),
    "max_length_a": _NumberRange(float, 0, 4),
    "max_length_b": _NumberRange(int, 1, 500),
    "min_length": _NumberRange(int, 0, 200),
    "prefix_bias": _NumberRange(float, 0, 0.999),
    "no_repeat_ngram": _NumberRange(int, 0, 200),
    "repetition_penalty": _NumberRange(float, 1, 100),
    "temperature": _NumberRange(float, 0.001, 1000),
    "top_k": _NumberRange(int, 0, 1_000_000),
    "top_p": _NumberRange(float, 1e-6, 1),
    "min_p": _NumberRange(float, 0, 0.999),
    "epsilon": _NumberRange(float, 0, 0.999),
    "seed": _NumberRange(int, 0, 2**63 - 1),
}
_SEARCH_CHOICES: dict[str, type[Enum]] = {
    "glossary_mode": GlossaryMode,
    "normalization": Normalization,
    "stop": Stop,
}


def read_options(api_request: ApiRequest) -> TranslationOptions:
    """Return the options of a request.

    Raises an `InvalidRequestError` or a `ConfigError` for unknown parameters and invalid values.
    """
    params = api_request.params
    for name in sorted(params):
        if name not in _PARAMETERS:
            hint = suggest_names(name, _PARAMETERS)
            raise InvalidRequestError(f"no field {name!r:.50}; {hint}")
    max_beam_size = api_request.service.config.max_beam_size
    search = params.get("search", {})
    _check_search(search, max_beam_size)
    if params.flag("alignment"):
        search = {**search, "alignment": True}
    n_best = params.integer("n_best", default=search.get("alternatives", 1), maximum=max_beam_size)
    split_sentences = None  # the setting of the server applies
    if "split_sentences" in params:
        split_sentences = params.flag("split_sentences")
    return replace(
        api_request.language_options(),
        n_best=max(1, n_best),
        prefix=params.text("prefix", ""),
        is_html=params.is_html(),
        with_scores=params.flag("scores"),
        split_sentences=split_sentences,
        search_changes=search,
        glossary=_read_glossary(params.get("glossary"), api_request.service.glossaries),
    )


def _check_search(search: object, max_beam_size: int) -> None:
    """Check that `search` is an object of search settings within the limits of the server.

    Raises an `InvalidRequestError` or a `ConfigError`. Both lead to a response with status 400.
    """
    if not isinstance(search, dict):
        raise InvalidRequestError("search is not an object")
    ranges = {
        "beam_size": _NumberRange(int, 1, max_beam_size),
        "alternatives": _NumberRange(int, 0, max_beam_size),
        **_SEARCH_RANGES,
    }
    for name, value in search.items():
        if name in ("sampling", "loop_guard", "allow_source_repeats", "protect"):
            Parameters(search).flag(name)  # raises an error unless the value is true or false
        elif name in _SEARCH_CHOICES:
            choose(_SEARCH_CHOICES[name], name, Parameters(search).text(name))
        elif name in ranges:
            _check_number(name, value, ranges[name])
        elif name in ("forbid", "suppress"):
            _check_phrases(name, value)
        else:
            raise InvalidRequestError(f"search has no setting {name!r:.50}")


def _check_number(name: str, value: object, allowed: _NumberRange) -> None:
    """Raise an `InvalidRequestError` unless a number has the type and range of `allowed`."""
    types: tuple[type, ...] = (int,)
    type_name = "an integer"
    if allowed.number_type is float:
        types = (int, float)
        type_name = "a number"
    is_in_range = False
    if isinstance(value, types) and not isinstance(value, bool):  # True is an instance of int
        is_in_range = allowed.minimum <= value <= allowed.maximum  # type: ignore[operator]
    if not is_in_range:
        raise InvalidRequestError(
            f"{name} is not {type_name} from {allowed.minimum:g} to {allowed.maximum:g}"
        )


def _check_phrases(name: str, phrases: object) -> None:
    """Raise an `InvalidRequestError` unless `phrases` is a short list of nonempty texts."""
    is_valid = False
    if isinstance(phrases, list) and len(phrases) <= _MAX_FORBIDDEN_PHRASES:
        is_valid = all(isinstance(phrase, str) and phrase.strip() for phrase in phrases)
    if not is_valid:
        raise InvalidRequestError(
            f"{name} is not a list of at most {_MAX_FORBIDDEN_PHRASES} phrases"
        )


def _read_glossary(glossary: object, glossaries: dict[str, Glossary]) -> Glossary | None:
    """Return the glossary of a request, or None if `glossary` is None.

    `glossary` is a list of [source, target] pairs, or the name of one of the server's `glossaries`.
    Raises an `InvalidRequestError` with status 404 for an unknown name, 400 for another type, and
    409 for an invalid term.
    """
    if glossary is None:
        return None
    if isinstance(glossary, str):
        if glossary not in glossaries:
            hint = suggest_names(glossary, glossaries) if glossaries else "this server has none"
            raise InvalidRequestError(f"no glossary {glossary!r:.50}; {hint}", status=404)
        return glossaries[glossary]
    if not isinstance(glossary, list) or len(glossary) > _MAX_GLOSSARY_PAIRS:
        raise InvalidRequestError(
            f"glossary is not a name or list of at most {_MAX_GLOSSARY_PAIRS} pairs"
        )
    entries = []
    for pair in glossary:
        is_pair = isinstance(pair, list) and len(pair) == 2
        is_pair_of_texts = is_pair and all(isinstance(text, str) and text for text in pair)
        if not is_pair_of_texts:
            raise InvalidRequestError("a pair of glossary is not [source, target]")
        try:
            entries.append(parse_entry("\t".join(pair)))
        except ConfigError as error:
            raise InvalidRequestError(str(error), status=409) from None
    return Glossary(entries)


def check_options(
    api_request: ApiRequest, options: TranslationOptions, texts: Sequence[str]
) -> None:
    """Raise an `InvalidRequestError` with status 409 if the options do not work together.

    The model for the first text must support the options, and search must be able to return
    `n_best` translations. A prefix is only allowed for a single sentence. With sampling, the number
    of sentences is limited. Also raises the errors of `resolve_direction` for the first text.
    """
    src_lang, _, direction = api_request.service.models.resolve_direction(texts[0], options)
    if direction is None:
        # the text is copied: it has no words, or is in the target language already
        return
    if options.glossary is not None:
        # whether the backend supports glossaries does not depend on their size
        search_changes = {**options.search_changes, "glossary": options.glossary.lines[:1]}
        options = replace(options, search_changes=search_changes)
    text_translator = api_request.service.text_translator
    options = text_translator.protect_if_needed(options, texts)
    try:
        batch_options = text_translator.make_batch_options(direction, options)
        direction.translator.backend.check(batch_options.search)
    except ConfigError as error:
        raise InvalidRequestError(str(error), status=409) from None
    if options.n_best > batch_options.line_options.n_best:
        name = "alternatives" if batch_options.search.alternatives else "beam_size"
        raise InvalidRequestError(
            f"n_best={options.n_best} is more than "
            f"{name}={batch_options.search.max_results} of the search from {src_lang}; "
            f"increase search.{name}",
            status=409,
        )
    if options.prefix:
        _check_prefix(api_request, options, texts)
    if not batch_options.search.sampling:
        return
    num_sentences = sum(len(parse_plain_text(text).sentences) for text in texts)
    if num_sentences > _MAX_SAMPLED_SENTENCES:
        raise InvalidRequestError(
            f"{num_sentences} sentences; sampling takes {_MAX_SAMPLED_SENTENCES} at a time",
            status=409,
        )


def _check_prefix(
    api_request: ApiRequest, options: TranslationOptions, texts: Sequence[str]
) -> None:
    """Raise an `InvalidRequestError` unless the request is a single sentence of plain text."""
    split_sentences = api_request.service.text_translator.should_split_sentences(options)
    num_sentences = 0
    for text in texts:
        num_sentences += len(parse_plain_text(text, split_sentences=split_sentences).sentences)
    if options.is_html:
        raise InvalidRequestError("prefix needs format=text", status=409)
    if num_sentences != 1:
        raise InvalidRequestError(
            f"prefix is for one plain sentence, not for {num_sentences}; send the sentences one by "
            "one, or set split_sentences to false",
            status=409,
        )
