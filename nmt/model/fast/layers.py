"""Faster linear layers and dropout for CPUs.

torch multiplies float32 matrices with MKL. On AVX-512 CPUs that are not from Intel, MKL uses only
half of the vector width, and oneDNN is twice as fast. On AVX2 CPUs, oneDNN is faster for few rows
and a large weight in its own layout. On other CPUs, torch's linear layers are used.

On a CPU, torch's dropout draws a float for each element, and keeps it for the backward pass.
`FastDropout` draws 16 random bits, and keeps one byte.
"""

# N rows, I input and O output features

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.config import Activation
from nmt.model.layers import FeedForward

ROWS_STEP = 64
"""More than 512 rows are padded to a multiple of this, which costs a copy."""
_ROW_MULTIPLES = ((8, 1), (32, 4), (256, 8), (512, 32))
"""Pairs (n, m): up to n rows are padded to a multiple of m."""
_MIN_AVX2_WEIGHT = 1 << 19  # on AVX2 CPUs, oneDNN is faster for weights of at least this size
_MIN_REORDERED_WEIGHT = 1 << 18  # for weights of this size, a copy pays off within one update
_MAX_ADDMM_PRODUCTS = 1 << 19  # rows * weights; up to this, `addmm` is faster than oneDNN
_DROPOUT_LEVELS = 1 << 16  # values of 16 random bits: probabilities are rounded to 1 / 2^16
_ELEMENTS_PER_DRAW = 4  # a random 64-bit number serves four elements


class ReorderedWeights(dict[tuple[int, int], tuple[Tensor, Tensor | None]]):
    """Copies of blocks of rows of a weight in oneDNN's layout, and of their biases.

    The keys are (first row, number of rows); `dtype` is the dtype of all copies.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype


class RoundedBlock(NamedTuple):
    """A block of rows of a weight in bfloat16; a large block is in oneDNN's layout."""

    version: int  # torch's count of in-place changes of the weight when it was copied
    weight: Tensor
    transposed: Tensor


RoundedWeights = dict[tuple[int, int], RoundedBlock]
"""Copies of blocks of a weight. The keys are (first row, number of rows)."""


class FastLinear(nn.Linear):
    """x W^T + b, by the fastest kernel; `block` computes only some of the outputs."""

    reordered_weights: ReorderedWeights | None = None  # set by `prepare_for_inference`
    rounded_weights: RoundedWeights | None = None  # set by `cache_rounded_weights`

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        return self.block(input, 0, self.out_features)

    def block(self, x: Tensor, start: int, end: int, *, activation: str = "none") -> Tensor:
        """Compute only the outputs from `start` to `end`, (..., end - start)."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if end - start < self.out_features:  # slicing costs a copy in the backward pass
            weight = weight[start:end]
            bias = self._slice_bias(start, end)
        if self.rounded_weights is not None and _autocasts_to_bfloat16(x):
            rounded = _round_block(self.rounded_weights, weight, start)
            return _OneDnnLinear.apply(x, weight, bias, activation, rounded)  # type: ignore[no-untyped-call, no-any-return]
        weight, reordered_bias = reorder(self.reordered_weights, weight, bias, x, start)
        return linear(x, weight, reordered_bias, activation=activation)

    def _slice_bias(self, start: int, end: int | None) -> Tensor | None:
        """Return the bias of the outputs from `start` to `end`, or None for a layer without one."""
        return None if self.bias is None else self.bias[start:end]

    def frozen_function(
        self, start: int = 0, end: int | None = None, activation: str = "none"
    ) -> Callable[[Tensor], Tensor]:
        """Return `frozen_linear` for the outputs from `start` to `end` (None: all).

        The weights must be on a CPU and must not change afterwards.
        """
        weight = self.weight[start:end]
        bias = self._slice_bias(start, end)
        example_input = weight[:1]  # (1, I)
        weight, bias = reorder(self.reordered_weights, weight, bias, example_input, start)
        return frozen_linear(weight, bias, activation)

    def few_rows_function(
        self, start: int = 0, end: int | None = None, activation: str = "none"
    ) -> Callable[[Tensor], Tensor]:
        """Like `frozen_function`, but return a function that is faster for few rows.

        A call of oneDNN takes some 15 microseconds longer than a call of `torch.addmm`. A small
        multiplication takes less time than that.
        """
        multiply_many = self.frozen_function(start, end, activation)
        weight = self.weight[start:end].t()  # (I, O)
        bias = self._slice_bias(start, end)
        max_rows = _MAX_ADDMM_PRODUCTS // weight.numel()

        def multiply(x: Tensor) -> Tensor:
            if x.shape[0] > max_rows:  # `len` takes four times as long
                return multiply_many(x)
            y = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
            return y.relu_() if activation == "relu" else y

        return multiply


class FastFeedForward(FeedForward):
    """`FeedForward` that computes a ReLU within the first linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        if self.activation is not Activation.relu:
            return super().forward(x)
        inner: Any = self.inner
        # `hidden` gets the dtype of the input, and should be bfloat16 if `outer` computes in it
        inner_input = x.bfloat16() if uses_bfloat16(inner.reordered_weights, x) else x
        hidden = inner.block(inner_input, 0, inner.out_features, activation="relu")  # (..., F)
        return self.outer(self.dropout(hidden)).to(x.dtype)  # type: ignore[no-any-return]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none"
) -> Tensor:
    """Compute x W^T + b, (..., O), of `x` (..., I), `weight` (O, I) and `bias` (O,).

    `activation` is "none" or "relu". The result has the dtype of `x`, even with a bfloat16 weight
    from `reorder`.
    """
    if weight.is_mkldnn:
        return _onednn(x.to(weight.dtype), weight, bias, activation).to(x.dtype)
    if not _suits_onednn(x):
        y = F.linear(x, weight, bias)
        return torch.relu(y) if activation == "relu" else y
    if torch.is_grad_enabled():
        return _OneDnnLinear.apply(x, weight, bias, activation, None)  # type: ignore[no-untyped-call, no-any-return]
    return _onednn(x, weight, bias, activation)


def frozen_linear(
    weight: Tensor, bias: Tensor | None, activation: str = "none"
) -> Callable[[Tensor], Tensor]:
    """Return a function that computes x W^T + b for a weight and a bias that `reorder` returned.

    The function takes `x` (N, I), where N is a result of `round_up_rows`. The result is float32.
    With an activation and a bfloat16 weight, it is bfloat16, which the next layer takes.
    """
    if not weight.is_mkldnn:
        if activation == "relu":
            return lambda x: torch.relu(F.linear(x, weight, bias))
        return lambda x: F.linear(x, weight, bias)
    # the last two arguments are the parameters of the activation, of which ReLU has none
    multiply = torch.ops.mkldnn._linear_pointwise
    if weight.dtype is torch.float32:
        return lambda x: multiply(x, weight, bias, activation, [], "")
    if activation == "relu":
        return lambda x: multiply(x.bfloat16(), weight, bias, activation, [], "")
    return lambda x: multiply(x.bfloat16(), weight, bias, activation, [], "").float()


def transposed_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute a^T b, (O, I), of `a` (N, O) and `b` (N, I), without a gradient."""
    if not _suits_onednn(a):
        return a.T @ b
    multiply = torch.ops.mkldnn._linear_pointwise
    # the rows of zeros that padding appends do not change the product
    return multiply(_pad_rows(a).T, _pad_rows(b).T, None, "none", [], "")  # type: ignore[no-any-return]


def reorder(
    reordered: ReorderedWeights | None,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    start: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Return `weight` and `bias` in the fastest layout and dtype for inputs like `x`.

    Copies are stored in `reordered`. `weight` is a block of a matrix that begins at row `start`.
    """
    if reordered is None or torch.is_grad_enabled():
        return weight, bias
    is_bfloat16 = uses_bfloat16(reordered, x)
    if not is_bfloat16 and not _suits_onednn(x, weight.numel()):
        return weight, bias
    key = (start, len(weight))
    if key not in reordered:
        if is_bfloat16:
            weight = weight.bfloat16()
            if bias is not None:
                bias = bias.bfloat16()
        weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        reordered[key] = (weight, bias)
    return reordered[key]


def uses_bfloat16(reordered: ReorderedWeights | None, x: Tensor) -> bool:
    """Return whether `reorder` gives bfloat16 weights for the input `x`."""
    return reordered is not None and reordered.dtype is torch.bfloat16 and x.numel() > 0


@functools.cache
def has_bfloat16_kernels() -> bool:
    """Return whether this CPU has bfloat16 instructions, and torch the operators that use them."""
    if not can_reorder():
        return False
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        is_supported = getattr(torch.cpu, name, None)  # private, may be missing
        if is_supported is not None and is_supported():
            return True
    return False


def is_bfloat16_faster() -> bool:
    """Return whether training in bfloat16 is faster than in float32 on this CPU.

    With AVX512-BF16, an AMD EPYC (Zen 5) trained in bfloat16 1.6 to 1.75 times as fast as in
    float32, and an Intel Xeon 0.7 times as fast. Other CPUs were not measured.
    """
    return has_bfloat16_kernels() and is_onednn_faster()  # the latter is false for Intel's CPUs


def cache_rounded_weights(model: nn.Module) -> None:
    """Let linear layers keep bfloat16 copies of their weights until the weights change.

    Used with autocast to bfloat16 on a CPU, which would otherwise round the weights in every
    micro-batch. A copy and its transpose together take 4 bytes a weight.
    """
    if not can_reorder() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for module in model.modules():
        if isinstance(module, FastLinear):
            module.rounded_weights = {}


def _round_block(rounded_weights: RoundedWeights, weight: Tensor, start: int) -> RoundedBlock:
    """Return the bfloat16 copy of `weight`, and renew it if `weight` has changed.

    `weight` is a block of a matrix, whose first row is `start`. The copy is stored in
    `rounded_weights`.
    """
    key = (start, len(weight))
    if key not in rounded_weights or rounded_weights[key].version != weight._version:
        block = weight.detach().bfloat16()
        transposed = block.T
        if block.numel() >= _MIN_REORDERED_WEIGHT:
            transposed = torch.ops.mkldnn._reorder_linear_weight(transposed.contiguous())
            block = torch.ops.mkldnn._reorder_linear_weight(block)
        rounded_weights[key] = RoundedBlock(weight._version, block, transposed)
    return rounded_weights[key]


class _OneDnnLinear(torch.autograd.Function):
    """`linear` with its gradients: dx = dy W, dW = dy^T x, db = sum of dy over rows.

    With a rounded copy of the weight, forward and backward run in bfloat16, as under autocast.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        rounded: RoundedBlock | None,
    ) -> Tensor:
        """Compute `linear`, with the rounded copy of the weight if there is one."""
        multiplied_weight = weight
        ctx.transposed = None
        if rounded is not None:
            multiplied_weight = rounded.weight
            ctx.transposed = rounded.transposed
            x = x.bfloat16()
            if bias is not None:
                bias = bias.bfloat16()
        y = _onednn(x, multiplied_weight, bias, activation)
        activated = y if activation == "relu" else None
        ctx.save_for_backward(x, weight, activated)
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
            transposed = weight.T if ctx.transposed is None else ctx.transposed  # (I, O)
            grad_x = _onednn(grad, transposed)
        if ctx.needs_input_grad[1]:
            product = transposed_matmul(rows, x.reshape(-1, x.size(-1)))
            grad_weight = product.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0, dtype=weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None


def _onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """Compute `linear` with oneDNN, padding rows if needed."""
    if x.dim() == 2 and round_up_rows(x.size(0)) == x.size(0):  # most steps of a search
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")  # type: ignore[no-any-return]
    rows = x.reshape(-1, x.size(-1))  # (N, I)
    y = torch.ops.mkldnn._linear_pointwise(_pad_rows(rows), weight, bias, activation, [], "")
    return y[: len(rows)].view(x.shape[:-1] + y.shape[1:])  # type: ignore[no-any-return]  # (..., O)


def round_up_rows(num_rows: int) -> int:
    """Round a number of rows up, so that few different numbers occur.

    oneDNN compiles a kernel for each number of rows and keeps the last thousand kernels. Each
    kernel takes milliseconds to compile and a megabyte of memory.
    """
    # -n % m is the distance from n to the next multiple of m
    for max_rows, multiple in _ROW_MULTIPLES:
        if num_rows <= max_rows:
            return num_rows + -num_rows % multiple
    return num_rows + -num_rows % ROWS_STEP


def _pad_rows(rows: Tensor) -> Tensor:
    """Append rows of zeros to `rows` (N, D), up to `round_up_rows`."""
    num_missing = round_up_rows(rows.size(0)) - rows.size(0)
    return F.pad(rows, (0, 0, 0, num_missing)) if num_missing else rows


def _suits_onednn(x: Tensor, reordered_size: int = 0) -> bool:
    """Return whether to multiply `x` with oneDNN. `is_onednn_faster` describes `reordered_size`."""
    return (
        not torch.compiler.is_compiling()  # first: the other checks break a graph
        and x.device.type == "cpu"
        and x.dtype is torch.float32
        and x.numel() > 0  # oneDNN takes no empty matrices
        and is_onednn_faster(reordered_size)
        and not torch.is_autocast_enabled("cpu")
    )


def _autocasts_to_bfloat16(x: Tensor) -> bool:
    """Return whether autocast to bfloat16 applies to `x` in training on a CPU."""
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
    operators = ("_linear_pointwise", "_reorder_linear_weight")  # private, may be missing
    return all(hasattr(torch.ops.mkldnn, name) for name in operators)


@functools.cache
def is_onednn_faster(reordered_size: int = 0) -> bool:
    """Return whether oneDNN is faster than MKL on this CPU.

    `reordered_size` is the number of elements of a weight in oneDNN's layout, or 0 for a weight in
    the layout of torch.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    is_large_on_avx2 = capability == "AVX2" and reordered_size >= _MIN_AVX2_WEIGHT
    if capability != "AVX512" and not is_large_on_avx2:
        return False
    cpu_info = Path("/proc/cpuinfo")
    if not cpu_info.is_file():
        return False
    return can_reorder() and "GenuineIntel" not in cpu_info.read_text(encoding="utf-8")


class FastDropout(nn.Dropout):
    """Dropout (Srivastava et al., 2014) that draws 16 random bits for each element on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Drop random elements in training and scale up the others."""
        if not self.training or self.p == 0:
            return input
        if input.device.type == "cpu" and self.p < 1 and not torch.compiler.is_compiling():
            return _CpuDropout.apply(input, self.p)  # type: ignore[no-untyped-call, no-any-return]
        return F.dropout(input, self.p)


class _CpuDropout(torch.autograd.Function):
    """Dropout with 16 random bits for each element. The backward pass reads one byte for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        num_dropped = round(p * _DROPOUT_LEVELS)  # number of 16-bit values that drop an element
        num_draws = -(-x.numel() // _ELEMENTS_PER_DRAW)  # rounded up
        draws = torch.empty(num_draws, dtype=torch.int64).random_(-(1 << 63), None)  # all 64 bits
        bits = draws.view(torch.int16)[: x.numel()]  # uniform from -2^15 to 2^15 - 1
        keep = torch.empty(x.shape, dtype=torch.int8)  # computing a boolean takes 5 times as long
        # `num_dropped` of the 16-bit values are below the threshold
        threshold = num_dropped - _DROPOUT_LEVELS // 2
        torch.ge(bits.view(x.shape), threshold, out=keep)
        ctx.save_for_backward(keep)
        ctx.scale = _DROPOUT_LEVELS / (_DROPOUT_LEVELS - num_dropped)
        return _scale_kept(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return _scale_kept(grads[0], keep, ctx.scale), None


def _scale_kept(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Return `x` times `scale` where `keep` is 1, else 0.

    Multiplying takes a tenth of the time of `torch.where`, which branches on each element.
    """
    return keep.to(x.dtype).mul_(x).mul_(scale)
