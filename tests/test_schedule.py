"""The learning rate by the papers' formulas, and against torch's schedulers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from nmt.config import ModelConfig, OptimizerConfig, Schedule, TrainConfig
from nmt.errors import ConfigError
from nmt.training.schedule import learning_rate, peak_learning_rate

INVERSE_SQRT, COSINE = Schedule.inverse_sqrt, Schedule.cosine
WITH_PEAK = [INVERSE_SQRT, COSINE]


def config(*, d_model: int = 512, max_updates: int = 100_000, **optimizer: Any) -> TrainConfig:
    if optimizer.get("schedule") is INVERSE_SQRT:
        optimizer.setdefault("peak_learning_rate", 5e-4)
    return TrainConfig(
        model=ModelConfig(d_model=d_model, num_heads=8),
        optimizer=OptimizerConfig(**optimizer),
        max_updates=max_updates,
    )


def torchs_rates(settings: TrainConfig) -> list[float]:
    """Run torch's linear warm-up and what follows it for `max_updates` steps.

    torch counts from 0, where the rate is that of the first update; its warm-up cannot start at 0.
    """
    warmup, peak = settings.optimizer.warmup_steps, peak_learning_rate(settings)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=peak)
    rise = lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    fall: lr_scheduler.LRScheduler
    if settings.optimizer.schedule is COSINE:
        fall = lr_scheduler.CosineAnnealingLR(optimizer, settings.max_updates - warmup)
    else:
        fall = lr_scheduler.LambdaLR(optimizer, lambda n: (warmup / (warmup + n)) ** 0.5)
    both = lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warmup - 1])
    rates = []
    for _ in range(settings.max_updates):
        rates.append(float(both.get_last_lr()[0]))
        optimizer.step()
        both.step()
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # inside torch's SequentialLR
@pytest.mark.parametrize("warmup_steps", [2, 700])
@pytest.mark.parametrize("schedule", list(Schedule))
def test_rates_equal_torchs_schedulers(schedule: Schedule, warmup_steps: int) -> None:
    settings = config(max_updates=3000, warmup_steps=warmup_steps, schedule=schedule)
    found = [learning_rate(step, settings) for step in range(1, 3001)]
    assert found == pytest.approx(torchs_rates(settings), rel=1e-9, abs=1e-15)


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
    assert rates[peak] == max(rates) == peak_learning_rate(settings)
    assert all(a < b for a, b in zip(rates[:peak], rates[1 : peak + 1], strict=True))
    assert all(a > b for a, b in zip(rates[peak:-1], rates[peak + 1 :], strict=True))
    rises = [b - a for a, b in zip([0.0, *rates[:peak]], rates[: peak + 1], strict=True)]
    assert rises == pytest.approx([rates[0]] * warmup_steps)  # a straight line from 0


@pytest.mark.parametrize("schedule", list(Schedule))
def test_no_schedule_jumps_where_warmup_ends(schedule: Schedule) -> None:
    settings = config(schedule=schedule)
    before, at, after = (learning_rate(step, settings) for step in (3999, 4000, 4001))
    assert at - before == pytest.approx(at / 4000)
    assert 0 < at - after < at / 4000


@pytest.mark.parametrize("schedule", [Schedule.noam, COSINE])
@pytest.mark.parametrize("step", [3, 4000, 9000])
def test_the_scale_is_a_factor(schedule: Schedule, step: int) -> None:
    plain = learning_rate(step, config(schedule=schedule))
    scaled = learning_rate(step, config(schedule=schedule, learning_rate_scale=0.3))
    assert scaled == pytest.approx(0.3 * plain, rel=1e-12)


@pytest.mark.parametrize("schedule", WITH_PEAK)
def test_a_peak_that_is_given_is_reached_whatever_the_width(schedule: Schedule) -> None:
    for d_model in (64, 512):
        settings = config(d_model=d_model, schedule=schedule, peak_learning_rate=3e-4)
        assert learning_rate(4000, settings) == 3e-4
        assert learning_rate(1000, settings) == pytest.approx(3e-4 / 4)


def test_inverse_sqrt_halves_when_updates_are_four_times_the_warmup() -> None:
    settings = config(schedule=INVERSE_SQRT, peak_learning_rate=8e-4)
    for times, expected in ((4, 4e-4), (16, 2e-4), (25, 1.6e-4)):
        assert learning_rate(times * 4000, settings) == pytest.approx(expected, rel=1e-12)


def test_inverse_sqrt_from_the_papers_peak_is_noam() -> None:
    peak = (512 * 4000) ** -0.5
    settings = config(schedule=INVERSE_SQRT, peak_learning_rate=peak)
    for step in (1, 77, 4000, 4001, 50_000):
        assert learning_rate(step, settings) == pytest.approx(learning_rate(step, config()))


@pytest.mark.parametrize("peak", [None, 1e-3])
def test_cosine_is_half_in_the_middle_and_ends_at_0(peak: float | None) -> None:
    settings = config(max_updates=5000, warmup_steps=1000, schedule=COSINE, peak_learning_rate=peak)
    highest = (512 * 1000) ** -0.5 if peak is None else peak
    assert learning_rate(500, settings) == pytest.approx(highest / 2)
    assert learning_rate(1000, settings) == pytest.approx(highest)
    assert learning_rate(2000, settings) == pytest.approx(highest * (1 + math.sqrt(0.5)) / 2)
    assert learning_rate(3000, settings) == pytest.approx(highest / 2)
    assert learning_rate(5000, settings) == pytest.approx(0, abs=1e-18)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"schedule": INVERSE_SQRT}, r"inverse_sqrt: needs optimizer\.peak_learning_rate"),
        ({"peak_learning_rate": 1e-3}, r"peak_learning_rate=0\.001: noam has the paper's peak"),
        ({"schedule": COSINE, "peak_learning_rate": 0.0}, "must be above 0"),
        (
            {"schedule": COSINE, "peak_learning_rate": 1e-3, "learning_rate_scale": 2.0},
            r"set optimizer\.learning_rate_scale=1",
        ),
    ],
)
def test_a_peak_given_twice_or_not_at_all_is_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        OptimizerConfig(**settings)
