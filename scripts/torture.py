"""Test how runs, models, exports and data folders survive damage, kills and extreme settings.

    python scripts/torture.py [--minutes 60] [--seed 1] [--output FILE]

Prepares a small corpus, trains, averages and exports. Then runs random cases of five classes until
the time is over, and prints how they ended:

- `flip`: one bit of a file is flipped.
- `damage`: a file is truncated, emptied, removed or replaced by the same file of another folder, or
  one sector of it is zeroed.
- `metadata`: a value of a JSON file gets another type or size, and the manifest is updated.
- `kill`: average, export, preprocess, train or visualize gets SIGKILL at a random call that changes
  the file system, and the command is started again.
- `setting`: a numeric setting of any command is -1, 0, 1e300, inf, nan or 2^63.

After damage, a command must end with one line on stderr and status 2, or its output must not
change. After a kill, the output must be complete, either the old or the new one, and after another
run of the command no temporary file may remain. An extreme setting must be refused in one line, or
the command must finish. Every case runs in a fork of one process that has imported everything, and
may use 60 seconds of CPU time; it is repeated once if it takes more than 10 minutes. Linux only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forks import Result, import_everything, run, run_and_kill

import nmt
from nmt.checkpoint import list_checkpoints
from nmt.cli.commands import COMMANDS
from nmt.errors import NmtError
from nmt.runtime.manifest import MANIFEST, read_run_config, verify_checksums, write_manifest
from nmt.runtime.metrics_log import read_metrics_log

TINY = """model=tiny model.d_model=32 model.d_ff=64 model.num_heads=2 device=cpu
    model.num_encoder_layers=1 model.num_decoder_layers=1 num_threads=1 keep_last=5
    tokens_per_update=400 max_tokens=200 checkpoint_every_updates=10 validate_every_updates=10
    log_every_updates=5 optimizer.schedule=noam optimizer.peak_learning_rate=null average_last=3
    keep_best=1"""
WORDS = ["the", "red", "green", "old", "tree", "house", "sees", "finds", "big", "cat"]
METADATA_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    10**9,
    10**18,
    1e300,
    "",
    "x" * 1000,
    "../x",
    [],
    {},
    [[]],
]
EXTREME_NUMBERS = ("-1", "0", "1e300", "inf", "nan", str(2**63))
TEMPORARY_NAME = re.compile(r"\.(tmp|old|work|partial)$")
SERVER_SECONDS = 4.0  # nmt-serve is stopped after this time
DAMAGE_CLASSES = ("flip", "damage", "metadata")
REPORT = """{about}

| class | cases | one line | same result or end | repeated, slow | failures |
|---|---|---|---|---|---|
{rows}

Different calls at which a command was killed: {calls}.
"""


@dataclass
class Tally:
    """Results of the cases of one class."""

    refused: int = 0  # the command ended with one line on stderr
    harmless: int = 0  # the output did not change, or the command finished
    repeated: int = 0  # run a second time, since the first run exceeded the time limit
    failures: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        """Number of cases of the class."""
        return self.refused + self.harmless + len(self.failures)


@dataclass
class Command:
    """A command, and the file that it writes, relative to the copy that it reads."""

    name: str
    arguments: list[str]
    output: str = ""


def main() -> int:
    """Run cases until the time is over and print the report; return 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="file for the report, as Markdown")
    options = parser.parse_args()
    import_everything()
    with tempfile.TemporaryDirectory() as folder:
        torture = Torture(Workspace(Path(folder)), random.Random(options.seed))
        torture.run_cases(options.minutes * 60)
    report = torture.make_report(f"{options.minutes:g} minutes, seed {options.seed}")
    print(report)
    if options.output:
        options.output.write_text(report, encoding="utf-8")
    return int(any(tally.failures for tally in torture.tallies.values()))


class Workspace:
    """Undamaged folders of data, a run, a model, an export and a report, and a copy to damage."""

    def __init__(self, root: Path, *, has_second: bool = True) -> None:
        """Write the folders, with `has_second` also folders of another seed to exchange files."""
        self.root = root
        self.undamaged = root / "undamaged"
        self.second = root / "second"
        self.src = root / "valid.src"
        self.tgt = root / "valid.tgt"
        self.preprocess = ["tokenizer.vocab_size=310", "num_threads=1", "shard_pairs=100"]
        self._write_text()
        seeds = {self.undamaged: 1}
        if has_second:
            seeds[self.second] = 2
        for folder, seed in seeds.items():
            self._run("preprocess", [*self.preprocess, f"data_dir={folder}/data", f"seed={seed}"])
            self._run("train", [*train_settings(folder, 30), f"seed={seed}"])
            self._run("average", [f"run_dir={folder}/run", "last=2", f"output={folder}/model"])
            self._run("export", [f"model_dir={folder}/model", f"output={folder}/export"])
            self._run("visualize", report_settings(folder))

    def _write_text(self) -> None:
        rng = random.Random(7)
        for split, num_lines in (("train", 300), ("valid", 20)):
            lines = [" ".join(rng.choices(WORDS, k=rng.randint(3, 9))) for _ in range(num_lines)]
            text = "\n".join(lines) + "\n"
            for side, content in (("src", text), ("tgt", text.upper())):
                path = self.root / f"{split}.{side}"
                path.write_text(content)
                self.preprocess.append(f"data.{split}.{side}={path}")

    def _run(self, name: str, arguments: list[str]) -> None:
        result = run(name, arguments)
        assert result.status == 0, result.errors

    def copy(self) -> Path:
        """Copy the undamaged folders, replacing the previous copy."""
        copy = self.root / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.undamaged, copy, symlinks=True)
        return copy

    def readers(self, copy: Path) -> dict[str, list[Command]]:
        """Return the commands that read each folder of the copy."""
        text = [f"input={self.src}", "num_threads=1"]
        data = f"data_dir={copy}/data"
        model = f"model_dir={copy}/model"
        run_dir = f"run_dir={copy}/run"
        out = f"output={copy}/out"
        evaluate = [model, data, "split=valid", "num_threads=1"]
        ctranslate2 = [f"model_dir={copy}/export", "backend=ctranslate2"]
        weights = "run/checkpoints/latest/model.safetensors"
        train = Command("train", [*train_settings(copy, 40), "seed=1"], weights)
        report = Command("visualize", report_settings(copy), "report.html")
        return {
            "model": [
                Command("translate", [model, *text, out], "out"),
                Command("export", [model, out, "max_positions=99"], "out/model.bin"),
            ],
            "export": [Command("translate", [*ctranslate2, *text, out], "out")],
            "run": [
                train,
                Command("average", [run_dir, "best=1", out], "out/model.safetensors"),
                Command("average", [run_dir, out], "out/model.safetensors"),
                Command("translate", [f"model_dir={copy}/run", *text, out], "out"),
                report,
                Command("visualize", ["what=run", run_dir, f"{out}.svg"], "out.svg"),
            ],
            "data": [
                train,
                Command("evaluate", evaluate),
                Command("visualize", ["what=data", data, f"{out}.html"], "out.html"),
                report,
            ],
        }

    def writers(self, copy: Path) -> dict[str, Command]:
        """Return a command for each folder or file of the copy that replaces it."""
        model = f"model_dir={copy}/model"
        average = [f"run_dir={copy}/run", "last=1", f"output={copy}/model"]
        export = [model, f"output={copy}/export", "max_positions=99"]
        preprocess = [*self.preprocess, f"data_dir={copy}/data", "max_length=20", "overwrite=true"]
        return {
            "model": Command("average", average),
            "export": Command("export", export),
            "data": Command("preprocess", preprocess),
            "run": Command("train", [*train_settings(copy, 40), "seed=1", "average_last=1"]),
            "report.html": Command("visualize", report_settings(copy)),
        }

    def arguments(self, name: str, copy: Path) -> list[str]:
        """Return valid arguments of a command."""
        model = [f"model_dir={copy}/model", "num_threads=1"]
        out = f"output={copy}/out"
        train = [f"data_dir={copy}/data", f"run_dir={copy}/out", "max_updates=4"]
        arguments = {
            "preprocess": [*self.preprocess, f"data_dir={copy}/out"],
            "train": [*TINY.split(), *train],
            "average": [f"run_dir={copy}/run", out],
            "export": [model[0], out],
            "translate": [*model, f"input={self.src}"],
            "distill": [*model, f"input={self.src}", out],
            "backtranslate": [*model, f"input={self.tgt}", out],
            "evaluate": [f"hypotheses={self.src}", f"references={self.tgt}"],
            "score": [*model, f"src={self.src}", f"tgt={self.tgt}"],
            "serve": [*model, "port=0"],
            "visualize": [*report_settings(copy), model[0]],
        }
        return arguments[name]


def train_settings(folder: Path, updates: int) -> list[str]:
    """Return the arguments to train in a folder of the workspace."""
    return [
        *TINY.split(),
        f"data_dir={folder}/data",
        f"run_dir={folder}/run",
        f"max_updates={updates}",
    ]


def report_settings(folder: Path) -> list[str]:
    """Return the arguments to write a report in a folder of the workspace."""
    paths = [f"run_dir={folder}/run", f"data_dir={folder}/data", f"output={folder}/report.html"]
    return ["what=report", *paths, "device=cpu", "num_threads=1"]


def run_reader(copy: Path, command: Command) -> Result:
    """Run a command. If it writes a file, the result has the content of this file as its output."""
    result = run(command.name, command.arguments)
    if result.status == 0 and command.output:
        result.output = (copy / command.output).read_bytes()
    return result


# --- all cases


class Torture:
    """Runs cases of all classes and counts their results."""

    def __init__(self, workspace: Workspace, rng: random.Random) -> None:
        self.workspace = workspace
        self.rng = rng
        self.tallies = {name: Tally() for name in (*DAMAGE_CLASSES, "kill", "setting")}
        self.kills = Kills(workspace)

    def run_cases(self, seconds: float) -> None:
        """Run cases of all classes in turn until the time is over, at least one of each class."""
        expected = self._run_all_readers()
        kills = repeat_shuffled(self.kills.cases(), self.rng)
        settings = repeat_shuffled(setting_cases(), self.rng)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or not self._has_every_class():
            for name in ("flip", "flip", "damage", "metadata"):
                folder, number = self.rng.choice(sorted(expected))
                self._damage_file(name, folder, number, expected[folder, number])
            for output, call in itertools.islice(kills, 2):
                self.kills.check(self.tallies["kill"], output, call)
            for name, key, value in itertools.islice(settings, 6):
                check_setting(self.tallies["setting"], self.workspace, name, key, value)
            self._print_progress()

    def _run_all_readers(self) -> dict[tuple[str, int], bytes]:
        """Return the output of each command that reads an undamaged folder.

        A key is the folder and the position of the command in its list of `readers`.
        """
        outputs = {}
        for folder, commands in self.workspace.readers(self.workspace.root / "copy").items():
            for number, command in enumerate(commands):
                result = run_reader(self.workspace.copy(), command)
                assert result.status == 0, result.errors
                outputs[folder, number] = result.output
        return outputs

    def _has_every_class(self) -> bool:
        return all(tally.num_cases for tally in self.tallies.values())

    def _damage_file(self, name: str, folder: str, number: int, expected: bytes) -> None:
        """Damage a random file of a folder, and run a command that reads the folder."""
        copy = self.workspace.copy()
        suffix = ".json" if name == "metadata" else ""
        paths = list_files(copy / folder, suffix) or [copy / "model/config.json"]
        path = self.rng.choice(paths)
        if name == "flip":
            is_changed = flip(path, self.rng)
        elif name == "damage":
            is_changed = damage(path, self.workspace.second / path.relative_to(copy), self.rng)
        else:
            is_changed = change_metadata(path, self.rng)
        if is_changed:
            command = self.workspace.readers(copy)[folder][number]
            check_reader(self.tallies[name], copy, path, command, expected)

    def _print_progress(self) -> None:
        counts = []
        failures = []
        for name, tally in self.tallies.items():
            counts.append(f"{name} {tally.num_cases} ({len(tally.failures)})")
            failures += tally.failures[-1:]
        print(", ".join(counts), " ".join(failures), file=sys.stderr)

    def make_report(self, options_text: str) -> str:
        """Return the counts of all classes and the failures as Markdown."""
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        rows = []
        failures: list[str] = []
        for name, tally in self.tallies.items():
            counts = f"{tally.num_cases} | {tally.refused} | {tally.harmless} | {tally.repeated}"
            rows.append(f"| {name} | {counts} | {len(tally.failures)} |")
            failures += tally.failures
        report = REPORT.format(
            about=f"{time.strftime('%Y-%m-%d')}, nmt {nmt.__version__} ({commit}), {options_text}.",
            rows="\n".join(rows),
            calls=self.kills.describe(),
        )
        for failure in sorted(set(failures)):
            report += f"\n- {failure}"
        return report


def repeat_shuffled(cases: list[Any], rng: random.Random) -> Iterator[Any]:
    """Yield all cases in random order, endlessly, each time in another order."""
    while True:
        yield from rng.sample(cases, len(cases))


def list_files(folder: Path, suffix: str = "") -> list[Path]:
    """Return all files below a folder whose names end with `suffix`, without links, sorted."""
    paths = []
    for path in folder.rglob(f"*{suffix}"):
        if path.is_file() and not path.is_symlink():
            paths.append(path)
    return sorted(paths)


# --- damage


def check_reader(tally: Tally, copy: Path, path: Path, command: Command, expected: bytes) -> None:
    """Run a command after damage to `path`, and count the result."""
    result = run_reader(copy, command)
    if result.status == -signal.SIGALRM:
        tally.repeated += 1
        result = run_reader(copy, command)
    is_success = result.status == 0 and not result.has_traceback
    if result.is_refusal:
        tally.refused += 1
    elif is_success and result.output == expected:
        tally.harmless += 1
    elif is_success and path.name in result.errors:
        tally.refused += 1  # a warning says that a checkpoint or a line was skipped
    else:
        tally.failures.append(
            f"{path.relative_to(copy)}, nmt-{command.name} {' '.join(command.arguments)}: "
            f"status {result.status}, {result.error_tail}"
        )


def flip(path: Path, rng: random.Random) -> bool:
    """Flip one bit of a file; return whether the file has changed."""
    content = bytearray(path.read_bytes())
    if not content:
        return False
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return True


def damage(path: Path, replacement: Path, rng: random.Random) -> bool:
    """Truncate, empty, remove or replace a file, or zero a sector; return whether it changed."""
    content = path.read_bytes()
    action = rng.choice(["truncate", "empty", "zero a sector", "remove", "replace"])
    position = rng.randrange(len(content) or 1)
    if action == "truncate":
        path.write_bytes(content[:position])
    elif action == "empty":
        path.write_bytes(b"")
    elif action == "zero a sector":
        start = position // 512 * 512
        zeros = bytes(min(512, len(content) - start))
        path.write_bytes(content[:start] + zeros + content[start + len(zeros) :])
    elif action == "remove":
        path.unlink()
        return True
    elif replacement.is_file():
        shutil.copy(replacement, path)
    return path.read_bytes() != content


def change_metadata(path: Path, rng: random.Random) -> bool:
    """Replace a value of a JSON file and update its manifest; return whether the file changed."""
    if path.suffix != ".json" or path.name in (MANIFEST, "report.json") or "trackers" in path.parts:
        return False
    content = json.loads(path.read_text())
    node = content
    while True:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = rng.choice(keys)
        has_children = isinstance(node[key], (dict, list)) and len(node[key]) > 0
        if not has_children or rng.random() < 0.2:
            break
        node = node[key]
    value = rng.choice(METADATA_VALUES)
    is_same_type = type(value) is type(node[key])
    if is_same_type and isinstance(value, (int, float, str)):
        return False  # another valid setting, such as beam_size, is no damage
    node[key] = value
    path.write_text(json.dumps(content))
    write_manifest(path.parent)
    return True


# --- kills


class Kills:
    """Kills commands that replace a file or folder at each call that changes the file system."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        # keyed by the name of the file or folder that a command replaces
        self.num_calls: dict[str, int] = {}
        self.killed_calls: dict[str, set[int]] = {}
        self.old_contents: dict[str, bytes] = {}
        self.new_contents: dict[str, bytes] = {}
        (workspace.undamaged / "report.html").write_text("another report")
        for output, command in workspace.writers(workspace.root / "copy").items():
            copy = workspace.copy()
            self.old_contents[output] = content_of(copy / output)
            status, self.num_calls[output] = run_and_kill(command.name, command.arguments, 0)
            assert status == 0
            self.new_contents[output] = content_of(copy / output)
            assert self.old_contents[output] != self.new_contents[output], output
            self.killed_calls[output] = set()

    def cases(self) -> list[tuple[str, int]]:
        """Return all pairs of a file or folder and the number of a call, from 1."""
        cases = []
        for output, num_calls in self.num_calls.items():
            cases += [(output, call) for call in range(1, num_calls + 1)]
        return cases

    def describe(self) -> str:
        """Say for each command at how many of its calls it was killed."""
        counts = []
        for output, command in self.workspace.writers(self.workspace.undamaged).items():
            num_killed = len(self.killed_calls[output])
            counts.append(f"{command.name} {num_killed} of {self.num_calls[output]}")
        return ", ".join(counts)

    def check(self, tally: Tally, output: str, call: int) -> None:
        """Kill the command that replaces `output` at a call, and count the result."""
        self.killed_calls[output].add(call)
        failure = self.find_failure(output, call)
        if failure:
            tally.failures.append(failure)
        else:
            tally.harmless += 1

    def find_failure(self, output: str, call: int) -> str:
        """Kill the command at a call, check `output`, and run the command again.

        Returns a description of the failure, or "".
        """
        copy = self.workspace.copy()
        command = self.workspace.writers(copy)[output]
        case = f"{command.name}, call {call}"
        paths_before = set(copy.rglob("*"))
        run_and_kill(command.name, command.arguments, call)
        try:
            self.check_complete(copy, output)
        except (NmtError, AssertionError, OSError) as error:
            return f"{case}: {error!r}"
        result = run(command.name, command.arguments)
        paths = set(copy.rglob("*"))
        leftovers = {path for path in paths if TEMPORARY_NAME.search(path.name)}
        if output != "run":  # only training may leave new files: its checkpoints
            leftovers |= paths - paths_before
        if result.status != 0 or leftovers:
            names = sorted(str(path.relative_to(copy)) for path in leftovers)[:3]
            return f"{case}, again: status {result.status}, {names}, {result.error_tail!r}"
        if content_of(copy / output) != self.new_contents[output]:
            return f"{case}, again: the result differs"
        return ""

    def check_complete(self, copy: Path, output: str) -> None:
        """Raise unless a file or folder is complete, and equal to the old or the new one."""
        path = copy / output
        is_old_or_new = content_of(path) in (self.old_contents[output], self.new_contents[output])
        assert is_old_or_new, "neither the old nor the new one"
        if output == "run":
            for folder in list_checkpoints(path):
                verify_checksums(folder)
            assert (path / "checkpoints/best" / MANIFEST).is_file(), "best leads nowhere"
            read_metrics_log(path / "metrics.jsonl")
            read_run_config(path)
        elif path.is_dir():
            verify_checksums(path)


def content_of(path: Path) -> bytes:
    """Return the bytes of a file, or of the manifest of a folder or of a run's last checkpoint."""
    if path.is_file():
        return path.read_bytes()
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints/latest"
    return (path / MANIFEST).read_bytes()


# --- settings


def setting_cases() -> list[tuple[str, str, str]]:
    """Return all triples of a command, a numeric setting and an extreme number."""
    cases = []
    for name, command in COMMANDS.items():
        for setting in command.accepted_settings:
            types = {setting.type_hint, *typing.get_args(setting.type_hint)}
            if types & {int, float} and name != "import":  # there is nothing to import here
                cases += [(name, setting.key, value) for value in EXTREME_NUMBERS]
    return cases


def check_setting(tally: Tally, workspace: Workspace, name: str, key: str, value: str) -> None:
    """Run a command with an extreme number, and count the result."""
    copy = workspace.copy()
    key = key.replace("NAME", "a")  # data.corpora.NAME.weight
    arguments = workspace.arguments(name, copy)
    if "corpora" in key:
        for side in ("src", "tgt"):
            arguments.append(f"data.corpora.a.{side}={workspace.root}/train.{side}")
    arguments = [argument for argument in arguments if not argument.startswith(f"{key}=")]
    arguments.append(f"{key}={value}")
    stop_after_seconds = SERVER_SECONDS if name == "serve" else 0.0
    result = run(name, arguments, stop_after_seconds=stop_after_seconds)
    if result.status == -signal.SIGALRM:
        tally.repeated += 1
        shutil.rmtree(copy / "out", ignore_errors=True)
        result = run(name, arguments, stop_after_seconds=stop_after_seconds)
    expected_statuses = (0, 130, -signal.SIGTERM) if name == "serve" else (0,)
    if result.is_refusal:
        tally.refused += 1
    elif result.status in expected_statuses and not result.has_traceback:
        tally.harmless += 1
    else:
        tally.failures.append(f"nmt-{name} {key}={value}: {result.status}, {result.error_tail}")


if __name__ == "__main__":
    sys.exit(main())
