"""Train a translator on the interface texts of Home Assistant, from download to BLEU.

Prints each command before running it. A step whose output exists is not repeated, except training,
which continues from its newest checkpoint. At the end, prints ten translations and the scores.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

EXPERIMENT = "experiment=homeassistant"
FETCH_SCRIPT = Path(__file__).with_name("fetch_homeassistant.py")
TEXT = Path("data/raw/homeassistant/en-de")
DATA = Path("data/homeassistant")
RUN = Path("runs/homeassistant")
OUTPUT = RUN / "test.hyp"
NUM_EXAMPLES = 10
NEXT_COMMANDS = f"""
Next commands to try:
  nmt-translate model_dir={RUN}                          translate what you type
  nmt-preprocess data.train.src=a.en data.train.tgt=a.de \\
      data.valid.src=v.en data.valid.tgt=v.de data_dir=data/mine tokenizer.vocab_size=8000
  nmt-train +model=small data_dir=data/mine run_dir=runs/mine    train on your own text
  nmt-train --help                                               every setting with its unit"""


def main() -> int:
    """Run the steps that are not done yet, then print the results."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    start_seconds = time.perf_counter()
    translate = ["nmt-translate", EXPERIMENT, f"model_dir={RUN}", f"input={DATA / 'test.src'}"]
    steps: list[tuple[Path | None, list[str]]] = [  # output and command
        (TEXT / "test.de", [sys.executable, str(FETCH_SCRIPT)]),
        (DATA / "meta.json", ["nmt-preprocess", EXPERIMENT]),
        (None, ["nmt-train", EXPERIMENT]),
        (RUN / "average/config.json", ["nmt-average", EXPERIMENT]),
        (OUTPUT, [*translate, f"output={OUTPUT}"]),
    ]
    if not OUTPUT.exists():
        for output, command in steps:
            if output is None or not output.exists():
                run(command)
    print_examples()
    run(["nmt-evaluate", f"hypotheses={OUTPUT}", f"references={DATA / 'test.tgt'}"])
    print(NEXT_COMMANDS)
    print(f"\n{time.perf_counter() - start_seconds:.0f} seconds", file=sys.stderr)
    return 0


def run(command: list[str]) -> None:
    """Print a command and run it; exit with its status if it fails."""
    print(f"\n$ {shlex.join(command)}", file=sys.stderr, flush=True)
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(status)


def print_examples() -> None:
    """Print source, translation and reference of ten sentences, evenly spaced in the test set."""
    sources = read_lines(DATA / "test.src")
    translations = read_lines(OUTPUT)
    references = read_lines(DATA / "test.tgt")
    step = len(sources) // NUM_EXAMPLES
    for i in range(0, step * NUM_EXAMPLES, step):
        print(f"\n      source  {sources[i]}")
        print(f" translation  {translations[i]}")
        print(f"   reference  {references[i]}")
    print(flush=True)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


if __name__ == "__main__":
    sys.exit(main())
