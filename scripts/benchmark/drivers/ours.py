"""What the drivers of nmt itself share."""

from __future__ import annotations

from typing import Any

from nmt.config import ModelConfig, Norm, Positions


def model_config(sizes: dict[str, Any]) -> ModelConfig:
    """Read the architecture of a job."""
    kinds = {"norm": Norm(sizes["norm"]), "positions": Positions(sizes["positions"])}
    return ModelConfig(**{**sizes, **kinds})
