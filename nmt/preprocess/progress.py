"""Says how far a pass over the training text is: a bar on a terminal, a line of log now and then
elsewhere.
"""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from tqdm import tqdm

log = logging.getLogger(__name__)
_LOG_SECONDS = 30.0


class Progress:
    """Counts pairs and the bytes of text that they take.

    How long it will last is an estimate by the bytes of the files, as they lie on disk.
    """

    def __init__(self, name: str, disk_bytes: int) -> None:
        self._name, self._disk_bytes = name, max(disk_bytes, 1)
        self._done = self._first = 0  # bytes on disk; those that were passed over
        self._pairs = self._text_bytes = 0
        self._started = self._logged = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=100.0,
                desc=name,
                file=sys.stderr,
                bar_format="{desc}: {percentage:3.0f}%|{bar}| {postfix} [{elapsed}<{remaining}]",
                mininterval=0.2,
                postfix="",
            )

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
        if error is None and self._pairs:
            log.info("%s: %s", self._name, self._speed())

    def skip(self, disk_bytes: int) -> None:
        """Note that the files are passed over up to `disk_bytes`, which are done already."""
        self._first += disk_bytes - self._done
        self._advance(disk_bytes)

    def update(self, num_pairs: int, text_bytes: int, disk_bytes: int) -> None:
        """Note that more pairs are done; with them, `disk_bytes` of the files are."""
        self._pairs += num_pairs
        self._text_bytes += text_bytes
        self._advance(disk_bytes)
        if self._bar is None and time.monotonic() - self._logged >= _LOG_SECONDS:
            self._logged = time.monotonic()
            log.info("%s: %s, %s left", self._name, self._speed(), self._left())

    def _advance(self, disk_bytes: int) -> None:
        more = disk_bytes - self._done
        self._done = disk_bytes
        if self._bar is not None:
            self._bar.set_postfix_str(self._speed(), refresh=False)
            self._bar.update(100.0 * more / self._disk_bytes)

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        pairs, megabytes = self._pairs / seconds, self._text_bytes / seconds / 1e6
        return f"{self._pairs:,} pairs, {pairs:,.0f} pairs/s, {megabytes:.1f} MB/s"

    def _left(self) -> str:
        seconds = time.monotonic() - self._started
        done = max(self._done - self._first, 1)
        left = round(seconds * (self._disk_bytes - self._done) / done)
        return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
