"""Products by oneDNN against torch's own: values, gradients, blocks; and dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nmt.model.dropout import Dropout
from nmt.model.products import Embedding, Linear, freeze, linear, product

from nmt.model.fast import linear

HAS_ONEDNN = torch.backends.mkldnn.is_available()
SHAPES = [((7,), 5, 3), ((2, 3), 16, 40), ((65, 3), 32, 96), ((1, 1), 8, 1)]


@pytest.fixture(
    params=[
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")
        ),
    ]
)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Take MKL, then oneDNN, whatever the processor."""
    monkeypatch.setattr(products, "is_onednn_faster", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize(("rows", "inner", "outer"), SHAPES)
def test_values_and_gradients_are_those_of_float64(
    rows: tuple[int, ...], inner: int, outer: int, activation: str, library: bool
) -> None:
    torch.manual_seed(1)
    shapes = ((*rows, inner), (outer, inner), (outer,))
    ours = [torch.randn(shape, requires_grad=True) for shape in shapes]
    theirs = [x.detach().double().requires_grad_() for x in ours]
    y = linear(*ours, activation=activation)
    expected = F.linear(*theirs)
    expected = expected.relu() if activation == "relu" else expected
    error = torch.randn_like(expected)
    y.backward(error.float())
    expected.backward(error)
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, atol=1e-4, rtol=1e-4)


def test_no_rows_and_no_bias_are_fine(library: bool) -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    assert linear(torch.zeros(0, 3), weight).shape == (0, 4)
    x = torch.randn(2, 3)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)
    torch.testing.assert_close(product(x, weight.detach().T), x @ weight.T)


def test_blocks_are_columns_of_the_whole(library: bool) -> None:
    layer, x = Linear(6, 9), torch.randn(4, 5, 6)
    whole = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), whole)
    torch.testing.assert_close(layer.block(x, 3, 9), whole[..., 3:9])
    torch.testing.assert_close(layer.relu(x), whole.relu())


@torch.inference_mode()
def test_frozen_weights_give_the_same(library: bool) -> None:
    layers = torch.nn.ModuleList([Linear(6, 9), Embedding(11, 6)])
    for rows in (1, 4, 64):
        x = torch.randn(rows, 6)
        expected = [layers[0](x), layers[0].block(x, 3, 9), layers[1].logits(x)]
        freeze(layers)
        for _ in range(2):
            found = [layers[0](x), layers[0].block(x, 3, 9), layers[1].logits(x)]
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean_and_the_gradient_agrees(share: float) -> None:
    torch.manual_seed(3)
    x = torch.ones(1000, 101, requires_grad=True)
    y = Dropout(share).train()(x)
    dropped = (y == 0).double().mean().item()
    deviation = (share * (1 - share) / x.numel()) ** 0.5
    assert abs(dropped - share) < 5 * deviation + 2**-16
    kept = y[y != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - share)), atol=0, rtol=1e-4)
    rows_dropped = (y == 0).double().mean(dim=0)  # no place in the row is dropped more often
    assert (rows_dropped - share).abs().max() < 6 * (share * (1 - share) / 1000) ** 0.5
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # of ones, value and gradient are both mask * scale


def test_dropout_depends_on_the_seed_and_nothing_is_dropped_outside_training() -> None:
    layer, x = Dropout(0.3).train(), torch.randn(33, 7)
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)
    assert layer.eval()(x) is x
