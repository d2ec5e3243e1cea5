"""Encoding and decoding of one sentence with few hypotheses on a CPU.

For few rows, calling operators takes longer than their arithmetic, so this module makes as few
calls as possible. One sentence needs neither packing nor the grid of `nmt.model.fast.decode`, since
all hypotheses share the keys and values of the source. Each hypothesis has one row. Each step adds
a column of keys and values for every hypothesis, and a mask selects the columns that belong to a
hypothesis, as in `nmt.model.fast.cache`. An SSRU has a state for each hypothesis instead.
"""

# R live hypotheses, one row each; S source length, N source rows (S and filler rows)
# C columns of the cache
# H heads, d dimensions of a head, D d_model, V vocab

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.config import Activation, Decoder
from nmt.model.fast.attention import FastAttention
from nmt.model.fast.decode import TensorFunction, norm_function
from nmt.model.fast.layers import FastLinear, round_up_rows
from nmt.model.positions import TokenPositions
from nmt.model.transformer import DecoderLayer, EncoderLayer, Transformer

MAX_ROWS = 8  # largest number of hypotheses; `nmt.model.fast.decode` decodes more
_MIN_CAPACITY = 64  # number of columns of a new cache
_NEG_INF = float("-inf")


def can_decode_single(model: Transformer) -> bool:
    """Return whether `SingleTransformer` supports a model.

    It needs frozen float32 weights, ReLU, and attention without bias, normalized queries or shared
    keys.
    """
    layer = cast(EncoderLayer, model.encoder_layers[0])
    attention = cast(FastAttention, layer.self_attention)
    encoding = attention.position_encoding
    linear = cast(FastLinear, attention.in_projection)
    return (
        layer.feed_forward.activation is Activation.relu
        and not encoding.has_bias
        and attention.query_norm is None
        and attention.qkv_sizes[0] == attention.qkv_sizes[1]
        and linear.reordered_weights is not None
        and linear.reordered_weights.dtype is torch.float32
    )


class SingleEncoderLayer:
    """An encoder layer of frozen weights, as a function of one sentence (N, D)."""

    def __init__(self, layer: EncoderLayer) -> None:
        self.is_post_norm = layer.is_post_norm
        attention = cast(FastAttention, layer.self_attention)
        self.num_heads = attention.num_heads
        self.head_size = attention.head_size
        self.position_encoding = attention.position_encoding
        self.attention_in = few_rows_function(attention.in_projection)
        self.attention_out = few_rows_function(attention.out_projection)
        self.inner = few_rows_function(layer.feed_forward.inner, activation="relu")
        self.outer = few_rows_function(layer.feed_forward.outer)
        self.attention_norm = norm_function(layer.self_attention_norm)
        self.feed_forward_norm = norm_function(layer.feed_forward_norm)

    def encode(self, x: Tensor, positions: TokenPositions, num_tokens: int) -> Tensor:
        """Map (N, D) to (N, D); rows from `num_tokens` on are filler."""
        if self.is_post_norm:
            x = self.attention_norm(x + self.attend(x, positions, num_tokens))
            return self.feed_forward_norm(x + self.outer(self.inner(x)))
        x = x + self.attend(self.attention_norm(x), positions, num_tokens)
        return x + self.outer(self.inner(self.feed_forward_norm(x)))

    def attend(self, x: Tensor, positions: TokenPositions, num_tokens: int) -> Tensor:
        """Attend to the first `num_tokens` rows of `x` (N, D)."""
        num_rows = x.shape[0]
        heads = self.attention_in(x).view(1, num_rows, 3, self.num_heads, self.head_size)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()  # each (1, H, N, d)
        q, k = self.position_encoding.rotate(q, k, positions)
        attended = F.scaled_dot_product_attention(q, k[:, :, :num_tokens], v[:, :, :num_tokens])
        return self.attention_out(attended.transpose(1, 2).reshape(num_rows, -1))


class SingleDecoderLayer:
    """A decoder layer of frozen weights, as a function of the newest tokens (R, D)."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.is_post_norm = layer.is_post_norm
        cross_attention = cast(FastAttention, layer.cross_attention)
        self.num_heads = cross_attention.num_heads
        self.head_size = cross_attention.head_size
        self.scale = self.head_size**-0.5
        # the sub-layer that reads the target: self-attention or an SSRU
        self.read_target: Callable[[Tensor, LayerCache, SingleState], Tensor]
        if layer.ssru is None:
            self_attention = cast(FastAttention, layer.self_attention)
            self.position_encoding = self_attention.position_encoding
            self.self_in = few_rows_function(self_attention.in_projection)
            self.self_out = few_rows_function(self_attention.out_projection)
            self.self_norm = norm_function(layer.self_attention_norm)
            self.read_target = self.attend_self
        else:
            self.ssru_gate = few_rows_function(layer.ssru.forget_gate)
            self.ssru_candidate = few_rows_function(layer.ssru.candidate)
            self.self_norm = norm_function(layer.ssru_norm)
            self.read_target = self.update_ssru
        q_size = cross_attention.qkv_sizes[0]
        self.cross_in = few_rows_function(cross_attention.in_projection, end=q_size)
        self.project_memory = few_rows_function(cross_attention.in_projection, start=q_size)
        self.cross_out = few_rows_function(cross_attention.out_projection)
        self.inner = few_rows_function(layer.feed_forward.inner, activation="relu")
        self.outer = few_rows_function(layer.feed_forward.outer)
        self.cross_norm = norm_function(layer.cross_attention_norm)
        self.feed_forward_norm = norm_function(layer.feed_forward_norm)

    def step(self, x: Tensor, cache: LayerCache, state: SingleState) -> Tensor:
        """Map the newest token of each hypothesis (R, D) to (R, D), and add it to the cache."""
        if self.is_post_norm:
            x = self.self_norm(x + self.read_target(x, cache, state))
            x = self.cross_norm(x + self.attend_source(x, cache))
            return self.feed_forward_norm(x + self.outer(self.inner(x)))
        x = x + self.read_target(self.self_norm(x), cache, state)
        x = x + self.attend_source(self.cross_norm(x), cache)
        return x + self.outer(self.inner(self.feed_forward_norm(x)))

    def attend_self(self, x: Tensor, cache: LayerCache, state: SingleState) -> Tensor:
        """Write the keys and values of `x` into the cache, and attend to all tokens so far."""
        num_rows = x.shape[0]
        heads = self.self_in(x).view(num_rows, 3, self.num_heads, self.head_size)
        heads = heads.permute(1, 2, 0, 3)  # (3, H, R, d): queries, keys and values
        if self.position_encoding.has_rotation:
            # changes `heads`: on a CPU without gradients, `rotate` works in place
            self.position_encoding.rotate(heads.select(0, 0), heads.select(0, 1), state.positions)
        # `narrow` and `select` take less time than indexing
        newest = cache.keys_values.narrow(2, state.num_columns - num_rows, num_rows)
        newest.copy_(heads.narrow(0, 1, 2))
        q = heads.select(0, 0)  # (H, R, d)
        logits = torch.baddbmm(state.mask, q, cache.keys, alpha=self.scale)  # (H, R, C)
        attended = torch.bmm(torch.softmax(logits, dim=-1), cache.values)  # (H, R, d)
        return self.self_out(attended.transpose(0, 1).reshape(num_rows, -1))

    def update_ssru(self, x: Tensor, cache: LayerCache, state: SingleState) -> Tensor:
        """Update the states of the SSRU in the cache by the newest tokens `x`."""
        gates = torch.sigmoid(self.ssru_gate(x))
        cache.ssru_states = torch.lerp(self.ssru_candidate(x), cache.ssru_states, gates)
        return torch.relu(cache.ssru_states)

    def attend_source(self, x: Tensor, cache: LayerCache) -> Tensor:
        """Attend to the source, whose keys in the cache are already scaled."""
        num_rows = x.shape[0]
        q = self.cross_in(x).view(num_rows, self.num_heads, self.head_size).transpose(0, 1)
        weights = torch.softmax(torch.bmm(q, cache.source_keys), dim=-1)  # (H, R, S)
        attended = torch.bmm(weights, cache.source_values)  # (H, R, d)
        return self.cross_out(attended.transpose(0, 1).reshape(num_rows, -1))


class LayerCache:
    """Keys and values of a decoder layer, for the source and for the target tokens so far.

    A layer with an SSRU has its states (R, D) in place of the target's keys and values.
    """

    def __init__(self, layer: SingleDecoderLayer, memory: Tensor, num_tokens: int) -> None:
        """Project the first `num_tokens` rows of `memory` (N, D) to source keys and values."""
        keys_values = layer.project_memory(memory)[:num_tokens]  # (S, 2 * H * d)
        keys_values = keys_values.view(num_tokens, 2, layer.num_heads, layer.head_size)
        scaled_keys = keys_values[:, 0] * layer.scale  # (S, H, d)
        self.source_keys = scaled_keys.permute(1, 2, 0).contiguous()  # (H, d, S)
        self.source_values = keys_values[:, 1].transpose(0, 1).contiguous()  # (H, S, d)
        self.ssru_states = memory.new_zeros(1, memory.size(1))
        self.set_target(memory.new_zeros(2, layer.num_heads, _MIN_CAPACITY, layer.head_size))

    def set_target(self, keys_values: Tensor) -> None:
        """Set the keys and values of the target (2, H, C, d), whose unused columns are 0."""
        self.keys_values = keys_values
        self.keys = keys_values[0].transpose(1, 2)  # (H, d, C)
        self.values = keys_values[1]  # (H, C, d)


class SingleTransformer:
    """A model with frozen weights that translates one sentence at a time."""

    def __init__(self, model: Transformer, logits: TensorFunction) -> None:
        """`logits` maps hidden states (R, D) to logits (R, V)."""
        self.model = model
        self.logits = logits
        self.encoder_layers = []
        for layer in model.encoder_layers:
            self.encoder_layers.append(SingleEncoderLayer(cast(EncoderLayer, layer)))
        self.decoder_layers = []
        for layer in model.decoder_layers:
            self.decoder_layers.append(SingleDecoderLayer(cast(DecoderLayer, layer)))
        self.encoder_norm = norm_function(model.encoder_norm)
        self.decoder_norm = norm_function(model.decoder_norm)

    def start(self, src: Tensor) -> SingleState:
        """Encode source ids (S,), and return the state of decoding with one empty hypothesis."""
        num_tokens = len(src)
        num_rows = round_up_rows(num_tokens)  # N, as the linear layers require
        src = F.pad(src, (0, num_rows - num_tokens))
        model = self.model
        embedding = model.src_embedding or model.embedding
        positions = TokenPositions(torch.arange(num_rows), num_rows)
        x = torch.embedding(embedding.weight, src) * model.embedding_scale  # (N, D)
        x = model.encoder_positions.add(x, positions)
        for layer in self.encoder_layers:
            x = layer.encode(x, positions, num_tokens)
        return SingleState(self, self.encoder_norm(x), num_tokens)


class SingleState:
    """The live hypotheses of one sentence, and the columns that each may attend to."""

    def __init__(self, transformer: SingleTransformer, memory: Tensor, num_tokens: int) -> None:
        """Begin with one empty hypothesis; `memory` (N, D) encodes `num_tokens` source tokens."""
        self.transformer = transformer
        self.is_recurrent = transformer.model.config.decoder is Decoder.ssru
        self.caches = []
        for layer in transformer.decoder_layers:
            self.caches.append(LayerCache(layer, memory, num_tokens))
        self.num_positions = 0  # number of target tokens of each hypothesis so far
        self.positions = TokenPositions(torch.zeros(1, 1), 0)  # of the newest tokens, set by `step`
        self.num_columns = 0  # number of columns of the cache in use
        # the mask has as many columns as each cache
        self.set_mask(memory.new_full((1, _MIN_CAPACITY), _NEG_INF))

    def set_mask(self, mask: Tensor) -> None:
        """Set the mask (R, C), which is added to the logits of self-attention.

        It is 0 where a hypothesis may attend to a column, and minus infinity elsewhere.
        """
        self.mask = mask
        # the same memory as an array, in which writing a number takes a tenth of the time
        self.mask_array = mask.numpy()

    def log_probs(self, tokens: Tensor) -> Tensor:
        """Append a token to each hypothesis, ids (R,); return log-probabilities (R, V)."""
        return torch.log_softmax(self.transformer.logits(self.step(tokens)), dim=-1)

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each hypothesis, ids (R,); return hidden states (R, D)."""
        if not self.is_recurrent:
            self._add_columns(tokens.shape[0])
        position = torch.full((1, 1), self.num_positions)
        self.num_positions += 1
        self.positions = TokenPositions(position, self.num_positions)
        transformer = self.transformer
        model = transformer.model
        x = torch.embedding(model.embedding.weight, tokens) * model.embedding_scale
        if self.is_recurrent and self.num_positions == 1:
            x = torch.zeros_like(x)  # see `Transformer.embed_target`
        x = model.decoder_positions.add(x, self.positions)
        for layer, cache in zip(transformer.decoder_layers, self.caches, strict=True):
            x = layer.step(x, cache, self)
        return transformer.decoder_norm(x)

    def reorder(self, rows: Tensor) -> None:
        """Replace the hypotheses by those at `rows` (R',); a row may be repeated or missing."""
        if not self.is_recurrent:
            self.set_mask(self.mask.index_select(0, rows))
            return
        for cache in self.caches:
            cache.ssru_states = cache.ssru_states.index_select(0, rows)

    def _add_columns(self, num_rows: int) -> None:
        """Add a column to the cache for each hypothesis, to which only this hypothesis attends."""
        if self.num_columns + num_rows > self.mask.size(1):
            self._drop_unused_columns(num_rows)
        for row in range(num_rows):
            self.mask_array[row, self.num_columns + row] = 0
        self.num_columns += num_rows

    def _drop_unused_columns(self, num_rows: int) -> None:
        """Drop the columns that no hypothesis attends to; grow the cache if over half is in use."""
        used = (self.mask == 0).any(dim=0).nonzero().squeeze(1)  # (C',)
        self.num_columns = len(used)
        capacity = max(self.mask.size(1), 2 * (self.num_columns + num_rows))
        mask = self.mask.new_full((len(self.mask), capacity), _NEG_INF)
        mask[:, : self.num_columns] = self.mask[:, used]
        self.set_mask(mask)
        for cache in self.caches:
            _, num_heads, _, head_size = cache.keys_values.shape
            keys_values = cache.keys_values.new_zeros(2, num_heads, capacity, head_size)
            keys_values[:, :, : self.num_columns] = cache.keys_values[:, :, used]
            cache.set_target(keys_values)


def few_rows_function(
    module: nn.Module, start: int = 0, end: int | None = None, activation: str = "none"
) -> TensorFunction:
    """Call `FastLinear.few_rows_function` of `module`."""
    return cast(FastLinear, module).few_rows_function(start, end, activation)
