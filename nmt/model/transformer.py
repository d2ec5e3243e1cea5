"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017) in plain PyTorch.

The file has the encoder and decoder layers, and then the model. Attention and masks are in
`nmt.model.attention`, norms and feed-forward layers in `nmt.model.layers`, and positional encodings
in `nmt.model.positions`. Sections, equations and figures refer to the paper.

    model = Transformer(ModelConfig(), vocab_size=8000)
    hidden = model(src, padding_mask(src_lengths, S), tgt, causal_mask(T))  # (B, T, D)
    logits = model.logits(hidden)  # (B, T, V)

Training and translation use the faster layers of `nmt.model.fast` instead. Tests compare their
results with the results of the layers in this file.
"""

# B batch, S source length, T target length, V vocab, D d_model

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmt.config import Decoder, ModelConfig, Norm
from nmt.model.attention import (
    AttentionContext,
    AttentionWeights,
    MultiHeadAttention,
    as_context,
)
from nmt.model.layers import FeedForward, new_norm
from nmt.model.positions import (
    PositionEncoding,
    TokenPositions,
    from_file_names,
    new_embedding_encoding,
    to_file_names,
)
from nmt.model.ssru import Ssru

# --- layers (section 3.1, figure 1)


class Layer(nn.Module):
    """Base class of encoder and decoder layers: sub-layers, each with a residual sum and a norm.

    Post-norm is LayerNorm(x + Sublayer(x)) (section 3.1). Pre-norm is x + Sublayer(LayerNorm(x)),
    as in the Annotated Transformer. Pre-norm models also train without warm-up, and with many
    layers (Xiong et al., 2020).
    """

    def __init__(
        self,
        config: ModelConfig,
        d_ff: int | None = None,
        first_sublayer: Decoder = Decoder.attention,
    ) -> None:
        """Make a layer that begins with self-attention or an SSRU.

        `d_ff` defaults to `config.d_ff`.
        """
        super().__init__()
        self.is_post_norm = config.norm is Norm.post
        self.dropout = nn.Dropout(config.dropout)
        self.ssru: Ssru | None = None
        if first_sublayer is Decoder.ssru:
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
        # in pre-norm, layers do not normalize their output, so each stack ends with its own norm
        self.encoder_norm: nn.Module = nn.Identity()
        self.decoder_norm: nn.Module = nn.Identity()
        if config.norm is Norm.pre:
            self.encoder_norm = new_norm(config.norm_layer, config.d_model)
            self.decoder_norm = new_norm(config.norm_layer, config.d_model)
        # weights of positional encodings have other names in model files than in this module
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
            attention_out: gets the weights of the modules that are its keys (`AttentionWeights`).
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
        embedding = self.embedding if self.src_embedding is None else self.src_embedding
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
        cross_context = as_context(src_mask, tgt)  # queries are target tokens, keys source tokens
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
            index = positions.index.flatten()  # (T,)
            is_bos = (index == 0).unsqueeze(1)  # (T, 1)
            x = x.masked_fill(is_bos, 0.0)
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
        """Store the rotations of a rotary encoding in `positions`, where all layers read them."""
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
