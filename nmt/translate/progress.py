"""Says how far a long translation is: a bar on a terminal, a line of log now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from tqdm import tqdm

log = logging.getLogger(__name__)

_LOG_SECONDS = 30.0


class Progress:
    """Counts lines as they are done.

    How many there are in all is an estimate, by the bytes that the lines so far took of a file.
    """

    def __init__(self, num_bytes: int | None, done_lines: int, *, has_bar: bool) -> None:
        self._num_bytes = num_bytes  # of the input, None when that cannot be known
        self._first_lines = self._lines = done_lines  # by an earlier process
        self._started = self._logged = time.monotonic()
        self._bar = None
        if has_bar and sys.stderr.isatty():
            self._bar = tqdm(initial=done_lines, unit=" lines", file=sys.stderr, mininterval=0.2)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, lines: int, read_bytes: int) -> None:
        """Note that `lines` are done, which took `read_bytes` of the input."""
        total = None
        if self._num_bytes is not None:
            total = max(lines, round(lines * self._num_bytes / max(read_bytes, 1)))
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(lines - self._lines)
        self._lines = lines
        if self._bar is None and time.monotonic() - self._logged >= _LOG_SECONDS:
            self._log(lines, total)

    def finish(self) -> None:
        """Close the bar, log the number of lines and the speed."""
        if self._bar is not None:
            self._bar.close()
        seconds = time.monotonic() - self._started
        speed = (self._lines - self._first_lines) / max(seconds, 1e-9)
        log.info("%d lines in %s, %.1f lines/s", self._lines, _clock(seconds), speed)

    def _log(self, lines: int, total: int | None) -> None:
        self._logged = time.monotonic()
        speed = (lines - self._first_lines) / (self._logged - self._started)
        if total is None:
            log.info("%d lines, %.1f lines/s", lines, speed)
        else:
            left = _clock((total - lines) / max(speed, 1e-9))
            log.info("%d of about %d lines, %.1f lines/s, %s left", lines, total, speed, left)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
