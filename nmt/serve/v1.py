"""The server's own API under /v1: n-best lists, scores, alignment, search settings, streaming."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor

from nmt.data.languages import Tags, tag_lines
from nmt.errors import ConfigError, nearest
from nmt.serve.access import HttpError
from nmt.serve.api import (
    check_size,
    context_of,
    format_param,
    int_param,
    read_json,
    service_of,
    text_param,
    texts_param,
)
from nmt.serve.service import Service, TranslatedText, TranslationOptions, run_unless_disconnected
from nmt.serve.texts import plain_text, token_spans
from nmt.translate.attention import KINDS, attention_shape
from nmt.translate.results import LineResult, Translation
from nmt.translate.translator import Translator

_MAX_LAYERS = 1000  # a number beyond is no layer and no head
_MAX_TOKENS = 256  # of either side of a pair whose attention is asked for
_MAX_DRAWN = 64  # sentences of a request with sampling, which are one batch
_NUMBERS: dict[str, tuple[type, float, float]] = {  # of search settings: type, least, most
    "beam_size": (int, 1, 0),  # the most is the server's setting
    "length_penalty": (float, -10, 10),
    "word_reward": (float, -100, 100),
    "coverage_penalty": (float, 0, 100),
    "max_length_a": (float, 0, 4),
    "max_length_b": (int, 1, 500),
    "min_length": (int, 0, 200),
    "temperature": (float, 0.001, 1000),
    "top_k": (int, 0, 1_000_000),
    "top_p": (float, 1e-6, 1),
    "seed": (int, 0, 2**63 - 1),
}
_FIELDS = {"text", "source", "target", "api_key", "format", "stream", "split_sentences"}
_FIELDS |= {"n_best", "scores", "alignment", "search"}


async def translate(request: Request) -> Response:
    """POST /v1/translate: JSON, or plain text that is answered line by line."""
    service, context = service_of(request), context_of(request)
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    params: dict[str, Any]
    if kind == "text/plain":
        params = dict(request.query_params)
        try:
            params |= {"text": (await request.body()).decode("utf-8-sig"), "stream": True}
        except UnicodeDecodeError as error:
            raise HttpError(400, f"the text is not UTF-8 (byte {error.start + 1})") from None
    else:
        params = read_json(await request.body())
    service.admit(request, context, params.get("api_key"))
    for name in sorted(params.keys() - _FIELDS):
        raise HttpError(400, f"Invalid request: no field {name!r:.50}; {nearest(name, _FIELDS)}")
    texts = texts_param(params, "text")
    source, target = text_param(params, "source"), text_param(params, "target")
    is_stream = _flag(params, "stream")
    is_list = isinstance(params["text"], list) and not is_stream
    search = _search(service, params.get("search"))
    is_large = is_stream and not search.get("sampling")
    check_size(service, context, texts, is_list=is_list, is_file=is_large)
    n_best = int_param(params, "n_best", 1, service.config.max_beam_size)
    options = TranslationOptions(
        source=source.lower(),
        target=target.lower(),
        is_html=format_param(params),
        n_best=max(n_best, 1),
        with_scores=_flag(params, "scores"),
        split_sentences=_flag(params, "split_sentences") if "split_sentences" in params else None,
        search=search | ({"alignment": True} if _flag(params, "alignment") else {}),
    )
    service.check_languages(options)
    _check_search(service, options, texts)
    if is_stream:
        if isinstance(params["text"], list) or options.is_html:
            raise HttpError(400, "stream is for one plain text, answered line by line")
        return _stream(request, texts[0], options, is_plain=kind == "text/plain")
    start = time.monotonic()
    answers = await service.translate(request, context, texts, options)
    service.metrics.request_seconds.observe(time.monotonic() - start)
    content = [_answer(answer, options) for answer in answers]
    return JSONResponse(
        {"translations": content, "target": service.models.find_code(options.target)}
    )


def _flag(params: dict[str, Any], name: str) -> bool:
    value = params.get(name, False)
    if not isinstance(value, bool):
        raise HttpError(400, f"Invalid request: {name} is not true or false")
    return value


def _search(service: Service, given: object) -> dict[str, Any]:
    """Check search settings: known, of the right type, and within the bounds of a server."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise HttpError(400, "Invalid request: search is no object")
    for name, value in given.items():
        if name == "sampling":
            _flag(given, name)
        elif name == "normalization":
            text_param(given, name)
        elif name not in _NUMBERS:
            raise HttpError(400, f"Invalid request: search has no setting {name!r:.50}")
        else:
            kind, least, most = _NUMBERS[name]
            most = most or service.config.max_beam_size
            fits = isinstance(value, (int, float) if kind is float else int)
            if not fits or isinstance(value, bool) or not least <= value <= most:
                raise HttpError(
                    400, f"Invalid request: {name} is no {kind.__name__} from {least:g} to {most:g}"
                )
    return given


def _check_search(service: Service, options: TranslationOptions, texts: list[str]) -> None:
    """Refuse settings that contradict each other or that the engine does not have."""
    code, _, direction = service.resolve_direction(texts[0], options)
    if direction is None:
        return
    try:
        batch_options = service.make_batch_options(direction, options, alignment=False)
        direction.translator.backend.check(batch_options.search)
    except ConfigError as error:
        raise HttpError(400, f"Invalid request: {error}") from None
    if options.n_best > batch_options.lines.n_best:
        raise HttpError(
            400,
            f"Invalid request: n_best={options.n_best} is more than "
            f"beam_size={batch_options.search.beam_size} from {code}; raise search.beam_size",
        )
    drawn = sum(len(plain_text(text).sentences) for text in texts if batch_options.search.sampling)
    if drawn > _MAX_DRAWN:
        raise HttpError(
            400, f"Invalid request: {drawn} sentences; sampling takes {_MAX_DRAWN} at a time"
        )


def _answer(answer: TranslatedText, options: TranslationOptions) -> dict[str, Any]:
    failed = any(result.error is not None for result in answer.results)
    content: dict[str, Any] = {"text": None if failed else answer.translation()}
    content["source"] = answer.source
    if options.source == "auto":
        content["confidence"] = answer.confidence
    if options.n_best > 1 and not failed:
        content["alternatives"] = answer.alternatives(options.n_best - 1)
    prefix = answer.direction.prefix if answer.direction else ""
    content["sentences"] = [
        _sentence(sentence, result, options, prefix)
        for sentence, result in zip(answer.source_text.sentences, answer.results, strict=False)
    ]
    return content


def _sentence(
    sentence: str, result: LineResult, options: TranslationOptions, prefix: str
) -> dict[str, Any]:
    content: dict[str, Any] = {"source": sentence}
    if result.error is not None:
        return content | {"error": result.error}
    if result.source_tokens:
        shift = len(prefix)
        spans = token_spans(result.source_tokens, prefix + sentence)
        content["source_tokens"] = result.source_tokens
        content["source_spans"] = [[max(a - shift, 0), max(b - shift, 0)] for a, b in spans]
    content["hypotheses"] = [_hypothesis(found, options) for found in result.translations]
    return content


def _hypothesis(found: Translation, options: TranslationOptions) -> dict[str, Any]:
    content: dict[str, Any] = {"text": found.text, "finished": found.finished}
    if options.with_scores:
        content |= {
            "score": found.score,
            "log_prob": found.log_prob,
            "token_log_probs": found.token_log_probs,
        }
    if options.with_scores or found.alignment is not None:
        content["tokens"] = found.tokens
    if found.alignment is not None:
        content["spans"] = token_spans(found.tokens, found.text)
        content["alignment"] = found.alignment
    return content


def _stream(
    request: Request, text: str, options: TranslationOptions, *, is_plain: bool
) -> Response:
    """Answer each line of a text as soon as it and those before it are translated."""
    service, context = service_of(request), context_of(request)
    _, _, direction = service.resolve_direction(text[:4000], options)
    split = service.splits_sentences(options)
    lines = text.removesuffix("\n").split("\n")

    async def answers() -> AsyncIterator[str]:
        if direction is None:
            for line in lines:
                yield line
            return
        pieces = (plain_text(line, split_sentences=split) for line in lines)
        async for translation in service.stream(context, direction, pieces, options):
            yield translation

    async def body() -> AsyncIterator[str]:
        index = 0
        try:
            async for translation in answers():
                line = {"index": index, "text": translation}
                yield translation + "\n" if is_plain else _json_line(line)
                index += 1
        except HttpError as error:
            context.fields["error"] = error.text
            if is_plain:  # the connection is cut: a text that ends early must not look whole
                raise
            yield _json_line({"index": index, "error": error.text})

    kind = "text/plain; charset=utf-8" if is_plain else "application/x-ndjson"
    return StreamingResponse(body(), media_type=kind)


def _json_line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"


async def attention(request: Request) -> Response:
    """POST /v1/attention: for a sentence and its translation, of one layer and head or of all."""
    service, context = service_of(request), context_of(request)
    params = read_json(await request.body())
    service.admit(request, context, params.get("api_key"))
    sentence, translation = text_param(params, "text"), text_param(params, "translation")
    source, target = text_param(params, "source"), text_param(params, "target")
    check_size(service, context, [sentence, translation], is_list=False)
    options = TranslationOptions(source=source.lower(), target=target.lower())
    _, _, direction = service.resolve_direction(sentence, options)
    if direction is None:
        raise HttpError(400, f"{target} texts are not translated to {target}")
    head = params.get("head")
    choice = (
        text_param(params, "kind", "cross"),
        int_param(params, "layer", 0, _MAX_LAYERS),
        None if head is None else int_param(params, "head", 0, _MAX_LAYERS),
    )
    [src], [tgt] = map(tag_lines, ([sentence], [translation]), direction.tags[:2])
    work = service.call_function(direction, _attention, (src, tgt), *choice)
    return JSONResponse(await run_unless_disconnected(request, work))


def _attention(
    translator: Translator, pair: tuple[str, str], kind: str, layer: int, head: int | None
) -> dict[str, Any]:
    """Return the attention of one layer and head, or the mean of heads; all of it for kind=all."""
    sides = (translator.tokenizer.src, translator.tokenizer.tgt)
    longest = 1 + max(len(side.encode(text)) for side, text in zip(sides, pair, strict=True))
    if longest > _MAX_TOKENS:
        raise ConfigError(f"{longest} tokens are more than {_MAX_TOKENS}; give a shorter sentence")
    [found] = translator.attention(*([text] for text in pair), tags=Tags())  # they have theirs
    if kind == "all":
        return found.as_json()
    if kind not in KINDS:
        raise ConfigError(f"kind={kind}: no such kind; give all or one of {', '.join(KINDS)}")
    weights: Tensor = getattr(found, kind)  # (L, H, T or S, S or T)
    for name, number, size in (("layer", layer, len(weights)), ("head", head, weights.size(1))):
        if number is not None and number >= size:
            raise ConfigError(f"{name}={number}: no such {name}; the last one is {size - 1}")
    chosen = weights[layer].mean(dim=0) if head is None else weights[layer, head]
    rows = {"encoder": found.src, "decoder": found.tgt, "cross": found.predicted}[kind]
    columns = found.tgt if kind == "decoder" else found.src
    rounded = [[round(w, 4) for w in row] for row in chosen.tolist()]
    return {"rows": rows, "columns": columns, "weights": rounded}


async def models(request: Request) -> Response:
    """GET /v1/models: groups of languages, each translated to all others of its group's targets,
    with search settings and limits.
    """
    service = service_of(request)
    codes: dict[tuple[Translator, str], set[str]] = defaultdict(set)
    for (source, target), direction in service.models.directions.items():
        codes[direction.translator, source] |= {source, target}
    groups: dict[tuple[Translator, frozenset[str]], list[str]] = defaultdict(list)
    for (translator, source), found in codes.items():
        groups[translator, frozenset(found)].append(source)
    answers = [
        {
            "sources": sorted(sources),
            "targets": sorted(found),
            "beam_size": translator.defaults.beam_size,
            "attention": attention_shape(translator.backend),
        }
        for (translator, found), sources in groups.items()
    ]
    return JSONResponse({"groups": answers, "max_beam_size": service.config.max_beam_size})


async def progress(request: Request) -> Response:
    """GET /v1/progress/ID: how far the file of the request with that id is."""
    done, total = service_of(request).progress.get(request.path_params["id"], (0, 0))
    return JSONResponse({"done": done, "total": total})


ROUTES = [
    Route("/v1/translate", translate, methods=["POST"]),
    Route("/v1/attention", attention, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/progress/{id}", progress, methods=["GET"]),
]
