"""Translates lines of many clients at the same time, with queues and with rounds of searches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nmt.documents.texts import remove_target_tag
from nmt.serve.encoding import TextEncoder
from nmt.serve.monitoring import Metrics
from nmt.serve.queues import BatchOptions, ClientQueues, QueuedRequest
from nmt.serve.round_runner import RoundRunner
from nmt.translate.restoring import restore_lines
from nmt.translate.results import LineResult, build_line_results

_INLINE_SEGMENTS = 32  # the results of larger requests are built outside of the event loop


class Scheduler:
    """Queues the sentences of requests, runs rounds, and assembles the results.

    `run` must run as a task of the event loop in which `translate` is called.

    Args:
        max_queue: maximum number of waiting segments; a client may have half of them.
        metrics: counters to update.
        num_workers: number of workers, each of which searches a round at a time.
        max_rounds: maximum number of rounds at a time, not counting rounds of urgent requests.
            This number of rounds keeps all CPU cores busy. If there are more workers, the last one
            searches urgent requests only.
    """

    def __init__(
        self, max_queue: int, metrics: Metrics, *, num_workers: int = 1, max_rounds: int = 1
    ) -> None:
        self.queues = ClientQueues(max_queue)
        self.rounds = RoundRunner(
            self.queues, metrics, num_workers=num_workers, max_rounds=max_rounds
        )
        self.encoder = TextEncoder()
        self._metrics = metrics

    async def translate(
        self,
        client: str,
        options: BatchOptions,
        lines: Sequence[str],
        *,
        timeout_seconds: float,
        prefix: str = "",
    ) -> list[LineResult]:
        """Return the result of each line. Each translation begins with `prefix`.

        If the call is canceled, its segments are removed from the queue. Raises `QueueFullError`,
        `TooManySentencesError`, and `TimeoutError` after `timeout_seconds`.
        """
        if not any(lines):
            return [LineResult([])] * len(lines)
        self._check_capacity(client, len(lines))  # before the lines are encoded, which takes time
        prefixes = [prefix] * len(lines) if prefix else None
        encoded = await self.encoder.encode(options, list(lines), prefixes)
        request = QueuedRequest(client, options, encoded)
        self._check_capacity(client, len(request.segments))
        if request.segments:
            self.queues.add(request)
            self.rounds.notify()
            # not `asyncio.wait_for`, which needs another future and another turn of the event loop
            timeout = asyncio.get_running_loop().call_later(timeout_seconds, request.expire)
            try:
                await request.done
            finally:
                timeout.cancel()
                self.queues.remove(request)
        if len(request.segments) <= _INLINE_SEGMENTS:
            return self._make_results(request)
        return await asyncio.to_thread(self._make_results, request)

    async def run(self) -> None:
        """Run rounds until cancelled."""
        await self.rounds.run()

    def close(self) -> None:
        """Let the threads end."""
        self.rounds.close()
        self.encoder.close()

    def _check_capacity(self, client: str, num_segments: int) -> None:
        """See `ClientQueues.check_capacity`."""
        self.queues.check_capacity(client, num_segments, self.rounds.tokens_per_second)

    def _make_results(self, request: QueuedRequest) -> list[LineResult]:
        """Return the result of each line of a request whose segments are finished."""
        options = request.options
        search_results = [request.results[i] for i in range(len(request.segments))]
        results = build_line_results(
            request.encoded,
            search_results,
            options.translator.tokenizer,
            n_best=options.line_options.n_best,
            alignment=options.search.alignment,
        )
        results = restore_lines(results, request.encoded)
        self._metrics.sentences.inc(len(results))
        self._metrics.failed_sentences.inc(sum(result.error is not None for result in results))
        return [remove_target_tag(result, options.num_forced) for result in results]
