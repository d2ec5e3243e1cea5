"""Adam as the paper sets it (section 5.3), and one step of it under the schedule."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nmt.config import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Adam:
    """Make Adam in torch's fused form; the learning rate is set before each step."""
    return torch.optim.Adam(
        model.parameters(),
        lr=0.0,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=next(model.parameters()).device.type in ("cpu", "cuda"),
    )


def clip_gradient(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradient down to `max_norm` (0 disables); return the norm that it had."""
    limit = max_norm if max_norm > 0 else float("inf")
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def step(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Change the weights with learning rate `lr` and drop the gradient."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
