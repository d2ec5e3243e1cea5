"""The likeliest continuations, found without sorting the vocabulary: the best of many numbers are
among the groups with the highest maxima.
"""

# R rows, the live hypotheses; B sentences, W beams of the widest; V vocab, G groups of 64 tokens
# C count

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nmt.model.fast.cache import BeamGrid

NEG_INF = float("-inf")
_GROUP = 64  # of several thousand tokens there are about as many groups as tokens in the best few


class Candidates(NamedTuple):
    """Hypotheses with one more token, best first, all (B, C)."""

    sums: Tensor  # log-probability with the new token; minus infinity where there are fewer than C
    rows: Tensor  # of the hypotheses that they continue
    tokens: Tensor
    log_probs: Tensor  # of the new token


def best_candidates(sums: Tensor, log_probs: Tensor, grid: BeamGrid, count: int) -> Candidates:
    """Return the continuations of each sentence with the highest sums, among equals the first by
    row and token.

    Args:
        sums: log-probabilities of the hypotheses so far (R,).
        log_probs: of the next token (R, V).
        grid: says which rows are of one sentence.
        count: how many, at most.
    """
    wanted = min(count + 1, grid.shape[1] * log_probs.size(1))  # one more shows a tie at the last
    is_stable = sums.device.type != "cpu"  # a GPU sorts faster than it says whether it needs to
    found = _choose(sums, log_probs, grid, wanted, is_stable=is_stable)
    equal = (found.sums[:, 1:] == found.sums[:, :-1]) & (found.sums[:, 1:] > NEG_INF)
    if not is_stable and equal.any():
        exact = _choose(sums, log_probs, grid, wanted, is_stable=True)
        tied = equal.any(dim=1, keepdim=True)  # (B, 1)
        pairs = zip(exact, found, strict=True)
        found = Candidates(*(torch.where(tied, one, other) for one, other in pairs))
    return Candidates(*(column[:, :count] for column in found))


def likeliest(log_probs: Tensor) -> Tensor:
    """Return the most probable token of each row (R, V), the lowest id among equals, (R,)."""
    groups = _group_maxima(log_probs).argmax(dim=1)  # (R,)
    tokens = _members(groups).clamp_(max=log_probs.size(1) - 1)  # (R, 64)
    best = log_probs.gather(1, tokens).argmax(dim=1, keepdim=True)  # (R, 1)
    return tokens.gather(1, best).squeeze(1)


def _choose(
    sums: Tensor, log_probs: Tensor, grid: BeamGrid, count: int, *, is_stable: bool = False
) -> Candidates:
    vocab_size = log_probs.size(1)
    maxima = _group_maxima(log_probs)  # (R, G)
    num_groups = maxima.size(1)
    bounds = grid.spread(sums.unsqueeze(1) + maxima)  # (B, W, G)
    if not grid.is_full:
        bounds = bounds.masked_fill(grid.is_empty.unsqueeze(2), NEG_INF)
    bounds = bounds.flatten(1)  # (B, W * G)
    groups = _highest(bounds, min(count, bounds.size(1)), is_stable)[1].sort(dim=1).values
    beams = groups.div(num_groups, rounding_mode="floor")  # (B, C)
    rows = grid.rows.gather(1, beams)  # (B, C)
    tokens = _members(groups % num_groups)  # (B, C, 64)
    places = rows.unsqueeze(2) * vocab_size + tokens.clamp(max=vocab_size - 1)  # (B, C, 64)
    added = log_probs.view(-1).index_select(0, places.flatten()).view_as(places)
    totals = sums[rows].unsqueeze(2) + added  # (B, C, 64)
    totals.masked_fill_(tokens >= vocab_size, NEG_INF)  # the last group may have fewer
    if not grid.is_full:
        totals.masked_fill_(grid.is_empty.gather(1, beams).unsqueeze(2), NEG_INF)
    top, index = _highest(totals.flatten(1), count, is_stable)  # (B, C)
    rows = rows.gather(1, index.div(_GROUP, rounding_mode="floor"))
    tokens, added = (x.flatten(1).gather(1, index) for x in (tokens, added))
    return Candidates(top, rows, tokens, added)


def _highest(values: Tensor, count: int, is_stable: bool) -> tuple[Tensor, Tensor]:
    """Return the highest of each row (B, N), best first, and their places, both (B, C); of equals
    the first, or with topk, which is faster, any.
    """
    if not is_stable:
        return values.topk(count)
    top, index = values.sort(dim=1, descending=True, stable=True)
    return top[:, :count], index[:, :count]


def _group_maxima(log_probs: Tensor) -> Tensor:
    """Return the maximum of each 64 tokens, and of those left over, (R, G)."""
    end = log_probs.size(1) // _GROUP * _GROUP
    whole, rest = log_probs[:, :end], log_probs[:, end:]
    maxima = whole.view(len(whole), -1, _GROUP).amax(dim=2) if whole.size(1) else whole
    return torch.cat([maxima, rest.amax(dim=1, keepdim=True)], dim=1) if rest.size(1) else maxima


def _members(groups: Tensor) -> Tensor:
    """Return the tokens of groups (...), (..., 64); the last group may reach beyond the last."""
    return groups.unsqueeze(-1) * _GROUP + torch.arange(_GROUP, device=groups.device)
