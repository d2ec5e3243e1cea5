"""Each fast kernel, and the accelerated model as a whole, against the plain one: packed sentences,
steps with a cache, dropout in its places, activation checkpointing.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import (
    VOCAB_SIZE,
    assert_near,
    decode_by_steps,
    hidden_states,
    plain,
    random_source,
    random_target,
    tiny_config,
    tiny_model,
)
from torch import Tensor, nn

from nmt.checkpoint import ModelInfo, load_info, save_model
from nmt.config import ModelConfig, Norm, Positions, SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.model import fast
from nmt.model.fast import FastTransformer, accelerate, freeze, layers
from nmt.model.fast.cache import BeamGrid
from nmt.model.fast.layers import FastDropout, FastLinear, linear, transposed_matmul
from nmt.model.fast.packing import PackedContext, attend_packed, pack
from nmt.model.fast.top import NEG_INF, Candidates, best_candidates, likeliest
from nmt.model.transformer import Transformer, attend, causal_mask, padding_mask
from nmt.runtime.manifest import write_manifest
from nmt.training.batches import make_batch
from nmt.training.loss import Objective

LENGTHS = [7, 3, 5, 1]
B, S, T, D, D_FF, LAYERS = 4, 7, 6, 16, 32, 2
EVERYWHERE = {
    "embedding_dropout": 0.11,
    "dropout": 0.22,
    "attention_dropout": 0.33,
    "activation_dropout": 0.44,
}


@pytest.fixture(params=[False, True], ids=["MKL", "oneDNN"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Use MKL, then oneDNN, whatever the CPU; the second also fuses the ReLU."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(layers, "is_onednn_faster", lambda _num_packed=0: request.param)
    return bool(request.param)


def test_onednn_multiplies_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(layers, "Path", lambda _: tmp_path / "cpuinfo")
    found = {}
    for vendor in ("AuthenticAMD", "GenuineIntel"):
        (tmp_path / "cpuinfo").write_text(f"vendor_id : {vendor}")
        for capability in ("AVX512", "AVX2", "DEFAULT"):
            monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda c=capability: c)
            sizes = (0, 1 << 18, 1 << 20)
            faster = [layers.is_onednn_faster.__wrapped__(size) for size in sizes]
            found[vendor, capability] = faster
    assert {key for key, faster in found.items() if any(faster)} == {
        ("AuthenticAMD", "AVX512"),
        ("AuthenticAMD", "AVX2"),
    }
    assert found["AuthenticAMD", "AVX512"] == [True, True, True]
    assert found["AuthenticAMD", "AVX2"] == [False, False, True]  # large and packed


def models() -> Iterator[tuple[str, FastTransformer]]:
    """Make a model of each norm, layout of positions, number of vocabularies, and depth."""
    for norm, layout, src_vocab_size in itertools.product(Norm, Positions, (None, 29)):
        case = f"{norm.value} {layout.value} {src_vocab_size}"
        depth = 3 if src_vocab_size else 1
        shape = {"norm": norm, "positions": layout, "num_heads": 2, "num_decoder_layers": depth}
        yield case, tiny_model(src_vocab_size=src_vocab_size, **shape)


def forward(model: Transformer) -> Tensor:
    return hidden_states(model, *random_source(LENGTHS), random_target(B, T))


# --- the whole model


def test_the_accelerated_model_is_the_plain_one_forward_and_backward(library: bool) -> None:
    tgt = random_target(B, T)
    for case, model in models():
        twin = plain(model)
        found, expected = forward(model), forward(twin)
        assert_near(found, expected, case)
        scores = model.logits(found), twin.logits(expected)
        assert_near(*scores, case, atol=1e-4)
        for logits in scores:
            F.cross_entropy(logits.flatten(0, 1), tgt.roll(-1, 1).flatten()).backward()
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None, name
            assert_near(ours.grad, theirs.grad, (case, name), rtol=1e-4)


@pytest.mark.slow
@torch.inference_mode()
def test_steps_with_frozen_weights_are_the_plain_model_at_once(library: bool) -> None:
    source, tgt = random_source(LENGTHS), random_target(B, 20)
    for case, model in models():
        twin = plain(model)
        expected = hidden_states(twin, *source, tgt)
        for _ in range(2):  # as it is, then frozen
            found = decode_by_steps(model, *source, tgt)
            assert_near(found, expected, case)
            assert_near(model.logits(found), twin.logits(found), case, atol=1e-4)
            freeze(model)
        decode_by_steps(model, *source, tgt)
        assert bool(model.encoder_layers[0].feed_forward.inner.reordered) is library
        model.logits(found)
        assert bool(model.reordered) is library


@torch.inference_mode()
def test_weights_frozen_in_bfloat16_are_packed_once_and_change_nothing_but_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not layers.can_reorder() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this torch or CPU has no products of bfloat16")
    monkeypatch.setattr("nmt.model.fast.multiplies_bfloat16", lambda: True)
    source, tgt = random_source(LENGTHS), random_target(B, 20)
    for case, model in models():
        exact = hidden_states(plain(model), *source, tgt)
        assert freeze(model, torch.bfloat16) is torch.float32, case  # autocast has nothing to do
        found = decode_by_steps(model, *source, tgt)
        assert found.dtype is torch.float32, case
        assert 1e-4 < (found - exact).norm() / exact.norm() < 0.02, case
        packed = [
            (module, dict(module.reordered))
            for module in model.modules()
            if isinstance(module, FastLinear)
        ]
        decode_by_steps(model, *source, tgt)
        for module, copies in packed:
            assert copies, case
            assert all(module.reordered[key] is both for key, both in copies.items()), case
            assert all(both[0].dtype is torch.bfloat16 for both in copies.values()), case


@torch.no_grad()
def test_an_accelerated_model_still_takes_boolean_masks_and_records_attention() -> None:
    model, (src, lengths), tgt = tiny_model(), random_source(LENGTHS), random_target(B, T)
    twin, masks = plain(model), (padding_mask(lengths, S), causal_mask(T))

    def record_of(owner: Transformer) -> tuple[Any, dict[Any, Any]]:
        module: Any = owner.decoder_layers[1]
        return module.cross_attention, {module.cross_attention: None}

    attention, record = record_of(twin)
    expected = twin(src, masks[0], tgt, masks[1], record)
    wanted = record[attention]  # (B, H, T, S)
    assert_near(model(src, masks[0], tgt, masks[1]), expected)
    attention, record = record_of(model)
    sources, targets = pack(LENGTHS), pack([T] * B)
    model(sources.unpad(src), sources, tgt.flatten(), targets, record)
    assert_near(record[attention], wanted)
    cache, steps = model.start(src, lengths), []
    for column in tgt.T:
        model.step(column, cache, record)
        steps.append(record[attention])
    stepped = torch.cat(steps, dim=2)  # (B, H, T, S or more)
    assert_near(stepped[..., :S], wanted)
    assert (stepped[..., S:] == 0).all()


@torch.inference_mode()
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_batch_encoded_in_pieces_is_that_of_the_plain_model(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "_ENCODED_TOKENS", size)
    for positions in (Positions.sinusoidal, Positions.rotary):
        model, (src, lengths) = tiny_model(positions=positions), random_source(LENGTHS)
        expected = plain(model).encode(src, padding_mask(lengths, S))  # (B, S, D)
        assert_near(model.encode_padded(src, lengths)[0], pack(LENGTHS).unpad(expected))
    model = tiny_model(positions=Positions.rotary, source_eos=False)
    expected, _ = model.encode_padded(src[:2], lengths[:2])
    lengths[2:] = 1  # EOS alone, which the encoder does not read, maybe in a piece by itself
    assert_near(model.encode_padded(src, lengths)[0], expected)


def test_accelerating_shares_parameters_and_names() -> None:
    model = Transformer(tiny_config(dropout=0.1), VOCAB_SIZE)
    before, names = list(model.parameters()), list(model.state_dict())
    fast = accelerate(model)
    assert isinstance(fast, FastTransformer)
    assert fast is model
    assert all(one is other for one, other in zip(fast.parameters(), before, strict=True))
    assert list(fast.state_dict()) == names
    assert not {nn.Linear, nn.Dropout} & {type(module) for module in fast.modules()}


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
    assert_near(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_under_autocast_the_model_is_the_plain_one_but_for_rounding() -> None:
    for case, model in models():
        exact = forward(plain(model))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            runs = [forward(plain(model)), forward(model)]
            runs.append(decode_by_steps(model, *random_source(LENGTHS), random_target(B, T)))
        for found in runs:
            assert 1e-4 < (found - exact).norm() / exact.norm() < 0.02, case


# --- packed sentences


def test_padding_and_back_is_the_same() -> None:
    for lengths in ([3, 7, 1, 5], [4, 4, 4], [4, 3, 4], [6], [1, 1], [2, 0, 5, 0]):
        packed, x = pack(lengths), torch.randn(sum(lengths), 2, 3)
        padded = packed.pad(x)
        assert padded.shape == (len(lengths), max(lengths), 2, 3)
        assert torch.equal(packed.unpad(padded), x)
        for row, part in zip(padded, x.split(lengths), strict=True):
            assert torch.equal(row[: len(part)], part)
        assert packed.positions.tolist() == [i for length in lengths for i in range(length)]
        assert packed.offsets.dtype is torch.int32  # as kernels of a GPU want them
        assert packed.offsets.tolist() == [0, *itertools.accumulate(lengths)]
        assert packed.is_full == (len(set(lengths)) == 1)


def test_attention_over_packed_sentences_is_the_plain_one() -> None:
    torch.manual_seed(0)
    cases = [
        ([3, 7, 1, 5], [3, 7, 1, 5], False),
        ([3, 7, 1, 5], [3, 7, 1, 5], True),
        ([4, 4, 4], [4, 4, 4], True),
        ([3, 7, 1, 5], [6, 2, 4, 1], False),
        ([3, 1, 2], [5, 5, 5], False),
    ]
    # float64 goes through torch's kernel, and so do long sentences; short ones have products
    for case, (dtype, atol) in itertools.product(
        [*cases, ([70, 2], [70, 2], True)],
        [(torch.float64, 1e-7), (torch.float32, 1e-5), (torch.bfloat16, 0.04)],
    ):
        targets, sources, is_causal = pack(case[0]), pack(case[1]), case[2]
        shapes = [(sum(lengths), 2, 8) for lengths in (case[0], case[1], case[1])]
        inputs = [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]
        context = PackedContext.of(targets, sources, is_causal=is_causal)
        found = attend_packed(*inputs, context)
        assert found.dtype is dtype
        exact = [x.detach().double().requires_grad_() for x in inputs]
        padded = [targets.pad(exact[0]), sources.pad(exact[1]), sources.pad(exact[2])]
        heads, _ = attend(*(x.transpose(1, 2) for x in padded), context.mask)
        expected = targets.unpad(heads.transpose(1, 2))
        assert_near(found.double(), expected, (case, dtype), atol=atol)
        weights = torch.randn_like(found)
        grads = torch.autograd.grad((found * weights).sum(), inputs)
        wanted = torch.autograd.grad((expected * weights).sum(), exact)
        assert_near([x.double() for x in grads], wanted, (case, dtype), atol=atol)


@torch.inference_mode()
def test_flash_attention_over_variable_lengths_is_called_for_every_attention() -> None:
    calls = []

    def flash(
        queries: Tensor, keys: Tensor, values: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
        max_q: int, max_k: int, *, window_size: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        """Do what torch's varlen_attn promises, a sentence at a time."""
        calls.append(queries.shape)
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

    model, (src, lengths), tgt = tiny_model(d_model=32), random_source([9, 2, 5]), [3, 8, 1]
    sources, targets = (replace(pack(x), flash=flash) for x in (lengths.tolist(), tgt))
    ids = random_target(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(sources.unpad(src), sources, targets.unpad(ids), targets)
    assert len(calls) == 2 + 4  # of every attention
    expected = targets.unpad(hidden_states(plain(model), src, lengths, ids))
    assert_near(found, expected, atol=0.1, rtol=0.05)


# --- batches


def test_targets_are_shifted_by_one(tokenizer: Tokenizer) -> None:
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    batch = make_batch([([10, 11, 12], [20, 21]), ([13], [22, 23, 24])], tokenizer)
    assert batch.src.tolist() == [10, 11, 12, eos, 13, eos]
    assert batch.tgt_in.tolist() == [bos, 20, 21, bos, 22, 23, 24]
    assert batch.tgt_out.tolist() == [20, 21, eos, 22, 23, 24, eos]
    offsets = batch.sources.offsets.tolist(), batch.targets.offsets.tolist()
    assert offsets == ([0, 4, 6], [0, 3, 7])
    assert (batch.num_src_tokens, batch.num_tokens) == (6, 7)


def test_a_rounded_batch_is_the_sum_of_its_pairs(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    ids = [[draw.randrange(4, 300) for _ in range(draw.randint(1, 13))] for _ in range(14)]
    for num_pairs, round_to, norm in itertools.product((1, 2, 7), (8, 64), Norm):
        case, pairs = (num_pairs, round_to, norm), list(zip(ids, ids[7:], strict=False))[:num_pairs]
        exact, batch = (make_batch(pairs, tokenizer, round_to=r) for r in (1, round_to))
        assert not any(len(x) % round_to for x in (batch.src, batch.tgt_in, batch.tgt_out)), case
        assert batch.sources.num_sentences == batch.targets.num_sentences > num_pairs, case
        assert batch.sources.longest == exact.sources.longest, case  # no more padding in attention
        assert batch.targets.longest == exact.targets.longest, case
        assert (batch.num_tokens, batch.num_src_tokens) == (exact.num_tokens, exact.num_src_tokens)
        results = []  # loss, negative log-likelihood and gradients of each batch
        for one in (batch, *(make_batch([pair], tokenizer) for pair in pairs)):
            model = tiny_model(vocab_size=tokenizer.vocab_size, norm=norm).train()
            loss, nll = Objective(model, smoothing=0.1)(one)
            loss.backward()
            results.append([loss.detach(), nll, *(weight.grad for weight in model.parameters())])
        expected = [torch.stack(parts).sum(0) for parts in zip(*results[1:], strict=True)]
        assert_near(results[0], expected, case, rtol=1e-4, atol=1e-4)


# --- linear layers


def test_values_and_gradients_of_linear_layers_are_those_of_float64(library: bool) -> None:
    torch.manual_seed(1)
    shapes = [((7,), 5, 3), ((2, 3), 16, 40), ((65, 3), 32, 96), ((1, 1), 8, 1)]
    for (rows, inner, outer), activation in itertools.product(shapes, ("none", "relu")):
        case = rows, activation
        ours = [torch.randn(s, requires_grad=True) for s in ((*rows, inner), (outer, inner), outer)]
        theirs = [x.detach().double().requires_grad_() for x in ours]
        y, expected = linear(*ours, activation=activation), F.linear(*theirs)
        expected = expected.relu() if activation == "relu" else expected
        error = torch.randn_like(expected)
        y.backward(error.float())
        expected.backward(error)
        assert_near(y.double(), expected, case)
        for one, other in zip(ours, theirs, strict=True):
            assert_near(one.grad.double(), other.grad, case, atol=1e-4, rtol=1e-4)
    a, b = torch.randn(70, 5), torch.randn(70, 9)
    assert_near(transposed_matmul(a, b), a.T @ b)
    assert linear(torch.zeros(0, 3), torch.randn(4, 3, requires_grad=True)).shape == (0, 4)


@torch.inference_mode()
def test_blocks_are_columns_of_the_whole_and_frozen_ones_too(library: bool) -> None:
    layer = FastLinear(6, 9)
    for rows in (1, 4, 64):
        x = torch.randn(rows, 2, 6)
        whole = F.linear(x, layer.weight, layer.bias)
        for _ in range(3):  # as it is, frozen, frozen again with the copies made
            assert_near(layer(x), whole)
            assert_near(layer.block(x, 3, 9), whole[..., 3:9])
            assert_near(layer.block(x, 0, 6), whole[..., :6])
            assert_near(layer.block(x, 0, 9, activation="relu"), whole.relu())
            freeze(layer)


# --- dropout


def test_dropout_drops_its_share_by_the_seed_and_keeps_the_mean_and_the_gradient() -> None:
    torch.manual_seed(3)
    for share in (0.1, 0.5, 0.9):
        x = torch.ones(1000, 101, requires_grad=True)
        y = FastDropout(share).train()(x)
        is_zero = (y == 0).double()
        deviation = math.sqrt(share * (1 - share))
        assert abs(is_zero.mean() - share) < 5 * deviation / math.sqrt(x.numel()) + 2**-16
        kept = y[y != 0]
        assert_near(kept, torch.full_like(kept, 1 / (1 - share)), share, atol=0, rtol=1e-4)
        columns = is_zero.mean(dim=0)  # no place in the row is dropped more often
        assert (columns - share).abs().max() < 6 * deviation / math.sqrt(1000)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())  # of ones, value and gradient are both mask * scale
    layer, x = FastDropout(0.3).train(), torch.randn(33, 7)
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)
    assert layer.eval()(x) is x


def test_each_share_is_dropped_in_its_places_and_in_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: Counter[tuple[float, tuple[int, ...]]] = Counter()  # of attention its queries and keys

    def seen(module: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            shape = given[0].shape
            found[module.p, tuple(shape[-2:] if len(shape) == 4 else shape)] += 1

    def seen_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **rest: Any) -> Tensor:
        if dropout_p > 0:
            found[dropout_p, (q.size(2), k.size(2))] += 1
        return attention(q, k, v, dropout_p=dropout_p, **rest)

    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", seen_attention)
    hook = nn.modules.module.register_module_forward_hook(seen)
    cases: list[tuple[dict[str, float], Any]] = [
        (EVERYWHERE, (0.11, 0.22, 0.33, 0.44)),
        ({"dropout": 0.1}, (0.1, 0.1, 0, 0)),  # the paper's, section 5.4
        ({"dropout": 0.1, "embedding_dropout": 0.0}, (0, 0.1, 0, 0)),
        ({"embedding_dropout": 0.1}, (0.1, 0, 0, 0)),
        ({"attention_dropout": 0.1}, (0, 0, 0.1, 0)),
        ({"activation_dropout": 0.1}, (0, 0, 0, 0.1)),
    ]
    for (shares, (embedding, residual, attended, activation)), norm in itertools.product(
        cases, Norm
    ):
        model = tiny_model(norm=norm, **shares)
        for variant, src, tgt in (
            (model, (sum(LENGTHS),), (B * T,)),
            (plain(model), (B, S), (B, T)),
        ):
            expected: Counter[Any] = Counter()  # the places of figure 1, in all layers
            for tokens, num_residuals in ((src, 2), (tgt, 3)):
                expected[embedding, (*tokens, D)] += 1
                expected[residual, (*tokens, D)] += num_residuals * LAYERS
                expected[activation, (*tokens, D_FF)] += LAYERS
            for shape in ((S, S), (T, T), (T, S)):
                expected[attended, shape] += LAYERS
            found.clear()
            forward(variant.train())
            wanted = {place: count for place, count in expected.items() if place[0] > 0}
            assert found == wanted, (shares, norm, type(variant))
            found.clear()
            forward(variant.eval())
            assert not found
    hook.remove()


def assert_dropped_half(found: Tensor, whole: Tensor) -> None:
    """Assert that each number is 0 or twice what it was, and about half of them are 0."""
    is_zero = found == 0
    assert_near(found, torch.where(is_zero, 0.0, 2 * whole))
    share = is_zero[whole.abs() > 1e-4].float().mean()
    assert 0.4 < float(share) < 0.6


@torch.no_grad()
def test_sums_with_positions_and_outputs_of_sublayers_are_dropped_before_the_residual_sum() -> None:
    model: Any = tiny_model(embedding_dropout=0.5, dropout=0.5)
    layer, seen = model.encoder_layers[0], []
    for module in (layer, layer.self_attention, layer.self_attention_norm):
        module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    layer.self_attention.register_forward_hook(lambda *call: seen.append(call[-1]))
    src, lengths = random_source([30, 20])
    model.start(src, lengths)
    embedded = seen[0]
    seen.clear()
    model.train().start(src, lengths)
    dropped, x, output, total = seen[:4]  # the layer's input, that of attention, its output
    assert_dropped_half(dropped, embedded)
    moved = total - x
    assert_dropped_half(torch.where(moved.abs() < 1e-6, 0.0, moved), output)


def test_a_share_outside_0_to_1_is_refused() -> None:
    for place, share in itertools.product(EVERYWHERE, (-0.1, 1.0)):
        with pytest.raises(ConfigError, match=f"model.{place}={share}: must be from 0 to below 1"):
            tiny_config(**{place: share})


# --- old configs, activation checkpointing


def test_a_config_from_before_these_keys_is_read_as_their_defaults(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = tiny_config(dropout=0.1)
    info = ModelInfo(config, SearchConfig(), VOCAB_SIZE, "en", "de", tokenizer.sha256, 1)
    folder = tmp_path / "model"
    save_model(folder, Transformer(config, VOCAB_SIZE).state_dict(), info, tokenizer)
    content = json.loads((folder / "config.json").read_text("utf-8"))
    for key in set(EVERYWHERE) - {"dropout"}:
        del content["model"][key]
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    write_manifest(folder)
    assert load_info(folder).model == config


def trainable(config: ModelConfig, *, recompute: bool = True) -> FastTransformer:
    return accelerate(Transformer(config, VOCAB_SIZE, activation_checkpointing=recompute))


@pytest.mark.slow
def test_activation_checkpointing_changes_no_bit_of_loss_gradients_and_generator() -> None:
    for norm, bfloat16 in itertools.product(Norm, (False, True)):
        config, runs = tiny_config(norm=norm, num_decoder_layers=3, **EVERYWHERE), []
        for recompute in (False, True):
            torch.manual_seed(0)
            model = trainable(config, recompute=recompute)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
                loss = model.logits(forward(model)).logsumexp(-1).sum()
                loss.backward()
            gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
            runs.append([loss.detach(), *gradients, torch.rand(3)])
        assert all(map(torch.equal, *runs)), (norm, bfloat16)


def test_activation_checkpointing_keeps_a_fraction_of_the_memory_in_training_alone() -> None:
    sizes = []
    for recompute, training in ((True, True), (False, True), (True, False)):
        model = trainable(tiny_config(num_encoder_layers=6), recompute=recompute).train(training)
        saved: dict[int, Tensor] = {}

        def keep(x: Tensor, to: dict[int, Tensor] = saved) -> Tensor:
            to[x.data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            hidden = hidden_states(model, *random_source([30] * 8), random_target(8, 30))
        assert hidden.requires_grad
        weights = {p.data_ptr() for p in model.parameters()}
        sizes.append(sum(x.nbytes for place, x in saved.items() if place not in weights))
    assert sizes[0] < 0.2 * sizes[1]
    assert sizes[2] > 0.8 * sizes[1]


# --- the cache of decoding


def test_rows_go_to_their_cells_and_come_back() -> None:
    for counts in ([2, 2, 2], [1, 3, 2], [1], [4], [0, 3, 0, 1], [8] * 5):
        sentences = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        grid = BeamGrid(sentences, len(counts))
        rows = torch.randn(len(sentences), 3)
        cells = grid.spread(rows)
        assert cells.shape == (len(counts), max(counts), 3)
        expected = iter(rows)
        for sentence, count in enumerate(counts):
            assert all(torch.equal(cells[sentence, i], next(expected)) for i in range(count))
            assert grid.is_empty[sentence].tolist() == [i >= count for i in range(max(counts))]
        assert torch.equal(grid.collect(cells)[: len(rows)], rows), counts
        assert len(grid.collect(cells)) == grid.num_collected >= len(rows)


@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_any_walk_through_the_cache_equals_the_plain_model(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(norm=list(Norm)[seed % 2], num_heads=2)
    oracle, (src, lengths), widest = plain(model), random_source([5, 20, 1, 9]), 1 + seed
    if seed >= 3:  # with another order of operations
        freeze(model)
    cache = model.start(src, lengths)
    sentences = torch.arange(4)
    history = torch.zeros(len(sentences), 0, dtype=torch.long)
    num_columns = []
    for t in range(40):
        tokens = torch.randint(4, VOCAB_SIZE, (len(sentences),), generator=generator)
        history = torch.cat([history, tokens.unsqueeze(1)], dim=1)  # (R, T)
        found = model.step(tokens, cache)
        expected = hidden_states(oracle, src[sentences], lengths[sentences], history)[:, -1]
        assert_near(found, expected, (seed, t))
        num_columns.append(cache.attention_mask.size(1))
        # each sentence goes on with some of its rows, sooner or later with none
        ends = torch.rand(4, generator=generator) < 0.03
        rows = []
        for sentence in sentences.unique().tolist():
            own = (sentences == sentence).nonzero().squeeze(1)
            count = int(torch.randint(1, widest + 1, (), generator=generator))
            picks = torch.randint(0, len(own), (0 if ends[sentence] and t else count,))
            rows += own[picks].tolist()
        if not rows:
            break
        sentences, history = sentences[rows], history[rows]
        cache.reorder(torch.tensor(rows))
        assert len(sentences.unique()) > 0.75 * len(cache.source_bias)  # others leave the memory
        assert {len(keys) for keys, _ in cache.source_keys_values} == {len(cache.source_bias)}
    assert t > 20
    if widest > 1:
        bounds = [1.5 * (i + 1 + 4 * widest) + 32 for i in range(t + 1)]
        assert all(n < bound for n, bound in zip(num_columns, bounds, strict=True))


# --- the best continuations, against sorting everything


def test_the_best_are_those_of_a_stable_sort_of_all() -> None:
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        bounds = (4, 6, 300, 9)
        batch, beams, vocab, count = (
            int(torch.randint(1, bound, (), generator=generator)) for bound in bounds
        )
        counts = torch.randint(1, beams + 1, (batch,), generator=generator)  # rows of each sentence
        sentences = torch.arange(batch).repeat_interleave(counts)
        log_probs = torch.randn(len(sentences), vocab, generator=generator)
        sums = torch.randn(len(sentences), generator=generator).round()
        if seed % 3 == 0:
            log_probs = log_probs.round()  # ties
        if seed % 4 == 0:
            log_probs[:, ::2] = NEG_INF  # forbidden tokens
        if seed % 5 == 0:
            sums[1:] = NEG_INF  # rows without use
        found = best_candidates(sums, log_probs, BeamGrid(sentences, batch), count)
        for sentence in range(batch):
            rows = (sentences == sentence).nonzero().squeeze(1)
            totals = (sums[rows].unsqueeze(1) + log_probs[rows]).flatten()
            values, order = totals.sort(descending=True, stable=True)
            usable = (values > NEG_INF)[:count]
            best = Candidates(*(column[sentence, : len(usable)][usable] for column in found))
            assert torch.equal(best.sums, values[:count][usable]), seed
            assert (found.sums[sentence, int(usable.sum()) :] == NEG_INF).all(), seed
            assert torch.equal(best.rows, rows[order[:count][usable] // vocab]), seed
            assert torch.equal(best.tokens, order[:count][usable] % vocab), seed
            assert torch.equal(best.log_probs, log_probs[best.rows, best.tokens]), seed


def test_the_likeliest_token_is_the_first_of_the_highest() -> None:
    for vocab in (1, 5, 63, 64, 65, 128, 1000):
        generator = torch.Generator().manual_seed(vocab)
        log_probs = torch.randn(50, vocab, generator=generator).mul(2).round()
        expected = [row.index(max(row)) for row in log_probs.tolist()]
        assert likeliest(log_probs).tolist() == expected, vocab
