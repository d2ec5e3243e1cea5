"""The device that a process computes on, and the number format of its products."""

from __future__ import annotations

import os

import torch

from nmt.errors import ConfigError, DeviceError
from nmt.options import DType

_DEVICES = "auto, cpu, cuda, cuda:1, mps"


def check_single_process() -> None:
    """Refuse to be one of several processes of a launcher, which would all write the same run."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise ConfigError(
            f"WORLD_SIZE={world_size}: this nmt trains in one process; "
            "start nmt-train without torchrun"
        )


def find_device(name: str) -> torch.device:
    """Turn the setting `device` into a device that is there; anything else is one line of error."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not index.isdigit()):
        raise ConfigError(f"device={name}: must be one of {_DEVICES}")
    count = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if int(index or 0) >= count[kind]:
        raise DeviceError(
            f"device={name}: this machine has {count[kind]} {kind} devices; "
            "use device=cpu or device=auto"
        )
    return torch.device(name)


def find_dtype(choice: DType, device: torch.device) -> torch.dtype:
    """Turn the setting `dtype` into the format of matrix products on `device`."""
    has_bfloat16 = device.type == "cpu" or (
        device.type == "cuda" and torch.cuda.is_bf16_supported()
    )
    if choice is DType.auto:
        return torch.bfloat16 if device.type == "cuda" and has_bfloat16 else torch.float32
    if choice is DType.bfloat16 and not has_bfloat16:
        raise DeviceError(f"dtype=bfloat16: {device.type} here has no bfloat16; use dtype=float32")
    return torch.bfloat16 if choice is DType.bfloat16 else torch.float32


def set_num_threads(num_threads: int) -> None:
    """Limit torch to so many processor threads; 0 leaves its own choice."""
    if num_threads:
        torch.set_num_threads(num_threads)
