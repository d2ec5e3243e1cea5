"""Helpers of tests of nmt-translate: a model folder, and child processes that translate."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from ranks import child
from tiny import sentences, tiny_model, tokenizer_config
from toy import command

from nmt.checkpoint import ModelInfo, save_model
from nmt.config import SearchConfig
from nmt.data.vocabulary import train_tokenizer
from nmt.translate import job


def write_model(
    folder: Path,
    *,
    seed: int = 2,
    eos_scale: float = 1.0,
    sep_scale: float = 0.0,
    separator: str = "<sep>",
    symbols: Sequence[str] = (),
) -> Path:
    """Write a model folder of random weights that translates each sentence differently.

    `eos_scale` multiplies the embedding of EOS: above 1, translations end before their limit.
    `sep_scale` multiplies the embedding of `separator`; 0 leaves the separator out.
    """
    separators = [separator] if sep_scale else []
    tokenizer = train_tokenizer(sentences(200), tokenizer_config(), [*separators, *symbols])
    model = tiny_model(seed, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        model.embedding.weight[tokenizer.eos_id] *= eos_scale
        for symbol in separators:
            model.embedding.weight[tokenizer.all_pieces().index(symbol)] *= sep_scale
    search = SearchConfig(beam_size=2, max_length_a=0.5, max_length_b=4)
    info = ModelInfo(
        model.config, search, tokenizer.vocab_size, "en", "de", tokenizer.sha256, updates=1
    )
    save_model(folder, dict(model.state_dict()), info, tokenizer)
    return folder


def write_lines(path: Path, lines: list[str]) -> Path:
    """Write lines unchanged, each with its \\n."""
    path.write_bytes(b"".join(line.encode("utf-8") + b"\n" for line in lines))
    return path


def translate(*arguments: str | Iterable[str]) -> int:
    """Run nmt-translate in this process; see `command` for `arguments`."""
    return command("translate", ["device=cpu", "num_threads=1"], arguments)


def fork(
    task: Callable[[], int],
    log: Path,
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    close: Sequence[int] = (),
    **environment: str,
) -> int:
    """Run `task` in a fork of this process; return its process id.

    `stdin` and `stdout` are the descriptors of the child. It closes the descriptors `close`.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        for descriptor in close:
            os.close(descriptor)
        if stdin is not None:
            sys.stdin = os.fdopen(stdin)
        if stdout is not None:
            sys.stdout = os.fdopen(stdout, "w")
        os.environ.update(environment)
        sys.stderr = log.open("w", buffering=1)
        code = task()
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def run_in_child(log: Path, task: Callable[..., Any], *arguments: Any) -> int:
    """Run `task(*arguments)` in a process that has no threads yet; return its exit status."""
    with child(log, task, *arguments) as process:
        return process.wait()


def run_and_die(call: str, number: int, task: Callable[..., int], *arguments: Any) -> int:
    """Run a task that saves its state after each window; this process is killed at call `number`
    of a method of `job.PartialFile`, or of a function that `nmt.translate.job` calls.
    """
    owner = job.PartialFile if hasattr(job.PartialFile, call) else job
    original = getattr(owner, call)
    calls = itertools.count(1)

    def call_or_die(*args: Any, **named: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **named)

    setattr(owner, call, call_or_die)
    job._MIN_SECONDS_BETWEEN_SAVES = 0.0
    return task(*arguments)


def kill(pid: int) -> None:
    """Kill a child that may have ended, and wait for it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def assert_bounded_memory(process: Callable[[Path], object], texts: list[Path]) -> None:
    """Process two texts in a child; the second, longer one must need at most 15 MiB more."""
    log = texts[0].with_name("log")
    peaks = texts[0].with_name("peaks")
    assert run_in_child(log, _measure_peaks, process, texts, peaks) == 0, log.read_text(
        encoding="utf-8"
    )
    memory_before, memory_after = map(float, peaks.read_text(encoding="utf-8").split())
    assert memory_after < memory_before + 15  # MiB; 50,000 results in memory would be 25 or more


def _measure_peaks(process: Callable[[Path], object], texts: list[Path], peaks: Path) -> None:
    """Process texts, and write the peak of the memory after each, in MiB."""
    for text in texts:
        process(text)
        with peaks.open("a") as stream:
            print(getrusage(RUSAGE_SELF).ru_maxrss / 1024, file=stream)


def status(pid: int, *, seconds: float = 600) -> int:
    """Wait for a child and return its exit status."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended_pid, wait_status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            return os.waitstatus_to_exitcode(wait_status)
        time.sleep(0.005)
    kill(pid)
    raise AssertionError(f"the child was still running after {seconds} s")
