"""Trains once without a break and once with many kills, and compares what the two runs leave.

Each kill is SIGKILL, to the launcher, to one rank or to all at once, at a moment drawn from --seed:
during start-up, in the first update, while a checkpoint is written, during validation, anywhere
else, and right after the last update. The same command is started again at once. Linux only: it
finds processes in /proc.

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
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
UPDATES, LOG_EVERY, CHECKPOINT_EVERY, VALIDATE_EVERY = 400, 5, 7, 20
SETTINGS = f"""
    model=tiny model.d_model=32 model.d_ff=64 model.num_heads=2 model.num_encoder_layers=1
    model.num_decoder_layers=1 model.dropout=0.1 tokens_per_update=800 max_tokens=200 device=cpu
    num_threads=1 max_updates={UPDATES} log_every_updates={LOG_EVERY}
    checkpoint_every_updates={CHECKPOINT_EVERY} validate_every_updates={VALIDATE_EVERY}
    keep_last=5 timeout_seconds=10""".split()
MOMENTS = ("start", "first", "write", "valid", "any")
MARK = "NMT_KILL_AND_RESUME"
READY = "at its peak"  # the last line before the first update
END_SECONDS = 60  # in which a run must end by itself after one of its processes was killed
POLL_SECONDS = 0.002
# times are not the same twice; a mean begins anew after a stop
UNLIKE = re.compile("second|memory|utilisation|^loss$|^nll$|padding")


@dataclass
class Kill:
    """One kill and what came of it."""

    moment: str
    update: int  # not before the checkpoint of this update
    victim: str
    newest: int = 0  # checkpoint at the moment of the kill
    seconds: float = 0.0  # until the command ended
    status: int = 0
    last_line: str = ""


def main() -> int:
    """Run both, print the kills and the comparison; 0 if nothing differs."""
    arguments = parse()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="nmt-kill-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"runs and logs: {folder}", flush=True)
    data_dir = folder / "data"
    if not data_dir.exists():
        command = [BIN / "nmt-preprocess", "data=numbers", f"data_dir={data_dir}"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    settings = [*SETTINGS, f"data_dir={data_dir}", f"devices={arguments.devices}"]
    whole, killed = folder / "whole", folder / "killed"
    train(whole, settings, folder / "whole.log")
    draw = random.Random(arguments.seed)
    print_row("moment", "victim", "checkpoint", "status", "seconds", "last line on the screen")
    for kill in plan(draw, arguments.kills, arguments.devices):
        interrupt(kill, draw, killed, settings, folder / "killed.log")
        line = kill.last_line[:70]
        print_row(kill.moment, kill.victim, kill.newest, kill.status, f"{kill.seconds:.1f}", line)
    train(killed, settings, folder / "killed.log")
    problems = compare(whole, killed)
    print("\n".join(problems) or f"nothing differs after {arguments.kills} kills")
    return 1 if problems else 0


def parse() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--devices", type=int, default=1, help="ranks")
    parser.add_argument("--seed", type=int, default=1, help="of moments and victims")
    parser.add_argument("--folder", type=Path, help="where the runs go; default: a new one")
    return parser.parse_args()


def print_row(*cells: Any) -> None:
    """Print a row of the table."""
    widths = (7, 9, 11, 7, 8)
    print(
        *(f"{cell!s:<{w}}" for cell, w in zip(cells, widths, strict=False)), cells[-1], flush=True
    )


def plan(draw: random.Random, num_kills: int, devices: int) -> list[Kill]:
    """Draw the kills, in the order of their updates; the last comes when the run is done."""
    victims = (
        ["all"] if devices == 1 else ["all", "launcher", *map("rank {}".format, range(devices))]
    )
    updates = sorted(draw.randrange(UPDATES - 2 * VALIDATE_EVERY) for _ in range(num_kills - 1))
    kills = [Kill(MOMENTS[i % 5], update, draw.choice(victims)) for i, update in enumerate(updates)]
    return [*kills, Kill("end", UPDATES, draw.choice(victims))]


def start(run_dir: Path, settings: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start the command with its stderr appended to `log`."""
    command = [BIN / "nmt-train", *settings, f"run_dir={run_dir}"]
    with log.open("ab") as file:
        environ = {**os.environ, MARK: str(os.getpid())}
        return subprocess.Popen(command, stderr=file, env=environ)


def train(run_dir: Path, settings: list[str], log: Path) -> None:
    """Train to the end; anything but exit status 0 ends the script."""
    status = start(run_dir, settings, log).wait()
    if status:
        sys.exit(f"nmt-train ended with {status}: {last_line(log)} ({log})")


def interrupt(
    kill: Kill, draw: random.Random, run_dir: Path, settings: list[str], log: Path
) -> None:
    """Start the command, kill it, wait until it has ended, and note what happened in `kill`."""
    log.touch()
    offset = log.stat().st_size
    process = start(run_dir, settings, log)
    await_moment(kill, draw, run_dir, process, log, offset)
    kill.newest = newest_checkpoint(run_dir)
    start_seconds = time.perf_counter()
    for pid in find_victims(kill.victim, process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            kill.victim += " (gone)"
    kill.status = wait(process)
    kill.seconds = time.perf_counter() - start_seconds
    kill.last_line = last_line(log, offset)


def wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status; a command that hangs is killed, and the script ends."""
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        for pid in processes():
            os.kill(pid, signal.SIGKILL)
        sys.exit(f"nmt-train did not end within {END_SECONDS} s after a kill")


def await_moment(
    kill: Kill,
    draw: random.Random,
    run_dir: Path,
    process: subprocess.Popen[bytes],
    log: Path,
    offset: int,
) -> None:
    """Return at the moment to kill, or when the command has ended before."""

    first = max(kill.update // CHECKPOINT_EVERY * CHECKPOINT_EVERY, newest_checkpoint(run_dir) + 1)

    def has_come() -> bool:
        newest = newest_checkpoint(run_dir)
        if kill.moment == "first":
            return READY.encode() in read_from(log, offset)
        if kill.moment == "write" and newest >= kill.update - CHECKPOINT_EVERY:
            return any((run_dir / "checkpoints").glob(".step-*.tmp"))
        return newest >= first and (kill.moment != "valid" or newest % VALIDATE_EVERY == 0)

    delays = {"start": 6.0, "first": 0.1, "write": 0.01, "valid": 0.05, "any": 0.5, "end": 0.1}
    while kill.moment != "start" and process.poll() is None and not has_come():
        time.sleep(POLL_SECONDS)
    time.sleep(draw.uniform(0, delays[kill.moment]))


def read_from(log: Path, offset: int) -> bytes:
    """Return what was written to `log` after `offset`."""
    with log.open("rb") as file:
        file.seek(offset)
        return file.read()


def newest_checkpoint(run_dir: Path) -> int:
    """Return the update of the newest checkpoint, 0 without one."""
    return max((int(p.name[5:]) for p in run_dir.glob("checkpoints/step-*")), default=0)


def find_victims(victim: str, launcher: int) -> list[int]:
    """Return the processes to kill; a rank that has not started yet is the launcher."""
    all_processes = processes()
    if victim.startswith("rank"):
        rank = victim.split()[1]
        ranks = [pid for pid in all_processes if environment(pid).get("RANK") == rank]
        return ranks or [launcher]
    return [launcher] if victim == "launcher" else all_processes


def processes() -> list[int]:
    """List the processes that this script started, directly or not, by a mark they inherit."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if environment(pid).get(MARK) == str(os.getpid())]


def environment(pid: int) -> dict[str, str]:
    """Read the environment a process was started with."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def last_line(log: Path, offset: int = 0) -> str:
    """Return the last line that was written after `offset`."""
    lines = read_from(log, offset).decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")


def compare(whole: Path, killed: Path) -> list[str]:
    """Return a line for each thing that differs between the two runs."""
    problems = []
    for name in ("model.safetensors", "config.json", "tokenizer.model"):
        path = Path("checkpoints/latest") / name
        if (whole / path).read_bytes() != (killed / path).read_bytes():
            problems.append(f"{path} differs")
    one, other = (
        sorted(p.name for p in (run / "checkpoints").iterdir()) for run in (whole, killed)
    )
    if one != other:
        problems.append(f"checkpoints: {', '.join(one)} without kills, {', '.join(other)} with")
    links = [(run / "checkpoints/best").resolve().name for run in (whole, killed)]
    if links[0] != links[1]:
        problems.append(f"best is {links[0]} without kills, {links[1]} with")
    return problems + compare_metrics(read_metrics(whole), read_metrics(killed))


def compare_metrics(whole: list[dict[str, Any]], killed: list[dict[str, Any]]) -> list[str]:
    """Return a line for each update that is logged more than once, or never, or otherwise."""
    counts = Counter((record["update"], kind(record)) for record in killed)
    problems = [f"metrics.jsonl: {place} comes {n} times" for place, n in counts.items() if n > 1]
    found = {(record["update"], kind(record)): record for record in killed}
    for record in whole:
        other = found.pop((record["update"], kind(record)), None)
        if other is None:
            problems.append(f"metrics.jsonl: {record['update']} ({kind(record)}) is missing")
            continue
        for name, value in record.items():
            if not UNLIKE.search(name) and other.get(name) != value:
                problems.append(f"update {record['update']}: {name} {value} and {other.get(name)}")
    return problems + [f"metrics.jsonl: {place} is not in the whole run" for place in found]


def kind(record: dict[str, Any]) -> str:
    """Name the kind of a line of metrics."""
    return "validation" if "valid_loss" in record else str(record.get("event", "training"))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the lines of `metrics.jsonl`."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


if __name__ == "__main__":
    sys.exit(main())
