"""What `nmt-translate` reads from and writes to: files, and streams that may be slow."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from typing import IO

from nmt.config import resolve
from nmt.data.text import WaitingLines, read_input, read_stream


def open_stream(path: str) -> tuple[Iterator[str], Callable[[], bool]]:
    """Open the input, and say how to tell whether more of it is there already."""
    details = _stdin_status() if path == "-" else None
    if details is not None and not stat.S_ISREG(details.st_mode):  # a terminal, pipe or socket
        waiting = WaitingLines(sys.stdin.buffer.fileno())
        return read_stream(waiting, "stdin"), waiting.has_more
    return read_input(path), always


@contextlib.contextmanager
def open_output(output: str) -> Iterator[IO[bytes]]:
    """Open stdout for "-", otherwise a pipe or device."""
    if output != "-":
        with resolve(output).open("wb") as stream:
            yield stream
    else:
        yield sys.stdout.buffer


def num_bytes(path: str) -> int | None:
    """Return the size of the text, where it can be known."""
    if path == "-":
        details = _stdin_status()
        return details.st_size if details and stat.S_ISREG(details.st_mode) else None
    return None if path.endswith(".gz") else resolve(path).stat().st_size


def is_typed(path: str) -> bool:
    """Say whether a person types the input."""
    return path == "-" and sys.stdin is not None and sys.stdin.buffer.isatty()


def always() -> bool:
    """Say that more lines are there, or that it does not matter."""
    return True


def _stdin_status() -> os.stat_result | None:
    """Return what the system knows of stdin, None when it is closed or no file of the system."""
    try:
        return os.fstat(sys.stdin.buffer.fileno())
    except (AttributeError, OSError):
        return None
