"""The learning rate as a pure function of the update.

Every schedule rises in a straight line to its peak, then falls by a factor of its own: one more
schedule is one more function in `_FACTORS`.
"""

from __future__ import annotations

import math

from nmt.config import Schedule, TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of the update `step`, counted from 1."""
    assert step >= 1, "updates count from 1"
    peak, warmup_steps = peak_learning_rate(config), config.optimizer.warmup_steps
    if step <= warmup_steps:
        return peak * (step / warmup_steps)
    return peak * _FACTORS[config.optimizer.schedule](step, config)


def peak_learning_rate(config: TrainConfig) -> float:
    """Return the rate at the end of warm-up: the one given, or scale * (d_model * warmup)^-0.5,
    where equation 3 of the paper has its peak.
    """
    optimizer = config.optimizer
    if optimizer.peak_learning_rate is not None:
        return optimizer.peak_learning_rate
    paper = (config.model.d_model * optimizer.warmup_steps) ** -0.5
    return float(optimizer.learning_rate_scale * paper)


def _inverse_sqrt(step: int, config: TrainConfig) -> float:
    """Vaswani et al. (2017), equation 3: from the paper's peak, this gives d_model^-0.5 *
    step^-0.5.
    """
    return math.sqrt(config.optimizer.warmup_steps / step)


def _cosine(step: int, config: TrainConfig) -> float:
    """Loshchilov and Hutter (2017), equation 5, without restarts: down to 0 at `max_updates`."""
    warmup_steps = config.optimizer.warmup_steps
    progress = (step - warmup_steps) / max(config.max_updates - warmup_steps, 1)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


_FACTORS = {
    Schedule.noam: _inverse_sqrt,
    Schedule.inverse_sqrt: _inverse_sqrt,
    Schedule.cosine: _cosine,
}
