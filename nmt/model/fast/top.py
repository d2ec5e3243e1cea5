"""Selection of the best next tokens of a search, without sorting the whole vocabulary.

The vocabulary is divided into groups of 64 neighboring tokens. To find the C best tokens, only the
C groups with the highest maxima are searched. This suffices, since their maxima are C tokens that
are at least as good as any token of another group.
"""

# R live hypotheses, one row each; V vocab, G groups of 64 tokens
# C candidates of a sentence, S groups of a sentence that are searched
# A `BeamGrid` maps rows (R, ...) to a grid (B, W, ...) of B sentences and W beams. In each cell,
# `grid.rows` (B, W) has the row, and `grid.is_empty` (B, W) says whether the cell has none.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nmt.model.fast.cache import BeamGrid

NEG_INF = float("-inf")
_GROUP_SIZE = 64  # near sqrt(V), so that neither the groups nor the tokens of a group are many


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
    num_continuations = grid.shape[1] * log_probs.size(1)  # of a sentence with W hypotheses
    # one more than `count`, to detect a tie between the last candidate and the next
    num_candidates = min(count + 1, num_continuations)
    # Only a stable selection orders equal sums as promised, but it is slower. So on a CPU, the
    # selection is stable only if there is a tie. On a GPU, it is always stable, since looking for
    # ties would wait for the device.
    is_stable = sums.device.type != "cpu"
    best = _select_candidates(sums, log_probs, grid, num_candidates, is_stable=is_stable)
    if not is_stable:
        # If a group was left out whose maximum equals a candidate, the candidates after this one
        # are equal to it, too. So a tie between groups is also a tie between candidates.
        is_equal = best.sums[:, 1:] == best.sums[:, :-1]  # to the candidate before
        is_tie = is_equal & (best.sums[:, 1:] > NEG_INF)
        if is_tie.any():
            stable = _select_candidates(sums, log_probs, grid, num_candidates, is_stable=True)
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
    """Return the most probable token (R,) of each row of `log_probs` (R, V).

    If several tokens are equally probable, returns the lowest.
    """
    groups = _group_maxima(log_probs).argmax(dim=1)  # (R,)
    tokens = _tokens_of_groups(groups)  # (R, 64)
    # the last group may be smaller than 64: replace tokens beyond the vocabulary by the last token
    tokens.clamp_(max=log_probs.size(1) - 1)
    best_index = log_probs.gather(1, tokens).argmax(dim=1, keepdim=True)  # (R, 1), in the group
    return tokens.gather(1, best_index).squeeze(1)


def _select_candidates(
    sums: Tensor, log_probs: Tensor, grid: BeamGrid, count: int, *, is_stable: bool
) -> Candidates:
    """Return the `count` best candidates of each sentence.

    Equal sums are in the order of `best_candidates` only with `is_stable`.
    """
    vocab_size = log_probs.size(1)
    maxima = _group_maxima(log_probs)  # (R, G)
    num_groups = maxima.size(1)
    # the highest sum within each group of each hypothesis
    group_sums = grid.rows_to_grid(sums.unsqueeze(1) + maxima)  # (B, W, G)
    if not grid.is_full:
        group_sums = group_sums.masked_fill(grid.is_empty.unsqueeze(2), NEG_INF)
    group_sums = group_sums.flatten(1)  # (B, W * G)
    num_searched = min(count, group_sums.size(1))  # S
    # indices of the best groups in `group_sums`, each w * G + g, (B, S)
    _, group_index = _select_highest(group_sums, num_searched, is_stable)
    # ascending, so that equal sums are in the order of their rows and tokens
    group_index = group_index.sort(dim=1).values
    beams = group_index.div(num_groups, rounding_mode="floor")  # (B, S), w of each group
    groups = group_index % num_groups  # (B, S), g of each group
    rows = grid.rows.gather(1, beams)  # (B, S)
    tokens = _tokens_of_groups(groups)  # (B, S, 64)
    # indices into the flattened log-probabilities, R * V
    flat_index = rows.unsqueeze(2) * vocab_size + tokens.clamp(max=vocab_size - 1)  # (B, S, 64)
    token_log_probs = log_probs.view(-1).index_select(0, flat_index.flatten())
    token_log_probs = token_log_probs.view_as(flat_index)  # (B, S, 64)
    token_sums = sums[rows].unsqueeze(2) + token_log_probs  # (B, S, 64)
    token_sums.masked_fill_(tokens >= vocab_size, NEG_INF)  # the last group may have fewer tokens
    if not grid.is_full:
        token_sums.masked_fill_(grid.is_empty.gather(1, beams).unsqueeze(2), NEG_INF)
    # the best of the S * 64 tokens of a sentence, and their indices, (B, C) each
    best_sums, best_index = _select_highest(token_sums.flatten(1), count, is_stable)
    best_groups = best_index.div(_GROUP_SIZE, rounding_mode="floor")  # (B, C), indices into S
    return Candidates(
        sums=best_sums,
        rows=rows.gather(1, best_groups),
        tokens=tokens.flatten(1).gather(1, best_index),
        log_probs=token_log_probs.flatten(1).gather(1, best_index),
    )


def _select_highest(values: Tensor, count: int, is_stable: bool) -> tuple[Tensor, Tensor]:
    """Return the `count` highest values of each row of (B, N) and their indices, (B, count) each.

    With `is_stable`, equal values keep their order. Without it, `topk` is faster, but returns equal
    values in any order.
    """
    if not is_stable:
        return values.topk(count)
    highest, index = values.sort(dim=1, descending=True, stable=True)
    return highest[:, :count], index[:, :count]


def _group_maxima(log_probs: Tensor) -> Tensor:
    """Return the maximum of each group of tokens, (R, G); the last group may be smaller."""
    num_rows, vocab_size = log_probs.shape
    num_full_groups = vocab_size // _GROUP_SIZE
    end = num_full_groups * _GROUP_SIZE
    maxima = log_probs.new_empty(num_rows, 0)  # of the full groups
    if num_full_groups:
        full_groups = log_probs[:, :end].view(num_rows, num_full_groups, _GROUP_SIZE)
        maxima = full_groups.amax(dim=2)
    if end == vocab_size:
        return maxima
    last_maximum = log_probs[:, end:].amax(dim=1, keepdim=True)  # (R, 1)
    return torch.cat([maxima, last_maximum], dim=1)


def _tokens_of_groups(groups: Tensor) -> Tensor:
    """Return the tokens (..., 64) of the groups with the indices `groups` (...).

    Tokens of the last group may be V or more.
    """
    return groups.unsqueeze(-1) * _GROUP_SIZE + torch.arange(_GROUP_SIZE, device=groups.device)
