"""Diverse beam search (Vijayakumar et al., 2018): groups of hypotheses with different tokens."""

# N sentences, B pairs of a sentence and a group, K beam size of a group, V vocab
# R live hypotheses, sorted by sentence and group

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
    """A beam search in groups. In each step, one group after the other chooses its tokens.

    A group ranks a candidate by its log-probability minus `diversity_penalty` times the number of
    hypotheses of earlier groups that got the same token in this step (Hamming diversity). The
    penalty does not change log-probabilities and scores of hypotheses.

    `BeamSearch` treats group g of sentence i as a sentence with the number i * beam_groups + g.
    """

    def __init__(self, stepper: Stepper, request: SearchRequest, tokenizer: Tokenizers) -> None:
        config = request.config
        self._num_groups = config.beam_groups
        self._penalty = config.diversity_penalty
        self._max_results = request.num_results
        group_config = replace(
            config,
            beam_size=config.beam_size // config.beam_groups,
            beam_groups=1,
            diversity_penalty=SearchConfig.diversity_penalty,  # the only valid value for one group
        )
        group_request = replace(request, config=group_config)
        super().__init__(stepper, group_request, tokenizer, num_copies=self._num_groups)

    def result(self, sentence: int) -> list[Hypothesis]:
        """See `BeamSearch.result`. Equal hypotheses of several groups are returned once."""
        hypotheses: dict[tuple[int, ...], Hypothesis] = {}
        first = sentence * self._num_groups
        for number in range(first, first + self._num_groups):
            for hypothesis in super().result(number):
                hypotheses.setdefault(tuple(hypothesis.tokens), hypothesis)
        ranking = sorted(hypotheses.values(), key=lambda item: item.rank, reverse=True)
        return ranking[: self._max_results]

    def _rank(self, log_probs: Tensor) -> Candidates:
        """See `BeamSearch._rank`; ranks the groups in order, with a penalty for chosen tokens."""
        beam = self._state.beam
        device = log_probs.device
        # the number of each pair (B,), and for each row the index of its pair (R,)
        pair_numbers, pair_indices = torch.unique_consecutive(beam.sentences, return_inverse=True)
        sentences = pair_numbers // self._num_groups  # (B,)
        _, sentence_indices = torch.unique_consecutive(sentences, return_inverse=True)  # (B,)
        pair_groups = pair_numbers % self._num_groups  # (B,)
        row_groups = beam.sentences % self._num_groups  # (R,)
        shape = (len(pair_numbers), 2 * self._state.request.config.beam_size)
        candidates = Candidates(
            sums=torch.full(shape, NEG_INF, device=device),
            rows=torch.zeros(shape, dtype=torch.long, device=device),
            tokens=torch.zeros(shape, dtype=torch.long, device=device),
            log_probs=torch.zeros(shape, device=device),
        )
        num_sentences = int(sentence_indices[-1]) + 1
        times_chosen = torch.zeros(num_sentences, log_probs.size(1), device=device)  # (N, V)
        for group in range(self._num_groups):
            pairs = (pair_groups == group).nonzero().squeeze(1)  # indices of pairs
            if not len(pairs):
                continue
            rows = (row_groups == group).nonzero().squeeze(1)  # indices of hypotheses
            # for each of these rows, the index of its pair in `pairs`
            row_pairs = pair_indices[rows]
            _, grid_rows = torch.unique_consecutive(row_pairs, return_inverse=True)
            grid = BeamGrid(grid_rows, len(pairs), device)
            sentences_of_rows = to_device(sentence_indices[row_pairs], device)
            penalties = self._penalty * times_chosen[sentences_of_rows]  # (len(rows), V)
            best = self._rank_group(log_probs, to_device(rows, device), penalties, grid)
            index = to_device(pairs, device)
            width = best.sums.size(1)  # less than 2 K if there are fewer candidates
            for values, group_values in zip(candidates, best, strict=True):  # sums, rows, ...
                values[index, :width] = group_values
            self._count_chosen(times_chosen, to_device(sentence_indices[pairs], device), best)
        return candidates

    def _rank_group(
        self, log_probs: Tensor, rows: Tensor, penalties: Tensor, grid: BeamGrid
    ) -> Candidates:
        """Return the 2 K best candidates of a group, for each of its sentences.

        `rows` are the rows of the group in `log_probs` (R, V), and `penalties` (len(rows), V) are
        subtracted for the ranking only.
        """
        totals = self._state.beam.total_log_probs
        beam_size = self._state.request.config.beam_size
        best = best_candidates(totals[rows], log_probs[rows] - penalties, grid, 2 * beam_size)
        # fillers, whose sums are minus infinity, may have tokens beyond the vocabulary
        tokens = best.tokens.clamp(max=log_probs.size(1) - 1)
        candidate_rows = rows[best.rows]
        token_log_probs = log_probs[candidate_rows, tokens]
        sums = totals[candidate_rows] + token_log_probs
        return Candidates(
            sums=sums.masked_fill(best.sums == NEG_INF, NEG_INF),
            rows=candidate_rows,
            tokens=tokens,
            log_probs=token_log_probs,
        )

    def _count_chosen(self, times_chosen: Tensor, sentences: Tensor, best: Candidates) -> None:
        """Count the tokens of the new beam of a group in `times_chosen` (N, V).

        `sentences` (B',) are the rows of `times_chosen` for the rows of `best` (B', 2K).
        """
        # as in `BeamSearch._choose`, the first K candidates without EOS become the beam
        is_live = best.tokens != self._state.tokenizer.tgt.eos_id
        num_without_eos = is_live.cumsum(dim=1)  # (B', 2K), up to each candidate
        is_live &= num_without_eos <= self._state.request.config.beam_size
        is_live &= best.sums > NEG_INF
        rows = sentences.unsqueeze(1).expand_as(best.tokens)[is_live]
        ones = torch.ones(len(rows), device=times_chosen.device)
        times_chosen.index_put_((rows, best.tokens[is_live]), ones, accumulate=True)
