"""Masks and multi-head attention of the Transformer, in plain PyTorch.

Sections, equations and figures refer to "Attention Is All You Need" (Vaswani et al., 2017).
Positional encodings are in `nmt.model.positions`.
"""

# B batch, T queries, S keys, D d_model, H heads, d dimensions of a head
# K heads of keys and values: H, or fewer if query heads share them. In equations, however, K is the
# matrix of keys, as in the paper.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.config import ModelConfig, NormLayer
from nmt.model.layers import new_norm
from nmt.model.positions import (
    PositionEncoding,
    TokenPositions,
    distance_matrix,
    new_attention_encoding,
)

AttentionWeights = dict[nn.Module, Tensor | None]
"""Attention weights (B, H, T, S), before dropout, keyed by `MultiHeadAttention` module. The caller
adds the modules whose weights it needs, with the value None. A forward pass then replaces None by
the weights.
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
    """Return the `AttentionContext` of a boolean mask for the queries `ids` (B, T).

    If `mask` already is an `AttentionContext`, returns it unchanged.
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

    `in_projection` stacks the W_i^Q of all heads, then the W_i^K, then the W_i^V.
    Self-attention may have a positional encoding, and an RMS norm of queries and keys (QK norm:
    Dehghani et al., 2023, section 2). Attention to the memory of the encoder has neither.
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
        """Let `x` (B, T, D) attend to `memory` (B, S, D), which is `x` in self-attention.

        If this module is a key of `attention_out`, its weights are stored there.
        """
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
