"""Encoding and decoding of one sentence with few hypotheses on a CPU.

With few hypotheses, calling operators takes longer than their arithmetic, so this module makes as
few calls as possible. It needs neither packing nor the grid of `nmt.model.fast.decode`, since there
is a single sentence, and all hypotheses share its keys and values.

Each hypothesis has one row in the tensors of a step. A step adds one column of keys and values to
the cache for each hypothesis. A mask selects the columns of a hypothesis, which are the columns of
its own tokens; the docstring of `nmt.model.fast.cache` has an example. In models with SSRUs, each
hypothesis has a state instead.
"""

# R rows: one for each live hypothesis
# S source tokens
# N rows in the encoder: S, and filler rows
# C columns of the cache, including unused ones
# H query heads
# K key heads, and as many value heads
# G = H / K query heads share a key head and a value head
# d dimensions of a head, D d_model, V vocabulary size

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.config import Activation, Decoder
from nmt.model.attention import repeat_heads
from nmt.model.fast.attention import FastAttention
from nmt.model.fast.decode import TensorFunction, norm_function
from nmt.model.fast.layers import FastLinear, round_up_rows
from nmt.model.layers import ACTIVATIONS, NORM_EPS, FeedForward, RmsNorm
from nmt.model.positions import TokenPositions
from nmt.model.transformer import DecoderLayer, EncoderLayer, Transformer

MAX_ROWS = 8  # largest number of hypotheses; `nmt.model.fast.decode` decodes more
_MIN_CAPACITY = 64  # number of columns of a new cache
_NEG_INF = float("-inf")


def can_decode_single(model: Transformer) -> bool:
    """Return whether `SingleTransformer` supports a model.

    It needs frozen float32 weights, and attention without a bias from the positional encoding.
    """
    layer = cast(EncoderLayer, model.encoder_layers[0])
    attention = cast(FastAttention, layer.self_attention)
    linear = cast(FastLinear, attention.in_projection)
    return (
        not attention.position_encoding.has_bias
        and linear.reordered_weights is not None
        and linear.reordered_weights.dtype is torch.float32
    )


class SingleEncoderLayer:
    """An encoder layer of frozen weights, as a function of one sentence (N, D)."""

    def __init__(self, layer: EncoderLayer) -> None:
        self.is_post_norm = layer.is_post_norm
        self.attention = cast(FastAttention, layer.self_attention)
        self.head_size = self.attention.head_size
        # H query heads, K key heads, K value heads
        self.head_counts = [size // self.head_size for size in self.attention.qkv_sizes]
        self.attention_in = few_rows_linear(self.attention.in_projection)
        self.attention_out = few_rows_linear(self.attention.out_projection)
        self.feed_forward = feed_forward_function(layer.feed_forward)
        self.attention_norm = few_rows_norm(layer.self_attention_norm)
        self.feed_forward_norm = few_rows_norm(layer.feed_forward_norm)

    def encode(self, x: Tensor, positions: TokenPositions, num_tokens: int) -> Tensor:
        """Map (N, D) to (N, D); rows from `num_tokens` on are filler."""
        if self.is_post_norm:
            x = self.attention_norm(x + self.attend(x, positions, num_tokens))
            return self.feed_forward_norm(x + self.feed_forward(x))
        x = x + self.attend(self.attention_norm(x), positions, num_tokens)
        return x + self.feed_forward(self.feed_forward_norm(x))

    def attend(self, x: Tensor, positions: TokenPositions, num_tokens: int) -> Tensor:
        """Attend to the first `num_tokens` rows of `x` (N, D)."""
        num_rows = x.shape[0]
        # a batch of one sentence, as `normalize_and_rotate` expects
        heads = self.attention_in(x).view(1, num_rows, -1, self.head_size)  # (1, N, H + 2K, d)
        heads = heads.transpose(1, 2)  # (1, H + 2K, N, d)
        q, k, v = torch.split(heads, self.head_counts, dim=1)  # (1, H, N, d), 2 x (1, K, N, d)
        q, k = self.attention.normalize_and_rotate(q, k, positions)
        k = repeat_heads(k[:, :, :num_tokens], self.attention.num_heads)  # (1, H, S, d)
        v = repeat_heads(v[:, :, :num_tokens], self.attention.num_heads)  # (1, H, S, d)
        attended = F.scaled_dot_product_attention(q, k, v)  # (1, H, N, d)
        joined_heads = attended.transpose(1, 2).reshape(num_rows, -1)  # (N, H * d)
        return self.attention_out(joined_heads)


class SingleDecoderLayer:
    """A decoder layer of frozen weights, as a function of the newest tokens (R, D)."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.is_post_norm = layer.is_post_norm
        cross_attention = cast(FastAttention, layer.cross_attention)
        q_size, kv_size, _ = cross_attention.qkv_sizes  # H * d, K * d, K * d
        self.num_heads = cross_attention.num_heads
        self.head_size = cross_attention.head_size
        self.num_kv_heads = kv_size // self.head_size
        self.scale = self.head_size**-0.5
        # self-attention or an SSRU: the sub-layer that reads the earlier tokens of the target
        self.target_sublayer: Callable[[Tensor, LayerCache, SingleState], Tensor]
        if layer.ssru is None:
            self_attention = cast(FastAttention, layer.self_attention)
            self.query_key_norm = make_query_key_norm(self_attention)
            self.position_encoding = self_attention.position_encoding
            self.self_in = few_rows_linear(self_attention.in_projection)
            self.self_out = few_rows_linear(self_attention.out_projection)
            self.self_norm = few_rows_norm(layer.self_attention_norm)
            self.target_sublayer = self.attend_self
        else:
            self.ssru_gate = few_rows_linear(layer.ssru.forget_gate)
            self.ssru_candidate = few_rows_linear(layer.ssru.candidate)
            self.self_norm = few_rows_norm(layer.ssru_norm)
            self.target_sublayer = self.update_ssru
        # `in_projection` has the outputs of queries, then of keys, then of values; the queries come
        # from the target, and the keys and values from the source
        self.cross_in = few_rows_linear(cross_attention.in_projection, end=q_size)
        self.project_memory = few_rows_linear(cross_attention.in_projection, start=q_size)
        self.cross_out = few_rows_linear(cross_attention.out_projection)
        self.feed_forward = feed_forward_function(layer.feed_forward)
        self.cross_norm = few_rows_norm(layer.cross_attention_norm)
        self.feed_forward_norm = few_rows_norm(layer.feed_forward_norm)

    def step(self, x: Tensor, cache: LayerCache, state: SingleState) -> Tensor:
        """Map the newest token of each hypothesis (R, D) to (R, D), and add it to the cache."""
        if self.is_post_norm:
            x = self.self_norm(x + self.target_sublayer(x, cache, state))
            x = self.cross_norm(x + self.attend_source(x, cache))
            return self.feed_forward_norm(x + self.feed_forward(x))
        x = x + self.target_sublayer(self.self_norm(x), cache, state)
        x = x + self.attend_source(self.cross_norm(x), cache)
        return x + self.feed_forward(self.feed_forward_norm(x))

    def attend_self(self, x: Tensor, cache: LayerCache, state: SingleState) -> Tensor:
        """Write the keys and values of `x` (R, D) into the cache, and attend to all tokens so far.

        `state` has already reserved the columns of `x`, the newest R ones.
        """
        num_rows = x.shape[0]
        heads = self.self_in(x).view(num_rows, -1, self.head_size)  # (R, H + 2K, d)
        # the heads come first, as in the cache: H of queries, K of keys, K of values
        heads = heads.transpose(0, 1)  # (H + 2K, R, d)
        # `narrow` returns a view of `heads`, as indexing does, in less time
        q = heads.narrow(0, 0, self.num_heads)  # (H, R, d)
        if self.query_key_norm is not None:
            queries_keys = heads.narrow(0, 0, self.num_heads + self.num_kv_heads)  # (H + K, R, d)
            # overwrites `heads`, and so `q`, which is a view of it
            queries_keys.copy_(self.query_key_norm(queries_keys))
        if self.position_encoding.has_rotation:
            k = heads.narrow(0, self.num_heads, self.num_kv_heads)  # (K, R, d)
            # changes `q` and `k`, and so `heads`: on a CPU without gradients, `rotate` works in
            # place, and its results are its arguments
            self.position_encoding.rotate(q, k, state.positions)
        new_keys_values = heads.narrow(0, self.num_heads, 2 * self.num_kv_heads)  # (2K, R, d)
        first_column = state.num_columns - num_rows
        newest_columns = cache.keys_values.narrow(1, first_column, num_rows)  # (2K, R, d)
        newest_columns.copy_(new_keys_values)  # writes into the cache
        q = self.group_queries(q)  # (K, G * R, d)
        # scale * q k^T + mask
        attention_logits = torch.baddbmm(
            state.repeated_mask, q, cache.transposed_keys, alpha=self.scale
        )
        weights = torch.softmax(attention_logits, dim=-1)  # (K, G * R, C)
        attended = torch.bmm(weights, cache.values)  # (K, G * R, d)
        return self.self_out(self.join_heads(attended, num_rows))

    def update_ssru(self, x: Tensor, cache: LayerCache, state: SingleState) -> Tensor:
        """Update the states of the SSRU in the cache by the newest tokens `x` (R, D)."""
        forget_gates = torch.sigmoid(self.ssru_gate(x))
        candidates = self.ssru_candidate(x)
        # gates * states + (1 - gates) * candidates
        cache.ssru_states = torch.lerp(candidates, cache.ssru_states, forget_gates)
        return torch.relu(cache.ssru_states)

    def attend_source(self, x: Tensor, cache: LayerCache) -> Tensor:
        """Attend to the source, whose keys in the cache are already scaled."""
        num_rows = x.shape[0]
        q = self.cross_in(x).view(num_rows, self.num_heads, self.head_size)  # (R, H, d)
        q = self.group_queries(q.transpose(0, 1))  # (K, G * R, d)
        attention_logits = torch.bmm(q, cache.transposed_source_keys)
        weights = torch.softmax(attention_logits, dim=-1)  # (K, G * R, S)
        attended = torch.bmm(weights, cache.source_values)  # (K, G * R, d)
        return self.cross_out(self.join_heads(attended, num_rows))

    def group_queries(self, q: Tensor) -> Tensor:
        """Rearrange queries (H, R, d) to a matrix (G * R, d) for each key head: (K, G * R, d).

        Query heads that share a key head are neighbors. So row g * R + r of a matrix belongs to
        hypothesis r.
        """
        return q.reshape(self.num_kv_heads, -1, self.head_size)

    def join_heads(self, attended: Tensor, num_rows: int) -> Tensor:
        """Undo `group_queries`, and join the heads: (K, G * R, d) becomes (R, H * d)."""
        heads = attended.view(self.num_heads, num_rows, self.head_size)
        return heads.transpose(0, 1).reshape(num_rows, -1)


class LayerCache:
    """Keys and values of a decoder layer, for the source and for the target tokens so far.

    The first dimension has the heads, since `torch.bmm` computes attention for all heads at once.
    Keys are transposed, as attention multiplies queries by them. A layer with an SSRU has states
    (R, D) instead of keys and values of the target.
    """

    def __init__(self, layer: SingleDecoderLayer, memory: Tensor, num_tokens: int) -> None:
        """Project the first `num_tokens` rows of `memory` (N, D) to source keys and values."""
        num_heads = layer.num_kv_heads
        keys_values = layer.project_memory(memory)[:num_tokens]  # (S, 2K * d)
        keys_values = keys_values.view(num_tokens, 2, num_heads, layer.head_size)
        scaled_keys = keys_values[:, 0] * layer.scale  # (S, K, d)
        values = keys_values[:, 1]  # (S, K, d)
        self.transposed_source_keys = scaled_keys.permute(1, 2, 0).contiguous()  # (K, d, S)
        self.source_values = values.transpose(0, 1).contiguous()  # (K, S, d)
        self.ssru_states = memory.new_zeros(1, memory.size(1))  # of one hypothesis
        self.set_target(memory.new_zeros(2 * num_heads, _MIN_CAPACITY, layer.head_size))

    def set_target(self, keys_values: Tensor) -> None:
        """Set the keys and values of the target (2K, C, d): K heads of keys, then K of values.

        Unused columns are 0. Later steps write into `keys_values`. The attributes `transposed_keys`
        and `values` are views of it, so they change, too.
        """
        self.keys_values = keys_values
        keys, values = keys_values.chunk(2)
        self.transposed_keys = keys.transpose(1, 2)  # (K, d, C)
        self.values = values  # (K, C, d)


class SingleTransformer:
    """A model with frozen weights that translates one sentence at a time."""

    def __init__(self, model: Transformer, compute_logits: TensorFunction) -> None:
        """`compute_logits` maps hidden states (R, D) to logits (R, V)."""
        self.model = model
        self.compute_logits = compute_logits
        self.encoder_layers = []
        for layer in model.encoder_layers:
            self.encoder_layers.append(SingleEncoderLayer(cast(EncoderLayer, layer)))
        self.decoder_layers = []
        for layer in model.decoder_layers:
            self.decoder_layers.append(SingleDecoderLayer(cast(DecoderLayer, layer)))
        first_layer = self.decoder_layers[0]
        self.group_size = first_layer.num_heads // first_layer.num_kv_heads  # G
        self.encoder_norm = few_rows_norm(model.encoder_norm)
        self.decoder_norm = few_rows_norm(model.decoder_norm)

    def start(self, src: Tensor) -> SingleState:
        """Encode source ids (S,), and return the state of decoding with one empty hypothesis."""
        num_tokens = len(src)
        num_rows = round_up_rows(num_tokens)  # N
        src = F.pad(src, (0, num_rows - num_tokens))  # (N,)
        model = self.model
        embedding = model.src_embedding or model.embedding
        positions = TokenPositions(torch.arange(num_rows), num_positions=num_rows)
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
        self.positions: TokenPositions  # of the newest tokens; `step` sets it
        self.num_columns = 0  # number of columns of the cache in use
        # the mask has as many columns as each cache
        self.set_mask(memory.new_full((1, _MIN_CAPACITY), _NEG_INF))

    def set_mask(self, mask: Tensor) -> None:
        """Set the mask (R, C), which is added to the logits of self-attention.

        It is 0 where a hypothesis may attend to a column, and minus infinity elsewhere.
        """
        self.mask = mask
        # An array with the same memory: writing into it changes `mask`. Writing a number takes a
        # tenth of the time that it takes in a tensor.
        self.mask_array = mask.numpy()
        self.repeated_mask = mask  # (G * R, C), see `_add_columns`

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each hypothesis, ids (R,); return log-probabilities (R, V)."""
        if not self.is_recurrent:
            self._add_columns(tokens.shape[0])
        position = torch.full((1, 1), self.num_positions)  # the same for all hypotheses
        self.num_positions += 1
        self.positions = TokenPositions(position, num_positions=self.num_positions)
        transformer = self.transformer
        model = transformer.model
        x = torch.embedding(model.embedding.weight, tokens) * model.embedding_scale  # (R, D)
        if self.is_recurrent and self.num_positions == 1:
            x = torch.zeros_like(x)  # BOS has no embedding, see `Transformer.embed_target`
        x = model.decoder_positions.add(x, self.positions)
        for layer, cache in zip(transformer.decoder_layers, self.caches, strict=True):
            x = layer.step(x, cache, self)
        logits = transformer.compute_logits(transformer.decoder_norm(x))
        return torch.log_softmax(logits, dim=-1)

    def reorder(self, rows: Tensor) -> None:
        """Replace the hypotheses by those at `rows` (R',); a row may be repeated or missing."""
        if not self.is_recurrent:
            self.set_mask(self.mask.index_select(0, rows))
            return
        for cache in self.caches:
            cache.ssru_states = cache.ssru_states.index_select(0, rows)

    def _add_columns(self, num_rows: int) -> None:
        """Reserve a column for each hypothesis, to which only this hypothesis attends."""
        if self.num_columns + num_rows > self.mask.size(1):
            self._drop_unused_columns(num_rows)
        for row in range(num_rows):
            self.mask_array[row, self.num_columns + row] = 0  # changes `mask`
        self.num_columns += num_rows
        self.repeated_mask = self.mask
        group_size = self.transformer.group_size
        if group_size > 1:
            # row g * R + r is the mask of hypothesis r, as `SingleDecoderLayer.group_queries` needs
            self.repeated_mask = self.mask.repeat(group_size, 1)

    def _drop_unused_columns(self, num_rows: int) -> None:
        """Drop the columns that no hypothesis attends to, to make room for `num_rows` new ones.

        The cache then has at least twice as many columns as are in use.
        """
        is_used = (self.mask == 0).any(dim=0)  # (C,)
        used_columns = is_used.nonzero().squeeze(1)  # (U,)
        self.num_columns = len(used_columns)  # U
        min_capacity = 2 * (self.num_columns + num_rows)
        capacity = max(self.mask.size(1), min_capacity)
        mask = self.mask.new_full((len(self.mask), capacity), _NEG_INF)
        mask[:, : self.num_columns] = self.mask[:, used_columns]
        self.set_mask(mask)
        for cache in self.caches:
            num_heads, _, head_size = cache.keys_values.shape  # 2K, C, d
            keys_values = cache.keys_values.new_zeros(num_heads, capacity, head_size)
            keys_values[:, : self.num_columns] = cache.keys_values[:, used_columns]
            cache.set_target(keys_values)


def few_rows_linear(
    module: nn.Module, start: int = 0, end: int | None = None, activation: str = "none"
) -> TensorFunction:
    """Return a function that computes a linear layer fast for few rows.

    It maps (R, I) to (R, O), the outputs from `start` to `end` of the layer (None: all). `module`
    is a `FastLinear`.
    """
    return cast(FastLinear, module).few_rows_function(start, end, activation)


def feed_forward_function(module: FeedForward) -> TensorFunction:
    """Return a function that computes a feed-forward sub-layer of frozen weights."""
    outer = few_rows_linear(module.outer)
    if module.activation is Activation.relu:
        inner = few_rows_linear(module.inner, activation="relu")
        return lambda x: outer(inner(x))
    inner = few_rows_linear(module.inner)
    activate = ACTIVATIONS[module.activation]
    if module.gate is None:
        return lambda x: outer(activate(inner(x)))
    gate = few_rows_linear(module.gate)
    return lambda x: outer(activate(gate(x)).mul_(inner(x)))


def few_rows_norm(norm: nn.Module) -> TensorFunction:
    """Like `norm_function`, but return a function that is faster for few rows."""
    if isinstance(norm, RmsNorm):
        return rms_norm_function(norm.weight)
    return norm_function(norm)


def make_query_key_norm(attention: FastAttention) -> TensorFunction | None:
    """Return a function that normalizes H query heads and K key heads at once.

    It maps (H + K, R, d) to the same shape. Returns None for a model without `qk_norm`.
    """
    if attention.query_norm is None:
        return None
    query_weight = cast(RmsNorm, attention.query_norm).weight
    key_weight = cast(RmsNorm, attention.key_norm).weight
    num_kv_heads = attention.qkv_sizes[1] // attention.head_size
    query_weights = query_weight.expand(attention.num_heads, 1, -1)  # (H, 1, d)
    key_weights = key_weight.expand(num_kv_heads, 1, -1)  # (K, 1, d)
    return rms_norm_function(torch.cat([query_weights, key_weights]))


def rms_norm_function(weight: Tensor) -> TensorFunction:
    """Return a function that computes `RmsNorm` for a weight that broadcasts to (..., D).

    It calls four operators. On a CPU, `torch.rms_norm` calls about ten.
    """
    # x / sqrt(mean(x^2) + eps) * weight = x / sqrt(|x|^2 + D * eps) * (sqrt(D) * weight)
    size = weight.shape[-1]
    scaled_weight = weight * math.sqrt(size)
    offset = torch.tensor(math.sqrt(size * NORM_EPS))

    def normalize(x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # |x|, (..., 1)
        denominator = torch.hypot(norm, offset)  # sqrt(|x|^2 + D * eps)
        normalized = torch.div(x, denominator)
        return normalized.mul_(scaled_weight)  # in place, since `normalized` is a new tensor

    return normalize
