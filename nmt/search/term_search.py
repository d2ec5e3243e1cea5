"""Beam search with required terms, by dynamic beam allocation (Post and Vilar, 2018).

The hypotheses of a sentence are divided into banks by the number of term tokens that they contain.
Each bank gets an equal share of the beam, so that more probable hypotheses without terms do not
replace the hypotheses with terms. EOS is forbidden until a hypothesis contains all terms.
"""

# In shapes: B sentences of a step, R live hypotheses (rows), K beam size, V vocabulary size

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.cache import BeamGrid
from nmt.model.fast.top import NEG_INF, Candidates, best_candidates
from nmt.model.fast.transfer import to_device
from nmt.search.beam import BeamSearch
from nmt.search.glossary import mark_word_ends
from nmt.search.protect import encode_protected, mark_protected_ends
from nmt.search.request import SearchRequest
from nmt.search.stepper import Stepper

TermSpellings = Sequence[Sequence[int]]
"""Token ids of the forms of a term; a translation must contain one form."""


class PartialTerm(NamedTuple):
    """The first tokens of a term at the end of a hypothesis."""

    term_index: int
    spelling_index: int  # index among the spellings of the term
    num_tokens: int  # number of tokens of the spelling at the end of the hypothesis


class TermProgress(NamedTuple):
    """The terms that a hypothesis contains, as indices."""

    complete: frozenset[int] = frozenset()
    ending: frozenset[int] = frozenset()
    """Terms at the end of the hypothesis. They become complete unless the next token continues
    their last word."""
    partial: frozenset[PartialTerm] = frozenset()


class SentenceTerms:
    """The terms that the translation of a sentence must contain.

    Args:
        terms: the spellings of each term. A term that is listed twice must occur twice.
        ends_previous_word: for each token id, whether the word before this token is complete,
            because the token cannot continue it. See `mark_word_ends`.
        closed: indices of protected texts that no token can continue, such as `{name}`.
        open_ended: indices of protected texts that a letter or digit could continue, such as `%s`.
        ends_previous_protected: for each token id, whether a text of `open_ended` is complete if
            this token follows. See `mark_protected_ends`.
    """

    def __init__(
        self,
        terms: Sequence[TermSpellings],
        ends_previous_word: Sequence[bool],
        closed: Collection[int] = (),
        open_ended: Collection[int] = (),
        ends_previous_protected: Sequence[bool] = (),
    ) -> None:
        self._terms = terms
        self._closed = frozenset(closed)
        self._open_ended = frozenset(open_ended)
        self._ends_previous_protected = ends_previous_protected
        self._ends_previous_word = ends_previous_word
        self._max_lengths = [max(map(len, spellings)) for spellings in terms]
        # keyed by the first token of a spelling
        self._beginnings: dict[int, list[PartialTerm]] = {}
        for term_index, spellings in enumerate(terms):
            for spelling_index, ids in enumerate(spellings):
                beginning = PartialTerm(term_index, spelling_index, num_tokens=0)
                self._beginnings.setdefault(ids[0], []).append(beginning)
        # keyed by the tokens of a hypothesis
        self._progress: dict[tuple[int, ...], TermProgress] = {(): TermProgress()}

    def progress(self, tokens: tuple[int, ...]) -> TermProgress:
        """Return the progress of a hypothesis; caches it for the hypotheses that continue it."""
        if tokens not in self._progress:
            prefix_progress = self.progress(tokens[:-1])
            self._progress[tokens] = self.advance(prefix_progress, tokens[-1])
        return self._progress[tokens]

    def advance(self, progress: TermProgress, token: int) -> TermProgress:
        """Return the progress after one more token."""
        # the terms at the end become complete, unless the token continues their last word
        complete = progress.complete
        if progress.ending and self._ends_previous_word[token]:
            complete = complete | progress.ending
        open_ended = progress.ending & self._open_ended
        if open_ended and self._ends_previous_protected[token]:
            complete = complete | open_ended
        # the terms that the token may continue or begin
        candidates = list(progress.partial) + self._beginnings.get(token, [])
        if not candidates:
            return TermProgress(complete)
        partial = set()
        new_ending: dict[int, TermSpellings] = {}  # terms whose last token is `token`
        for term_index, spelling_index, num_tokens in sorted(candidates):
            spellings = self._terms[term_index]
            ids = spellings[spelling_index]
            if term_index in complete or ids[num_tokens] != token:
                continue
            if num_tokens + 1 < len(ids):
                partial.add(PartialTerm(term_index, spelling_index, num_tokens + 1))
            elif spellings not in new_ending.values():
                # a term may be listed twice; this occurrence counts for only one of the two
                new_ending[term_index] = spellings
        closed = self._closed.intersection(new_ending)  # complete at once
        return TermProgress(
            complete=complete | closed,
            ending=frozenset(new_ending) - closed,
            partial=frozenset(partial),
        )

    def can_end(self, progress: TermProgress) -> bool:
        """Return whether a hypothesis contains all terms if it ends now."""
        return len(progress.complete | progress.ending) == len(self._terms)

    def is_complete(self, progress: TermProgress) -> bool:
        """Return whether a hypothesis contains all terms, however it continues."""
        return len(progress.complete) == len(self._terms)

    def next_tokens(self, progress: TermProgress) -> set[int]:
        """Return the tokens that begin or continue a missing term."""
        done = progress.complete | progress.ending
        tokens = set()
        for term_index, spelling_index, num_tokens in progress.partial:
            ids = self._terms[term_index][spelling_index]
            tokens.add(ids[num_tokens])
        for term_index, spellings in enumerate(self._terms):
            if term_index not in done:
                tokens.update(ids[0] for ids in spellings)
        return tokens

    def num_term_tokens(self, progress: TermProgress) -> int:
        """Return the number of term tokens in a hypothesis, which determines its bank.

        A complete term counts with the length of its longest spelling. Of the partial terms, only
        the longest counts.
        """
        done = progress.complete | progress.ending
        num_tokens = sum(self._max_lengths[term_index] for term_index in done)
        partial_lengths = [
            partial.num_tokens for partial in progress.partial if partial.term_index not in done
        ]
        return num_tokens + max(partial_lengths, default=0)


def find_terms(request: SearchRequest, tokenizers: Tokenizers) -> list[SentenceTerms | None]:
    """Return the terms of each sentence of a request, or None for a sentence without terms.

    These are the terms of the glossary and the protected texts. Leaves out terms that the target
    tokenizer cannot encode.
    """
    ends_previous_word = mark_word_ends(tokenizers.tgt)
    sentences: list[SentenceTerms | None] = []
    for i in range(len(request.sources)):
        terms: list[TermSpellings] = []
        closed: list[int] = []
        open_ended: list[int] = []
        for protected in request.find_protected(i, tokenizers):
            spellings = encode_protected(protected, tokenizers.tgt)
            if spellings:
                term_index = len(terms)
                terms.append(spellings)
                if protected.ends_with_word_character:
                    open_ended.append(term_index)
                else:
                    closed.append(term_index)
        terms += request.find_spellings(i, tokenizers)
        if not terms:
            sentences.append(None)
            continue
        sentence_terms = SentenceTerms(
            terms,
            ends_previous_word,
            closed=closed,
            open_ended=open_ended,
            ends_previous_protected=mark_protected_ends(tokenizers.tgt),
        )
        sentences.append(sentence_terms)
    return sentences


class TermHypothesis(NamedTuple):
    """A live hypothesis of a sentence with terms."""

    row: int
    sentence: int
    terms: SentenceTerms
    progress: TermProgress


class Candidate(NamedTuple):
    """A hypothesis with one more token."""

    total_log_prob: float  # log-probability of the hypothesis with the token
    hypothesis: TermHypothesis
    token: int
    log_prob: float  # log-probability of the token

    @property
    def bank(self) -> int:
        """The number of term tokens."""
        hypothesis = self.hypothesis
        return hypothesis.terms.num_term_tokens(
            hypothesis.terms.advance(hypothesis.progress, self.token)
        )

    @property
    def has_all_terms(self) -> bool:
        """Whether the hypothesis contains all terms if it ends with this token."""
        terms = self.hypothesis.terms
        return terms.can_end(terms.advance(self.hypothesis.progress, self.token))

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sort key that puts the best candidate first."""
        return (-self.total_log_prob, self.hypothesis.row, self.token)


def prefer_all_terms(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates that contain all terms, or all candidates if none does.

    At the length limit, a hypothesis that is cut off before its terms must not replace a hypothesis
    with all terms, even if its score is higher.
    """
    with_terms = [candidate for candidate in candidates if candidate.has_all_terms]
    return with_terms or candidates


def replace_candidates(candidates: Candidates, replacements: dict[int, list[Candidate]]) -> None:
    """Replace the candidates of some sentences, in place.

    Args:
        candidates: tensors (B, 2K).
        replacements: for each index in dimension B, at most 2K new candidates of this sentence.
    """
    batch_indices: list[int] = []  # in dimension B, for each new candidate
    columns: list[int] = []  # in dimension 2K, for each new candidate
    new_candidates: list[Candidate] = []
    for batch_index, sentence_candidates in replacements.items():
        num_candidates = len(sentence_candidates)
        batch_indices += [batch_index] * num_candidates
        columns += range(num_candidates)
        new_candidates += sentence_candidates
    sums = [candidate.total_log_prob for candidate in new_candidates]
    rows = [candidate.hypothesis.row for candidate in new_candidates]
    tokens = [candidate.token for candidate in new_candidates]
    log_probs = [candidate.log_prob for candidate in new_candidates]
    candidates.sums[list(replacements)] = NEG_INF  # drops all old candidates of these sentences
    candidates.sums[batch_indices, columns] = torch.tensor(sums)
    candidates.rows[batch_indices, columns] = torch.tensor(rows)
    candidates.tokens[batch_indices, columns] = torch.tensor(tokens)
    candidates.log_probs[batch_indices, columns] = torch.tensor(log_probs)


class TermSearch(BeamSearch):
    """A beam search with required terms.

    Args:
        terms: the terms of each sentence; None for a sentence without terms, which is searched as
            in `BeamSearch`.
        ends_previous_word: see `SentenceTerms`.
    """

    def __init__(
        self,
        stepper: Stepper,
        request: SearchRequest,
        tokenizers: Tokenizers,
        *,
        terms: Sequence[SentenceTerms | None],
        ends_previous_word: Sequence[bool],
    ) -> None:
        super().__init__(stepper, request, tokenizers)
        self._terms = terms
        self._ends_previous_word = ends_previous_word
        self._continues_word = ~torch.tensor(ends_previous_word, device=stepper.device)  # (V,)

    def _choose(self, log_probs: Tensor) -> tuple[Candidates, Tensor, Tensor]:
        """Return the best candidates, a mask of finished ones, and a mask of those for the beam.

        All are (B, 2K), as in `BeamSearch._choose`. Sentences that miss a term get the candidates
        of `_allocate` instead.
        """
        eos_id = self._state.tokenizers.tgt.eos_id
        hypotheses = self._find_hypotheses()
        # EOS is forbidden in rows of hypotheses that miss a term
        unfinished_rows = []
        for hypothesis in hypotheses:
            if not hypothesis.terms.can_end(hypothesis.progress):
                unfinished_rows.append(hypothesis.row)
        log_probs[unfinished_rows, eos_id] = NEG_INF
        candidates, is_finished, is_live = super()._choose(log_probs)  # (B, 2K) each
        if not hypotheses:
            return candidates, is_finished, is_live
        rankings = self._rank_candidates(log_probs, hypotheses)
        # (B,), the sentence to which the rows of candidates belong
        sentence_numbers = self._state.beam.sentences[candidates.rows[:, 0]]
        sentences = sentence_numbers.tolist()
        # (B,), the number of tokens of candidates
        lengths = self._state.num_tokens(sentence_numbers, self._state.beam.length + 1)
        max_lengths = self._state.limits[sentence_numbers]  # (B,)
        is_at_limit = (lengths == max_lengths).tolist()
        replacements: dict[int, list[Candidate]] = {}  # keyed by the index in dimension B
        for batch_index, sentence in enumerate(sentences):
            if sentence in rankings:
                sentence_candidates = self._allocate(rankings[sentence])
                if is_at_limit[batch_index]:
                    sentence_candidates = prefer_all_terms(sentence_candidates)
                if sentence_candidates:
                    replacements[batch_index] = sentence_candidates
        replace_candidates(candidates, replacements)
        is_replaced = torch.zeros(len(sentences), 1, dtype=torch.bool)  # (B, 1)
        is_replaced[list(replacements)] = True
        is_possible = candidates.sums > NEG_INF  # (B, 2K)
        is_eos = candidates.tokens == eos_id  # (B, 2K)
        is_finished = torch.where(is_replaced, is_possible & is_eos, is_finished)
        is_live = torch.where(is_replaced, is_possible & ~is_eos, is_live)
        return candidates, is_finished, is_live

    def _find_hypotheses(self) -> list[TermHypothesis]:
        """Return the live hypotheses of sentences in which a hypothesis still misses a term."""
        beam = self._state.beam
        tokens = beam.tokens.tolist()
        hypotheses = []
        unfinished_sentences = set()
        for row, sentence in enumerate(beam.sentences.tolist()):
            terms = self._terms[sentence]
            if terms is None:
                continue
            progress = terms.progress(tuple(tokens[row]))
            hypotheses.append(TermHypothesis(row, sentence, terms, progress))
            if not terms.is_complete(progress):
                unfinished_sentences.add(sentence)
        return [
            hypothesis for hypothesis in hypotheses if hypothesis.sentence in unfinished_sentences
        ]

    def _rank_candidates(
        self, log_probs: Tensor, hypotheses: list[TermHypothesis]
    ) -> dict[int, list[Candidate]]:
        """Return the candidates of each sentence, best first, keyed by the number of the sentence.

        A hypothesis is continued by its K best tokens and by the next tokens of terms. After the
        last token of a term, it is also continued by the best token that begins a new word.
        """
        best_tokens = self._best_tokens(log_probs, [hypothesis.row for hypothesis in hypotheses])
        # for each candidate, the hypothesis that it continues, and the token that it adds
        continued_hypotheses = []
        tokens = []
        for hypothesis, best in zip(hypotheses, best_tokens, strict=True):
            next_tokens = hypothesis.terms.next_tokens(hypothesis.progress).union(best)
            # so that the term can become complete, at least one token must end its last word
            has_word_end = any(self._ends_previous_word[token] for token in best)
            if hypothesis.progress.ending and not has_word_end:
                row_log_probs = log_probs[hypothesis.row]  # (V,)
                ending_log_probs = row_log_probs.masked_fill(self._continues_word, NEG_INF)  # (V,)
                next_tokens.add(int(ending_log_probs.argmax()))
            continued_hypotheses += [hypothesis] * len(next_tokens)
            tokens += sorted(next_tokens)
        rows = [hypothesis.row for hypothesis in continued_hypotheses]
        token_log_probs = log_probs[rows, tokens]  # one for each candidate
        total_log_probs = self._state.beam.total_log_probs[rows] + token_log_probs
        token_log_prob_list = token_log_probs.tolist()
        total_log_prob_list = total_log_probs.tolist()
        rankings: dict[int, list[Candidate]] = {}
        for i, hypothesis in enumerate(continued_hypotheses):
            ranking = rankings.setdefault(hypothesis.sentence, [])
            if total_log_prob_list[i] > NEG_INF:
                candidate = Candidate(
                    total_log_prob=total_log_prob_list[i],
                    hypothesis=hypothesis,
                    token=tokens[i],
                    log_prob=token_log_prob_list[i],
                )
                ranking.append(candidate)
        for ranking in rankings.values():
            ranking.sort(key=lambda candidate: candidate.rank)
        return rankings

    def _best_tokens(self, log_probs: Tensor, rows: list[int]) -> list[list[int]]:
        """Return the K best tokens of each of these rows."""
        num_best = min(self._state.request.config.beam_size, log_probs.size(1))
        index = to_device(torch.tensor(rows), log_probs.device)
        # `best_candidates` treats each row as a sentence with a single hypothesis
        sums = torch.zeros(len(rows), device=log_probs.device)
        grid = BeamGrid(torch.arange(len(rows)), len(rows), log_probs.device)
        best = best_candidates(sums, log_probs.index_select(0, index), grid, num_best)
        # If fewer than K tokens are possible, `best_candidates` adds ids that may exceed the
        # vocabulary. `clamp` replaces them by the last id.
        return best.tokens.clamp(max=log_probs.size(1) - 1).tolist()

    def _allocate(self, ranking: list[Candidate]) -> list[Candidate]:
        """Return at most K candidates without EOS and at most K with EOS, best first.

        Banks take turns, beginning with the bank with the most term tokens. At its turn, a bank
        gives its best remaining candidate without EOS. A candidate with EOS is returned if it is
        among the K best of its bank.
        """
        beam_size = self._state.request.config.beam_size
        eos_id = self._state.tokenizers.tgt.eos_id
        banks: dict[int, list[Candidate]] = {}
        for candidate in ranking:
            banks.setdefault(candidate.bank, []).append(candidate)
        finished = []
        queues = []  # a list for each bank, with its candidates without EOS
        for _, bank in sorted(banks.items(), reverse=True):
            finished += [candidate for candidate in bank[:beam_size] if candidate.token == eos_id]
            queues.append([candidate for candidate in bank if candidate.token != eos_id])
        live: list[Candidate] = []
        for round_index in range(beam_size):
            for queue in queues:
                has_candidate = round_index < len(queue)
                if has_candidate and len(live) < beam_size:
                    live.append(queue[round_index])
        return sorted(live + finished[:beam_size], key=lambda candidate: candidate.rank)
