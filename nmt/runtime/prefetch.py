"""Compute the next item of an iterable in a thread while the current one is in use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterable[T], *, leave_seconds: float = 0.5) -> Iterator[T]:
    """Yield `items`, each computed in a thread while the one before it is in use.

    At most one finished item waits while the next one is computed. An exception of `items` is
    raised to the caller. If the caller stops early, `prefetch` waits up to `leave_seconds` for the
    item that the thread computes, because Python aborts if it exits while a thread is inside torch.
    """
    # (item, None) or (None, exception); None at the end
    finished: queue.Queue[tuple[T | None, BaseException | None] | None] = queue.Queue(maxsize=1)
    is_closed = threading.Event()

    def fill_queue() -> None:
        try:
            for item in items:
                finished.put((item, None))
                if is_closed.is_set():
                    return
            finished.put(None)
        except BaseException as error:
            finished.put((None, error))

    # A daemon thread, since it may wait for input that never comes
    thread = threading.Thread(target=fill_queue, daemon=True)
    thread.start()
    try:
        while (entry := finished.get()) is not None:
            item, error = entry
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        is_closed.set()
        while not finished.empty():  # a thread that is blocked in `put` continues and exits
            finished.get_nowait()
        thread.join(leave_seconds)
