"""Starts one process for each device of this machine with torch's elastic launcher, and reports as
if there were one.
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
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nmt.errors import EXIT_STOPPED, EXIT_USER, NmtError, PeerError, RankError, StoppedError

_HINTS = {
    "SIGKILL": "; was there enough memory?",
    "SIGABRT": "; NCCL does so to a rank that waited longer than timeout_seconds",
}


def launch(num_processes: int, config_yaml: str, *, timeout_seconds: int) -> None:
    """Train in `num_processes` processes of this machine until all are done or one fails.

    The error of the rank that failed first is raised here, so that it is the last line printed.
    """
    for name in list(logging.root.manager.loggerDict):  # this module reports what happened
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # how long the launcher waits for ranks that it has asked to end, before it kills them
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(timeout_seconds))
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
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup, which torch would undo
            config.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"

        def pass_on(number: int, frame: FrameType | None) -> NoReturn:
            raise SignalException("asked to stop", sigval=signal.Signals(number))

        before = signal.signal(signal.SIGUSR1, pass_on)  # the launcher handles SIGTERM itself
        number = None
        try:
            elastic_launch(config, sys.executable)("-m", "nmt.cli.train", str(path))
        except ChildFailedError as error:
            _report(error.failures.values())
        except SignalException as error:
            number = error.sigval
        finally:
            signal.signal(signal.SIGUSR1, before)
        # raised here: as long as a SignalException lives, so does a thread of torch, at which
        # Python may abort when it ends
        if number is not None:
            _report_signal(number, Path(folder))


def _report_signal(number: signal.Signals, folder: Path) -> NoReturn:
    """Raise what the ranks, to which the launcher passed a signal on, wrote below `folder`."""
    if number is signal.SIGINT:
        raise KeyboardInterrupt
    text = f"stopped by {number.name}; the same command goes on from the newest checkpoint"
    for path in sorted(folder.rglob("error.json")):
        message = json.loads(path.read_text(encoding="utf-8"))["message"]["message"]
        kind, _, text = message.partition(": ")
        if kind != StoppedError.__name__:
            raise RankError(f"rank {path.parent.name}, asked to stop by {number.name}: {text}")
    raise StoppedError(text)


def _report(failures: Iterable[ProcessFailure]) -> NoReturn:
    """Raise the error of the rank that caused the others to fail."""
    first = min(failures, key=_order)
    kind, text = _kind_and_text(first)
    if first.exitcode == EXIT_STOPPED:
        raise StoppedError(text)
    if first.exitcode == EXIT_USER:
        raise NmtError(f"rank {first.local_rank}: {text}")
    is_plain = first.exitcode < 0 or kind == PeerError.__name__
    raise RankError(f"rank {first.local_rank}: {text if is_plain else f'{kind}: {text}'}")


def _order(failure: ProcessFailure) -> tuple[int, int]:
    """Order failures by nearness to the cause, then by time: a rank that failed by itself; those
    killed or waiting in vain; those that lost another rank; those that the launcher ended.
    """
    kind, text = _kind_and_text(failure)
    place = 1
    if failure.exitcode == -signal.SIGTERM:
        place = 3
    elif kind == PeerError.__name__:
        place = 1 if "no answer" in text else 2
    elif failure.exitcode > 0:
        place = 0
    return place, failure.timestamp


def _kind_and_text(failure: ProcessFailure) -> tuple[str, str]:
    """Return the class of the rank's exception and its message, or the signal that killed it."""
    if failure.exitcode < 0:
        number = signal.Signals(-failure.exitcode)
        hint = _HINTS.get(number.name, "")
        return number.name, f"process {failure.pid} was killed by {number.name}{hint}"
    message: Any = failure.message  # a text, or what `record` wrote
    kind, _, text = (message["message"] if isinstance(message, dict) else message).partition(": ")
    return kind, text
