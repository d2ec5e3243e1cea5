"""The server's own API under /v1: n-best lists, scores, alignment, search settings, streaming."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor

from nmt.config import Normalization, Stop, choose
from nmt.data.languages import Tags, tag_lines
from nmt.errors import ConfigError, suggest_names
from nmt.search.glossary import Glossary, parse_entry
from nmt.serve.access import HttpError
from nmt.serve.parameters import (
    ApiRequest,
    Parameters,
    admit,
    get_media_type,
    get_service,
    parse_json,
)
from nmt.serve.service import (
    TranslatedText,
    TranslationOptions,
    call_for_texts,
    run_unless_disconnected,
)
from nmt.serve.texts import find_token_spans, parse_plain_text
from nmt.translate.attention import KINDS, attention_shape
from nmt.translate.results import LineResult, Translation
from nmt.translate.translator import Translator

_SAMPLE_CHARACTERS = 4000  # at the start of a stream, from which its language is detected
_MAX_ATTENTION_TOKENS = 256  # of the source and of the translation, for /v1/attention
_MAX_SAMPLED_SENTENCES = 64  # of a request with sampling, which is searched as one batch
_TRANSLATE_PARAMETERS = {
    "alignment",
    "api_key",
    "format",
    "glossary",
    "n_best",
    "scores",
    "search",
    "source",
    "split_sentences",
    "stream",
    "target",
    "text",
}


class _NumberRange(NamedTuple):
    """The type of a number, and the bounds that it may be equal to."""

    number_type: type
    minimum: float
    maximum: float


# Within the ranges of `SearchConfig`, and often narrower, so that a request has a bounded cost.
_SEARCH_RANGES = {
    "length_penalty": _NumberRange(float, -10, 10),
    "word_reward": _NumberRange(float, -100, 100),
    "coverage_penalty": _NumberRange(float, 0, 100),
    "max_length_a": _NumberRange(float, 0, 4),
    "max_length_b": _NumberRange(int, 1, 500),
    "min_length": _NumberRange(int, 0, 200),
    "no_repeat_ngram": _NumberRange(int, 0, 200),
    "repetition_penalty": _NumberRange(float, 1, 100),
    "temperature": _NumberRange(float, 0.001, 1000),
    "top_k": _NumberRange(int, 0, 1_000_000),
    "top_p": _NumberRange(float, 1e-6, 1),
    "min_p": _NumberRange(float, 0, 0.999),
    "epsilon": _NumberRange(float, 0, 0.999),
    "seed": _NumberRange(int, 0, 2**63 - 1),
}
_MAX_FORBIDDEN_PHRASES = 100
_MAX_GLOSSARY_PAIRS = 10_000
_SEARCH_CHOICES: dict[str, type[Enum]] = {"normalization": Normalization, "stop": Stop}


async def translate(request: Request) -> Response:
    """POST /v1/translate: JSON, or plain text, which is streamed line by line."""
    is_plain = get_media_type(request) == "text/plain"
    api_request = await _read_request(request, is_plain=is_plain)
    params = api_request.params
    for name in sorted(params):
        if name not in _TRANSLATE_PARAMETERS:
            hint = suggest_names(name, _TRANSLATE_PARAMETERS)
            raise HttpError(400, f"Invalid request: no field {name!r:.50}; {hint}")
    texts = params.texts("text")
    languages = api_request.language_options()
    is_list = isinstance(params["text"], list)
    is_stream = params.flag("stream")
    max_beam_size = api_request.service.config.max_beam_size
    search = _check_search(params.get("search", {}), max_beam_size)
    # the limit of files applies to a stream, except to one that is sampled in a single batch
    is_like_file = is_stream and not search.get("sampling")
    api_request.check_size(texts, is_list=is_list and not is_stream, is_file=is_like_file)
    if params.flag("alignment"):
        search = {**search, "alignment": True}
    options = TranslationOptions(
        source=languages.source,
        target=languages.target,
        n_best=max(1, params.integer("n_best", default=1, maximum=max_beam_size)),
        is_html=params.is_html(),
        with_scores=params.flag("scores"),
        split_sentences=params.flag("split_sentences") if "split_sentences" in params else None,
        search=search,
        glossary=_read_glossary(api_request),
    )
    api_request.service.check_languages(options)
    _check_options(api_request, options, texts)
    if is_stream:
        if is_list or options.is_html:
            raise HttpError(409, "stream is for one plain text, answered line by line")
        return _stream(api_request, texts[0], options, is_plain=is_plain)
    start = time.monotonic()
    translated_texts = await api_request.service.translate(
        request, api_request.context, texts, options
    )
    api_request.service.metrics.request_seconds.observe(time.monotonic() - start)
    descriptions = await call_for_texts(texts, _describe_texts, translated_texts, options)
    return JSONResponse(
        {
            "translations": descriptions,
            "target": api_request.service.models.find_code(options.target),
        }
    )


async def _read_request(request: Request, *, is_plain: bool) -> ApiRequest:
    """Read a request and admit it. A plain text has its parameters in the query string."""
    body = await request.body()
    if not is_plain:
        return admit(request, parse_json(body))
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the text is not UTF-8 (byte {error.start + 1})") from None
    params = Parameters(request.query_params)
    params.update(text=text, stream=True)
    return admit(request, params)


def _check_search(search: object, max_beam_size: int) -> dict[str, Any]:
    """Return the search settings of a request.

    Raises `HttpError` or `ConfigError`, both answered with status 400, for an unknown setting or a
    value beyond the limits of the server.
    """
    if not isinstance(search, dict):
        raise HttpError(400, "Invalid request: search is no object")
    ranges = {"beam_size": _NumberRange(int, 1, max_beam_size), **_SEARCH_RANGES}
    for name, value in search.items():
        if name in ("sampling", "loop_guard"):
            Parameters(search).flag(name)
        elif name in _SEARCH_CHOICES:
            choose(_SEARCH_CHOICES[name], name, Parameters(search).text(name))
        elif name in ranges:
            _check_number(name, value, ranges[name])
        elif name == "forbid":
            _check_phrases(value)
        else:
            raise HttpError(400, f"Invalid request: search has no setting {name!r:.50}")
    return search


def _read_glossary(api_request: ApiRequest) -> Glossary | None:
    """Return the glossary of a request, which is a list of [source, target] pairs or the name of a
    glossary of the server.

    Raises `HttpError` with status 404 for an unknown name, 400 for another type, and 409 for a term
    that no glossary may have.
    """
    glossary = api_request.params.get("glossary")
    if glossary is None:
        return None
    if isinstance(glossary, str):
        glossaries = api_request.service.glossaries
        if glossary not in glossaries:
            hint = suggest_names(glossary, glossaries) if glossaries else "this server has none"
            raise HttpError(404, f"Invalid request: no glossary {glossary!r:.50}; {hint}")
        return glossaries[glossary]
    if not isinstance(glossary, list) or len(glossary) > _MAX_GLOSSARY_PAIRS:
        raise HttpError(
            400,
            f"Invalid request: glossary is no name or list of at most {_MAX_GLOSSARY_PAIRS} pairs",
        )
    entries = []
    for pair in glossary:
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) and text for text in pair):
            raise HttpError(400, "Invalid request: a pair of glossary is not [source, target]")
        try:
            entries.append(parse_entry("\t".join(pair)))
        except ConfigError as error:
            raise HttpError(409, f"Invalid request: {error}") from None
    return Glossary(entries)


def _check_phrases(phrases: object) -> None:
    """Raise a 400 `HttpError` unless `phrases` is a valid value of `forbid`."""
    is_short_list = isinstance(phrases, list) and len(phrases) <= _MAX_FORBIDDEN_PHRASES
    if not is_short_list or not all(isinstance(item, str) and item.strip() for item in phrases):  # type: ignore[attr-defined]
        raise HttpError(
            400, f"Invalid request: forbid is no list of at most {_MAX_FORBIDDEN_PHRASES} phrases"
        )


def _check_number(name: str, value: object, allowed: _NumberRange) -> None:
    """Raise a 400 `HttpError` unless a search setting has the type and range of `allowed`."""
    types = (int, float) if allowed.number_type is float else int
    is_number = isinstance(value, types) and not isinstance(value, bool)
    if not is_number or not allowed.minimum <= value <= allowed.maximum:  # type: ignore[operator]
        raise HttpError(
            400,
            f"Invalid request: {name} is no {allowed.number_type.__name__} "
            f"from {allowed.minimum:g} to {allowed.maximum:g}",
        )


def _check_options(
    api_request: ApiRequest, options: TranslationOptions, texts: Sequence[str]
) -> None:
    """Raise a 409 `HttpError` for settings that contradict each other, or that the backend of the
    model does not support.
    """
    source, _, direction = api_request.service.resolve_direction(texts[0], options)
    if direction is None:
        return
    if options.glossary is not None:  # one line shows whether the backend supports glossaries
        search = {**options.search, "glossary": options.glossary.lines[:1]}
        options = replace(options, search=search)
    try:
        batch_options = api_request.service.make_batch_options(direction, options, alignment=False)
        direction.translator.backend.check(batch_options.search)
    except ConfigError as error:
        raise HttpError(409, f"Invalid request: {error}") from None
    if options.n_best > batch_options.lines.n_best:
        raise HttpError(
            409,
            f"Invalid request: n_best={options.n_best} is more than "
            f"beam_size={batch_options.search.beam_size} from {source}; raise search.beam_size",
        )
    if not batch_options.search.sampling:
        return
    num_sentences = sum(len(parse_plain_text(text).sentences) for text in texts)
    if num_sentences > _MAX_SAMPLED_SENTENCES:
        raise HttpError(
            409,
            f"Invalid request: {num_sentences} sentences; "
            f"sampling takes {_MAX_SAMPLED_SENTENCES} at a time",
        )


def _describe_texts(
    texts: Sequence[TranslatedText], options: TranslationOptions
) -> list[dict[str, Any]]:
    """Return the JSON objects of the texts of a request."""
    return [_describe_text(text, options) for text in texts]


def _describe_text(text: TranslatedText, options: TranslationOptions) -> dict[str, Any]:
    """Return the JSON object of a text. Its translation is null if a sentence has failed."""
    has_failed = any(result.error is not None for result in text.results)
    content: dict[str, Any] = {
        "text": None if has_failed else text.render_translation(),
        "source": text.source,
    }
    if options.source == "auto":
        content["confidence"] = text.confidence
    if options.n_best > 1 and not has_failed:
        content["alternatives"] = text.list_alternatives(options.n_best - 1)
    prefix = text.direction.prefix if text.direction else ""
    content["sentences"] = [
        _describe_sentence(sentence, result, prefix, with_scores=options.with_scores)
        for sentence, result in zip(text.source_text.sentences, text.results, strict=False)
    ]
    return content


def _describe_sentence(
    sentence: str, result: LineResult, prefix: str, *, with_scores: bool
) -> dict[str, Any]:
    """Return the JSON object of a sentence. Its error replaces tokens and translations."""
    content: dict[str, Any] = {"source": sentence}
    if result.error is not None:
        return content | {"error": result.error}
    if result.source_tokens:
        content["source_tokens"] = result.source_tokens
        content["source_spans"] = [  # in the sentence, to which the model reads `prefix` as well
            [max(0, start - len(prefix)), max(0, end - len(prefix))]
            for start, end in find_token_spans(result.source_tokens, prefix + sentence)
        ]
    content["hypotheses"] = [
        _describe_translation(translation, with_scores=with_scores)
        for translation in result.translations
    ]
    return content


def _describe_translation(translation: Translation, *, with_scores: bool) -> dict[str, Any]:
    """Return the JSON object of a hypothesis."""
    content: dict[str, Any] = {"text": translation.text, "finished": translation.finished}
    if with_scores:
        content["score"] = translation.score
        content["log_prob"] = translation.log_prob
        content["token_log_probs"] = translation.token_log_probs
    if with_scores or translation.alignment is not None:
        content["tokens"] = translation.tokens
    if translation.alignment is not None:
        content["spans"] = find_token_spans(translation.tokens, translation.text)
        content["alignment"] = translation.alignment
    return content


def _stream(
    api_request: ApiRequest, text: str, options: TranslationOptions, *, is_plain: bool
) -> Response:
    """Return a response that sends each line once it and all lines before it are translated."""
    _, _, direction = api_request.service.resolve_direction(text[:_SAMPLE_CHARACTERS], options)
    split_sentences = api_request.service.should_split_sentences(options)
    lines = text.removesuffix("\n").split("\n")

    async def translate_lines() -> AsyncIterator[str]:
        if direction is None:
            for line in lines:
                yield line
            return
        source_texts = (parse_plain_text(line, split_sentences=split_sentences) for line in lines)
        async for translation in api_request.service.stream(
            api_request.context, direction, source_texts, options
        ):
            yield translation

    async def write_lines() -> AsyncIterator[str]:
        index = 0
        try:
            async for translation in translate_lines():
                if is_plain:
                    yield translation + "\n"
                else:
                    yield _to_json_line({"index": index, "text": translation})
                index += 1
        except HttpError as error:
            api_request.context.fields["error"] = error.text
            if is_plain:
                raise  # closes the connection, so that the client notices the missing lines
            yield _to_json_line({"index": index, "error": error.text})

    media_type = "text/plain; charset=utf-8" if is_plain else "application/x-ndjson"
    return StreamingResponse(write_lines(), media_type=media_type)


def _to_json_line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"


async def attention(request: Request) -> Response:
    """POST /v1/attention: the attention weights of a model for a sentence and its translation."""
    api_request = admit(request, parse_json(await request.body()))
    sentence = api_request.params.text("text")
    translation = api_request.params.text("translation")
    languages = api_request.language_options()
    api_request.check_size([sentence, translation])
    kind = api_request.params.text("kind") if "kind" in api_request.params else "cross"
    if kind != "all" and kind not in KINDS:
        kinds = ", ".join(KINDS)
        raise HttpError(400, f"Invalid request: kind={kind}: give all or one of {kinds}")
    layer = api_request.params.integer("layer", default=0)
    head = None  # the mean of all heads
    if api_request.params.get("head") is not None:
        head = api_request.params.integer("head", default=0)
    _, _, direction = api_request.service.resolve_direction(sentence, languages)
    if direction is None:
        target = api_request.params["target"]
        raise HttpError(404, f"{target} texts are not translated to {target}")
    shape = attention_shape(direction.translator.backend)
    if shape is not None and kind != "all":  # None: `_compute_attention` raises an error
        _check_index("layer", layer, shape[kind])
        _check_index("head", head or 0, shape["heads"])
    tags = direction.tags
    [src_line] = tag_lines([sentence], tags.src)
    [tgt_line] = tag_lines([translation], tags.tgt)
    computation = api_request.service.call_function(
        direction, _compute_attention, src_line, tgt_line, kind, layer, head
    )
    return JSONResponse(await run_unless_disconnected(request, computation))


def _check_index(name: str, index: int, count: int) -> None:
    """Raise a 404 `HttpError` if no layer or head has this index."""
    if index >= count:
        raise HttpError(404, f"{name}={index}: no such {name}; the last one is {count - 1}")


def _compute_attention(
    translator: Translator, src_line: str, tgt_line: str, kind: str, layer: int, head: int | None
) -> dict[str, Any]:
    """Return the attention weights of a layer and head, as the JSON object of the response.

    `head` None returns the mean of all heads, `kind` "all" the weights of all layers and heads. The
    lines begin with the language tags of the model.
    """
    num_src_tokens = len(translator.tokenizer.src.encode(src_line)) + 1  # with EOS
    num_tgt_tokens = len(translator.tokenizer.tgt.encode(tgt_line)) + 1
    num_tokens = max(num_src_tokens, num_tgt_tokens)
    if num_tokens > _MAX_ATTENTION_TOKENS:
        raise ConfigError(
            f"{num_tokens} tokens are more than {_MAX_ATTENTION_TOKENS}; give a shorter sentence"
        )
    [attention_maps] = translator.attention([src_line], [tgt_line], tags=Tags())
    if kind == "all":
        return attention_maps.as_json()
    # L layers, H heads; S source and T target tokens
    layers: Tensor = getattr(attention_maps, kind)  # (L, H, queries, keys), each S or T
    weights = layers[layer].mean(dim=0) if head is None else layers[layer, head]
    query_tokens = {
        "encoder": attention_maps.src,
        "decoder": attention_maps.tgt,
        "cross": attention_maps.predicted,
    }
    return {
        "rows": query_tokens[kind],
        "columns": attention_maps.tgt if kind == "decoder" else attention_maps.src,
        "weights": [[round(weight, 4) for weight in row] for row in weights.tolist()],
    }


async def models(request: Request) -> Response:
    """GET /v1/models: groups of languages, with the settings of their model.

    Each source of a group is translated to all targets of the group but itself.
    """
    service = get_service(request)
    # a source counts as one of its targets, so that all sources of a group have the same set
    targets_by_source: dict[tuple[Translator, str], set[str]] = defaultdict(set)
    for (source, target), direction in service.models.directions.items():
        targets_by_source[direction.translator, source] |= {source, target}
    groups: dict[tuple[Translator, frozenset[str]], list[str]] = defaultdict(list)
    for (translator, source), targets in targets_by_source.items():
        groups[translator, frozenset(targets)].append(source)
    descriptions = [
        {
            "sources": sorted(sources),
            "targets": sorted(targets),
            "beam_size": translator.defaults.beam_size,
            "attention": attention_shape(translator.backend),
        }
        for (translator, targets), sources in groups.items()
    ]
    return JSONResponse(
        {
            "groups": descriptions,
            "max_beam_size": service.config.max_beam_size,
            "glossaries": list(service.glossaries),
        }
    )


async def progress(request: Request) -> Response:
    """GET /v1/progress/ID: how many sentences of the file in request ID are translated."""
    progress_by_id = get_service(request).progress
    num_finished, num_sentences = progress_by_id.get(request.path_params["id"], (0, 0))
    return JSONResponse({"done": num_finished, "total": num_sentences})


ROUTES = [
    Route("/v1/translate", translate, methods=["POST"]),
    Route("/v1/attention", attention, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/progress/{id}", progress, methods=["GET"]),
]
