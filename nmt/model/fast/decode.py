"""Decoding step by step: the decoder of one step, and the state of the hypotheses between steps.

A step computes the next hidden state of each hypothesis. With few hypotheses, calling modules and
choosing kernels would take as long as computing. So a `StepDecoder` chooses the kernels once, for
its device and dtype, and then calls plain functions.
"""

# R live hypotheses, one row each, and filler rows
# B sentences, W beams: a `BeamGrid` maps rows (R, ...) to a grid (B, W, ...) and back
# N source tokens of all sentences, packed; S source length
# C columns of a cache of keys and values, T columns that one hypothesis attends to
# D d_model, H heads, K heads of keys and values, d dimensions of a head
# SSRU: the simpler simple recurrent unit, which can replace self-attention in the decoder

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.config import Activation
from nmt.model.attention import AttentionWeights, attend, repeat_heads
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
from nmt.model.fast.transfer import to_device
from nmt.model.positions import TokenPositions
from nmt.model.transformer import DecoderLayer

TensorFunction = Callable[[Tensor], Tensor]
_MAX_LIVE_SHARE = 0.75  # share of live sentences up to which finished sentences are dropped


# --- attention of a step


def attend_gathered(q: Tensor, k: Tensor, v: Tensor, context: StepContext) -> Tensor:
    """Attend to the columns that `context.gather_index` lists, on a CPU in float32.

    Takes queries (B, H, W, d), keys (B, H, C, d) and values (B, H, C or more, d); returns rows
    (R, H * d). A beam attends only to its own columns of the cache, so the logits and values of
    other beams are skipped.
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
    # For each row and head, `embedding_bag` looks up T values and sums them by weight, which is
    # several times as fast as `bmm` with all values. `torch.embedding_bag` takes less time than
    # `F.embedding_bag`, which checks its arguments first.
    table = v.flatten(0, 2)  # (B*H*capacity, d)
    heads, *_ = torch.embedding_bag(
        table, index.value_index, index.offsets, per_sample_weights=weights
    )  # (R*H, d)
    return heads.view(index.shape[0], -1)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, context: StepContext) -> Tensor:
    """Attend to all columns of a sentence that the additive mask `context.bias` allows.

    Takes queries (B, H, W, d), keys (B, K, C, d) and values (B, K, C or more, d); returns rows
    (R, H * d).
    """
    bias = context.bias  # (B, 1, 1 or W, C)
    assert bias is not None
    v = v[:, :, : k.size(2)]  # drop the spare capacity
    group_size = q.size(1) // k.size(1)  # number of query heads that share a head of keys
    grouped = q
    if group_size > 1:
        # The H/K query heads of a group become one head with H/K times as many queries, so that
        # their shared keys need not be repeated.
        grouped = q.reshape(*k.shape[:2], -1, q.size(3))  # (B, K, H/K * W, d)
        if bias.size(2) > 1:  # each head of the group needs the mask of every beam
            bias = bias.repeat(1, 1, group_size, 1)  # (B, 1, H/K * W, C)
    if q.device.type != "cpu":
        bias = bias.to(q.dtype)
        heads = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias)
    else:  # three operations take less time than the fused kernel
        scaled = (grouped * q.size(-1) ** -0.5).flatten(0, 1)  # (B*K, H/K * W, d)
        k = k.flatten(0, 1)  # (B*K, C, d)
        v = v.flatten(0, 1)
        logits = torch.bmm(scaled, k.transpose(1, 2))  # (B*K, H/K * W, C)
        logits = logits.view(*grouped.shape[:3], -1) + bias  # (B, K, H/K * W, C)
        weights = torch.softmax(logits, dim=-1).flatten(0, 1)  # (B*K, H/K * W, C)
        heads = torch.bmm(weights.to(v.dtype), v)  # (B*K, H/K * W, d)
    heads = heads.reshape(q.shape)  # (B, H, W, d)
    return context.grid.grid_to_rows(heads.transpose(1, 2).flatten(2))  # (B, W, H*d) to (R, H*d)


def attend_with_position_bias(
    attention: FastAttention, q: Tensor, k: Tensor, v: Tensor, context: StepContext
) -> Tensor:
    """Like `attend_masked`, for a positional encoding that adds biases to logits and values."""
    heads, _ = attend_returning_weights(attention, q, k, v, context)
    return context.grid.grid_to_rows(heads.transpose(1, 2).flatten(2))  # (B, W, H*d) to (R, H*d)


def attend_returning_weights(
    attention: FastAttention, q: Tensor, k: Tensor, v: Tensor, context: StepContext
) -> tuple[Tensor, Tensor]:
    """Attend as `nmt.model.attention` does, with the masks and shapes of a step.

    Takes the tensors of `attend_masked`; returns heads (B, H, W, d) and weights (B, H, W, C).
    """
    assert context.bias is not None
    mask = context.bias == 0  # the bias of a masked column is negative
    k = repeat_heads(k, attention.num_heads)  # (B, H, C, d)
    v = repeat_heads(v[:, :, : k.size(2)], attention.num_heads)  # without the spare capacity
    encoding = attention.position_encoding
    return attend(q, k, v, mask, encoding=encoding, distances=context.distances)


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
        q_size = self.cross_attention.qkv_sizes[0]  # H * d
        self.cross_in = linear(self.cross_attention.in_projection, end=q_size)  # only the queries
        self.cross_out = linear(self.cross_attention.out_projection)
        self.attend_cross = attend_gathered if decoder.gathers_cross_attention else attend_masked
        # the sub-layer that reads the target: self-attention or an SSRU
        if layer.ssru is None:
            self._prepare_self_attention(cast(FastAttention, layer.self_attention), decoder)
            target_norm = norm_function(layer.self_attention_norm)
            decode_target: Sublayer = self.decode_self
        else:
            self.ssru_gate = linear(layer.ssru.forget_gate)
            self.ssru_candidate = linear(layer.ssru.candidate)
            target_norm = norm_function(layer.ssru_norm)
            decode_target = self.decode_ssru
        self.feed_forward = layer.feed_forward
        decode_feed_forward: Sublayer = self.decode_feed_forward
        if decoder.is_frozen and layer.feed_forward.activation is Activation.relu:
            self.inner = linear(layer.feed_forward.inner, activation="relu")
            self.outer = linear(layer.feed_forward.outer)
            decode_feed_forward = self.decode_frozen_feed_forward
        # pairs of a norm and a sub-layer, in their order
        self.sublayers: list[tuple[TensorFunction, Sublayer]] = [
            (target_norm, decode_target),
            (norm_function(layer.cross_attention_norm), self.decode_cross),
            (norm_function(layer.feed_forward_norm), decode_feed_forward),
        ]

    def _prepare_self_attention(self, attention: FastAttention, decoder: StepDecoder) -> None:
        """Choose the functions that `decode_self` calls."""
        self.self_attention = attention
        has_rotation = attention.position_encoding.has_rotation
        self.has_norm_or_rotation = has_rotation or attention.query_norm is not None
        self.self_in = decoder.linear(attention.in_projection)  # (R, D) to (R, (H + 2K) * d)
        self.self_out = decoder.linear(attention.out_projection)  # (R, H * d) to (R, D)
        self.attend_self: Callable[[Tensor, Tensor, Tensor, StepContext], Tensor] = attend_masked
        if decoder.has_position_bias:
            self.attend_self = functools.partial(attend_with_position_bias, attention)
        elif decoder.gathers_self_attention:
            self.attend_self = attend_gathered

    def decode_ssru(self, x: Tensor, state: DecodingState, _: AttentionWeights | None) -> Tensor:
        """Compute the next states of the SSRU from the newest tokens, and apply a ReLU."""
        cache = state.target_cache
        assert isinstance(cache, RecurrentCache)
        dtype = cache.states[0].dtype
        gates = torch.sigmoid(self.ssru_gate(x).to(dtype))  # (R, D)
        candidates = self.ssru_candidate(x).to(dtype)  # (R, D)
        return torch.relu(cache.update(self.layer_index, gates, candidates)).to(x.dtype)

    def decode_self(self, x: Tensor, state: DecodingState, _: AttentionWeights | None) -> Tensor:
        """Add the newest keys and values to the cache, and attend to all tokens so far."""
        heads = self.self_in(x).view(len(x), -1, self.head_size)  # (R, H + 2K, d)
        if self.has_norm_or_rotation:
            heads = self._normalize_and_rotate(heads, state.positions)
        heads = state.grid.rows_to_grid(heads)  # (B, W, H + 2K, d)
        q = heads[:, :, : self.num_heads].transpose(1, 2)  # (B, H, W, d)
        keys_values = heads[:, :, self.num_heads :]  # (B, W, 2K, d)
        newest = keys_values.view(*state.grid.shape, 2, -1, self.head_size)  # (B, W, 2, K, d)
        newest = newest.permute(2, 0, 3, 1, 4)  # (2, B, K, W, d)
        cache = state.target_cache
        assert isinstance(cache, AttentionCache)
        k, v = cache.keys_values.update(self.layer_index, newest).unbind()  # (B, K, capacity, d)
        # Keys without the spare capacity of the cache give fewer logits. Values keep it, since a
        # `GatherIndex` points into whole values, and `attend_gathered` would copy a slice.
        k = k[:, :, : cache.keys_values.width]  # (B, K, C, d)
        return self.self_out(self.attend_self(q, k, v, cache.context))

    def _normalize_and_rotate(self, heads: Tensor, positions: TokenPositions) -> Tensor:
        """Normalize and rotate the queries and keys in `heads` (R, H + 2K, d)."""
        attention = self.self_attention
        num_kv_heads = (heads.size(1) - self.num_heads) // 2
        q, k, v = torch.split(heads, [self.num_heads, num_kv_heads, num_kv_heads], dim=1)
        q, k = attention.normalize_and_rotate(q, k, positions)
        return torch.cat([q, k, v], dim=1)

    def decode_cross(
        self, x: Tensor, state: DecodingState, attention_out: AttentionWeights | None
    ) -> Tensor:
        """Attend to the source, whose keys and values were computed when `state` was made.

        If this layer is a key of `attention_out`, its weights (R, H, 1, S) are stored there.
        """
        context = state.cross_context
        heads = self.cross_in(x).view(len(x), self.num_heads, self.head_size)  # (R, H, d)
        q = state.grid.rows_to_grid(heads).transpose(1, 2)  # (B, H, W, d)
        k, v = state.source_keys_values[self.layer_index].unbind()  # (B, K, S, d)
        if attention_out is not None and self.cross_attention in attention_out:
            _, weights = attend_returning_weights(self.cross_attention, q, k, v, context)
            rows = state.grid.grid_to_rows(weights.transpose(1, 2))  # (R, H, S)
            rows = rows[: len(state.sentences)]  # without filler rows
            attention_out[self.cross_attention] = rows.unsqueeze(2)
        return self.cross_out(self.attend_cross(q, k, v, context))

    def decode_feed_forward(
        self, x: Tensor, state: DecodingState, _: AttentionWeights | None
    ) -> Tensor:
        """Call the feed-forward module."""
        return self.feed_forward(x)  # type: ignore[no-any-return]

    def decode_frozen_feed_forward(
        self, x: Tensor, state: DecodingState, _: AttentionWeights | None
    ) -> Tensor:
        """Compute the feed-forward sub-layer of frozen weights, without calling the module."""
        return self.outer(self.inner(x))


Sublayer = Callable[[Tensor, "DecodingState", AttentionWeights | None], Tensor]
"""Maps the newest tokens (R, D) to (R, D), and may store attention weights."""


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
        self.has_position_bias = (
            not self.is_recurrent and layer.self_attention.position_encoding.has_bias
        )
        weight = attention.in_projection.weight
        is_float32_on_cpu = (
            weight.device.type == "cpu"
            and weight.dtype is torch.float32
            and not torch.is_autocast_enabled("cpu")
        )
        shares_keys = attention.qkv_sizes[1] < attention.qkv_sizes[0]
        self.gathers_cross_attention = is_float32_on_cpu and not shares_keys
        self.gathers_self_attention = self.gathers_cross_attention and not self.has_position_bias
        self.layers = [LayerStep(index, layer, self) for index, layer in enumerate(decoder_layers)]

    def linear(
        self, module: nn.Module, end: int | None = None, activation: str = "none"
    ) -> TensorFunction:
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
            uses_gather_index=self.gathers_self_attention,
            has_position_bias=self.has_position_bias,
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


def norm_function(norm: nn.Module) -> TensorFunction:
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
        # (B,), the value of `num_positions` when each sentence joined this state; None if no
        # sentence joined later
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
        if self.first_positions is None:  # one position for all rows
            positions = torch.full((1, 1), newest, device=self.device)
        else:
            positions = newest - self.first_positions[self.sentences]  # (R,)
            num_filler_rows = self.grid.num_padded_rows - len(positions)
            positions = F.pad(positions, (0, num_filler_rows)).unsqueeze(1)  # (padded R, 1)
            positions = to_device(positions, self.device)
        return TokenPositions(index=positions, num_positions=self.num_positions)

    def _source_index(self) -> GatherIndex:
        """Return the index of the keys and values of each row's source."""
        width = self.source_bias.size(3)
        num_beams = self.grid.shape[1]
        sentences = self.grid.cpu_cells // num_beams  # (padded R,), since a cell is b * W + w
        return GatherIndex.from_columns(
            torch.arange(width).expand(len(sentences), width),
            self.source_bias.squeeze(1).index_select(0, sentences),  # (padded R, 1, S)
            self.grid,
            num_heads=self.decoder.num_heads,
            width=width,
            capacity=width,
        )

    def reorder(self, rows: Tensor) -> None:
        """Keep the hypotheses at `rows` (R',), in that order.

        `rows` is a tensor on the CPU, sorted by sentence. A row may be repeated or missing.
        """
        num_sentences = self.grid.shape[0]
        sentences = self.sentences.index_select(0, rows)
        if not torch.equal(sentences, self.sentences):
            self.sentences = sentences
            self._rebuild_grid(num_sentences)
        self.target_cache.reorder(rows, self.grid)
        num_live_sentences = int((self.grid.counts > 0).sum())
        has_few_live = num_live_sentences <= _MAX_LIVE_SHARE * num_sentences
        if has_few_live or self.target_cache.needs_compaction(self.num_positions):
            self._compact()

    def _compact(self) -> None:
        """Drop sentences without hypotheses, and columns that no hypothesis reads."""
        is_live = self.grid.counts > 0  # (B,)
        live = is_live.nonzero().squeeze(1)  # (B',)
        new_indices = is_live.cumsum(0) - 1  # (B,), the new index of each live sentence
        self.sentences = new_indices[self.sentences]
        if self.first_positions is not None:
            self.first_positions = self.first_positions.index_select(0, live)
            earliest = int(self.first_positions.min())  # count from the oldest live sentence
            self.first_positions -= earliest
            self.num_positions -= earliest
        self.target_cache.compact(live, self.sentences, self.grid)
        index = to_device(live, self.device)
        self.source_keys_values = [x.index_select(1, index) for x in self.source_keys_values]
        self.source_bias = self.source_bias.index_select(0, index)
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
