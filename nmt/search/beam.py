"""Beam search: the K most probable hypotheses of each sentence are kept alive.

Every sentence is searched as if it were alone: its beam, its length limit and its end depend on no
neighbour.
"""

# B live sentences, K beam size, V vocab; rows, the live hypotheses, sorted by sentence, best first

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nmt.model.fast.cache import Grid
from nmt.model.fast.top import Continuations, best_continuations
from nmt.search.hypotheses import NEVER, Hypothesis, Live, SearchTask
from nmt.search.penalties import least_log_prob
from nmt.search.stepper import Stepper


def beam_search(stepper: Stepper, task: SearchTask) -> list[list[Hypothesis]]:
    """Return up to `task.n_best` hypotheses a sentence, best first, finished ones before others."""
    pools = [_Pool(task.n_best) for _ in task.limits]
    limits = torch.tensor(task.limits, device=stepper.device)
    state = stepper.start(task.src, task.src_lengths, attention=task.needs_attention)
    live = task.first(stepper.device)
    while len(live):
        log_probs = stepper.step(task.newest(live), state)  # (rows, V)
        log_probs, live = task.constrain(log_probs, live, stepper, state)
        ended, best = _extend(live, log_probs, task)
        _collect(ended, pools, task)
        sentences = live.sentences[best.rows[:, 0]]  # (B,)
        bars = _bars(pools, sentences, live.length + 1, task).unsqueeze(1)  # (B, 1)
        can_win = best.sums > bars  # (B, K)
        is_last = (limits[sentences] == live.length + 1).unsqueeze(1)  # (B, 1)
        if is_last.any():  # what is alive at the limit is a result, if an unfinished one
            _collect(_take(live, best, can_win & is_last), pools, task)
        going = can_win & ~is_last  # (B, K)
        rows, live = best.rows[going], _take(live, best, going)
        if len(live):
            state = stepper.reorder(state, rows)
    return [pool.kept for pool in pools]


@dataclass
class _Pool:
    """The best hypotheses of one sentence that have come to an end, at most `size`."""

    size: int
    kept: list[Hypothesis] = field(default_factory=list)

    def add(self, hypothesis: Hypothesis) -> None:
        self.kept.append(hypothesis)
        self.kept.sort(key=lambda h: (h.finished, h.score), reverse=True)  # stable: first come
        del self.kept[self.size :]

    @property
    def bar(self) -> float:
        """The score above which a hypothesis gets in."""
        return self.kept[-1].score if len(self.kept) == self.size else NEVER


def _bars(pools: list[_Pool], sentences: Tensor, length: int, task: SearchTask) -> Tensor:
    """Return the log-probability above which a hypothesis of `length` tokens can still become one
    of the results, for each of `sentences` (B,).
    """
    numbers = sentences.tolist()
    bars = [pools[i].bar for i in numbers]
    last = [max(length + 1, task.limits[i]) for i in numbers]
    columns = torch.tensor([bars, last], dtype=torch.float64, device=sentences.device)
    # where there is a bar, hypotheses may end: no longer prefix or least length is to be met
    first = torch.full_like(columns[1], length + 1)
    return least_log_prob(columns[0], first, columns[1], task.config)


def _extend(live: Live, log_probs: Tensor, task: SearchTask) -> tuple[Live, Continuations]:
    """Return the hypotheses that end, and the K best continuations that go on (B, K).

    A hypothesis ends when EOS is among the K best continuations of its sentence. Of 2 K
    continuations at most K end, so that K can go on.
    """
    size = task.config.beam_size
    sentences, numbers = torch.unique_consecutive(live.sentences, return_inverse=True)
    grid = Grid(numbers, len(sentences))
    best = best_continuations(live.sums, log_probs, grid, 2 * size)  # (B, 2K)
    is_end = best.tokens == task.ids.eos
    ended = _take(live, best, (is_end & (best.sums > NEVER))[:, :size])
    best = best._replace(sums=best.sums.masked_fill(is_end, NEVER))
    order = is_end.to(torch.uint8).argsort(dim=1, stable=True)[:, :size]  # the first K that go on
    return ended, Continuations(*(column.gather(1, order) for column in best))


def _take(live: Live, best: Continuations, chosen: Tensor) -> Live:
    """Return the continuations where `chosen` (B, up to 2K) is true as hypotheses."""
    sums, rows, tokens, log_probs = (column[:, : chosen.size(1)][chosen] for column in best)
    return live.select(rows).extend(sums, tokens, log_probs)


def _collect(ended: Live, pools: list[_Pool], task: SearchTask) -> None:
    for sentence, hypothesis in task.close(ended) if len(ended) else ():
        pools[sentence].add(hypothesis)
