"""Batches of few shapes: how few, and that updates are those of batches without padding."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_compiled import Traced, draw_pairs, raise_traced
from tiny import tiny_model
from torch import Tensor
from toy import make_setup, write_data

from nmt.config import Sharding, TrainConfig
from nmt.data.batching import TokenBatchSampler
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.training.compiled import Compiler
from nmt.training.loss import Objective
from nmt.training.microbatches import Batch, Shape, make_batch


def test_batches_of_a_corpus_have_few_shapes_which_they_fit() -> None:
    draw = np.random.default_rng(0)
    src = draw.lognormal(3.0, 0.6, 30_000).clip(1, 150)
    lengths = np.stack([src, (src * draw.normal(1.0, 0.2, 30_000)).clip(1, 150)], axis=1)
    lengths = lengths.astype(np.int64)
    shapes: dict[int, set[Shape]] = {}
    real = padded = 0
    for size in (1, 3):  # a rank has parts of batches
        for epoch in range(2):
            sampler = TokenBatchSampler(
                lengths, 4096, tokens_per_update=9000, seed=1, rank=0, world_size=size
            )
            for rows in (rows for update in sampler.updates(epoch) for rows in update.batches):
                found, shape = lengths[rows], Shape.around(lengths[rows], 4096)
                shapes.setdefault(size, set()).add(shape)
                assert found.max() <= shape.longest <= max(8, 1.5 * found.max())
                assert (found.sum(axis=0) <= shape.num_tokens).all()
                missing = shape.num_tokens - found.sum(axis=0)
                assert (len(rows) - (-missing // shape.longest) <= shape.num_sentences).all()
                if size == 1:
                    real, padded = real + found.sum(), padded + 2 * shape.num_tokens
    assert len(shapes[1]) <= 20
    assert len(shapes[3]) <= 40
    assert 0.7 < real / padded < 1


def gradients(objective: Objective, batch: Batch) -> tuple[list[float], list[Tensor]]:
    loss, nll = objective(batch)
    (loss / batch.num_tokens).backward()
    found = [p.grad for p in objective.parameters() if p.grad is not None]
    objective.zero_grad()
    return [float(loss.detach()), float(nll)], found


def test_losses_and_gradients_are_those_of_batches_without_padding(tokenizer: Tokenizer) -> None:
    model = tiny_model(vocab_size=tokenizer.vocab_size, output_bias=True).train()
    plain = Objective(model, smoothing=0.1)
    static = Objective(model, smoothing=0.1, is_static=True)
    draw = random.Random(0)
    for count, longest in ((5, 20), (1, 60), (40, 3), (12, 12), (1, 1), (64, 1)):
        pairs = draw_pairs(draw, count, longest)
        if count == 40:
            pairs += draw_pairs(draw, 1, 60)  # a long one among short ones
        batch = make_batch(pairs, tokenizer, static_tokens=128)
        shape = Shape.around(batch.lengths, 128)
        for ids, sentences in ((batch.src, batch.sources), (batch.tgt_in, batch.targets)):
            assert (len(ids), sentences.longest, sentences.num_sentences) == shape
        expected, exact = gradients(plain, make_batch(pairs, tokenizer))
        sums, found = gradients(static, batch)
        assert sums == pytest.approx(expected, rel=1e-5), (count, longest)
        for one, other in zip(found, exact, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm() + 1e-7, (count, longest)


def test_updates_are_the_same_and_gradients_stay_where_they_are(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_data(tmp_path, tokenizer, [(9, 8), (3, 12), (20, 20), (1, 2), (5, 5), (7, 3), (33, 21)])
    losses, weights = [], []
    for is_static in (False, True):
        learner = make_setup(tmp_path, tmp_path, static_shapes=is_static, max_tokens=40).learner
        sampler = make_setup(tmp_path, tmp_path, max_tokens=40, tokens_per_update=60).sampler_at(0)
        before = [p.grad for p in learner.model.parameters()]
        for update in sampler.updates(0):
            batches = learner.make_batches(update)
            outcome = learner.update(update, batches, 0.001, is_stop_asked=False)
            losses.append(outcome.loss_sum)
        after = [p.grad for p in learner.model.parameters()]
        assert all(a is b for a, b in zip(before, after, strict=True))
        assert all((grad is not None) == is_static for grad in after)
        weights.append(torch.cat([p.detach().flatten() for p in learner.model.parameters()]))
    count = len(losses) // 2
    assert losses[:count] == pytest.approx(losses[count:], rel=1e-5)
    # biases of keys have no gradient but rounding, of which Adam makes whole steps
    assert (weights[0] - weights[1]).norm() < 1e-3 * weights[0].norm()


@pytest.mark.slow
def test_model_and_loss_are_one_graph_without_breaks(tokenizer: Tokenizer) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    torch.compiler.reset()
    Compiler()  # sets what must be set
    shape = {"d_model": 32, "num_encoder_layers": 1, "num_decoder_layers": 1, "dropout": 0.1}
    model = tiny_model(vocab_size=tokenizer.vocab_size, **shape).train()
    objective = Objective(model, smoothing=0.1, is_static=True)
    draw, graphs = random.Random(0), []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return raise_traced

    step = torch.compile(objective.compute_all, dynamic=True, fullgraph=True, backend=note)
    for count, longest in ((5, 20), (1, 44), (28, 26), (3, 1)):
        batch = make_batch(draw_pairs(draw, count, longest), tokenizer, static_tokens=256)
        both = (replace(p, flash=varlen.varlen_attn) for p in (batch.sources, batch.targets))
        with pytest.raises(Traced), torch.autocast("cpu", dtype=torch.bfloat16):
            step(batch.src, batch.tgt_in, batch.tgt_out, *both)
    assert len(graphs) <= 2  # 512 rows of logits are a chunk
    text = "".join(str(m.graph) for m in graphs[0].modules() if isinstance(m, torch.fx.GraphModule))
    assert "_varlen_attn" in text
    assert "log_softmax" in text


@pytest.mark.slow
def test_the_gradient_of_the_one_graph_is_the_plain_one(tokenizer: Tokenizer) -> None:
    """With torch 2.11 it was 0 where a sum that is returned was made in place."""
    torch.compiler.reset()
    Compiler()  # sets what must be set
    shape = {"d_model": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
    pairs, gradients = draw_pairs(random.Random(0), 12, 30), []
    for wrap in (torch.compile(dynamic=True, fullgraph=True, backend="eager"), lambda run: run):
        model = tiny_model(vocab_size=tokenizer.vocab_size, **shape).train()
        compute: Any = wrap(Objective(model, smoothing=0.1, is_static=True).compute_all)
        batch = make_batch(pairs, tokenizer, static_tokens=512)
        ids = (batch.src, batch.tgt_in, batch.tgt_out)
        compute(*ids, batch.sources, batch.targets)[0].backward()
        given = [p.grad for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat([gradient.flatten() for gradient in given]))
    found, exact = gradients
    assert (found - exact).norm() < 1e-4 * exact.norm()


def test_what_needs_other_batches_is_refused() -> None:
    for settings in ({"r_drop": 1.0}, {"sharding": Sharding.full}):
        with pytest.raises(ConfigError, match="static_shapes"):
            TrainConfig(static_shapes=True, **settings)
