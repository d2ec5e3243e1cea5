"""Positional encodings, one class for each, selected by `model.positions`.

There are three ways to tell the model the positions of tokens. An encoding overrides the methods of
one of them:

- `add` adds vectors to embeddings,
- `rotate` rotates queries and keys,
- `bias` and `value_bias` return terms that are added to the logits and to the outputs of
  self-attention.

A new encoding needs a class and a line of `ENCODINGS` here, a member of `nmt.config.Positions`, and
a row of the table in docs/layers.md.
"""

# B batch, T queries, S keys, H heads, D d_model, d dimensions of a head, K max_distance
# N tokens of packed sentences: all sentences of a batch, one after the other, without padding

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nmt.config import ModelConfig, Positions

INITIAL_TABLE_ROWS = 512  # number of positions in a new table; a longer sentence enlarges it
ROTARY_BASE = 10_000.0


@dataclass(eq=False)
class TokenPositions:
    """The positions of source or target tokens, counted from 0 in each sentence.

    Attributes:
        index: the positions. The shape broadcasts over heads: it is (T,) for queries (B, H, T, d),
            and (N, 1) for queries (N, H, d).
        num_positions: upper bound of the positions, exclusive.
        rotations: cosines and sines (..., d/2, 2), which `Rotary` computes once for all layers.
    """

    index: Tensor
    num_positions: int
    rotations: Tensor | None = None

    @classmethod
    def up_to(cls, length: int, device: torch.device) -> TokenPositions:
        """Return the positions of padded sentences, 0 to `length` - 1."""
        return cls(torch.arange(length, device=device), length)


class PositionEncoding(nn.Module):
    """Base class of all encodings. By itself it encodes nothing."""

    has_bias = False  # whether attention has to add `bias` and `value_bias`

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def add(self, x: Tensor, positions: TokenPositions) -> Tensor:
        """Return embeddings `x`, (B, T, D) or (N, D), plus the vectors of their positions."""
        return x

    @property
    def has_rotation(self) -> bool:
        """Whether the class overrides `rotate`."""
        return type(self).rotate is not PositionEncoding.rotate

    def prepare(self, positions: TokenPositions, head_size: int, dtype: torch.dtype) -> None:
        """Store values that all layers need in `positions`; called before the first layer."""

    def rotate(self, q: Tensor, k: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        """Rotate the queries and keys (..., d) of the same tokens by their positions."""
        return q, k

    def bias(self, q: Tensor, distances: Tensor) -> Tensor:
        """Return the bias of the logits, broadcasting to (B, H, T, S).

        `distances`, (T, S) or (B, T, S), are key positions minus query positions.
        """
        return q.new_zeros(())

    def value_bias(self, weights: Tensor, distances: Tensor) -> Tensor:
        """Return the bias of the attended values (B, H, T, d) for `weights` (B, H, T, S)."""
        return weights.new_zeros(())


class Sinusoidal(PositionEncoding):
    """Sines and cosines added to embeddings (Vaswani et al., 2017, section 3.5)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.table: Tensor
        self.register_buffer("table", self.make_table(INITIAL_TABLE_ROWS), persistent=False)

    def make_table(self, length: int) -> Tensor:
        """Compute the encodings (length, D) of the first `length` positions."""
        config = self.config
        return sinusoidal_positions(
            length, config.d_model, config.positions, offset=config.position_offset
        )

    def add(self, x: Tensor, positions: TokenPositions) -> Tensor:
        """Add the row of the table for each position."""
        table = self.table  # read once, since another thread may replace it
        if positions.num_positions > table.size(0):
            table = self.make_table(2 * positions.num_positions).to(table)
            self.table = table
        # flattened, since `index` is (N, 1) for packed sentences
        return x + table.index_select(0, positions.index.flatten())


def sinusoidal_positions(length: int, d_model: int, layout: Positions, offset: int = 0) -> Tensor:
    """Compute the encodings (length, D) of the positions from `offset` on, in float32.

    The layout `sinusoidal` of the paper interleaves sines and cosines. `sinusoidal_halves` and
    `sinusoidal_concat` have all sines first, then all cosines. `sinusoidal_concat` has the
    wavelengths of Tensor2Tensor, up to 2 pi * 10000.
    """
    half = d_model // 2
    pos = torch.arange(offset, offset + length, dtype=torch.float64).unsqueeze(1)  # (length, 1)
    i = torch.arange(half, dtype=torch.float64)  # (D/2,)
    if layout is Positions.sinusoidal_concat:
        angle = pos * torch.exp(-math.log(10000.0) * i / max(half - 1, 1))  # (length, D/2)
    else:
        # PE(pos, 2i) = sin(pos / 10000^(2i / d_model)); PE(pos, 2i + 1) is the cosine of that angle
        angle = pos * torch.exp(-math.log(10000.0) * 2 * i / d_model)  # (length, D/2)
    if layout is Positions.sinusoidal:
        table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
    else:
        table = torch.cat([angle.sin(), angle.cos()], dim=-1)
    return table.float()  # (length, D)


class Learned(PositionEncoding):
    """A learned vector for each position, added to embeddings (Gehring et al., 2017).

    The table has `config.num_positions` rows. Later positions use its last row.
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
    """Rotation of queries and keys by their positions (Su et al., 2021, equation 34).

    Dimensions 2i and 2i + 1 rotate by the angle position / 10000^(2i / d). The dot product of a
    query and a key then depends on their distance only. Angles are at least float32.
    """

    def prepare(self, positions: TokenPositions, head_size: int, dtype: torch.dtype) -> None:
        """Compute the cosines and sines of the angles."""
        angle = rotary_angles(positions.index, head_size, dtype)  # (..., d/2)
        positions.rotations = torch.stack([angle.cos(), angle.sin()], dim=-1)  # (..., d/2, 2)

    def rotate(self, q: Tensor, k: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys (..., d). On a CPU without gradients, rotates them in place."""
        if positions.rotations is None:
            self.prepare(positions, q.size(-1), q.dtype)
        rotations = positions.rotations
        assert rotations is not None
        is_cpu_float32 = q.device.type == "cpu" and q.dtype is torch.float32
        can_rotate_in_place = is_cpu_float32 and not torch.is_grad_enabled()
        if not can_rotate_in_place:
            return rotate_pairs(q, rotations), rotate_pairs(k, rotations)
        factors = torch.view_as_complex(rotations)  # e^(i * angle), (..., d/2)
        for x in (q, k):
            pairs = x.view(*x.shape[:-1], x.size(-1) // 2, 2)  # (..., d/2, 2)
            torch.view_as_complex(pairs).mul_(factors)  # also changes `x`, since `pairs` is a view
        return q, k


def rotary_angles(index: Tensor, head_size: int, dtype: torch.dtype) -> Tensor:
    """Return the angles by which pairs of dimensions rotate at the positions `index` (...).

    The shape of the angles is (..., d/2), where d is `head_size`.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    i = torch.arange(0, head_size, 2, device=index.device, dtype=dtype)  # (d/2,)
    frequencies = ROTARY_BASE ** (-i / head_size)  # (d/2,)
    return index.unsqueeze(-1) * frequencies


def rotate_pairs(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate pairs of dimensions of `x` (..., d) by the cosines and sines (..., d/2, 2)."""
    pairs = x.to(rotations.dtype).reshape(*x.shape[:-1], x.size(-1) // 2, 2)  # (..., d/2, 2)
    if torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
        # neither torch.compile nor the export to ONNX supports complex numbers
        cos, sin = rotations.unbind(-1)  # (..., d/2)
        even, odd = pairs.unbind(-1)
        rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    else:  # one complex multiplication instead of six operations
        factors = torch.view_as_complex(rotations)  # e^(i * angle), (..., d/2)
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * factors)
    return rotated.flatten(-2).to(x.dtype)  # (..., d)


class Relative(PositionEncoding):
    """Learned vectors of distances, added to keys and values (Shaw et al., 2018, equations 3, 4).

    All heads of a layer share these vectors. Distances are clipped to -K and K (equation 5).
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
        scaled_q = q * q.size(-1) ** -0.5
        bias_by_distance = scaled_q @ self.keys.to(q.dtype).T  # (B, H, T, 2K+1)
        return bias_by_distance.gather(-1, self._table_rows(distances, q))  # type: ignore[no-any-return]

    def value_bias(self, weights: Tensor, distances: Tensor) -> Tensor:
        """Return the sum over keys of w_ij a^V_ij, (B, H, T, d)."""
        shape = (*weights.shape[:-1], len(self.values))
        zeros = weights.new_zeros(shape)  # (B, H, T, 2K+1)
        weight_sums = zeros.scatter_add(-1, self._table_rows(distances, weights), weights)
        return weight_sums @ self.values.to(weights.dtype)

    def _table_rows(self, distances: Tensor, x: Tensor) -> Tensor:
        """Return the row of each distance in the tables, (B, H, T, S), for `x` (B, H, T, ...)."""
        rows = distances.clamp(-self.max_distance, self.max_distance) + self.max_distance
        rows = rows.unsqueeze(-3)  # (1, T, S) or (B, 1, T, S)
        return rows.expand(*x.shape[:-1], distances.size(-1))


class Alibi(PositionEncoding):
    """Logits that fall linearly with distance (Press et al., 2022, section 3).

    The slope in head h, from 1 to H, is 2^(-8h / H). The encoder, which the paper does not have,
    treats distances to the left and to the right alike.
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
    """Make the encoding that is added to source or target embeddings.

    If `config.positions` is an encoding of self-attention, the result adds nothing.
    """
    if config.positions.is_added_to_embeddings:
        return ENCODINGS[config.positions](config)
    return PositionEncoding(config)


def new_attention_encoding(config: ModelConfig) -> PositionEncoding:
    """Make the encoding of a self-attention layer.

    If `config.positions` is an encoding of embeddings, the result does nothing.
    """
    if config.positions.is_added_to_embeddings:
        return PositionEncoding(config)
    return ENCODINGS[config.positions](config)


def distance_matrix(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return key position minus query position, (T, S), both counted from 0."""
    keys = torch.arange(num_keys, device=device)
    return keys - torch.arange(num_queries, device=device).unsqueeze(1)


def to_file_names(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: Any
) -> None:
    """Give the weights of encodings in `state_dict` the names that they have in model files.

    docs/formats.md lists these names. Changes `state_dict`, as a hook of `nn.Module.state_dict`.
    """
    for name in list(state_dict):
        name_in_file = name.replace(".position_encoding.", ".relation.")
        if name.endswith("coder_positions.table"):  # encoder_positions or decoder_positions
            name_in_file = name.removesuffix(".table")
        # every weight moves to the end, even under its old name, which preserves their order
        state_dict[name_in_file] = state_dict.pop(name)


def from_file_names(module: nn.Module, state_dict: dict[str, Tensor], *_: Any) -> None:
    """Undo `to_file_names` in `state_dict`, as a hook of `nn.Module.load_state_dict`."""
    for name_in_file in list(state_dict):
        name = name_in_file.replace(".relation.", ".position_encoding.")
        if name.endswith("coder_positions"):
            name = f"{name}.table"
        state_dict[name] = state_dict.pop(name_in_file)
