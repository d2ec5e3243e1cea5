"""The plain Transformer against torch's own, naive loops and the formulas of the paper, and the
properties that masks promise; these hold for the accelerated model, too.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from tiny import (
    BOS,
    EOS,
    PAD,
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

from nmt.config import ModelConfig, Norm, Positions
from nmt.model import positions, transformer
from nmt.model.attention import MultiHeadAttention, as_context, attend, causal_mask, padding_mask
from nmt.model.positions import TokenPositions, sinusoidal_positions
from nmt.model.transformer import Transformer, count_parameters

NORMS = [Norm.post, Norm.pre]
LENGTHS = [7, 3, 5, 1]  # of source sentences, EOS included
BASE = ModelConfig()
BIG = ModelConfig(d_model=1024, d_ff=4096, num_heads=16)


# --- size


def test_base_and_big_have_the_papers_number_of_parameters() -> None:
    for config, expected in ((BASE, 63_082_496), (BIG, 214_245_376)):
        with torch.device("meta"):
            model = Transformer(config, 37_000)
        assert count_parameters(model) == expected


# --- positions


def paper_positions(length: int, d_model: int) -> Tensor:
    """Section 3.5, one number at a time."""
    table = torch.zeros(length, d_model, dtype=torch.float64)
    for pos, i in itertools.product(range(length), range(d_model // 2)):
        angle = pos / 10000 ** (2 * i / d_model)
        table[pos, 2 * i] = math.sin(angle)
        table[pos, 2 * i + 1] = math.cos(angle)
    return table


def tensor2tensor_positions(length: int, d_model: int) -> Tensor:
    """`get_timing_signal_1d` of Tensor2Tensor, one number at a time."""
    num_timescales = d_model // 2
    increment = math.log(10000.0 / 1.0) / (num_timescales - 1)
    table = torch.zeros(length, d_model, dtype=torch.float64)
    for pos, i in itertools.product(range(length), range(num_timescales)):
        angle = pos * math.exp(-i * increment)
        table[pos, i] = math.sin(angle)
        table[pos, num_timescales + i] = math.cos(angle)
    return table


LAYOUTS: dict[Positions, Any] = {
    Positions.sinusoidal: paper_positions,
    Positions.sinusoidal_concat: tensor2tensor_positions,
}


def test_positions_follow_their_formula_and_bfloat16_rounds_it_once() -> None:
    for layout, formula in LAYOUTS.items():
        for d_model in (4, 16, 30):
            table = sinusoidal_positions(300, d_model, layout)
            assert table.dtype is torch.float32
            assert_near(table.double(), formula(300, d_model), (layout, d_model), atol=1e-7, rtol=0)
        model = plain(tiny_model(positions=layout)).bfloat16()
        src, lengths = random_source([600])
        model.encode(src, padding_mask(lengths, 600))  # the table grows beyond its first 512 rows
        assert torch.equal(
            model.encoder_positions.table[:600], formula(600, 16).float().bfloat16()
        ), layout
    model = Transformer(tiny_config(d_model=512), VOCAB_SIZE).bfloat16()
    x = torch.zeros(1024, 512, dtype=torch.bfloat16)
    table = model.encoder_positions.add(x, TokenPositions.up_to(1024, x.device))
    assert len(torch.unique(table, dim=0)) == 1024


def test_sentences_longer_than_the_table_of_positions_work(monkeypatch: pytest.MonkeyPatch) -> None:
    src, lengths = random_source([5, 3])
    tgt = random_target(2, 33)
    expected = hidden_states(plain(tiny_model()), src, lengths, tgt)
    monkeypatch.setattr(positions, "INITIAL_TABLE_ROWS", 4)
    for model, run in (
        (plain(tiny_model()), hidden_states),
        (tiny_model(), hidden_states),
        (tiny_model(), decode_by_steps),
    ):
        assert len(model.encoder_positions.table) == 4
        assert_near(run(model, src, lengths, tgt), expected, (type(model), run))


# --- torch's Transformer as the oracle


def copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    theirs.in_proj_weight.copy_(ours.in_projection.weight)
    theirs.in_proj_bias.copy_(ours.in_projection.bias)
    theirs.out_proj.load_state_dict(ours.out_projection.state_dict())


@torch.no_grad()
def copy_layer(ours: Any, theirs: Any) -> None:
    copy_attention(ours.self_attention, theirs.self_attn)
    norms = [ours.self_attention_norm, ours.feed_forward_norm]
    if hasattr(ours, "cross_attention"):
        copy_attention(ours.cross_attention, theirs.multihead_attn)
        norms.insert(1, ours.cross_attention_norm)
    theirs.linear1.load_state_dict(ours.feed_forward.inner.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.outer.state_dict())
    for number, norm in enumerate(norms, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())


def torch_stack(model: Transformer, side: str) -> Any:
    """Build torch's encoder or decoder with the weights of `model`."""
    config = model.config
    name = side.capitalize()
    pre = config.norm is Norm.pre
    new_layer = getattr(nn, f"Transformer{name}Layer")
    layer = new_layer(
        config.d_model,
        config.num_heads,
        config.d_ff,
        config.dropout,
        batch_first=True,
        norm_first=pre,
    )
    norm = nn.LayerNorm(config.d_model) if pre else None
    extra = {"enable_nested_tensor": False} if side == "encoder" else {}
    num_layers = getattr(config, f"num_{side}_layers")
    stack = getattr(nn, f"Transformer{name}")(layer, num_layers, norm=norm, **extra)
    for ours, theirs in zip(getattr(model, f"{side}_layers"), stack.layers, strict=True):
        copy_layer(ours, theirs)
    if pre:
        stack.norm.load_state_dict(getattr(model, f"{side}_norm").state_dict())
    return stack.train(model.training)


def oracle_embed(model: Transformer, ids: Tensor) -> Tensor:
    """sqrt(d_model) * embedding + positions (sections 3.4 and 3.5)."""
    vectors = model.embedding.weight[ids] * model.config.d_model**0.5
    return vectors + paper_positions(ids.size(1), model.config.d_model).float()


def test_encoder_and_decoder_equal_torchs() -> None:
    (src, lengths) = random_source(LENGTHS)
    tgt = random_target(len(LENGTHS), 6)
    src_mask = padding_mask(lengths, src.size(1))
    is_padding = ~src_mask[:, 0, 0]  # (B, S), True = ignored, torch's convention
    options = {"tgt_mask": ~causal_mask(6), "memory_key_padding_mask": is_padding}
    for case in itertools.product(NORMS, [(2, 5), (6, 1)], (False, True)):
        norm, (num_encoder_layers, num_decoder_layers), training = case
        layers = dict(num_encoder_layers=num_encoder_layers, num_decoder_layers=num_decoder_layers)
        model = plain(tiny_model(norm=norm, num_heads=2, **layers)).train(training)
        encoder = torch_stack(model, "encoder")
        decoder = torch_stack(model, "decoder")
        memory = encoder(oracle_embed(model, src), src_key_padding_mask=is_padding)
        assert_near(model.encode(src, src_mask)[~is_padding], memory[~is_padding], case)
        expected = decoder(oracle_embed(model, tgt), memory, **options)
        hidden = model(src, src_mask, tgt, causal_mask(6))
        assert_near(hidden, expected, case)
        assert_near(model.logits(hidden), expected @ model.embedding.weight.T, case, atol=1e-4)


@torch.no_grad()
def test_attention_and_its_recorded_weights_equal_torchs() -> None:
    model = plain(tiny_model(3))
    attention: Any = model.decoder_layers[0].cross_attention
    theirs = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    copy_attention(attention, theirs)
    x = torch.randn(3, 5, 16)
    memory = torch.randn(3, 6, 16)
    x_mask = padding_mask(torch.tensor([5, 2, 1]), 5)
    memory_mask = padding_mask(torch.tensor([6, 3, 1]), 6)
    cases = {
        "self": (x, x_mask),
        "causal": (x, x_mask & causal_mask(5)),
        "cross": (memory, memory_mask),
    }
    for name, (keys, mask) in cases.items():
        attention_out: dict[Any, Tensor | None] = {attention: None}
        context = as_context(mask, x[..., 0])
        output = attention(x, keys, context, attention_out)
        hidden = ~mask.expand(3, 4, 5, keys.size(1)).flatten(0, 1)  # (B * H, T, S)
        expected = theirs(x, keys, keys, attn_mask=hidden, average_attn_weights=False)
        assert_near([output, attention_out[attention]], list(expected), name)
    (src, lengths) = random_source([5, 3])
    tgt = random_target(2, 4)
    attention_out = {m: None for m in model.modules() if isinstance(m, MultiHeadAttention)}
    src_mask = padding_mask(lengths, 5)
    recorded = model(src, src_mask, tgt, causal_mask(4), attention_out)
    expected = model(src, src_mask, tgt, causal_mask(4))
    assert torch.equal(recorded, expected)  # recording changes nothing
    shapes = [tuple(weights.shape[1:]) for weights in attention_out.values() if weights is not None]
    assert shapes == 2 * [(4, 5, 5)] + 2 * [(4, 4, 4), (4, 4, 5)]


def test_fresh_weights_lie_within_the_bounds_of_torchs_layers() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(48, 4).in_proj_weight
    ours = MultiHeadAttention(tiny_config(d_model=48), is_self=True).in_projection.weight
    bound = math.sqrt(6 / (48 + 3 * 48))
    for block in (*ours.chunk(3), *theirs.chunk(3)):
        assert 0.99 * bound < float(block.detach().abs().max()) <= bound
    layer = transformer.FeedForward(48, 192, 0.0)
    for linear, bound in ((layer.inner, 48**-0.5), (layer.outer, 192**-0.5)):
        assert 0.99 * bound < float(linear.weight.detach().abs().max()) <= bound


def test_softmax_is_float32_when_the_model_is_bfloat16() -> None:
    queries = torch.randn(2, 3, 4, 8).bfloat16()
    keys = torch.randn(2, 3, 50, 8).bfloat16()
    values = torch.randn(2, 3, 50, 8).bfloat16()
    heads, weights = attend(queries, keys, values, torch.ones(1, dtype=torch.bool))
    assert heads.dtype is torch.bfloat16
    assert weights.dtype is torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 4), atol=1e-6, rtol=0)


# --- one matrix


@torch.no_grad()
def test_one_matrix_is_both_embeddings_and_the_output() -> None:
    model = plain(tiny_model())
    for name, tensor in model.state_dict().items():
        assert (VOCAB_SIZE in tensor.shape) == (name == "embedding.weight")
        assert "positions" not in name
    src = torch.tensor([[5, 6, EOS]])
    src_mask = padding_mask(torch.tensor([3]), 3)
    tgt = torch.tensor([[BOS, 5]])
    hidden = torch.randn(16)

    def embeddings_and_logits() -> list[Tensor]:
        memory = model.encode(src, src_mask)
        decoded = model.decode(tgt, causal_mask(2), torch.ones_like(memory), src_mask)
        return [memory, decoded, model.logits(hidden)]

    old_outputs = embeddings_and_logits()
    model.embedding.weight[5] += 1.0
    new_outputs = embeddings_and_logits()
    for old, new in zip(old_outputs, new_outputs, strict=True):
        assert not torch.equal(old, new)
    assert (old_outputs[2] != new_outputs[2]).nonzero().tolist() == [[5]]


# --- causality, padding, neighbors


def both_models(**changes: Any) -> list[Transformer]:
    """Return accelerated models of both norms and the plain ones."""
    fast = [tiny_model(norm=norm, **changes) for norm in NORMS]
    return [*fast, *map(plain, fast)]


def test_a_position_sees_itself_and_the_past_but_no_future() -> None:
    tgt = random_target(2, 6)
    for model, mode in itertools.product(both_models(dropout=0.1), (False, True)):
        model.train(mode)
        embedded: list[Tensor] = []
        model.embedding.register_forward_hook(lambda *call, to=embedded: to.append(call[-1]))
        src, lengths = random_source([5, 3])
        logits = model.logits(hidden_states(model, src, lengths, tgt))
        for t in range(6):
            score = logits[:, t].log_softmax(-1)[:, 7].sum()
            (gradient,) = torch.autograd.grad(score, embedded[1], retain_graph=True)
            sizes = gradient.view(2, 6, -1).abs().amax(dim=(0, 2))  # (T,)
            assert (sizes[t + 1 :] == 0).all(), type(model)
            assert (sizes[: t + 1] > 0).all(), type(model)


@torch.no_grad()
def test_neither_padding_nor_other_sentences_change_anything() -> None:
    (src, lengths) = random_source(LENGTHS)
    tgt = random_target(len(LENGTHS), 6)
    is_padding = torch.arange(src.size(1)) >= lengths[:, None]
    other_padding = src.masked_scatter(
        is_padding, torch.arange(4, 4 + int(is_padding.sum())) % 19 + 4
    )
    for model in both_models():
        together = hidden_states(model, src, lengths, tgt)
        assert_near(hidden_states(model, other_padding, lengths, tgt), together, type(model))
        for i, length in enumerate(LENGTHS):
            for num_padding, num_targets in ((0, 2), (0, 6), (50, 2), (50, 6)):
                row = nn.functional.pad(src[i : i + 1, :length], (0, num_padding), value=PAD)
                start = tgt[i : i + 1, :num_targets]
                alone = hidden_states(model, row, lengths[i : i + 1], start)
                assert_near(alone[0], together[i, :num_targets], (type(model), i, num_padding))
        model.embedding.weight[PAD] = 1e4
        assert_near(hidden_states(model, src, lengths, tgt), together, type(model))


def test_an_empty_sentence_gives_numbers_and_finite_gradients() -> None:
    src = torch.tensor([[5, EOS], [PAD, PAD]])
    lengths = torch.tensor([2, 0])
    for model in both_models():
        hidden_states(model, src, lengths, random_target(2, 3)).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), (type(model), name)
