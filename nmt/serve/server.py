"""Run the server: listen on its address, and serve until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from nmt.config import ServeConfig
from nmt.errors import ConfigError
from nmt.runtime.distributed import limit_malloc_arenas, set_num_threads
from nmt.serve.app import make_app
from nmt.serve.file_process import start_fork_server
from nmt.serve.models import Models, choose_serve_engine
from nmt.serve.monitoring import OncePerMinute
from nmt.serve.protocol import BoundedProtocol
from nmt.serve.service import Service

log = logging.getLogger(__name__)

_BACKLOG = 2048  # number of connections that wait to be accepted
# The event loop accepts up to this number of connections before `BoundedProtocol` counts them. For
# a moment, the number of connections may exceed `max_connections` by this number.
_ACCEPTED_AT_ONCE = 8
_RESERVED_FILES = 128  # number of files and sockets that belong to no connection
_FILES_PER_CONNECTION = 2  # the socket, and perhaps a file for an upload or a download
# Python's thread switch interval: how long another thread may hold the GIL while the event loop
# waits. Each request waits for the GIL several times. The default of 5 ms would be too long.
_SWITCH_SECONDS = 0.0005
# Each memory arena of malloc keeps freed memory. With only one, threads would wait for each other.
_MALLOC_ARENAS = 2


def serve(config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT, then finish the accepted requests. SIGHUP reloads the models.

    Raises `ConfigError` if the server cannot listen on the address.
    """
    set_num_threads(config.num_threads)
    limit_malloc_arenas(_MALLOC_ARENAS)  # before any thread starts and gets an arena of its own
    # these calls report mistakes in the settings, so they come before the models are loaded
    max_connections = reserve_connections(config)
    listener = listen(config)
    config = choose_serve_engine(config)
    start_fork_server()  # it imports modules while this process loads the models
    service = Service(config, Models.load(config))
    server = _make_server(service, max_connections)
    for name in ("asyncio", "uvicorn.error", "python_multipart.multipart"):
        logging.getLogger(name).addFilter(OncePerMinute())  # a client can cause many warnings
    gc.freeze()  # so that garbage collection does not visit the objects of modules and models
    sys.setswitchinterval(_SWITCH_SECONDS)
    asyncio.run(_run(server, service, listener))
    if server.was_interrupted:
        raise KeyboardInterrupt  # the command has the exit status of Ctrl-C


def _make_server(service: Service, max_connections: int) -> Server:
    """Return a uvicorn server with the settings of the service."""
    config = service.config
    settings = uvicorn.Config(
        make_app(service),
        http=BoundedProtocol,
        backlog=_ACCEPTED_AT_ONCE,  # not the backlog of the socket, see `Server.startup`
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(config.trusted_proxies),
        forwarded_allow_ips=config.trusted_proxies or None,
        limit_concurrency=max_connections,
        timeout_graceful_shutdown=config.drain_seconds,
    )
    return Server(settings)


class Server(uvicorn.Server):
    """A uvicorn server with a longer backlog and without signal handlers, see `_handle_signals`."""

    was_interrupted = False  # whether it has received SIGINT (Ctrl-C)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with `_BACKLOG` instead of uvicorn's setting `backlog`.

        asyncio uses that setting for two limits: the backlog of the socket, and the number of
        connections that it accepts in a row. Only the second one should be small.
        """
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    def stop(self, received_signal: signal.Signals) -> None:
        """Finish the accepted requests and stop. If Ctrl-C was received before, stop at once."""
        self.should_exit = True
        if self.was_interrupted:  # by an earlier signal
            self.force_exit = True
            log.info("%s: stopping without finishing the accepted requests", received_signal.name)
        else:
            log.info("%s: finishing the requests that were accepted", received_signal.name)
        if received_signal == signal.SIGINT:
            self.was_interrupted = True


async def _run(server: Server, service: Service, listener: socket.socket) -> None:
    """Serve until the server is stopped, then cancel reloads that still run."""
    reloads = _handle_signals(server, service)
    host, port = listener.getsockname()[:2]
    if ":" in host:  # IPv6
        host = f"[{host}]"
    log.info("serving on http://%s:%d", host, port)
    await server.serve([listener])
    for task in reloads:
        task.cancel()


def _handle_signals(server: Server, service: Service) -> set[asyncio.Task[None]]:
    """Stop on SIGTERM and SIGINT, reload on SIGHUP. Return the set of running reloads."""
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = asyncio.ensure_future(service.reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    if sys.platform != "win32":  # Windows has only Ctrl-C, which raises KeyboardInterrupt
        loop = asyncio.get_running_loop()
        for stop_signal in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(stop_signal, server.stop, stop_signal)
        loop.add_signal_handler(signal.SIGHUP, reload)
    return reloads


def reserve_connections(config: ServeConfig) -> int:
    """Return the number of connections that may be open.

    The number is `max_connections`, or a smaller number if the process may not open enough files.
    If necessary and allowed, this function increases the process's limit of open files. Raises
    `ConfigError` if no connection is possible.
    """
    if sys.platform == "win32":
        return config.max_connections
    import resource  # not on Windows

    unlimited = resource.RLIM_INFINITY
    num_files = _FILES_PER_CONNECTION * config.max_connections + _RESERVED_FILES
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == unlimited or soft_limit >= num_files:
        return config.max_connections
    max_files = num_files
    if hard_limit != unlimited:
        max_files = min(num_files, hard_limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, hard_limit))
    max_connections = (max_files - _RESERVED_FILES) // _FILES_PER_CONNECTION
    if max_connections < 1:
        min_files = _RESERVED_FILES + _FILES_PER_CONNECTION
        raise ConfigError(
            f"the process may open {max_files} files (ulimit -n); the server needs "
            f"{min_files}, or {num_files} for max_connections={config.max_connections}"
        )
    if max_connections < config.max_connections:
        log.warning(
            "max_connections is %d, as the process may open %d files (ulimit -n)",
            max_connections,
            max_files,
        )
    return max_connections


def listen(config: ServeConfig) -> socket.socket:
    """Return a socket that listens on the address of the settings."""
    try:
        addresses = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        # with an explicit protocol, since asyncio turns off Nagle's algorithm only for such sockets
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


def _find_free_port(host: str) -> int:
    """Return a port of the host that no process listens on."""
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
    return port
