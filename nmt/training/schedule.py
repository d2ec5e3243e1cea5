"""The learning rate as a function of the update (paper, section 5.3, equation 3; known as Noam)."""

from __future__ import annotations

from nmt.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, d_model: int) -> float:
    """Return scale * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5) for the update `step`,
    counted from 1.
    """
    assert step >= 1, "updates count from 1"
    rise, decay = step * config.warmup_steps**-1.5, step**-0.5
    return float(config.learning_rate_scale * d_model**-0.5 * min(rise, decay))
