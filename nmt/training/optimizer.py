"""Adam as the paper sets it (section 5.3), and its variants.

One more optimizer is one more function in `_MAKERS`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nmt.config import Optimizer, OptimizerConfig

FUSED_DEVICES = ("cpu", "cuda", "mps")  # where torch has had one kernel for the step since 2.6


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer of the config, fused where torch has that; the learning rate is set before
    each step.
    """
    return _MAKERS[config.name](model, config)


def _adam(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Kingma and Ba (2015), algorithm 1."""
    return torch.optim.Adam(model.parameters(), **_adam_settings(model, config))


def _adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Loshchilov and Hutter (2019), algorithm 2, with the schedule on both terms: a matrix loses
    lr * `weight_decay` of itself an update, beside what Adam does.

    Biases and norms have nothing to overfit with and keep their size. The shared embedding is the
    output's matrix too, and decays like the others.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **_adam_settings(model, config))


def _adam_settings(model: nn.Module, config: OptimizerConfig) -> dict[str, Any]:
    return {
        "lr": 0.0,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "fused": next(model.parameters()).device.type in FUSED_DEVICES,
    }


_MAKERS = {Optimizer.adam: _adam, Optimizer.adamw: _adamw}


def clip_gradient(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradient down to `max_norm` (0 disables); return the norm that it had."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
