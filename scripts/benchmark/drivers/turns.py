"""How a driver talks to the benchmark: it is asked for a turn of work by a line on stdin, and
answers with one line of JSON on stdout.

Runs in the environments of all engines, so it knows the standard library alone.
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
    """The turns of one process: `job` is what it is to do, the rest is the clock."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        # libraries print as well: the real stdout is kept for answers, all else goes to stderr
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def ready(self, **facts: Any) -> None:
        """Say that everything is loaded and warm; return when the first turn is asked for."""
        self._answer({"python": sys.version.split()[0], **facts})
        self._wait()

    def end(self, **counts: Any) -> None:
        """Report a turn with what was done in it; return when the next one is asked for.

        `cpu_seconds` are those of all threads of this process, `peak_bytes` the most memory it has
        had so far.
        """
        cpu = self.cpu_seconds()
        wall = time.perf_counter() - self._wall_start
        counts.setdefault("peak_bytes", peak_bytes())
        self._answer({**counts, "cpu_seconds": cpu, "wall_seconds": wall})
        self._wait()

    def cpu_seconds(self) -> float:
        """Return the processor seconds of the turn so far."""
        return time.process_time() - self._cpu_start

    def _answer(self, content: dict[str, Any]) -> None:
        self._answers.write(json.dumps(content) + "\n")

    def _wait(self) -> None:
        if not sys.stdin.readline():  # nothing more is wanted
            os._exit(0)  # frameworks have threads and handlers that would linger
        self._wall_start = time.perf_counter()
        self._cpu_start = time.process_time()


class Steps:
    """Makes turns of training steps: the first steps warm up, then a turn is so many steps, and as
    many more as `turn_seconds` have room for.
    """

    def __init__(self, turns: Turns, **facts: Any) -> None:
        self._turns, self._facts = turns, facts
        self._left = int(turns.job["warmup_steps"])
        self._is_warm = False
        self._counts = {"src_tokens": 0, "tgt_tokens": 0, "positions": 0}

    def done(self, *, src_tokens: int, tgt_tokens: int, positions: int, **counts: Any) -> None:
        """Count a step: its real tokens (EOS included), and all its positions with padding.

        Called when a step is over, so that a turn covers making its batches too.
        """
        self._left -= 1
        done = {"src_tokens": src_tokens, "tgt_tokens": tgt_tokens, "positions": positions}
        if self._is_warm:
            self._counts = {name: self._counts[name] + done[name] for name in done}
        if self._left > 0:
            return
        if self._is_warm and self._turns.cpu_seconds() < self._turns.job["turn_seconds"]:
            return
        if self._is_warm:
            self._turns.end(**self._counts, **counts)
        else:
            self._is_warm = True
            self._turns.ready(**self._facts)
        self._left = int(self._turns.job["steps"])
        self._counts = dict.fromkeys(done, 0)


def peak_bytes() -> int:
    """Return the most memory this process has had at once."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss may be that of the process before exec
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert found
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def fastest(choices: list[Any], run: Callable[[Any], Any], device: str) -> Any:
    """Return the choice with which `run(choice)` takes the least time.

    On a processor its own clock counts, since neighbours slow the other down; a GPU works while the
    processor waits.
    """
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds = {}
    for choice in choices:
        start = clock()
        run(choice)
        seconds[choice] = clock() - start
    return min(choices, key=seconds.__getitem__)
