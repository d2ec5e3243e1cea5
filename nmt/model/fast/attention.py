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
from torch import Tensor, nn

from nmt.model.fast.cache import DecoderCache, Reads, rotations
from nmt.model.fast.layers import FastLinear
from nmt.model.fast.packing import PackedMask, attend_packed
from nmt.model.transformer import AttentionRecord, Mask, MultiHeadAttention, attend
from nmt.model.variants import distances, repeat_heads


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
            queries, *both = self._project(x, memory, mask.queries.positions.unsqueeze(-1))
            keys, values = (repeat_heads(part, self.num_heads, dim=1) for part in both)
            dropout = self.dropout.p if self.training else 0.0  # (N, H, D/H), 2 x (M, H, D/H)
            if self.relation is None:
                joined = attend_packed(queries, keys, values, mask, dropout).flatten(1)  # (N, D)
            else:
                heads = self._attend_padded(queries, keys, values, mask, self.dropout)[0]
                joined = mask.queries.unpad(heads.transpose(1, 2)).flatten(1)
            if record is not None and self in record:  # the fast kernels never form the weights
                record[self] = self._attend_padded(queries, keys, keys, mask)[1]
        elif isinstance(mask, DecoderCache):
            queries, keys, values = self._project_step(x, memory, mask)  # (B, H, W or C, D/H)
            is_own, is_recorded = memory is x, record is not None and self in record
            is_shared = keys.size(1) < self.num_heads
            is_plain = queries.device.type == "cpu" and queries.dtype is torch.float32
            if is_plain and self.relation is None and not is_shared:
                places = (self.num_heads, values.size(2))
                reads = mask.reads(*places) if is_own else mask.source_reads(*places)
                joined = attend_by_places(queries, keys, values, reads)  # (R or more, D)
            elif self.relation is None:
                bias = mask.bias if is_own else mask.source_bias
                heads = attend_from_few(queries, keys, values[:, :, : keys.size(2)], bias)
                joined = mask.grid.collect(heads.transpose(1, 2).flatten(2))  # (R or more, D)
            if self.relation is not None or is_recorded:
                sides = (keys, values[:, :, : keys.size(2)])
                keys, values = (repeat_heads(y, self.num_heads, dim=1) for y in sides)
                relation = () if self.relation is None else (self.relation, mask.distances())
                bias = mask.bias if is_own else mask.source_bias
                plain, weights = attend(queries, keys, values, bias == 0, None, *relation)
                if self.relation is not None:
                    joined = mask.grid.collect(plain.transpose(1, 2).flatten(2))
            if record is not None and is_recorded:
                rows = mask.grid.collect(weights.transpose(1, 2))  # (R or more, H, C)
                record[self] = rows[: len(mask.sentences), :, None]
        else:
            return super().forward(x, memory, mask, record)
        return self.out_projection(joined)  # type: ignore[no-any-return]

    def place(self, queries: Tensor, keys: Tensor, positions: Tensor | None) -> list[Tensor]:
        """See `MultiHeadAttention.place`; without gradients a CPU turns pairs in place, as complex
        numbers.
        """
        is_plain = queries.device.type == "cpu" and queries.dtype is torch.float32
        if positions is None or not (self.is_rotary and is_plain) or torch.is_grad_enabled():
            return super().place(queries, keys, positions)
        queries, keys = super().place(queries, keys, None)
        turns = rotations(positions, self.head_size)
        for x in (queries, keys):
            torch.view_as_complex(x.view(*x.shape[:-1], self.head_size // 2, 2)).mul_(turns)
        return [queries, keys]

    def _attend_padded(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: PackedMask,
        dropout: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend as the plain page does, from queries (N, H, D/H) to keys and values (M, H, D/H);
        return heads (B, H, T, D/H) and weights (B, H, T, S).
        """
        queries = mask.queries.pad(queries).transpose(1, 2)  # (B, H, T, D/H)
        keys, values = (mask.keys.pad(side).transpose(1, 2) for side in (keys, values))
        places = distances(mask.queries.longest, mask.keys.longest, queries.device)  # (T, S)
        return attend(queries, keys, values, mask.visible(), dropout, self.relation, places)

    def _project(
        self, x: Tensor, memory: Tensor | None, positions: Tensor | None = None
    ) -> list[Tensor]:
        """Compute queries of `x` (N, D), and keys and values of `memory` (M, D) if there is one,
        each (..., H or fewer, D/H). Rotary ones turn by `positions` (N, 1).
        """
        in_projection = cast(FastLinear, self.in_projection)
        if memory is x:
            parts = in_projection(x).split(self.sizes, dim=-1)  # (N, D), 2 x (N, D or less)
            queries, keys, values = (part.unflatten(-1, (-1, self.head_size)) for part in parts)
            return [*self.place(queries, keys, positions), values]
        queries = in_projection.block(x, 0, x.size(-1)).view(len(x), self.num_heads, -1)
        return [queries] if memory is None else [queries, *self.read(memory)]

    def read(self, memory: Tensor) -> list[Tensor]:
        """Compute keys and values of `memory` (M, D), each (M, H or fewer, D/H)."""
        in_projection, d_model = cast(FastLinear, self.in_projection), memory.size(-1)
        both = in_projection.block(memory, d_model, sum(self.sizes))  # (M, 2 D or less)
        return [part.view(len(memory), -1, self.head_size) for part in both.chunk(2, dim=-1)]

    def _project_step(self, x: Tensor, memory: Tensor, cache: DecoderCache) -> list[Tensor]:
        """Compute the queries (B, H, W, D/H) of `x` (R, D); return them with the keys and values
        (B, H or fewer, C, D/H) that are to be attended to.
        """
        if memory is x:
            positions = cache.ages().unsqueeze(-1) if self.is_rotary else None
            parts = self._project(x, x, positions)  # 3 x (R, H, D/H)
            queries, keys, values = (cache.grid.spread(part).transpose(1, 2) for part in parts)
            return [queries, *cache.append(self, torch.stack([keys, values]))]
        rows, *new = self._project(x, None if self in cache.sources else memory)
        if new:
            cache.add_source(self, *new)
        return [cache.grid.spread(rows).transpose(1, 2), *cache.sources[self]]


def attend_by_places(queries: Tensor, keys: Tensor, values: Tensor, reads: Reads) -> Tensor:
    """Attend from the queries (B, H, W, D/H) of a step to keys (B, H, C, D/H) and values (B, H, C
    or more, D/H), from each to the places that `reads` says; return rows (R or more, D).

    The sums of values are those of torch's `embedding_bag` (that of `F` checks more), which is
    several times as fast on a CPU as a product of small matrices, without the weights 0 of others.
    """
    scaled = (queries * queries.size(-1) ** -0.5).flatten(0, 1)  # (B*H, W, D/H)
    keys = keys.flatten(0, 1)  # (B*H, C, D/H)
    sides = (keys, scaled) if reads.is_swapped else (scaled, keys)
    products = torch.bmm(sides[0], sides[1].transpose(1, 2)).view(-1)  # (B*H*W*C,)
    logits = products.index_select(0, reads.logits).view(reads.shape)
    if reads.bias is not None:
        logits += reads.bias  # (R or more, H, T)
    weights = torch.softmax(logits, dim=-1).view(-1)
    table = values.flatten(0, 2)  # (B*H*C or more, D/H)
    heads = torch.embedding_bag(table, reads.values, reads.bags, per_sample_weights=weights)[0]
    return heads.view(reads.shape[0], -1)


def attend_from_few(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attend from the few queries (B, H, W, D/H) of a step to keys and values (B, H or fewer, C,
    D/H); `bias` (B, 1, 1 or W, C) is added to the logits.

    On a CPU these three operations take less time than torch's fused kernel.
    """
    if queries.size(1) > keys.size(1):  # heads that share keys are more queries of one head
        joined = queries.reshape(*keys.shape[:2], -1, queries.size(3))  # (B, K, H/K * W, D/H)
        if bias.size(2) > 1:
            bias = bias.repeat(1, 1, queries.size(1) // keys.size(1), 1)
        return attend_from_few(joined, keys, values, bias).reshape(queries.shape)
    if queries.device.type != "cpu":
        bias = bias.to(queries.dtype)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
    scaled = (queries * queries.size(-1) ** -0.5).flatten(0, 1)  # (B*H, W, D/H)
    logits = torch.bmm(scaled, keys.flatten(0, 1).transpose(1, 2))  # (B*H, W, C)
    logits = logits.view(*queries.shape[:3], -1)  # (B, H, W, C)
    weights = torch.softmax(logits + bias, dim=-1)
    attended = torch.bmm(weights.flatten(0, 1).to(values.dtype), values.flatten(0, 1))
    return attended.view_as(queries)  # (B, H, W, D/H)
