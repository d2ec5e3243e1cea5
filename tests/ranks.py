"""Runs tasks and commands in processes of their own, cheaply: a server that has imported torch
forks each of them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# modules that training imports; missing ones are ignored
_CONTEXT.set_forkserver_preload(
    ["pytest", "pandas", "torch._dynamo", "torch.onnx", "torch.utils.tensorboard"]
    + ["torch.distributed.rpc", "nmt.cli.compose", "nmt.cli.train", "nmt.translate.translator"]
)
_PATIENCE_SECONDS = 600  # enough for each of these tests on a busy machine


_NUM_PORTS = 400  # of a worker of pytest-xdist
_used_ports: set[int] = set()


def find_free_port() -> str:
    """Return a free port that no other test and no process gets that does not ask for it."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first_port = 20_000 + worker % 30 * _NUM_PORTS  # below those that the system gives
    ports = set(range(first_port, first_port + _NUM_PORTS)) - _used_ports
    for port in random.SystemRandom().sample(sorted(ports), len(ports)):
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            _used_ports.add(port)
            return str(port)
    raise AssertionError("no port is free")


def rank_environments(size: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets for each of `size` ranks."""
    port = find_free_port()
    same = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    same |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [{**same, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


class Child:
    """A process that runs `task(*arguments)` and exits with its result.

    Its stderr is written to `log`.
    """

    def __init__(
        self, log: Path, task: Callable[..., Any], *arguments: Any, env: dict[str, str]
    ) -> None:
        self.log = log
        log.touch()
        self.process: BaseProcess = _CONTEXT.Process(
            target=_run, args=(log, env, task, arguments), daemon=False
        )
        self.process.start()

    @property
    def pid(self) -> int:
        """Return the number of the process."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def stderr(self) -> str:
        """Return the stderr of the process so far."""
        return self.log.read_text(encoding="utf-8")

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = _PATIENCE_SECONDS) -> int:
        """Wait for the end and return the exit status, negative after a signal."""
        self.process.join(seconds)
        code = self.process.exitcode
        assert code is not None, f"still at work after {seconds} s:\n{self.stderr}"
        return code

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Wait until the condition is true; the process must not end before."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            assert self.process.is_alive(), f"ended too soon:\n{self.stderr}"
            assert time.monotonic() < deadline, f"in vain:\n{self.stderr}"
            time.sleep(0.002)


@contextlib.contextmanager
def child(
    log: Path, task: Callable[..., Any], *arguments: Any, env: dict[str, str] | None = None
) -> Iterator[Child]:
    """Run `task` in a process that is killed when the block ends."""
    process = Child(log, task, *arguments, env=env or {})
    try:
        yield process
    finally:
        process.process.kill()
        process.process.join()


@contextlib.contextmanager
def ranks(
    folder: Path, size: int, task: Callable[..., Any], *arguments: Any
) -> Iterator[list[Child]]:
    """Run `task` in `size` processes that can form a process group."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(child(folder / f"rank{i}.log", task, *arguments, env=env))
            for i, env in enumerate(rank_environments(size))
        ]


def run_ranks(folder: Path, size: int, task: Callable[..., Any], *arguments: Any) -> None:
    """Run `task` on `size` ranks; each must exit with status 0."""
    with ranks(folder, size, task, *arguments) as children:
        for process in children:
            assert process.wait() == 0, process.stderr


def _run(log: Path, env: dict[str, str], task: Callable[..., Any], arguments: Any) -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", **env})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background jobs
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    faulthandler.dump_traceback_later(_PATIENCE_SECONDS - 10, file=stream)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        code = task(*arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.exit(code)
