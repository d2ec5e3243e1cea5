"""What the drivers of nmt itself share."""

from __future__ import annotations

import sys
from typing import Any

from nmt.config import ModelConfig, Norm, Positions
from nmt.model.fast import layers
from nmt.training import loss


def model_config(sizes: dict[str, Any]) -> ModelConfig:
    """Read the architecture of a job."""
    kinds = {"norm": Norm(sizes["norm"]), "positions": Positions(sizes["positions"])}
    return ModelConfig(**{**sizes, **kinds})


def take_kernels(job: dict[str, Any]) -> str:
    """Choose products as the options of a job say, which are removed; return the number format.

    Ends with a line where this processor has no such products, or no others.
    """
    options = job.setdefault("options", {})
    dtype: str = options.pop("dtype", job["dtype"])
    if options.pop("leaves_onednn_out", False):
        if not layers.is_onednn_faster():
            sys.exit("oneDNN does not replace MKL on this processor: the row nmt is without it")
        for module in (layers, loss):
            module.is_onednn_faster = lambda _num_packed=0: False
    if dtype == "bfloat16" and job["device"] == "cpu" and not layers.multiplies_bfloat16():
        sys.exit("this processor has no instructions for bfloat16")
    return dtype
