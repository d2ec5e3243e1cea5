"""Sentences laid one after the other, without padding between them, and attention over them.

What happens at every position by itself needs no more than the flat stream (N, ...); attention
alone knows where sentences begin. It knows neither weights nor ids.
"""

# B sentences, N tokens of all of them, T of the longest, H heads, D d_model
# in attention: N queries, S keys, T and U the longest sentences of either side

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)
_FLASH_HEAD = 256  # most dimensions of a head, which must be a multiple of 8


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
        """Whether to go without padding; a compiled graph is the same for all lengths."""
        return not torch.compiler.is_compiling() and self.has_one_length

    def pad(self, x: Tensor) -> Tensor:
        """Lay (N, ...) out as (B, T, ...); at padding stands a copy of some token."""
        padded = x if self.is_full else x.index_select(0, self.tokens)  # (B * T, ...)
        return padded.reshape(self.num_sentences, self.longest, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """Take the tokens (N, ...) out of (B, T, ...)."""
        x = x.flatten(0, 1)  # (B * T, ...)
        return x if self.is_full else x.index_select(0, self.places)

    def scatter(self, x: Tensor) -> Tensor:
        """Lay (N, ...) out as (B, T, ...) with zeros at padding."""
        if self.is_full:
            return self.pad(x)
        padded = x.new_zeros(self.tokens.size(0), *x.shape[1:]).index_copy_(0, self.places, x)
        return padded.view(self.num_sentences, self.longest, *x.shape[1:])

    def to(self, device: torch.device) -> Packing:
        """Copy the tensors to `device`, without a wait where they are pinned."""
        moved = self._map(lambda x: x.to(device, non_blocking=True))
        return replace(moved, flash=find_flash(device))

    def pin(self) -> Packing:
        """Copy the tensors to memory that a GPU reads by itself."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Packing:
        names = ("offsets", "positions", "places", "tokens", "mask")
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)


def pack(lengths: Sequence[int]) -> Packing:
    """Describe sentences of so many tokens.

    Who attends to a sentence without any gets some number, which means nothing.
    """
    sizes = np.asarray(lengths, dtype=np.int64)  # (B,)
    offsets = np.concatenate([[0], sizes.cumsum()])  # (B + 1,)
    num_tokens, longest = int(offsets[-1]), int(sizes.max())
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


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    targets: Packing,
    sources: Packing,
    *,
    causal: bool,
    dropout: float = 0.0,
) -> Tensor:
    """Compute softmax(Q K^T / sqrt(D/H)) V within each sentence, (N, H, D/H) (paper, equation 1).

    Args:
        queries: (N, H, D/H), packed as `targets` says.
        keys: (S, H, D/H), packed as `sources` says.
        values: like `keys`.
        targets: the sentences that attend.
        sources: the sentences that are attended to, as many.
        causal: no query sees a later key; both sides are the same sentences.
        dropout: share of the weights that are dropped.
    """
    if dropout == 0 and targets.flash is not None and _suits_flash(queries):
        return targets.flash(  # type: ignore[no-any-return]
            queries,
            keys,
            values,
            targets.offsets,
            sources.offsets,
            targets.longest,
            sources.longest,
            window_size=(-1, 0) if causal else (-1, -1),  # keys before and after; -1 is all
        )
    if dropout == 0 and _takes_cpu_kernel(queries):
        return _CpuAttention.apply(queries, keys, values, targets, sources, causal)  # type: ignore[no-untyped-call, no-any-return]
    heads = F.scaled_dot_product_attention(
        _heads(targets.pad(queries)),
        _heads(sources.pad(keys)),
        _heads(sources.pad(values)),
        attn_mask=None if causal or sources.is_full else sources.mask,
        dropout_p=dropout,
        is_causal=causal,
    )  # (B, H, T, D/H)
    return targets.unpad(heads.transpose(1, 2))  # (N, H, D/H)


class _CpuAttention(torch.autograd.Function):
    """torch's fused attention on padded tensors; kept for the way back are packed ones alone.

    Gradients at padding are zero: no real query sees a padded key, and no padded query is asked.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor,
        targets: Packing, sources: Packing, causal: bool,
    ) -> Tensor:  # fmt: skip
        padded = _pad_all(queries, keys, values, targets, sources)
        bias = None if causal else _bias(sources, queries.dtype)
        heads, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *padded, 0.0, causal, attn_mask=bias
        )  # (B, H, T, D/H), (B, H, T)
        out = targets.unpad(heads.transpose(1, 2))  # (N, H, D/H)
        ctx.save_for_backward(queries, keys, values, out, log_sums)
        ctx.targets, ctx.sources, ctx.causal = targets, sources, causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, out, log_sums = ctx.saved_tensors
        targets, sources = ctx.targets, ctx.sources
        bias = None if ctx.causal else _bias(sources, queries.dtype)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads(targets.scatter(grads[0])),
            *_pad_all(queries, keys, values, targets, sources),
            _heads(targets.pad(out)),
            log_sums,
            0.0,
            ctx.causal,
            attn_mask=bias,
        )  # 3 x (B, H, T, D/H)
        packed = zip((targets, sources, sources), found, strict=True)
        return *(packing.unpad(grad.transpose(1, 2)) for packing, grad in packed), None, None, None


def _pad_all(
    queries: Tensor, keys: Tensor, values: Tensor, targets: Packing, sources: Packing
) -> tuple[Tensor, Tensor, Tensor]:
    return _heads(targets.pad(queries)), _heads(sources.pad(keys)), _heads(sources.pad(values))


def _heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2)  # (B, T, H, D/H) to (B, H, T, D/H)


def _bias(sources: Packing, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to logits: 0, and minus infinity at padding (B, 1, 1, U)."""
    if sources.is_full:
        return None
    bias = torch.zeros(sources.mask.shape, dtype=dtype)
    return bias.masked_fill_(~sources.mask, float("-inf"))


def _takes_cpu_kernel(queries: Tensor) -> bool:
    return queries.device.type == "cpu" and not torch.compiler.is_compiling()


def _suits_flash(queries: Tensor) -> bool:
    is_half = queries.dtype in (torch.bfloat16, torch.float16)
    return is_half and queries.size(-1) % 8 == 0 and queries.size(-1) <= _FLASH_HEAD


@functools.cache
def find_flash(device: torch.device) -> Any:
    """Return torch's attention over variable lengths, which it has since 2.11 for recent GPUs, or
    None.

    It takes half precision alone, and drops no weights. It is tried out once, against padding.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    logging.getLogger("torch.nn.attention.varlen").setLevel(logging.WARNING)  # a line a call
    if "window_size" not in inspect.signature(varlen_attn).parameters:  # as in 2.10
        return None
    try:
        agrees = _agrees(varlen_attn, device)
    except Exception as error:  # of kernels that this GPU, or this build of torch, does not have
        log.warning("attention is padded: torch's for variable lengths failed: %s", error)
        return None
    if not agrees:
        log.warning("attention is padded: torch's for variable lengths computes something else")
    return varlen_attn if agrees else None


@torch.inference_mode(False)
@torch.enable_grad()
def _agrees(flash: Any, device: torch.device) -> bool:
    """Say whether `flash` gives what padded attention gives, forward and backward."""
    found = []
    for choice in (flash, None):
        sentences = replace(pack([5, 2, 9])._map(lambda index: index.to(device)), flash=choice)
        x = torch.linspace(0, 999, 16 * 2 * 64, device=device).sin().view(16, 2, 64)  # (N, H, D/H)
        x = x.bfloat16().requires_grad_()
        heads = attend(x, x.flip(0), x, sentences, sentences, causal=True)
        (gradient,) = torch.autograd.grad(heads.float().square().sum(), x)
        found.append((heads, gradient))
    return all(torch.allclose(a, b, atol=0.05, rtol=0.05) for a, b in zip(*found, strict=True))
