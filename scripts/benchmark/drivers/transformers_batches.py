"""Batches of ids as tensors, for both drivers of Hugging Face transformers."""

from __future__ import annotations

import torch

PAD = 0
BOS = 2
EOS = 3


def pad(rows: list[list[int]]) -> torch.Tensor:
    """Stack rows of ids to a tensor (rows, longest)."""
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
