"""The likeliest continuations, found without sorting the vocabulary: the best of many numbers are
among the groups with the highest maxima.
"""

# B sentences, K beams, V vocab, G groups of 64 tokens, C count; rows = B * K

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Best = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Takes values (B, N) and a count C; returns the C highest of each row, best first, and where."""

NEVER = float("-inf")
_GROUP = 64  # of several thousand tokens there are about as many groups as tokens in the best few


def best_continuations(sums: Tensor, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the highest totals of each sentence (B, C) and their places among its K * V, among
    equals the first.

    Args:
        sums: log-probabilities of the hypotheses so far (B, K).
        log_probs: of the next token (B * K, V).
        count: how many, at most; there may be fewer continuations.
    """
    (batch, beams), vocab_size = sums.shape, log_probs.size(1)
    wanted = min(count + 1, beams * vocab_size)  # one more shows whether the last is a tie
    top, places = _choose(sums, log_probs, wanted, _topk)
    equal = (top[:, 1:] == top[:, :-1]) & (top[:, 1:] > NEVER)
    if equal.any():
        tied = equal.any(dim=1).nonzero().squeeze(1)
        their_probs = log_probs.view(batch, beams, -1)[tied].flatten(0, 1)
        top[tied], places[tied] = _choose(sums[tied], their_probs, wanted, _stable)
    return top[:, :count], places[:, :count]


def likeliest(log_probs: Tensor) -> Tensor:
    """Return the most probable token of each row (B, V), the lowest id among equals, (B,)."""
    groups = _group_maxima(log_probs).argmax(dim=1)  # (B,)
    tokens = _members(groups).clamp_(max=log_probs.size(1) - 1)  # (B, 64)
    best = log_probs.gather(1, tokens).argmax(dim=1, keepdim=True)  # (B, 1)
    return tokens.gather(1, best).squeeze(1)


def _choose(sums: Tensor, log_probs: Tensor, count: int, best: Best) -> tuple[Tensor, Tensor]:
    """Return the highest totals of each sentence (B, C) and their places, as `best` chooses."""
    (batch, beams), vocab_size = sums.shape, log_probs.size(1)
    maxima = _group_maxima(log_probs).view(batch, beams, -1)  # (B, K, G)
    num_groups = maxima.size(2)
    bounds = (sums.unsqueeze(2) + maxima).flatten(1)  # (B, K * G)
    groups = best(bounds, min(count, bounds.size(1)))[1].sort(dim=1).values  # (B, C)
    beam = groups.div(num_groups, rounding_mode="floor")  # (B, C)
    tokens = _members(groups % num_groups)  # (B, C, 64)
    places = beam.unsqueeze(2) * vocab_size + tokens.clamp(max=vocab_size - 1)  # (B, C, 64)
    added = log_probs.view(batch, -1).gather(1, places.flatten(1)).view_as(places)
    totals = sums.gather(1, beam).unsqueeze(2) + added
    totals.masked_fill_(tokens >= vocab_size, NEVER)  # the last group may have fewer
    top, index = best(totals.flatten(1), count)
    return top, places.flatten(1).gather(1, index)


def _topk(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    top, index = values.topk(count)  # of equals it takes any
    return top, index


def _stable(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    top, index = values.sort(dim=1, descending=True, stable=True)
    return top[:, :count], index[:, :count]


def _group_maxima(log_probs: Tensor) -> Tensor:
    """Return the maximum of each 64 tokens, and of those left over, (rows, G)."""
    end = log_probs.size(1) // _GROUP * _GROUP
    whole, rest = log_probs[:, :end], log_probs[:, end:]
    maxima = whole.view(len(whole), -1, _GROUP).amax(dim=2) if whole.size(1) else whole
    return torch.cat([maxima, rest.amax(dim=1, keepdim=True)], dim=1) if rest.size(1) else maxima


def _members(groups: Tensor) -> Tensor:
    """Return the tokens of groups (...), (..., 64); the last group may reach beyond the last."""
    return groups.unsqueeze(-1) * _GROUP + torch.arange(_GROUP, device=groups.device)
