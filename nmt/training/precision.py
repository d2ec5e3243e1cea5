"""The number format of products in training, and the scaling of the loss that float16 needs.

Weights, gradients, the optimizer, softmax and loss stay float32; autocast rounds the operands of
products alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Precision:
    """Computes products in `dtype` on `device`, and keeps small float16 gradients from becoming 0.

    For float16 the loss is multiplied by a large power of two, which halves when a gradient
    overflows and doubles after 2,000 updates without (Micikevicius et al., 2018, section 3.2). An
    update is `scale`, backward, `unscale`, then `step` if the gradient is finite, then `update`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, tf32: bool = False) -> None:
        """`tf32` lets a GPU round the operands of float32 products to 10 bits of mantissa."""
        self.dtype, self.device = dtype, device
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high" if tf32 else "highest")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that forward passes run in."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """Scale a loss before its backward pass."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the scaling in the gradients, once an update; what overflowed stays infinite."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        """Change the weights with learning rate `lr` by gradients that are unscaled and finite."""
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()

    def update(self) -> None:
        """Adapt the scale to what `unscale` has found in this update."""
        if self._scaler.is_enabled():
            self._scaler.update()

    @property
    def can_lower_scale(self) -> bool:
        """Whether an overflow may mean no more than a scale that is too high still."""
        return self._scaler.is_enabled() and self._scaler.get_scale() > 1

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on: primitives; nothing but for float16."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`; a run that changed to float16 or from it starts with a new scale."""
        if self._scaler.is_enabled() and state:
            self._scaler.load_state_dict(state)
