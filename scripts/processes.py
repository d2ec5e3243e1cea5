"""Helpers of the scripts: start servers, find processes and measure their CPU time."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
_START_SECONDS = 180


def free_port() -> int:
    """Return a TCP port that is not in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def run_server(
    command: list[str],
    url: str,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[psutil.Process]:
    """Start a server, wait until `url` answers, yield the process, and stop it after the block."""
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not is_answering(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    sys.exit(f"{command[0]} did not start:\n{log.read().decode()[-3000:]}")
                time.sleep(0.3)
            yield psutil.Process(server.pid)
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def is_answering(url: str) -> bool:
    """Return whether a GET request for `url` succeeds."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


def process_tree(root: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    return [root, *root.children(recursive=True)]


def tree_cpu_seconds(root: psutil.Process) -> float:
    """Return the CPU time that a process and its running descendants have used."""
    return cpu_seconds_of(process_tree(root))


def cpu_seconds_of(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU time that processes have used, without those that have ended."""
    seconds = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment variables a process was started with, none if it has ended."""
    try:
        return dict(psutil.Process(pid).environ())
    except (psutil.Error, OSError):
        return {}
