"""The ASGI application of the server: all routes, the web page, and background tasks."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import json
import sys
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import PurePosixPath

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from nmt import __version__
from nmt.serve import api, v1
from nmt.serve.access import get_bearer_token, get_client_name
from nmt.serve.http_errors import HttpError
from nmt.serve.middleware import EXCEPTION_HANDLERS, Middleware
from nmt.serve.parameters import get_service
from nmt.serve.service import Service

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
_STATIC_FILES = resources.files("nmt.serve") / "static"
_SECONDS_BETWEEN_CLEANUPS = 10


async def health(request: Request) -> Response:
    """GET /health. The status is "ok" even if a reload failed, since the old models are served."""
    content: dict[str, object] = {"status": "ok"}  # as in LibreTranslate
    if get_service(request).reload_failed:
        content["reload_failed"] = True
    return JSONResponse(content)


async def metrics(request: Request) -> Response:
    """GET /metrics. Requires the bearer token of the server, if it has one."""
    service = get_service(request)
    if not service.config.metrics:
        raise HttpError(404, "metrics are turned off")
    keys = service.metrics_token
    token = get_bearer_token(request)
    if keys is not None and keys.find(get_client_name(request), token) is None:
        raise HttpError(401, "send the server's token: Authorization: Bearer TOKEN")
    return PlainTextResponse(service.metrics.render(), media_type="text/plain; version=0.0.4")


async def spec(request: Request) -> Response:
    """GET /spec: the OpenAPI description, with the languages and limits of this server."""
    service = get_service(request)
    content = _openapi_json(tuple(service.models.languages.codes), service.config.max_beam_size)
    return Response(content, media_type="application/json")


@functools.lru_cache(maxsize=1)
def _openapi_json(codes: tuple[str, ...], max_beam_size: int) -> bytes:
    """Return the OpenAPI description with the served languages and the largest beam size."""
    description = json.loads(_read_static("openapi.json"))
    description["info"]["version"] = __version__
    schemas = description["components"]["schemas"]
    schemas["Source"]["enum"] = ["auto", *codes]
    schemas["Target"]["enum"] = codes
    schemas["NBest"]["maximum"] = max_beam_size
    schemas["BeamSize"]["maximum"] = max_beam_size
    schemas["Search"]["properties"]["alternatives"]["maximum"] = max_beam_size
    return bytes(JSONResponse(description).body)


async def page(request: Request) -> Response:
    """GET /, /docs, and the files that these pages load."""
    if not get_service(request).config.frontend:
        raise HttpError(404, "this server has no page")
    pages = {"/": "index.html", "/docs": "docs.html"}
    name = request.path_params.get("name")  # only paths under /static/ have this parameter
    if not name:
        name = pages[request.scope["path"]]
    if name not in [file.name for file in _STATIC_FILES.iterdir()]:
        raise HttpError(404, "Not Found")
    media_type = _MEDIA_TYPES[PurePosixPath(name).suffix]
    return Response(_read_static(name), headers=_PAGE_HEADERS, media_type=media_type)


def _read_static(name: str) -> str:
    """Return the content of a file of the web page."""
    return (_STATIC_FILES / name).read_text(encoding="utf-8")


def make_app(service: Service) -> ASGIApp:
    """Return the ASGI application. The scheduler runs until the application stops."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [
            asyncio.ensure_future(service.scheduler.run()),
            asyncio.ensure_future(_clean_up(service)),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            service.close()

    routes = [
        *api.ROUTES,
        *v1.ROUTES,
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/spec", spec, methods=["GET"]),
        Route("/", page, methods=["GET"]),
        Route("/docs", page, methods=["GET"]),
        Route("/static/{name}", page, methods=["GET"]),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=EXCEPTION_HANDLERS)
    app.state.service = service
    return Middleware(app, service)


async def _clean_up(service: Service) -> None:
    """Regularly delete old downloads, end idle processes, and return freed memory to the system."""
    malloc_trim = None
    if sys.platform.startswith("linux"):
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in glibc
    while True:
        await asyncio.sleep(_SECONDS_BETWEEN_CLEANUPS)
        service.downloads.expire()
        service.scheduler.encoder.end_idle_processes()
        if malloc_trim is not None:
            await asyncio.to_thread(malloc_trim, 0)
