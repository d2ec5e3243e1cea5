"""Scaled dot-product and multi-head attention (paper, sections 3.2.1 and 3.2.2) and the cache for
decoding.

It knows neither positions nor padding ids: a `Packing` says which tokens form a sentence, in
decoding a boolean mask what may be attended to.
"""

# B batch, T queries, S keys, H heads, D d_model, K beams that share keys and values
# N and M tokens of all sentences of a side, one sentence after the other

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.model.packing import Packing, attend
from nmt.model.products import Linear

_ROOM = 8  # positions that a cache is made larger for at a time


class KeyValueCache:
    """Keys and values of the target positions decoded so far, for one self-attention layer.

    They stand in tensors with room for more positions, so that a new one moves no others.
    """

    def __init__(self) -> None:
        self.num_positions = 0
        self.keys: Tensor | None = None  # (B, H, room, D/H)
        self.values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest positions, each (B, H, T, D/H), and return all of them."""
        start, end = self.num_positions, self.num_positions + keys.size(2)
        self.keys = _with_room(self.keys, keys, end)
        self.values = _with_room(self.values, values, end)
        self.keys[:, :, start:end], self.values[:, :, start:end] = keys, values
        self.num_positions = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reorder(self, rows: Tensor) -> None:
        """Keep the rows given, in that order, `rows` (B',)."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.index_select(0, rows)
            self.values = self.values.index_select(0, rows)


def _with_room(old: Tensor | None, new: Tensor, num_positions: int) -> Tensor:
    """Return `old` (B, H, room, D/H), or a copy with room for so many positions."""
    room = 0 if old is None else old.size(2)
    if old is not None and num_positions <= room:
        return old
    larger = new.new_empty(*new.shape[:2], num_positions + _ROOM, new.size(3))
    if old is not None:
        larger[:, :, :room] = old
    return larger


class AttentionRecord:
    """Keeps what one layer attends to in the source, for callers that hand it to the decoder."""

    def __init__(self, layer: int) -> None:
        self.layer = layer  # of the decoder, from 0
        self.weights: Tensor | None = None  # (B*K, T, S), mean of the heads, of the last forward


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

    def self_step(self, x: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Let the newest positions `x` (B, T, D) attend to themselves and to those in the cache."""
        queries, keys, values = (
            self._split_heads(part) for part in self.in_projection(x).chunk(3, dim=-1)
        )  # 3 x (B, H, T, D/H)
        causal = cache is None
        if cache is not None:
            assert x.size(1) == 1, "decoding with a cache goes one position at a time"
            keys, values = cache.append(keys, values)
        return self._attend(queries, keys, values, mask=None, causal=causal)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Project the encoder's output (B, S, D) to keys and values, each (B, H, S, D/H)."""
        d_model = memory.size(-1)
        keys, values = self.in_projection.block(memory, d_model, 3 * d_model).chunk(2, dim=-1)
        return self._split_heads(keys), self._split_heads(values)

    def cross_step(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        mask: Tensor | None,
        record: AttentionRecord | None = None,
    ) -> Tensor:
        """Let `x` (B*K, T, D) attend to keys and values (B, H, S, D/H) of `project_memory`; `mask`
        (B, 1, 1, S); `record` is given the weights.

        With K > 1 the K beams of a sentence share its memory: they become further queries of one
        row.
        """
        num_rows, num_positions, d_model = x.shape
        x = x.reshape(keys.size(0), -1, d_model)  # (B, K*T, D)
        queries = self._split_heads(self.in_projection.block(x, 0, d_model))  # (B, H, K*T, D/H)
        if record is not None:
            weights = attention_weights(queries, keys, mask).mean(dim=1)  # (B, K*T, S)
            record.weights = weights.view(num_rows, num_positions, -1)  # (B*K, T, S)
        attended = self._attend(queries, keys, values, mask=mask, causal=False)
        return attended.view(num_rows, num_positions, d_model)  # (B*K, T, D)

    def _split_heads(self, x: Tensor) -> Tensor:
        batch, length, d_model = x.shape
        x = x.view(batch, length, self.num_heads, d_model // self.num_heads)  # (B, T, H, D/H)
        return x.transpose(1, 2)  # (B, H, T, D/H)

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None, causal: bool
    ) -> Tensor:
        # softmax(Q K^T / sqrt(D/H)) V, equation 1 of the paper; torch picks the fastest kernel
        if mask is None and queries.size(2) == 1 and _is_plain(queries):
            heads = _attend_with_one(queries, keys, values)  # (B, H, 1, D/H)
        else:
            heads = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, dropout_p=self._dropout, is_causal=causal
            )  # (B, H, T, D/H)
        joined = heads.transpose(1, 2).flatten(2)  # (B, T, D)
        return self.out_projection(joined)  # type: ignore[no-any-return]


def _is_plain(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.is_grad_enabled()


def _attend_with_one(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend from one position (B, H, 1, D/H), where a processor spends more on calling torch's
    fused kernel than on these three steps.
    """
    scaled = query * query.size(-1) ** -0.5
    logits = torch.bmm(scaled.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))  # (B*H, 1, S)
    weights = torch.softmax(logits, dim=-1)
    return torch.bmm(weights, values.flatten(0, 1)).view_as(query)  # (B, H, 1, D/H)


def attention_weights(queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """Compute softmax(Q K^T / sqrt(D/H)), (B, H, T, S), in float32 (paper, equation 1).

    The fast kernels of `_attend` never form this matrix.
    """
    logits = (queries @ keys.transpose(-2, -1)).float() * queries.size(-1) ** -0.5
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return torch.softmax(logits, dim=-1)
