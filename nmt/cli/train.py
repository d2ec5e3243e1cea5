"""Runs `nmt-train`."""

from __future__ import annotations

import logging

from nmt.config import TrainConfig
from nmt.export.support import announce
from nmt.training.trainer import Trainer

log = logging.getLogger(__name__)


def run(config: TrainConfig, config_yaml: str) -> None:
    """Train, or go on with a run."""
    announce(config.model, required=config.exportable)
    trainer = Trainer(config)
    trainer.train(config_yaml)
    log.info(
        "done after %d updates; next: nmt-average run_dir=%s", trainer.state.update, config.run_dir
    )
