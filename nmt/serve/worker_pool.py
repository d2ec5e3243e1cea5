"""Starts, feeds and replaces the processes that search for the server.

The server process serves HTTP and holds no weights. A loader process loads the models once and
forks the workers, which share its memory. The loader has a single thread, so that forking is safe.
When a worker dies, the loader forks another one. Each `WorkerPool` has its own loader and workers.

The server and each worker exchange the messages of `nmt.serve.worker_process` through a socket. A
worker searches one round at a time: segments, which are lines or parts of long lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from nmt.checkpoint import (
    ModelInfo,
    build_model,
    describe_other_models,
    find_model,
    load_info,
    load_model_tokenizers,
)
from nmt.config import Engine, ServeConfig, resolve_path
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ModelError
from nmt.runtime.distributed import find_device
from nmt.search.stepper import ModelStepper
from nmt.serve.rounds import Delivery, SearchRound
from nmt.serve.worker_process import (
    STARTED_BYTE,
    FunctionCall,
    FunctionResult,
    LoadModels,
    StartRound,
    WorkerIdle,
)
from nmt.translate.engines.base import find_model_directions
from nmt.translate.engines.native import NativeBackend
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_DEFAULT_WORKERS = 4  # more workers would take more memory and have fewer threads each
# The arguments of the program are a file descriptor and the entries of the server's `sys.path`. By
# default, `python -c` would search modules in the working directory first.
_LOADER_PROGRAM = """import sys
control_fd = int(sys.argv[1])
sys.path[:] = sys.argv[2:]
from nmt.serve.worker_process import run_loader
run_loader(control_fd)"""
_MESSAGE_LENGTH = struct.Struct("!i")  # precedes each message of `multiprocessing.connection`


class WorkerDiedError(Exception):
    """A worker has died before it delivered all results."""


def count_workers(config: ServeConfig) -> int:
    """Return the number of worker processes to start.

    Workers search with the native backend on a Linux CPU. Otherwise, returns 0: the server searches
    in its own process.
    """
    if config.backend is not Engine.native or not sys.platform.startswith("linux"):
        return 0
    if find_device(config.device).type != "cpu":
        return 0
    if config.num_workers is None:
        return min(_MAX_DEFAULT_WORKERS, torch.get_num_threads())
    return config.num_workers


class RemoteBackend(NativeBackend):
    """The settings of a model whose weights are in the workers of a pool. Cannot search itself.

    Args:
        pool: the workers.
        model_index: index of the model in `ServeConfig.model_dir`.
        info: the settings of the model.
    """

    def __init__(
        self, pool: WorkerPool, model_index: int, info: ModelInfo, tokenizers: Tokenizers
    ) -> None:
        model_without_weights = build_model(info, weights=None, device=torch.device("cpu"))
        super().__init__(ModelStepper(model_without_weights), tokenizers)
        self.pool = pool
        self.model_index = model_index
        self.num_workers = pool.num_workers


class WorkerPool:
    """The worker processes that search with the models of a server.

    Implements `nmt.serve.rounds.SearchWorkers`. Each worker is started at its first use. The
    processes end when the pool is closed or garbage collected.

    Args:
        config: the models, `model_dir`, and how to load them.
        num_sharing_workers: number of workers that share the CPU cores. If it is 1, the pool has a
            second worker, which is for urgent requests only.

    Attributes:
        num_workers: number of workers of the pool, at least 2.
        num_deaths: number of workers that have died.
    """

    def __init__(self, config: ServeConfig, num_sharing_workers: int) -> None:
        """Load the models. Raises the exceptions of `Translator.load`."""
        self.num_workers = max(num_sharing_workers, 2)
        self.num_deaths = 0
        # folders of models or runs, as the user named them
        self._configured_dirs = config.model_dir
        model_folders = [str(find_model(resolve_path(folder))) for folder in config.model_dir]
        self._config = replace(config, model_dir=model_folders)
        # if the second worker is for urgent requests only, both have one thread for each core
        self._num_threads = max(torch.get_num_threads() // num_sharing_workers, 1)
        self._control = self._start_loader()
        self._workers: list[_WorkerConnection | None] = [None] * self.num_workers
        self._lock = asyncio.Lock()

    def _start_loader(self) -> socket.socket:
        """Start the loader process; return the socket to it after it has loaded the models."""
        control, loader_control = socket.socketpair()
        with loader_control:
            fd = loader_control.fileno()
            command = [sys.executable, "-c", _LOADER_PROGRAM, str(fd), *sys.path]
            process = subprocess.Popen(command, pass_fds=[fd])
        # waits for the end of the process, which would otherwise leave a zombie
        threading.Thread(target=process.wait, daemon=True).start()
        # `connection.close` closes its file descriptor, so it gets a duplicate
        connection = Connection(os.dup(control.fileno()))
        try:
            connection.send(LoadModels(self._config, self._num_threads))
            error: Exception | None = connection.recv()  # None if the models are loaded
        except (EOFError, OSError):
            error = ModelError(
                "the process that loads the models has died; does it have enough memory?"
            )
        finally:
            connection.close()
        if error is not None:
            control.close()
            raise error
        return control

    def make_translators(self) -> list[Translator]:
        """Return a translator for each model. The translators have no weights."""
        translators = []
        for model_index, name in enumerate(self._config.model_dir):
            folder = Path(name)
            info = load_info(folder)
            tokenizers = load_model_tokenizers(folder, info)
            backend = RemoteBackend(self, model_index, info, tokenizers)
            configured_dir = resolve_path(self._configured_dirs[model_index])
            note_on_other_models = describe_other_models(configured_dir, folder)
            log.info("model %s, %d updates, on cpu%s", folder, info.updates, note_on_other_models)
            directions = find_model_directions(info, tokenizers)
            translators.append(Translator(backend, tokenizers, info.search, directions))
        return translators

    async def search(
        self, worker_index: int, search_round: SearchRound, deliver: Callable[[Delivery], None]
    ) -> None:
        """Search a round in a worker. Raises `WorkerDiedError` if the worker dies."""
        worker = await self._get_worker(worker_index)

        def send_new_segments() -> None:
            """Send the segments that were added to the round since the last call."""
            segments = search_round.take_new_segments()
            if segments:
                worker.send(segments)

        worker.is_busy = True
        worker.send(_make_start(search_round))
        send_new_segments()
        search_round.on_new_segments = send_new_segments
        try:
            is_finished = False
            while not is_finished:
                message = await worker.receive()
                if isinstance(message, Delivery):
                    deliver(message)
                else:
                    # `WorkerIdle`: the worker has finished the segments that it has received, but
                    # others may still be on their way
                    is_finished = message.num_finished == search_round.num_added
        except BaseException:
            # After any exception, also a cancellation, this worker may still send results of this
            # round, and the next round would receive them. So another worker must take over.
            worker.close()
            raise
        finally:
            worker.is_busy = False
            search_round.on_new_segments = lambda: None

    async def call_function(
        self, translator: Translator, function: Callable[..., T], *args: Any
    ) -> T:
        """Return `function(translator, *args)`, called in a worker. Raises `WorkerDiedError`.

        An idle worker calls the function, but not the last worker, which is left for urgent
        requests. If no worker is idle, the first worker calls it between two steps of its search,
        or after its search.
        """
        assert isinstance(translator.backend, RemoteBackend)
        worker_index = 0
        for index, candidate in enumerate(self._workers[:-1]):
            if candidate is None or not candidate.is_busy:
                worker_index = index
                break
        worker = await self._get_worker(worker_index)
        call = FunctionCall(function, model_index=translator.backend.model_index, args=args)
        return await worker.call_function(call)  # type: ignore[no-any-return]

    async def _get_worker(self, worker_index: int) -> _WorkerConnection:
        """Return a worker. Starts it at the first use, and starts another one if it has died."""
        async with self._lock:
            worker = self._workers[worker_index]
            if worker is not None and worker.is_alive:
                return worker
            if worker is not None:
                self.num_deaths += 1
                log.warning("a worker process has died; another one takes its place")
            worker_socket = await self._fork_worker()
            reader, writer = await asyncio.open_unix_connection(sock=worker_socket)
            worker = _WorkerConnection(reader, writer)
            self._workers[worker_index] = worker
            return worker

    async def _fork_worker(self) -> socket.socket:
        """Return the socket of a new worker. Restarts the loader process if it has died."""
        connection = await self._try_fork()
        if connection is None:
            self._control.close()
            self._control = await asyncio.to_thread(self._start_loader)
            connection = await self._try_fork()
        if connection is None:
            raise WorkerDiedError("no worker process can be started")
        return connection

    async def _try_fork(self) -> socket.socket | None:
        """Return the socket of a new worker, or None if the loader process has died."""
        connection, worker_connection = socket.socketpair()
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            with worker_connection:  # closed here; the loader process receives a duplicate
                # Sends the file descriptor, with which the new worker talks to the server. A file
                # descriptor can only be sent together with data: a byte, which the loader ignores.
                socket.send_fds(self._control, [b"f"], [worker_connection.fileno()])
            first_byte = await loop.sock_recv(connection, len(STARTED_BYTE))
        except OSError:
            first_byte = b""
        if first_byte == STARTED_BYTE:
            return connection
        connection.close()  # the loader has closed the other end
        return None

    def close(self) -> None:
        """End the processes."""
        self._control.close()
        for worker in self._workers:
            if worker is not None:
                worker.close()

    def __del__(self) -> None:
        if hasattr(self, "_workers"):  # not if `__init__` failed to load the models
            self.close()


def _make_start(search_round: SearchRound) -> StartRound:
    """Return the message that starts a round in a worker."""
    backend = search_round.options.translator.backend
    assert isinstance(backend, RemoteBackend)
    batch_search = search_round.batch_search
    return StartRound(
        model_index=backend.model_index,
        search=batch_search.config,
        n_best=batch_search.n_best,
        num_forced=batch_search.num_forced,
        src_tags=batch_search.src_tags,
        with_scores=batch_search.with_scores,
        can_join=search_round.options.can_join,
    )


class _WorkerConnection:
    """The server's end of the socket of a worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.is_alive = True
        self.is_busy = False  # whether it searches a round
        self._writer = writer
        self._round_messages: asyncio.Queue[Delivery | WorkerIdle | None] = asyncio.Queue()
        self._calls: deque[asyncio.Future[Any]] = deque()  # the worker answers in this order
        self._reading = asyncio.ensure_future(self._read(reader))

    def send(self, message: Any) -> None:
        """Send a message. If the worker has died, the message is lost."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._writer.write(_MESSAGE_LENGTH.pack(len(data)) + data)

    async def receive(self) -> Delivery | WorkerIdle:
        """Return the next message about a round. Raises `WorkerDiedError`."""
        message = await self._round_messages.get()
        if message is None:
            raise WorkerDiedError("a worker process has died")
        return message

    async def call_function(self, call: FunctionCall) -> Any:
        """Let the worker call a function, and return the result."""
        future = asyncio.get_running_loop().create_future()
        self._calls.append(future)
        self.send(call)
        return await future

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Receive messages until the worker has died, and pass them on."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                header = await reader.readexactly(_MESSAGE_LENGTH.size)
                [num_bytes] = _MESSAGE_LENGTH.unpack(header)
                message = pickle.loads(await reader.readexactly(num_bytes))
                if isinstance(message, FunctionResult):
                    self._finish_call(message)
                else:
                    self._round_messages.put_nowait(message)
        self.is_alive = False
        self._round_messages.put_nowait(None)
        while self._calls:
            self._finish_call(FunctionResult(None, WorkerDiedError("a worker process has died")))

    def _finish_call(self, message: FunctionResult) -> None:
        """Set the result of the oldest call."""
        future = self._calls.popleft()
        if future.done():  # canceled, since the client has closed its connection
            return
        if message.error is not None:
            future.set_exception(message.error)
        else:
            future.set_result(message.result)

    def close(self) -> None:
        """End the worker."""
        self.is_alive = False
        self._reading.cancel()
        with contextlib.suppress(RuntimeError):  # the event loop may be closed
            self._writer.close()
