"""Requests whose segments wait to be searched, in one queue per client.

A segment is a sentence, or a part of a long sentence, as token ids. A round (`nmt.serve.rounds`) is
a group of segments that a worker searches together. Each client in turn contributes a segment to a
round, so that a client with many sentences does not delay the others. Requests of clients with
little unfinished work are urgent: a worker is reserved for them. The number of waiting segments is
limited, in total and per client.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from nmt.config import SearchConfig
from nmt.data.languages import Tags, encode_tag
from nmt.search.request import SearchRequest
from nmt.translate.batch_search import BatchSearch, SearchResult, Segment
from nmt.translate.engines.native import NativeBackend
from nmt.translate.options import LineOptions, add_search_settings
from nmt.translate.translator import Translator
from nmt.translate.windows import EncodedWindow

_MAX_REQUESTS_COMPARED = 16  # number of requests of a client whose options are compared
_TOKENS_PER_SEGMENT = 20  # average number, to estimate Retry-After
_MAX_RETRY_SECONDS = 60
# requests are urgent if all unanswered requests of their client together have at most this number
_MAX_URGENT_SEGMENTS = 8
_MAX_URGENT_TOKENS = 128  # source tokens
_URGENT_SECONDS = 30.0  # how long after an urgent request another one is expected


class QueueFullError(Exception):
    """The queue has no space for a request, but may have space in `retry_seconds`."""

    def __init__(self, retry_seconds: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_seconds} s")
        self.retry_seconds = retry_seconds


class TooManySentencesError(Exception):
    """A request has more sentences than a client may have in the queue."""


@dataclass(frozen=True)
class BatchOptions:
    """Settings that all sentences of a batch share."""

    translator: Translator
    search: SearchConfig
    line_options: LineOptions
    tags: Tags = field(default=Tags(), compare=False)  # not compared: may differ within a batch
    has_prefix: bool = False  # whether translations begin with a text of the request

    @functools.cached_property
    def encoding_options(self) -> LineOptions:
        """The options for encoding lines as segments."""
        return add_search_settings(replace(self.line_options, tags=self.tags), self.search)

    @property
    def can_join(self) -> bool:
        """Whether sentences with these options may join a running search."""
        backend = self.translator.backend
        # in a search that sentences can join, all translations begin with the same tokens
        if self.has_prefix or not isinstance(backend, NativeBackend):
            return False
        tag_ids = encode_tag(self.translator.tokenizer.tgt, self.tags.tgt)
        request = SearchRequest(sources=[], config=self.search, prefixes=[tag_ids])
        return backend.can_join(request)

    @property
    def num_forced(self) -> int:
        """Number of tokens of the tag that each translation begins with."""
        tag_ids = encode_tag(self.translator.tokenizer.tgt, self.tags.tgt)
        return len(tag_ids)

    def can_share_batch(self, other_options: BatchOptions) -> bool:
        """Return whether sentences with these and with other options may share a batch."""
        return self == other_options and self.can_join == other_options.can_join

    def make_batch_search(self) -> BatchSearch:
        """Return a search with these options."""
        search = self.search
        if search.sampling:  # samples are independent, so draw only those that are used
            search = replace(search, beam_size=self.line_options.n_best)
        return BatchSearch(
            backend=self.translator.backend,
            config=search,
            n_best=self.line_options.n_best,
            max_tokens=self.translator.backend.max_tokens,
            num_forced=self.num_forced,
            src_tags=self.translator.list_src_tags(self.tags),
            with_scores=self.line_options.with_scores,
            is_parallel=False,  # other workers search other rounds
        )


@dataclass(eq=False)
class QueuedRequest:
    """The segments of one call of `Scheduler.translate`.

    Rounds take the segments in order, but may finish them in any order.
    """

    client: str
    options: BatchOptions
    encoded: EncodedWindow
    segments: list[Segment] = field(init=False)
    num_tokens: int = field(init=False)  # number of source tokens of all segments
    results: dict[int, SearchResult] = field(default_factory=dict)
    """The results of finished segments, keyed by the index of the segment."""
    num_taken: int = 0  # number of segments that a round has taken
    queued_at: float = field(default_factory=time.monotonic)
    done: asyncio.Future[None] = field(init=False)

    def __post_init__(self) -> None:
        self.segments = list(chain.from_iterable(self.encoded.segments))
        self.num_tokens = sum(segment.num_tokens for segment in self.segments)
        self.done = asyncio.get_running_loop().create_future()

    @property
    def num_waiting(self) -> int:
        """Number of segments that no round has taken; 0 if the request was answered or failed."""
        if self.done.done():
            return 0
        return len(self.segments) - self.num_taken

    @property
    def num_unfinished(self) -> int:
        """Number of segments that have no result yet."""
        return len(self.segments) - len(self.results)

    def finish_segment(self, index: int, result: SearchResult) -> None:
        """Store the result of a segment; the last one completes the request."""
        self.results[index] = result
        if not self.num_unfinished and not self.done.done():
            self.done.set_result(None)

    def expire(self) -> None:
        """Fail the request with a `TimeoutError`, unless it is complete."""
        if not self.done.done():
            self.done.set_exception(TimeoutError())


class ClientQueues:
    """The queues of all clients, in the order in which the clients are served.

    Args:
        max_waiting: maximum number of waiting segments; a client may have half of them.
    """

    def __init__(self, max_waiting: int) -> None:
        self.num_waiting = 0  # number of segments of all clients that no round has taken
        self.requests: set[QueuedRequest] = set()  # unanswered requests, waiting or being searched
        self.max_per_client = max(max_waiting // 2, 1)  # maximum number of segments of a client
        self._max_waiting = max_waiting
        self._queues: OrderedDict[str, deque[QueuedRequest]] = OrderedDict()  # keyed by client
        # for each client, the number of segments of its unanswered requests
        self._num_segments: Counter[str] = Counter()
        self._num_tokens: Counter[str] = Counter()  # number of source tokens of these segments
        # for each client, the time of its latest urgent request, sorted by time
        self._urgent_at: OrderedDict[str, float] = OrderedDict()

    def check_capacity(self, client: str, num_segments: int, tokens_per_second: float) -> None:
        """Raise an exception unless a client may add `num_segments` segments now.

        Raises `TooManySentencesError` for more segments than the limit of a client, and
        `QueueFullError` if the client should try again later. `tokens_per_second` is the throughput
        of the server, from which the time to wait is estimated.
        """
        if num_segments > self.max_per_client:
            raise TooManySentencesError(
                f"{num_segments} sentences are more than {self.max_per_client}, the limit of a "
                "client; send fewer"
            )
        is_full = self.num_waiting + num_segments > self._max_waiting
        # `_num_segments` also counts segments that no longer wait. The waiting segments are counted
        # only if this number exceeds the limit, since counting takes time.
        if self._num_segments[client] + num_segments > self.max_per_client:
            num_waiting = sum(request.num_waiting for request in self._queues.get(client, ()))
            is_full = is_full or num_waiting + num_segments > self.max_per_client
        if is_full:
            seconds_until_empty = self.num_waiting * _TOKENS_PER_SEGMENT / tokens_per_second
            # a queue that is half empty has space for most requests
            retry_seconds = max(1, math.ceil(seconds_until_empty / 2))
            raise QueueFullError(min(retry_seconds, _MAX_RETRY_SECONDS))

    def add(self, request: QueuedRequest) -> None:
        """Append a request to the queue of its client."""
        self.requests.add(request)
        self._num_segments[request.client] += len(request.segments)
        self._num_tokens[request.client] += request.num_tokens
        self._queues.setdefault(request.client, deque()).append(request)
        self.num_waiting += len(request.segments)
        if self._is_urgent(request.client):
            self._urgent_at[request.client] = time.monotonic()
            self._urgent_at.move_to_end(request.client)

    def remove(self, request: QueuedRequest) -> None:
        """Remove a request that was answered or canceled."""
        self.num_waiting -= len(request.segments) - request.num_taken
        request.num_taken = len(request.segments)  # so that no round takes the remaining ones
        request.done.cancel()
        self.requests.discard(request)
        self._num_segments[request.client] -= len(request.segments)
        self._num_tokens[request.client] -= request.num_tokens
        if not self._num_segments[request.client]:  # the client has no other request
            del self._num_segments[request.client]
            del self._num_tokens[request.client]
        queue = self._queues.get(request.client, deque())
        if request in queue:
            queue.remove(request)
        if not queue:
            self._queues.pop(request.client, None)

    def count_expected(self) -> int:
        """Return the number of requests that the next round can expect.

        These are the requests that wait, and new requests of clients that were just answered.
        """
        num_expected = 0
        for request in self.requests:
            if request.num_waiting or request.done.done():
                num_expected += 1
        return num_expected

    def fail_all(self, reason: str) -> None:
        """Fail all unanswered requests with a `RuntimeError`."""
        for request in self.requests:
            request.num_taken = len(request.segments)
            if not request.done.done():
                request.done.set_exception(RuntimeError(reason))
        self._queues.clear()
        self.num_waiting = 0

    def next_request(self, *, only_urgent: bool = False) -> QueuedRequest | None:
        """Return the oldest waiting request of the next client, or None if no request waits.

        With `only_urgent`, skips clients whose requests are not urgent.
        """
        for client in list(self._queues):
            queue = self._queues[client]
            _drop_taken(queue)
            if not queue:
                del self._queues[client]
            elif not only_urgent or self._is_urgent(client):
                return queue[0]
        return None

    def take_turns(
        self, options: BatchOptions, *, only_urgent: bool = False
    ) -> Iterator[QueuedRequest]:
        """Yield waiting requests that can share a batch with `options`, one per client and turn.

        The caller must take one segment of a request before it asks for the next request. A request
        with further waiting segments is yielded again in the next turn of its client. With
        `only_urgent`, yields only urgent requests.
        """
        clients = deque(self._queues)
        while clients:
            client = clients.popleft()
            if only_urgent and not self._is_urgent(client):
                continue
            request = self._find_request(client, options)
            if request is not None:
                yield request
                self.end_turn(client)
                clients.append(client)

    def take_segment(self, request: QueuedRequest) -> int:
        """Take the first waiting segment of a request; return its index in the request."""
        index = request.num_taken
        request.num_taken += 1
        self.num_waiting -= 1
        return index

    def end_turn(self, client: str) -> None:
        """Move a client behind all other clients."""
        self._queues.move_to_end(client)

    def has_competition(self) -> bool:
        """Return whether urgent requests may have to wait for the work of another client.

        This is possible if a client with much work waits, and another client sent an urgent request
        in the last `_URGENT_SECONDS`.
        """
        expired_at = time.monotonic() - _URGENT_SECONDS
        while self._urgent_at:
            client, sent_at = next(iter(self._urgent_at.items()))  # the oldest
            if sent_at > expired_at:
                break
            del self._urgent_at[client]
        for client in self._queues:
            urgent_competitors = self._urgent_at.keys() - {client}
            if urgent_competitors and not self._is_urgent(client):
                return True
        return False

    def _is_urgent(self, client: str) -> bool:
        """Return whether the unanswered requests of a client have few segments and tokens."""
        return (
            self._num_segments[client] <= _MAX_URGENT_SEGMENTS
            and self._num_tokens[client] <= _MAX_URGENT_TOKENS
        )

    def _find_request(self, client: str, options: BatchOptions) -> QueuedRequest | None:
        """Return the first waiting request of a client that can share a batch with `options`."""
        queue = self._queues[client]
        _drop_taken(queue)
        for request in islice(queue, _MAX_REQUESTS_COMPARED):
            if request.num_waiting and request.options.can_share_batch(options):
                return request
        return None


def _drop_taken(queue: deque[QueuedRequest]) -> None:
    """Drop the requests at the front of a queue that have no waiting segments."""
    while queue and not queue[0].num_waiting:
        queue.popleft()
