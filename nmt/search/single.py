"""Greedy and beam search for one sentence on a CPU.

The results equal the results of the general search in `nmt.search.search`. For one sentence,
operations on small tensors would take most of the time. Therefore hypotheses are lists, and NumPy
ranks their continuations.
"""

# R live hypotheses, best first; V vocab

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nmt.data.batch import pad_source
from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.single import MAX_ROWS
from nmt.model.fast.top import NEG_INF
from nmt.search.beam import ResultList, prune_threshold
from nmt.search.constraints import forbidden_ids
from nmt.search.hypotheses import Hypothesis, check_finite
from nmt.search.request import SearchRequest
from nmt.search.stepper import Stepper

Floats = np.ndarray[Any, np.dtype[np.float32]]
_NUM_GROUPS = 256  # groups into which `_find_highest` divides the values


def can_search_one_sentence(request: SearchRequest, device: torch.device) -> bool:
    """Return whether `search_one_sentence` supports a request.

    The request must have one sentence and few hypotheses, and must not use sampling, groups,
    attention, forced prefixes or constraints.
    """
    config = request.config
    return (
        len(request.sources) == 1
        and device.type == "cpu"
        and config.beam_size <= MAX_ROWS
        and not config.sampling
        and not config.needs_attention
        and not config.has_constraints
        and config.beam_groups == 1
        and not any(request.prefixes)
        and not request.constraints
    )


def search_one_sentence(
    stepper: Stepper, request: SearchRequest, tokenizers: Tokenizers
) -> list[Hypothesis]:
    """Return the hypotheses of the only sentence of a request, best first."""
    src, src_lengths = pad_source(request.sources, tokenizers)  # (1, S), (1,)
    state = stepper.start_single(src, src_lengths)
    decoder = SentenceDecoder(stepper, state, request, tokenizers)
    if request.config.beam_size == 1:
        hypotheses = [_search_greedily(decoder)]
    else:
        hypotheses = _search_with_beam(decoder)
    check_finite(hypotheses)
    return hypotheses


class SentenceDecoder:
    """Runs the decoder of a model on the live hypotheses of one sentence."""

    def __init__(
        self, stepper: Stepper, state: Any, request: SearchRequest, tokenizers: Tokenizers
    ) -> None:
        self.request = request
        self.config = request.config
        self.bos_id = tokenizers.tgt.bos_id
        self.eos_id = tokenizers.tgt.eos_id
        self.max_length = request.length_limits()[0]  # in tokens, including EOS
        self._forbidden = forbidden_ids(tokenizers.tgt)
        self._stepper = stepper
        self._state = state  # from `stepper.start_single`

    def next_log_probs(self, tokens: list[int]) -> Floats:
        """Append a token to each row; return the log-probabilities of the next token (R, V)."""
        tensor = self._stepper.step(torch.tensor(tokens), self._state)  # (R, V)
        log_probs: Floats = tensor.numpy()
        log_probs[:, self._forbidden] = NEG_INF
        return log_probs

    def reorder(self, rows: list[int]) -> None:
        """Keep the hypotheses at `rows`, in that order; a row may be repeated or missing."""
        self._state = self._stepper.reorder(self._state, torch.tensor(rows))

    def make_hypothesis(self, tokens: list[int], log_probs: list[float]) -> Hypothesis:
        """Return a complete hypothesis with its score."""
        return Hypothesis.from_tokens(tokens, log_probs, self.config, eos_id=self.eos_id)


def _search_greedily(decoder: SentenceDecoder) -> Hypothesis:
    """Append the most probable token until EOS or the length limit."""
    tokens: list[int] = []
    token_log_probs: list[float] = []
    token = decoder.bos_id
    while len(tokens) < decoder.max_length:
        log_probs = decoder.next_log_probs([token])[0]  # (V,)
        token = int(log_probs.argmax())  # the lowest id if several are equal
        tokens.append(token)
        token_log_probs.append(float(log_probs[token]))
        if token == decoder.eos_id:
            break
    return decoder.make_hypothesis(tokens, token_log_probs)


@dataclass(frozen=True)
class Continuation:
    """A hypothesis with one more token."""

    parent_row: int  # index in the beam of the hypothesis without this token
    tokens: list[int]  # BOS, then the tokens of the hypothesis
    log_probs: list[float]  # log-probability of each token after BOS
    total: np.float32  # sum of the log-probabilities; float32, as in `BeamSearch`


def _search_with_beam(decoder: SentenceDecoder) -> list[Hypothesis]:
    """Return the results of beam search, which equal the results of `BeamSearch`."""
    beam_size = decoder.config.beam_size
    results = ResultList(decoder.request.num_results)
    beam = [Continuation(0, [decoder.bos_id], [], np.float32(0))]
    for length in range(1, decoder.max_length + 1):
        last_tokens = [continuation.tokens[-1] for continuation in beam]  # (R,)
        log_probs = decoder.next_log_probs(last_tokens)  # (R, V)
        ranking = _rank_continuations(beam, log_probs, 2 * beam_size)
        live = []
        for rank, candidate in enumerate(ranking):
            if candidate.tokens[-1] != decoder.eos_id:
                live.append(candidate)
            elif rank < beam_size:  # EOS below the best `beam_size` continuations is ignored
                results.add(decoder.make_hypothesis(candidate.tokens[1:], candidate.log_probs))
        beam = live[:beam_size]
        if length == decoder.max_length:
            for candidate in beam:  # these are complete, though they do not end with EOS
                results.add(decoder.make_hypothesis(candidate.tokens[1:], candidate.log_probs))
            beam = []
        elif results.worst_score > NEG_INF:  # it is NEG_INF until there are enough results
            threshold = _compute_prune_threshold(decoder, results.worst_score, length)
            beam = [candidate for candidate in beam if candidate.total > threshold]
        if not beam:
            break
        decoder.reorder([candidate.parent_row for candidate in beam])
    return results.hypotheses


def _rank_continuations(
    beam: list[Continuation], log_probs: Floats, count: int
) -> list[Continuation]:
    """Return up to `count` continuations with the highest totals, best first.

    Among equal totals, lower rows come first, then lower tokens.
    """
    previous = np.array([continuation.total for continuation in beam])  # (R,)
    totals = (previous[:, None] + log_probs).ravel()  # (R * V,)
    best = _find_highest(totals, count)
    rows, tokens = np.divmod(best, log_probs.shape[1])
    ranking = []
    for i, row, token in zip(best.tolist(), rows.tolist(), tokens.tolist(), strict=True):
        parent = beam[row]
        continuation = Continuation(
            parent_row=row,
            tokens=[*parent.tokens, token],
            log_probs=[*parent.log_probs, float(log_probs[row, token])],
            total=totals[i],
        )
        ranking.append(continuation)
    return ranking


def _find_highest(values: Floats, count: int) -> np.ndarray[Any, Any]:
    """Return the indices of up to `count` highest values above minus infinity, best first.

    Equal values keep their order. Sorting all values would be slow, so values below a threshold are
    left out. The threshold is the `count`-th highest maximum of groups of values. At least `count`
    values reach it: the maxima of `count` groups. `count` must not exceed the number of groups.
    """
    threshold = np.finfo(np.float32).min  # the lowest value above minus infinity
    group_size = len(values) // _NUM_GROUPS
    if group_size:
        # column i is the group of the values i, i + 256, i + 512, ...
        num_grouped = group_size * _NUM_GROUPS  # the remaining values are in no group
        groups = values[:num_grouped].reshape(group_size, _NUM_GROUPS)
        maxima = groups.max(axis=0)  # (_NUM_GROUPS,)
        nth_highest_maximum = np.partition(maxima, -count)[-count]
        threshold = max(threshold, nth_highest_maximum)
    indices = np.flatnonzero(values >= threshold)
    order = np.argsort(-values[indices], kind="stable")[:count]
    return indices[order]


def _compute_prune_threshold(decoder: SentenceDecoder, worst_score: float, length: int) -> float:
    """Return the log-probability that a live hypothesis must exceed to become a result later.

    `worst_score` is the lowest score of the results.
    """
    threshold = prune_threshold(
        torch.tensor([worst_score], dtype=torch.float64),
        torch.tensor([length]),
        torch.tensor([decoder.max_length]),
        decoder.config,
    )
    return float(threshold)
