"""The learning rate as a pure function of the update."""

from __future__ import annotations

import math

from nmt.config import TrainConfig
from nmt.options import Schedule


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of the update `step`, counted from 1.

    It rises linearly to scale * (d_model * warmup_steps)^-0.5, where the paper's schedule has its
    peak, and then falls as `optimizer.schedule` says.
    """
    assert step >= 1, "updates count from 1"
    optimizer = config.optimizer
    if optimizer.schedule is Schedule.noam or step <= optimizer.warmup_steps:
        shape = _noam(step, optimizer.warmup_steps)
    else:
        shape = _cosine(step, optimizer.warmup_steps, config.max_updates)
    return float(optimizer.learning_rate_scale * config.model.d_model**-0.5 * shape)


def _noam(step: int, warmup_steps: int) -> float:
    """Vaswani et al. (2017), equation 3: min(step^-0.5, step * warmup_steps^-1.5)."""
    return float(min(step**-0.5, step * warmup_steps**-1.5))


def _cosine(step: int, warmup_steps: int, max_updates: int) -> float:
    """Loshchilov and Hutter (2017), equation 5, without restarts: from the peak down to 0."""
    progress = min((step - warmup_steps) / max(max_updates - warmup_steps, 1), 1.0)
    return float(warmup_steps**-0.5 * 0.5 * (1 + math.cos(math.pi * progress)))
