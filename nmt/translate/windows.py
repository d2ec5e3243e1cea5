"""Cuts a stream of lines into windows that are translated at a time, so that memory does not grow
with its length.

Where a window ends depends on the lines alone, so that a job that goes on after a kill, or is
shared by several processes, finds the same windows again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from nmt.config import require
from nmt.errors import ConfigError, DataError

WINDOW_LINES = 2048
_FIRST_LINES = 64
_MAX_CHARACTERS = 1 << 21  # a window ends with the line that goes beyond
T = TypeVar("T")


@dataclass(frozen=True)
class Window:
    """Lines that are translated together."""

    first_line: int  # lines before these
    lines: list[str]
    prefixes: list[str] | None  # forced starts of their translations

    @property
    def next_line(self) -> int:
        """The lines that are done when this window is."""
        return self.first_line + len(self.lines)


def cut_windows(
    lines: Iterable[str],
    prefixes: Iterable[str] | None = None,
    *,
    window_lines: int = WINDOW_LINES,
    first_line: int = 0,
    small_first: bool = True,
    has_more: Callable[[], bool] = lambda: True,
) -> Iterator[Window]:
    """Yield the windows of a stream whose first line is number `first_line`.

    With `small_first` the first windows are small and double, so that results come soon; larger
    ones hold less padding. `has_more` says whether a line waits to be read; where none does, the
    window ends. Raises `DataError` when there are not as many prefixes as lines.
    """
    require(window_lines >= 1, "window_lines", window_lines, "must be at least 1")
    stream = iter(check_lines("lines", lines))
    forced = None if prefixes is None else iter(check_lines("prefixes", prefixes))
    while True:
        end = window_end(first_line, window_lines, small_first=small_first)
        texts: list[str] = []
        room = _MAX_CHARACTERS
        for line in stream:
            texts.append(line)
            room -= len(line)
            if first_line + len(texts) == end or room < 0 or not has_more():
                break
        starts = None if forced is None else list(islice(forced, max(len(texts), 1)))
        if starts is not None and len(starts) != len(texts):
            few = "fewer" if len(starts) < len(texts) else "more"
            raise DataError(f"there are {few} prefixes than lines; give one line for each")
        if not texts:
            return
        yield Window(first_line, texts, starts)
        first_line += len(texts)


def check_lines(name: str, lines: Iterable[str]) -> Iterable[str]:
    """Return `lines`; raise a `ConfigError` for a single text, whose characters they would be."""
    if isinstance(lines, str):
        raise ConfigError(f"{name} is one text; give a list of lines, such as [text]")
    return lines


def window_end(first_line: int, window_lines: int, *, small_first: bool) -> int:
    """Return the line before which a window that starts at `first_line` ends, unless its text is
    very long.
    """
    if small_first and first_line < window_lines:
        return min(first_line + max(first_line, _FIRST_LINES), window_lines)
    return (first_line // window_lines + 1) * window_lines


def prefetch(items: Iterable[T]) -> Iterator[T]:
    """Yield `items`, each made in a thread while the one before is worked on.

    What making one raises comes up here. At most one waits, and one is being made.
    """
    waiting: queue.Queue[tuple[T | None, BaseException | None] | None] = queue.Queue(maxsize=1)
    is_over = threading.Event()

    def fill() -> None:
        try:
            for item in items:
                waiting.put((item, None))
                if is_over.is_set():
                    return
            waiting.put(None)
        except BaseException as error:
            waiting.put((None, error))

    # a daemon: it may wait for a line that never comes when the reader of our output is gone
    threading.Thread(target=fill, daemon=True).start()
    try:
        while (found := waiting.get()) is not None:
            item, error = found
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        is_over.set()
        while not waiting.empty():  # a thread that waits to hand on its item goes on, and ends
            waiting.get_nowait()
