"""torch.compile for model and loss in training, and a count of what it compiles."""

# D d_model

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nmt.model.transformer import Transformer

log = logging.getLogger(__name__)
Forward = Callable[..., Tensor]


def make_compiler(choice: bool | None, device: torch.device) -> Compiler | None:
    """Return a compiler if it is wanted; with None as `choice` on a GPU where a small part of a
    model can be compiled, which needs Triton and a C compiler.
    """
    if choice is None and device.type == "cuda":
        failure = _try_out(device)
        if failure is not None:
            log.info("compile=false, since torch.compile does not work here: %s", failure)
        return None if failure else Compiler(may_fail=True)
    return Compiler() if choice else None


def _try_out(device: torch.device) -> str | None:
    """Compile a layer forward and backward; return the first line of what went wrong."""
    layer = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.5)).to(device)
    try:
        torch.compile(layer, dynamic=True)(torch.ones(8, 16, device=device)).sum().backward()
    except Exception as error:  # of Triton, of compilers and of the many layers between
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Compiler:
    """Compiles for all sizes at once (dynamic shapes), and logs each graph that comes nevertheless.

    A `Packing` has nothing that would need a graph of its own. The environment variable
    TORCH_LOGS=recompiles makes torch say why it compiles again.
    """

    def __init__(self, *, may_fail: bool = False) -> None:
        """With `may_fail` a model that cannot be compiled runs as it is, with a warning."""
        # here, since importing it takes seconds that only a compiled run should pay
        from torch._dynamo import callback, utils
        from torch.fx.experimental import _config

        # N and M, equal by chance in the first batch, are not equal in all; as torch's log advises
        _config.use_duck_shape = False

        self.seconds = 0.0
        self._may_fail, self._failed = may_fail, False
        self._counters = utils.counters
        self._start_seconds = 0.0
        self._logged = self.num_graphs
        callback.on_compile_start(self._begin)
        callback.on_compile_end(self._end)

    @property
    def num_graphs(self) -> int:
        """Graphs that this process has compiled; the backward pass of each is not counted."""
        return int(self._counters["stats"]["unique_graphs"])

    def compile(self, model: Transformer) -> Forward:
        """Return the forward pass of `model`, which compiles itself when it is first called.

        The model stays as it is: validation and decoding run it uncompiled.
        """
        compiled = torch.compile(model.forward, dynamic=True, fullgraph=True)

        def forward(*inputs: Any) -> Tensor:
            if self._failed:
                return model(*inputs)  # type: ignore[no-any-return]
            try:
                return compiled(*inputs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of Triton, of compilers and of the many layers between
                self._failed = True
                log.warning("the model runs uncompiled: %s", _first_line(error))
                return model(*inputs)  # type: ignore[no-any-return]

        return forward if self._may_fail else compiled

    # torch 2.6 passes nothing, later ones what is compiled

    def _begin(self, *_: Any) -> None:
        self._start_seconds = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._start_seconds
        if self.num_graphs > self._logged:
            self._logged = self.num_graphs
            log.info("compiled graph %d; %.0f s of compiling so far", self._logged, self.seconds)
