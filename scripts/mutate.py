"""Break the code a little, one place at a time, and see whether the tests notice.

    python scripts/mutate.py                        all breaks of scripts/mutations/*.yaml
    python scripts/mutate.py --sample 150 --seed 1  some of them, drawn at random
    python scripts/mutate.py --only bucket-bound    one of them, or several
    python scripts/mutate.py --named --slow         only the tests named for each, slow ones too
    python scripts/mutate.py --list                 names, and whether the text is still there

Each break is made in a copy of the tree. The tests that should notice run first, the rest of the
default suite only if those pass, and slow tests only with --slow. A test that fails without a break
ends the script. Results are saved in build/mutations.json, so that a second run continues; a break
whose text has changed is made again. Exit status 1: some break survived.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
MUTATIONS = Path(__file__).parent / "mutations"
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]


@dataclass(frozen=True)
class Break:
    """A place to break: `old`, which occurs once in `file`, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # names of test files that should notice, without tests/test_ and .py

    @property
    def test_files(self) -> list[str]:
        """The tests that run first."""
        return [f"tests/test_{name}.py" for name in self.tests.split()]

    def problem(self, root: Path) -> str:
        """Say why the break cannot be made, or return ""."""
        path = root / self.file
        if not path.is_file():
            return "no such file"
        for test in self.test_files:
            if not (root / test).is_file():
                return f"no {test}"
        num_matches = path.read_text(encoding="utf-8").count(self.old)
        return "" if num_matches == 1 else f"text found {num_matches} times"


def main() -> int:
    """Make the breaks that are not done yet; print a table of all that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the breaks and stop")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="make only these, again if they have results"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="draw N of them at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of --sample (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="breaks at a time (default 1)")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds a run of tests may take"
    )
    parser.add_argument(
        "--named", action="store_true", help="leave out the rest of the suite when these pass"
    )
    parser.add_argument("--slow", action="store_true", help="run slow tests too")
    parser.add_argument("--results", type=Path, default=ROOT / "build/mutations.json")
    args = parser.parse_args()
    breaks = read_breaks()
    assert len({candidate.name for candidate in breaks}) == len(breaks), "two breaks have one name"
    if args.only:
        unknown = set(args.only) - {candidate.name for candidate in breaks}
        if unknown:
            parser.error(f"no such break: {', '.join(sorted(unknown))}")
        breaks = [candidate for candidate in breaks if candidate.name in args.only]
    if args.sample is not None:
        breaks = random.Random(args.seed).sample(breaks, args.sample)
    if args.list:
        rows = [(b.name, b.file, b.tests, b.problem(ROOT) or "ready") for b in breaks]
        print(tabulate(rows, headers=("break", "file", "tests", "state")))
        return int(any(row[3] != "ready" for row in rows))
    results = read_results(args.results, breaks, redo=bool(args.only))
    run_all([candidate for candidate in breaks if candidate.name not in results], results, args)
    return report(breaks, results)


def read_breaks() -> list[Break]:
    """Read the table of breaks: one file for each package, then files, names and the texts."""
    breaks = []
    for path in sorted(MUTATIONS.glob("*.yaml")):
        files = yaml.safe_load(path.read_text(encoding="utf-8"))
        for file, entries in files.items():
            for name, entry in entries.items():
                breaks.append(Break(name=name, file=file, **entry))
    return breaks


def read_results(path: Path, breaks: list[Break], *, redo: bool) -> dict[str, Any]:
    """Return the earlier results that still hold, by name."""
    if not path.is_file():
        return {}
    current = {candidate.name: asdict(candidate) for candidate in breaks}
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    reusable = {} if redo else current
    return {
        name: result
        for name, result in results.items()
        if (name not in current) or (name in reusable and result["break"] == current[name])
    }


def run_all(breaks: list[Break], results: dict[str, Any], args: argparse.Namespace) -> None:
    """Make the breaks in one copy of the tree per job; save the results after each."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        for number in range(args.jobs if breaks else 0):
            copies.put(copy_tree(Path(folder) / str(number)))
        if breaks:
            tree = copies.get()
            tests = {
                test
                for candidate in breaks
                for test in candidate.test_files
                if (tree / test).is_file()
            }
            timeout = len(tests) * args.timeout
            if by := run_tests(tree, [*marks(args), *sorted(tests)], timeout):
                sys.exit(f"{by} fails without a break")
            copies.put(tree)

        def make(candidate: Break) -> tuple[Break, dict[str, Any]]:
            tree = copies.get()
            try:
                return candidate, make_break(candidate, tree, args)
            finally:
                copies.put(tree)

        for candidate, result in pool.map(make, breaks):
            results[candidate.name] = {"break": asdict(candidate), **result}
            text = json.dumps(results, indent=1, ensure_ascii=False)
            args.results.write_text(text + "\n", encoding="utf-8")
            print(
                f"{candidate.name}: {result['state']} {result['by']}", file=sys.stderr, flush=True
            )


def copy_tree(tree: Path) -> Path:
    """Copy what git tracks or would track; `nmt` and its configs are imported from the copy."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    (tree / "nmt/configs").symlink_to("../configs")
    return tree


def make_break(candidate: Break, tree: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Break a copy of the tree, run its tests, and restore it."""
    started = time.monotonic()
    problem = candidate.problem(tree)
    state = "stale"
    by = problem
    seconds = 0.0
    if not problem:
        path = tree / candidate.file
        text = path.read_text(encoding="utf-8")
        times = path.stat()
        try:
            path.write_text(text.replace(candidate.old, candidate.new), encoding="utf-8")
            by = run_tests(tree, [*marks(args), *candidate.test_files], args.timeout)
            state = "caught" if by else "survived"
            if not by and not args.named:
                ignored = [f"--ignore={test}" for test in candidate.test_files]
                by = run_tests(tree, marks(args) + ignored, args.timeout)
                state = "caught late" if by else state
        finally:
            path.write_text(text, encoding="utf-8")
            # Python compares time and size of a file to decide whether its compiled code is valid
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        seconds = round(time.monotonic() - started, 1)
    return {"state": state, "by": by, "seconds": seconds}


def marks(args: argparse.Namespace) -> list[str]:
    """Return the words that choose tests by their marks."""
    return ["-m", "not long"] if args.slow else []


def run_tests(tree: Path, arguments: list[str], timeout: float) -> str:
    """Run tests; return the first that fails, or "" when all pass."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [*PYTEST, *arguments]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # its own session: the tests and their child processes
        process.communicate()
        return "time-out"
    if process.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):  # or all of them are slow
        return ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return str(failed[0]) if failed else f"exit status {process.returncode}"


def report(breaks: list[Break], results: dict[str, Any]) -> int:
    """Print all results and their counts."""
    rows = [
        (b.name, b.file, *(results[b.name][k] for k in ("state", "by", "seconds"))) for b in breaks
    ]
    print(tabulate(rows, headers=("break", "file", "state", "by", "seconds")))
    states = [row[2] for row in rows]
    print("\n" + ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))))
    return int("survived" in states or "stale" in states)


if __name__ == "__main__":
    sys.exit(main())
