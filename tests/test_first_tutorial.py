"""docs/tutorials/first-model.md, typed word for word, ends with a model and a served page.

Only `max_updates` is added to the command of training, so that the test is short; the test marked
long leaves it out. The output of each command is compared with the one that the page shows:
numbers may differ, except for the translations and the score of the long test.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pages import ROOT, fenced_blocks, shell_lines
from ranks import find_free_port

PAGE = ROOT / "docs/tutorials/first-model.md"
NUM_UPDATES = 30
PAGE_PORT = "8321"  # of the server; the test takes a free one
LEFT_OUT = "..."
_TIME = re.compile(r"^\d\d:\d\d:\d\d ")  # of a line of the log
_NUMBER = re.compile(r"\d[\d,.:]*")
_BARS = re.compile(r"[▁▂▃▄▅▆▇█][▁▂▃▄▅▆▇█ ]*")


@dataclass(frozen=True)
class Step:
    """A block of commands, and the output that the page shows after it."""

    commands: list[str]
    output_lines: list[str]  # LEFT_OUT is in place of any number of lines


def read_steps() -> list[Step]:
    """Return the indented blocks of the page, each with the block of text that follows it."""
    steps: list[Step] = []
    is_shown = False
    was_command = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        is_command = line.startswith("    ") and not is_shown
        if line.startswith("```"):
            is_shown = not is_shown
        elif is_shown:
            steps[-1].output_lines.append(line)
        elif is_command:
            if not was_command:
                steps.append(Step(commands=[], output_lines=[]))
            steps[-1].commands.append(line.strip())
        was_command = is_command
    return steps


def as_pattern(line: str) -> str:
    """Return a line without its time, with signs in place of numbers, bars and spaces.

    The page shows float32, but some CPUs train in bfloat16.
    """
    line = line.replace("bfloat16", "float32")
    line = _BARS.sub("▁", _TIME.sub("", line))
    return re.sub(r"[\s-]+", " ", _NUMBER.sub("0", line)).strip()


def assert_shown(step: Step, output: str) -> None:
    """Check that each shown line is in the output, whose two streams may mix in any order."""
    lines = {as_pattern(line) for line in output.splitlines()}
    for line in step.output_lines:
        is_shown = line.strip() in ("", LEFT_OUT) or as_pattern(line) in lines
        assert is_shown, f"{step.commands}: {line!r} is not in:\n{output}"


def run(command: str, environment: dict[str, str]) -> str:
    """Run a command as a shell does; return its output on stdout and stderr."""
    result = subprocess.run(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An empty folder as the current one, with the commands of nmt on the PATH."""
    monkeypatch.chdir(tmp_path)
    scripts = Path(sys.executable).parent
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}


def serve(command: str, environment: dict[str, str]) -> Iterator[str]:
    """Run the server until the generator is closed; yield the address of its page."""
    [port] = re.findall(r"port=(\d+)", command)
    url = f"http://127.0.0.1:{port}/"
    server = subprocess.Popen(command.split(), env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(url, timeout=60).close()
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(300)


@pytest.mark.parametrize(
    "is_whole",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.long)],
)
def test_the_first_tutorial_ends_with_a_model_and_a_served_page(
    environment: dict[str, str], is_whole: bool
) -> None:
    port = find_free_port()
    servers = []
    for step in read_steps():
        output = ""
        for page_command in step.commands:
            command = page_command.replace(PAGE_PORT, port)
            if command.startswith(("make ", "git ", "pip ", "source ")):
                continue  # the environment of the test is installed
            if command.startswith("nmt-train") and not is_whole:
                command += f" max_updates={NUM_UPDATES} checkpoint_every_updates=5"
            if command.startswith("nmt-serve"):
                servers.append(serve(command, environment))
                url = next(servers[-1])
                with urllib.request.urlopen(url) as page:
                    assert "<html" in page.read().decode()
                continue
            output += run(command, environment)
        is_translation = "translate" in step.commands[-1] or "BLEU" in "".join(step.output_lines)
        if is_whole or not is_translation:
            assert_shown(step, output)
        if is_whole and is_translation:
            assert_same_figures(step, output)
    assert servers
    for server in servers:
        server.close()
    assert Path("runs/default/average/model.safetensors").is_file()
    if is_whole:
        follow_second_tutorial(environment)


def follow_second_tutorial(environment: dict[str, str]) -> None:
    """Run the commands and the Python of the page on attention with the model of the first one.

    The trained model has the target pieces of the page; where they attend may differ.
    """
    page = ROOT / "docs/tutorials/attention.md"
    for line in shell_lines(page):
        run(line, environment)
    for name in ("boxes.png", "steps.png", "attention.html", "decoding.html"):
        assert Path(name).stat().st_size > 10_000, name
    text = page.read_text(encoding="utf-8")
    [block] = fenced_blocks(text, "python")
    [expected_output] = fenced_blocks(text, "text")
    Path("attention_weights.py").write_text(block, encoding="utf-8")
    output = run("python attention_weights.py", environment)
    expected_lines = expected_output.splitlines()
    lines = [line.split() for line in output.splitlines()[-len(expected_lines) :]]
    assert all(len(line) == 2 for line in lines), output
    assert [line[0] for line in lines] == [line.split()[0] for line in expected_lines]


def assert_same_figures(step: Step, output: str) -> None:
    """Check that scores are at most 5 away from the shown ones, which another CPU may change."""
    for shown_line in step.output_lines:
        if shown_line.startswith("BLEU"):
            [line] = [line for line in output.splitlines() if line.startswith("BLEU")]
            assert abs(first_number(line) - first_number(shown_line)) < 5


def first_number(line: str) -> float:
    """Return the first number of a line, such as 27.5 of "BLEU 27.5 63.1"."""
    return float(_NUMBER.findall(line)[0])
