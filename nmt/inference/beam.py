"""Beam search: the K most probable hypotheses of each sentence are kept alive.

Every sentence is searched as if it were alone: its beam, its length limit and its end depend on no
neighbour.
"""

# B live sentences, K beams, V vocab, S source; rows = B * K

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nmt.inference.hypotheses import NEVER, Hypothesis, Live, Task
from nmt.inference.penalties import best_score
from nmt.inference.stepper import Stepper
from nmt.inference.stepping import advance, begin
from nmt.inference.top import best_continuations


def beam_search(stepper: Stepper, task: Task) -> list[list[Hypothesis]]:
    """Return up to `beam_size` hypotheses a sentence, best first, finished ones before others."""
    size = task.config.beam_size
    pools = [_Pool(size, task, sentence) for sentence in range(len(task.limits))]
    sentences = list(range(len(pools)))  # those that go on
    live, state = begin(stepper, task)
    while sentences:
        log_probs, live = advance(stepper, state, live, task)  # (B * K, V)
        ended, step = _extend(live, log_probs, len(sentences), size, task.ids.eos)
        for sentence, hypothesis in task.close(ended) if ended else ():
            pools[sentence].add(hypothesis)
        beams = step.rows.size(1)
        still = [pools[sentence] for sentence in sentences]
        going = _go_on(live, step, still, task)
        if len(going) < len(sentences):
            sentences = [sentences[i] for i in going]
            step = step.select(torch.tensor(going, dtype=torch.long, device=step.rows.device))
        if sentences:
            live = step.follow(live)
            state = stepper.reorder(state, step.rows.flatten(), beams)
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


@dataclass(frozen=True)
class _Step:
    """The continuations that go on, all (B, K)."""

    rows: Tensor  # of the hypotheses that they continue
    sums: Tensor  # log-probability with the new token
    tokens: Tensor
    log_probs: Tensor  # of the new token

    def select(self, sentences: Tensor) -> _Step:
        return _Step(*(part.index_select(0, sentences) for part in vars(self).values()))

    def follow(self, live: Live) -> Live:
        rows, sums, tokens, log_probs = (part.flatten() for part in vars(self).values())
        return live.select(rows).extend(sums, tokens, log_probs)


def _extend(
    live: Live, log_probs: Tensor, batch: int, size: int, eos: int
) -> tuple[Live | None, _Step]:
    """Return the hypotheses that end, if any, and the continuations that go on.

    A hypothesis ends when EOS is among the K best continuations of its sentence. Of 2 K
    continuations at most K end, so that K can go on.
    """
    beams, vocab_size = len(live) // batch, log_probs.size(1)
    top, index = best_continuations(live.sums.view(batch, beams), log_probs, 2 * size)  # (B, 2K)
    first_rows = torch.arange(batch, device=top.device).unsqueeze(1) * beams
    rows, tokens = first_rows + index // vocab_size, index % vocab_size  # (B, 2K)
    chosen = log_probs.view(batch, -1).gather(1, index)  # (B, 2K)
    ends = tokens == eos
    order = ends.to(torch.uint8).argsort(dim=1, stable=True)[:, :size]  # the first K that go on
    columns = (rows, top.masked_fill(ends, NEVER), tokens, chosen)
    step = _Step(*(column.gather(1, order) for column in columns))  # (B, K)
    places = (ends & (top > NEVER))[:, :size].nonzero(as_tuple=True)
    if not len(places[0]):
        return None, step
    ended = live.select(rows[places]).extend(top[places], tokens[places], chosen[places])
    return ended, step


def _go_on(live: Live, step: _Step, pools: list[_Pool], task: Task) -> list[int]:
    """Return which sentences (numbers among `pools`) go on; at its limit a sentence takes what is
    alive, unfinished.
    """
    length = live.length + 1
    best = step.sums.amax(dim=1).tolist()
    going, cut = [], []
    for i, pool in enumerate(pools):
        if length == task.limits[pool.sentence]:
            cut.append(i)
        elif best[i] > NEVER and not pool.is_closed(best[i], length):
            going.append(i)
    if cut:
        by_sentence = {pool.sentence: pool for pool in pools}
        left = step.select(torch.tensor(cut, device=step.rows.device)).follow(live)
        usable = left.select((left.sums > NEVER).nonzero().squeeze(1))
        for sentence, hypothesis in task.close(usable):
            by_sentence[sentence].add(hypothesis)
    return going
