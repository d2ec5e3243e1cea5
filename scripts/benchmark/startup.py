"""How long a cold process takes to translate one line, beside what importing torch and reading the
weights takes anyway.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from players import Record, bounded_environment
from report import Section, number
from settings import Settings

_LINE = b"A man is riding a bicycle.\n"
_FLOOR = "import torch and load the weights"
_LOAD = "import sys, torch, safetensors.torch; safetensors.torch.load_file(sys.argv[1])"


def compare(model_dir: Path, settings: Settings) -> Section:
    """Start processes in turn; return their processor seconds."""
    translate = Path(sys.executable).parent / "nmt-translate"
    commands = {
        _FLOOR: [sys.executable, "-c", _LOAD, str(model_dir / "model.safetensors")],
        "nmt-translate": [str(translate), f"model_dir={model_dir}"],
    }
    commands["nmt-translate"] += [f"device={settings.device}", f"num_threads={settings.threads}"]
    turns: dict[str, list[Record]] = {name: [] for name in commands}
    for turn_number in range(settings.repeats + 1):
        for name, command in commands.items():
            turn = run(command, settings.threads)
            if turn_number:  # the first round brings files into the cache of the disk
                turns[name].append(turn)
    walls = {n: statistics.median(t["wall_seconds"] for t in some) for n, some in turns.items()}
    return Section(
        title="Start-up, one line",
        setting=f"A cold process, files in the disk's cache; {settings.repeats} turns.",
        unit="CPU seconds",
        rates={name: [t["cpu_seconds"] for t in some] for name, some in turns.items()},
        columns={
            "seconds by the clock": {name: number(wall) for name, wall in walls.items()},
            "ratio of those": {n: f"{wall / walls[_FLOOR]:.2f}" for n, wall in walls.items()},
        },
        bars={"torch and weights": [_FLOOR]},
        lower_is_better=True,
        raw={"turns": turns, "commands": commands},
    )


def run(command: list[str], threads: int) -> Record:
    """Run a command to its end; return its seconds."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=bounded_environment(threads, is_ours=True),
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(_LINE)
    process.stdin.close()
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed: {said.decode(errors='replace')}")
    wall = time.perf_counter() - start
    return {"wall_seconds": wall, "cpu_seconds": usage.ru_utime + usage.ru_stime}
