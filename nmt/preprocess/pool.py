"""Worker processes that do one kind of work on many items and give the results back in order.

Each worker is a fresh Python with one socket to the parent: it ends when that closes, so that no
worker outlives a parent that was killed. It knows nothing of text.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any, Generic, TypeVar

from nmt.errors import NmtError

Item = TypeVar("Item")
Result = TypeVar("Result")
_AHEAD = 2  # items that a worker has: one that it works on, one that waits
_PROTOCOL = 5  # of pickle: arrays travel without being taken apart
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from nmt.preprocess.pool import work; work({socket})"
)


def count_workers(num_threads: int) -> int:
    """Return `num_threads`, or for 0 the number of processors that this process may use."""
    if num_threads:
        return num_threads
    if hasattr(os, "sched_getaffinity"):  # where a scheduler gives a job a part of a machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass
class _Failure:
    """An exception in a worker, sent in place of a result."""

    error: NmtError | None
    text: str  # its traceback


class _Worker:
    """The parent's side of one worker."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        self.connection, theirs = Pipe()
        program = _PROGRAM.format(path=sys.path, socket=theirs.fileno())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the parent alone
            )
        except OSError as error:
            raise NmtError(
                f"a worker process cannot be started: {error.strerror}; set fewer num_threads"
            ) from None
        finally:
            theirs.close()
        self.items: list[int] = []  # numbers of those it has, oldest first
        self._send_object(make)

    def send(self, number: int, item: object) -> None:
        self.items.append(number)
        self._send_object(item)

    def receive(self) -> tuple[int, Any]:
        try:
            result = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._death() from None
        return self.items.pop(0), result

    def end(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()

    def _send_object(self, content: object) -> None:
        try:
            self.connection.send_bytes(pickle.dumps(content, _PROTOCOL))
        except OSError:
            raise self._death() from None

    def _death(self) -> Exception:
        status = self._process.wait()
        if status == -signal.SIGKILL:
            return NmtError(
                "a worker process was killed (signal 9), as happens when memory runs out; give "
                "the same command again with fewer num_threads, it goes on with what is done"
            )
        if status < 0:
            return NmtError(
                f"a worker process was ended by signal {-status}; the same command goes on with "
                "what is done"
            )
        return RuntimeError(f"a worker process ended with status {status}")


class Pool(Generic[Item, Result]):
    """At most `num_workers` processes, each with a function of its own that `make` returns there.

    They start as there is work for them. Items, results and `make` must be picklable. As a context
    it ends the processes.
    """

    def __init__(self, num_workers: int, make: Callable[[], Callable[[Item], Result]]) -> None:
        self._num_workers, self._make = num_workers, make
        self._workers: list[_Worker] = []

    def __enter__(self) -> Pool[Item, Result]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers:  # whatever they are doing
            worker.end()

    def map(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Yield each item with its result, in order; what an iteration of `items` raises comes
        after the results of all that it gave before.

        A few items a worker are under way at a time. Raises the `NmtError` of the first item that
        has one.
        """
        source, kept = _Source(items), dict[int, Item]()
        results: dict[int, Any] = {}
        number, limit = 0, (_AHEAD + 1) * self._num_workers
        while True:
            while len(kept) < limit and self._has_room() and source.has_next():
                kept[number + len(kept)] = source.item
                self._choose().send(number + len(kept) - 1, source.item)
                self._receive(results, block=False)
            if not kept:
                break
            while number not in results:
                self._receive(results, block=True)
            yield kept.pop(number), _unwrap(results.pop(number))
            number += 1
        if source.error is not None:
            raise source.error

    def _has_room(self) -> bool:
        is_full = all(len(worker.items) == _AHEAD for worker in self._workers)
        return len(self._workers) < self._num_workers or not is_full

    def _choose(self) -> _Worker:
        """Return the worker with the least to do, a new one rather than one that is busy."""
        if len(self._workers) < self._num_workers and all(w.items for w in self._workers):
            self._workers.append(_Worker(self._make))
            return self._workers[-1]
        return min(self._workers, key=lambda worker: len(worker.items))

    def _receive(self, results: dict[int, Any], *, block: bool) -> None:
        busy = [worker.connection for worker in self._workers if worker.items]
        ready = wait(busy, None if block else 0)
        for worker in self._workers:
            if worker.connection in ready:
                number, result = worker.receive()
                results[number] = result


class _Source(Generic[Item]):
    """An iterator that is asked for one item at a time and keeps the error that ended it."""

    item: Item

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self.error: NmtError | None = None

    def has_next(self) -> bool:
        if self.error is not None:
            return False
        try:
            self.item = next(self._items)
        except StopIteration:
            return False
        except NmtError as error:
            self.error = error
            return False
        return True


def _unwrap(result: Any) -> Any:
    if not isinstance(result, _Failure):
        return result
    if result.error is not None:
        raise result.error
    raise RuntimeError(f"in a worker process:\n{result.text}")


def work(socket: int) -> None:
    """Be a worker: receive the function, then items, and send their results until the parent ends
    or closes the socket.
    """
    connection = Connection(socket)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # A thread reads, so that the parent never waits to send while this process waits to do so
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    function: Callable[[Any], Any] | None = None
    while True:
        content = pickle.loads(inbox.get())
        try:
            if function is None:
                function = content()
                continue
            result = function(content)
        except NmtError as error:
            result = _Failure(error, "")
        except MemoryError:
            text = "a worker process has no memory left; set fewer num_threads"
            result = _Failure(NmtError(text), "")
        except Exception:  # the parent raises it with this traceback
            result = _Failure(None, traceback.format_exc())
        try:
            connection.send_bytes(pickle.dumps(result, _PROTOCOL))
        except OSError:
            os._exit(0)  # nobody is there to hear


def _read(connection: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)  # the parent has ended, perhaps in the middle of our work
