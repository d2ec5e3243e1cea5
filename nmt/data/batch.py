"""A batch of sentence pairs as padded tensors."""

# B batch, S source, T target; EOS is part of both lengths

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.data.tokenizer import Tokenizers

Ids = Sequence[int] | np.ndarray[Any, Any]


@dataclass
class Batch:
    """What one forward pass of training reads: `tgt_in` is BOS + target, `tgt_out` is target + EOS,
    both padded.
    """

    src: Tensor  # (B, S)
    src_lengths: Tensor  # (B,)
    tgt_in: Tensor  # (B, T)
    tgt_out: Tensor  # (B, T)
    num_tokens: int  # real target tokens, EOS included
    num_src_tokens: int

    def to(self, device: torch.device) -> Batch:
        """Copy the tensors to `device`, without a wait where they are pinned."""
        return self._map(lambda x: x.to(device, non_blocking=True))

    def pin(self) -> Batch:
        """Copy the tensors to memory that a GPU reads by itself."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        tensors = (self.src, self.src_lengths, self.tgt_in, self.tgt_out)
        src, src_lengths, tgt_in, tgt_out = map(change, tensors)
        return replace(self, src=src, src_lengths=src_lengths, tgt_in=tgt_in, tgt_out=tgt_out)


def pad(
    rows: Sequence[Ids],
    *,
    pad_id: int,
    bos: int | None = None,
    eos: int | None = None,
    round_to: int = 1,
) -> Tensor:
    """Stack rows of ids to (B, longest), padded on the right, with BOS before or EOS after each
    when given; the longest is rounded up to a multiple of `round_to`.
    """
    start = int(bos is not None)
    longest = max(len(row) for row in rows) + start + int(eos is not None)
    longest += -longest % round_to
    table = np.full((len(rows), longest), pad_id, dtype=np.int64)
    for i, row in enumerate(rows):
        end = start + len(row)
        table[i, start:end] = row
        if bos is not None:
            table[i, 0] = bos
        if eos is not None:
            table[i, end] = eos
    return torch.from_numpy(table)


def pad_source(
    rows: Sequence[Ids], tokenizer: Tokenizers, *, round_to: int = 1
) -> tuple[Tensor, Tensor]:
    """Return source ids with EOS (B, S) and their lengths (B,)."""
    src = pad(rows, pad_id=tokenizer.src.pad_id, eos=tokenizer.src.eos_id, round_to=round_to)
    return src, torch.tensor([len(row) + 1 for row in rows])


def make_batch(
    pairs: Sequence[tuple[Ids, Ids]], tokenizer: Tokenizers, *, round_to: int = 1
) -> Batch:
    """Pad pairs of ids without BOS and EOS to a `Batch`; S and T are multiples of `round_to`."""
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    src, src_lengths = pad_source(sources, tokenizer, round_to=round_to)
    pad_id, bos_id, eos_id = tokenizer.tgt.pad_id, tokenizer.tgt.bos_id, tokenizer.tgt.eos_id
    tgt_in = pad(targets, pad_id=pad_id, bos=bos_id, round_to=round_to)
    tgt_out = pad(targets, pad_id=pad_id, eos=eos_id, round_to=round_to)
    num_tokens = sum(len(row) + 1 for row in targets)
    return Batch(src, src_lengths, tgt_in, tgt_out, num_tokens, int(src_lengths.sum()))


def make_compiled_batch(
    pairs: Sequence[tuple[Ids, Ids]], tokenizer: Tokenizers, *, round_to: int
) -> Batch:
    """Pad pairs like `make_batch`, to sizes that a compiled model has one graph for.

    A pair alone gets a row of padding beside it, since torch compiles sizes of 1 apart; its source
    has one token, so that attention sees one.
    """
    batch = make_batch(pairs, tokenizer, round_to=round_to)
    if len(pairs) > 1:
        return batch
    src = F.pad(batch.src, (0, 0, 0, 1), value=tokenizer.src.pad_id)  # (2, S)
    tgt_in, tgt_out = (
        F.pad(ids, (0, 0, 0, 1), value=tokenizer.tgt.pad_id)
        for ids in (batch.tgt_in, batch.tgt_out)
    )  # 2 x (2, T)
    src_lengths = F.pad(batch.src_lengths, (0, 1), value=1)
    return replace(batch, src=src, src_lengths=src_lengths, tgt_in=tgt_in, tgt_out=tgt_out)
