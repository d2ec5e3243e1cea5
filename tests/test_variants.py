"""What users vary in the model: dropout in its places, unequal depths, activation checkpointing."""

from __future__ import annotations

import gc
import itertools
import json
from pathlib import Path
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

from nmt.checkpoint import ModelInfo, build_model, load_info, load_weights, save_model
from nmt.config import ModelConfig, Norm, SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.model.fast import FastTransformer, accelerate
from nmt.model.fast.layers import FastDropout
from nmt.model.fast.packing import PackedMask, pack
from nmt.model.transformer import FeedForward, MultiHeadAttention, Transformer

NORMS = [Norm.post, Norm.pre]
LENGTHS = [7, 3, 5, 1]
B, S, T, D, D_FF, LAYERS = 4, 7, 6, 16, 32, 2
EVERYWHERE = {
    "embedding_dropout": 0.11,
    "dropout": 0.22,
    "attention_dropout": 0.33,
    "activation_dropout": 0.44,
}
Drop = tuple[float, tuple[int, ...]]


def forward(model: Transformer) -> Tensor:
    return hidden_states(model, *random_source(LENGTHS), random_target(B, T))


# --- dropout: where


@pytest.fixture
def drops(monkeypatch: pytest.MonkeyPatch) -> list[Drop]:
    """Collect share and shape of all that is dropped; of attention its queries and keys."""
    found: list[Drop] = []

    def watch(kind: type[nn.Dropout]) -> None:
        usual = kind.forward

        def seen(self: nn.Dropout, x: Tensor) -> Tensor:
            if self.training and self.p > 0:
                found.append((self.p, tuple(x.shape[-2:] if x.dim() == 4 else x.shape)))
            return usual(self, x)

        monkeypatch.setattr(kind, "forward", seen)

    attention = F.scaled_dot_product_attention

    def seen_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **rest: Any) -> Tensor:
        if dropout_p > 0:
            found.append((dropout_p, (q.size(2), k.size(2))))
        return attention(q, k, v, dropout_p=dropout_p, **rest)

    watch(nn.Dropout)
    watch(FastDropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", seen_attention)
    return found


def expected_drops(
    embedding: float, residual: float, attention: float, activation: float, *, is_packed: bool
) -> list[Drop]:
    """List the places of figure 1 in their order."""
    sources, targets = ((sum(LENGTHS),), (B * T,)) if is_packed else ((B, S), (B, T))

    def sublayer(share: float, shape: tuple[int, ...], tokens: tuple[int, ...]) -> list[Drop]:
        return [(share, shape), (residual, (*tokens, D))]

    encoder = sublayer(attention, (S, S), sources)
    encoder += sublayer(activation, (*sources, D_FF), sources)
    decoder = sublayer(attention, (T, T), targets) + sublayer(attention, (T, S), targets)
    decoder += sublayer(activation, (*targets, D_FF), targets)
    places = [(embedding, (*sources, D)), *LAYERS * encoder, (embedding, (*targets, D))]
    places += LAYERS * decoder
    return [place for place in places if place[0] > 0]


@pytest.mark.parametrize("norm", NORMS)
def test_each_share_is_dropped_in_its_places_and_in_no_other(norm: Norm, drops: list[Drop]) -> None:
    cases: list[tuple[dict[str, float], Any]] = [
        (EVERYWHERE, (0.11, 0.22, 0.33, 0.44)),
        ({"dropout": 0.1}, (0.1, 0.1, 0, 0)),  # the paper's, section 5.4
        ({"dropout": 0.1, "embedding_dropout": 0.0}, (0, 0.1, 0, 0)),
        ({"embedding_dropout": 0.1}, (0.1, 0, 0, 0)),
        ({"attention_dropout": 0.1}, (0, 0, 0.1, 0)),
        ({"activation_dropout": 0.1}, (0, 0, 0, 0.1)),
    ]
    for shares, expected in cases:
        model = tiny_model(norm=norm, **shares)
        for variant, is_packed in ((model, True), (plain(model), False)):
            drops.clear()
            forward(variant.train())
            assert drops == expected_drops(*expected, is_packed=is_packed), (shares, is_packed)
            drops.clear()
            forward(variant.eval())
            assert drops == []


def test_outside_training_dropout_changes_nothing_and_neither_does_the_cache() -> None:
    dropping, without = tiny_model(**EVERYWHERE), tiny_model()
    assert torch.equal(forward(dropping), forward(without))
    stepped = decode_by_steps(dropping, *random_source(LENGTHS), random_target(B, T))
    torch.testing.assert_close(stepped, forward(without), atol=1e-5, rtol=1e-5)
    dropping.train()
    assert not torch.equal(forward(dropping), forward(dropping))


# --- dropout: what


def assert_dropped_half(found: Tensor, whole: Tensor) -> None:
    """Assert that each number is 0 or twice what it was, and about half of them are 0."""
    is_zero = found == 0
    torch.testing.assert_close(found, torch.where(is_zero, 0.0, 2 * whole), atol=1e-5, rtol=1e-5)
    share = is_zero[whole.abs() > 1e-4].float().mean()
    assert 0.4 < float(share) < 0.6


def test_the_sum_of_embedding_and_position_is_dropped() -> None:
    model, inputs = tiny_model(embedding_dropout=0.5).train(), []
    model.encoder_layers[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    src, lengths = random_source([30, 20])
    model.start(src, lengths)
    model.eval().start(src, lengths)
    assert_dropped_half(*inputs)


def test_the_output_of_a_sublayer_is_dropped_before_the_residual_sum() -> None:
    layer: Any = tiny_model(dropout=0.5).encoder_layers[0].train()
    sums: list[Tensor] = []
    layer.self_attention_norm.register_forward_pre_hook(lambda _, given: sums.append(given[0]))
    x, mask = torch.randn(4 * 20, D), PackedMask(pack([20] * 4), pack([20] * 4))
    layer(x, mask)
    whole = layer.self_attention(x, x, mask)
    moved = sums[0] - x
    assert_dropped_half(torch.where(moved.abs() < 1e-6, 0.0, moved), whole)


def test_activations_are_dropped_between_the_two_matrices() -> None:
    model = Transformer(tiny_config(d_ff=D, activation_dropout=0.5), VOCAB_SIZE)
    x = torch.randn(4, 20, D)
    for _ in range(2):  # plain, then accelerated
        feed_forward: Any = model.encoder_layers[0].feed_forward
        with torch.no_grad():
            feed_forward.outer.weight.copy_(torch.eye(D))
        assert_dropped_half(feed_forward.train()(x), feed_forward.eval()(x))
        accelerate(model)


def bare_heads(dropout: float) -> MultiHeadAttention:
    """Attention whose output is that of the heads, side by side."""
    model = tiny_model(attention_dropout=dropout)
    attention: Any = model.encoder_layers[0].self_attention
    with torch.no_grad():
        attention.out_projection.weight.copy_(torch.eye(D))
        attention.out_projection.bias.zero_()
    return attention


def test_attention_drops_a_weight_with_all_that_its_head_would_have_read() -> None:
    attention, x = bare_heads(0.5), torch.randn(500, D)
    mask = PackedMask(pack([1] * 500), pack([1] * 500))  # one key: each head has one weight, 1
    found, whole = attention.train()(x, x, mask), attention.eval()(x, x, mask)
    assert_dropped_half(found, whole)
    is_zero = (found == 0).view(500, 4, D // 4)
    assert torch.equal(is_zero.any(-1), is_zero.all(-1))


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_attention_with_dropout_is_on_average_attention_without(is_causal: bool) -> None:
    torch.manual_seed(0)
    attention, count = bare_heads(0.3), 20_000
    x = torch.randn(7, D)
    lengths = [5, 2]  # the second sentence is padded
    one, many = pack(lengths), pack(lengths * count)
    expected = attention.eval()(x, x, PackedMask(one, one, is_causal=is_causal))
    copies = x.repeat(count, 1)
    found = attention.train()(copies, copies, PackedMask(many, many, is_causal=is_causal))
    found = found.view(count, 7, D)
    error = found.std(0) / count**0.5
    assert (error > 0).all()
    assert ((found.mean(0) - expected).abs() < 5 * error).all()


def test_a_share_outside_0_to_1_is_refused() -> None:
    for place, share in itertools.product(EVERYWHERE, (-0.1, 1.0)):
        with pytest.raises(ConfigError, match=f"model.{place}={share}: must be from 0 to below 1"):
            tiny_config(**{place: share})


# --- depth


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("depth", [(2, 5), (6, 1)])
@torch.no_grad()
def test_unequal_depths_are_saved_loaded_and_decoded_step_by_step(
    norm: Norm, depth: tuple[int, int], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    layers = dict(zip(("num_encoder_layers", "num_decoder_layers"), depth, strict=True))
    model = tiny_model(norm=norm, **layers)
    info = ModelInfo(model.config, SearchConfig(), VOCAB_SIZE, "en", "de", tokenizer.sha256, 1)
    save_model(tmp_path / "model", model.state_dict(), info, tokenizer)
    loaded = load_info(tmp_path / "model")
    other = build_model(loaded, load_weights(tmp_path / "model"), torch.device("cpu")).eval()
    assert (len(other.encoder_layers), len(other.decoder_layers)) == depth
    assert torch.equal(forward(other), forward(model))
    stepped = decode_by_steps(other, *random_source(LENGTHS), random_target(B, T))
    torch.testing.assert_close(stepped, forward(plain(model)), atol=1e-5, rtol=1e-5)


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
    assert load_info(folder).model == config


# --- activation checkpointing


def trainable(config: ModelConfig, *, recompute: bool = True) -> FastTransformer:
    return accelerate(Transformer(config, VOCAB_SIZE, activation_checkpointing=recompute))


def gradients(config: ModelConfig, *, recompute: bool) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return gradients and loss of one batch, and what the generator draws after it."""
    torch.manual_seed(0)
    model = trainable(config, recompute=recompute)
    loss = model.logits(forward(model)).logsumexp(-1).sum()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return found, loss.detach(), torch.rand(3)


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS)
def test_activation_checkpointing_changes_no_bit_of_loss_gradients_and_generator(
    norm: Norm, bfloat16: bool
) -> None:
    config = tiny_config(norm=norm, num_decoder_layers=3, **EVERYWHERE)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        plain, saving = (gradients(config, recompute=on) for on in (False, True))
    assert all(torch.equal(saving[0][name], gradient) for name, gradient in plain[0].items())
    assert torch.equal(plain[1], saving[1])
    assert torch.equal(plain[2], saving[2])


def test_activation_checkpointing_runs_each_layer_twice_and_only_in_training() -> None:
    model = trainable(tiny_config())
    calls: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, FeedForward):
            module.outer.register_forward_hook(lambda *_, name=name: calls.append(name))
    forward(model.eval()).sum().backward()
    assert len(calls) == 2 * LAYERS
    calls.clear()
    forward(model.train()).sum().backward()
    assert sorted(calls) == sorted(2 * list(dict.fromkeys(calls)))
    assert len(calls) == 4 * LAYERS


def live_storages() -> dict[int, int]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is Tensor]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def kept_bytes(config: ModelConfig, *, recompute: bool) -> int:
    """Count what lives between forward and backward: what autograd saves, and checkpoints hold."""
    model = trainable(config, recompute=recompute)
    batch = *random_source([30] * 8), random_target(8, 30)
    before, saved = live_storages(), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        hidden = hidden_states(model, *batch)
    assert hidden.requires_grad
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    kept |= live_storages()
    return sum(size for place, size in kept.items() if place not in {*before, *weights})


def test_activation_checkpointing_keeps_a_fraction_of_the_memory() -> None:
    config = tiny_config(num_encoder_layers=6, num_decoder_layers=6, dropout=0.1)
    assert kept_bytes(config, recompute=True) < 0.2 * kept_bytes(config, recompute=False)
