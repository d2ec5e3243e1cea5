"""The model and the options of a job, for the drivers of nmt itself."""

from __future__ import annotations

import sys
from typing import Any

from nmt.config import ModelConfig, Norm, Positions
from nmt.model.fast import layers
from nmt.training import loss


def model_config(settings: dict[str, Any]) -> ModelConfig:
    """Read the architecture of a job."""
    norm = Norm(settings["norm"])
    positions = Positions(settings["positions"])
    return ModelConfig(**settings | {"norm": norm, "positions": positions})


def apply_options(job: dict[str, Any]) -> str:
    """Apply the options that choose matrix multiplications, and remove them; return the dtype.

    Exits with the reason if this CPU does not have these matrix multiplications, or no others.
    """
    options = job.setdefault("options", {})
    dtype: str = options.pop("dtype", job["dtype"])
    if options.pop("disable_onednn", False):
        if not layers.is_onednn_faster():
            sys.exit("nmt does not use oneDNN on this CPU anyway: see the row nmt")
        for module in (layers, loss):
            module.is_onednn_faster = lambda _num_packed=0: False
    if dtype == "bfloat16" and job["device"] == "cpu" and not layers.has_bfloat16_kernels():
        sys.exit("this CPU has no bfloat16 instructions")
    return dtype
