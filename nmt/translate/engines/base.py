"""The interface of a translation engine: search and scoring over token ids, one batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from nmt.checkpoint import ModelInfo
from nmt.config import SearchConfig
from nmt.data.languages import LanguagePair, find_directions
from nmt.data.tokenizer import Tokenizers
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import Ids, SearchRequest


@runtime_checkable
class Backend(Protocol):
    """A translation engine. Several threads may call its methods at once."""

    max_tokens: int
    """Batch size with the highest speed: sentences * beam size * longest source in tokens."""
    num_workers: int
    """Number of threads that may each search a batch at the same time."""

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        """Raise a `ConfigError` for settings that `search`, or with `scoring` `score`, cannot use.

        Commands call this before they read any text.
        """

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Return the hypotheses of each sentence, best first, at least one."""

    def score(
        self, sources: Sequence[Ids], targets: Sequence[Ids], config: SearchConfig, max_tokens: int
    ) -> list[Hypothesis]:
        """Score each target as the translation of its source; return it as a hypothesis with EOS.

        Neither `sources` nor `targets` contain EOS; a target may be empty. `max_tokens` bounds the
        size of a batch: sentences * longest side in tokens.
        """


class LoadedModel(NamedTuple):
    """An engine, with the tokenizer, settings and directions of its model folders."""

    backend: Backend
    tokenizer: Tokenizers
    defaults: SearchConfig  # search settings saved in the first folder
    directions: list[LanguagePair]


def find_model_directions(info: ModelInfo, tokenizer: Tokenizers) -> list[LanguagePair]:
    """Return the translation directions of a model; see `find_directions`."""
    return find_directions(info.directions, info.src_lang, info.tgt_lang, tokenizer.src)
