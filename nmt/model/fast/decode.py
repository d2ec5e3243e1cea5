"""Decoding step by step: the decoder of one step, and the state of the hypotheses between steps.

A step computes the next hidden state of each hypothesis. With few hypotheses, calling modules and
choosing kernels would take as long as computing, so a `StepDecoder` chooses the kernels once for
its device and dtype, and then calls plain functions.
"""

# R live hypotheses, one row each (and filler rows, see `BeamGrid`)
# B sentences, W beams (see `BeamGrid`); C columns of the cache, S source length
# D d_model, H heads, K heads of keys and values, d dimensions of a head

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.config import Activation
from nmt.model.fast.attention import FastAttention
from nmt.model.fast.cache import (
    AttentionCache,
    BeamGrid,
    GatherIndex,
    RecurrentCache,
    StepContext,
    TargetCache,
)
from nmt.model.fast.layers import FastLinear
from nmt.model.fast.packing import MASKED, MIN_WIDTH, Packing, additive_mask
from nmt.model.fast.transfer import send
from nmt.model.positions import PositionEncoding, TokenPositions
from nmt.model.transformer import AttentionWeights, DecoderLayer, attend, repeat_heads

Function = Callable[[Tensor], Tensor]


# --- attention of a step


def attend_gathered(q: Tensor, k: Tensor, v: Tensor, context: StepContext) -> Tensor:
    """Attend from queries (B, H, W, d) to keys (B, H, C, d) and values (B, H, C or more, d), by
    `context.gather_index`; return rows (R, H * d). For float32 on a CPU.

    `torch.embedding_bag` sums the weighted values several times as fast as `torch.bmm`, since it
    skips the columns of other beams. It is called in place of `F.embedding_bag`, which first spends
    time on checks of its arguments.
    """
    index = context.gather_index
    assert index is not None
    q = (q * q.size(-1) ** -0.5).flatten(0, 1)  # (B*H, W, d)
    k = k.flatten(0, 1)  # (B*H, C, d)
    if index.is_transposed:
        products = torch.bmm(k, q.transpose(1, 2))  # (B*H, C, W)
    else:
        products = torch.bmm(q, k.transpose(1, 2))  # (B*H, W, C)
    logits = products.view(-1).index_select(0, index.logit_index).view(index.shape)  # (R, H, T)
    if index.bias is not None:
        logits += index.bias
    weights = torch.softmax(logits, dim=-1).view(-1)  # (R*H*T,)
    table = v.flatten(0, 2)  # (B*H*capacity, d)
    heads, *_ = torch.embedding_bag(
        table, index.value_index, index.offsets, per_sample_weights=weights
    )  # (R*H, d)
    return heads.view(index.shape[0], -1)


def attend_biased(q: Tensor, k: Tensor, v: Tensor, context: StepContext) -> Tensor:
    """Attend from queries (B, H, W, d) to keys (B, K, C, d) and values (B, K, C or more, d), with
    `context.bias`; return rows (R, H * d).
    """
    bias = context.bias
    assert bias is not None
    v = v[:, :, : k.size(2)]  # drop the spare capacity
    group_size = q.size(1) // k.size(1)  # number of query heads that share a head of keys
    grouped = q
    if group_size > 1:  # the heads of a group become further queries of one head
        grouped = q.reshape(*k.shape[:2], -1, q.size(3))  # (B, K, H/K * W, d)
        if bias.size(2) > 1:
            bias = bias.repeat(1, 1, group_size, 1)  # (B, 1, H/K * W, C)
    if q.device.type != "cpu":
        bias = bias.to(q.dtype)
        heads = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias)
    else:  # three operations take less time than the fused kernel
        scaled = (grouped * q.size(-1) ** -0.5).flatten(0, 1)  # (B*K, H/K * W, d)
        logits = torch.bmm(scaled, k.flatten(0, 1).transpose(1, 2))
        weights = torch.softmax(logits.view(*grouped.shape[:3], -1) + bias, dim=-1)
        heads = torch.bmm(weights.flatten(0, 1).to(v.dtype), v.flatten(0, 1))
    heads = heads.reshape(q.shape)  # (B, H, W, d)
    return context.grid.collect(heads.transpose(1, 2).flatten(2))


def attend_with_distances(
    attention: FastAttention, q: Tensor, k: Tensor, v: Tensor, context: StepContext
) -> Tensor:
    """Attend with a positional encoding that adds biases; return rows (R, H * d)."""
    heads, _ = attend_plainly(attention, q, k, v, context)
    return context.grid.collect(heads.transpose(1, 2).flatten(2))


def attend_plainly(
    attention: FastAttention, q: Tensor, k: Tensor, v: Tensor, context: StepContext
) -> tuple[Tensor, Tensor]:
    """Call `attend` of the plain layer; return heads (B, H, W, d) and weights (B, H, W, C)."""
    assert context.bias is not None
    mask = context.bias == 0
    k = repeat_heads(k, attention.num_heads)
    v = repeat_heads(v[:, :, : k.size(2)], attention.num_heads)
    encoding = attention.position_encoding
    return attend(q, k, v, mask, None, encoding, context.distances)


# --- the decoder


class LayerStep:
    """A decoder layer as functions of the newest tokens (R, D), one for each sub-layer."""

    def __init__(self, layer_index: int, layer: DecoderLayer, decoder: StepDecoder) -> None:
        self.layer_index = layer_index
        self.is_post_norm = layer.is_post_norm
        self.cross_attention = cast(FastAttention, layer.cross_attention)
        self.num_heads = self.cross_attention.num_heads
        self.head_size = self.cross_attention.head_size
        linear = decoder.linear
        q_size = self.cross_attention.qkv_sizes[0]
        self.cross_in = linear(self.cross_attention.in_projection, q_size)
        self.cross_out = linear(self.cross_attention.out_projection)
        self.attend_cross = attend_gathered if decoder.gathers_cross_attention else attend_biased
        if layer.ssru is None:
            self._prepare_self_attention(cast(FastAttention, layer.self_attention), decoder)
            first_sublayer = norm_function(layer.self_attention_norm), self.decode_self
        else:
            self.ssru_gate = linear(layer.ssru.forget_gate)
            self.ssru_candidate = linear(layer.ssru.candidate)
            first_sublayer = norm_function(layer.ssru_norm), self.decode_ssru
        feed_forward: Function = layer.feed_forward
        if decoder.is_frozen and layer.feed_forward.activation is Activation.relu:
            inner = linear(layer.feed_forward.inner, activation="relu")
            outer = linear(layer.feed_forward.outer)
            feed_forward = lambda x: outer(inner(x))  # noqa: E731
        # pairs of a norm and a sub-layer, which is called with (x, state, attention_out)
        self.sublayers: list[tuple[Function, Callable[..., Tensor]]] = [
            first_sublayer,
            (norm_function(layer.cross_attention_norm), self.decode_cross),
            (norm_function(layer.feed_forward_norm), lambda x, *_: feed_forward(x)),
        ]

    def _prepare_self_attention(self, attention: FastAttention, decoder: StepDecoder) -> None:
        """Choose the functions that `decode_self` calls."""
        self.self_attention = attention
        # whether the class of the encoding overrides `rotate`
        has_rotation = type(attention.position_encoding).rotate is not PositionEncoding.rotate
        self.has_norm_or_rotation = has_rotation or attention.query_norm is not None
        self.self_in = decoder.linear(attention.in_projection)  # (R, D) to (R, (H + 2K) * d)
        self.self_out = decoder.linear(attention.out_projection)  # (R, H * d) to (R, D)
        self.attend_self: Callable[[Tensor, Tensor, Tensor, StepContext], Tensor] = attend_biased
        if decoder.has_bias:
            self.attend_self = functools.partial(attend_with_distances, attention)
        elif decoder.gathers_self_attention:
            self.attend_self = attend_gathered

    def decode_ssru(self, x: Tensor, state: DecodingState, _: AttentionWeights | None) -> Tensor:
        """Update the states of the SSRU by the newest tokens."""
        cache = state.target_cache
        assert isinstance(cache, RecurrentCache)
        dtype = cache.states[0].dtype
        gates = torch.sigmoid(self.ssru_gate(x).to(dtype))  # (R, D)
        candidates = self.ssru_candidate(x).to(dtype)  # (R, D)
        return torch.relu(cache.update(self.layer_index, gates, candidates))

    def decode_self(self, x: Tensor, state: DecodingState, _: AttentionWeights | None) -> Tensor:
        """Add the newest keys and values to the cache, and attend to all tokens so far."""
        heads = self.self_in(x).view(len(x), -1, self.head_size)  # (R, H + 2K, d)
        if self.has_norm_or_rotation:
            heads = self._normalize_and_rotate(heads, state.positions)
        cells = state.grid.spread(heads)  # (B, W, H + 2K, d)
        q = cells[:, :, : self.num_heads].transpose(1, 2)  # (B, H, W, d)
        keys_values = cells[:, :, self.num_heads :]  # (B, W, 2K, d)
        newest = keys_values.view(*state.grid.shape, 2, -1, self.head_size).permute(2, 0, 3, 1, 4)
        cache = state.target_cache
        assert isinstance(cache, AttentionCache)
        k, v = cache.keys_values.update(self.layer_index, newest).unbind()  # (B, K, capacity, d)
        k = k[:, :, : cache.keys_values.width]  # the gather index counts the spare capacity of `v`
        return self.self_out(self.attend_self(q, k, v, cache.context))

    def _normalize_and_rotate(self, heads: Tensor, positions: TokenPositions) -> Tensor:
        attention = self.self_attention
        num_kv_heads = (heads.size(1) - self.num_heads) // 2
        q, k, v = torch.split(heads, [self.num_heads, num_kv_heads, num_kv_heads], dim=1)
        q, k = attention.normalize_and_rotate(q, k, positions)
        return torch.cat([q, k, v], dim=1)

    def decode_cross(
        self, x: Tensor, state: DecodingState, attention_out: AttentionWeights | None
    ) -> Tensor:
        """Attend to the source; its keys and values were computed with `state`."""
        heads = self.cross_in(x).view(len(x), self.num_heads, self.head_size)
        q = state.grid.spread(heads).transpose(1, 2)  # (B, H, W, d)
        k, v = state.source_keys_values[self.layer_index].unbind()  # (B, K, S, d)
        if attention_out is not None and self.cross_attention in attention_out:
            _, weights = attend_plainly(self.cross_attention, q, k, v, state.cross_context)
            rows = state.grid.collect(weights.transpose(1, 2))  # (R, H, S)
            attention_out[self.cross_attention] = rows[: len(state.sentences), :, None]
        return self.cross_out(self.attend_cross(q, k, v, state.cross_context))


class StepDecoder:
    """All layers of a decoder, with the kernels for the device and dtype of their weights.

    With `is_frozen`, the weights are float32 on a CPU and must not change afterwards.
    """

    def __init__(self, layers: Iterable[nn.Module], *, is_frozen: bool) -> None:
        self.is_frozen = is_frozen
        decoder_layers = [cast(DecoderLayer, layer) for layer in layers]
        layer = decoder_layers[0]
        attention = layer.cross_attention
        self.is_recurrent = layer.ssru is not None
        self.num_heads = attention.num_heads
        self.has_bias = not self.is_recurrent and layer.self_attention.position_encoding.has_bias
        weight = attention.in_projection.weight
        is_float32_on_cpu = (
            weight.device.type == "cpu"
            and weight.dtype is torch.float32
            and not torch.is_autocast_enabled("cpu")
        )
        shares_keys = attention.qkv_sizes[1] < attention.qkv_sizes[0]
        self.gathers_cross_attention = is_float32_on_cpu and not shares_keys
        self.gathers_self_attention = self.gathers_cross_attention and not self.has_bias
        self.layers = [LayerStep(index, layer, self) for index, layer in enumerate(decoder_layers)]

    def linear(
        self, module: nn.Module, end: int | None = None, activation: str = "none"
    ) -> Function:
        """Return a function that computes a linear layer, or its first `end` outputs.

        Only frozen layers support an `activation`.
        """
        layer = cast(FastLinear, module)
        if self.is_frozen:
            return layer.frozen_function(end=end, activation=activation)
        assert activation == "none"
        if end is None:
            return layer
        return functools.partial(layer.block, start=0, end=end)

    def make_target_cache(self, memory: Tensor, grid: BeamGrid) -> TargetCache:
        """Return the cache of empty hypotheses; `memory` (N, D) is the encoder's output."""
        if self.is_recurrent:
            return RecurrentCache(memory, len(self.layers), grid)
        return AttentionCache(
            grid.shape[0],
            memory.device,
            num_heads=self.num_heads,
            gathers=self.gathers_self_attention,
            has_bias=self.has_bias,
        )

    def step(
        self, x: Tensor, state: DecodingState, attention_out: AttentionWeights | None
    ) -> Tensor:
        """Map the embedded newest token of each hypothesis, (R, D), to (R, D)."""
        for layer in self.layers:
            for norm, sublayer in layer.sublayers:
                if layer.is_post_norm:
                    x = norm(x + sublayer(x, state, attention_out))
                else:
                    x = x + sublayer(norm(x), state, attention_out)
        return x


def norm_function(norm: nn.Module) -> Function:
    """Return a function that computes a norm; for LayerNorm, without calling the module."""
    if type(norm) is not nn.LayerNorm:
        return norm
    shape = norm.normalized_shape
    weight = norm.weight
    bias = norm.bias
    eps = norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


# --- the state


class DecodingState:
    """The live hypotheses, the source's keys and values, and the cache of the target.

    `sentences` is on the CPU, so that no step waits for a GPU.
    """

    def __init__(self, decoder: StepDecoder, memory: Tensor, packing: Packing) -> None:
        """Begin with an empty hypothesis for each sentence of `memory` (N, D)."""
        self.decoder = decoder
        self.device = memory.device
        width = max(packing.longest, MIN_WIDTH)
        self.source_bias = additive_mask(packing.mask, width)  # (B, 1, 1, S)
        self.source_keys_values: list[Tensor] = []  # one tensor (2, B, K, S, d) for each layer
        for layer in decoder.layers:
            keys_values = packing.pad(layer.cross_attention.project_memory(memory))
            keys_values = keys_values.permute(2, 0, 3, 1, 4)  # (B, S, 2, K, d) to (2, B, K, S, d)
            self.source_keys_values.append(widen(keys_values, width).contiguous())
        self.num_positions = 0  # number of target tokens of the longest hypotheses so far
        # (B,), `num_positions` at the time when each sentence joined; None if none joined later
        self.first_positions: Tensor | None = None
        self.sentences = torch.arange(packing.num_sentences)  # (R,), ascending
        self._rebuild_grid(packing.num_sentences)
        self.target_cache = decoder.make_target_cache(memory, self.grid)

    def _rebuild_grid(self, num_sentences: int) -> None:
        """Rebuild the grid and the cross-attention context for changed rows or sentences."""
        self.grid = BeamGrid(self.sentences, num_sentences, self.device)
        index = self._source_index() if self.decoder.gathers_cross_attention else None
        self.cross_context = StepContext(self.grid, bias=self.source_bias, gather_index=index)

    def advance(self) -> None:
        """Begin a step, which adds a token to each hypothesis."""
        self.num_positions += 1
        self.positions = self._newest_positions()
        self.target_cache.advance(self.grid)

    def _newest_positions(self) -> TokenPositions:
        """Return the position of each row's newest token."""
        newest = self.num_positions - 1
        if self.first_positions is None:
            index = torch.full((1, 1), newest, device=self.device)
        else:
            positions = newest - self.first_positions[self.sentences]  # (R,)
            padding = self.grid.num_padded_rows - len(positions)
            index = send(F.pad(positions, (0, padding)).unsqueeze(1), self.device)
        return TokenPositions(index, self.num_positions)

    def _source_index(self) -> GatherIndex:
        """Index the keys and values of each row's source."""
        width = self.source_bias.size(3)
        sentences = self.grid.cpu_cells // self.grid.shape[1]  # (padded R,)
        return GatherIndex.of(
            torch.arange(width).expand(len(sentences), width),
            self.source_bias.squeeze(1).index_select(0, sentences),  # (padded R, 1, S)
            self.grid,
            num_heads=self.decoder.num_heads,
            width=width,
            capacity=width,
        )

    def reorder(self, rows: Tensor) -> None:
        """Replace the hypotheses by those at `rows` (R',), sorted by sentence, on the CPU.

        A row may be repeated or missing.
        """
        num_sentences = self.grid.shape[0]
        sentences = self.sentences.index_select(0, rows)
        if not torch.equal(sentences, self.sentences):
            self.sentences = sentences
            self._rebuild_grid(num_sentences)
        self.target_cache.reorder(rows, self.grid)
        num_live = int((self.grid.counts > 0).sum())  # number of sentences
        # compact also if a quarter of the sentences is finished
        if (
            self.target_cache.needs_compaction(self.num_positions)
            or num_live <= 0.75 * num_sentences
        ):
            self._compact()

    def _compact(self) -> None:
        """Drop sentences without hypotheses, and columns that no hypothesis reads."""
        is_live = self.grid.counts > 0  # (B,)
        live = is_live.nonzero().squeeze(1)  # (B',)
        self.sentences = (is_live.cumsum(0) - 1)[self.sentences]
        if self.first_positions is not None:
            self.first_positions = self.first_positions.index_select(0, live)
            earliest = int(self.first_positions.min())  # count from the oldest live sentence
            self.first_positions -= earliest
            self.num_positions -= earliest
        self.target_cache.compact(live, self.sentences, self.grid)
        live = send(live, self.device)
        self.source_keys_values = [x.index_select(1, live) for x in self.source_keys_values]
        self.source_bias = self.source_bias.index_select(0, live)
        self._rebuild_grid(len(live))

    def join(self, new: DecodingState) -> None:
        """Add the sentences of `new`, a state of the same model that has made no step."""
        num_sentences = self.grid.shape[0]
        num_new = new.grid.shape[0]
        width = max(self.source_bias.size(3), new.source_bias.size(3))
        for i, keys_values in enumerate(self.source_keys_values):
            padded = [widen(keys_values, width), widen(new.source_keys_values[i], width)]
            self.source_keys_values[i] = torch.cat(padded, dim=1)
        bias = F.pad(self.source_bias, (0, width - self.source_bias.size(3)), value=MASKED)
        new_bias = F.pad(new.source_bias, (0, width - new.source_bias.size(3)), value=MASKED)
        self.source_bias = torch.cat([bias, new_bias])
        if self.first_positions is None:
            self.first_positions = self.sentences.new_zeros(num_sentences)
        self.first_positions = F.pad(self.first_positions, (0, num_new), value=self.num_positions)
        self.sentences = torch.cat([self.sentences, new.sentences + num_sentences])
        self._rebuild_grid(num_sentences + num_new)
        self.target_cache.add_sentences(num_new, self.grid)


def widen(keys_values: Tensor, width: int) -> Tensor:
    """Pad keys and values (2, B, K, S, d) with zeros to S = `width`."""
    num_missing = width - keys_values.size(3)
    return F.pad(keys_values, (0, 0, 0, num_missing)) if num_missing else keys_values
