"""torch.compile for model and loss in training, with a log line for each graph."""

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
    """Compiles functions for inputs of any size and logs each new graph.

    The environment variable TORCH_LOGS=recompiles makes torch log why it compiles again.
    """

    def __init__(self, *, may_fail: bool = False) -> None:
        """With `may_fail`, a function that cannot be compiled runs uncompiled, with a warning."""
        # imported here because it takes seconds, which only a compiled run should pay
        from torch._dynamo import callback, config, utils
        from torch.fx.experimental import _config

        # source and target sizes that are equal by chance in the first batch must stay independent
        _config.use_duck_shape = False
        config.optimize_ddp = False  # DDP would split the graph at its gradient buckets

        self.seconds = 0.0  # of compiling
        self._start_seconds = 0.0
        self._may_fail = may_fail
        self._counters = utils.counters
        self._num_logged = self.num_graphs
        callback.on_compile_start(self._on_start)
        callback.on_compile_end(self._on_end)

    @property
    def num_graphs(self) -> int:
        """The forward graphs that this process has compiled; each may have a backward graph too."""
        return int(self._counters["stats"]["unique_graphs"])

    def compile(
        self, function: Callable[..., T], *, dynamic: bool | None = True
    ) -> Callable[..., T]:
        """Return `function`, to be compiled at its first call; `dynamic` as in `torch.compile`."""
        compiled: Callable[..., T] = torch.compile(function, dynamic=dynamic, fullgraph=True)
        return self._with_fallback(compiled, function) if self._may_fail else compiled

    def _with_fallback(
        self, compiled: Callable[..., T], function: Callable[..., T]
    ) -> Callable[..., T]:
        """Return `compiled`, replaced by `function` after its first failure."""
        current = compiled

        def call(*inputs: Any) -> T:
            nonlocal current
            try:
                return current(*inputs)
            except Exception as error:  # Triton, compilers and torch raise many types
                if current is function or isinstance(error, torch.OutOfMemoryError):
                    raise
                log.warning("%s runs uncompiled: %s", function.__qualname__, _first_line(error))
            current = function
            return function(*inputs)

        return call

    def _on_start(self, *_: Any) -> None:  # torch 2.6 passes nothing, later versions arguments
        self._start_seconds = time.perf_counter()

    def _on_end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._start_seconds
        if self.num_graphs > self._num_logged:
            self._num_logged = self.num_graphs
            log.info(
                "compiled graph %d; %.0f s of compiling so far", self._num_logged, self.seconds
            )


def make_compiler(choice: bool | None, device: torch.device) -> Compiler | None:
    """Return a compiler for the setting `compile`, or None to run uncompiled.

    With `choice` None the model is compiled on a GPU if a small model can be compiled there, which
    needs Triton and a C compiler.
    """
    if choice is not None:
        return Compiler() if choice else None
    if device.type != "cuda":
        return None
    layer = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.5)).to(device)
    try:
        torch.compile(layer, dynamic=True)(torch.ones(8, 16, device=device)).sum().backward()
    except Exception as error:  # Triton, compilers and torch raise many types
        log.info("compile=false: torch.compile does not work here: %s", _first_line(error))
        return None
    return Compiler(may_fail=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
