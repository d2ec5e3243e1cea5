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
    """Size of a batch, rows * beam size * longest source, at which it is fastest."""
    num_workers: int
    """Number of batches that it computes at the same time."""

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        """Raise a `ConfigError` for a setting of search, or of scoring, that it does not support.

        Callers check before they read the first line.
        """

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Return the hypotheses of each row, best first, at least one."""

    def score(
        self, rows: Sequence[Ids], targets: Sequence[Ids], config: SearchConfig, max_tokens: int
    ) -> list[Hypothesis]:
        """Return each target, with EOS appended, and its scores as a translation of its row.

        Neither `rows` nor `targets` contain EOS; a target may be empty. `max_tokens` bounds the
        size of a batch, rows * longest side.
        """


class LoadedModel(NamedTuple):
    """The contents of one or several model folders, as `Translator` needs them."""

    backend: Backend
    tokenizer: Tokenizers
    defaults: SearchConfig  # of the first folder
    directions: list[LanguagePair]


def directions_of(info: ModelInfo, tokenizer: Tokenizers) -> list[LanguagePair]:
    """Return the directions of a model; see `find_directions`."""
    return find_directions(info.directions, info.src_lang, info.tgt_lang, tokenizer.src)
