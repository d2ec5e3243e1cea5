"""Measures the limit: the rate of matrix multiplications of the model's own shapes.

Each weight of the model is multiplied at full size, forward and, for training, both products of the
backward pass, by the fastest library in torch. Shapes count as often as the model has them.
"""

# N rows

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from nmt_options import apply_options, model_config
from turns import Turns

from nmt.model.fast.layers import linear, transposed_matmul
from nmt.training.costs import Shape, source_shapes, synchronize, target_shapes


def main() -> None:
    """Answer each turn with operations per second."""
    turns = Turns()
    job = turns.job
    torch.set_num_threads(job["threads"])
    job["dtype"] = apply_options(job)
    config = model_config(job["model"])
    counts = target_shapes(config, job["vocab_size"])
    if job["is_training"]:
        counts += source_shapes(config)
    measure(job, counts)
    turns.ready(torch=torch.__version__)
    while True:
        turns.end(**measure(job, counts))


def measure(job: dict[str, Any], counts: Counter[Shape]) -> dict[str, float]:
    """Time every shape; return operations per CPU second and per wall-clock second."""
    device = torch.device(job["device"])
    dtype = getattr(torch, job["dtype"])
    num_rows = job["rows"]
    repeats = job["repeats"]
    operations = 6 if job["is_training"] else 2  # for each weight and row
    flops = cpu_seconds = wall_seconds = 0.0
    for (inner, outer), count in counts.items():
        x = torch.randn(num_rows, inner, device=device, dtype=dtype)
        weight = torch.randn(outer, inner, device=device, dtype=dtype)
        multiply(x[:8], weight, is_training=job["is_training"])  # kernels are chosen here
        synchronize(device)
        cpu_start = time.process_time()
        wall_start = time.perf_counter()
        for _ in range(repeats):
            multiply(x, weight, is_training=job["is_training"])
        synchronize(device)
        cpu_seconds += count * (time.process_time() - cpu_start)
        wall_seconds += count * (time.perf_counter() - wall_start)
        flops += float(count * repeats * operations * num_rows * inner * outer)
    return {"flops_per_cpu_second": flops / cpu_seconds, "flops_per_second": flops / wall_seconds}


def multiply(x: torch.Tensor, weight: torch.Tensor, *, is_training: bool) -> None:
    """Multiply as a linear layer does, and backward for its two gradients."""
    y = linear(x, weight)  # (N, outer)
    if is_training:
        linear(y, weight.T)  # (N, inner), the gradient of x
        transposed_matmul(y, x)  # (outer, inner), the gradient of the weight


main()
