"""Compares the speed of nmt-preprocess with that of SentencePiece alone on the same lines.

    python scripts/preprocess_speed.py train.en train.fr dev.en dev.fr tokenizer.model

For 1 and 2 threads, in turn: `SentencePieceProcessor.encode(lines, num_threads=N)` on both sides,
already read, against the whole command from start to end with an existing tokenizer. Prints wall
time and CPU time; the latter says more on a machine that others use too.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

_ENCODE = (
    "import sys, time, sentencepiece\n"
    "processor = sentencepiece.SentencePieceProcessor(model_file=sys.argv[1])\n"
    "sides = [open(p, 'rb').read().decode().split('\\n')[:-1] for p in sys.argv[3:]]\n"
    "wall, cpu = time.perf_counter(), time.process_time()\n"
    "for lines in sides:\n"
    "    processor.encode(lines, num_threads=int(sys.argv[2]))\n"
    "print(time.perf_counter() - wall, time.process_time() - cpu)\n"
)


def encode_alone(texts: list[str], model: str, num_threads: int) -> tuple[float, float]:
    """Return wall time and CPU time of SentencePiece, in seconds."""
    command = [sys.executable, "-c", _ENCODE, model, str(num_threads), *texts[:2]]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


def preprocess(texts: list[str], model: str, num_threads: int) -> tuple[float, float]:
    """Return wall time and CPU time of the command with all its processes, in seconds."""
    keys = ("train.src", "train.tgt", "valid.src", "valid.tgt")
    sources = [f"data.{key}={text}" for key, text in zip(keys, texts, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"data_dir={folder}/data", f"tokenizer.model={model}"]
        command = ["nmt-preprocess", *sources, *settings, f"num_threads={num_threads}"]
        before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - wall, cpu


def main() -> None:
    """Measure each twice and print a table."""
    *texts, model = sys.argv[1:]
    ways: dict[str, Callable[[list[str], str, int], tuple[float, float]]] = {
        "SentencePiece": encode_alone,
        "nmt-preprocess": preprocess,
    }
    for num_threads in (1, 2):
        for _ in range(2):
            for name, way in ways.items():
                wall, cpu = way(texts, model, num_threads)
                print(f"{num_threads} threads  {name:<15} {wall:7.1f} s  {cpu:7.1f} s of CPU")


if __name__ == "__main__":
    main()
