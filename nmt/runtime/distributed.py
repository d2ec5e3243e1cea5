"""The processes that train together: which of them this one is, its device, what they exchange."""

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
from nmt.errors import ConfigError, DeviceError, PeerError, StoppedError
from nmt.runtime.cores import choose_threads

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """One rank among `size`; `local_rank` counts on its machine alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run folder and logs."""
        return self.rank == 0


def find_world() -> World:
    """Read which rank a launcher (torchrun) made this process; local numbers may be missing."""
    if not is_launched():
        return World()
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
        raise ConfigError(
            f"RANK={rank}, WORLD_SIZE={size}: set by a launcher, the rank must be from 0 to below "
            "the world size; start with torchrun, or unset both"
        )
    local = (os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", size))
    return World(int(rank), int(size), *map(int, local))


def is_launched() -> bool:
    """Say whether a launcher started this process, be it the only one."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def num_processes(devices: int, device: str) -> int:
    """Return how many processes this machine trains with; `devices` 0 is one for each GPU."""
    kind, _, index = device.partition(":")
    if index and devices > 1:
        raise ConfigError(f"devices={devices}: device={device} is one alone; use device={kind}")
    num_gpus = torch.cuda.device_count() if kind in ("auto", "cuda") and not index else 0
    if 1 <= num_gpus < devices:
        advice = f"use devices={num_gpus} or device=cpu"
        raise DeviceError(f"devices={devices}: this machine has {num_gpus} GPUs; {advice}")
    return devices or max(num_gpus, 1)


@contextlib.contextmanager
def process_group(world: World, device: torch.device, timeout_seconds: int) -> Iterator[None]:
    """Join the other ranks for the time of the block; one that waits longer than `timeout_seconds`
    for another fails.
    """
    if device.type == "cuda":  # of which torch's clock waits for the current one
        torch.cuda.set_device(device)
    if world.size == 1:
        yield
        return
    try:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        yield
    except StoppedError:  # by all ranks alike
        dist.destroy_process_group()
        raise
    except RuntimeError as error:  # a `DistError`, or of gloo a plain one
        is_late = re.search(r"[Tt]imed out|[Tt]imeout", str(error)) is not None
        if not (isinstance(error, dist.DistError) or "gloo" in str(error) or is_late):
            raise
        lost = "the connection to another rank is lost"
        if is_late:
            lost = f"no answer from another rank within timeout_seconds={timeout_seconds}"
        lost += "; the same command goes on from the newest checkpoint"
        raise PeerError(f"{lost} ({' '.join(str(error).split())[:300]})") from error
    dist.destroy_process_group()  # not after an error: it would wait for the others


def sum_over_ranks(values: Tensor) -> list[float]:
    """Add up the vector `values` of all ranks, of a GPU or the host; with one of a GPU, the one
    point of an update that waits for it.
    """
    if dist.is_initialized():
        dist.all_reduce(values)
    return values.tolist()


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in their order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def from_main(value: T) -> T:
    """Return rank 0's value on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device that the setting names; each rank of a machine has a GPU of its own."""
    has_mps = int(torch.backends.mps.is_available())
    counts = {"cuda": torch.cuda.device_count(), "mps": has_mps, "cpu": 1}
    if name == "auto":
        name = next(kind for kind, count in counts.items() if count)
    kind, _, index = name.partition(":")
    if kind not in counts or (index and not index.isdigit()):
        raise ConfigError(f"device={name}: must be one of auto, cpu, cuda, cuda:1, mps")
    number = int(index or (local_rank if kind == "cuda" else 0))
    if number >= counts[kind]:
        what = f"this machine has {counts[kind]} {kind} devices; use device=cpu or device=auto"
        raise DeviceError(f"device={name}: {what}")
    return torch.device(kind, number) if kind == "cuda" else torch.device(kind)


def find_dtype(choice: DType, device: torch.device) -> torch.dtype:
    """Turn the setting `dtype` into the format of matrix multiplications on `device`."""
    kind, is_cuda = device.type, device.type == "cuda"
    has_bfloat16 = is_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    if choice is DType.auto:
        return torch.bfloat16 if has_bfloat16 else torch.float32
    has = {DType.bfloat16: kind == "cpu" or has_bfloat16, DType.float16: kind == "cpu" or is_cuda}
    if not has.get(choice, True):
        name = choice.value
        raise DeviceError(f"dtype={name}: {kind} here has no {name}; use dtype=float32")
    is_half = choice in (DType.bfloat16, DType.float16)  # every CPU has them, if slowly
    is_slow = is_half and torch.backends.cpu.get_cpu_capability() == "AVX2"
    if kind == "cpu" and is_slow and find_world().is_main:
        text = "dtype=%s: this CPU has no instructions for it; float32 is 4 to 10 times as fast"
        log.warning(text, choice.value)
    return getattr(torch, choice.value)  # type: ignore[no-any-return]


def set_num_threads(num_threads: int) -> None:
    """Let torch use so many CPU threads; 0: its own number, or fewer on a machine that is busy. The
    ranks of a machine keep what they were given.
    """
    most = torch.get_num_threads()
    chosen = num_threads or (most if is_launched() else choose_threads(most))
    if chosen != most:
        torch.set_num_threads(chosen)
    if not num_threads and chosen < most:
        text = "%d threads, since other processes are busy; num_threads=%d takes all cores"
        log.info(text, chosen, most)


def keep_freed_memory() -> None:
    """Let this process keep up to 512 MiB of freed memory between the steps of a search (glibc)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # numbers of malloc.h; the latter may be 32 MiB
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 512 << 20)
