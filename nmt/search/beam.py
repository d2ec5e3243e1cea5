"""Beam search, one step at a time. Sentences may join while others are being searched."""

# B sentences of a step, K beam size, V vocab; R live hypotheses, sorted by sentence, best first

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nmt.config import SearchConfig, Stop
from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.cache import BeamGrid
from nmt.model.fast.top import NEG_INF, Candidates, best_candidates
from nmt.model.fast.transfer import to_cpu
from nmt.search.hypotheses import Beam, Hypothesis, check_finite
from nmt.search.request import Ids, SearchRequest
from nmt.search.scoring import min_log_prob
from nmt.search.state import SearchState
from nmt.search.stepper import Stepper

_ROUNDING = 1e-3  # relative tolerance, far above the rounding error of a sum in float32


class BeamSearch:
    """A beam search that the caller advances step by step.

    A candidate is a hypothesis with one more token. A step ranks the 2 K best candidates of each
    sentence. Candidates that end with EOS are finished hypotheses if they are among the K best. The
    K best candidates without EOS become the new beam, except those that can no longer become a
    result.
    """

    def __init__(
        self,
        stepper: Stepper,
        request: SearchRequest,
        tokenizers: Tokenizers,
        *,
        num_copies: int = 1,
    ) -> None:
        """Encode the sentences of `request` with the model of `stepper`.

        With `num_copies` n, sentence i is searched as n sentences, numbered from i * n.
        """
        self._state = SearchState(stepper, request, tokenizers, num_copies=num_copies)
        self._num_sentences = 0  # number of sentences added so far
        self._results: dict[int, ResultList] = {}  # keyed by number of the sentence
        self._live_sentences: set[int] = set()
        self._add_sentences(len(request.sources) * num_copies)

    @property
    def num_live(self) -> int:
        """Number of sentences that are not done."""
        return len(self._live_sentences)

    @torch.inference_mode()
    def step(self) -> set[int]:
        """Extend all hypotheses by a token; return the numbers of the sentences that are done."""
        state = self._state
        log_probs = state.next_log_probs()  # (R, V)
        beam = state.beam
        candidates, is_finished, is_live = self._choose(log_probs)  # (B, 2K) each
        # all candidates in a row of `candidates` continue hypotheses of one sentence
        sentences = beam.sentences[candidates.rows[:, 0]]  # (B,)
        lengths = state.num_tokens(sentences, beam.length + 1)  # (B,)
        limits = state.limits[sentences]  # (B,)
        is_at_limit = (lengths == limits).unsqueeze(1)  # (B, 1)
        # at the length limit, candidates without EOS are complete, but not finished
        is_complete = is_finished | (is_live & is_at_limit)  # (B, 2K)
        if is_complete.any():
            is_complete &= candidates.sums >= self._entry_threshold(sentences, lengths)
            complete_beam = _extend_beam(beam, candidates, is_complete)
            for sentence, hypothesis in state.to_hypotheses(complete_beam):
                self._results[sentence].add(hypothesis)
        is_live &= ~is_at_limit
        is_live &= candidates.sums > self._prune_threshold(sentences, lengths, limits)
        live_beam = _extend_beam(beam, candidates, is_live)
        state.replace_beam(live_beam, parents=candidates.rows[is_live])
        previously_live = self._live_sentences
        self._live_sentences = set(state.beam.sentences.tolist())
        return previously_live - self._live_sentences

    def result(self, sentence: int) -> list[Hypothesis]:
        """Remove and return the results of a sentence that is done, ordered as in `ResultList`.

        Raises a `ModelError` if the output of the model is not finite.
        """
        hypotheses = self._results.pop(sentence).hypotheses
        check_finite(hypotheses)
        return hypotheses

    @torch.inference_mode()
    def join(self, sources: Sequence[Ids]) -> None:
        """Add sentences between two steps, while at least one other sentence is not done.

        Only for requests whose `SearchRequest.can_join` is true.
        """
        self._state.join(sources)
        self._add_sentences(len(sources))

    def _add_sentences(self, count: int) -> None:
        """Number `count` new sentences, and mark them as live."""
        numbers = range(self._num_sentences, self._num_sentences + count)
        self._num_sentences += count
        self._live_sentences.update(numbers)
        for number in numbers:
            self._results[number] = ResultList(self._state.request.num_results)

    def _choose(self, log_probs: Tensor) -> tuple[Candidates, Tensor, Tensor]:
        """Return the best candidates, a mask of finished ones, and a mask of those for the beam.

        All are (B, 2K), on the CPU. Each of the K hypotheses of a sentence has one candidate with
        EOS. Therefore, at least K of the 2 K candidates are without EOS and may enter the beam.
        """
        beam_size = self._state.request.config.beam_size
        ranked = self._rank(log_probs)
        sums, rows, tokens, token_log_probs = to_cpu(
            ranked.sums, ranked.rows, ranked.tokens, ranked.log_probs
        )
        candidates = Candidates(sums=sums, rows=rows, tokens=tokens, log_probs=token_log_probs)
        is_eos = candidates.tokens == self._state.tokenizers.tgt.eos_id
        is_possible = candidates.sums > NEG_INF
        is_live = ~is_eos & is_possible
        num_without_eos = (~is_eos).cumsum(dim=1)  # (B, 2K), up to each candidate
        is_live &= num_without_eos <= beam_size  # only the first K without EOS enter the beam
        is_finished = is_eos & is_possible
        is_finished[:, beam_size:] = False
        return candidates, is_finished, is_live

    def _rank(self, log_probs: Tensor) -> Candidates:
        """Return the 2 K best candidates of each sentence, (B, 2K), on the device."""
        beam = self._state.beam
        sentences, indices = torch.unique_consecutive(beam.sentences, return_inverse=True)
        grid = BeamGrid(indices, len(sentences), log_probs.device)
        beam_size = self._state.request.config.beam_size
        return best_candidates(beam.total_log_probs, log_probs, grid, 2 * beam_size)

    def _entry_threshold(self, sentences: Tensor, lengths: Tensor) -> Tensor:
        """Return the log-probability (B, 1) that a complete hypothesis needs to enter the results.

        `lengths` (B,) has the number of tokens of the hypotheses of each sentence. The threshold is
        slightly below the exact value, since sums are rounded.
        """
        scores = [self._results[i].min_entry_score for i in sentences.tolist()]
        threshold = min_log_prob(
            torch.tensor(scores, dtype=torch.float64), lengths.double(), self._state.request.config
        )
        tolerance = _ROUNDING * (1 + threshold.abs())
        return (threshold - tolerance).unsqueeze(1)

    def _prune_threshold(self, sentences: Tensor, lengths: Tensor, limits: Tensor) -> Tensor:
        """Return the log-probability (B, 1) that a live hypothesis must exceed to stay in the beam.

        Below this threshold, no continuation of the hypothesis can become a result. For each
        sentence, `lengths` (B,) has the number of tokens of its hypotheses, and `limits` (B,) the
        maximum number. The shortest continuation only adds EOS. Wherever the threshold is finite,
        EOS is allowed: the list of results is full, so the hypotheses are already longer than
        `min_length` and any forced prefix.
        """
        scores = [self._results[i].worst_score for i in sentences.tolist()]
        return prune_threshold(
            torch.tensor(scores, dtype=torch.float64), lengths, limits, self._state.request.config
        ).unsqueeze(1)


def prune_threshold(
    worst_scores: Tensor, lengths: Tensor, limits: Tensor, config: SearchConfig
) -> Tensor:
    """Return the log-probability (N,) that live hypotheses must exceed to become a result later.

    Assumes that the next token of a hypothesis may be EOS.

    Args:
        worst_scores: score of the last result of the sentence of each hypothesis (N,), float64.
        lengths: number of tokens of each hypothesis (N,).
        limits: maximum number of tokens of each hypothesis (N,).
    """
    next_lengths = lengths.double() + 1  # (N,)
    max_lengths = None  # only consider hypotheses that end with the next token
    if config.stop is Stop.exact:
        max_lengths = limits.double().maximum(next_lengths)  # (N,)
    return min_log_prob(worst_scores, next_lengths, config, max_lengths=max_lengths)


@dataclass
class ResultList:
    """The best complete hypotheses of a sentence: finished ones first, and then by score."""

    capacity: int
    hypotheses: list[Hypothesis] = field(default_factory=list)

    @property
    def worst_score(self) -> float:
        """Score of the last result; minus infinity while the list is not full."""
        if len(self.hypotheses) < self.capacity:
            return NEG_INF
        return self.hypotheses[-1].score

    @property
    def min_entry_score(self) -> float:
        """The lowest score with which a finished hypothesis can enter the list."""
        if self.hypotheses and not self.hypotheses[-1].finished:
            return NEG_INF  # any finished hypothesis replaces an unfinished one
        return self.worst_score

    def add(self, hypothesis: Hypothesis) -> None:
        """Insert a hypothesis if it is among the best. Equal scores stay in order of insertion."""
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda hypothesis: hypothesis.rank, reverse=True)
        del self.hypotheses[self.capacity :]


def _extend_beam(beam: Beam, candidates: Candidates, is_selected: Tensor) -> Beam:
    """Return the candidates where `is_selected` (B, 2K) is true, as hypotheses with a new token."""
    parents = beam.select(candidates.rows[is_selected])
    return parents.append(
        candidates.tokens[is_selected],
        candidates.log_probs[is_selected],
        candidates.sums[is_selected],
    )
