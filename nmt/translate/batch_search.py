"""Segments of text that go through an engine in batches of similar length."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from nmt.config import SearchConfig
from nmt.data.batch import bucket, pad_source
from nmt.search.hypotheses import Hypothesis
from nmt.search.search import occurrences
from nmt.translate.engines.base import Backend, SearchRequest
from nmt.translate.engines.native import NativeBackend

log = logging.getLogger(__name__)

MAX_FAILURES = 32
"""After so many in a row, a segment that was translated before shows whether the engine still
works.
"""


@dataclass(frozen=True)
class Segment:
    """One line, or a part of a long one."""

    ids: list[int]  # of the source, without EOS, at least one
    prefix: list[int]  # target ids that the translation starts with; may be empty


@dataclass(frozen=True)
class Failure:
    """Why a segment has no translation."""

    reason: str


SearchResult = list[Hypothesis] | Failure
"""The hypotheses of a segment, best first, or why there are none."""


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

    def translate(self, segments: Sequence[Segment]) -> list[SearchResult]:
        """Return the hypotheses of each segment, best first, or why there are none. Searches as
        many batches at a time as the engine has workers.

        Raises what the engine raised when it failed with `MAX_FAILURES` segments in a row and with
        one that it translated before.
        """
        results: list[SearchResult] = [[] for _ in segments]
        if not segments:
            return results
        lengths = np.array([[len(segment.ids) + 1] * 2 for segment in segments], dtype=np.int32)
        keys = occurrences(segment.ids for segment in segments)
        most = max(self.max_tokens // self.config.beam_size, int(lengths.max()))
        batches = bucket(lengths, most, np.arange(len(segments)))
        rows = [[segments[i] for i in batch] for batch in batches]
        their_keys = [[keys[i] for i in batch] for batch in batches]
        if self.backend.num_workers == 1 or len(batches) == 1:
            found = list(map(self._search, rows, their_keys))
        else:
            with ThreadPoolExecutor(self.backend.num_workers) as pool:
                found = list(pool.map(self._search, rows, their_keys))
        for batch, outcomes in zip(batches, found, strict=True):
            for i, outcome in zip(batch, outcomes, strict=True):
                results[i] = outcome
        return results

    def translate_arriving(
        self,
        segments: Sequence[Segment],
        take: Callable[[int], Sequence[Segment]],
        deliver: Callable[[list[tuple[int, SearchResult]]], None],
    ) -> int:
        """Translate segments without prefixes, and those that `take` returns between two steps, by
        a backend whose `can_join` allows it; return their number.

        `take` is given the number of segments that are searched. `deliver` gets the segments that
        are done, by their number, and what `translate` returns for each. Raises what that raises.
        """
        assert isinstance(self.backend, NativeBackend)
        left = dict(enumerate(segments))
        num_taken = len(left)
        try:
            rows = [segment.ids for segment in segments]
            beams = self.backend.begin(rows, self.config, self.n_best)
            while beams.num_live:
                found: list[tuple[int, SearchResult]] = [(i, beams.result(i)) for i in beams.step()]
                for number, _ in found:
                    self.known = left.pop(number)
                if found:
                    deliver(found)
                more = take(beams.num_live) if beams.num_live else ()
                left |= enumerate(more, start=num_taken)
                num_taken += len(more)
                if more:
                    rows = [segment.ids for segment in more]
                    beams.join(*pad_source(rows, self.backend.tokenizer))
        except Exception as error:  # whatever it is, sentences are to be translated without others
            log.warning("a search of %d sentences failed (%s); trying again", len(left), error)
        if left:
            deliver(list(zip(left, self.translate(list(left.values())), strict=True)))
        return num_taken

    def _search(self, rows: Sequence[Segment], keys: Sequence[int]) -> list[SearchResult]:
        batch = ([row.ids for row in rows], self.config, [row.prefix for row in rows])
        try:
            found = self.backend.search(SearchRequest(*batch, keys, self.n_best, self.with_scores))
        except Exception as error:  # whatever it is, the other segments are to be translated
            if len(rows) == 1:
                self.num_failed += 1
                if self.num_failed >= MAX_FAILURES and not self._still_works():
                    raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            self.num_failed, self.known = 0, rows[0]
            return [*found]
        # outside the except block, where the error would keep the memory of the batch alive
        if len(rows) == 1:
            return [Failure(reason)]
        torch.cuda.empty_cache()  # does nothing without a GPU in use
        log.warning("a batch of %d sentences failed (%s); trying its halves", len(rows), reason)
        half = len(rows) // 2
        return self._search(rows[:half], keys[:half]) + self._search(rows[half:], keys[half:])

    def _still_works(self) -> bool:
        """Try again a segment that was translated; the engine may be broken for good."""
        if self.known is None:
            return False
        try:
            batch = ([self.known.ids], self.config, [self.known.prefix])
            self.backend.search(SearchRequest(*batch, keys=[0]))
        except Exception:  # the same as without a segment to try
            return False
        self.num_failed = 0
        return True
