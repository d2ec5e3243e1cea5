"""torch.compile for the model in training, and a count of what it compiles."""

# B batch, S source, T target, D d_model

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nmt.model.transformer import Transformer

log = logging.getLogger(__name__)
Forward = Callable[..., Tensor]


class Compiler:
    """Compiles for all sizes at once (dynamic shapes), and logs each graph that comes nevertheless.

    Batches of `make_compiled_batch` have no sizes that need a graph of their own. The environment
    variable TORCH_LOGS=recompiles makes torch say why it compiles again.
    """

    def __init__(self, device: torch.device) -> None:
        # here, since importing it takes seconds that only a compiled run should pay
        from torch._dynamo import callback, utils

        self.seconds = 0.0
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
        return torch.compile(model.forward, dynamic=True)

    # torch 2.6 passes nothing, later ones what is compiled

    def _begin(self, *_: Any) -> None:
        self._start_seconds = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._start_seconds
        if self.num_graphs > self._logged:
            self._logged = self.num_graphs
            log.info("compiled graph %d; %.0f s of compiling so far", self._logged, self.seconds)
