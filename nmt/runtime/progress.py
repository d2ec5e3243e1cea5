"""How far a long job is: a bar on a terminal, elsewhere a line of log every 30 seconds."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import AbstractContextManager
from datetime import timedelta

from tqdm import tqdm

log = logging.getLogger(__name__)

LOG_SECONDS = 30.0


class Progress(AbstractContextManager["Progress"]):
    """Counts what is done and estimates the remaining time, in a `with` block or until `close`.

    Args:
        name: of the job; begins each line.
        unit: what is counted, in the plural: pairs, lines, updates.
        total: how many there are; with `total_bytes` of input it is estimated from the bytes read
            so far, and without both there is no remaining time.
        done: what an earlier process has done.
        has_bar: False where a bar would disturb other output on the terminal.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        *,
        total: int | None = None,
        total_bytes: int | None = None,
        done: int = 0,
        has_bar: bool = True,
    ) -> None:
        self.done = done
        self._name, self._unit = name, unit
        self._total, self._total_bytes = total, total_bytes
        self._first, self._text_bytes, self._figures = done, 0, ""
        self._started = self._logged = time.monotonic()
        self._bar = None
        if has_bar and sys.stderr.isatty():
            self._bar = tqdm(
                desc=name, unit=f" {unit}", total=total, initial=done,
                file=sys.stderr, mininterval=0.2, dynamic_ncols=True,
            )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, count: int = 1, *, read_bytes: int = 0, text_bytes: int = 0) -> None:
        """Count what was done since the last call, and its `text_bytes`, shown as MB/s;
        `read_bytes` is how far the input is read, from its start, of `total_bytes`.
        """
        self.done += count
        self._text_bytes += text_bytes
        if self._total_bytes is not None:
            estimate = round(self.done * self._total_bytes / max(read_bytes, 1))
            self._total = max(self.done, estimate)
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.set_postfix_str(self._details(), refresh=False)
            self._bar.update(count)
        elif time.monotonic() - self._logged >= LOG_SECONDS:
            self._log()

    def show(self, figures: str) -> None:
        """Show figures beside the bar from now on; without a bar, log a line with them now."""
        self._figures = figures
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
        else:
            self._log()

    def note(self, text: str) -> None:
        """Write a line for the user, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            log.info("%s", text)

    def finish(self) -> None:
        """Close, and log the count, the time and the speed."""
        self.close()
        self._write(f"{self.done:,} {self._unit} in {_clock(self._seconds())}")

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def _log(self) -> None:
        self._logged = time.monotonic()
        if self._total is None:
            return self._write(f"{self.done:,} {self._unit}")
        about = "about " if self._total_bytes is not None else ""
        pace = self._seconds() / max(self.done - self._first, 1)
        left = f"{_clock(pace * (self._total - self.done))} left"
        return self._write(f"{self.done:,} of {about}{self._total:,} {self._unit}", left)

    def _write(self, count: str, left: str = "") -> None:
        speed = f"{(self.done - self._first) / self._seconds():,.1f} {self._unit}/s"
        parts = [part for part in (count, speed, self._details(), left) if part]
        log.info("%s: %s", self._name, ", ".join(parts))

    def _details(self) -> str:
        if not self._text_bytes:
            return self._figures
        return f"{self._text_bytes / self._seconds() / 1e6:.1f} MB/s"

    def _seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
