"""Greedy and beam search over a `Stepper` (paper, section 6.1).

The score of a hypothesis is log P(y | x) / ((5 + |y|) / 6)^alpha (Wu et al., 2016, equation 14
without coverage), its log-probabilities summed in float32 and EOS counted in |y|. Every sentence is
searched as if it were alone: its beam, its length limit and its end depend on no neighbour.
"""

# B live sentences, K beams, V vocab; rows = B * K

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.inference.stepper import Stepper

NEVER = float("-inf")


@dataclass(frozen=True)
class ControlIds:
    """The tokenizer's control symbols."""

    pad: int
    bos: int
    eos: int


@dataclass(frozen=True)
class Hypothesis:
    """One translation; it ends with EOS when `finished`, otherwise it met the length limit."""

    tokens: list[int]
    log_prob: float  # nats
    score: float  # log_prob over the length penalty
    finished: bool


def length_penalty(length: int, alpha: float) -> float:
    """Return ((5 + length) / 6)^alpha; `length` counts EOS."""
    return float(((5 + length) / 6) ** alpha)


def length_limits(src_lengths: Tensor, config: SearchConfig) -> list[int]:
    """Return the most tokens of each translation, EOS included: a * source tokens (EOS not counted)
    + b.
    """
    return [
        int(config.max_length_a * (length - 1)) + config.max_length_b
        for length in src_lengths.tolist()
    ]


@torch.inference_mode()
def search(
    stepper: Stepper, src: Tensor, src_lengths: Tensor, config: SearchConfig, ids: ControlIds
) -> list[list[Hypothesis]]:
    """Return up to `beam_size` hypotheses a sentence, best first; beam size 1 is greedy search.

    Args:
        stepper: the model.
        src: source ids with EOS, right-padded (B, S).
        src_lengths: real source tokens, EOS included (B,).
        config: beam size, length penalty and length limit.
        ids: control symbols of the tokenizer.
    """
    if config.beam_size == 1:
        return greedy_search(stepper, src, src_lengths, config, ids)
    return beam_search(stepper, src, src_lengths, config, ids)


def greedy_search(
    stepper: Stepper, src: Tensor, src_lengths: Tensor, config: SearchConfig, ids: ControlIds
) -> list[list[Hypothesis]]:
    """Take the most probable token at every step."""
    limits = length_limits(src_lengths, config)
    state = stepper.start(src, src_lengths)
    results: list[list[Hypothesis]] = [[] for _ in limits]
    live = list(range(len(limits)))  # sentence of each row
    history: list[list[int]] = [[] for _ in limits]
    sums = torch.zeros(len(limits), device=stepper.device)  # (B,)
    tokens = torch.full((len(limits),), ids.bos, device=stepper.device)
    while live:
        best, tokens = _forbid(stepper.step(tokens, state), ids).max(dim=-1)  # (B,), (B,)
        sums = sums + best
        going = []
        for row, (sentence, log_prob, token) in enumerate(
            zip(live, sums.tolist(), tokens.tolist(), strict=True)
        ):
            history[sentence].append(token)
            if token == ids.eos or len(history[sentence]) == limits[sentence]:
                hypothesis = _close(history[sentence], log_prob, config, token == ids.eos)
                results[sentence] = [hypothesis]
            else:
                going.append(row)
        if len(going) < len(live):
            rows = torch.tensor(going, device=tokens.device, dtype=torch.long)
            live, tokens, sums = [live[row] for row in going], tokens[rows], sums[rows]
            state = stepper.reorder(state, rows, 1) if live else state
    return results


@dataclass
class _Pool:
    """The finished hypotheses of one sentence, of which the `size` best are kept."""

    size: int
    limit: int  # most tokens, EOS included
    kept: list[Hypothesis] = field(default_factory=list)

    def add(self, hypothesis: Hypothesis) -> None:
        self.kept.append(hypothesis)
        self.kept.sort(key=lambda h: (h.finished, h.score), reverse=True)
        del self.kept[self.size :]

    def is_closed(self, best_live: float, length: int, alpha: float) -> bool:
        """Say whether no live hypothesis of `length` tokens and `best_live` log-probability can
        still get in.

        Log-probabilities only fall, so the best that can become of it is to end with the same sum
        at the length that the penalty favours: the limit for alpha > 0, the next token for alpha <=
        0.
        """
        if len(self.kept) < self.size:
            return False
        favoured = self.limit if alpha > 0 else length + 1
        return best_live / length_penalty(favoured, alpha) <= self.kept[-1].score


def beam_search(
    stepper: Stepper, src: Tensor, src_lengths: Tensor, config: SearchConfig, ids: ControlIds
) -> list[list[Hypothesis]]:
    """Keep the K most probable unfinished hypotheses of each sentence at every step."""
    size = config.beam_size
    pools = [_Pool(size, limit) for limit in length_limits(src_lengths, config)]
    live = list(range(len(pools)))  # sentence of each group of beams
    state = stepper.start(src, src_lengths)
    sums = torch.zeros(
        len(pools), 1, device=stepper.device
    )  # (B, K); K is 1 at first and grows to the beam size
    tokens = torch.full((len(pools), 1, 1), ids.bos, device=stepper.device)  # (B, K, 1 + length)
    length = 0
    while live:
        length += 1
        log_probs = _forbid(stepper.step(tokens[:, :, -1].flatten(), state), ids)  # (B * K, V)
        candidates = _extend(tokens, sums, log_probs, size, ids)
        _collect(candidates, [pools[s] for s in live], length, config, ids)
        sums, tokens = candidates.live_sums, candidates.live_tokens
        going = _close_sentences(sums, tokens, [pools[s] for s in live], length, config)
        live = [live[i] for i in going]
        if live:
            rows = candidates.live_rows  # (B, K)
            if len(going) < len(rows):
                keep = torch.tensor(going, device=rows.device)
                sums, tokens, rows = sums[keep], tokens[keep], rows[keep]
            state = stepper.reorder(state, rows.flatten(), rows.size(1))
    return [pool.kept for pool in pools]


@dataclass
class _Candidates:
    """The best continuations of one step: those that end, and the K best that go on."""

    ended_sums: Tensor  # (B, K), minus infinity where rank k did not end
    ended_tokens: Tensor  # (B, K, 1 + length)
    live_sums: Tensor  # (B, K)
    live_tokens: Tensor  # (B, K, 1 + length)
    live_rows: Tensor  # (B, K), row of the step that each comes from


def _extend(
    tokens: Tensor, sums: Tensor, log_probs: Tensor, size: int, ids: ControlIds
) -> _Candidates:
    """Rank all continuations; a hypothesis ends when EOS is among the K best, and K others stay
    alive.
    """
    batch, beams, length = tokens.shape
    vocab_size = log_probs.size(-1)
    totals = sums.unsqueeze(-1) + log_probs.view(batch, beams, vocab_size)  # (B, K, V)
    # of 2 K candidates at most K end, so at least K go on
    top, index = totals.flatten(1).topk(min(2 * size, beams * vocab_size))  # (B, 2K)
    beam, token = index // vocab_size, index % vocab_size  # (B, 2K)
    history = tokens.gather(1, beam.unsqueeze(-1).expand(-1, -1, length))  # (B, 2K, length)
    extended = torch.cat([history, token.unsqueeze(-1)], dim=-1)  # (B, 2K, 1 + length)
    ends = token == ids.eos
    ended_sums = top.masked_fill(~ends, NEVER)[:, :size]
    order = ends.to(torch.uint8).argsort(dim=1, stable=True)[:, :size]  # the first K that go on
    live_sums = top.masked_fill(ends, NEVER).gather(1, order)
    live_tokens = extended.gather(1, order.unsqueeze(-1).expand(-1, -1, length + 1))
    first_rows = torch.arange(batch, device=tokens.device).unsqueeze(1) * beams
    return _Candidates(
        ended_sums, extended[:, :size], live_sums, live_tokens, first_rows + beam.gather(1, order)
    )


def _collect(
    candidates: _Candidates, pools: list[_Pool], length: int, config: SearchConfig, ids: ControlIds
) -> None:
    for i, k in (candidates.ended_sums > NEVER).nonzero().tolist():
        tokens = candidates.ended_tokens[i, k, 1:].tolist()
        pools[i].add(_close(tokens, float(candidates.ended_sums[i, k]), config, finished=True))


def _close_sentences(
    sums: Tensor, tokens: Tensor, pools: list[_Pool], length: int, config: SearchConfig
) -> list[int]:
    """Return the sentences (indices into the batch) that go on; at its limit a sentence takes what
    is alive, unfinished.
    """
    going = []
    for i, (pool, best) in enumerate(zip(pools, sums.amax(dim=1).tolist(), strict=True)):
        if length == pool.limit:
            for k, log_prob in enumerate(sums[i].tolist()):
                if log_prob > NEVER:
                    pool.add(_close(tokens[i, k, 1:].tolist(), log_prob, config, finished=False))
        elif best > NEVER and not pool.is_closed(best, length, config.length_penalty):
            going.append(i)
    return going


def _forbid(log_probs: Tensor, ids: ControlIds) -> Tensor:
    """Take PAD and BOS out of the choice, (rows, V)."""
    log_probs[:, [ids.pad, ids.bos]] = NEVER
    return log_probs


def _close(tokens: list[int], log_prob: float, config: SearchConfig, finished: bool) -> Hypothesis:
    score = log_prob / length_penalty(len(tokens), config.length_penalty)
    return Hypothesis(tokens, log_prob, score, finished)
