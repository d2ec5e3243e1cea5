"""A step through a decoder whose weights no longer change, as a plain list of operations.

For a few rows, calling modules and looking up what they hold takes as long as computing. This is
the decoder of the paper on a CPU, with either norm, and with rotary positions; other models step
through their modules.
"""

# R rows, the live hypotheses and some more; D d_model, H heads, F d_ff; B sentences, W beams of the
# widest

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.config import Activation
from nmt.model.fast.attention import attend_by_places
from nmt.model.fast.cache import DecoderCache
from nmt.model.fast.layers import Weights, frozen_linear
from nmt.model.transformer import DecoderLayer


class FrozenLayer(NamedTuple):
    """What a step needs of a `DecoderLayer`."""

    own: nn.Module  # self-attention, the key to its part of the cache
    source: nn.Module  # cross-attention
    num_heads: int
    is_rotary: bool
    is_post_norm: bool
    norms: list[tuple[Tensor, Tensor, float]]  # of each sub-layer: weight, bias (D,) and epsilon
    own_in: Weights  # queries, keys and values (3D, D)
    own_out: Weights  # (D, D)
    source_in: Weights  # queries (D, D)
    source_out: Weights  # (D, D)
    inner: Weights  # (F, D)
    outer: Weights  # (D, F)


def freeze_layer(layer: DecoderLayer) -> FrozenLayer | None:
    """Return what a step needs of `layer`, or None if it is not that of the paper."""
    own: Any = layer.self_attention
    source: Any = layer.cross_attention
    feed: Any = layer.feed_forward
    norms: list[Any] = [
        layer.self_attention_norm,
        layer.cross_attention_norm,
        layer.feed_forward_norm,
    ]
    is_plain = own.relation is None and own.query_norm is None
    has_all_heads = own.sizes[1] == own.sizes[0]
    is_known = all(type(norm) is nn.LayerNorm for norm in norms)
    if not (is_plain and has_all_heads and is_known and feed.activation is Activation.relu):
        return None
    return FrozenLayer(
        own,
        source,
        own.num_heads,
        own.is_rotary,
        layer.is_post_norm,
        [(norm.weight, norm.bias, norm.eps) for norm in norms],
        own_in=own.in_projection.frozen(),
        own_out=own.out_projection.frozen(),
        source_in=source.in_projection.frozen(source.sizes[0]),
        source_out=source.out_projection.frozen(),
        inner=feed.inner.frozen(),
        outer=feed.outer.frozen(),
    )


def step_through(layers: list[FrozenLayer], x: Tensor, cache: DecoderCache) -> Tensor:
    """Map the newest token of each hypothesis, (R, D), to (R, D), and add it to `cache`."""
    sublayers = (_attend_to_own, _attend_to_source, _feed)
    for layer in layers:
        for norm, sublayer in zip(layer.norms, sublayers, strict=True):
            if layer.is_post_norm:
                x = _normalize(x + sublayer(layer, x, cache), norm)
            else:
                x = x + sublayer(layer, _normalize(x, norm), cache)
    return x


def _attend_to_own(layer: FrozenLayer, x: Tensor, cache: DecoderCache) -> Tensor:
    rows = frozen_linear(x, layer.own_in)  # (R, 3D)
    if layer.is_rotary:
        heads = rows.view(len(rows), 3 * layer.num_heads, -1, 2)  # (R, 3H, D/H/2, 2)
        both = torch.view_as_complex(heads[:, : 2 * layer.num_heads])  # queries and keys
        both *= cache.rotations(2 * heads.size(2))
    parts = cache.grid.spread(rows)  # (B, W, 3D)
    cells = parts.view(*parts.shape[:2], 3, layer.num_heads, -1).permute(2, 0, 3, 1, 4)
    keys, values = cache.append(layer.own, cells[1:])  # cells are (3, B, H, W, D/H)
    reads = cache.reads(layer.num_heads, values.size(2))
    return frozen_linear(attend_by_places(cells[0], keys, values, reads), layer.own_out)


def _attend_to_source(layer: FrozenLayer, x: Tensor, cache: DecoderCache) -> Tensor:
    queries = cache.grid.spread(frozen_linear(x, layer.source_in))  # (B, W, D)
    queries = queries.view(*queries.shape[:2], layer.num_heads, -1).transpose(1, 2)
    keys, values = cache.sources[layer.source]
    reads = cache.source_reads(layer.num_heads, values.size(2))
    heads = attend_by_places(queries, keys, values, reads)  # (R, D), of (B, H, W, D/H)
    return frozen_linear(heads, layer.source_out)


def _feed(layer: FrozenLayer, x: Tensor, cache: DecoderCache) -> Tensor:
    return frozen_linear(frozen_linear(x, layer.inner, "relu"), layer.outer)


def _normalize(x: Tensor, norm: tuple[Tensor, Tensor, float]) -> Tensor:
    weight, bias, epsilon = norm
    return torch.layer_norm(x, (x.size(1),), weight, bias, epsilon)
