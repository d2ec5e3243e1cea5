"""Apply a function to many items in worker processes, or in this process.

Results come in the order of the items. Worker processes end when their parent ends, even if it is
killed. Workers on other machines are in `nmt.runtime.cluster`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any, Generic, TypeVar

from nmt.errors import NmtError
from nmt.runtime.executor import CrashSafeExecutor

Item = TypeVar("Item")
Result = TypeVar("Result")
ITEMS_PER_WORKER = 3
"""Maximum number of items per worker that are submitted, but whose results were not yielded yet."""


def count_workers(num_threads: int) -> int:
    """Return the number of workers for the setting `num_threads`; 0 means one per CPU core."""
    if num_threads:
        return num_threads
    if hasattr(os, "sched_getaffinity"):  # a job scheduler may restrict the cores of a job
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers(contextlib.AbstractContextManager["Workers[Item, Result]"], Generic[Item, Result]):
    """Applies a function to items in one or more workers.

    Leaving the `with` block of an instance ends all workers, including busy ones.
    """

    @abstractmethod
    def map(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Yield each item with its result, in order.

        Reads only a few items ahead of the results. An exception of the function, or an `NmtError`
        of `items`, is raised after the results of all earlier items. Raises `NmtError` if a worker
        is lost.
        """


class CurrentProcess(Workers[Item, Result]):
    """Applies a function to items in this process, without further workers.

    Args:
        function_factory: builds the function.
    """

    def __init__(self, function_factory: Callable[[], Callable[[Item], Result]]) -> None:
        self._function_factory = function_factory

    def __exit__(self, *exc_info: object) -> None:
        """Do nothing, since this process is the only worker."""

    def map(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Yield each item with its result; see `Workers.map`."""
        function = self._function_factory()
        for item in items:
            yield item, function(item)


class Processes(Workers[Item, Result]):
    """Applies a function to items in up to `num_workers` processes of this machine.

    Args:
        function_factory: builds the function. Each worker calls it once, before its first item.
    """

    def __init__(
        self, num_workers: int, function_factory: Callable[[], Callable[[Item], Result]]
    ) -> None:
        self._max_pending = ITEMS_PER_WORKER * num_workers
        # children that this pool did not start, and that `__exit__` must not kill
        self._older_children = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")
        worker_indices = context.SimpleQueue()
        for index in range(num_workers):
            worker_indices.put(index)
        self._executor = CrashSafeExecutor(
            num_workers,
            mp_context=context,
            initializer=_start_worker,
            initargs=(function_factory, worker_indices),
        )

    def __exit__(self, *exc_info: object) -> None:
        """Kill all workers, including busy ones."""
        own_children = set(multiprocessing.active_children()) - self._older_children
        for process in own_children:
            process.kill()
        self._executor.close_result_pipe()  # a killed process may have sent half of a result
        self._executor.shutdown(cancel_futures=True)

    def map(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Yield each item with its result; see `Workers.map`."""
        try:
            yield from map_in_order(
                items,
                self._submit,
                self._executor.wait_for_result,
                get_max_pending=lambda: self._max_pending,
            )
        except MemoryError:
            raise NmtError("a worker process has no memory left; start fewer processes") from None
        except BrokenProcessPool:
            raise NmtError(
                "a worker process was killed, probably because memory ran out; run the same "
                "command with fewer processes to continue"
            ) from None

    def _submit(self, item: Item) -> Future[Result]:
        """Send an item to the processes; raise `BrokenProcessPool` if one of them was lost."""
        try:
            with _delayed_interrupts():  # `submit` may start a process
                return self._executor.submit(_apply_function, item)
        except ValueError as error:
            # A pool that has lost a worker closes its pipes. If `submit` is just starting another
            # process, a new pipe may get the file descriptor of a closed pipe. Passing the same
            # descriptor to the process twice raises a ValueError.
            raise BrokenProcessPool from error
        except OSError as error:
            # Python itself raises an OSError without errno, "handle is closed", for a closed pipe;
            # the pool closes its pipes if it has lost a worker
            if error.errno is None:
                raise BrokenProcessPool from error
            raise NmtError(
                f"a worker process cannot be started: {error.strerror}; start fewer processes"
            ) from None


def map_in_order(
    items: Iterable[Item],
    submit: Callable[[Item], Any],
    wait_for_result: Callable[[Any], Result],
    *,
    get_max_pending: Callable[[], int],
) -> Iterator[tuple[Item, Result]]:
    """Submit all items and yield each with its result, in order.

    Args:
        submit: starts the work on an item and returns a future.
        wait_for_result: returns the result of a future.
        get_max_pending: returns the maximum number of items that are submitted but not yet yielded.
    """
    pending: deque[tuple[Item, Any]] = deque()  # items with their futures
    iterator = iter(items)
    items_error: NmtError | None = None
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            break
        except NmtError as error:
            items_error = error
            break
        pending.append((item, submit(item)))
        while len(pending) >= get_max_pending():
            oldest, future = pending.popleft()
            yield oldest, wait_for_result(future)
    for oldest, future in pending:
        yield oldest, wait_for_result(future)
    if items_error is not None:
        raise items_error


@contextlib.contextmanager
def _delayed_interrupts() -> Iterator[None]:
    """Delay SIGINT until the end of the block, and block it in processes that start inside.

    Ctrl-C sends SIGINT to all processes of a terminal, but only the parent should react to it.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # The mask delays a signal to this thread, and is inherited by processes that start in the
    # block. The signal may still arrive in another thread, or in this thread when the mask ends.
    # The handler therefore records it, and it is raised after the block.
    received_signals = []
    old_handler = signal.signal(
        signal.SIGINT, lambda number, frame: received_signals.append(number)
    )
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.signal(signal.SIGINT, old_handler)
    if received_signals:
        signal.raise_signal(signal.SIGINT)


# --- functions and state of a worker process

_function_factory: Callable[[], Callable[[Any], Any]]
_function: Callable[[Any], Any] | None = None
_worker_index = 0


def get_worker_index() -> int:
    """Return the index of this worker process in its pool."""
    return _worker_index


def _start_worker(
    function_factory: Callable[[], Callable[[Any], Any]], worker_indices: Any
) -> None:
    """Prepare a worker process, which takes its index from the queue `worker_indices`."""
    global _function_factory, _worker_index
    _function_factory = function_factory
    _worker_index = worker_indices.get()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        """Wait until the parent process ends, then end this one."""
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _apply_function(item: Any) -> Any:
    """Apply the function to an item in a worker process. Builds the function for the first item."""
    global _function
    if _function is None:
        # built here, since exceptions of an initializer such as `_start_worker` would be lost
        _function = _function_factory()
    return _function(item)
