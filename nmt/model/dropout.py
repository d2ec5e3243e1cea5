"""Dropout (Srivastava et al., 2014), with cheap random bits on a processor.

torch draws a float for every element there and keeps it for the way back; here an element costs 16
random bits and one byte of memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 1 << 16  # of a share: 16 bits an element
_DRAWS = 4  # elements for which one 64-bit number suffices


class Dropout(nn.Module):
    """Set a `share` of the elements to 0 in training and scale the others, so that their mean
    stays.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor of any shape to one like it."""
        if not self.training or self.share == 0:
            return x
        if x.device.type == "cpu" and self.share < 1 and not torch.compiler.is_compiling():
            return _Dropout.apply(x, self.share)  # type: ignore[no-untyped-call, no-any-return]
        return F.dropout(x, self.share)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        dropped = round(share * _LEVELS)  # of _LEVELS
        keep = _random_bits(x.numel()).ge(dropped - _LEVELS // 2).view(x.shape)
        ctx.save_for_backward(keep)
        ctx.scale = _LEVELS / (_LEVELS - dropped)
        return _mask(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return _mask(grads[0], keep, ctx.scale), None


def _mask(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Scale what is kept; a tensor for 0 spares `where` the slow way that a number takes."""
    return torch.where(keep, x, x.new_zeros(())).mul_(scale)


def _random_bits(count: int) -> Tensor:
    """Draw (count,) whole numbers of 16 bits, evenly from -2^15 to 2^15 - 1."""
    draws = torch.empty(-(-count // _DRAWS), dtype=torch.int64).random_(-(1 << 63), None)
    return draws.view(torch.int16)[:count]
