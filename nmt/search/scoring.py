"""Scores of hypotheses. docs/search.md derives the formulas."""

# N hypotheses, S source

from __future__ import annotations

import torch
from torch import Tensor

from nmt.config import Normalization, SearchConfig


def normalizer(length: float | Tensor, config: SearchConfig) -> float | Tensor:
    """Return the divisor of the log-probability of `length` tokens, EOS included.

    With `wu` it is ((5 + length) / 6)^alpha (Wu et al., 2016, equation 14).
    """
    if config.normalization is Normalization.wu:
        return ((5 + length) / 6) ** config.length_penalty
    if config.normalization is Normalization.average:
        return length
    return 1.0


def score(log_prob: float, length: int, config: SearchConfig, coverage: float = 0.0) -> float:
    """Return (log_prob + reward * length) / normalizer(length) + beta * coverage.

    Args:
        log_prob: sum over the tokens, in nats.
        length: number of tokens, EOS included.
        coverage: return value of `coverage_score`.
    """
    normalized = (log_prob + config.word_reward * length) / float(normalizer(length, config))
    return normalized + config.coverage_penalty * coverage


def min_log_prob(
    scores: Tensor, min_lengths: Tensor, config: SearchConfig, *, max_lengths: Tensor | None = None
) -> Tensor:
    """Return the log-probability above which a hypothesis can still exceed a score.

    The log-probability of a hypothesis can only fall and its coverage score is at most 0. The bound
    is therefore the minimum over the possible lengths l of

        g(l) = score * normalizer(l) - reward * l

    This minimum lies at the smallest length, at the largest length, or next to the zero of g'.

    Args:
        scores: the scores to exceed (N,), float64.
        min_lengths: smallest final length of each hypothesis, EOS included (N,), float64.
        max_lengths: largest final length (N,), float64; None means `min_lengths`.
    """
    alpha = config.length_penalty
    reward = config.word_reward
    lengths = [min_lengths]
    if max_lengths is not None:
        lengths.append(max_lengths)
        if config.normalization is Normalization.wu and reward and alpha not in (0, 1):
            # g' = score * alpha / 6 * ((5 + l) / 6)^(alpha - 1) - reward
            # `zeros` is NaN where g' has no zero
            zeros = 6 * (6 * reward / (scores * alpha)) ** (1 / (alpha - 1)) - 5
            zeros = zeros.nan_to_num(0.0, posinf=0.0).maximum(min_lengths).minimum(max_lengths)
            lengths += [zeros.floor(), zeros.ceil()]
    bounds = [scores * normalizer(length, config) - reward * length for length in lengths]
    return torch.stack(bounds).amin(dim=0)


def coverage_score(attention_sums: Tensor, num_words: Tensor) -> Tensor:
    """Return sum_i log(min(sum_j p_ij, 1)) of each hypothesis (Wu et al., 2016, equation 14), (N,).

    Args:
        attention_sums: attention to each source token, summed over the target tokens (N, S).
        num_words: number of source tokens without EOS (N,).
    """
    tiny = torch.finfo(attention_sums.dtype).tiny  # keeps the logarithm of 0 finite
    logs = attention_sums.clamp(tiny, 1.0).log()  # (N, S)
    is_word = torch.arange(logs.size(1), device=logs.device) < num_words.unsqueeze(1)  # (N, S)
    return logs.masked_fill(~is_word, 0.0).sum(dim=1)
