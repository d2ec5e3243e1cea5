"""Cuts pairs or sentences into token-bucket batches: of similar length, and of bounded cost.

It knows lengths alone, neither text nor files.
"""

# N pairs; lengths are in tokens and count EOS

from __future__ import annotations

from typing import Any

import numpy as np

Lengths = np.ndarray[Any, np.dtype[Any]]  # (N, 2), uint16, or int32 above its range
Rows = np.ndarray[Any, np.dtype[np.int64]]

CPU_PIECE_TOKENS = 1024
"""Cost of what a processor computes at a time of a batch: memory grows with it, and 768 is 2 to 4 %
slower.
"""


def batch_cost(lengths: Lengths) -> int:
    """Cost of rows with `lengths` (B, 2) as one batch: rows * longest side, padding included."""
    return len(lengths) * int(lengths.max())


def padding_share(lengths: Lengths, batches: list[Rows]) -> float:
    """Share of all source and target positions in `batches` that hold padding (0 to 1)."""
    real = sum(int(lengths[rows].sum()) for rows in batches)
    padded = sum(len(rows) * int(lengths[rows].max(axis=0).sum()) for rows in batches)
    return 1 - real / padded


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
