"""Short requests are answered while other clients keep the server busy."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import PATIENCE_SECONDS, Copying, one_model
from work import die_while_sending

from nmt.config import SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.serve import encoding, queues
from nmt.serve.encoding import TextEncoder
from nmt.serve.monitoring import Metrics
from nmt.serve.queues import BatchOptions
from nmt.serve.scheduler import Scheduler
from nmt.translate.options import LineOptions
from nmt.translate.translator import Translator
from nmt.translate.windows import Window, encode_window

NUM_LINES = 500


class SlowWithLargeBatches(Copying):
    """An engine whose searches of more than eight sentences wait for `large_gate`."""

    num_workers = 2

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.large_gate = threading.Event()
        self.num_large = 0  # searches of more than eight sentences that have started

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        if len(request.sources) > 8:
            self.num_large += 1
            self.large_gate.wait(PATIENCE_SECONDS)
        return super().search(request)


def make_options(engine: Copying, tokenizer: Tokenizer) -> BatchOptions:
    translator = one_model(Translator(engine, tokenizer, SearchConfig())).directions["xx", "yy"]
    return BatchOptions(translator.translator, SearchConfig(), LineOptions(with_scores=False))


async def wait_until(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not claim():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_short_requests_are_answered_while_a_client_with_much_work_keeps_the_engine_busy(
    tokenizer: Tokenizer,
) -> None:
    engine = SlowWithLargeBatches(tokenizer)

    async def scenario() -> None:
        scheduler = Scheduler(20_000, Metrics(), num_workers=2, max_rounds=2)
        runner = asyncio.ensure_future(scheduler.run())
        options = make_options(engine, tokenizer)

        def translate(client: str, num_lines: int) -> asyncio.Future[object]:
            lines = ["the house"] * num_lines
            work = scheduler.translate(client, options, lines, timeout_seconds=PATIENCE_SECONDS)
            return asyncio.ensure_future(work)

        await translate("small", 1)
        greedy = translate("greedy", NUM_LINES)
        await wait_until(lambda: engine.num_large == 1)
        for _ in range(20):
            await asyncio.wait_for(translate("small", 3), PATIENCE_SECONDS)
        long_request = translate("small", 9)  # is not short
        await asyncio.sleep(0.1)
        assert not long_request.done()
        assert engine.num_large == 1
        engine.large_gate.set()
        await asyncio.wait_for(asyncio.gather(greedy, long_request), PATIENCE_SECONDS)
        assert not scheduler.queues.num_waiting
        runner.cancel()
        scheduler.close()

    asyncio.run(scenario())


def test_a_client_with_much_work_gets_all_workers_while_nobody_else_needs_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "_URGENT_SECONDS", 0.0)

    async def count_rounds(max_rounds: int) -> int:
        engine = SlowWithLargeBatches(tokenizer)
        scheduler = Scheduler(20_000, Metrics(), num_workers=2, max_rounds=max_rounds)
        runner = asyncio.ensure_future(scheduler.run())
        options = make_options(engine, tokenizer)
        await scheduler.translate("small", options, ["a tree"], timeout_seconds=PATIENCE_SECONDS)
        lines = ["the house"] * NUM_LINES
        work = scheduler.translate("greedy", options, lines, timeout_seconds=PATIENCE_SECONDS)
        greedy = asyncio.ensure_future(work)
        await wait_until(lambda: engine.num_large == max_rounds)
        await asyncio.sleep(0.1)
        num_rounds = engine.num_large
        engine.large_gate.set()
        await greedy
        runner.cancel()
        scheduler.close()
        return num_rounds

    assert asyncio.run(count_rounds(2)) == 2
    assert asyncio.run(count_rounds(1)) == 1  # the other worker is more than the cores


def test_long_texts_are_encoded_in_another_process_which_may_die(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(Copying(tokenizer), tokenizer)
    lines = ["the house " * 40 + "a tree"] * 20
    expected = encode_window(Window(0, lines, None), tokenizer, options.line_options).segments

    async def scenario() -> None:
        encoder = TextEncoder()
        with monkeypatch.context() as patch:
            patch.setattr(encoding, "encode_window", lambda *_: 1 / 0)  # in this process only
            assert (await encoder.encode(options, lines)).segments == expected
        [executor] = encoder._executors.values()
        [process_id] = executor._processes
        os.kill(process_id, signal.SIGKILL)
        for _ in range(2):
            assert (await encoder.encode(options, lines)).segments == expected
        [executor] = encoder._executors.values()
        [process_id] = executor._processes
        encoder.end_idle_processes()  # it was used since the start
        assert (await encoder.encode(options, lines)).segments == expected
        assert Path(f"/proc/{process_id}").exists()
        for _ in range(2):
            encoder.end_idle_processes()
        await wait_until(lambda: not Path(f"/proc/{process_id}").exists())
        encoder.close()

    asyncio.run(scenario())


def test_a_process_that_dies_while_it_sends_an_encoded_text_is_noticed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(Copying(tokenizer), tokenizer)
    lines = ["the house " * 400] * 20
    expected = encode_window(Window(0, lines, None), tokenizer, options.line_options).segments

    async def scenario() -> None:
        encoder = TextEncoder()
        monkeypatch.setattr(encoding, "_encode", die_while_sending)
        encoded = await asyncio.wait_for(encoder.encode(options, lines), PATIENCE_SECONDS)
        assert encoded.segments == expected
        assert not encoder._executors
        encoder.close()

    asyncio.run(scenario())
