"""The learning rate by the paper's formula, and Adam against one written by hand in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nmt.config import ModelConfig, OptimizerConfig, TrainConfig
from nmt.options import Schedule
from nmt.training import optimizer as optim
from nmt.training.schedule import learning_rate


def config(*, d_model: int = 512, max_updates: int = 100_000, **optimizer: Any) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(d_model=d_model, num_heads=8),
        optimizer=OptimizerConfig(**optimizer),
        max_updates=max_updates,
    )


@pytest.mark.parametrize("step", [1, 2, 100, 3999, 4000, 4001, 8000, 100_000])
@pytest.mark.parametrize("d_model", [512, 1024])
def test_noam_is_equation_3_of_the_paper(d_model: int, step: int) -> None:
    expected = d_model**-0.5 * min(step**-0.5, step * 4000**-1.5)
    assert learning_rate(step, config(d_model=d_model)) == pytest.approx(expected, rel=1e-12)


def test_base_peaks_at_7e_4_at_the_end_of_warmup() -> None:
    rates = [learning_rate(step, config()) for step in range(1, 12_001)]
    assert max(rates) == rates[4000 - 1] == pytest.approx(6.9877e-4, rel=1e-4)
    assert rates[0] == pytest.approx(1.7469e-7, rel=1e-4)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("warmup_steps", [1, 7, 40])
def test_the_rate_rises_until_warmup_ends_and_then_falls(
    schedule: Schedule, warmup_steps: int
) -> None:
    settings = config(max_updates=200, warmup_steps=warmup_steps, schedule=schedule)
    rates = [learning_rate(step, settings) for step in range(1, 201)]
    peak = warmup_steps - 1
    assert rates[peak] == max(rates)
    assert all(a < b for a, b in zip(rates[:peak], rates[1 : peak + 1], strict=True))
    assert all(a > b for a, b in zip(rates[peak:-1], rates[peak + 1 :], strict=True))
    rises = [b - a for a, b in zip([0.0, *rates[:peak]], rates[: peak + 1], strict=True)]
    assert rises == pytest.approx([rates[0]] * warmup_steps)  # a straight line from 0


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("step", [3, 4000, 9000])
def test_the_scale_is_a_factor(schedule: Schedule, step: int) -> None:
    plain = learning_rate(step, config(schedule=schedule))
    scaled = learning_rate(step, config(schedule=schedule, learning_rate_scale=0.3))
    assert scaled == pytest.approx(0.3 * plain, rel=1e-12)


def test_cosine_starts_at_noams_peak_is_half_in_the_middle_and_ends_at_0() -> None:
    settings = config(max_updates=5000, warmup_steps=1000, schedule=Schedule.cosine)
    noam = config(max_updates=5000, warmup_steps=1000)
    peak = learning_rate(1000, noam)
    assert [learning_rate(step, settings) for step in (1, 500, 1000)] == [
        learning_rate(step, noam) for step in (1, 500, 1000)
    ]
    assert learning_rate(3000, settings) == pytest.approx(peak / 2)
    assert learning_rate(2000, settings) == pytest.approx(peak * (1 + math.sqrt(0.5)) / 2)
    assert learning_rate(5000, settings) == pytest.approx(0, abs=1e-18)


# --- Adam


def adam_by_hand(
    start: Tensor, gradients: list[Tensor], rates: list[float], config: OptimizerConfig
) -> Tensor:
    """Kingma and Ba (2015), algorithm 1, in float64."""
    weights = start.double()
    mean, square = torch.zeros_like(weights), torch.zeros_like(weights)
    for step, (gradient, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        g = gradient.double()
        mean = config.beta1 * mean + (1 - config.beta1) * g
        square = config.beta2 * square + (1 - config.beta2) * g * g
        corrected_mean = mean / (1 - config.beta1**step)
        corrected_square = square / (1 - config.beta2**step)
        weights = weights - lr * corrected_mean / (corrected_square.sqrt() + config.eps)
    return weights


@pytest.mark.parametrize("eps", [1e-9, 0.1])
def test_steps_equal_adam_by_hand(eps: float) -> None:
    torch.manual_seed(0)
    settings = OptimizerConfig(eps=eps)
    model = nn.Linear(5, 3, bias=False)
    start = model.weight.detach().clone()
    optimizer = optim.make_optimizer(model, settings)
    gradients = [torch.randn(3, 5) * 10**-i for i in range(6)]
    rates = [0.01 * (i + 1) for i in range(6)]
    for gradient, lr in zip(gradients, rates, strict=True):
        model.weight.grad = gradient.clone()
        optim.step(optimizer, lr)
        assert model.weight.grad is None
    expected = adam_by_hand(start, gradients, rates, settings)
    torch.testing.assert_close(model.weight.double(), expected, atol=1e-6, rtol=1e-5)


def test_the_papers_adam_is_the_default() -> None:
    group = optim.make_optimizer(nn.Linear(2, 2), OptimizerConfig()).param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-9)
    assert group["weight_decay"] == 0


@pytest.mark.parametrize(("max_norm", "factor"), [(0.0, 1.0), (100.0, 1.0), (2.5, 0.25)])
def test_gradients_are_clipped_to_the_norm_and_the_old_norm_returned(
    max_norm: float, factor: float
) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[6.0, 8.0]])
    assert float(optim.clip_gradient(model, max_norm)) == pytest.approx(10.0)
    expected = torch.tensor([[6.0, 8.0]]) * factor
    torch.testing.assert_close(model.weight.grad, expected, atol=1e-5, rtol=1e-5)
