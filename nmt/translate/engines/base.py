"""The interface of a translation engine, which searches and scores batches of token ids."""

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
    """Size of the fastest batches: number of sentences times beam size times the number of tokens
    of the longest source."""
    num_workers: int
    """Number of batches that threads should search at the same time."""

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        """Raise a `ConfigError` for settings that `search` does not support.

        With `scoring`, checks the settings for `score` instead. Commands call this before they read
        text.
        """

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Return the hypotheses of each sentence, at least one, best first."""

    def score(
        self, sources: Sequence[Ids], targets: Sequence[Ids], config: SearchConfig, max_tokens: int
    ) -> list[Hypothesis]:
        """Score each target as the translation of its source; return it as a hypothesis with EOS.

        Neither `sources` nor `targets` contain EOS; a target may be empty. `max_tokens` bounds the
        size of a batch: its number of pairs times the number of tokens of its longest sentence.
        """


class LoadedModel(NamedTuple):
    """An engine with the tokenizers, search settings and directions of its model."""

    backend: Backend
    tokenizer: Tokenizers
    defaults: SearchConfig  # saved with the model; of an ensemble, with the first model
    directions: list[LanguagePair]


def find_model_directions(info: ModelInfo, tokenizers: Tokenizers) -> list[LanguagePair]:
    """Return the translation directions of a model; see `find_directions`."""
    return find_directions(info.directions, info.src_lang, info.tgt_lang, tokenizers.src)
