"""The protocol of a driver: a line on stdin requests a turn of work, a line of JSON answers it.

Runs in the environments of all engines, so it uses the standard library only.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Turns:
    """The turns of one process: `job` describes the work, the methods measure it."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        # libraries print as well: keep stdout for answers, and send everything else to stderr
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def ready(self, **versions: Any) -> None:
        """Report that everything is loaded and warm; return when the first turn is requested."""
        self._answer({"python": sys.version.split()[0], **versions})
        self._wait()

    def end(self, **counts: Any) -> None:
        """Report the counts of a turn; return when the next one is requested.

        Adds `cpu_seconds` of all threads of this process, `wall_seconds`, and `peak_bytes`, the
        largest memory of the process so far, unless it is given.
        """
        cpu_seconds = self.cpu_seconds()
        wall_seconds = time.perf_counter() - self._wall_start
        counts.setdefault("peak_bytes", peak_bytes())
        self._answer({**counts, "cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds})
        self._wait()

    def end_translation(self, translate: Callable[[list[str]], dict[str, Any]]) -> None:
        """Translate the lines of the job and report the turn, as `end` does.

        With `one_by_one`, each line is a call of its own; their wall-clock times are reported too.
        """
        if not self.job.get("one_by_one"):
            self.end(**translate(self.job["lines"]))
            return
        milliseconds = []
        for line in self.job["lines"]:
            start_seconds = time.perf_counter()
            translate([line])
            milliseconds.append((time.perf_counter() - start_seconds) * 1000)
        self.end(sentences=len(milliseconds), milliseconds=milliseconds)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the turn so far."""
        return time.process_time() - self._cpu_start

    def _answer(self, content: dict[str, Any]) -> None:
        self._answers.write(json.dumps(content) + "\n")

    def _wait(self) -> None:
        if not sys.stdin.readline():  # the benchmark has closed the pipe
            os._exit(0)  # without waiting for threads and exit handlers of frameworks
        self._wall_start = time.perf_counter()
        self._cpu_start = time.process_time()


class Steps:
    """Divides training into turns of at least `steps` steps and `turn_seconds` of CPU time.

    The first `warmup_steps` steps are not counted.
    """

    def __init__(self, turns: Turns, **versions: Any) -> None:
        self._turns = turns
        self._versions = versions
        self._steps_left = int(turns.job["warmup_steps"])
        self._is_warm = False
        self._counts = {"src_tokens": 0, "tgt_tokens": 0, "positions": 0}

    def done(self, *, src_tokens: int, tgt_tokens: int, positions: int, **counts: Any) -> None:
        """Count a step: its tokens without padding (EOS included), and its positions with padding.

        Called after each step, so that a turn includes making its batches.
        """
        self._steps_left -= 1
        if self._is_warm:
            self._counts["src_tokens"] += src_tokens
            self._counts["tgt_tokens"] += tgt_tokens
            self._counts["positions"] += positions
        if self._steps_left > 0:
            return
        if not self._is_warm:
            self._is_warm = True
            self._turns.ready(**self._versions)
        elif self._turns.cpu_seconds() < self._turns.job["turn_seconds"]:
            return
        else:
            self._turns.end(**self._counts, **counts)
        self._steps_left = int(self._turns.job["steps"])
        self._counts = dict.fromkeys(self._counts, 0)


def count_steps(steps: Steps, trainer: type, method: str, count: Callable[..., Any]) -> None:
    """Wrap a method of a toolkit's trainer that makes one step, so that steps are counted.

    `count` gets the arguments of the method and returns the arguments of `Steps.done`. A step
    counts when the next one begins: only then its optimizer step is over and the next batch made.
    """
    make_step = getattr(trainer, method)
    pending: list[dict[str, int]] = []

    def make_and_count_step(*arguments: Any) -> Any:
        if pending:
            steps.done(**pending.pop())
        result = make_step(*arguments)
        pending.append(count(*arguments))
        return result

    setattr(trainer, method, make_and_count_step)


def peak_bytes() -> int:
    """Return the largest memory that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss may belong to the process before exec
        match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert match
        return int(match[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def fastest(choices: list[Any], run: Callable[[Any], Any], device: str) -> Any:
    """Return the choice with which `run(choice)` takes the least time.

    Measures CPU time on a CPU, since other processes slow it down, and wall-clock time on a GPU.
    """
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds = {}
    for choice in choices:
        start_seconds = clock()
        run(choice)
        seconds[choice] = clock() - start_seconds
    return min(choices, key=seconds.__getitem__)
