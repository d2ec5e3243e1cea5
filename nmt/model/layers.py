"""Norms and feed-forward layers of the Transformer.

Sections and equations refer to "Attention Is All You Need" (Vaswani et al., 2017).
"""

# D d_model, F d_ff

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.config import Activation, NormLayer

NORM_EPS = 1e-5

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.relu: torch.relu,
    Activation.gelu: F.gelu,
    Activation.silu: F.silu,
    Activation.swiglu: F.silu,  # applied to the gate, see `FeedForward`
}


class RmsNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * g (Zhang and Sennrich, 2019, equation 4), in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def new_norm(norm_layer: NormLayer, size: int) -> nn.Module:
    """Make a norm over the last dimension."""
    norm_class = RmsNorm if norm_layer is NormLayer.rms else nn.LayerNorm
    return norm_class(size, eps=NORM_EPS)


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W1 + b1) W2 + b2 (section 3.3, equation 2).

    `activation` may replace the max, and `dropout` follows it. SwiGLU computes
    (silu(x Wg + bg) * (x W1 + b1)) W2 + b2 (Shazeer, 2020, equation 6, with biases).
    """

    def __init__(
        self, d_model: int, d_ff: int, dropout: float, activation: Activation = Activation.relu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        # torch's default initialization; with F = 4 D, its bound for `outer` is 0.46 times Xavier's
        self.inner = nn.Linear(d_model, d_ff)  # W1, b1
        self.outer = nn.Linear(d_ff, d_model)  # W2, b2
        self.gate: nn.Linear | None = None
        if activation is Activation.swiglu:
            self.gate = nn.Linear(d_model, d_ff)  # Wg, bg

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        activate = ACTIVATIONS[self.activation]
        if self.gate is None:
            hidden = activate(self.inner(x))  # (..., F)
        else:
            hidden = activate(self.gate(x)) * self.inner(x)
        return self.outer(self.dropout(hidden))  # type: ignore[no-any-return]
