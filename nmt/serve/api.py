"""LibreTranslate's HTTP API, as its clients use it: routes, parameters, answers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import parse_qsl, quote

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from nmt.config import resolve
from nmt.errors import NmtError
from nmt.serve.access import HttpError
from nmt.serve.codes import name_of
from nmt.serve.documents import FORMATS, Document, ReadOptions, read_document
from nmt.serve.service import (
    RequestContext,
    Service,
    TranslationOptions,
    check_results,
    run_unless_disconnected,
)

log = logging.getLogger(__name__)

_MAX_FIELDS = 1000  # of a form
_MAX_ALTERNATIVES = 100


def service_of(request: Request) -> Service:
    """Return the server's state."""
    return request.app.state.service  # type: ignore[no-any-return]


def context_of(request: Request) -> RequestContext:
    """Return what is known of this request."""
    return request.scope["state"]["context"]  # type: ignore[no-any-return]


async def read_params(request: Request) -> dict[str, Any]:
    """Return the parameters of a request: its JSON if that is its content type, otherwise form and
    query string. Line ends of forms become `\\n`.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        return read_json(await request.body())
    params: dict[str, Any] = {}
    if kind == "multipart/form-data":
        try:
            form = await request.form(max_files=1, max_fields=_MAX_FIELDS)
        except HTTPException as error:
            raise HttpError(400, f"Invalid form: {error.detail}") from None
        params |= {
            name: value for name, value in form.items() if isinstance(value, (str, UploadFile))
        }
    else:
        params |= dict(_decode_form(await request.body(), "form"))
    params |= dict(_decode_form(request.scope.get("query_string", b""), "query string"))
    for name, value in params.items():
        if isinstance(value, str):
            params[name] = value.replace("\r\n", "\n").replace("\r", "\n")
    return params


def read_json(body: bytes) -> dict[str, Any]:
    """Return a JSON object; anything else is a 400 `HttpError`."""
    try:
        content = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise HttpError(400, f"Invalid JSON: not UTF-8 (byte {error.start + 1})") from None
    except RecursionError:
        raise HttpError(400, "Invalid JSON: nested too deeply") from None
    except ValueError as error:
        raise HttpError(400, f"Invalid JSON: {error}") from None
    if not isinstance(content, dict):
        raise HttpError(400, "Invalid JSON: send an object with the parameters")
    return content


def _decode_form(content: bytes, what: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            content.decode(),  # not all clients URL-encode UTF-8
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_FIELDS,
        )
    except ValueError:
        raise HttpError(400, f"Invalid {what}: send it URL-encoded, in UTF-8") from None


def text_param(params: dict[str, Any], name: str, default: str | None = None) -> str:
    """Return a parameter that is text; one that is missing and has no default is a 400."""
    value = params.get(name)
    if value is None or value == "":
        if default is None:
            raise HttpError(400, f"Invalid request: missing {name} parameter")
        return default
    if not isinstance(value, str):
        raise HttpError(400, f"Invalid request: {name} is not a string")
    _check_unicode(name, value)
    return value


def texts_param(params: dict[str, Any], name: str) -> list[str]:
    """Return a parameter that is a text, or a list of them, as a list."""
    value = params.get(name)
    if not value:
        raise HttpError(400, f"Invalid request: missing {name} parameter")
    texts = []
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            raise HttpError(400, f"Invalid request: {name} is no string or list of strings")
        _check_unicode(name, text)
        texts.append(text)
    return texts


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HttpError(
            400, f"Invalid request: {name} has half a surrogate pair at character {error.start}"
        ) from None


def int_param(params: dict[str, Any], name: str, default: int, most: int) -> int:
    """Return a parameter that is a whole number from 0 to `most`."""
    value = params.get(name, default)
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise HttpError(400, f"Invalid request: {name} is not a number") from None
    if not 0 <= number <= most:
        raise HttpError(400, f"Invalid request: {name} is not from 0 to {most}")
    return number


def check_size(
    service: Service,
    context: RequestContext,
    texts: Sequence[str],
    *,
    is_list: bool,
    is_file: bool = False,
) -> None:
    """Refuse too many texts or characters with a 400 `HttpError` that has size and limit."""
    batch_limit = service.config.batch_limit
    if is_list and batch_limit and len(texts) > batch_limit:
        raise HttpError(
            400, f"Invalid request: {len(texts)} texts exceed the limit of {batch_limit}"
        )
    size, limit = sum(map(len, texts)), service.char_limit(context, is_file=is_file)
    if limit and size > limit:
        raise HttpError(400, f"Invalid request: {size} characters exceed the limit of {limit}")


def format_param(params: dict[str, Any]) -> bool:
    """Whether the texts are HTML."""
    name = text_param(params, "format", "text")
    if name not in ("text", "html"):
        raise HttpError(400, f"{name} format is not supported")
    return name == "html"


async def translate(request: Request) -> Response:
    """POST /translate."""
    service, context = service_of(request), context_of(request)
    params = await read_params(request)
    service.admit(request, context, params.get("api_key"))
    texts = texts_param(params, "q")
    is_list = isinstance(params["q"], list)
    source, target = text_param(params, "source"), text_param(params, "target")
    alternatives = int_param(params, "alternatives", 0, _MAX_ALTERNATIVES)
    check_size(service, context, texts, is_list=is_list)
    options = TranslationOptions(
        source=source.lower(), target=target.lower(), n_best=alternatives + 1
    )
    service.check_languages(options)
    options = TranslationOptions(**vars(options) | {"is_html": format_param(params)})
    start = time.monotonic()
    answers = await service.translate(request, context, texts, options)
    for answer in answers:
        check_results(answer.results)
    service.metrics.request_seconds.observe(time.monotonic() - start)
    content: dict[str, Any] = {"translatedText": [answer.translation() for answer in answers]}
    if options.source == "auto":
        content["detectedLanguage"] = [
            {"confidence": answer.confidence, "language": answer.source} for answer in answers
        ]
    if alternatives:
        content["alternatives"] = [answer.alternatives(alternatives) for answer in answers]
    if not is_list:
        content = {name: values[0] for name, values in content.items()}
    return JSONResponse(content)


async def detect(request: Request) -> Response:
    """POST /detect."""
    service, context = service_of(request), context_of(request)
    params = await read_params(request)
    service.admit(request, context, params.get("api_key"))
    text = " ".join(texts_param(params, "q"))
    check_size(service, context, [text], is_list=False)
    found = service.models.detect_languages(text)
    return JSONResponse(
        [{"confidence": score, "language": code} for code, score in found]
        or [{"confidence": 0.0, "language": "en"}]
    )


async def languages(request: Request) -> Response:
    """GET /languages."""
    return JSONResponse(service_of(request).models.list_languages())


async def frontend_settings(request: Request) -> Response:
    """GET /frontend/settings."""
    service = service_of(request)
    config, models = service.config, service.models
    source = models.sources[0]
    target = next((code for code in models.targets(source) if code != source), source)
    return JSONResponse(
        {
            "charLimit": config.char_limit or -1,
            "frontendTimeout": 500,
            "apiKeys": service.has_keys,
            "keyRequired": service.has_keys and config.key_required,
            "suggestions": config.suggestions is not None,
            "filesTranslation": config.max_file_bytes > 0,
            "supportedFilesFormat": list(FORMATS) if config.max_file_bytes else [],
            "language": {
                "source": {"code": source, "name": name_of(source)},
                "target": {"code": target, "name": name_of(target)},
            },
        }
    )


async def translate_file(request: Request) -> Response:
    """POST /translate_file: a multipart form."""
    service, context = service_of(request), context_of(request)
    if not service.config.max_file_bytes:
        raise HttpError(403, "Files translation is disabled on this server")
    params = await read_params(request)
    service.admit(request, context, params.get("api_key"))
    source, target = text_param(params, "source"), text_param(params, "target")
    upload = params.get("file")
    if not isinstance(upload, UploadFile) or not upload.filename:
        raise HttpError(400, "Invalid request: missing file parameter")
    path, content = PurePath(upload.filename), await upload.read()
    is_html = path.suffix.lower() in (".html", ".htm")
    options = TranslationOptions(source=source.lower(), target=target.lower(), is_html=is_html)
    text = content.decode("utf-8", "replace")
    check_size(service, context, [text], is_list=False, is_file=True)
    sample = text if is_html else text[:4000]
    _, _, direction = await asyncio.to_thread(service.resolve_direction, sample, options)
    columns = [c.strip() for c in text_param(params, "columns", "").split(",") if c.strip()]
    reading = ReadOptions(
        split_sentences=service.config.split_sentences,
        prefix=direction.prefix if direction else "",
        columns=columns,
    )

    async def work() -> str:
        document = await asyncio.to_thread(read_document, path.name, content, reading)
        texts: list[str] = []
        if direction is None:
            return content.decode()
        async for text in _with_progress(service, context, document, direction, options):
            texts.append(text)
        return await asyncio.to_thread(document.assemble, texts)

    try:
        result = await run_unless_disconnected(request, work())
    except NmtError as error:
        raise HttpError(400, f"Invalid request: {error}") from None
    key = service.downloads.add(f"{path.stem}_{target}{path.suffix}", result)
    return JSONResponse({"translatedFileUrl": f"{request.base_url}download_file/{quote(key)}"})


async def _with_progress(
    service: Service,
    context: RequestContext,
    document: Document,
    direction: Any,
    options: TranslationOptions,
) -> Any:
    """Yield the translations of a document's pieces; /v1/progress says how far it is."""
    total, done = sum(len(piece.sentences) for piece in document.texts), 0
    service.progress[context.id] = (0, total)
    pieces = iter(document.texts)
    try:
        async for text in service.stream(context, direction, document.texts, options):
            done += len(next(pieces).sentences)
            service.progress[context.id] = (done, total)
            yield text
    finally:
        service.progress.pop(context.id, None)


async def download_file(request: Request) -> Response:
    """GET /download_file/NAME."""
    key = request.path_params["name"]
    path = service_of(request).downloads.find(key)
    if path is None:
        raise HttpError(404, "no such file, or no longer")
    return FileResponse(
        path, media_type="application/octet-stream", filename=key.rsplit("/", 1)[-1]
    )


async def suggest(request: Request) -> Response:
    """POST /suggest: append a better translation to a file."""
    service, context = service_of(request), context_of(request)
    if service.config.suggestions is None:
        raise HttpError(403, "Suggestions are disabled on this server")
    params = await read_params(request)
    service.admit(request, context, params.get("api_key"))
    names = ("q", "s", "source", "target")
    entry = {name: text_param(params, name) for name in names}
    check_size(service, context, [entry["q"], entry["s"]], is_list=False)
    line = json.dumps({"time": int(time.time()), **entry}, ensure_ascii=False) + "\n"
    with open(resolve(service.config.suggestions), "a", encoding="utf-8") as stream:
        stream.write(line)
    return JSONResponse({"success": True})


ROUTES = [
    Route("/translate", translate, methods=["POST"]),
    Route("/detect", detect, methods=["POST"]),
    Route("/languages", languages, methods=["GET"]),
    Route("/frontend/settings", frontend_settings, methods=["GET"]),
    Route("/translate_file", translate_file, methods=["POST"]),
    Route("/download_file/{name:path}", download_file, methods=["GET"]),
    Route("/suggest", suggest, methods=["POST"]),
]
