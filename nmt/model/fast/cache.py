"""Keys and values of the tokens decoded so far, and the indices by which hypotheses find theirs.

A step adds a column of keys and values for every beam of a sentence. Columns stay where they are
when hypotheses are reordered: only the rows of a boolean attention mask move. Columns and sentences
that no hypothesis needs are dropped now and then, many at once.

Masks and indices are computed on the CPU and sent to the device, so that no step waits for a GPU.
"""

# R rows, the live hypotheses; B sentences, W beams of the widest; C columns, H heads, K heads of
# keys and values, d dimensions of a head; T columns that a hypothesis attends to

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.model.fast.layers import rounded
from nmt.model.fast.packing import MIN_WIDTH
from nmt.model.fast.transfer import send

CPU = torch.device("cpu")
_SPARE_STEPS = 16  # steps that added capacity lasts for; adding it copies everything
_TRANSPOSED_WIDTH = 24  # with more columns a CPU multiplies keys by queries faster than the reverse


class BeamGrid:
    """Lays R rows, sorted by sentence, out on a grid of B sentences x W beams. Empty cells hold a
    copy of another row.
    """

    def __init__(self, sentences: Tensor, num_sentences: int, device: torch.device = CPU) -> None:
        """`sentences` (R,) is the number of each row's sentence, ascending, on the CPU; tensors to
        lay out are on `device`.
        """
        num_rows = len(sentences)
        self.counts = torch.bincount(sentences, minlength=num_sentences)  # (B,), rows of each
        firsts = self.counts.cumsum(0) - self.counts  # (B,)
        num_beams = int(self.counts.max())
        self.shape = (num_sentences, num_beams)
        self.beams = torch.arange(num_rows) - firsts[sentences]  # (R,)
        beams = torch.arange(num_beams)  # (W,)
        rows = (firsts.unsqueeze(1) + beams).clamp(max=num_rows - 1)  # (B, W)
        self.is_empty = send(beams >= self.counts.unsqueeze(1), device)  # (B, W)
        self.rows = send(rows, device)  # (B, W)
        self.num_collected = rounded(num_rows)  # R, and meaningless rows at the end
        cells = sentences * num_beams + self.beams  # (R,)
        self.host_cells = F.pad(cells, (0, self.num_collected - num_rows))
        self.is_full = num_rows == self.num_collected == num_sentences * num_beams
        self._host_rows = rows.flatten()
        self._rows = self.rows.flatten()
        self._cells = send(self.host_cells, device)

    def spread(self, x: Tensor) -> Tensor:
        """Map rows (R or more, ...), on the device or the CPU, to cells (B, W, ...)."""
        if not self.is_full:
            x = x.index_select(0, self._host_rows if x.device.type == "cpu" else self._rows)
        return x.view(self.shape + x.shape[1:])

    def collect(self, x: Tensor) -> Tensor:
        """Map cells (B, W, ...) to rows (num_collected, ...), at least R."""
        x = x.flatten(0, 1)
        return x if self.is_full else x.index_select(0, self._cells)


@dataclass(frozen=True)
class GatherIndex:
    """Where each row of a step finds its T columns, so that nothing is computed for the columns of
    other beams. Rows after the first R repeat one of them.
    """

    logits: Tensor  # (R or more * H * T,), into the flattened products of queries and keys
    values: Tensor  # (R or more * H * T,), into the flattened values (B * H * capacity, d)
    shape: torch.Size  # (R or more, H, T)
    offsets: Tensor  # (R or more * H,), where the entries of each query begin
    bias: Tensor | None  # (R or more, 1, T), added to the logits
    is_transposed: bool  # the products are (B, H, C, W) instead of (B, H, W, C)

    @classmethod
    def of(
        cls,
        columns: Tensor,
        bias: Tensor | None,
        grid: BeamGrid,
        *,
        num_heads: int,
        width: int,
        capacity: int,
    ) -> GatherIndex:
        """Index `columns` (R or more, T) of each row, of `width` columns of keys and `capacity`
        columns of values.
        """
        num_beams = grid.shape[1]
        is_transposed = num_beams > 1 and width > _TRANSPOSED_WIDTH
        cells = grid.host_cells.view(-1, 1, 1)  # (R or more, 1, 1)
        beams = cells % num_beams
        heads = cells // num_beams * num_heads + torch.arange(num_heads).unsqueeze(1)
        columns = columns.unsqueeze(1)  # (R or more, 1, T); heads are (R or more, H, 1)
        products = columns * num_beams + beams if is_transposed else columns + beams * width
        values = heads * capacity + columns  # (R or more, H, T)
        return cls(
            logits=(heads * (width * num_beams) + products).view(-1),
            values=values.view(-1),
            shape=values.shape,
            offsets=torch.arange(0, values.numel(), values.size(2)),
            bias=bias,
            is_transposed=is_transposed,
        )


class KVCache:
    """Keys and values of the target tokens, in one tensor (2, B, K, capacity, d) for each layer."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.num_columns = 0
        self.capacity = 0

    @property
    def width(self) -> int:
        """Columns to multiply queries with, C."""
        return max(self.num_columns, MIN_WIDTH)

    def add_columns(self, count: int) -> None:
        """Make room for a column for each of `count` beams; `update` writes it in every layer."""
        self.num_columns += count
        if self.width > self.capacity:
            self.capacity = max(self.width + _SPARE_STEPS * count, 3 * self.capacity // 2)

    def update(self, layer: int, new: Tensor) -> Tensor:
        """Write keys and values (2, B, K, W, d) into the newest columns of a layer; return its
        tensor. Columns that are not written yet are 0.
        """
        if layer == len(self.tensors):
            shape = (*new.shape[:3], self.capacity, new.size(4))
            self.tensors.append(new.new_zeros(shape))
        tensor = self.tensors[layer]
        if tensor.size(3) < self.capacity:
            tensor = F.pad(tensor, (0, 0, 0, self.capacity - tensor.size(3)))
            self.tensors[layer] = tensor
        tensor[:, :, :, self.num_columns - new.size(3) : self.num_columns] = new
        return tensor

    def reorder(self, sentences: Tensor, columns: Tensor, num_columns: int) -> None:
        """Keep only `sentences` (B',), and of each the `columns` (B', capacity), of which the first
        `num_columns` are in use.
        """
        self.num_columns = num_columns
        self.capacity = columns.size(1)
        for layer, tensor in enumerate(self.tensors):
            _, num_sentences, num_heads, capacity, head_size = tensor.shape
            heads = torch.arange(num_heads, device=sentences.device)
            blocks = sentences[:, None, None] * num_heads + heads.unsqueeze(1)  # (B', K, 1)
            keys = blocks * capacity + columns.unsqueeze(1)  # (B', K, capacity')
            index = torch.stack([keys, keys + num_sentences * num_heads * capacity])
            # faster than indexing with several tensors
            rows = tensor.view(-1, head_size).index_select(0, index.flatten())
            self.tensors[layer] = rows.view(*index.shape, head_size)

    def add_sentences(self, count: int) -> None:
        """Append `count` sentences without tokens."""
        self.tensors = [F.pad(tensor, (0, 0, 0, 0, 0, 0, 0, count)) for tensor in self.tensors]
