"""What `Translator` knows of an engine: search and scoring over ids, one batch at a time.

An engine knows nothing of text, lines or files. `NativeBackend` computes with torch; the one that
runs an exported model by CTranslate2 stands in its own file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from nmt.config import SearchConfig
from nmt.data.batch import pad_source
from nmt.data.tokenizer import Tokenizers
from nmt.search.search import ControlIds, Hypothesis, search
from nmt.search.stepper import Model
from nmt.translate.scoring import score_pairs

Ids = Sequence[int]
_CPU_TOKENS = 16384  # half as many are 5 to 10 % slower, twice as many no faster
_GPU_TOKENS = 65536  # a guess: it has not been measured


@runtime_checkable
class Backend(Protocol):
    """An engine. Its methods may be called from several threads at once."""

    name: str
    """As in the setting `backend`, for error messages."""
    max_tokens: int
    """Bound on a batch, rows * beam * longest source with EOS, with which it is fastest."""
    num_workers: int
    """Batches that it computes at the same time."""

    def check(self, config: SearchConfig, *, with_prefixes: bool = False) -> None:
        """Raise a `ConfigError` that names option and backend for what it cannot do; called before
        the first line is read.
        """

    def search(
        self,
        rows: Sequence[Ids],
        config: SearchConfig,
        prefixes: Sequence[Ids] | None = None,
        *,
        keys: Sequence[int] | None = None,
        n_best: int | None = None,
        with_scores: bool = True,
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each row, best first.

        Args:
            rows: source ids of a batch of sentences, without EOS, none of them empty.
            config: how to search.
            prefixes: target ids that each translation starts with, possibly none, without BOS.
            keys: a number for each row that sampling depends on; an engine may ignore it.
            n_best: how many of each row the caller looks at, None for all; more may come.
            with_scores: whether the caller looks at scores; without, an engine may leave
                `token_log_probs` empty and `log_prob` and `score` rough or nan.
        """

    def score(self, rows: Sequence[Ids], targets: Sequence[Ids]) -> list[list[float]]:
        """Return log-probabilities, in nats, of each target's tokens and of the EOS after them.

        Neither `rows` nor `targets` hold EOS; a target may be empty.
        """


@dataclass(frozen=True)
class Loaded:
    """What a model folder gives a `Translator`."""

    backend: Backend
    tokenizer: Tokenizers
    defaults: SearchConfig


class NativeBackend:
    """Searches with torch: one model, or an ensemble."""

    name = "native"
    num_workers = 1  # torch has its threads within a product

    def __init__(self, stepper: Model, tokenizer: Tokenizers) -> None:
        self.stepper = stepper
        self.max_tokens = _GPU_TOKENS if stepper.device.type == "cuda" else _CPU_TOKENS
        self.tokenizer = tokenizer
        self._ids = ControlIds.of(tokenizer)

    def check(self, config: SearchConfig, *, with_prefixes: bool = False) -> None:
        """Accept everything that `SearchConfig` accepts."""

    def search(
        self,
        rows: Sequence[Ids],
        config: SearchConfig,
        prefixes: Sequence[Ids] | None = None,
        *,
        keys: Sequence[int] | None = None,
        n_best: int | None = None,
        with_scores: bool = True,
    ) -> list[list[Hypothesis]]:
        """See `Backend.search`."""
        src, src_lengths = pad_source(rows, self.tokenizer)  # (B, S), (B,)
        return search(
            self.stepper,
            src,
            src_lengths,
            config,
            self._ids,
            prefixes=prefixes,
            keys=keys,
            n_best=n_best,
        )

    def score(self, rows: Sequence[Ids], targets: Sequence[Ids]) -> list[list[float]]:
        """See `Backend.score`."""
        return score_pairs(self.stepper, rows, targets, self._ids)
