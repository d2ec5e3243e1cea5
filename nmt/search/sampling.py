"""Sampling of tokens, reproducible for each sentence."""

# V vocab; rows, the live hypotheses, `beam_size` samples per sentence

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.model.fast.top import NEG_INF
from nmt.model.fast.transfer import send


class Sampler:
    """Draws the next token of every hypothesis.

    Each sample of a sentence has its own random generator, seeded with the seed, the key of the
    sentence, the number of the sample and the source ids.
    """

    def __init__(
        self, sources: Sequence[Sequence[int]], keys: Sequence[int], config: SearchConfig
    ) -> None:
        """`sources` are source ids with EOS; `keys` distinguish equal sources."""
        self.config = config
        self.generators: list[list[np.random.Generator]] = []
        for source, key in zip(sources, keys, strict=True):
            seeds = [[config.seed, key, sample, *source] for sample in range(config.beam_size)]
            self.generators.append([np.random.default_rng(seed) for seed in seeds])

    def draw(self, log_probs: Tensor, sentences: Tensor) -> Tensor:
        """Draw from log-probabilities (rows, V) of `sentences` (rows,); return tokens (rows,)."""
        noise = np.empty(log_probs.shape, dtype=np.float32)  # (rows, V)
        for row, sentence in enumerate(sentences.tolist()):
            generator = self.generators[sentence][row % self.config.beam_size]
            # float64, in which none of many thousand draws is exactly 0
            noise[row] = -np.log(generator.standard_exponential(log_probs.size(1)))
        # The maximum of logits plus Gumbel noise is a sample of their softmax (Gumbel, 1954). It is
        # less sensitive to rounding of the logits than a search in cumulative probabilities.
        gumbel = send(torch.from_numpy(noise), log_probs.device)
        return (truncate(log_probs, self.config) + gumbel).argmax(dim=1)


def truncate(log_probs: Tensor, config: SearchConfig) -> Tensor:
    """Return the logits to sample from (rows, V), with minus infinity for excluded tokens.

    Divides by the temperature, keeps the `top_k` most probable tokens (Fan et al., 2018), and of
    these, renormalized, the most probable that reach `top_p` (Holtzman et al., 2020). Tokens as
    probable as the last one kept stay too.
    """
    logits = log_probs / config.temperature  # (rows, V)
    if 0 < config.top_k < logits.size(1):
        lowest = logits.topk(config.top_k).values[:, -1:]  # (rows, 1)
        logits = logits.masked_fill(logits < lowest, NEG_INF)
    if config.top_p < 1:
        ranked = logits.sort(dim=1, descending=True).values  # (rows, V)
        probs = ranked.softmax(dim=1)  # (rows, V)
        probs_before = probs.cumsum(dim=1) - probs  # (rows, V), total of the more probable tokens
        is_excluded = probs_before >= config.top_p
        lowest = ranked.masked_fill(is_excluded, float("inf")).amin(dim=1)  # (rows,)
        lowest = lowest.unsqueeze(1)  # (rows, 1)
        logits = logits.masked_fill(logits < lowest, NEG_INF)
    return logits


def count_repeats(rows: Iterable[Sequence[int]]) -> list[int]:
    """Return for each row of ids the number of equal rows before it.

    As keys, these give equal sentences different samples; other sentences' samples do not depend on
    their position.
    """
    counters: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
    return [next(counters[tuple(row)]) for row in rows]
