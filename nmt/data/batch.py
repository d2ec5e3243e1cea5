"""Divide pairs into batches of similar length and bounded cost, and pad them to tensors."""

# N pairs, B pairs of a batch, S source tokens; lengths are in tokens and count EOS

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
"""Approximate cost of a micro-batch on a CPU. A larger one takes more memory. Training with 768 is
2 to 4 % slower.
"""


def batch_cost(lengths: Lengths) -> int:
    """Return the number of positions, with padding, of the larger side of a batch.

    `lengths` (B, 2) has the source and target length of each pair.
    """
    return len(lengths) * int(lengths.max())


def padding_share(lengths: Lengths, batches: list[Rows]) -> float:
    """Return the share of padding among all source and target positions in `batches` (0 to 1)."""
    num_tokens = sum(int(lengths[rows].sum()) for rows in batches)
    num_positions = 0
    for rows in batches:
        src_width, tgt_width = lengths[rows].max(axis=0).tolist()
        num_positions += len(rows) * (src_width + tgt_width)
    if num_positions == 0:
        return 0.0
    return 1 - num_tokens / num_positions


def bucket_by_length(lengths: Lengths, max_tokens: int, order: Rows) -> list[Rows]:
    """Divide the pairs `order` into batches of similar length.

    The cost of a batch is at most `max_tokens`, so no pair may be longer. Pairs of equal lengths
    keep their order.
    """
    src, tgt = lengths[order].T  # (N,) each
    longest = np.maximum(src, tgt)
    by_length = np.lexsort((src, tgt, longest))  # sorts by longest side, then target, then source
    rows = order[by_length]
    longest = longest[by_length]
    batches = []
    start = 0
    while start < len(rows):
        # more rows cannot fit, since the rows after `start` are not shorter
        max_rows = max_tokens // int(longest[start])
        next_longest = longest[start : start + max_rows]
        # cost of a batch of the next 1, 2, ... rows: their number times the longest, the last one
        batch_costs = np.arange(1, len(next_longest) + 1) * next_longest
        num_rows = int(np.searchsorted(batch_costs, max_tokens, side="right"))
        batches.append(rows[start : start + num_rows])
        start += num_rows
    return batches


def pad(
    rows: Sequence[Ids], *, pad_id: int, bos: int | None = None, eos: int | None = None
) -> Tensor:
    """Stack rows of ids to (B, longest row), padded on the right.

    Each row gets the id `bos` at its start and the id `eos` at its end, if these are given.
    """
    prefix = [] if bos is None else [bos]
    suffix = [] if eos is None else [eos]
    width = max(map(len, rows)) + len(prefix) + len(suffix)
    padded = np.full((len(rows), width), pad_id, dtype=np.int64)
    for i, row in enumerate(rows):
        ids = [*prefix, *row, *suffix]
        padded[i, : len(ids)] = ids
    return torch.from_numpy(padded)


def pad_source(rows: Sequence[Ids], tokenizers: Tokenizers) -> tuple[Tensor, Tensor]:
    """Return source ids with EOS (B, S) and their lengths (B,)."""
    src = pad(rows, pad_id=tokenizers.src.pad_id, eos=tokenizers.src.eos_id)
    return src, torch.tensor([len(row) + 1 for row in rows])
