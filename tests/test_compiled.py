"""Compiled training against plain training, and the shapes that make it compile seldom."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from conftest import tiny_model

from nmt.data.tokenizer import Tokenizer
from nmt.training.batch import make_batch
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
    return Objective(model, smoothing=0.1, forward_model=forward_model)


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
            batch = make_batch(pairs, tokenizer, round_to=8)
            loss, nll = objective(batch)
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
    objective(make_batch([([5], [6])], tokenizer))
    assert compiler.num_graphs == before
    assert all(name.startswith("model.") for name in objective.state_dict())
