"""The application: routes, what every answer has in common, and the server's life."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import json
import logging
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from importlib import resources
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nmt import __version__
from nmt.config import ServeConfig
from nmt.errors import ConfigError, DataError
from nmt.runtime.distributed import set_num_threads
from nmt.serve import api, v1
from nmt.serve.access import Body, HttpError, is_same, read_token
from nmt.serve.models import Models
from nmt.serve.monitoring import log_access
from nmt.serve.service import ClientDisconnectedError, RequestContext, Service, client_of

log = logging.getLogger(__name__)

_CORS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-headers", b"Authorization, Content-Type"),
    (b"access-control-expose-headers", b"X-Request-ID, Retry-After"),
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-max-age", b"1728000"),
]
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
_PAGES = {"/": "index.html", "/docs": "docs.html"}
_GONE = 499  # in logs and metrics: the client did not wait for its answer
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Middleware:
    """What is around every request: id, access log, CORS, bounds on the body, errors as JSON."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        given = request.headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        context = scope.setdefault("state", {})["context"] = RequestContext(
            request_id, client_of(request)
        )
        is_page = scope["path"] in _PAGES or scope["path"].startswith("/static/")
        start, status = time.monotonic(), _GONE

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
                message["headers"] = [*message["headers"], *extra, *(() if is_page else _CORS)]
            await send(message)

        config = self._service.config
        is_file = scope["path"] in ("/translate_file", "/v1/translate") and not is_page
        most = max(config.max_file_bytes if is_file else 0, config.max_body_bytes)
        body = Body(most)
        try:
            if scope["method"] == "OPTIONS" and not is_page:
                response: ASGIApp = Response(status_code=204)
            else:
                length = request.headers.get("content-length", "0")
                if length.isdigit() and int(length[:18]) > most:
                    raise HttpError(413, f"the body is larger than {most} bytes, the limit")
                response = self._app
            limited = self._service.bodies.limited(receive, body)
            await response(scope, limited, send_with_headers)
        except HttpError as error:
            await _refuse(context, error)(scope, receive, send_with_headers)
        except Exception:
            if status == _GONE:  # nothing was answered: the server's own handler is to know
                raise
            log.exception("request %s failed while it was answered", context.id)
        finally:
            self._service.bodies.release(body)
            self._report(scope, context, status, time.monotonic() - start)

    def _report(self, scope: Scope, context: RequestContext, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self._service.metrics.requests.labels(scope["method"], path, status).inc()
        if self._service.config.access_log:
            fields = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "id": context.id,
                "client": context.client,
                "method": scope["method"],
                "path": path if "download" in path else scope["path"][:200],
                "status": status,
                "ms": round(seconds * 1000, 1),
            }
            log_access(fields | context.fields)


def _refuse(context: RequestContext, error: HttpError) -> Response:
    context.fields.setdefault("error", error.text[:300])
    headers = {"Retry-After": str(error.retry_seconds)} if error.retry_seconds else {}
    if error.status in (408, 413):  # the rest of the body is not read
        headers["Connection"] = "close"
    return JSONResponse({"error": error.text}, error.status, headers)


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return _refuse(api.context_of(request), error)


async def _on_user_error(request: Request, error: Exception) -> Response:
    return _refuse(api.context_of(request), HttpError(400, f"Invalid request: {error}"))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = _refuse(api.context_of(request), HttpError(error.status_code, error.detail))
    answer.headers.update(error.headers or {})
    return answer


async def _on_gone(request: Request, error: Exception) -> Response:
    api.service_of(request).metrics.disconnects.inc()
    return Response(status_code=_GONE)  # which nobody reads


async def _on_bug(request: Request, error: Exception) -> Response:
    context = api.context_of(request)
    log.error("request %s failed", context.id, exc_info=error)
    return _refuse(
        context, HttpError(500, f"internal error; the server's log has request {context.id}")
    )


async def health(request: Request) -> Response:
    """GET /health."""
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    """GET /metrics, with a bearer token where one is set."""
    service = api.service_of(request)
    if not service.config.metrics:
        raise HttpError(404, "metrics are turned off")
    token = request.app.state.metrics_token
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if token is not None and not is_same(token, given):
        raise HttpError(401, "send the server's token: Authorization: Bearer TOKEN")
    return PlainTextResponse(service.metrics.render(), media_type="text/plain; version=0.0.4")


async def spec(request: Request) -> Response:
    """GET /spec: the OpenAPI description."""
    content = json.loads(_static("openapi.json"))
    content["info"]["version"] = __version__
    return JSONResponse(content)


async def page(request: Request) -> Response:
    """GET /, /docs and what they load."""
    name = request.path_params.get("name") or _PAGES[request.scope["path"]]
    if not api.service_of(request).config.frontend:
        raise HttpError(404, "this server has no page")
    suffix = "." + name.rsplit(".", 1)[-1]
    if not re.fullmatch(r"[a-z]+\.[a-z]+", name) or suffix not in _KINDS:
        raise HttpError(404, "Not Found")
    try:
        content = _static(name)
    except FileNotFoundError:
        raise HttpError(404, "Not Found") from None
    return Response(content, headers=_PAGE_HEADERS, media_type=_KINDS[suffix])


def _static(name: str) -> str:
    return (resources.files("nmt.serve") / "static" / name).read_text(encoding="utf-8")


def make_app(service: Service) -> ASGIApp:
    """Return the ASGI application; its lifespan runs the scheduler."""
    config = service.config

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        running = asyncio.ensure_future(service.scheduler.run())
        expiring = asyncio.ensure_future(_expire(service))
        try:
            yield
        finally:
            running.cancel()
            expiring.cancel()
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
    handlers: Any = {
        ClientDisconnect: _on_gone,
        ClientDisconnectedError: _on_gone,
        HttpError: _on_refusal,
        ConfigError: _on_user_error,
        DataError: _on_user_error,
        HTTPException: _on_http_exception,
        Exception: _on_bug,
    }
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.state.service = service
    token = config.metrics_token
    app.state.metrics_token = None if token is None else read_token(token)
    return Middleware(app, service)


async def _expire(service: Service) -> None:
    while True:
        await asyncio.sleep(30)
        service.downloads.expire()


def http_protocol() -> Any:
    """Return what reads HTTP: llhttp, with a quarter less processor time a request, or h11 where
    httptools is missing.
    """
    if importlib.util.find_spec("httptools") is None:
        return "h11"
    from nmt.serve.protocol import BoundedProtocol

    return BoundedProtocol


class Server(uvicorn.Server):
    """A server whose signals are handled by `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def serve(config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT, then answer what was accepted; SIGHUP reloads the models.

    Raises `ConfigError` for an address that cannot be listened on.
    """
    set_num_threads(config.num_threads)
    listener = _listen(config)
    service = Service(config, Models.load(config))
    settings = uvicorn.Config(
        make_app(service),
        http=http_protocol(),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(config.trusted_proxies),
        forwarded_allow_ips=config.trusted_proxies or None,
        limit_concurrency=config.max_connections,
        timeout_graceful_shutdown=config.drain_seconds,
    )
    server = Server(settings)
    gc.freeze()  # what is there now stays; collecting garbage need not look at it
    if asyncio.run(_run(server, service, listener)):
        raise KeyboardInterrupt


async def _run(server: uvicorn.Server, service: Service, listener: socket.socket) -> bool:
    """Run until a signal comes; return whether it was Ctrl-C."""
    came: list[signal.Signals] = []
    tasks = _handle_signals(server, service, came)
    host, port = listener.getsockname()[:2]
    log.info("serving on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    await server.serve([listener])
    for task in tasks:
        task.cancel()
    return signal.SIGINT in came


def _handle_signals(
    server: uvicorn.Server, service: Service, came: list[signal.Signals]
) -> set[asyncio.Task[None]]:
    """Stop, or reload, on signals, which are added to `came`; return the set of running reloads."""
    loop, reloads = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def stop(number: signal.Signals) -> None:
        server.force_exit = signal.SIGINT in came  # a second signal after Ctrl-C does not wait
        server.should_exit = True
        came.append(number)
        log.info("%s: finishing the requests that were accepted", number.name)

    def reload() -> None:
        task = asyncio.ensure_future(service.reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    if sys.platform != "win32":  # where Ctrl-C is a KeyboardInterrupt, and that is all
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        loop.add_signal_handler(signal.SIGHUP, reload)
    return reloads


def _listen(config: ServeConfig) -> socket.socket:
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        # with its protocol: asyncio turns Nagle's algorithm off only for sockets that name TCP
        listener = socket.socket(found[0], socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
        listener.listen(2048)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host={config.host} port={config.port}: {error}") from None
    return listener
