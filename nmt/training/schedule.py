"""The learning rate as a function of the update number."""

from __future__ import annotations

import math

from nmt.config import Schedule, TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of update number `step`, counted from 1.

    It rises linearly to its peak during warm-up. Then it follows the schedule:

    - noam and inverse_sqrt: falls with the inverse square root of `step` (Vaswani et al., 2017,
      equation 3). The default peak gives the paper's d_model^-0.5 * step^-0.5.
    - constant: stays at the peak.
    - cosine: falls to 0 at `max_updates` (Loshchilov and Hutter, 2017, equation 5, no restarts).
    - linear: falls to 0 at `max_updates`.
    - wsd: stays at the peak, and falls to 0 as 1 - sqrt(progress) in the last `decay_share` of
      updates (Haegele et al., 2024, section 3).
    """
    assert step >= 1, "updates count from 1"
    peak = peak_learning_rate(config)
    optimizer = config.optimizer
    schedule = optimizer.schedule
    warmup_steps = optimizer.warmup_steps
    decay_end = config.max_updates
    if step <= warmup_steps:
        return peak * (step / warmup_steps)
    decay_start = warmup_steps
    if schedule is Schedule.wsd:
        decay_start = max(decay_start, decay_end - round(optimizer.decay_share * decay_end))
    num_decay_steps = max(decay_end - decay_start, 1)
    # the share of the decay that is over
    progress = min(max(step - decay_start, 0) / num_decay_steps, 1.0)
    if schedule is Schedule.cosine:
        return peak * (0.5 * (1 + math.cos(math.pi * progress)))
    if schedule is Schedule.constant:
        return peak
    if schedule is Schedule.linear:
        return peak * (1 - progress)
    if schedule is Schedule.wsd:
        return peak * (1 - math.sqrt(progress))
    return peak * math.sqrt(warmup_steps / step)


def peak_learning_rate(config: TrainConfig) -> float:
    """Return the learning rate at the end of warm-up.

    The default is the peak of the paper's equation 3, (d_model * warmup_steps)^-0.5.
    """
    optimizer = config.optimizer
    if optimizer.peak_learning_rate is not None:
        return optimizer.peak_learning_rate
    return float((config.model.d_model * optimizer.warmup_steps) ** -0.5)
