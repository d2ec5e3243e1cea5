"""Translation of text segments by an engine, in batches of similar length."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from nmt.config import SearchConfig
from nmt.data.batch import bucket_by_length
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.sampling import count_repeats
from nmt.translate.engines.base import Backend
from nmt.translate.engines.native import NativeBackend

log = logging.getLogger(__name__)

MAX_FAILURES = 32
"""After this many failed segments in a row, `BatchSearch` repeats one that worked before, to find
out whether the engine is broken.
"""


@dataclass(frozen=True)
class Segment:
    """A line or a part of a long line, as token ids."""

    ids: list[int]  # source ids without EOS, at least one
    prefix: list[int]  # target ids that the translation starts with; may be empty


@dataclass(frozen=True)
class Failure:
    """Why a segment has no translation."""

    reason: str


SearchResult = list[Hypothesis] | Failure
"""The hypotheses of a segment, best first, or the reason why it has no translation."""

_KeyedSegment = tuple[Segment, int]
"""A segment and its key for sampling, see `SearchRequest.keys`."""


@dataclass
class BatchSearch:
    """Translates segments with fixed settings.

    A batch that fails is retried in halves, so that one bad segment does not fail the others.
    """

    backend: Backend
    config: SearchConfig
    n_best: int  # hypotheses to return for each segment
    max_tokens: int  # of a batch: segments * beam size * longest source, EOS included
    with_scores: bool = True  # see `SearchRequest.with_scores`
    num_failed: int = 0  # segments in a row that failed, counted over all threads
    last_translated: Segment | None = None  # the latest one that did not fail

    def translate(self, segments: Sequence[Segment]) -> list[SearchResult]:
        """Return the result of each segment, in order.

        Forms batches of similar length, and searches `num_workers` of them at a time. Raises the
        engine's error when `MAX_FAILURES` segments in a row have failed and the engine can no
        longer translate a segment that worked before.
        """
        results: list[SearchResult] = [[] for _ in segments]
        if not segments:
            return results
        # `bucket_by_length` takes the lengths of source and target; the latter are unknown
        lengths = np.array([[len(segment.ids) + 1] * 2 for segment in segments], dtype=np.int32)
        max_tokens = max(self.max_tokens // self.config.beam_size, int(lengths.max()))
        keys = count_repeats(segment.ids for segment in segments)
        keyed = list(zip(segments, keys, strict=True))
        batch_indices = bucket_by_length(lengths, max_tokens, np.arange(len(segments)))
        batches = [[keyed[i] for i in indices] for indices in batch_indices]
        if self.backend.num_workers == 1 or len(batches) == 1:
            batch_results = []
            for batch in batches:
                batch_results.append(self._search(batch))
        else:
            with ThreadPoolExecutor(self.backend.num_workers) as pool:
                batch_results = list(pool.map(self._search, batches))
        for indices, batch_result in zip(batch_indices, batch_results, strict=True):
            for i, result in zip(indices, batch_result, strict=True):
                results[i] = result
        return results

    def translate_arriving(
        self,
        segments: Sequence[Segment],
        take: Callable[[int], Sequence[Segment]],
        deliver: Callable[[list[tuple[int, SearchResult]]], None],
    ) -> int:
        """Translate segments without prefixes and others that arrive meanwhile; return how many.

        Only for a native engine whose `can_join` allows it. Segments are numbered in the order of
        arrival. Between two steps of the search, `deliver` is called with the numbers and results
        of segments that are done, then `take` with the number of segments still in the search; it
        returns new ones. Raises the same errors as `translate`.
        """
        assert isinstance(self.backend, NativeBackend)
        remaining = dict(enumerate(segments))
        num_taken = len(segments)
        try:
            rows = [segment.ids for segment in segments]
            search = self.backend.begin(SearchRequest(rows, self.config, n_best=self.n_best))
            while search.num_live:
                results: list[tuple[int, SearchResult]] = []
                results += [(number, search.result(number)) for number in search.step()]
                for number, _ in results:
                    self.last_translated = remaining.pop(number)
                if results:
                    deliver(results)
                arrived = take(search.num_live) if search.num_live else ()
                if arrived:
                    remaining.update(enumerate(arrived, start=num_taken))
                    num_taken += len(arrived)
                    search.join([segment.ids for segment in arrived])
        except Exception as error:  # of any kind: `translate` finds the sentence that causes it
            log.warning("a search of %d sentences failed (%s); retrying", len(remaining), error)
        if remaining:
            retried = self.translate(list(remaining.values()))
            deliver(list(zip(remaining, retried, strict=True)))
        return num_taken

    def _search(self, batch: list[_KeyedSegment]) -> list[SearchResult]:
        """Search a batch; if that fails, search its halves, down to single segments."""
        request = SearchRequest(
            [segment.ids for segment, _ in batch],
            self.config,
            prefixes=[segment.prefix for segment, _ in batch],
            keys=[key for _, key in batch],
            n_best=self.n_best,
            with_scores=self.with_scores,
        )
        try:
            hypotheses = self.backend.search(request)
        except Exception as error:  # of any kind: the other segments are still translated
            if len(batch) == 1:
                self.num_failed += 1
                if self.num_failed >= MAX_FAILURES and not self._still_works():
                    raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            self.num_failed = 0
            self.last_translated = batch[0][0]
            return list(hypotheses)
        # not in the except block: there, the error's traceback keeps the tensors of the batch alive
        if len(batch) == 1:
            return [Failure(reason)]
        torch.cuda.empty_cache()  # does nothing if no GPU is used
        log.warning("a batch of %d sentences failed (%s); trying its halves", len(batch), reason)
        half = len(batch) // 2
        return self._search(batch[:half]) + self._search(batch[half:])

    def _still_works(self) -> bool:
        """Return whether the latest translation can be repeated; if so, reset `num_failed`."""
        if self.last_translated is None:
            return False
        segment = self.last_translated
        try:
            self.backend.search(SearchRequest([segment.ids], self.config, [segment.prefix], [0]))
        except Exception:  # of any kind: the engine is broken
            return False
        self.num_failed = 0
        return True
