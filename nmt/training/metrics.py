"""Where the figures of a run go: `metrics.jsonl`, TensorBoard where it is installed, and the
terminal.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nmt.files import replace_file

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends one object a line to `metrics.jsonl` and the same figures to TensorBoard."""

    def __init__(self, run_dir: Path, *, update: int) -> None:
        """Open the log of a run that goes on after `update`; later lines of an interrupted run are
        removed.
        """
        self._path = run_dir / "metrics.jsonl"
        self.forgot_validation = self._path.exists() and _forget_after(self._path, update)
        self._file = self._path.open("a", encoding="utf-8", newline="\n")
        self._board = _open_tensorboard(run_dir / "tensorboard", update)

    def write(self, record: dict[str, Any]) -> None:
        """Write one record; it has the key `update`."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "update":
                    self._board.add_scalar(name, value, record["update"])

    def close(self) -> None:
        """Write what is buffered."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _forget_after(path: Path, update: int) -> bool:
    """Remove what was logged after `update`, and its validation; say whether there was one.

    A checkpoint is older than the validation of its update, which must therefore be done again.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines if line.endswith("}")]
    kept = [r for r in records if r["update"] < update or (r["update"] == update and "loss" in r)]
    with replace_file(path) as temporary:
        text = "".join(json.dumps(record) + "\n" for record in kept)
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return any(r["update"] == update and "valid_loss" in r for r in records)


def _open_tensorboard(folder: Path, update: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # the extra "tensorboard"
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=update + 1)


class Meter:
    """Sums what happens between two lines of metrics."""

    def __init__(self) -> None:
        self.start_seconds = time.perf_counter()
        self.loss_sum = self.nll_sum = 0.0
        self.num_tokens = self.num_src_tokens = self.num_positions = 0

    def add(self, loss_sum: float, nll_sum: float, tokens: tuple[int, int, int]) -> None:
        """Count an update of (target tokens, source tokens, positions with padding)."""
        self.loss_sum += loss_sum
        self.nll_sum += nll_sum
        self.num_tokens += tokens[0]
        self.num_src_tokens += tokens[1]
        self.num_positions += tokens[2]

    def pause(self, seconds: float) -> None:
        """Do not count so many seconds, in which something else was done."""
        self.start_seconds += seconds

    def record(self) -> dict[str, Any]:
        """Return the means since the start, in nats a target token and tokens a second."""
        seconds = time.perf_counter() - self.start_seconds
        real = self.num_tokens + self.num_src_tokens
        return {
            "loss": self.loss_sum / self.num_tokens,
            "nll": self.nll_sum / self.num_tokens,
            "target_tokens_per_second": self.num_tokens / seconds,
            "tokens_per_second": real / seconds,
            "padding_share": 1 - real / self.num_positions,
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
