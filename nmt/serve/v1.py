"""The routes under /v1, with n-best lists, scores, alignment, search settings and streaming."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nmt.documents.texts import find_token_spans, parse_plain_text
from nmt.serve.access import RequestContext
from nmt.serve.http_errors import HttpError
from nmt.serve.models import Direction, TranslationOptions
from nmt.serve.parameters import (
    ApiRequest,
    Parameters,
    admit,
    get_media_type,
    get_service,
    parse_json,
)
from nmt.serve.text_translation import TranslatedText, call_in_thread_if_long
from nmt.serve.v1_attention import attention
from nmt.serve.v1_options import check_options, read_options
from nmt.translate.attention import attention_shape
from nmt.translate.results import LineResult, Translation
from nmt.translate.translator import Translator

_SAMPLE_CHARACTERS = 4000  # length of the start of a stream from which its language is detected


async def translate(request: Request) -> Response:
    """POST /v1/translate: JSON, or plain text, which is streamed line by line."""
    is_plain = get_media_type(request) == "text/plain"
    api_request = await _read_request(request, is_plain=is_plain)
    service = api_request.service
    texts = api_request.params.texts("text")
    options = read_options(api_request)
    is_list = isinstance(api_request.params["text"], list)
    is_stream = api_request.params.flag("stream")
    # streams have the limit of files, except with sampling, which searches all lines in one batch
    has_file_limit = is_stream and not options.search_changes.get("sampling")
    api_request.check_size(texts, is_list=is_list and not is_stream, is_file=has_file_limit)
    service.models.check_languages(options)
    check_options(api_request, options, texts)
    if is_stream:
        if is_list or options.is_html:
            raise HttpError(409, "stream is for one plain text, answered line by line")
        return _stream(api_request, texts[0], options, is_plain=is_plain)
    start = time.monotonic()
    translated_texts = await service.translate(request, api_request.context, texts, options)
    service.metrics.request_seconds.observe(time.monotonic() - start)
    describe_texts = partial(_describe_texts, translated_texts, options)
    descriptions = await call_in_thread_if_long(texts, describe_texts)
    target = service.models.languages.find_code(options.target)
    return JSONResponse({"translations": descriptions, "target": target})


async def _read_request(request: Request, *, is_plain: bool) -> ApiRequest:
    """Read a request and admit it. With plain text, the parameters are in the query string."""
    body = await request.body()
    if not is_plain:
        return admit(request, parse_json(body))
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the text is not UTF-8 (byte {error.start + 1})") from None
    params = Parameters(request.query_params)
    params["text"] = text
    params["stream"] = True
    return admit(request, params)


def _describe_texts(
    texts: Sequence[TranslatedText], options: TranslationOptions
) -> list[dict[str, Any]]:
    """Return the JSON objects of the texts of a request."""
    return [_describe_text(text, options) for text in texts]


def _describe_text(text: TranslatedText, options: TranslationOptions) -> dict[str, Any]:
    """Return the JSON object of a text. The translation is null if a sentence failed."""
    translation = None
    if text.is_complete:
        translation = text.render_translation()
    content: dict[str, Any] = {"text": translation, "source": text.source}
    if options.source == "auto":
        content["confidence"] = text.confidence
    if options.n_best > 1 and text.is_complete:
        content["alternatives"] = text.list_alternatives(options.n_best - 1)
    prefix = text.direction.source_prefix if text.direction else ""
    content["sentences"] = [
        _describe_sentence(sentence, result, prefix, with_scores=options.with_scores)
        # not strict: a text that is not translated has no results
        for sentence, result in zip(text.source_text.sentences, text.results, strict=False)
    ]
    return content


def _describe_sentence(
    sentence: str, result: LineResult, prefix: str, *, with_scores: bool
) -> dict[str, Any]:
    """Return the JSON object of a sentence, with either an error or translations.

    `prefix` is the text before the sentence in the input of the model.
    """
    content: dict[str, Any] = {"source": sentence}
    if result.error is not None:
        return content | {"error": result.error}
    if result.source_tokens:
        content["source_tokens"] = result.source_tokens
        spans = []  # positions in the sentence, which begins after the prefix
        for span in find_token_spans(result.source_tokens, prefix + sentence):
            spans.append([max(0, position - len(prefix)) for position in span])
        content["source_spans"] = spans
    content["hypotheses"] = [
        _describe_translation(translation, with_scores=with_scores)
        for translation in result.translations
    ]
    return content


def _describe_translation(translation: Translation, *, with_scores: bool) -> dict[str, Any]:
    """Return the JSON object of a translation."""
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
    """Return a response that sends the translated lines in order, as soon as possible."""
    models = api_request.service.models
    direction = models.resolve_direction(text[:_SAMPLE_CHARACTERS], options).direction
    lines = text.removesuffix("\n").split("\n")
    translations = _translate_lines(api_request, direction, lines, options)
    content = _format_lines(api_request.context, translations, is_plain=is_plain)
    media_type = "text/plain; charset=utf-8" if is_plain else "application/x-ndjson"
    return StreamingResponse(content, media_type=media_type)


async def _translate_lines(
    api_request: ApiRequest,
    direction: Direction | None,
    lines: Sequence[str],
    options: TranslationOptions,
) -> AsyncIterator[str]:
    """Yield the translation of each line, or the line itself without a direction."""
    if direction is None:
        for line in lines:
            yield line
        return
    translator = api_request.service.text_translator
    split_sentences = translator.should_split_sentences(options)
    source_texts = (parse_plain_text(line, split_sentences=split_sentences) for line in lines)
    async for translation in translator.stream(
        api_request.context, direction, source_texts, options
    ):
        yield translation


async def _format_lines(
    context: RequestContext, translations: AsyncIterator[str], *, is_plain: bool
) -> AsyncIterator[str]:
    """Yield each translation as a line of plain text, or of JSON with its index.

    If a translation fails, the last line of JSON contains the error.
    """
    index = 0
    try:
        async for translation in translations:
            if is_plain:
                yield translation + "\n"
            else:
                yield _to_json_line({"index": index, "text": translation})
            index += 1
    except HttpError as error:
        context.fields["error"] = error.text
        if is_plain:
            raise  # this closes the connection, so that the client notices the missing lines
        yield _to_json_line({"index": index, "error": error.text})


def _to_json_line(content: dict[str, Any]) -> str:
    """Return an object as a line of JSON."""
    return json.dumps(content, ensure_ascii=False) + "\n"


async def models(request: Request) -> Response:
    """GET /v1/models: groups of languages, with the settings of their model.

    Each source of a group is translated to all other languages among the targets of the group.
    """
    service = get_service(request)
    # The targets of a source include the source itself. Sources that can be translated to one
    # another then have the same targets, and form a group: for the directions de-en and en-de, both
    # sources have the targets {de, en}.
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
    """GET /v1/progress/ID: the number of translated sentences of the file in the request ID."""
    progress_by_id = get_service(request).progress
    num_finished, num_sentences = progress_by_id.get(request.path_params["id"], (0, 0))
    return JSONResponse({"done": num_finished, "total": num_sentences})


ROUTES = [
    Route("/v1/translate", translate, methods=["POST"]),
    Route("/v1/attention", attention, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/progress/{id}", progress, methods=["GET"]),
]
