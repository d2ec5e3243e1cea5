"""Decoding of one sentence with few hypotheses on a CPU.

For few rows, calling operators takes longer than their arithmetic, so this path makes as few calls
as possible. One sentence needs neither padding nor the grid of `nmt.model.fast.decode`: all
hypotheses share the keys and values of the source, and a mask selects the columns of the cache that
belong to each hypothesis.
"""

# R rows, the live hypotheses; S source length, C columns of the cache; L layers, H heads, d
# dimensions of a head, D d_model

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from nmt.config import Activation
from nmt.model.fast.attention import FastAttention
from nmt.model.fast.decode import norm_function
from nmt.model.fast.layers import FastLinear
from nmt.model.positions import PositionEncoding, TokenPositions
from nmt.model.transformer import DecoderLayer, Transformer

MAX_ROWS = 8
_MIN_CAPACITY = 64  # columns of a new cache
_NEG_INF = float("-inf")


def can_decode_single(model: Transformer) -> bool:
    """Return whether `SingleDecoder` supports a model: float32 weights, ReLU, and attention without
    rotation, bias, normalized queries or shared keys.
    """
    layer = cast(DecoderLayer, model.decoder_layers[0])
    attention = cast(FastAttention, layer.self_attention)
    encoding = attention.position_encoding
    linear = cast(FastLinear, attention.in_projection)
    return (
        layer.feed_forward.activation is Activation.relu
        and not encoding.has_bias
        and type(encoding).rotate is PositionEncoding.rotate
        and attention.query_norm is None
        and attention.qkv_sizes[0] == attention.qkv_sizes[1]
        and linear.reordered_weights is not None
        and linear.reordered_weights.dtype is torch.float32
    )


class SingleLayer:
    """A decoder layer as functions of the newest tokens (R, D)."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.is_post_norm = layer.is_post_norm
        self.self_attention = cast(FastAttention, layer.self_attention)
        self.cross_attention = cast(FastAttention, layer.cross_attention)
        self.num_heads = self.self_attention.num_heads
        self.head_size = self.self_attention.head_size
        self.scale = self.head_size**-0.5
        self.self_in = few_rows_function(self.self_attention.in_projection)
        self.self_out = few_rows_function(self.self_attention.out_projection)
        q_size = self.cross_attention.qkv_sizes[0]
        self.cross_in = few_rows_function(self.cross_attention.in_projection, q_size)
        self.cross_out = few_rows_function(self.cross_attention.out_projection)
        self.inner = few_rows_function(layer.feed_forward.inner, activation="relu")
        self.outer = few_rows_function(layer.feed_forward.outer)
        self.self_norm = norm_function(layer.self_attention_norm)
        self.cross_norm = norm_function(layer.cross_attention_norm)
        self.feed_forward_norm = norm_function(layer.feed_forward_norm)

    def step(self, x: Tensor, cache: LayerCache, state: SingleState) -> Tensor:
        """Map the newest token of each hypothesis (R, D) to (R, D), and add it to the cache."""
        if self.is_post_norm:
            x = self.self_norm(x + self.attend_self(x, cache, state))
            x = self.cross_norm(x + self.attend_source(x, cache))
            return self.feed_forward_norm(x + self.outer(self.inner(x)))
        x = x + self.attend_self(self.self_norm(x), cache, state)
        x = x + self.attend_source(self.cross_norm(x), cache)
        return x + self.outer(self.inner(self.feed_forward_norm(x)))

    def attend_self(self, x: Tensor, cache: LayerCache, state: SingleState) -> Tensor:
        """Attend to the tokens so far, and write keys and values of the newest into the cache."""
        num_rows = x.shape[0]
        heads = self.self_in(x).view(num_rows, 3, self.num_heads, self.head_size)
        heads = heads.permute(1, 2, 0, 3)  # (3, H, R, d): queries, keys and values
        cache.keys_values[:, :, state.num_columns - num_rows : state.num_columns] = heads[1:]
        logits = torch.baddbmm(state.mask, heads[0], cache.keys, alpha=self.scale)  # (H, R, C)
        attended = torch.bmm(torch.softmax(logits, dim=-1), cache.values)  # (H, R, d)
        return self.self_out(attended.transpose(0, 1).reshape(num_rows, -1))

    def attend_source(self, x: Tensor, cache: LayerCache) -> Tensor:
        """Attend to the source; its keys are scaled already."""
        num_rows = x.shape[0]
        q = self.cross_in(x).view(num_rows, self.num_heads, self.head_size).transpose(0, 1)
        weights = torch.softmax(torch.bmm(q, cache.source_keys), dim=-1)  # (H, R, S)
        attended = torch.bmm(weights, cache.source_values)  # (H, R, d)
        return self.cross_out(attended.transpose(0, 1).reshape(num_rows, -1))


class LayerCache:
    """Keys and values of a layer, for the source and for the target tokens so far."""

    def __init__(self, layer: SingleLayer, memory: Tensor) -> None:
        keys_values = layer.cross_attention.project_memory(memory)  # (S, 2, H, d)
        self.source_keys = (keys_values[:, 0] * layer.scale).permute(1, 2, 0).contiguous()
        self.source_values = keys_values[:, 1].transpose(0, 1).contiguous()  # (H, S, d)
        self.set_target(memory.new_zeros(2, layer.num_heads, _MIN_CAPACITY, layer.head_size))

    def set_target(self, keys_values: Tensor) -> None:
        """Set the tensor (2, H, C, d) for keys and values of the target. Unused columns are 0."""
        self.keys_values = keys_values
        self.keys = keys_values[0].transpose(1, 2)  # (H, d, C)
        self.values = keys_values[1]  # (H, C, d)


class SingleDecoder:
    """The decoder of a model with frozen weights, for one sentence at a time."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.layers = [SingleLayer(cast(DecoderLayer, layer)) for layer in model.decoder_layers]
        self.norm = norm_function(model.decoder_norm)


class SingleState:
    """The live hypotheses of one sentence, and what each may attend to. It begins with one."""

    def __init__(self, decoder: SingleDecoder, memory: Tensor) -> None:
        """Begin with the encoder's output `memory` (S, D)."""
        self.decoder = decoder
        self.caches = [LayerCache(layer, memory) for layer in decoder.layers]
        self.num_positions = 0  # target tokens of each hypothesis so far
        self.num_columns = 0  # of the cache that are in use
        self.mask = memory.new_full((1, _MIN_CAPACITY), _NEG_INF)
        """(R, C), added to the logits: 0 where a hypothesis may attend, else minus infinity."""

    def step(self, tokens: Tensor) -> Tensor:
        """Decode the newest token of each hypothesis, ids (R,), to hidden states (R, D)."""
        self._add_columns(len(tokens))
        index = torch.full((1, 1), self.num_positions)
        self.num_positions += 1
        model = self.decoder.model
        positions = TokenPositions(index, self.num_positions)
        x = torch.embedding(model.embedding.weight, tokens) * model.embedding_scale
        x = model.decoder_positions.add(x, positions)
        for layer, cache in zip(self.decoder.layers, self.caches, strict=True):
            x = layer.step(x, cache, self)
        return self.decoder.norm(x)

    def reorder(self, rows: Tensor) -> None:
        """Go on with `rows` (R',); a row may be repeated."""
        self.mask = self.mask.index_select(0, rows)

    def _add_columns(self, num_rows: int) -> None:
        """Add a column to the cache for each hypothesis, which only this one attends to."""
        if self.num_columns + num_rows > self.mask.size(1):
            self._drop_unused_columns(num_rows)
        self.mask.narrow(1, self.num_columns, num_rows).diagonal().zero_()
        self.num_columns += num_rows

    def _drop_unused_columns(self, num_rows: int) -> None:
        """Drop the columns that no hypothesis attends to; add capacity if that frees too few."""
        used = (self.mask == 0).any(dim=0).nonzero().squeeze(1)  # (C',)
        self.num_columns = len(used)
        capacity = max(self.mask.size(1), 2 * (self.num_columns + num_rows))
        mask = self.mask.new_full((len(self.mask), capacity), _NEG_INF)
        mask[:, : self.num_columns] = self.mask[:, used]
        self.mask = mask
        for cache in self.caches:
            _, num_heads, _, head_size = cache.keys_values.shape
            keys_values = cache.keys_values.new_zeros(2, num_heads, capacity, head_size)
            keys_values[:, :, : self.num_columns] = cache.keys_values[:, :, used]
            cache.set_target(keys_values)


def few_rows_function(
    module: nn.Module, end: int | None = None, activation: str = "none"
) -> Callable[[Tensor], Tensor]:
    """Return the function of a linear layer, or of its first `end` outputs; see
    `FastLinear.few_rows_function`.
    """
    return cast(FastLinear, module).few_rows_function(end, activation)
