"""The simpler simple recurrent unit (SSRU), which may replace the decoder's self-attention."""

# B sentences, T tokens of the longest one, D d_model

from __future__ import annotations

import torch
from torch import Tensor, nn


class Ssru(nn.Module):
    """The simpler simple recurrent unit of Kim et al. (2019, section 3.2).

    f_t = sigmoid(W_f x_t + b_f)
    c_t = f_t * c_{t-1} + (1 - f_t) * (W x_t), with c_0 = 0
    o_t = max(0, c_t)
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.forget_gate = nn.Linear(d_model, d_model)  # W_f, b_f
        self.candidate = nn.Linear(d_model, d_model, bias=False)  # W
        nn.init.xavier_uniform_(self.forget_gate.weight)
        nn.init.xavier_uniform_(self.candidate.weight)
        nn.init.zeros_(self.forget_gate.bias)

    def forward(self, x: Tensor, context: object) -> Tensor:
        """Map (B, T, D) to (B, T, D). Padding must be at the end; the `context` is not used."""
        gates, candidates = self.project(x)
        state = torch.zeros_like(candidates[:, 0])  # c_0, (B, D)
        states = []
        for t in range(x.size(1)):
            state = gates[:, t] * state + (1 - gates[:, t]) * candidates[:, t]
            states.append(state)
        return torch.relu(torch.stack(states, dim=1)).to(x.dtype)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gates f and the candidates W x of `x` (..., D), at least in float32.

        In lower precision, rounding errors would add up over time.
        """
        gates = self.forget_gate(x)
        candidates = self.candidate(x)
        dtype = torch.promote_types(candidates.dtype, torch.float32)
        return torch.sigmoid(gates.to(dtype)), candidates.to(dtype)
