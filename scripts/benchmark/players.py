"""Engines that take turns: each is a process with a driver, asked for one turn at a time.

A player that fails says why and is left out from then on; the others go on.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Record = dict[str, Any]
_DRIVERS = Path(__file__).parent / "drivers"
_READY_SECONDS, _TURN_SECONDS = 1200, 900


class PlayerError(Exception):
    """Why an engine gives no figures, in one line."""


class Player:
    """One engine at work on one job."""

    def __init__(self, name: str, python: Path, driver: str, job: Record, folder: Path) -> None:
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        job_file = folder / f"{name}.json"
        job_file.write_text(json.dumps(job, indent=2), encoding="utf-8")
        self.command = [str(python), str(_DRIVERS / driver), str(job_file)]
        self._folder, self._threads = folder, job["threads"]
        self._is_ours = str(python) == sys.executable
        self._log = folder / f"{name}.log"

    def start(self) -> Record:
        """Start the process; return its versions when it has loaded and warmed up."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                cwd=self._folder,
                env=bounded_environment(self._threads, is_ours=self._is_ours),
            )
        return self._answer(_READY_SECONDS)

    def turn(self) -> Record:
        """Let it do one turn of work; return what it counted."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"turn\n")
        except BrokenPipeError:
            raise PlayerError(self._last_words()) from None
        return self._answer(_TURN_SECONDS)

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

    def _answer(self, seconds: float) -> Record:
        stream = self._process.stdout
        assert stream is not None
        if not select.select([stream], [], [], seconds)[0]:
            raise PlayerError(f"no answer in {seconds:.0f} seconds; see {self._log}")
        line = stream.readline()
        if not line:
            raise PlayerError(self._last_words())
        answer: Record = json.loads(line)
        return answer

    def _last_words(self) -> str:
        status = self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f"exit status {status}: {said[-1] if said else 'it said nothing'}"


def bounded_environment(threads: int, *, is_ours: bool) -> dict[str, str]:
    """Bound every library's threads, keep libraries from looking at the network, and peers from
    this environment; our own drivers find nmt where it is not installed.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    bounds = dict.fromkeys(names, str(threads))
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if is_ours:
        others = os.environ.get("PYTHONPATH", "")  # what scripts/gpu.py has unpacked
        kept["PYTHONPATH"] = os.pathsep.join([str(_DRIVERS.parent.parent.parent), others])
    return kept | bounds | quiet


def take_turns(
    players: list[Player], repeats: int, say: Any, *, deadline: float = math.inf
) -> tuple[Record, Record, Record]:
    """Let all players warm up, one after the other, then play rounds: A B C, A B C, ... After
    `deadline`, a time of `perf_counter`, no round begins but the first.

    Returns facts, turns and reasons of failure, each by name.
    """
    facts: Record = {}
    turns: Record = {player.name: [] for player in players}
    reasons: Record = {}
    alive = []
    for player in players:
        try:
            facts[player.name] = player.start()
            alive.append(player)
        except PlayerError as error:
            reasons[player.name] = str(error)
        say(f"  {player.name}: {reasons.get(player.name, 'ready')}")
    for number in range(1, repeats + 1):
        if number > 1 and time.perf_counter() > deadline:
            break
        for player in [p for p in alive if p.name not in reasons]:
            try:
                turns[player.name].append(player.turn())
            except PlayerError as error:
                reasons[player.name] = str(error)
                say(f"  {player.name}: {error}")
        say(f"  round {number} of {repeats}")
    for player in players:
        player.close()
    return facts, turns, reasons
