"""Kernels, training and search on a GPU compared with the CPU; `make gpu` runs these tests.

`NMT_TEST_DEVICE=cpu` runs them on the CPU, to test the tests themselves.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from searching import LENGTHS, TOKENIZER, assert_same, decided_model, source_rows
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


def assert_close(tensor: Tensor, expected: Tensor, tolerance: float, case: Any) -> None:
    """Compare two tensors by the norm of their difference, relative to `expected`."""
    assert (tensor.cpu() - expected).norm() <= tolerance * expected.norm() + 1e-6, case


def attend(device: torch.device, dtype: torch.dtype, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output of attention over sentences of different lengths, and the gradient."""
    lengths = [5, 1, 60, 17]
    torch.manual_seed(0)
    x = torch.randn(3, sum(lengths), 4, 64).to(device, dtype).requires_grad_()
    sentences = pack(lengths).to(device)
    context = PackedContext.of(sentences, sentences, is_causal=is_causal)
    queries, keys, values = x
    heads = attend_packed(queries, keys, values, context)
    (gradient,) = torch.autograd.grad(heads.float().sin().sum(), x)
    return heads.detach().float(), gradient.float()


def test_attention_over_variable_lengths_equals_float32_on_the_cpu() -> None:
    """Uses flash attention if the GPU has it."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        for is_causal in (False, True):
            expected, expected_gradient = attend(CPU, torch.float32, is_causal=is_causal)
            heads, gradient = attend(DEVICE, dtype, is_causal=is_causal)
            assert_close(heads, expected, tolerance, (dtype, is_causal))
            assert_close(gradient, expected_gradient, tolerance, (dtype, is_causal))
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (8, 0):
        assert find_flash_attention(DEVICE) is not None


def update(folder: Path, device: torch.device, **settings: Any) -> tuple[float, dict[str, Tensor]]:
    """Make two updates of several batches; return the loss of the second, and the weights."""
    config = TrainConfig(
        data_dir=str(folder),
        run_dir=str(folder / "run"),
        num_threads=1,
        model=tiny_config(d_model=32, num_heads=2),
        # with a small eps, Adam would amplify rounding errors of the gradient of the keys' bias
        optimizer=OptimizerConfig(eps=1e-4),
        max_tokens=40,
        tokens_per_update=200,
        valid_bleu=False,
        **settings,
    )
    setup = build_run(config, World(), device)
    learner = setup.learner
    updates = setup.sampler_at(0).plan_epoch(0)
    for _ in range(2):
        batches = learner.batch_maker.make_batches(updates[0])
        result = learner.update(updates[0], batches, 0.001, is_stop_requested=False)
    weights = learner.weights_to_save()
    return result.loss_sum, {name: weight.cpu() for name, weight in weights.items()}


def flatten(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def test_updates_in_all_data_types_equal_updates_on_the_cpu(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_data(tmp_path, tokenizer, PAIRS)
    expected, expected_weights = update(tmp_path, CPU, dtype=DType.float32, compile=False)
    for dtype, tolerance in ((DType.float32, 1e-4), (DType.bfloat16, 2e-2), (DType.float16, 5e-3)):
        loss, weights = update(tmp_path, DEVICE, dtype=dtype, compile=False)
        assert loss == pytest.approx(expected, rel=tolerance), dtype
        # all weights together: some gradients consist mostly of rounding errors
        assert_close(flatten(weights), flatten(expected_weights), tolerance, dtype)
    for settings in ({"activation_checkpointing": True}, {"ema_decay": 0.9}):
        loss, _ = update(tmp_path, DEVICE, dtype=DType.float32, compile=False, **settings)
        assert loss == pytest.approx(expected, rel=1e-4), settings


def test_the_same_seed_gives_the_same_weights_twice(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_data(tmp_path, tokenizer, PAIRS)
    _, expected = update(tmp_path, DEVICE, dtype=DType.float32, compile=False)
    _, weights = update(tmp_path, DEVICE, dtype=DType.float32, compile=False)
    for name, weight in weights.items():
        # the order of sums over many tokens is not fixed
        assert_close(weight, expected[name], 1e-5, name)


def test_search_gives_the_translations_and_scores_of_the_cpu() -> None:
    source = random_source(LENGTHS)
    for settings in ({"beam_size": 1}, {"beam_size": 4}, {"beam_size": 3, "alignment": True}):
        config = SearchConfig(max_length_b=10, **settings)
        request = SearchRequest(source_rows(source), config)
        expected = search(ModelStepper(decided_model()), request, TOKENIZER)
        with torch.inference_mode():
            stepper = ModelStepper(decided_model().to(DEVICE))
            results = search(stepper, request, TOKENIZER)
        for hypotheses, expected_hypotheses in zip(results, expected, strict=True):
            assert_same(hypotheses, expected_hypotheses, tolerance=1e-3, case=settings)


def test_copies_from_page_locked_memory_arrive_before_they_are_read(tokenizer: Tokenizer) -> None:
    model = tiny_model(vocab_size=tokenizer.vocab_size).to(DEVICE).requires_grad_(False)
    objective = Objective(model, smoothing=0.1)
    rng = random.Random(0)
    batches = [make_batch(draw_pairs(rng, 30, 40), tokenizer, round_to=8) for _ in range(20)]
    pinned = [batch.pin() if DEVICE.type == "cuda" else batch for batch in batches]
    losses = [objective(batch.to(DEVICE))[0] for batch in pinned]  # without waiting in between
    for batch, loss in zip(batches, losses, strict=True):
        expected, _ = objective(replace(batch.to(DEVICE)))
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_steps_of_the_optimizer_equal_the_papers_algorithm_by_hand() -> None:
    check_steps(DEVICE.type)


@pytest.mark.long
def test_compiled_gradients_equal_gradients_without_compilation(tokenizer: Tokenizer) -> None:
    def compute_gradients(compiler: Compiler | None) -> list[Tensor]:
        model = tiny_model(vocab_size=tokenizer.vocab_size).to(DEVICE).train()
        objective = Objective(model, smoothing=0.1, compiler=compiler)
        rng = random.Random(0)
        for count in (5, 28, 1):
            batch = make_batch(draw_pairs(rng, count, 30), tokenizer, round_to=8).to(DEVICE)
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                loss, _ = objective(batch)
            (loss / batch.num_tokens).backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    torch.compiler.reset()
    gradients = compute_gradients(Compiler())
    expected = compute_gradients(None)
    assert len(gradients) == len(expected)
    for gradient, exact in zip(gradients, expected, strict=True):
        assert_close(gradient, exact, 0.1, exact.shape)
