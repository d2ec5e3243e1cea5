"""The moving average of the weights against its recursion in float64."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from conftest import hidden_states, random_source, random_target, tiny_model
from torch import Tensor

from nmt.config import OptimizerConfig
from nmt.model.transformer import Transformer
from nmt.training import optimizer as optim
from nmt.training.ema import WeightAverage
from nmt.training.precision import Precision


class Run:
    """A tiny training run that keeps an average."""

    def __init__(self, decay: float) -> None:
        self.model = tiny_model().train()
        self.optimizer = optim.make_optimizer(self.model, OptimizerConfig())
        self.average = WeightAverage(self.model, decay)

    def update(self, seed: int) -> dict[str, Tensor]:
        """Train for one update; return a copy of the weights after it."""
        hidden = hidden_states(self.model, *random_source([5, 3], seed), random_target(2, 4, seed))
        hidden.square().sum().backward()
        Precision(torch.float32, torch.device("cpu")).step(self.optimizer, 0.01)
        self.optimizer.zero_grad()
        self.average.update(self.model)
        return weights_of(self.model)


def weights_of(model: Transformer) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("decay", [0.2, 0.6, 0.9999])
def test_the_average_is_its_recursion_by_hand(decay: float) -> None:
    run = Run(decay)
    expected = {name: tensor.double() for name, tensor in weights_of(run.model).items()}
    for t in range(1, 31):
        weights = run.update(t)
        d = decay if t / (t + 9) > decay else t / (t + 9)
        for name, tensor in weights.items():
            expected[name] = d * expected[name] + (1 - d) * tensor.double()
    assert run.average.weights().keys() == expected.keys()
    for name, tensor in run.average.weights().items():
        assert tensor.dtype is torch.float32
        torch.testing.assert_close(tensor.double(), expected[name], atol=1e-6, rtol=1e-5)


def test_a_high_decay_forgets_the_random_start() -> None:
    model = tiny_model()
    average = WeightAverage(model, 0.99999)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    for _ in range(100):
        average.update(model)
    for tensor in average.weights().values():
        torch.testing.assert_close(tensor, torch.ones_like(tensor), atol=1e-5, rtol=0)


def test_the_average_fits_the_model_and_holds_the_shared_matrix_once() -> None:
    run = Run(0.5)
    run.update(1)
    names = [name for name in run.average.weights() if "embedding" in name]
    assert names == ["embedding.weight"]
    other = tiny_model(seed=7)
    other.load_state_dict(run.average.weights())  # strict: same names and shapes
    assert same(weights_of(other), run.average.weights())


def test_the_average_takes_no_part_in_training() -> None:
    run, alone = Run(0.9), Run(0.9)
    alone.average = WeightAverage(tiny_model(), 0.9)
    for seed in range(3):
        with run.average.in_place_of(run.model):
            pass
        assert same(run.update(seed), alone.update(seed))
    assert not any(tensor.requires_grad for tensor in run.average.weights().values())


def test_the_model_has_the_average_for_a_while_and_then_its_own_bits_again() -> None:
    run = Run(0.9)
    trained = run.update(1)
    average = copy.deepcopy(run.average.weights())
    places = [parameter.data_ptr() for parameter in run.model.parameters()]
    batch: Any = (*random_source([4, 2]), random_target(2, 3))
    with run.average.in_place_of(run.model), torch.inference_mode():
        found = hidden_states(run.model.eval(), *batch)
        assert same(weights_of(run.model), average)
    assert same(weights_of(run.model), trained)
    assert not same(trained, average)
    assert same(run.average.weights(), average)
    assert [parameter.data_ptr() for parameter in run.model.parameters()] == places
    other = tiny_model(seed=7)
    other.load_state_dict(average)
    assert torch.equal(hidden_states(other, *batch), found)


def test_an_error_while_the_average_stands_in_gives_the_weights_back() -> None:
    run = Run(0.9)
    trained = run.update(1)
    with pytest.raises(KeyboardInterrupt), run.average.in_place_of(run.model):
        raise KeyboardInterrupt
    assert same(weights_of(run.model), trained)


def test_an_average_that_is_saved_and_read_goes_on_to_the_same_bits() -> None:
    straight = Run(0.9)
    for seed in range(3):
        straight.update(seed)
    resumed, file = Run(0.9), io.BytesIO()
    torch.save(
        {
            "model": straight.model.state_dict(),
            "optimizer": straight.optimizer.state_dict(),
            "average": straight.average.state_dict(),
        },
        file,
    )
    file.seek(0)
    content = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(content["model"])
    resumed.optimizer.load_state_dict(content["optimizer"])
    resumed.average.load_state_dict(content["average"])
    for seed in range(3, 6):
        straight.update(seed)
        resumed.update(seed)
    assert same(resumed.average.weights(), straight.average.weights())
    assert not same(resumed.average.weights(), weights_of(resumed.model))
