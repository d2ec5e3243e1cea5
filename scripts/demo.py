"""The main job on real text: fetch, preprocess, train, average, translate, evaluate.

Runs the console scripts as a user would and prints each command first; steps with results are not
repeated. Ends with ten sentences and the scores.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

EXPERIMENT = "experiment=homeassistant"
FETCH = Path(__file__).with_name("fetch_homeassistant.py")
TEXT = Path("data/raw/homeassistant/en-de")
DATA, RUN = Path("data/homeassistant"), Path("runs/homeassistant")
OUTPUT = RUN / "test.hyp"
NUM_EXAMPLES = 10
NEXT = f"""
What to type next:
  nmt-translate model_dir={RUN}                          translate what you type
  nmt-preprocess data.train.src=a.en data.train.tgt=a.de \\
      data.valid.src=v.en data.valid.tgt=v.de data_dir=data/mine tokenizer.vocab_size=8000
  nmt-train +model=tiny data_dir=data/mine run_dir=runs/mine     train on your own text
  nmt-train --help                                               every setting with its unit"""


def main() -> int:
    """Run the steps that are not done yet, then show the results."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    start_seconds = time.perf_counter()
    translate = ["nmt-translate", EXPERIMENT, f"model_dir={RUN}", f"input={DATA / 'test.src'}"]
    steps = [
        (TEXT / "test.de", [sys.executable, str(FETCH)]),
        (DATA / "meta.json", ["nmt-preprocess", EXPERIMENT]),
        (None, ["nmt-train", EXPERIMENT]),
        (RUN / "average/config.json", ["nmt-average", EXPERIMENT]),
        (OUTPUT, [*translate, f"output={OUTPUT}"]),
    ]
    if not OUTPUT.exists():
        for result, command in steps:
            if result is None or not result.exists():
                run(command)
    print_examples()
    run(["nmt-evaluate", f"hypotheses={OUTPUT}", f"references={DATA / 'test.tgt'}"])
    print(NEXT)
    print(f"\n{time.perf_counter() - start_seconds:.0f} seconds", file=sys.stderr)
    return 0


def run(command: list[str]) -> None:
    """Print a command and run it; stop at its first failure, with its exit status."""
    print(f"\n$ {shlex.join(command)}", file=sys.stderr, flush=True)
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(status)


def print_examples() -> None:
    """Print source, translation and reference of ten test sentences, spread over the test set."""
    paths = (DATA / "test.src", OUTPUT, DATA / "test.tgt")
    columns = [path.read_text(encoding="utf-8").split("\n")[:-1] for path in paths]
    rows = list(zip(*columns, strict=True))
    for row in rows[:: len(rows) // NUM_EXAMPLES][:NUM_EXAMPLES]:
        print()
        for name, text in zip(("source", "translation", "reference"), row, strict=True):
            print(f"{name:>12}  {text}")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
