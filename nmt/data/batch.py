"""A batch of sentence pairs as padded tensors."""

# B batch, S source, T target; EOS is part of both lengths

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmt.data.tokenizer import Tokenizer

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
        """Copy the tensors to `device`."""
        names = ("src", "src_lengths", "tgt_in", "tgt_out")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **moved)


def pad(
    rows: Sequence[Ids], *, pad_id: int, bos: int | None = None, eos: int | None = None
) -> Tensor:
    """Stack rows of ids to (B, longest), padded on the right, with BOS before or EOS after each
    when given.
    """
    start = int(bos is not None)
    longest = max(len(row) for row in rows) + start + int(eos is not None)
    table = np.full((len(rows), longest), pad_id, dtype=np.int64)
    for i, row in enumerate(rows):
        end = start + len(row)
        table[i, start:end] = row
        if bos is not None:
            table[i, 0] = bos
        if eos is not None:
            table[i, end] = eos
    return torch.from_numpy(table)


def pad_source(rows: Sequence[Ids], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return source ids with EOS (B, S) and their lengths (B,)."""
    src = pad(rows, pad_id=tokenizer.pad_id, eos=tokenizer.eos_id)
    return src, torch.tensor([len(row) + 1 for row in rows])


def make_batch(pairs: Sequence[tuple[Ids, Ids]], tokenizer: Tokenizer) -> Batch:
    """Pad pairs of ids without BOS and EOS to a `Batch`."""
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    src, src_lengths = pad_source(sources, tokenizer)
    tgt_in = pad(targets, pad_id=tokenizer.pad_id, bos=tokenizer.bos_id)
    tgt_out = pad(targets, pad_id=tokenizer.pad_id, eos=tokenizer.eos_id)
    num_tokens = sum(len(row) + 1 for row in targets)
    return Batch(src, src_lengths, tgt_in, tgt_out, num_tokens, int(src_lengths.sum()))
