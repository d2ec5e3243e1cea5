"""Runs `nmt-preprocess`."""

from __future__ import annotations

import logging

from nmt.config import PreprocessConfig
from nmt.data.prepare import prepare

log = logging.getLogger(__name__)


def run(config: PreprocessConfig, config_yaml: str) -> None:
    """Write the data folder and log what went in."""
    reports = prepare(config)
    for split, report in reports.items():
        tokens = report.src_tokens + report.tgt_tokens
        log.info(
            "%s: %d of %d pairs, %.1f + %.1f tokens a pair, %.2f %% unknown",
            split,
            report.kept,
            report.read,
            report.src_tokens / report.kept,
            report.tgt_tokens / report.kept,
            100 * report.unknown_tokens / max(tokens, 1),
        )
    log.info("wrote %s; next: nmt-train +model=tiny data_dir=%s", config.data_dir, config.data_dir)
