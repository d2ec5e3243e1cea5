"""Rounds, which are groups of segments to search together, and the workers that search rounds.

Workers are threads of the server process (`WorkerThreads`) or other processes (`WorkerPool` in
`nmt.serve.worker_pool`). In a worker, `JoiningSearch` lets segments join a running search.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

from nmt.serve.queues import BatchOptions, QueuedRequest
from nmt.translate.batch_search import BatchSearch, Failure, SearchResult, Segment
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)
T = TypeVar("T")

# Each join costs one run of the encoder. Therefore, segments wait until there are enough of them,
# or until they have waited for several steps of the search.
_MIN_JOIN_SHARE = 0.25  # number of waiting segments divided by the number of searched segments
_MAX_JOIN_STEPS = 4
_MAX_REASON_CHARACTERS = 300  # `Failure.reason` is cut to this length


class Delivery(NamedTuple):
    """Results of segments that a round has finished."""

    results: list[tuple[int, SearchResult]]  # each with the number of its segment in the round
    batch_sizes: list[int]
    """The number of segments in the search after its start, and after each time that segments
    joined it, since the last delivery."""


class SearchRound:
    """Segments that a worker searches together, and the requests that they belong to.

    Segments are numbered in the order in which they are added. Only `take_new_segments` may be
    called in the thread of a worker, all other methods only in the event loop.

    Args:
        only_urgent: whether to add only segments of urgent requests.
    """

    def __init__(self, options: BatchOptions, *, only_urgent: bool = False) -> None:
        self.options = options
        self.only_urgent = only_urgent
        self.batch_search = options.make_batch_search()
        self.is_open = options.can_join  # whether segments may be added to the running search
        self.num_added = 0
        self.unfinished: dict[int, tuple[QueuedRequest, int]] = {}
        """The request of each unfinished segment and the index of the segment in the request, keyed
        by the number of the segment."""
        self.num_tokens = 0  # number of source tokens of the unfinished segments
        self.measured_at = time.monotonic()  # when the throughput was last measured
        self.num_finished_tokens = 0  # number of source tokens finished since `measured_at`
        # number of requests that the next round can expect; set at the end of this round
        self.num_expected = 0
        self.on_new_segments: Callable[[], None] = lambda: None
        """Called after segments were added to the running search. Set by the worker."""
        self._new_segments: deque[Segment] = deque()  # not taken by the worker yet

    def add(self, request: QueuedRequest, index: int) -> None:
        """Add a segment of a request, given its index in the request."""
        segment = request.segments[index]
        self.unfinished[self.num_added] = (request, index)
        self.num_added += 1
        self.num_tokens += segment.num_tokens
        self._new_segments.append(segment)

    def take_new_segments(self) -> list[Segment]:
        """Return the segments that were added since the last call."""
        num_segments = len(self._new_segments)
        # the event loop may append meanwhile; `popleft` is atomic
        return [self._new_segments.popleft() for _ in range(num_segments)]

    def finish_segment(self, number: int, result: SearchResult) -> None:
        """Pass the result of a segment to its request."""
        request, index = self.unfinished.pop(number)
        request.finish_segment(index, result)
        num_tokens = request.segments[index].num_tokens
        self.num_tokens -= num_tokens
        self.num_finished_tokens += num_tokens


class JoiningSearch:
    """Searches the segments of a round, including segments that arrive while it runs.

    Args:
        batch_search: search with the settings of the round.
        can_join: whether segments may join between two steps of the search. If not, segments that
            arrive are searched afterwards.
        receive: returns the segments that have arrived since the last call, without waiting.
        deliver: called with results as soon as segments are finished.
    """

    def __init__(
        self,
        batch_search: BatchSearch,
        *,
        can_join: bool,
        receive: Callable[[], list[Segment]],
        deliver: Callable[[Delivery], None],
    ) -> None:
        self.num_finished = 0  # number of segments that earlier searches of the round finished
        self._batch_search = batch_search
        self._can_join = can_join
        self._receive = receive
        self._deliver_to_round = deliver
        self._waiting: list[Segment] = []
        self._num_steps_waited = 0  # steps of the current search since segments began to wait
        self._next_number = 0  # number of the next segment that joins the current search
        self._unfinished: set[int] = set()  # numbers of segments in the current search
        self._batch_sizes: list[int] = []  # see `Delivery`

    def search(self, segments: list[Segment]) -> None:
        """Search segments, and segments that arrive meanwhile, until all are delivered."""
        self._waiting += segments
        while self._waiting:
            self._next_number = 0
            self._unfinished.clear()
            self._search_waiting()
            self.num_finished += self._next_number

    def _search_waiting(self) -> None:
        """Run one search. If it raises an exception, its unfinished segments fail."""
        segments = self._take_waiting(num_searched=0)
        try:
            if self._can_join:
                self._batch_search.translate_arriving(segments, self._take_joining, self._deliver)
            else:
                results = self._batch_search.translate(segments)
                self._deliver(list(enumerate(results)))
        except (EOFError, ConnectionError):  # the server has closed the connection to this process
            raise
        # an engine may raise any type; the worker goes on with the next round
        except Exception as error:
            log.exception("the engine failed with %d sentences", len(self._unfinished))
            failure = describe_failure(error)
            self._deliver([(number, failure) for number in self._unfinished])

    def _take_joining(self, num_searched: int) -> list[Segment]:
        """Return the segments that join a search of `num_searched` segments at its next step."""
        self._waiting += self._receive()
        if not self._waiting:
            return []
        self._num_steps_waited += 1
        is_small = len(self._waiting) < _MIN_JOIN_SHARE * num_searched
        if is_small and self._num_steps_waited <= _MAX_JOIN_STEPS:
            return []
        return self._take_waiting(num_searched)

    def _take_waiting(self, num_searched: int) -> list[Segment]:
        """Return all waiting segments, and number them for the current search."""
        segments = self._waiting
        self._waiting = []
        self._num_steps_waited = 0
        first_number = self._next_number
        self._next_number += len(segments)
        self._unfinished.update(range(first_number, self._next_number))
        self._batch_sizes.append(num_searched + len(segments))
        return segments

    def _deliver(self, results: Sequence[tuple[int, SearchResult]]) -> None:
        """Deliver results, each with the number of its segment in the current search."""
        round_results = [(self.num_finished + number, result) for number, result in results]
        self._deliver_to_round(Delivery(round_results, self._batch_sizes))
        self._unfinished.difference_update([number for number, _ in results])
        self._batch_sizes = []


def describe_failure(error: Exception) -> Failure:
    """Return the result of segments whose search raised an exception."""
    reason = f"{type(error).__name__}: {error}"
    return Failure(reason[:_MAX_REASON_CHARACTERS])


class SearchWorkers(Protocol):
    """Workers, each of which searches one round at a time."""

    async def search(
        self, worker_index: int, search_round: SearchRound, deliver: Callable[[Delivery], None]
    ) -> None:
        """Search the segments of a round, and segments that are added meanwhile.

        Calls `deliver` with results in the event loop, and returns when all are delivered. Raises
        an exception if the unfinished segments cannot be searched.
        """

    async def call_function(
        self, translator: Translator, function: Callable[..., T], *args: Any
    ) -> T:
        """Return `function(translator, *args)`, called where the model is loaded."""


class WorkerThreads:
    """Threads of the server process; see `SearchWorkers`."""

    def __init__(self, num_workers: int) -> None:
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="search")

    async def search(
        self, worker_index: int, search_round: SearchRound, deliver: Callable[[Delivery], None]
    ) -> None:
        """Search a round in any free thread; `worker_index` is not used."""
        loop = asyncio.get_running_loop()

        def deliver_in_loop(delivery: Delivery) -> None:
            """Call `deliver` in the event loop, from the thread that searches."""
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(deliver, delivery)

        joining_search = JoiningSearch(
            search_round.batch_search,
            can_join=search_round.options.can_join,
            receive=search_round.take_new_segments,
            deliver=deliver_in_loop,
        )
        segments = search_round.take_new_segments()
        while segments:
            await loop.run_in_executor(self._threads, joining_search.search, segments)
            segments = search_round.take_new_segments()  # segments that arrived since the search

    async def call_function(
        self, translator: Translator, function: Callable[..., T], *args: Any
    ) -> T:
        """Return `function(translator, *args)`, called as soon as a thread is free."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, translator, *args)

    def close(self) -> None:
        """Let the threads end after their current task."""
        self._threads.shutdown(wait=False, cancel_futures=True)
