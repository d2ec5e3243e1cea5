"""One token at a time, without a beam: greedy search and sampling."""

# B live sentences, K draws of each (1 when greedy), V vocab; rows = B * K, all draws of a sentence

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nmt.model.fast.top import likeliest
from nmt.search.hypotheses import Hypothesis, Live, Task
from nmt.search.stepper import Stepper
from nmt.search.stepping import advance, begin

Choice = Callable[[Tensor, Tensor], Tensor]
"""Takes log-probabilities (rows, V) and the sentence of each row; returns tokens (rows,)."""


def greedy(log_probs: Tensor, sentences: Tensor) -> Tensor:
    """Choose the most probable token, the lowest id among equals."""
    return likeliest(log_probs)


def walk(stepper: Stepper, task: Task, choose: Choice, draws: int) -> list[list[Hypothesis]]:
    """Return `draws` hypotheses a sentence, in the order drawn."""
    found: list[dict[int, Hypothesis]] = [{} for _ in task.limits]
    limits = torch.tensor(task.limits, device=stepper.device)
    live, state = begin(stepper, task)
    if draws > 1:
        rows = torch.arange(len(live), device=stepper.device).repeat_interleave(draws)
        live, state = live.select(rows), stepper.reorder(state, rows)
    while len(live):
        log_probs, live = advance(stepper, state, live, task)  # (B * K, V)
        tokens = choose(log_probs, live.sentences)  # (B * K,)
        chosen = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)  # (B * K,)
        live = live.extend(live.sums + chosen, tokens, chosen)
        is_over = (tokens == task.ids.eos) | (limits[live.sentences] == live.length)  # (B * K,)
        over = is_over.nonzero().squeeze(1)
        if not len(over):
            continue
        _collect(live.select(over), over.tolist(), found, draws, task)
        numbers = live.sentences.tolist()
        going = [row for row, number in enumerate(numbers) if len(found[number]) < draws]
        rows = torch.tensor(going, dtype=torch.long, device=stepper.device)
        if going and len(going) < len(numbers):
            state = stepper.reorder(state, rows)
        live = live.select(rows)
    return [[row[draw] for draw in range(draws)] for row in found]


def _collect(
    over: Live, rows: list[int], found: list[dict[int, Hypothesis]], draws: int, task: Task
) -> None:
    """Note the draws that are over; one that was before stays as it was while others go on."""
    for row, (sentence, hypothesis) in zip(rows, task.close(over), strict=True):
        found[sentence].setdefault(row % draws, hypothesis)
