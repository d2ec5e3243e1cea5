"""Corpora with odd characters, and nmt-preprocess in this process or others, for its tests."""

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

from toy import command, flatten

from nmt.data.binary import ParallelData
from nmt.data.tokenizer import load_tokenizers

WORDS = ["red", "green", "big", "house", "tree", "sees", "the", "a", "river", "bridge"]
ODD = ["\u2028", "\u2029", "\x85", "\v", "\f", "\x1c", "\r", "\u00a0", "\ufeff", "😀", "\x1a"]
_MAIN = "import sys; from nmt.cli.main import preprocess; sys.exit(preprocess())"


def write_text(path: Path, lines: list[str]) -> Path:
    """Write lines without changing them."""
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8"))
    return path


def write_corpus(folder: Path, num_pairs: int = 300, *, name: str = "train") -> list[str]:
    """Write numbered pairs, some odd, unless the files exist; return arguments of nmt-preprocess.

    Writes validation pairs too.
    """
    draw = random.Random(name)
    for split, size in ((name, num_pairs), ("valid", 12)):
        rows = [draw.choices(WORDS, k=draw.randint(1, 9)) for _ in range(size)]
        for side in ("src", "tgt"):
            lines = [" ".join([str(n), draw.choice(ODD), *row]) for n, row in enumerate(rows)]
            for n in draw.sample(range(size), size // 20):
                lines[n] = draw.choice(["", " ", "\0", "too long " * 200])
            path = folder / f"{split}.{side}.txt"
            if not path.exists():
                write_text(path, lines)
    settings = ["tokenizer.vocab_size=330", "filter.max_ratio=9", "num_threads=1", "shard_pairs=70"]
    return [*settings, *name_files(folder, name), *name_files(folder, "valid")]


def name_files(folder: Path, split: str, key: str = "") -> list[str]:
    """Return the arguments that name the files of `write_corpus`."""
    key = f"data.{key or split}"
    return [f"{key}.src={folder}/{split}.src.txt", f"{key}.tgt={folder}/{split}.tgt.txt"]


def preprocess(data_dir: Path, *arguments: str | list[str]) -> Path:
    """Make or replace a data folder with nmt-preprocess in this process, and return it."""
    settings = ["num_threads=1", "overwrite=true", f"data_dir={data_dir}"]
    assert command("preprocess", arguments, settings) == 0, arguments
    return data_dir


def start(*arguments: str | list[str]) -> subprocess.Popen[str]:
    """Start nmt-preprocess in a process with its own group."""
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, *flatten(arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_in_fork(prepare: Callable[[], object], *arguments: str | list[str]) -> int:
    """Run `prepare` and nmt-preprocess in a fork of this process; return its exit status, negative
    for the signal that ended it.
    """
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            os._exit(command("preprocess", arguments))
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_and_die(number: int, *arguments: str | list[str]) -> int:
    """Run nmt-preprocess and kill it at call `number` of os.replace, which completes a file."""
    calls = itertools.count(1)
    replace = os.replace

    def replace_or_die(temporary: Path, path: Path) -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(temporary, path)

    return run_in_fork(lambda: setattr(os, "replace", replace_or_die), arguments)


def wait_for_workers(process: subprocess.Popen[str]) -> list[int]:
    """Return the ids of the worker processes as soon as there are any."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        workers = list(filter(_is_worker, map(int, path.read_text().split())))
        if workers:
            return workers
        time.sleep(0.002)
    raise AssertionError(f"ended with {process.returncode}: {process.communicate()[1]}")


def _is_worker(pid: int) -> bool:
    """Return whether a child is a worker, not the process that removes semaphores at the end."""
    try:
        return b"multiprocessing.spawn" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int]) -> None:
    """Wait until all of the processes have ended."""
    deadline = time.monotonic() + 600  # much longer than it takes on a busy machine
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
