"""Beam search, one step at a time, in which sentences may join while others are searched."""

# B sentences that are searched, K beam size, V vocab; rows, the live hypotheses, sorted by
# sentence, best first

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.cache import BeamGrid
from nmt.model.fast.top import NEG_INF, Candidates, best_candidates
from nmt.model.fast.transfer import fetch
from nmt.search.hypotheses import Beam, Hypothesis, check_finite
from nmt.search.request import Ids, SearchRequest
from nmt.search.scoring import min_log_prob
from nmt.search.state import SearchState
from nmt.search.stepper import Stepper

_ROUNDING = 1e-3  # relative; far above the rounding error of a sum in float32


class BeamSearch:
    """A beam search that the caller advances step by step.

    Of 2 K candidates of a sentence, those among the first K that end with EOS are complete; the
    first K others stay in the beam, as long as they can still become a result.
    """

    def __init__(self, stepper: Stepper, request: SearchRequest, tokenizer: Tokenizers) -> None:
        self._state = SearchState(stepper, request, tokenizer)
        self._num_sentences = 0  # that are searched or done
        self._results: dict[int, _ResultList] = {}
        self._live: set[int] = set()
        self._add_sentences(len(request.rows))

    @property
    def num_live(self) -> int:
        """Number of sentences that are not done."""
        return len(self._live)

    @torch.inference_mode()
    def step(self) -> set[int]:
        """Extend all hypotheses by a token. Return the numbers of the sentences that are done."""
        state = self._state
        log_probs = state.next_log_probs()  # (rows, V)
        beam = state.beam
        candidates, ends, stays = self._choose(log_probs)  # (B, 2K) each
        sentences = beam.sentences[candidates.rows[:, 0]]  # (B,)
        lengths = state.lengths(sentences, beam.length + 1)  # (B,)
        limits = state.limits[sentences]  # (B,)
        is_at_limit = (lengths == limits).unsqueeze(1)  # (B, 1)
        # at the length limit, candidates without EOS are complete too, but not finished
        is_complete = ends | stays & is_at_limit  # (B, 2K)
        if is_complete.any():
            is_complete &= candidates.sums >= self._keep_threshold(sentences, lengths)
            self._collect(_extend(beam, candidates, is_complete))
        stays &= ~is_at_limit
        stays &= candidates.sums > self._prune_threshold(sentences, lengths, limits)
        state.go_on(_extend(beam, candidates, stays), candidates.rows[stays])
        previously_live = self._live
        self._live = set(state.beam.sentences.tolist())
        return previously_live - self._live

    def result(self, sentence: int) -> list[Hypothesis]:
        """Return the results of a sentence that is done, best first, finished ones before others.

        Can be called once per sentence. Raises a `ModelError` if the model's output is not finite.
        """
        hypotheses = self._results.pop(sentence).hypotheses
        check_finite(hypotheses)
        return hypotheses

    @torch.inference_mode()
    def join(self, rows: Sequence[Ids]) -> None:
        """Add sentences, given as source ids, between two steps while any other is not done.

        Only for requests that allow it, see `SearchRequest.can_join`.
        """
        self._state.join(rows)
        self._add_sentences(len(rows))

    def _add_sentences(self, count: int) -> None:
        numbers = range(self._num_sentences, self._num_sentences + count)
        self._num_sentences += count
        self._live.update(numbers)
        for number in numbers:
            self._results[number] = _ResultList(self._state.request.num_results)

    def _choose(self, log_probs: Tensor) -> tuple[Candidates, Tensor, Tensor]:
        """Return the best candidates of each sentence, on the CPU, and which of them end with EOS
        or stay in the beam, (B, 2K) each.

        At most K candidates end, so that among 2 K there are K that can stay.
        """
        beam = self._state.beam
        beam_size = self._state.request.config.beam_size
        sentences, indices = torch.unique_consecutive(beam.sentences, return_inverse=True)
        grid = BeamGrid(indices, len(sentences), log_probs.device)
        best = best_candidates(beam.sums, log_probs, grid, 2 * beam_size)
        candidates = Candidates(*fetch(*best))
        is_eos = candidates.tokens == self._state.tokenizer.tgt.eos_id
        is_possible = candidates.sums > NEG_INF
        stays = ~is_eos & is_possible
        stays &= (~is_eos).cumsum(dim=1) <= beam_size
        ends = is_eos & is_possible
        ends[:, beam_size:] = False
        return candidates, ends, stays

    def _collect(self, beam: Beam) -> None:
        """Add complete hypotheses to the results of their sentences."""
        for sentence, hypothesis in self._state.complete(beam):
            self._results[sentence].add(hypothesis)

    def _keep_threshold(self, sentences: Tensor, lengths: Tensor) -> Tensor:
        """Return the log-probability below which no hypothesis of `lengths` (B,) tokens enters the
        results, (B, 1); a little less than the exact value, since sums are rounded.
        """
        scores = [self._results[i].min_entry_score for i in sentences.tolist()]
        threshold = min_log_prob(
            torch.tensor(scores, dtype=torch.float64), lengths.double(), self._state.request.config
        )
        return (threshold - _ROUNDING * (1 + threshold.abs())).unsqueeze(1)

    def _prune_threshold(self, sentences: Tensor, lengths: Tensor, limits: Tensor) -> Tensor:
        """Return the log-probability above which a hypothesis of `lengths` (B,) tokens can still
        become a result, (B, 1).

        Where the results are full, a hypothesis may end with its next token: no prefix or minimum
        length is left.
        """
        scores = [self._results[i].worst_score for i in sentences.tolist()]
        next_lengths = lengths.double() + 1  # (B,)
        threshold = min_log_prob(
            torch.tensor(scores, dtype=torch.float64),
            next_lengths,
            self._state.request.config,
            max_lengths=limits.double().maximum(next_lengths),
        )
        return threshold.unsqueeze(1)


@dataclass
class _ResultList:
    """The best complete hypotheses of a sentence, best first."""

    size: int  # maximum
    hypotheses: list[Hypothesis] = field(default_factory=list)

    @property
    def worst_score(self) -> float:
        """Score of the last result; minus infinity while the list is not full."""
        return self.hypotheses[-1].score if len(self.hypotheses) == self.size else NEG_INF

    @property
    def min_entry_score(self) -> float:
        """Score without which no hypothesis enters the list."""
        if self.hypotheses and not self.hypotheses[-1].finished:
            return NEG_INF  # any finished hypothesis replaces an unfinished one
        return self.worst_score

    def add(self, hypothesis: Hypothesis) -> None:
        """Insert a hypothesis if it is among the best; of equal ones the first stays first."""
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda h: (h.finished, h.score), reverse=True)
        del self.hypotheses[self.size :]


def _extend(beam: Beam, candidates: Candidates, is_selected: Tensor) -> Beam:
    """Return the hypotheses of the candidates where `is_selected` (B, 2K) is true."""
    parents = beam.select(candidates.rows[is_selected])
    return parents.extend(
        candidates.sums[is_selected],
        candidates.tokens[is_selected],
        candidates.log_probs[is_selected],
    )
