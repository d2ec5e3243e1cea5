"""The score of a hypothesis, and the best score that an unfinished one can still reach.

Formulas and their derivation stand in docs/search.md. Nothing here knows models or search.
"""

# N hypotheses, S source

from __future__ import annotations

import math

import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.options import Normalization


def length_penalty(length: int, alpha: float) -> float:
    """Return ((5 + length) / 6)^alpha (Wu et al., 2016, equation 14); `length` counts EOS."""
    return float(((5 + length) / 6) ** alpha)


def score(log_prob: float, length: int, config: SearchConfig, coverage: float = 0.0) -> float:
    """Return (log_prob + reward * length) / normaliser(length) + beta * coverage.

    `log_prob` is in nats; `length` counts EOS; `coverage` comes from `coverage_of`.
    """
    total = log_prob + config.word_reward * length
    if config.normalization is Normalization.wu:
        total /= length_penalty(length, config.length_penalty)
    elif config.normalization is Normalization.average:
        total /= length
    return total + config.coverage_penalty * coverage


def best_score(log_prob: float, first: int, last: int, config: SearchConfig) -> float:
    """Return the highest score that a hypothesis can still end with, `first` to `last` tokens long.

    Its log-probability can only fall from `log_prob` and its coverage term is at most 0, so the
    bound is the maximum over the length alone: at one of both ends, or where the derivative is 0.
    """
    lengths = {first, last}
    alpha, reward = config.length_penalty, config.word_reward
    slope = reward * (1 - alpha)
    if config.normalization is Normalization.wu and slope:
        # d score / d length has the sign of 5 reward - alpha log_prob + slope * length
        peak = (alpha * log_prob - 5 * reward) / slope
        if first < peak < last:
            lengths |= {math.floor(peak), math.ceil(peak)}
    return max(score(log_prob, length, config) for length in lengths)


def coverage_of(attended: Tensor, num_words: Tensor) -> Tensor:
    """Return sum_i log(min(sum_j p_ij, 1)) of each hypothesis, (N,) (Wu et al., 2016, equation 14).

    Args:
        attended: attention that each source token got from all target tokens (N, S).
        num_words: source tokens of each, without EOS (N,).
    """
    tiny = torch.finfo(attended.dtype).tiny  # the logarithm of an unseen token stays finite
    logs = attended.clamp(tiny, 1.0).log()  # (N, S)
    is_word = torch.arange(attended.size(1), device=attended.device) < num_words.unsqueeze(1)
    return logs.masked_fill(~is_word, 0.0).sum(dim=1)
