"""Find the weights of rerank=noisy_channel on a validation set, by a search over two grids."""

# N lines, K candidates of the line that has the most

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def find_weights(
    candidates: Sequence[Sequence[Translation]],
    score: Callable[[npt.NDArray[np.int64]], float],
) -> ChannelWeights:
    """Return the weights whose best candidates have the highest score.

    Among equal scores, returns the weights closest to 0.

    Args:
        candidates: the candidates of each line, at least one, with `reverse_log_prob`.
        score: returns the score of one candidate per line, given their indices (N,).
    """
    features = _Features(candidates)
    scores: dict[ChannelWeights, float] = {}

    def rank(weights: ChannelWeights) -> tuple[float, float, float]:
        return scores[weights], -abs(weights.reverse_weight), -abs(weights.length_weight)

    for reverse_weight, length_weight in itertools.product(_REVERSE_WEIGHTS, _LENGTH_WEIGHTS):
        weights = ChannelWeights(float(reverse_weight), float(length_weight))
        scores[weights] = score(features.choose(weights))
    coarse = max(scores, key=rank)
    for reverse_step, length_step in itertools.product(_FINE_STEPS, _FINE_STEPS):
        weights = ChannelWeights(
            reverse_weight=round(max(coarse.reverse_weight + float(reverse_step), 0.0), 2),
            length_weight=round(coarse.length_weight + float(length_step), 2),
        )
        scores[weights] = score(features.choose(weights))
    return max(scores, key=rank)


def choose_by_weights(
    candidates: Sequence[Sequence[Translation]], weights: ChannelWeights
) -> list[Translation]:
    """Return the best candidate of each line."""
    choice = _Features(candidates).choose(weights)
    return [line[index] for line, index in zip(candidates, choice.tolist(), strict=True)]


class _Features:
    """The log-probabilities and lengths of candidates as arrays (N, K).

    Weights choose only among the candidates with the highest completeness, as in `rank_candidates`.
    """

    def __init__(self, candidates: Sequence[Sequence[Translation]]) -> None:
        shape = (len(candidates), max(map(len, candidates), default=1))
        # -inf for a candidate that is never chosen: it is missing, or less complete than another
        self._log_probs: _Floats = np.full(shape, -np.inf)
        self._reverse_log_probs: _Floats = np.zeros(shape)
        self._lengths: _Floats = np.zeros(shape)
        for i, translations in enumerate(candidates):
            highest_completeness = max(item.completeness for item in translations)
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
        choice: npt.NDArray[np.int64] = np.argmax(
            scores + weights.length_weight * self._lengths, axis=1
        )
        return choice
