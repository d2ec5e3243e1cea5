"""The ranks of distributed training, and the device, dtype, threads and memory of a process."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nmt.config import DType
from nmt.errors import ConfigError, DeviceError, PeerError, StoppedError, to_one_line
from nmt.runtime.cores import choose_num_threads

log = logging.getLogger(__name__)
T = TypeVar("T")
# parameters of glibc's `mallopt`, as its malloc.h numbers them
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MAX_MMAP_THRESHOLD = 32 << 20  # the largest value that glibc accepts
_KEPT_BYTES = 512 << 20  # freed memory that glibc keeps instead of giving it back to the system

# a forked process does not have the OpenMP threads of its parent, and would wait for them forever
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


@dataclass(frozen=True)
class World:
    """The rank of this process among all `size` ranks, and among the ranks of this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run folder and logs."""
        return self.rank == 0


def find_world() -> World:
    """Read the rank of this process from the environment variables that torchrun sets."""
    if not is_launched():
        return World()
    rank = os.environ["RANK"]
    size = os.environ["WORLD_SIZE"]
    is_valid = rank.isdigit() and size.isdigit() and int(rank) < int(size)
    if not is_valid:
        raise ConfigError(
            f"RANK={rank}, WORLD_SIZE={size}: RANK must be at least 0 and below WORLD_SIZE; start "
            "with torchrun, or unset both variables"
        )
    return World(
        rank=int(rank),
        size=int(size),
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
    )


def is_launched() -> bool:
    """Return whether a launcher such as torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def choose_num_processes(devices: int, device: str) -> int:
    """Return the number of processes to start on this machine for the settings of nmt-train.

    `devices` of 0 means one process per GPU, or one on a CPU. Raises `ConfigError` for several
    processes on a single GPU such as cuda:1, and `DeviceError` for too few GPUs.
    """
    device_type, _, index = device.partition(":")
    if index and devices > 1:
        raise ConfigError(
            f"devices={devices}: device={device} is a single device; use device={device_type}"
        )
    num_gpus = 0
    if device_type in ("auto", "cuda") and not index:
        num_gpus = torch.cuda.device_count()
    if 1 <= num_gpus < devices:
        raise DeviceError(
            f"devices={devices}: this machine has {num_gpus} GPUs; use devices={num_gpus} or "
            "device=cpu"
        )
    num_cores = os.cpu_count() or 1
    if not num_gpus and devices > num_cores:
        log.warning(
            "devices=%d processes share %d CPU cores; devices=%d is faster",
            devices,
            num_cores,
            num_cores,
        )
    if devices:
        return devices
    return max(num_gpus, 1)


@contextlib.contextmanager
def process_group(world: World, device: torch.device, timeout_seconds: int) -> Iterator[None]:
    """Connect this process to the other ranks during the `with` block.

    Raises `PeerError` if another rank is lost or does not answer within `timeout_seconds`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # torch's timers and barriers use the current device
    if world.size == 1:
        yield
        return
    try:
        # gloo is for tensors on the CPU, and NCCL for tensors on the GPU
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        yield
    except StoppedError:
        # every rank has stopped, so none waits for the others when the group is destroyed
        dist.destroy_process_group()
        raise
    except RuntimeError as error:
        has_timed_out = re.search(r"[Tt]imed out|[Tt]imeout", str(error)) is not None
        is_from_gloo = "gloo" in str(error)  # gloo raises plain RuntimeErrors
        is_from_peer = isinstance(error, dist.DistError) or is_from_gloo or has_timed_out
        if not is_from_peer:
            raise
        problem = "the connection to another rank is lost"
        if has_timed_out:
            problem = f"no answer from another rank within timeout_seconds={timeout_seconds}"
        reason = to_one_line(error, 300)
        raise PeerError(
            f"{problem}; run the same command to continue from the newest checkpoint ({reason})"
        ) from error
    # Not in a `finally` block: `destroy_process_group` waits forever if another rank is lost.
    dist.destroy_process_group()


def sum_over_ranks(values: Tensor) -> list[float]:
    """Add up the vector `values` over all ranks, in place, and return the sums as floats.

    Synchronizes with the GPU.
    """
    if dist.is_initialized():
        dist.all_reduce(values)
    return values.tolist()


def gather(value: T) -> list[T]:
    """Return the `value` of each rank, ordered by rank. All ranks must call it."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def broadcast_from_main(value: T) -> T:
    """Return the value of rank 0 on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device for the setting `device`; `cuda` means the GPU with index `local_rank`.

    Raises `ConfigError` for unknown devices, and `DeviceError` if this machine lacks the device.
    """
    device_counts = {
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
        "cpu": 1,
    }
    if name == "auto":
        # `device_counts` lists the fastest devices first
        name = next(device_type for device_type, count in device_counts.items() if count)
    device_type, _, index = name.partition(":")
    is_valid_index = index == "" or index.isdigit()
    if device_type not in device_counts or not is_valid_index:
        raise ConfigError(f"device={name}: must be one of auto, cpu, cuda, cuda:1, mps")
    device_index = 0
    if index:
        device_index = int(index)
    elif device_type == "cuda":
        device_index = local_rank
    if device_index >= device_counts[device_type]:
        raise DeviceError(
            f"device={name}: this machine has {device_counts[device_type]} {device_type} devices; "
            "use device=cpu or device=auto"
        )
    if device_type == "cuda":
        return torch.device("cuda", device_index)
    return torch.device(device_type)


def find_dtype(choice: DType, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix multiplications on `device` for the setting `dtype`.

    Raises `DeviceError` if the device does not support it.
    """
    gpu_has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(
        including_emulation=False
    )
    if choice is DType.auto:
        return torch.bfloat16 if gpu_has_bfloat16 else torch.float32
    if choice is DType.float32:
        return torch.float32
    is_supported = {
        DType.bfloat16: device.type == "cpu" or gpu_has_bfloat16,
        DType.float16: device.type in ("cpu", "cuda"),
    }
    if not is_supported[choice]:
        raise DeviceError(
            f"dtype={choice.value}: the device {device.type} of this machine does not support it; "
            "use dtype=float32"
        )
    # only newer CPUs have instructions for 16-bit numbers
    is_slow = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    if is_slow and find_world().is_main:
        log.warning(
            "dtype=%s: this CPU has no instructions for it; float32 is 4 to 10 times as fast",
            choice.value,
        )
    dtype: torch.dtype = getattr(torch, choice.value)
    return dtype


def set_num_threads(num_threads: int) -> None:
    """Let torch use `num_threads` CPU threads; 0 means one per idle core.

    With 0, the number never exceeds torch's default. In a rank that a launcher started, 0 changes
    nothing, since the launcher divides the cores among the ranks.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    elif not is_launched():
        max_threads = torch.get_num_threads()
        num_threads = choose_num_threads(max_threads)
        if num_threads < max_threads:
            torch.set_num_threads(num_threads)
            log.info(
                "num_threads=%d, since other processes are busy; num_threads=%d takes all cores",
                num_threads,
                max_threads,
            )


def keep_freed_memory() -> None:
    """Let glibc keep up to 512 MiB of freed memory, which the next step of beam search reuses.

    Blocks of more than 32 MiB still go back to the system when they are freed.
    """
    _set_malloc_option(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
    _set_malloc_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def limit_malloc_arenas(num_arenas: int) -> None:
    """Let glibc use at most `num_arenas` memory pools, since each of them keeps freed memory."""
    _set_malloc_option(_M_ARENA_MAX, num_arenas)


def _set_malloc_option(option: int, value: int) -> None:
    """Set a parameter of glibc's malloc. Does nothing with other C libraries."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(option, value)
