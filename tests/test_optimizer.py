"""Learning rate, Adam, AdamW, clipping and the moving average, against the papers' formulas written
out in float64 and against torch's schedulers.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from conftest import hidden_states, random_source, random_target, tiny_model
from torch import Tensor, nn
from torch.optim import lr_scheduler

from nmt.config import ModelConfig, Optimizer, OptimizerConfig, Schedule, TrainConfig
from nmt.errors import ConfigError
from nmt.training import optimizer as optim
from nmt.training.optimizer import WeightAverage, learning_rate, peak_learning_rate

ADAMW, INVERSE_SQRT, COSINE = Optimizer.adamw, Schedule.inverse_sqrt, Schedule.cosine

# --- the learning rate


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
def test_rates_equal_torchs_schedulers() -> None:
    for schedule in Schedule:
        for warmup_steps in (2, 700):
            settings = config(max_updates=3000, warmup_steps=warmup_steps, schedule=schedule)
            found = [learning_rate(step, settings) for step in range(1, 3001)]
            expected = pytest.approx(torchs_rates(settings), rel=1e-9, abs=1e-15)
            assert found == expected, (schedule, warmup_steps)


def test_noam_is_equation_3_of_the_paper() -> None:
    for d_model in (512, 1024):
        for step in (1, 2, 100, 3999, 4000, 4001, 8000, 100_000):
            expected = d_model**-0.5 * min(step**-0.5, step * 4000**-1.5)
            found = learning_rate(step, config(d_model=d_model))
            assert found == pytest.approx(expected, rel=1e-12), (d_model, step)


def test_base_peaks_at_7e_4_at_the_end_of_warmup() -> None:
    rates = [learning_rate(step, config()) for step in range(1, 12_001)]
    assert max(rates) == rates[4000 - 1] == pytest.approx(6.9877e-4, rel=1e-4)
    assert rates[0] == pytest.approx(1.7469e-7, rel=1e-4)


def test_the_rate_rises_until_warmup_ends_and_then_falls_without_a_jump() -> None:
    for schedule in Schedule:
        for warmup_steps in (1, 7, 40):
            settings = config(max_updates=200, warmup_steps=warmup_steps, schedule=schedule)
            rates = [learning_rate(step, settings) for step in range(1, 201)]
            peak = warmup_steps - 1
            assert rates[peak] == max(rates) == peak_learning_rate(settings), schedule
            rises = [b - a for a, b in zip([0.0, *rates[:peak]], rates[: peak + 1], strict=True)]
            assert rises == pytest.approx([rates[0]] * warmup_steps)  # a straight line from 0
            assert all(a > b for a, b in zip(rates[peak:-1], rates[peak + 1 :], strict=True))
        at, after = (learning_rate(step, config(schedule=schedule)) for step in (4000, 4001))
        assert 0 < at - after < at / 4000, schedule


def test_the_scale_is_a_factor() -> None:
    for schedule in (Schedule.noam, COSINE):
        for step in (3, 4000, 9000):
            plain = learning_rate(step, config(schedule=schedule))
            scaled = learning_rate(step, config(schedule=schedule, learning_rate_scale=0.3))
            assert scaled == pytest.approx(0.3 * plain, rel=1e-12), (schedule, step)


def test_a_peak_that_is_given_is_reached_whatever_the_width() -> None:
    for schedule in (INVERSE_SQRT, COSINE):
        for d_model in (64, 512):
            settings = config(d_model=d_model, schedule=schedule, peak_learning_rate=3e-4)
            assert learning_rate(4000, settings) == 3e-4
            assert learning_rate(1000, settings) == pytest.approx(3e-4 / 4)


def test_inverse_sqrt_from_the_papers_peak_is_noam() -> None:
    peak = (512 * 4000) ** -0.5
    settings = config(schedule=INVERSE_SQRT, peak_learning_rate=peak)
    for step in (1, 77, 4000, 4001, 50_000):
        assert learning_rate(step, settings) == pytest.approx(learning_rate(step, config()))


def test_cosine_is_half_in_the_middle_and_ends_at_0() -> None:
    for peak, highest in ((None, (512 * 1000) ** -0.5), (1e-3, 1e-3)):
        settings = config(
            max_updates=5000, warmup_steps=1000, schedule=COSINE, peak_learning_rate=peak
        )
        shares = {500: 1 / 2, 1000: 1, 2000: (1 + math.sqrt(0.5)) / 2, 3000: 1 / 2, 5000: 0}
        for step, share in shares.items():
            found = learning_rate(step, settings)
            assert found == pytest.approx(share * highest, abs=1e-18), (peak, step)


def test_settings_that_contradict_each_other_are_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"schedule": INVERSE_SQRT}, r"inverse_sqrt: needs optimizer\.peak_learning_rate"),
        ({"peak_learning_rate": 1e-3}, r"peak_learning_rate=0\.001: noam has the paper's peak"),
        ({"schedule": COSINE, "peak_learning_rate": 0.0}, "must be above 0"),
        (
            {"schedule": COSINE, "peak_learning_rate": 1e-3, "learning_rate_scale": 2.0},
            r"set optimizer\.learning_rate_scale=1",
        ),
        ({"weight_decay": 0.1}, r"weight_decay=0\.1: needs optimizer\.name=adamw"),
        ({"weight_decay": -0.1, "name": ADAMW}, "must not be negative"),
    ]
    for settings, rule in refused:
        with pytest.raises(ConfigError, match=rule):
            OptimizerConfig(**settings)


# --- the optimizer


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


class Layers(nn.Module):
    """One of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 5)
        self.linear = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(3)


def step(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Make a step with the gradient, and drop it."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


DECAYING = {"embedding.weight", "linear.weight"}


def train_by_random_gradients(
    settings: OptimizerConfig, device: str = "cpu"
) -> dict[str, tuple[Tensor, Tensor]]:
    """Take six steps; return what was found and what was expected of each parameter."""
    torch.manual_seed(0)
    model = Layers().to(device)
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
        step(optimizer, lr)
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


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
            ],
        ),
    ],
)
def test_steps_equal_the_papers_algorithm_by_hand(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fused in (optim.FUSED_DEVICES, ()):
        monkeypatch.setattr(optim, "FUSED_DEVICES", fused)
        for settings in SETTINGS:
            for name, (found, expected) in train_by_random_gradients(settings, device).items():
                torch.testing.assert_close(
                    found, expected, atol=1e-6, rtol=1e-5, msg=f"{settings}, {fused}: {name}"
                )


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


def test_an_optimizer_that_is_saved_goes_on_to_the_same_bits() -> None:
    for name in Optimizer:
        settings = OptimizerConfig(name=name)
        straight = tiny_model()
        optimizer = optim.make_optimizer(straight, settings)
        for update in range(4):
            if update == 2:
                other = copy.deepcopy(straight)
                resumed = optim.make_optimizer(other, settings)
                resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            gradient_of(straight)
            step(optimizer, 0.01)
        for _ in range(2):
            gradient_of(other)
            step(resumed, 0.01)
        for one, two in zip(straight.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two), name


def test_gradients_are_clipped_to_the_norm_and_the_old_norm_returned() -> None:
    for max_norm, factor in ((0.0, 1.0), (100.0, 1.0), (2.5, 0.25)):
        model = nn.Linear(2, 1, bias=False)
        model.weight.grad = torch.tensor([[6.0, 8.0]])
        assert float(optim.clip_gradient(model, max_norm)) == pytest.approx(10.0)
        expected = torch.tensor([[6.0, 8.0]]) * factor
        torch.testing.assert_close(model.weight.grad, expected, atol=1e-5, rtol=1e-5)


# --- the moving average


class Averaged:
    """A tiny training run that keeps an average."""

    def __init__(self, decay: float) -> None:
        self.model = tiny_model().train()
        self.optimizer = optim.make_optimizer(self.model, OptimizerConfig())
        self.average = WeightAverage(self.model, decay)

    def update(self, seed: int) -> dict[str, Tensor]:
        """Train for one update; return a copy of the weights after it."""
        hidden = hidden_states(self.model, *random_source([5, 3], seed), random_target(2, 4, seed))
        hidden.square().sum().backward()
        step(self.optimizer, 0.01)
        self.average.update(self.model)
        return copy.deepcopy(self.model.state_dict())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_the_average_is_its_recursion_by_hand() -> None:
    for decay in (0.2, 0.6, 0.9999):
        run = Averaged(decay)
        expected = {name: tensor.double() for name, tensor in run.model.state_dict().items()}
        for t in range(1, 31):
            weights = run.update(t)
            d = decay if t / (t + 9) > decay else t / (t + 9)
            for name, tensor in weights.items():
                expected[name] = d * expected[name] + (1 - d) * tensor.double()
        found = run.average.model.state_dict()
        assert found.keys() == expected.keys()
        assert [name for name in found if "embedding" in name] == ["embedding.weight"]
        for name, tensor in found.items():
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
    for tensor in average.model.parameters():
        torch.testing.assert_close(tensor, torch.ones_like(tensor), atol=1e-5, rtol=0)


def test_the_average_takes_no_part_in_training() -> None:
    run, alone = Averaged(0.9), Averaged(0.9)
    alone.average = WeightAverage(tiny_model(), 0.9)
    for seed in range(3):
        run.average.model.eval()
        assert same(run.update(seed), alone.update(seed))
    assert not any(tensor.requires_grad for tensor in run.average.model.parameters())
    assert not same(run.average.model.state_dict(), run.model.state_dict())
    places = [
        {p.data_ptr() for p in model.parameters()} for model in (run.model, run.average.model)
    ]
    assert not places[0] & places[1]


def test_an_average_that_is_saved_and_read_goes_on_to_the_same_bits() -> None:
    straight, resumed = Averaged(0.9), Averaged(0.9)
    for seed in range(3):
        straight.update(seed)
    resumed.model.load_state_dict(copy.deepcopy(straight.model.state_dict()))
    resumed.optimizer.load_state_dict(copy.deepcopy(straight.optimizer.state_dict()))
    resumed.average.load(straight.average.model.state_dict(), straight.average.num_updates)
    for seed in range(3, 6):
        straight.update(seed)
        resumed.update(seed)
    assert same(resumed.average.model.state_dict(), straight.average.model.state_dict())
