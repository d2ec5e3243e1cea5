"""What changes the weights: the learning rate schedule, the optimizer, gradient clipping, and the
exponential moving average (EMA) kept beside them.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from nmt.config import Optimizer, OptimizerConfig, Schedule, TrainConfig
from nmt.model.fast import FastTransformer
from nmt.training.muon import Muon


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of the update `step`, counted from 1.

    It rises linearly to its peak during warm-up, then falls by a factor that the schedule gives:
    noam and inverse_sqrt by Vaswani et al. (2017), equation 3, which from the paper's peak gives
    d_model^-0.5 * step^-0.5. The others reach 0 at `max_updates`: cosine by Loshchilov and Hutter
    (2017), equation 5, without restarts; linear; wsd, which stays at the peak before its last
    `decay_share`, by 1 - sqrt (Haegele et al., 2024, section 3).
    """
    assert step >= 1, "updates count from 1"
    peak, warmup_steps = peak_learning_rate(config), config.optimizer.warmup_steps
    schedule, start, end = config.optimizer.schedule, warmup_steps, config.max_updates
    if step <= warmup_steps:
        return peak * (step / warmup_steps)
    if schedule is Schedule.wsd:
        start = max(start, end - round(config.optimizer.decay_share * end))
    progress = min(max(step - start, 0) / max(end - start, 1), 1.0)
    if schedule is Schedule.cosine:
        return peak * (0.5 * (1 + math.cos(math.pi * progress)))
    if schedule is Schedule.linear:
        return peak * (1 - progress)
    if schedule is Schedule.wsd:
        return peak * (1 - math.sqrt(progress))
    return peak * math.sqrt(warmup_steps / step)


def peak_learning_rate(config: TrainConfig) -> float:
    """Return the learning rate at the end of warm-up; by default the peak of equation 3 of the
    paper, (d_model * warmup_steps)^-0.5.
    """
    optimizer = config.optimizer
    if optimizer.peak_learning_rate is not None:
        return optimizer.peak_learning_rate
    return float((config.model.d_model * optimizer.warmup_steps) ** -0.5)


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer of the config; the learning rate is set before each step.

    Adam is Kingma and Ba (2015), algorithm 1. AdamW is Loshchilov and Hutter (2019), algorithm 2,
    with the schedule on both terms: a matrix loses lr * `weight_decay` of itself an update, beside
    what Adam does, the embedding too. Biases and norms do not decay. Adafactor is torch's, whose
    step is the learning rate times the root mean square of the weight.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    settings: dict[str, Any] = {"lr": 0.0, "betas": (config.beta1, config.beta2)}
    settings |= {"eps": config.eps, "fused": True}  # one kernel, on the CPU, CUDA and Apple's GPU
    if config.name is Optimizer.adam:
        return torch.optim.Adam(named.values(), **settings)
    if config.name is Optimizer.muon:
        settings |= {"weight_decay": config.weight_decay, "momentum": config.momentum}
        return Muon(named, **settings)
    matrices, vectors = ([p for p in named.values() if (p.dim() >= 2) == x] for x in (True, False))
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if config.name is Optimizer.adafactor:
        return torch.optim.Adafactor(groups, lr=0.0)
    return torch.optim.AdamW(groups, **settings)


def clip_gradient(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradient down to `max_norm` (0 disables); return the norm that it had."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if hasattr(norm, "full_tensor"):  # of parts that ranks have, where the model is sharded
        norm = norm.full_tensor()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


class WeightAverage:
    """A copy of a model, whose weights become d * average + (1 - d) * weights after update t, with
    d = min(decay, t / (t + 9)).

    The lower d of the first updates makes it forget the random weights that training starts from,
    as in Marian (Junczys-Dowmunt et al., 2018). Averages of weights: Polyak and Juditsky (1992).
    """

    def __init__(self, model: FastTransformer, decay: float) -> None:
        self.decay, self.num_updates = decay, 0
        self.model = copy.deepcopy(model).requires_grad_(False)  # that has the average

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Include the weights of `model` after one more update."""
        self.num_updates += 1
        decay = min(self.decay, self.num_updates / (self.num_updates + 9))
        average_in_place = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        average_in_place([*self.model.parameters()], [*model.parameters()], self.num_updates)

    def load(self, weights: dict[str, Tensor], num_updates: int) -> None:
        """Continue from an average that had `weights` after `num_updates`."""
        self.num_updates = num_updates
        self.model.load_state_dict(weights)
