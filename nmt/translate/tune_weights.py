"""Find the weights of rerank=noisy_channel on a validation set, by a coarse and a fine search."""

# N lines, K candidates: the largest number of candidates of a line

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nmt.translate.results import Translation

_Floats = npt.NDArray[np.float64]
_REVERSE_WEIGHTS = np.arange(0, 31) / 10  # coarse grid: 0.0, 0.1, ..., 3.0
_LENGTH_WEIGHTS = np.arange(-20, 31) / 10  # coarse grid: -2.0, -1.9, ..., 3.0
_FINE_STEPS = np.arange(-4, 5) / 50  # around the best coarse weights: -0.08, -0.06, ..., 0.08


@dataclass(frozen=True)
class ChannelWeights:
    """The weights of a noisy channel, see `nmt.translate.noisy_channel.NoisyChannel`."""

    reverse_weight: float
    length_weight: float


class CandidateScorer(Protocol):
    """Scores the corpus that consists of one chosen candidate for each line. Higher is better.

    Both methods take the indices of the chosen candidates (N,). `nmt.evaluate.CandidateCounts` is
    such a scorer.
    """

    def score(self, choice: npt.NDArray[np.int64]) -> float:
        """Return the score of the corpus."""

    def score_resamples(self, choice: npt.NDArray[np.int64]) -> _Floats:
        """Return the scores of bootstrap resamples of the lines, the same resamples each time."""


def find_weights(
    candidates: Sequence[Sequence[Translation]],
    scorer: CandidateScorer,
    min_score: float = -math.inf,
) -> ChannelWeights:
    """Return simple weights that choose candidates with about the highest score.

    Many weights have almost the highest score, and which of them has the highest depends on the
    lines. Length weights far from 0 often fit only the lengths of these references. So all weights
    that are at most one standard error worse than the best count as equally good (the 1-SE rule of
    Breiman et al., 1984). Of these, returns the weights whose length weight is closest to 0, and if
    several are equally close, those with the smallest reverse weight. The standard error is the
    bootstrap estimate for the difference between the best score and the score of the weights.

    Args:
        candidates: the candidates of each line, at least one, with `reverse_log_prob`.
        scorer: scores the candidates that weights choose.
        min_score: the score that the returned weights must reach, if any weights reach it.
    """
    features = _Features(candidates)
    scores: dict[ChannelWeights, float] = {}
    for reverse_weight, length_weight in itertools.product(_REVERSE_WEIGHTS, _LENGTH_WEIGHTS):
        weights = ChannelWeights(float(reverse_weight), float(length_weight))
        scores[weights] = scorer.score(features.choose(weights))
    best_coarse = _best(scores)
    for reverse_step, length_step in itertools.product(_FINE_STEPS, _FINE_STEPS):
        reverse_weight = best_coarse.reverse_weight + float(reverse_step)
        reverse_weight = max(reverse_weight, 0.0)
        length_weight = best_coarse.length_weight + float(length_step)
        # multiples of 0.02, without the rounding errors of the sums
        weights = ChannelWeights(round(reverse_weight, 2), round(length_weight, 2))
        scores[weights] = scorer.score(features.choose(weights))
    best = _best(scores)
    best_resampled_scores = scorer.score_resamples(features.choose(best))
    min_score = min(min_score, scores[best])  # `best` always qualifies
    rejected_choices: set[bytes] = set()  # other weights may choose the same candidates
    for weights in sorted(scores, key=_complexity):
        choice = features.choose(weights)
        if scores[weights] < min_score or choice.tobytes() in rejected_choices:
            continue
        resampled_differences = best_resampled_scores - scorer.score_resamples(choice)
        standard_error = float(np.std(resampled_differences))
        if scores[best] - scores[weights] <= standard_error:
            return weights
        rejected_choices.add(choice.tobytes())
    return best


def _best(scores: dict[ChannelWeights, float]) -> ChannelWeights:
    """Return the weights with the highest score. If several have it, return the simplest."""
    simplest_first = sorted(scores, key=_complexity)
    # `max` returns the first of several equal ones
    return max(simplest_first, key=lambda weights: scores[weights])


def _complexity(weights: ChannelWeights) -> tuple[float, float]:
    """Return a sort key that is lower for simpler weights."""
    return abs(weights.length_weight), weights.reverse_weight


def choose_by_weights(
    candidates: Sequence[Sequence[Translation]], weights: ChannelWeights
) -> list[Translation]:
    """Return the best candidate of each line."""
    choice = _Features(candidates).choose(weights)
    return [line[index] for line, index in zip(candidates, choice.tolist(), strict=True)]


class _Features:
    """The log-probabilities and lengths of candidates as arrays (N, K).

    Only the candidates of a line with the highest `Translation.completeness` can be chosen, as in
    `rank_candidates`.
    """

    def __init__(self, candidates: Sequence[Sequence[Translation]]) -> None:
        max_candidates = max((len(translations) for translations in candidates), default=1)
        shape = (len(candidates), max_candidates)  # (N, K)
        # -inf for a candidate that is never chosen: it is missing, or less complete than another
        self._log_probs: _Floats = np.full(shape, -np.inf)
        self._reverse_log_probs: _Floats = np.zeros(shape)
        self._lengths: _Floats = np.zeros(shape)
        for i, translations in enumerate(candidates):
            highest_completeness = max(translation.completeness for translation in translations)
            for k, translation in enumerate(translations):
                if translation.completeness < highest_completeness:
                    continue
                self._log_probs[i, k] = translation.log_prob
                # lines with a single candidate are not scored by the reverse model
                self._reverse_log_probs[i, k] = translation.reverse_log_prob or 0.0
                self._lengths[i, k] = translation.num_tokens

    def choose(self, weights: ChannelWeights) -> npt.NDArray[np.int64]:
        """Return the index of the best candidate of each line (N,)."""
        scores = self._log_probs + weights.reverse_weight * self._reverse_log_probs
        scores += weights.length_weight * self._lengths
        choice: npt.NDArray[np.int64] = np.argmax(scores, axis=1)
        return choice
