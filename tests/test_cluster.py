"""Commands write the same output on a Dask cluster; lost workers are one-line errors."""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import LocalCluster, Worker
from preprocessing import preprocess, tree, write_corpus
from translating import translate, write_lines, write_model
from work import gate, refuser, sleeper, waiter

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


@pytest.mark.slow
def test_preprocessing_writes_the_same_bytes(scheduler: str, tmp_path: Path) -> None:
    settings = [*write_corpus(tmp_path), "data.test.num_pairs=5"]
    expected = preprocess(tmp_path / "one", settings)
    data = preprocess(tmp_path / "two", settings, f"scheduler={scheduler}")
    assert tree(data) == tree(expected)
    assert not list(tmp_path.glob(".*"))  # work folders


@pytest.mark.slow
def test_translation_is_in_order_and_the_same(scheduler: str, tmp_path: Path) -> None:
    lines = ["the house", "", "a green tree", "the " * 40] * 20
    options = ["window_lines=9", "format=json", "max_source_length=20", f"input={tmp_path}/in"]
    options.append(f"model_dir={write_model(tmp_path / 'model')}")
    write_lines(tmp_path / "in", lines)
    assert translate(options, f"output={tmp_path}/one", "devices=1") == 0
    assert translate(options, f"output={tmp_path}/two", f"scheduler={scheduler}") == 0
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


@pytest.mark.timeout(300)  # it once waited forever
def test_an_error_of_a_network_disk_that_does_not_answer_is_raised(scheduler: str) -> None:
    """In Python 3.11, this is also the error of a result that has not come yet."""
    with (
        open_workers(scheduler, 0, refuser) as workers,
        pytest.raises(TimeoutError, match="the disk does not answer"),
    ):
        list(workers.map([0, 110]))


def test_a_worker_with_another_nmt_or_folder_is_named(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = pickle.dumps(0.0)
    make = pickle.dumps(sleeper)
    assert run_task(__version__, tmp_path, "key", make, item) == 0.0
    with pytest.raises(
        NmtError, match=rf"has nmt {__version__}, but the client has 0.0.0; install"
    ):
        run_task("0.0.0", tmp_path, "key", make, item)
    with pytest.raises(NmtError, match=f"does not see {tmp_path}; choose a folder that all"):
        run_task(__version__, tmp_path / "marker", "key", make, item)
    monkeypatch.setattr(cluster, "__version__", "9.9.9")
    with pytest.raises(
        NmtError, match=rf"^worker \S+ has nmt {__version__}, but the client has 9.9.9"
    ):
        open_workers(scheduler, 0, sleeper)


@pytest.mark.slow
def test_no_scheduler_and_a_lost_one_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "_CONNECT_SECONDS", 0.2)
        with pytest.raises(NmtError, match="^scheduler=tcp://127.0.0.1:1: no scheduler answers"):
            open_workers("tcp://127.0.0.1:1", 0, sleeper)
    gate.clear()
    # a worker that closes would wait 30 s for its task, which waits for the gate
    close_at_once = functools.partialmethod(Worker.close, executor_wait=False)
    monkeypatch.setattr(Worker, "close", close_at_once)
    with LocalCluster(1, processes=False, threads_per_worker=1, dashboard_address=None) as local:
        workers = open_workers(local.scheduler_address, 0, waiter)
        results = workers.map([0, 1])
        assert next(results) == (0, 0)
    with (
        workers,
        pytest.raises(PeerError, match=r"^the scheduler inproc:\S+ is lost; run the same"),
    ):
        list(results)
    gate.set()
    assert "Traceback" not in capfd.readouterr().err


def test_an_invalid_address_is_refused_without_a_client(
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
