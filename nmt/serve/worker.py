"""A process that searches for the server: how it is forked, what it is told, and what it answers.

The process that loads the models has a single thread and forks the workers, which share its memory.
Messages are pickled, with their length before them as `multiprocessing.connection` writes it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from nmt.config import SearchConfig, ServeConfig
from nmt.errors import NmtError
from nmt.runtime.manifest import set_verify
from nmt.serve.rounds import Found, JoinRule
from nmt.translate.batch_search import BatchSearch, Failure, Segment
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)


class Start(NamedTuple):
    """What the process that loads the models is told."""

    config: ServeConfig
    num_threads: int  # of each worker


class Begin(NamedTuple):
    """The settings of a round. Its parts follow, as lists of segments; rounds do not overlap."""

    model: int
    search: SearchConfig
    n_best: int
    with_scores: bool
    can_join: bool


class FunctionCall(NamedTuple):
    """A function to call with a translator."""

    number: int
    function: Callable[..., Any]
    model: int
    args: tuple[Any, ...]


class FunctionResult(NamedTuple):
    """What it returned or raised."""

    number: int
    result: Any
    error: Exception | None


class Delivery(NamedTuple):
    """Outcomes of a round, and how many sentences were searched whenever some were added."""

    found: Found
    sizes: list[int]


HELLO = b"w"
"""What a worker sends first. What a process was asked for when it died is no worker."""


class Idle(NamedTuple):
    """The worker has nothing left of a round, of which it has got `num_parts`."""

    num_parts: int


def fork_workers(fd: int) -> None:
    """Load models, and fork a worker for each socket that comes through the socket `fd`, until it
    is closed at the other end. Only the server stops these processes: they ignore signals that a
    terminal or a service manager sends to all.
    """
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that end leave no zombies
    try:
        with socket.socket(fileno=fd) as control:
            _fork_workers(control)
    except (EOFError, ConnectionError):  # the server has closed its end, or is gone
        os._exit(0)


def _fork_workers(control: socket.socket) -> None:
    connection = Connection(os.dup(control.fileno()))
    start: Start = connection.recv()
    torch.set_num_threads(1)  # a pool of OpenMP threads would not survive the fork
    set_verify(start.config.verify)
    error, translators = None, []
    try:
        for folder in start.config.model_dir:
            translator = Translator.load(folder, device="cpu", dtype=start.config.dtype)
            translators.append(translator)
    except (NmtError, OSError) as found:
        error = found
    connection.send(error)
    connection.close()
    gc.collect()
    gc.freeze()  # collecting garbage does not write to the pages that the workers share
    while error is None and (fds := socket.recv_fds(control, 1, 1)[1]):
        if os.fork() == 0:
            control.close()
            torch.set_num_threads(start.num_threads)
            os.write(fds[0], HELLO)
            _Worker(Connection(fds[0]), translators).run()
        os.close(fds[0])


class _Worker:
    """Searches one round after the other."""

    def __init__(self, connection: Connection, translators: list[Translator]) -> None:
        self._connection = connection
        self._translators = translators
        self._begin: Begin | None = None
        self._arrived: deque[Segment] = deque()  # parts that are not searched yet
        self._num_parts = 0  # of the round, all that came

    def run(self) -> None:
        """Work until the server closes its end, which is an `EOFError` or a
        `ConnectionError`."""
        while True:
            self._read()
            while self._begin is not None and self._arrived:
                self._search(self._begin)
                if not self._arrived:
                    self._connection.send(Idle(self._num_parts))

    def _read(self) -> None:
        """Wait for a message and do what it says, but for searching."""
        message = self._connection.recv()
        if isinstance(message, Begin):
            self._begin, self._num_parts = message, 0
        elif isinstance(message, FunctionCall):
            try:
                result = message.function(self._translators[message.model], *message.args)
                self._connection.send(FunctionResult(message.number, result, None))
            except Exception as error:  # whatever it is, the server is to know
                self._connection.send(FunctionResult(message.number, None, error))
        else:
            self._arrived += message
            self._num_parts += len(message)

    def _search(self, begin: Begin) -> None:
        """Search the parts that arrived, and what joins them meanwhile."""
        backend = self._translators[begin.model].backend
        settings = (begin.search, begin.n_best, backend.max_tokens, begin.with_scores)
        batches, rule = BatchSearch(backend, *settings), JoinRule()
        first = self._num_parts - len(self._arrived)
        left, sizes = set(range(first, self._num_parts)), [len(self._arrived)]

        def take(num_live: int) -> list[Segment]:
            while self._connection.poll():
                self._read()
            if not rule(len(self._arrived), num_live):
                return []
            left.update(range(self._num_parts - len(self._arrived), self._num_parts))
            sizes.append(num_live + len(self._arrived))
            return self._take()

        def deliver(found: Found) -> None:
            self._connection.send(
                Delivery([(first + i, outcome) for i, outcome in found], sizes[:])
            )
            left.difference_update(first + i for i, _ in found)
            sizes.clear()

        try:
            if begin.can_join:
                batches.translate_arriving(self._take(), take, deliver)
            else:
                deliver(list(enumerate(batches.translate(self._take()))))
        except (EOFError, ConnectionError):  # the server is gone
            raise
        except Exception as error:  # every part fails, the worker goes on
            log.exception("the engine failed with %d sentences", len(left))
            failure = Failure(f"{type(error).__name__}: {error}"[:300])
            deliver([(i - first, failure) for i in left])

    def _take(self) -> list[Segment]:
        return [self._arrived.popleft() for _ in range(len(self._arrived))]
