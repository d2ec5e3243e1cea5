"""Runs rounds: takes segments from the queues of the clients, and lets workers search them.

A round starts as soon as a worker is free. Clients that were just answered may send further
requests, so the round first waits for these for a moment. Segments that arrive while all workers
are busy join a running search if their options allow it, and otherwise wait for the next round.

Urgent requests (see `nmt.serve.queues`) may compete with clients that have much work. If there are
several workers, the last one is then reserved for urgent requests.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from nmt.serve.monitoring import Metrics
from nmt.serve.queues import ClientQueues, QueuedRequest, QueueFullError
from nmt.serve.rounds import (
    Delivery,
    SearchRound,
    SearchWorkers,
    WorkerThreads,
    describe_failure,
)
from nmt.serve.worker_pool import RemoteBackend, WorkerDiedError
from nmt.translate.batch_search import Failure, SearchResult
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)
T = TypeVar("T")

_ROUND_SECONDS = 0.5  # planned duration of a round, so that new clients do not wait long
_MIN_SEGMENTS = 32  # smaller rounds may exceed `_ROUND_SECONDS`, since small batches are slow
_MAX_JOINED_SEGMENTS = 2048  # when this number of segments has been added to a round, none joins it
_MAX_FUNCTION_CALLS = 8  # number of calls of `call_function` at the same time
# To wait for requests, a round is delayed by this share of the duration of the previous round, but
# at most by `_MAX_WAIT_SECONDS`.
_WAIT_SHARE = 0.15
_MAX_WAIT_SECONDS = 0.1
_POLL_SECONDS = 0.001
_MEASURED_SECONDS = 0.3  # interval between two updates of the measured throughput
_MIN_MEASURED_SECONDS = 1e-4  # avoids a division by 0
_INITIAL_TOKENS_PER_SECOND = 2000.0


class _Expectation(NamedTuple):
    """The requests that a round can expect from clients that the previous round answered."""

    num_requests: int
    deadline: float  # the round waits at most until `time.monotonic()` has this value


class RoundRunner:
    """Runs rounds in one event loop, one at a time for each worker.

    Args:
        num_workers: number of workers, each of which searches a round at a time.
        max_rounds: maximum number of rounds at a time, not counting rounds of urgent requests.
            This number of rounds keeps all CPU cores busy. If there are more workers, the last one
            searches urgent requests only.
    """

    def __init__(
        self, queues: ClientQueues, metrics: Metrics, *, num_workers: int, max_rounds: int
    ) -> None:
        self.tokens_per_second = _INITIAL_TOKENS_PER_SECOND  # source tokens; a moving average
        self.running: list[SearchRound] = []
        self.threads = WorkerThreads(num_workers)  # they search with models of this process
        self._queues = queues
        self._metrics = metrics
        self._max_rounds = max_rounds
        self._num_workers = num_workers
        self._num_function_calls = 0
        self._busy_workers: set[int] = set()  # indices of the workers that search
        self._wake_events = [asyncio.Event() for _ in range(num_workers)]
        """For each worker, set while it may start a round."""

    async def run(self) -> None:
        """Run rounds until cancelled."""
        await asyncio.gather(*[self._run_worker(index) for index in range(self._num_workers)])

    def notify(self) -> None:
        """Let waiting segments start or join a round."""
        for wake_event in self._wake_events:
            wake_event.set()
        self._join_waiting()

    async def call_function(
        self, translator: Translator, function: Callable[..., T], *args: Any
    ) -> T:
        """Return `function(translator, *args)`, called where the model is loaded.

        Raises `QueueFullError` if too many calls are running.
        """
        if self._num_function_calls >= _MAX_FUNCTION_CALLS:
            raise QueueFullError(retry_seconds=1)
        self._num_function_calls += 1
        try:
            workers = self._find_workers(translator)
            return await workers.call_function(translator, function, *args)
        finally:
            self._num_function_calls -= 1

    def close(self) -> None:
        """Let the threads end."""
        self.threads.close()

    async def _run_worker(self, worker_index: int) -> None:
        """Run one round after the other with a worker.

        An error outside of a search fails all requests, and the loop continues.
        """
        expectation = _Expectation(0, 0.0)
        while True:
            await self._wake_events[worker_index].wait()
            await asyncio.sleep(0)  # let requests that have already arrived enter the queues
            try:
                expectation = await self._run_next_round(worker_index, expectation)
            # a bug; the loop must continue, since requests would otherwise wait forever
            except Exception as error:
                log.exception("a round failed outside the engine; all requests fail")
                self._wake_events[worker_index].clear()
                self._queues.fail_all(str(error))

    async def _run_next_round(self, worker_index: int, expectation: _Expectation) -> _Expectation:
        """Run a round if segments wait; return the requests that the next round can expect."""
        await self._wait_for_expected(expectation)
        search_round = self._take_round(only_urgent=self._is_reserved(worker_index))
        if search_round is None:
            self._wake_events[worker_index].clear()
            return expectation
        start = time.monotonic()
        self.running.append(search_round)
        self._busy_workers.add(worker_index)
        try:
            await self._search_or_repeat(worker_index, search_round)
        finally:
            self.running.remove(search_round)
            self._busy_workers.remove(worker_index)
        can_join_running_rounds = search_round.options.can_join
        if can_join_running_rounds:
            return _Expectation(0, 0.0)  # the next round need not wait: later requests can join it
        end = time.monotonic()
        wait_seconds = min(_WAIT_SHARE * (end - start), _MAX_WAIT_SECONDS)
        return _Expectation(search_round.num_expected, end + wait_seconds)

    async def _wait_for_expected(self, expectation: _Expectation) -> None:
        """If fewer segments wait than requests are expected, wait for more until the deadline.

        Returns at once if no segment waits, or if at least `_MIN_SEGMENTS` segments wait. A client
        that was just answered may send its next request at once. If a round started before the
        request arrives, the request would have to wait for the end of this round. Clients that send
        one request after the other would then divide into two halves, and each round would search
        the requests of only one half.
        """
        num_requests = min(expectation.num_requests, _MIN_SEGMENTS)
        while 0 < self._queues.num_waiting < num_requests:
            if time.monotonic() >= expectation.deadline:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _take_round(self, *, only_urgent: bool) -> SearchRound | None:
        """Return a round with the options of the oldest request of the next client."""
        request = self._queues.next_request(only_urgent=only_urgent)
        if request is None:
            return None
        search_round = SearchRound(request.options, only_urgent=only_urgent)
        if search_round.batch_search.config.sampling:
            # The samples of a sentence depend on the number of equal sentences before it in the
            # round, so a round with sampling has the segments of one request only.
            while request.num_waiting:
                self._take_segment(search_round, request)
            self._queues.end_turn(request.client)  # the next round begins with another client
        else:
            self._add_segments(search_round)
        return search_round

    async def _search_or_repeat(self, worker_index: int, search_round: SearchRound) -> None:
        """Search a round. If its worker dies, search the unfinished segments again, one by one.

        So if a segment kills workers, only this segment fails.
        """
        try:
            await self._search(worker_index, search_round)
        except WorkerDiedError:
            search_round.is_open = False
            unfinished = list(search_round.unfinished.values())
            log.warning("a worker died with %d sentences; searching them again", len(unfinished))
            for request, index in unfinished:
                is_answered = request.done.done()
                if not is_answered:
                    await self._repeat(worker_index, request, index)

    async def _repeat(self, worker_index: int, request: QueuedRequest, index: int) -> None:
        """Search one segment of a request, given by its index, again."""
        search_round = SearchRound(request.options)
        search_round.add(request, index)
        try:
            await self._search(worker_index, search_round)
        except WorkerDiedError:
            self._fail(search_round, Failure("the process that translated it died twice"))

    async def _search(self, worker_index: int, search_round: SearchRound) -> None:
        """Search a round. If the search raises an exception, the unfinished segments fail."""
        workers = self._find_workers(search_round.options.translator)
        try:
            deliver = functools.partial(self._deliver, search_round)
            await workers.search(worker_index, search_round, deliver)
        except WorkerDiedError:
            raise
        except Exception as error:  # for example, if a pool can no longer load its models
            search_round.is_open = False
            log.exception("the engine failed with %d sentences", len(search_round.unfinished))
            self._fail(search_round, describe_failure(error))

    def _fail(self, search_round: SearchRound, failure: Failure) -> None:
        """Deliver a failure as the result of all unfinished segments of a round."""
        results: list[tuple[int, SearchResult]] = [
            (number, failure) for number in search_round.unfinished
        ]
        self._deliver(search_round, Delivery(results, batch_sizes=[]))

    def _find_workers(self, translator: Translator) -> SearchWorkers:
        """Return the pool of worker processes or the threads that search with a model."""
        backend = translator.backend
        return backend.pool if isinstance(backend, RemoteBackend) else self.threads

    def _join_waiting(self) -> None:
        """Add waiting segments to running rounds, the smallest first.

        The client whose turn is next decides: if its oldest request cannot join a round, requests
        of other clients do not join it either. No segment joins while a worker may start a round,
        or while a called function needs a worker.
        """
        if self._has_free_worker() or self._num_function_calls:
            return
        open_rounds = [search_round for search_round in self.running if search_round.is_open]
        open_rounds.sort(key=lambda open_round: len(open_round.unfinished))
        for search_round in open_rounds:
            request = self._queues.next_request(only_urgent=search_round.only_urgent)
            if request is None:
                continue
            has_same_options = request.options.can_share_batch(search_round.options)
            if has_same_options and search_round.num_added < _MAX_JOINED_SEGMENTS:
                self._add_segments(search_round)
                search_round.on_new_segments()

    def _is_reserved(self, worker_index: int) -> bool:
        """Return whether a worker may search only urgent requests."""
        if worker_index == 0 or worker_index < self._num_workers - 1:
            return False  # only the last one of several workers can be reserved
        has_extra_worker = self._num_workers > self._max_rounds
        return has_extra_worker or self._queues.has_competition()

    def _has_free_worker(self) -> bool:
        """Return whether a free worker may search some of the waiting segments."""
        for worker_index in range(self._num_workers):
            if worker_index not in self._busy_workers:
                only_urgent = self._is_reserved(worker_index)
                if self._queues.next_request(only_urgent=only_urgent) is not None:
                    return True
        return False

    def _add_segments(self, search_round: SearchRound) -> None:
        """Add waiting segments to a round, from each client in turn.

        The round gets the segments that can be translated in `_ROUND_SECONDS`. It gets up to
        `_MIN_SEGMENTS` even if they take longer, unless they fill a batch. With several rounds at a
        time, it gets at most its share of all segments.
        """
        search = search_round.batch_search
        # maximum number of source tokens of a batch, in which a sentence takes several rows
        batch_tokens = search.max_tokens // search.config.rows_per_sentence
        goal_tokens = min(batch_tokens, int(self.tokens_per_second * _ROUND_SECONDS))
        max_segments = sys.maxsize
        if self._max_rounds > 1:
            num_unfinished = sum(request.num_unfinished for request in self._queues.requests)
            max_segments = math.ceil(num_unfinished / self._max_rounds)
        only_urgent = search_round.only_urgent
        for request in self._queues.take_turns(search_round.options, only_urgent=only_urgent):
            num_segments = len(search_round.unfinished)
            max_tokens = goal_tokens
            if num_segments < _MIN_SEGMENTS:
                max_tokens = batch_tokens
            if num_segments >= max_segments or search_round.num_tokens >= max_tokens:
                return
            self._take_segment(search_round, request)

    def _take_segment(self, search_round: SearchRound, request: QueuedRequest) -> None:
        """Move the first waiting segment of a request into a round."""
        if request.num_taken == 0:
            self._metrics.queue_seconds.observe(time.monotonic() - request.queued_at)
        search_round.add(request, self._queues.take_segment(request))

    def _deliver(self, search_round: SearchRound, delivery: Delivery) -> None:
        """Pass results to their requests, and let waiting segments join the round."""
        for size in delivery.batch_sizes:
            self._metrics.batch_sentences.observe(size)
        for number, result in delivery.results:
            search_round.finish_segment(number, result)
        if not search_round.unfinished:
            search_round.num_expected = self._queues.count_expected()
        self._update_throughput(search_round)
        self.notify()

    def _update_throughput(self, search_round: SearchRound) -> None:
        """Measure the throughput when a round ends, and every `_MEASURED_SECONDS` before."""
        seconds = time.monotonic() - search_round.measured_at
        if search_round.unfinished and seconds < _MEASURED_SECONDS:
            return
        num_tokens = search_round.num_finished_tokens
        tokens_per_second = num_tokens / max(seconds, _MIN_MEASURED_SECONDS)
        # The weight of a measurement in the moving average grows with its duration: 0.1 for 0.1 s,
        # and at most 0.3.
        weight = min(seconds, _MEASURED_SECONDS)
        self.tokens_per_second += weight * (tokens_per_second - self.tokens_per_second)
        self._metrics.engine_seconds.inc(seconds)
        self._metrics.source_tokens.inc(num_tokens)
        search_round.num_finished_tokens = 0
        search_round.measured_at = time.monotonic()
