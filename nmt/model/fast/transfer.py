"""Copies between the CPU and a GPU that do not wait, or wait once for many tensors.

A GPU works through its queue of kernels behind the program. Reading a value on the CPU waits until
the queue is empty; copying to the GPU from ordinary memory may wait, too. On a CPU nothing is
copied.
"""

from __future__ import annotations

import torch
from torch import Tensor


def send(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device`; a GPU reads it later, from page-locked memory."""
    if device.type == "cuda" and x.device.type == "cpu":
        return (x if x.is_pinned() else x.pin_memory()).to(device, non_blocking=True)
    return x if x.device == device else x.to(device)  # comparing is faster than an empty copy


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors of one device to the CPU by one copy, which waits for the device.

    Their formats are float32 and int64, with integers that fit in 32 bits.
    """
    if tensors[0].device.type == "cpu":
        return list(tensors)
    bits = [x.float().view(torch.int32) if x.is_floating_point() else x.int() for x in tensors]
    copied = torch.cat([x.flatten() for x in bits]).cpu()
    fetched = []
    start = 0
    for x in tensors:
        values = copied[start : start + x.numel()].view(x.shape)
        fetched.append(values.view(torch.float32) if x.is_floating_point() else values.long())
        start += x.numel()
    return fetched
