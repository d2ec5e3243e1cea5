"""Learning rate, Adam, AdamW, clipping and the moving average, against the papers' formulas written
out in float64 and against torch's schedulers.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import assert_near, assert_same_tensors, tiny_model
from torch import Tensor, nn
from torch.optim import lr_scheduler

from nmt.config import (
    Activation,
    ModelConfig,
    Optimizer,
    OptimizerConfig,
    Positions,
    Schedule,
    Sharding,
    TrainConfig,
)
from nmt.errors import ConfigError
from nmt.model.fast import FastTransformer
from nmt.training.optimizer import (
    ScheduleFree,
    WeightAverage,
    clip_gradient,
    make_optimizers,
)
from nmt.training.schedule import learning_rate, peak_learning_rate

ADAMW = Optimizer.adamw
INVERSE_SQRT = Schedule.inverse_sqrt
COSINE = Schedule.cosine
MUON = Optimizer.muon
ADAFACTOR = Optimizer.adafactor
SCHEDULE_FREE: dict[str, Any] = {
    "name": Optimizer.schedule_free,
    "schedule": Schedule.constant,
}


def config(*, d_model: int = 512, max_updates: int = 100_000, **optimizer: Any) -> TrainConfig:
    if optimizer.get("schedule") is INVERSE_SQRT:
        optimizer.setdefault("peak_learning_rate", 5e-4)
    model = ModelConfig(d_model=d_model, num_heads=8)
    return TrainConfig(model=model, optimizer=OptimizerConfig(**optimizer), max_updates=max_updates)


def torchs_rates(settings: TrainConfig) -> list[float]:
    """Run torch's linear warm-up and decay for `max_updates` steps.

    torch counts updates from 0, this project from 1; its warm-up cannot start at 0.
    """
    warmup = settings.optimizer.warmup_steps
    peak = peak_learning_rate(settings)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=peak)
    rise = lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    fall: lr_scheduler.LRScheduler
    schedule = settings.optimizer.schedule
    num_left = settings.max_updates - warmup
    if schedule is COSINE:
        fall = lr_scheduler.CosineAnnealingLR(optimizer, num_left)
    elif schedule is Schedule.linear:
        fall = lr_scheduler.LinearLR(optimizer, 1.0, end_factor=0.0, total_iters=num_left)
    elif schedule is Schedule.constant:
        fall = lr_scheduler.ConstantLR(optimizer, factor=1.0)
    elif schedule is Schedule.wsd:
        num_falling = min(settings.optimizer.decay_share * settings.max_updates, num_left)
        fall = lr_scheduler.LambdaLR(
            optimizer, lambda n: 1 - max(1 - (num_left - n) / num_falling, 0) ** 0.5
        )
    else:
        fall = lr_scheduler.LambdaLR(optimizer, lambda n: (warmup / (warmup + n)) ** 0.5)
    scheduler = lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warmup - 1])
    rates = []
    for _ in range(settings.max_updates):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # inside torch's SequentialLR
def test_rates_equal_torchs_schedulers() -> None:
    for schedule in Schedule:
        for warmup_steps, share in ((2, 0.25), (30, 0.9)):
            options: dict[str, Any] = {"schedule": schedule, "decay_share": share}
            settings = config(max_updates=100, warmup_steps=warmup_steps, **options)
            for step, expected in enumerate(torchs_rates(settings), start=1):
                rate = learning_rate(step, settings)
                assert rate == pytest.approx(expected, rel=1e-9, abs=1e-15), (schedule, step)


def test_the_peak_is_the_given_one_or_the_peak_of_equation_3() -> None:
    for d_model in (512, 1024):
        for step in (1, 2, 100, 3999, 4000, 4001, 100_000):
            expected = d_model**-0.5 * min(step**-0.5, step * 4000**-1.5)
            rate = learning_rate(step, config(d_model=d_model))
            assert rate == pytest.approx(expected, rel=1e-12), (d_model, step)
    for schedule in (Schedule.noam, COSINE):
        settings = config(schedule=schedule, warmup_steps=7)
        assert learning_rate(7, settings) == pytest.approx((512 * 7) ** -0.5, rel=1e-12)
    for schedule in (INVERSE_SQRT, COSINE):
        settings = config(schedule=schedule, peak_learning_rate=3e-4)
        assert learning_rate(4000, settings) == 3e-4 > learning_rate(4001, settings)


def test_settings_that_contradict_each_other_are_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"schedule": INVERSE_SQRT}, r"inverse_sqrt: needs optimizer\.peak_learning_rate"),
        (
            {"peak_learning_rate": 1e-3},
            r"=0\.001: noam has its own peak; set optimizer",
        ),
        ({"weight_decay": 0.1}, r"weight_decay=0\.1: needs optimizer\.name=adamw"),
        ({"name": Optimizer.schedule_free}, r"needs optimizer\.schedule=constant"),
        (
            SCHEDULE_FREE | {"beta1": 0.0},
            r"optimizer\.beta1=0\.0: schedule_free needs a number above",
        ),
    ]
    for settings, rule in refused:
        with pytest.raises(ConfigError, match=rule):
            OptimizerConfig(**settings)
    schedule_free = OptimizerConfig(**SCHEDULE_FREE)
    with pytest.raises(ConfigError, match=r"ema_decay=0\.9: schedule_free averages the weights"):
        TrainConfig(optimizer=schedule_free, ema_decay=0.9)
    with pytest.raises(ConfigError, match="does not work with sharding=full"):
        TrainConfig(optimizer=schedule_free, sharding=Sharding.full)


def adam_by_hand(
    start: Tensor, gradients: Tensor, config: OptimizerConfig, weight_decay: float
) -> Tensor:
    """Loshchilov and Hutter (2019), algorithm 2, in float64; without decay it is Adam."""
    weights = start.double()
    mean = torch.zeros_like(weights)
    square = torch.zeros_like(weights)
    for step, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        mean = config.beta1 * mean + (1 - config.beta1) * g
        square = config.beta2 * square + (1 - config.beta2) * g * g
        corrected_mean = mean / (1 - config.beta1**step)
        corrected_square = square / (1 - config.beta2**step)
        move = corrected_mean / (corrected_square.sqrt() + config.eps) + weight_decay * weights
        weights = weights - 0.01 * step * move
    return weights


def adafactor_by_hand(start: Tensor, gradients: Tensor, weight_decay: float) -> Tensor:
    """Shazeer and Stern (2018), algorithms 4 and 5 without eps_1, in float64."""
    weights = start.double()
    row_square = weights.new_zeros(1)
    column_square = weights.new_zeros(1)
    scale: Any = 1.0
    for step, gradient in enumerate(gradients, start=1):
        square = gradient.double() ** 2
        share = step**-0.8
        if weights.dim() == 2:
            row_square = row_square.lerp(square.mean(-1, keepdim=True), share)
            column_square = column_square.lerp(square.mean(-2, keepdim=True), share)
            scale = row_square.mean(-2, keepdim=True)
        else:
            row_square = row_square.lerp(square, share)
            column_square = weights.new_ones(1)
        move = gradient.double() / (row_square * column_square / scale).sqrt()
        move = move / max(1.0, float(move.square().mean().sqrt()))
        rate = min(0.01 * step, step**-0.5)
        size = max(1e-3, float(weights.square().mean().sqrt()))
        weights = weights * (1 - 0.01 * step * weight_decay) - rate * size * move
    return weights


def muon_by_hand(start: Tensor, gradients: Tensor, config: OptimizerConfig) -> Tensor:
    """Jordan et al. (2024) with the factor of Liu et al. (2025), in float64 by singular values."""
    weights = start.double()
    mean = torch.zeros_like(start, dtype=torch.float64)
    for step, gradient in enumerate(gradients, start=1):
        mean = config.momentum * mean + (1 - config.momentum) * gradient.double()
        ahead = config.momentum * mean + (1 - config.momentum) * gradient.double()
        left_vectors, values, right = torch.linalg.svd(ahead, full_matrices=False)
        values = values / values.square().sum().sqrt()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        move = 0.2 * max(start.shape) ** 0.5 * left_vectors @ values.diag() @ right
        weights = weights * (1 - 0.01 * step * config.weight_decay) - 0.01 * step * move
    return weights


def schedule_free_by_hand(
    start: Tensor, gradients: Tensor, config: OptimizerConfig, weight_decay: float
) -> Tensor:
    """Defazio et al. (2024), algorithm 1, in float64: return y, at which gradients are computed."""
    base = start.double()  # z
    average = start.double()  # x
    y = start.double()
    square = torch.zeros_like(base)
    weights_sum = 0.0
    for step, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        square = config.beta2 * square + (1 - config.beta2) * g * g
        corrected_square = square / (1 - config.beta2**step)
        lr = 0.01 * step
        base = base - lr * (g / (corrected_square.sqrt() + config.eps) + weight_decay * y)
        weights_sum += lr**2
        average = average + lr**2 / weights_sum * (base - average)
        y = (1 - config.beta1) * base + config.beta1 * average
    return y


def check_steps(device: str) -> None:
    """Take six steps with rising rates and ever smaller gradients, with each of some settings."""
    for settings in (
        OptimizerConfig(),
        OptimizerConfig(beta1=0.5, beta2=0.7, eps=0.1),
        OptimizerConfig(name=ADAMW, weight_decay=0.0),
        OptimizerConfig(name=ADAMW, weight_decay=2.0, eps=0.1),
        OptimizerConfig(name=ADAFACTOR, weight_decay=2.0),
        OptimizerConfig(**SCHEDULE_FREE),
        OptimizerConfig(**SCHEDULE_FREE, beta1=0.6, beta2=0.7, weight_decay=2.0, eps=0.1),
    ):
        torch.manual_seed(0)
        layers = {"embedding": nn.Embedding(4, 5), "linear": nn.Linear(5, 3)}
        model = nn.ModuleDict({**layers, "norm": nn.LayerNorm(3)}).to(device)
        start = copy.deepcopy(dict(model.named_parameters()))
        scales = 10.0 ** -torch.arange(6, device=device)
        gradients = {}  # of the six steps, (6, *shape)
        for name, parameter in start.items():
            gradients[name] = torch.stack([torch.randn_like(parameter) * scale for scale in scales])
        (optimizer,) = make_optimizers(model, settings)
        for i in range(6):
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name][i].clone()
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (i + 1)
            optimizer.step()
        for name, weight in model.named_parameters():
            decay = settings.weight_decay if weight.dim() == 2 else 0.0
            weights = start[name].detach()
            expected = adam_by_hand(weights, gradients[name], settings, decay)
            if settings.name is ADAFACTOR:
                expected = adafactor_by_hand(weights, gradients[name], decay)
            if settings.name is Optimizer.schedule_free:
                expected = schedule_free_by_hand(weights, gradients[name], settings, decay)
            assert_near(weight.detach().double(), expected, (settings, name), atol=1e-6)


def test_steps_equal_the_papers_algorithm_by_hand() -> None:
    check_steps("cpu")
    # the settings of the paper
    (optimizer,) = make_optimizers(nn.Linear(2, 2), OptimizerConfig())
    group = optimizer.param_groups[0]
    assert (*group["betas"], group["eps"]) == (0.9, 0.98, 1e-9)
    assert (group["weight_decay"], group["fused"]) == (0, True)


def test_muon_turns_each_matrix_of_a_layer_and_leaves_all_else_to_adamw() -> None:
    settings = OptimizerConfig(name=MUON, weight_decay=0.5, momentum=0.8)
    shared = {"num_kv_heads": 1, "activation": Activation.swiglu, "positions": Positions.relative}
    for case in ({"output_bias": True, "tied_output": False}, shared, {"head_size": 3}):
        check_muon(settings, tiny_model(**case))


def check_muon(settings: OptimizerConfig, model: FastTransformer) -> None:
    start = copy.deepcopy(dict(model.named_parameters()))
    draw = torch.Generator().manual_seed(0)
    gradients = {}  # of the three steps, (3, *shape)
    for name, parameter in model.named_parameters():
        gradients[name] = torch.randn((3, *parameter.shape), generator=draw)
    optimizers = make_optimizers(model, settings)
    for i in range(3):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name][i].clone()
        for optimizer, resumed in zip(optimizers, make_optimizers(model, settings), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (i + 1)
            optimizer.step()
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizers[optimizers.index(optimizer)] = resumed
    for name, weight in model.named_parameters():
        decay = settings.weight_decay if weight.dim() == 2 else 0.0
        weights = start[name].detach()
        expected = adam_by_hand(weights, gradients[name], settings, decay)
        if weight.dim() == 2 and "layers" in name and name.endswith("weight"):
            attention = model.encoder_layers[0].self_attention
            sizes = attention.qkv_sizes if "in_projection" in name else [len(weight)]
            start_blocks = weights.split(sizes)
            gradient_blocks = gradients[name].split(sizes, dim=1)
            blocks = []
            for start_block, block in zip(start_blocks, gradient_blocks, strict=True):
                blocks.append(muon_by_hand(start_block, block, settings))
            expected = torch.cat(blocks)
        assert_near(weight.detach().double(), expected, name, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("averaging_power", [0, 1.5])
def test_schedule_free_steps_and_averages_equal_the_authors_package_bit_for_bit(
    averaging_power: float,
) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    settings = config(
        **SCHEDULE_FREE,
        warmup_steps=10,
        peak_learning_rate=0.01,
        weight_decay=0.1,
        averaging_power=averaging_power,
    )
    model = tiny_model()
    reference_model = copy.deepcopy(model)
    (optimizer,) = make_optimizers(model, settings.optimizer)
    assert isinstance(optimizer, ScheduleFree)
    parameters = list(reference_model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    vectors = [parameter for parameter in parameters if parameter.dim() == 1]
    reference = schedulefree.AdamWScheduleFree(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.98),
        eps=1e-9,
        weight_decay=0.1,
        warmup_steps=10,
        r=averaging_power,
        foreach=False,
    )
    draw = torch.Generator().manual_seed(0)
    for step in range(1, 26):
        reference.train()
        for weight, reference_weight in zip(model.parameters(), parameters, strict=True):
            weight.grad = torch.randn(weight.shape, generator=draw)
            reference_weight.grad = weight.grad.clone()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        optimizer.step()
        reference.step()
        assert_same_tensors(model.state_dict(), reference_model.state_dict())
    reference.eval()  # sets the weights to the average
    assert_same_tensors(optimizer.averaged_copy(model).state_dict(), reference_model.state_dict())


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    model = tiny_model()
    (optimizer,) = make_optimizers(model, OptimizerConfig(name=ADAMW, weight_decay=0.1))
    decay_of = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert id(parameter) not in decay_of
            decay_of[id(parameter)] = group["weight_decay"]
    for name, parameter in model.named_parameters():
        is_matrix = name.endswith(".weight") and "norm" not in name
        assert decay_of.pop(id(parameter)) == (0.1 if is_matrix else 0.0), name
    assert not decay_of


def test_gradients_are_clipped_to_the_norm_and_the_old_norm_returned() -> None:
    for max_norm, factor in ((0.0, 1.0), (100.0, 1.0), (2.5, 0.25)):
        model = nn.Linear(2, 1, bias=False)
        model.weight.grad = torch.tensor([[6.0, 8.0]])
        assert float(clip_gradient(list(model.parameters()), max_norm)) == pytest.approx(10.0)
        assert_near(model.weight.grad, torch.tensor([[6.0, 8.0]]) * factor, max_norm)


def test_the_average_is_its_recursion_by_hand_and_takes_no_part_in_training() -> None:
    for decay in (0.2, 0.6, 0.9999):
        model = tiny_model().train()
        draw = torch.Generator().manual_seed(0)
        average = WeightAverage(model, decay)
        expected = copy.deepcopy(model).double().state_dict()
        for t in range(1, 19):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=draw))
            weights_before = copy.deepcopy(model.state_dict())
            average.update(model)
            d = decay if t / (t + 9) > decay else t / (t + 9)
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, weights_before[name])
                expected[name] = d * expected[name] + (1 - d) * tensor.double()
        averages = average.model.state_dict()
        assert averages.keys() == expected.keys()
        for name, tensor in averages.items():
            assert tensor.dtype is torch.float32
            assert_near(tensor.double(), expected[name], (decay, name), atol=1e-6)
        assert not any(parameter.requires_grad for parameter in average.model.parameters())
