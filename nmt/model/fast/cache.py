"""The cache of the target tokens in decoding: keys and values, or the states of SSRUs.

In the key-value cache, each step adds one column of keys and values for every beam of a sentence. A
boolean mask says which columns each hypothesis attends to. Reordering hypotheses moves only the
rows of this mask; keys and values stay where they are. For example, two beams have four columns
after two steps. If both hypotheses of the second step continue beam 0, the mask is:

                  step 1   step 2
    hypothesis 0   1  0     1  0
    hypothesis 1   1  0     0  1

From time to time, a compaction drops unused columns and finished sentences.

Masks and indices are computed on the CPU and sent to the device, so that no step waits for a GPU.
"""

# R live hypotheses, one row each (and filler rows, see `BeamGrid`); B sentences
# W beams, the largest number of hypotheses of a sentence
# C columns, T columns that a hypothesis attends to
# H heads, K heads of keys and values, d dimensions of a head, N tokens of the sources, D d_model

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.model.fast.layers import round_up_rows
from nmt.model.fast.packing import MIN_WIDTH, additive_mask
from nmt.model.fast.transfer import to_device

CPU = torch.device("cpu")
_SPARE_STEPS = 16  # steps for which capacity is added at once, since adding it copies the cache
_TRANSPOSED_WIDTH = 24  # number of columns above which a CPU computes K Q^T faster than Q K^T


class BeamGrid:
    """Maps R rows, sorted by sentence, to a grid of B sentences x W beams, and back.

    Row r of sentence b is in cell (b, beams[r]) of the grid. A sentence with fewer than W rows has
    empty cells, which hold a copy of another row. `grid_to_rows` appends filler rows, copies of
    cell (0, 0), up to `num_padded_rows` rows.
    """

    def __init__(self, sentences: Tensor, num_sentences: int, device: torch.device = CPU) -> None:
        """Make the grid for tensors on `device`.

        `sentences` (R,), on the CPU, holds the sentence of each row in ascending order.
        """
        num_rows = len(sentences)
        # (B,), the number of rows of each sentence
        self.counts = torch.bincount(sentences, minlength=num_sentences)
        first_rows = self.counts.cumsum(0) - self.counts  # (B,)
        num_beams = int(self.counts.max())
        self.shape = (num_sentences, num_beams)
        self.beams = torch.arange(num_rows) - first_rows[sentences]  # (R,)
        beam_indices = torch.arange(num_beams)  # (W,)
        # the row of each cell; empty cells get a row of a later sentence, or the last row
        rows = first_rows.unsqueeze(1) + beam_indices  # (B, W)
        rows = rows.clamp(max=num_rows - 1)
        self.is_empty = to_device(beam_indices >= self.counts.unsqueeze(1), device)  # (B, W)
        self.rows = to_device(rows, device)  # (B, W)
        self.num_padded_rows = round_up_rows(num_rows)  # filler rows included
        cells = sentences * num_beams + self.beams  # (R,), indices into the flattened grid
        self.cpu_cells = F.pad(cells, (0, self.num_padded_rows - num_rows))  # (num_padded_rows,)
        # without empty cells and filler rows, row i is cell i of the flattened grid
        has_empty_cells = num_rows < num_sentences * num_beams
        has_filler_rows = num_rows < self.num_padded_rows
        self.is_full = not has_empty_cells and not has_filler_rows
        # on the CPU and on the device: the row of each cell, (B * W,)
        self._cpu_rows = rows.flatten()
        self._device_rows = self.rows.flatten()
        # on the device: the cell of each row, (num_padded_rows,)
        self._device_cells = to_device(self.cpu_cells, device)

    def rows_to_grid(self, x: Tensor) -> Tensor:
        """Map rows (R or more, ...), on the device or the CPU, to the grid (B, W, ...)."""
        if not self.is_full:
            rows = self._cpu_rows if x.device.type == "cpu" else self._device_rows
            x = x.index_select(0, rows)
        return x.view(self.shape + x.shape[1:])

    def grid_to_rows(self, x: Tensor) -> Tensor:
        """Map the grid (B, W, ...) to rows (num_padded_rows, ...)."""
        x = x.flatten(0, 1)
        return x if self.is_full else x.index_select(0, self._device_cells)


@dataclass(frozen=True)
class GatherIndex:
    """Indices of the T columns that each row attends to.

    With them, softmax and weighted sum skip the columns of other beams. In this class, R includes
    filler rows.
    """

    logit_index: Tensor  # (R * H * T,), indices into the flattened products of queries and keys
    value_index: Tensor  # (R * H * T,), indices into the flattened values (B * H * capacity, d)
    shape: torch.Size  # (R, H, T)
    offsets: Tensor  # (R * H,), where each row and head starts in `logit_index` and `value_index`
    bias: Tensor | None  # (R, 1, T), added to the logits
    is_transposed: bool  # whether the products are (B, H, C, W) instead of (B, H, W, C)

    @classmethod
    def from_columns(
        cls,
        columns: Tensor,
        bias: Tensor | None,
        grid: BeamGrid,
        *,
        num_heads: int,
        width: int,
        capacity: int,
    ) -> GatherIndex:
        """Compute the indices for the `columns` (R, T) that each row attends to.

        There are `width` columns of keys and `capacity` columns of values.
        """
        num_beams = grid.shape[1]
        is_transposed = num_beams > 1 and width > _TRANSPOSED_WIDTH
        cells = grid.cpu_cells.view(-1, 1, 1)  # (R, 1, 1), each b * W + w
        beams = cells % num_beams
        sentences = cells // num_beams
        # (R, H, 1), b * H + h for head h of sentence b, as products and values are stored
        head_index = sentences * num_heads + torch.arange(num_heads).unsqueeze(1)
        columns = columns.unsqueeze(1)  # (R, 1, T)
        # (R, 1, T), indices into the flattened products of one head
        if is_transposed:  # the products are (C, W)
            row_starts = columns * num_beams
            index_in_head = row_starts + beams
        else:  # the products are (W, C)
            row_starts = beams * width
            index_in_head = row_starts + columns
        products_per_head = width * num_beams
        logit_index = head_index * products_per_head + index_in_head  # (R, H, T)
        value_index = head_index * capacity + columns  # (R, H, T)
        return cls(
            logit_index=logit_index.view(-1),
            value_index=value_index.view(-1),
            shape=value_index.shape,
            offsets=torch.arange(0, value_index.numel(), value_index.size(2)),
            bias=bias,
            is_transposed=is_transposed,
        )


@dataclass(frozen=True)
class StepContext:
    """Selects the keys that each row attends to in one step.

    Either `gather_index` lists these keys, or `bias` masks all other keys.
    """

    grid: BeamGrid
    bias: Tensor | None = None  # (B, 1, 1 or W, C), added to the logits
    gather_index: GatherIndex | None = None
    distances: Tensor | None = None  # (B, W, C), key position minus query position


class KVCache:
    """Keys and values of the target tokens, in one tensor (2, B, K, capacity, d) for each layer.

    Of the `capacity` columns of a tensor, the first `num_columns` hold tokens, and the others are
    zeros. Attention reads the keys of the first `width` columns.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.num_columns = 0
        self.capacity = 0

    @property
    def width(self) -> int:
        """C, the number of columns of keys that attention reads.

        This is `num_columns`, or `MIN_WIDTH` if it is larger.
        """
        return max(self.num_columns, MIN_WIDTH)

    def add_columns(self, count: int) -> None:
        """Add `count` columns, which `update` then writes in every layer."""
        self.num_columns += count
        if self.width > self.capacity:
            needed_capacity = self.width + _SPARE_STEPS * count
            # grow by half or more, so that few steps copy the cache
            self.capacity = max(needed_capacity, 3 * self.capacity // 2)

    def update(self, layer_index: int, new_keys_values: Tensor) -> Tensor:
        """Write keys and values (2, B, K, W, d) into the newest columns of a layer.

        Returns the layer's tensor (2, B, K, capacity, d), in which unused columns are 0.
        """
        _, num_sentences, num_heads, num_new, head_size = new_keys_values.shape
        if layer_index == len(self.tensors):  # the first step of this layer; layers come in order
            shape = (2, num_sentences, num_heads, self.capacity, head_size)
            self.tensors.append(new_keys_values.new_zeros(shape))
        tensor = self.tensors[layer_index]
        if tensor.size(3) < self.capacity:
            num_missing = self.capacity - tensor.size(3)
            tensor = F.pad(tensor, (0, 0, 0, num_missing))  # appends columns of zeros
            self.tensors[layer_index] = tensor
        first_new = self.num_columns - num_new
        tensor[:, :, :, first_new : self.num_columns] = new_keys_values
        return tensor

    def compact(self, sentences: Tensor, columns: Tensor, num_columns: int) -> None:
        """Keep only `sentences` (B',), and of each sentence only the columns in `columns`.

        `columns` (B', new capacity) are indices. The first `num_columns` of the new columns are in
        use; the others are spare capacity.
        """
        self.num_columns = num_columns
        self.capacity = columns.size(1)
        for layer_index, tensor in enumerate(self.tensors):
            _, num_sentences, num_heads, capacity, head_size = tensor.shape
            heads = torch.arange(num_heads, device=sentences.device)
            # One flat index is faster than an index for each dimension. The tensor stores vectors
            # (d,), sorted by key or value, then by sentence, head and column.
            head_index = sentences[:, None, None] * num_heads + heads.unsqueeze(1)  # (B', K, 1)
            key_index = head_index * capacity + columns.unsqueeze(1)  # (B', K, new capacity)
            num_keys = num_sentences * num_heads * capacity
            value_index = key_index + num_keys  # the values follow all keys
            index = torch.stack([key_index, value_index])  # (2, B', K, new capacity)
            vectors = tensor.view(-1, head_size).index_select(0, index.flatten())
            self.tensors[layer_index] = vectors.view(*index.shape, head_size)

    def add_sentences(self, count: int) -> None:
        """Append `count` sentences without tokens."""
        # F.pad takes the padding of the last dimension first; this pads the second dimension
        padding = (0, 0, 0, 0, 0, 0, 0, count)
        self.tensors = [F.pad(tensor, padding) for tensor in self.tensors]


class TargetCache(Protocol):
    """Keys and values, or states, of the target tokens of each hypothesis, for all layers."""

    def advance(self, grid: BeamGrid) -> None:
        """Begin a step, which adds a token to each hypothesis."""

    def reorder(self, rows: Tensor, grid: BeamGrid) -> None:
        """Keep the hypotheses at `rows` (R',), in that order; `grid` is the grid of the new rows.

        `rows` is a tensor on the CPU, in which a row may be repeated or missing.
        """

    def needs_compaction(self, num_positions: int) -> bool:
        """Return whether to call `compact`. No hypothesis has more than `num_positions` tokens."""

    def compact(self, live_sentences: Tensor, row_sentences: Tensor, grid: BeamGrid) -> None:
        """Drop the finished sentences of `grid`.

        `live_sentences` (B',) has the indices of the other sentences, and `row_sentences` (R,) the
        new index of the sentence of each row.
        """

    def add_sentences(self, count: int, grid: BeamGrid) -> None:
        """Append `count` sentences with an empty hypothesis each; `grid` is the new grid."""


class AttentionCache:
    """The keys and values of all target tokens, for decoders with self-attention.

    With `uses_gather_index`, the context of a step lists the columns that each row attends to.
    Otherwise, it has a bias that masks all other columns. With `has_position_bias`, it also has the
    distances that the positional encoding needs. `attention_mask` (R, C) is on the CPU.
    """

    def __init__(
        self,
        num_sentences: int,
        device: torch.device,
        *,
        num_heads: int,
        uses_gather_index: bool,
        has_position_bias: bool,
    ) -> None:
        self.keys_values = KVCache()
        self.context: StepContext  # set by `advance`
        self.attention_mask = torch.zeros(num_sentences, 0, dtype=torch.bool)
        self._device = device
        self._num_heads = num_heads
        self._uses_gather_index = uses_gather_index
        self._has_position_bias = has_position_bias
        self._num_compact_columns = 0  # number of columns after the latest compaction

    def advance(self, grid: BeamGrid) -> None:
        """Add a column for every beam, and let each hypothesis attend to its own."""
        num_beams = grid.shape[1]
        is_own = grid.beams.unsqueeze(1) == torch.arange(num_beams)  # (R, W)
        self.attention_mask = torch.cat([self.attention_mask, is_own], dim=1)  # (R, C)
        self.keys_values.add_columns(num_beams)
        if self._uses_gather_index:
            self.context = StepContext(grid, gather_index=self._index_columns(grid))
        else:
            mask = grid.rows_to_grid(self.attention_mask).unsqueeze(1)  # (B, 1, W, used columns)
            mask = to_device(mask, self._device)
            bias = additive_mask(mask, self.keys_values.width)  # (B, 1, W, C)
            distances = None
            if self._has_position_bias:
                distances = self._distances(grid)
            self.context = StepContext(grid, bias=bias, distances=distances)

    def _distances(self, grid: BeamGrid) -> Tensor:
        """Return the position of each column's token minus the newest position, (B, W, C).

        Columns are in the order of tokens. In a hypothesis' row of the mask, the cumulative sum is
        1 in the column of the first token, 2 in the column of the second token, and so on. Sums in
        columns of other beams have no meaning, and the bias hides these columns.
        """
        positions = self.attention_mask.cumsum(dim=1)  # (R, C)
        newest_positions = positions[:, -1:]  # (R, 1)
        distances = grid.rows_to_grid(positions - newest_positions)
        num_spare = self.keys_values.width - distances.size(2)  # columns not used yet
        return to_device(F.pad(distances, (0, num_spare)), self._device)

    def _index_columns(self, grid: BeamGrid) -> GatherIndex:
        """Return the index of the columns that hold the tokens of each row."""
        # the row and the column of each token of all hypotheses, sorted by row, (tokens,) each
        token_rows, token_columns = self.attention_mask.nonzero().unbind(1)
        lengths = self.attention_mask.sum(dim=1)  # (R,)
        longest = int(lengths.max())
        have_one_length = len(token_columns) == len(lengths) * longest
        if have_one_length:
            columns = token_columns.view(len(lengths), longest)  # (R, T)
        else:  # sentences that joined later have fewer tokens
            row_starts = lengths.cumsum(0) - lengths  # (R,), index of the first token of each row
            token_indices = torch.arange(len(token_columns))
            positions = token_indices - row_starts[token_rows]  # (tokens,), positions in the row
            # (R, T): the column of each token at its row and position, and zeros after them
            zeros = token_columns.new_zeros(len(lengths), longest)
            columns = zeros.index_put((token_rows, positions), token_columns)
        # add filler rows, and columns up to `MIN_WIDTH`
        num_filler = grid.num_padded_rows - len(lengths)
        num_missing = max(0, MIN_WIDTH - longest)
        columns = F.pad(columns, (0, num_missing, 0, num_filler))  # (padded R, T)
        bias = None
        if not have_one_length or longest < MIN_WIDTH:  # the bias hides the padding
            padded_lengths = F.pad(lengths, (0, num_filler), value=1)  # (padded R,)
            mask = torch.arange(columns.size(1)) < padded_lengths.unsqueeze(1)  # (padded R, T)
            bias = additive_mask(mask.unsqueeze(1), columns.size(1))  # (padded R, 1, T)
        return GatherIndex.from_columns(
            columns,
            bias,
            grid,
            num_heads=self._num_heads,
            width=self.keys_values.width,
            capacity=self.keys_values.capacity,
        )

    def reorder(self, rows: Tensor, grid: BeamGrid) -> None:
        """See `TargetCache.reorder`."""
        self.attention_mask = self.attention_mask.index_select(0, rows)

    def needs_compaction(self, num_positions: int) -> bool:
        """Return whether the number of columns has grown by half since the latest compaction.

        Returns False if there are at most `num_positions` columns, since a single hypothesis may
        use all of them.
        """
        num_columns = self.attention_mask.size(1)
        num_added = num_columns - self._num_compact_columns
        has_grown = num_added > _allowed_growth(self._num_compact_columns)
        return has_grown and num_columns > num_positions

    def compact(self, live_sentences: Tensor, row_sentences: Tensor, grid: BeamGrid) -> None:
        """Also drop the columns that no hypothesis attends to; see `TargetCache.compact`."""
        is_used = grid.rows_to_grid(self.attention_mask).any(dim=1)  # (B, C)
        is_used = is_used[live_sentences]  # (B', C)
        num_columns = int(is_used.sum(dim=1).max())
        # True sorts before False, so the used columns of each sentence come first, in their order
        order = is_used.sort(dim=1, descending=True, stable=True).indices  # (B', C)
        columns = order[:, :num_columns]
        self._num_compact_columns = num_columns
        self.attention_mask = self.attention_mask.gather(1, columns[row_sentences])  # (R, C')
        # spare capacity until the next compaction, which follows the step that exceeds the growth
        num_beams = grid.shape[1]
        num_spare = _allowed_growth(num_columns) + num_beams
        columns = to_device(F.pad(columns, (0, num_spare)), self._device)
        self.keys_values.compact(to_device(live_sentences, self._device), columns, num_columns)

    def add_sentences(self, count: int, grid: BeamGrid) -> None:
        """See `TargetCache.add_sentences`."""
        self.keys_values.add_sentences(count)
        # the new rows attend to no column yet
        self.attention_mask = F.pad(self.attention_mask, (0, 0, 0, count))


def _allowed_growth(num_compact_columns: int) -> int:
    """Return the number of columns that steps may add to compact columns without a compaction."""
    return num_compact_columns // 2 + MIN_WIDTH


class RecurrentCache:
    """The states of the SSRUs, one tensor (R, D) for each layer, filler rows included.

    They have the same size in every step.
    """

    def __init__(self, memory: Tensor, num_layers: int, grid: BeamGrid) -> None:
        """Begin with zeros on the device of `memory` (N, D), the output of the encoder."""
        self._device = memory.device
        dtype = torch.promote_types(memory.dtype, torch.float32)
        zeros = memory.new_zeros(grid.num_padded_rows, memory.size(1), dtype=dtype)
        self.states = [zeros] * num_layers  # layers replace their tensor, and never change it

    def advance(self, grid: BeamGrid) -> None:
        """Do nothing: the layers replace their states by `update`."""

    def update(self, layer_index: int, gates: Tensor, candidates: Tensor) -> Tensor:
        """Compute, store and return the next state (R, D) of a layer: f * state + (1 - f) * W x.

        `gates` (R, D) are the forget gates f, and `candidates` (R, D) are W x.
        """
        state = torch.lerp(candidates, self.states[layer_index], gates)
        self.states[layer_index] = state
        return state

    def reorder(self, rows: Tensor, grid: BeamGrid) -> None:
        """See `TargetCache.reorder`."""
        num_filler = grid.num_padded_rows - len(rows)
        rows = to_device(F.pad(rows, (0, num_filler)), self._device)
        self.states = [state.index_select(0, rows) for state in self.states]

    def needs_compaction(self, num_positions: int) -> bool:
        """Return False: there are no unused states."""
        return False

    def compact(self, live_sentences: Tensor, row_sentences: Tensor, grid: BeamGrid) -> None:
        """Do nothing: finished sentences have no rows any more, see `reorder`."""

    def add_sentences(self, count: int, grid: BeamGrid) -> None:
        """Append a row of zeros for each sentence."""
        num_rows_before = len(grid.beams) - count
        # the new rows and the filler rows are zeros
        padding = (0, 0, 0, grid.num_padded_rows - num_rows_before)
        self.states = [F.pad(state[:num_rows_before], padding) for state in self.states]
