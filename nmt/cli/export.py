"""Runs `nmt-export`."""

from __future__ import annotations

import logging

from nmt.checkpoint import find_model
from nmt.config import ExportConfig, ExportFormat, resolve
from nmt.export.folder import export

log = logging.getLogger(__name__)


def run(config: ExportConfig, config_yaml: str) -> None:
    """Convert the model and log where it went and how to use it."""
    folder, output = find_model(resolve(config.model_dir)), resolve(config.output)
    export(folder, output, config)
    size = sum(path.stat().st_size for path in output.iterdir())
    log.info(
        "exported %s to %s (%s, %s, %.1f MB)",
        folder,
        output,
        config.format.value,
        config.quantization.value,
        size / 1e6,
    )
    if config.format is ExportFormat.ctranslate2:
        command = f"nmt-translate backend=ctranslate2 model_dir={config.output} < FILE"
        log.info("next: %s, or without nmt as its README.md shows", command)
    else:
        log.info("its README.md shows how to translate with transformers")
