"""Every setting of the layers: against a naive oracle, gradients against finite differences, packed
sentences and cached steps against the plain model, and sentences in batches.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny import (
    assert_near,
    assert_same_tensors,
    check_beams,
    decode_by_steps,
    gradients_by_name,
    hidden_states,
    plain,
    random_source,
    random_target,
    tiny_config,
    tiny_model,
)
from torch import Tensor
from variants import VARIANTS

from nmt.config import Activation, Decoder, ExportFormat, ModelConfig, NormLayer, Positions
from nmt.errors import ConfigError
from nmt.export.export_model import find_unsupported
from nmt.model.attention import MultiHeadAttention, as_context, causal_mask, padding_mask
from nmt.model.fast import FastTransformer, prepare_for_inference
from nmt.model.fast.packing import pack
from nmt.model.layers import FeedForward, new_norm
from nmt.model.positions import Learned, Rotary, TokenPositions, rotate_pairs
from nmt.model.transformer import Transformer

LENGTHS = [7, 3, 5, 1]
B = 4
S = 7
T = 6


def models(sample: str = "all") -> Any:
    """Yield names and models: all, some for quick tests, or the rest."""
    for name, changes in VARIANTS.items():
        if sample == "all" or (name in QUICK) == (sample == "some"):
            yield name, tiny_model(**{"num_heads": 4, **changes})


QUICK = ("learned, pre", "relative", "rotary", "ssru", "modern, alibi")
every_sample = pytest.mark.parametrize(
    "sample", ["some", pytest.param("rest", marks=pytest.mark.slow)]
)


# --- formulas, one number at a time


def rotate_naively(x: Tensor, position: int) -> Tensor:
    """Rotate each pair of dimensions of `x` (d,) by a 2 x 2 matrix."""
    pairs = []
    for i in range(len(x) // 2):
        angle = position / 10000 ** (2 * i / len(x))
        cos = math.cos(angle)
        sin = math.sin(angle)
        rotation = torch.tensor([[cos, -sin], [sin, cos]]).to(x)
        pairs.append(rotation @ x[2 * i : 2 * i + 2])
    return torch.cat(pairs)


def normalize_naively(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * norm.weight  # type: ignore[no-any-return]


def naive_attention(
    module: MultiHeadAttention, config: ModelConfig, x: Tensor, memory: Tensor, *, is_causal: bool
) -> Tensor:
    """Attend from `x` (T, D) to `memory` (S, D), with loops over heads, queries and keys."""
    is_self = memory is x
    is_relative = is_self and config.positions is Positions.relative
    num_kv_heads = config.num_kv_heads or config.num_heads
    encoding: Any = module.position_encoding

    def vector(start: int, y: Tensor) -> Tensor:
        rows = slice(start, start + config.d_k)
        return y @ module.in_projection.weight[rows].T + module.in_projection.bias[rows]

    def place(y: Tensor, norm: Any, position: int) -> Tensor:
        if config.qk_norm and is_self:
            y = normalize_naively(y, norm)
        is_rotary = is_self and config.positions is Positions.rotary
        return rotate_naively(y, position) if is_rotary else y

    rows = []
    for t, y in enumerate(x):
        heads = []
        for h in range(config.num_heads):
            kv_head = h * num_kv_heads // config.num_heads
            key_start = (config.num_heads + kv_head) * config.d_k
            query = place(vector(h * config.d_k, y), module.query_norm, t)
            logits = []
            values = []
            for s, z in enumerate(memory[: t + 1] if is_causal else memory):
                key = place(vector(key_start, z), module.key_norm, s)
                value = vector(key_start + num_kv_heads * config.d_k, z)
                if is_relative:
                    distance = max(-config.max_distance, min(config.max_distance, s - t))
                    key = key + encoding.keys[distance + config.max_distance]
                    value = value + encoding.values[distance + config.max_distance]
                logit = query @ key / math.sqrt(config.d_k)
                if is_self and config.positions is Positions.alibi:
                    logit = logit - 2 ** (-8 * (h + 1) / config.num_heads) * abs(t - s)
                logits.append(logit)
                values.append(value)
            heads.append(torch.stack(logits).softmax(0) @ torch.stack(values))
        rows.append(torch.cat(heads))
    return module.out_projection(torch.stack(rows))  # type: ignore[no-any-return]


@torch.no_grad()
def test_attention_follows_the_formulas_of_the_papers() -> None:
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    memory = torch.randn(1, 6, 16, dtype=torch.float64)
    for name, model in models():
        twin: Any = plain(model.double())
        encoder_layer = twin.encoder_layers[0]
        decoder_layer = twin.decoder_layers[0]
        modules = [
            (encoder_layer.self_attention, x, False),
            (decoder_layer.cross_attention, memory, False),
        ]
        if model.config.decoder is Decoder.attention:
            modules.append((decoder_layer.self_attention, x, True))
        for module, keys, is_causal in modules:
            mask = causal_mask(6) if is_causal else padding_mask(torch.tensor([6]), 6)
            output = module(x, keys, as_context(mask, x[..., 0]))[0]
            naive_x = x[0]
            naive_memory = naive_x if keys is x else memory[0]
            expected = naive_attention(
                module, model.config, naive_x, naive_memory, is_causal=is_causal
            )
            assert_near(output, expected, (name, is_causal), atol=1e-7)


@torch.no_grad()
def test_norms_and_gates_follow_the_formulas_of_the_papers() -> None:
    x = torch.randn(3, 6, dtype=torch.float64)
    norm: Any = new_norm(NormLayer.rms, 6).double()
    norm.weight.uniform_(0.5, 1.5)
    for scale in (1.0, 1e-3):  # the second shows epsilon
        mean = (scale * x).square().sum(1, keepdim=True) / 6
        expected = scale * x / torch.sqrt(mean + 1e-5) * norm.weight
        assert_near(norm(scale * x), expected, scale, atol=1e-9)
    layer: Any = FeedForward(6, 10, 0.0, Activation.swiglu).double()
    gate = x @ layer.gate.weight.T + layer.gate.bias
    hidden = gate / (1 + torch.exp(-gate)) * (x @ layer.inner.weight.T + layer.inner.bias)
    assert_near(layer(x), hidden @ layer.outer.weight.T + layer.outer.bias, atol=1e-9)


def rotate(x: Tensor, position: int) -> Tensor:
    positions = TokenPositions(torch.tensor(position), position + 1)
    encoding = Rotary(tiny_config(positions=Positions.rotary))
    rotated, _ = encoding.rotate(x.clone(), x.clone(), positions)
    return rotated


def test_products_of_rotated_vectors_depend_on_the_distance_only() -> None:
    query = torch.randn(8, dtype=torch.float64)
    key = torch.randn(8, dtype=torch.float64)
    for first, second in ((0, 3), (5, 8), (1000, 1003)):
        product = rotate(query, first) @ rotate(key, second)
        assert_near(product, query @ rotate(key, 3), first, atol=1e-9)


def test_rotation_in_place_without_gradients_gives_the_same_vectors() -> None:
    x = torch.randn(5, 8)
    expected = rotate(x, 7)
    with torch.no_grad():
        assert_near(rotate(x, 7), expected)


@pytest.mark.parametrize("first_has_gradients", [True, False])
def test_positions_serve_passes_with_and_without_gradients(first_has_gradients: bool) -> None:
    encoding = Rotary(tiny_config(positions=Positions.rotary))
    positions = TokenPositions.up_to(5, torch.device("cpu"))
    x = torch.randn(3, 2, 5, 8)
    expected, _ = encoding.rotate(x, x, TokenPositions.up_to(5, torch.device("cpu")))
    for has_gradients in (first_has_gradients, not first_has_gradients):
        with torch.set_grad_enabled(has_gradients):
            rotated, _ = encoding.rotate(x.clone(), x.clone(), positions)
        assert_near(rotated, expected)


def test_later_positions_use_the_last_learned_vector() -> None:
    encoding = Learned(tiny_config(positions=Positions.learned, num_positions=3))
    x = torch.zeros(5, 16)
    added = encoding.add(x, TokenPositions.up_to(5, x.device))
    assert torch.equal(added, encoding.table[[0, 1, 2, 2, 2]])


# --- settings and names


def test_head_size_sets_the_dimensions_of_all_heads_and_most_exports_refuse_it() -> None:
    model = tiny_model(num_heads=3, head_size=4)  # 3 does not divide d_model
    attention: Any = model.decoder_layers[0].cross_attention
    assert attention.in_projection.weight.shape == (3 * 12, 16)
    assert attention.out_projection.weight.shape == (16, 12)
    onnx_formats = {ExportFormat.onnx, ExportFormat.web}
    for export_format in onnx_formats:
        assert find_unsupported(model.config, export_format) == []
    for export_format in set(ExportFormat) - onnx_formats:
        (unsupported,) = find_unsupported(model.config, export_format)
        assert "model.head_size=4" in unsupported
    with pytest.raises(ConfigError, match=r"model.num_heads=3: must divide .*model.head_size"):
        tiny_config(num_heads=3)
    with pytest.raises(ConfigError, match="even number of dimensions per head"):
        tiny_config(positions=Positions.rotary, head_size=5)


def test_weights_of_encodings_keep_their_names_in_files() -> None:
    names = {
        Positions.learned: ["decoder_positions", "encoder_positions"],
        Positions.relative: [
            "decoder_layers.0.self_attention.relation.keys",
            "decoder_layers.0.self_attention.relation.values",
            "decoder_layers.1.self_attention.relation.keys",
            "decoder_layers.1.self_attention.relation.values",
            "encoder_layers.0.self_attention.relation.keys",
            "encoder_layers.0.self_attention.relation.values",
            "encoder_layers.1.self_attention.relation.keys",
            "encoder_layers.1.self_attention.relation.values",
        ],
    }
    usual_names = set(tiny_model().state_dict())
    for name in usual_names:
        assert name.endswith((".weight", ".bias"))
    for positions, expected in names.items():
        weights = tiny_model(positions=positions).state_dict()
        assert sorted(set(weights) - usual_names) == expected
        twin = tiny_model(seed=1, positions=positions)
        twin.load_state_dict(weights)
        assert_same_tensors(twin.state_dict(), weights)


# --- gradients


@pytest.mark.slow
def test_gradients_equal_finite_differences_in_float64() -> None:
    src, lengths = random_source([5, 3])
    tgt = random_target(2, 4)
    for name, changes in VARIANTS.items():
        settings = {"num_heads": 4, **changes, "num_encoder_layers": 1, "num_decoder_layers": 1}
        model = plain(tiny_model(**settings).double())
        factors = torch.randn(2, 4, 16, dtype=torch.float64)

        def loss(model: Transformer = model, factors: Tensor = factors) -> Tensor:
            return (hidden_states(model, src, lengths, tgt) * factors).sum()

        loss().backward()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                direction = torch.randn_like(parameter)
                parameter.add_(direction, alpha=1e-5)
                loss_above = loss()
                parameter.add_(direction, alpha=-2e-5)
                loss_below = loss()
                parameter.add_(direction, alpha=1e-5)
                assert parameter.grad is not None
                slope = (parameter.grad * direction).sum()
                expected = (loss_above - loss_below) / 2e-5
                assert_near(slope, expected, (name, parameter_name), atol=1e-6, rtol=1e-5)


# --- packed sentences, steps, other sentences


@pytest.mark.slow
def test_packed_sentences_give_the_outputs_and_gradients_of_the_plain_model() -> None:
    src, lengths = random_source(LENGTHS)
    tgt = random_target(B, T)
    for name, model in models():
        twin = plain(model)
        hidden = hidden_states(model, src, lengths, tgt)
        expected = hidden_states(twin, src, lengths, tgt)
        assert_near(hidden, expected, name)
        factors = torch.randn_like(hidden)
        (hidden * factors).sum().backward()
        (expected * factors).sum().backward()
        gradients = gradients_by_name(model)
        assert_near(gradients, gradients_by_name(twin), name, atol=1e-4, rtol=1e-4)


@every_sample
@torch.inference_mode()
def test_cached_steps_equal_one_pass_of_the_plain_model(sample: str) -> None:
    src, lengths = random_source(LENGTHS)
    tgt = random_target(B, 20)
    for name, model in models(sample):
        expected = hidden_states(plain(model), src, lengths, tgt)
        assert_near(decode_by_steps(model, src, lengths, tgt), expected, name)
        prepare_for_inference(model)
        assert_near(decode_by_steps(model, src, lengths, tgt), expected, (name, "frozen"))


@every_sample
@torch.inference_mode()
def test_steps_of_beams_and_of_joining_sentences_equal_the_plain_model(sample: str) -> None:
    for name, model in models(sample):
        config = model.config
        has_default_steps = config.positions.is_sinusoidal and config.decoder is Decoder.attention
        if has_default_steps and config.num_kv_heads is None:
            continue  # steps like the default model
        if name in ("rotary", "ssru, pre"):
            prepare_for_inference(model)
        check_beams(model, max_rows=3, case=name)


@torch.no_grad()
def check_recorded_attention(name: str, model: FastTransformer) -> None:
    """Compare the weights of masked, packed and cached attention with the plain model."""
    src, lengths = random_source(LENGTHS)
    tgt = random_target(B, T)

    def weights_of(owner: Transformer, *inputs: Any) -> list[Tensor | None]:
        layer: Any = owner.decoder_layers[-1]
        attention_out = {layer.cross_attention: None}
        if model.config.decoder is Decoder.attention:
            attention_out[layer.self_attention] = None
        owner(*inputs, attention_out)
        return list(attention_out.values())

    masked = (src, padding_mask(lengths, S), tgt, causal_mask(T))
    expected = weights_of(plain(model), *masked)
    assert_near(weights_of(model, *masked), expected, name)
    src_packing = pack(LENGTHS)
    tgt_packing = pack([T] * B)
    packed = (src_packing.unpad(src), src_packing, tgt.flatten(), tgt_packing)
    assert_near(weights_of(model, *packed), expected, name)
    state = model.start(src, lengths)
    layer: Any = model.decoder_layers[-1]
    attention_out: Any = {layer.cross_attention: None}
    steps = []
    for column in tgt.T:
        model.step(column, state, attention_out)
        steps.append(attention_out[layer.cross_attention])
    stepped = torch.cat(steps, dim=2)  # (B, H, T, S or more)
    assert_near(stepped[..., :S], expected[0], name)
    assert (stepped[..., S:] == 0).all(), name


def test_recorded_attention_equals_the_plain_model() -> None:
    check_recorded_attention("default", tiny_model())


@pytest.mark.slow
def test_recorded_attention_of_every_setting_equals_the_plain_model() -> None:
    for name, model in models():
        check_recorded_attention(name, model)


def test_autocast_changes_the_modern_layers_by_rounding_only() -> None:
    src, lengths = random_source(LENGTHS)
    tgt = random_target(B, T)
    for name, model in models():
        if "modern" not in name:
            continue
        exact = hidden_states(plain(model), src, lengths, tgt)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = [
                hidden_states(plain(model), src, lengths, tgt),
                hidden_states(model, src, lengths, tgt),
                decode_by_steps(model, src, lengths, tgt),
            ]
        for hidden in outputs:
            assert 1e-4 < (hidden - exact).norm() / exact.norm() < 0.03, name


def test_pairs_rotate_alike_with_and_without_complex_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    angles = torch.rand(5, 1, 4)
    rotations = torch.stack([angles.cos(), angles.sin()], dim=-1)  # (5, 1, d/2, 2)
    x = torch.randn(5, 3, 8)
    expected = rotate_pairs(x, rotations)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_near(rotate_pairs(x, rotations), expected, atol=1e-6)
