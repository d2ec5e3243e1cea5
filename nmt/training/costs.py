"""Count the floating-point operations of training; measure the speed and the memory of a device."""

# N pairs or rows, S source, T target, D d_model

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from nmt.config import Activation, Decoder, ModelConfig, Positions
from nmt.data import Lengths
from nmt.model.fast.layers import linear, transposed_matmul

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

Shape = tuple[int, int]  # input size and output size of a weight matrix

PEAK_SECONDS = 0.25  # time for measuring the peak throughput of a device
# sizes of matrices measured on a CPU; the throughput of larger ones differs by less than 3 %
_MAX_CPU_ROWS = 256
_MAX_CPU_OUT_SIZE = 4096
_CONTAINER_LIMITS = (  # files with the memory limit of a container, for cgroups v2 and v1
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
GPU_CHUNK_LOGITS = 1 << 27
"""On a GPU, the loss computes about this number of logits at a time. Smaller matrices would not
keep the GPU busy.
"""


def count_training_flops(config: ModelConfig, vocab_size: int, lengths: Lengths) -> int:
    """Count the floating-point operations of forward and backward over pairs of `lengths` (N, 2).

    Only matrix multiplications on non-padding tokens count. Multiplying by a weight matrix takes 2
    operations per weight and token in the forward pass, and 4 in the backward pass. The two
    multiplications of attention take 4 * S * T * D operations in each layer in the forward pass,
    and 8 * S * T * D in the backward pass. Causal attention counts as if each token attended to all
    (Chowdhery et al., 2022, PaLM, appendix B).
    """
    src = lengths[:, 0].astype("int64")
    tgt = lengths[:, 1].astype("int64")
    num_weight_uses = int(src.sum()) * _count_weights(source_shapes(config))
    num_weight_uses += int(tgt.sum()) * _count_weights(target_shapes(config, vocab_size))
    # The number of pairs of a query and a key in all layers. For example, src @ tgt is the sum of
    # S * T over the sentence pairs: the pairs of the cross-attention of one layer.
    num_attention_pairs = config.num_encoder_layers * int(src @ src)
    num_attention_pairs += config.num_decoder_layers * int(src @ tgt)
    if config.decoder is Decoder.attention:
        num_attention_pairs += config.num_decoder_layers * int(tgt @ tgt)
    weight_flops = (2 + 4) * num_weight_uses  # forward and backward
    attention_flops = (4 + 8) * config.num_heads * config.d_k * num_attention_pairs
    return weight_flops + attention_flops


def _count_weights(shapes: Counter[Shape]) -> int:
    """Return the number of weights in matrices of these shapes."""
    return sum(in_size * out_size * count for (in_size, out_size), count in shapes.items())


def source_shapes(config: ModelConfig) -> Counter[Shape]:
    """Return how many weight matrices of each shape are applied to a source token."""
    cross_keys_values = (config.d_model, 2 * kv_size(config))  # applied to the encoder's output
    shapes = _layer_shapes(config, config.d_ff) * config.num_encoder_layers
    return Counter(shapes + [cross_keys_values] * config.num_decoder_layers)


def target_shapes(config: ModelConfig, vocab_size: int) -> Counter[Shape]:
    """Return how many weight matrices of each shape are applied to a target token."""
    d_model = config.d_model
    q_size = config.num_heads * config.d_k
    cross_query_and_output = [(d_model, q_size), (q_size, d_model)]
    d_ff = config.decoder_d_ff or config.d_ff
    if config.decoder is Decoder.ssru:  # two matrices instead of self-attention
        layer_shapes = [(d_model, d_model)] * 2 + _feed_forward_shapes(config, d_ff)
    else:
        layer_shapes = _layer_shapes(config, d_ff)
    layer_shapes += cross_query_and_output
    return Counter(layer_shapes * config.num_decoder_layers + [(d_model, vocab_size)])


def kv_size(config: ModelConfig) -> int:
    """Return the size of the keys of all heads together, which is also the size of the values."""
    return config.d_k * (config.num_kv_heads or config.num_heads)


def _layer_shapes(config: ModelConfig, d_ff: int) -> list[Shape]:
    """Return the shapes of the matrices of self-attention and the feed-forward network."""
    d_model = config.d_model
    q_size = config.num_heads * config.d_k
    shapes = [(d_model, q_size + 2 * kv_size(config)), (q_size, d_model)]
    shapes += _feed_forward_shapes(config, d_ff)
    if config.positions is Positions.relative:
        # The heads share tables (num_distances, d_k) for keys and for values. Multiplying all heads
        # by such a table takes as many operations as one matrix of these sizes.
        num_distances = 2 * config.max_distance + 1
        shapes += [(q_size, num_distances), (num_distances, q_size)]
    return shapes


def _feed_forward_shapes(config: ModelConfig, d_ff: int) -> list[Shape]:
    """Return the shapes of the matrices of a feed-forward network."""
    num_inner = 2 if config.activation is Activation.swiglu else 1  # SwiGLU also has a gate
    return [(config.d_model, d_ff)] * num_inner + [(d_ff, config.d_model)]


def measure_flops_per_second(
    device: torch.device,
    dtype: torch.dtype,
    config: ModelConfig,
    *,
    vocab_size: int,
    num_tokens: int,
) -> float:
    """Measure the FLOP/s of `device` in the matrix multiplications of training.

    Times one forward and two backward multiplications for each shape of weight matrix, with
    `num_tokens` rows or fewer. A shape counts once for each matrix of the model that has it. Takes
    about 0.3 s on a CPU.
    """
    shapes = source_shapes(config) + target_shapes(config, vocab_size)
    flops = 0.0
    seconds = 0.0
    for (in_size, out_size), count in shapes.items():
        measured_out_size = out_size
        if device.type == "cpu":
            max_rows = _MAX_CPU_ROWS
            measured_out_size = min(out_size, _MAX_CPU_OUT_SIZE)
        else:
            max_rows = max(1, GPU_CHUNK_LOGITS // out_size)  # no larger than the matrices of logits
        num_rows = min(num_tokens, max_rows)
        x = torch.randn(num_rows, in_size, device=device, dtype=dtype)
        weight = torch.randn(measured_out_size, in_size, device=device, dtype=dtype)
        fastest_seconds = _measure_fastest(x, weight, seconds=PEAK_SECONDS / len(shapes))
        # Sum the operations and the time of one row. Each of the three multiplications takes two
        # operations for each weight. A row has `out_size` output numbers.
        flops += count * 3 * 2.0 * in_size * out_size
        seconds_per_output = fastest_seconds / (num_rows * measured_out_size)
        seconds += count * seconds_per_output * out_size
    return flops / seconds


def _measure_fastest(x: Tensor, weight: Tensor, *, seconds: float) -> float:
    """Multiply for `seconds`; return the seconds of the fastest multiplication.

    The fastest one is least disturbed by other load on the machine. The timer of
    `torch.utils.benchmark` is not used, since it imports setuptools, which takes 0.3 s.
    """
    num_runs = 1 if x.device.type == "cpu" else 10  # a GPU computes while the next runs are queued
    _multiply_like_training(x, weight)  # the first run allocates memory
    synchronize(x.device)
    end = time.perf_counter() + seconds
    fastest_seconds = float("inf")
    run_end = time.perf_counter()
    while fastest_seconds == float("inf") or run_end < end:  # at least once
        start = run_end
        for _ in range(num_runs):
            _multiply_like_training(x, weight)
        synchronize(x.device)
        run_end = time.perf_counter()
        fastest_seconds = min(fastest_seconds, (run_end - start) / num_runs)
    return fastest_seconds


def _multiply_like_training(x: Tensor, weight: Tensor) -> None:
    """Run the three multiplications of a linear layer, forward and backward."""
    y = linear(x, weight)  # (N, out)
    linear(y, weight.T)  # the gradient of x, (N, in)
    transposed_matmul(y, x)  # the gradient of the weight, (out, in)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors on a GPU, or of the process on a CPU; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # not `getrusage`, whose peak includes the peak of the parent process
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return _parse_bytes(status, "VmHWM:")
    except (OSError, IndexError):  # not Linux
        if resource is None:
            return 0
        bytes_per_unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit


def _parse_bytes(text: str, key: str) -> int:
    """Return a size in bytes from a text of /proc, with lines such as "VmHWM:   1234 kB"."""
    text_after_key = text.split(key)[1]
    kib = text_after_key.split()[0]
    return int(kib) * 1024


def reset_peak_memory(device: torch.device) -> None:
    """Make `peak_memory_bytes` forget earlier peaks: on a GPU, and on a CPU if Linux allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            # 5 sets VmHWM, the peak in /proc/self/status, to the current memory
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def usable_memory_bytes(device: torch.device) -> int:
    """Return the memory of `device` that this process uses or could use; 0 if it is unknown.

    On a GPU, this is free memory and the memory of this process. On a CPU with Linux, it is the
    memory available without swapping, limited by the container.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return free_bytes + torch.cuda.memory_reserved(device)
    try:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        statm = Path("/proc/self/statm").read_text(encoding="ascii")
        num_resident_pages = int(statm.split()[1])  # the second field
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
        available_bytes = _parse_bytes(meminfo, "MemAvailable:")
    except (AttributeError, IndexError, OSError, ValueError):  # not Linux
        return device_memory_bytes(device)
    usable_bytes = num_resident_pages * page_bytes + available_bytes
    for path in _CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # "max" is no limit
            usable_bytes = min(usable_bytes, int(path.read_text(encoding="ascii")))
    return usable_bytes


def device_memory_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or of this machine for a CPU; 0 if it is unknown."""
    if device.type == "cuda":
        _, total_bytes = torch.cuda.mem_get_info(device)
        return total_bytes
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows, and systems without these names
        return 0


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished its work. Call it before reading the clock."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
