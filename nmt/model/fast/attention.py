"""Multi-head attention over packed sentences."""

# N queries and M keys of all sentences, packed; B sentences, T queries and S keys of the longest
# H heads, K heads of keys and values, D d_model, d dimensions of a head

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from nmt.model.attention import (
    AttentionContext,
    AttentionWeights,
    MultiHeadAttention,
    attend,
    attention_weights,
    repeat_heads,
)
from nmt.model.fast.layers import FastLinear
from nmt.model.fast.packing import PackedContext, attend_packed


class FastAttention(MultiHeadAttention):
    """`MultiHeadAttention` that also takes packed sentences."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        context: AttentionContext,
        attention_out: AttentionWeights | None = None,
    ) -> Tensor:
        """Let `x` (N, D) attend to `memory` (M, D), which is `x` in self-attention.

        With a context that is not a `PackedContext`, see `MultiHeadAttention.forward`.
        """
        if not isinstance(context, PackedContext):
            return super().forward(x, memory, context, attention_out)
        q, k, v = self.project_packed(x, memory)  # (N, H, d), 2 x (M, K, d)
        q, k = self.normalize_and_rotate(q, k, context.positions)
        k = repeat_heads(k, self.num_heads)  # (M, H, d)
        v = repeat_heads(v, self.num_heads)
        if self.position_encoding.has_bias:
            heads, _ = self.attend_padded(q, k, v, context, self.dropout)
            heads = context.queries.unpad(heads.transpose(1, 2))  # (N, H, d)
        else:
            dropout = self.dropout.p if self.training else 0.0
            heads = attend_packed(q, k, v, context, dropout)  # (N, H, d)
        if attention_out is not None and self in attention_out:
            # computed again, since the kernels do not return the weights
            encoding = self.position_encoding
            attention_out[self] = attention_weights(
                context.queries.pad(q).transpose(1, 2),  # (B, H, T, d)
                context.keys.pad(k).transpose(1, 2),  # (B, H, S, d)
                context.mask,
                encoding,
                context.distances if encoding.has_bias else None,
            )
        return self.out_projection(heads.flatten(1))  # type: ignore[no-any-return]

    def attend_padded(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: PackedContext,
        dropout: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Pad queries (N, H, d), keys and values (M, H, d), and call `attend`.

        Returns heads (B, H, T, d) and weights (B, H, T, S).
        """
        q = context.queries.pad(q).transpose(1, 2)  # (B, H, T, d)
        k = context.keys.pad(k).transpose(1, 2)  # (B, H, S, d)
        v = context.keys.pad(v).transpose(1, 2)
        encoding = self.position_encoding
        distances = context.distances if encoding.has_bias else None
        return attend(q, k, v, context.mask, dropout, encoding, distances)

    def project_packed(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries (N, H, d) of `x`, keys and values (M, K, d) of `memory`."""
        in_projection = cast(FastLinear, self.in_projection)
        if memory is x:  # one matrix multiplication
            q, k, v = in_projection(x).split(self.qkv_sizes, dim=-1)
            shape = (-1, self.head_size)
            return q.unflatten(-1, shape), k.unflatten(-1, shape), v.unflatten(-1, shape)
        q = in_projection.block(x, 0, self.qkv_sizes[0]).view(len(x), self.num_heads, -1)
        k, v = self.project_memory(memory).unbind(1)
        return q, k, v

    def project_memory(self, memory: Tensor) -> Tensor:
        """Compute the keys and values of `memory` (M, D), stacked in one tensor (M, 2, K, d)."""
        in_projection = cast(FastLinear, self.in_projection)
        keys_values = in_projection.block(memory, self.qkv_sizes[0], sum(self.qkv_sizes))
        return keys_values.view(-1, 2, self.qkv_sizes[1] // self.head_size, self.head_size)
