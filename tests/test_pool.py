"""Worker processes: results in order, errors in one line, and none outlives the parent."""

from __future__ import annotations

import multiprocessing
import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
from preprocessing import wait_until_gone
from work import half_sender, refuser, sleeper

from nmt.errors import DataError, NmtError
from nmt.runtime import executor
from nmt.runtime.cluster import open_workers
from nmt.runtime.executor import CrashSafeExecutor
from nmt.runtime.pool import Processes, count_workers


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers import `work` as the tests do."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_results_come_in_order_however_long_each_takes() -> None:
    seconds = [0.2, 0.0, 0.1, 0.0, 0.0, 0.05, 0.0]
    for num_workers in (3, 1):
        with open_workers(None, num_workers, sleeper) as pool:
            assert list(pool.map(seconds)) == [(s, s) for s in seconds]
    num_cores = len(os.sched_getaffinity(0))
    assert list(map(count_workers, range(4))) == [num_cores, 1, 2, 3]


@pytest.mark.slow
def test_items_and_results_larger_than_a_pipe_do_not_block() -> None:
    items = [bytes([i]) * (1 << 21) for i in range(12)]
    with Processes(2, partial(operator.methodcaller, "upper")) as pool:
        for item, result in pool.map(items):
            assert result == item.upper()


@pytest.mark.slow
def test_no_more_items_are_taken_and_workers_started_than_needed() -> None:
    taken = 0

    def items() -> Iterator[float]:
        nonlocal taken
        for _ in range(50):
            taken += 1
            yield 0.0

    with Processes(2, sleeper) as pool:
        for number, _ in enumerate(pool.map(items()), start=1):
            assert taken - number < 3 * 2
    assert taken == 50
    earlier = set(multiprocessing.active_children())
    with Processes(64, sleeper) as pool:
        assert list(pool.map([0.0])) == [(0.0, 0.0)]
        assert len(set(multiprocessing.active_children()) - earlier) == 1


def test_the_first_error_in_order_is_raised_after_the_results_before_it() -> None:
    def items() -> Iterator[int]:
        yield from (0, 1, 2)
        raise DataError("the end is missing")

    for numbers, message in (([0, 1, 2, 3, 5], "3 is no good"), (items(), "the end is missing")):
        results: list[tuple[int, int]] = []
        with Processes(2, refuser) as pool, pytest.raises(DataError, match=message):
            results.extend(pool.map(numbers))
        assert results == [(0, 0), (1, 1), (2, 2)]
    with Processes(1, refuser) as pool, pytest.raises(ValueError, match="a bug") as caught:
        list(pool.map([5]))
    assert "_refuse" in str(caught.value.__cause__)  # a bug shows its traceback


def test_a_worker_that_dies_is_one_line() -> None:
    for number in (signal.SIGKILL, signal.SIGSEGV):
        with Processes(2, refuser) as pool, pytest.raises(NmtError, match="killed") as caught:
            list(pool.map([-number] * 5))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    # as multiprocessing raises them, without errno
    [OSError("handle is closed"), ValueError("bad value(s) in fds_to_keep")],
    ids=["closed pipe", "number of a closed pipe"],
)
def test_a_worker_that_dies_while_an_item_is_submitted_is_the_same_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    with Processes(2, sleeper) as pool:
        monkeypatch.setattr(pool._executor, "submit", fail)
        with pytest.raises(NmtError, match="a worker process was killed"):
            list(pool.map([0.0]))


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_process_may_start_while_the_pool_ends_after_a_lost_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread of the executor asks each process whether it is alive."""

    def start_another(process: SpawnProcess) -> bool:
        processes = pool._executor._processes
        processes[-1 - len(processes)] = process
        return is_alive(process)

    is_alive = SpawnProcess.is_alive
    monkeypatch.setattr(SpawnProcess, "is_alive", start_another)
    with Processes(2, refuser) as pool, pytest.raises(NmtError, match="killed"):
        list(pool.map([-signal.SIGKILL] * 5))


def test_an_item_submitted_after_all_others_have_failed_is_the_same_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`submit` adds an item to a pool that was intact when it began."""
    futures: list[Future[float]] = []

    def create_future(future: Future[float]) -> None:
        create(future)
        futures.append(future)
        if len(futures) == 2:
            assert futures[0].result() == 0.0
            [process] = pool._executor._processes.values()
            process.kill()
            deadline = time.monotonic() + 10  # newer Pythons end a pool only after `submit`
            while not pool._executor._call_queue._reader.closed and time.monotonic() < deadline:
                time.sleep(0.005)

    create = Future.__init__
    monkeypatch.setattr(Future, "__init__", create_future)
    with Processes(1, sleeper) as pool, pytest.raises(NmtError, match="killed"):
        list(pool.map([0.0, 0.0]))


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_while_it_sends_a_result_is_the_same_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "CHECK_SECONDS", 0.05)
    for num_workers in (1, 2):
        with Processes(num_workers, half_sender) as pool, pytest.raises(NmtError, match="killed"):
            list(pool.map([0, 1, 2]))
    with Processes(1, half_sender) as pool:  # which nobody waits for
        pool._submit(0)
        [process] = pool._executor._processes.values()
        process.join()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_canceled_item_does_not_keep_others_from_failing() -> None:
    with CrashSafeExecutor(1) as executor:
        futures = [executor.submit(time.sleep, 600.0) for _ in range(5)]
        assert futures[3].cancel()
        [process] = executor._processes.values()
        process.kill()
        for future in futures[:3] + futures[4:]:
            with pytest.raises(BrokenProcessPool):
                executor.wait_for_result(future)


def test_a_worker_ignores_interrupts_even_if_a_thread_has_started_it() -> None:
    """Ctrl-C sends SIGINT to all processes of a terminal; the parent ends its workers."""
    with Processes(1, refuser) as pool, ThreadPoolExecutor(1) as threads:
        future = threads.submit(list, pool.map([-signal.SIGINT]))
        assert future.exception() is None
        assert future.result() == [(-signal.SIGINT, -signal.SIGINT)]


def test_leaving_ends_workers_at_once() -> None:
    earlier = set(multiprocessing.active_children())
    started = time.monotonic()
    with Processes(2, sleeper) as pool:
        next(pool.map([0.0, 600.0, 0.0, 0.0, 0.0, 0.0]))
        assert set(multiprocessing.active_children()) - earlier
    assert time.monotonic() - started < 300
    assert set(multiprocessing.active_children()) <= earlier


def test_workers_end_with_a_parent_that_is_killed() -> None:
    program = (
        "import multiprocessing, sys; sys.path.insert(0, sys.argv[1]); import work\n"
        "from nmt.runtime.pool import Processes\n"
        "pool = Processes(2, work.sleeper)\n"
        "for _ in pool.map([0.0, 0.0, 600.0, 600.0, 0.0, 0.0]):\n"
        "    print(*[p.pid for p in multiprocessing.active_children()], flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert workers
    wait_until_gone(workers)
