"""Train once without interruption and once with many kills, and compare the two runs.

Each kill is SIGKILL to the launcher, to one rank or to all processes, at a random moment: during
start-up, in the first update, while a checkpoint is written, during validation, at any other time,
and right after the last update. Then the same command is started again. Linux only.

    python scripts/kill_and_resume.py --devices 2 --kills 20 --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from processes import BIN, environment_of

UPDATES = 400
CHECKPOINT_EVERY = 7
VALIDATE_EVERY = 20
SETTINGS = f"""
    model=tiny model.d_model=32 model.d_ff=64 model.num_heads=2 model.num_encoder_layers=1
    model.num_decoder_layers=1 model.dropout=0.1 tokens_per_update=800 max_tokens=200 device=cpu
    num_threads=1 max_updates={UPDATES} log_every_updates=5
    checkpoint_every_updates={CHECKPOINT_EVERY} validate_every_updates={VALIDATE_EVERY}
    keep_last=5 timeout_seconds=10""".split()
MAX_DELAYS = {  # seconds between the start of a phase and the kill
    "start": 6.0,
    "first": 0.1,
    "write": 0.01,
    "valid": 0.05,
    "any": 0.5,
    "end": 0.1,
}
PHASES = ["start", "first", "write", "valid", "any"]
MARK = "NMT_KILL_AND_RESUME"  # an environment variable that all processes of a run inherit
LAST_LINE_OF_STARTUP = b"at its peak"  # a part of the last log line before the first update
END_SECONDS = 60  # how long a run may take to end after one of its processes was killed
POLL_SECONDS = 0.002
# metrics that may differ: times, and means over several updates, which start again after a kill
IGNORED_METRICS = re.compile("second|memory|utilisation|^loss$|^nll$|padding")


@dataclass
class Kill:
    """The moment of a kill and its victim."""

    phase: str  # a key of MAX_DELAYS
    update: int  # the kill comes after the checkpoint of this update
    victim: str  # "all", "launcher" or "rank N"


class Command:
    """One run of nmt-train in `run_dir`, with its stderr appended to `log`."""

    def __init__(self, run_dir: Path, settings: list[str], log: Path) -> None:
        self.run_dir = run_dir
        self.log = log
        self.log.touch()
        self._log_start = log.stat().st_size
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [BIN / "nmt-train", *settings, f"run_dir={run_dir}"],
                stderr=file,
                env=os.environ | {MARK: str(os.getpid())},
            )

    def output(self) -> bytes:
        """Return the log of the command so far."""
        return read_from(self.log, self._log_start)

    def last_line(self) -> str:
        """Return the last line of the log."""
        return last_line(self.output())

    def finish(self) -> None:
        """Wait for the command; end this script if it fails."""
        status = self.process.wait()
        if status:
            sys.exit(f"nmt-train ended with {status}: {self.last_line()} ({self.log})")

    def wait_for_kill(self, kill: Kill, rng: random.Random) -> None:
        """Return at the moment of the kill, or when the command has ended before."""
        last_checkpoint_before_kill = kill.update // CHECKPOINT_EVERY * CHECKPOINT_EVERY
        next_update = newest_checkpoint(self.run_dir) + 1
        min_checkpoint = max(last_checkpoint_before_kill, next_update)
        while self.process.poll() is None and not self._is_in_phase(kill, min_checkpoint):
            time.sleep(POLL_SECONDS)
        time.sleep(rng.uniform(0, MAX_DELAYS[kill.phase]))

    def _is_in_phase(self, kill: Kill, min_checkpoint: int) -> bool:
        """Return whether the run is in the phase of the kill.

        The phases valid, any and end begin after the checkpoint of update `min_checkpoint`.
        """
        newest = newest_checkpoint(self.run_dir)
        if kill.phase == "start":
            return True
        if kill.phase == "first":
            return LAST_LINE_OF_STARTUP in self.output()
        if kill.phase == "write":
            is_near = newest >= kill.update - CHECKPOINT_EVERY
            return is_near and any((self.run_dir / "checkpoints").glob(".step-*.tmp"))
        if kill.phase == "valid" and newest % VALIDATE_EVERY != 0:
            return False
        return newest >= min_checkpoint

    def end_after_kill(self) -> int:
        """Wait for the end and return the exit status; if the command hangs, end this script."""
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in find_processes():
                os.kill(pid, signal.SIGKILL)
            sys.exit(f"nmt-train did not end within {END_SECONDS} s after a kill")


def main() -> int:
    """Run without and with kills, print kills and differences; return 1 if the runs differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--devices", type=int, default=1, help="number of ranks")
    parser.add_argument("--seed", type=int, default=1, help="seed of moments and victims")
    parser.add_argument("--folder", type=Path, help="folder for the runs (default: a new one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="nmt-kill-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"runs and logs: {folder}", flush=True)
    data_dir = folder / "data"
    if not data_dir.exists():
        command = [BIN / "nmt-preprocess", "data=numbers", f"data_dir={data_dir}"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    settings = [*SETTINGS, f"data_dir={data_dir}", f"devices={options.devices}"]
    uninterrupted = folder / "uninterrupted"
    killed = folder / "killed"
    Command(uninterrupted, settings, folder / "uninterrupted.log").finish()
    rng = random.Random(options.seed)
    print_row("phase", "victim", "checkpoint", "status", "seconds", "last line of the log")
    for kill in plan_kills(rng, options.kills, options.devices):
        interrupt(kill, rng, Command(killed, settings, folder / "killed.log"))
    Command(killed, settings, folder / "killed.log").finish()
    differences = compare_runs(uninterrupted, killed)
    print("\n".join(differences) or f"nothing differs after {options.kills} kills")
    return 1 if differences else 0


def plan_kills(rng: random.Random, num_kills: int, devices: int) -> list[Kill]:
    """Draw the kills in the order of their updates; the last comes when the run is complete."""
    victims = ["all"]
    if devices > 1:
        victims += ["launcher", *(f"rank {rank}" for rank in range(devices))]
    updates = sorted(rng.randrange(UPDATES - 2 * VALIDATE_EVERY) for _ in range(num_kills - 1))
    kills = []
    for i, update in enumerate(updates):
        kills.append(Kill(PHASES[i % len(PHASES)], update, rng.choice(victims)))
    return [*kills, Kill("end", UPDATES, rng.choice(victims))]


def interrupt(kill: Kill, rng: random.Random, command: Command) -> None:
    """Kill a command, wait until it has ended, and print a row of the table."""
    command.wait_for_kill(kill, rng)
    checkpoint = newest_checkpoint(command.run_dir)
    start_seconds = time.perf_counter()
    victim = kill.victim
    for pid in find_victims(victim, command.process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            victim = f"{kill.victim} (gone)"
    status = command.end_after_kill()
    seconds = f"{time.perf_counter() - start_seconds:.1f}"
    print_row(kill.phase, victim, checkpoint, status, seconds, command.last_line()[:70])


def print_row(
    phase: str, victim: str, checkpoint: object, status: object, seconds: str, line: str
) -> None:
    """Print a row of the table of kills."""
    print(
        f"{phase:<7} {victim:<9} {checkpoint!s:<11} {status!s:<7} {seconds:<8} {line}", flush=True
    )


def read_from(log: Path, offset: int) -> bytes:
    """Return the bytes of a log after an offset."""
    with log.open("rb") as file:
        file.seek(offset)
        return file.read()


def last_line(output: bytes) -> str:
    """Return the last line that is not empty."""
    return output.decode(errors="replace").strip().split("\n")[-1]


def newest_checkpoint(run_dir: Path) -> int:
    """Return the update of the newest checkpoint, 0 without one."""
    paths = run_dir.glob("checkpoints/step-*")
    return max((int(path.name.removeprefix("step-")) for path in paths), default=0)


def find_victims(victim: str, launcher: int) -> list[int]:
    """Return the processes to kill; if a rank has not started yet, the launcher."""
    if victim == "all":
        return find_processes()
    if victim.startswith("rank"):
        rank = victim.split()[1]
        pids = [pid for pid in find_processes() if environment_of(pid).get("RANK") == rank]
        return pids or [launcher]
    return [launcher]


def find_processes() -> list[int]:
    """Return all processes that this script has started, by the variable that they inherit."""
    return [pid for pid in psutil.pids() if environment_of(pid).get(MARK) == str(os.getpid())]


def compare_runs(uninterrupted: Path, killed: Path) -> list[str]:
    """Return a line for each difference between the two runs."""
    differences = []
    for name in ("model.safetensors", "config.json", "tokenizer.model"):
        path = Path("checkpoints/latest") / name
        if (uninterrupted / path).read_bytes() != (killed / path).read_bytes():
            differences.append(f"{path} differs")
    expected = list_checkpoints(uninterrupted)
    checkpoints = list_checkpoints(killed)
    if checkpoints != expected:
        differences.append(f"checkpoints: {expected} without kills, {checkpoints} with kills")
    return differences + compare_metrics(uninterrupted / "metrics.jsonl", killed / "metrics.jsonl")


def list_checkpoints(run_dir: Path) -> list[str]:
    """Return the names of the checkpoints, and for links also the target."""
    names = []
    for path in sorted((run_dir / "checkpoints").iterdir()):
        name = path.name
        if path.is_symlink():
            name += f" -> {path.resolve().name}"
        names.append(name)
    return names


def compare_metrics(uninterrupted: Path, killed: Path) -> list[str]:
    """Return a line for each record that is missing, repeated or different in the killed run."""
    differences = []
    records: dict[str, dict[str, Any]] = {}
    for line in killed.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        name = name_of(record)
        if name in records:
            differences.append(f"metrics.jsonl: {name} is repeated")
        records[name] = record
    for line in uninterrupted.read_text(encoding="utf-8").splitlines():
        expected = json.loads(line)
        name = name_of(expected)
        record = records.pop(name, {})
        if not record:
            differences.append(f"metrics.jsonl: {name} is missing")
            continue
        for key, value in expected.items():
            if not IGNORED_METRICS.search(key) and record.get(key) != value:
                differences.append(f"{name}: {key} {value} and {record.get(key)}")
    for name in records:
        differences.append(f"metrics.jsonl: {name} is only in the killed run")
    return differences


def name_of(record: dict[str, Any]) -> str:
    """Return the update and the event of a record of metrics."""
    event = "validation" if "valid_loss" in record else record.get("event", "training")
    return f"update {record['update']} ({event})"


if __name__ == "__main__":
    sys.exit(main())
