"""Where the figures of a run go: `metrics.jsonl`, TensorBoard where it is installed, and the
terminal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nmt.data.batching import Update
from nmt.files import replace_file
from nmt.training.learner import Outcome
from nmt.training.state import TrainerState

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends one object a line to `metrics.jsonl` and the same figures to TensorBoard.

    A log that can no longer be written, for example on a full disk, does not end the run.
    """

    def __init__(self, run_dir: Path, *, update: int, is_validated: bool) -> None:
        """Open the log of a run that goes on after `update`; later lines of an interrupted run are
        removed.
        """
        self._path = run_dir / "metrics.jsonl"
        self.forgot_validation = self._path.exists() and _forget_after(
            self._path, update, is_validated=is_validated
        )
        self._file = self._path.open("ab", buffering=0)
        self._board = _open_tensorboard(run_dir / "tensorboard", update)

    def write(self, record: dict[str, Any]) -> None:
        """Write one record; it has the key `update`."""
        try:
            self._file.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            log.warning("%s: %s; this line of metrics is lost", self._path, error.strerror)
        try:
            self._write_board(record)
        except Exception as error:  # of TensorBoard's own thread and its many kinds of files
            log.warning("tensorboard: %s; the run goes on without it", error)
            self._board = None

    def close(self) -> None:
        """Write what is buffered."""
        self._file.close()
        if self._board is not None:
            with contextlib.suppress(Exception):  # see `write`
                self._board.close()

    def _write_board(self, record: dict[str, Any]) -> None:
        if self._board is not None:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "update":
                    self._board.add_scalar(name, value, record["update"])


def _forget_after(path: Path, update: int, *, is_validated: bool) -> bool:
    """Remove what was logged after `update`, and its validation; say whether there was one.

    A checkpoint is older than the validation of its update, which must therefore be done again,
    unless the checkpoint says that it is validated.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = [record for line in lines if (record := _parse(line)) is not None]
    undone = [] if is_validated else [r for r in records if _is_validation_of(r, update)]
    kept = [r for r in records if r["update"] <= update and r not in undone]
    with replace_file(path) as temporary:
        text = "".join(json.dumps(record) + "\n" for record in kept)
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return bool(undone)


def _parse(line: str) -> dict[str, Any] | None:
    """Read a line of metrics; one that a kill or a full disk cut is None."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "update" in record else None


def _is_validation_of(record: dict[str, Any], update: int) -> bool:
    return record["update"] == update and "valid_loss" in record


def _open_tensorboard(folder: Path, update: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # the extra "tensorboard"
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=update + 1)


class Meter:
    """Sums what all ranks do between two lines of metrics."""

    def __init__(self) -> None:
        self.start_seconds = time.perf_counter()
        self.loss_sum = self.nll_sum = self.num_positions = self.flops = 0.0
        self.num_tokens = self.num_src_tokens = 0

    def add(self, outcome: Outcome, update: Update) -> None:
        """Count an update."""
        self.loss_sum += outcome.loss_sum
        self.nll_sum += outcome.nll_sum
        self.num_tokens += update.num_tokens
        self.num_src_tokens += update.num_src_tokens
        self.num_positions += outcome.num_positions
        self.flops += outcome.flops

    def pause(self, seconds: float) -> None:
        """Do not count so many seconds, in which something else was done."""
        self.start_seconds += seconds

    def record(self, *, flops_per_second: float) -> dict[str, Any]:
        """Return the means since the start, in nats a target token and tokens a second.

        `flops_per_second` is what all devices could do: utilisation is relative to it.
        """
        seconds = time.perf_counter() - self.start_seconds
        real = self.num_tokens + self.num_src_tokens
        return {
            "loss": self.loss_sum / self.num_tokens,
            "nll": self.nll_sum / self.num_tokens,
            "target_tokens_per_second": self.num_tokens / seconds,
            "tokens_per_second": real / seconds,
            "padding_share": 1 - real / self.num_positions,
            "model_flops_per_second": self.flops / seconds,
            "model_flops_utilisation": self.flops / seconds / flops_per_second,
        }


class Progress:
    """A bar on a terminal, plain log lines elsewhere."""

    def __init__(self, *, update: int, max_updates: int) -> None:
        self._bar = tqdm(
            total=max_updates,
            initial=update,
            unit="update",
            desc="train",
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        )
        self._start = (time.perf_counter(), update)
        self._max_updates = max_updates

    def advance(self) -> None:
        """Count one update."""
        self._bar.update()

    def show(self, record: dict[str, Any]) -> None:
        """Show the newest figures."""
        figures = {
            "loss": f"{record['loss']:.3f}",
            "lr": f"{record['learning_rate']:.2e}",
            "tok/s": f"{record['tokens_per_second']:.0f}",
        }
        if self._bar.disable:
            text = ", ".join(f"{name} {value}" for name, value in figures.items())
            left = self._time_left(record["update"])
            log.info("update %d/%d: %s, %s left", record["update"], self._max_updates, text, left)
        else:
            self._bar.set_postfix(figures, refresh=False)

    def note(self, text: str) -> None:
        """Write a line above the bar."""
        if self._bar.disable:
            log.info("%s", text)
        else:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()

    def _time_left(self, update: int) -> str:
        start_seconds, start_update = self._start
        pace = (time.perf_counter() - start_seconds) / max(update - start_update, 1)
        return str(tqdm.format_interval(pace * (self._max_updates - update)))


class Reporter:
    """Tells files and terminal what happens in a run; of several ranks the main one alone does."""

    def __init__(
        self, run_dir: Path, state: TrainerState, *, max_updates: int, is_main: bool
    ) -> None:
        self._log = self._progress = None
        if is_main:
            is_validated = state.validated == state.update
            self._log = MetricsLog(run_dir, update=state.update, is_validated=is_validated)
            self._progress = Progress(update=state.update, max_updates=max_updates)
        self.forgot_validation = self._log is not None and self._log.forgot_validation

    def write(self, record: dict[str, Any]) -> None:
        """Write a line of metrics; it has the key `update`."""
        if self._log is not None:
            self._log.write(record)

    def show(self, record: dict[str, Any]) -> None:
        """Show the newest figures."""
        if self._progress is not None:
            self._progress.show(record)

    def note(self, text: str) -> None:
        """Write a line for the user."""
        if self._progress is not None:
            self._progress.note(text)

    def advance(self) -> None:
        """Count one update."""
        if self._progress is not None:
            self._progress.advance()

    def close(self) -> None:
        """Write what is buffered and leave the terminal as it is."""
        if self._log is not None and self._progress is not None:
            self._progress.close()
            self._log.close()
