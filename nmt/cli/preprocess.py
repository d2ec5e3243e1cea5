"""Runs `nmt-preprocess`."""

from __future__ import annotations

import logging

from nmt.config import PreprocessConfig, Step
from nmt.preprocess.prepare import prepare
from nmt.preprocess.rendering import report_table

log = logging.getLogger(__name__)


def run(config: PreprocessConfig, config_yaml: str) -> None:
    """Do what is due of the data folder, print the report and say what comes next."""
    report = prepare(config)
    place = f"data_dir={config.data_dir}"
    if report is not None:
        print(report_table(report))
    if config.report_only:
        return
    if report is not None:
        log.info("wrote %s; next: nmt-train +model=tiny %s", config.data_dir, place)
    elif config.step is Step.plan:
        log.info(
            "planned; next, for each NUMBER to COUNT: the same command with shard=NUMBER/COUNT"
        )
    else:
        log.info("shard %s is done; when all are: the same command with step=merge", config.shard)
