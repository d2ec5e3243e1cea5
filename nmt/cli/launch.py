"""Trains in several processes of this machine with torch's elastic launcher, and reports their
outcome as if there were one process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import errors
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nmt.errors import NmtError, PeerError, RankError, StoppedError

_HINTS = {
    "SIGKILL": "; was there enough memory?",
    "SIGABRT": "; NCCL aborts a rank that waits longer than timeout_seconds",
}


def launch(num_processes: int, config_yaml: str, *, timeout_seconds: int) -> None:
    """Train in `num_processes` processes of this machine until all are done or one fails.

    The error of the rank that failed first is raised here, so that it is the last line printed.
    """
    _silence_torch(timeout_seconds)
    with tempfile.TemporaryDirectory(prefix="nmt-train-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(config_yaml, encoding="utf-8", newline="\n")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # set by nohup; torch would undo it
            config.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
        number = _run_ranks(config, path)
        # Raised after `_run_ranks` has dropped the SignalException: as long as that lives, so does
        # a thread of torch, and Python may abort at exit.
        if number is not None:
            _raise_stopped(number, Path(folder))


def _silence_torch(timeout_seconds: int) -> None:
    """Turn off the logs of torch's launcher, and set how long it waits for ranks to end."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each logger has its own level
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(timeout_seconds))


def _run_ranks(config: LaunchConfig, config_path: Path) -> signal.Signals | None:
    """Start the ranks and wait for them; return the signal that stopped this process, if any."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SignalException("asked to stop", sigval=signal.Signals(number))

    previous = signal.signal(signal.SIGUSR1, stop)  # the launcher handles SIGTERM itself
    try:
        elastic_launch(config, sys.executable)(
            "-m", "nmt.cli.rank", str(config_path), str(os.getpid())
        )
    except errors.ChildFailedError as error:
        raise_first_cause(error.failures.values())
    except SignalException as error:
        return signal.Signals(error.sigval)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    return None


def _raise_stopped(number: signal.Signals, folder: Path) -> NoReturn:
    """Raise the error for a signal that the launcher passed on to the ranks.

    A rank that failed otherwise wrote its error below `folder`; that error is raised instead.
    """
    if number is signal.SIGINT:
        raise KeyboardInterrupt
    text = f"stopped by {number.name}; the same command resumes from the newest checkpoint"
    for path in sorted(folder.rglob("error.json")):
        message = json.loads(path.read_text(encoding="utf-8"))["message"]["message"]
        error_name, _, text = message.partition(": ")
        if error_name != StoppedError.__name__:
            raise RankError(f"rank {path.parent.name}, asked to stop by {number.name}: {text}")
    raise StoppedError(text)


@dataclass(frozen=True, order=True)
class _Cause:
    """Why a rank failed; the smallest one is nearest to the cause of all."""

    severity: int  # 0 failed by itself, 1 killed or waited in vain, 2 lost a rank, 3 was ended
    seconds: int
    rank: int
    exit_code: int
    text: str
    log_line: str


def raise_first_cause(failures: Iterable[errors.ProcessFailure]) -> NoReturn:
    """Raise the error of the rank that made the others fail."""
    cause = min(_read_cause(failure) for failure in failures)
    if cause.exit_code == StoppedError.exit_status:
        raise StoppedError(cause.text)
    if cause.exit_code == NmtError.exit_status:
        raise NmtError(f"rank {cause.rank}: {cause.text}")
    raise RankError(f"rank {cause.rank}: {cause.log_line}")


def _read_cause(failure: errors.ProcessFailure) -> _Cause:
    """Read why a rank failed from its signal or from the error that it recorded."""
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        log_line = text = f"process {failure.pid} was killed by {name}{_HINTS.get(name, '')}"
        severity = 3 if name == "SIGTERM" else 1
    else:
        # a text, or the dictionary that torch's `record` wrote
        message = failure.message
        log_line = message["message"] if isinstance(message, dict) else message
        name, _, text = log_line.partition(": ")
        severity = 0
        if name == PeerError.__name__:
            log_line = text
            severity = 1 if "no answer" in text else 2
    return _Cause(severity, failure.timestamp, failure.local_rank, failure.exitcode, text, log_line)
