"""Settings of the optimizer and of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nmt.config.options import Settings, option


class Optimizer(str, Enum):
    """The update rule that turns gradients into changes of the weights."""

    adam = "adam"  # Kingma and Ba (2015), as in the paper
    adamw = "adamw"  # Adam with decoupled weight decay, Loshchilov and Hutter (2019)
    muon = "muon"  # orthogonalized updates of matrices, Jordan et al. (2024); AdamW for the rest
    adafactor = "adafactor"  # Shazeer and Stern (2018): row and column means of second moments
    schedule_free = "schedule_free"  # AdamW that averages its weights, Defazio et al. (2024)


class Schedule(str, Enum):
    """The learning rate after the linear warm-up, which is the same for all schedules."""

    noam = "noam"  # inverse square root of the update number, from the paper's peak
    inverse_sqrt = "inverse_sqrt"  # the same curve from peak_learning_rate
    cosine = "cosine"  # half a cosine to 0 at max_updates; better for short runs
    linear = "linear"  # a line to 0 at max_updates
    constant = "constant"  # the peak, for fine-tuning or to end a run by hand
    wsd = "wsd"  # warm-up, stable, decay: constant, then to 0, Hägele et al. (2024)


@dataclass(kw_only=True)
class OptimizerConfig(Settings):
    """The optimizer and its schedule; the defaults are Adam as in section 5.3 of the paper."""

    key_prefix = "optimizer."
    name: Optimizer = option(
        Optimizer.adam,
        "adam, adamw (Adam with decoupled weight decay), muon, adafactor, or schedule_free (AdamW "
        "that validates and saves an average of its weights)",
    )
    beta1: float = option(
        0.9,
        "decay of the mean of gradients; with schedule_free, gradients are computed at beta1 * "
        "averaged weights + (1 - beta1) * current weights",
        low=0,
        below=1,
    )
    beta2: float = option(0.98, "decay of the mean of squared gradients", low=0, below=1)
    eps: float = option(1e-9, "added to the root of the second moment", above=0, high=1)
    weight_decay: float = option(
        0.0, "decay of matrices, times the learning rate; not for adam", low=0
    )
    momentum: float = option(0.95, "muon: decay of the mean of gradients", low=0, below=1)
    averaging_power: float = option(
        0.0,
        "schedule_free: update t has the weight t^averaging_power in the average; a larger number "
        "forgets old weights sooner",
        low=0,
        high=10,
    )
    warmup_steps: int = option(4000, "updates during which the learning rate rises", low=1)
    peak_learning_rate: float | None = option(
        None,
        "learning rate at the end of warm-up; null: (d_model * warmup_steps)^-0.5",
        above=0,
    )
    schedule: Schedule = option(
        Schedule.noam, "after warm-up: noam, inverse_sqrt, cosine, linear, constant or wsd"
    )
    decay_share: float = option(
        0.2, "wsd: share of max_updates in which the rate falls to 0", above=0, high=1
    )
    max_grad_norm: float = option(
        0.0, "gradients with a larger norm are scaled down to it; 0 disables", low=0
    )

    def check(self) -> None:
        if self.name is Optimizer.adam:
            problem = "needs optimizer.name=adamw, muon, adafactor or schedule_free"
            self.require(self.weight_decay == 0, "weight_decay", problem)
        if self.name is Optimizer.schedule_free:
            is_constant = self.schedule is Schedule.constant
            self.require(is_constant, "name", "needs optimizer.schedule=constant")
            self.require(self.beta1 > 0, "beta1", "schedule_free needs a number above 0")
        else:
            problem = "needs optimizer.name=schedule_free"
            self.require(self.averaging_power == 0, "averaging_power", problem)
        peak = self.peak_learning_rate
        if self.schedule is Schedule.inverse_sqrt:
            problem = (
                "needs optimizer.peak_learning_rate=N; optimizer.schedule=noam is this curve with "
                "the peak of the paper"
            )
            self.require(peak is not None, "schedule", problem)
        if self.schedule is Schedule.noam:
            problem = (
                "noam has its own peak; set optimizer.schedule=inverse_sqrt (or cosine, linear, "
                "...)"
            )
            self.require(peak is None, "peak_learning_rate", problem)
