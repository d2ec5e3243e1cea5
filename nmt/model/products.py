"""Products of activations with weights, by the fastest library that torch brings for the processor.

On processors with AVX-512 that are not Intel's, MKL, which torch takes for float32, uses half of
their width; oneDNN uses all of it and is twice as fast there. Elsewhere these are torch's own.
"""

# N rows, I inner and O outer dimension

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROUNDING = ((8, 1), (32, 4), (256, 8), (512, 32))  # up to so many rows, to multiples of this
ROWS_STEP = 64
"""More rows are rounded up to a multiple of this for oneDNN; who comes with such a number spares
the copies.
"""


class Linear(nn.Linear):
    """x W^T + b, by `linear`; also by a block of the rows of W alone."""

    packed: dict[tuple[int, int], Tensor] | None = None  # blocks of W; see `freeze`

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        return self.block(input, 0, self.out_features)

    def relu(self, x: Tensor) -> Tensor:
        """Compute max(0, x W^T + b) of `x` (..., I)."""
        return self.block(x, 0, self.out_features, activation="relu")

    def block(self, x: Tensor, start: int, end: int, *, activation: str = "none") -> Tensor:
        """Compute the outputs from `start` to `end` alone, (..., end - start)."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if end - start < self.out_features:  # the gradient of a part is copied into one of 0
            weight, bias = weight[start:end], bias[start:end]
        return linear(x, _pack(self.packed, weight, x, start), bias, activation=activation)


class Embedding(nn.Embedding):
    """A vector (D) for each of V ids, and the logits of a vector by the same matrix."""

    packed: dict[tuple[int, int], Tensor] | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., D) to unnormalised log-probabilities (..., V)."""
        return linear(hidden, _pack(self.packed, self.weight, hidden, 0))


def freeze(model: nn.Module) -> None:
    """Let products with the weights of `model` use copies in the library's own order, made when
    first needed; the weights must not change any more.
    """
    for module in model.modules():
        if isinstance(module, Linear | Embedding):
            module.packed = {}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none"
) -> Tensor:
    """Compute x W^T + b, (..., O), of `x` (..., I), `weight` (O, I) and `bias` (O,), and with
    `activation` relu the larger of that and 0.
    """
    if not _takes_onednn(x):
        y = F.linear(x, weight, bias)
        return torch.relu(y) if activation == "relu" else y
    if torch.is_grad_enabled():
        return _OneDnnLinear.apply(x, weight, bias, activation)  # type: ignore[no-untyped-call, no-any-return]
    return _onednn(x, weight, bias, activation)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a b, (N, O), of `a` (N, I) and `b` (I, O), without a gradient."""
    return _onednn(a, b.T) if _takes_onednn(a) else a @ b


def product_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """Compute a^T b, (O, I), the sum over rows of `a` (N, O) and `b` (N, I), without a gradient."""
    if not _takes_onednn(a):
        return a.T @ b
    return _call(_rounded(a).T, _rounded(b).T)


class _OneDnnLinear(torch.autograd.Function):
    """`linear` with its gradients: dx = dy W, dW = dy^T x, db = sum of dy over rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
    ) -> Tensor:
        rows = _rounded(x.reshape(-1, x.size(-1)))  # (N, I)
        y = _call(rows, weight, bias, activation)[: x.shape[:-1].numel()]
        ctx.is_relu = activation == "relu"
        ctx.save_for_backward(rows, weight, *((y,) if ctx.is_relu else ()))
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, *others = ctx.saved_tensors
        shape = grads[0].shape
        grad = grads[0].reshape(-1, shape[-1])  # (N, O)
        for y in others:
            grad = torch.ops.aten.threshold_backward(grad, y, 0)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_bias = grad.sum(0) if needs_bias else None
        num_rows, grad = len(grad), _rounded(grad)
        grad_x = None
        if needs_x:
            grad_x = _call(grad, weight.T)[:num_rows].view(*shape[:-1], -1)
        return grad_x, product_of_rows(grad, rows) if needs_weight else None, grad_bias, None


def _onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    rows = _rounded(x.reshape(-1, x.size(-1)))  # (N, I)
    y = _call(rows, weight, bias, activation)  # (N or more, O)
    return y[: x.shape[:-1].numel()].view(*x.shape[:-1], -1)


def _call(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")  # type: ignore[no-any-return]


def rounded(num_rows: int) -> int:
    """Return a number of rows that comes often, and at least `num_rows`.

    For every number of rows oneDNN writes a kernel of its own, which takes milliseconds and a
    megabyte, and keeps a thousand of them.
    """
    step = next((step for most, step in _ROUNDING if num_rows <= most), ROWS_STEP)
    return num_rows + -num_rows % step


def _rounded(rows: Tensor) -> Tensor:
    """Return `rows` (N, D) with rows of 0 after them, up to a number that comes often."""
    missing = rounded(len(rows)) - len(rows)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _pack(
    packed: dict[tuple[int, int], Tensor] | None, weight: Tensor, x: Tensor, start: int
) -> Tensor:
    """Return rows of a weight as they are best multiplied by, where they are frozen."""
    if packed is None or torch.is_grad_enabled() or not _takes_onednn(x):
        return weight
    key = start, len(weight)
    if key not in packed:
        packed[key] = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed[key]


def _takes_onednn(x: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # first, since what follows breaks a graph
        and x.device.type == "cpu"
        and x.dtype is torch.float32
        and x.numel() > 0  # of nothing oneDNN makes no product
        and is_onednn_faster()
        and not torch.is_autocast_enabled("cpu")
    )


@functools.cache
def is_onednn_faster() -> bool:
    """Say whether oneDNN has wider instructions than MKL on this processor."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    operations = ("_linear_pointwise", "_reorder_linear_weight")  # private, so look first
    if not all(hasattr(torch.ops.mkldnn, name) for name in operations):
        return False
    info = Path("/proc/cpuinfo")
    return info.is_file() and "GenuineIntel" not in info.read_text(encoding="utf-8")
