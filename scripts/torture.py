"""Damages, kills and numbers: what runs, models, exports and data folders survive.

    python scripts/torture.py [--minutes 60] [--seed 1] [--output docs/reliability.md]

Prepares a small corpus, trains, averages and exports; then repeats, until the time is over, random
cases of five classes. `flip`: one bit of any file. `damage`: a file cut, emptied, with a zeroed
sector, removed, or exchanged for the same file of another folder. `metadata`: a value of a JSON
file replaced by another type or size, with a manifest that fits. `kill`: SIGKILL to average,
export, preprocess, train or visualize at any of the calls that change the file system, and the
command again. `setting`: a numeric setting of any command with -1, 0, 1e300, inf, nan or 2^63.

After damage a command must end with one line on stderr and status 2, or give the bytes it gave
before. After a kill there is the old or the new whole thing, and nothing beside it once the command
was run again. A number must be refused in one line, or the command come to its end. Every case runs
in a process that is forked from one in which all is imported. A command may take 60 seconds of CPU
time; one that is not done after 10 minutes is run once more. Linux only.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import nmt
from nmt.checkpoint import list_checkpoints
from nmt.cli.commands import COMMANDS
from nmt.cli.main import main as nmt_main
from nmt.errors import NmtError
from nmt.runtime import files
from nmt.runtime.manifest import MANIFEST, read_config, verify, write_manifest
from nmt.runtime.metrics_log import read_metrics_log

Use = tuple[str, list[str], str]  # a command, its arguments, and the file or folder that it writes
_CPU_SECONDS = 60  # that a command may take; damaged metadata must not make it compute for long
_SECONDS = 600
_BYTES = 8 << 30  # of address space
_TINY = [
    "model=tiny",
    "model.d_model=32",
    "model.d_ff=64",
    "model.num_heads=2",
    "device=cpu",
    "model.num_encoder_layers=1",
    "model.num_decoder_layers=1",
    "num_threads=1",
    "keep_last=5",
    "tokens_per_update=400",
    "max_tokens=200",
    "checkpoint_every_updates=10",
    "validate_every_updates=10",
    "log_every_updates=5",
    "optimizer.schedule=noam",
    "optimizer.peak_learning_rate=null",
    "average_last=3",
    "keep_best=1",
]
_VALUES: list[Any] = [None, True, -1, 0, 10**9, 10**18, 1e300, "", "x" * 1000, "../x", [], {}, [[]]]
_NUMBERS = ("-1", "0", "1e300", "inf", "nan", str(2**63))
_CHANGES = {  # audit events before a name in the file system changes
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.chmod",
    "os.truncate",
}
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_LEFTOVER = re.compile(r"\.(tmp|old|work|partial)$")


@dataclass
class Tally:
    """What became of the cases of one class."""

    noticed: int = 0
    harmless: int = 0
    repeated: int = 0  # for the time limit
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
    import_everything()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        tallies, kills = torture(place, random.Random(options.seed), options.minutes * 60)
    text = report(tallies, kills, options)
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    return int(any(tally.failures for tally in tallies.values()))


def import_everything() -> None:
    """Import what commands import when they run, so that forks have it."""
    torch.set_num_threads(1)
    for name in (
        "cli.tasks",
        "cli.train",
        "cli.translate",
        "cli.evaluate",
        "cli.data_folder",
        "average",
        "training.train",
        "translate.translator",
        "translate.engines.ctranslate2",
        "export.ctranslate2",
        "preprocess.prepare",
        "visualize.draw",
        "visualize.runs",
        "visualize.run_report",
        "visualize.style",
        "serve.app",
    ):
        importlib.import_module(f"nmt.{name}")
    for name in ("ctranslate2", "torch.utils.tensorboard", "matplotlib.pyplot", "sacrebleu"):
        importlib.import_module(name)


class Place:
    """The folders that are tortured, and what the commands give on whole ones."""

    def __init__(self, root: Path, *, has_other: bool = True) -> None:
        self.root, self.whole = root, root / "whole"
        draw = random.Random(7)
        words = ["the", "red", "green", "old", "tree", "house", "sees", "finds", "big", "cat"]
        for split, count in (("train", 300), ("valid", 20)):
            lines = [" ".join(draw.choices(words, k=draw.randint(3, 9))) for _ in range(count)]
            for side, text in (("src", lines), ("tgt", [line.upper() for line in lines])):
                (root / f"{split}.{side}").write_text("\n".join(text) + "\n")
        self.inputs, self.references = root / "valid.src", root / "valid.tgt"
        self.preprocess = [
            *(f"data.{s}.{e}={root}/{s}.{e}" for s in ("train", "valid") for e in ("src", "tgt")),
            "tokenizer.vocab_size=310",
            "num_threads=1",
            "shard_pairs=100",
        ]
        others = [(root / "other", 2)] if has_other else []  # to exchange files with
        for at, seed in [(self.whole, 1), *others]:
            for name, arguments in (
                ("preprocess", [*self.preprocess, f"data_dir={at}/data", f"seed={seed}"]),
                ("train", self.train(at, 30, f"seed={seed}")),
                ("average", [f"run_dir={at}/run", "last=2", f"output={at}/model"]),
                ("export", [f"model_dir={at}/model", f"output={at}/export"]),
                ("visualize", self.report(at)),
            ):
                status, _, errors = run(name, arguments)
                assert status == 0, errors

    def train(self, at: Path, updates: int, *more: str) -> list[str]:
        """Return the arguments of nmt-train for the run in `at`."""
        data, length = f"data_dir={at}/data", f"max_updates={updates}"
        return [*_TINY, data, f"run_dir={at}/run", length, *more]

    def report(self, at: Path) -> list[str]:
        """Return the arguments of nmt-visualize for the report of the run in `at`."""
        data = f"data_dir={at}/data"
        run_dir, output = f"run_dir={at}/run", f"output={at}/report.html"
        return ["what=report", run_dir, data, output, "device=cpu", "num_threads=1"]

    def uses(self, at: Path) -> dict[str, list[Use]]:
        """Return for each folder commands that read it."""
        text, alone = f"input={self.inputs}", "num_threads=1"
        weights = "run/checkpoints/latest/model.safetensors"
        train = ("train", self.train(at, 40, "seed=1"), weights)
        out = f"output={at}/out"
        return {
            "model": [
                ("translate", [f"model_dir={at}/model", text, alone, out], "out"),
                ("export", [f"model_dir={at}/model", out, "max_positions=99"], "out/model.bin"),
            ],
            "export": [
                (
                    "translate",
                    [f"model_dir={at}/export", text, out, "backend=ctranslate2", alone],
                    "out",
                ),
            ],
            "run": [
                train,
                ("average", [f"run_dir={at}/run", "best=1", out], "out/model.safetensors"),
                ("average", [f"run_dir={at}/run", out], "out/model.safetensors"),
                ("translate", [f"model_dir={at}/run", text, alone, out], "out"),
                ("visualize", self.report(at), "report.html"),
                ("visualize", ["what=run", f"run_dir={at}/run", f"{out}.svg"], "out.svg"),
            ],
            "data": [
                train,
                (
                    "evaluate",
                    [f"model_dir={at}/model", f"data_dir={at}/data", "split=valid", alone],
                    "",
                ),
                ("visualize", ["what=data", f"data_dir={at}/data", f"{out}.html"], "out.html"),
                ("visualize", self.report(at), "report.html"),
            ],
        }

    def copy(self) -> Path:
        """Return a fresh copy of the whole folders."""
        at = self.root / "case"
        shutil.rmtree(at, ignore_errors=True)
        shutil.copytree(self.whole, at, symlinks=True)
        return at


# --- running


def run(
    name: str, arguments: list[str], *, calls: mmap.mmap | None = None, end: float = 0
) -> tuple[int, bytes, str]:
    """Run a command in a fork; return its status (negative for a signal), stdout and stderr.

    With `calls` it is killed as `die_at_a_call` says; with `end`, it gets SIGTERM after so many
    seconds.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = os.fork()
        if not process:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.stdin = open(os.devnull)  # noqa: SIM115
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
            signal.alarm(_SECONDS)
            status = 1
            try:
                if calls is not None:
                    die_at_a_call(calls)
                status = nmt_main(COMMANDS[name], arguments)
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        if end:
            time.sleep(end)
            os.kill(process, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        out.seek(0)
        errors.seek(0)
        return status, out.read(), errors.read().decode("utf-8", "replace")


def die_at_a_call(calls: mmap.mmap) -> None:
    """Count, in the second number of `calls`, what changes the file system: names that are made,
    removed or changed, files that are opened for writing, what is brought to disk; and be killed
    just before the one whose number, from 1, is the first number of `calls`.
    """

    def count(*_: Any) -> None:
        number = int.from_bytes(calls[8:16], "little") + 1
        calls[8:16] = number.to_bytes(8, "little")
        if calls[:8] == calls[8:16]:
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and (arguments[2] or 0) & _FOR_WRITING):
            count()

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            count()
            return original(*arguments)

        return call

    sys.addaudithook(hear)
    os.fsync = counted(os.fsync)
    files._exchange = counted(files._exchange)


def run_and_die(name: str, arguments: list[str], number: int) -> tuple[int, int]:
    """Run a command that is killed at a call, or at none of 0; return its status, and how many
    calls there were.
    """
    with mmap.mmap(-1, 16) as calls:
        calls[:8] = number.to_bytes(8, "little")
        status, _, errors = run(name, arguments, calls=calls)
        assert status in (0, -signal.SIGKILL), errors
        return status, int.from_bytes(calls[8:16], "little")


def result(at: Path, use: Use) -> tuple[int, bytes, str]:
    """Run a use of a folder; return its status, what it wrote, and its stderr."""
    name, arguments, written = use
    status, out, errors = run(name, arguments)
    if status == 0 and written:
        out = (at / written).read_bytes()
    return status, out, errors


# --- cases


def torture(place: Place, draw: random.Random, seconds: float) -> tuple[dict[str, Tally], Kills]:
    """Run cases of all classes in turn until the time is over, and one of each at least."""
    kinds: dict[str, Callable[[Path, Path, random.Random], bool]] = {
        "flip": flip,
        "damage": damage,
        "metadata": change_metadata,
    }
    tallies = {name: Tally() for name in (*kinds, "kill", "setting")}
    expected: dict[tuple[str, int], bytes] = {}
    for folder, uses in place.uses(place.copy()).items():
        for number, use in enumerate(uses):
            status, expected[folder, number], errors = result(place.copy(), use)
            assert status == 0, errors
    kills, numbers = Kills(place), settings(draw)
    kill_cases = kills.cases(draw)
    end = time.monotonic() + seconds
    while time.monotonic() < end or not all(tally.num_cases for tally in tallies.values()):
        for name, act in (("flip", flip), *kinds.items()):
            at, (folder, number) = place.copy(), draw.choice(sorted(expected))
            found = (p for p in (at / folder).rglob("*") if p.is_file() and not p.is_symlink())
            choices = sorted(p for p in found if act is not change_metadata or p.suffix == ".json")
            path = draw.choice(choices or [at / "model/config.json"])
            if act(path, place.root / "other" / path.relative_to(at), draw):
                use = place.uses(at)[folder][number]
                judge(tallies[name], at, path, use, expected[folder, number])
        for case in itertools.islice(kill_cases, 2):
            kills.check(tallies["kill"], *case)
        for setting in itertools.islice(numbers, 6):
            set_number(tallies["setting"], place, *setting)
        counts = (f"{name} {t.num_cases} ({len(t.failures)})" for name, t in tallies.items())
        print(", ".join(counts), *(t.failures[-1:] for t in tallies.values()), file=sys.stderr)
    return tallies, kills


def judge(tally: Tally, at: Path, path: Path, use: Use, expected: bytes) -> None:
    """Count a case after damage to `path`, which is not changed by commands that read it."""
    status, out, errors = result(at, use)
    if status == -signal.SIGALRM:
        tally.repeated += 1
        status, out, errors = result(at, use)
    if is_refusal(status, errors):
        tally.noticed += 1
    elif status == 0 and "Traceback" not in errors and out == expected:
        tally.harmless += 1
    elif status == 0 and "Traceback" not in errors and str(path.name) in errors:
        tally.noticed += 1  # a checkpoint or line that is left out with a warning
    else:
        tail = " ".join(errors.split())[-300:]
        tally.failures.append(f"{path.relative_to(at)}, {use[:2]}: status {status}, {tail}")


def is_refusal(status: int, errors: str) -> bool:
    """Say whether a command ended with its one line."""
    lines = [line for line in errors.splitlines() if line.startswith("nmt-")]
    return status == 2 and len(lines) == 1 and "Traceback" not in errors


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
    if path.suffix != ".json" or path.name in (MANIFEST, "report.json") or "trackers" in path.parts:
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


class Kills:
    """Commands that replace something, how many calls each makes, and at which they were killed."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.num_calls: dict[str, int] = {}
        self.killed: dict[str, set[int]] = {}
        self.contents: dict[str, list[bytes]] = {}  # before a command, and after it
        (place.whole / "report.html").write_text("another report")
        for what in self.commands(place.whole):
            at = place.copy()
            before = content_of(at / what)
            status, self.num_calls[what] = run_and_die(*self.commands(at)[what], 0)
            assert status == 0
            self.contents[what] = [before, content_of(at / what)]
            assert before != self.contents[what][1], what

    def commands(self, at: Path) -> dict[str, tuple[str, list[str]]]:
        """Return the commands by what they replace."""
        return {
            "model": ("average", [f"run_dir={at}/run", "last=1", f"output={at}/model"]),
            "export": (
                "export",
                [f"model_dir={at}/model", f"output={at}/export", "max_positions=99"],
            ),
            "data": (
                "preprocess",
                [*self.place.preprocess, f"data_dir={at}/data", "max_length=20"],
            ),
            "run": ("train", self.place.train(at, 40, "seed=1", "average_last=1")),
            "report.html": ("visualize", self.place.report(at)),
        }

    def cases(self, draw: random.Random) -> Iterator[tuple[str, int]]:
        """Yield what is replaced and a call, without end, each once in a round."""
        every = [(what, i) for what, n in self.num_calls.items() for i in range(1, n + 1)]
        while True:
            yield from draw.sample(every, len(every))

    def check(self, tally: Tally, what: str, number: int) -> None:
        """Kill a command at a call."""
        self.killed.setdefault(what, set()).add(number)
        failure = self.failure(what, number)
        if failure:
            tally.failures.append(failure)
        else:
            tally.harmless += 1

    def failure(self, what: str, number: int) -> str:
        """Kill a command at a call, look, and run it again; return what is wrong, or nothing."""
        at = self.place.copy()
        name, arguments = self.commands(at)[what]
        before, case = names(at), f"{name}, call {number}"
        run_and_die(name, arguments, number)
        try:
            check_whole(at / what, self.contents[what])
        except (NmtError, AssertionError, OSError) as error:
            return f"{case}: {error!r}"
        status, _, errors = run(name, arguments)
        left = [path for path in names(at) if _LEFTOVER.search(path)]
        new = set(names(at)) - set(before) if what != "run" else set()
        if status != 0 or left or new:
            beside = [*left, *sorted(new)[:3]]
            return f"{case}, again: status {status}, {beside}, {errors[-200:].strip()!r}"
        is_new = content_of(at / what) == self.contents[what][1]
        return "" if is_new else f"{case}, again: the result differs"


def names(folder: Path) -> list[str]:
    """Return all paths below a folder, without work that goes on in a run."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def content_of(path: Path) -> bytes:
    """Return what stands for the content of a file, a folder with a manifest, or a run."""
    if path.is_file():
        return path.read_bytes()
    is_run = (path / "checkpoints").is_dir()
    return (path / ("checkpoints/latest" if is_run else "") / MANIFEST).read_bytes()


def check_whole(path: Path, contents: list[bytes]) -> None:
    """Raise unless `path` is whole: as it was before, or as it becomes."""
    assert content_of(path) in contents, "neither the old nor the new"
    if (path / "checkpoints").is_dir():
        for folder in list_checkpoints(path):
            verify(folder)
        assert (path / "checkpoints/best" / MANIFEST).is_file(), "best leads nowhere"
        read_metrics_log(path / "metrics.jsonl")
        read_config(path)
    elif path.is_dir():
        verify(path)


def settings(draw: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield commands, their numeric settings and values, without end, each once in a round."""
    every: list[tuple[str, str, str]] = []
    for name, command in COMMANDS.items():
        for setting in command.accepted:
            kinds = {setting.hint, *typing.get_args(setting.hint)}
            if {int, float} & kinds and name != "import":  # which has nothing to import here
                every += [(name, setting.key, value) for value in _NUMBERS]
    while True:  # the two that are accepted most come first
        yield from sorted(
            draw.sample(every, len(every)), key=lambda case: case[2] not in ("-1", "0")
        )


def set_number(tally: Tally, place: Place, name: str, key: str, value: str) -> None:
    """Run a command with a number; it is refused, or comes to its end."""
    at = place.copy()
    text, alone, model = f"input={place.inputs}", "num_threads=1", f"model_dir={at}/model"
    pair = [f"src={place.inputs}", f"tgt={place.references}"]
    scored = [f"hypotheses={place.inputs}", f"references={place.references}"]
    key = key.replace("NAME", "a")
    corpus = [
        f"data.corpora.a.src={place.root}/train.src",
        f"data.corpora.a.tgt={place.root}/train.tgt",
    ]
    arguments = {
        "preprocess": [*place.preprocess, f"data_dir={at}/out"],
        "train": [*_TINY, f"data_dir={at}/data", f"run_dir={at}/out", "max_updates=4"],
        "average": [f"run_dir={at}/run", f"output={at}/out"],
        "export": [model, f"output={at}/out"],
        "translate": [model, text, alone],
        "evaluate": scored,
        "score": [model, *pair, alone],
        "serve": [model, alone, "port=0"],
        "visualize": [*place.report(at), model],
    }[name] + (corpus if "corpora" in key else [])
    kept = [a for a in arguments if not a.startswith(f"{key}=")]
    end = 4.0 if name == "serve" else 0.0
    for _ in range(2):
        shutil.rmtree(at / "out", ignore_errors=True)
        status, _, errors = run(name, [*kept, f"{key}={value}"], end=end)
        if status != -signal.SIGALRM:
            break
        tally.repeated += 1
    if is_refusal(status, errors):
        tally.noticed += 1
    elif "Traceback" not in errors and (status == 0 or end and status in (130, -signal.SIGTERM)):
        tally.harmless += 1
    else:
        tail = " ".join(errors.split())[-300:]
        tally.failures.append(f"nmt-{name} {key}={value}: status {status}, {tail}")


def report(tallies: dict[str, Tally], kills: Kills, options: argparse.Namespace) -> str:
    """Return the table as Markdown."""
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    lines = [
        "# Reliability",
        "",
        "What becomes of runs, models, exports and data folders that are damaged, of commands",
        "that are killed, and of extreme numbers. Made by `make torture`; what a case is says",
        "`scripts/torture.py`.",
        "",
        f"{time.strftime('%Y-%m-%d')}, nmt {nmt.__version__} ({head.stdout.strip()}), "
        f"{options.minutes:g} minutes, seed {options.seed}.",
        "",
        "| class | cases | one line | same result or end | repeated, slow | failures |",
        "|---|---|---|---|---|---|",
    ]
    for name, tally in tallies.items():
        counts = [tally.num_cases, tally.noticed, tally.harmless, tally.repeated]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {len(tally.failures)} |")
    commands = kills.commands(kills.place.whole)
    done = (
        f"{commands[what][0]} {len(kills.killed.get(what, ()))} of {number}"
        for what, number in kills.num_calls.items()
    )
    lines += ["", f"Different calls at which a command was killed: {', '.join(done)}."]
    failures = Counter(text for tally in tallies.values() for text in tally.failures)
    lines += ["", *(f"- {text}" for text in failures)] if failures else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
