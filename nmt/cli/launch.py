"""Train in several processes of this machine with torch's elastic launcher.

If a rank fails, the launcher raises the error that training in a single process would raise.
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

_SIGNAL_HINTS = {  # appended to the message about a rank that a signal killed
    "SIGKILL": "; was there enough memory?",
    "SIGABRT": "; NCCL aborts a rank that waits longer than timeout_seconds",
}
# How far a failure is from the first failure, which caused the others; see `_Cause`
_OWN_ERROR = 0  # an error of the rank itself
_NO_ANSWER = 1  # the rank was killed, or waited for another rank in vain
_LOST_CONNECTION = 2  # the rank lost the connection to another rank
_ENDED_BY_TORCH = 3  # torch ended the rank after the failure of another rank


def launch(num_processes: int, config_yaml: str, *, timeout_seconds: int) -> None:
    """Train in `num_processes` processes of this machine until all are done or one fails.

    Raises the error of the rank that failed first.
    """
    _configure_torch(timeout_seconds)
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
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            # nohup made this process ignore SIGHUP; without this line, torch would handle it
            config.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
        stop_signal = _run_ranks(config, path)
        # Not raised in the `except` clause of `_run_ranks`: the error would reference the
        # SignalException, which keeps a thread of torch running. Python may then abort at exit.
        if stop_signal is not None:
            _raise_stopped(stop_signal, Path(folder))


def _configure_torch(timeout_seconds: int) -> None:
    """Turn off the logs of torch's launcher, and set how long it waits for ranks to end."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each logger has its own level
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(timeout_seconds))


def _run_ranks(config: LaunchConfig, config_path: Path) -> signal.Signals | None:
    """Start the ranks and wait for them; return the signal that stopped the launcher, if any."""

    def stop(signal_number: int, frame: FrameType | None) -> NoReturn:
        raise SignalException("asked to stop", sigval=signal.Signals(signal_number))

    previous_handler = signal.signal(signal.SIGUSR1, stop)  # the launcher handles SIGTERM itself
    try:
        run_command = elastic_launch(config, sys.executable)
        run_command("-m", "nmt.cli.rank", str(config_path), str(os.getpid()))
    except errors.ChildFailedError as error:
        raise_first_cause(error.failures.values())
    except SignalException as error:
        return signal.Signals(error.sigval)
    finally:
        signal.signal(signal.SIGUSR1, previous_handler)
    return None


def _raise_stopped(stop_signal: signal.Signals, folder: Path) -> NoReturn:
    """Raise the error for a signal that the launcher passed on to the ranks.

    Each rank writes its error to a file in `folder`, normally a `StoppedError`. If a rank wrote
    another error, raises a `RankError` with its message.
    """
    if stop_signal is signal.SIGINT:
        raise KeyboardInterrupt
    stop_message = (
        f"stopped by {stop_signal.name}; the same command resumes from the newest checkpoint"
    )
    for path in sorted(folder.rglob("error.json")):
        content = json.loads(path.read_text(encoding="utf-8"))  # written by torch's `record`
        message = content["message"]["message"]  # "StoppedError: text"
        error_name, _, rank_message = message.partition(": ")
        if error_name != StoppedError.__name__:
            raise RankError(
                f"rank {path.parent.name}, asked to stop by {stop_signal.name}: {rank_message}"
            )
        stop_message = rank_message  # contains the update after which the rank stopped
    raise StoppedError(stop_message)


@dataclass(frozen=True, order=True)
class _Cause:
    """Why a rank failed. Causes are ordered: the smallest one probably led to the others."""

    distance: int  # how far this failure is from the first one: `_OWN_ERROR`, `_NO_ANSWER`, ...
    timestamp: int  # when the rank failed, in seconds
    rank: int
    exit_code: int
    text: str  # the message of the error
    log_line: str  # class and message, "ValueError: text"; for a `PeerError` only the message


def raise_first_cause(failures: Iterable[errors.ProcessFailure]) -> NoReturn:
    """Raise the error of the rank that made the other ranks fail."""
    cause = min(_read_cause(failure) for failure in failures)
    if cause.exit_code == StoppedError.exit_status:
        raise StoppedError(cause.text)
    if cause.exit_code == NmtError.exit_status:
        raise NmtError(f"rank {cause.rank}: {cause.text}")
    raise RankError(f"rank {cause.rank}: {cause.log_line}")


def _read_cause(failure: errors.ProcessFailure) -> _Cause:
    """Return why a rank failed: the signal that killed it, or the error that it recorded."""
    if failure.exitcode < 0:
        signal_name = signal.Signals(-failure.exitcode).name
        hint = _SIGNAL_HINTS.get(signal_name, "")
        text = f"process {failure.pid} was killed by {signal_name}{hint}"
        log_line = text
        distance = _ENDED_BY_TORCH if signal_name == "SIGTERM" else _NO_ANSWER
    else:
        message = failure.message  # a text, or the dictionary that torch's `record` wrote
        log_line = message["message"] if isinstance(message, dict) else message
        error_name, _, text = log_line.partition(": ")  # "PeerError: text"
        distance = _OWN_ERROR
        if error_name == PeerError.__name__:
            log_line = text
            # "no answer" is in the message of a timeout, see `nmt.runtime.distributed`
            distance = _NO_ANSWER if "no answer" in text else _LOST_CONNECTION
    return _Cause(
        distance=distance,
        timestamp=failure.timestamp,
        rank=failure.local_rank,
        exit_code=failure.exitcode,
        text=text,
        log_line=log_line,
    )
