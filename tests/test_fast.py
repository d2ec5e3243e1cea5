"""Each fast kernel, and the accelerated model as a whole, against the plain model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    VOCAB_SIZE,
    decode_by_steps,
    hidden_states,
    plain,
    random_source,
    random_target,
    tiny_config,
    tiny_model,
)
from torch import Tensor, nn

from nmt.config import Norm, Positions
from nmt.model.fast import FastTransformer, accelerate, freeze, layers, packing
from nmt.model.fast.layers import FastDropout, FastLinear, linear, matmul, transposed_matmul
from nmt.model.fast.packing import PackedMask, attend_packed, pack
from nmt.model.transformer import Transformer, attend, causal_mask, padding_mask

HAS_ONEDNN = torch.backends.mkldnn.is_available()
LENGTHS = [7, 3, 5, 1]
MODELS: dict[str, dict[str, Any]] = {
    f"{norm.value}-{layout.value}-{'separate' if separate else 'joint'}": {
        "norm": norm,
        "positions": layout,
        "src_vocab_size": 29 if separate else None,
    }
    for norm, layout, separate in itertools.product(Norm, Positions, (False, True))
}


@pytest.fixture(
    params=[
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")
        ),
    ],
    ids=["MKL", "oneDNN"],
)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Use MKL, then oneDNN, whatever the CPU; the second also fuses the ReLU."""
    monkeypatch.setattr(layers, "is_onednn_faster", lambda: request.param)
    return bool(request.param)


# --- the whole model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "unfused"])
def test_the_accelerated_model_is_the_plain_one_forward_and_backward(
    name: str, is_fused: bool, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass
    model = tiny_model(**MODELS[name])
    twin = plain(model)
    (src, lengths), tgt = random_source(LENGTHS), random_target(len(LENGTHS), 7)
    found, expected = (
        hidden_states(model, src, lengths, tgt),
        hidden_states(twin, src, lengths, tgt),
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    scores = model.logits(found), twin.logits(expected)
    torch.testing.assert_close(*scores, atol=1e-4, rtol=1e-5)
    for logits in scores:
        F.cross_entropy(logits.flatten(0, 1), tgt.roll(-1, 1).flatten()).backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None, name
        torch.testing.assert_close(
            ours.grad, theirs.grad, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_steps_with_frozen_weights_are_the_plain_model_at_once(name: str, library: bool) -> None:
    model = tiny_model(**MODELS[name])
    source, tgt = random_source(LENGTHS), random_target(len(LENGTHS), 20)
    expected = hidden_states(plain(model), *source, tgt)
    for is_frozen in (False, True):
        if is_frozen:
            freeze(model)
        found = decode_by_steps(model, *source, tgt)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        logits = model.logits(found)
        torch.testing.assert_close(logits, plain(model).logits(found), atol=1e-4, rtol=1e-5)
    assert bool(model.encoder_layers[0].feed_forward.inner.reordered) is library
    assert bool(model.reordered) is library


def test_an_accelerated_model_still_takes_boolean_masks_and_records_attention() -> None:
    model, (src, lengths), tgt = tiny_model(), random_source(LENGTHS), random_target(4, 6)
    twin, sources, targets = plain(model), padding_mask(lengths, 7), causal_mask(6)
    expected = twin(src, sources, tgt, targets)
    torch.testing.assert_close(model(src, sources, tgt, targets), expected, atol=1e-5, rtol=1e-5)

    def weights(run: Callable[[dict[Any, Any]], Any], owner: Transformer) -> Tensor:
        layer: Any = owner.decoder_layers[1]
        record: dict[Any, Any] = {layer.cross_attention: None}
        run(record)
        return record[layer.cross_attention]

    wanted = weights(lambda record: twin(src, sources, tgt, targets, record), twin)  # (B, H, T, S)
    packed = pack(LENGTHS), tgt.flatten(), pack([6] * 4)
    ids = packed[0].unpad(src)
    found = weights(lambda record: model(ids, *packed, record), model)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    cache, steps = model.start(src, lengths), []
    for column in tgt.T:
        steps.append(weights(lambda record, ids=column: model.step(ids, cache, record), model))
    stepped = torch.cat(steps, dim=2)  # (B, H, T, S or more)
    torch.testing.assert_close(stepped[..., :7], wanted, atol=1e-5, rtol=1e-5)
    assert (stepped[..., 7:] == 0).all()


def test_accelerating_shares_parameters_and_names() -> None:
    model = Transformer(tiny_config(dropout=0.1), VOCAB_SIZE)
    before, names = list(model.parameters()), list(model.state_dict())
    fast = accelerate(model)
    assert isinstance(fast, FastTransformer)
    assert fast is model
    assert all(one is other for one, other in zip(fast.parameters(), before, strict=True))
    assert list(fast.state_dict()) == names
    plain_kinds = {nn.Linear, nn.Dropout}
    assert not [name for name, m in fast.named_modules() if type(m) in plain_kinds]


@torch.inference_mode()
def test_threads_translate_with_one_model_at_once(library: bool) -> None:
    model = tiny_model()
    freeze(model)

    def decode(seed: int) -> Tensor:
        return decode_by_steps(model, *random_source(LENGTHS, seed), random_target(4, 15, seed))

    expected = [decode(seed) for seed in range(4)]
    freeze(model)  # so that the threads make the copies of the weights
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(torch.inference_mode()(decode), range(4)))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("norm", list(Norm))
def test_under_autocast_the_model_is_the_plain_one_but_for_rounding(norm: Norm) -> None:
    model, source = tiny_model(norm=norm), random_source(LENGTHS)
    tgt = random_target(4, 6)
    exact = hidden_states(plain(model), *source, tgt)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        runs = [hidden_states(plain(model), *source, tgt), hidden_states(model, *source, tgt)]
        runs.append(decode_by_steps(model, *source, tgt))
    for found in runs:
        error = (found - exact).norm() / exact.norm()
        assert 1e-4 < error < 0.02


# --- attention over packed sentences


@pytest.mark.parametrize("is_fused", [True, False])
def test_attention_over_packed_sentences_is_the_plain_one(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass
    torch.manual_seed(0)
    cases = [
        ([3, 7, 1, 5], [3, 7, 1, 5], False),
        ([3, 7, 1, 5], [3, 7, 1, 5], True),
        ([4, 4, 4], [4, 4, 4], True),
        ([3, 7, 1, 5], [6, 2, 4, 1], False),
        ([3, 1, 2], [5, 5, 5], False),
    ]
    for case in cases:
        targets, sources, is_causal = pack(case[0]), pack(case[1]), case[2]
        shapes = [(sum(lengths), 2, 8) for lengths in (case[0], case[1], case[1])]
        inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
        mask = PackedMask(targets, sources, is_causal=is_causal)
        found = attend_packed(*inputs, mask)
        padded = [targets.pad(inputs[0]), sources.pad(inputs[1]), sources.pad(inputs[2])]
        heads, _ = attend(*(x.transpose(1, 2) for x in padded), mask.visible())
        expected = targets.unpad(heads.transpose(1, 2))
        torch.testing.assert_close(found, expected, msg=lambda text, case=case: f"{case}: {text}")
        weights = torch.randn_like(found)
        gradients = [torch.autograd.grad((y * weights).sum(), inputs) for y in (found, expected)]
        torch.testing.assert_close(*gradients, msg=lambda text, case=case: f"{case}: {text}")


def test_a_gradient_through_sentences_without_tokens_is_a_number() -> None:
    x = torch.randn(7, 2, 8, requires_grad=True)
    keys = torch.randn(9, 2, 8, requires_grad=True)
    found = attend_packed(x, keys, keys, PackedMask(pack([4, 3]), pack([9, 0])))
    found[:4].sum().backward()  # the second sentence counts nothing
    alone = attend_packed(x[:4], keys, keys, PackedMask(pack([4]), pack([9])))
    torch.testing.assert_close(found[:4], alone)
    assert x.grad is not None
    assert keys.grad is not None
    assert (x.grad[4:] == 0).all()
    expected = torch.autograd.grad(alone.sum(), [x, keys])
    torch.testing.assert_close([x.grad, keys.grad], [expected[0], expected[1]])


def test_backward_keeps_no_padded_tensor() -> None:
    sentences, saved = pack([10, 1, 1, 1]), []
    inputs = [torch.randn(13, 2, 8, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attend_packed(*inputs, PackedMask(sentences, sentences, is_causal=True))
    assert max(x.numel() for x in saved) == 13 * 2 * 8


def flash_by_loops(
    queries: Tensor, keys: Tensor, values: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
    max_q: int, max_k: int, *, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Do what torch's varlen_attn promises, a sentence at a time."""
    out = torch.zeros_like(queries)
    assert cu_seq_q.dtype is cu_seq_k.dtype is torch.int32
    spans = [itertools.pairwise(ends.tolist()) for ends in (cu_seq_q, cu_seq_k)]
    for (start, end), (first, last) in zip(*spans, strict=True):
        assert end - start <= max_q
        assert last - first <= max_k
        visible = torch.ones(end - start, last - first, dtype=torch.bool)
        mask = {(-1, 0): visible.tril(), (-1, -1): visible}[window_size]
        parts = queries[start:end], keys[first:last], values[first:last]
        heads, _ = attend(*(x.float().transpose(0, 1) for x in parts), mask)  # (H, T, D/H)
        out[start:end] = heads.transpose(0, 1).to(out.dtype)
    return out


@torch.inference_mode()  # a translation may be the first to ask
def test_an_attention_over_variable_lengths_is_tried_against_padding() -> None:
    def blind(*args: Any, window_size: tuple[int, int]) -> Tensor:
        return flash_by_loops(*args, window_size=(-1, -1))

    assert packing._agrees(flash_by_loops, torch.device("cpu"))
    assert not packing._agrees(blind, torch.device("cpu"))


@pytest.mark.parametrize("norm", list(Norm))
def test_a_model_with_attention_over_variable_lengths_is_the_plain_one(norm: Norm) -> None:
    model, (src, lengths), tgt = (
        tiny_model(d_model=32, norm=norm),
        random_source([9, 2, 5]),
        [3, 8, 1],
    )
    calls = []

    def flash(*args: Any, **options: Any) -> Tensor:
        calls.append(args[0].shape)
        return flash_by_loops(*args, **options)

    sources, targets = (replace(pack(x), flash=flash) for x in (lengths.tolist(), tgt))
    ids = random_target(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(sources.unpad(src), sources, targets.unpad(ids), targets)
    assert len(calls) == 2 + 4  # of every attention
    expected = targets.unpad(hidden_states(plain(model), src, lengths, ids))
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)


# --- linear layers


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_values_and_gradients_are_those_of_float64(activation: str, library: bool) -> None:
    torch.manual_seed(1)
    for rows, inner, outer in [((7,), 5, 3), ((2, 3), 16, 40), ((65, 3), 32, 96), ((1, 1), 8, 1)]:
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


def test_matrix_multiplications_without_a_gradient_are_torchs(library: bool) -> None:
    a, b, c = torch.randn(70, 5), torch.randn(5, 9), torch.randn(70, 9)
    torch.testing.assert_close(matmul(a, b), a @ b)
    torch.testing.assert_close(transposed_matmul(a, c), a.T @ c)
    assert linear(torch.zeros(0, 3), torch.randn(4, 3, requires_grad=True)).shape == (0, 4)


@torch.inference_mode()
def test_blocks_are_columns_of_the_whole_and_frozen_ones_too(library: bool) -> None:
    layer = FastLinear(6, 9)
    for rows in (1, 4, 64):
        x = torch.randn(rows, 2, 6)
        whole = F.linear(x, layer.weight, layer.bias)
        for _ in range(3):  # as it is, frozen, frozen again with the copies made
            torch.testing.assert_close(layer(x), whole)
            torch.testing.assert_close(layer.block(x, 3, 9), whole[..., 3:9])
            torch.testing.assert_close(layer.block(x, 0, 9, activation="relu"), whole.relu())
            freeze(layer)


# --- dropout


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean_and_the_gradient_agrees(share: float) -> None:
    torch.manual_seed(3)
    x = torch.ones(1000, 101, requires_grad=True)
    y = FastDropout(share).train()(x)
    dropped = (y == 0).double().mean().item()
    deviation = math.sqrt(share * (1 - share) / x.numel())
    assert abs(dropped - share) < 5 * deviation + 2**-16
    kept = y[y != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - share)), atol=0, rtol=1e-4)
    rows_dropped = (y == 0).double().mean(dim=0)  # no place in the row is dropped more often
    assert (rows_dropped - share).abs().max() < 6 * math.sqrt(share * (1 - share) / 1000)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # of ones, value and gradient are both mask * scale


def test_dropout_depends_on_the_seed_and_nothing_is_dropped_outside_training() -> None:
    layer, x = FastDropout(0.3).train(), torch.randn(33, 7)
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)
    assert layer.eval()(x) is x
