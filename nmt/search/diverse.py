"""Diverse beam search (Vijayakumar et al., 2018): groups of hypotheses with different tokens."""

# N sentences, B pairs of a sentence and a group, K beam size of a group, V vocab
# R live hypotheses, sorted by sentence and group
# one group has P of the B pairs and Q of the R live hypotheses

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.cache import BeamGrid
from nmt.model.fast.top import NEG_INF, Candidates, best_candidates
from nmt.model.fast.transfer import to_device
from nmt.search.beam import BeamSearch
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.stepper import Stepper


class DiverseSearch(BeamSearch):
    """A beam search whose beam is divided into groups, which choose tokens one after the other.

    A group ranks a candidate by its log-probability minus `diversity_penalty` times the number of
    hypotheses of earlier groups that got the same token in this step (Hamming diversity). The
    penalty does not change log-probabilities and scores of hypotheses.

    `BeamSearch` searches `beam_groups` copies of each sentence, one for each group. Such a pair of
    sentence i and group g has the pair number i * beam_groups + g. For `BeamSearch`, it is a
    sentence with this number: `Beam.sentences` holds pair numbers.
    """

    def __init__(self, stepper: Stepper, request: SearchRequest, tokenizers: Tokenizers) -> None:
        config = request.config
        self._num_groups = config.beam_groups
        self._penalty = config.diversity_penalty
        self._max_results = request.num_results
        group_config = replace(
            config,
            beam_size=config.beam_size // config.beam_groups,
            beam_groups=1,
            # the default, since other values are invalid without groups
            diversity_penalty=SearchConfig.diversity_penalty,
        )
        group_request = replace(request, config=group_config)
        super().__init__(stepper, group_request, tokenizers, num_copies=self._num_groups)

    def result(self, sentence: int) -> list[Hypothesis]:
        """See `BeamSearch.result`. Equal hypotheses of several groups are returned once."""
        hypotheses: dict[tuple[int, ...], Hypothesis] = {}
        first_pair = sentence * self._num_groups
        for pair in range(first_pair, first_pair + self._num_groups):
            for hypothesis in super().result(pair):
                hypotheses.setdefault(tuple(hypothesis.tokens), hypothesis)
        # finished hypotheses first, then by score
        ranking = sorted(hypotheses.values(), key=lambda hypothesis: hypothesis.rank, reverse=True)
        return ranking[: self._max_results]

    def _rank(self, log_probs: Tensor) -> Candidates:
        """Return the 2 K best candidates of each pair (B, 2K), on the device of `log_probs` (R, V).

        The groups of a sentence choose one after the other. A group with fewer than 2 K candidates
        gets fillers, with sums of minus infinity.
        """
        device = log_probs.device
        row_pairs = self._state.beam.sentences  # (R,), the pair number of each hypothesis
        pairs = torch.unique_consecutive(row_pairs)  # (B,), the pair numbers
        # the numbers of the sentences (N,), and for each pair the index of its sentence there (B,)
        sentences, pair_sentences = torch.unique_consecutive(
            pairs // self._num_groups, return_inverse=True
        )
        candidates = self._make_fillers(len(pairs), device)
        # how often earlier groups of each sentence chose each token in this step
        times_chosen = torch.zeros(len(sentences), log_probs.size(1), device=device)  # (N, V)
        for group in range(self._num_groups):
            pair_indices = (pairs % self._num_groups == group).nonzero().squeeze(1)  # (P,)
            rows = (row_pairs % self._num_groups == group).nonzero().squeeze(1)  # (Q,)
            if not len(rows):
                continue
            # For each hypothesis of the group, the index of its pair among the P pairs. Both are in
            # the order of the pair numbers.
            _, pair_of_row = torch.unique_consecutive(row_pairs[rows], return_inverse=True)  # (Q,)
            # maps the Q hypotheses to a grid of the P pairs and their beams
            grid = BeamGrid(pair_of_row, len(pair_indices), device)
            # the rows of `times_chosen` for the P pairs and for the Q hypotheses
            group_sentences = pair_sentences[pair_indices]  # (P,)
            row_sentences = group_sentences[pair_of_row]  # (Q,)
            penalties = self._penalty * times_chosen[to_device(row_sentences, device)]  # (Q, V)
            best = self._rank_group(log_probs, to_device(rows, device), penalties, grid)
            self._count_chosen(times_chosen, to_device(group_sentences, device), best)
            _replace_rows(candidates, to_device(pair_indices, device), best)
        return candidates

    def _make_fillers(self, num_pairs: int, device: torch.device) -> Candidates:
        """Return candidates (num_pairs, 2K) with sums of minus infinity."""
        shape = (num_pairs, 2 * self._state.request.config.beam_size)
        return Candidates(
            sums=torch.full(shape, NEG_INF, device=device),
            rows=torch.zeros(shape, dtype=torch.long, device=device),
            tokens=torch.zeros(shape, dtype=torch.long, device=device),
            log_probs=torch.zeros(shape, device=device),
        )

    def _rank_group(
        self, log_probs: Tensor, rows: Tensor, penalties: Tensor, grid: BeamGrid
    ) -> Candidates:
        """Return the 2 K best candidates of each pair of one group, (P, 2K) or fewer columns.

        Args:
            log_probs: log-probabilities of the next token (R, V).
            rows: the rows of `log_probs` that belong to the group (Q,).
            penalties: subtracted from these rows, but only for the ranking (Q, V).
            grid: which of `rows` belong to which pair.
        """
        totals = self._state.beam.total_log_probs
        beam_size = self._state.request.config.beam_size
        best = best_candidates(totals[rows], log_probs[rows] - penalties, grid, 2 * beam_size)
        is_filler = best.sums == NEG_INF
        # `best_candidates` searches blocks of 64 tokens. The last block may extend beyond the
        # vocabulary, so the tokens of fillers may be V or larger.
        tokens = best.tokens.clamp(max=log_probs.size(1) - 1)
        candidate_rows = rows[best.rows]
        token_log_probs = log_probs[candidate_rows, tokens]
        sums = totals[candidate_rows] + token_log_probs
        return Candidates(
            sums=sums.masked_fill(is_filler, NEG_INF),
            rows=candidate_rows,
            tokens=tokens,
            log_probs=token_log_probs,
        )

    def _count_chosen(self, times_chosen: Tensor, sentences: Tensor, best: Candidates) -> None:
        """Add 1 to `times_chosen` (N, V) for each token that enters the new beam of a group.

        The candidates of pair i, `best.tokens[i]`, are counted in `times_chosen[sentences[i]]`.
        `sentences` is (P,), and the tensors of `best` are (P, 2K).
        """
        # as in `BeamSearch._choose`, the first K candidates without EOS become the beam
        is_without_eos = best.tokens != self._state.tokenizers.tgt.eos_id
        num_without_eos = is_without_eos.cumsum(dim=1)  # (P, 2K), up to each candidate
        is_among_first = num_without_eos <= self._state.request.config.beam_size
        is_chosen = is_without_eos & is_among_first & (best.sums > NEG_INF)  # (P, 2K)
        candidate_sentences = sentences.unsqueeze(1).expand_as(best.tokens)  # (P, 2K)
        chosen_sentences = candidate_sentences[is_chosen]
        chosen_tokens = best.tokens[is_chosen]
        ones = torch.ones(len(chosen_tokens), device=times_chosen.device)
        times_chosen.index_put_((chosen_sentences, chosen_tokens), ones, accumulate=True)


def _replace_rows(candidates: Candidates, rows: Tensor, replacements: Candidates) -> None:
    """Overwrite the rows `rows` (P,) of `candidates` (B, 2K), in place.

    `replacements` are (P, 2K). If they have fewer columns, the last columns of the rows keep their
    values.
    """
    width = replacements.sums.size(1)
    candidates.sums[rows, :width] = replacements.sums
    candidates.rows[rows, :width] = replacements.rows
    candidates.tokens[rows, :width] = replacements.tokens
    candidates.log_probs[rows, :width] = replacements.log_probs
