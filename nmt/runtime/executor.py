"""A `ProcessPoolExecutor` that notices every lost process while a result is awaited."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ProcessPoolExecutor
from concurrent.futures import wait as wait_for_futures
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_connections
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
Result = TypeVar("Result")
CHECK_SECONDS = 1.0
"""How often to check whether a process was lost, while a result is awaited."""


class CrashSafeExecutor(ProcessPoolExecutor):
    """A `ProcessPoolExecutor` in which every future fails after a process was lost.

    A thread of the executor notices that a process was lost. It fails all futures with a
    `BrokenProcessPool` and ends the other processes. Python 3.11 has two bugs here. First, the
    thread and `submit` may change the futures at the same time. Second, if a killed process has
    sent only a part of a result, the thread waits forever for the rest. This class avoids the first
    bug. To avoid the second, await results with `wait_for_result`, or call `fail_if_process_lost`
    regularly.
    """

    def __init__(self, max_workers: int, **options: Any) -> None:
        super().__init__(max_workers, **options)
        self._processes = _ConcurrentDict()
        self._pending_work_items = _ConcurrentDict()
        call_queue: Any = self._call_queue  # type: ignore[attr-defined]
        call_queue.pending_work_items = self._pending_work_items

    def submit(
        self, function: Callable[..., Result], /, *args: Any, **kwargs: Any
    ) -> Future[Result]:
        """Return the future of a call. Raises `BrokenProcessPool` if a process was lost."""
        try:
            future = super().submit(function, *args, **kwargs)
        except RuntimeError as error:  # "after shutdown", which comes with a lost process too
            if self._broken:
                raise BrokenProcessPool(self._broken) from error
            raise
        if self._broken:  # perhaps all futures were failed before this one was added
            raise BrokenProcessPool(self._broken)
        future.__class__ = _SafeFuture
        return future

    def wait_for_result(self, future: Future[Result]) -> Result:
        """Return the result of a future, or raise its exception."""
        while not wait_for_futures([future], timeout=CHECK_SECONDS).done:
            self.fail_if_process_lost()
        return future.result()

    def fail_if_process_lost(self) -> None:
        """If a process was lost, let all futures fail soon.

        Call it regularly while a result is awaited. If a process was killed while it sent a result,
        the thread of the executor waits for the rest of the result. When no process can write to
        the pipe any more, the thread reads the end of the pipe, and then fails the futures.
        """
        processes = list((self._processes or {}).values())  # None after `shutdown`
        is_lost = wait_for_connections([process.sentinel for process in processes], timeout=0)
        if is_lost:
            for process in processes:
                process.kill()
            self.close_result_pipe()

    def close_result_pipe(self) -> None:
        """Close this process's end for writing to the pipe of the results, if it is open."""
        result_queue: Any = self._result_queue
        if result_queue is not None:  # None after `shutdown`
            result_queue._writer.close()


class _ConcurrentDict(dict[Key, Value]):
    """A dictionary to which a thread may add values while another one goes through them.

    An iterator over a `dict` raises a RuntimeError in that case. The thread of the executor would
    print a traceback and end without failing the futures.
    """

    def values(self) -> list[Value]:  # type: ignore[override]
        """Return a list of the current values, which does not change."""
        return list(self.copy().values())

    def items(self) -> list[tuple[Key, Value]]:  # type: ignore[override]
        """Return a list of the current items, which does not change."""
        return list(self.copy().items())


class _SafeFuture(Future[Result]):
    """A future that may be canceled at any time.

    In Python 3.11, the thread of the executor fails canceled futures too. This raises an error,
    which would end the thread before it has failed the other futures.
    """

    def set_exception(self, exception: BaseException | None) -> None:
        """Fail the future, unless it was canceled."""
        with contextlib.suppress(InvalidStateError):
            super().set_exception(exception)
