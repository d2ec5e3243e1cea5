"""Rerank candidates by a noisy channel: how well a reverse model translates them back.

Yee et al. (2019) and Ng et al. (2019) add a language model. Here, a weight for the length balances
the scores, as in the latter paper.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from nmt.config import RerankConfig
from nmt.data.languages import DEFAULT_LANGUAGES, LanguagePair, Tags, choose_tags
from nmt.errors import ConfigError
from nmt.translate.engines.base import LoadedModel
from nmt.translate.engines.native import load_models
from nmt.translate.pair_scores import score_pairs
from nmt.translate.results import Translation


class NoisyChannel:
    """Scores a candidate y of a source x by log P(y|x) + a log P(x|y) + b |y|, in nats.

    The log-probabilities are sums over tokens, EOS included, without normalization by length. |y|
    is the number of tokens of y with EOS, a is `reverse_weight`, and b is `length_weight`.

    Args:
        config: the weights, and the folder of the reverse model.
        languages: the directions of the forward model that the sources may have.
        device: the device of the reverse model.
    """

    def __init__(
        self, config: RerankConfig, languages: Sequence[LanguagePair], device: str
    ) -> None:
        self._config = config
        self._model = _load_reverse_model(tuple(config.reverse_model or ()), device)
        self._tags = self._choose_tags(languages)

    def score(
        self, sources: Sequence[str], candidates: Sequence[Sequence[Translation]]
    ) -> list[list[Translation]]:
        """See `Reranker.score`; also sets `reverse_log_prob`."""
        candidate_texts: list[str] = []
        source_texts: list[str] = []
        for source, translations in zip(sources, candidates, strict=True):
            candidate_texts += [translation.text for translation in translations]
            source_texts += [source] * len(translations)
        hypotheses = score_pairs(
            self._model.backend,
            self._model.tokenizer,
            candidate_texts,
            source_texts,
            self._model.defaults,
            tags=self._tags,
        )
        reverse_log_probs = iter([hypothesis.log_prob for hypothesis in hypotheses])
        scored = []
        for translations in candidates:
            scored.append([self._add_score(item, next(reverse_log_probs)) for item in translations])
        return scored

    def _add_score(self, translation: Translation, reverse_log_prob: float) -> Translation:
        """Return a candidate with the log-probability of its source given the candidate."""
        score = translation.log_prob + self._config.reverse_weight * reverse_log_prob
        score += self._config.length_weight * translation.num_tokens
        return replace(translation, reverse_log_prob=reverse_log_prob, rerank_score=score)

    def _choose_tags(self, languages: Sequence[LanguagePair]) -> Tags:
        """Return the tags with which the reverse model translates from target to source.

        Raises a `ConfigError` if the model does not translate in this direction, or in several
        ones of which the text may have any.
        """
        src_langs = {pair.src_lang for pair in languages} - set(DEFAULT_LANGUAGES)
        tgt_langs = {pair.tgt_lang for pair in languages} - set(DEFAULT_LANGUAGES)
        names = ",".join(self._config.reverse_model or ())
        try:
            tags = choose_tags(
                self._model.directions,
                self._model.tokenizer,
                src_lang=tgt_langs.pop() if len(tgt_langs) == 1 else "",
                tgt_lang=src_langs.pop() if len(src_langs) == 1 else "",
            )
        except ConfigError as error:
            raise ConfigError(f"reverse_model={names}: {error}") from None
        if tags.choices:
            raise ConfigError(
                f"reverse_model={names}: has several directions; give src_lang=... and tgt_lang=..."
            )
        return tags


@functools.lru_cache(maxsize=2)
def _load_reverse_model(folders: tuple[str, ...], device: str) -> LoadedModel:
    """Load a reverse model or ensemble once for all calls of a translator."""
    return load_models(folders, device=device)
