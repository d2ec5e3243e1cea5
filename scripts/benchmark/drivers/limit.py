"""Measures the limit: how fast this machine multiplies matrices of the model's own shapes.

Each weight product of the model is done at full size, forward and, for training, both products
backward, by the fastest library that torch brings for the processor; shapes weigh as often as the
model has them.
"""

# N rows

from __future__ import annotations

import time
from collections import Counter

import torch
from ours import model_config, take_kernels
from turns import Turns

from nmt.model.fast.layers import linear, transposed_matmul
from nmt.training.costs import Shape, source_shapes, synchronize, target_shapes


def main() -> None:
    """Answer each turn with the operations of a weighed pass and the seconds it would take."""
    turns = Turns()
    job = turns.job
    torch.set_num_threads(job["threads"])
    job["dtype"] = take_kernels(job)
    config = model_config(job["model"])
    counts = target_shapes(config, job["vocab_size"])
    if job["is_training"]:
        counts += source_shapes(config)
    measure(job, counts)
    turns.ready(torch=torch.__version__)
    while True:
        turns.end(**measure(job, counts))


def measure(job: dict, counts: Counter[Shape]) -> dict[str, float]:
    """Time every shape; return operations a processor second and a second by the clock."""
    device, dtype = torch.device(job["device"]), getattr(torch, job["dtype"])
    flops = cpu = wall = 0.0
    for (inner, outer), times in counts.items():
        x = torch.randn(job["rows"], inner, device=device, dtype=dtype)
        weight = torch.randn(outer, inner, device=device, dtype=dtype)
        products(x[:8], weight, job["is_training"])  # chooses kernels
        synchronize(device)
        starts = time.process_time(), time.perf_counter()
        for _ in range(job["times"]):
            products(x, weight, job["is_training"])
        synchronize(device)
        cpu += times * (time.process_time() - starts[0])
        wall += times * (time.perf_counter() - starts[1])
        operations = 6 if job["is_training"] else 2
        flops += times * job["times"] * float(operations * job["rows"] * inner * outer)
    return {"flops_per_cpu_second": flops / cpu, "flops_per_second": flops / wall}


def products(x: torch.Tensor, weight: torch.Tensor, is_training: bool) -> None:
    """Multiply as a layer does with its weight, and back for the two gradients."""
    y = linear(x, weight)  # (N, outer)
    if is_training:
        linear(y, weight.T)  # (N, inner), the gradient of x
        transposed_matmul(y, x)  # (outer, inner), the gradient of the weight


main()
