"""Rerank the candidates of a search by another score.

A reranker has the interface `Reranker`. To add one, write a class, enter it in `_RERANKERS`, and
add its name to `nmt.config.RerankScore`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

from nmt.config import RerankConfig, RerankScore
from nmt.data.languages import LanguagePair, Tags, split_tag
from nmt.errors import ConfigError
from nmt.runtime.score_command import run_score_command
from nmt.search.protect import lacks_protected
from nmt.translate.noisy_channel import NoisyChannel
from nmt.translate.results import LineResult, Translation


class Reranker(Protocol):
    """Scores the candidates of each source."""

    def score(
        self, sources: Sequence[str], candidates: Sequence[Sequence[Translation]]
    ) -> list[list[Translation]]:
        """Return the candidates of each source, in the same order, with `rerank_score` set.

        A higher score is better.
        """


class MinimumBayesRisk:
    """Scores a candidate by its mean similarity to all candidates of its source.

    The similarity is chrF. Each candidate is compared only once, with a reference that has the
    average n-gram counts of all candidates (Vamvas and Sennrich, 2024). The time is thus linear in
    the number of candidates. Equal candidates are not merged.
    """

    def __init__(
        self, config: RerankConfig, languages: Sequence[LanguagePair], device: str
    ) -> None:
        if importlib.util.find_spec("fastchrf") is None:
            raise ConfigError("rerank=mbr needs fastchrf; install it with: pip install nmt[mbr]")

    def score(
        self, sources: Sequence[str], candidates: Sequence[Sequence[Translation]]
    ) -> list[list[Translation]]:
        """See `Reranker.score`."""
        import fastchrf  # an extra

        scored = []
        for translations in candidates:
            texts = [translation.text for translation in translations]
            # The arguments are, for each sentence, its candidates and its references. Here, the
            # candidates of one sentence are also its references.
            scores_of_sentences = fastchrf.aggregate_chrf([texts], [texts])
            scored.append(_with_scores(translations, scores_of_sentences[0]))
        return scored


class ScoreCommand:
    """Scores a candidate by the number that another program prints for it."""

    def __init__(
        self, config: RerankConfig, languages: Sequence[LanguagePair], device: str
    ) -> None:
        self._command = config.rerank_command or ""
        self._timeout_seconds = config.rerank_timeout

    def score(
        self, sources: Sequence[str], candidates: Sequence[Sequence[Translation]]
    ) -> list[list[Translation]]:
        """See `Reranker.score`. The program runs once for all candidates."""
        lines = []
        for source, translations in zip(sources, candidates, strict=True):
            for translation in translations:
                pair = {"src": source, "mt": translation.text}
                lines.append(json.dumps(pair, ensure_ascii=False))
        scores = run_score_command(
            "rerank_command", self._command, lines, timeout_seconds=self._timeout_seconds
        )
        remaining_scores = iter(scores)
        scored = []
        for translations in candidates:
            scores_of_source = list(islice(remaining_scores, len(translations)))
            scored.append(_with_scores(translations, scores_of_source))
        return scored


_RERANKERS: dict[RerankScore, Callable[[RerankConfig, Sequence[LanguagePair], str], Reranker]] = {
    RerankScore.mbr: MinimumBayesRisk,
    RerankScore.noisy_channel: NoisyChannel,
    RerankScore.command: ScoreCommand,
}


def make_reranker(config: RerankConfig, languages: Sequence[LanguagePair], device: str) -> Reranker:
    """Return the reranker that the settings choose.

    `languages` are the directions that the sources may have. Models of the reranker are loaded on
    `device`. Raises a `ConfigError` if a package is missing, or if the model of
    rerank=noisy_channel does not translate in the reverse direction.
    """
    return _RERANKERS[config.rerank](config, languages, device)


def rank_candidates(
    reranker: Reranker,
    sources: Sequence[str],
    results: Sequence[LineResult],
    *,
    n_best: int,
    protect: bool = False,
    tags: Tags | None = None,
) -> list[LineResult]:
    """Return the `n_best` candidates of each line with the highest scores, best first.

    Candidates that were cut off at the length limit come after all others. With `protect`,
    candidates that lack a placeholder, tag or address of the source come after complete ones.
    `tags` are the language tags with which a source may begin. Candidates with equal scores keep
    their order. Lines with fewer than two candidates are returned without a `rerank_score`.
    """
    ranked = list(results)
    indices = [i for i, result in enumerate(results) if len(result.translations) > 1]
    if not indices:
        return ranked
    candidates = reranker.score(
        [sources[i] for i in indices], [results[i].translations for i in indices]
    )
    for i, translations in zip(indices, candidates, strict=True):
        if protect:
            _, text = split_tag(sources[i], tags or Tags())  # without the language tag
            translations = _mark_lacking(text, translations)
        # candidates with equal keys keep their order, also with `reverse`
        best_first = sorted(translations, key=_quality, reverse=True)
        ranked[i] = replace(results[i], translations=best_first[:n_best])
    return ranked


def _mark_lacking(source: str, translations: Sequence[Translation]) -> list[Translation]:
    """Set `lacks_protected` of translations that lack a placeholder, tag or address of `source`."""
    marked = []
    for translation in translations:
        is_lacking = lacks_protected(source, translation.text)
        marked.append(replace(translation, lacks_protected=is_lacking))
    return marked


def _quality(translation: Translation) -> tuple[int, float]:
    """Return a sort key that is higher for a better candidate.

    `completeness` compares first whether the candidate is finished, and then whether it has all
    protected text. Among equal candidates, the score decides.
    """
    assert translation.rerank_score is not None
    return translation.completeness, translation.rerank_score


def _with_scores(translations: Sequence[Translation], scores: Sequence[float]) -> list[Translation]:
    """Return translations with their `rerank_score`."""
    return [
        replace(translation, rerank_score=score)
        for translation, score in zip(translations, scores, strict=True)
    ]
