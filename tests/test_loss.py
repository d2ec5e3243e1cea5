"""The loss against its definition in float64, and what half precision may round."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import hidden_states, random_source, random_target, tiny_model
from torch import Tensor, nn

from nmt.config import DType
from nmt.distributed import find_dtype
from nmt.errors import DeviceError
from nmt.model.transformer import Transformer
from nmt.training import loss
from nmt.training.loss import smoothed_cross_entropy

NUM_WORDS, WIDTH = 11, 6
EPSILONS = [0.0, 0.1, 0.5]


def by_definition(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Sum -q log p with an explicit q, one token at a time."""
    loss_sum = nll_sum = torch.zeros((), dtype=torch.float64)
    for vector, wanted in zip(hidden, targets.tolist(), strict=True):
        exponentials = (weight @ vector).exp()
        log_p = (exponentials / exponentials.sum()).log()  # (V,)
        q = torch.full((len(weight),), smoothing / len(weight), dtype=torch.float64)
        q[wanted] += 1 - smoothing
        assert math.isclose(float(q.sum()), 1.0)
        loss_sum = loss_sum - (q * log_p).sum()
        nll_sum = nll_sum - log_p[wanted]
    return loss_sum, nll_sum


def example(count: int = 12, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states, an output weight and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(count, WIDTH, dtype=dtype)
    weight = torch.randn(NUM_WORDS, WIDTH, dtype=dtype)
    targets = torch.randint(1, NUM_WORDS, (count,))
    return hidden.requires_grad_(), weight.requires_grad_(), targets


SOFTMAXES = [loss.softmax_in_place, loss.softmax_at_once]


def test_value_and_gradients_equal_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    for smoothing, chunk, softmax in itertools.product(EPSILONS, (512, 4, 1), SOFTMAXES):
        monkeypatch.setattr(loss, "_ROWS_A_CHUNK", chunk)
        check_against_definition(smoothing, softmax)


def check_against_definition(smoothing: float, softmax: loss.Softmax) -> None:
    hidden, weight, targets = example()
    exact_hidden, exact_weight, _ = example()
    exact_hidden = exact_hidden.detach().double().requires_grad_()
    exact_weight = exact_weight.detach().double().requires_grad_()
    found = smoothed_cross_entropy(hidden, weight, targets, smoothing=smoothing, softmax=softmax)
    expected = by_definition(exact_hidden, exact_weight, targets, smoothing)
    torch.testing.assert_close(found[0].double(), expected[0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found[1].double(), expected[1], atol=1e-5, rtol=1e-6)
    (found[0] * 0.25).backward()  # the factor must reach the gradients
    (expected[0] * 0.25).backward()
    for ours, theirs in ((hidden, exact_hidden), (weight, exact_weight)):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("smoothing", EPSILONS)
def test_it_equals_torchs_cross_entropy_over_several_chunks(smoothing: float) -> None:
    hidden, weight, targets = example(1100)
    assert len(targets) > 2 * loss._ROWS_A_CHUNK
    found, nll = smoothed_cross_entropy(hidden, weight, targets, smoothing=smoothing)
    logits = hidden @ weight.T
    expected = torch.nn.functional.cross_entropy(
        logits, targets, label_smoothing=smoothing, reduction="sum"
    )
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(nll, plain, rtol=1e-5, atol=1e-3)
    gradients = torch.autograd.grad(found, (hidden, weight))
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected, (hidden, weight)), rtol=1e-4, atol=1e-4
    )


def test_without_smoothing_the_loss_is_the_negative_log_likelihood() -> None:
    loss_sum, nll_sum = smoothed_cross_entropy(*example(), smoothing=0.0)
    assert loss_sum == nll_sum


def test_the_negative_log_likelihood_knows_no_smoothing() -> None:
    sums = [smoothed_cross_entropy(*example(), smoothing=e) for e in EPSILONS]
    assert sums[0][1] == sums[1][1] == sums[2][1]
    assert len({loss_sum.item() for loss_sum, _ in sums}) == 3
    assert not sums[1][1].requires_grad


def test_no_tokens_have_loss_0_and_gradient_0() -> None:
    hidden, weight, targets = example()
    sums = smoothed_cross_entropy(hidden[:0], weight, targets[:0], smoothing=0.1)
    assert (sums[0].item(), sums[1].item()) == (0.0, 0.0)
    sums[0].backward()
    for tensor in (hidden, weight):
        assert tensor.grad is not None
        assert (tensor.grad == 0).all()


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_sums_are_float32_under_autocast(softmax: loss.Softmax) -> None:
    hidden, weight, targets = example(900)
    exact = smoothed_cross_entropy(hidden, weight, targets, smoothing=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = smoothed_cross_entropy(
            hidden.bfloat16(), weight, targets, smoothing=0.1, softmax=softmax
        )
    assert rough[0].dtype is rough[1].dtype is torch.float32
    logits = (hidden.bfloat16() @ weight.bfloat16().T).float()
    expected = torch.nn.functional.cross_entropy(
        logits, targets, label_smoothing=0.1, reduction="sum"
    )
    torch.testing.assert_close(rough[0], expected, rtol=1e-5, atol=0)
    gradients = torch.autograd.grad(rough[0], (hidden, weight))
    assert gradients[1].dtype is torch.float32
    wanted = torch.autograd.grad(exact[0], (hidden, weight))
    assert torch.nn.functional.cosine_similarity(
        gradients[1].flatten(), wanted[1].flatten(), dim=0
    ) == pytest.approx(1.0, abs=1e-3)


# --- half precision

CPU = torch.device("cpu")
HALVES = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of one operand


def autocast(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32)


def loss_of(model: Transformer) -> Tensor:
    src, src_lengths = random_source([5, 3, 4, 9])
    tgt = random_target(4, 6)
    hidden = hidden_states(model, src, src_lengths, tgt).flatten(0, 1)
    wanted = tgt.roll(-1, dims=1)
    weight = model.embedding.weight
    total, _ = smoothed_cross_entropy(hidden, weight, wanted.flatten(), smoothing=0.1)
    return total / wanted.numel()


@pytest.mark.parametrize("dtype", HALVES)
def test_loss_and_gradient_are_those_of_float64_but_for_rounding(dtype: torch.dtype) -> None:
    rough, exact = tiny_model(), tiny_model().double()
    scale = 2.0**12  # without one, float16 loses small gradients
    with torch.autocast("cpu", dtype=dtype):
        found = loss_of(rough)
    assert found.dtype is torch.float32
    expected = loss_of(exact)
    assert abs(found.item() - expected.item()) < 10 * ROUNDING[dtype] * expected.item()
    (found * scale).backward()
    expected.backward()
    for (name, ours), theirs in zip(rough.named_parameters(), exact.parameters(), strict=True):
        assert ours.dtype is torch.float32, name
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype is torch.float32, name
        difference = (ours.grad.double() / scale - theirs.grad).norm()
        # the bias of keys has no gradient, softmax takes it out: what is left there is rounding
        assert difference < 60 * ROUNDING[dtype] * (theirs.grad.norm() + 1e-2), name


@pytest.fixture
def wide_output() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, an output weight of 37,000 rows and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(700, 16, requires_grad=True)
    weight = (torch.randn(37_000, 16) * 16**-0.5).requires_grad_()
    return hidden, weight, torch.randint(1, 37_000, (700,))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_gradient_of_the_output_layer_survives_a_large_vocabulary(
    dtype: torch.dtype, wide_output: tuple[Tensor, Tensor, Tensor]
) -> None:
    hidden, weight, targets = wide_output
    with autocast(dtype):
        total, _ = smoothed_cross_entropy(hidden, weight, targets, smoothing=0.1)
    found = torch.autograd.grad(total, (hidden, weight))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    expected = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum")
    assert abs(total.item() / expected.item() - 1) < 1e-4
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
def test_the_gradient_of_the_output_layer_is_summed_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum in half precision stops growing after a few hundred equal terms."""
    monkeypatch.setattr(loss, "_ROWS_A_CHUNK", 1)
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 6).expand(3000, 6), torch.randn(11, 6).requires_grad_()
    targets = torch.full((3000,), 5)
    with autocast(dtype):
        total, _ = smoothed_cross_entropy(hidden, weight, targets, smoothing=0.1)
    (found,) = torch.autograd.grad(total, weight)
    exact = weight.detach().double().requires_grad_()
    logits = hidden.double() @ exact.T
    expected = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum")
    (wanted,) = torch.autograd.grad(expected, exact)
    assert (found.double() - wanted).norm() < 4 * ROUNDING[dtype] * wanted.norm()


@pytest.mark.parametrize("choice", list(DType))
def test_a_cpu_has_every_format_and_float32_by_default(choice: DType) -> None:
    wanted = "float32" if choice is DType.auto else choice.value
    assert find_dtype(choice, CPU) is getattr(torch, wanted)


def test_a_format_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(DeviceError, match="dtype=float16: mps here has no float16; use dtype=flo"):
        find_dtype(DType.float16, torch.device("mps"))
