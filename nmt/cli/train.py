"""Runs `nmt-train`: in this process, or in one for each device."""

from __future__ import annotations

import logging
import os
import threading

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from nmt.cli.launch import launch
from nmt.config import TrainConfig
from nmt.distributed import (
    find_device,
    find_world,
    is_launched,
    num_processes,
    process_group,
)
from nmt.export.folder import announce
from nmt.training.trainer import Trainer

log = logging.getLogger(__name__)
_PARENT_SECONDS = 0.5  # between two looks whether the launcher lives


def run(config: TrainConfig, config_yaml: str) -> None:
    """Train, or go on with a run."""
    if is_launched():
        _watch_parent()
        record(train_rank)(config, config_yaml)  # the launcher reads from a file why a rank failed
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
        trainer = Trainer(config, world, device)
        if config.dry_run:
            told = trainer.dry_run()
            if world.is_main:
                print(told, flush=True)
        else:
            trainer.train(config_yaml)
            done = "done after %d updates; next: nmt-average run_dir=%s"
            log.info(done, trainer.state.update, config.run_dir)


def _watch_parent() -> None:
    """End with the launcher, however it ends: a rank that outlives it would train on unseen."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            threading.Event().wait(_PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
