"""What later papers have in the place of parts of the Transformer, each a setting of `ModelConfig`:
the norm, heads that share keys and values, and positions inside self-attention instead of vectors
added to embeddings. `nmt.model.transformer` calls this page.

The formulas are those of the papers named; "distance" is the position of a key minus that of the
query, so that the past has negative ones.
"""

# B batch, T queries, S keys, H heads, d dimensions of a head, K max_distance

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.config import ModelConfig, NormLayer, Positions

NORM_EPS = 1e-5
ROTARY_BASE = 10_000.0


class RmsNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * g over the last dimension (Zhang and Sennrich, 2019, equation 4),
    in the dtype of x.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor (..., D) to one like it."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def new_norm(kind: NormLayer, size: int) -> nn.Module:
    """Make a norm over the last dimension."""
    return (RmsNorm if kind is NormLayer.rms else nn.LayerNorm)(size, eps=NORM_EPS)


def new_head_norm(config: ModelConfig) -> nn.Module | None:
    """Make the norm of the queries or keys (..., d) of all heads of a layer, with `qk_norm`: RMS,
    where Dehghani et al. (2023, section 2) have LayerNorm.
    """
    size = config.d_model // config.num_heads
    return new_norm(NormLayer.rms, size) if config.qk_norm else None


def new_positions(config: ModelConfig) -> nn.Parameter | None:
    """Make the vectors (num_positions, D) that are added to the embeddings of one side, if they are
    learned (Gehring et al., 2017).
    """
    if config.positions is not Positions.learned:
        return None
    table = nn.Parameter(torch.empty(config.num_positions, config.d_model))
    nn.init.normal_(table, std=config.d_model**-0.5)
    return table


def lengthen(table: Tensor, length: int) -> Tensor:
    """Return learned positions (at least `length`, D); those beyond the last are like the last."""
    num_more = length - len(table)
    return table if num_more <= 0 else torch.cat([table, table[-1:].expand(num_more, -1)])


def repeat_heads(x: Tensor, num_heads: int, dim: int) -> Tensor:
    """Give each of `num_heads` heads its keys or values, of which `x` has fewer in dimension `dim`:
    neighbors share them (Ainslie et al., 2023, grouped-query attention, figure 2).
    """
    times = num_heads // x.size(dim)
    return x if times == 1 else x.repeat_interleave(times, dim=dim)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn dimensions 2i and 2i + 1 of queries or keys (..., d) by the angle position / 10000^(2i /
    d), so that their product depends on the distance alone (Su et al., 2021, equation 34).

    `positions` broadcasts to (...). Angles, sines and cosines are float32 at least.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    angle = rotary_angles(positions, x.size(-1), dtype)  # (..., d/2)
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[..., 0::2].to(dtype), x[..., 1::2].to(dtype)  # (..., d/2)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)  # (..., d)


def rotary_angles(positions: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute by how much `rotate` turns each pair of `size` dimensions, (..., size/2)."""
    steps = torch.arange(0, size, 2, device=positions.device, dtype=dtype)  # (size/2,)
    return positions.unsqueeze(-1) * ROTARY_BASE ** (-steps / size)


def distances(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return the distance from each query to each key, (T, S), both counted from the first."""
    keys = torch.arange(num_keys, device=device)
    return keys - torch.arange(num_queries, device=device).unsqueeze(1)


class RelativePositions(nn.Module):
    """Vectors of distances, added to keys and to values (Shaw et al., 2018, equations 3 and 4). The
    heads of a layer share them. A distance above K is K (equation 5); a decoder, which sees the
    past alone, leaves those above 0 as they are.
    """

    def __init__(self, head_size: int, max_distance: int) -> None:
        super().__init__()
        self.max_distance = max_distance
        shape = 2 * max_distance + 1, head_size
        self.keys = nn.Parameter(torch.empty(shape))  # a^K, distances from -K to K
        self.values = nn.Parameter(torch.empty(shape))  # a^V
        nn.init.xavier_uniform_(self.keys)
        nn.init.xavier_uniform_(self.values)

    def logits(self, queries: Tensor, distances: Tensor) -> Tensor:
        """Return what is added to the logits (B, H, T, S): q_i a^K_ij / sqrt(d), of `queries` (B,
        H, T, d) and `distances` (T, S) or (B, T, S).
        """
        scaled = queries * queries.size(-1) ** -0.5
        by_distance = scaled @ self.keys.to(queries.dtype).T  # (B, H, T, 2K+1)
        rows = self._rows(distances, by_distance)
        return by_distance.gather(-1, rows)  # type: ignore[no-any-return]  # (B, H, T, S)

    def heads(self, weights: Tensor, distances: Tensor) -> Tensor:
        """Return what is added to the attended values (B, H, T, d): the sum over keys of w_ij
        a^V_ij, of `weights` (B, H, T, S).
        """
        by_distance = weights.new_zeros(*weights.shape[:-1], len(self.values))  # (B, H, T, 2K+1)
        by_distance = by_distance.scatter_add(-1, self._rows(distances, weights), weights)
        return by_distance @ self.values.to(weights.dtype)

    def _rows(self, distances: Tensor, like: Tensor) -> Tensor:
        """Return the row of each distance in the tables, (B, H, T, S)."""
        rows = distances.clamp(-self.max_distance, self.max_distance) + self.max_distance
        return rows.unsqueeze(-3).expand(*like.shape[:-1], distances.size(-1))


class Alibi(nn.Module):
    """Logits that fall with distance, -m |i - j|, by a slope m for each head: 2^(-8/H), 2^(-16/H),
    ... (Press et al., 2022, section 3). Nothing is learned.

    The paper has a decoder alone. In the encoder the distance is symmetric here: tokens before and
    after count alike.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def logits(self, queries: Tensor, distances: Tensor) -> Tensor:
        """Return what is added to the logits, (H, T, S) or (B, H, T, S) like `distances` (T, S) or
        (B, T, S).
        """
        dtype = torch.promote_types(queries.dtype, torch.float32)
        number = torch.arange(1, self.num_heads + 1, device=queries.device, dtype=dtype)
        slopes = 2.0 ** (-8 * number / self.num_heads)  # (H,)
        return -slopes[:, None, None] * distances.abs().unsqueeze(-3)

    def heads(self, weights: Tensor, distances: Tensor) -> Tensor:
        """Return what is added to the attended values: nothing."""
        return weights.new_zeros(())


Relation = RelativePositions | Alibi
"""What adds distances to self-attention."""


def new_relation(config: ModelConfig) -> Relation | None:
    """Make what the positions of `config` add to a self-attention, if anything."""
    if config.positions is Positions.relative:
        return RelativePositions(config.d_model // config.num_heads, config.max_distance)
    return Alibi(config.num_heads) if config.positions is Positions.alibi else None
