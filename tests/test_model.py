"""The Transformer against torch's own, naive loops, and the properties that masks promise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import (
    BOS,
    EOS,
    PAD,
    VOCAB_SIZE,
    decode_by_steps,
    hidden_states,
    random_source,
    random_target,
    tiny_config,
    tiny_model,
)
from nmt.model.attention import MultiHeadAttention
from torch import Tensor, nn

from nmt.config import ModelConfig, Norm, Positions
from nmt.model import transformer
from nmt.model.fast.packing import pack
from nmt.model.transformer import Transformer, num_parameters, sinusoidal_positions

NORMS = [Norm.post, Norm.pre]
LENGTHS = [7, 3, 5, 1]  # of source sentences, EOS included
BASE = ModelConfig()
BIG = ModelConfig(d_model=1024, d_ff=4096, num_heads=16)


# --- size


def paper_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Count the weights of figure 1 one matrix at a time."""
    d, d_ff = config.d_model, config.d_ff
    attention, norm = 4 * (d * d + d), 2 * d
    feed_forward = d * d_ff + d_ff + d_ff * d + d
    encoder = attention + feed_forward + 2 * norm
    decoder = 2 * attention + feed_forward + 3 * norm
    layers = config.num_encoder_layers * encoder + config.num_decoder_layers * decoder
    return vocab_size * d + layers


@pytest.mark.parametrize(("config", "expected"), [(BASE, 63_082_496), (BIG, 214_245_376)])
def test_base_and_big_have_the_papers_number_of_parameters(
    config: ModelConfig, expected: int
) -> None:
    with torch.device("meta"):
        model = Transformer(config, 37_000)
    assert num_parameters(model) == expected == paper_parameters(config, 37_000)


def test_pre_norm_adds_one_norm_to_each_stack() -> None:
    post, pre = (num_parameters(Transformer(tiny_config(norm=norm), 50)) for norm in NORMS)
    assert pre - post == 2 * 2 * 16


# --- positions


def paper_positions(length: int, d_model: int) -> Tensor:
    """Section 3.5, one number at a time."""
    table = torch.zeros(length, d_model, dtype=torch.float64)
    for pos in range(length):
        for i in range(d_model // 2):
            angle = pos / 10000 ** (2 * i / d_model)
            table[pos, 2 * i] = math.sin(angle)
            table[pos, 2 * i + 1] = math.cos(angle)
    return table


def tensor2tensor_positions(length: int, d_model: int) -> Tensor:
    """`get_timing_signal_1d` of Tensor2Tensor, one number at a time."""
    num_timescales = d_model // 2
    increment = math.log(10000.0 / 1.0) / (num_timescales - 1)
    table = torch.zeros(length, d_model, dtype=torch.float64)
    for pos in range(length):
        for i in range(num_timescales):
            angle = pos * math.exp(-i * increment)
            table[pos, i] = math.sin(angle)
            table[pos, num_timescales + i] = math.cos(angle)
    return table


LAYOUTS = [
    (Positions.sinusoidal, paper_positions),
    (Positions.sinusoidal_concat, tensor2tensor_positions),
]


@pytest.mark.parametrize("d_model", [4, 16, 30])
@pytest.mark.parametrize(("layout", "oracle"), LAYOUTS)
def test_positions_follow_their_formula(layout: Positions, oracle: Any, d_model: int) -> None:
    table = sinusoidal_positions(300, d_model, layout)
    assert table.dtype is torch.float32
    torch.testing.assert_close(table.double(), oracle(300, d_model), atol=1e-7, rtol=0)


@pytest.mark.parametrize(("layout", "oracle"), LAYOUTS)
def test_positions_in_bfloat16_are_the_float32_table_rounded_once(
    layout: Positions, oracle: Any
) -> None:
    model = tiny_model(positions=layout).bfloat16()
    model.encode(*random_source([1024]))  # the table grows beyond its first 512 rows
    table = model.positions[:1024]
    assert table.dtype is torch.bfloat16
    assert torch.equal(table, sinusoidal_positions(1024, 16, layout).bfloat16())
    assert torch.equal(table, oracle(1024, 16).float().bfloat16())


def test_positions_in_bfloat16_are_distinct() -> None:
    table = sinusoidal_positions(1024, 512, Positions.sinusoidal).bfloat16()
    assert len(torch.unique(table.float(), dim=0)) == 1024


@pytest.mark.parametrize("norm", NORMS)
def test_sentences_longer_than_the_table_of_positions_work(
    norm: Norm, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_table, src, tgt = tiny_model(norm=norm), random_source([40, 9]), random_target(2, 33)
    monkeypatch.setattr(transformer, "NUM_POSITIONS", 4)
    short_table = tiny_model(norm=norm)
    assert len(short_table.positions) == 4
    torch.testing.assert_close(
        hidden_states(short_table, *src, tgt), hidden_states(long_table, *src, tgt)
    )
    stepped = decode_by_steps(short_table, tgt, short_table.encode(*src))
    torch.testing.assert_close(stepped, hidden_states(long_table, *src, tgt), atol=1e-5, rtol=1e-5)


def test_the_table_of_positions_is_no_weight() -> None:
    model = tiny_model()
    assert "positions" not in model.state_dict()
    assert all(parameter is not model.positions for parameter in model.parameters())


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
    pre = config.norm is Norm.pre
    kinds = {
        "encoder": (nn.TransformerEncoderLayer, nn.TransformerEncoder),
        "decoder": (nn.TransformerDecoderLayer, nn.TransformerDecoder),
    }
    layer_kind, stack_kind = kinds[side]
    layer: Any = layer_kind(
        config.d_model,
        config.num_heads,
        config.d_ff,
        dropout=config.dropout,
        batch_first=True,
        norm_first=pre,
    )
    norm = nn.LayerNorm(config.d_model) if pre else None
    extra = {"enable_nested_tensor": False} if side == "encoder" else {}
    stack: Any = stack_kind(layer, getattr(config, f"num_{side}_layers"), norm=norm, **extra)
    for ours, theirs in zip(getattr(model, f"{side}_layers"), stack.layers, strict=True):
        copy_layer(ours, theirs)
    if pre:
        stack.norm.load_state_dict(getattr(model, f"{side}_norm").state_dict())
    return stack.train(model.training)


def oracle_embed(model: Transformer, ids: Tensor) -> Tensor:
    """sqrt(d_model) * embedding + positions (sections 3.4 and 3.5)."""
    d_model = model.config.d_model
    vectors = model.embedding.weight[ids] * d_model**0.5
    return vectors + paper_positions(ids.size(1), d_model).float()


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("depth", [(2, 2), (2, 5), (6, 1)])
@pytest.mark.parametrize("norm", NORMS)
def test_encoder_and_decoder_equal_torchs(
    norm: Norm, depth: tuple[int, int], training: bool
) -> None:
    layers = dict(zip(("num_encoder_layers", "num_decoder_layers"), depth, strict=True))
    model = tiny_model(norm=norm, **layers).train(training)
    encoder, decoder = torch_stack(model, "encoder"), torch_stack(model, "decoder")
    (src, lengths), tgt = random_source(LENGTHS), random_target(len(LENGTHS), 6)
    is_padding = torch.arange(src.size(1)) >= lengths[:, None]  # True = ignored, torch's convention
    is_future = torch.ones(6, 6, dtype=torch.bool).triu(1)

    hidden = hidden_states(model, src, lengths, tgt)
    expected = encoder(oracle_embed(model, src), src_key_padding_mask=is_padding)
    keys, _ = model.decoder_layers[0].cross_attention.project_memory(
        expected[~is_padding], pack(lengths.tolist())
    )
    found = model.encode(src, lengths).layers[0][0]
    shown = ~is_padding[:, None, :, None].expand_as(found)  # (B, H, S, D/H)
    torch.testing.assert_close(found[shown], keys[shown], atol=1e-5, rtol=1e-5)
    expected = decoder(
        oracle_embed(model, tgt),
        expected,
        tgt_mask=is_future,
        memory_key_padding_mask=is_padding,
    )
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        model.logits(hidden), expected @ model.embedding.weight.T, atol=1e-4, rtol=1e-5
    )


# --- attention, by loops


def naive_attention(
    attention: MultiHeadAttention, x: Tensor, memory: Tensor, visible: Tensor
) -> Tensor:
    """Equation 1 and section 3.2.2 for each sentence, head and query; `visible` is (B, T, S)."""
    weights = attention.in_projection.weight.chunk(3)
    biases = attention.in_projection.bias.chunk(3)
    d_model, num_heads = x.size(-1), attention.num_heads
    size = d_model // num_heads
    joined = torch.zeros_like(x)
    for b in range(x.size(0)):
        queries = x[b] @ weights[0].T + biases[0]
        keys = memory[b] @ weights[1].T + biases[1]
        values = memory[b] @ weights[2].T + biases[2]
        for h in range(num_heads):
            part = slice(h * size, (h + 1) * size)
            for t in range(x.size(1)):
                seen = [s for s in range(memory.size(1)) if visible[b, t, s]]
                scores = [float(queries[t, part] @ keys[s, part]) / math.sqrt(size) for s in seen]
                shares = [math.exp(score - max(scores)) for score in scores]
                for s, share in zip(seen, shares, strict=True):
                    joined[b, t, part] += share / sum(shares) * values[s, part]
    return joined @ attention.out_projection.weight.T + attention.out_projection.bias


@pytest.fixture
def attention() -> MultiHeadAttention:
    layer: Any = tiny_model(3).decoder_layers[0]
    assert isinstance(layer.cross_attention, MultiHeadAttention)
    return layer.cross_attention.double()


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_self_attention_equals_loops(attention: MultiHeadAttention, causal: bool) -> None:
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    sentences = pack([5, 2, 1])
    visible = sentences.mask[:, 0].expand(3, 5, 5)  # (B, T, T)
    if causal:
        visible = visible & torch.ones(5, 5, dtype=torch.bool).tril()
    found = attention.self_attention(sentences.unpad(x), sentences, causal=causal)
    expected = naive_attention(attention, x, x, visible)
    torch.testing.assert_close(found, sentences.unpad(expected))


@torch.no_grad()
def test_cross_attention_equals_loops(attention: MultiHeadAttention) -> None:
    memory = torch.randn(2, 6, 16, dtype=torch.float64)
    x = torch.randn(2, 4, 16, dtype=torch.float64)
    sources = pack([6, 3])
    targets = pack([4, 4])
    found = attention.cross_attention(targets.unpad(x), sources.unpad(memory), targets, sources)
    expected = naive_attention(attention, x, memory, sources.mask[:, 0].expand(2, 4, 6))
    torch.testing.assert_close(found, targets.unpad(expected))


# --- one matrix


@torch.no_grad()
def test_one_matrix_is_both_embeddings_and_the_output() -> None:
    model = tiny_model()
    with_vocabulary = [n for n, t in model.state_dict().items() if VOCAB_SIZE in t.shape]
    assert with_vocabulary == ["embedding.weight"]
    src, lengths = torch.tensor([[5, 6, EOS]]), torch.tensor([3])
    tgt, hidden = torch.tensor([[BOS, 5]]), torch.randn(16)

    def embeddings_and_logits() -> list[Tensor]:
        keys, _ = model.encode(src, lengths).layers[0]
        targets = model.embedding(tgt)
        return [keys, targets, model.logits(hidden)]

    before = embeddings_and_logits()
    model.embedding.weight[5] += 1.0
    after = embeddings_and_logits()
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert (before[2] != after[2]).nonzero().tolist() == [[5]]


# --- causality


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_position_sees_itself_and_the_past_but_no_future(norm: Norm, training: bool) -> None:
    model = tiny_model(norm=norm, dropout=0.1).train(training)
    tgt = random_target(2, 6)
    embedded: list[Tensor] = []
    model.embedding.register_forward_hook(lambda *call: embedded.append(call[-1]))
    logits = model.logits(hidden_states(model, *random_source([5, 3]), tgt))
    for t in range(6):
        score = logits[:, t].log_softmax(-1)[:, 7].sum()
        (gradient,) = torch.autograd.grad(score, embedded[1], retain_graph=True)
        sizes = gradient.view(2, 6, -1).abs().amax(dim=(0, 2))  # (T,)
        assert (sizes[t + 1 :] == 0).all()
        assert (sizes[: t + 1] > 0).all()


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("norm", NORMS)
def test_later_targets_change_no_earlier_logits(norm: Norm, training: bool) -> None:
    model = tiny_model(norm=norm, dropout=0.1).train(training)
    src, tgt = random_source([5, 3]), random_target(2, 6)

    def logits(ids: Tensor) -> Tensor:
        torch.manual_seed(1)  # the same dropout
        return model.logits(hidden_states(model, *src, ids))

    for t in range(1, 6):
        other = tgt.clone()
        other[:, t:] = PAD if t == 3 else tgt[:, t:] % 19 + 4
        with torch.no_grad():
            first, second = logits(tgt), logits(other)
        assert torch.equal(first[:, :t], second[:, :t])
        assert not torch.equal(first[:, t], second[:, t])


# --- padding and neighbours


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_what_stands_at_padded_places_changes_nothing(norm: Norm) -> None:
    model = tiny_model(norm=norm)
    (src, lengths), tgt = random_source(LENGTHS), random_target(len(LENGTHS), 6)
    is_padding = torch.arange(src.size(1)) >= lengths[:, None]
    clean, hidden = model.encode(src, lengths), hidden_states(model, src, lengths, tgt)
    other = src.masked_scatter(is_padding, torch.arange(4, 4 + int(is_padding.sum())) % 19 + 4)
    for changed in (other, src):
        dirty = model.encode(changed, lengths)
        for pairs in zip(dirty.layers, clean.layers, strict=True):
            for found, expected in zip(*pairs, strict=True):  # (B, H, S, D/H)
                shown = ~is_padding[:, None, :, None].expand_as(found)
                torch.testing.assert_close(found[shown], expected[shown])
        torch.testing.assert_close(hidden_states(model, changed, lengths, tgt), hidden)
        model.embedding.weight[PAD] = 1e4  # for the second round


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_a_sentence_alone_is_as_in_a_batch(norm: Norm) -> None:
    model = tiny_model(norm=norm)
    (src, lengths), tgt = random_source(LENGTHS), random_target(len(LENGTHS), 6)
    together = hidden_states(model, src, lengths, tgt)
    for i, length in enumerate(LENGTHS):
        for num_padding in (0, 50):
            padded = nn.functional.pad(src[i : i + 1, :length], (0, num_padding), value=PAD)
            for num_targets in (2, 6):
                alone = hidden_states(
                    model, padded, lengths[i : i + 1], tgt[i : i + 1, :num_targets]
                )
                torch.testing.assert_close(
                    alone[0], together[i, :num_targets], atol=1e-5, rtol=1e-5
                )


# --- step by step


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_decoding_step_by_step_equals_decoding_at_once(norm: Norm) -> None:
    model, tgt = tiny_model(norm=norm), random_target(len(LENGTHS), 8)
    memory = model.encode(*random_source(LENGTHS))
    expected = hidden_states(model, *random_source(LENGTHS), tgt)
    torch.testing.assert_close(decode_by_steps(model, tgt, memory), expected, atol=1e-5, rtol=1e-5)
