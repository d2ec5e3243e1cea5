"""Losses that are not finite never reach the weights, and are logged with their sentences."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import poison, train_poisoned
from ranks import child
from tiny import assert_same_tensors
from torch.nn.utils import parameters_to_vector
from toy import (
    assert_resumes_exactly,
    assert_same_weights,
    batch_rows,
    read_records,
    read_values,
    read_weights,
    train,
)

from nmt.config import OptimizerConfig, TrainConfig
from nmt.data.batch import padding_share
from nmt.data.batching import TokenBatchSampler
from nmt.data.binary import ParallelData
from nmt.training import checks
from nmt.training.checks import SpikeDetector, describe_batches
from nmt.training.learner import Learner
from nmt.training.schedule import learning_rate

PAIR = 17  # of the training set, as good as any
PLAIN = ["valid_bleu=false", "validate_every_updates=100", "max_updates=20", "log_every_updates=1"]
RICH = [*PLAIN, "ema_decay=0.9"]
LEFT_OUT = "not finite, left out"


@pytest.fixture(scope="module")
def bad_run(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which the loss of a pair is not a number."""
    folder = tmp_path_factory.mktemp("guard")
    run = folder / "run"
    log = folder / "log"
    with child(log, train_poisoned, PAIR, "update", 1000, toy_data, run, RICH) as process:
        assert process.wait() == 0, process.stderr
    return run


@pytest.fixture
def poisoned() -> Iterator[Callable[[int, float], None]]:
    """Let a pair have another loss until the end of the test."""
    original = Learner.compute_loss
    yield poison
    Learner.compute_loss = original  # type: ignore[method-assign]


def sampler(toy_data: Path) -> TokenBatchSampler:
    lengths = ParallelData(toy_data, "train").lengths
    return TokenBatchSampler(lengths, 100, tokens_per_update=200, seed=1)


def plan(toy_data: Path, num_epochs: int) -> list[list[list[int]]]:
    """Return the pairs of each batch of each update."""
    updates: list[list[list[int]]] = []
    for epoch in range(num_epochs):
        updates.extend(map(batch_rows, sampler(toy_data).plan_epoch(epoch)))
    return updates


def named_pairs(text: str) -> list[int]:
    """Return the pairs that a message names."""
    match = re.search(r"for pairs (\d+(?:, \d+)*)", text)
    assert match is not None
    return list(map(int, match[1].split(", ")))


# --- losses that are not finite


def test_updates_with_a_bad_pair_are_left_out_and_the_others_done(
    bad_run: Path, toy_data: Path
) -> None:
    updates = plan(toy_data, 3)
    events = read_records(bad_run, "event")
    assert len(events) == 3
    for event in events:
        assert event["event"] == LEFT_OUT
        assert event["batch"].startswith("loss nan for pairs ")
        assert PAIR in named_pairs(event["batch"])
        # updates are numbered without those that were left out before
        assert named_pairs(event["batch"]) in updates.pop(event["update"] - 1)
    for batches in updates[:20]:
        assert PAIR not in chain.from_iterable(batches)
    assert parameters_to_vector(read_weights(bad_run).values()).isfinite().all()
    saved = torch.load(bad_run / "checkpoints/latest/trainer.pt", weights_only=True)
    assert saved["state"]["bad_updates"] == 0  # in a row
    # figures are finite, and the schedule counts only finished updates
    config = TrainConfig(optimizer=OptimizerConfig(warmup_steps=20))
    config.model.d_model = 16
    records = read_records(bad_run, "nll")
    assert read_values(bad_run, "nll") == list(range(1, 21))
    names = "loss gradient_norm tokens_per_second memory_bytes model_flops_per_second"
    names += " cpu_seconds wall_seconds"
    lengths = sampler(toy_data).lengths
    for record, batches in zip(records, updates[:20], strict=True):
        share = padding_share(lengths, list(map(np.array, batches)))
        assert record["padding_share"] == pytest.approx(share)
        for name in [*names.split(), "model_flops_utilisation"]:
            assert 0 < record[name] < math.inf, name
        assert record["learning_rate"] == pytest.approx(learning_rate(record["update"], config))
        assert record["memory_bytes"] > 50e6
        assert 0 < record["target_tokens_per_second"] < record["tokens_per_second"]


@pytest.mark.slow
def test_a_left_out_update_changes_nothing(
    bad_run: Path, toy_data: Path, tmp_path: Path, poisoned: Callable[[int, float], None]
) -> None:
    """Until its first bad update, a run has the bits of a run without the bad pair."""
    num_good = read_records(bad_run, "event")[0]["update"] - 1
    assert train(toy_data, tmp_path / "good", RICH, f"max_updates={num_good}") == 0
    learners: list[Any] = []
    original = Learner.update

    def noting(learner: Learner, *arguments: Any, **named: Any) -> Any:
        result = original(learner, *arguments, **named)
        if not result.is_finite:
            learners.append(copy.deepcopy((learner.averaged_model, learner.optimizers[0])))
        return result

    poisoned(PAIR, float("inf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", noting)
        assert train(toy_data, tmp_path / "bad", RICH, f"max_updates={num_good + 1}") == 0
    ((model, optimizer),) = learners
    assert_same_tensors(model.state_dict(), read_weights(tmp_path / "good"))
    path = tmp_path / "good/checkpoints/latest/trainer.pt"
    saved = torch.load(path, weights_only=True)["learner"]["optimizers"][0]
    assert saved["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"]
    for i, moments in optimizer.state_dict()["state"].items():
        assert_same_tensors(moments, saved["state"][i])


@pytest.mark.slow
def test_a_run_killed_near_left_out_updates_ends_with_the_same_bits(
    bad_run: Path, toy_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    log = tmp_path / "log"
    for number, code in ((7, -9), (9, -9), (1000, 0)):
        with child(log, train_poisoned, PAIR, "update", number, toy_data, run, RICH) as process:
            assert process.wait() == code, process.stderr
    assert_same_weights(bad_run, run)
    for key in ("nll", "event"):
        assert read_values(run, key) == read_values(bad_run, key)


@pytest.mark.slow
def test_too_many_bad_updates_in_a_row_end_the_run(
    toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    original = Learner.compute_loss

    def infinite_loss(learner: Learner, batch: Any) -> tuple[Any, Any]:
        loss, nll = original(learner, batch)
        return math.inf * loss, nll

    monkeypatch.setattr(Learner, "compute_loss", infinite_loss)
    assert train(toy_data, tmp_path / "run", PLAIN, "max_bad_updates=3") == 2
    err = capfd.readouterr().err
    last_line = err.splitlines()[-1]
    assert re.match(
        r"nmt-train: update 1: 3 times in a row .* not finite; last: loss inf", last_line
    )
    third = list(chain.from_iterable(plan(toy_data, 1)[2]))
    assert named_pairs(last_line) == third[:20]
    assert err.count(LEFT_OUT) == 3
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


# --- float16


@pytest.mark.slow
def test_overflows_lower_the_scale_and_do_not_end_the_run(
    toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Learner.__init__

    def start(self: Learner, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**34)  # any gradient overflows

    monkeypatch.setattr(Learner, "__init__", start)
    options = [*PLAIN, "dtype=float16", "max_bad_updates=2"]
    run_dir = assert_resumes_exactly(toy_data, tmp_path, options, ends=(4, 8))
    num_left_out = len(read_records(run_dir, "event"))
    assert 5 < num_left_out < 34
    assert read_values(run_dir, "nll") == list(range(1, 9))
    path = run_dir / "checkpoints/latest/trainer.pt"
    state = torch.load(path, weights_only=True)
    assert state["learner"]["precision"]["scale"] == 2.0 ** (34 - num_left_out)
    assert state["state"]["bad_updates"] == 0


# --- spikes


def test_a_spike_stands_out_of_the_losses_before_it() -> None:
    draw = np.random.default_rng(0)
    detector = SpikeDetector()
    falling = 9 * np.exp(-np.arange(400) / 100) + 2 + 0.05 * draw.standard_normal(400)
    assert not any(map(detector.is_spike, falling.tolist()))
    assert detector.is_spike(3.5)
    assert not detector.is_spike(float(falling[-1]))
    detector = SpikeDetector()  # losses that vary much by themselves
    noisy = 2 + 0.2 * draw.standard_normal(400)
    assert not any(map(detector.is_spike, noisy.tolist()))
    detector = SpikeDetector()  # nothing to compare with yet
    assert not any(map(detector.is_spike, (1.0, 50.0, 1.0, 900.0)))


@pytest.mark.slow
def test_a_spike_is_logged_with_the_batch_of_the_highest_loss(
    toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poisoned: Any
) -> None:
    monkeypatch.setattr(checks, "_NUM_PREVIOUS", 5)
    poisoned(PAIR, 30.0)
    assert train(toy_data, tmp_path / "run", PLAIN) == 0
    updates = plan(toy_data, 3)
    events = read_records(tmp_path / "run", "event")
    assert events
    for event in events:
        assert event["event"] == "loss spike"
        assert PAIR in named_pairs(event["batch"])
        assert named_pairs(event["batch"]) in updates[event["update"] - 1]
    text = describe_batches([(np.arange(50), math.nan), (np.arange(90, 92), 3.0)])
    assert text.endswith("17, 18, 19 and 30 more of the training set, from 0")
    assert "90" not in text
