"""Sentences as a padded tensor, for search."""

# B batch, S source; EOS is part of the lengths

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmt.data.tokenizer import Tokenizers

Ids = Sequence[int] | np.ndarray[Any, Any]


def pad(
    rows: Sequence[Ids],
    *,
    pad_id: int,
    bos: int | None = None,
    eos: int | None = None,
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


def pad_source(rows: Sequence[Ids], tokenizer: Tokenizers) -> tuple[Tensor, Tensor]:
    """Return source ids with EOS (B, S) and their lengths (B,)."""
    src = pad(rows, pad_id=tokenizer.src.pad_id, eos=tokenizer.src.eos_id)
    return src, torch.tensor([len(row) + 1 for row in rows])
