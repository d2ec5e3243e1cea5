"""Kernels, training and search on a GPU compared with the CPU; `make gpu` runs these tests.

`NMT_TEST_DEVICE=cpu` runs all of it on the CPU, which tests the tests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from searching import LENGTHS, TOKENIZER, decided_model, source_rows
from test_compiled import draw_pairs
from test_optimizer import check_steps
from tiny import random_source, tiny_config, tiny_model
from torch import Tensor
from toy import write_data

from nmt.config import DType, OptimizerConfig, SearchConfig, TrainConfig
from nmt.data.tokenizer import Tokenizer
from nmt.model.fast.packing import PackedContext, attend_packed, find_flash_attention, pack
from nmt.runtime.distributed import World
from nmt.search.request import SearchRequest
from nmt.search.search import search
from nmt.search.stepper import ModelStepper
from nmt.training.batches import make_batch
from nmt.training.build import build_run
from nmt.training.compiled import Compiler
from nmt.training.loss import Objective

DEVICE = torch.device(os.environ.get("NMT_TEST_DEVICE", "cuda"))
CPU = torch.device("cpu")
PAIRS = [(5, 4), (9, 9), (3, 8), (12, 2), (7, 7), (30, 20), (1, 1)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"
    ),
]


def assert_like(found: Tensor, exact: Tensor, share: float, what: Any) -> None:
    """Compare two tensors by the norm of their difference."""
    assert (found.cpu() - exact).norm() <= share * exact.norm() + 1e-6, what


def test_attention_over_variable_lengths_is_the_padded_one_forward_and_backward() -> None:
    """Flash attention, if the GPU has it, compared with float32 on the CPU."""
    lengths = [5, 1, 60, 17]
    for dtype, share in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        for is_causal in (False, True):
            found = []
            for device, kind in ((CPU, torch.float32), (DEVICE, dtype)):
                torch.manual_seed(0)
                x = torch.randn(3, sum(lengths), 4, 64)
                x = x.to(device, kind).requires_grad_()
                sentences = pack(lengths).to(device)
                context = PackedContext.of(sentences, sentences, is_causal=is_causal)
                heads = attend_packed(*x, context)
                (gradient,) = torch.autograd.grad(heads.float().sin().sum(), x)
                found.append((heads.detach().float(), gradient.float()))
            for exact, other in zip(*found, strict=True):
                assert_like(other, exact, share, (dtype, is_causal))
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (8, 0):
        assert find_flash_attention(DEVICE) is not None


def update(folder: Path, device: torch.device, **settings: Any) -> tuple[float, dict[str, Tensor]]:
    """Make two updates of several batches; return the second's loss, and the weights."""
    model = tiny_config(d_model=32, num_heads=2)
    own = {"data_dir": str(folder), "run_dir": str(folder / "run"), "num_threads": 1}
    # with a small eps, Adam would scale the rounding errors of the gradient of the keys' bias up
    own |= {"optimizer": OptimizerConfig(eps=1e-4)}
    config = TrainConfig(
        model=model, max_tokens=40, tokens_per_update=200, valid_bleu=False, **own, **settings
    )
    setup = build_run(config, World(), device)
    learner, updates = setup.learner, setup.sampler_at(0).updates(0)
    for _ in range(2):
        batches = learner.batch_maker.make(updates[0])
        outcome = learner.update(updates[0], batches, 0.001, is_stop_requested=False)
    return outcome.loss_sum, {name: x.cpu() for name, x in learner.weights().items()}


def test_updates_are_those_of_the_processor_in_every_format(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_data(tmp_path, tokenizer, PAIRS)
    expected, weights = update(tmp_path, CPU, dtype=DType.float32, compile=False)
    for dtype, share in ((DType.float32, 1e-4), (DType.bfloat16, 2e-2), (DType.float16, 5e-3)):
        loss, found = update(tmp_path, DEVICE, dtype=dtype, compile=False)
        assert loss == pytest.approx(expected, rel=share), dtype
        # together, since the gradients of some are little but rounding
        everything = (torch.cat([x[name].flatten() for name in weights]) for x in (found, weights))
        assert_like(*everything, share, dtype)
    for settings in ({"activation_checkpointing": True}, {"ema_decay": 0.9}):
        loss, _ = update(tmp_path, DEVICE, dtype=DType.float32, compile=False, **settings)
        assert loss == pytest.approx(expected, rel=1e-4), settings


def test_the_same_seed_gives_the_same_weights_twice(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_data(tmp_path, tokenizer, PAIRS)
    runs = [update(tmp_path, DEVICE, dtype=DType.float32, compile=False) for _ in range(2)]
    for name, x in runs[0][1].items():
        assert_like(runs[1][1][name], x, 1e-5, name)  # sums over many tokens have no fixed order


def test_search_and_scores_are_those_of_the_processor() -> None:
    source = random_source(LENGTHS)
    for settings in ({"beam_size": 1}, {"beam_size": 4}, {"beam_size": 3, "alignment": True}):
        config = SearchConfig(max_length_b=10, **settings)
        request = SearchRequest(source_rows(source), config)
        expected = search(ModelStepper(decided_model()), request, TOKENIZER)
        with torch.inference_mode():
            stepper = ModelStepper(decided_model().to(DEVICE))
            found = search(stepper, request, TOKENIZER)
        for ours, theirs in zip(found, expected, strict=True):
            assert [h.tokens for h in ours] == [h.tokens for h in theirs], settings
            assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], rel=1e-4)


def test_copies_from_page_locked_memory_arrive_before_they_are_read(tokenizer: Tokenizer) -> None:
    model = tiny_model(vocab_size=tokenizer.vocab_size).to(DEVICE).requires_grad_(False)
    objective, draw = Objective(model, smoothing=0.1), random.Random(0)
    batches = [make_batch(draw_pairs(draw, 30, 40), tokenizer, round_to=8) for _ in range(20)]
    pinned = [batch.pin() if DEVICE.type == "cuda" else batch for batch in batches]
    at_once = [objective(batch.to(DEVICE))[0] for batch in pinned]  # nothing waits between them
    for batch, loss in zip(batches, at_once, strict=True):
        alone = objective(replace(batch.to(DEVICE)))[0]
        assert float(loss) == pytest.approx(float(alone), rel=1e-5)


def test_steps_of_the_optimizer_equal_the_papers_algorithm_by_hand() -> None:
    check_steps(DEVICE.type)


@pytest.mark.long
def test_compiled_losses_and_gradients_are_the_plain_ones(tokenizer: Tokenizer) -> None:
    def run(make: Callable[[], Compiler | None]) -> list[Tensor]:
        model = tiny_model(vocab_size=tokenizer.vocab_size).to(DEVICE).train()
        objective, draw = Objective(model, smoothing=0.1, compiler=make()), random.Random(0)
        for count in (5, 28, 1):
            batch = make_batch(draw_pairs(draw, count, 30), tokenizer, round_to=8).to(DEVICE)
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                loss, _ = objective(batch)
            (loss / batch.num_tokens).backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    torch.compiler.reset()
    for found, exact in zip(run(Compiler), run(lambda: None), strict=True):
        assert_like(found, exact, 0.05, exact.shape)
