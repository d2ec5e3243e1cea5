"""torch.compile for model and loss in training, and a count of what it compiles."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

log = logging.getLogger(__name__)
T = TypeVar("T")


class Compiler:
    """Compiles with dynamic shapes, and logs each graph; a `Packing` needs none of its own.

    The environment variable TORCH_LOGS=recompiles makes torch log why it compiles again.
    """

    def __init__(self, *, may_fail: bool = False) -> None:
        """With `may_fail` what cannot be compiled runs as it is, with a warning."""
        # here, since importing it takes seconds that only a compiled run should pay
        from torch._dynamo import callback, config, utils
        from torch.fx.experimental import _config

        # N and M, equal by chance in the first batch, are not equal in all; as torch's log advises
        _config.use_duck_shape = False
        config.optimize_ddp = False  # or graphs are split by DDP's buckets, and CUDA's with them

        self.seconds = self._start_seconds = 0.0
        self._may_fail = may_fail
        self._counters = utils.counters
        self._logged = self.num_graphs
        callback.on_compile_start(self._begin)
        callback.on_compile_end(self._end)

    @property
    def num_graphs(self) -> int:
        """Graphs that this process has compiled; the backward pass of each is not counted."""
        return int(self._counters["stats"]["unique_graphs"])

    def compile(
        self, plain: Callable[..., T], *, dynamic: bool | None = True, replays: bool = False
    ) -> Callable[..., T]:
        """Return `plain` compiled at its first call, again for other sizes as `dynamic` says; with
        `replays` a GPU records its kernels once for each size, and replays them (CUDA graphs).
        """
        mode = "reduce-overhead" if replays else None
        chosen: Callable[..., T] = torch.compile(plain, dynamic=dynamic, fullgraph=True, mode=mode)
        if not self._may_fail:
            return chosen

        def call(*inputs: Any) -> T:
            nonlocal chosen
            try:
                return chosen(*inputs)
            except Exception as error:  # of Triton, of compilers and of the many layers between
                if chosen is plain or isinstance(error, torch.OutOfMemoryError):
                    raise
                log.warning("%s runs uncompiled: %s", plain.__qualname__, _first_line(error))
            chosen = plain
            return plain(*inputs)

        return call

    def _begin(self, *_: Any) -> None:  # torch 2.6 passes nothing, later ones what is compiled
        self._start_seconds = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._start_seconds
        if self.num_graphs > self._logged:
            self._logged = self.num_graphs
            log.info("compiled graph %d; %.0f s of compiling so far", self._logged, self.seconds)


def make_compiler(choice: bool | None, device: torch.device) -> Compiler | None:
    """Return a compiler if `choice` is True, or if it is None and a small model can be compiled on
    the GPU `device`, which needs Triton and a C compiler.
    """
    if choice is not None or device.type != "cuda":
        return Compiler() if choice else None
    layer = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.5)).to(device)
    try:
        torch.compile(layer, dynamic=True)(torch.ones(8, 16, device=device)).sum().backward()
    except Exception as error:  # of Triton, of compilers and of the many layers between
        reason = _first_line(error)
        log.info("compile=false, since torch.compile does not work here: %s", reason)
        return None
    return Compiler(may_fail=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
