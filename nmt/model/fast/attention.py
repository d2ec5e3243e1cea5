"""Multi-head attention over packed sentences and over the cache of decoding; with a boolean mask it
is that of the plain page.
"""

# B sentences, T queries, S keys, H heads, D d_model
# N and M tokens of all sentences of a side, one sentence after the other
# decoding: R rows, the live hypotheses; W beams of the widest sentence, C columns of the cache

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.model.fast.cache import DecoderCache, Reads
from nmt.model.fast.layers import FastLinear
from nmt.model.fast.packing import PackedMask, attend_packed
from nmt.model.transformer import AttentionRecord, Mask, MultiHeadAttention, attend


class FastAttention(MultiHeadAttention):
    """`MultiHeadAttention` that also takes packed sentences and a `DecoderCache`, each with a mask
    of its own kind.
    """

    def forward(
        self, x: Tensor, memory: Tensor, mask: Mask, record: AttentionRecord | None = None
    ) -> Tensor:
        """Let `x` attend to `memory`, which is `x` in self-attention.

        With a `PackedMask` these are (N, D) and (M, D), packed as it says. With a `DecoderCache`
        `x` is the newest token of each hypothesis (R, D), which attends to all its tokens so far,
        or to the source, whose keys and values are computed once.
        """
        if isinstance(mask, PackedMask):
            queries, keys, values = self._project(x, memory)  # (N, H, D/H), 2 x (M, H, D/H)
            dropout = self.dropout.p if self.training else 0.0
            joined = attend_packed(queries, keys, values, mask, dropout).flatten(1)  # (N, D)
            if record is not None and self in record:  # the fast kernels never form the weights
                queries = mask.queries.pad(queries).transpose(1, 2)  # (B, H, T, D/H)
                keys = mask.keys.pad(keys).transpose(1, 2)  # (B, H, S, D/H)
                record[self] = attend(queries, keys, keys, mask.visible())[1]
        elif isinstance(mask, DecoderCache):
            queries, keys, values = self._project_step(x, memory, mask)  # (B, H, W or C, D/H)
            is_own = memory is x
            if queries.device.type == "cpu" and queries.dtype is torch.float32:
                num_heads, room = values.shape[1:3]
                reads = mask.reads(num_heads, room) if is_own else mask.source_reads(num_heads)
                joined = attend_by_places(queries, keys, values, reads)  # (R or more, D)
            else:
                bias = mask.bias if is_own else mask.source_bias
                heads = attend_from_few(queries, keys, values[:, :, : keys.size(2)], bias)
                joined = mask.grid.collect(heads.transpose(1, 2).flatten(2))  # (R or more, D)
            if record is not None and self in record:
                bias = mask.bias if is_own else mask.source_bias
                weights = attend(queries, keys, keys, bias == 0)[1]  # (B, H, W, C)
                rows = mask.grid.collect(weights.transpose(1, 2))  # (R or more, H, C)
                record[self] = rows[: len(mask.sentences), :, None]
        else:
            return super().forward(x, memory, mask, record)
        return self.out_projection(joined)  # type: ignore[no-any-return]

    def _project(self, x: Tensor, memory: Tensor | None) -> list[Tensor]:
        """Compute queries of `x` (N, D), and keys and values of `memory` (M, D) if there is one,
        each (..., H, D/H).
        """
        in_projection = cast(FastLinear, self.in_projection)
        if memory is x:
            parts = in_projection(x).chunk(3, dim=-1)  # 3 x (N, D)
            return [part.unflatten(-1, (self.num_heads, -1)) for part in parts]
        queries = in_projection.block(x, 0, x.size(-1)).view(len(x), self.num_heads, -1)
        return [queries] if memory is None else [queries, *self.read(memory)]

    def read(self, memory: Tensor) -> list[Tensor]:
        """Compute keys and values of `memory` (M, D), each (M, H, D/H)."""
        in_projection, d_model = cast(FastLinear, self.in_projection), memory.size(-1)
        both = in_projection.block(memory, d_model, 3 * d_model)  # (M, 2 D)
        return [part.view(len(memory), self.num_heads, -1) for part in both.chunk(2, dim=-1)]

    def _project_step(self, x: Tensor, memory: Tensor, cache: DecoderCache) -> list[Tensor]:
        """Compute the queries (B, H, W, D/H) of `x` (R, D); return them with the keys and values
        (B, H, C, D/H) that are to be attended to.
        """
        if memory is x:
            parts = self._project(x, x)  # 3 x (R, H, D/H)
            queries, keys, values = (cache.grid.spread(part).transpose(1, 2) for part in parts)
            return [queries, *cache.append(self, keys, values)]
        rows, *new = self._project(x, None if self in cache.sources else memory)
        if new:
            cache.add_source(self, *new)
        return [cache.grid.spread(rows).transpose(1, 2), *cache.sources[self]]


def attend_by_places(queries: Tensor, keys: Tensor, values: Tensor, reads: Reads) -> Tensor:
    """Attend from the queries (B, H, W, D/H) of a step to keys (B, H, C, D/H) and values (B, H, C
    or more, D/H), from each to the places that `reads` says; return rows (R or more, D).

    The sums of values are those of `embedding_bag`, which is several times as fast on a CPU as a
    product of small matrices, and does not multiply by the weights 0 of other beams.
    """
    scaled = (queries * queries.size(-1) ** -0.5).flatten(0, 1)  # (B*H, W, D/H)
    keys = keys.flatten(0, 1)  # (B*H, C, D/H)
    sides = (keys, scaled) if reads.is_swapped else (scaled, keys)
    products = torch.bmm(sides[0], sides[1].transpose(1, 2)).view(-1)  # (B*H*W*C,)
    logits = products.index_select(0, reads.logits.view(-1)).view(reads.logits.shape)
    if reads.bias is not None:
        logits += reads.bias  # (R or more, H, T)
    weights = torch.softmax(logits, dim=-1).view(reads.values.shape)
    table = values.flatten(0, 2)  # (B*H*C or more, D/H)
    heads = F.embedding_bag(reads.values, table, mode="sum", per_sample_weights=weights)
    return heads.view(len(reads.logits), -1)


def attend_from_few(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attend from the few queries (B, H, W, D/H) of a step to keys and values (B, H, C, D/H);
    `bias` (B, 1, 1 or W, C) is added to the logits.
    """
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias.to(queries.dtype))
