"""The processes that search for the server, and the messages between server and processes.

A loader process loads the models in a single thread and forks the workers, which share its memory:

    server -> loader    LoadModels; then a socket for each worker
    loader -> server    None or an exception, after it has loaded the models
    server -> worker    StartRound, then lists of the round's segments; FunctionCall at any time
    worker -> server    STARTED_BYTE; Delivery and WorkerIdle in a round; FunctionResult

Messages are pickled and preceded by their length, as `multiprocessing.connection` writes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import torch

from nmt.config import Engine, SearchConfig, ServeConfig, resolve_path
from nmt.errors import ModelError, NmtError
from nmt.runtime.manifest import set_verify
from nmt.runtime.signatures import set_verify_key
from nmt.serve.rounds import JoiningSearch
from nmt.translate.batch_search import BatchSearch, Segment
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # an option of prctl, see linux/prctl.h
STARTED_BYTE = b"w"
"""The first byte that a worker sends, which tells the server that the worker has started."""


class LoadModels(NamedTuple):
    """Tells the loader process to load models."""

    config: ServeConfig
    num_threads: int  # number of threads of each worker


class StartRound(NamedTuple):
    """Tells a worker to start a round with these settings, after the previous round has ended."""

    model_index: int  # index in `LoadModels.config.model_dir`
    search: SearchConfig
    n_best: int
    num_forced: int  # number of forced tokens at the start, see `SearchRequest.num_forced`
    src_tags: Sequence[str]
    with_scores: bool
    can_join: bool


class FunctionCall(NamedTuple):
    """Tells a worker to call a function with a translator. Calls are answered in order."""

    function: Callable[..., Any]
    model_index: int
    args: tuple[Any, ...]


class FunctionResult(NamedTuple):
    """The return value of a called function, or the exception that it raised."""

    result: Any
    error: Exception | None


class WorkerIdle(NamedTuple):
    """Tells the server that the worker has delivered all segments that it has received."""

    num_finished: int  # number of segments finished since the round started


def run_loader(fd: int) -> None:
    """Load models, then fork a worker for each socket received through the socket `fd`.

    Ends when the server closes its end of the socket. Ignores signals that a terminal or a service
    manager sends to all processes, so that only the server stops the loader and the workers.
    """
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that end leave no zombies
    with socket.socket(fileno=fd) as control, contextlib.suppress(EOFError, ConnectionError):
        _load_and_fork(control)
    os._exit(0)  # do not wait for the workers, which end with this process


def _load_and_fork(control: socket.socket) -> None:
    """Load models, then fork workers until the server closes its end of the socket `control`."""
    # A thread of the server waits for the models. Until they are loaded, this process ends with
    # that thread. Later, the thread may end before the server.
    set_parent_death_signal(signal.SIGKILL)
    connection = Connection(os.dup(control.fileno()))
    request: LoadModels = connection.recv()
    try:
        translators = _load_translators(request.config)
    except (NmtError, OSError) as error:
        connection.send(error)
        return
    # a damaged file may raise any type, perhaps one that cannot be pickled
    except Exception as error:
        connection.send(ModelError(f"the models cannot be loaded: {error!r}"))
        return
    set_parent_death_signal(0)
    connection.send(None)
    connection.close()
    gc.collect()
    gc.freeze()  # garbage collection would write to memory pages, which are then no longer shared
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)  # a byte and a file descriptor
        if not fds:  # the server has closed its end
            return
        loader_pid = os.getpid()
        if os.fork() == 0:  # this is the worker
            _run_worker(fds[0], control, loader_pid, translators, request.num_threads)
        os.close(fds[0])


def _run_worker(
    fd: int,
    control: socket.socket,
    loader_pid: int,
    translators: list[Translator],
    num_threads: int,
) -> NoReturn:
    """Search in a forked process that is connected to the server by the socket `fd`.

    Raises EOFError or ConnectionError when the server closes its end.
    """
    # end with the loader, even during a search
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != loader_pid:  # the loader ended before the signal was set
        os._exit(0)
    control.close()  # only the loader uses this socket
    torch.set_num_threads(num_threads)
    os.write(fd, STARTED_BYTE)
    _SearchProcess(Connection(fd), translators).run()


def _load_translators(config: ServeConfig) -> list[Translator]:
    """Load the models in this thread. Raises the exceptions of `Translator.load`."""
    torch.set_num_threads(1)  # a pool of OpenMP threads would not survive the fork
    set_verify(config.verify)
    if config.verify_key is not None:
        set_verify_key(resolve_path(config.verify_key))
    return [
        Translator.load(folder, device="cpu", dtype=config.dtype, backend=Engine.native)
        for folder in config.model_dir
    ]


def set_parent_death_signal(signal_number: int) -> None:
    """Let this process receive a signal when the thread that started it ends; 0: no signal."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)


class _SearchProcess:
    """The main loop of a worker: searches one round after the other."""

    def __init__(self, connection: Connection, translators: list[Translator]) -> None:
        self._connection = connection
        self._translators = translators

    def run(self) -> NoReturn:
        """Process messages. Raises EOFError or ConnectionError when the server closes its end."""
        while True:
            message = self._connection.recv()
            if isinstance(message, StartRound):
                joining_search = self._start_round(message)
            elif isinstance(message, FunctionCall):
                self._call_function(message)
            else:  # segments, which come after a StartRound
                joining_search.search(message)
                self._connection.send(WorkerIdle(joining_search.num_finished))

    def _start_round(self, start: StartRound) -> JoiningSearch:
        """Return the search for a round."""
        backend = self._translators[start.model_index].backend
        batch_search = BatchSearch(
            backend=backend,
            config=start.search,
            n_best=start.n_best,
            max_tokens=backend.max_tokens,
            num_forced=start.num_forced,
            src_tags=start.src_tags,
            with_scores=start.with_scores,
        )
        return JoiningSearch(
            batch_search,
            can_join=start.can_join,
            receive=self._receive_arrived,
            deliver=self._connection.send,
        )

    def _receive_arrived(self) -> list[Segment]:
        """Return the segments that have arrived, and answer function calls that have arrived."""
        segments: list[Segment] = []
        while self._connection.poll():
            message = self._connection.recv()
            if isinstance(message, FunctionCall):
                self._call_function(message)
            else:
                segments += message
        return segments

    def _call_function(self, call: FunctionCall) -> None:
        """Call a function, and send its result or its exception."""
        try:
            result = call.function(self._translators[call.model_index], *call.args)
            message = FunctionResult(result, None)
        except NmtError as error:
            message = FunctionResult(None, error)
        # a bug, which must not end the worker
        except Exception as error:
            log.exception("%s failed in a worker", call.function.__name__)
            # the server might not be able to unpickle `error` itself
            message = FunctionResult(None, RuntimeError(repr(error)))
        self._connection.send(message)
