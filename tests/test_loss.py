"""Label smoothing against its definition, written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import PAD
from torch import Tensor

from nmt.data.batch import make_batch
from nmt.data.tokenizer import Tokenizer
from nmt.training import loss
from nmt.training.loss import smoothed_cross_entropy

NUM_WORDS, WIDTH = 11, 6
EPSILONS = [0.0, 0.1, 0.5]


def by_definition(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, int]:
    """Sum -q log p with an explicit q over the positions that are not padding, one at a time."""
    loss_sum = nll_sum = torch.zeros((), dtype=torch.float64)
    num_tokens = 0
    for vector, wanted in zip(hidden.flatten(0, 1), targets.flatten().tolist(), strict=True):
        if wanted == PAD:
            continue
        exponentials = (weight @ vector).exp()
        log_p = (exponentials / exponentials.sum()).log()  # (V,)
        q = torch.full((len(weight),), smoothing / len(weight), dtype=torch.float64)
        q[wanted] += 1 - smoothing
        assert math.isclose(float(q.sum()), 1.0)
        loss_sum = loss_sum - (q * log_p).sum()
        nll_sum = nll_sum - log_p[wanted]
        num_tokens += 1
    return loss_sum, nll_sum, num_tokens


def example(
    batch: int = 3, length: int = 5, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states, an output matrix and targets with padding on the right."""
    torch.manual_seed(0)
    hidden = torch.randn(batch, length, WIDTH, dtype=dtype)
    weight = torch.randn(NUM_WORDS, WIDTH, dtype=dtype)
    targets = torch.randint(1, NUM_WORDS, (batch, length))
    for row in range(batch):
        targets[row, length - row % length :] = PAD
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("chunk", [512, 4, 1])
@pytest.mark.parametrize("smoothing", EPSILONS)
def test_value_and_gradients_equal_the_definition(
    smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_ROWS_A_CHUNK", chunk)
    hidden, weight, targets = example()
    exact_hidden, exact_weight, _ = example()
    exact_hidden = exact_hidden.detach().double().requires_grad_()
    exact_weight = exact_weight.detach().double().requires_grad_()
    found = smoothed_cross_entropy(hidden, weight, targets, smoothing=smoothing, pad_id=PAD)
    expected = by_definition(exact_hidden, exact_weight, targets, smoothing)
    torch.testing.assert_close(found[0].double(), expected[0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found[1].double(), expected[1], atol=1e-5, rtol=1e-6)
    assert found[2] == expected[2] == 5 + 4 + 3
    (found[0] * 0.25).backward()  # the factor must reach the gradients
    (expected[0] * 0.25).backward()
    for ours, theirs in ((hidden, exact_hidden), (weight, exact_weight)):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("smoothing", EPSILONS)
def test_it_equals_torchs_cross_entropy_over_several_chunks(smoothing: float) -> None:
    hidden, weight, targets = example(batch=40, length=50)
    assert (targets != PAD).sum() > 1000 > loss._ROWS_A_CHUNK
    found, nll, _ = smoothed_cross_entropy(hidden, weight, targets, smoothing=smoothing, pad_id=PAD)
    logits, wanted = (hidden @ weight.T).flatten(0, 1), targets.flatten()
    settings = {"reduction": "sum", "ignore_index": PAD}
    expected = torch.nn.functional.cross_entropy(
        logits, wanted, label_smoothing=smoothing, **settings
    )
    plain = torch.nn.functional.cross_entropy(logits, wanted, **settings)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(nll, plain, rtol=1e-5, atol=1e-3)
    gradients = torch.autograd.grad(found, (hidden, weight))
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected, (hidden, weight)), rtol=1e-4, atol=1e-4
    )


def test_without_smoothing_the_loss_is_the_negative_log_likelihood() -> None:
    loss_sum, nll_sum, _ = smoothed_cross_entropy(*example(), smoothing=0.0, pad_id=PAD)
    assert loss_sum == nll_sum


def test_the_negative_log_likelihood_knows_no_smoothing() -> None:
    sums = [smoothed_cross_entropy(*example(), smoothing=e, pad_id=PAD) for e in EPSILONS]
    assert sums[0][1] == sums[1][1] == sums[2][1]
    assert len({loss_sum.item() for loss_sum, _, _ in sums}) == 3
    assert not sums[1][1].requires_grad


@pytest.mark.parametrize("num_padding", [1, 5, 50])
def test_padding_changes_neither_sums_nor_gradients(num_padding: int) -> None:
    hidden, weight, targets = example()
    plain = smoothed_cross_entropy(hidden, weight, targets, smoothing=0.1, pad_id=PAD)
    wanted = torch.autograd.grad(plain[0], (hidden, weight))
    wider = torch.nn.functional.pad(hidden.detach(), (0, 0, 0, num_padding), value=7.0)
    wider.requires_grad_()
    padded_targets = torch.nn.functional.pad(targets, (0, num_padding), value=PAD)
    padded = smoothed_cross_entropy(wider, weight, padded_targets, smoothing=0.1, pad_id=PAD)
    assert [v.item() for v in padded[:2]] == [v.item() for v in plain[:2]]
    assert padded[2] == plain[2]
    found = torch.autograd.grad(padded[0], (wider, weight))
    assert torch.equal(found[0][:, : targets.size(1)], wanted[0])
    assert (found[0][padded_targets == PAD] == 0).all()
    assert torch.equal(found[1], wanted[1])


def test_padding_alone_has_loss_0_and_gradient_0() -> None:
    hidden, weight, targets = example()
    sums = smoothed_cross_entropy(
        hidden, weight, torch.full_like(targets, PAD), smoothing=0.1, pad_id=PAD
    )
    assert (sums[0].item(), sums[1].item(), sums[2]) == (0.0, 0.0, 0)
    sums[0].backward()
    for tensor in (hidden, weight):
        assert tensor.grad is not None
        assert (tensor.grad == 0).all()


def test_sums_are_float32_under_autocast() -> None:
    hidden, weight, targets = example(batch=30, length=30)
    exact = smoothed_cross_entropy(hidden, weight, targets, smoothing=0.1, pad_id=PAD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = smoothed_cross_entropy(
            hidden.bfloat16(), weight, targets, smoothing=0.1, pad_id=PAD
        )
    assert rough[0].dtype is rough[1].dtype is torch.float32
    logits = (hidden.bfloat16() @ weight.bfloat16().T).float().flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(
        logits, targets.flatten(), label_smoothing=0.1, reduction="sum", ignore_index=PAD
    )
    torch.testing.assert_close(rough[0], expected, rtol=1e-5, atol=0)
    gradients = torch.autograd.grad(rough[0], (hidden, weight))
    assert gradients[1].dtype is torch.float32
    wanted = torch.autograd.grad(exact[0], (hidden, weight))
    assert torch.nn.functional.cosine_similarity(
        gradients[1].flatten(), wanted[1].flatten(), dim=0
    ) == pytest.approx(1.0, abs=1e-3)


def test_targets_are_shifted_by_one(tokenizer: Tokenizer) -> None:
    pad, bos, eos = tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id
    batch = make_batch([([10, 11, 12], [20, 21]), ([13], [22, 23, 24, 25])], tokenizer)
    assert batch.src.tolist() == [[10, 11, 12, eos], [13, eos, pad, pad]]
    assert batch.src_lengths.tolist() == [4, 2]
    assert batch.tgt_in.tolist() == [[bos, 20, 21, pad, pad], [bos, 22, 23, 24, 25]]
    assert batch.tgt_out.tolist() == [[20, 21, eos, pad, pad], [22, 23, 24, 25, eos]]
    assert (batch.num_tokens, batch.num_src_tokens) == (3 + 5, 4 + 2)
    assert len({pad, bos, eos, tokenizer.unk_id}) == 4
