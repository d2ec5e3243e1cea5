"""Lines of a pipe or a terminal as they come, so that an answer need not wait for more of them."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Iterator

_CHUNK_BYTES = 1 << 16
_PATIENCE_SECONDS = 0.05  # between two lines of one writer


class WaitingLines:
    """The lines of a descriptor, as bytes that end with \\n but for the last; one reader alone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._start: list[bytes] = []  # of the line that has no end yet
        self._is_over = False

    def __iter__(self) -> Iterator[bytes]:
        while True:
            while not self._lines and not self._is_over:
                self._read()
            if not self._lines:
                return
            yield self._lines.popleft()

    def has_more(self) -> bool:
        """Say whether a line, or the end, is there or comes within an instant."""
        if self._lines or self._is_over:
            return True
        return bool(select.select([self._descriptor], [], [], _PATIENCE_SECONDS)[0])

    def _read(self) -> None:
        select.select([self._descriptor], [], [])  # some hand over pipes that do not block
        data = os.read(self._descriptor, _CHUNK_BYTES)
        first, *others = data.split(b"\n")
        self._start.append(first)
        for piece in others:
            self._lines.append(b"".join(self._start) + b"\n")
            self._start = [piece]
        if not data:
            self._is_over = True
            if any(self._start):
                self._lines.append(b"".join(self._start))
