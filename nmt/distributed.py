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
    # bfloat16 and float16 run on every processor, if slowly without instructions for them
    has_bfloat16 = device.type == "cpu" or (
        device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    )
    available = {
        DType.float32: True,
        DType.bfloat16: has_bfloat16,
        DType.float16: device.type in ("cpu", "cuda"),
    }
    if choice is DType.auto:
        is_fast = device.type == "cuda" and has_bfloat16
        return torch.bfloat16 if is_fast else torch.float32
    if not available[choice]:
        name = choice.value
        raise DeviceError(f"dtype={name}: {device.type} here has no {name}; use dtype=float32")
    return getattr(torch, choice.value)  # type: ignore[no-any-return]


def set_num_threads(num_threads: int) -> None:
    """Limit torch to so many processor threads; 0 leaves its own choice."""
    if num_threads:
        torch.set_num_threads(num_threads)
