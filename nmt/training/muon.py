"""Muon (Jordan et al., 2024): an optimizer whose steps are orthogonal matrices.

`torch.optim.Muon` takes one step for a whole parameter. Here queries, keys and values, which one
parameter holds, need a step each.
"""

# R rows and C columns of a matrix

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial, as published
_NUM_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon with decoupled weight decay for matrices.

    The step of a matrix is its momentum (Nesterov's), made orthogonal, times 0.2 * sqrt(max(R, C)).
    With this factor it is as large as AdamW's, so that learning rates and weight decays for AdamW
    fit (Liu et al., 2025, section 2.2). A group with `is_fused_qkv` holds weights whose rows are
    queries, keys and values.
    """

    def __init__(
        self, params: list[dict[str, Any]], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"is_fused_qkv": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change the weights by their gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, group)

    def _step(self, weight: Tensor, group: dict[str, Any]) -> None:
        assert weight.grad is not None
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
        direction = weight.grad.lerp(momentum, group["momentum"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        num_rows, d_model = weight.shape
        sizes = [num_rows]
        if group["is_fused_qkv"]:
            kv_rows = (num_rows - d_model) // 2  # fewer than d_model if heads share keys and values
            sizes = [d_model, kv_rows, kv_rows]
        start = 0
        for size in sizes:
            block = weight[start : start + size]
            orthogonal = orthogonalize(direction[start : start + size]).to(block.dtype)
            block.add_(orthogonal, alpha=-group["lr"] * 0.2 * math.sqrt(max(block.shape)))
            start += size


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return the matrix (R, C) with the same singular vectors and singular values near 1.

    A Newton-Schulz iteration brings them to between about 0.7 and 1.2; in bfloat16 on a GPU.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)  # no singular value is above 1
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
