"""Corpora with something odd, and nmt-preprocess in processes of its own, for its tests."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toy import command

from nmt.data.binary import ParallelData
from nmt.data.tokenizer import load_tokenizers

WORDS = ["red", "green", "big", "house", "tree", "sees", "the", "a", "river", "bridge"]
ODD = ["\u2028", "\u2029", "\x85", "\v", "\f", "\x1c", "\r", "\u00a0", "\ufeff", "😀", "\x1a"]
_MAIN = "import sys; from nmt.cli.main import preprocess; sys.exit(preprocess())"


def write_text(path: Path, lines: list[str]) -> Path:
    """Write lines as they are."""
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8"))
    return path


def write_corpus(folder: Path, num_pairs: int = 300, *, name: str = "train") -> list[str]:
    """Write numbered pairs, some odd, unless they are there; return the arguments of nmt-preprocess
    that name them.
    """
    draw = random.Random(name)
    arguments = ["tokenizer.vocab_size=330", "filter.max_ratio=9", "num_threads=1"]
    for split, size in ((name, num_pairs), ("valid", 12)):
        rows = [draw.choices(WORDS, k=draw.randint(1, 9)) for _ in range(size)]
        for side in ("src", "tgt"):
            lines = [" ".join([str(n), draw.choice(ODD), *row]) for n, row in enumerate(rows)]
            for n in draw.sample(range(size), size // 20):
                lines[n] = draw.choice(["", " ", "\0", "too long " * 200])
            path = folder / f"{split}.{side}.txt"
            if not path.exists():
                write_text(path, lines)
            arguments.append(f"data.{split}.{side}={path}")
    return arguments


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start nmt-preprocess."""
    program, pipe = [sys.executable, "-c", _MAIN, *arguments], subprocess.PIPE
    return subprocess.Popen(
        program, stdout=subprocess.DEVNULL, stderr=pipe, text=True, start_new_session=True
    )


def run_in_fork(prepare: Callable[[], object], *arguments: str) -> int:
    """Run `prepare` and nmt-preprocess in a fork of this process; return its exit status, negative
    for the signal that ended it.
    """
    if (pid := os.fork()) == 0:
        try:
            prepare()
            os._exit(command("preprocess", *arguments))
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_and_die(number: int, *arguments: str) -> int:
    """Run nmt-preprocess, killed at call `number` of os.replace, which makes each part whole."""
    calls, replace = itertools.count(1), os.replace

    def replace_or_die(*paths: Path) -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)

    return run_in_fork(lambda: setattr(os, "replace", replace_or_die), *arguments)


def wait_for_workers(process: subprocess.Popen[str]) -> list[int]:
    """Return the ids of the worker processes as soon as there are any."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        children = [int(pid) for pid in path.read_text().split()]
        if workers := [pid for pid in children if _is_worker(pid)]:
            return workers
        time.sleep(0.002)
    raise AssertionError(f"ended with {process.returncode}: {process.communicate()[1]}")


def _is_worker(pid: int) -> bool:
    """Say whether a child is a worker, not the process that removes semaphores at the end."""
    try:
        return b"multiprocessing.spawn" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_running(pid: int) -> bool:
    """Say whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int]) -> None:
    """Wait until none of the processes runs, at most 20 seconds."""
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def tree(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, hidden ones too, by name."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def read_report(folder: Path) -> dict[str, Any]:
    """Read report.json."""
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


def read_back(folder: Path, split: str = "train") -> Iterator[tuple[str, str]]:
    """Yield the text of all pairs of a split, from their ids."""
    tokenizers = load_tokenizers(folder)
    for src, tgt in ParallelData(folder, split):
        yield tokenizers.src.decode(src.tolist()), tokenizers.tgt.decode(tgt.tolist())
