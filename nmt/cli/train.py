"""Runs `nmt-train`: in this process, or in one for each device.

`python -m nmt.cli.train CONFIG_FILE` is what the launcher starts for each device.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from nmt.cli.compose import to_config
from nmt.cli.launch import launch
from nmt.cli.main import log_to_stderr
from nmt.config import TrainConfig
from nmt.distributed import find_device, find_world, is_launched, num_processes, process_group
from nmt.errors import EXIT_INTERRUPTED, LINE_ERRORS
from nmt.export.folder import announce
from nmt.training.train import dry_run, train

log = logging.getLogger("nmt.cli.train")  # whose `__name__` is `__main__` in a rank of the launcher


def run(config: TrainConfig, config_yaml: str) -> None:
    """Train, or go on with a run."""
    if is_launched():
        _watch_parent()
        record(train_rank)(config, config_yaml)  # writes to a file why a rank failed
    elif (count := num_processes(config.devices, config.device)) > 1:
        launch(count, config_yaml, timeout_seconds=config.timeout_seconds)
    else:
        train_rank(config, config_yaml)


def train_rank(config: TrainConfig, config_yaml: str) -> None:
    """Train as the rank that the environment says; the only one without a launcher."""
    announce(config.model, required=config.exportable)
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
            done = "done after %d updates; next: nmt-average run_dir=%s"
            log.info(done, num_updates, config.run_dir)


def _watch_parent() -> None:
    """End with the launcher, however it ends: a rank that outlives it would train unnoticed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
