"""Every setting of the layers: against a naive oracle, gradients against differences of float64,
packed sentences and steps with a cache against the plain page, and sentences among others.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from tiny import (
    assert_near,
    decode_by_steps,
    hidden_states,
    plain,
    random_source,
    random_target,
    tiny_config,
    tiny_model,
)
from torch import Tensor
from variants import VARIANTS

from nmt.config import Activation, ModelConfig, NormLayer, Positions
from nmt.model.fast import freeze
from nmt.model.positions import Rotary, TokenPositions
from nmt.model.transformer import (
    FeedForward,
    MultiHeadAttention,
    as_context,
    causal_mask,
    new_norm,
    padding_mask,
)

LENGTHS = [7, 3, 5, 1]
B, T = 4, 6


def models() -> Any:
    for name, changes in VARIANTS.items():
        yield name, tiny_model(**{"num_heads": 4, **changes})


# --- formulas, one number at a time


def naive_attention(
    module: MultiHeadAttention, config: ModelConfig, x: Tensor, memory: Tensor, *, is_causal: bool
) -> Tensor:
    """Attend from `x` (T, D) to `memory` (S, D), with loops over heads, queries and keys."""
    size, is_self, positions = module.head_size, memory is x, config.positions
    weight, bias = module.in_projection.weight, module.in_projection.bias
    num_kv_heads = config.num_kv_heads or config.num_heads
    q_size = config.num_heads * size
    starts = [0, q_size, q_size + num_kv_heads * size]

    def vector(kind: int, head: int, y: Tensor, place: int) -> Tensor:
        first = starts[kind] + head * size
        found = y @ weight[first : first + size].T + bias[first : first + size]
        if config.qk_norm and is_self and kind < 2:
            norm: Any = (module.query_norm, module.key_norm)[kind]
            found = found / (found.square().mean() + 1e-5).sqrt() * norm.weight
        if is_self and positions is Positions.rotary and kind < 2:
            for i in range(size // 2):
                angle = place / 10000 ** (2 * i / size)
                turn = torch.tensor(
                    [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
                )
                pair = turn.to(found) @ found[2 * i : 2 * i + 2]
                found = torch.cat([found[: 2 * i], pair, found[2 * i + 2 :]])
        return found

    rows = []
    for t, y in enumerate(x):
        heads = []
        for h in range(config.num_heads):
            kv_head = h * num_kv_heads // config.num_heads
            query = vector(0, h, y, t)
            logits, values = [], []
            for s, z in enumerate(memory[: t + 1] if is_causal else memory):
                key, value = vector(1, kv_head, z, s), vector(2, kv_head, z, s)
                if is_self and positions is Positions.relative:
                    relation: Any = module.position_encoding
                    row = max(-config.max_distance, min(config.max_distance, s - t))
                    key = key + relation.keys[row + config.max_distance]
                    value = value + relation.values[row + config.max_distance]
                logit = query @ key / math.sqrt(size)
                if is_self and positions is Positions.alibi:
                    logit = logit - 2 ** (-8 * (h + 1) / config.num_heads) * abs(t - s)
                logits.append(logit)
                values.append(value)
            heads.append(torch.stack(logits).softmax(0) @ torch.stack(values))
        rows.append(torch.cat(heads))
    joined = torch.stack(rows)
    return joined @ module.out_projection.weight.T + module.out_projection.bias


@torch.no_grad()
def test_attention_is_that_of_the_papers() -> None:
    x, memory = torch.randn(2, 1, 6, 16, dtype=torch.float64).unbind()
    for name, model in models():
        twin: Any = plain(model.double())
        layers = twin.encoder_layers[0], twin.decoder_layers[0]
        for module, other, is_causal in (
            (layers[0].self_attention, x, False),
            (layers[1].self_attention, x, True),
            (layers[1].cross_attention, memory, False),
        ):
            mask = causal_mask(6) if is_causal else padding_mask(torch.tensor([6]), 6)
            found = module(x, other, as_context(mask, x[..., 0]))[0]
            pair = x[0], x[0] if other is x else memory[0]
            if other is x:
                pair = pair[0], pair[0]
            expected = naive_attention(module, model.config, *pair, is_causal=is_causal)
            assert_near(found, expected, (name, is_causal), atol=1e-7)


@torch.no_grad()
def test_norms_and_gates_are_those_of_the_papers() -> None:
    x = torch.randn(3, 6, dtype=torch.float64)
    norm: Any = new_norm(NormLayer.rms, 6).double()
    norm.weight.uniform_(0.5, 1.5)
    for scale in (1.0, 1e-3):  # where epsilon counts
        mean = (scale * x).square().sum(1, keepdim=True) / 6
        expected = scale * x / torch.sqrt(mean + 1e-5) * norm.weight
        assert_near(norm(scale * x), expected, scale, atol=1e-9)
    layer: Any = FeedForward(6, 10, 0.0, Activation.swiglu).double()
    gate = x @ layer.gate.weight.T + layer.gate.bias
    hidden = gate / (1 + torch.exp(-gate)) * (x @ layer.inner.weight.T + layer.inner.bias)
    assert_near(layer(x), hidden @ layer.outer.weight.T + layer.outer.bias, atol=1e-9)


def rotate(x: Tensor, position: int) -> Tensor:
    positions = TokenPositions(torch.tensor(position), position + 1)
    turned, _ = Rotary(tiny_config(positions=Positions.rotary)).rotate(
        x.clone(), x.clone(), positions
    )
    return turned


def test_products_of_rotated_vectors_depend_on_the_distance_only() -> None:
    query, key = torch.randn(2, 8, dtype=torch.float64)
    for first, second in ((0, 3), (5, 8), (1000, 1003)):
        product = rotate(query, first) @ rotate(key, second)
        assert_near(product, query @ rotate(key, 3), first, atol=1e-9)


def test_rotation_in_place_without_gradients_is_the_same() -> None:
    x = torch.randn(5, 8)
    expected = rotate(x, 7)
    with torch.no_grad():
        assert_near(rotate(x, 7), expected)
    assert_near(expected, rotate(x.double(), 7).float())


# --- gradients


@pytest.mark.slow
def test_gradients_are_differences_of_float64() -> None:
    source, tgt = random_source([5, 3]), random_target(2, 4)
    for name, changes in VARIANTS.items():
        few = {"num_encoder_layers": 1, "num_decoder_layers": 1}
        model = plain(tiny_model(**{"num_heads": 4, **changes, **few}).double())
        wanted = torch.randn(2, 4, 16, dtype=torch.float64)

        def loss(owner: Any = model, wanted: Tensor = wanted) -> Tensor:
            return (hidden_states(owner, *source, tgt) * wanted).sum()

        loss().backward()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                direction = torch.randn_like(parameter)
                ends = []
                for step in (1e-5, -2e-5):
                    parameter.add_(direction, alpha=step)
                    ends.append(loss())
                parameter.add_(direction, alpha=1e-5)
                assert parameter.grad is not None
                found, expected = (parameter.grad * direction).sum(), (ends[0] - ends[1]) / 2e-5
                assert_near(found, expected, (name, parameter_name), atol=1e-6, rtol=1e-5)


# --- packed sentences, steps, other sentences


@pytest.mark.slow
def test_packed_sentences_give_the_outputs_and_gradients_of_the_plain_page() -> None:
    source, tgt = random_source(LENGTHS), random_target(B, T)
    for name, model in models():
        twin = plain(model)
        found, expected = (hidden_states(owner, *source, tgt) for owner in (model, twin))
        assert_near(found, expected, name)
        weights = torch.randn_like(found)
        for hidden in (found, expected):
            (hidden * weights).sum().backward()
        for (key, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert_near(ours.grad, theirs.grad, (name, key), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_steps_with_a_cache_are_the_plain_page_at_once() -> None:
    source, tgt = random_source(LENGTHS), random_target(B, 20)
    for name, model in models():
        expected = hidden_states(plain(model), *source, tgt)
        for _ in range(2):  # as it is, then frozen
            assert_near(decode_by_steps(model, *source, tgt), expected, name)
            freeze(model)


@torch.inference_mode()
def test_steps_of_beams_and_of_sentences_that_join_are_the_plain_page_at_once() -> None:
    """Beams change places, sentences end and others join, so that columns mean other positions."""
    draw = torch.Generator().manual_seed(5)
    for name, model in models():
        if model.config.positions.is_sinusoidal and model.config.num_kv_heads is None:
            continue  # a cache has nothing new
        twin, (src, lengths) = plain(model), random_source([5, 3, 6, 2, 4])
        if name == "rotary":
            freeze(model)
        cache = model.start(src[:3], lengths[:3])
        read = [[] for _ in range(3)]  # the tokens of each row
        numbers = [0, 1, 2]  # and its sentence
        for step in range(28):
            tokens = torch.randint(4, 20, (len(read),), generator=draw)
            found = model.step(tokens, cache)
            for row, token in zip(read, tokens.tolist(), strict=True):
                row.append(token)
            ends = torch.tensor([len(row) - 1 for row in read])
            wide = torch.tensor([row + [0] * (int(ends.max()) + 1 - len(row)) for row in read])
            whole = hidden_states(twin, src[numbers], lengths[numbers], wide)
            assert_near(found, whole[torch.arange(len(read)), ends], (name, step), atol=1e-4)
            if step == 14:  # the last sentences end
                kept = [i for i, number in enumerate(numbers) if number < 2]
            else:  # some row of each sentence, up to three of them
                kept = []
                for _, group in itertools.groupby(range(len(read)), key=lambda i: numbers[i]):
                    rows = list(group)
                    count = 1 + int(torch.randint(3, (), generator=draw))
                    chosen = torch.randint(len(rows), (count,), generator=draw).tolist()
                    kept += sorted(rows[i] for i in chosen)
            cache.reorder(torch.tensor(kept))
            places = {number: i for i, number in enumerate(dict.fromkeys(numbers[i] for i in kept))}
            read, numbers = [list(read[i]) for i in kept], [numbers[i] for i in kept]
            assert len(places) == len(set(numbers))
            if step in (5, 18):
                more = [3] if step == 5 else [4]
                model.join(cache, src[more], lengths[more])
                read, numbers = [*read, []], [*numbers, *more]


@pytest.mark.slow
@torch.no_grad()
def test_neither_padding_nor_other_sentences_change_anything() -> None:
    (src, lengths), tgt = random_source(LENGTHS), random_target(B, T)
    for name, fast in models():
        for model in (fast, plain(fast)):
            together = hidden_states(model, src, lengths, tgt)
            for i, length in enumerate(LENGTHS):
                one = src[i : i + 1, :length], lengths[i : i + 1], tgt[i : i + 1]
                alone = hidden_states(model, *one)[0]
                assert_near(alone, together[i], (name, type(model), i))


@pytest.mark.slow
@torch.no_grad()
def test_recorded_attention_is_that_of_the_plain_page_packed_and_in_steps() -> None:
    (src, lengths), tgt = random_source(LENGTHS), random_target(B, T)
    for name, model in models():
        recorded = []
        for owner in (plain(model), model):
            layer: Any = owner.decoder_layers[-1]
            record: dict[Any, Any] = {layer.self_attention: None, layer.cross_attention: None}
            masks = padding_mask(lengths, src.size(1)), causal_mask(T)
            owner(src, masks[0], tgt, masks[1], record)
            recorded.append(list(record.values()))
        assert_near(recorded[1], recorded[0], name)
        cache, steps = model.start(src, lengths), []
        for column in tgt.T:
            model.step(column, cache, record)
            steps.append(record[layer.cross_attention][..., : src.size(1)])
        assert_near(torch.cat(steps, dim=2), recorded[0][1], name)


def test_under_autocast_a_variant_is_the_plain_page_but_for_rounding() -> None:
    source, tgt = random_source(LENGTHS), random_target(B, T)
    for name, model in models():
        if "modern" not in name:
            continue
        exact = hidden_states(plain(model), *source, tgt)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            runs = [hidden_states(plain(model), *source, tgt), hidden_states(model, *source, tgt)]
            runs.append(decode_by_steps(model, *source, tgt))
        for found in runs:
            assert 1e-4 < (found - exact).norm() / exact.norm() < 0.03, name


def test_the_default_model_has_no_parameters_of_variants() -> None:
    names = {name.rpartition(".")[2] for name in plain(tiny_model()).state_dict()}
    assert names == {"weight", "bias"}
    assert tiny_config().positions is Positions.sinusoidal
