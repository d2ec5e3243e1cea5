"""Scaled dot-product and multi-head attention (paper, sections 3.2.1 and 3.2.2), of whole sentences
and of the newest token of hypotheses.

It knows neither positions nor padding ids: a `Packing` says which tokens form a sentence, in
decoding a bias what may be attended to.
"""

# B sentences, T queries, S keys, H heads, D d_model
# N and M tokens of all sentences of a side, one sentence after the other
# decoding: R rows, the live hypotheses; W beams of a sentence, C columns of the cache

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.model.cache import DecoderCache
from nmt.model.packing import Packing, attend
from nmt.model.products import Linear


class AttentionRecord:
    """Keeps what one layer attends to in the source, for callers that hand it to the decoder."""

    def __init__(self, layer: int) -> None:
        self.layer = layer  # of the decoder, from 0
        self.weights: Tensor | None = None  # (B or R, T, S), mean of the heads, of the last forward


class MultiHeadAttention(nn.Module):
    """Attention with `num_heads` heads of D/H dimensions each.

    The projections of queries, keys and values are the three D x D blocks of one matrix, so that
    self-attention needs one product for all of them. In training, `dropout` is the share of
    attention weights that are dropped.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.in_projection = Linear(d_model, 3 * d_model)
        self.out_projection = Linear(d_model, d_model)
        for block in self.in_projection.weight.chunk(3):
            nn.init.xavier_uniform_(block)
        nn.init.xavier_uniform_(self.out_projection.weight)
        nn.init.zeros_(self.in_projection.bias)
        nn.init.zeros_(self.out_projection.bias)

    def self_attention(self, x: Tensor, sentences: Packing, *, causal: bool) -> Tensor:
        """Let the tokens of each sentence in `x` (N, D) attend to each other."""
        parts = self.in_projection(x).view(len(x), 3, self.num_heads, -1)  # (N, 3, H, D/H)
        queries, keys, values = parts.unbind(1)  # 3 x (N, H, D/H)
        heads = attend(
            queries, keys, values, sentences, sentences, causal=causal, dropout=self._dropout
        )  # (N, H, D/H)
        return self.out_projection(heads.flatten(1))  # type: ignore[no-any-return]

    def cross_attention(
        self,
        x: Tensor,
        memory: Tensor,
        targets: Packing,
        sources: Packing,
        record: AttentionRecord | None = None,
    ) -> Tensor:
        """Let the sentences in `x` (N, D) attend to those in `memory` (M, D), the encoder's output;
        `record` is given the weights.
        """
        d_model = x.size(-1)
        queries = self.in_projection.block(x, 0, d_model)  # (N, D)
        queries = queries.view(len(x), self.num_heads, -1)  # (N, H, D/H)
        parts = self.in_projection.block(memory, d_model, 3 * d_model)  # (M, 2D)
        keys, values = parts.view(len(memory), 2, self.num_heads, -1).unbind(1)  # (M, H, D/H)
        if record is not None:
            padded = targets.pad(queries).transpose(1, 2), sources.pad(keys).transpose(1, 2)
            record.weights = attention_weights(*padded, sources.mask).mean(dim=1)  # (B, T, S)
        heads = attend(
            queries, keys, values, targets, sources, causal=False, dropout=self._dropout
        )  # (N, H, D/H)
        return self.out_projection(heads.flatten(1))  # type: ignore[no-any-return]

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def project_memory(self, memory: Tensor, sources: Packing) -> tuple[Tensor, Tensor]:
        """Project the encoder's output (M, D) to keys and values, each (B, H, S, D/H)."""
        d_model = memory.size(-1)
        parts = self.in_projection.block(memory, d_model, 3 * d_model)  # (M, 2D)
        keys, values = parts.view(len(memory), 2, self.num_heads, -1).unbind(1)  # (M, H, D/H)
        return sources.pad(keys).transpose(1, 2), sources.pad(values).transpose(1, 2)

    def self_attention_step(self, x: Tensor, cache: DecoderCache, layer: int) -> Tensor:
        """Let the newest token of each hypothesis, `x` (R, D), attend to all of its tokens."""
        queries, keys, values = (
            self._split_heads(cache.grid.spread(part))
            for part in self.in_projection(x).chunk(3, dim=-1)
        )  # 3 x (B, H, W, D/H)
        keys, values = cache.append(layer, keys, values)  # (B, H, C, D/H)
        heads = _attend_from_few(queries, keys, values, cache.bias)  # (B, H, W, D/H)
        return self._join_heads(heads, cache)

    def cross_attention_step(
        self, x: Tensor, cache: DecoderCache, layer: int, record: AttentionRecord | None = None
    ) -> Tensor:
        """Let the newest token of each hypothesis, `x` (R, D), attend to the source; `record` is
        given the weights.
        """
        keys, values = cache.memory[layer]  # (B, H, S, D/H)
        queries = self.in_projection.block(x, 0, x.size(-1))  # (R, D)
        queries = self._split_heads(cache.grid.spread(queries))  # (B, H, W, D/H)
        if record is not None:
            weights = attention_weights(queries, keys, cache.memory_bias).mean(dim=1)  # (B, W, S)
            rows = cache.grid.collect(weights)[: len(cache.sentences)]  # (R, S)
            record.weights = rows.unsqueeze(1)  # (R, 1, S)
        heads = _attend_from_few(queries, keys, values, cache.memory_bias)  # (B, H, W, D/H)
        return self._join_heads(heads, cache)

    def _split_heads(self, x: Tensor) -> Tensor:
        batch, beams, d_model = x.shape
        x = x.view(batch, beams, self.num_heads, d_model // self.num_heads)  # (B, W, H, D/H)
        return x.transpose(1, 2)  # (B, H, W, D/H)

    def _join_heads(self, heads: Tensor, cache: DecoderCache) -> Tensor:
        """Map the cells (B, H, W, D/H) to rows (R, D)."""
        joined = cache.grid.collect(heads.transpose(1, 2).flatten(2))  # (R, D)
        return self.out_projection(joined)  # type: ignore[no-any-return]


def _attend_from_few(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Attend from the few queries (B, H, W, D/H) of a step to keys and values (B, H, C, D/H);
    `bias` (B, 1, 1 or W, C) is added to the logits.

    On a processor these three steps take less time than torch's fused kernel.
    """
    if queries.device.type != "cpu":
        bias = None if bias is None else bias.to(queries.dtype)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
    scaled = (queries * queries.size(-1) ** -0.5).flatten(0, 1)  # (B*H, W, D/H)
    logits = torch.bmm(scaled, keys.flatten(0, 1).transpose(1, 2))  # (B*H, W, C)
    logits = logits.view(*queries.shape[:3], -1)  # (B, H, W, C)
    weights = torch.softmax(logits if bias is None else logits + bias, dim=-1)
    attended = torch.bmm(weights.flatten(0, 1).to(values.dtype), values.flatten(0, 1))
    return attended.view_as(queries)  # (B, H, W, D/H)


def attention_weights(queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """Compute softmax(Q K^T / sqrt(D/H)), (B, H, T, S), in float32 (paper, equation 1); `mask` is
    boolean, or what is added to the logits.

    The fast kernels of `_attend` never form this matrix.
    """
    logits = (queries @ keys.transpose(-2, -1)).float() * queries.size(-1) ** -0.5
    if mask is not None and mask.dtype is torch.bool:
        logits = logits.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        logits = logits + mask
    return torch.softmax(logits, dim=-1)
