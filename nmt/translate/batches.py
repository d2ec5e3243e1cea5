"""Runs segments through an engine, in batches of similar length.

A batch that fails is tried again in halves, down to the segment that cannot be translated. It knows
ids and nothing of text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from nmt.config import SearchConfig
from nmt.data.batch import bucket
from nmt.search.hypotheses import Hypothesis
from nmt.search.search import occurrences
from nmt.translate.backend import Backend
from nmt.translate.windows import Segment

log = logging.getLogger(__name__)

MAX_FAILURES = 32
"""After so many in a row, a segment that was translated before shows whether the engine still
works.
"""


@dataclass(frozen=True)
class Failure:
    """Why a segment has no translation."""

    reason: str


Outcome = list[Hypothesis] | Failure


@dataclass
class BatchSearch:
    """Searches with fixed settings; remembers whether the engine works at all."""

    backend: Backend
    config: SearchConfig
    n_best: int  # hypotheses of each segment that are looked at
    max_tokens: int  # bound on a batch: rows * beam * longest source, EOS included
    with_scores: bool = True  # whether the scores of hypotheses are looked at
    num_failed: int = 0  # segments that failed in a row, over all threads
    known: Segment | None = None  # one that was translated

    def translate(self, segments: Sequence[Segment]) -> list[Outcome]:
        """Return the hypotheses of each segment, best first, or why there are none. Searches as
        many batches at a time as the engine has workers.

        Raises what the engine raised when it failed with `MAX_FAILURES` segments in a row and with
        one that it translated before.
        """
        results: list[Outcome] = [[] for _ in segments]
        if not segments:
            return results
        lengths = np.array([[len(segment.ids) + 1] * 2 for segment in segments], dtype=np.int32)
        keys = occurrences(segment.ids for segment in segments)
        most = max(self.max_tokens // self.config.beam_size, int(lengths.max()))
        batches = bucket(lengths, most, np.arange(len(segments)))
        rows = [[segments[i] for i in batch] for batch in batches]
        their_keys = [[keys[i] for i in batch] for batch in batches]
        if self.backend.num_workers == 1:
            found = list(map(self._search, rows, their_keys))
        else:
            with ThreadPoolExecutor(self.backend.num_workers) as pool:
                found = list(pool.map(self._search, rows, their_keys))
        for batch, outcomes in zip(batches, found, strict=True):
            for i, outcome in zip(batch, outcomes, strict=True):
                results[i] = outcome
        return results

    def _search(self, rows: Sequence[Segment], keys: Sequence[int]) -> list[Outcome]:
        prefixes = [row.prefix for row in rows]
        try:
            found = self.backend.search(
                [row.ids for row in rows],
                self.config,
                prefixes if any(prefixes) else None,
                keys=keys,
                n_best=self.n_best,
                with_scores=self.with_scores,
            )
        except Exception as error:  # whatever it is, the other segments are to be translated
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
        return self._search(rows[:half], keys[:half]) + self._search(rows[half:], keys[half:])

    def _works(self) -> bool:
        """Try again a segment that was translated; the engine may be broken for good."""
        if self.known is None:
            return False
        try:
            self.backend.search([self.known.ids], self.config, [self.known.prefix], keys=[0])
        except Exception:  # the same as without a segment to try
            return False
        self.num_failed = 0
        return True
