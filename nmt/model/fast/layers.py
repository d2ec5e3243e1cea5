"""Faster linear layers and dropout for CPUs.

torch multiplies float32 matrices with MKL. On AVX-512 CPUs of other vendors than Intel, MKL uses
half of the vector width and oneDNN all of it, which is twice as fast. On AVX2 CPUs oneDNN is faster
for few rows and a large weight in its own layout. Elsewhere the linear layers are torch's.

On a CPU, torch's dropout draws a float per element and keeps it for the backward pass. Here an
element takes 16 random bits and one byte of memory.
"""

# N rows, I inner and O outer dimension

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.config import Activation
from nmt.model.transformer import FeedForward

ROWS_STEP = 64
"""Above 512 rows, oneDNN pads to a multiple of this; a multiple needs no copy."""
_ROUNDING = ((8, 1), (32, 4), (256, 8), (512, 32))  # (largest number of rows, its multiple)
_LARGE = 1 << 19  # elements of a weight from which oneDNN's slower calls pay off with AVX2
_REORDERED = 1 << 18  # elements of a weight from which a copy pays off within one update
_LEVELS = 1 << 16  # a dropout probability is a multiple of 1 / _LEVELS: 16 bits per element
_DRAWS = 4  # elements per random 64-bit number


class Reordered(dict[tuple[int, int], tuple[Tensor, Tensor | None]]):
    """Copies of blocks of a weight in oneDNN's layout, and of their bias, by (first row, number of
    rows). `dtype` is their number format.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype


Rounded = dict[tuple[int, int], tuple[int, Tensor, Tensor]]
"""Copies in bfloat16 of blocks of a weight, by (first row, number of rows): the version of the
weight when it was copied, the block and its transpose, large ones in oneDNN's layout.
"""


class FastLinear(nn.Linear):
    """x W^T + b by `linear`; `block` uses some rows of W only."""

    reordered: Reordered | None = None  # set by `freeze`: weights do not change after that
    rounded: Rounded | None = None  # see `round_once`

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        return self.block(input, 0, self.out_features)

    def block(self, x: Tensor, start: int, end: int, *, activation: str = "none") -> Tensor:
        """Compute only the outputs from `start` to `end`, (..., end - start)."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if end - start < self.out_features:  # slicing costs a copy in the backward pass
            weight, bias = weight[start:end], bias[start:end]
        if self.rounded is not None and _takes_bfloat16(x):
            copies = _round(self.rounded, weight, start)
            return _OneDnnLinear.apply(x, weight, bias, activation, copies)  # type: ignore[no-untyped-call, no-any-return]
        weight, reordered_bias = reorder(self.reordered, weight, bias, x, start)
        return linear(x, weight, reordered_bias, activation=activation)

    def frozen_function(
        self, end: int | None = None, activation: str = "none"
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that computes the first `end` outputs, by default all, on a CPU with
        frozen weights.

        It takes (N, I) where N is one of `rounded`. With bfloat16 weights it returns float32, or
        bfloat16 with an activation.
        """
        rows = self.weight[:end]
        weight, bias = reorder(self.reordered, rows, self.bias[:end], rows[:1])
        if not weight.is_mkldnn:
            if activation == "relu":
                return lambda x: torch.relu(F.linear(x, weight, bias))
            return lambda x: F.linear(x, weight, bias)
        multiply = torch.ops.mkldnn._linear_pointwise
        if weight.dtype is torch.float32:
            return lambda x: multiply(x, weight, bias, activation, [], "")
        if activation == "relu":
            return lambda x: multiply(x.bfloat16(), weight, bias, activation, [], "")
        return lambda x: multiply(x.bfloat16(), weight, bias, activation, [], "").float()


class FastFeedForward(FeedForward):
    """`FeedForward` with a ReLU in the first linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        if self.activation is not Activation.relu:
            return super().forward(x)
        inner: Any = self.inner
        narrow = x.bfloat16() if is_narrowed(inner.reordered, x) else x
        hidden = inner.block(narrow, 0, inner.out_features, activation="relu")  # (..., F)
        return self.outer(self.dropout(hidden)).to(x.dtype)  # type: ignore[no-any-return]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none"
) -> Tensor:
    """Compute x W^T + b, (..., O), of `x` (..., I), `weight` (O, I) and `bias` (O,), with a ReLU if
    `activation` is relu. A bfloat16 weight of `reorder` multiplies in bfloat16; the result has the
    format of `x`.
    """
    if weight.is_mkldnn:
        return _onednn(x.to(weight.dtype), weight, bias, activation).to(x.dtype)
    if not _takes_onednn(x):
        y = F.linear(x, weight, bias)
        return torch.relu(y) if activation == "relu" else y
    if torch.is_grad_enabled():
        return _OneDnnLinear.apply(x, weight, bias, activation, None)  # type: ignore[no-untyped-call, no-any-return]
    return _onednn(x, weight, bias, activation)


def transposed_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute a^T b, (O, I), the sum over rows of `a` (N, O) and `b` (N, I), without a gradient."""
    if not _takes_onednn(a):
        return a.T @ b
    multiply = torch.ops.mkldnn._linear_pointwise
    return multiply(_pad_rows(a).T, _pad_rows(b).T, None, "none", [], "")  # type: ignore[no-any-return]


def reorder(
    reordered: Reordered | None, weight: Tensor, bias: Tensor | None, x: Tensor, start: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Return `weight`, the rows of a matrix from `start` on, in the fastest layout to multiply `x`
    with, and `bias`, both in the format of `reordered`, which keeps them.
    """
    if reordered is None or torch.is_grad_enabled():
        return weight, bias
    is_narrow = is_narrowed(reordered, x)
    if not is_narrow and not _takes_onednn(x, weight.numel()):
        return weight, bias
    key = (start, len(weight))
    if key not in reordered:
        if is_narrow:
            weight = weight.bfloat16()
            bias = None if bias is None else bias.bfloat16()
        reordered[key] = torch.ops.mkldnn._reorder_linear_weight(weight), bias
    return reordered[key]


def is_narrowed(reordered: Reordered | None, x: Tensor) -> bool:
    """Return whether to multiply `x` in bfloat16."""
    return reordered is not None and reordered.dtype is torch.bfloat16 and x.numel() > 0


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 instructions, and torch the operators that use them."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private, so look first
    return can_reorder() and any(getattr(torch.cpu, name, bool)() for name in checks)


def round_once(model: nn.Module) -> None:
    """Let linear layers keep rounded copies of their weights (4 bytes a weight) until the weights
    change, for autocast to bfloat16 on a CPU. Rounding in every micro-batch would take longer.
    """
    if not can_reorder() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for module in model.modules():
        if isinstance(module, FastLinear):
            module.rounded = {}


def _round(rounded: Rounded, weight: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return `weight`, the rows of a matrix from `start` on, and its transpose, both rounded."""
    key = (start, len(weight))
    if key not in rounded or rounded[key][0] != weight._version:
        block = weight.detach().bfloat16()
        transposed = block.T
        if block.numel() >= _REORDERED:
            transposed = torch.ops.mkldnn._reorder_linear_weight(transposed.contiguous())
            block = torch.ops.mkldnn._reorder_linear_weight(block)
        rounded[key] = (weight._version, block, transposed)
    return rounded[key][1:]


class _OneDnnLinear(torch.autograd.Function):
    """`linear` with its gradients: dx = dy W, dW = dy^T x, db = sum of dy over rows.

    With rounded copies of the weight all of them are computed in bfloat16, as under autocast.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        copies: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """`copies` are the rounded weight and its transpose."""
        factor = weight
        ctx.transposed = None
        if copies is not None:
            factor, ctx.transposed = copies
            x = x.bfloat16()
            bias = None if bias is None else bias.bfloat16()
        y = _onednn(x, factor, bias, activation)
        ctx.save_for_backward(x, weight, y if activation == "relu" else None)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, activated = ctx.saved_tensors
        grad = grads[0]  # (..., O)
        if activated is not None:
            grad = torch.ops.aten.threshold_backward(grad, activated, 0)
        rows = grad.reshape(-1, grad.size(-1))  # (N, O)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _onednn(grad, weight.T if ctx.transposed is None else ctx.transposed)
        if ctx.needs_input_grad[1]:
            product = transposed_matmul(rows, x.reshape(-1, x.size(-1)))
            grad_weight = product.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0, dtype=weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None


def _onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    if x.dim() == 2 and rounded(x.size(0)) == x.size(0):  # most steps of a search
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")  # type: ignore[no-any-return]
    rows = x.reshape(-1, x.size(-1))  # (N, I)
    y = torch.ops.mkldnn._linear_pointwise(_pad_rows(rows), weight, bias, activation, [], "")
    return y[: len(rows)].view(x.shape[:-1] + y.shape[1:])  # type: ignore[no-any-return]  # (..., O)


def rounded(num_rows: int) -> int:
    """Round a number of rows up to one of few.

    oneDNN generates a kernel for each number of rows, in milliseconds and a megabyte, and keeps a
    thousand of them.
    """
    step = next((step for limit, step in _ROUNDING if num_rows <= limit), ROWS_STEP)
    return num_rows + -num_rows % step


def _pad_rows(rows: Tensor) -> Tensor:
    """Append rows of 0 to `rows` (N, D), up to the number of `rounded`."""
    missing = rounded(rows.size(0)) - rows.size(0)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _takes_onednn(x: Tensor, num_packed: int = 0) -> bool:
    return (
        not torch.compiler.is_compiling()  # first: the other checks break a graph
        and x.device.type == "cpu"
        and x.dtype is torch.float32
        and x.numel() > 0  # oneDNN takes no empty matrices
        and is_onednn_faster(num_packed)
        and not torch.is_autocast_enabled("cpu")
    )


def _takes_bfloat16(x: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.numel() > 0
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is torch.bfloat16
        and torch.is_grad_enabled()
    )


def can_reorder() -> bool:
    """Return whether torch has oneDNN's linear layers with weights in its layout."""
    operators = ("_linear_pointwise", "_reorder_linear_weight")  # private, so look first
    return all(hasattr(torch.ops.mkldnn, name) for name in operators)


@functools.cache
def is_onednn_faster(num_packed: int = 0) -> bool:
    """Return whether oneDNN is faster than MKL on this CPU, for a weight of `num_packed` elements
    in oneDNN's layout; 0: for any weight.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    info = Path("/proc/cpuinfo")
    if not (capability == "AVX512" or capability == "AVX2" and num_packed >= _LARGE):
        return False
    text = info.read_text(encoding="utf-8") if info.is_file() else "GenuineIntel"
    return can_reorder() and "GenuineIntel" not in text


class FastDropout(nn.Dropout):
    """Dropout (Srivastava et al., 2014), with cheap random bits on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Map a tensor of any shape to one like it."""
        if not self.training or self.p == 0:
            return input
        if input.device.type == "cpu" and self.p < 1 and not torch.compiler.is_compiling():
            return _CpuDropout.apply(input, self.p)  # type: ignore[no-untyped-call, no-any-return]
        return F.dropout(input, self.p)


class _CpuDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        num_dropped = round(p * _LEVELS)
        draws = torch.empty(-(-x.numel() // _DRAWS), dtype=torch.int64).random_(-(1 << 63), None)
        bits = draws.view(torch.int16)[: x.numel()]  # uniform from -2^15 to 2^15 - 1
        keep = torch.empty(x.shape, dtype=torch.int8)  # a boolean takes 5 times as long to compute
        torch.ge(bits.view(x.shape), num_dropped - _LEVELS // 2, out=keep)
        ctx.save_for_backward(keep)
        ctx.scale = _LEVELS / (_LEVELS - num_dropped)
        return _scale_kept(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return _scale_kept(grads[0], keep, ctx.scale), None


def _scale_kept(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Return `x` times `scale` where `keep` is 1, else 0. Multiplying takes a tenth of the time of
    `where`, which branches on each element.
    """
    return keep.to(x.dtype).mul_(x).mul_(scale)
