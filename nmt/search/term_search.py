"""Beam search whose translations contain given terms: dynamic beam allocation (Post and Vilar,
2018).

The hypotheses of a sentence are divided into banks by the number of term tokens that they contain.
Each bank gets an equal share of the beam, so that hypotheses with terms survive beside more
probable ones without them. EOS is forbidden until a hypothesis contains all terms.
"""

# R live hypotheses; B sentences of a step, K beam size, V vocab

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.top import NEG_INF, Candidates
from nmt.search.beam import BeamSearch
from nmt.search.glossary import Bools, load_glossary, spell, word_starts
from nmt.search.request import SearchRequest
from nmt.search.stepper import Stepper

Spellings = Sequence[Sequence[int]]


class Progress(NamedTuple):
    """Which terms a hypothesis contains."""

    complete: frozenset[int] = frozenset()  # indices of terms
    ending: frozenset[int] = frozenset()  # complete, if the next token does not continue the word
    begun: frozenset[tuple[int, int, int]] = frozenset()  # term, spelling, number of its tokens


class SentenceTerms:
    """The terms that the translation of a sentence must contain.

    Args:
        terms: the spellings of each term, of which one must occur; a term that is listed twice must
            occur twice.
        starts_word: for each id, whether a word ends before it, (V,).
    """

    def __init__(self, terms: Sequence[Spellings], starts_word: Bools) -> None:
        self.continues_word = torch.from_numpy(~starts_word)  # (V,)
        self._terms = terms
        self._starts_word = starts_word
        self._max_lengths = [max(map(len, spellings)) for spellings in terms]
        self._progress: dict[tuple[int, ...], Progress] = {
            (): Progress()
        }  # by the tokens of a hypothesis

    def progress(self, tokens: tuple[int, ...]) -> Progress:
        """Return the progress of a hypothesis. Fastest if its beginning has been asked for."""
        if tokens not in self._progress:
            before = self.progress(tokens[:-1])
            self._progress[tokens] = self.advance(before, tokens[-1])
        return self._progress[tokens]

    def advance(self, before: Progress, token: int) -> Progress:
        """Return the progress after one more token."""
        complete = before.complete
        if self._starts_word[token]:
            complete = complete | before.ending
        continued = set(before.begun)
        for term, spellings in enumerate(self._terms):
            continued.update((term, spelling, 0) for spelling in range(len(spellings)))
        begun = set()
        ended: dict[int, Spellings] = {}
        for term, spelling, num_tokens in sorted(continued):
            spellings = self._terms[term]
            ids = spellings[spelling]
            if term in complete or ids[num_tokens] != token:
                continue
            if num_tokens + 1 < len(ids):
                begun.add((term, spelling, num_tokens + 1))
            elif spellings not in ended.values():  # one occurrence for each of two equal terms
                ended[term] = spellings
        return Progress(complete, frozenset(ended), frozenset(begun))

    def is_complete(self, progress: Progress) -> bool:
        """Return whether a hypothesis that ends now contains all terms."""
        return len(progress.complete | progress.ending) == len(self._terms)

    def next_tokens(self, progress: Progress) -> set[int]:
        """Return the tokens that begin or continue a missing term."""
        done = progress.complete | progress.ending
        tokens = set()
        for term, spelling, num_tokens in progress.begun:
            tokens.add(self._terms[term][spelling][num_tokens])
        for term, spellings in enumerate(self._terms):
            if term not in done:
                tokens.update(ids[0] for ids in spellings)
        return tokens

    def num_term_tokens(self, progress: Progress) -> int:
        """Return the bank of a hypothesis: how many tokens of terms it contains.

        Each complete term counts as its longest spelling, and only the longest begun one counts.
        """
        done = progress.complete | progress.ending
        num_begun = [n for term, _, n in progress.begun if term not in done]
        return sum(self._max_lengths[term] for term in done) + max(num_begun, default=0)


def find_terms(request: SearchRequest, tokenizer: Tokenizers) -> list[SentenceTerms | None]:
    """Find the terms of the glossary in each sentence of a request; None for a sentence without.

    Leaves out terms whose targets the tokenizer cannot encode.
    """
    glossary = load_glossary(tuple(request.config.glossary))
    sentences: list[SentenceTerms | None] = []
    for source in request.sources:
        terms = []
        for targets in glossary.find(tokenizer.src.decode(source)):
            spellings = spell(targets, tokenizer.tgt)
            if spellings:
                terms.append(spellings)
        sentences.append(SentenceTerms(terms, word_starts(tokenizer.tgt)) if terms else None)
    return sentences


class Candidate(NamedTuple):
    """A hypothesis with one more token."""

    total: float  # log-probability
    row: int
    token: int
    log_prob: float  # of the token


class TermSearch(BeamSearch):
    """A beam search with terms for some of its sentences; the others are searched as usual."""

    def __init__(
        self,
        stepper: Stepper,
        request: SearchRequest,
        tokenizer: Tokenizers,
        terms: Sequence[SentenceTerms | None],
    ) -> None:
        super().__init__(stepper, request, tokenizer)
        self._terms = terms

    def _choose(self, log_probs: Tensor) -> tuple[Candidates, Tensor, Tensor]:
        """See `BeamSearch._choose`; sentences with terms have candidates of each bank instead."""
        beam = self._state.beam
        eos_id = self._state.tokenizer.tgt.eos_id
        tokens = beam.tokens.tolist()
        progress: dict[int, dict[int, Progress]] = {}  # by sentence and row
        for row, sentence in enumerate(beam.sentences.tolist()):
            terms = self._terms[sentence]
            if terms is None:
                continue
            row_progress = terms.progress(tuple(tokens[row]))
            progress.setdefault(sentence, {})[row] = row_progress
            if not terms.is_complete(row_progress):
                log_probs[row, eos_id] = NEG_INF
        candidates, is_finished, is_live = super()._choose(log_probs)  # (B, 2K) each
        for index, sentence in enumerate(beam.sentences[candidates.rows[:, 0]].tolist()):
            terms = self._terms[sentence]
            if terms is not None:
                ranking = self._rank_candidates(log_probs, terms, progress[sentence])
                live, finished = self._allocate(ranking, terms, progress[sentence])
                chosen = sorted([*live, *finished], key=lambda c: (-c.total, c.row, c.token))
                candidates.sums[index] = NEG_INF
                is_live[index] = False
                is_finished[index] = False
                for column, candidate in enumerate(chosen):
                    candidates.sums[index, column] = candidate.total
                    candidates.rows[index, column] = candidate.row
                    candidates.tokens[index, column] = candidate.token
                    candidates.log_probs[index, column] = candidate.log_prob
                    is_finished[index, column] = candidate.token == eos_id
                    is_live[index, column] = candidate.token != eos_id
        return candidates, is_finished, is_live

    def _rank_candidates(
        self, log_probs: Tensor, terms: SentenceTerms, progress: dict[int, Progress]
    ) -> list[Candidate]:
        """Return continuations of each hypothesis, best first; `progress` is by row.

        These are the K best ones, those by a token of a term, and after the last token of a term
        the best one that begins a new word.
        """
        num_best = min(self._state.request.config.beam_size, log_probs.size(1))
        row_log_probs = log_probs[list(progress)]  # (rows of the sentence, V)
        best_tokens = row_log_probs.topk(num_best, dim=1).indices.tolist()
        continues_word = terms.continues_word.to(log_probs.device)  # (V,)
        best_starts = row_log_probs.masked_fill(continues_word, NEG_INF).argmax(dim=1).tolist()
        rows = []
        tokens = []
        for i, (row, row_progress) in enumerate(progress.items()):
            row_tokens = terms.next_tokens(row_progress).union(best_tokens[i])
            if row_progress.ending:
                row_tokens.add(best_starts[i])
            rows += [row] * len(row_tokens)
            tokens += sorted(row_tokens)
        new_log_probs = log_probs[rows, tokens]  # (C,)
        totals = self._state.beam.total_log_probs[rows] + new_log_probs  # (C,)
        columns = (totals.tolist(), rows, tokens, new_log_probs.tolist())
        candidates = [Candidate(*values) for values in zip(*columns, strict=True)]
        candidates = [candidate for candidate in candidates if candidate.total > NEG_INF]
        return sorted(candidates, key=lambda c: (-c.total, c.row, c.token))

    def _allocate(
        self, ranking: list[Candidate], terms: SentenceTerms, progress: dict[int, Progress]
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Return at most K candidates for the beam, and at most K that end with EOS.

        Banks take turns, the fullest first; each gives its best remaining candidate. A candidate
        with EOS finishes if it is among the K best of its bank.
        """
        beam_size = self._state.request.config.beam_size
        eos_id = self._state.tokenizer.tgt.eos_id
        banks: dict[int, list[Candidate]] = {}
        for candidate in ranking:
            new_progress = terms.advance(progress[candidate.row], candidate.token)
            banks.setdefault(terms.num_term_tokens(new_progress), []).append(candidate)
        finished = []
        queues = []
        for _, bank in sorted(banks.items(), reverse=True):
            finished += [candidate for candidate in bank[:beam_size] if candidate.token == eos_id]
            queues.append([candidate for candidate in bank if candidate.token != eos_id])
        live: list[Candidate] = []
        for round_index in range(beam_size):
            for queue in queues:
                if round_index < len(queue) and len(live) < beam_size:
                    live.append(queue[round_index])
        return live, finished[:beam_size]
