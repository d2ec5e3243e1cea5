"""Sampling: which tokens are drawn from, and the draw.

Every draw of a sentence has a source of randomness of its own, made from the seed, the source ids
and the number of the draw. So it depends on no neighbour, batch, position or device.
"""

# B sentences, V vocab; rows, the hypotheses alive: the draws of a sentence side by side

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.inference.hypotheses import NEVER, Task


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


class Sampler:
    """Draws the next token of every row."""

    def __init__(self, task: Task) -> None:
        self.config = task.config
        self.seeds = [
            row[:length]
            for row, length in zip(task.src.tolist(), task.src_lengths.tolist(), strict=True)
        ]
        self.generators: dict[tuple[int, int], np.random.Generator] = {}

    def __call__(self, log_probs: Tensor, sentences: Tensor) -> Tensor:
        """Choose from log-probabilities (rows, V) of `sentences` (rows,); return tokens (rows,)."""
        noise = np.empty(log_probs.shape, dtype=np.float32)  # (rows, V)
        for row, sentence in enumerate(sentences.tolist()):
            draw = row % self.config.beam_size
            # in float64, where no token of many thousands gets an exact 0 by chance
            uniform = self._generator(sentence, draw).standard_exponential(log_probs.size(1))
            noise[row] = -np.log(uniform)
        # the maximum of logits plus Gumbel noise is a draw from their softmax (Gumbel, 1954); other
        # than a sum of probabilities it does not turn over when these differ in the last digit
        gumbel = torch.from_numpy(noise).to(log_probs.device)
        return (narrow(log_probs, self.config) + gumbel).argmax(dim=1)

    def _generator(self, sentence: int, draw: int) -> np.random.Generator:
        key = (sentence, draw)
        if key not in self.generators:
            self.generators[key] = np.random.default_rng(
                [self.config.seed, draw, *self.seeds[sentence]]
            )
        return self.generators[key]
