"""Copies between the host and a GPU that wait for nothing, or once for many tensors.

A GPU computes what it was asked for in order, behind the program. A value that the host reads costs
the time until the GPU is there; a copy from ordinary host memory may cost it too. On a CPU nothing
is copied.
"""

# N any number, the same or not for all tensors

from __future__ import annotations

import torch
from torch import Tensor


def send(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device`; a GPU reads one of the host later, from page-locked memory."""
    if device.type == "cuda" and x.device.type == "cpu":
        return (x if x.is_pinned() else x.pin_memory()).to(device, non_blocking=True)
    return x if x.device == device else x.to(device)  # asking takes less time than copying nothing


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors (N, ...) of one device to the host by one copy, which waits for the device.

    Their formats are float32 and int64, with integers that 32 bits hold.
    """
    if tensors[0].device.type == "cpu":
        return list(tensors)
    bits = [x.float().view(torch.int32) if x.is_floating_point() else x.int() for x in tensors]
    flat, sizes = torch.cat([x.flatten() for x in bits]).cpu(), [x.numel() for x in bits]
    return [
        (part.view(torch.float32) if x.is_floating_point() else part.long()).view(x.shape)
        for x, part in zip(tensors, torch.split(flat, sizes), strict=True)
    ]
