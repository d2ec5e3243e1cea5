"""Many clients at a time: who is served when, and that nothing is lost, swapped or held up."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import random
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import (
    GOOD,
    HEAD,
    PATIENCE_SECONDS,
    Running,
    copying,
    eventually,
    loaded,
    running,
    start_server,
    tiny_folder,
)
from tiny import sentences
from toy import call_before

from nmt.config import ServeConfig
from nmt.data.tokenizer import Tokenizer
from nmt.search.beam import BeamSearch
from nmt.serve import access, round_runner, v1
from nmt.serve.access import client_network
from nmt.serve.middleware import EXCEPTION_HANDLERS
from nmt.serve.models import Models
from nmt.serve.monitoring import Metrics
from nmt.serve.queues import BatchOptions, QueueFullError
from nmt.serve.scheduler import Scheduler
from nmt.serve.service import Service
from nmt.translate.options import LineOptions
from nmt.translate.results import LineResult
from nmt.translate.translator import Translator


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as executor:
        yield executor


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time pass for the limits on requests per minute."""
    monkeypatch.setattr(access, "time", SimpleNamespace(monotonic=lambda: 1000.0))


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result() for future in futures]


@pytest.mark.slow
def test_64_clients_get_the_translations_of_a_single_client(
    tmp_path: Path, tokenizer: Tokenizer, pool: ThreadPoolExecutor
) -> None:
    folder = tiny_folder(tmp_path / "model", tokenizer)
    translator = Translator.load(folder, device="cpu", backend="native")
    lines = [*sentences(40), " ".join(sentences(120)), "Ein Satz. " * 3 + "Ende"]
    searches: list[dict[str, Any]] = [{}, {"beam_size": 1}, {"beam_size": 2, "length_penalty": 1.0}]
    expected = []  # translations by line, for each search
    for search in searches:
        translations = translator.translate(lines, **search, too_long="split")
        expected.append(dict(zip(lines, translations, strict=True)))
    draw = random.Random(3)

    with running(loaded(folder)) as server, ThreadPoolExecutor(64) as clients:
        answers = []
        for number in draw.choices(range(len(searches)), k=70):
            text = draw.sample(lines, draw.randint(1, 4))
            body = {"text": text, "search": searches[number], "split_sentences": False, **GOOD}
            answer = clients.submit(server.post, "/v1/translate", **body)
            answers.append((answer, [expected[number][line] for line in text]))
        for answer, expected_texts in answers:
            texts = [item["text"] for item in answer.result().json["translations"]]
            assert texts == expected_texts
        assert server.metric("nmt_batch_sentences_count") < server.metric("nmt_sentences_total")


def test_clients_that_hang_up_free_their_places_and_disturb_nobody(tokenizer: Tokenizer) -> None:
    models, engine = copying(tokenizer)
    with running(models) as server, ThreadPoolExecutor(8) as clients:
        engine.gate.clear()
        first = clients.submit(server.translate, "the")
        assert engine.entered.wait(PATIENCE_SECONDS)
        gone = []
        for _ in range(10):
            connection = server.connect()
            body = json.dumps({"q": ["gone tree"] * 50, **GOOD})
            connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
            gone.append(connection)
        eventually(lambda: server.service.scheduler.queues.num_waiting == 500)
        waiting = clients.submit(server.translate, "a house")
        eventually(lambda: server.service.scheduler.queues.num_waiting == 501)
        for connection in gone:
            connection.close()
        eventually(lambda: server.service.scheduler.queues.num_waiting == 1)
        engine.gate.set()
        assert (first.result(), waiting.result()) == ("the", "a house")
        eventually(lambda: server.metric("nmt_disconnects_total") == 10)
        hung_up = 'nmt_requests_total{method="POST",route="/translate",status="499"'
        eventually(lambda: server.metric(hung_up) == 10)
        eventually(lambda: server.service.body_limits.held_bytes == 0)
        assert not server.service.scheduler.queues._queues
    assert engine.batch_sizes() == [1, 1]


def test_one_client_with_many_lines_does_not_starve_another(tokenizer: Tokenizer) -> None:
    models, engine = copying(tokenizer)

    async def scenario() -> None:
        scheduler = Scheduler(20_000, Metrics())
        scheduler.rounds.tokens_per_second = 100.0  # small rounds
        runner = asyncio.ensure_future(scheduler.run())
        options = options_of(models)
        engine.gate.clear()
        greedy = asyncio.ensure_future(
            scheduler.translate(
                "greedy", options, ["the house"] * 5000, timeout_seconds=PATIENCE_SECONDS
            )
        )
        while not engine.entered.is_set():
            await asyncio.sleep(0.01)
        small = asyncio.ensure_future(
            scheduler.translate("small", options, ["a tree"], timeout_seconds=PATIENCE_SECONDS)
        )
        while scheduler.queues.num_waiting < 4000 or len(scheduler.queues.requests) < 2:
            await asyncio.sleep(0.01)
        engine.gate.set()
        await small
        assert len(engine.batches) <= 3
        assert not greedy.done()
        assert len(await greedy) == 5000
        runner.cancel()
        scheduler.close()

    asyncio.run(scenario())


def options_of(models: Models) -> BatchOptions:
    translator = models.directions["xx", "yy"].translator
    return BatchOptions(translator, translator.defaults, LineOptions(with_scores=False))


def test_the_engine_starts_at_once_and_gathers_while_it_is_busy(
    tokenizer: Tokenizer, pool: ThreadPoolExecutor
) -> None:
    models, engine = copying(tokenizer)
    with running(models) as server:
        engine.gate.clear()
        first = pool.submit(server.translate, "the")
        assert engine.entered.wait(PATIENCE_SECONDS)  # without waiting for other requests
        waiting = [pool.submit(server.translate, text) for text in ("a tree", "a house") * 6]
        eventually(lambda: server.service.scheduler.queues.num_waiting == 12)
        different = pool.submit(server.post, "/translate", q="a tree", alternatives=2, **GOOD)
        eventually(lambda: server.service.scheduler.queues.num_waiting == 13)
        engine.gate.set()
        assert results([first, *waiting]) == ["the", *["a tree", "a house"] * 6]
        assert different.result().json["translatedText"] == "a tree"
    assert engine.batch_sizes() == [1, 12, 1]  # equal options share a batch


def test_a_round_waits_for_the_next_request_of_clients_that_were_just_answered(
    tokenizer: Tokenizer, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the request comes in this time
    monkeypatch.setattr(round_runner, "_WAIT_SHARE", 1e6)
    monkeypatch.setattr(round_runner, "_MAX_WAIT_SECONDS", PATIENCE_SECONDS)
    models, engine = copying(tokenizer)
    with running(models) as server:
        engine.gate.clear()
        first = pool.submit(lambda: [server.translate("the"), server.translate("a house")])
        assert engine.entered.wait(PATIENCE_SECONDS)
        waiting = [pool.submit(server.translate, "a tree") for _ in range(3)]
        eventually(lambda: server.service.scheduler.queues.num_waiting == 3)
        engine.gate.set()
        assert first.result() == ["the", "a house"]
        assert results(waiting) == ["a tree"] * 3
    assert engine.batch_sizes() == [1, 4]


def test_requests_join_a_running_search_and_a_failed_join_harms_no_request(
    tokenizer: Tokenizer, pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(tmp_path / "model", tokenizer)
    lines = ["the house", "a tree", "the small tree"]
    expected = Translator.load(folder, device="cpu", backend="native").translate(lines)
    entered = threading.Event()
    gate = threading.Event()
    sizes = []

    def wait_for_gate(_: BeamSearch) -> None:
        entered.set()
        gate.wait(PATIENCE_SECONDS)

    def note_size(_: BeamSearch, rows: list[list[int]]) -> None:
        sizes.append(len(rows))

    def fail(*_: Any) -> None:
        raise RuntimeError("no more")

    call_before(monkeypatch, BeamSearch, "step", wait_for_gate)
    with running(loaded(folder)) as server:
        for action in (note_size, fail):
            call_before(monkeypatch, BeamSearch, "join", action)
            entered.clear()
            gate.clear()
            first = pool.submit(server.translate, lines[0])
            assert entered.wait(PATIENCE_SECONDS)
            joining = [pool.submit(server.translate, line) for line in lines[1:]]
            eventually(lambda: len(server.service.scheduler.rounds.running[0].unfinished) == 3)
            gate.set()
            assert results([first, *joining]) == expected, action
        assert sizes == [2]
        assert server.service.scheduler.queues.num_waiting == 0


@pytest.mark.slow
def test_a_full_queue_a_deadline_and_a_share_are_refused_and_others_unharmed(
    tokenizer: Tokenizer, pool: ThreadPoolExecutor
) -> None:
    models, engine = copying(tokenizer)
    with running(models, max_queue=20) as server:
        assert server.post("/translate", q=["a"] * 11, **GOOD).status == 400  # more than its share
        engine.gate.clear()
        first = pool.submit(server.post, "/translate", q="the", **GOOD)
        assert engine.entered.wait(PATIENCE_SECONDS)
        waiting = pool.submit(server.post, "/translate", q=["a"] * 10, **GOOD)
        eventually(lambda: server.service.scheduler.queues.num_waiting == 10)
        refused = server.post("/translate", q=["a"] * 5, **GOOD)
        assert refused.status == 429
        assert refused.json["error"].startswith("Slowdown: ")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        engine.gate.set()
        assert first.result().status == waiting.result().status == 200
    with running(models, timeout_seconds=1.0) as server:
        engine.gate.clear()
        engine.entered.clear()
        first = pool.submit(server.post, "/translate", q="the", **GOOD)
        assert engine.entered.wait(PATIENCE_SECONDS)
        late = server.post("/translate", q=["a"] * 10, **GOOD)
        assert late.status == 503
        assert late.headers["retry-after"]
        assert first.result().status == 503
        engine.gate.set()
        eventually(lambda: server.post("/translate", q="the tree", **GOOD).status == 200)
        assert server.service.scheduler.queues.num_waiting == 0


def test_a_sentence_that_fails_fails_its_request_alone(
    tokenizer: Tokenizer, pool: ThreadPoolExecutor
) -> None:
    models, engine = copying(tokenizer, poison="über")
    with running(models) as server:
        engine.gate.clear()
        first = pool.submit(server.translate, "the")
        assert engine.entered.wait(PATIENCE_SECONDS)
        numbered = [f"a tree {number}" for number in range(9)]
        good = [pool.submit(server.translate, text) for text in numbered]
        bad = pool.submit(server.post, "/translate", q=["a tree", "a über house"], **GOOD)
        eventually(lambda: server.service.scheduler.queues.num_waiting == 11)
        engine.gate.set()
        assert results([first, *good]) == ["the", *numbered]
        assert bad.result().status == 500
        assert "a poisoned sentence" in bad.result().json["error"]
        content = server.post("/v1/translate", text=["a tree", "a über house"], **GOOD).json
        assert [item["text"] for item in content["translations"]] == ["a tree", None]
        assert "poisoned" in content["translations"][1]["sentences"][0]["error"]
        assert server.metric("nmt_failed_sentences_total") == 2


def test_a_bug_outside_the_engine_fails_the_requests_there_and_the_server_goes_on(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, engine = copying(tokenizer)
    with running(models) as server:
        engine.max_tokens = None  # type: ignore[assignment]
        assert server.post("/translate", q="the", **GOOD).status == 500
        assert caplog.text.count("failed outside the engine") == 1
        engine.max_tokens = 4096
        assert server.translate("the tree") == "the tree"
        assert server.service.scheduler.queues.num_waiting == 0
        with monkeypatch.context() as patch:
            patch.setattr(server.service.scheduler.rounds, "_take_round", lambda **_: 1 / 0)
            assert server.post("/translate", q="the", **GOOD).status == 500
            time.sleep(0.2)
        assert caplog.text.count("failed outside the engine") <= 3  # not again and again
        assert server.translate("the tree") == "the tree"


def test_a_request_whose_exception_handler_fails_counts_as_500(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, _ = copying(tokenizer)
    monkeypatch.setitem(EXCEPTION_HANDLERS, Exception, lambda request, error: 1 / 0)
    with running(models) as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.service.metrics, "render", lambda: 1 / 0)
            assert server.get("/metrics").status == 500
        assert server.metric('nmt_requests_total{method="GET",route="/metrics",status="500"') == 1
        assert server.metric('nmt_requests_total{method="GET",route="/metrics",status="499"') == 0


def raw(
    server: Running, chunks: list[bytes], *, pause_seconds: float = 0.0, hang_up: bool = False
) -> bytes:
    """Send bytes with a pause after each chunk; return the bytes that come back."""
    address = ("127.0.0.1", server.port)
    received = b""
    with (
        socket.create_connection(address, timeout=PATIENCE_SECONDS) as connection,
        contextlib.suppress(ConnectionError),  # the server may close before the last chunk
    ):
        for sent in chunks:
            connection.sendall(sent)
            time.sleep(pause_seconds)
        while not hang_up and (chunk := connection.recv(65536)):
            received += chunk
    return received


@pytest.mark.slow
def test_bodies_that_are_wrong_get_the_right_status(tokenizer: Tokenizer) -> None:
    models, _ = copying(tokenizer)
    with running(models, body_timeout_seconds=0.5) as server:
        slow = raw(server, [HEAD + b"40\r\n\r\n", b" ", b" ", b" "], pause_seconds=0.1)
        assert b" 408 " in slow.splitlines()[0]
    with running(models, max_body_bytes=4096) as server:
        kind = {"Content_Type": "application/json"}
        for body, status in (
            (b'{"q": "' + b"a" * 5000 + b'"}', 413),
            (b'{"q": "\xff"}', 400),
            (b'{"q": ' + b"[" * 3900, 400),
            (b'{"a": ' * 500 + b"1" + b"}" * 500, 400),
            (b"[1]", 400),
            (b'{"q": 1e5000, "source": "xx"', 400),
            (b"", 400),
        ):
            assert server.send("POST", "/translate", body, **kind).status == status, body[:20]
        form = {"Content_Type": "application/x-www-form-urlencoded"}
        for body in (b"q=%ff&source=xx&target=yy", b"q=\xff", b"&a=" * 1200):
            assert server.send("POST", "/translate", body, **form).status == 400, body[:20]
        broken = server.send("POST", "/translate_file", b"--", Content_Type="multipart/form-data")
        assert broken.status == 400
        chunked = HEAD.replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\n\r\n")
        large_chunk = b"800\r\n" + b" " * 2048 + b"\r\n"
        assert b" 413 " in raw(server, [chunked, large_chunk, large_chunk, large_chunk])
        raw(server, [HEAD + b"400\r\n\r\n{"], hang_up=True)  # cut off
        header = [b"a" * 30_000] * 3
        endless = raw(server, [b"GET / HTTP/1.1\r\nX: ", *header], pause_seconds=0.05)
        assert b" 400 " in endless.splitlines()[0]
        line = b"X: " + b"a" * 30_000 + b"\r\n"
        lines = [line, line, b"X: " + b"a" * 6000 + b"\r\n"]
        trailers = raw(server, [chunked + b"0\r\n", *lines], pause_seconds=0.1)
        assert b" 400 " in trailers.splitlines()[0]
        closing = chunked.replace(b"Host", b"Connection: close\r\nHost")
        response = raw(server, [closing, b"1\r\n \r\n" * 3000 + b"0\r\n\r\n"])
        assert b"Invalid JSON" in response
        assert server.translate("the tree") == "the tree"
        eventually(lambda: server.service.body_limits.held_bytes == 0)


@pytest.mark.slow
def test_connections_without_a_request_are_closed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, engine = copying(tokenizer)
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with running(models) as server, ThreadPoolExecutor(4) as clients:
        engine.gate.clear()
        for head_seconds in (1.0, 10.0, 60.0):  # on a busy machine, clients may need seconds
            monkeypatch.setattr("nmt.serve.protocol._HEAD_SECONDS", head_seconds)
            slow = clients.submit(server.translate, "the tree")
            eventually(lambda: len(server.service.scheduler.queues.requests) == 1)
            idle = []
            for chunks in ([], [b"GET /health HTT", b"P"], [request, b"\r\n", b"G"]):
                idle.append(clients.submit(raw, server, chunks, pause_seconds=0.1))
            answers = results(idle)
            engine.gate.set()
            assert slow.result() == "the tree"
            assert answers[:2] == [b"", b""]
            if answers[2]:
                break
            engine.gate.clear()
        assert answers[2].count(b"200 OK") == 1


@pytest.mark.slow
def test_a_stream_is_read_as_it_is_translated(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, engine = copying(tokenizer)
    path = "/v1/translate?source=xx&target=yy"
    kind = {"Content_Type": "text/plain"}
    read: list[str] = []
    call_before(monkeypatch, v1, "parse_plain_text", lambda text, **_: read.append(text))
    engine.gate.clear()
    with running(models) as server, ThreadPoolExecutor(1) as client:
        text = b"the tree\n" * 2000
        stream = client.submit(server.send, "POST", path, text, **kind)
        assert engine.entered.wait(PATIENCE_SECONDS)
        assert len(read) <= 2 * 128 + 2
        assert set(read) == {"the tree"}
        engine.gate.set()
        assert stream.result().body == text
    with running(models, max_queue=20) as server:  # a part of it fits into the queue
        lines = b"the tree\n" * 25
        assert server.send("POST", path, lines, **kind).body == lines
        assert server.upload("a.txt", lines, **GOOD).status == 200


@pytest.mark.slow
def test_keys_and_rates_are_limited_by_key_and_address(
    tokenizer: Tokenizer, tmp_path: Path, stopped_clock: None
) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("# mine\nsecret-1 2\nsecret-2 0 5\n")
    models, _ = copying(tokenizer)
    with running(models, api_keys=str(keys)) as server:
        settings = server.get("/frontend/settings").json
        assert (settings["apiKeys"], settings["keyRequired"]) == (True, True)

        def status(key: str, q: str = "a") -> int:
            return server.post("/translate", q=q, api_key=key, **GOOD).status

        assert status("wrong") == 403
        assert status("") == 400
        assert list(map(status, ["secret-1"] * 3)) == [200, 200, 429]
        params = {"api_key": "secret-2", **GOOD}
        for n, expected in ((5, 200), (6, 400)):  # the limit of a key counts for files, too
            assert status("secret-2", "a" * n) == expected
            stream = server.post("/v1/translate", text="a" * n, stream=True, **params)
            assert stream.status == expected
            assert server.upload("a.txt", b"a" * n, **params).status == expected
        bearer = server.send("POST", "/detect", b"q=a", Authorization="Bearer secret-1")
        assert bearer.status == 429
        statuses = [status(f"wrong-{n}") for n in range(30)]
        assert statuses[:17] + statuses[-5:] == [403] * 17 + [429] * 5
        assert status("secret-2") == 200  # it was used before
        assert server.get("/health").status == 200
    with running(models, requests_per_minute=3) as server:
        assert list(map(status, [""] * 5)) == [200, 200, 200, 429, 429]
        assert server.post("/translate", q="a", **GOOD).headers["retry-after"]
    with running(models, api_keys=str(keys)) as server:
        assert [status(f"wrong-{n}") for n in range(21)] == [403] * 20 + [429]
        assert status("secret-2") == 429  # else a client could go on trying
    assert client_network("::ffff:1.2.3.4") == client_network("1.2.3.4") == "1.2.3.4"
    assert client_network("::ffff:1.2.3.5") == "1.2.3.5"
    assert (
        client_network("2001:db8::1")
        == client_network("2001:db8::2")
        != client_network("2001:db8:0:1::1")
    )


def test_metrics_have_the_type_of_their_name(tokenizer: Tokenizer) -> None:
    models, _ = copying(tokenizer)
    with running(models) as server:
        text = server.get("/metrics").body.decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert types["nmt_worker_deaths_total"] == "counter"
    for name, kind in types.items():
        assert (kind == "counter") == name.endswith("_total"), name
    assert types["nmt_queue_sentences"] == types["nmt_held_bytes"] == "gauge"


def test_metrics_can_ask_for_a_token_and_the_log_holds_no_text(
    tokenizer: Tokenizer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stopped_clock: None,
) -> None:
    token = tmp_path / "token"
    token.write_text("t0ken\n")
    models, _ = copying(tokenizer)
    logger = "nmt.access"
    with running(models, metrics_token=str(token), access_log=True) as server:
        assert server.get("/metrics").status == 401
        assert server.get("/metrics", Authorization="Bearer t0ken").status == 200
        guesses = [server.get("/metrics", Authorization=f"Bearer {n}").status for n in range(25)]
        assert guesses == [401] * 18 + [429] * 7
        with caplog.at_level("INFO", logger), _propagating(logger):
            server.translate("the secret house")
            eventually(lambda: "/translate" in caplog.text)
    (entry,) = [e for e in map(json.loads, caplog.messages) if e["path"] == "/translate"]
    assert (entry["status"], entry["sentences"], entry["characters"]) == (200, 1, 16)
    assert "secret" not in caplog.text
    caplog.clear()
    with running(models, access_log=True, log_texts=True) as server, _propagating(logger):
        with caplog.at_level("INFO", logger):
            server.translate("the house")
            eventually(lambda: bool(caplog.messages))
            assert json.loads(caplog.messages[-1])["texts"] == ["the house"]
            foreign = "\u2028\u2029\x85\x7f\x1b\u202e\ufeff\U000e0041ä"
            server.post("/translate", q=foreign, **GOOD)
            eventually(lambda: "\\u2028" in caplog.messages[-1])
        assert caplog.messages[-1].isprintable()
        assert json.loads(caplog.messages[-1])["texts"] == [foreign]


@contextmanager
def _propagating(name: str) -> Iterator[None]:
    """Let pytest see the logs of nmt, whatever a command has configured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(name), "propagate", True)
        patch.setattr(logging.getLogger("nmt"), "propagate", True)
        yield


def test_a_queue_that_is_full_says_when_to_come_back(tokenizer: Tokenizer) -> None:
    models, _ = copying(tokenizer)

    async def scenario() -> None:
        scheduler = Scheduler(10, Metrics())  # nothing runs it
        options = options_of(models)
        first = scheduler.translate("a", options, ["a"] * 5, timeout_seconds=9)
        second = scheduler.translate("b", options, ["a"] * 5, timeout_seconds=9)
        waiting = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="try again in 1 s"):
            await scheduler.translate("c", options, ["a"], timeout_seconds=9)
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        assert scheduler.queues.num_waiting == 5
        waiting[1].cancel()
        scheduler.close()

    asyncio.run(scenario())


def test_sentences_that_are_searched_do_not_count_as_waiting(tokenizer: Tokenizer) -> None:
    models, _ = copying(tokenizer)

    async def scenario() -> None:
        scheduler = Scheduler(10, Metrics())  # nothing runs it
        queues = scheduler.queues

        def translate(num_lines: int) -> asyncio.Task[list[LineResult]]:
            call = scheduler.translate(
                "a", options_of(models), ["a"] * num_lines, timeout_seconds=9
            )
            return asyncio.ensure_future(call)

        tasks = [translate(5)]
        await asyncio.sleep(0)
        request = queues.next_request()
        assert request is not None
        for _ in range(5):  # as a round does
            queues.take_segment(request)
        tasks.append(translate(4))
        await asyncio.sleep(0)
        assert queues.num_waiting == 4
        with pytest.raises(QueueFullError):
            await translate(2)
        tasks.append(translate(1))
        await asyncio.sleep(0)
        assert queues.num_waiting == 5
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.01)
        assert not queues._num_segments
        assert not queues._num_tokens
        scheduler.close()

    asyncio.run(scenario())


def test_reloads_come_one_after_the_other_and_one_that_fails_changes_nothing(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    models, _ = copying(tokenizer)
    service = Service(ServeConfig(), models)
    first_load = copying(tokenizer)[0]
    second_load = copying(tokenizer)[0]
    errors = [RuntimeError("CUDA out of\nmemory"), KeyError("d_model"), RecursionError()]
    loads = iter([(first_load, 0.3), (second_load, 0.0)])

    def load(_: ServeConfig) -> Models:
        models, seconds = next(loads)
        time.sleep(seconds)
        return models

    def fail(_: ServeConfig) -> Models:
        raise errors.pop()

    async def scenario() -> None:
        await asyncio.gather(service.reload(), service.reload())
        assert service.models is second_load
        monkeypatch.setattr(Models, "load", fail)
        while errors:
            error_name = type(errors[-1]).__name__
            caplog.clear()
            await service.reload()
            assert error_name in caplog.messages[0]
            assert service.models is second_load
            assert service.reload_failed
            assert "\n" not in caplog.messages[0]
            assert len(caplog.records) == 1
        assert 'nmt_reloads_total{result="failed"} 3' in service.metrics.render()
        monkeypatch.setattr(Models, "load", lambda _: first_load)
        await service.reload()
        assert not service.reload_failed

    monkeypatch.setattr(Models, "load", load)
    asyncio.run(scenario())
    service.close()


@pytest.mark.slow
def test_signals_drain_and_reload_without_a_lost_request(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folders = [tiny_folder(tmp_path / "a", tokenizer, 3), tiny_folder(tmp_path / "b", tokenizer, 4)]
    expected = [
        Translator.load(f, device="cpu", backend="native").translate(["the house"])[0]
        for f in folders
    ]
    link = tmp_path / "model"
    link.symlink_to(folders[0])
    settings = ["num_threads=1", f"drain_seconds={PATIENCE_SECONDS:.0f}"]
    process, server, lines = start_server(link, *settings, cwd=tmp_path)
    try:
        threading.Thread(target=list, args=[lines], daemon=True).start()  # reads the whole log
        assert server.translate("the house") == expected[0]
        stop = threading.Event()
        answered: list[str] = []

        def ask() -> None:
            while not stop.is_set():
                answered.append(server.translate("the house"))

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: bool(answered))
        link.unlink()
        link.symlink_to(folders[1])
        process.send_signal(signal.SIGHUP)
        eventually(lambda: answered[-1:] == [expected[1]])
        stop.set()
        asking.join()
        assert set(answered) == set(expected)
        body = json.dumps({"q": ["the house"] * 50, **GOOD})
        connections: list[http.client.HTTPConnection] = []

        def keep_busy() -> bool:
            """Send requests; return whether all have arrived and none is answered yet."""
            for connection in connections:  # of the last try
                connection.close()
            connections[:] = [server.connect() for _ in range(4)]
            for connection in connections:
                connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
            server.get("/metrics")  # answered after the others have arrived
            return not select.select([c.sock for c in connections], [], [], 0)[0]

        eventually(keep_busy)
        process.send_signal(signal.SIGTERM)
        for connection in connections:
            response = connection.getresponse()
            content = response.read()
            assert response.status == 200, content
            assert json.loads(content)["translatedText"] == [expected[1]] * 50
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
