"""Compute the next item of an iterable in a thread while the current one is in use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterable[T], *, join_seconds: float = 0.5) -> Iterator[T]:
    """Yield `items`. A thread computes the next item while the caller uses the current one.

    The thread computes at most two items ahead. An exception of `items` is raised in the caller. If
    the caller stops early, waits up to `join_seconds` for the thread to finish its item. Without
    this, Python could exit while the thread runs code of torch, and would abort.
    """
    # each future holds an item, or the exception of `items`; None marks the end
    futures: queue.Queue[Future[T] | None] = queue.Queue(maxsize=1)
    is_closed = threading.Event()

    def fill_queue() -> None:
        try:
            for item in items:
                future: Future[T] = Future()
                future.set_result(item)
                futures.put(future)
                if is_closed.is_set():
                    return
            futures.put(None)
        except BaseException as error:  # any exception must reach the caller, or it waits forever
            future = Future()
            future.set_exception(error)
            futures.put(future)

    # a daemon thread does not keep Python from exiting while it waits for input
    thread = threading.Thread(target=fill_queue, daemon=True)
    thread.start()
    try:
        while (future := futures.get()) is not None:
            yield future.result()
    finally:
        is_closed.set()
        while not futures.empty():  # lets the thread leave `put` if it is blocked there
            futures.get_nowait()
        thread.join(join_seconds)
