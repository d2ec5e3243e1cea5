"""nmt-translate continues after it was killed or the disk was full."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tiny import sentences
from translating import run_and_die, run_in_child, translate, write_lines, write_model

from nmt.translate import job

pytestmark = pytest.mark.slow

LINES = [line if i % 17 else "" for i, line in enumerate(sentences(120, seed=5))]
OPTIONS = ["window_lines=20", "format=json", "n_best=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a text, its translation by one process, and files of a killed process."""
    folder = tmp_path_factory.mktemp("resume")
    write_model(folder / "model")
    write_model(folder / "other", seed=3)
    write_lines(folder / "in", LINES)
    assert translate(*model_and_input(folder), f"output={folder / 'uninterrupted'}", *OPTIONS) == 0
    arguments = [*model_and_input(folder), f"output={folder / 'out'}", *OPTIONS]
    log = folder / "log"
    assert run_in_child(log, run_and_die, "append", 3, translate, *arguments) == -signal.SIGKILL
    with (folder / "out.partial").open("ab") as stream:
        stream.write(b"lines that came between the last state and the kill\nand a ha")
    assert lines_done(folder / "out.partial.json") == 40
    assert not (folder / "out").exists()
    return folder


def model_and_input(folder: Path) -> list[str]:
    return [f"model_dir={folder / 'model'}", f"input={folder / 'in'}"]


def lines_done(state: Path) -> int:
    return int(json.loads(state.read_text(encoding="utf-8"))["lines"])


def copy_killed_job(folder: Path, destination: Path) -> int:
    """Copy the files of the killed process; return the number of lines that it had done."""
    for name in ("out.partial", "out.partial.json"):
        shutil.copy(folder / name, destination)
    return lines_done(destination / "out.partial.json")


def test_a_job_killed_several_times_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    output_dir = tmp_path / "output"
    output_dir.mkdir()
    arguments = [*model_and_input(folder), f"output={output_dir / 'out'}", *OPTIONS]
    log = tmp_path / "log"
    for call, number in (("_save", 1), ("sync", 3), ("append", 2), ("write_json", 2)):
        assert (
            run_in_child(log, run_and_die, call, number, translate, *arguments) == -signal.SIGKILL
        )
    assert run_in_child(log, translate, *arguments) == 0
    assert "resuming after line 80" in log.read_text(encoding="utf-8")
    assert (output_dir / "out").read_bytes() == (folder / "uninterrupted").read_bytes()
    assert [path.name for path in output_dir.iterdir()] == ["out"]


def test_several_processes_resume_a_job_of_one_and_write_the_same_bytes(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = copy_killed_job(folder, tmp_path)
    arguments = [*model_and_input(folder), *OPTIONS, "devices=2"]
    assert translate(*arguments, f"output={tmp_path / 'out'}") == 0
    assert f"resuming after line {lines}\n" in capfd.readouterr().err
    assert (tmp_path / "out").read_bytes() == (folder / "uninterrupted").read_bytes()
    assert translate(*model_and_input(folder), "devices=2", "scheduler=tcp://localhost:1") == 2
    assert "devices=2: does not work with scheduler" in capfd.readouterr().err


def test_a_killed_job_continues_also_with_more_lines_and_another_batch_size(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = copy_killed_job(folder, tmp_path)
    (tmp_path / "model").symlink_to(folder / "model")
    write_lines(tmp_path / "in", [*LINES, "the house"])
    arguments = [
        *model_and_input(tmp_path),
        f"output={tmp_path / 'out'}",
        *OPTIONS,
        "max_tokens=500",
    ]
    assert translate(*arguments) == 0
    assert f"resuming after line {lines}\n" in capfd.readouterr().err
    output = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    expected = (folder / "uninterrupted").read_bytes().splitlines(keepends=True)
    assert output[:lines] == expected[:lines]
    assert list(map(first_text, output[:-1])) == list(map(first_text, expected))


def first_text(line: bytes) -> str:
    return str(json.loads(line)["hypotheses"][0]["text"])


def test_a_job_with_other_settings_model_or_input_starts_over_and_says_so(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "changed", ["something else", *LINES[1:50]])
    for change, message in (
        ("beam_size=3", "cannot be continued (other beam_size)"),
        ("max_source_length=20", "cannot be continued (other max_source_length)"),
        (f"model_dir={folder / 'other'}", "cannot be continued (other model)"),
        (f"input={tmp_path / 'changed'}", "belongs to another input"),
    ):
        copy_killed_job(folder, tmp_path)
        key = change.split("=")[0]
        arguments = [
            *(a for a in model_and_input(folder) if a.split("=")[0] != key),
            *OPTIONS,
            change,
        ]
        assert translate(*arguments, f"output={tmp_path / 'out'}") == 0
        log = capfd.readouterr().err
        assert f"out.partial {message}; starting over" in log, change
        lost_lines = re.search(r"starting over without its (\d+) lines\n", log)
        if message != "belongs to another input":
            assert lost_lines is not None, change
            assert int(lost_lines[1]) > 0, change
        assert translate(*arguments, f"output={tmp_path / 'new'}") == 0
        assert (tmp_path / "out").read_bytes() == (tmp_path / "new").read_bytes(), change
        (tmp_path / "new").unlink()
    assert translate(*model_and_input(folder), f"output={tmp_path / 'out'}") == 0
    assert f"{tmp_path / 'out'} exists; the complete translation replaces" in capfd.readouterr().err


def test_a_job_whose_files_are_damaged_starts_over_and_says_so(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state_file = tmp_path / "out.partial.json"

    def change_version() -> None:
        state = json.loads(state_file.read_text(encoding="utf-8"))
        state_file.write_text(json.dumps(state | {"format_version": -1}), encoding="utf-8")

    damages: dict[str, Callable[[], object]] = {
        "its state is damaged": lambda: state_file.write_text("{", encoding="utf-8"),
        "it is too short": lambda: os.truncate(tmp_path / "out.partial", 3),
        "written by another version of nmt": change_version,
    }
    for problem, damage in damages.items():
        copy_killed_job(folder, tmp_path)
        damage()
        arguments = [*model_and_input(folder), *OPTIONS]
        assert translate(*arguments, f"output={tmp_path / 'out'}") == 0
        log = capfd.readouterr().err
        assert f"out.partial cannot be continued ({problem}); starting over" in log
        output = (tmp_path / "out").read_bytes()
        assert output == (folder / "uninterrupted").read_bytes()
        (tmp_path / "out").unlink()


def test_prefixes_of_a_stream_are_not_read_twice(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"model_dir={folder / 'model'}", f"input={tmp_path / 'in'}", *OPTIONS]
    arguments += [f"output={tmp_path / 'out'}", "too_long=error"]
    for lines, message in (
        ([*LINES[:90], "the " * 300], "kept 80 lines"),
        (["another", *LINES[1:90]], "the input does not begin with the 80 lines"),
    ):
        write_lines(tmp_path / "in", lines)
        pipe = tmp_path / f"pipe-{len(lines)}"
        os.mkfifo(pipe)
        feed = partial(write_lines, pipe, ["the"] * len(lines))
        threading.Thread(target=feed, daemon=True).start()
        assert translate(*arguments, f"prefixes={pipe}") == 2
        assert message in capfd.readouterr().err


def test_a_second_process_with_the_same_output_is_refused(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with job.PartialFile(tmp_path / "out", {}):
        assert translate(*model_and_input(folder), f"output={tmp_path / 'out'}") == 2
        assert "is being written by another process" in capfd.readouterr().err


def test_a_full_disk_is_refused_in_one_line_and_the_job_continues_later(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files simulates a full disk: a write fails half-way."""
    arguments = [*model_and_input(folder), *OPTIONS, f"output={tmp_path / 'out'}"]
    assert run_in_child(tmp_path / "log", translate_with_full_disk, *arguments) == 2
    errors = (tmp_path / "log").read_text(encoding="utf-8").split("\n")
    assert errors[-2].startswith(f"nmt-translate: {tmp_path}/out.partial cannot be written: ")
    assert "Traceback" not in "".join(errors)
    assert not (tmp_path / "out").exists()
    assert translate(*arguments) == 0
    assert "resuming after line" in capfd.readouterr().err
    assert (tmp_path / "out").read_bytes() == (folder / "uninterrupted").read_bytes()


def translate_with_full_disk(*arguments: str) -> int:
    sys.dont_write_bytecode = True  # the limit would cut off compiled modules
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    return translate(*arguments)


def test_an_error_keeps_the_lines_before_it_and_without_any_leaves_nothing(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(b"\xff\n")
    damaged = [f"model_dir={folder / 'model'}", f"input={tmp_path / 'in'}"]
    assert translate(*damaged, f"output={tmp_path / 'out'}") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    write_lines(tmp_path / "in", [*LINES[:90], "the " * 300])
    arguments = [f"model_dir={folder / 'model'}", f"input={tmp_path / 'in'}", *OPTIONS]
    arguments += [f"output={tmp_path / 'out'}", "too_long=error"]
    assert translate(*arguments) == 2
    assert lines_done(tmp_path / "out.partial.json") == 80
    write_lines(tmp_path / "in", LINES)
    assert translate(*arguments) == 0
    assert (tmp_path / "out").read_bytes() == (folder / "uninterrupted").read_bytes()
