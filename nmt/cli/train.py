"""Run `nmt-train` in this process, or in one process for each device of this machine."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing import errors as torchrun_errors

from nmt.average import read_validation_scores
from nmt.checkpoint import CONFIG, WEIGHTS, list_checkpoints, parse_checkpoint_update
from nmt.cli.commands import shell_command
from nmt.cli.compose import DataPreparation
from nmt.cli.data_folder import ensure_data
from nmt.cli.launch import launch
from nmt.cli.parent import exit_after_launcher
from nmt.config import BestMetric, TrainConfig, resolve_path
from nmt.errors import ConfigError
from nmt.runtime.distributed import (
    World,
    broadcast_from_main,
    choose_num_processes,
    find_device,
    find_world,
    is_launched,
    process_group,
)
from nmt.training.auto_batch import find_max_tokens
from nmt.training.dry_run import dry_run
from nmt.training.initial_weights import use_initial_architecture
from nmt.training.train import train

log = logging.getLogger(__name__)


def run(config: TrainConfig, config_yaml: str, preparation: DataPreparation) -> float | None:
    """Prepare the data folder if it does not exist, then start or resume the run.

    Returns the best validation score, which Hydra's sweepers optimize. `best_metric` chooses
    between loss and BLEU. Returns None for a dry run, and in a process that torchrun has started.

    Args:
        config: the settings.
        config_yaml: the same settings as YAML, for the run folder and for other processes.
        preparation: how to make the data folder if it does not exist.
    """
    _check_run_dir(config.run_dir)
    if is_launched():  # torchrun has started this process
        exit_after_launcher(os.getppid())
        # `record` reports the error of this rank to torchrun
        run_and_report = torchrun_errors.record(_run_launched)
        run_and_report(config, config_yaml, preparation)
        return None
    run_dir = resolve_path(config.run_dir)
    ensure_data(config, preparation, may_write=not config.dry_run)
    num_ranks = choose_num_processes(config.devices, config.device)
    try:
        if num_ranks > 1:
            launch(num_ranks, config_yaml, timeout_seconds=config.timeout_seconds)
        else:
            run_rank(config, config_yaml)
    except KeyboardInterrupt:
        _log_resume_point(run_dir)
        raise
    if config.dry_run:
        return None
    scores = read_validation_scores(run_dir, config.best_metric).values()
    if config.best_metric is BestMetric.bleu:
        return max(scores, default=None)
    return min(scores, default=None)


def train_in_process(config: TrainConfig) -> None:
    """Start or resume a run in this process, on one device.

    The data folder must exist; `nmt.prepare` writes it. Raises subclasses of `NmtError` for
    mistakes of the user.
    """
    _check_run_dir(config.run_dir)
    run_rank(config, OmegaConf.to_yaml(OmegaConf.structured(config)))


def _check_run_dir(run_dir: str) -> None:
    """Raise a `ConfigError` if `run_dir` is, or is inside of, a checkpoint or model folder."""
    path = resolve_path(run_dir)
    if (path / CONFIG).exists():
        raise ConfigError(
            f"run_dir={run_dir} is a checkpoint or model folder; choose another run_dir. To start "
            f"from these weights, add init_from={run_dir}"
        )
    for folder in (path, *path.parents):  # `path` may be RUN/checkpoints
        if _is_model(folder) or _is_checkpoints_folder(folder):
            raise ConfigError(
                f"run_dir={run_dir} is inside {os.path.relpath(folder)}, which has models of a "
                "run; choose another run_dir"
            )


def _is_model(folder: Path) -> bool:
    """Return whether a folder has the files of a model."""
    return (folder / WEIGHTS).exists() and (folder / CONFIG).exists()


def _is_checkpoints_folder(folder: Path) -> bool:
    """Return whether a folder is `checkpoints` of a run that has written a checkpoint."""
    return folder.name == "checkpoints" and (folder / "latest" / CONFIG).exists()


def _log_resume_point(run_dir: Path) -> None:
    """Log the update after which an interrupted run will continue."""
    checkpoints = list_checkpoints(run_dir)
    if checkpoints:
        update = parse_checkpoint_update(checkpoints[-1])
        log.info("interrupted; the same command goes on after update %d", update)
    else:
        log.info("interrupted before the first checkpoint; the same command starts again")


def _run_launched(config: TrainConfig, config_yaml: str, preparation: DataPreparation) -> None:
    """Train in a process that torchrun has started.

    Raises `DataError` if the data folder is missing.
    """
    ensure_data(config, preparation, may_write=False)
    run_rank(config, config_yaml)


def _choose_max_tokens(config: TrainConfig, world: World, device: torch.device) -> int:
    """Return the number of tokens for max_tokens=auto.

    A run that resumes has recorded the number. For a new run, returns the largest number whose
    batches fit in the memory of the device.
    """
    recorded: int | None = None
    path = resolve_path(config.run_dir) / "config.yaml"
    if world.is_main and path.is_file() and not config.dry_run:
        recorded = OmegaConf.select(OmegaConf.load(path), "max_tokens")
    recorded = broadcast_from_main(recorded)
    if recorded is None:
        return find_max_tokens(config, world, device)
    log.info("max_tokens=auto: %d, as recorded in %s", recorded, os.path.relpath(path))
    return recorded


def run_rank(config: TrainConfig, config_yaml: str) -> None:
    """Train as one of the processes that torchrun or `launch` has started.

    The environment variables of torchrun tell the rank. Without them, this is the only process.
    """
    config = use_initial_architecture(config)
    world = find_world()
    device = find_device(config.device, world.local_rank)
    # ranks of one machine share its cores, unless the user has set a number of threads
    has_set_threads = config.num_threads > 0 or "OMP_NUM_THREADS" in os.environ
    if world.local_size > 1 and not has_set_threads:
        torch.set_num_threads(max(1, torch.get_num_threads() // world.local_size))
    with process_group(world, device, config.timeout_seconds):
        if config.max_tokens is None:  # auto
            max_tokens = _choose_max_tokens(config, world, device)
            config = replace(config, max_tokens=max_tokens)
            settings = OmegaConf.create(config_yaml)
            OmegaConf.update(settings, "max_tokens", max_tokens)
            config_yaml = OmegaConf.to_yaml(settings)
        if config.dry_run:
            from nmt.export.export_model import describe_exports  # slow to import

            log.info("dry run of run_dir=%s", config.run_dir)
            report = dry_run(config, world, device)
            if world.is_main:
                print(report, describe_exports(config.model), sep="\n", flush=True)
        else:
            num_updates = train(config, config_yaml, world, device)
            next_command = shell_command("average", run_dir=config.run_dir)
            log.info("done after %d updates; next: %s", num_updates, next_command)
