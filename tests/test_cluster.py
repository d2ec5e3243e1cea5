"""Commands on a Dask cluster write what they write alone; what is lost is one line."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import LocalCluster
from preprocessing import tree, write_corpus
from toy import command
from translating import translate, write_lines, write_model
from work import refuser, sleeper

from nmt import __version__
from nmt.errors import NmtError, PeerError
from nmt.runtime import cluster
from nmt.runtime.cluster import open_workers, run_task


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """Two workers that are threads, which need no time to start."""
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    with LocalCluster(2, processes=False, threads_per_worker=1, dashboard_address=None) as local:
        yield local.scheduler_address


def test_preprocessing_writes_the_same_bytes(scheduler: str, tmp_path: Path) -> None:
    corpus = [*write_corpus(tmp_path), "shard_pairs=70", "data.test.num_pairs=5"]
    for name, more in (("one", "num_threads=1"), ("two", f"scheduler={scheduler}")):
        assert command("preprocess", *corpus, f"data_dir={tmp_path / name}", more) == 0
    assert tree(tmp_path / "two") == tree(tmp_path / "one")
    assert not list(tmp_path.glob(".*"))  # work folders


@pytest.mark.slow
def test_translation_is_in_order_and_the_same(scheduler: str, tmp_path: Path) -> None:
    lines = ["the house", "", "a green tree", "the " * 40] * 20
    places = [f"model_dir={write_model(tmp_path / 'model')}", f"input={tmp_path / 'in'}"]
    write_lines(tmp_path / "in", lines)
    for name, more in (("one", "devices=1"), ("two", f"scheduler={scheduler}")):
        options = ["window_lines=9", "format=json", "max_source_length=20", more]
        assert translate(*places, f"output={tmp_path / name}", *options) == 0
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    assert (tmp_path / "two").read_bytes().count(b"\n") == len(lines)


def test_results_come_in_order_and_the_first_error_after_those_before_it(scheduler: str) -> None:
    seconds = [0.2, 0.0, 0.1, 0.0, 0.0, 0.05, 0.0]
    with open_workers(scheduler, 0, sleeper) as workers:
        assert list(workers.map(seconds)) == [(s, s) for s in seconds]
    results = []
    with (
        open_workers(scheduler, 0, refuser) as workers,
        pytest.raises(NmtError, match="3 is no good"),
    ):
        results.extend(workers.map([0, 1, 2, 3, 5]))
    assert results == [(0, 0), (1, 1), (2, 2)]


def test_a_worker_with_another_nmt_or_folder_is_named(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, make = pickle.dumps(0.0), pickle.dumps(sleeper)
    assert run_task(__version__, tmp_path, "key", make, item) == 0.0
    with pytest.raises(NmtError, match=rf"has nmt {__version__}, and this is 0.0.0; install"):
        run_task("0.0.0", tmp_path, "key", make, item)
    with pytest.raises(NmtError, match=f"does not see {tmp_path}; choose a folder that all"):
        run_task(__version__, tmp_path / "marker", "key", make, item)
    monkeypatch.setattr(cluster, "__version__", "9.9.9")
    with pytest.raises(NmtError, match=rf"^worker \S+ has nmt {__version__}, and this is 9.9.9"):
        open_workers(scheduler, 0, sleeper)


@pytest.mark.slow
def test_no_scheduler_and_a_lost_one_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "_CONNECT_SECONDS", 0.2)
    with pytest.raises(NmtError, match="^scheduler=tcp://127.0.0.1:1: no scheduler answers"):
        open_workers("tcp://127.0.0.1:1", 0, sleeper)
    with LocalCluster(1, processes=False, threads_per_worker=1, dashboard_address=None) as local:
        workers = open_workers(local.scheduler_address, 0, sleeper)
        results = workers.map([0.0, 2.0])
        assert next(results) == (0.0, 0.0)
    with (
        workers,
        pytest.raises(PeerError, match=r"^the scheduler inproc:\S+ is lost; run the same"),
    ):
        list(results)
    assert "Traceback" not in capfd.readouterr().err


def test_an_address_that_is_none_is_refused_without_a_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distributed.Client", None)
    for address, reason in (("head", "missing port"), ("http://head:80", "unknown address scheme")):
        with pytest.raises(NmtError, match=f"^scheduler={address}: no scheduler .*{reason}"):
            open_workers(address, 0, sleeper)


@pytest.mark.slow
def test_a_task_that_ends_its_workers_is_one_line() -> None:
    quick = {"distributed.scheduler.allowed-failures": 0}
    with (
        dask.config.set(quick),
        LocalCluster(1, threads_per_worker=1, dashboard_address=None) as local,
        open_workers(local.scheduler_address, 0, refuser) as workers,
        pytest.raises(PeerError, match=r"^1 workers were lost with the same task"),
    ):
        list(workers.map([0, -9]))
