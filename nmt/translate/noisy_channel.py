"""Rerank candidates by a noisy channel: how well a reverse model translates them back.

Yee et al. (2019) and Ng et al. (2019) also use the score of a language model, which is left out
here. As in Ng et al., a reward per token balances the preference of the scores for short texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nmt.config import RerankConfig
from nmt.data.languages import LanguagePair
from nmt.translate.results import Translation
from nmt.translate.reverse_model import ReverseModel


class NoisyChannel:
    """Scores a candidate y of a source x by log P(y|x) + a log P(x|y) + b |y|, in nats.

    The log-probabilities are sums over the tokens and EOS. |y| is the number of tokens of y with
    EOS, a is `reverse_weight`, and b is `length_weight`.

    Args:
        config: the weights, and the folder of the reverse model.
        languages: the directions of the forward model that the sources may have.
        device: the device of the reverse model.
    """

    def __init__(
        self, config: RerankConfig, languages: Sequence[LanguagePair], device: str
    ) -> None:
        self._config = config
        self._model = ReverseModel(config.reverse_model or [], languages, device)

    def score(
        self, sources: Sequence[str], candidates: Sequence[Sequence[Translation]]
    ) -> list[list[Translation]]:
        """See `Reranker.score`; also sets `reverse_log_prob`."""
        candidate_texts: list[str] = []
        source_texts: list[str] = []
        for source, translations in zip(sources, candidates, strict=True):
            candidate_texts += [translation.text for translation in translations]
            source_texts += [source] * len(translations)
        hypotheses = iter(self._model.score(source_texts, candidate_texts))
        scored = []
        for translations in candidates:
            with_scores = []
            for translation in translations:
                with_scores.append(self._add_score(translation, next(hypotheses).log_prob))
            scored.append(with_scores)
        return scored

    def _add_score(self, translation: Translation, reverse_log_prob: float) -> Translation:
        """Return a candidate with its scores; `reverse_log_prob` is log P(x|y)."""
        score = translation.log_prob + self._config.reverse_weight * reverse_log_prob
        score += self._config.length_weight * translation.num_tokens
        return replace(translation, reverse_log_prob=reverse_log_prob, rerank_score=score)
