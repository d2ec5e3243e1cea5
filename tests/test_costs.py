"""Counted operations against torch's own counter, the measured peak throughput, and the forecast of
a dry run.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pytest
import torch
from tiny import VOCAB_SIZE, hidden_states, random_source, tiny_config, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from variants import VARIANTS

from nmt.config import ModelConfig, Optimizer, OptimizerConfig, TrainConfig
from nmt.data.batch import padding_share
from nmt.data.batching import EpochPlan, TokenBatchSampler, UpdatePlan
from nmt.training import costs
from nmt.training.costs import count_training_flops, measure_flops_per_second
from nmt.training.dry_run import (
    Measurement,
    cost_settings,
    first_batches,
    measure_updates,
    render_report,
)
from nmt.training.loss import smoothed_cross_entropy

LAYERS = importlib.import_module("nmt.model.fast.layers")
PACKING = importlib.import_module("nmt.model.fast.packing")

# --- operations


SIZES = [(3, 5, 7, {"d_ff": 40}), (1, 9, 2, {"d_ff": 24}), (2, 4, 4, {"decoder_d_ff": 48})]
OF_VARIANTS = [(3, 5, 7, changes) for changes in VARIANTS.values()]


@pytest.mark.parametrize("cases", [SIZES, pytest.param(OF_VARIANTS, marks=pytest.mark.slow)])
def test_operations_equal_those_that_torch_counts_without_padding(
    cases: list[tuple[int, int, int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LAYERS, "is_onednn_faster", lambda _num_packed=0: False
    )  # unknown to the counter
    monkeypatch.setattr(PACKING, "_MAX_SHORT_BYTES", 0)  # products of short sentences have padding
    for batch, source, target, changes in cases:
        shape = {"num_encoder_layers": 2, "num_decoder_layers": 3, "d_model": 24, **changes}
        model = tiny_model(**shape)
        src, src_lengths = random_source([source] * batch)
        tgt, _ = random_source([target] * batch, seed=1)
        # the fused kernel of a CPU is unknown to the counter; the plain one is two multiplications
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            hidden = hidden_states(model, src, src_lengths, tgt).flatten(0, 1)
            weight = model.embedding.weight
            loss, _ = smoothed_cross_entropy(hidden, weight, tgt.flatten(), smoothing=0.1)
            loss.backward()
        lengths = np.array([(source, target)] * batch)
        counted = count_training_flops(tiny_config(**shape), VOCAB_SIZE, lengths)
        assert counted == counter.get_total_flops(), (batch, source, target, changes)


def test_only_real_tokens_count_and_those_of_a_long_corpus_do_not_overflow() -> None:
    config = tiny_config()
    pairs = np.array([(3, 50), (40, 4)], dtype=np.int32)
    first = count_training_flops(config, 100, pairs[:1])
    second = count_training_flops(config, 100, pairs[1:])
    assert count_training_flops(config, 100, pairs) == first + second
    lengths = np.full((3_000_000, 2), 100, dtype=np.int32)
    pair_flops = count_training_flops(config, 37000, lengths[:1])
    assert count_training_flops(config, 37000, lengths) == 3_000_000 * pair_flops


class GigaflopDevice:
    """The simulated clock of a device of 1 GFLOP/s, which the load of this machine does not affect.

    The first multiplication and every second one take longer, as on a busy device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_load: bool) -> None:
        self.largest = 0  # logits of a multiplication
        self._seconds = 0.0
        self._num_calls: Counter[torch.Size] = Counter()  # by shape
        self._has_load = has_load
        self._multiply = costs._multiply_like_training
        monkeypatch.setattr(costs, "PEAK_SECONDS", 1e-3)  # several times for small matrices only
        monkeypatch.setattr(costs, "_multiply_like_training", self.multiply)
        monkeypatch.setattr(costs, "synchronize", lambda device: None)
        monkeypatch.setattr(costs.time, "perf_counter", lambda: self._seconds)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        with FlopCounterMode(display=False) as counter:
            self._multiply(x, weight)
        self.largest = max(self.largest, len(x) * len(weight))
        call = self._num_calls[weight.shape]
        self._num_calls[weight.shape] += 1
        is_slow = call == 0 or (self._has_load and call % 2 == 0)
        self._seconds += (1.1e-9 if is_slow else 1e-9) * counter.get_total_flops()


def test_the_rate_is_the_devices_whatever_the_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        LAYERS, "is_onednn_faster", lambda _num_packed=0: False
    )  # unknown to the counter
    for vocab_size, d_ff, num_tokens in ((100, 32, 40), (10_000, 64, 5000)):  # the latter is cut
        for dtype in (torch.float32, torch.bfloat16):
            with monkeypatch.context() as patch:
                GigaflopDevice(patch, has_load=True)
                sizes = {"vocab_size": vocab_size, "num_tokens": num_tokens}
                rate = measure_flops_per_second(
                    torch.device("cpu"), dtype, tiny_config(d_ff=d_ff), **sizes
                )
                assert rate == pytest.approx(1e9), (vocab_size, dtype)


def test_a_gpu_is_measured_with_no_more_logits_than_training_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = GigaflopDevice(monkeypatch, has_load=False)
    sizes = {"vocab_size": 256_000, "num_tokens": 25_000}
    rate = measure_flops_per_second(torch.device("meta"), torch.bfloat16, tiny_config(), **sizes)
    assert rate == pytest.approx(1e9)
    assert 0.9 * costs.GPU_CHUNK_LOGITS < device.largest <= costs.GPU_CHUNK_LOGITS


# --- the forecast

LENGTHS = np.random.default_rng(0).integers(2, 30, (400, 2)).astype(np.int32)


def plan_updates(size: int = 1) -> EpochPlan:
    return TokenBatchSampler(
        LENGTHS, 200, tokens_per_update=500, seed=0, world_size=size
    ).plan_epoch(0)


def simulate_steps(
    monkeypatch: pytest.MonkeyPatch, duration: Callable[[UpdatePlan], float]
) -> tuple[Callable[[UpdatePlan], float], list[UpdatePlan]]:
    """Return a training step on a simulated clock, and the list to which it appends its plans.

    `duration` returns the seconds that a plan takes.
    """
    clock = [0.0]
    measured: list[UpdatePlan] = []

    def step(plan: UpdatePlan) -> float:
        measured.append(plan)
        clock[0] += duration(plan)
        return 7.0

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    return step, measured


def test_updates_are_measured_for_ten_seconds_after_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates = plan_updates()
    tokens = LENGTHS.sum() / len(updates)
    for seconds, planned, min_count, max_count in (
        (3.0, updates, 2, 4),
        (0.1, updates, 20, 20),
        (0.9, [updates[0]], 9, 12),  # again and again
        (60.0, updates, 1, 1),  # the first is measured itself
    ):
        step, measured = simulate_steps(
            monkeypatch,
            lambda plan, rate=tokens / seconds: (plan.num_tokens + plan.num_src_tokens) / rate,
        )
        measurement = measure_updates(step, planned, planned[0])
        count = len(measurement.plans)
        assert min_count <= count <= max_count, seconds
        assert len(measured) == count + (seconds < 60)
        assert list(measurement.plans) == measured[-count:]
        assert measured[-1] is planned[(len(measured) - 1) % len(planned)]
        assert measurement.flops == 7.0 * count
        num_tokens = sum(update.num_tokens + update.num_src_tokens for update in measurement.plans)
        assert measurement.seconds == pytest.approx(num_tokens * seconds / tokens)


def test_a_slow_model_is_measured_on_the_first_batch_of_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates = plan_updates()
    first_plan = first_batches(updates[0], LENGTHS)
    [rows] = first_plan.batches
    assert first_plan.num_tokens == LENGTHS[rows, 1].sum() < updates[0].num_tokens / 2
    assert first_plan.num_src_tokens == LENGTHS[rows, 0].sum()
    for seconds_per_update, num_more in ((600.0, 0), (20.0, 1), (4.9, 2)):
        seconds_per_token = seconds_per_update / updates[0].num_tokens
        step, measured = simulate_steps(
            monkeypatch, lambda plan, seconds=seconds_per_token: seconds * plan.num_tokens
        )
        measurement = measure_updates(step, updates, first_plan)
        assert len(measured) == 1 + num_more
        assert list(measurement.plans) == (measured[1:] or [first_plan])
        is_whole = measured[-1] is not first_plan
        assert is_whole == (seconds_per_update < 10)


def test_runs_share_a_measurement_if_no_setting_differs_that_costs_time_or_memory() -> None:
    base = TrainConfig()
    adam = OptimizerConfig(warmup_steps=9)
    for same in (
        TrainConfig(seed=2, max_updates=9, label_smoothing=0, run_dir="r", optimizer=adam),
        TrainConfig(model=ModelConfig(dropout=0.2)),
    ):
        assert cost_settings(same) == cost_settings(base)
    for changed in (
        TrainConfig(model=ModelConfig(dropout=0)),
        TrainConfig(model=ModelConfig(num_encoder_layers=5)),
        TrainConfig(data_dir="other"),
        TrainConfig(max_tokens=9),
        TrainConfig(activation_checkpointing=True),
        TrainConfig(optimizer=OptimizerConfig(name=Optimizer.adamw)),
    ):
        assert cost_settings(changed) != cost_settings(base)


def test_the_report_gives_plan_memory_speed_and_time() -> None:
    """The measured updates are half as large as the mean one, which takes twice as long."""
    for world_size in (1, 2):
        updates = plan_updates(world_size)
        num_updates = 30 * len(updates)
        total = round(LENGTHS.sum() / len(updates))
        sizes = [total // 2, total // 8, 0, total - total // 2 - total // 8]
        measured = [UpdatePlan([], num_tokens=n, num_src_tokens=n) for n in sizes]
        text = render_report(
            updates,
            LENGTHS,
            Measurement(measured, 8.0, 8e12),
            num_updates=num_updates,
            memory="2.00 GB",
            peak_flops_per_second=4e12,
            start=datetime(2026, 1, 31, 23, 0),
        )
        lines = dict(line.split(maxsplit=1) for line in text.splitlines())
        assert list(lines) == ["plan", "memory", "speed", "time"]
        batches: list[Any] = []
        for update in updates:
            batches.extend(update.batches)
        assert lines["plan"] == (
            f"400 pairs; {len(updates)} updates an epoch of {len(batches) / len(updates):.1f} "
            f"batches a rank and {LENGTHS[:, 1].sum() / len(updates):,.0f} target tokens; "
            f"{padding_share(LENGTHS, batches):.1%} padding; {num_updates} updates are 30.0 epochs"
        )
        assert lines["memory"] == "2.00 GB"
        assert "4 seconds an update (from 4)" in lines["speed"]
        assert "1,000 GFLOP/s of the model, 25% of the peak" in lines["speed"]
        minutes = round(4 * num_updates / 60)
        hours = lines["time"].split(maxsplit=1)[0]
        forecast = lines["time"][-16:]
        forecast_minutes = 60 * int(hours.split(":")[0]) + int(hours.split(":")[1])
        assert abs(forecast_minutes - minutes) <= 1
        end = datetime(2026, 1, 31, 23, 0) + timedelta(minutes=minutes)
        assert abs(end - datetime.strptime(forecast, "%Y-%m-%d %H:%M")) <= timedelta(minutes=2)
