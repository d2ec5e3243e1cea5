"""Which architectures each export format can hold; known before a model is trained.

The converters read their choices from the tables here, so what is checked is what they do.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from enum import Enum
from typing import Any

from nmt.config import ExportFormat, ModelConfig, Norm, Positions
from nmt.errors import ConfigError

log = logging.getLogger(__name__)

PRE_NORM = {Norm.post: False, Norm.pre: True}
"""CTranslate2's `pre_norm` for each placement of the norm."""

MARIAN_NORM = {Norm.post: "after the residual sum"}
"""MarianMT has no other."""

SINES_FIRST = {Positions.sinusoidal: False, Positions.sinusoidal_concat: True}
"""Whether a layout has all sines before all cosines, as MarianMT has."""

_SIZES: dict[str, None] = dict.fromkeys(
    ("num_encoder_layers", "num_decoder_layers", "d_model", "d_ff", "num_heads")
)  # None: any value
SUPPORTED: dict[ExportFormat, dict[str, Mapping[Any, Any] | None]] = {
    ExportFormat.ctranslate2: {**_SIZES, "norm": PRE_NORM, "positions": SINES_FIRST},
    ExportFormat.huggingface: {**_SIZES, "norm": MARIAN_NORM, "positions": SINES_FIRST},
}
"""The values of each setting of the architecture that a format can hold."""


def check_exportable(config: ModelConfig) -> dict[ExportFormat, list[str]]:
    """Return for each format why a model of this architecture cannot be exported to it; an empty
    list means that it can.

    Dropout is of training alone and never a reason. A setting that a format's table does not name
    is a reason unless it has its default, which by the rule for new settings changes nothing.
    """
    return {name: _reasons(config, table) for name, table in SUPPORTED.items()}


def announce(config: ModelConfig, *, required: bool) -> None:
    """Log, before a model is trained, to which formats it can be exported, and why not to others.

    With `required`, raise a `ConfigError` for one that CTranslate2 cannot run.
    """
    reasons = check_exportable(config)
    if required and reasons[ExportFormat.ctranslate2]:
        raise ConfigError(
            f"{' and '.join(reasons[ExportFormat.ctranslate2])} cannot be exported to CTranslate2; "
            "change it, or set exportable=false to train all the same"
        )
    for name, why in reasons.items():
        log.info("export to %s: %s", name.value, f"no, {', '.join(why)}" if why else "yes")


def require_exportable(config: ModelConfig, name: ExportFormat) -> None:
    """Raise a `ConfigError` that says why `config` cannot be exported to `name`, and to what it
    can be.
    """
    reasons = check_exportable(config)
    if reasons[name]:
        others = " or ".join(f"format={other.value}" for other in reasons if not reasons[other])
        advice = f"use {others}" if others else "nor does another format"
        raise ConfigError(
            f"format={name.value} does not hold {' and '.join(reasons[name])}; {advice}"
        )


def _reasons(config: ModelConfig, table: dict[str, Mapping[Any, Any] | None]) -> list[str]:
    reasons = []
    for setting in dataclasses.fields(config):
        value = getattr(config, setting.name)
        held = table.get(setting.name, {setting.default: None})
        if held is not None and value not in held and "dropout" not in setting.name:
            choices = ", ".join(_shown(choice) for choice in held)
            reasons.append(f"model.{setting.name}={_shown(value)} (only {choices})")
    return reasons


def _shown(value: object) -> str:
    return str(value.value if isinstance(value, Enum) else value)
