"""Processes that search for the server, and how they are started, fed and replaced.

The server's own process serves HTTP and holds no weights. A second one loads the models once and
forks the workers, which share its memory; it has a single thread, so that forking is safe, and
forks again when a worker dies. Each set of models has processes of its own, which end with it.

Each worker has a socket, and nmt.serve.worker says what goes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from nmt.checkpoint import (
    ModelInfo,
    build_model,
    find_model,
    load_info,
    load_tokenizer,
    other_models,
)
from nmt.config import Engine, ServeConfig, resolve
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ModelError
from nmt.runtime.distributed import find_device
from nmt.search.stepper import ModelStepper
from nmt.serve.rounds import Found, Round
from nmt.serve.worker import HELLO, Begin, Delivery, FunctionCall, FunctionResult, Idle, Start
from nmt.translate.engines.base import directions_of
from nmt.translate.engines.native import NativeBackend
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)
T = TypeVar("T")

_DEFAULT_WORKERS = 4  # at most; each beyond takes memory, and leaves fewer threads to the others
_PROGRAM = """import sys
sys.path[:] = sys.argv[2:]  # the server's: without the working directory, where anything may lie
from nmt.serve.worker import fork_workers
fork_workers(int(sys.argv[1]))"""


class WorkerDiedError(Exception):
    """A worker is gone, and with it what it had not delivered."""


def count_workers(config: ServeConfig) -> int:
    """Return how many worker processes there are to be; 0 where the server computes itself."""
    is_native = config.backend is Engine.native and find_device(config.device).type == "cpu"
    if not (is_native and sys.platform.startswith("linux")):
        return 0
    default = min(_DEFAULT_WORKERS, torch.get_num_threads())
    return default if config.num_workers is None else config.num_workers


class WorkersBackend(NativeBackend):
    """Says what a native backend says of a model; the weights are with the workers, and here they
    are undefined.
    """

    def __init__(
        self, pool: WorkerPool, number: int, info: ModelInfo, tokenizer: Tokenizers
    ) -> None:
        model = build_model(info, None, torch.device("cpu"))
        super().__init__(ModelStepper(model), tokenizer)
        self.pool = pool
        self.number = number
        self.num_workers = pool.num_rounds


def load_in_workers(config: ServeConfig, count: int) -> list[Translator]:
    """Load the models of `config` into so many processes. The translators that are returned have
    no weights; `WorkerPool.search` searches with theirs. Raises what `Translator.load` raises.
    """
    folders = [find_model(resolve(folder)) for folder in config.model_dir]
    pool = WorkerPool(replace(config, model_dir=list(map(str, folders))), count)
    translators = []
    for number, (given, folder) in enumerate(zip(config.model_dir, folders, strict=True)):
        info = load_info(folder)
        tokenizer = load_tokenizer(folder, info)
        backend = WorkersBackend(pool, number, info, tokenizer)
        others = other_models(resolve(given), folder)
        log.info("model %s, %d updates, on cpu%s", folder, info.updates, others)
        directions = directions_of(info, tokenizer)
        translators.append(Translator(backend, tokenizer, info.search, directions))
    return translators


class WorkerPool:
    """The workers of one set of models, a `RoundEngine`. They end when it is closed or lost."""

    def __init__(self, config: ServeConfig, count: int) -> None:
        """Load the models of `config`. Raises what loading them raises."""
        self.num_rounds = count
        self.num_deaths = 0
        self._config = config
        self._control = self._start()
        self._workers: list[_Worker | None] = [None] * count
        self._lock = asyncio.Lock()

    def _start(self) -> socket.socket:
        """Start the process that forks the workers."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *sys.path]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        threading.Thread(target=process.wait, daemon=True).start()  # it leaves no zombie
        connection = Connection(os.dup(ours.fileno()))
        try:
            threads = max(torch.get_num_threads() // self.num_rounds, 1)
            connection.send(Start(self._config, threads))
            error = connection.recv()
        except (EOFError, OSError):
            error = ModelError("the process that loads the models has died; is there memory?")
        finally:
            connection.close()
        if error is not None:
            ours.close()
            raise error
        return ours

    async def search(
        self,
        slot: int,
        work: Round,
        deliver: Callable[[Found], None],
        observe: Callable[[int], None],
    ) -> None:
        """See `RoundEngine.search`. Raises `WorkerDiedError`."""
        backend, batches = work.options.translator.backend, work.batches
        assert isinstance(backend, WorkersBackend)
        worker = await self._worker(slot)
        settings = (batches.config, batches.n_best, batches.with_scores, work.can_join)
        worker.send(Begin(backend.number, *settings))
        work.on_arrival = lambda: worker.send(work.take())
        work.on_arrival()
        try:
            while True:
                message = await worker.receive()
                if isinstance(message, Delivery):
                    for size in message.sizes:
                        observe(size)
                    deliver(message.found)
                elif message.num_parts == work.num_parts:
                    return
        except BaseException:
            worker.close()  # what it would still deliver belongs to no round
            raise
        finally:
            work.on_arrival = lambda: None

    async def call(self, function: Callable[..., T], translator: Translator, *args: Any) -> T:
        """See `RoundEngine.call`. Raises `WorkerDiedError`."""
        assert isinstance(translator.backend, WorkersBackend)
        idle = [i for i, worker in enumerate(self._workers) if worker is None or not worker.is_busy]
        worker = await self._worker(next(iter(idle), 0))
        return await worker.call(function, translator.backend.number, args)  # type: ignore[no-any-return]

    async def _worker(self, slot: int) -> _Worker:
        """Return the worker of a slot, a new one where it has died."""
        async with self._lock:
            worker = self._workers[slot]
            if worker is None or not worker.is_alive:
                if worker is not None:
                    self.num_deaths += 1
                    log.warning("a worker process has died; another one takes its place")
                worker = self._workers[slot] = await _Worker.connect(await self._fork())
            return worker

    async def _fork(self) -> socket.socket:
        """Return the socket of a new worker."""
        for is_last in (False, True):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with contextlib.suppress(OSError):
                with theirs:
                    socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                if await asyncio.get_running_loop().sock_recv(ours, len(HELLO)):
                    return ours
            ours.close()
            if not is_last:  # the process that forks has died itself
                self._control.close()
                self._control = await asyncio.to_thread(self._start)
        raise WorkerDiedError("no worker process can be started")

    def close(self) -> None:
        """End the workers."""
        self._control.close()
        for worker in self._workers:
            if worker is not None:
                worker.close()

    def __del__(self) -> None:
        if hasattr(self, "_workers"):
            self.close()


class _Worker:
    """The server's end of a worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._reading = asyncio.ensure_future(self._read(reader))
        self.is_alive = True
        self.is_busy = False

    @classmethod
    async def connect(cls, connection: socket.socket) -> _Worker:
        """Return the worker behind a socket."""
        return cls(*await asyncio.open_unix_connection(sock=connection))

    def send(self, message: Any) -> None:
        """Send a message; to a worker that is gone it is lost."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._writer.write(struct.pack("!i", len(data)) + data)
        self.is_busy = self.is_busy or isinstance(message, Begin)

    async def receive(self) -> Delivery | Idle:
        """Return the next message about a round. Raises `WorkerDiedError`."""
        message = await self._messages.get()
        if message is None:
            raise WorkerDiedError("a worker process has died")
        self.is_busy = not isinstance(message, Idle)  # of a part of what was sent, at most a moment
        return message  # type: ignore[no-any-return]

    async def call(self, function: Callable[..., Any], model: int, args: tuple[Any, ...]) -> Any:
        """Return what a function returns there."""
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self.send(FunctionCall(number, function, model, args))
        try:
            return await future
        finally:
            del self._calls[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Sort what arrives until the worker is gone."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                message = pickle.loads(await reader.readexactly(size))
                if not isinstance(message, FunctionResult):
                    self._messages.put_nowait(message)
                elif (future := self._calls.get(message.number)) and not future.done():
                    if message.error is not None:
                        future.set_exception(message.error)
                    else:
                        future.set_result(message.result)
        self.is_alive = False
        self._messages.put_nowait(None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(WorkerDiedError("a worker process has died"))

    def close(self) -> None:
        """End the worker."""
        self.is_alive = False
        self._reading.cancel()
        with contextlib.suppress(RuntimeError):  # the event loop may be closed
            self._writer.close()
