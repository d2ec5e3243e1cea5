"""Damages and kills: what a run, a model, an export and a data folder survive.

    python scripts/torture.py [--minutes 60] [--seed 1] [--output docs/reliability.md]

Prepares a small corpus, trains, averages and exports; then repeats, until the time is over, random
cases of four classes. `flip`: one bit of one file. `damage`: a file cut, emptied, with a zeroed
sector, or exchanged for the same file of another folder. `metadata`: a value of a JSON file
replaced by another type or size, with a manifest that fits. `kill`: SIGKILL to average, export or
preprocess at a random moment, and the command again. After damage a command must end with one line
on stderr and status 2, or give the bytes it gave before; after a kill there is the old or the new
whole folder, and nothing beside it once the command was run again. Every case runs in a process
that is forked from one in which all is imported. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nmt
from nmt.cli.commands import COMMANDS
from nmt.cli.main import main as nmt_main
from nmt.errors import NmtError
from nmt.manifest import MANIFEST, verify, write_manifest

_SECONDS = 60  # that a command may take; damaged metadata must not make it compute for long
_BYTES = 8 << 30  # of address space
_TINY = [
    "model=tiny", "model.d_model=32", "model.d_ff=64", "model.num_heads=2", "device=cpu",
    "model.num_encoder_layers=1", "model.num_decoder_layers=1", "num_threads=1", "keep_last=5",
    "tokens_per_update=400", "max_tokens=200", "checkpoint_every_updates=10",
    "validate_every_updates=20", "optimizer.schedule=noam",
]  # fmt: skip
_VALUES: list[Any] = [None, True, -1, 0, 10**9, 10**18, 1e300, "", "x" * 1000, "../x", [], {}, [[]]]


@dataclass
class Tally:
    """What became of the cases of one class."""

    noticed: int = 0
    harmless: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        """All cases of the class."""
        return self.noticed + self.harmless + len(self.failures)


def main() -> int:
    """Run cases until the time is over, print the table, and return 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="file for the table, as Markdown")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        tallies = torture(place, random.Random(options.seed), options.minutes * 60)
    text = report(tallies, options)
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    return int(any(tally.failures for tally in tallies.values()))


class Place:
    """The folders that are tortured, and what the commands give on whole ones."""

    def __init__(self, root: Path) -> None:
        self.root, self.whole = root, root / "whole"
        draw = random.Random(7)
        words = ["the", "red", "green", "old", "tree", "house", "sees", "finds", "big", "cat"]
        for split, count in (("train", 300), ("valid", 20)):
            lines = [" ".join(draw.choices(words, k=draw.randint(3, 9))) for _ in range(count)]
            for side, text in (("src", lines), ("tgt", [line.upper() for line in lines])):
                (root / f"{split}.{side}").write_text("\n".join(text) + "\n")
        self.preprocess = [
            *(f"data.{s}.{e}={root}/{s}.{e}" for s in ("train", "valid") for e in ("src", "tgt")),
            "tokenizer.vocab_size=310", "num_threads=1", "shard_pairs=100",
        ]  # fmt: skip
        w = self.whole
        for number, seed in enumerate((1, 2)):  # the second is another run, to exchange files with
            at = w if number == 0 else root / "other"
            for name, arguments in (
                ("preprocess", [*self.preprocess, f"data_dir={at}/data", f"seed={seed}"]),
                ("train", self.train(at, 30, f"seed={seed}")),
                ("average", [f"run_dir={at}/run", "last=2", f"output={at}/model"]),
                ("export", [f"model_dir={at}/model", f"output={at}/export"]),
            ):
                status, _, errors = run(name, arguments)
                assert status == 0, errors
        self.inputs = root / "valid.src"

    def train(self, at: Path, updates: int, *more: str) -> list[str]:
        """Return the arguments of nmt-train for the run in `at`."""
        data, length = f"data_dir={at}/data", f"max_updates={updates}"
        return [*_TINY, data, f"run_dir={at}/run", length, *more]

    def uses(self, at: Path) -> dict[str, tuple[str, list[str]]]:
        """Return for each folder a command that reads it."""
        text = f"input={self.inputs}"
        return {
            "model": ("translate", [f"model_dir={at}/model", text, "num_threads=1"]),
            "export": (
                "translate",
                [f"model_dir={at}/export", text, "backend=ctranslate2", "num_threads=1"],
            ),
            "run": ("train", self.train(at, 40, "seed=1")),
            "data": ("train", self.train(at, 40, "seed=1")),
        }

    def copy(self) -> Path:
        """Return a fresh copy of the whole folders."""
        at = self.root / "case"
        shutil.rmtree(at, ignore_errors=True)
        shutil.copytree(self.whole, at, symlinks=True)
        return at


def run(
    name: str, arguments: list[str], *, kill_after: float | None = None
) -> tuple[int, bytes, str]:
    """Run a command in a fork; return its status (negative for a signal), stdout and stderr."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = os.fork()
        if not process:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
            signal.alarm(_SECONDS)
            status = 1
            try:
                status = nmt_main(COMMANDS[name], arguments)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        out.seek(0)
        errors.seek(0)
        return status, out.read(), errors.read().decode("utf-8", "replace")


def result(at: Path, use: tuple[str, list[str]]) -> tuple[int, bytes, str]:
    """Run a use of a folder; what training gives are the weights at its end."""
    status, out, errors = run(*use)
    if use[0] == "train" and status == 0:
        out = (at / "run/checkpoints/latest/model.safetensors").read_bytes()
    return status, out, errors


def torture(place: Place, draw: random.Random, seconds: float) -> dict[str, Tally]:
    """Run cases of all classes in turn until the time is over, and one of each at least."""
    kinds: dict[str, Callable[[Path, Path, random.Random], bool]] = {
        "flip": flip, "damage": damage, "metadata": change_metadata,
    }  # fmt: skip
    tallies = {name: Tally() for name in (*kinds, "kill")}
    expected = {}
    for folder in ("model", "export", "run", "data"):
        at = place.copy()
        status, expected[folder], errors = result(at, place.uses(at)[folder])
        assert status == 0, errors
    end = time.monotonic() + seconds
    while time.monotonic() < end or not all(tally.num_cases for tally in tallies.values()):
        for name, act in kinds.items():
            at, folder = place.copy(), draw.choice(sorted(expected))
            files = sorted(p for p in (at / folder).rglob("*") if p.is_file() and used(p))
            path = draw.choice(files)
            if act(path, place.root / "other" / path.relative_to(at), draw):
                judge(tallies[name], at, folder, path, place.uses(at)[folder], expected[folder])
        kill_and_repeat(tallies["kill"], place, draw)
    return tallies


def used(path: Path) -> bool:
    """Say whether a file is one of those that later commands read."""
    ours = (".json", ".safetensors", ".model", ".pt", ".arrow", ".npy", ".src", ".tgt", ".bin")
    return path.suffix in ours and not path.is_symlink() and path.name != "report.json"


def judge(
    tally: Tally, at: Path, folder: str, path: Path, use: tuple[str, list[str]], expected: bytes
) -> None:
    """Count a case after damage to `path`."""
    status, out, errors = result(at, use)
    lines = [line for line in errors.splitlines() if line.startswith("nmt-")]
    if status == 2 and len(lines) == 1 and "Traceback" not in errors:
        tally.noticed += 1
    elif status == 0 and out == expected and "Traceback" not in errors:
        tally.harmless += 1  # padding, or training went on from the checkpoint before
    else:
        tail = " ".join(errors.split())[-300:]
        tally.failures.append(f"{path.relative_to(at)}: status {status}, {tail}")


def flip(path: Path, _: Path, draw: random.Random) -> bool:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    return bool(content)


def damage(path: Path, other: Path, draw: random.Random) -> bool:
    """Cut, empty, zero a sector of, remove or exchange a file."""
    content, way = path.read_bytes(), draw.randrange(5)
    if way == 0:
        path.write_bytes(content[: draw.randrange(len(content) or 1)])
    elif way == 1:
        path.write_bytes(b"")
    elif way == 2:
        start = draw.randrange(len(content) or 1) // 512 * 512
        zeros = bytes(min(512, len(content) - start))
        path.write_bytes(content[:start] + zeros + content[start + len(zeros) :])
    elif way == 3:
        path.unlink()
    elif other.is_file():
        shutil.copy(other, path)
    return way == 3 or path.read_bytes() != content


def change_metadata(path: Path, _: Path, draw: random.Random) -> bool:
    """Replace a value of a JSON file, and write a manifest that fits."""
    if path.suffix != ".json" or path.name == MANIFEST:
        return False
    content = json.loads(path.read_text())
    place = content
    while True:
        key = draw.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], (dict, list)) or not place[key] or draw.random() < 0.2:
            break
        place = place[key]
    value = draw.choice(_VALUES)
    if type(value) is type(place[key]) and isinstance(value, (int, float, str)):
        return False  # another valid setting, such as beam_size, is no damage
    place[key] = value
    path.write_text(json.dumps(content))
    write_manifest(path.parent)
    return True


def kill_and_repeat(tally: Tally, place: Place, draw: random.Random) -> None:
    """Kill a command that replaces a folder at a random moment, look, and run it again."""
    at = place.copy()
    name, folder, arguments = draw.choice([
        ("average", "model", [f"run_dir={at}/run", "last=1", f"output={at}/model"]),
        ("export", "export", [f"model_dir={at}/model", f"output={at}/export", "max_positions=99"]),
        ("preprocess", "data", [*place.preprocess, f"data_dir={at}/data", "max_length=20"]),
    ])  # fmt: skip
    before = sorted(p.name for p in at.iterdir())
    run(name, arguments, kill_after=draw.uniform(0.0, 0.6))
    try:
        verify(at / folder)
    except NmtError as error:
        tally.failures.append(f"{name}: {error}")
        return
    status, _, errors = run(name, arguments)
    left = sorted(p.name for p in at.iterdir())
    if status != 0 or left != before:
        tally.failures.append(f"{name} again: status {status}, {left}, {errors[-200:]}")
    else:
        tally.harmless += 1


def report(tallies: dict[str, Tally], options: argparse.Namespace) -> str:
    """Return the table as Markdown."""
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    lines = [
        "# Reliability",
        "",
        "What becomes of runs, models, exports and data folders that are damaged, and of commands",
        "that are killed. Made by `make torture`; `scripts/torture.py` says what a case is.",
        "",
        f"{time.strftime('%Y-%m-%d')}, nmt {nmt.__version__} ({head.stdout.strip()}), "
        f"{options.minutes:g} minutes, seed {options.seed}.",
        "",
        "| class | cases | one line, status 2 | same result | failures |",
        "|---|---|---|---|---|",
    ]
    for name, tally in tallies.items():
        counts = f"{tally.num_cases} | {tally.noticed} | {tally.harmless} | {len(tally.failures)}"
        lines.append(f"| {name} | {counts} |")
    failures = Counter(text for tally in tallies.values() for text in tally.failures)
    lines += ["", *(f"- {text}" for text in failures)] if failures else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
