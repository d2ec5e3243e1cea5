"""Selection of the best next tokens of a search, without sorting the whole vocabulary.

The vocabulary is divided into groups of 64 neighboring tokens. The C highest scores are in the C
groups with the highest maxima, so only these groups are sorted.
"""

# R live hypotheses, one row each; B sentences, W beams (see `BeamGrid`)
# V vocab, G groups of 64 tokens, C candidates

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nmt.model.fast.cache import BeamGrid

NEG_INF = float("-inf")
_GROUP_SIZE = 64  # of the order of sqrt(V), so that few groups and few tokens are compared


class Candidates(NamedTuple):
    """Hypotheses with one more token, best first, all (B, C)."""

    sums: Tensor  # log-probability of the whole hypothesis; -inf where there are fewer than C
    rows: Tensor  # the row of the hypothesis that is continued
    tokens: Tensor  # the new token
    log_probs: Tensor  # log-probability of the new token


def best_candidates(sums: Tensor, log_probs: Tensor, grid: BeamGrid, count: int) -> Candidates:
    """Return the candidates of each sentence with the highest sums.

    Among equal sums, lower rows come first, then lower tokens.

    Args:
        sums: log-probabilities of the hypotheses so far (R,).
        log_probs: log-probabilities of the next token (R, V).
        grid: which rows belong to which sentence.
        count: the number of candidates of a sentence, C.
    """
    # one more than `count`, to detect a tie between the last candidate and the next
    num_chosen = min(count + 1, grid.shape[1] * log_probs.size(1))
    # A stable sort is slower, so a CPU sorts stably only if there are ties. Checking for ties on a
    # GPU would wait for the device.
    is_stable = sums.device.type != "cpu"
    best = _select_candidates(sums, log_probs, grid, num_chosen, is_stable=is_stable)
    if not is_stable:
        is_equal = best.sums[:, 1:] == best.sums[:, :-1]  # to the candidate before
        is_tie = is_equal & (best.sums[:, 1:] > NEG_INF)
        if is_tie.any():
            stable = _select_candidates(sums, log_probs, grid, num_chosen, is_stable=True)
            has_tie = is_tie.any(dim=1, keepdim=True)  # (B, 1)
            best = Candidates(
                sums=torch.where(has_tie, stable.sums, best.sums),
                rows=torch.where(has_tie, stable.rows, best.rows),
                tokens=torch.where(has_tie, stable.tokens, best.tokens),
                log_probs=torch.where(has_tie, stable.log_probs, best.log_probs),
            )
    return Candidates(
        sums=best.sums[:, :count],
        rows=best.rows[:, :count],
        tokens=best.tokens[:, :count],
        log_probs=best.log_probs[:, :count],
    )


def most_likely_tokens(log_probs: Tensor) -> Tensor:
    """Return the most probable token (R,) of each row of (R, V): the lowest of equal tokens."""
    groups = _group_maxima(log_probs).argmax(dim=1)  # (R,)
    tokens = _tokens_of_groups(groups).clamp_(max=log_probs.size(1) - 1)  # (R, 64)
    best = log_probs.gather(1, tokens).argmax(dim=1, keepdim=True)  # (R, 1)
    return tokens.gather(1, best).squeeze(1)


def _select_candidates(
    sums: Tensor, log_probs: Tensor, grid: BeamGrid, count: int, *, is_stable: bool
) -> Candidates:
    """Return `count` candidates of each sentence; only `is_stable` guarantees the order of ties."""
    vocab_size = log_probs.size(1)
    maxima = _group_maxima(log_probs)  # (R, G)
    num_groups = maxima.size(1)
    # the highest sum within each group of each hypothesis
    bounds = grid.rows_to_grid(sums.unsqueeze(1) + maxima)  # (B, W, G)
    if not grid.is_full:
        bounds = bounds.masked_fill(grid.is_empty.unsqueeze(2), NEG_INF)
    bounds = bounds.flatten(1)  # (B, W * G)
    _, groups = _select_highest(bounds, min(count, bounds.size(1)), is_stable)
    groups = groups.sort(dim=1).values  # restore the order of rows and tokens, for ties
    beams = groups.div(num_groups, rounding_mode="floor")  # (B, C)
    rows = grid.rows.gather(1, beams)  # (B, C)
    tokens = _tokens_of_groups(groups % num_groups)  # (B, C, 64)
    index = rows.unsqueeze(2) * vocab_size + tokens.clamp(max=vocab_size - 1)  # (B, C, 64)
    token_log_probs = log_probs.view(-1).index_select(0, index.flatten()).view_as(index)
    totals = sums[rows].unsqueeze(2) + token_log_probs  # (B, C, 64)
    totals.masked_fill_(tokens >= vocab_size, NEG_INF)  # the last group may have fewer
    if not grid.is_full:
        totals.masked_fill_(grid.is_empty.gather(1, beams).unsqueeze(2), NEG_INF)
    best_sums, cells = _select_highest(totals.flatten(1), count, is_stable)  # (B, C)
    return Candidates(
        sums=best_sums,
        rows=rows.gather(1, cells.div(_GROUP_SIZE, rounding_mode="floor")),
        tokens=tokens.flatten(1).gather(1, cells),
        log_probs=token_log_probs.flatten(1).gather(1, cells),
    )


def _select_highest(values: Tensor, count: int, is_stable: bool) -> tuple[Tensor, Tensor]:
    """Return the `count` highest values of each row of (B, N), and their indices, both (B, C).

    With `is_stable`, equal values keep their order. Without it, `topk` is faster, but returns equal
    values in any order.
    """
    if not is_stable:
        return values.topk(count)
    highest, index = values.sort(dim=1, descending=True, stable=True)
    return highest[:, :count], index[:, :count]


def _group_maxima(log_probs: Tensor) -> Tensor:
    """Return the maximum of each group of tokens, (R, G); the last group may be smaller."""
    end = log_probs.size(1) // _GROUP_SIZE * _GROUP_SIZE
    remaining = log_probs[:, end:]
    maxima = log_probs[:, :end]
    if end:
        maxima = maxima.view(len(log_probs), -1, _GROUP_SIZE).amax(dim=2)
    if not remaining.size(1):
        return maxima
    return torch.cat([maxima, remaining.amax(dim=1, keepdim=True)], dim=1)


def _tokens_of_groups(groups: Tensor) -> Tensor:
    """Return the tokens (..., 64) of `groups` (...). Tokens of the last group may be V or more."""
    return groups.unsqueeze(-1) * _GROUP_SIZE + torch.arange(_GROUP_SIZE, device=groups.device)
