"""Show the progress of a long job: a bar on a terminal, otherwise a log line every 30 seconds."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import AbstractContextManager
from datetime import timedelta

from tqdm import tqdm

log = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 30.0


class Progress(AbstractContextManager["Progress"]):
    """Counts the finished units of a job, and shows their number and the remaining time.

    The remaining time is shown only with `total` or `total_bytes`.

    Args:
        name: name of the job, at the start of each line.
        unit: name of the units in the plural, such as pairs, lines or updates.
        total: number of units.
        total_bytes: size of the input, from which the total number of units is estimated.
        done: number of units that an earlier process finished.
        has_bar: False if a bar would disturb other output on the terminal.
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
        self._name = name
        self._unit = unit
        self._total = total
        self._total_bytes = total_bytes
        self._initially_done = done
        self._text_bytes = 0
        self._metrics = ""  # the last text of `show`
        self._start_time = time.monotonic()
        self._last_log_time = self._start_time
        self._bar = None
        if has_bar and sys.stderr.isatty() and log.isEnabledFor(logging.INFO):
            self._bar = tqdm(
                desc=name,
                unit=f" {unit}",
                total=total,
                initial=done,
                file=sys.stderr,
                mininterval=0.2,
                dynamic_ncols=True,
            )

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, count: int = 1, *, read_bytes: int = 0, text_bytes: int = 0) -> None:
        """Count more finished units, and refresh the bar or log a line if one is due.

        Args:
            count: number of units.
            read_bytes: number of bytes of the input read so far, of `total_bytes`.
            text_bytes: size of the text of these units, to show the speed in MB/s.
        """
        self.done += count
        self._text_bytes += text_bytes
        if self._total_bytes is not None:
            units_per_byte = self.done / max(read_bytes, 1)
            estimated_total = round(units_per_byte * self._total_bytes)
            self._total = max(self.done, estimated_total)
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.set_postfix_str(self._describe_metrics(), refresh=False)
            self._bar.update(count)
        elif time.monotonic() - self._last_log_time >= LOG_INTERVAL_SECONDS:
            self._log()

    def show(self, metrics: str) -> None:
        """Show a text such as "loss 2.1" from now on; without a bar, also log it now."""
        self._metrics = metrics
        if self._bar is not None:
            self._bar.set_postfix_str(metrics, refresh=False)
        else:
            self._log()

    def note(self, text: str) -> None:
        """Log a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            log.info("%s", text)

    def finish(self) -> None:
        """Close the bar, and log the number of units, the elapsed time and the speed."""
        self.close()
        self._log_line(f"{self.done:,} {self._unit} in {_format_time(self._elapsed_seconds())}")

    def close(self) -> None:
        """Close the bar, which stays visible on the terminal."""
        if self._bar is not None:
            self._bar.close()

    def _log(self) -> None:
        """Log the number of finished units and, if the total is known, the remaining time."""
        self._last_log_time = time.monotonic()
        if self._total is None:
            self._log_line(f"{self.done:,} {self._unit}")
            return
        about = "" if self._total_bytes is None else "about "
        num_done_by_this_process = max(self.done - self._initially_done, 1)
        seconds_per_unit = self._elapsed_seconds() / num_done_by_this_process
        remaining_seconds = seconds_per_unit * (self._total - self.done)
        self._log_line(
            f"{self.done:,} of {about}{self._total:,} {self._unit}",
            f"{_format_time(remaining_seconds)} left",
        )

    def _log_line(self, count: str, remaining: str = "") -> None:
        """Log a line with the count, the speed, the metrics and the remaining time."""
        speed = (self.done - self._initially_done) / self._elapsed_seconds()
        fields = [count, f"{speed:,.1f} {self._unit}/s", self._describe_metrics(), remaining]
        log.info("%s: %s", self._name, ", ".join(field for field in fields if field))

    def _describe_metrics(self) -> str:
        """Return the speed in MB/s if `update` gets `text_bytes`, otherwise the text of `show`."""
        if not self._text_bytes:
            return self._metrics
        return f"{self._text_bytes / self._elapsed_seconds() / 1e6:.1f} MB/s"

    def _elapsed_seconds(self) -> float:
        return max(time.monotonic() - self._start_time, 1e-9)


def _format_time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
