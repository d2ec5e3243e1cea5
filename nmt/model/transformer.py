"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017) in plain PyTorch.

The file goes from small to large: masks, attention, feed-forward, encoder and decoder layers, the
model. Sections, equations and figures refer to the paper. Positional encodings are in
`nmt.model.positions`.

    model = Transformer(ModelConfig(), vocab_size=8000)
    hidden = model(src, padding_mask(src_lengths, S), tgt, causal_mask(T))  # (B, T, D)
    logits = model.logits(hidden)  # (B, T, V)

Training and translation use the faster layers of `nmt.model.fast` instead, which tests compare with
these.
"""

# B batch, S source length, T target length (in attention: T queries, S keys), V vocab
# D d_model, F d_ff, H heads, d dimensions of a head
# K heads of keys and values: H, or fewer if query heads share them

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmt.config import Activation, Decoder, ModelConfig, Norm, NormLayer
from nmt.model.positions import (
    PositionEncoding,
    TokenPositions,
    distance_matrix,
    from_file_names,
    new_attention_encoding,
    new_embedding_encoding,
    to_file_names,
)
from nmt.model.ssru import Ssru

NORM_EPS = 1e-5

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.relu: torch.relu,
    Activation.gelu: F.gelu,
    Activation.silu: F.silu,
    Activation.swiglu: F.silu,  # applied to the gate, see `FeedForward`
}

AttentionWeights = dict[nn.Module, Tensor | None]
"""Attention weights (B, H, T, S), before dropout. The caller sets the keys: the modules
`MultiHeadAttention` whose weights it needs. A forward pass sets the values.
"""


# --- masks (section 3.2.3)


def padding_mask(lengths: Tensor, width: int) -> Tensor:
    """Return a mask (B, 1, 1, S), False for padding.

    Sentences have `lengths` (B,) and are padded on the right to `width` (S). The first position of
    an empty sentence is not masked: if all logits were masked, their softmax would be NaN.
    """
    mask = torch.arange(width, device=lengths.device) < lengths.clamp(min=1)[:, None]  # (B, S)
    return mask[:, None, None, :]  # (B, 1, 1, S)


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """Return a mask (T, T) that lets a position attend to itself and to earlier positions only.

    The paper: to "prevent leftward information flow in the decoder".
    """
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


class AttentionContext(Protocol):
    """A mask, together with the positions that positional encodings need.

    `PaddedContext` is for padded sentences. `nmt.model.fast.packing` has one for packed sentences.
    """

    @property
    def positions(self) -> TokenPositions:
        """The positions of the queries. In self-attention the keys have the same positions."""

    @property
    def mask(self) -> Tensor:
        """Boolean, broadcasts to (B, H, T, S); True = may be attended to."""

    @property
    def distances(self) -> Tensor:
        """Key position minus query position, (T, S)."""


@dataclass(frozen=True)
class PaddedContext:
    """An `AttentionContext` of padded sentences."""

    mask: Tensor
    positions: TokenPositions

    @property
    def distances(self) -> Tensor:
        """See `AttentionContext.distances`."""
        length = self.positions.num_positions
        return distance_matrix(length, length, self.mask.device)


def as_context(mask: Tensor | AttentionContext, ids: Tensor) -> AttentionContext:
    """Return the context of a boolean mask and of queries `ids` (B, T).

    Returns a context unchanged.
    """
    if not isinstance(mask, Tensor):
        return mask
    return PaddedContext(mask, TokenPositions.up_to(ids.size(1), ids.device))


# --- attention (section 3.2, figure 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    dropout: nn.Module | None = None,
    encoding: PositionEncoding | None = None,
    distances: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute scaled dot-product attention (section 3.2.1, left half of figure 2).

    Args:
        q: queries (B, H, T, d).
        k: keys (B, H, S, d).
        v: values (B, H, S, d).
        mask: boolean, broadcasts to (B, H, T, S), True = may be attended to.
        dropout: applied to the weights.
        encoding: adds biases to logits and values; used only together with `distances`.
        distances: key positions minus query positions, (T, S) or (B, T, S).

    Returns:
        The attended values (B, H, T, d), and the weights (B, H, T, S) before dropout, at least in
        float32.
    """
    # equation 1: Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V
    weights = attention_weights(q, k, mask, encoding, distances)  # (B, H, T, S)
    value_weights = weights
    if dropout is not None:
        value_weights = dropout(weights)
    value_weights = value_weights.to(v.dtype)
    heads = value_weights @ v  # (B, H, T, d)
    if encoding is not None and distances is not None:
        heads = heads + encoding.value_bias(value_weights, distances)
    return heads, weights


def attention_weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor,
    encoding: PositionEncoding | None = None,
    distances: Tensor | None = None,
) -> Tensor:
    """Return the weights (B, H, T, S), at least in float32. `attend` describes the arguments."""
    logits = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, H, T, S)
    if encoding is not None and distances is not None:
        logits = logits + encoding.bias(q, distances)
    logits = logits.masked_fill(~mask, float("-inf"))
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.softmax(logits, dim=-1, dtype=dtype)


def repeat_heads(x: Tensor, num_heads: int, dim: int = 1) -> Tensor:
    """Repeat the K heads of keys or values `x`, in dimension `dim`, to `num_heads` heads.

    In grouped-query attention, H / K neighboring query heads share a head of keys and values
    (Ainslie et al., 2023, figure 2).
    """
    repeats = num_heads // x.size(dim)
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=dim)


class MultiHeadAttention(nn.Module):
    """Multi-head attention (section 3.2.2, right half of figure 2).

    MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O
    where head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)

    `in_projection` stacks the W_i^Q of all heads, then the W_i^K, then the W_i^V. Only
    self-attention has a positional encoding and a norm of queries and keys (Dehghani et al., 2023,
    section 2, here an RMS norm).
    """

    def __init__(self, config: ModelConfig, *, is_self: bool) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_size = config.d_k
        q_size = config.num_heads * config.d_k
        kv_size = (config.num_kv_heads or config.num_heads) * config.d_k
        self.qkv_sizes = [q_size, kv_size, kv_size]  # rows of in_projection.weight
        self.position_encoding = PositionEncoding(config)  # the base class encodes nothing
        if is_self:
            self.position_encoding = new_attention_encoding(config)
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if config.qk_norm and is_self:
            self.query_norm = new_norm(NormLayer.rms, config.d_k)
            self.key_norm = new_norm(NormLayer.rms, config.d_k)
        self.dropout = nn.Dropout(config.attention_dropout)
        self.in_projection = nn.Linear(config.d_model, sum(self.qkv_sizes))
        self.out_projection = nn.Linear(q_size, config.d_model)
        # Xavier's bound is computed for the stacked matrix, as in nn.MultiheadAttention. It is
        # smaller than the bounds of W^Q, W^K and W^V alone.
        nn.init.xavier_uniform_(self.in_projection.weight)
        nn.init.xavier_uniform_(self.out_projection.weight)
        nn.init.zeros_(self.in_projection.bias)
        nn.init.zeros_(self.out_projection.bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        context: AttentionContext,
        attention_out: AttentionWeights | None = None,
    ) -> Tensor:
        """Let `x` (B, T, D) attend to `memory` (B, S, D), which is `x` in self-attention."""
        q, k, v = self.project(x, memory)  # (B, H, T, d), 2 x (B, K, S, d)
        q, k = self.normalize_and_rotate(q, k, context.positions)
        k = repeat_heads(k, self.num_heads)  # (B, H, S, d)
        v = repeat_heads(v, self.num_heads)
        encoding = self.position_encoding
        distances = context.distances if encoding.has_bias else None
        heads, weights = attend(q, k, v, context.mask, self.dropout, encoding, distances)
        if attention_out is not None and self in attention_out:
            attention_out[self] = weights
        concatenated = heads.transpose(1, 2).flatten(2)  # (B, T, H * d)
        return self.out_projection(concatenated)  # type: ignore[no-any-return]

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries (B, H, T, d) of `x`, keys and values (B, K, S, d) of `memory`."""
        w_q, w_k, w_v = torch.split(self.in_projection.weight, self.qkv_sizes)
        b_q, b_k, b_v = torch.split(self.in_projection.bias, self.qkv_sizes)
        q = self._split_heads(F.linear(x, w_q, b_q))
        k = self._split_heads(F.linear(memory, w_k, b_k))
        v = self._split_heads(F.linear(memory, w_v, b_v))
        return q, k, v

    def normalize_and_rotate(
        self, q: Tensor, k: Tensor, positions: TokenPositions
    ) -> tuple[Tensor, Tensor]:
        """Apply the norm of queries and keys (..., d) and the rotary encoding, if configured."""
        if self.query_norm is not None and self.key_norm is not None:
            q = self.query_norm(q)
            k = self.key_norm(k)
        return self.position_encoding.rotate(q, k, positions)

    def _split_heads(self, x: Tensor) -> Tensor:
        """Divide vectors (B, T, H * d) into heads (B, H, T, d)."""
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)  # (B, H, T, d)


# --- layers (section 3.1, figure 1)


class RmsNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * g (Zhang and Sennrich, 2019, equation 4), in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def new_norm(norm_layer: NormLayer, size: int) -> nn.Module:
    """Make a norm over the last dimension."""
    norm_class = RmsNorm if norm_layer is NormLayer.rms else nn.LayerNorm
    return norm_class(size, eps=NORM_EPS)


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W1 + b1) W2 + b2 (section 3.3, equation 2).

    `activation` may replace the max, and `dropout` follows it. SwiGLU computes
    (silu(x Wg + bg) * (x W1 + b1)) W2 + b2 (Shazeer, 2020, equation 6, with biases).
    """

    def __init__(
        self, d_model: int, d_ff: int, dropout: float, activation: Activation = Activation.relu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        # torch's default initialization; with F = 4 D, its bound for `outer` is 0.46 times Xavier's
        self.inner = nn.Linear(d_model, d_ff)  # W1, b1
        self.outer = nn.Linear(d_ff, d_model)  # W2, b2
        self.gate: nn.Linear | None = None
        if activation is Activation.swiglu:
            self.gate = nn.Linear(d_model, d_ff)  # Wg, bg

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        activate = ACTIVATIONS[self.activation]
        if self.gate is None:
            hidden = activate(self.inner(x))  # (..., F)
        else:
            hidden = activate(self.gate(x)) * self.inner(x)
        return self.outer(self.dropout(hidden))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Base class of encoder and decoder layers: sub-layers, each with a residual sum and a norm.

    Post-norm is LayerNorm(x + Sublayer(x)) (section 3.1). Pre-norm is x + Sublayer(LayerNorm(x)),
    as in the Annotated Transformer. It also trains without warm-up, and with many layers (Xiong et
    al., 2020).
    """

    def __init__(
        self, config: ModelConfig, d_ff: int | None = None, decoder: Decoder = Decoder.attention
    ) -> None:
        """Make a layer with self-attention or an SSRU; `d_ff` defaults to `config.d_ff`."""
        super().__init__()
        self.is_post_norm = config.norm is Norm.post
        self.dropout = nn.Dropout(config.dropout)
        self.ssru: Ssru | None = None
        if decoder is Decoder.ssru:
            self.ssru = Ssru(config.d_model)
            self.ssru_norm = new_norm(config.norm_layer, config.d_model)
        else:
            self.self_attention = MultiHeadAttention(config, is_self=True)
            self.self_attention_norm = new_norm(config.norm_layer, config.d_model)
        self.feed_forward = FeedForward(
            config.d_model, d_ff or config.d_ff, config.activation_dropout, config.activation
        )
        self.feed_forward_norm = new_norm(config.norm_layer, config.d_model)

    def sublayer_input(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return `x` as a sub-layer reads it: normalized in pre-norm, unchanged in post-norm."""
        return x if self.is_post_norm else norm(x)

    def add_and_norm(self, norm: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Add the output `y` of a sub-layer to its input `x`; in post-norm, normalize the sum.

        Dropout is applied to `y` (section 5.4).
        """
        x = x + self.dropout(y)
        return norm(x) if self.is_post_norm else x


class EncoderLayer(Layer):
    """Self-attention, then feed-forward (left half of figure 1)."""

    def forward(
        self, x: Tensor, context: AttentionContext, attention_out: AttentionWeights | None = None
    ) -> Tensor:
        """Map (B, S, D) to (B, S, D). `context` has the mask of the source."""
        y = self.sublayer_input(self.self_attention_norm, x)
        y = self.self_attention(y, y, context, attention_out)
        x = self.add_and_norm(self.self_attention_norm, x, y)
        y = self.feed_forward(self.sublayer_input(self.feed_forward_norm, x))
        return self.add_and_norm(self.feed_forward_norm, x, y)


class DecoderLayer(Layer):
    """Causal self-attention or an SSRU, cross-attention, feed-forward (right half of figure 1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.decoder_d_ff, config.decoder)
        self.cross_attention = MultiHeadAttention(config, is_self=False)
        self.cross_attention_norm = new_norm(config.norm_layer, config.d_model)

    def forward(
        self,
        x: Tensor,
        tgt_context: AttentionContext,
        memory: Tensor,
        cross_context: AttentionContext,
        attention_out: AttentionWeights | None = None,
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D).

        `memory` (B, S, D) is the encoder's output. `tgt_context` has the causal mask, and
        `cross_context` the mask of the source.
        """
        if self.ssru is not None:
            y = self.ssru(self.sublayer_input(self.ssru_norm, x), tgt_context)
            x = self.add_and_norm(self.ssru_norm, x, y)
        else:
            y = self.sublayer_input(self.self_attention_norm, x)
            y = self.self_attention(y, y, tgt_context, attention_out)
            x = self.add_and_norm(self.self_attention_norm, x, y)
        y = self.sublayer_input(self.cross_attention_norm, x)
        y = self.cross_attention(y, memory, cross_context, attention_out)  # section 3.2.3
        x = self.add_and_norm(self.cross_attention_norm, x, y)
        y = self.feed_forward(self.sublayer_input(self.feed_forward_norm, x))
        return self.add_and_norm(self.feed_forward_norm, x, y)


# --- the model (figure 1)


class Transformer(nn.Module):
    """An encoder-decoder model. Source, target and output share one embedding (section 3.4).

    With `src_vocab_size`, the source has its own vocabulary and embedding. With
    `activation_checkpointing`, training keeps only the inputs of layers, and recomputes other
    activations in the backward pass (Chen et al., 2016). This takes less memory for the same
    gradients.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        src_vocab_size: int | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.embedding_scale = 1.0
        if config.scale_embedding:
            self.embedding_scale = math.sqrt(config.d_model)
        self.embedding = new_embedding(vocab_size, config.d_model)
        self.src_embedding: nn.Embedding | None = None
        if src_vocab_size is not None:
            self.src_embedding = new_embedding(src_vocab_size, config.d_model)
        self.output_weight: nn.Parameter | None = None
        if not config.tied_output:
            self.output_weight = nn.Parameter(torch.empty(vocab_size, config.d_model))
            nn.init.normal_(self.output_weight, std=config.d_model**-0.5)
        self.output_bias: nn.Parameter | None = None
        if config.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(vocab_size))
        dropout = config.dropout
        if config.embedding_dropout is not None:
            dropout = config.embedding_dropout
        self.dropout = nn.Dropout(dropout)
        self.encoder_layers = nn.ModuleList(
            EncoderLayer(config) for _ in range(config.num_encoder_layers)
        )
        self.decoder_layers = nn.ModuleList(
            DecoderLayer(config) for _ in range(config.num_decoder_layers)
        )
        self.encoder_positions = new_embedding_encoding(config)
        self.decoder_positions = new_embedding_encoding(config)
        # in pre-norm, no layer normalizes its output
        self.encoder_norm: nn.Module = nn.Identity()
        self.decoder_norm: nn.Module = nn.Identity()
        if config.norm is Norm.pre:
            self.encoder_norm = new_norm(config.norm_layer, config.d_model)
            self.decoder_norm = new_norm(config.norm_layer, config.d_model)
        # in model files, the weights of positional encodings have other names than their modules
        self.register_state_dict_post_hook(to_file_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(from_file_names)  # type: ignore[no-untyped-call]

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | AttentionContext,
        tgt: Tensor,
        tgt_mask: Tensor | AttentionContext,
        attention_out: AttentionWeights | None = None,
    ) -> Tensor:
        """Return hidden states (B, T, D), from which `logits` predicts the next target tokens.

        Args:
            src: source ids (B, S).
            src_mask: the source tokens to attend to, see `padding_mask`.
            tgt: target ids (B, T), beginning with BOS.
            tgt_mask: the target tokens to attend to, see `causal_mask`.
            attention_out: see `AttentionWeights`.
        """
        memory = self.encode(src, src_mask, attention_out)  # (B, S, D)
        return self.decode(tgt, tgt_mask, memory, src_mask, attention_out)

    def encode(
        self,
        src: Tensor,
        src_mask: Tensor | AttentionContext,
        attention_out: AttentionWeights | None = None,
    ) -> Tensor:
        """Map source ids (B, S) to the encoder's output (B, S, D)."""
        context = as_context(src_mask, src)
        embedding = self.src_embedding or self.embedding
        x = self.embed(src, embedding, self.encoder_positions, context.positions)  # (B, S, D)
        self._prepare_positions(self.encoder_layers, context.positions, x.dtype)
        for layer in self.encoder_layers:
            x = self.checkpointed(layer)(x, context, attention_out)
        return self.encoder_norm(x)  # type: ignore[no-any-return]

    def decode(
        self,
        tgt: Tensor,
        tgt_mask: Tensor | AttentionContext,
        memory: Tensor,
        src_mask: Tensor | AttentionContext,
        attention_out: AttentionWeights | None = None,
    ) -> Tensor:
        """Map target ids (B, T) to hidden states (B, T, D).

        `memory` (B, S, D) is the output of the encoder.
        """
        tgt_context = as_context(tgt_mask, tgt)
        cross_context = as_context(src_mask, tgt)  # its queries are `tgt`, its keys the source
        x = self.embed_target(tgt, tgt_context.positions)  # (B, T, D)
        self._prepare_positions(self.decoder_layers, tgt_context.positions, x.dtype)
        for layer in self.decoder_layers:
            x = self.checkpointed(layer)(x, tgt_context, memory, cross_context, attention_out)
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    @property
    def output_matrix(self) -> Tensor:
        """The weight of the output layer (V, D): by default the target embedding (section 3.4)."""
        return self.embedding.weight if self.output_weight is None else self.output_weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., D) to unnormalized log-probabilities (..., V)."""
        return F.linear(hidden, self.output_matrix, self.output_bias)

    def embed_target(self, ids: Tensor, positions: TokenPositions) -> Tensor:
        """Map target ids (B, T) to embeddings (B, T, D), see `embed`.

        A decoder with SSRUs reads zeros in place of the embedding of BOS, as in Marian.
        """
        x = self.embedding(ids) * self.embedding_scale
        if self.config.decoder is Decoder.ssru:
            is_first = positions.index.flatten().unsqueeze(1) == 0  # (T, 1)
            x = x.masked_fill(is_first, 0.0)
        return self.dropout(self.decoder_positions.add(x, positions))  # type: ignore[no-any-return]

    def embed(
        self,
        ids: Tensor,
        embedding: nn.Embedding,
        encoding: PositionEncoding,
        positions: TokenPositions,
    ) -> Tensor:
        """Map ids (B, T) to embeddings (B, T, D).

        Token embeddings are multiplied by sqrt(d_model) (section 3.4), positional encodings are
        added (section 3.5), and dropout is applied to the sum (section 5.4).
        """
        x = embedding(ids) * self.embedding_scale
        return self.dropout(encoding.add(x, positions))  # type: ignore[no-any-return]

    def _prepare_positions(
        self, layers: nn.ModuleList, positions: TokenPositions, dtype: torch.dtype
    ) -> None:
        """Compute the rotations of rotary positions once, since all layers use the same."""
        layer = cast(Layer, layers[0])
        if layer.ssru is None:
            attention = layer.self_attention
            attention.position_encoding.prepare(positions, attention.head_size, dtype)

    def checkpointed(self, layer: nn.Module) -> Callable[..., Any]:
        """Return `layer`, with activation checkpointing in training if it is configured."""
        if self.activation_checkpointing and self.training:
            return functools.partial(checkpoint, layer, use_reentrant=False)
        return layer


def new_embedding(vocab_size: int, d_model: int) -> nn.Embedding:
    """Make an embedding (V, D) with a standard deviation of 1 / sqrt(D)."""
    embedding = nn.Embedding(vocab_size, d_model)
    nn.init.normal_(embedding.weight, std=d_model**-0.5)
    return embedding


def count_parameters(model: nn.Module) -> int:
    """Count the parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
