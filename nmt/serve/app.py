"""The server: its ASGI application, the web page, and running until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import gc
import json
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from importlib import resources
from pathlib import PurePosixPath
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from nmt import __version__
from nmt.config import ServeConfig
from nmt.errors import ConfigError, DataError
from nmt.runtime.distributed import limit_malloc_arenas, set_num_threads
from nmt.serve import api, middleware, v1
from nmt.serve.access import HttpError, Key, KeyRing, read_token
from nmt.serve.file_process import start_fork_server
from nmt.serve.models import Models, choose_serve_engine
from nmt.serve.monitoring import OncePerMinute
from nmt.serve.parameters import get_service
from nmt.serve.protocol import BoundedProtocol
from nmt.serve.service import ClientDisconnectedError, Service, get_client_name

log = logging.getLogger(__name__)

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
_CLEANUP_SECONDS = 10  # between two calls that delete downloads and free memory
_BACKLOG = 2048  # connections that wait to be accepted
_ACCEPTED_AT_ONCE = 8  # connections accepted before the first of them is counted
_RESERVED_FILES = 128  # sockets and files that belong to no connection
# After this time, a thread that reads a large text lets the event loop run. A short request needs
# several turns, so Python's default of 5 ms would delay it too much.
_SWITCH_SECONDS = 0.0005


async def health(request: Request) -> Response:
    """GET /health. The server works on with its old models if a reload fails."""
    content: dict[str, object] = {"status": "ok"}  # as LibreTranslate answers
    if get_service(request).reload_failed:
        content["reload_failed"] = True
    return JSONResponse(content)


async def metrics(request: Request) -> Response:
    """GET /metrics, with the bearer token of the server if it has one."""
    service = get_service(request)
    if not service.config.metrics:
        raise HttpError(404, "metrics are turned off")
    keys: KeyRing | None = request.app.state.metrics_keys
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    if keys is not None and keys.find(get_client_name(request), token) is None:
        raise HttpError(401, "send the server's token: Authorization: Bearer TOKEN")
    return PlainTextResponse(service.metrics.render(), media_type="text/plain; version=0.0.4")


async def spec(request: Request) -> Response:
    """GET /spec: the OpenAPI description, with the languages and limits of this server."""
    service = get_service(request)
    content = _openapi_json(tuple(service.models.codes), service.config.max_beam_size)
    return Response(content, media_type="application/json")


@functools.lru_cache(maxsize=1)
def _openapi_json(codes: tuple[str, ...], max_beam_size: int) -> bytes:
    """Return the OpenAPI description with the codes of the served languages."""
    description = json.loads(_read_static("openapi.json"))
    description["info"]["version"] = __version__
    schemas = description["components"]["schemas"]
    schemas["Source"]["enum"] = ["auto", *codes]
    schemas["Target"]["enum"] = codes
    schemas["NBest"]["maximum"] = max_beam_size
    schemas["BeamSize"]["maximum"] = max_beam_size
    return bytes(JSONResponse(description).body)


async def page(request: Request) -> Response:
    """GET /, /docs, and the files that these pages load."""
    if not get_service(request).config.frontend:
        raise HttpError(404, "this server has no page")
    pages = {"/": "index.html", "/docs": "docs.html"}
    name = request.path_params.get("name") or pages[request.scope["path"]]
    if name not in [file.name for file in _STATIC_FILES.iterdir()]:
        raise HttpError(404, "Not Found")
    media_type = _MEDIA_TYPES[PurePosixPath(name).suffix]
    return Response(_read_static(name), headers=_PAGE_HEADERS, media_type=media_type)


def _read_static(name: str) -> str:
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
    handlers: Any = {
        ClientDisconnect: middleware.respond_to_disconnect,
        ClientDisconnectedError: middleware.respond_to_disconnect,
        HttpError: middleware.respond_to_http_error,
        HTTPException: middleware.respond_to_http_error,
        ConfigError: middleware.respond_to_user_error,
        DataError: middleware.respond_to_user_error,
        OSError: middleware.respond_to_storage_error,
        Exception: middleware.respond_to_bug,
    }
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.state.service = service
    token_file = service.config.metrics_token
    app.state.metrics_keys = None
    if token_file is not None:
        app.state.metrics_keys = KeyRing([Key(read_token(token_file), "metrics")])
    return middleware.Middleware(app, service)


async def _clean_up(service: Service) -> None:
    """Delete old downloads, end idle processes, and give freed memory back to the system."""
    malloc_trim = None
    if sys.platform.startswith("linux"):
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library
    while True:
        await asyncio.sleep(_CLEANUP_SECONDS)
        service.downloads.expire()
        service.scheduler.encoder.end_idle_processes()
        if malloc_trim is not None:
            await asyncio.to_thread(malloc_trim, 0)


def limit_connections(config: ServeConfig) -> int:
    """Return `max_connections`, or fewer if the process may not open as many files.

    Raises the limit of open files if it can. Each connection may need a second file, for an upload
    or a download. Raises `ConfigError` if no connection is possible.
    """
    if sys.platform == "win32":
        return config.max_connections
    import resource  # not on Windows

    unlimited = resource.RLIM_INFINITY
    num_files = 2 * config.max_connections + _RESERVED_FILES
    max_files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == unlimited or max_files >= num_files:
        return config.max_connections
    max_files = num_files if hard_limit == unlimited else min(num_files, hard_limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, hard_limit))
    max_connections = (max_files - _RESERVED_FILES) // 2
    if max_connections < 1:
        raise ConfigError(
            f"the process may open {max_files} files (ulimit -n); the server needs "
            f"{_RESERVED_FILES + 2}, or {num_files} for max_connections={config.max_connections}"
        )
    if max_connections < config.max_connections:
        log.warning(
            "max_connections is %d, as the process may open %d files (ulimit -n)",
            max_connections,
            max_files,
        )
    return max_connections


class Server(uvicorn.Server):
    """A uvicorn server that `serve` stops on signals, and that has a longer backlog."""

    was_interrupted = False  # by Ctrl-C

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with `_BACKLOG`, in place of the limit of connections accepted at once."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers; `_handle_signals` does."""
        yield

    def stop(self, number: signal.Signals) -> None:
        """Finish the accepted requests and stop; a signal after Ctrl-C stops at once."""
        self.force_exit = self.was_interrupted
        self.should_exit = True
        self.was_interrupted = self.was_interrupted or number == signal.SIGINT
        log.info("%s: finishing the requests that were accepted", number.name)


def serve(config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT, then finish the accepted requests. SIGHUP reloads the models.

    Raises `ConfigError` if the server cannot listen on the address.
    """
    set_num_threads(config.num_threads)
    limit_malloc_arenas(2)
    max_connections = limit_connections(config)
    listener = listen(config)
    config = choose_serve_engine(config)
    start_fork_server()
    service = Service(config, Models.load(config))
    settings = uvicorn.Config(
        make_app(service),
        http=BoundedProtocol,
        backlog=_ACCEPTED_AT_ONCE,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(config.trusted_proxies),
        forwarded_allow_ips=config.trusted_proxies or None,
        limit_concurrency=max_connections,
        timeout_graceful_shutdown=config.drain_seconds,
    )
    server = Server(settings)
    for name in ("asyncio", "uvicorn.error", "python_multipart.multipart"):
        logging.getLogger(name).addFilter(OncePerMinute())  # clients can cause warnings at will
    gc.freeze()  # garbage collection need not visit the objects of modules and models
    sys.setswitchinterval(_SWITCH_SECONDS)
    asyncio.run(_run(server, service, listener))
    if server.was_interrupted:
        raise KeyboardInterrupt


async def _run(server: Server, service: Service, listener: socket.socket) -> None:
    reloads = _handle_signals(server, service)
    host, port = listener.getsockname()[:2]
    log.info("serving on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    await server.serve([listener])
    for task in reloads:
        task.cancel()


def _handle_signals(server: Server, service: Service) -> set[asyncio.Task[None]]:
    """Stop or reload on signals. Return the set of running reloads."""
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = asyncio.ensure_future(service.reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    if sys.platform != "win32":  # there, Ctrl-C raises KeyboardInterrupt and nothing else is sent
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop, number)
        loop.add_signal_handler(signal.SIGHUP, reload)
    return reloads


def _find_free_port(host: str) -> int:
    """Return a port of the host that no process listens on."""
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
    return port


def listen(config: ServeConfig) -> socket.socket:
    """Return a socket that listens on the address of the settings."""
    try:
        addresses = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        # asyncio turns off Nagle's algorithm only for sockets with an explicit protocol
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        problem = f"host={config.host} port={config.port}: {error}"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            problem += f"; give another port, such as port={_find_free_port(config.host)}"
        raise ConfigError(problem) from None
    return listener
