"""One token at a time, without a beam: greedy search and sampling."""

# B live sentences, K draws of each (1 when greedy), V vocab; rows = B * K

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nmt.inference.hypotheses import Hypothesis, Live, Task
from nmt.inference.stepper import Stepper
from nmt.inference.stepping import advance, begin
from nmt.inference.top import likeliest

Choice = Callable[[Tensor, Tensor], Tensor]
"""Takes log-probabilities (rows, V) and the sentence of each row; returns tokens (rows,)."""


def greedy(log_probs: Tensor, sentences: Tensor) -> Tensor:
    """Choose the most probable token, the lowest id among equals."""
    return likeliest(log_probs)


def walk(stepper: Stepper, task: Task, choose: Choice, draws: int) -> list[list[Hypothesis]]:
    """Return `draws` hypotheses a sentence, in the order drawn."""
    found: list[dict[int, Hypothesis]] = [{} for _ in task.limits]
    live, state = begin(stepper, task)
    if draws > 1:
        rows = torch.arange(len(live), device=live.sums.device).repeat_interleave(draws)
        live, state = live.select(rows), stepper.reorder(state, rows, draws)
    sentences = list(range(len(found)))  # those that go on
    while sentences:
        log_probs, live = advance(stepper, state, live, task)  # (B * K, V)
        tokens = choose(log_probs, live.sentences)  # (B * K,)
        chosen = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)  # (B * K,)
        live = live.extend(live.sums + chosen, tokens, chosen)
        _collect(live, found, draws, task)
        going = [i for i, sentence in enumerate(sentences) if len(found[sentence]) < draws]
        if going and len(going) < len(sentences):
            kept = torch.tensor(going, device=tokens.device)
            rows = (kept.unsqueeze(1) * draws + torch.arange(draws, device=kept.device)).flatten()
            live, state = live.select(rows), stepper.reorder(state, rows, draws)
        sentences = [sentences[i] for i in going]
    return [[row[draw] for draw in range(draws)] for row in found]


def _collect(live: Live, found: list[dict[int, Hypothesis]], draws: int, task: Task) -> None:
    """Take the draws that end now; one that has ended stays as it was while others go on."""
    numbers, newest = live.sentences.tolist(), live.tokens[:, -1].tolist()
    done = [
        row
        for row, (sentence, token) in enumerate(zip(numbers, newest, strict=True))
        if row % draws not in found[sentence]
        and (token == task.ids.eos or live.length == task.limits[sentence])
    ]
    if not done:
        return
    rows = torch.tensor(done, device=live.tokens.device)
    for row, (sentence, hypothesis) in zip(done, task.close(live.select(rows)), strict=True):
        found[sentence][row % draws] = hypothesis
