"""Batches sentences across requests, fair between clients, bounded.

The engine starts at once when it is free. What arrives while it is busy joins its search where the
backend allows that, and is the next round otherwise; an engine that computes several rounds at a
time has as many. All state belongs to the event loop, but for `Round.arrived`, which an engine's
thread empties.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from nmt.serve.monitoring import Metrics
from nmt.serve.rounds import Found, LocalEngine, Options, Round, RoundEngine
from nmt.serve.texts import without_forced_start
from nmt.serve.workers import WorkerDiedError, WorkersBackend
from nmt.translate.batch_search import Failure, SearchResult, Segment
from nmt.translate.lines import (
    EncodedWindow,
    LineResult,
    Window,
    encode_window,
    to_results,
)
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)
T = TypeVar("T")

_ROUND_SECONDS = 0.5  # what a round may take, so that a new client does not wait long
_GATHER_SHARE = 0.15  # of the last round's time, and at most so many seconds: a wait for what
_GATHER_SECONDS = 0.01  # its clients send next
_LEAST_PARTS = 32  # of a round, however slow the engine is: fewer waste its time
_INLINE_CHARACTERS = 4000  # longer requests are encoded outside the event loop
_MEASURED_SECONDS = 0.3  # for which the speed is measured
_MAX_PARTS = 2048  # that join a search before another one begins
_MAX_CALLS = 8  # of `call` at a time
_NUM_LOOKED_AT = 16  # tasks of a client that are looked at for one with the settings of the round


class QueueFullError(Exception):
    """No place for so many sentences; `retry_seconds` is an estimate of when there will be."""

    def __init__(self, retry_seconds: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_seconds} s")
        self.retry_seconds = retry_seconds


class TooManySentencesError(Exception):
    """More sentences than a client may ever have in the queue."""


@dataclass(eq=False)
class _Task:
    """The sentences of one call of `translate`, as parts."""

    client: str
    options: Options
    encoded: EncodedWindow
    parts: list[Segment]
    done: asyncio.Future[None]
    outcomes: list[SearchResult | None] = field(default_factory=list)
    next_part: int = 0  # the first one that waits
    num_left: int = 0  # without an outcome
    queued_at: float = field(default_factory=time.monotonic)

    @property
    def num_waiting(self) -> int:
        """Parts that no round has taken yet."""
        return 0 if self.done.done() else len(self.parts) - self.next_part


class _Round(Round):
    """Parts that go through an engine together, each with its task and its place there."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.places: dict[int, tuple[_Task, int]] = {}  # of the parts without outcome, by number
        self.num_tokens = 0  # of these
        self.num_done = 0  # tokens that were not measured yet
        self.measured_at = time.monotonic()

    def add_next(self, task: _Task) -> None:
        """Add the first part of a task that waits."""
        self.add_part(task, task.next_part)
        task.next_part += 1

    def add_part(self, task: _Task, place: int) -> None:
        """Add a part of a task."""
        part = task.parts[place]
        self.places[self.add(part)] = task, place
        self.num_tokens += len(part.ids) + 1


class Scheduler:
    """Translates sentences of many clients at a time.

    Start it with `run` as a task of the event loop in which `translate` is called.
    """

    def __init__(self, max_queue: int, metrics: Metrics, num_rounds: int = 1) -> None:
        self.num_waiting = 0
        self._num_rounds = num_rounds  # at a time
        self._max_queue = max_queue
        self._metrics = metrics
        self._clients: OrderedDict[str, deque[_Task]] = OrderedDict()  # the next one first
        self._open: set[_Task] = set()  # whose call of `translate` has not returned
        self._num_calls = 0
        self._wake = asyncio.Event()
        self._running: list[_Round] = []  # that sentences may join
        self._num_busy = 0  # rounds that run
        self._local = LocalEngine(num_rounds)
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._tokens_per_second = 2000.0  # source tokens; a moving average of what was measured

    async def translate(
        self, client: str, options: Options, lines: Sequence[str], *, timeout_seconds: float
    ) -> list[LineResult]:
        """Return what becomes of each line; cancelling the call frees its places in the queue.

        Raises `QueueFullError`, `TooManySentencesError`, and `TimeoutError` after
        `timeout_seconds`.
        """
        if not any(lines):
            return [LineResult([])] * len(lines)
        self._check_place(client, 1)
        encoded = await self._encode(options, lines)
        parts = [segment for segments in encoded.segments for segment in segments]
        self._check_place(client, len(parts))
        done = asyncio.get_running_loop().create_future()
        task = _Task(client, options, encoded, parts, done, [None] * len(parts), 0, len(parts))
        if parts:
            self._open.add(task)
            self._clients.setdefault(client, deque()).append(task)
            self.num_waiting += len(parts)
            self._wake.set()
            self._let_join()
            try:
                await asyncio.wait_for(done, timeout_seconds)
            except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
                raise TimeoutError from None
            finally:
                self._forget(task)
        return self._finish(task)

    async def run(self) -> None:
        """Give the engine one round after the other, as many at a time as it computes, until
        cancelled.

        Whatever fails outside the engine fails the requests that wait, and the server goes on.
        """
        await asyncio.gather(*map(self._serve_rounds, range(self._num_rounds)))

    async def _serve_rounds(self, slot: int) -> None:
        last = (0, 0.0)  # requests and seconds of the last round
        while True:
            await self._wake.wait()
            await asyncio.sleep(0)  # whoever has sent a request by now takes part
            try:
                last = await self._serve_round(slot, last)
            except Exception as error:
                log.exception("a round failed outside the engine; its requests fail")
                for task in self._open:
                    task.next_part = len(task.parts)
                    if not task.done.done():
                        task.done.set_exception(RuntimeError(str(error)))
                self._wake.clear()
                self._clients.clear()
                self.num_waiting = 0

    async def _serve_round(self, slot: int, last: tuple[int, float]) -> tuple[int, float]:
        """Translate what waits; return the number of requests and the seconds it took."""
        await self._gather(last)
        work = self._take()
        if work is None:
            self._wake.clear()
            return last
        start = time.monotonic()
        num_requests = len({task for task, _ in work.places.values()})
        self._num_busy += 1
        if work.can_join:
            self._running.append(work)
        try:
            await self._search(slot, work)
        except WorkerDiedError:
            self._leave(work)
            log.warning("a worker died with %d sentences; they are repeated", len(work.places))
            await self._repeat(slot, work)
        finally:
            self._leave(work)
            self._num_busy -= 1
        if work.can_join:
            return 0, 0.0  # whoever comes next need not wait for others
        return num_requests, time.monotonic() - start

    def _leave(self, work: _Round) -> None:
        """Let nobody join a round any more."""
        if work in self._running:
            self._running.remove(work)

    async def _search(self, slot: int, work: _Round) -> None:
        """Search the parts of a round; when the engine fails they do, and the server goes on."""
        engine, observe = (
            self._engine(work.options.translator),
            self._metrics.batch_sentences.observe,
        )
        try:
            await engine.search(slot, work, lambda found: self._deliver(work, found), observe)
        except WorkerDiedError:
            raise
        except Exception as error:
            log.exception("the engine failed with %d sentences", len(work.places))
            failure = Failure(f"{type(error).__name__}: {error}"[:300])
            self._deliver(work, [(number, failure) for number in work.places])

    async def _repeat(self, slot: int, work: _Round) -> None:
        """Search what a worker had not delivered when it died, each part by itself, so that one
        that is the reason harms no other.
        """
        for task, place in list(work.places.values()):
            if task.done.done():
                continue
            alone = _Round(work.options)
            alone.add_part(task, place)
            try:
                await self._search(slot, alone)
            except WorkerDiedError:
                failure = Failure("the process that translated it died twice")
                self._deliver(alone, [(0, failure)])

    def _engine(self, translator: Translator) -> RoundEngine:
        backend = translator.backend
        return backend.pool if isinstance(backend, WorkersBackend) else self._local

    async def _gather(self, last: tuple[int, float]) -> None:
        """Wait a moment for as many requests as the last round had: who was answered just now
        may send the next at once, and a round without it makes it wait for two.
        """
        num_last, seconds = last
        end = time.monotonic() + min(_GATHER_SHARE * seconds, _GATHER_SECONDS)
        while time.monotonic() < end:
            if sum(task.num_waiting > 0 for task in self._open) >= num_last:
                return
            await asyncio.sleep(0.0005)

    async def call_function(
        self, translator: Translator, function: Callable[..., T], *args: Any
    ) -> T:
        """Return what `function(translator, *args)` returns where the model is."""
        if self._num_calls >= _MAX_CALLS:
            raise QueueFullError(1)
        self._num_calls += 1
        try:
            return await self._engine(translator).call(function, translator, *args)
        finally:
            self._num_calls -= 1

    def close(self) -> None:
        """Let the threads end."""
        self._local.close()
        self._helper.shutdown(wait=False, cancel_futures=True)

    def _check_place(self, client: str, num_parts: int) -> None:
        share = max(self._max_queue // 2, 1)
        if num_parts > share:
            raise TooManySentencesError(
                f"{num_parts} sentences are more than {share}, the limit of a client; send fewer"
            )
        own = sum(task.num_waiting for task in self._clients.get(client, ()))
        if self.num_waiting + num_parts > self._max_queue or own + num_parts > share:
            seconds = self.num_waiting * 20 / self._tokens_per_second  # at 20 tokens a sentence
            raise QueueFullError(max(1, min(60, math.ceil(seconds / 2))))

    async def _encode(self, options: Options, lines: Sequence[str]) -> EncodedWindow:
        work = (
            Window(0, list(lines), None),
            options.translator.tokenizer,
            replace(options.lines, tags=options.tags),
        )
        if sum(map(len, lines)) <= _INLINE_CHARACTERS:
            return encode_window(*work)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._helper, encode_window, *work)

    def _take(self) -> _Round | None:
        """Take the parts of the next round: of each client in turn, with the settings that the
        first one's oldest task has.
        """
        first = next(self._tasks(), None)
        if first is None:
            return None
        work = _Round(first.options)
        if work.batches.config.sampling:  # draws of equal sentences depend on which is first
            while first.num_waiting:
                self._add(work, first)
            self._clients.move_to_end(first.client)
        else:
            self._fill(work)
        return work

    def _let_join(self) -> None:
        """Add what waits to rounds that run, the smallest first, unless the next client wants
        something else, or a round that starts takes it.
        """
        if self._num_busy < self._num_rounds or self._num_calls:
            return
        for work in sorted(self._running, key=lambda some: len(some.places)):
            first = next(self._tasks(), None)
            if first is None:
                return
            fits = first.options == work.options and first.options.can_join
            if fits and work.num_parts < _MAX_PARTS:
                self._fill(work)
                work.on_arrival()

    def _fill(self, work: _Round) -> None:
        """Add to a round what waits, of each client in turn, until it has enough: its share, where
        there are several rounds at a time, of what takes a short time to translate.
        """
        most = work.batches.max_tokens // max(work.batches.config.beam_size, 1)  # source tokens
        goal = min(most, int(self._tokens_per_second * _ROUND_SECONDS))
        share = sys.maxsize
        if self._num_rounds > 1:
            share = math.ceil(sum(task.num_left for task in self._open) / self._num_rounds)
        tasks = self._in_turn(work.options)
        while (
            len(work.places) < share
            and work.num_tokens < (most if len(work.places) < _LEAST_PARTS else goal)
            and (task := next(tasks, None)) is not None
        ):
            self._add(work, task)

    def _add(self, work: _Round, task: _Task) -> None:
        if task.next_part == 0:
            self._metrics.queue_seconds.observe(time.monotonic() - task.queued_at)
        work.add_next(task)
        self.num_waiting -= 1

    def _tasks(self) -> Iterator[_Task]:
        """Yield the tasks that wait, those of the next client first; drop clients without any."""
        for client in list(self._clients):
            tasks = self._clients[client]
            while tasks and not tasks[0].num_waiting:
                tasks.popleft()
            if not tasks:
                del self._clients[client]
            yield from tuple(tasks)

    def _in_turn(self, options: Options) -> Iterator[_Task]:
        """Yield tasks with these options, of each client in turn, one for each part to take."""
        can_join = options.can_join
        while True:
            found = False
            for client in list(self._clients):
                tasks = self._clients[client]
                while tasks and not tasks[0].num_waiting:
                    tasks.popleft()
                for task in list(tasks)[:_NUM_LOOKED_AT]:
                    fits = task.options == options and task.options.can_join == can_join
                    if task.num_waiting and fits:
                        found = True
                        self._clients.move_to_end(client)
                        yield task
                        break
            if not found:
                return

    def _deliver(self, work: _Round, found: Found) -> None:
        """Give outcomes to their tasks, and let others that wait join the round."""
        for number, outcome in found:
            task, i = work.places.pop(number)
            task.outcomes[i] = outcome
            task.num_left -= 1
            work.num_tokens -= len(task.parts[i].ids) + 1
            work.num_done += len(task.parts[i].ids) + 1
            if not task.num_left and not task.done.done():
                task.done.set_result(None)
        self._measure(work)
        self._let_join()

    def _measure(self, work: _Round) -> None:
        seconds = time.monotonic() - work.measured_at
        if work.places and seconds < _MEASURED_SECONDS:
            return
        share = min(_MEASURED_SECONDS, seconds)  # short rounds say little
        speed = work.num_done / max(seconds, 1e-4)
        self._tokens_per_second += share * (speed - self._tokens_per_second)
        self._metrics.engine_seconds.add(seconds)
        self._metrics.source_tokens.add(work.num_done)
        work.num_done, work.measured_at = 0, time.monotonic()

    def _forget(self, task: _Task) -> None:
        """Free the places of a task that is done or was given up."""
        self.num_waiting -= len(task.parts) - task.next_part
        task.next_part = len(task.parts)
        task.done.cancel()
        self._open.discard(task)
        tasks = self._clients.get(task.client, deque())
        if task in tasks:
            tasks.remove(task)
        if not tasks:
            self._clients.pop(task.client, None)

    def _finish(self, task: _Task) -> list[LineResult]:
        """Join the segments of each line."""
        options = task.options
        results = to_results(
            task.encoded,
            [outcome for outcome in task.outcomes if outcome is not None],
            options.translator.tokenizer,
            n_best=options.lines.n_best,
            alignment=options.search.alignment,
        )
        self._metrics.sentences.add(len(results))
        self._metrics.failed_sentences.add(sum(result.error is not None for result in results))
        pairs = zip(results, task.encoded.segments, strict=True)
        return [without_forced_start(*pair) for pair in pairs]
