"""Linear layers and dropout as fast as the CPU allows.

On CPUs with AVX-512 that are not Intel's, MKL, which torch uses for float32, uses half of their
width; oneDNN uses all of it and is twice as fast there. With AVX2 it multiplies few rows by a large
matrix in its own order faster. Elsewhere linear layers are torch's own.
torch's dropout draws a float for every element on a CPU and keeps it for the backward pass; here an
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
"""More than 512 rows are padded to a multiple of this for oneDNN; such a number saves the copy."""
_ROUNDING = ((8, 1), (32, 4), (256, 8), (512, 32))  # up to so many rows, to multiples of this
_LARGE = 1 << 19  # elements of a matrix for which oneDNN's calls, slower than MKL's, pay with AVX2
_REORDERED = 1 << 18  # elements; copies of smaller matrices for one update cost more than they save
_LEVELS = 1 << 16  # of a dropout probability: 16 bits an element
_DRAWS = 4  # elements for which one 64-bit number suffices


class Reordered(dict[tuple[int, int], tuple[Tensor, Tensor | None]]):
    """Copies of blocks of a weight matrix in the library's own order, and of their bias, by first
    row and size; `dtype` is their number format.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype


Rounded = dict[tuple[int, int], tuple[int, Tensor, Tensor]]
"""Copies in bfloat16 of blocks of a weight matrix, by first row and size: the version of the matrix
that they were made of, and the block and its transpose, large ones in the library's own order.
"""


class FastLinear(nn.Linear):
    """x W^T + b, by `linear`; also by a block of the rows of W alone."""

    reordered: Reordered | None = None  # a dictionary where the weights no longer change
    rounded: Rounded | None = None  # see `round_once`

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        return self.block(input, 0, self.out_features)

    def block(self, x: Tensor, start: int, end: int, *, activation: str = "none") -> Tensor:
        """Compute the outputs from `start` to `end` alone, (..., end - start)."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if end - start < self.out_features:  # the gradient of a part is copied into one of 0
            weight, bias = weight[start:end], bias[start:end]
        if self.rounded is not None and _takes_bfloat16(x):
            both = _round(self.rounded, weight, start)
            return _BFloat16Linear.apply(x, weight, bias, activation, both)  # type: ignore[no-untyped-call, no-any-return]
        return linear(x, *reorder(self.reordered, weight, bias, x, start), activation=activation)

    def frozen_function(
        self, end: int | None = None, activation: str = "none"
    ) -> Callable[[Tensor], Tensor]:
        """Return the function of the first `end` outputs, by default all, for weights that do not
        change any more, on a CPU.

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
        narrow = x.bfloat16() if is_narrowed(inner.reordered, x) else x  # and so is what is hidden
        hidden = inner.block(narrow, 0, inner.out_features, activation="relu")  # (..., F)
        return self.outer(self.dropout(hidden)).to(x.dtype)  # type: ignore[no-any-return]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none"
) -> Tensor:
    """Compute x W^T + b, (..., O), of `x` (..., I), `weight` (O, I) and `bias` (O,), and with
    `activation` relu the larger of that and 0; with weights that `reorder` made bfloat16 by
    products of bfloat16, in the format of `x` again.
    """
    if weight.is_mkldnn:
        return _onednn(x.to(weight.dtype), weight, bias, activation).to(x.dtype)
    if not _takes_onednn(x):
        y = F.linear(x, weight, bias)
        return torch.relu(y) if activation == "relu" else y
    if torch.is_grad_enabled():
        return _OneDnnLinear.apply(x, weight, bias, activation)  # type: ignore[no-untyped-call, no-any-return]
    return _onednn(x, weight, bias, activation)


def transposed_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute a^T b, (O, I), the sum over rows of `a` (N, O) and `b` (N, I), without a gradient."""
    if not _takes_onednn(a):
        return a.T @ b
    rows = _pad_rows(a).T, _pad_rows(b).T
    return torch.ops.mkldnn._linear_pointwise(*rows, None, "none", [], "")  # type: ignore[no-any-return]


def reorder(
    reordered: Reordered | None, weight: Tensor, bias: Tensor | None, x: Tensor, start: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Return `weight`, the rows from `start` on of a matrix, in the order that is the fastest to
    multiply `x` with, and `bias`, both in the format of `reordered`, which keeps them.
    """
    if reordered is None or torch.is_grad_enabled():
        return weight, bias
    is_narrow = is_narrowed(reordered, x)
    if not is_narrow and not _takes_onednn(x, weight.numel()):
        return weight, bias
    key = start, len(weight)
    if key not in reordered:
        if is_narrow:
            weight, bias = weight.bfloat16(), None if bias is None else bias.bfloat16()
        reordered[key] = torch.ops.mkldnn._reorder_linear_weight(weight), bias
    return reordered[key]


def is_narrowed(reordered: Reordered | None, x: Tensor) -> bool:
    """Return whether `x` is to be multiplied in bfloat16."""
    return reordered is not None and reordered.dtype is torch.bfloat16 and x.numel() > 0


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16, and torch the operators
    that use them.
    """
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private, so look first
    return can_reorder() and any(getattr(torch.cpu, name, bool)() for name in checks)


def round_once(model: nn.Module) -> None:
    """Let linear layers, under autocast to bfloat16 on a CPU with instructions for it, keep rounded
    weights, 4 bytes each, while the version of the weights is the same.
    """
    if not can_reorder() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for module in model.modules():
        if isinstance(module, FastLinear):
            module.rounded = {}


def _round(rounded: Rounded, weight: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return `weight`, the rows from `start` on of a matrix, and its transpose, both rounded."""
    place = start, len(weight)
    if place not in rounded or rounded[place][0] != weight._version:
        block = weight.detach().bfloat16()
        both = block, block.T
        if block.numel() >= _REORDERED:
            both = tuple(torch.ops.mkldnn._reorder_linear_weight(w.contiguous()) for w in both)
        rounded[place] = weight._version, *both
    return rounded[place][1:]


class _BFloat16Linear(torch.autograd.Function):
    """`linear` and its gradients with rounded factors, as autocast has it, but kept weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str,
        both: tuple[Tensor, Tensor],
    ) -> Tensor:  # fmt: skip
        x = x.bfloat16()
        y = _onednn(x, both[0], None if bias is None else bias.bfloat16(), activation)
        ctx.save_for_backward(x, *((y,) if activation == "relu" else ()))
        ctx.transposed = both[1]
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *activated = ctx.saved_tensors
        grad = grads[0]  # (..., O)
        if activated:
            grad = torch.ops.aten.threshold_backward(grad, *activated, 0)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.size(-1))  # (N, O)
        return (
            _onednn(grad, ctx.transposed) if needs_x else None,
            (rows.T @ x.reshape(-1, x.size(-1))).float() if needs_weight else None,
            rows.sum(0, dtype=torch.float32) if needs_bias else None,
            None,
            None,
        )


class _OneDnnLinear(torch.autograd.Function):
    """`linear` with its gradients: dx = dy W, dW = dy^T x, db = sum of dy over rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
    ) -> Tensor:
        y = _onednn(x, weight, bias, activation)
        ctx.save_for_backward(x, weight, *((y,) if activation == "relu" else ()))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *others = ctx.saved_tensors
        grad = grads[0]  # (..., O)
        for y in others:
            grad = torch.ops.aten.threshold_backward(grad, y, 0)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.size(-1))  # (N, O)
        return (
            _onednn(grad, weight.T) if needs_x else None,
            transposed_matmul(rows, x.reshape(-1, x.size(-1))) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
            None,
        )


def _onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    if x.dim() == 2 and rounded(x.size(0)) == x.size(0):  # as in most steps of a search
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")  # type: ignore[no-any-return]
    rows = _pad_rows(x.reshape(-1, x.size(-1)))  # (N, I)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, activation, [], "")
    return y[: x.shape[:-1].numel()].view(*x.shape[:-1], -1)  # (..., O)


def rounded(num_rows: int) -> int:
    """Return a number of rows that is common, and at least `num_rows`.

    For every number of rows oneDNN generates another kernel, which takes milliseconds and a
    megabyte, and it keeps a thousand of them.
    """
    step = next((step for most, step in _ROUNDING if num_rows <= most), ROWS_STEP)
    return num_rows + -num_rows % step


def _pad_rows(rows: Tensor) -> Tensor:
    """Return `rows` (N, D) with rows of 0 after them, up to a number that is common."""
    missing = rounded(rows.size(0)) - rows.size(0)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _takes_onednn(x: Tensor, num_packed: int = 0) -> bool:
    return (
        not torch.compiler.is_compiling()  # first, since what follows breaks a graph
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
    """Return whether torch has oneDNN's linear layers with weights in its own order."""
    operators = ("_linear_pointwise", "_reorder_linear_weight")  # private, so look first
    return all(hasattr(torch.ops.mkldnn, name) for name in operators)


@functools.cache
def is_onednn_faster(num_packed: int = 0) -> bool:
    """Return whether oneDNN is faster than MKL on this CPU, with a matrix of so many elements in
    its own order, or with any.
    """
    capability, info = torch.backends.cpu.get_cpu_capability(), Path("/proc/cpuinfo")
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
        dropped = round(p * _LEVELS)  # of _LEVELS
        draws = torch.empty(-(-x.numel() // _DRAWS), dtype=torch.int64).random_(-(1 << 63), None)
        bits = draws.view(torch.int16)[: x.numel()]  # evenly from -2^15 to 2^15 - 1
        keep = torch.empty(x.shape, dtype=torch.int8)  # a boolean takes 5 times as long to compute
        torch.ge(bits.view(x.shape), dropped - _LEVELS // 2, out=keep)
        ctx.save_for_backward(keep)
        ctx.scale = _LEVELS / (_LEVELS - dropped)
        return _scale_kept(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return _scale_kept(grads[0], keep, ctx.scale), None


def _scale_kept(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Scale what is kept, where `keep` is 1; products take a tenth of the time of `where`, which
    goes from element to element and guesses what comes next.
    """
    return keep.to(x.dtype).mul_(x).mul_(scale)
