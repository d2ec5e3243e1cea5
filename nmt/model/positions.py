"""Positional encodings, one class for each, selected by `model.positions`.

An encoding tells the model the positions of tokens in one of three ways: `add` changes embeddings,
`rotate` changes queries and keys, and `bias` and `value_bias` add to the logits and the outputs of
self-attention. To add an encoding, write its class and its line in `ENCODINGS` here, a member of
`nmt.config.Positions`, and a row of the table in docs/layers.md.
"""

# B batch, T queries, S keys, N tokens of packed sentences, H heads, D d_model, d dimensions of a
# head, P rows of a table of positions, K max_distance

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nmt.config import ModelConfig, Positions

NUM_POSITIONS = 512  # rows of the first table of sinusoids; it grows with longer sentences
ROTARY_BASE = 10_000.0


@dataclass(eq=False)
class TokenPositions:
    """The positions of the tokens of one side, counted from 0 in each sentence.

    `index` broadcasts to queries without their last dimension: it is (T,) for queries (B, H, T, d),
    and (N, 1) for (N, H, d). Every position is below `num_positions`.
    """

    index: Tensor
    num_positions: int
    rotations: Tensor | None = None  # computed by the first layer with `Rotary`, used by all

    @classmethod
    def up_to(cls, length: int, device: torch.device) -> TokenPositions:
        """Return the positions of padded sentences, 0 to `length` - 1."""
        return cls(torch.arange(length, device=device), length)


class PositionEncoding(nn.Module):
    """The interface of all encodings; this one adds nothing anywhere."""

    has_bias = False  # whether attention has to call `bias` and `value_bias`

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def add(self, x: Tensor, positions: TokenPositions) -> Tensor:
        """Return embeddings (B, T, D) or (N, D) plus vectors of their positions."""
        return x

    def rotate(self, q: Tensor, k: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        """Return the queries and keys (..., d) of the same tokens, turned by their positions."""
        return q, k

    def bias(self, q: Tensor, distances: Tensor) -> Tensor:
        """Return what to add to the logits, broadcasting to (B, H, T, S).

        `distances` (T, S) or (B, T, S) are key positions minus query positions.
        """
        return q.new_zeros(())

    def value_bias(self, weights: Tensor, distances: Tensor) -> Tensor:
        """Return what to add to the outputs (B, H, T, d) of attention weights (B, H, T, S)."""
        return weights.new_zeros(())


class Sinusoidal(PositionEncoding):
    """Sines and cosines added to embeddings (Vaswani et al., 2017, section 3.5)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.table: Tensor
        self.register_buffer("table", self.new_table(NUM_POSITIONS), persistent=False)

    def new_table(self, length: int) -> Tensor:
        """Compute the encodings (length, D) of the first positions."""
        config = self.config
        return sinusoidal_positions(
            length, config.d_model, config.positions, offset=config.position_offset
        )

    def add(self, x: Tensor, positions: TokenPositions) -> Tensor:
        """Add the row of each position."""
        table = self.table  # another thread may replace it meanwhile
        if positions.num_positions > table.size(0):
            table = self.table = self.new_table(2 * positions.num_positions).to(table)
        return x + table.index_select(0, positions.index.flatten())


def sinusoidal_positions(length: int, d_model: int, layout: Positions, offset: int = 0) -> Tensor:
    """Compute the encodings (length, D) of the positions from `offset` on, in float32.

    The paper interleaves sines and cosines. `sinusoidal_concat` and `sinusoidal_halves` have all
    sines first, then the cosines; `sinusoidal_concat` with the D/2 wavelengths of Tensor2Tensor,
    the last of which is 2 pi * 10000.
    """
    half = d_model // 2
    pos = torch.arange(offset, offset + length, dtype=torch.float64).unsqueeze(1)  # (length, 1)
    i = torch.arange(half, dtype=torch.float64)  # (D/2,)
    if layout is Positions.sinusoidal_concat:
        angle = pos * torch.exp(-math.log(10000.0) * i / max(half - 1, 1))  # (length, D/2)
    else:
        # PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) the cosine
        angle = pos * torch.exp(-math.log(10000.0) * 2 * i / d_model)  # (length, D/2)
    if layout is Positions.sinusoidal:
        table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
    else:
        table = torch.cat([angle.sin(), angle.cos()], dim=-1)
    return table.float()  # (length, D)


class Learned(PositionEncoding):
    """A learned vector for each of `num_positions`, added to embeddings (Gehring et al., 2017).

    Later positions share the last vector.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.empty(config.num_positions, config.d_model))
        nn.init.normal_(self.table, std=config.d_model**-0.5)

    def add(self, x: Tensor, positions: TokenPositions) -> Tensor:
        """Add the vector of each position."""
        rows = positions.index.flatten().clamp(max=len(self.table) - 1)
        return x + self.table.index_select(0, rows)


class Rotary(PositionEncoding):
    """Queries and keys turned by their positions (Su et al., 2021, equation 34).

    Dimensions 2i and 2i + 1 turn by the angle position / 10000^(2i / d), so that the dot product of
    a query and a key depends on their distance only. Angles are at least float32.
    """

    def rotate(self, q: Tensor, k: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        """Turn queries and keys; without gradients on a CPU in place, as complex numbers."""
        in_place = (
            not torch.is_grad_enabled() and q.device.type == "cpu" and q.dtype is torch.float32
        )
        if positions.rotations is None:
            angle = rotary_angles(positions.index, q.size(-1), q.dtype)  # (..., d/2)
            positions.rotations = (
                torch.polar(torch.ones_like(angle), angle)
                if in_place
                else torch.stack([angle.cos(), angle.sin()])
            )
        if not in_place:
            return rotate_pairs(q, positions.rotations), rotate_pairs(k, positions.rotations)
        for x in (q, k):
            pairs = x.view(*x.shape[:-1], x.size(-1) // 2, 2)  # (..., d/2, 2)
            torch.view_as_complex(pairs).mul_(positions.rotations)
        return q, k


def rotary_angles(positions: Tensor, head_size: int, dtype: torch.dtype) -> Tensor:
    """Return the angles (..., d/2) of the pairs of dimensions at `positions` (...)."""
    dtype = torch.promote_types(dtype, torch.float32)
    i = torch.arange(0, head_size, 2, device=positions.device, dtype=dtype)  # (d/2,)
    return positions.unsqueeze(-1) * ROTARY_BASE ** (-i / head_size)


def rotate_pairs(x: Tensor, rotations: Tensor) -> Tensor:
    """Turn the pairs of `x` (..., d) by the cosines and sines in `rotations` (2, ..., d/2)."""
    cos, sin = rotations.unbind()
    even = x[..., 0::2].to(cos.dtype)  # (..., d/2)
    odd = x[..., 1::2].to(cos.dtype)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)  # (..., d)


class Relative(PositionEncoding):
    """Vectors of distances, added to keys and values (Shaw et al., 2018, equations 3 and 4).

    The heads of a layer share them. A distance beyond K is taken as K (equation 5).
    """

    has_bias = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.max_distance = config.max_distance
        shape = (2 * config.max_distance + 1, config.d_k)
        self.keys = nn.Parameter(torch.empty(shape))  # a^K, distances from -K to K
        self.values = nn.Parameter(torch.empty(shape))  # a^V
        nn.init.xavier_uniform_(self.keys)
        nn.init.xavier_uniform_(self.values)

    def bias(self, q: Tensor, distances: Tensor) -> Tensor:
        """Return q_i a^K_ij / sqrt(d), (B, H, T, S)."""
        scaled = q * q.size(-1) ** -0.5
        by_distance = scaled @ self.keys.to(q.dtype).T  # (B, H, T, 2K+1)
        return by_distance.gather(-1, self._rows(distances, by_distance))  # type: ignore[no-any-return]

    def value_bias(self, weights: Tensor, distances: Tensor) -> Tensor:
        """Return the sum over keys of w_ij a^V_ij, (B, H, T, d)."""
        shape = (*weights.shape[:-1], len(self.values))
        by_distance = weights.new_zeros(shape)  # (B, H, T, 2K+1)
        by_distance = by_distance.scatter_add(-1, self._rows(distances, weights), weights)
        return by_distance @ self.values.to(weights.dtype)

    def _rows(self, distances: Tensor, like: Tensor) -> Tensor:
        """Return the row of each distance in the tables, (B, H, T, S)."""
        rows = distances.clamp(-self.max_distance, self.max_distance) + self.max_distance
        return rows.unsqueeze(-3).expand(*like.shape[:-1], distances.size(-1))


class Alibi(PositionEncoding):
    """Logits that fall with distance (Press et al., 2022, section 3), by a slope of 2^(-8h / H) in
    head h = 1 to H.

    The paper has a decoder only. In the encoder, tokens before and after count alike.
    """

    has_bias = True

    def bias(self, q: Tensor, distances: Tensor) -> Tensor:
        """Return -slope * |distance|, (H, T, S) or (B, H, T, S)."""
        num_heads = self.config.num_heads
        dtype = torch.promote_types(q.dtype, torch.float32)
        head = torch.arange(1, num_heads + 1, device=q.device, dtype=dtype)
        slopes = 2.0 ** (-8 * head / num_heads)  # (H,)
        return -slopes[:, None, None] * distances.abs().unsqueeze(-3)


ENCODINGS: dict[Positions, type[PositionEncoding]] = {
    Positions.sinusoidal: Sinusoidal,
    Positions.sinusoidal_concat: Sinusoidal,
    Positions.sinusoidal_halves: Sinusoidal,
    Positions.learned: Learned,
    Positions.relative: Relative,
    Positions.rotary: Rotary,
    Positions.alibi: Alibi,
}


def new_embedding_encoding(config: ModelConfig) -> PositionEncoding:
    """Make the encoding that is added to the embeddings of one side."""
    is_added = config.positions.is_added
    return (ENCODINGS[config.positions] if is_added else PositionEncoding)(config)


def new_attention_encoding(config: ModelConfig) -> PositionEncoding:
    """Make the encoding of a self-attention."""
    is_added = config.positions.is_added
    return (PositionEncoding if is_added else ENCODINGS[config.positions])(config)


def distances(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return the distance from each query to each key, (T, S), both counted from 0."""
    keys = torch.arange(num_keys, device=device)
    return keys - torch.arange(num_queries, device=device).unsqueeze(1)


def write_file_names(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: Any
) -> None:
    """Give weights of encodings the names of docs/formats.md, in a state dict in place."""
    for name in list(state_dict):
        file_name = name.replace(".position_encoding.", ".relation.")
        if name.endswith("coder_positions.table"):
            file_name = name.removesuffix(".table")
        state_dict[file_name] = state_dict.pop(name)


def read_file_names(module: nn.Module, state_dict: dict[str, Tensor], *_: Any) -> None:
    """Undo `write_file_names`, in a state dict in place."""
    for file_name in list(state_dict):
        name = file_name.replace(".relation.", ".position_encoding.")
        if name.endswith("coder_positions"):
            name = f"{name}.table"
        state_dict[name] = state_dict.pop(file_name)
