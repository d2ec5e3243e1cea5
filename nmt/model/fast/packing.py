"""Sentences laid one after the other, without padding between them, and attention over them.

Whatever is computed for each position by itself needs only the flat stream (N, ...). Attention
alone knows where sentences begin. This module knows neither weights nor ids.
"""

# B sentences, N tokens of all of them, T of the longest, H heads, D d_model
# in attention: N queries, S keys, T and U the longest sentences of either side

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.model.fast.transfer import send
from nmt.model.transformer import causal_mask

log = logging.getLogger(__name__)
MIN_WIDTH = 16  # torch's softmax over fewer numbers is several times as slow on a CPU
MASKED = -1e30  # added to a logit; finite, so that a cell without a hypothesis makes no NaN
_FLASH_HEAD = 256  # most dimensions of a head, which must be a multiple of 8
_SHORT = 256  # bytes of a column of keys, up to which torch's fused kernel is the slower one


@dataclass(frozen=True)
class Packing:
    """Where sentences stand in a flat stream of tokens, and in a padded tensor.

    Everything is made on the host by `pack`; no method waits for a device.
    """

    offsets: Tensor  # (B + 1,) int32, where each sentence begins, and the end
    positions: Tensor  # (N,) of each token in its sentence
    places: Tensor  # (N,) of each token in the padded tensor (B * T)
    tokens: Tensor  # (B * T,) that stands there; at padding any one
    mask: Tensor  # (B, 1, 1, T), True = may be attended to
    longest: int  # T
    has_one_length: bool  # all sentences are as long
    flash: Any = None  # see `find_flash`

    @property
    def num_sentences(self) -> int:
        """B."""
        return self.offsets.size(0) - 1

    @property
    def is_full(self) -> bool:
        """Whether padding can be skipped; a compiled graph is the same for all lengths."""
        return not torch.compiler.is_compiling() and self.has_one_length

    def pad(self, x: Tensor) -> Tensor:
        """Lay (N, ...) out as (B, T, ...); at padding stands a copy of some token."""
        padded = x if self.is_full else x.index_select(0, self.tokens)  # (B * T, ...)
        return padded.reshape(self.num_sentences, self.longest, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """Take the tokens (N, ...) out of (B, T, ...)."""
        x = x.flatten(0, 1)  # (B * T, ...)
        return x if self.is_full else x.index_select(0, self.places)

    def to(self, device: torch.device) -> Packing:
        """Copy the tensors to `device`, without waiting for it."""
        moved = self._map(lambda x: send(x, device))
        return replace(moved, flash=find_flash(device))

    def pin(self) -> Packing:
        """Copy the tensors to page-locked memory, which a GPU reads asynchronously."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Packing:
        names = ("offsets", "positions", "places", "tokens", "mask")
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)


class PackedMask(NamedTuple):
    """What may be attended to among packed sentences: each one sees its counterpart."""

    queries: Packing  # the sentences that attend
    keys: Packing  # the sentences that are attended to, as many
    is_causal: bool = False  # no query sees a later key; both sides are the same sentences

    def visible(self) -> Tensor:
        """Return the boolean mask of the padded sentences, (B, 1, 1 or T, S)."""
        longest, device = self.keys.longest, self.keys.mask.device
        return self.keys.mask & causal_mask(longest, device) if self.is_causal else self.keys.mask


def pack(lengths: Sequence[int], longest: int | None = None) -> Packing:
    """Describe sentences of so many tokens; padded tensors may have room for `longest`.

    Attention to an empty sentence gives some finite number, which means nothing.
    """
    sizes = np.asarray(lengths, dtype=np.int64)  # (B,)
    offsets = np.concatenate([[0], sizes.cumsum()])  # (B + 1,)
    num_tokens, longest = int(offsets[-1]), longest or int(sizes.max())
    positions = np.arange(num_tokens) - np.repeat(offsets[:-1], sizes)  # (N,)
    places = np.repeat(np.arange(len(sizes)) * longest, sizes) + positions  # (N,)
    tokens = np.minimum(offsets[:-1, None] + np.arange(longest), num_tokens - 1)  # (B, T)
    mask = np.arange(longest) < np.maximum(sizes, 1)[:, None]  # (B, T)
    return Packing(
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        positions=torch.from_numpy(positions),
        places=torch.from_numpy(places),
        tokens=torch.from_numpy(tokens.ravel()),
        mask=torch.from_numpy(mask)[:, None, None, :],
        longest=longest,
        has_one_length=bool((sizes == longest).all()),
    )


def attend_packed(
    queries: Tensor, keys: Tensor, values: Tensor, mask: PackedMask, dropout: float = 0.0
) -> Tensor:
    """Compute softmax(Q K^T / sqrt(D/H)) V within each sentence, (N, H, D/H) (paper, equation 1).

    Args:
        queries: (N, H, D/H), packed as `mask` says.
        keys: (S, H, D/H), packed as `mask` says.
        values: like `keys`.
        mask: which sentences attend to which.
        dropout: share of the weights that are dropped.
    """
    targets, sources, is_causal = mask
    is_half = queries.dtype in (torch.bfloat16, torch.float16)
    suits_flash = is_half and queries.size(-1) % 8 == 0 and queries.size(-1) <= _FLASH_HEAD
    if dropout == 0 and targets.flash is not None and suits_flash:
        spans = targets.offsets, sources.offsets, targets.longest, sources.longest
        window = (-1, 0) if is_causal else (-1, -1)  # keys before and after; -1 is all
        return targets.flash(queries, keys, values, *spans, window_size=window)  # type: ignore[no-any-return]
    dtype, kind = queries.dtype, queries.device.type
    if dropout == 0 and _suits_short(queries, sources):
        visible = causal_mask(sources.longest) if is_causal else sources.mask  # (..., T or 1, S)
        padded = (
            side.pad(x.to(values.dtype)).transpose(1, 2)
            for side, x in ((targets, queries), (sources, keys), (sources, values))
        )
        bias = additive_mask(visible, max(sources.longest, MIN_WIDTH))
        heads = _ShortAttention.apply(*padded, bias)  # type: ignore[no-untyped-call]
        return targets.unpad(heads.transpose(1, 2))
    # a CPU's kernel goes backward in half precision at a ninth of the speed of float32
    is_slow = is_half and kind == "cpu"
    if is_slow:
        queries, keys, values = queries.float(), keys.float(), values.float()
    queries, keys, values = targets.pad(queries), sources.pad(keys), sources.pad(values)
    with torch.autocast(kind, enabled=False) if is_slow else nullcontext():
        heads = F.scaled_dot_product_attention(
            queries.transpose(1, 2),  # (B, H, T, D/H)
            keys.transpose(1, 2),  # (B, H, S, D/H)
            values.transpose(1, 2),
            attn_mask=None if is_causal or sources.is_full else sources.mask,
            dropout_p=dropout,
            is_causal=is_causal,  # padding comes after all that a real query sees
        )  # (B, H, T, D/H)
    return targets.unpad(heads.transpose(1, 2)).to(dtype)  # (N, H, D/H)


def _suits_short(queries: Tensor, sources: Packing) -> bool:
    """Return whether `_ShortAttention` is the faster way through these sentences and back."""
    return (
        not torch.compiler.is_compiling()
        and queries.device.type == "cpu"
        and torch.is_grad_enabled()
        and queries.dtype in (torch.float32, torch.bfloat16)
        and sources.longest * queries.element_size() <= _SHORT
    )


class _ShortAttention(torch.autograd.Function):
    """Attention by products of small matrices, which keeps the weights. torch's fused kernel for
    CPUs takes up to three times as long where sentences are short or numbers are bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Map (B, H, T, D/H) and twice (B, H, S, D/H) to (B, H, T, D/H). `bias` (B or 1, 1, T or 1,
        U), at least as wide as S, is added to the logits.
        """
        ctx.shape = shape = queries.shape
        missing = bias.size(-1) - keys.size(2)
        queries = queries.flatten(0, 1)  # (B*H, T, D/H)
        keys, values = (F.pad(x, (0, 0, 0, missing)).flatten(0, 1) for x in (keys, values))
        with torch.autocast("cpu", enabled=False):
            products = torch.bmm(queries, keys.transpose(1, 2)).view(*shape[:3], -1)  # (B, H, T, U)
            logits = products.float().mul_(shape[-1] ** -0.5).add_(bias)
            weights = torch.softmax(logits, dim=-1).flatten(0, 1)  # (B*H, T, U)
            heads = torch.bmm(weights.to(values.dtype), values)
        ctx.save_for_backward(queries, keys, values, weights)
        ctx.num_keys = keys.size(1) - missing
        return heads.view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, weights = ctx.saved_tensors
        (grad,) = (x.reshape(queries.shape) for x in grads)  # (B*H, T, D/H)
        grad_weights = torch.bmm(grad, values.transpose(1, 2)).float()  # (B*H, T, U)
        logits = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        logits = logits.mul_(queries.size(-1) ** -0.5).to(grad.dtype)
        found = (
            torch.bmm(logits, keys),
            torch.bmm(logits.transpose(1, 2), queries)[:, : ctx.num_keys],
            torch.bmm(weights.to(grad.dtype).transpose(1, 2), grad)[:, : ctx.num_keys],
        )
        return *(x.view(*ctx.shape[:2], *x.shape[1:]) for x in found), None


def additive_mask(mask: Tensor, width: int) -> Tensor:
    """Return what a mask (..., C), True = may be attended to, adds to logits (..., width)."""
    wide = F.pad(mask, (0, width - mask.size(-1)))
    return torch.zeros(wide.shape, device=mask.device).masked_fill_(~wide, MASKED)


@functools.cache
def find_flash(device: torch.device) -> Any:
    """Return torch's attention over variable lengths, which torch 2.11 has for recent GPUs, or
    None.

    It takes half precision alone, and has no dropout. It is compared with padding once. For padded
    attention cuDNN is turned off, which torch 2.11 prefers on an H100 or H200: it makes a plan for
    each shape, and nearly every batch, and every step of a search, has another.
    """
    if device.type != "cuda":
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn

        logging.getLogger("torch.nn.attention.varlen").setLevel(logging.WARNING)  # a line a call
        agrees = _agrees(varlen_attn, device)
    except ImportError:
        return None
    except Exception as error:  # of kernels that this GPU, or this build of torch, does not have
        log.warning("attention is padded: torch's for variable lengths failed: %s", error)
        return None
    if not agrees:
        log.warning("attention is padded: torch's for variable lengths computes something else")
    return varlen_attn if agrees else None


@torch.inference_mode(False)
@torch.enable_grad()
def _agrees(flash: Any, device: torch.device) -> bool:
    """Return whether `flash` gives what padded attention gives, forward and backward."""
    found = []
    for choice in (flash, None):
        sentences = replace(pack([5, 2, 9])._map(lambda index: index.to(device)), flash=choice)
        x = torch.linspace(0, 999, 16 * 2 * 64, device=device).sin().view(16, 2, 64)  # (N, H, D/H)
        x = x.bfloat16().requires_grad_()
        heads = attend_packed(x, x.flip(0), x, PackedMask(sentences, sentences, is_causal=True))
        (gradient,) = torch.autograd.grad(heads.float().square().sum(), x)
        found.append((heads, gradient))
    return all(torch.allclose(a, b, atol=0.05, rtol=0.05) for a, b in zip(*found, strict=True))
