"""The interface of a translation engine: search and scoring over token ids, one batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from nmt.checkpoint import ModelInfo
from nmt.config import SearchConfig
from nmt.data.languages import LanguagePair, find_directions
from nmt.data.tokenizer import Tokenizers
from nmt.search.hypotheses import Hypothesis

Ids = Sequence[int]


@dataclass(frozen=True)
class SearchRequest:
    """A batch of sentences and how to search them."""

    rows: Sequence[Ids]  # source ids without EOS, at least one each
    config: SearchConfig
    prefixes: Sequence[Ids] | None = None
    """Target ids that each translation starts with, possibly none, without BOS."""
    keys: Sequence[int] | None = None
    """A number for each row that sampling depends on; an engine may ignore it."""
    n_best: int | None = None  # hypotheses of a row that are looked at, None for all
    with_scores: bool = True
    """Whether scores are looked at; without, an engine may leave `token_log_probs` empty and
    `log_prob` and `score` rough or nan.
    """


@runtime_checkable
class Backend(Protocol):
    """An engine. Its methods may be called from several threads at once."""

    max_tokens: int  # bound on a batch, rows * beam * longest source, with which it is fastest
    num_workers: int  # batches that it computes at the same time

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        """Raise a `ConfigError` that names option and backend for what it cannot do in search, or
        in scoring; called before the first line is read.
        """

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Return the hypotheses of each row, best first: `n_best`, or more."""

    def score(
        self, rows: Sequence[Ids], targets: Sequence[Ids], config: SearchConfig, max_tokens: int
    ) -> list[Hypothesis]:
        """Return each target, EOS added, as search with `config` would report it.

        Neither `rows` nor `targets` hold EOS; a target may be empty. A batch has at most
        `max_tokens`, rows * longest side.
        """


class LoadedModel(NamedTuple):
    """What model folders give a `Translator`."""

    backend: Backend
    tokenizer: Tokenizers
    defaults: SearchConfig  # of the first folder
    directions: list[LanguagePair]


def directions_of(info: ModelInfo, tokenizer: Tokenizers) -> list[LanguagePair]:
    """Return the directions of a model; see `find_directions`."""
    return find_directions(info.directions, info.src_lang, info.tgt_lang, tokenizer.src)
