"""Worker processes that take turns: each runs the driver of an engine, one turn per request.

A worker that fails is left out of later turns; the others continue.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
_DRIVERS = Path(__file__).parent / "drivers"
_START_SECONDS = 1200
_TURN_SECONDS = 900


class WorkerError(Exception):
    """A worker failed; the message has one line."""


class Worker:
    """The process of one engine for one job."""

    def __init__(self, name: str, python: Path, driver: str, job: Record, folder: Path) -> None:
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        job_file = folder / f"{name}.json"
        job_file.write_text(json.dumps(job, indent=2), encoding="utf-8")
        self.command = [str(python), str(_DRIVERS / driver), str(job_file)]
        self._folder = folder
        self._environment = worker_environment(
            job["threads"], is_ours=str(python) == sys.executable
        )
        self._log = folder / f"{name}.log"

    def start(self) -> Record:
        """Start the process; return its versions once it has loaded and warmed up."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                cwd=self._folder,
                env=self._environment,
            )
        return self._read_answer(_START_SECONDS)

    def turn(self) -> Record:
        """Request one turn of work; return its counts and seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"turn\n")
        except BrokenPipeError:
            raise self._exit_error() from None
        return self._read_answer(_TURN_SECONDS)

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read_answer(self, seconds: float) -> Record:
        stream = self._process.stdout
        assert stream is not None
        readable, _, _ = select.select([stream], [], [], seconds)
        if not readable:
            raise WorkerError(f"no answer in {seconds:.0f} seconds; see {self._log}")
        line = stream.readline()
        if not line:
            raise self._exit_error()
        answer: Record = json.loads(line)
        return answer

    def _exit_error(self) -> WorkerError:
        """Return the exit status with the last line of the log as an error."""
        status = self._process.wait()
        log = self._log.read_text(encoding="utf-8", errors="replace").strip()
        last_line = log.splitlines()[-1].strip() if log else "no output"
        return WorkerError(f"exit status {status}: {last_line}")


def worker_environment(threads: int, *, is_ours: bool) -> dict[str, str]:
    """Return environment variables that limit threads and forbid downloads.

    The drivers of nmt get a PYTHONPATH with nmt, others none.
    """
    environment = dict(os.environ)
    search_path = environment.pop("PYTHONPATH", "")  # includes the packages of scripts/gpu.py
    if is_ours:
        root = str(_DRIVERS.parent.parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join([root, search_path])
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def take_turns(
    workers: list[Worker],
    repeats: int,
    say: Callable[[str], Any],
    *,
    deadline: float = math.inf,
) -> tuple[Record, dict[str, list[Record]], dict[str, str]]:
    """Start the workers one after the other, then run their turns in rounds: A B C, A B C, ...

    When `perf_counter` has passed `deadline`, no round begins except the first. Returns versions,
    turns and reasons of failures, each by the name of the worker.
    """
    versions: Record = {}
    turns: dict[str, list[Record]] = {worker.name: [] for worker in workers}
    failures: dict[str, str] = {}
    for worker in workers:
        try:
            versions[worker.name] = worker.start()
        except WorkerError as error:
            failures[worker.name] = str(error)
        say(f"  {worker.name}: {failures.get(worker.name, 'ready')}")
    for round_number in range(1, repeats + 1):
        if round_number > 1 and time.perf_counter() > deadline:
            break
        for worker in workers:
            if worker.name in failures:
                continue
            try:
                turns[worker.name].append(worker.turn())
            except WorkerError as error:
                failures[worker.name] = str(error)
                say(f"  {worker.name}: {error}")
        say(f"  round {round_number} of {repeats}")
    for worker in workers:
        worker.close()
    return versions, turns, failures
