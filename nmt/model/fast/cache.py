"""What decoding remembers between two steps: keys and values of the source and of target positions.

A step adds a column of keys and values for every beam of a sentence. Columns stay where they are
when hypotheses change places; what moves is a row of booleans for each, which columns it may attend
to. Columns and sentences that no hypothesis needs are dropped now and then, many at once.

The host keeps the books, in tensors of its own: no step waits for the device. Keys, values and the
places to read them from are on the device.
"""

# R rows, the live hypotheses; B sentences, W beams of the widest; C columns, H heads, S source,
# D d_model

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.model.fast.layers import rounded
from nmt.model.fast.packing import MASKED, MIN_WIDTH, Packing, additive_mask
from nmt.model.fast.transfer import send
from nmt.model.variants import rotary_angles

CPU = torch.device("cpu")
_ROOM = 16  # steps for which columns are added at once, since all are copied then
KeyValues = tuple[Tensor, Tensor]
_SWAPPED_COLUMNS = 24  # with more columns a CPU multiplies keys by queries faster than the reverse


class Reads(NamedTuple):
    """Where the rows of a step find what they attend to, T places each, so that nothing is computed
    for other beams' columns; rows after the first R repeat one of them.
    """

    logits: Tensor  # (R or more * H * T,), in the flat products of queries and keys
    values: Tensor  # (R or more * H * T,), in the flat rows (B * H * room, D/H) of values
    shape: torch.Size  # (R or more, H, T)
    bags: Tensor  # (R * H or more,), where those of each query begin
    bias: Tensor | None  # (R or more, 1, T), added to the logits
    is_swapped: bool  # products are (B, H, C, W), else (B, H, W, C)


def rotations(positions: Tensor, size: int) -> Tensor:
    """Return what `rotate` turns `size` dimensions by, as complex numbers (..., size/2)."""
    angle = rotary_angles(positions, size)
    return torch.polar(torch.ones_like(angle), angle)


class Grid:
    """Places R rows, sorted by sentence, on a grid of B sentences x W beams; cells that are left
    over repeat another row.
    """

    def __init__(self, sentences: Tensor, num_sentences: int, device: torch.device = CPU) -> None:
        """`sentences` (R,) is the number of each row's sentence, ascending, on the host; `device`
        is that of what is placed.
        """
        num_rows = len(sentences)
        self.counts = torch.bincount(sentences, minlength=num_sentences)  # (B,), rows of each
        firsts = self.counts.cumsum(0) - self.counts  # (B,)
        self.shape = num_sentences, int(self.counts.max())
        self.beams = torch.arange(num_rows) - firsts[sentences]  # (R,)
        beams = torch.arange(self.shape[1])  # (W,)
        self.host_rows = (firsts.unsqueeze(1) + beams).clamp(max=num_rows - 1)  # (B, W)
        self.is_empty = send(beams >= self.counts.unsqueeze(1), device)  # (B, W)
        self.rows = send(self.host_rows, device)  # (B, W)
        self.num_collected = rounded(num_rows)  # with rows that mean nothing at the end
        cells = sentences * self.shape[1] + self.beams  # (R,)
        self.host_cells = F.pad(cells, (0, self.num_collected - num_rows))
        self._cells = send(self.host_cells, device)
        self.is_full = num_rows == self.num_collected == num_sentences * self.shape[1]

    def spread(self, x: Tensor) -> Tensor:
        """Map rows (R or more, ...), of the device or the host, to cells (B, W, ...)."""
        if not self.is_full:
            rows = self.host_rows if x.device.type == "cpu" else self.rows
            x = x.index_select(0, rows.flatten())
        return x.view(*self.shape, *x.shape[1:])

    def collect(self, x: Tensor) -> Tensor:
        """Map cells (B, W, ...) to rows (num_collected, ...), at least R."""
        x = x.flatten(0, 1)
        return x if self.is_full else x.index_select(0, self._cells)


class DecoderCache:
    """The state of decoding: which hypotheses are alive, and what each may attend to. It begins
    with one hypothesis a sentence.

    Keys and values are kept for each attention module, which is the key to its own.
    """

    def __init__(self, memory: Tensor, sources: Packing) -> None:
        """Begin with the encoder's output `memory` (N, D), packed as `sources` says."""
        num_sentences, self.device = sources.num_sentences, memory.device
        self.memory = memory
        self.packing = sources
        self.sources: dict[nn.Module, KeyValues] = {}  # (B, H, S, D/H) each
        width = max(sources.longest, MIN_WIDTH)
        self.source_bias = additive_mask(sources.mask, width)  # (B, 1, 1, S)
        self.targets: dict[nn.Module, Tensor] = {}  # keys and values with room, (2, B, H, C+, D/H)
        self.num_positions = 0  # target positions so far, of the first sentence
        self.starts: Tensor | None = None
        """(B,), positions before each sentence joined, on the host; None for 0."""
        self.sentences = torch.arange(num_sentences)  # (R,), ascending, on the host
        self.grid = Grid(self.sentences, num_sentences, self.device)
        self.visible = torch.zeros(num_sentences, 0, dtype=torch.bool)  # (R, C), on the host
        self._bias: Tensor | None = None  # of this step, once it is asked for; so are reads
        self._reads: dict[tuple[int, int], Reads] = {}
        self._source_reads: dict[tuple[int, int], Reads] = {}
        self._distances: Tensor | None = None  # of this step, once they are asked for
        self._rotations: Tensor | None = None
        self._num_kept = 0  # columns after those without use were dropped last

    def add_source(self, module: nn.Module, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values of the source (N, H, D/H), as (B, H, S, D/H)."""
        width = self.source_bias.size(3)
        padded = (self.packing.pad(x).transpose(1, 2) for x in (keys, values))
        if width > self.packing.longest:  # even a padding of 0 copies
            padded = (F.pad(x, (0, 0, 0, width - x.size(2))) for x in padded)
        keys, values = (x.contiguous() for x in padded)
        self.sources[module] = keys, values

    def add_position(self) -> None:
        """Make a column for every beam, which the hypothesis in it may attend to."""
        own = self.grid.beams.unsqueeze(1) == torch.arange(self.grid.shape[1])  # (R, W)
        self.visible = torch.cat([self.visible, own], dim=1)  # (R, C)
        self.num_positions += 1
        self._bias = self._distances = self._rotations = None
        self._reads.clear()

    @property
    def width(self) -> int:
        """Columns that self-attention looks at, C."""
        return max(self.visible.size(1), MIN_WIDTH)

    @property
    def bias(self) -> Tensor:
        """What is added to the logits of self-attention, (B, 1, W, C)."""
        if self._bias is None:
            visible = self.grid.spread(self.visible).unsqueeze(1)  # (B, 1, W, C)
            self._bias = additive_mask(send(visible, self.device), self.width)
        return self._bias

    def reads(self, num_heads: int, room: int) -> Reads:
        """Return where the rows find their own tokens, among values with `room` for columns."""
        key = num_heads, room
        if key not in self._reads:
            rows, columns = self.visible.nonzero().unbind(1)
            lengths = self.visible.sum(dim=1)  # (R,)
            longest = int(lengths.max())
            num_padded = self.grid.num_collected - len(lengths)
            if self.starts is None:
                own = columns.view(len(lengths), longest)
            else:  # sentences that joined later have fewer
                ends = lengths.cumsum(0)
                places = torch.arange(len(columns)) - (ends - lengths)[rows]
                own = columns.new_zeros(len(lengths), longest)
                own[rows, places] = columns
            own = F.pad(own, (0, max(0, MIN_WIDTH - longest), 0, num_padded))  # (R or more, T)
            bias = None
            if self.starts is not None or longest < MIN_WIDTH:
                seen = torch.arange(own.size(1)) < F.pad(lengths, (0, num_padded), value=1)[:, None]
                bias = additive_mask(seen.unsqueeze(1), own.size(1))  # (R or more, 1, T)
            self._reads[key] = self._find(own, bias, num_heads, self.width, room)
        return self._reads[key]

    def source_reads(self, num_heads: int, width: int) -> Reads:
        """Return where the rows find the tokens of their source, among `width`."""
        key = num_heads, width
        if key not in self._source_reads:
            sentences = self.grid.host_cells // self.grid.shape[1]  # (R or more,)
            bias = self.source_bias.squeeze(1).index_select(0, sentences)  # (R or more, 1, S)
            columns = torch.arange(width).expand(len(sentences), width)
            self._source_reads[key] = self._find(columns, bias, num_heads, width, width)
        return self._source_reads[key]

    def _find(
        self, columns: Tensor, bias: Tensor | None, num_heads: int, width: int, room: int
    ) -> Reads:
        """Return `Reads` of `columns` (R or more, T) of `width`, and of values with `room`."""
        num_beams = self.grid.shape[1]
        is_swapped = num_beams > 1 and width > _SWAPPED_COLUMNS
        cells = self.grid.host_cells.view(-1, 1, 1)  # (R or more, 1, 1)
        sentences, beams = cells // num_beams, cells % num_beams
        blocks = sentences * num_heads + torch.arange(num_heads).unsqueeze(1)  # (R or more, H, 1)
        columns = columns.unsqueeze(1)  # (R or more, 1, T)
        inner = columns * num_beams + beams if is_swapped else columns + beams * width
        values = blocks * room + columns
        bags = torch.arange(0, values.numel(), values.size(2))
        logits = (blocks * (width * num_beams) + inner).view(-1)
        return Reads(logits, values.view(-1), values.shape, bags, bias, is_swapped)

    def ages(self) -> Tensor:
        """Return the position of each newest token in its sentence, (R or more,), or () where all
        have the same.
        """
        newest = self.num_positions - 1
        if self.starts is None:
            return torch.full((), newest, device=self.device)
        ages = newest - self.starts[self.sentences]  # (R,)
        return send(F.pad(ages, (0, self.grid.num_collected - len(ages))), self.device)

    def rotations(self, size: int) -> Tensor:
        """Return what `rotate` turns the newest queries and keys (R, heads, size) by, as complex
        numbers (R or more or 1, 1, size/2) that pairs of dimensions are multiplied with.
        """
        if self._rotations is None:
            self._rotations = rotations(self.ages().view(-1, 1), size)
        return self._rotations

    def distances(self) -> Tensor:
        """Return how far before its newest token a hypothesis has the token of a column that it may
        attend to, from 0 down, (B, W, C): its columns stand in the order of its tokens.
        """
        if self._distances is None:
            places = self.visible.cumsum(dim=1)  # (R, C)
            found = self.grid.spread(places - places[:, -1:])
            found = F.pad(found, (0, self.width - found.size(2)))
            self._distances = send(found, self.device)
        return self._distances

    def append(self, module: nn.Module, new: Tensor) -> KeyValues:
        """Put keys and values (2, B, H, W, D/H) of `module` into the newest columns; return all
        keys, as many as `width`, and all values, with room for more.
        """
        stop, end = self.visible.size(1), self.width
        start = stop - new.size(3)
        both = self.targets.get(module, new.new_empty(*new.shape[:3], 0, new.size(4)))
        room = both.size(3)
        if end > room:  # zeros, for columns are attended to, with weight 0, before they are written
            more = max(end + _ROOM * new.size(3), 3 * room // 2) - room
            both = self.targets[module] = F.pad(both, (0, 0, 0, more))
        both[:, :, :, start:stop] = new
        return both[0, :, :, :end], both[1]

    def reorder(self, rows: Tensor) -> None:
        """Go on with the rows given (R',), sorted by sentence, on the host; one may stand there
        repeatedly.
        """
        num_sentences = self.grid.shape[0]
        sentences = self.sentences.index_select(0, rows)
        self.visible = self.visible.index_select(0, rows)
        if not torch.equal(sentences, self.sentences):
            self.sentences = sentences
            self._place(num_sentences)
        num_columns = self.visible.size(1)
        is_loose = num_columns > max(1.5 * self._num_kept + MIN_WIDTH, self.num_positions)
        if is_loose or int((self.grid.counts > 0).sum()) <= 0.75 * num_sentences:
            self._compact()

    def join(self, other: DecoderCache) -> None:
        """Add the sentences of a cache without positions, whose sources are those of the same
        modules.
        """
        num_sentences, num_more = self.grid.shape[0], other.grid.shape[0]
        width = max(self.source_bias.size(3), other.source_bias.size(3))
        for module, pair in self.sources.items():
            both = zip(pair, other.sources[module], strict=True)
            keys, values = (
                torch.cat([F.pad(x, (0, 0, 0, width - x.size(2))) for x in sides]) for sides in both
            )
            self.sources[module] = keys, values
        biases = (self.source_bias, other.source_bias)
        self.source_bias = torch.cat(
            [F.pad(x, (0, width - x.size(3)), value=MASKED) for x in biases]
        )
        for module, kept in self.targets.items():
            self.targets[module] = F.pad(kept, (0, 0, 0, 0, 0, 0, 0, num_more))
        starts = self.sentences.new_zeros(num_sentences) if self.starts is None else self.starts
        self.starts = F.pad(starts, (0, num_more), value=self.num_positions)
        self.sentences = torch.cat([self.sentences, other.sentences + num_sentences])
        self.visible = F.pad(self.visible, (0, 0, 0, num_more))
        self._place(num_sentences + num_more)

    def _compact(self) -> None:
        """Drop sentences without hypotheses, and columns that nothing alive descends from."""
        is_alive = self.grid.counts > 0  # (B,)
        alive = is_alive.nonzero().squeeze(1)  # (B',)
        self.sentences = (is_alive.cumsum(0) - 1)[self.sentences]
        seen = self.grid.spread(self.visible).any(dim=1)[alive]  # (B', C)
        if self.starts is not None:
            self.starts = self.starts.index_select(0, alive)
            first = int(self.starts.min())  # no position before is needed
            self.starts, self.num_positions = self.starts - first, self.num_positions - first
        alive = send(alive, self.device)
        for module, (keys, values) in self.sources.items():
            self.sources[module] = keys.index_select(0, alive), values.index_select(0, alive)
        self.source_bias = self.source_bias.index_select(0, alive)
        self._num_kept = int(seen.sum(dim=1).max()) if seen.size(1) else 0
        columns = seen.sort(dim=1, descending=True, stable=True).indices[:, : self._num_kept]
        self.visible = self.visible.gather(1, columns[self.sentences])  # (R, C')
        room = self._num_kept // 2 + MIN_WIDTH + self.grid.shape[1]  # until the next time
        with_room = send(F.pad(columns, (0, room)), self.device)  # (B', C' + room)
        for module, both in self.targets.items():
            _, num_sentences, num_heads, room, dim = both.shape
            blocks = alive[:, None, None] * num_heads + torch.arange(num_heads, device=alive.device)
            places = blocks.transpose(1, 2) * room + with_room.unsqueeze(1)  # (B', H, C' + room)
            places = torch.stack([places, places + num_sentences * num_heads * room])
            rows = both.view(-1, dim).index_select(0, places.flatten())  # faster than indexing
            self.targets[module] = rows.view(*places.shape, dim)
        self._place(len(alive))

    def _place(self, num_sentences: int) -> None:
        self.grid = Grid(self.sentences, num_sentences, self.device)
        self._source_reads.clear()
