"""The layers around attention: positions, feed-forward, and one layer of the encoder and of the
decoder (paper, section 3).

A layer knows one residual rule, `_residual`, for both placements of the norm.
"""

# D d_model; R rows, the live hypotheses when decoding
# N source tokens and M target tokens of all sentences, one sentence after the other

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nmt.config import ModelConfig, Norm, Positions
from nmt.model.attention import AttentionRecord, MultiHeadAttention
from nmt.model.cache import DecoderCache
from nmt.model.dropout import Dropout
from nmt.model.packing import Packing
from nmt.model.products import Linear

LAYER_NORM_EPS = 1e-5
Attend = Callable[[Tensor], Tensor]


def sinusoidal_positions(length: int, d_model: int, layout: Positions) -> Tensor:
    """Compute the positional encodings (length, D) in float32 (paper, section 3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i/D)) and PE(pos, 2i+1) the cosine; `sinusoidal_concat` has all
    sines first, then the cosines, over the D/2 wavelengths of Tensor2Tensor, which reach 2 pi *
    10000 with the last.
    """
    half = d_model // 2
    position = torch.arange(length, dtype=torch.float64).unsqueeze(1)  # (length, 1)
    steps = torch.arange(half, dtype=torch.float64)
    if layout is Positions.sinusoidal:
        angle = position * torch.exp(-math.log(10000.0) * 2 * steps / d_model)  # (length, D/2)
        table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)  # (length, D)
    else:
        angle = position * torch.exp(-math.log(10000.0) * steps / max(half - 1, 1))
        table = torch.cat([angle.sin(), angle.cos()], dim=-1)
    return table.float()


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2 at every position (paper, equation 2), `dropout` after the max."""

    def __init__(self, d_model: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.inner = Linear(d_model, d_ff)
        self.outer = Linear(d_ff, d_model)
        for linear in (self.inner, self.outer):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        return self.outer(self.dropout(self.inner.relu(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """What all layers share: sub-layers, each with dropout, residual sum and norm (section 5.4)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_post_norm = config.norm is Norm.post
        self.dropout = Dropout(config.dropout)
        self.self_attention = _attention(config)
        self.self_attention_norm = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.activation_dropout)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS)

    def _residual(self, x: Tensor, norm: nn.Module, sublayer: Attend) -> Tensor:
        if self.is_post_norm:
            return norm(x + self.dropout(sublayer(x)))  # type: ignore[no-any-return]
        return x + self.dropout(sublayer(norm(x)))  # type: ignore[no-any-return]


class EncoderLayer(Layer):
    """Self-attention, then feed-forward (left half of figure 1)."""

    def forward(self, x: Tensor, sources: Packing) -> Tensor:
        """Map the sentences (N, D) to (N, D)."""
        x = self._residual(
            x,
            self.self_attention_norm,
            lambda y: self.self_attention.self_attention(y, sources, causal=False),
        )
        return self._residual(x, self.feed_forward_norm, self.feed_forward)


class DecoderLayer(Layer):
    """Causal self-attention, attention to the source, feed-forward (right half of figure 1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.cross_attention = _attention(config)
        self.cross_attention_norm = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS)

    def forward(
        self,
        x: Tensor,
        targets: Packing,
        memory: Tensor,
        sources: Packing,
        record: AttentionRecord | None = None,
    ) -> Tensor:
        """Map the sentences (M, D) to (M, D), given the encoder's output `memory` (N, D)."""
        return self._sublayers(
            x,
            lambda y: self.self_attention.self_attention(y, targets, causal=True),
            lambda y: self.cross_attention.cross_attention(y, memory, targets, sources, record),
        )

    def step(
        self, x: Tensor, cache: DecoderCache, layer: int, record: AttentionRecord | None = None
    ) -> Tensor:
        """Map the newest token of each hypothesis, (R, D), to (R, D); this is layer number `layer`
        of `cache`.
        """
        return self._sublayers(
            x,
            lambda y: self.self_attention.self_attention_step(y, cache, layer),
            lambda y: self.cross_attention.cross_attention_step(y, cache, layer, record),
        )

    def _sublayers(self, x: Tensor, attend_target: Attend, attend_source: Attend) -> Tensor:
        x = self._residual(x, self.self_attention_norm, attend_target)
        x = self._residual(x, self.cross_attention_norm, attend_source)
        return self._residual(x, self.feed_forward_norm, self.feed_forward)


def _attention(config: ModelConfig) -> MultiHeadAttention:
    return MultiHeadAttention(config.d_model, config.num_heads, config.attention_dropout)
