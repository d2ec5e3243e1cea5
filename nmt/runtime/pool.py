"""Workers that do one kind of work on many items: processes of this machine, or one of this process
alone. Results come in the order of the items. `nmt/runtime/cluster.py` has workers on other
machines.

No process outlives the parent, even one that was killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any, Generic, TypeVar

from nmt.errors import NmtError

Item = TypeVar("Item")
Result = TypeVar("Result")
ITEMS_A_WORKER = 3
"""Items that wait, are worked on, or are done before those in front of them."""


def count_workers(num_threads: int) -> int:
    """Return the number of workers; 0 stands for all CPU cores."""
    affinity = getattr(os, "sched_getaffinity", None)  # a scheduler may give a job fewer cores
    return num_threads or (len(affinity(0)) if affinity else os.cpu_count() or 1)


class Workers(contextlib.AbstractContextManager["Workers[Item, Result]"], Generic[Item, Result]):
    """Workers, each with a function of its own that `make` returned there. This is the only one, in
    this process.
    """

    def __init__(self, make: Callable[[], Callable[[Item], Result]]) -> None:
        self._make = make

    def __exit__(self, *exc_info: object) -> None:
        """End the workers, whatever they are doing."""

    def map(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Yield each item with its result, in order; only a few a worker are under way.

        Raises the exception of the first item that has one, an `NmtError` where a worker was lost,
        and one of iterating over `items` after the results of all items before it.
        """
        function = self._make()
        yield from ((item, function(item)) for item in items)


class Processes(Workers[Item, Result]):
    """At most `num_workers` processes of this machine."""

    def __init__(self, num_workers: int, make: Callable[[], Callable[[Item], Result]]) -> None:
        super().__init__(make)
        self._num_workers = num_workers
        self._others = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")
        numbers = context.SimpleQueue()
        for number in range(num_workers):
            numbers.put(number)
        self._executor = ProcessPoolExecutor(num_workers, context, _start_worker, (make, numbers))

    def __exit__(self, *exc_info: object) -> None:
        for process in set(multiprocessing.active_children()) - self._others:
            process.kill()
        self._executor.shutdown(cancel_futures=True)

    def map(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Yield each item with its result; see `Workers.map`."""
        try:
            most = ITEMS_A_WORKER * self._num_workers
            yield from in_order(self._submit, items, lambda: most, Future.result)
        except MemoryError:
            raise NmtError("a worker process has no memory left; start fewer") from None
        except BrokenProcessPool:
            raise NmtError(
                "a worker process was killed, as happens when memory runs out; give the same "
                "command again with fewer processes, it goes on with what is done"
            ) from None

    def _submit(self, item: Item) -> Future[Result]:
        try:
            with _interrupts_deferred():  # this may start a process
                return self._executor.submit(_work, item)
        except OSError as error:
            raise NmtError(
                f"a worker process cannot be started: {error.strerror}; start fewer"
            ) from None


def in_order(
    submit: Callable[[Item], Any],
    items: Iterable[Item],
    most: Callable[[], int],
    result: Callable[[Any], Result],
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with the `result` of what `submit` returned; up to `most()` are under way."""
    waiting: deque[tuple[Item, Any]] = deque()
    last_error: Exception = StopIteration()
    source = iter(items)
    while True:
        try:
            item = next(source)
        except (StopIteration, NmtError) as error:
            last_error = error
            break
        waiting.append((item, submit(item)))
        while len(waiting) >= most():
            first, future = waiting.popleft()
            yield first, result(future)
    for first, future in waiting:
        yield first, result(future)
    if isinstance(last_error, NmtError):
        raise last_error


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let a process that starts in this block never see SIGINT, which Ctrl-C sends to every process
    of a terminal; the parent gets it after the block, and ends its workers itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "pthread_sigmask"):  # as on Windows
        yield
        return
    received = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if received:
        signal.raise_signal(signal.SIGINT)


_make: Callable[[], Callable[[Any], Any]]  # in a worker
_function: Callable[[Any], Any] | None = None
_number = 0


def worker_number() -> int:
    """Return which of the processes of its pool this is, from 0."""
    return _number


def _start_worker(make: Callable[[], Callable[[Any], Any]], numbers: Any) -> None:
    """Prepare a worker process."""
    global _make, _number
    _make, _number = make, numbers.get()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work(item: Any) -> Any:
    global _function
    if _function is None:  # made here, so that what it raises reaches the parent
        _function = _make()
    return _function(item)
