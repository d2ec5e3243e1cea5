"""Adam and AdamW against ones written by hand in float64, and what a step promises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import hidden_states, random_source, random_target, tiny_model
from torch import Tensor, nn

from nmt.config import Optimizer, OptimizerConfig
from nmt.errors import ConfigError
from nmt.training import optimizer as optim
from nmt.training.precision import Precision

ADAMW = Optimizer.adamw


def adam_by_hand(
    start: Tensor,
    gradients: list[Tensor],
    rates: list[float],
    config: OptimizerConfig,
    weight_decay: float = 0.0,
) -> Tensor:
    """Loshchilov and Hutter (2019), algorithm 2, in float64; without decay it is Adam."""
    weights = start.double()
    mean, square = torch.zeros_like(weights), torch.zeros_like(weights)
    for step, (gradient, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        g = gradient.double()
        mean = config.beta1 * mean + (1 - config.beta1) * g
        square = config.beta2 * square + (1 - config.beta2) * g * g
        corrected_mean = mean / (1 - config.beta1**step)
        corrected_square = square / (1 - config.beta2**step)
        move = corrected_mean / (corrected_square.sqrt() + config.eps) + weight_decay * weights
        weights = weights - lr * move
    return weights


class Part(nn.Module):
    """One of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 5)
        self.linear = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(3)


DECAYING = {"embedding.weight", "linear.weight"}


def train_by_random_gradients(
    settings: OptimizerConfig, device: str = "cpu"
) -> dict[str, tuple[Tensor, Tensor]]:
    """Take six steps; return what was found and what was expected of each parameter."""
    torch.manual_seed(0)
    model = Part().to(device)
    start = copy.deepcopy(dict(model.named_parameters()))
    gradients = {
        name: [torch.randn_like(p) * 10**-i for i in range(6)]
        for name, p in model.named_parameters()
    }
    rates = [0.01 * (i + 1) for i in range(6)]
    optimizer = optim.make_optimizer(model, settings)
    for i, lr in enumerate(rates):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name][i].clone()
        Precision(torch.float32, torch.device(device)).step(optimizer, lr)
    result = {}
    for name, parameter in model.named_parameters():
        decay = settings.weight_decay if name in DECAYING else 0.0
        expected = adam_by_hand(start[name].detach(), gradients[name], rates, settings, decay)
        result[name] = (parameter.detach().double(), expected)
    return result


SETTINGS = [
    OptimizerConfig(),
    OptimizerConfig(eps=0.1),
    OptimizerConfig(beta1=0.5, beta2=0.7),
    OptimizerConfig(name=ADAMW, weight_decay=0.0),
    OptimizerConfig(name=ADAMW, weight_decay=0.3),
    OptimizerConfig(name=ADAMW, weight_decay=2.0, eps=0.1),
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.name.value}-{s.weight_decay}")
def test_steps_equal_the_papers_algorithm_by_hand(
    settings: OptimizerConfig, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fused:
        monkeypatch.setattr(optim, "FUSED_DEVICES", ())
    for found, expected in train_by_random_gradients(settings).values():
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.name.value}-{s.weight_decay}")
def test_steps_on_a_gpu_equal_the_papers_algorithm_by_hand(settings: OptimizerConfig) -> None:
    for found, expected in train_by_random_gradients(settings, "cuda").values():
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_papers_adam_is_the_default_and_fused() -> None:
    group = optim.make_optimizer(nn.Linear(2, 2), OptimizerConfig()).param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-9)
    assert group["weight_decay"] == 0
    assert group["fused"]


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    model = tiny_model()
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = optim.make_optimizer(model, OptimizerConfig(name=ADAMW, weight_decay=0.1))
    groups = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    decaying, others = ([names[id(p)] for p in groups[decay]] for decay in (0.1, 0.0))
    assert all(name.endswith(".weight") and "norm" not in name for name in decaying)
    assert all(name.endswith(".bias") or "norm" in name for name in others)
    assert "embedding.weight" in decaying
    assert sorted(decaying + others) == sorted(names.values())  # each once


def gradient_of(model: nn.Module) -> None:
    src, tgt = random_source([3, 5]), random_target(2, 4)
    hidden_states(model, *src, tgt).square().sum().backward()


def step(optimizer: torch.optim.Optimizer) -> None:
    """Make a step and drop the gradient."""
    Precision(torch.float32, torch.device("cpu")).step(optimizer, 0.01)
    optimizer.zero_grad()


@pytest.mark.parametrize("name", list(Optimizer))
def test_an_optimizer_that_is_saved_goes_on_to_the_same_bits(name: Optimizer) -> None:
    settings = OptimizerConfig(name=name)
    straight = tiny_model()
    optimizer = optim.make_optimizer(straight, settings)
    for update in range(4):
        if update == 2:
            other = copy.deepcopy(straight)
            resumed = optim.make_optimizer(other, settings)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        gradient_of(straight)
        step(optimizer)
    for _ in range(2):
        gradient_of(other)
        step(resumed)
    for one, two in zip(straight.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("unscale", [False, True], ids=["in the kernel", "before it"])
@pytest.mark.parametrize("name", list(Optimizer))
def test_a_gradient_scaler_can_drive_every_optimizer(name: Optimizer, unscale: bool) -> None:
    settings = OptimizerConfig(name=name)
    plain, scaled = tiny_model(), tiny_model()
    one, two = (optim.make_optimizer(model, settings) for model in (plain, scaled))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for is_bad in (False, True, False):
        before = copy.deepcopy(scaled.state_dict())
        for model, optimizer in ((plain, one), (scaled, two)):
            optimizer.zero_grad()
            gradient_of(model)
            for group in optimizer.param_groups:
                group["lr"] = 0.01
        scale: Any = scaler.scale(torch.ones(()))
        for parameter in scaled.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(float("inf") if is_bad else scale)
        if unscale:
            scaler.unscale_(two)
        scaler.step(two)
        scaler.update()
        if is_bad:
            assert all(torch.equal(before[n], w) for n, w in scaled.state_dict().items())
            assert float(scaler.get_scale()) == 2.0**9
        else:
            one.step()
    for left, right in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("max_norm", "factor"), [(0.0, 1.0), (100.0, 1.0), (2.5, 0.25)])
def test_gradients_are_clipped_to_the_norm_and_the_old_norm_returned(
    max_norm: float, factor: float
) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[6.0, 8.0]])
    assert float(optim.clip_gradient(model, max_norm)) == pytest.approx(10.0)
    expected = torch.tensor([[6.0, 8.0]]) * factor
    torch.testing.assert_close(model.weight.grad, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"weight_decay": 0.1}, r"weight_decay=0\.1: needs optimizer\.name=adamw"),
        ({"weight_decay": -0.1, "name": ADAMW}, "must not be negative"),
    ],
)
def test_a_decay_that_would_do_nothing_is_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        OptimizerConfig(**settings)
