"""How much arithmetic an update is, and how much the device could do: model-FLOPs utilisation.

Counted are the products that the model needs for real tokens, whatever is computed besides:
padding, recomputed activations and everything that is no product cost time and count nothing.
"""

# N pairs or rows, S source, T target, D d_model, V vocab

from __future__ import annotations

import time
from collections import Counter

import torch
from torch import Tensor

from nmt.config import ModelConfig
from nmt.data import Lengths
from nmt.model.fast.layers import linear, matmul, transposed_matmul

Shape = tuple[int, int]  # inner and outer dimension of a product (N, inner) x (inner, outer)

_CPU_ROWS, _CPU_COLUMNS = 256, 4096  # more take longer and reach the same rate within 3 %
_SECONDS = 0.25  # of measuring, warm-up aside
_CUDA_REPEATS = 10


def training_flops(config: ModelConfig, vocab_size: int, lengths: Lengths) -> int:
    """Count the floating-point operations of forward and backward over pairs of `lengths` (N, 2).

    A product with a weight costs 2 operations a weight and token forward and 4 backward; the two of
    attention cost 4 * S * T * D forward a layer, twice that backward, and a causal one counts as a
    whole square (Chowdhery et al., 2022, PaLM, appendix B). Looking up embeddings is no product.
    """
    src, tgt = lengths[:, 0].astype("int64"), lengths[:, 1].astype("int64")
    src_weights = sum(d * e * n for (d, e), n in source_products(config).items())
    tgt_weights = sum(d * e * n for (d, e), n in target_products(config, vocab_size).items())
    in_weights = int(src.sum()) * src_weights + int(tgt.sum()) * tgt_weights
    squares = config.num_encoder_layers * int(src @ src)
    squares += config.num_decoder_layers * int(tgt @ tgt + src @ tgt)
    return 6 * in_weights + 12 * config.d_model * squares


def source_products(config: ModelConfig) -> Counter[Shape]:
    """Return the weight products of a source token, with how often each is done; the decoder's keys
    and values of the source are among them.
    """
    d, layers = config.d_model, config.num_encoder_layers
    products = Counter({(d, 3 * d): layers}) + Counter({(d, d): layers})
    return (
        products + _feed_forward(config, layers) + Counter({(d, 2 * d): config.num_decoder_layers})
    )


def target_products(config: ModelConfig, vocab_size: int) -> Counter[Shape]:
    """Return the weight products of a target token, with how often each is done."""
    d, layers = config.d_model, config.num_decoder_layers
    products = Counter({(d, 3 * d): layers}) + Counter({(d, d): 3 * layers})
    return products + _feed_forward(config, layers) + Counter({(d, vocab_size): 1})


def matmul_rate(
    device: torch.device,
    dtype: torch.dtype,
    config: ModelConfig,
    *,
    vocab_size: int,
    num_tokens: int,
) -> float:
    """Measure how many operations a second `device` does in the products of a training step.

    Each weight product of the model is timed with `num_tokens` rows (fewer on a processor), forward
    and both of its products backward, and weighed by how often the model does it. Takes about 0.3 s
    on a processor, less on a GPU.
    """
    rows, most_columns = num_tokens, vocab_size
    if device.type == "cpu":
        rows, most_columns = min(num_tokens, _CPU_ROWS), _CPU_COLUMNS
    counts = source_products(config) + target_products(config, vocab_size)
    flops = seconds = 0.0
    for (inner, outer), times in counts.items():
        columns = min(outer, most_columns)
        x = torch.randn(rows, inner, device=device, dtype=dtype)
        weight = torch.randn(columns, inner, device=device, dtype=dtype)
        pace = _fastest(x, weight, _SECONDS / len(counts))
        flops += times * 6.0 * rows * inner * outer
        seconds += times * pace * outer / columns
    return flops / seconds


def _feed_forward(config: ModelConfig, layers: int) -> Counter[Shape]:
    d, e = config.d_model, config.d_ff
    return Counter({(d, e): layers}) + Counter({(e, d): layers})


def _products(x: Tensor, weight: Tensor) -> None:
    y = linear(x, weight)  # (N, outer)
    matmul(y, weight)  # the gradient of x
    transposed_matmul(y, x)  # the gradient of the weight


def _fastest(x: Tensor, weight: Tensor, seconds: float) -> float:
    """Return the time of the fastest of the runs that `seconds` have room for, at least one: others
    on the machine can only make it slower.
    """
    _products(x, weight)  # libraries choose their kernels in the first run
    if x.device.type == "cuda":
        return min(_cuda_seconds(x, weight) for _ in range(3))
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        _products(x, weight)
        synchronize(x.device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


def _cuda_seconds(x: Tensor, weight: Tensor) -> float:
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_CUDA_REPEATS):
        _products(x, weight)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / _CUDA_REPEATS


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that was asked of it, so that a clock reading means it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
