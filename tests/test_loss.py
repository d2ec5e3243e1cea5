"""Label smoothing against its definition, written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

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
    """Draw hidden states, an output matrix and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(count, WIDTH, dtype=dtype)
    weight = torch.randn(NUM_WORDS, WIDTH, dtype=dtype)
    targets = torch.randint(1, NUM_WORDS, (count,))
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("softmax", [loss.softmax_in_place, loss.softmax_at_once])
@pytest.mark.parametrize("chunk", [512, 4, 1])
@pytest.mark.parametrize("smoothing", EPSILONS)
def test_value_and_gradients_equal_the_definition(
    smoothing: float, chunk: int, softmax: loss.Softmax, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_ROWS_A_CHUNK", chunk)
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


@pytest.mark.parametrize("softmax", [loss.softmax_in_place, loss.softmax_at_once])
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
