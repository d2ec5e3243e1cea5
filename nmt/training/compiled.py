"""`torch.compile` for the model and the loss in training."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nmt.model.transformer import Transformer

log = logging.getLogger(__name__)
T = TypeVar("T")


class Compiler:
    """Compiles functions for inputs of any size, and logs a line for each compiled graph.

    With the environment variable TORCH_LOGS=recompiles, torch logs why it compiles again.
    """

    def __init__(self, *, may_fail: bool = False, by_layer: bool = False) -> None:
        """Change settings of `torch.compile` for the whole process.

        With `may_fail`, a function that cannot be compiled runs uncompiled, after a warning. With
        `by_layer`, `compile_model` compiles layers instead of the whole model.
        """
        # these imports take seconds, so runs that do not compile skip them
        from torch._dynamo import callback, utils
        from torch._dynamo import config as dynamo_config
        from torch.fx.experimental import _config as symbolic_shapes_config

        # do not assume that sizes which are equal in the first batch, by chance, are always equal
        symbolic_shapes_config.use_duck_shape = False
        dynamo_config.optimize_ddp = False  # do not split the graph at the gradient buckets of DDP

        self.compile_seconds = 0.0
        self._start_seconds = 0.0
        self._may_fail = may_fail
        self._by_layer = by_layer
        self._counters = utils.counters
        self._num_logged_graphs = self.num_graphs
        callback.on_compile_start(self._on_start)
        callback.on_compile_end(self._on_end)

    @property
    def num_graphs(self) -> int:
        """The number of forward graphs that this process has compiled."""
        return int(self._counters["stats"]["unique_graphs"])

    def compile(
        self, function: Callable[..., T], *, dynamic: bool | None = True
    ) -> Callable[..., T]:
        """Return a function that compiles `function` at its first call.

        `dynamic` is passed to `torch.compile`.
        """
        compiled: Callable[..., T] = torch.compile(function, dynamic=dynamic, fullgraph=True)
        return self._with_fallback(compiled, function) if self._may_fail else compiled

    def compile_model(self, model: Transformer) -> Callable[..., Tensor]:
        """Return a function that computes `model.forward` compiled.

        Compiling by layer makes two graphs, one for encoder layers and one for decoder layers, and
        replaces the classes of the layers in `model`. A graph of the whole model is about a tenth
        faster. But it takes three times as long to compile, and ranks cannot exchange gradients
        before the end of the backward pass.

        With activation checkpointing, the whole model is compiled. Otherwise, torch would end the
        recomputation of a layer with an exception, which a compiled layer cannot pass on.
        """
        if not self._by_layer or model.activation_checkpointing:
            return self.compile(model.forward)
        compiled_classes = {}  # keyed by the class of the uncompiled layers
        for layer in [*model.encoder_layers, *model.decoder_layers]:
            layer_class = type(layer)
            if layer_class not in compiled_classes:
                compiled_classes[layer_class] = self._compiled_class(layer_class)
            layer.__class__ = compiled_classes[layer_class]  # changes only the method `forward`
        return model.forward

    def _compiled_class(self, layer_class: type[nn.Module]) -> type[nn.Module]:
        """Return a subclass of a layer's class with a compiled `forward`."""
        plain_forward = layer_class.forward
        compiled_forward = self.compile(plain_forward)

        def forward(layer: nn.Module, *inputs: Any) -> Any:
            if torch.is_grad_enabled():
                return compiled_forward(layer, *inputs)
            # Validation and search run without gradients, and are too short to be worth compiling.
            return plain_forward(layer, *inputs)

        return type(f"Compiled{layer_class.__name__}", (layer_class,), {"forward": forward})

    def _with_fallback(
        self, compiled: Callable[..., T], function: Callable[..., T]
    ) -> Callable[..., T]:
        """Return a function that calls `compiled` until it fails, and then only `function`."""
        has_failed = False

        def call(*inputs: Any) -> T:
            nonlocal has_failed
            if not has_failed:
                try:
                    return compiled(*inputs)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # Triton, compilers and torch raise many types
                    log.warning("%s runs uncompiled: %s", _name_of(function), _first_line(error))
                    has_failed = True
            return function(*inputs)  # raises the error again if `function` itself caused it

        return call

    def _on_start(self, *_: Any) -> None:  # torch 2.6 passes nothing, later versions arguments
        self._start_seconds = time.perf_counter()

    def _on_end(self, *_: Any) -> None:
        self.compile_seconds += time.perf_counter() - self._start_seconds
        if self.num_graphs > self._num_logged_graphs:
            self._num_logged_graphs = self.num_graphs
            log.info(
                "compiled graph %d; %.0f s of compiling so far",
                self._num_logged_graphs,
                self.compile_seconds,
            )


def make_compiler(should_compile: bool | None, device: torch.device) -> Compiler | None:
    """Return a compiler, or None to run uncompiled.

    `should_compile` is the setting `compile`. If it is None, a run on a GPU compiles by layer. This
    needs Triton and a C compiler, so the function first compiles a small model.
    """
    if should_compile is not None:
        return Compiler() if should_compile else None
    if device.type != "cuda":
        return None
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.5)).to(device)
    try:
        output = torch.compile(model, dynamic=True)(torch.ones(8, 16, device=device))
        output.sum().backward()
    except Exception as error:  # Triton, compilers and torch raise many types
        log.info("compile=false: torch.compile does not work here: %s", _first_line(error))
        return None
    return Compiler(may_fail=True, by_layer=True)


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function or of the function of a `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function.__qualname__


def _first_line(error: Exception) -> str:
    """Return the first line of the message of an error, or its type if it has no message."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0]
