"""The work folder of preprocessing: its owner, and its content after a run that ends early."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nmt.config import PreprocessConfig
from nmt.errors import ConfigError, DataError, NmtError
from nmt.preprocess.chunks import Chunk, Span
from nmt.preprocess.workspace import Job, Task, Workspace, open_workspace, run_stage
from nmt.runtime.files import replace_json
from nmt.runtime.metadata import read_json

JOB = {"seed": 1, "inputs": {"a.en": [10, 20]}}


def fill(work: Workspace) -> None:
    """Start a job and write one result."""
    work.start(JOB)
    replace_json(work.records / "train-00000.json", {"kept": 3})


def end_early(data_dir: Path, error: BaseException, *, is_begun: bool = True) -> None:
    """Let an error end a run."""

    def run() -> None:
        with open_workspace(data_dir) as work:
            if is_begun:
                fill(work)
            raise error

    with pytest.raises(type(error)):
        run()


def records(data_dir: Path) -> list[str]:
    """Return the names of the results in the work folder of `data_dir`."""
    return [path.name for path in data_dir.parent.glob(f".{data_dir.name}.work/records/*")]


def test_results_stay_for_the_same_job_only_and_empty_folders_go(tmp_path: Path) -> None:
    data_dir = tmp_path / "new/data"
    for error in (DataError("line 3"), ConfigError("seed")):
        end_early(data_dir, error)
        assert list(tmp_path.iterdir()) == [], error
    end_early(data_dir, KeyboardInterrupt(), is_begun=False)
    assert list(tmp_path.iterdir()) == []
    for error in (NmtError("full"), KeyboardInterrupt(), RuntimeError("bug")):
        end_early(data_dir, error)
        end_early(data_dir, ConfigError("typo"), is_begun=False)
        with open_workspace(data_dir) as work:
            (work.data / "x.tmp").write_bytes(b"half")
            work.start(JOB)
            assert records(data_dir) == ["train-00000.json"], error
            assert not (work.data / "x.tmp").exists()
    for key in ("seed", "inputs", "new"):
        with open_workspace(data_dir) as work:
            fill(work)
            work.spool.mkdir(exist_ok=True)
            (work.spool / "stdin").write_bytes(b"text")
            work.start({**JOB, key: 2})
            assert records(data_dir) == [], key
            assert (work.spool / "stdin").exists()  # its content is part of the job


def test_a_finished_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    (data_dir / "meta.json").write_text('{"format_version": 1}', encoding="utf-8")
    (data_dir / "train-00009.arrow").write_bytes(b"old")
    with open_workspace(data_dir) as work:
        fill(work)
        (work.data / "meta.json").write_text('{"format_version": 2}', encoding="utf-8")
        assert (data_dir / "train-00009.arrow").exists()
        work.finish(overwrite=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "data",
        "manifest.json",
        "meta.json",
    ]
    assert json.loads((data_dir / "meta.json").read_text(encoding="utf-8")) == {"format_version": 2}


def test_a_kill_before_the_work_folder_goes_loses_nothing(tmp_path: Path) -> None:
    end_early(tmp_path / "data", KeyboardInterrupt())
    (tmp_path / ".data.work/data").rmdir()  # renamed, and killed before the rest was removed
    with open_workspace(tmp_path / "data") as work:
        work.start(JOB)
        assert records(tmp_path / "data") == []


def test_a_stage_runs_the_spans_without_a_record_and_nothing_if_all_have_one(
    tmp_path: Path,
) -> None:
    finished_spans: list[str] = []

    def make_task(_: Job) -> Task:
        def run(span: Span, _: Iterator[Chunk]) -> dict[str, Any]:
            finished_spans.append(span.name)
            return {"kept": span.num_pairs}

        return run

    spans = []
    for i in range(3):
        span = Span(
            corpus="",
            index_in_corpus=i,
            index_overall=i,
            first_pair=10 * i,
            num_pairs=10,
            source_index=0,
            first_line=10 * i + 1,
            offsets=(),
        )
        spans.append(span)
    with open_workspace(tmp_path / "data") as work:
        work.start(JOB)
        job = Job(PreprocessConfig(num_threads=1), work, sources={"": []}, held_out={})
        (work.records / "scan").mkdir()
        replace_json(work.records / f"scan/{spans[1].name}.json", {"kept": 3})
        for _ in range(2):
            run_stage(job, spans, "scan", make_task)
        assert finished_spans == [spans[0].name, spans[2].name]
        paths = (work.records / "scan").iterdir()
        record_of_span = {path.stem: read_json(path) for path in paths}
    assert [record_of_span[span.name]["kept"] for span in spans] == [10, 3, 10]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        open_workspace(tmp_path / "data"),
        pytest.raises(ConfigError, match="in use by another"),
        open_workspace(tmp_path / "data"),
    ):
        raise AssertionError("two at once")


def test_a_foreign_folder_or_file_stays_and_so_does_a_link(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear", encoding="utf-8")
    for data_dir in (tmp_path, tmp_path / "letter.txt"):
        with pytest.raises(NmtError, match="choose another folder"), open_workspace(data_dir):
            raise AssertionError("taken over")
    assert (tmp_path / "letter.txt").read_text(encoding="utf-8") == "dear"
    (tmp_path / "disk/data").mkdir(parents=True)
    (tmp_path / "data").symlink_to(tmp_path / "disk/data")
    with open_workspace(tmp_path / "data") as work:
        fill(work)
        (work.data / "meta.json").write_text("{}", encoding="utf-8")
        work.finish(overwrite=True)
    assert (tmp_path / "data").is_symlink()
    assert (tmp_path / "disk/data/meta.json").exists()
