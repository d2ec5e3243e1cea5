"""Mutation tests: break the code in one place at a time, and check that a test fails.

    python scripts/mutate.py                        all breaks of scripts/mutations/*.yaml
    python scripts/mutate.py --sample 150 --seed 1  150 of them, drawn at random
    python scripts/mutate.py --only bucket-bound    the named ones
    python scripts/mutate.py --named --slow         only the tests named for each, with slow ones
    python scripts/mutate.py --list                 check that each break can be made

Each break is made in a copy of the repository. The test files that the break names run first, the
rest of the default suite only if they pass, slow tests only with --slow. If a test fails without
a break, the script ends. Results are saved in build/mutations.json, and a second run continues; a
break that has changed is made again. The exit status is 1 if a break survived.
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
from collections import Counter
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
    """A break: `old`, which occurs once in `file`, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # test files that should fail, without tests/test_ and .py, separated by spaces

    @property
    def test_files(self) -> list[str]:
        """The paths of these test files."""
        return [f"tests/test_{name}.py" for name in self.tests.split()]

    def problem(self, root: Path) -> str:
        """Return why the break cannot be made below `root`, or ""."""
        path = root / self.file
        if not path.is_file():
            return "no such file"
        for test in self.test_files:
            if not (root / test).is_file():
                return f"no {test}"
        num_matches = path.read_text(encoding="utf-8").count(self.old)
        return "" if num_matches == 1 else f"text found {num_matches} times"


def main() -> int:
    """Make the requested breaks that have no result yet, and print the results of all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the breaks and stop")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="make only these, even if they have results"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="draw N breaks at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of --sample (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="breaks at a time (default 1)")
    parser.add_argument(
        "--timeout", type=float, default=600, help="time limit of a run of tests in seconds"
    )
    parser.add_argument(
        "--named", action="store_true", help="run only the test files that a break names"
    )
    parser.add_argument("--slow", action="store_true", help="run slow tests too")
    parser.add_argument("--results", type=Path, default=ROOT / "build/mutations.json")
    options = parser.parse_args()
    breaks = read_breaks()
    if options.only:
        unknown_names = set(options.only) - set(breaks)
        if unknown_names:
            parser.error(f"no such break: {', '.join(sorted(unknown_names))}")
        breaks = {name: breaks[name] for name in options.only}
    if options.sample is not None:
        names = random.Random(options.seed).sample(list(breaks), options.sample)
        breaks = {name: breaks[name] for name in names}
    if options.list:
        return list_breaks(breaks)
    results = {}
    if options.results.is_file():
        results = json.loads(options.results.read_text(encoding="utf-8"))
    for name in set(results) & set(breaks):
        if options.only or results[name]["break"] != asdict(breaks[name]):
            del results[name]
    new_breaks = [candidate for name, candidate in breaks.items() if name not in results]
    if new_breaks:
        run_all(new_breaks, results, options)
    return report(breaks, results)


def read_breaks() -> dict[str, Break]:
    """Read the breaks by name. A YAML file has file names, names of breaks, and their fields."""
    breaks: dict[str, Break] = {}
    for path in sorted(MUTATIONS.glob("*.yaml")):
        files = yaml.safe_load(path.read_text(encoding="utf-8"))
        for file, fields_by_name in files.items():
            for name, fields in fields_by_name.items():
                assert name not in breaks, f"two breaks are named {name}"
                breaks[name] = Break(name=name, file=file, **fields)
    return breaks


def list_breaks(breaks: dict[str, Break]) -> int:
    """Print all breaks; return 1 if one cannot be made."""
    rows = []
    for name, candidate in breaks.items():
        rows.append((name, candidate.file, candidate.tests, candidate.problem(ROOT) or "ready"))
    print(tabulate(rows, headers=("break", "file", "tests", "state")))
    return int(any(row[3] != "ready" for row in rows))


def run_all(breaks: list[Break], results: dict[str, Any], options: argparse.Namespace) -> None:
    """Make the breaks in parallel, each job in its copy of the repository; save each result."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for number in range(options.jobs):
            copies.put(copy_repository(Path(folder) / str(number)))
        check_tests(Path(folder) / "0", breaks, options)

        def make(candidate: Break) -> dict[str, Any]:
            copy = copies.get()
            try:
                return make_break(candidate, copy, options)
            finally:
                copies.put(copy)

        for candidate, result in zip(breaks, pool.map(make, breaks), strict=True):
            results[candidate.name] = {"break": asdict(candidate), **result}
            text = json.dumps(results, indent=1, ensure_ascii=False)
            options.results.write_text(text + "\n", encoding="utf-8")
            message = f"{candidate.name}: {result['state']} {result['by']}"
            print(message, file=sys.stderr, flush=True)


def copy_repository(copy: Path) -> Path:
    """Copy all files that git does not ignore; `nmt` and its configs are imported from the copy."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / "nmt/configs").symlink_to("../configs")
    return copy


def check_tests(copy: Path, breaks: list[Break], options: argparse.Namespace) -> None:
    """Run the test files that breaks name; exit if one fails without a break."""
    test_files: set[str] = set()
    for candidate in breaks:
        test_files.update(file for file in candidate.test_files if (copy / file).is_file())
    failed_test = run_tests(
        copy, sorted(test_files), slow=options.slow, timeout=len(test_files) * options.timeout
    )
    if failed_test:
        sys.exit(f"{failed_test} fails without a break")


def make_break(candidate: Break, copy: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Break a copy of the repository, run the tests, and restore the copy.

    In the result, `state` is "caught", "caught late" by a test file that the break does not name,
    "survived", or "stale" if the break cannot be made. `by` is the test that failed, or the reason
    why the break is stale.
    """
    problem = candidate.problem(copy)
    if problem:
        return {"state": "stale", "by": problem, "seconds": 0.0}
    start_seconds = time.monotonic()
    path = copy / candidate.file
    text = path.read_text(encoding="utf-8")
    times = path.stat()
    arguments = {"slow": options.slow, "timeout": options.timeout}
    try:
        path.write_text(text.replace(candidate.old, candidate.new), encoding="utf-8")
        failed_test = run_tests(copy, candidate.test_files, **arguments)
        state = "caught" if failed_test else "survived"
        if not failed_test and not options.named:
            other_files = [f"--ignore={file}" for file in candidate.test_files]
            failed_test = run_tests(copy, other_files, **arguments)
            state = "caught late" if failed_test else "survived"
    finally:
        path.write_text(text, encoding="utf-8")
        # Python compares time and size of a file to decide whether its compiled code is valid
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    seconds = round(time.monotonic() - start_seconds, 1)
    return {"state": state, "by": failed_test, "seconds": seconds}


def run_tests(copy: Path, arguments: list[str], *, slow: bool, timeout: float) -> str:
    """Run pytest; return the first test that fails, or "" if all pass."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [*PYTEST, *arguments]
    if slow:
        command += ["-m", "not long"]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # the whole session: the tests and their child processes
        process.communicate()
        return "time-out"
    if process.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):  # all tests may be slow
        return ""
    failure = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return failure[1] if failure else f"exit status {process.returncode}"


def report(breaks: dict[str, Break], results: dict[str, Any]) -> int:
    """Print the results and the number of breaks of each state; return 1 if not all are caught."""
    rows = []
    num_breaks: Counter[str] = Counter()
    for name, candidate in breaks.items():
        result = results[name]
        rows.append((name, candidate.file, result["state"], result["by"], result["seconds"]))
        num_breaks[result["state"]] += 1
    print(tabulate(rows, headers=("break", "file", "state", "by", "seconds")))
    print("\n" + ", ".join(f"{count} {state}" for state, count in sorted(num_breaks.items())))
    return int(num_breaks["survived"] + num_breaks["stale"] > 0)


if __name__ == "__main__":
    sys.exit(main())
