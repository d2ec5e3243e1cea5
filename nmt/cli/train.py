"""Runs `nmt-train`: in this process, or with torch's elastic launcher in one for each device of
this machine, and reports as if there were one.
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

import torch
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing import errors
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nmt.average import validation_scores
from nmt.cli.commands import command_line
from nmt.cli.compose import to_config
from nmt.cli.data_folder import Preparation, ensure_data
from nmt.cli.main import log_to_stderr
from nmt.cli.rank import end_with
from nmt.config import BestMetric, TrainConfig, resolve
from nmt.errors import EXIT_INTERRUPTED, LINE_ERRORS, NmtError, PeerError, RankError, StoppedError
from nmt.export.folder import announce
from nmt.runtime.distributed import (
    find_device,
    find_world,
    is_launched,
    num_processes,
    process_group,
)
from nmt.training.checkpoints import adopt_model
from nmt.training.train import dry_run, train

log = logging.getLogger(__name__)
_HINTS = {
    "SIGKILL": "; was there enough memory?",
    "SIGABRT": "; NCCL does so to a rank that waited longer than timeout_seconds",
}


def run(
    config: TrainConfig, config_yaml: str, preparation: Preparation | None = None
) -> float | None:
    """Prepare the data folder if need be, then train, or go on with a run; return the best score of
    the validations, loss or BLEU as `best_metric` says.
    """
    if is_launched():
        end_with(os.getppid())
        errors.record(_train_rank)(config, config_yaml, preparation)  # writes why a rank failed
    elif (count := num_processes(config.devices, config.device)) > 1:
        ensure_data(config, preparation, may_write=not config.dry_run)
        _launch(count, config_yaml, timeout_seconds=config.timeout_seconds)
    else:
        _train_rank(config, config_yaml, preparation)
    if config.dry_run or is_launched():
        return None
    scores = validation_scores(resolve(config.run_dir), config.best_metric).values()
    best = max if config.best_metric is BestMetric.bleu else min
    return best(scores, default=None)


def _train_rank(config: TrainConfig, config_yaml: str, preparation: Preparation | None) -> None:
    """Train as the rank that the environment says; the only one without a launcher."""
    config = adopt_model(config)
    announce(config.model, required=config.exportable)
    ensure_data(config, preparation, may_write=not (is_launched() or config.dry_run))
    world = find_world()
    device = find_device(config.device, world.local_rank)
    if world.local_size > 1 and not config.num_threads and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // world.local_size))
    with process_group(world, device, config.timeout_seconds):
        if config.dry_run:
            text = dry_run(config, world, device)
            if world.is_main:
                print(text, flush=True)
        else:
            num_updates = train(config, config_yaml, world, device)
            hint = command_line("average", run_dir=config.run_dir)
            log.info("done after %d updates; next: %s", num_updates, hint)


def _launch(num_processes: int, config_yaml: str, *, timeout_seconds: int) -> None:
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
            command = ("-m", "nmt.cli.rank", str(path), str(os.getpid()))
            elastic_launch(config, sys.executable)(*command)
        except errors.ChildFailedError as error:
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


def _report(failures: Iterable[errors.ProcessFailure]) -> NoReturn:
    """Raise the error of the rank nearest to the cause, of several the first in time: one that
    failed by itself; killed or waiting in vain; that lost another rank; that the launcher ended.
    """
    causes = []
    for failure in failures:
        if failure.exitcode < 0:
            kind = signal.Signals(-failure.exitcode).name
            text = f"process {failure.pid} was killed by {kind}{_HINTS.get(kind, '')}"
            place = 3 if kind == "SIGTERM" else 1
        else:
            message: Any = failure.message  # a text, or what `record` wrote
            whole = message["message"] if isinstance(message, dict) else message
            kind, _, text = whole.partition(": ")
            lost = 1 if "no answer" in text else 2
            place = lost if kind == PeerError.__name__ else 0
        is_plain = failure.exitcode < 0 or kind == PeerError.__name__
        shown = f"rank {failure.local_rank}: {text if is_plain else f'{kind}: {text}'}"
        causes.append((place, failure.timestamp, failure.local_rank, failure.exitcode, text, shown))
    _, _, rank, exitcode, text, shown = min(causes)
    if exitcode == StoppedError.exit_status:
        raise StoppedError(text)
    if exitcode == NmtError.exit_status:
        raise NmtError(f"rank {rank}: {text}")
    raise RankError(shown)


def main(path: str) -> int:
    """Train as one rank with the config in a file and return the exit status; the launcher reports
    why it failed.
    """
    log_to_stderr()
    composed = OmegaConf.create(Path(path).read_text(encoding="utf-8"))
    try:
        run(*to_config(composed, TrainConfig))  # type: ignore[arg-type]
    except LINE_ERRORS as error:
        return error.exit_status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0
