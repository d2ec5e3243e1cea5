"""Translation of text segments by an engine, in batches of similar length."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from nmt.config import SearchConfig
from nmt.errors import to_one_line
from nmt.search.beam import BeamSearch
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.sampling import make_sampling_keys
from nmt.translate.engines.base import Backend
from nmt.translate.engines.native import NativeBackend
from nmt.translate.loops import replace_loops

log = logging.getLogger(__name__)

MAX_FAILURES = 32
"""Number of failed segments in a row after which `BatchSearch` tests the engine.

In the test, the engine has to translate the latest segment again that did not fail. If no segment
has been translated yet, the engine fails the test.
"""

_MAX_REASON_CHARACTERS = 300  # maximum length of an error message in `Failure.reason`


@dataclass(frozen=True)
class Segment:
    """A line, or a part of a long line, as token ids."""

    ids: list[int]  # source ids without EOS, at least one
    prefix_ids: list[int]  # target ids that the translation starts with; may be empty
    is_continuation: bool = False  # whether it is a later part of a long line
    sampling_key: int = 0  # equal segments with different keys get different samples

    @property
    def num_tokens(self) -> int:
        """Number of source tokens, EOS included."""
        return len(self.ids) + 1


@dataclass(frozen=True)
class Failure:
    """Why a segment has no translation."""

    reason: str


SearchResult = list[Hypothesis] | Failure
"""The hypotheses of a segment, best first, or the reason why it has no translation."""


@dataclass
class BatchSearch:
    """Translates segments in batches.

    The halves of a batch that fails are retried, so that one bad segment does not fail the others.
    """

    backend: Backend
    config: SearchConfig
    n_best: int  # number of hypotheses to return for each segment
    max_tokens: int
    """Maximum size of a batch. The size is the product of the number of segments,
    `SearchConfig.rows_per_sentence`, and the tokens of the longest source, EOS included."""
    num_forced: int = 0  # tokens of a prefix that are always forced, see `SearchRequest.num_forced`
    src_tags: Sequence[str] = ()  # see `SearchRequest.src_tags`
    with_scores: bool = True  # False lets an engine skip the scores, which may then be nan
    is_parallel: bool = True  # whether to search `num_workers` batches at a time
    num_failed: int = 0  # number of segments in a row that failed, over all threads
    last_translated: Segment | None = None  # the latest segment that did not fail
    _failure_lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `num_failed`."""

    def translate(self, segments: Sequence[Segment]) -> list[SearchResult]:
        """Return the result of each segment, in order.

        Forms batches of similar length, and may search several of them at a time. A segment that
        fails has the result `Failure`. If `MAX_FAILURES` segments fail in a row and the test of the
        engine fails too, raises the error of the engine.
        """
        results: list[SearchResult] = [[] for _ in segments]
        if not segments:
            return results
        continuations = [i for i, segment in enumerate(segments) if segment.is_continuation]
        if self.config.alternatives and continuations:
            return self._translate_with_alternatives(segments, continuations)
        if self.config.sampling:
            segments = _set_sampling_keys(segments)

        batch_indices = self._form_batches(segments)
        batches = []
        for indices in batch_indices:
            batches.append([segments[i] for i in indices])
        num_parallel = self.backend.num_workers if self.is_parallel else 1
        results_by_batch = []
        if num_parallel == 1 or len(batches) == 1:
            for batch in batches:
                results_by_batch.append(self._search(batch))
        else:
            with ThreadPoolExecutor(num_parallel) as pool:
                results_by_batch += pool.map(self._search, batches)
        for indices, batch_results in zip(batch_indices, results_by_batch, strict=True):
            for i, result in zip(indices, batch_results, strict=True):
                results[i] = result
        return results

    def _translate_with_alternatives(
        self, segments: Sequence[Segment], continuations: Sequence[int]
    ) -> list[SearchResult]:
        """Return `config.alternatives` translations of the first segment of each line.

        Later segments of lines, which have the indices `continuations`, get one translation each.
        """
        results: list[SearchResult] = [[] for _ in segments]
        first_segments = [i for i, segment in enumerate(segments) if not segment.is_continuation]
        first_results = self.translate([segments[i] for i in first_segments])
        for i, result in zip(first_segments, first_results, strict=True):
            results[i] = result
        # the copy shares the lock and takes over the number of failures so far
        plain_search = replace(self, config=replace(self.config, alternatives=0), n_best=1)
        plain_results = plain_search.translate([segments[i] for i in continuations])
        for i, result in zip(continuations, plain_results, strict=True):
            results[i] = result
        return results

    def _form_batches(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Divide segments into batches of similar length; return the indices of each batch."""
        by_length = sorted(range(len(segments)), key=lambda i: segments[i].num_tokens)
        longest = segments[by_length[-1]]
        # the maximum number of source tokens of a batch, padding included
        max_batch_tokens = self.max_tokens // self.config.rows_per_sentence
        # a segment that is longer than the maximum still needs a batch
        max_batch_tokens = max(max_batch_tokens, longest.num_tokens)
        batches: list[list[int]] = [[]]
        for i in by_length:
            # segment i is the longest one so far, so the batch would be padded to its length
            num_segments = len(batches[-1]) + 1
            num_batch_tokens = num_segments * segments[i].num_tokens
            if num_batch_tokens > max_batch_tokens:
                batches.append([])
            batches[-1].append(i)
        return batches

    def translate_arriving(
        self,
        segments: Sequence[Segment],
        take_new: Callable[[int], Sequence[Segment]],
        deliver: Callable[[list[tuple[int, SearchResult]]], None],
    ) -> None:
        """Translate segments without prefixes, and further segments that arrive meanwhile.

        Only for a native engine whose `can_join` returns True. Segments are numbered in the order
        of arrival. After each step of the search:

        1. If segments are finished, calls `deliver` with their numbers and results.
        2. If segments remain, calls `take_new` with their count. `take_new` returns new segments,
           which join the search.

        Raises the errors of `translate`, `take_new` and `deliver`.
        """
        assert isinstance(self.backend, NativeBackend)
        unfinished = dict(enumerate(segments))  # keyed by number of the segment
        num_taken = len(segments)
        search: BeamSearch | None = None
        request = SearchRequest([], self.config, n_best=self.n_best)
        new_segments = segments
        while unfinished:
            new_rows = [segment.ids for segment in new_segments]
            try:
                if search is None:
                    search = self.backend.begin(replace(request, sources=new_rows))
                elif new_rows:
                    search.join(new_rows)
                results: list[tuple[int, SearchResult]] = []
                for number in search.step():
                    single_request = replace(request, sources=[unfinished[number].ids])
                    # a translation that loops or met the length limit is searched again
                    hypotheses = search.result(number)
                    [hypotheses] = replace_loops(self.backend, single_request, [hypotheses])
                    results.append((number, hypotheses))
            # an engine may raise any exception; `translate` below finds the segment at fault
            except Exception as error:
                num_unfinished = len(unfinished)
                log.warning("a search of %d sentences failed (%s); retrying", num_unfinished, error)
                break
            for number, _ in results:
                segment = unfinished.pop(number)
                self.last_translated = segment
            if results:
                deliver(results)
            if unfinished:
                new_segments = take_new(len(unfinished))
                unfinished.update(enumerate(new_segments, start=num_taken))
                num_taken += len(new_segments)
        if unfinished:  # the loop was left by `break`, since the search failed
            retried = self.translate(list(unfinished.values()))
            deliver(list(zip(unfinished, retried, strict=True)))

    def _search(self, batch: list[Segment]) -> list[SearchResult]:
        """Search a batch; if that fails, search its halves, down to single segments."""
        request = SearchRequest(
            [segment.ids for segment in batch],
            self.config,
            prefixes=[segment.prefix_ids for segment in batch],
            num_forced=self.num_forced,
            src_tags=self.src_tags,
            sampling_keys=[segment.sampling_key for segment in batch],
            n_best=self.n_best,
            with_scores=self.with_scores,
        )
        try:
            hypotheses = self.backend.search(request)
            # a translation that loops or met the length limit is searched again
            hypotheses = replace_loops(self.backend, request, hypotheses)
        # an engine may raise any type for a segment; the other segments are still translated
        except Exception as error:
            if len(batch) == 1:
                num_failed = self._count_failure()
                if num_failed >= MAX_FAILURES and not self._can_repeat_last():
                    raise  # the engine is broken
            reason = f"{type(error).__name__}: {to_one_line(error, _MAX_REASON_CHARACTERS)}"
        else:
            with self._failure_lock:
                self.num_failed = 0
                self.last_translated = batch[0]
            return list(hypotheses)
        # The search failed. This code is outside of the `except` clause, since the traceback of the
        # exception would keep the tensors of the batch in memory.
        if len(batch) == 1:
            return [Failure(reason)]
        torch.cuda.empty_cache()  # does nothing if no GPU is used
        log.warning("a batch of %d sentences failed (%s); trying its halves", len(batch), reason)
        half = len(batch) // 2
        return self._search(batch[:half]) + self._search(batch[half:])

    def _count_failure(self) -> int:
        """Count a failed segment. Return the number of segments that failed in a row."""
        with self._failure_lock:
            self.num_failed += 1
            return self.num_failed

    def _can_repeat_last(self) -> bool:
        """Search `last_translated` again; return True and reset `num_failed` if that works."""
        if self.last_translated is None:
            return False
        segment = self.last_translated
        request = SearchRequest(
            [segment.ids],
            self.config,
            prefixes=[segment.prefix_ids],
            num_forced=self.num_forced,
            src_tags=self.src_tags,
        )
        try:
            self.backend.search(request)
        except Exception:  # `_search` raises the exception of its own segment instead
            return False
        with self._failure_lock:
            self.num_failed = 0
        return True


def _set_sampling_keys(segments: Sequence[Segment]) -> list[Segment]:
    """Return segments with keys that give equal segments different samples."""
    keys = make_sampling_keys(segment.ids for segment in segments)
    keyed_segments = []
    for segment, key in zip(segments, keys, strict=True):
        keyed_segments.append(replace(segment, sampling_key=key))
    return keyed_segments
