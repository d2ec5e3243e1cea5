"""Compute the next item of an iterable in a thread while the current one is in use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterable[T], *, leave_seconds: float = 0.5) -> Iterator[T]:
    """Yield `items`, each computed in a thread while the one before it is in use.

    At most one finished item waits while the next one is computed. An exception of `items` is
    raised to the caller. If the caller stops early, `prefetch` waits up to `leave_seconds` for the
    item that the thread computes, because Python aborts if it exits while a thread is inside torch.
    """
    # each future holds an item, or the exception of `items`; None marks the end
    finished: queue.Queue[Future[T] | None] = queue.Queue(maxsize=1)
    is_closed = threading.Event()

    def fill_queue() -> None:
        try:
            for item in items:
                future: Future[T] = Future()
                future.set_result(item)
                finished.put(future)
                if is_closed.is_set():
                    return
            finished.put(None)
        except BaseException as error:  # any exception must reach the caller, or it waits forever
            failed: Future[T] = Future()
            failed.set_exception(error)
            finished.put(failed)

    # A daemon thread, since it may wait for input that never comes
    thread = threading.Thread(target=fill_queue, daemon=True)
    thread.start()
    try:
        while (future := finished.get()) is not None:
            yield future.result()
    finally:
        is_closed.set()
        while not finished.empty():  # a thread that is blocked in `put` continues and exits
            finished.get_nowait()
        thread.join(leave_seconds)
