"""The installed console scripts: there, quick, quiet in a closed pipe."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from nmt.cli.commands import COMMANDS

SCRIPTS = Path(sys.executable).parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPTS / arguments[0], *arguments[1:]], capture_output=True, text=True, check=False
    )


def test_every_command_has_its_script() -> None:
    names = {point.name for point in entry_points(group="console_scripts") if point.name != "nmt"}
    assert {f"nmt-{name}" for name in COMMANDS} <= names


def test_nmt_alone_lists_the_commands() -> None:
    result = run("nmt")
    assert result.returncode == 0
    assert all(f"  {name}" in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_less_than_a_second_and_is_the_same_by_both_names(name: str) -> None:
    start_seconds = time.perf_counter()
    one = run(f"nmt-{name}", "--help")
    assert time.perf_counter() - start_seconds < 1
    assert one.returncode == 0
    assert one.stdout == run("nmt", name, "--help").stdout


def test_hydra_shows_the_composed_config() -> None:
    result = run("nmt-train", "+model=big", "--cfg", "job")
    assert result.returncode == 0
    assert "d_model: 1024" in result.stdout


def test_an_unknown_command_names_the_nearest() -> None:
    result = run("nmt", "trian")
    assert result.returncode == 2
    assert result.stderr == "nmt: no command trian; did you mean train or translate?\n"


def test_importing_nmt_loads_no_torch() -> None:
    code = "import sys, nmt, nmt.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_garbage_collection_goes_over_nothing_that_a_command_imports() -> None:
    code = (
        "import gc, sys; from nmt.cli.commands import COMMANDS; from nmt.cli.main import main;"
        "status = main(COMMANDS['translate'], ['model_dir=nowhere']);"
        "print(status, gc.isenabled(), len(gc.get_objects()) < 50_000, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout.split() == [b"2", b"True", b"True", b"True"]


@pytest.mark.parametrize("arguments", [["nmt"], ["nmt-train", "--help"]])
def test_a_closed_pipe_is_no_error(arguments: list[str]) -> None:
    with subprocess.Popen(
        [SCRIPTS / arguments[0], *arguments[1:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
