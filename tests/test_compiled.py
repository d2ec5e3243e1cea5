"""Compiled training against plain training, and the shapes that make it compile seldom."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from conftest import tiny_model

from nmt.data.batch import Batch, make_batch, make_compiled_batch
from nmt.data.tokenizer import Tokenizer
from nmt.training.compiled import Compiler
from nmt.training.objective import Objective

CPU = torch.device("cpu")
Pairs = list[tuple[list[int], list[int]]]


def draw_pairs(draw: random.Random, count: int, longest: int) -> Pairs:
    def ids() -> list[int]:
        return [draw.randrange(4, 300) for _ in range(draw.randint(1, longest))]

    return [(ids(), ids()) for _ in range(count)]


def make_objective(tokenizer: Tokenizer, compiler: Compiler | None) -> Objective:
    model = tiny_model(vocab_size=tokenizer.vocab_size).train()
    forward_model = compiler.compile(model) if compiler else None
    return Objective(model, smoothing=0.1, pad_id=tokenizer.pad_id, forward_model=forward_model)


def sums(objective: Objective, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = objective(
        batch.src, batch.src_lengths, batch.tgt_in, batch.tgt_out, batch.num_tokens
    )
    return found


@pytest.mark.parametrize("num_pairs", [1, 2, 7])
def test_rounding_changes_neither_loss_nor_gradient(tokenizer: Tokenizer, num_pairs: int) -> None:
    pairs = draw_pairs(random.Random(0), num_pairs, 13)
    plain, rounded = make_batch(pairs, tokenizer), make_compiled_batch(pairs, tokenizer, round_to=8)
    for ids in (rounded.src, rounded.tgt_in, rounded.tgt_out):
        assert ids.size(1) % 8 == 0
        assert ids.size(0) == max(2, num_pairs)
    # some kernels of attention make NaN of a row that sees nothing
    assert rounded.src_lengths.min() >= 1
    assert (rounded.num_tokens, rounded.num_src_tokens) == (plain.num_tokens, plain.num_src_tokens)
    results = []
    for batch in (plain, rounded):
        objective = make_objective(tokenizer, None)
        loss, nll = sums(objective, batch)
        loss.backward()
        results.append([loss, nll, *(weight.grad for weight in objective.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_fifty_compiled_updates_are_those_of_plain_ones_with_few_graphs(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    def losses(compiler: Compiler | None) -> list[float]:
        draw = random.Random(0)
        objective = make_objective(tokenizer, compiler)
        optimizer = torch.optim.Adam(objective.parameters(), lr=1e-3, fused=True)
        found = []
        for update in range(50):
            count = 1 if update % 10 == 3 else draw.randint(2, 30)
            pairs = draw_pairs(draw, count, draw.randint(3, 60))
            batch = make_batch(pairs, tokenizer)
            if compiler:
                batch = make_compiled_batch(pairs, tokenizer, round_to=compiler.round_to)
            loss, nll = sums(objective, batch)
            (loss / batch.num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((nll / batch.num_tokens).item())
        return found

    torch.compiler.reset()
    compiler = Compiler(CPU)
    before = compiler.num_graphs
    expected = losses(None)
    with caplog.at_level(logging.INFO):
        found = losses(compiler)
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 0.1
    assert 1 <= compiler.num_graphs - before <= 3
    assert compiler.seconds > 0
    assert "compiled graph" in caplog.text


@pytest.mark.slow
def test_a_compiled_model_still_runs_plain_elsewhere(tokenizer: Tokenizer) -> None:
    compiler = Compiler(CPU)
    objective = make_objective(tokenizer, compiler)
    before = compiler.num_graphs
    objective.model.eval()
    objective.model(torch.full((2, 8), 5), torch.tensor([8, 8]), torch.full((2, 8), 6))
    assert compiler.num_graphs == before
    assert all(name.startswith("model.") for name in objective.state_dict())
