"""nmt-preprocess when things go wrong: kills, Ctrl-C, lost workers, full disks, two at once."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from preprocessing import (
    is_running,
    preprocess,
    run_and_die,
    run_in_fork,
    start,
    tree,
    wait_for_workers,
    wait_until_gone,
    write_corpus,
)
from test_foreign_files import REPLACEMENTS, limited
from toy import command

from nmt.data.text import explain_read_errors
from nmt.preprocess import workspace
from nmt.preprocess.chunks import Chunk, DataSource, Span, read_span
from nmt.preprocess.workspace import open_workspace

KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, and a data folder made of it without interruption."""
    folder = tmp_path_factory.mktemp("kills")
    preprocess(folder / "data", write_corpus(folder))
    return folder


def arguments(corpus_dir: Path, data_dir: Path) -> list[str]:
    """Return the arguments for a data folder of the corpus in `corpus_dir`, in five shards."""
    return [*write_corpus(corpus_dir), f"data_dir={data_dir}"]


def assert_done(corpus_dir: Path, folder: Path) -> None:
    """Check that the data folder equals an uninterrupted one, and that nothing else is left."""
    assert tree(folder / "data") == tree(corpus_dir / "data")
    assert list(folder.iterdir()) == [folder / "data"]


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(
    corpus_dir: Path, tmp_path: Path
) -> None:
    settings = arguments(corpus_dir, tmp_path / "data")
    work = tmp_path / ".data.work"
    done: dict[str, tuple[int, int]] = {}
    for number in (5, 21, 13):  # before the plan is complete, in shard 1, in shard 3
        assert run_and_die(number, settings) == KILLED
        assert not (tmp_path / "data").exists()
        for name, identity in done.items():  # finished shards are not written again
            assert _identity(work / "data" / name) == identity
        for record in work.glob("records/encode/*.json"):
            name = f"{record.stem}.arrow"
            done[name] = _identity(work / "data" / name)
    assert sorted(done) == [f"train-{number:05d}.arrow" for number in range(3)]
    assert command("preprocess", settings, "num_threads=2") == 0
    assert_done(corpus_dir, tmp_path)
    for name, identity in done.items():
        assert _identity(tmp_path / "data" / name) == identity


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


@pytest.mark.slow
def test_a_lost_worker_is_one_line_and_no_process_is_left(corpus_dir: Path, tmp_path: Path) -> None:
    with start(arguments(corpus_dir, tmp_path / "data"), "num_threads=2") as process:
        workers = wait_for_workers(process)
        for pid in workers:  # for a killed parent see tests/test_pool.py
            os.kill(pid, signal.SIGKILL)
        error = process.communicate()[1]
    wait_until_gone(workers)
    assert not (tmp_path / "data").exists()
    assert process.returncode == 2, error
    assert error.split("\n")[-2].startswith("nmt-preprocess: a worker process was killed")
    assert "Traceback" not in error


@pytest.mark.slow
def test_control_c_ends_all_processes_quietly(corpus_dir: Path, tmp_path: Path) -> None:
    with start(arguments(corpus_dir, tmp_path / "data"), "num_threads=2") as process:
        workers = wait_for_workers(process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=600) == 130
        error = process.communicate()[1]
    assert not any(map(is_running, workers))
    assert not (tmp_path / "data").exists()
    assert error.split("\n")[-2:] == ["nmt-preprocess: interrupted", ""]
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_folder_in_use_or_one_that_cannot_be_written_is_one_line(
    corpus_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with open_workspace(tmp_path / "data"):
        for data_dir, message in (
            (tmp_path / "data", "is in use by another nmt-preprocess"),
            (Path("/proc/nmt/data"), "/proc/nmt/data cannot be written"),
            (Path("/dev/null/data"), "/dev/null/data cannot be written"),
        ):
            assert command("preprocess", arguments(corpus_dir, data_dir)) == 2
            (line,) = capfd.readouterr().err.split("\n")[:-1]
            assert message in line


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_line_and_the_work_goes_on(
    corpus_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (6000, 6000))
    # python ignores SIGXFSZ: write fails
    assert run_in_fork(small, arguments(corpus_dir, tmp_path / "data")) == 2
    error = capfd.readouterr().err
    assert "cannot be written: File too large; fix this" in error.split("\n")[-2]
    assert "Traceback" not in error
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_a_disk_that_fails_for_a_while_costs_no_shard_that_is_done(
    corpus_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def read(sources: list[DataSource], span: Span) -> Iterator[Chunk]:
        if span.index_in_corpus == 2 and (tmp_path / ".data.work/records/encode").exists():
            with explain_read_errors("train.src.txt"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield from read_span(sources, span)

    with monkeypatch.context() as patch:
        patch.setattr(workspace, "read_span", read)
        assert command("preprocess", arguments(corpus_dir, tmp_path / "data")) == 2
    assert "train.src.txt cannot be read: Input/output error" in capfd.readouterr().err
    assert len([*tmp_path.glob(".data.work/records/encode/*.json")]) == 2
    assert command("preprocess", arguments(corpus_dir, tmp_path / "data")) == 0
    assert "continuing an earlier run" in capfd.readouterr().err
    assert_done(corpus_dir, tmp_path)


@pytest.mark.long
def test_pipes_and_devices_in_a_work_folder_are_refused_unread(
    corpus_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = [*arguments(corpus_dir, tmp_path / "data"), "filter.duplicates=pair"]
    work = tmp_path / ".data.work"
    num_cases = 0
    for number in (1, 5, 21):  # before the plan is complete, in the first shards
        assert run_and_die(number, settings) == KILLED
        backup = shutil.copytree(work, tmp_path / "backup")
        for path in sorted(path for path in work.rglob("*") if path.is_file()):
            for name, replace in list(REPLACEMENTS.items())[:5]:
                path.unlink()
                replace(path)
                with limited(max_seconds=20):  # it may start over
                    status = command("preprocess", settings, "num_threads=1")
                error = capfd.readouterr().err
                num_cases += 1
                assert status in (0, 2), (path, name, error)
                assert status == 0 or path.stem in error, (path, name, error)
                assert status == 2 or name not in ("pipe", "endless device"), (path, name)
                for folder in (work, tmp_path / "data"):
                    shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(backup, work)
        shutil.rmtree(backup)
    assert num_cases >= 150
