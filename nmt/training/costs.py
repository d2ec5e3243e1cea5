"""What training costs: floating-point operations, memory, peak throughput, a dry run's estimate.

Counted are the matrix multiplications that the model needs for real tokens alone.
"""

# N pairs or rows, S source, T target, D d_model, V vocab

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import cycle, islice

import torch
from torch.utils.benchmark import Timer

from nmt.config import Activation, ModelConfig, Positions
from nmt.data import Lengths
from nmt.data.batch import padding_share
from nmt.data.batching import Update, Updates
from nmt.model.fast.layers import linear, transposed_matmul
from nmt.runtime.distributed import from_main

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

Shape = tuple[int, int]  # inner and outer dimension of a multiplication (N, inner) x (inner, outer)

RATE_SECONDS = 0.25  # of measuring the peak throughput
_CPU_ROWS, _CPU_COLUMNS = 256, 4096  # more take longer and reach the same rate within 3 %
GPU_NUMBERS = 1 << 27  # of logits at a time on a GPU, which is fast with large matrices
PACE_SECONDS, _MOST_UPDATES = 10.0, 20  # of a dry run, whichever ends first; at least one update


def training_flops(config: ModelConfig, vocab_size: int, lengths: Lengths) -> int:
    """Count the floating-point operations of forward and backward over pairs of `lengths` (N, 2).

    Multiplying by a weight matrix costs 2 operations a weight and token forward and 4 backward;
    the two multiplications of attention cost 4 * S * T * D forward a layer, twice that backward,
    and a causal one counts as a whole square (Chowdhery et al., 2022, PaLM, appendix B). Embedding
    lookups cost nothing.
    """
    src, tgt = lengths[:, 0].astype("int64"), lengths[:, 1].astype("int64")
    src_weights = sum(d * e * n for (d, e), n in source_shapes(config).items())
    tgt_weights = sum(d * e * n for (d, e), n in target_shapes(config, vocab_size).items())
    in_weights = int(src.sum()) * src_weights + int(tgt.sum()) * tgt_weights
    squares = config.num_encoder_layers * int(src @ src)
    squares += config.num_decoder_layers * int(tgt @ tgt + src @ tgt)
    return 6 * in_weights + 12 * config.d_model * squares


def source_shapes(config: ModelConfig) -> Counter[Shape]:
    """Return the weight matrices that a source token is multiplied by, with their numbers."""
    across = [(config.d_model, 2 * kv_size(config))] * config.num_decoder_layers
    return Counter(_layer_shapes(config) * config.num_encoder_layers + across)


def target_shapes(config: ModelConfig, vocab_size: int) -> Counter[Shape]:
    """Return the weight matrices that a target token is multiplied by, with their numbers."""
    d = config.d_model
    layer = [*_layer_shapes(config), (d, d), (d, d)]  # with queries and output of the third part
    return Counter(layer * config.num_decoder_layers + [(d, vocab_size)])


def kv_size(config: ModelConfig) -> int:
    """Return the dimensions of the keys, and of the values, of all heads."""
    return config.d_model // config.num_heads * (config.num_kv_heads or config.num_heads)


def _layer_shapes(config: ModelConfig) -> list[Shape]:
    """Return the matrices of self-attention and feed-forward."""
    d, e = config.d_model, config.d_ff
    wide = [(d, e)] * (2 if config.activation is Activation.swiglu else 1)
    # of all heads, though these share the tables of keys and of values
    distances = 2 * config.max_distance + 1
    tables = [(d, distances), (distances, d)] if config.positions is Positions.relative else []
    return [(d, d + 2 * kv_size(config)), (d, d), *wide, (e, d), *tables]


def matmul_rate(
    device: torch.device, dtype: torch.dtype, config: ModelConfig, *,
    vocab_size: int, num_tokens: int,
) -> float:  # fmt: skip
    """Measure the operations a second of `device` in the matrix multiplications of training.

    Each weight matrix of the model is timed with `num_tokens` rows (fewer on a CPU, or of logits),
    forward and both of its multiplications backward, and weighted by its number. Takes about 0.3 s
    on a CPU.
    """
    is_cpu = device.type == "cpu"
    counts = source_shapes(config) + target_shapes(config, vocab_size)
    flops = seconds = 0.0
    for (inner, outer), times in counts.items():
        rows = min(num_tokens, _CPU_ROWS if is_cpu else max(1, GPU_NUMBERS // outer))
        columns = min(outer, _CPU_COLUMNS) if is_cpu else outer
        x = torch.randn(rows, inner, device=device, dtype=dtype)
        weight = torch.randn(columns, inner, device=device, dtype=dtype)

        def multiply(x: torch.Tensor, weight: torch.Tensor) -> None:
            y = linear(x, weight)  # (N, outer)
            linear(y, weight.T)  # the gradient of x
            transposed_matmul(y, x)  # the gradient of the weight

        names = {"multiply": multiply, "x": x, "weight": weight}
        timer = Timer("multiply(x, weight)", globals=names, num_threads=torch.get_num_threads())
        timed = timer.blocked_autorange(min_run_time=RATE_SECONDS / len(counts))
        flops += times * 6.0 * inner * outer
        # the fastest: other load on the machine can only make it slower
        seconds += times * min(timed.times) / rows * outer / columns
    return flops / seconds


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most that tensors took on a GPU, or that the process took at all on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_memory_bytes(device: torch.device) -> int:
    """Return the memory that a GPU has, or this machine for a CPU; 0 where that is unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows, and systems without these names
        return 0


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all its work, so that the time measured includes it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class Pace:
    """What the measured updates took, over all ranks."""

    updates: Sequence[Update]
    seconds: float
    flops: float  # of the model, for real tokens


def measure_pace(step: Callable[[Update], float], updates: Sequence[Update]) -> Pace:
    """Make some updates for about 10 seconds, the same on all ranks.

    `step` makes one update and returns its operations over all ranks, when its work is done. The
    first update warms up libraries; one that takes all the time by itself is measured nevertheless.
    """

    def timed(some: Sequence[Update]) -> Pace:
        start = time.perf_counter()
        flops = sum(step(update) for update in some)
        return Pace(some, time.perf_counter() - start, flops)

    first = timed([updates[0]])
    # the clocks of the ranks differ
    count = from_main(min(_MOST_UPDATES, int(PACE_SECONDS / first.seconds)))
    return timed(list(islice(cycle(updates), 1, 1 + count))) if count else first


def report(
    updates: Updates, lengths: Lengths, pace: Pace, *,
    num_updates: int, memory: str, flops_per_second: float, now: datetime,
) -> str:  # fmt: skip
    """Return the output of a dry run that begins `now` and makes `num_updates`.

    `updates` are an epoch of pairs of `lengths` (N, 2), of a large corpus its first pool; they take
    as long a token, of both sides, as those of `pace`. `flops_per_second` is the peak throughput of
    all devices in this model's matrices.
    """
    planned = updates.pool_of(0)
    batches = [rows for update in planned for rows in update.batches]
    (src_planned, tgt_planned), (src_tokens, tgt_tokens) = (
        (sum(u.num_src_tokens for u in some), sum(u.num_tokens for u in some))
        for some in (planned, pace.updates)
    )
    per_token = pace.seconds / (tgt_tokens + src_tokens)
    update_seconds = (tgt_planned + src_planned) / len(planned) * per_token
    minutes = round(num_updates * update_seconds / 60)
    end = now + timedelta(seconds=num_updates * update_seconds)
    lines = {
        "plan": f"{updates.num_pairs:,} pairs; {len(updates):,} updates an epoch of "
        f"{len(batches) / len(planned):.1f} batches a rank and "
        f"{tgt_planned / len(planned):,.0f} target tokens; "
        f"{padding_share(lengths, batches):.1%} padding; "
        f"{num_updates:,} updates are {num_updates / len(updates):,.1f} epochs",
        "memory": memory,
        "speed": f"{src_tokens / pace.seconds:,.0f} source and "
        f"{tgt_tokens / pace.seconds:,.0f} target tokens a second; "
        f"{update_seconds:.3g} seconds an update (from {len(pace.updates)}); "
        f"{pace.flops / pace.seconds / 1e9:,.0f} GFLOP/s of the model, "
        f"{pace.flops / pace.seconds / flops_per_second:.0%} of the peak of its matrix "
        "multiplications",
        "time": f"{minutes // 60}:{minutes % 60:02d} hours:minutes without validation and "
        f"checkpoints; begun now, it ends {end:%Y-%m-%d %H:%M}",
    }
    return "\n".join(f"{name:<8}{text}" for name, text in lines.items())
