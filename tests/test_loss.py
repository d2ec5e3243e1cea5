"""The loss against its definition in float64, and its rounding in half precision."""

from __future__ import annotations

import itertools
import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from tiny import assert_near, exact_copies, tiny_model
from torch import Tensor, nn

from nmt.data.tokenizer import Tokenizer
from nmt.training import loss
from nmt.training.batches import make_batch
from nmt.training.compiled import Compiler
from nmt.training.loss import smoothed_cross_entropy

NUM_WORDS = 11
WIDTH = 6
EPSILONS = [0.0, 0.1, 0.5]
SOFTMAXES = [loss.eager_softmax_loss, loss.softmax_loss_for_compiler]
HALVES = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of one operand


def by_definition(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Sum -q log p with an explicit q, one token at a time."""
    loss_sum = nll_sum = torch.zeros((), dtype=torch.float64)
    for vector, target in zip(hidden, targets.tolist(), strict=True):
        exponentials = (weight @ vector).exp()
        log_p = (exponentials / exponentials.sum()).log()  # (V,)
        q = torch.full((len(weight),), smoothing / len(weight), dtype=torch.float64)
        q[target] += 1 - smoothing
        assert math.isclose(float(q.sum()), 1.0)
        loss_sum = loss_sum - (q * log_p).sum()
        nll_sum = nll_sum - log_p[target]
    return loss_sum, nll_sum


def example(count: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states, an output weight and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(count, WIDTH)
    weight = torch.randn(NUM_WORDS, WIDTH)
    targets = torch.randint(1, NUM_WORDS, (count,))
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def test_value_and_gradients_equal_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    for smoothing, chunk, softmax in itertools.product(EPSILONS, (512, 4, 1), SOFTMAXES):
        monkeypatch.setattr(loss, "CPU_CHUNK_ROWS", chunk)
        hidden, weight, targets = example()
        exact = exact_copies(hidden, weight)
        options = {"smoothing": smoothing, "softmax_loss": softmax}
        sums = smoothed_cross_entropy(hidden, weight, targets, **options)
        expected = by_definition(exact[0], exact[1], targets, smoothing)
        assert_near([x.double() for x in sums], expected, smoothing, rtol=1e-6)
        assert not sums[1].requires_grad
        (sums[0] * 0.25).backward()  # the factor must reach the gradients
        (expected[0] * 0.25).backward()
        gradients = [hidden.grad.double(), weight.grad.double()]
        assert_near(gradients, [x.grad for x in exact], smoothing)


def test_smoothing_leaves_out_the_ids_that_round_up_the_vocabulary() -> None:
    used = NUM_WORDS - 3
    for softmax in SOFTMAXES:
        hidden, weight, targets = example()
        targets = targets.clamp(max=used - 1)
        exact = exact_copies(hidden, weight)
        options = {"smoothing": 0.3, "softmax_loss": partial(softmax, used_size=used)}
        loss_sum, _ = smoothed_cross_entropy(hidden, weight, targets, **options)
        log_probs = (exact[0] @ exact[1].T).log_softmax(-1)  # of all ids
        nll = -log_probs.gather(1, targets[:, None]).sum()
        expected = 0.7 * nll - 0.3 * log_probs[:, :used].mean(-1).sum()
        torch.testing.assert_close(loss_sum.double(), expected, atol=1e-5, rtol=1e-6)
        loss_sum.backward()
        expected.backward()
        torch.testing.assert_close(weight.grad.double(), exact[1].grad, atol=1e-5, rtol=1e-5)


def r_drop_by_definition(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, alpha: float
) -> tuple[Tensor, Tensor]:
    """Liang et al. (2021): the mean over two passes, and both directions of the KL divergence."""
    loss_sum, nll_sum = by_definition(hidden, weight, targets.repeat_interleave(2), smoothing)
    first = (hidden[0::2] @ weight.T).log_softmax(-1)
    second = (hidden[1::2] @ weight.T).log_softmax(-1)
    divergence = ((first.exp() - second.exp()) * (first - second)).sum()
    return loss_sum / 2 + alpha / 4 * divergence, nll_sum / 2


def simcut_by_definition(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, alpha: float
) -> tuple[Tensor, Tensor]:
    """Gao et al. (2022): the loss of whole inputs, and the KL divergence of cut inputs."""
    loss_sum, nll_sum = by_definition(hidden[0::2], weight, targets, smoothing)
    full = (hidden[0::2] @ weight.T).log_softmax(-1)
    cut = (hidden[1::2] @ weight.T).log_softmax(-1)
    divergence = nn.functional.kl_div(cut, full, reduction="sum", log_target=True)
    return loss_sum + alpha * divergence, nll_sum


@pytest.mark.parametrize(
    ("make_loss", "definition"),
    [(loss.r_drop_loss, r_drop_by_definition), (loss.simcut_loss, simcut_by_definition)],
)
def test_losses_of_two_passes_equal_their_definition_whatever_the_chunks(
    monkeypatch: pytest.MonkeyPatch, make_loss: Any, definition: Any
) -> None:
    for smoothing, alpha, chunk in itertools.product((0.0, 0.1), (0.5, 5.0), (512, 4, 2)):
        monkeypatch.setattr(loss, "CPU_CHUNK_ROWS", chunk)
        hidden, weight, targets = example()
        exact = exact_copies(hidden, weight)
        options = {"smoothing": smoothing, "softmax_loss": make_loss(alpha)}
        repeated = targets[:6].repeat_interleave(2)
        sums = smoothed_cross_entropy(hidden, weight, repeated, **options)
        expected = definition(exact[0], exact[1], targets[:6], smoothing, alpha)
        assert_near([x.double() for x in sums], expected, smoothing, rtol=1e-6)
        sums[0].backward()
        expected[0].backward()
        gradients = [hidden.grad.double(), weight.grad.double()]
        assert_near(gradients, [x.grad for x in exact], smoothing, atol=2e-5)


def test_the_negative_log_likelihood_knows_no_smoothing_and_no_tokens_have_loss_0() -> None:
    hidden, weight, targets = example()
    loss_sums = set()
    for smoothing in EPSILONS:
        loss_sum, nll_sum = smoothed_cross_entropy(hidden, weight, targets, smoothing=smoothing)
        loss_sums.add(loss_sum.item())
        assert nll_sum.item() in loss_sums  # equals the loss without smoothing
    assert len(loss_sums) == 3
    none = smoothed_cross_entropy(hidden[:0], weight, targets[:0], smoothing=0.1)
    assert (none[0].item(), none[1].item()) == (0.0, 0.0)
    assert not torch.autograd.grad(none[0], weight)[0].any()


def exact_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return torch's loss and gradients in float64, after its own matrix of all logits."""
    exact = exact_copies(hidden, weight)
    logits = exact[0] @ exact[1].T
    loss = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum")
    return loss, torch.autograd.grad(loss, exact)


# --- half precision


def test_the_gradient_of_the_output_layer_survives_a_large_vocabulary() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(24, 16, requires_grad=True)
    weight = (torch.randn(37_000, 16) * 16**-0.5).requires_grad_()
    targets = torch.randint(1, 37_000, (24,))
    expected, exact_gradients = exact_loss(hidden, weight, targets)
    rare = torch.ones(len(weight), dtype=torch.bool)
    rare[targets] = False  # rows whose gradient is a sum of tiny probabilities
    for dtype, softmax in itertools.product([torch.float32, *HALVES], SOFTMAXES):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            sums = smoothed_cross_entropy(
                hidden, weight, targets, smoothing=0.1, softmax_loss=softmax
            )
        assert sums[0].dtype is sums[1].dtype is torch.float32
        assert abs(sums[0].item() / expected.item() - 1) < 1e-4, dtype
        gradients = torch.autograd.grad(sums[0], (hidden, weight))
        pairs = [
            *zip(gradients, exact_gradients, strict=True),
            (gradients[1][rare], exact_gradients[1][rare]),
        ]
        for ours, theirs in pairs:
            assert ours.dtype is torch.float32
            limit = 4 * ROUNDING.get(dtype, 1e-6)
            assert ((ours.double() - theirs).norm() / theirs.norm()).item() < limit, dtype


def test_the_gradient_of_the_output_layer_is_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sum in half precision stops growing after a few hundred equal terms."""
    monkeypatch.setattr(loss, "CPU_CHUNK_ROWS", 1)
    torch.manual_seed(0)
    hidden = torch.randn(1, 6).expand(1000, 6)
    weight = torch.randn(11, 6).requires_grad_()
    targets = torch.full((1000,), 5)
    exact_gradient = exact_loss(hidden, weight, targets)[1][1]
    for dtype in HALVES:
        with torch.autocast("cpu", dtype=dtype):
            total, _ = smoothed_cross_entropy(hidden, weight, targets, smoothing=0.1)
        (gradient,) = torch.autograd.grad(total, weight)
        assert (gradient.double() - exact_gradient).norm() < 4 * ROUNDING[
            dtype
        ] * exact_gradient.norm(), dtype


@pytest.mark.long
def test_simcut_compiled_by_layer_has_the_loss_and_gradients_of_plain_simcut(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_eagerly = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    monkeypatch.setattr(loss, "CUT_PROB", 0.3)
    draw = random.Random(0)
    pairs = []
    for length in (9, 3, 14):
        pairs.append([draw.choices(range(4, 300), k=length) for _ in range(2)])
    batch = make_batch(pairs, tokenizer, round_to=8)

    def compute(compiler: Compiler | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = tiny_model(vocab_size=tokenizer.vocab_size)  # without dropout
        objective = loss.Objective(
            model,
            smoothing=0.1,
            simcut=3.0,
            compiler=compiler,
            uncut_ids={model.embedding: torch.tensor([tokenizer.eos_id, tokenizer.bos_id])},
        )
        torch.manual_seed(5)  # of the cut embeddings
        loss_sum, nll_sum = objective(batch)
        loss_sum.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return loss_sum, nll_sum, gradients

    torch.compiler.reset()
    compiler = Compiler(by_layer=True)
    num_graphs = compiler.num_graphs
    expected = compute(None)
    assert compiler.num_graphs == num_graphs
    actual = compute(compiler)
    assert compiler.num_graphs == num_graphs + 3  # two layers and the loss
    assert expected[0] > expected[1] + 1  # the passes differ
    assert_near(actual, expected, atol=1e-4, rtol=1e-4)
