"""Ranks that share one model compute and write the same as ranks with a model each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_gradients import CUTS, accumulate, change, gradient, make_update, without_dropout
from tiny import assert_near, tiny_config
from toy import call_before, make_run, read_weights, write_data

from nmt.config import DType, Optimizer, OptimizerConfig, Sharding, TrainConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.runtime.distributed import find_world, process_group
from nmt.training import train as training
from nmt.training.checkpoints import load_checkpoint
from nmt.training.learner import Learner

CPU = torch.device("cpu")
MUON = OptimizerConfig(name=Optimizer.muon)
LENGTHS = [(1, 1), (40, 2), (2, 45), (3, 3), (7, 1), (1, 30), (12, 12), (5, 1), (60, 60), (2, 2)]


@pytest.fixture(scope="module")
def data_dir(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of pairs of very unequal length."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, tokenizer, LENGTHS * 3)
    return folder


def train_part(data_dir: Path, run_dir: Path, sharding: str, max_updates: int) -> None:
    """Train as this rank, up to an update."""
    config = TrainConfig(
        data_dir=str(data_dir),
        run_dir=str(run_dir),
        model=tiny_config(num_heads=2),
        # a large eps: the gradient of the keys' bias is 0 except for rounding, which Adam amplifies
        optimizer=OptimizerConfig(warmup_steps=50, max_grad_norm=1.0, eps=1e-4),
        sharding=Sharding(sharding),
        tokens_per_update=150,
        max_tokens=60,
        max_updates=max_updates,
        checkpoint_every_updates=10,
        validate_every_updates=10,
        valid_bleu=False,
        ema_decay=0.9,
        num_threads=1,
        device="cpu",
        dtype=DType.float32,  # sharded and whole weights round differently to bfloat16
    )
    from torch.distributed.tensor import DTensor  # takes 2 s

    world = find_world()

    def check_division(learner: Learner, *_: Any, **__: Any) -> None:
        for parameter in learner.model.parameters():
            assert isinstance(parameter, DTensor) == (sharding == "full")
        if sharding == "full":
            embedding: Any = learner.model.embedding.weight
            assert embedding.to_local().size(0) < embedding.size(0)

    call_before(pytest.MonkeyPatch(), Learner, "update", check_division)
    with process_group(world, CPU, 60):
        training.train(config, "", world, CPU)


def content(run_dir: Path) -> dict[str, Any]:
    """Return all tensors of the newest checkpoint."""
    learner = load_checkpoint(run_dir / "checkpoints/latest").learner
    moments = learner["optimizers"][0]["state"]
    return {"average": read_weights(run_dir), "trained": learner["trained"], "moments": moments}


@pytest.fixture
def lone_group() -> Iterator[None]:
    """A process group with this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("lone_group")
def test_dividing_a_model_in_training_keeps_weights_moments_and_average(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nmt.training.sharding import Sharded

    update = make_update(CUTS["unequal"])
    states = []
    passes = []
    settings = {"model": tiny_config(num_heads=2), "optimizer": OptimizerConfig(eps=1e-4)}
    for sharding in Sharding:
        torch.manual_seed(1)
        learner = make_run(data_dir, tmp_path, sharding=sharding, ema_decay=0.9, **settings).learner
        without_dropout(learner)
        change(learner, update)
        if sharding is Sharding.full:
            learner.sharded = Sharded(
                learner.objective, learner.optimizers[0], learner.average, CPU, world_size=1
            )
            # another rank has three batches more
            monkeypatch.setattr("nmt.training.learner.gather", lambda count: [count, count + 3])
        learner.objective.register_forward_hook(lambda *_: passes.append(1))
        change(learner, update)
        state: Any = [learner.state_dict(), learner.weights_to_save()]
        states.append(
            learner.sharded.gather_to_host(state, should_keep=True) if learner.sharded else state
        )
    assert len(passes) == 2 * 3 + 3
    torch.testing.assert_close(states[1], states[0], atol=1e-6, rtol=0)


def test_a_rank_with_fewer_micro_batches_runs_others_that_change_no_gradient(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_run(data_dir, tmp_path).learner
    update = make_update(CUTS["unequal"])
    monkeypatch.setattr("nmt.training.learner.gather", lambda count: [count, count + 3])
    num_passes = []
    gradients = []
    for sharded in (None, Mock()):
        learner.sharded = sharded
        hook = Mock(return_value=None)  # else it would replace the output
        with learner.objective.register_forward_hook(hook):
            accumulate(learner, update)
        num_passes.append(hook.call_count)
        gradients.append(gradient(learner.model))
        learner.zero_grad()
    assert num_passes == [3, 3 + 3]
    assert_near(gradients[1], gradients[0])


@pytest.mark.slow
def test_sharded_ranks_train_the_same_weights_and_go_on_from_the_same_files(
    data_dir: Path, tmp_path: Path
) -> None:
    runs = {"none": ["none"], "both ways": ["full", "none", "full"]}
    for name, stages in runs.items():
        for number, sharding in enumerate(stages):
            max_updates = (20, 13, 7)[len(stages) - 1 - number]
            run_ranks(tmp_path, 2, train_part, data_dir, tmp_path / name, sharding, max_updates)
    expected = content(tmp_path / "none")
    assert type(expected["moments"][0]["exp_avg_sq"]) is torch.Tensor
    tolerance: Any = {"atol": 1e-6, "rtol": 0, "allow_subclasses": False}
    torch.testing.assert_close(content(tmp_path / "both ways"), expected, **tolerance)


def test_settings_that_contradict_sharding_are_errors() -> None:
    for setting in (
        {"dtype": DType.float16},
        {"compile": True},
        {"r_drop": 1.0},
        {"simcut": 1.0},
        {"optimizer": MUON},
    ):
        with pytest.raises(ConfigError, match="does not work with sharding=full"):
            TrainConfig(sharding=Sharding.full, **setting)
