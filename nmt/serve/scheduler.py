"""Translates lines of many clients at a time: the interface of the server to its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from nmt.serve.monitoring import Metrics
from nmt.serve.queues import BatchOptions, ClientQueues, QueuedRequest
from nmt.serve.rounds import RoundRunner
from nmt.serve.texts import without_forced_start
from nmt.translate.results import LineResult, build_line_results
from nmt.translate.windows import EncodedWindow, Window, encode_window

_INLINE_CHARACTERS = 4000  # longer requests are encoded outside of the event loop


class Scheduler:
    """Queues the sentences of requests, runs rounds, and assembles the results.

    Start `run` as a task of the event loop in which `translate` is called.

    Args:
        max_queue: maximum number of waiting segments; a client may have half of them.
        metrics: counters to update.
        num_rounds: rounds that run at the same time.
    """

    def __init__(self, max_queue: int, metrics: Metrics, num_rounds: int = 1) -> None:
        self.queues = ClientQueues(max_queue)
        self.rounds = RoundRunner(self.queues, metrics, num_rounds)
        self._metrics = metrics
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")

    async def translate(
        self, client: str, options: BatchOptions, lines: Sequence[str], *, timeout_seconds: float
    ) -> list[LineResult]:
        """Return the result of each line. Cancelling the call removes its segments from the queue.

        Raises `QueueFullError`, `TooManySentencesError`, and `TimeoutError` after
        `timeout_seconds`.
        """
        if not any(lines):
            return [LineResult([])] * len(lines)
        self._check_capacity(client, len(lines))  # before the effort of encoding
        request = QueuedRequest(client, options, await self._encode(options, lines))
        self._check_capacity(client, len(request.segments))
        if request.segments:
            self.queues.add(request)
            self.rounds.notify()
            try:
                await asyncio.wait_for(request.done, timeout_seconds)
            except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
                raise TimeoutError from None
            finally:
                self.queues.remove(request)
        return self._make_results(request)

    async def run(self) -> None:
        """Run rounds until cancelled."""
        await self.rounds.run()

    def close(self) -> None:
        """Let the threads end."""
        self.rounds.close()
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def _check_capacity(self, client: str, num_segments: int) -> None:
        self.queues.check_capacity(client, num_segments, self.rounds.tokens_per_second)

    async def _encode(self, options: BatchOptions, lines: Sequence[str]) -> EncodedWindow:
        """Encode lines as segments of token ids, in a thread if they are long."""
        window = Window(0, list(lines), None)
        tokenizer = options.translator.tokenizer
        line_options = replace(options.lines, tags=options.tags)
        if sum(map(len, lines)) <= _INLINE_CHARACTERS:
            return encode_window(window, tokenizer, line_options)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._encoder, encode_window, window, tokenizer, line_options
        )

    def _make_results(self, request: QueuedRequest) -> list[LineResult]:
        """Join the segments of each line."""
        options = request.options
        search_results = [request.results[i] for i in range(len(request.segments))]
        results = build_line_results(
            request.encoded,
            search_results,
            options.translator.tokenizer,
            n_best=options.lines.n_best,
            alignment=options.search.alignment,
        )
        self._metrics.sentences.inc(len(results))
        self._metrics.failed_sentences.inc(sum(result.error is not None for result in results))
        return [
            without_forced_start(result, segments)
            for result, segments in zip(results, request.encoded.segments, strict=True)
        ]
