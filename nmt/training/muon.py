"""Muon (Jordan et al., 2024): steps whose matrices are orthogonal."""

# R rows and C columns of a matrix

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_LAYERS = ("encoder_layers.", "decoder_layers.")
_FUSED = ".in_projection.weight"  # the matrices of queries, keys and values, one above the other
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial, as published
_NUM_STEPS = 5


class Muon(torch.optim.AdamW):
    """Muon for the weight matrices of layers, AdamW for embeddings, output, biases and norms.

    The step of a matrix is its momentum (Nesterov's), made orthogonal, times 0.2 * sqrt(max(R, C)),
    with which it is as large as AdamW's, so that the learning rate and the decay of AdamW fit
    (Liu et al., 2025, section 2.2). Queries, keys and values have a step each.
    """

    def __init__(
        self, named: Mapping[str, Tensor], *, momentum: float, weight_decay: float, **adamw: Any
    ) -> None:
        """Take parameters by their names in the model; `adamw` are settings for the others."""
        groups = [{"params": [], "weight_decay": decay} for decay in (weight_decay,) * 3 + (0.0,)]
        for group, num_blocks in zip(groups, (3, 1, 0, 0), strict=True):
            group["num_blocks"] = num_blocks  # matrices in a weight; 0: AdamW's
        for name, parameter in named.items():
            is_matrix = parameter.dim() == 2
            is_own = is_matrix and name.startswith(_LAYERS) and name.endswith(".weight")
            kind = int(not name.endswith(_FUSED)) if is_own else 2 + int(not is_matrix)
            groups[kind]["params"].append(parameter)  # type: ignore[attr-defined]
        self.momentum = momentum
        super().__init__(groups, **adamw)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change the weights by their gradients."""
        groups = self.param_groups
        for group in groups:
            for weight in group["params"] if group["num_blocks"] else ():
                if weight.grad is not None:
                    self._step(weight, group)
        self.param_groups = [group for group in groups if not group["num_blocks"]]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups

    def _step(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:  # AdamW looks for a step in every state that it loads
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["momentum_buffer"] = torch.zeros_like(weight)
        state["step"] += 1
        mean = state["momentum_buffer"].lerp_(weight.grad, 1 - self.momentum)
        ahead = weight.grad.lerp(mean, self.momentum)  # type: ignore[union-attr]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        num_rows, d_model = weight.shape
        rest = (num_rows - d_model) // 2  # of keys, of values: fewer than of queries if shared
        sizes = [d_model, rest, rest] if group["num_blocks"] == 3 else num_rows
        for block, step in zip(*(torch.split(x, sizes) for x in (weight, ahead)), strict=True):
            size = 0.2 * math.sqrt(max(block.shape))
            block.add_(orthogonalize(step).to(block.dtype), alpha=-group["lr"] * size)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of `matrix` (R, C), and singular values between
    about 0.7 and 1.2, by a Newton-Schulz iteration; in bfloat16 on a GPU.
    """
    a, b, c = _COEFFICIENTS
    x: Tensor = matrix.bfloat16() if matrix.is_cuda else matrix
    x = x.T if x.size(0) > x.size(1) else x
    x = x / x.norm().clamp(min=1e-7)  # no singular value is above 1
    for _ in range(_NUM_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x
