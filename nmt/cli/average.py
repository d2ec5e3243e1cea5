"""Runs `nmt-average`."""

from __future__ import annotations

import logging
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nmt.average import average, best_checkpoints, last_checkpoints
from nmt.checkpoint import list_checkpoints
from nmt.config import AverageConfig, BestMetric, resolve
from nmt.errors import ModelError

log = logging.getLogger(__name__)


def run(config: AverageConfig, config_yaml: str) -> None:
    """Choose the checkpoints, average them, and log which they were."""
    run_dir = resolve(config.run_dir)
    folders = _choose(config, run_dir)
    output = resolve(config.output) if config.output else run_dir / "average"
    if (output / "trainer.pt").exists():
        raise ModelError(f"output={output} is a checkpoint of a run; choose another folder")
    average(folders, output)
    log.info("averaged %s", ", ".join(folder.name for folder in folders))
    log.info(
        "wrote %s; next: nmt-translate model_dir=%s < FILE", output, config.output or config.run_dir
    )


def _choose(config: AverageConfig, run_dir: Path) -> list[Path]:
    if config.checkpoints:
        return [resolve(folder) for folder in config.checkpoints]
    path = run_dir / "config.yaml"
    if not path.is_file():
        what = "is no run folder (no config.yaml)" if run_dir.is_dir() else "does not exist"
        raise ModelError(f"{run_dir} {what}; give run_dir=FOLDER or checkpoints=[FOLDER,...]")
    try:
        trained = OmegaConf.load(path)
        metric, usual = BestMetric[trained.best_metric], int(trained.average_last)
    except (YAMLError, OmegaConfBaseException, AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(f"{path} is no config of a run; give checkpoints=[FOLDER,...]") from None
    if config.best is not None:
        return best_checkpoints(run_dir, config.best, metric)
    available = len(list_checkpoints(run_dir))
    return last_checkpoints(run_dir, config.last or min(usual, max(available, 1)))
