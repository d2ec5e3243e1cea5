"""Beam search: the K most probable hypotheses of each sentence are kept alive.

Every sentence is searched as if it were alone: its beam, its length limit and its end depend on no
neighbour.
"""

# B live sentences, K beams, V vocab, S source; rows = B * K

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nmt.inference.hypotheses import NEVER, Hypothesis, Live, Task
from nmt.inference.penalties import best_score
from nmt.inference.stepper import Stepper
from nmt.inference.stepping import advance, begin


def beam_search(stepper: Stepper, task: Task) -> list[list[Hypothesis]]:
    """Return up to `beam_size` hypotheses a sentence, best first, finished ones before others."""
    size = task.config.beam_size
    pools = [_Pool(size, task, sentence) for sentence in range(len(task.limits))]
    sentences = list(range(len(pools)))  # those that go on
    live, state = begin(stepper, task)
    while sentences:
        log_probs, live = advance(stepper, state, live, task)  # (B * K, V)
        ended, live, rows = _extend(live, log_probs, len(sentences), size, task.ids.eos)
        for sentence, hypothesis in task.close(ended) if len(ended) else ():
            pools[sentence].add(hypothesis)
        going = _go_on(live, [pools[sentence] for sentence in sentences], task)
        beams = len(live) // len(sentences)
        if len(going) < len(sentences):
            sentences = [sentences[i] for i in going]
            kept = torch.tensor(going, dtype=torch.long, device=rows.device)
            kept = (kept.unsqueeze(1) * beams + torch.arange(beams, device=rows.device)).flatten()
            live, rows = live.select(kept), rows[kept]
        if sentences:
            state = stepper.reorder(state, rows, beams)
    return [pool.kept for pool in pools]


@dataclass
class _Pool:
    """The finished hypotheses of one sentence, of which the `size` best are kept."""

    size: int
    task: Task
    sentence: int
    kept: list[Hypothesis] = field(default_factory=list)

    def add(self, hypothesis: Hypothesis) -> None:
        self.kept.append(hypothesis)
        self.kept.sort(key=lambda h: (h.finished, h.score), reverse=True)  # stable: first come
        del self.kept[self.size :]

    def is_closed(self, best_live: float, length: int) -> bool:
        """Say whether no hypothesis of `length` tokens can still get in, when the best has the
        log-probability `best_live`.
        """
        if len(self.kept) < self.size:
            return False
        first = max(length + 1, self.task.earliest[self.sentence])
        last = self.task.limits[self.sentence]
        return best_score(best_live, first, last, self.task.config) <= self.kept[-1].score


def _extend(
    live: Live, log_probs: Tensor, batch: int, size: int, eos: int
) -> tuple[Live, Live, Tensor]:
    """Return the hypotheses that end, those that go on, and the rows of the step that the latter
    come from.

    A hypothesis ends when EOS is among the K best continuations of its sentence. Of 2 K
    continuations at most K end, so that K can go on.
    """
    beams, vocab_size = len(live) // batch, log_probs.size(1)
    totals = (live.sums.unsqueeze(1) + log_probs).view(batch, -1)  # (B, K * V)
    top, index = _best(totals, 2 * size)  # (B, 2K)
    first_rows = torch.arange(batch, device=top.device).unsqueeze(1) * beams
    rows, tokens = first_rows + index // vocab_size, index % vocab_size  # (B, 2K)
    chosen = log_probs.view(batch, -1).gather(1, index)  # (B, 2K)
    ends = tokens == eos
    places = (ends & (top > NEVER))[:, :size].nonzero(as_tuple=True)
    ended = live.select(rows[places]).extend(top[places], tokens[places], chosen[places])
    order = ends.to(torch.uint8).argsort(dim=1, stable=True)[:, :size]  # the first K that go on
    sums = top.masked_fill(ends, NEVER).gather(1, order).flatten()  # (B * K,)
    rows, tokens, chosen = (part.gather(1, order).flatten() for part in (rows, tokens, chosen))
    return ended, live.select(rows).extend(sums, tokens, chosen), rows


def _best(totals: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row of (B, N) and their places, among equals the first."""
    top, index = totals.topk(min(count + 1, totals.size(1)))  # of equals topk takes any
    equal = (top[:, 1:] == top[:, :-1]) & (top[:, 1:] > NEVER)
    if equal.any():
        tied = equal.any(dim=1).nonzero().squeeze(1)
        values, places = totals[tied].sort(dim=1, descending=True, stable=True)
        top[tied], index[tied] = values[:, : top.size(1)], places[:, : top.size(1)]
    return top[:, :count], index[:, :count]


def _go_on(live: Live, pools: list[_Pool], task: Task) -> list[int]:
    """Return which sentences (numbers among `pools`) go on; at its limit a sentence takes what is
    alive, unfinished.
    """
    best = live.sums.view(len(pools), -1).amax(dim=1).tolist()
    going, cut = [], []
    for i, pool in enumerate(pools):
        if live.length == task.limits[pool.sentence]:
            cut.append(i)
        elif best[i] > NEVER and not pool.is_closed(best[i], live.length):
            going.append(i)
    if cut:
        _take_unfinished(live, cut, pools, task)
    return going


def _take_unfinished(live: Live, cut: list[int], pools: list[_Pool], task: Task) -> None:
    usable: Any = (live.sums > NEVER).view(len(pools), -1)  # (B, K)
    places = usable[cut].nonzero()  # (n, 2)
    beams = usable.size(1)
    first = torch.tensor(cut, device=places.device)[places[:, 0]] * beams
    by_sentence = {pool.sentence: pool for pool in pools}
    for sentence, hypothesis in task.close(live.select(first + places[:, 1])):
        by_sentence[sentence].add(hypothesis)
