"""A model of the reverse direction, which scores a source given its translation."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from nmt.data.languages import DEFAULT_LANGUAGES, LanguagePair, Tags, choose_tags
from nmt.errors import ConfigError
from nmt.search.hypotheses import Hypothesis
from nmt.translate.engines.base import LoadedModel
from nmt.translate.engines.native import load_models
from nmt.translate.pair_scores import score_pairs


class ReverseModel:
    """Scores sources as translations of their targets, with the native engine in float32.

    Args:
        folders: the model folders; several form an ensemble. They are loaded once.
        languages: the directions that pairs of source and target may have.
        device: the device of the model.

    Raises a `ConfigError` if the model does not translate from target to source, or if it
    translates in several directions and `languages` does not choose one.
    """

    def __init__(
        self, folders: Sequence[str], languages: Sequence[LanguagePair], device: str
    ) -> None:
        self._model = _load_once(tuple(folders), device)
        self._tags = _choose_reverse_tags(self._model, ",".join(folders), languages)

    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, first_line: int = 0
    ) -> list[Hypothesis]:
        """Return each source as a hypothesis, with the log-probability log P(source|target)."""
        return score_pairs(
            self._model.backend,
            self._model.tokenizer,
            targets,
            sources,
            self._model.defaults,
            tags=self._tags,
            first_line=first_line,
        )


def _choose_reverse_tags(model: LoadedModel, name: str, languages: Sequence[LanguagePair]) -> Tags:
    """Return the tags for the reverse of the directions `languages`.

    `name` is the value of `reverse_model`, for error messages.
    """
    try:
        tags = choose_tags(
            model.directions,
            model.tokenizer,
            src_lang=_only_language(pair.tgt_lang for pair in languages),
            tgt_lang=_only_language(pair.src_lang for pair in languages),
        )
    except ConfigError as error:
        raise ConfigError(f"reverse_model={name}: {error}") from None
    if tags.src_choices:
        advice = "give src_lang=... and tgt_lang=..."
        codes = {pair.src_lang for pair in languages} | {pair.tgt_lang for pair in languages}
        if codes <= set(DEFAULT_LANGUAGES):
            advice = "the model in model_dir names no languages; use a model of one direction"
        raise ConfigError(f"reverse_model={name}: has several directions; {advice}")
    return tags


def _only_language(languages: Iterable[str]) -> str:
    """Return the language of all directions, or "" if it is unknown or differs between them."""
    names = set(languages) - set(DEFAULT_LANGUAGES)
    return names.pop() if len(names) == 1 else ""


@functools.lru_cache(maxsize=2)
def _load_once(folders: tuple[str, ...], device: str) -> LoadedModel:
    """Load a model or ensemble once for all calls of a translator."""
    return load_models(folders, device=device)
