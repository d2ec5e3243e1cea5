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
_MICRO_BATCH_TIME = 60.0
"""Fixed time of a micro-batch on a CPU, as a multiple of the time of one token."""
_ATTENTION_TIME = 0.002
"""Time of attention for a pair of positions, including padding, as a multiple of the time of one
token.
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
    by_length = _sort_by_length(lengths[order])
    rows = order[by_length]
    longest = lengths[rows].max(axis=1)
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


def divide_by_time(lengths: Lengths, max_tokens: int) -> list[Rows]:
    """Divide a batch into the micro-batches that probably take the least time on a CPU.

    Attention pads to the longest pair of a micro-batch, so a long pair slows down the others. But
    each micro-batch also takes a time that does not depend on its size. Of all ways to cut the
    pairs, sorted by length, dynamic programming finds the one with the least total time. The longer
    sides of a micro-batch have at most `max_tokens` tokens, unless it is a single pair.

    Returns:
        the indices of the pairs of each micro-batch, shortest pairs first.
    """
    order = _sort_by_length(lengths)
    longest = lengths[order].max(axis=1).astype(np.int64)
    # Item i of these arrays is about the i shortest pairs: the number of their tokens, the least
    # total time of their micro-batches, and the start of the last micro-batch.
    num_tokens = np.concatenate([[0], np.cumsum(longest)])
    total_times = np.zeros(len(order) + 1)
    last_starts = np.zeros(len(order) + 1, dtype=np.int64)
    for end in range(1, len(order) + 1):
        # possible starts of a micro-batch that ends before the pair `end`
        first_start = int(np.searchsorted(num_tokens, num_tokens[end] - max_tokens))
        starts = np.arange(min(first_start, end - 1), end)
        num_pairs = end - starts
        width = longest[end - 1]
        attention_sizes = num_pairs * width**2
        times = total_times[starts] + _MICRO_BATCH_TIME + _ATTENTION_TIME * attention_sizes
        fastest = times.argmin()
        total_times[end] = times[fastest]
        last_starts[end] = starts[fastest]
    micro_batches: list[Rows] = []
    end = len(order)
    while end > 0:
        start = int(last_starts[end])
        micro_batches.insert(0, order[start:end])
        end = start
    return micro_batches


def _sort_by_length(lengths: Lengths) -> Rows:
    """Return the order of pairs by their longer side, then by target and by source (N,)."""
    src, tgt = lengths.T  # (N,) each
    longest = np.maximum(src, tgt)
    order: Rows = np.lexsort((src, tgt, longest))
    return order


def pad(
    rows: Sequence[Ids], *, pad_id: int, bos: int | None = None, eos: int | None = None
) -> Tensor:
    """Stack rows of ids to (B, longest row), padded on the right.

    Unless they are None, adds the id `bos` at the start of each row and the id `eos` at its end.
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
