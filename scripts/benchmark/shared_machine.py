"""Measures training, in turns, alone and beside busy processes, by how OpenMP's threads are set.

    python scripts/benchmark/shared_machine.py --rounds 3 --busy 1

The machine must be idle but for this. Prints the seconds of each round, and the speed beside the
busy processes as a share of that alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from statistics import median

WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "default": ([], {}),
    "all threads": ([f"num_threads={os.cpu_count()}"], {}),
    "one thread": (["num_threads=1"], {}),
    "spin 2000": ([f"num_threads={os.cpu_count()}"], {"GOMP_SPINCOUNT": "2000"}),
}


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many other processes busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def train(folder: str, updates: int, arguments: list[str], variables: dict[str, str]) -> float:
    """Return the seconds that a new process takes for a training run."""
    with tempfile.TemporaryDirectory() as run_dir:
        settings = ["model=tiny", f"data_dir={folder}/data", f"run_dir={run_dir}"]
        settings += [f"max_updates={updates}", "valid_bleu=false", "device=cpu", *arguments]
        start_seconds = time.perf_counter()
        command = [sys.executable, "-m", "nmt", "train", *settings]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | variables)
        return time.perf_counter() - start_seconds


def main() -> None:
    """Measure all ways in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=1, help="other processes")
    parser.add_argument("--updates", type=int, default=150)
    options = parser.parse_args()
    seconds: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        prepare = [sys.executable, "-m", "nmt", "preprocess", f"data_dir={folder}/data"]
        subprocess.run(prepare, check=True, capture_output=True)
        for _ in range(options.rounds):
            for way, (arguments, variables) in WAYS.items():
                for place, count in enumerate((0, options.busy)):
                    with busy(count):
                        spent = train(folder, options.updates, arguments, variables)
                    seconds[way][place].append(spent)
                    print(f"{way}, {count} busy: {spent:.1f} s", flush=True)
    best = median(seconds["all threads"][0])
    print("\n| | alone, s | beside, s | loss alone | speed beside / alone |\n|---|---|---|---|---|")
    for way, (alone, beside) in seconds.items():
        one, other = median(alone), median(beside)
        print(f"| {way} | {one:.1f} | {other:.1f} | {one / best - 1:+.1%} | {one / other:.2f} |")


if __name__ == "__main__":
    main()
