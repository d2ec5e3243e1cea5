"""Token-bucket batches: rows of similar length and bounded cost, and their padded tensors."""

# N pairs, B rows of a batch, S source; lengths are in tokens and count EOS

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmt.data import Lengths, Rows
from nmt.data.tokenizer import Tokenizers

Ids = Sequence[int] | np.ndarray[Any, Any]

MICRO_BATCH_TOKENS = 1024
"""Cost of what a CPU computes at a time of a batch: memory grows with it, and 768 is 2 to 4 %
slower.
"""


def batch_cost(lengths: Lengths) -> int:
    """Cost of rows with `lengths` (B, 2) as one batch: rows * longest side, padding included."""
    return len(lengths) * int(lengths.max())


def padding_share(lengths: Lengths, batches: list[Rows]) -> float:
    """Share of all source and target positions in `batches` that hold padding (0 to 1)."""
    real = sum(int(lengths[rows].sum()) for rows in batches)
    padded = sum(len(rows) * int(lengths[rows].max(axis=0).sum()) for rows in batches)
    return 1 - real / padded if padded else 0.0


def bucket(lengths: Lengths, max_tokens: int, order: Rows) -> list[Rows]:
    """Cut the pairs into batches of similar length, each of at most `max_tokens` by `batch_cost`.

    `order` holds the pairs, and breaks ties between those of the same lengths.
    """
    src, tgt = lengths[order].T  # (N,) each
    longest = np.maximum(src, tgt)
    by_length = np.lexsort((src, tgt, longest))  # by longest side, then target, then source
    rows, longest = order[by_length], longest[by_length]
    batches = []
    start = 0
    while start < len(rows):
        most = max_tokens // int(longest[start])  # no batch from here can have more rows
        costs = np.arange(1, most + 1)[: len(rows) - start] * longest[start : start + most]
        num_rows = int(np.searchsorted(costs, max_tokens, side="right"))
        batches.append(rows[start : start + num_rows])
        start += num_rows
    return batches


def pad(
    rows: Sequence[Ids], *, pad_id: int, bos: int | None = None, eos: int | None = None
) -> Tensor:
    """Stack ids to (B, longest), padded on the right, with BOS before or EOS after if given."""
    before, after = ([] if symbol is None else [symbol] for symbol in (bos, eos))
    rows = [[*before, *row, *after] for row in rows]
    table = np.full((len(rows), max(map(len, rows))), pad_id, dtype=np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return torch.from_numpy(table)


def pad_source(rows: Sequence[Ids], tokenizer: Tokenizers) -> tuple[Tensor, Tensor]:
    """Return source ids with EOS (B, S) and their lengths (B,)."""
    src = pad(rows, pad_id=tokenizer.src.pad_id, eos=tokenizer.src.eos_id)
    return src, torch.tensor([len(row) + 1 for row in rows])
