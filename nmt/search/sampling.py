"""Sampling: which tokens are drawn from, and the draw.

Every draw of a sentence has a source of randomness of its own, made from the seed, the source ids,
the number of the draw and a key that tells equal sentences apart. So it depends on no neighbour,
batch or device.
"""

# B sentences, V vocab; rows, the hypotheses alive: the draws of a sentence side by side

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.search.hypotheses import NEVER, Task


def narrow(log_probs: Tensor, config: SearchConfig) -> Tensor:
    """Return the logits (rows, V) to draw from: divided by the temperature, then minus infinity for
    all but the `top_k` likeliest, then for all but the likeliest with a share of `top_p` in what is
    left (Fan et al., 2018; Holtzman et al., 2020). Tokens as likely as the last one kept stay too.
    """
    logits = log_probs / config.temperature  # (rows, V)
    if 0 < config.top_k < logits.size(1):
        least = logits.topk(config.top_k).values[:, -1:]  # (rows, 1)
        logits = logits.masked_fill(logits < least, NEVER)
    if config.top_p < 1:
        ranked = logits.sort(dim=1, descending=True).values  # (rows, V)
        shares = ranked.softmax(dim=1)
        before = shares.cumsum(dim=1) - shares  # share of the likelier ones
        least = ranked.masked_fill(before >= config.top_p, float("inf")).amin(dim=1, keepdim=True)
        logits = logits.masked_fill(logits < least, NEVER)
    return logits


def occurrences(rows: Iterable[Sequence[int]]) -> list[int]:
    """Say of each row of ids how many equal rows stand before it.

    As keys they give equal sentences draws of their own, and all others none that depend on where
    they stand.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    keys = []
    for row in map(tuple, rows):
        keys.append(seen[row])
        seen[row] += 1
    return keys


class Sampler:
    """Draws the next token of every row."""

    def __init__(self, task: Task) -> None:
        self.config = task.config
        columns = zip(task.keys, task.src.tolist(), task.src_lengths.tolist(), strict=True)
        self.generators = [
            [
                np.random.default_rng([self.config.seed, key, draw, *row[:length]])
                for draw in range(self.config.beam_size)
            ]
            for key, row, length in columns
        ]

    def __call__(self, log_probs: Tensor, sentences: Tensor) -> Tensor:
        """Choose from log-probabilities (rows, V) of `sentences` (rows,); return tokens (rows,)."""
        noise = np.empty(log_probs.shape, dtype=np.float32)  # (rows, V)
        for row, sentence in enumerate(sentences.tolist()):
            generator = self.generators[sentence][row % self.config.beam_size]
            # in float64, where no token of many thousands gets an exact 0 by chance
            noise[row] = -np.log(generator.standard_exponential(log_probs.size(1)))
        # the maximum of logits plus Gumbel noise is a draw from their softmax (Gumbel, 1954); other
        # than a sum of probabilities it does not turn over when these differ in the last digit
        gumbel = torch.from_numpy(noise).to(log_probs.device)
        return (narrow(log_probs, self.config) + gumbel).argmax(dim=1)
