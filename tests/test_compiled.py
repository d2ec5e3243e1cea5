"""Compiled training against plain training, and the shapes that make it compile seldom."""

from __future__ import annotations

import functools
import logging
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from variants import VARIANTS

from nmt.config import Decoder, Positions
from nmt.data.tokenizer import Tokenizer
from nmt.model.fast import FastTransformer
from nmt.model.fast.packing import PackedContext, pack
from nmt.training import compiled
from nmt.training.batches import make_batch
from nmt.training.compiled import Compiler
from nmt.training.loss import Objective

CPU = torch.device("cpu")
Pairs = list[tuple[list[int], list[int]]]


def draw_pairs(draw: random.Random, count: int, longest: int) -> Pairs:
    pairs = []
    for _ in range(count):
        src = draw.choices(range(4, 300), k=draw.randint(1, longest))
        tgt = draw.choices(range(4, 300), k=draw.randint(1, longest))
        pairs.append((src, tgt))
    return pairs


class Traced(Exception):
    """A graph would run now."""


class Backend:
    """A backend of torch.compile that records graphs and runs none: a CPU lacks some kernels."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph)
        return self._raise_traced

    def _raise_traced(self, *_: Any) -> Any:
        raise Traced


def trace(
    model: FastTransformer, tokenizer: Tokenizer, flash: Any = None, *, by_layer: bool = False
) -> list[torch.fx.GraphModule]:
    """Return the graphs of batches of several shapes; in one of them all sentences are as long."""
    backend = Backend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        forward = Compiler(by_layer=by_layer).compile_model(model)
    draw = random.Random(0)
    for count, longest in ((5, 20), (1, 44), (28, 26), (6, 12), (3, 1)):
        batch = make_batch(draw_pairs(draw, count, longest), tokenizer, round_to=8)
        src_packing = replace(batch.src_packing, flash_attention=flash)
        tgt_packing = replace(batch.tgt_packing, flash_attention=flash)
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(Traced):
            forward(batch.src, src_packing, batch.tgt_in, tgt_packing)
        if by_layer and not model.activation_checkpointing:  # the call ended in the encoder
            memory = torch.randn(len(batch.src), model.config.d_model, requires_grad=True)
            tgt_context = PackedContext.of(tgt_packing, tgt_packing, is_causal=True)
            cross_context = PackedContext.of(tgt_packing, src_packing)
            with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(Traced):
                model.decode(batch.tgt_in, tgt_context, memory, cross_context)
    return backend.graphs


@pytest.mark.slow
@pytest.mark.parametrize("by_layer", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("has_flash", [True, False])
def test_one_graph_of_a_model_or_kind_of_layer_serves_batches_of_all_shapes(
    tokenizer: Tokenizer, has_flash: bool, checkpointing: bool, by_layer: bool
) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen") if has_flash else None
    torch.compiler.reset()
    shape = {"d_model": 32, "num_encoder_layers": 2, "num_decoder_layers": 2, "dropout": 0.1}
    model = tiny_model(vocab_size=tokenizer.vocab_size, **shape).train()
    model.activation_checkpointing = checkpointing
    graphs = trace(model, tokenizer, varlen.varlen_attn if varlen else None, by_layer=by_layer)
    # of encoder layers and of decoder layers; with checkpointing, of the whole model
    assert len(graphs) == (2 if by_layer and not checkpointing else 1)
    for graph in graphs:
        text = ""
        for module in graph.modules():
            if isinstance(module, torch.fx.GraphModule):
                text += str(module.graph)
        assert ("_varlen_attn" in text) == has_flash
        assert ("scaled_dot_product_attention" in text) != has_flash
        for node in graph.graph.nodes:  # quotients of sizes do not compile for GPUs
            value = node.meta.get("example_value")
            assert not isinstance(value, Tensor) or "//" not in str(value.shape), node


@pytest.mark.slow
def test_the_graph_of_a_model_is_one_for_several_ranks_too(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch splits those inside of DDP where one of its buckets ends, the first after 1 MB."""
    torch.compiler.reset()
    backend = Backend()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    shape = {"d_model": 256, "num_encoder_layers": 1, "num_decoder_layers": 1}
    model = tiny_model(vocab_size=tokenizer.vocab_size, **shape).train()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = DistributedDataParallel(Objective(model, smoothing=0.1, compiler=Compiler()))
        with pytest.raises(Traced):
            ranks(make_batch(draw_pairs(random.Random(0), 5, 20), tokenizer, round_to=8))
    finally:
        dist.destroy_process_group()
    assert len(backend.graphs) == 1


@pytest.mark.long
def test_fifty_compiled_updates_are_those_of_plain_ones_with_few_graphs(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    def losses(compiler: Compiler | None) -> list[float]:
        draw = random.Random(0)
        model = tiny_model(vocab_size=tokenizer.vocab_size).train()
        objective = Objective(model, smoothing=0.1, compiler=compiler)
        optimizer = torch.optim.Adam(objective.parameters(), lr=1e-3, fused=True)
        sums = []
        for update in range(50):
            count = 1 if update % 10 == 3 else draw.randint(2, 30)
            pairs = draw_pairs(draw, count, draw.randint(3, 60))
            batch = make_batch(pairs, tokenizer, round_to=8)
            loss, nll = objective(batch)
            (loss / batch.num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            sums.append((nll / batch.num_tokens).item())
        return sums

    expected = losses(None)
    assert expected[-1] < expected[0] - 0.1
    for by_layer in (True, False):
        torch.compiler.reset()
        compiler = Compiler(by_layer=by_layer)
        num_graphs = compiler.num_graphs
        with caplog.at_level(logging.INFO):
            sums = losses(compiler)
        assert sums == pytest.approx(expected, rel=1e-4), by_layer
        # one of the model or two of its layers, and few of the loss
        assert 1 <= compiler.num_graphs - num_graphs <= 7, by_layer
        assert compiler.compile_seconds > 0
        assert "compiled graph" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "checkpointing"),
    [
        ({}, False),
        ({}, True),
        ({"positions": Positions.rotary}, False),
        pytest.param({"positions": Positions.rotary}, True, marks=pytest.mark.long),
        ({"decoder": Decoder.ssru}, False),
        pytest.param({"decoder": Decoder.ssru}, True, marks=pytest.mark.long),
    ],
)
def test_gradients_of_layers_compiled_as_on_a_gpu_equal_uncompiled_ones(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    checkpointing: bool,
) -> None:
    # this backend makes graphs for the backward pass too, but no kernels
    patched = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", patched)
    torch.compiler.reset()
    shape = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dropout": 0.0, **changes}
    gradients = []
    for compiler in (None, Compiler(may_fail=True, by_layer=True)):
        model = tiny_model(vocab_size=tokenizer.vocab_size, **shape).train()
        model.activation_checkpointing = checkpointing
        objective = Objective(model, smoothing=0.1, compiler=compiler)
        rng = random.Random(0)
        for count in (5, 9):
            loss, _ = objective(make_batch(draw_pairs(rng, count, 20), tokenizer))
            loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for compiled_gradient, gradient in zip(*gradients, strict=True):
        assert_close(compiled_gradient, gradient, rtol=1e-4, atol=1e-5)
    assert "runs uncompiled" not in caplog.text


def test_what_cannot_be_compiled_runs_as_it_is_where_nobody_asked(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for choice in (None, False, True):  # a CPU compiles only on request
        assert (compiled.make_compiler(choice, CPU) is not None) == bool(choice)

    def broken(*call: Any, **options: Any) -> Any:
        def fail(*inputs: Any) -> Any:
            raise RuntimeError("no such kernel\nand a page more")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)  # no GPU here
    monkeypatch.setattr(
        torch, "ones", lambda *size, device=None, **named: torch.empty(*size, **named).fill_(1)
    )
    caplog.set_level(logging.INFO)
    assert compiled.make_compiler(None, torch.device("cuda")) is None
    model = tiny_model()
    sentences = pack([2, 1])
    inputs = torch.ones(3, dtype=torch.long), sentences, torch.ones(3, dtype=torch.long), sentences
    forward = Compiler(may_fail=True).compile(model.forward)
    for _ in range(2):
        assert torch.equal(forward(*inputs), model(*inputs))
    assert caplog.messages == [
        "compile=false: torch.compile does not work here: no such kernel",
        "FastTransformer.forward runs uncompiled: no such kernel",
    ]
    compiled_model = tiny_model()
    Compiler(may_fail=True, by_layer=True).compile_model(compiled_model)
    assert torch.equal(compiled_model(*inputs), model(*inputs))
    assert caplog.messages[2:] == [
        "EncoderLayer.forward runs uncompiled: no such kernel",
        "DecoderLayer.forward runs uncompiled: no such kernel",
    ]
    objective = Objective(model.train(), smoothing=0.1, compiler=Compiler(may_fail=True))
    objective(make_batch([([5, 6], [7])], tokenizer))
    assert caplog.messages[-1] == "softmax_loss_for_compiler runs uncompiled: no such kernel"
    with pytest.raises(RuntimeError, match="no such kernel"):
        Compiler().compile(model.forward)(*inputs)


@pytest.mark.long
def test_every_kind_of_layer_is_one_graph_without_breaks(tokenizer: Tokenizer) -> None:
    for name, changes in VARIANTS.items():
        torch.compiler.reset()
        model = tiny_model(vocab_size=tokenizer.vocab_size, **changes).train()
        assert len(trace(model, tokenizer, by_layer=True)) == 2, name
