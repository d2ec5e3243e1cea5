"""Copies between the CPU and a GPU that wait as little as possible.

A GPU executes kernels asynchronously. Reading a value on the CPU waits until all of them are done.
Copying to the GPU may wait too, unless the memory of the CPU is page-locked.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device` without waiting for a GPU; return `x` if it is there already."""
    if device.type == "cuda" and x.device.type == "cpu":
        pinned = x if x.is_pinned() else x.pin_memory()
        return pinned.to(device, non_blocking=True)
    return x if x.device == device else x.to(device)  # comparing first is faster than `to`


def to_cpu(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors from one device to the CPU, in a single copy that waits for the device.

    They must be float32, or int64 with values that fit in 32 bits.
    """
    if tensors[0].device.type == "cpu":
        return list(tensors)
    # one int32 tensor holds the bits of floats and the values of integers
    flat = []
    for x in tensors:
        bits = x.float().view(torch.int32) if x.is_floating_point() else x.int()
        flat.append(bits.flatten())
    copied = torch.cat(flat).cpu()
    copies = []
    start = 0
    for x in tensors:
        end = start + x.numel()
        values = copied[start:end].view(x.shape)
        copies.append(values.view(torch.float32) if x.is_floating_point() else values.long())
        start = end
    return copies
