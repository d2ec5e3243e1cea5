"""Runs the parts of lines through an engine, in batches of similar length.

A batch that fails is tried again in halves, down to the one that cannot be translated. It knows ids
and nothing of text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from nmt.config import SearchConfig
from nmt.data.batch import bucket
from nmt.search.sampling import occurrences
from nmt.search.search import Hypothesis
from nmt.translate.backend import Backend

log = logging.getLogger(__name__)

MAX_FAILURES = 32
"""After so many in a row, a sentence that went well before shows whether the engine still works."""


@dataclass(frozen=True)
class Part:
    """One line, or a piece of a long one."""

    ids: list[int]
    """Source ids without EOS, at least one."""
    prefix: list[int]
    """Target ids that the translation starts with; may be empty."""


@dataclass(frozen=True)
class Failure:
    """Why a part has no translation."""

    reason: str


Outcome = list[Hypothesis] | Failure


@dataclass
class Decoder:
    """Searches with fixed settings; remembers whether the engine works at all."""

    backend: Backend
    config: SearchConfig
    n_best: int
    """How many hypotheses of each part are looked at."""
    max_tokens: int
    """Bound on a batch: rows * beam * longest source, EOS included."""
    with_scores: bool = True
    """Whether the scores of hypotheses are looked at."""
    num_failed: int = 0
    """Parts that failed in a row."""
    known: Part | None = None
    """One that went well."""

    def decode(self, parts: Sequence[Part]) -> list[Outcome]:
        """Return the hypotheses of each part, best first, or why there are none.

        Raises what the engine raised when it failed with `MAX_FAILURES` parts in a row and with one
        that went well before.
        """
        results: list[Outcome] = [[] for _ in parts]
        if not parts:
            return results
        lengths = np.array([[len(part.ids) + 1] * 2 for part in parts], dtype=np.int32)
        keys = occurrences([part.ids for part in parts]) if self.config.sampling else None
        most = max(self.max_tokens // self.config.beam_size, int(lengths.max()))
        batches = bucket(lengths, most, np.arange(len(parts)))
        rows = [[parts[i] for i in batch] for batch in batches]
        some_keys = [None if keys is None else [keys[i] for i in batch] for batch in batches]
        for batch, outcomes in zip(batches, self._search_all(rows, some_keys), strict=True):
            for i, outcome in zip(batch, outcomes, strict=True):
                results[i] = outcome
        return results

    def _search_all(
        self, rows: list[list[Part]], keys: Sequence[Sequence[int] | None]
    ) -> Iterator[list[Outcome]]:
        """Search batches, as many at a time as the engine has workers; what fails in a row is then
        counted over all.
        """
        if self.backend.num_workers == 1:
            yield from map(self._search, rows, keys)
        else:
            with ThreadPoolExecutor(self.backend.num_workers) as pool:
                yield from pool.map(self._search, rows, keys)

    def _search(self, rows: Sequence[Part], keys: Sequence[int] | None) -> list[Outcome]:
        try:
            found = self._call(rows, keys)
        except Exception as error:  # whatever it is, the other sentences are to be translated
            if len(rows) == 1:
                self.num_failed += 1
                if self.num_failed >= MAX_FAILURES and not self._works():
                    raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            self.num_failed, self.known = 0, rows[0]
            return [*found]
        # outside the except block, where the error would keep the memory of the batch alive
        if len(rows) == 1:
            return [Failure(reason)]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.warning("a batch of %d sentences failed (%s); trying its halves", len(rows), reason)
        half = len(rows) // 2
        halves = (slice(half), slice(half, None))
        return [
            outcome
            for part in halves
            for outcome in self._search(rows[part], None if keys is None else keys[part])
        ]

    def _works(self) -> bool:
        """Try again a part that went well; the engine may be broken for good."""
        if self.known is None:
            return False
        try:
            self._call([self.known], None)
        except Exception:  # the same as without a part to try
            return False
        self.num_failed = 0
        return True

    def _call(self, rows: Sequence[Part], keys: Sequence[int] | None) -> list[list[Hypothesis]]:
        sources = [row.ids for row in rows]
        prefixes = [row.prefix for row in rows]
        return self.backend.search(
            sources,
            self.config,
            prefixes if any(prefixes) else None,
            keys=keys,
            n_best=self.n_best,
            with_scores=self.with_scores,
        )
