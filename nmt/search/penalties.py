"""The score of a hypothesis, and what an unfinished one needs to reach a score.

Formulas and their derivation stand in docs/search.md. Nothing here knows models or search.
"""

# N hypotheses, S source

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nmt.config import Normalization, SearchConfig


def normalizer(length: Any, config: SearchConfig) -> Any:
    """Return what the log-probability of `length` tokens, EOS counted, is divided by; `length` is a
    number or a tensor. With `wu` it is ((5 + length) / 6)^alpha (Wu et al., 2016, equation 14).
    """
    if config.normalization is Normalization.wu:
        return ((5 + length) / 6) ** config.length_penalty
    return length if config.normalization is Normalization.average else 1


def score(log_prob: float, length: int, config: SearchConfig, coverage: float = 0.0) -> float:
    """Return (log_prob + reward * length) / normalizer(length) + beta * coverage.

    `log_prob` is in nats; `length` counts EOS; `coverage` comes from `coverage_of`.
    """
    total = (log_prob + config.word_reward * length) / float(normalizer(length, config))
    return total + config.coverage_penalty * coverage


def least_log_prob(scores: Tensor, first: Tensor, last: Tensor, config: SearchConfig) -> Tensor:
    """Return the log-probability that a live hypothesis must exceed to end with a score above each
    of `scores` (N,), when it can have `first` to `last` tokens then, both (N,); all in float64.

    Its log-probability can only fall and its coverage term is at most 0. So the bound is the least
    of g(l) = score * normalizer(l) - reward * l, at one of both ends or where g' is 0.
    """
    lengths = [first, last]
    alpha, reward = config.length_penalty, config.word_reward
    if config.normalization is Normalization.wu and reward and alpha not in (0, 1):
        # g' = score * alpha / 6 * ((5 + l) / 6)^(alpha - 1) - reward
        turn = 6 * (6 * reward / (scores * alpha)) ** (1 / (alpha - 1)) - 5  # NaN where g has none
        turn = turn.nan_to_num(0.0, posinf=0.0).maximum(first).minimum(last)
        lengths += [turn.floor(), turn.ceil()]
    bounds = [scores * normalizer(length, config) - reward * length for length in lengths]
    return torch.stack(bounds).amin(dim=0)


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
