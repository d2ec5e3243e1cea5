"""Find translations that loop, which means that they repeat tokens, and search them once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nmt.search.hypotheses import Hypothesis
from nmt.search.request import Ids, SearchRequest
from nmt.translate.engines.base import Backend

MAX_REPEATS = 4  # largest number of repeats in a row of a translation that does not loop
NGRAM_OF_SECOND_SEARCH = 4  # `no_repeat_ngram` of the second search


def replace_loops(
    backend: Backend, request: SearchRequest, hypotheses: list[list[Hypothesis]]
) -> list[list[Hypothesis]]:
    """Search sentences again whose best hypothesis loops or met the length limit.

    The second search forbids repeated n-grams. The hypotheses of a sentence are replaced if the
    best hypothesis of the second search is better, see `_rank`. Does nothing for samples and with
    `loop_guard=false`.
    """
    config = request.config
    # the first search may already have forbidden all repeats that the second would forbid
    forbids_repeats = 0 < config.no_repeat_ngram <= NGRAM_OF_SECOND_SEARCH
    if not config.loop_guard or config.sampling or forbids_repeats:
        return hypotheses
    indices = []
    for i, source in enumerate(request.sources):
        if needs_second_search(source, hypotheses[i][0]):
            indices.append(i)
    if not indices:
        return hypotheses
    second_request = replace(
        request.select(indices),
        config=replace(config, no_repeat_ngram=NGRAM_OF_SECOND_SEARCH),
        with_scores=True,  # `_rank` needs them
    )
    second_hypotheses = backend.search(second_request)
    results = list(hypotheses)
    for i, second in zip(indices, second_hypotheses, strict=True):
        source = request.sources[i]
        first_rank = _rank(source, hypotheses[i][0])
        second_rank = _rank(source, second[0])
        if second_rank > first_rank:
            results[i] = [replace(hypothesis, searched_again=True) for hypothesis in second]
    return results


def needs_second_search(source: Ids, hypothesis: Hypothesis) -> bool:
    """Return whether the translation of `source` loops or met the length limit."""
    return not hypothesis.finished or is_looping(source, hypothesis.tokens, MAX_REPEATS)


def _rank(source: Ids, hypothesis: Hypothesis) -> tuple[bool, float]:
    """Return a key that is higher for the better of two translations.

    A translation that does not loop is better than one that loops. Otherwise, the log-probability
    per token decides. A translation without log-probability (nan) is not better.
    """
    loops = is_looping(source, hypothesis.tokens, MAX_REPEATS)
    return not loops, hypothesis.log_prob / len(hypothesis.tokens)


def is_looping(source: Sequence[Any], target: Sequence[Any], max_repeats: int) -> bool:
    """Return whether the target repeats tokens more than `max_repeats` times in a row, and more
    often than the source does.
    """
    # Two quick tests: a loop has more than `max_repeats` occurrences of each of its tokens.
    num_repeated_tokens = len(target) - len(set(target))
    if num_repeated_tokens < max_repeats:
        return False
    if max(Counter(target).values(), default=0) <= max_repeats:
        return False
    # sequences that occur more than `max_repeats` times in a row are at most this long
    max_period = len(target) // (max_repeats + 1)
    num_repeats = count_repeats(target, max_period)
    return num_repeats > max_repeats and num_repeats > count_repeats(source)


def count_repeats(tokens: Sequence[Any], max_period: int | None = None) -> int:
    """Return the largest number of times in a row that a sequence occurs: 3 in `x a b a b a b`.

    With `max_period`, counts only sequences of at most this many tokens.
    """
    token_ids = {token: i for i, token in enumerate(tokens)}
    ids = np.array([token_ids[token] for token in tokens])
    num_repeats = min(len(ids), 1)
    if max_period is None:
        max_period = len(ids) // 2
    for period in range(1, max_period + 1):
        # In `a b a b a b`, with period 2, the first 4 tokens equal the token one period later. This
        # run of 4 equal tokens gives 4 // 2 + 1 = 3 repeats.
        # True for a token that differs from the token one period later
        differs = ids[:-period] != ids[period:]
        run_ends = np.flatnonzero(differs)
        run_lengths = np.diff(run_ends, prepend=-1, append=len(differs)) - 1
        longest_run = int(run_lengths.max())
        num_repeats = max(num_repeats, longest_run // period + 1)
    return num_repeats
