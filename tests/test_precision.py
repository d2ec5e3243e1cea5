"""Half precision against float64: what it may round, and what it must not."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB_SIZE, hidden_states, random_source, random_target, tiny_model
from torch import Tensor, nn

from nmt.config import DType
from nmt.distributed import find_dtype
from nmt.errors import DeviceError
from nmt.model.transformer import Transformer
from nmt.training import loss as loss_module
from nmt.training.loss import smoothed_cross_entropy
from nmt.training.precision import Precision

CPU = torch.device("cpu")
HALVES = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of one operand


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), fused=True)


def loss_of(model: Transformer, *, vocab_size: int = VOCAB_SIZE) -> Tensor:
    src, src_lengths = random_source([5, 3, 4, 9])
    tgt = random_target(4, 6)
    hidden = hidden_states(model, src, src_lengths, tgt).flatten(0, 1)
    wanted = tgt.roll(-1, dims=1)
    weight = model.embedding.weight
    loss, _ = smoothed_cross_entropy(hidden, weight, wanted.flatten(), smoothing=0.1)
    return loss / wanted.numel()


@pytest.mark.parametrize("dtype", HALVES)
def test_loss_and_gradient_are_those_of_float64_but_for_rounding(dtype: torch.dtype) -> None:
    rough, exact = tiny_model(), tiny_model().double()
    precision = Precision(dtype, CPU)
    with precision.autocast():
        loss = loss_of(rough)
    assert loss.dtype is torch.float32
    expected = loss_of(exact)
    assert abs(loss.item() - expected.item()) < 10 * ROUNDING[dtype] * expected.item()
    optimizer = adam(rough)
    precision.scale(loss).backward()
    precision.unscale(optimizer)
    expected.backward()
    for (name, ours), theirs in zip(rough.named_parameters(), exact.parameters(), strict=True):
        assert ours.dtype is torch.float32, name
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype is torch.float32, name
        difference = (ours.grad.double() - theirs.grad).norm()
        # the bias of keys has no gradient, softmax takes it out: what is left there is rounding
        assert difference < 60 * ROUNDING[dtype] * (theirs.grad.norm() + 1e-2), name


@pytest.fixture
def wide_output() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, an output matrix of 37,000 rows and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(700, 16, requires_grad=True)
    weight = (torch.randn(37_000, 16) * 16**-0.5).requires_grad_()
    return hidden, weight, torch.randint(1, 37_000, (700,))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_gradient_of_the_output_matrix_survives_a_large_vocabulary(
    dtype: torch.dtype, wide_output: tuple[Tensor, Tensor, Tensor]
) -> None:
    hidden, weight, targets = wide_output
    with Precision(dtype, CPU).autocast():
        loss, nll = smoothed_cross_entropy(hidden, weight, targets, smoothing=0.1)
    found = torch.autograd.grad(loss, (hidden, weight))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    expected = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum")
    assert abs(loss.item() / expected.item() - 1) < 1e-4
    wanted = torch.autograd.grad(expected, exact)
    seldom = torch.ones(len(weight), dtype=torch.bool)
    seldom[targets] = False  # rows whose gradient is made of tiny probabilities alone
    step = ROUNDING.get(dtype, 1e-6)
    for ours, theirs in (
        (found[0], wanted[0]),
        (found[1], wanted[1]),
        (found[1][seldom], wanted[1][seldom]),
    ):
        assert ours.dtype is torch.float32
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < 4 * step


@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradient_of_the_output_matrix_is_summed_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum in half precision stops growing after a few hundred equal terms."""
    monkeypatch.setattr(loss_module, "_ROWS_A_CHUNK", 1)
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 6).expand(3000, 6), torch.randn(11, 6).requires_grad_()
    targets = torch.full((3000,), 5)
    with Precision(dtype, CPU).autocast():
        loss, _ = smoothed_cross_entropy(hidden, weight, targets, smoothing=0.1)
    (found,) = torch.autograd.grad(loss, weight)
    exact = weight.detach().double().requires_grad_()
    logits = hidden.double() @ exact.T
    expected = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum")
    (wanted,) = torch.autograd.grad(expected, exact)
    assert (found.double() - wanted).norm() < 4 * ROUNDING[dtype] * wanted.norm()


def test_gradients_too_small_for_float16_survive_by_scaling() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    x = torch.randn(8, 4)

    def gradient(*, scaled: bool) -> Tensor:
        layer.zero_grad()
        precision = Precision(torch.float16, CPU)
        with precision.autocast():
            loss = (layer(x).float() * 1e-9).sum()
        (precision.scale(loss) if scaled else loss).backward()
        if scaled:
            precision.unscale(adam(layer))
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    wanted = 1e-9 * x.sum(0).expand(4, 4)
    assert (gradient(scaled=False) == 0).all()
    torch.testing.assert_close(gradient(scaled=True), wanted, rtol=2e-2, atol=1e-10)


def test_an_overflow_halves_the_scale_and_shows_in_the_gradient() -> None:
    layer, precision = nn.Linear(4, 4), Precision(torch.float16, CPU)
    optimizer = adam(layer)
    before = precision.state_dict()["scale"]
    with precision.autocast():
        loss = (layer(torch.randn(8, 4)).float() * 1e30).sum()
    precision.scale(loss).backward()
    precision.unscale(optimizer)
    assert not torch.isfinite(nn.utils.clip_grad_norm_(layer.parameters(), float("inf")))
    precision.update()
    assert precision.state_dict()["scale"] == before / 2
    assert precision.can_lower_scale


def test_a_resumed_run_goes_on_with_its_scale() -> None:
    first = Precision(torch.float16, CPU)
    layer = nn.Linear(4, 4)
    optimizer = adam(layer)
    precision_loss = layer(torch.full((1, 4), float("inf"))).sum()
    first.scale(precision_loss).backward()
    first.unscale(optimizer)
    first.update()
    second = Precision(torch.float16, CPU)
    assert second.state_dict() != first.state_dict()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_float16_scales(dtype: torch.dtype) -> None:
    precision = Precision(dtype, CPU)
    assert precision.scale(torch.tensor(3.0)).item() == 3.0
    assert precision.state_dict() == {}
    assert not precision.can_lower_scale
    precision.load_state_dict({})


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_forty_steps_learn_as_in_float64(dtype: torch.dtype) -> None:
    def losses(model: Transformer, dtype: torch.dtype) -> list[float]:
        precision, optimizer = Precision(dtype, CPU), adam(model)
        found = []
        for _ in range(40):
            with precision.autocast():
                loss = loss_of(model)
            precision.scale(loss).backward()
            precision.unscale(optimizer)
            precision.step(optimizer, 3e-3)
            precision.update()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    exact = losses(tiny_model().double(), torch.float32)
    found = losses(tiny_model(), dtype)
    assert exact[-1] < exact[0] - 1
    assert found == pytest.approx(exact, rel=1e-4 if dtype is torch.float32 else 3e-2)


@pytest.mark.parametrize("choice", list(DType))
def test_a_processor_has_every_format_and_float32_by_default(choice: DType) -> None:
    wanted = "float32" if choice is DType.auto else choice.value
    assert find_dtype(choice, CPU) is getattr(torch, wanted)


def test_a_format_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(DeviceError, match="dtype=float16: mps here has no float16; use dtype=flo"):
        find_dtype(DType.float16, torch.device("mps"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tf32_is_off_unless_asked_for() -> None:
    device = torch.device("cuda")
    for asked, name in ((True, "high"), (False, "highest")):
        Precision(torch.float32, device, tf32=asked)
        assert torch.get_float32_matmul_precision() == name
