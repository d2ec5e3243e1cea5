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
from test_compiled import draw_pairs
from tiny import (
    VOCAB_SIZE,
    assert_near,
    check_beams,
    decode_by_steps,
    exact_copies,
    gradients_by_name,
    hidden_states,
    plain,
    random_source,
    random_target,
    tiny_config,
    tiny_model,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from nmt.checkpoint import ModelInfo, load_info, save_model
from nmt.config import ModelConfig, Norm, Positions, SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.model import fast
from nmt.model.attention import attend, padding_mask
from nmt.model.fast import FastTransformer, accelerate, layers, prepare_for_inference
from nmt.model.fast.cache import BeamGrid
from nmt.model.fast.layers import FastDropout, FastLinear, linear, transposed_matmul
from nmt.model.fast.packing import PackedContext, attend_packed, pack
from nmt.model.fast.top import NEG_INF, Candidates, best_candidates, most_likely_tokens
from nmt.model.transformer import Transformer
from nmt.runtime.manifest import write_manifest
from nmt.training.batches import make_batch
from nmt.training.loss import Objective

LENGTHS = [7, 3, 5, 1]
B = 4
S = 7
T = 6
D = 16
D_FF = 32
LAYERS = 2
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
    is_faster = {}
    for vendor in ("AuthenticAMD", "GenuineIntel"):
        (tmp_path / "cpuinfo").write_text(f"vendor_id : {vendor}")
        for capability in ("AVX512", "AVX2", "DEFAULT"):
            monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda c=capability: c)
            is_onednn_faster = layers.is_onednn_faster.__wrapped__
            answers = list(map(is_onednn_faster, (0, 1 << 18, 1 << 20)))
            if any(answers):
                is_faster[vendor, capability] = answers
    assert is_faster == {
        ("AuthenticAMD", "AVX512"): [True, True, True],
        ("AuthenticAMD", "AVX2"): [False, False, True],  # a large weight in oneDNN's layout
    }


def models() -> Iterator[tuple[str, FastTransformer]]:
    """Make a model of each norm and layout of positions, of one or two vocabularies in turn."""
    for norm, (number, layout) in itertools.product(Norm, enumerate(Positions)):
        has_two_vocabularies = (number + (norm is Norm.pre)) % 2 == 1
        shape: dict[str, Any] = {"norm": norm, "positions": layout, "num_decoder_layers": 1}
        if has_two_vocabularies:
            shape |= {"src_vocab_size": 29, "num_decoder_layers": 3}
        yield f"{norm.value} {layout.value}", tiny_model(num_heads=2, **shape)


def forward(model: Transformer) -> Tensor:
    src, lengths = random_source(LENGTHS)
    return hidden_states(model, src, lengths, random_target(B, T))


def flat_gradients(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters as one vector."""
    return parameters_to_vector(parameter.grad for parameter in model.parameters())


# --- the whole model


def test_the_accelerated_model_is_the_plain_one_forward_and_backward(library: bool) -> None:
    tgt = random_target(B, T)
    for case, model in models():
        twin = plain(model)
        hidden = forward(model)
        expected = forward(twin)
        assert_near(hidden, expected, case)
        scores = (model.logits(hidden), twin.logits(expected))
        assert_near(scores[0], scores[1], case, atol=1e-4)
        for logits in scores:
            F.cross_entropy(logits.flatten(0, 1), tgt.roll(-1, 1).flatten()).backward()
        assert_near(gradients_by_name(model), gradients_by_name(twin), case, rtol=1e-4)


@pytest.mark.slow
@torch.inference_mode()
def test_steps_with_frozen_weights_equal_one_pass_of_the_plain_model(library: bool) -> None:
    src, lengths = random_source(LENGTHS)
    tgt = random_target(B, 20)
    for case, model in models():
        twin = plain(model)
        expected = hidden_states(twin, src, lengths, tgt)
        prepare_for_inference(model)
        hidden = decode_by_steps(model, src, lengths, tgt)
        assert_near(hidden, expected, case)
        assert_near(model.logits(hidden), twin.logits(hidden), case, atol=1e-4)
        assert bool(model.encoder_layers[0].feed_forward.inner.reordered_weights) is library
        assert bool(model.reordered_weights) is library


@torch.inference_mode()
def test_weights_frozen_in_bfloat16_are_packed_once_and_change_nothing_but_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not layers.can_reorder() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this torch or CPU has no products of bfloat16")
    monkeypatch.setattr("nmt.model.fast.has_bfloat16_kernels", lambda: True)
    src, lengths = random_source(LENGTHS)
    tgt = random_target(B, 20)
    for case in itertools.product(Norm, (Positions.sinusoidal, Positions.rotary)):
        norm, positions = case
        model = tiny_model(norm=norm, positions=positions, num_heads=2)
        exact = hidden_states(plain(model), src, lengths, tgt)
        autocast_dtype = prepare_for_inference(model, torch.bfloat16)
        assert autocast_dtype is torch.float32, case  # autocast has nothing to do
        hidden = decode_by_steps(model, src, lengths, tgt)
        assert hidden.dtype is torch.float32, case
        assert 1e-4 < (hidden - exact).norm() / exact.norm() < 0.02, case
        linears = [module for module in model.modules() if isinstance(module, FastLinear)]
        copies = [dict(layer.reordered_weights) for layer in linears]
        decode_by_steps(model, src, lengths, tgt)
        for layer, weights_before in zip(linears, copies, strict=True):
            assert weights_before, case
            for key, (weight, _) in weights_before.items():
                assert layer.reordered_weights[key][0] is weight, case
                assert weight.dtype is torch.bfloat16, case


@torch.inference_mode()
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_batch_encoded_in_chunks_equals_the_plain_model(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "_CPU_ENCODER_TOKENS", size)
    for positions in (Positions.sinusoidal, Positions.rotary):
        model = tiny_model(positions=positions)
        (src, lengths) = random_source(LENGTHS)
        expected = plain(model).encode(src, padding_mask(lengths, S))  # (B, S, D)
        assert_near(model.encode_padded(src, lengths)[0], pack(LENGTHS).unpad(expected))
    model = tiny_model(positions=Positions.rotary, source_eos=False)
    expected, _ = model.encode_padded(src[:2], lengths[:2])
    lengths[2:] = 1  # only EOS, which the encoder does not read, possibly in a chunk of its own
    assert_near(model.encode_padded(src, lengths)[0], expected)


def test_accelerating_shares_parameters_and_names() -> None:
    model = Transformer(tiny_config(dropout=0.1), VOCAB_SIZE)
    names = list(model.state_dict())
    addresses = list(map(id, model.parameters()))
    fast = accelerate(model)
    assert isinstance(fast, FastTransformer)
    assert fast is model
    assert list(map(id, fast.parameters())) == addresses
    assert list(fast.state_dict()) == names
    assert not {nn.Linear, nn.Dropout} & set(map(type, fast.modules()))


@torch.inference_mode()
def test_threads_translate_with_one_model_at_once(library: bool) -> None:
    model = tiny_model()
    prepare_for_inference(model)

    def decode(seed: int) -> Tensor:
        src, lengths = random_source(LENGTHS, seed)
        return decode_by_steps(model, src, lengths, random_target(4, 15, seed))

    expected = list(map(decode, range(4)))
    prepare_for_inference(model)  # so that the threads make the copies of the weights
    with ThreadPoolExecutor(4) as pool:
        hidden = list(pool.map(torch.inference_mode()(decode), range(4)))
    assert_near(hidden, expected, atol=1e-6, rtol=1e-6)


# --- packed sentences


def test_padding_and_back_is_the_same() -> None:
    for lengths in ([3, 7, 1, 5], [4, 4, 4], [4, 3, 4], [6], [1, 1], [2, 0, 5, 0]):
        packed = pack(lengths)
        x = torch.randn(sum(lengths), 2, 3)
        padded = packed.pad(x)
        assert padded.shape == (len(lengths), max(lengths), 2, 3)
        assert torch.equal(packed.unpad(padded), x)
        for row, tokens in zip(padded, x.split(lengths), strict=True):
            assert torch.equal(row[: len(tokens)], tokens)
        assert packed.positions.tolist() == [i for length in lengths for i in range(length)]
        assert packed.offsets.dtype is torch.int32  # as kernels of a GPU want them
        assert packed.offsets.tolist() == [0, *itertools.accumulate(lengths)]
        assert packed.is_full == (len(set(lengths)) == 1)


def test_attention_over_packed_sentences_equals_attention_over_padded_ones() -> None:
    torch.manual_seed(0)
    cases = [
        ([3, 7, 1, 5], [3, 7, 1, 5], False),
        ([3, 7, 1, 5], [3, 7, 1, 5], True),
        ([4, 4, 4], [4, 4, 4], True),
        ([3, 7, 1, 5], [6, 2, 4, 1], False),
        ([3, 1, 2], [5, 5, 5], False),
    ]
    # float64 and long sentences use torch's kernel, short sentences products of matrices
    for (queries, keys, is_causal), (dtype, atol) in itertools.product(
        [*cases, ([70, 2], [70, 2], True)],
        [(torch.float64, 1e-7), (torch.float32, 1e-5), (torch.bfloat16, 0.04)],
    ):
        case = (queries, keys, is_causal, dtype)
        context = PackedContext.of(pack(queries), pack(keys), is_causal=is_causal)
        q = torch.randn(sum(queries), 2, 8, dtype=dtype, requires_grad=True)
        k = torch.randn(sum(keys), 2, 8, dtype=dtype, requires_grad=True)
        v = torch.randn(sum(keys), 2, 8, dtype=dtype, requires_grad=True)
        heads = attend_packed(q, k, v, context)
        assert heads.dtype is dtype
        exact = exact_copies(q, k, v)
        padded_heads, _ = attend(
            context.queries.pad(exact[0]).transpose(1, 2),
            context.keys.pad(exact[1]).transpose(1, 2),
            context.keys.pad(exact[2]).transpose(1, 2),
            context.mask,
        )
        expected = context.queries.unpad(padded_heads.transpose(1, 2))
        assert_near(heads.double(), expected, case, atol=atol)
        factors = torch.randn_like(heads)
        gradients = torch.autograd.grad((heads * factors).sum(), (q, k, v))
        exact_gradients = torch.autograd.grad((expected * factors).sum(), exact)
        assert_near([x.double() for x in gradients], exact_gradients, case, atol=atol)


@torch.inference_mode()
def test_flash_attention_over_variable_lengths_is_called_for_every_attention() -> None:
    calls = []

    def flash(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
    ) -> Tensor:
        """Attend as torch's varlen_attn does, a sentence at a time."""
        calls.append(q.shape)
        heads = torch.zeros_like(q)
        assert cu_seq_q.dtype is cu_seq_k.dtype is torch.int32
        queries = itertools.pairwise(cu_seq_q.tolist())
        keys = itertools.pairwise(cu_seq_k.tolist())
        for (q_start, q_end), (k_start, k_end) in zip(queries, keys, strict=True):
            assert q_end - q_start <= max_q
            assert k_end - k_start <= max_k
            mask = torch.ones(q_end - q_start, k_end - k_start, dtype=torch.bool)
            sentence_heads, _ = attend(
                q[q_start:q_end].float().transpose(0, 1),  # (H, T, d)
                k[k_start:k_end].float().transpose(0, 1),
                v[k_start:k_end].float().transpose(0, 1),
                {(-1, 0): mask.tril(), (-1, -1): mask}[window_size],
            )
            heads[q_start:q_end] = sentence_heads.transpose(0, 1).to(heads.dtype)
        return heads

    model = tiny_model(d_model=32)
    src, lengths = random_source([9, 2, 5])
    tgt = random_target(3, 8)
    src_packing = replace(pack(lengths.tolist()), flash_attention=flash)
    tgt_packing = replace(pack([3, 8, 1]), flash_attention=flash)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model(src_packing.unpad(src), src_packing, tgt_packing.unpad(tgt), tgt_packing)
    assert len(calls) == 2 + 4  # of every attention
    expected = tgt_packing.unpad(hidden_states(plain(model), src, lengths, tgt))
    assert_near(hidden, expected, atol=0.1, rtol=0.05)


# --- batches


def test_targets_are_shifted_by_one(tokenizer: Tokenizer) -> None:
    bos = tokenizer.bos_id
    eos = tokenizer.eos_id
    batch = make_batch([([10, 11, 12], [20, 21]), ([13], [22, 23, 24])], tokenizer)
    assert batch.src.tolist() == [10, 11, 12, eos, 13, eos]
    assert batch.tgt_in.tolist() == [bos, 20, 21, bos, 22, 23, 24]
    assert batch.tgt_out.tolist() == [20, 21, eos, 22, 23, 24, eos]
    offsets = batch.src_packing.offsets.tolist(), batch.tgt_packing.offsets.tolist()
    assert offsets == ([0, 4, 6], [0, 3, 7])
    assert (batch.num_src_tokens, batch.num_tokens) == (6, 7)


def test_a_rounded_batch_is_the_sum_of_its_pairs(tokenizer: Tokenizer) -> None:
    for num_pairs, round_to, norm in itertools.product((1, 4), (8, 64), Norm):
        case = (num_pairs, round_to, norm)
        pairs = draw_pairs(random.Random(0), num_pairs, 13)
        exact = make_batch(pairs, tokenizer)
        batch = make_batch(pairs, tokenizer, round_to=round_to)
        for ids in (batch.src, batch.tgt_in, batch.tgt_out):
            assert len(ids) % round_to == 0, case
        assert batch.src_packing.num_sentences == batch.tgt_packing.num_sentences > num_pairs, case
        assert batch.src_packing.longest == exact.src_packing.longest, (
            case
        )  # no more padding in attention
        assert batch.tgt_packing.longest == exact.tgt_packing.longest, case
        assert (batch.num_tokens, batch.num_src_tokens) == (exact.num_tokens, exact.num_src_tokens)
        results = []  # loss, negative log-likelihood and gradients of each batch
        for single_batch in [batch, *[make_batch([pair], tokenizer) for pair in pairs]]:
            model = tiny_model(vocab_size=tokenizer.vocab_size, norm=norm).train()
            loss, nll = Objective(model, smoothing=0.1)(single_batch)
            loss.backward()
            gradients = flat_gradients(model)
            results.append(torch.cat([loss.detach()[None], nll[None], gradients]))
        assert_near(results[0], torch.stack(results[1:]).sum(0), case, rtol=1e-4, atol=1e-4)


# --- linear layers


def test_values_and_gradients_of_linear_layers_equal_float64(library: bool) -> None:
    torch.manual_seed(1)
    shapes = [((7,), 5, 3), ((2, 3), 16, 40), ((65, 3), 32, 96), ((1, 1), 8, 1)]
    for (rows, inner, outer), activation in itertools.product(shapes, ("none", "relu")):
        case = (rows, activation)
        x = torch.randn(*rows, inner, requires_grad=True)
        weight = torch.randn(outer, inner, requires_grad=True)
        bias = torch.randn(outer, requires_grad=True)
        exact = exact_copies(x, weight, bias)
        y = linear(x, weight, bias, activation=activation)
        expected = F.linear(exact[0], exact[1], exact[2])
        expected = expected.relu() if activation == "relu" else expected
        error = torch.randn_like(expected)
        assert_near(y.double(), expected, case)
        gradients = torch.autograd.grad(y, (x, weight, bias), error.float())
        exact_gradients = torch.autograd.grad(expected, exact, error)
        gradients = [gradient.double() for gradient in gradients]
        assert_near(gradients, exact_gradients, case, atol=1e-4, rtol=1e-4)
    a = torch.randn(70, 5)
    b = torch.randn(70, 9)
    assert_near(transposed_matmul(a, b), a.T @ b)
    assert linear(torch.zeros(0, 3), torch.randn(4, 3, requires_grad=True)).shape == (0, 4)


@torch.inference_mode()
def test_blocks_are_columns_of_the_whole_and_frozen_ones_too(library: bool) -> None:
    layer = FastLinear(6, 9)
    for rows in (1, 4, 64):
        x = torch.randn(rows, 2, 6)
        expected = F.linear(x, layer.weight, layer.bias)
        for _ in range(3):  # not frozen, frozen, frozen again with the copies made
            assert_near(layer(x), expected)
            assert_near(layer.block(x, 3, 9), expected[..., 3:9])
            assert_near(layer.block(x, 0, 6), expected[..., :6])
            assert_near(layer.block(x, 0, 9, activation="relu"), expected.relu())
            prepare_for_inference(layer)


# --- dropout


def test_dropout_drops_its_share_by_the_seed_and_keeps_the_mean_and_the_gradient() -> None:
    torch.manual_seed(3)
    for share in (0.1, 0.5, 0.9):
        x = torch.ones(1000, 101, requires_grad=True)
        y = FastDropout(share).train()(x)
        is_zero = (y == 0).double()
        deviation = math.sqrt(share * (1 - share))
        assert abs(is_zero.mean() - share) < 5 * deviation / math.sqrt(x.numel()) + 2**-16
        survivors = y[y != 0]
        scale = torch.full_like(survivors, 1 / (1 - share))
        assert_near(survivors, scale, share, atol=0, rtol=1e-4)
        columns = is_zero.mean(dim=0)
        assert (columns - share).abs().max() < 6 * deviation / math.sqrt(1000)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())  # of ones, value and gradient are both mask * scale
    layer = FastDropout(0.3).train()
    x = torch.randn(33, 7)
    torch.manual_seed(1)
    first = layer(x)
    second = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)
    assert layer.eval()(x) is x


def count_dropouts(
    rates: tuple[float, float, float, float], src: tuple[int, ...], tgt: tuple[int, ...]
) -> Counter[tuple[float, tuple[int, ...]]]:
    """Count the calls of dropout in figure 1 of the paper, in all layers, by rate and shape."""
    embedding, residual, attended, activation = rates
    counts: Counter[tuple[float, tuple[int, ...]]] = Counter()
    for tokens, num_residuals in ((src, 2), (tgt, 3)):
        counts[embedding, (*tokens, D)] += 1
        counts[residual, (*tokens, D)] += num_residuals * LAYERS
        counts[activation, (*tokens, D_FF)] += LAYERS
    for shape in ((S, S), (T, T), (T, S)):
        counts[attended, shape] += LAYERS
    for key in list(counts):
        if key[0] == 0:
            del counts[key]
    return counts


def test_each_dropout_probability_applies_to_its_layers_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # calls of dropout, by probability and shape; for attention the numbers of queries and keys
    calls: Counter[tuple[float, tuple[int, ...]]] = Counter()

    def count(module: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            shape = inputs[0].shape
            calls[module.p, tuple(shape[-2:] if len(shape) == 4 else shape)] += 1

    def count_attention(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **options: Any
    ) -> Tensor:
        if dropout_p > 0:
            calls[dropout_p, (q.size(2), k.size(2))] += 1
        return attention(q, k, v, dropout_p=dropout_p, **options)

    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", count_attention)
    hook = nn.modules.module.register_module_forward_hook(count)
    cases: list[tuple[dict[str, float], tuple[float, float, float, float]]] = [
        (EVERYWHERE, (0.11, 0.22, 0.33, 0.44)),
        ({"dropout": 0.1}, (0.1, 0.1, 0, 0)),  # the paper's, section 5.4
        ({"dropout": 0.1, "embedding_dropout": 0.0}, (0, 0.1, 0, 0)),
        ({"embedding_dropout": 0.1}, (0.1, 0, 0, 0)),
        ({"attention_dropout": 0.1}, (0, 0, 0.1, 0)),
        ({"activation_dropout": 0.1}, (0, 0, 0, 0.1)),
    ]
    for (probabilities, rates), norm in itertools.product(cases, Norm):
        model = tiny_model(norm=norm, **probabilities)
        for variant, src, tgt in (
            (model, (sum(LENGTHS),), (B * T,)),
            (plain(model), (B, S), (B, T)),
        ):
            calls.clear()
            forward(variant.train())
            assert calls == count_dropouts(rates, src, tgt), (probabilities, norm, type(variant))
            calls.clear()
            forward(variant.eval())
            assert not calls
    hook.remove()


def assert_dropped_half(dropped: Tensor, x: Tensor) -> None:
    """Assert that half of `dropped` is 0, roughly, and the rest is twice the numbers of `x`."""
    is_zero = dropped == 0
    assert_near(dropped, torch.where(is_zero, 0.0, 2 * x))
    assert 0.4 < float(is_zero[x.abs() > 1e-4].float().mean()) < 0.6


@torch.no_grad()
def test_sums_with_positions_and_outputs_of_sublayers_are_dropped_before_the_residual_sum() -> None:
    model: Any = tiny_model(embedding_dropout=0.5, dropout=0.5)
    layer = model.encoder_layers[0]
    seen: list[Tensor] = []
    for module in (layer, layer.self_attention, layer.self_attention_norm):
        module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    layer.self_attention.register_forward_hook(lambda *call: seen.append(call[-1]))
    src, lengths = random_source([30, 20])
    model.start(src, lengths)
    embedded = seen[0]
    seen.clear()
    model.train().start(src, lengths)
    dropped, x, output, total = seen[:4]  # inputs of layer and attention, its output, norm's input
    assert_dropped_half(dropped, embedded)
    added = total - x
    assert_dropped_half(torch.where(added.abs() < 1e-6, 0.0, added), output)


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
        config = tiny_config(norm=norm, num_decoder_layers=3, **EVERYWHERE)
        runs = []
        for recompute in (False, True):
            torch.manual_seed(0)
            model = trainable(config, recompute=recompute)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
                loss = model.logits(forward(model)).logsumexp(-1).sum()
                loss.backward()
            runs.append(torch.cat([loss.detach()[None], flat_gradients(model), torch.rand(3)]))
        assert torch.equal(runs[0], runs[1]), (norm, bfloat16)


def test_activation_checkpointing_keeps_a_fraction_of_the_memory_in_training_only() -> None:
    sizes = []
    for recompute, training in ((True, True), (False, True), (True, False)):
        model = trainable(tiny_config(num_encoder_layers=6), recompute=recompute).train(training)
        saved: dict[int, Tensor] = {}

        def keep(x: Tensor, to: dict[int, Tensor] = saved) -> Tensor:
            to[x.data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            src, lengths = random_source([30] * 8)
            hidden = hidden_states(model, src, lengths, random_target(8, 30))
        assert hidden.requires_grad
        weights = {p.data_ptr() for p in model.parameters()}
        sizes.append(sum(x.nbytes for address, x in saved.items() if address not in weights))
    assert sizes[0] < 0.2 * sizes[1]
    assert sizes[2] > 0.8 * sizes[1]


# --- the cache of decoding


def test_rows_go_to_their_cells_and_come_back() -> None:
    for counts in ([2, 2, 2], [1, 3, 2], [1], [4], [0, 3, 0, 1], [8] * 5):
        sentences = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        grid = BeamGrid(sentences, len(counts))
        rows = torch.randn(len(sentences), 3)
        cells = grid.rows_to_grid(rows)
        assert cells.shape == (len(counts), max(counts), 3)
        for sentence, count in enumerate(counts):
            assert torch.equal(cells[sentence, :count], rows[sentences == sentence])
            assert torch.equal(grid.is_empty[sentence], torch.arange(max(counts)) >= count)
        assert torch.equal(grid.grid_to_rows(cells)[: len(rows)], rows), counts
        assert len(grid.grid_to_rows(cells)) == grid.num_padded_rows >= len(rows)


@pytest.mark.parametrize(
    "seed", [2, 5, *[pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 3, 4)]]
)
@torch.no_grad()
def test_any_walk_through_the_cache_equals_the_plain_model(seed: int) -> None:
    model = tiny_model(norm=list(Norm)[seed % 2], num_heads=2)
    if seed >= 3:
        prepare_for_inference(model)
    check_beams(model, max_rows=1 + seed, seed=seed)


# --- the best candidates, against sorting everything


def test_the_best_candidates_come_first_in_a_stable_sort() -> None:
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        draw = random.Random(seed)
        batch = draw.randrange(1, 4)
        beams = draw.randrange(1, 6)
        vocab = draw.randrange(1, 300)
        count = draw.randrange(1, 9)
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
        candidates = best_candidates(sums, log_probs, BeamGrid(sentences, batch), count)
        for sentence in range(batch):
            rows = (sentences == sentence).nonzero().squeeze(1)
            totals = (sums[rows].unsqueeze(1) + log_probs[rows]).flatten()
            values, order = totals.sort(descending=True, stable=True)
            usable = (values > NEG_INF)[:count]
            best = Candidates._make(x[sentence, : len(usable)][usable] for x in candidates)
            assert torch.equal(best.sums, values[:count][usable]), seed
            assert (candidates.sums[sentence, int(usable.sum()) :] == NEG_INF).all(), seed
            assert torch.equal(best.rows, rows[order[:count][usable] // vocab]), seed
            assert torch.equal(best.tokens, order[:count][usable] % vocab), seed
            assert torch.equal(best.log_probs, log_probs[best.rows, best.tokens]), seed


def test_the_likeliest_token_is_the_first_of_the_highest() -> None:
    for vocab in (1, 5, 63, 64, 65, 128, 1000):
        generator = torch.Generator().manual_seed(vocab)
        log_probs = torch.randn(50, vocab, generator=generator).mul(2).round()
        expected = [row.index(max(row)) for row in log_probs.tolist()]
        assert most_likely_tokens(log_probs).tolist() == expected, vocab
