"""The forecast of a run: its arithmetic, and that it comes true for work of known speed."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import numpy as np
import pytest

from nmt.data.batching import TokenBatchSampler, Update
from nmt.training import dry_run
from nmt.training.dry_run import Pace, make_plan, measure_pace, report, seconds_left

LENGTHS = np.random.default_rng(0).integers(2, 30, (400, 2)).astype(np.int32)


def plan_updates(world_size: int = 1) -> list[Update]:
    sampler = TokenBatchSampler(
        LENGTHS, 200, tokens_per_update=500, seed=0, rank=0, world_size=world_size
    )
    return sampler.updates(0)


def test_the_plan_counts_every_token_once_whatever_the_number_of_ranks() -> None:
    one, two = (make_plan(plan_updates(n), LENGTHS) for n in (1, 2))
    assert one.num_pairs == 400
    assert (one.num_src_tokens, one.num_tokens) == tuple(LENGTHS.sum(axis=0))
    assert (two.num_updates, two.num_tokens) == (one.num_updates, one.num_tokens)
    assert two.num_batches < one.num_batches
    assert 0 < one.padding_share < 0.5


def test_the_forecast_comes_true_for_work_of_known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "_SECONDS", 0.3)
    updates, made = plan_updates(), []

    def step(update: Update) -> float:
        made.append(update)
        time.sleep(2e-5 * (update.num_tokens + update.num_src_tokens))
        return 7.0

    pace = measure_pace(step, updates)
    plan = make_plan(updates, LENGTHS)
    assert 3 <= pace.num_updates == len(made) - 1 <= 20
    assert pace.flops == 7.0 * pace.num_updates
    assert made[1] is updates[1]
    expected = 2e-5 * LENGTHS.sum()
    assert seconds_left(plan, pace, len(updates)) == pytest.approx(expected, rel=0.3)


def test_an_update_that_takes_all_the_time_is_measured_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dry_run, "_SECONDS", 0.01)
    made = []

    def step(update: Update) -> float:
        made.append(update)
        time.sleep(0.02)
        return 1.0

    assert measure_pace(step, plan_updates()).num_updates == len(made) == 1


def test_a_plan_of_one_update_is_made_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "_SECONDS", 0.1)
    pace = measure_pace(lambda _: time.sleep(0.01) or 1.0, plan_updates()[:1])
    assert 2 <= pace.num_updates <= 20


def test_speed_is_scaled_to_the_mean_update() -> None:
    """Updates twice as large as the mean take twice as long: the plan's mean counts."""
    plan = make_plan(plan_updates(), LENGTHS)
    tokens = round(2 * plan.tokens_an_update)
    pace = Pace(1, 10.0, tokens // 2, tokens - tokens // 2, 1.0)
    assert seconds_left(plan, pace, 100) == pytest.approx(500, rel=1e-3)


def test_the_report_says_plan_memory_speed_and_time() -> None:
    updates = plan_updates()
    plan = make_plan(updates, LENGTHS)
    share = plan.tokens_an_update / 2
    pace = Pace(4, 8.0, round(4 * share), round(4 * share), 8e12)
    text = report(
        plan,
        pace,
        num_updates=30 * len(updates),
        memory="2.00 GB",
        flops_per_second=4e12,
        now=datetime(2026, 1, 31, 23, 0),
    )
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert list(lines) == ["plan", "memory", "speed", "time"]
    assert f"400 pairs; {len(updates)} updates an epoch" in lines["plan"]
    assert "are 30.0 epochs" in lines["plan"]
    assert f"{plan.padding_share:.1%} padding" in lines["plan"]
    assert lines["memory"] == "2.00 GB"
    assert "2 seconds an update (from 4)" in lines["speed"]
    assert "1,000 GFLOP/s of the model, 25% of the rate" in lines["speed"]
    minutes = round(2 * 30 * len(updates) / 60)
    assert lines["time"].startswith(f"{minutes // 60}:{minutes % 60:02d} hours:minutes")
    end = datetime(2026, 1, 31, 23, 0) + timedelta(seconds=2 * 30 * len(updates))
    told = datetime.strptime(lines["time"][-16:], "%Y-%m-%d %H:%M")
    assert abs(end - told) <= timedelta(minutes=1)
