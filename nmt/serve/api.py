"""LibreTranslate's HTTP API: its routes, parameters and responses."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from nmt.config import resolve_path
from nmt.data.language_codes import language_name
from nmt.documents.document import ReadOptions
from nmt.documents.suffixes import FORMATS
from nmt.serve.file_process import FileSummary, FileWindow, OpenFile
from nmt.serve.http_errors import HttpError, InvalidRequestError
from nmt.serve.languages import DetectedLanguage
from nmt.serve.models import Direction, TranslationOptions
from nmt.serve.parameters import ApiRequest, get_service, read_request
from nmt.serve.service import run_unless_disconnected
from nmt.serve.text_translation import TranslatedText, call_in_thread_if_long, check_results

_MAX_ALTERNATIVES = 100
_FRONTEND_TIMEOUT_MS = 500  # milliseconds that LibreTranslate's page waits after a key press
_SUGGESTIONS_LOCK = threading.Lock()  # held while a suggestion is appended to the file


async def translate(request: Request) -> Response:
    """POST /translate."""
    api_request = await read_request(request)
    texts = api_request.params.texts("q")
    is_list = isinstance(api_request.params["q"], list)
    options = api_request.language_options()
    num_alternatives = api_request.params.integer(
        "alternatives", default=0, maximum=_MAX_ALTERNATIVES
    )
    api_request.check_size(texts, is_list=is_list)
    api_request.service.models.check_languages(options)
    options = replace(options, n_best=num_alternatives + 1, is_html=api_request.params.is_html())
    start = time.monotonic()
    translated_texts = await api_request.service.translate(
        request, api_request.context, texts, options
    )
    for text in translated_texts:
        check_results(text.results)
    api_request.service.metrics.request_seconds.observe(time.monotonic() - start)
    describe_texts = partial(
        _describe_texts,
        translated_texts,
        num_alternatives=num_alternatives,
        detects_source=options.source == "auto",
    )
    content = await call_in_thread_if_long(texts, describe_texts)
    if is_list:
        return JSONResponse(content)
    # the response to a single text has plain values instead of lists
    return JSONResponse({name: values[0] for name, values in content.items()})


def _describe_texts(
    translated_texts: Sequence[TranslatedText], *, num_alternatives: int, detects_source: bool
) -> dict[str, list[Any]]:
    """Return the JSON object for a list of texts.

    Each value of the object is a list with one element for each text. With `detects_source`, the
    object also has the detected source languages.
    """
    content: dict[str, list[Any]] = {
        "translatedText": [text.render_translation() for text in translated_texts]
    }
    if detects_source:
        content["detectedLanguage"] = [
            {"confidence": text.confidence, "language": text.source} for text in translated_texts
        ]
    if num_alternatives > 0:
        content["alternatives"] = [
            text.list_alternatives(num_alternatives) for text in translated_texts
        ]
    return content


async def detect(request: Request) -> Response:
    """POST /detect."""
    api_request = await read_request(request)
    text = " ".join(api_request.params.texts("q"))
    api_request.check_size([text])
    detected_languages = api_request.service.models.languages.detect(text)
    if not detected_languages:  # clients of LibreTranslate expect at least one language
        detected_languages = [DetectedLanguage("en", 0.0)]
    return JSONResponse(
        [{"confidence": confidence, "language": code} for code, confidence in detected_languages]
    )


async def languages(request: Request) -> Response:
    """GET /languages."""
    return JSONResponse(get_service(request).models.languages.describe())


async def frontend_settings(request: Request) -> Response:
    """GET /frontend/settings."""
    service = get_service(request)
    config = service.config
    served_languages = service.models.languages
    source = served_languages.sources[0]
    targets = [code for code in served_languages.list_targets(source) if code != source]
    target = targets[0] if targets else source
    return JSONResponse(
        {
            "charLimit": config.char_limit or -1,  # in LibreTranslate, -1 means no limit
            "frontendTimeout": _FRONTEND_TIMEOUT_MS,
            "apiKeys": service.admission.has_keys,
            "keyRequired": service.admission.has_keys and config.key_required,
            "suggestions": config.suggestions is not None,
            "filesTranslation": config.max_file_bytes > 0,
            "supportedFilesFormat": list(FORMATS) if config.max_file_bytes else [],
            "language": {
                "source": {"code": source, "name": language_name(source)},
                "target": {"code": target, "name": language_name(target)},
            },
        }
    )


async def translate_file(request: Request) -> Response:
    """POST /translate_file: a multipart form."""
    if not get_service(request).config.max_file_bytes:
        raise HttpError(403, "Files translation is disabled on this server")
    api_request = await read_request(request)
    options = api_request.language_options()
    upload = api_request.params.get("file")
    if not isinstance(upload, UploadFile) or not upload.filename:
        raise InvalidRequestError("missing file parameter")
    path = PurePath(upload.filename)
    content = await upload.read()
    coroutine = _translate_file(api_request, path, content, options)
    translation = await run_unless_disconnected(request, coroutine)
    name = f"{path.stem}_{api_request.params['target']}{path.suffix}"
    key = api_request.service.downloads.add(name, translation)
    return JSONResponse({"translatedFileUrl": f"{request.base_url}download_file/{quote(key)}"})


async def _translate_file(
    api_request: ApiRequest, path: PurePath, content: bytes, options: TranslationOptions
) -> bytes:
    """Return the content of the translated file, given name and content of the original file."""
    columns = api_request.params.text("columns", "").split(",")
    read_options = ReadOptions(
        split_sentences=api_request.service.config.split_sentences,
        columns=[column.strip() for column in columns if column.strip()],
        tgt_lang=options.target,
    )
    client = api_request.context.client
    service = api_request.service
    service.models.check_languages(options)
    async with service.file_processes.open(client, path.name, content, read_options) as file:
        async with service.file_processes.hold_read_slot(client):
            max_sentences = service.text_translator.max_window_sentences
            # the sentences of a text are queued together, so they must fit in the queue
            max_text_sentences = service.scheduler.queues.max_per_client
            summary: FileSummary = await file.call("read", max_sentences, max_text_sentences)
        api_request.check_characters(summary.num_characters, is_file=True)
        direction = service.models.resolve_direction(summary.language_sample, options).direction
        if direction is None:  # nothing to translate, such as a file in the target language
            return content
        return await _translate_open_file(api_request, file, summary, direction, options)


async def _translate_open_file(
    api_request: ApiRequest,
    file: OpenFile,
    summary: FileSummary,
    direction: Direction,
    options: TranslationOptions,
) -> bytes:
    """Translate a file that was read, and return its content. /v1/progress shows the progress."""
    progress = api_request.service.progress
    request_id = api_request.context.id
    num_finished = 0
    progress[request_id] = (0, summary.num_sentences)

    async def next_window() -> list[FileWindow] | None:
        """Return the next window of the file, or None at its end.

        `translate_windows` expects a list of texts. The only element of the list is the window of
        the file, which already combines several texts.
        """
        file_window = await file.call("next_window")
        return None if file_window is None else [file_window]

    try:
        windows = api_request.service.text_translator.translate_windows(
            api_request.context, direction, next_window, options
        )
        async for _, results_by_text in windows:
            [sentence_results] = results_by_text  # the results of the only text, a `FileWindow`
            await file.call("render", sentence_results, direction.source_prefix)
            num_finished += len(sentence_results)
            progress[request_id] = (num_finished, summary.num_sentences)
    finally:
        progress.pop(request_id, None)
    translation: bytes = await file.call("assemble")
    return translation


async def download_file(request: Request) -> Response:
    """GET /download_file/NAME."""
    key = request.path_params["name"]
    path = get_service(request).downloads.find(key)
    if path is None:
        raise HttpError(404, "no such file; it may have been deleted")
    filename = key.rsplit("/", 1)[-1]  # the key is SECRET/FILENAME
    return FileResponse(path, media_type="application/octet-stream", filename=filename)


async def suggest(request: Request) -> Response:
    """POST /suggest: append a user's translation to the file of suggestions.

    In LibreTranslate's API, `q` is the text and `s` the suggested translation.
    """
    path = get_service(request).config.suggestions
    if path is None:
        raise HttpError(403, "Suggestions are disabled on this server")
    api_request = await read_request(request)
    suggestion = {name: api_request.params.text(name) for name in ("q", "s", "source", "target")}
    api_request.check_size([suggestion["q"], suggestion["s"]])
    line = json.dumps({"time": int(time.time()), **suggestion}, ensure_ascii=False) + "\n"
    options = TranslationOptions(source=suggestion["source"], target=suggestion["target"])
    api_request.service.models.check_languages(options)
    await asyncio.to_thread(_append_line, resolve_path(path), line.encode())
    return JSONResponse({"success": True})


def _append_line(path: Path, line: bytes) -> None:
    """Append a line to a file. If that fails, leave the file unchanged and raise `OSError`."""
    with _SUGGESTIONS_LOCK, open(path, "ab", buffering=0) as stream:
        old_size = stream.tell()
        if stream.write(line) < len(line):  # the disk is full
            stream.truncate(old_size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


ROUTES = [
    Route("/translate", translate, methods=["POST"]),
    Route("/detect", detect, methods=["POST"]),
    Route("/languages", languages, methods=["GET"]),
    Route("/frontend/settings", frontend_settings, methods=["GET"]),
    Route("/translate_file", translate_file, methods=["POST"]),
    Route("/download_file/{name:path}", download_file, methods=["GET"]),
    Route("/suggest", suggest, methods=["POST"]),
]
