"""Packed sentences, which follow one another without padding, and attention within each sentence.

Layers other than attention process each token separately, so they take packed tokens (N, ...)
without changes. Attention needs a `Packing`, which says where sentences begin.
"""

# B sentences, N tokens of all of them, T of the longest, H heads, d dimensions of a head
# in attention: N queries and M keys of all sentences, T queries and S keys of the longest ones

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.model.attention import causal_mask
from nmt.model.fast.transfer import to_device
from nmt.model.positions import TokenPositions, distance_matrix

MIN_WIDTH = 16  # torch's softmax over fewer numbers is several times as slow on a CPU
MASKED = -1e30  # added to a logit; finite, so that a row of masked logits gives no NaN
_MAX_FLASH_HEAD_SIZE = 256  # the largest that flash attention supports
_MAX_SHORT_BYTES = 256
"""Size of a row of logits up to which `_ShortAttention` is faster than torch's fused kernel."""


@dataclass(frozen=True)
class Packing:
    """Where packed tokens (N, ...) belong in a padded tensor (B, T, ...), and vice versa.

    `pack` computes everything on the CPU; no method waits for a GPU.
    """

    offsets: Tensor  # (B + 1,) the first token of each sentence, and N; int32 for flash attention
    positions: Tensor  # (N,) the position of each token in its sentence, from 0
    cell_index: Tensor  # (N,) the index of each token among the B * T cells of the padded tensor
    token_index: Tensor  # (B, T) the index of the packed token of each cell; any token for padding
    mask: Tensor  # (B, 1, 1, T), True = may be attended to
    longest: int  # T
    has_one_length: bool  # whether all sentences have T tokens
    flash_attention: Any = None  # torch's function, or None; see `find_flash_attention`

    @property
    def num_sentences(self) -> int:
        """The number of sentences, B."""
        return self.offsets.size(0) - 1

    @property
    def is_full(self) -> bool:
        """Whether the padded tensor has no padding.

        Always False in `torch.compile`, so that one graph serves all lengths.
        """
        return not torch.compiler.is_compiling() and self.has_one_length

    def pad(self, x: Tensor) -> Tensor:
        """Map packed tokens (N, ...) to padded ones (B, T, ...), with arbitrary padding."""
        padded = x  # (B * T, ...)
        if not self.is_full:
            padded = x.index_select(0, self.token_index.flatten())
        # The shape of `token_index` is (B, T). `view(B, -1, ...)` would compute T as a quotient of
        # symbolic sizes in `torch.compile`, which fails on GPUs.
        return padded.reshape(*self.token_index.shape, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """Map padded tokens (B, T, ...) to packed ones (N, ...)."""
        x = x.flatten(0, 1)  # (B * T, ...)
        return x if self.is_full else x.index_select(0, self.cell_index)

    def to(self, device: torch.device) -> Packing:
        """Copy the tensors to `device`, without waiting for it."""
        packing = self._map(lambda x: to_device(x, device))
        return replace(packing, flash_attention=find_flash_attention(device))

    def pin(self) -> Packing:
        """Copy the tensors to page-locked memory, which a GPU reads asynchronously."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Packing:
        """Apply a function to all tensors."""
        return replace(
            self,
            offsets=function(self.offsets),
            positions=function(self.positions),
            cell_index=function(self.cell_index),
            token_index=function(self.token_index),
            mask=function(self.mask),
        )


@dataclass(frozen=True)
class PackedContext:
    """An `AttentionContext` of packed sentences.

    The queries of sentence i attend to the keys of sentence i. With `is_causal`, queries and keys
    are the same tokens, and no query attends to a later key.
    """

    queries: Packing
    keys: Packing
    positions: TokenPositions
    is_causal: bool = False

    @classmethod
    def of(cls, queries: Packing, keys: Packing, *, is_causal: bool = False) -> PackedContext:
        """Return the context of attention from `queries` to `keys`."""
        positions = TokenPositions(queries.positions.unsqueeze(1), queries.longest)
        return cls(queries, keys, positions, is_causal)

    @property
    def mask(self) -> Tensor:
        """The mask of the padded sentences, (B, 1, 1 or T, S)."""
        if not self.is_causal:
            return self.keys.mask
        return self.keys.mask & causal_mask(self.keys.longest, self.keys.mask.device)

    @property
    def distances(self) -> Tensor:
        """Key position minus query position in padded sentences, (T, S)."""
        return distance_matrix(self.queries.longest, self.keys.longest, self.keys.mask.device)


def pack(lengths: Sequence[int]) -> Packing:
    """Return the packing of sentences; `lengths` has the number of tokens of each.

    Attention to an empty sentence gives arbitrary, but finite numbers.
    """
    sizes = np.asarray(lengths, dtype=np.int64)  # (B,)
    offsets = np.concatenate([[0], sizes.cumsum()])  # (B + 1,)
    num_tokens = int(offsets[-1])
    longest = int(sizes.max())
    first_tokens = offsets[:-1]  # (B,), the index of the first token of each sentence
    positions = np.arange(num_tokens) - np.repeat(first_tokens, sizes)  # (N,)
    first_cells = np.arange(len(sizes)) * longest  # (B,), the first cell of each sentence
    cell_index = np.repeat(first_cells, sizes) + positions  # (N,)
    # the padding of a sentence refers to the tokens of later sentences, or to the last token
    token_index = first_tokens[:, None] + np.arange(longest)  # (B, T)
    token_index = np.minimum(token_index, num_tokens - 1)
    # the first token of an empty sentence is not masked, see `padding_mask`
    mask = np.arange(longest) < np.maximum(sizes, 1)[:, None]  # (B, T)
    return Packing(
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        positions=torch.from_numpy(positions),
        cell_index=torch.from_numpy(cell_index),
        token_index=torch.from_numpy(token_index),
        mask=torch.from_numpy(mask)[:, None, None, :],
        longest=longest,
        has_one_length=bool((sizes == longest).all()),
    )


# --- attention within packed sentences


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, context: PackedContext, dropout: float = 0.0
) -> Tensor:
    """Compute softmax(Q K^T / sqrt(d)) V within each sentence, (N, H, d) (paper, equation 1).

    Args:
        q: queries (N, H, d).
        k: keys (M, H, d).
        v: values (M, H, d).
        context: the packings of queries and keys.
        dropout: probability of dropping a weight.
    """
    queries = context.queries
    keys = context.keys
    if dropout == 0:  # flash and short attention have no dropout
        if queries.flash_attention is not None and suits_flash_attention(q):
            return attend_flash(q, k, v, context)
        if suits_short_attention(q, keys):
            return attend_short(q, k, v, context)
    dtype = q.dtype
    # on CPUs, the backward pass of torch's kernel is nine times as fast in float32
    needs_float32 = q.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)
    if needs_float32:
        q = q.float()
        k = k.float()
        v = v.float()
    attn_mask: Tensor | None = keys.mask
    if context.is_causal or keys.is_full:  # a causal mask also hides padding from all real tokens
        attn_mask = None
    # autocast would round the float32 inputs again
    with torch.autocast("cpu", enabled=False) if needs_float32 else nullcontext():
        heads = F.scaled_dot_product_attention(
            queries.pad(q).transpose(1, 2),  # (B, H, T, d)
            keys.pad(k).transpose(1, 2),  # (B, H, S, d)
            keys.pad(v).transpose(1, 2),
            attn_mask=attn_mask,
            dropout_p=dropout,
            is_causal=context.is_causal,
        )  # (B, H, T, d)
    return queries.unpad(heads.transpose(1, 2)).to(dtype)  # (N, H, d)


def suits_flash_attention(q: Tensor) -> bool:
    """Return whether flash attention supports the dtype and head size of `q` (N, H, d)."""
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return is_half and q.size(-1) % 8 == 0 and q.size(-1) <= _MAX_FLASH_HEAD_SIZE


def attend_flash(q: Tensor, k: Tensor, v: Tensor, context: PackedContext) -> Tensor:
    """Call torch's flash attention, which takes packed sentences; see `attend_packed`."""
    queries = context.queries
    keys = context.keys
    window_size = (-1, -1)  # the numbers of keys before and after the query; -1 means all
    if context.is_causal:
        window_size = (-1, 0)
    return queries.flash_attention(  # type: ignore[no-any-return]
        q,
        k,
        v,
        queries.offsets,
        keys.offsets,
        queries.longest,
        keys.longest,
        window_size=window_size,
    )


def suits_short_attention(q: Tensor, keys: Packing) -> bool:
    """Return whether `_ShortAttention` is faster than torch's fused kernel for `q` and `keys`."""
    return (
        not torch.compiler.is_compiling()
        and q.device.type == "cpu"
        and torch.is_grad_enabled()
        and q.dtype in (torch.float32, torch.bfloat16)
        and keys.longest * q.element_size() <= _MAX_SHORT_BYTES
    )


def attend_short(q: Tensor, k: Tensor, v: Tensor, context: PackedContext) -> Tensor:
    """Call `_ShortAttention` on padded sentences; arguments as in `attend_packed`."""
    keys = context.keys
    q = context.queries.pad(q.to(v.dtype)).transpose(1, 2)  # (B, H, T, d)
    k = keys.pad(k.to(v.dtype)).transpose(1, 2)  # (B, H, S, d)
    v = keys.pad(v).transpose(1, 2)
    mask = keys.mask  # (B, 1, 1, S)
    if context.is_causal:
        mask = causal_mask(keys.longest)  # (T, S)
    bias = additive_mask(mask, max(keys.longest, MIN_WIDTH))
    heads: Tensor = _ShortAttention.apply(q, k, v, bias)  # type: ignore[no-untyped-call]
    return context.queries.unpad(heads.transpose(1, 2))


class _ShortAttention(torch.autograd.Function):
    """Attention by batched matrix multiplications, keeping the weights for the backward pass.

    torch's fused CPU kernel takes up to three times as long for short sentences and for bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Map queries (B, H, T, d) and keys and values (B, H, S, d) to heads (B, H, T, d).

        `bias` (B or 1, 1, T or 1, W) is added to the logits. Keys and values are padded to W >= S.
        """
        shape = q.shape
        ctx.shape = shape
        scale = q.size(-1) ** -0.5
        padding = bias.size(-1) - k.size(2)  # W - S
        q = q.flatten(0, 1)  # (B*H, T, d)
        k = F.pad(k, (0, 0, 0, padding)).flatten(0, 1)  # (B*H, W, d)
        v = F.pad(v, (0, 0, 0, padding)).flatten(0, 1)
        with torch.autocast("cpu", enabled=False):
            logits = torch.bmm(q, k.transpose(1, 2)).view(*shape[:3], -1)  # (B, H, T, W)
            logits = logits.float().mul_(scale).add_(bias)
            weights = torch.softmax(logits, dim=-1).flatten(0, 1)  # (B*H, T, W)
            heads = torch.bmm(weights.to(v.dtype), v)
        ctx.save_for_backward(q, k, v, weights)
        ctx.num_keys = k.size(1) - padding  # S
        return heads.view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        grad = grads[0].reshape(q.shape)  # (B*H, T, d)
        grad_weights = torch.bmm(grad, v.transpose(1, 2)).float()  # (B*H, T, W)
        grad_logits = torch.ops.aten._softmax_backward_data(
            grad_weights, weights, -1, weights.dtype
        )
        scale = q.size(-1) ** -0.5
        grad_logits = grad_logits.mul_(scale).to(grad.dtype)
        grad_q = torch.bmm(grad_logits, k)
        # the columns after the first S belong to padding
        grad_k = torch.bmm(grad_logits.transpose(1, 2), q)[:, : ctx.num_keys]
        grad_v = torch.bmm(weights.to(grad.dtype).transpose(1, 2), grad)[:, : ctx.num_keys]
        num_sentences, num_heads, _, head_size = ctx.shape
        shape = (num_sentences, num_heads, -1, head_size)  # (B, H, T or S, d)
        return grad_q.view(shape), grad_k.view(shape), grad_v.view(shape), None


def additive_mask(mask: Tensor, width: int) -> Tensor:
    """Turn a boolean mask (..., C) into a bias of logits (..., `width`), where `width` >= C.

    The bias is 0 where the mask is True, and `MASKED` where it is False or has no column.
    """
    padded = F.pad(mask, (0, width - mask.size(-1)))  # padded with False
    return torch.zeros(padded.shape, device=mask.device).masked_fill_(~padded, MASKED)


@functools.cache
def find_flash_attention(device: torch.device) -> Any:
    """Return torch's `varlen_attn`, flash attention over packed sentences, or None.

    `varlen_attn` needs torch 2.11 and a GPU of compute capability 8.0, takes half precision only,
    and has no dropout. On a GPU, this function also turns off cuDNN's attention, which would make a
    new plan for each shape of a padded batch.
    """
    if device.type != "cuda":
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    logging.getLogger("torch.nn.attention.varlen").setLevel(logging.WARNING)  # it logs each call
    return varlen_attn
