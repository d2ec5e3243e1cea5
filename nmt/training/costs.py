"""Floating-point operations, memory and peak throughput of training.

Counts only matrix multiplications on non-padding tokens.
"""

# N pairs or rows, S source, T target, D d_model, V vocab

from __future__ import annotations

import os
import sys
from collections import Counter

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from nmt.config import Activation, ModelConfig, Positions
from nmt.data import Lengths
from nmt.model.fast.layers import linear, transposed_matmul

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

Shape = tuple[int, int]  # inner and outer dimension of a multiplication (N, inner) x (inner, outer)

RATE_SECONDS = 0.25  # for measuring the peak throughput
_CPU_ROWS = 256  # larger matrices take longer and reach the same throughput within 3 %
_CPU_COLUMNS = 4096
GPU_CHUNK_LOGITS = 1 << 27  # computed at a time on a GPU, which is fast with large matrices


def training_flops(config: ModelConfig, vocab_size: int, lengths: Lengths) -> int:
    """Count the floating-point operations of forward and backward over pairs of `lengths` (N, 2).

    Multiplying by a weight matrix costs 2 operations per weight and token forward and 4 backward.
    The two multiplications of attention cost 4 * S * T * D forward in each layer and twice that
    backward; causal attention counts as a full square (Chowdhery et al., 2022, PaLM, appendix B).
    Embedding lookups cost nothing.
    """
    src = lengths[:, 0].astype("int64")
    tgt = lengths[:, 1].astype("int64")
    weight_uses = int(src.sum()) * _count_weights(source_shapes(config))
    weight_uses += int(tgt.sum()) * _count_weights(target_shapes(config, vocab_size))
    attended = config.num_encoder_layers * int(src @ src)
    attended += config.num_decoder_layers * int(tgt @ tgt + src @ tgt)
    return 6 * weight_uses + 12 * config.num_heads * config.d_k * attended


def _count_weights(shapes: Counter[Shape]) -> int:
    return sum(inner * outer * count for (inner, outer), count in shapes.items())


def source_shapes(config: ModelConfig) -> Counter[Shape]:
    """Return the weight matrices that a source token is multiplied by, with their numbers."""
    cross_keys_values = [(config.d_model, 2 * kv_size(config))] * config.num_decoder_layers
    return Counter(_layer_shapes(config) * config.num_encoder_layers + cross_keys_values)


def target_shapes(config: ModelConfig, vocab_size: int) -> Counter[Shape]:
    """Return the weight matrices that a target token is multiplied by, with their numbers."""
    d_model = config.d_model
    q_size = config.num_heads * config.d_k
    cross_query_and_output = [(d_model, q_size), (q_size, d_model)]
    layer = _layer_shapes(config) + cross_query_and_output
    return Counter(layer * config.num_decoder_layers + [(d_model, vocab_size)])


def kv_size(config: ModelConfig) -> int:
    """Return the dimensions of the keys, and of the values, of all heads."""
    return config.d_k * (config.num_kv_heads or config.num_heads)


def _layer_shapes(config: ModelConfig) -> list[Shape]:
    """Return the matrices of self-attention and feed-forward."""
    d_model = config.d_model
    d_ff = config.d_ff
    q_size = config.num_heads * config.d_k
    shapes = [(d_model, q_size + 2 * kv_size(config)), (q_size, d_model), (d_model, d_ff)]
    if config.activation is Activation.swiglu:
        shapes.append((d_model, d_ff))
    shapes.append((d_ff, d_model))
    if config.positions is Positions.relative:  # tables of keys and values, shared by the heads
        num_distances = 2 * config.max_distance + 1
        shapes += [(q_size, num_distances), (num_distances, q_size)]
    return shapes


def matmul_rate(
    device: torch.device,
    dtype: torch.dtype,
    config: ModelConfig,
    *,
    vocab_size: int,
    num_tokens: int,
) -> float:
    """Measure the operations per second of `device` in the matrix multiplications of training.

    Each weight matrix of the model is timed with `num_tokens` rows (fewer on a CPU, or of logits),
    forward and with both multiplications of backward, and weighted by its number. Takes about 0.3 s
    on a CPU.
    """
    is_cpu = device.type == "cpu"
    shapes = source_shapes(config) + target_shapes(config, vocab_size)
    flops = 0.0
    seconds = 0.0
    for (inner, outer), count in shapes.items():
        max_rows = _CPU_ROWS if is_cpu else max(1, GPU_CHUNK_LOGITS // outer)
        rows = min(num_tokens, max_rows)
        columns = min(outer, _CPU_COLUMNS) if is_cpu else outer
        x = torch.randn(rows, inner, device=device, dtype=dtype)
        weight = torch.randn(columns, inner, device=device, dtype=dtype)
        timer = Timer(
            "multiply(x, weight)",
            globals={"multiply": _multiply_like_training, "x": x, "weight": weight},
            num_threads=torch.get_num_threads(),
        )
        measurement = timer.blocked_autorange(min_run_time=RATE_SECONDS / len(shapes))
        flops += count * 6.0 * inner * outer
        # the fastest run: other load on the machine can only slow it down
        seconds += count * min(measurement.times) / rows * outer / columns
    return flops / seconds


def _multiply_like_training(x: Tensor, weight: Tensor) -> None:
    y = linear(x, weight)  # (N, outer)
    linear(y, weight.T)  # the gradient of x
    transposed_matmul(y, x)  # the gradient of the weight


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors on a GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_memory_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or of this machine for a CPU; 0 if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows, and systems without these names
        return 0


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished its work, so that a measured time includes it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
