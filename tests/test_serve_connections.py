"""Connections of the server: how many there are, and clients that hold them up."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import multiprocessing
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from asyncio import selector_events
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from multiprocessing.popen_fork import Popen
from pathlib import Path
from typing import NoReturn

import pytest
import uvicorn
from serving import (
    GOOD,
    HEAD,
    PATIENCE_SECONDS,
    SPEC,
    Running,
    copying,
    eventually,
    running,
    tiny_folder,
)
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from nmt.config import ServeConfig
from nmt.data.tokenizer import Tokenizer
from nmt.documents.document import ReadOptions
from nmt.errors import ConfigError
from nmt.serve import file_process, protocol
from nmt.serve.file_process import FileProcesses, OpenFile, _FileReader, start_fork_server
from nmt.serve.http_errors import HttpError, TooManyRequestsError
from nmt.serve.server import Server


def connect(port: int, receive_bytes: int = 0) -> socket.socket:
    """Open a connection; `receive_bytes` is the size of its receive buffer."""
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(PATIENCE_SECONDS)
    client.connect(("127.0.0.1", port))
    return client


def receive_all(client: socket.socket) -> bytes:
    received = b""
    while chunk := client.recv(65536):
        received += chunk
    return received


def is_closed(client: socket.socket) -> bool:
    """Return whether the server has closed a connection on which nothing arrives."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def num_requests() -> int:
    """Return the number of requests that the server holds."""
    gc.collect()
    return sum(isinstance(item, RequestResponseCycle) for item in gc.get_objects())


def test_pipelined_requests_are_answered_in_order_and_not_read_without_end(
    tokenizer: Tokenizer,
) -> None:
    models, engine = copying(tokenizer)
    with running(models) as server:
        with connect(server.port) as client:  # which sends more while the engine works
            engine.gate.clear()
            body = json.dumps({"q": "the tree", **GOOD}).encode()
            client.sendall(HEAD + str(len(body)).encode() + b"\r\n\r\n" + body)
            for _ in range(40):
                client.sendall(SPEC)
                time.sleep(0.005)
            assert not is_closed(client)
            engine.gate.set()
        with connect(server.port) as client:
            paths = [b"/health", b"/languages", b"/missing"] * 5
            requests = b"".join(SPEC.replace(b"/spec", path) for path in paths)
            client.sendall(requests + SPEC.replace(b"Host", b"Connection: close\r\nHost"))
            statuses = re.findall(rb"HTTP/1.1 (\d+)", receive_all(client))
            assert statuses == [b"200", b"200", b"404"] * 5 + [b"200"]
        with connect(server.port) as client:
            client.sendall(SPEC * 1000)
            eventually(lambda: is_closed(client))
        with connect(server.port, receive_bytes=4096) as client:
            client.settimeout(0.2)
            num_before = server.metric("nmt_requests_total")
            try:
                for _ in range(2000):
                    client.sendall(SPEC)
                    time.sleep(0.0005)
            except OSError:  # the server reads no more, or the connection is closed
                pass
            assert num_requests() < 30
            assert server.metric("nmt_requests_total") - num_before < 1500
        assert server.translate("the tree") == "the tree"


def test_head_and_body_of_a_response_are_sent_together(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    write = selector_events._SelectorSocketTransport.write  # type: ignore[attr-defined]

    def record(transport: object, data: bytes) -> None:
        sent.append(bytes(data))
        write(transport, data)

    monkeypatch.setattr(selector_events._SelectorSocketTransport, "write", record)  # type: ignore[attr-defined]
    with running(copying(tokenizer)[0]) as server, connect(server.port) as client:
        client.sendall(SPEC.replace(b"GET", b"HEAD") + SPEC.replace(b"/spec", b"/health") * 2)
        eventually(lambda: len(sent) == 3)
        assert all(data.startswith(b"HTTP/1.1 ") for data in sent)
        assert [data.partition(b"\r\n\r\n")[2] for data in sent] == [b"", *[b'{"status":"ok"}'] * 2]


@pytest.mark.slow
def test_a_client_that_does_not_take_its_response_is_disconnected(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_WRITE_SECONDS", 0.3)
    monkeypatch.setattr(protocol, "_DISCARD_SECONDS", 0.3)
    text = "the tree <img class='" + "a" * 8_000_000 + "'>"
    body = json.dumps({"q": text, "format": "html", **GOOD}).encode()
    settings = {"char_limit": 0, "max_body_bytes": 1 << 24}
    with running(copying(tokenizer)[0], **settings) as server:
        request = HEAD + str(len(body)).encode() + b"\r\n\r\n" + body
        closing = request.replace(b"Host", b"Connection: close\r\nHost")
        for data in (request, closing, request + SPEC):
            with connect(server.port, receive_bytes=4096) as client:
                client.sendall(data)
                assert client.recv(12) == b"HTTP/1.1 200"
                eventually(lambda: server.num_connections() == 0)
                assert (
                    len(receive_all(client)) < len(text) - 100_000
                )  # the bytes that were sent before
        for write_seconds in (1.0, 10.0, 60.0):  # on a busy machine, nothing is read for seconds
            monkeypatch.setattr(protocol, "_WRITE_SECONDS", write_seconds)
            with connect(server.port, receive_bytes=65536) as client:  # slow, but it reads
                client.sendall(closing)
                num_bytes = 0
                start = time.monotonic()
                with suppress(ConnectionError):
                    while chunk := client.recv(1 << 16):
                        num_bytes += len(chunk)
                        time.sleep(0.01 * write_seconds)
                seconds = time.monotonic() - start
            if num_bytes > len(text):
                break
        assert num_bytes > len(text)
        assert seconds > write_seconds


def test_a_response_before_the_end_of_a_body_arrives(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"q": "' + b"a" * 17_000_000 + b'"}'
    head = HEAD + str(len(body)).encode() + b"\r\n\r\n"
    with running(copying(tokenizer)[0]) as server:
        for request in (
            head + body,
            head.replace(b"Host", b"Connection: close\r\nHost") + body,
            head.replace(b"HTTP/1.1", b"HTTP/1.0") + body,
            head.replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nX-Length: ")
            + (b"10000\r\n" + b"a" * 65536 + b"\r\n") * 260,
        ):
            for _ in range(3):
                with connect(server.port) as client:
                    client.sendall(request)
                    client.shutdown(socket.SHUT_WR)
                    assert b" 413 " in receive_all(client).splitlines()[0]
        eventually(lambda: server.num_connections() == 0)
        monkeypatch.setattr(protocol, "_DISCARD_SECONDS", 0.2)
        with connect(server.port) as client:
            client.sendall(head)
            assert b" 413 " in receive_all(client)
            eventually(lambda: server.num_connections() == 0)
        monkeypatch.setattr(protocol, "_DISCARD_SECONDS", 60)
        monkeypatch.setattr(protocol, "_MAX_DISCARDED_BYTES", 1_000_000)
        with connect(server.port) as client, pytest.raises(ConnectionError):
            client.sendall(head + body * 4)


def test_idle_connections_make_room_and_busy_ones_do_not(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    models, engine = copying(tokenizer)
    with (
        running(models, max_connections=4) as server,
        ThreadPoolExecutor(4) as pool,
        ExitStack() as stack,
        propagating(),
    ):
        idle = [stack.enter_context(connect(server.port)) for _ in range(10)]
        idle[1].sendall(HEAD[:20])
        eventually(lambda: all(map(is_closed, idle[:6])))
        assert not any(map(is_closed, idle[6:]))
        for _ in range(20):
            assert server.translate("the tree") == "the tree"
        engine.gate.clear()
        busy = [pool.submit(server.translate, "a house") for _ in range(4)]
        eventually(lambda: len(server.service.scheduler.queues.requests) == 4)
        answer = server.post("/translate", q="a", **GOOD)
        assert (answer.status, answer.body) == (503, b"Service Unavailable")
        engine.gate.set()
        assert [future.result() for future in busy] == ["a house"] * 4
    messages = [message for message in caplog.messages if "connections are open" in message]
    assert len(messages) == 1


def test_several_idle_connections_are_closed_at_once_if_many_may_be_open(
    tokenizer: Tokenizer,
) -> None:
    models, _ = copying(tokenizer)
    with running(models, max_connections=32) as server, ExitStack() as stack:
        idle = [stack.enter_context(connect(server.port)) for _ in range(33)]
        eventually(lambda: all(map(is_closed, idle[:2])))
        assert not any(map(is_closed, idle[2:]))


@contextmanager
def propagating() -> Iterator[None]:
    """Let pytest see the warnings of the server, as if nothing had been logged before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("nmt"), "propagate", True)
        for log_filter in protocol.log.filters:
            log_filter.__init__()  # type: ignore[misc]
        yield


LIMITED = """
import resource, sys
resource.setrlimit(getattr(resource, sys.argv.pop(1)), (int(sys.argv.pop(1)),) * 2)
from nmt.cli.main import main, COMMANDS
sys.exit(main(COMMANDS["serve"]))
"""


@pytest.mark.slow
def test_more_connections_than_files_are_one_line_of_log(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tiny_folder(tmp_path / "model", tokenizer)
    command = [sys.executable, "-c", LIMITED, "RLIMIT_NOFILE"]
    settings = [f"model_dir={folder}", "port=0", "num_workers=1", "access_log=false"]
    settings.append("backend=native")
    refused = subprocess.run([*command, "100", *settings], stderr=subprocess.PIPE, text=True)
    assert refused.returncode == 2
    assert "may open 100 files (ulimit -n)" in refused.stderr.splitlines()[-1]
    log = tmp_path / "log"
    with open(log, "w") as stream:
        process = subprocess.Popen([*command, "300", *settings], stderr=stream)
    try:
        eventually(lambda: "serving on" in log.read_text())
        match = re.search(r"serving on http://127.0.0.1:(\d+)", log.read_text())
        assert match is not None
        server = Running(int(match[1]), None)  # type: ignore[arg-type]

        def measure_seconds() -> float:
            start = time.monotonic()
            server.translate("the house")
            return time.monotonic() - start

        seconds_alone = [measure_seconds() for _ in range(5)]
        clients = [connect(server.port) for _ in range(500)]
        seconds = []
        for _ in range(20):
            seconds.append(measure_seconds())
            clients += [connect(server.port) for _ in range(20)]
        assert sorted(seconds)[10] < 1 + 3 * max(seconds_alone)
        for client in clients:
            client.close()
        lines = log.read_text().splitlines()
        assert len(lines) < 10, lines
        assert "max_connections is 86, as the process may open 300 files" in log.read_text()
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_too_little_address_space_is_one_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tiny_folder(tmp_path / "model", tokenizer)
    for megabytes in (350, 500, 600, 1000, 1535):
        command = [sys.executable, "-c", LIMITED, "RLIMIT_AS", str(megabytes << 20)]
        arguments = [f"model_dir={folder}", "port=0"]
        result = subprocess.run([*command, *arguments], stderr=subprocess.PIPE, text=True)
        assert result.returncode == 2
        (line,) = result.stderr.splitlines()
        assert f"{megabytes} MiB of address space (ulimit -v); nmt-serve needs at least" in line


def test_trusted_proxies_are_addresses_and_networks() -> None:
    for value in ("", "10.0.0.1", "10.0.0.0/8, ::1", "fd00::/8"):
        ServeConfig(trusted_proxies=value)
    for value in ("proxy", "10.0.0.1/8", "10.0.0.1,", "300.1.1.1", "*", "10.0.0.1 ::1", " "):
        with pytest.raises(ConfigError, match="trusted_proxies"):
            ServeConfig(trusted_proxies=value)


def test_nothing_is_read_while_requests_wait_or_a_response_is_not_taken() -> None:
    actions: list[str] = []

    class Transport:
        def pause_reading(self) -> None:
            actions.append("pause")

        def resume_reading(self) -> None:
            actions.append("resume")

    pipeline = [1]
    flow = protocol._FlowControl(Transport(), pipeline)  # type: ignore[arg-type]
    flow.pause_reading()
    flow.resume_reading()
    pipeline.clear()
    flow.pause_writing()
    flow.resume_reading()
    assert actions == ["pause"]
    flow.resume_writing()
    flow.resume_reading()
    assert actions == ["pause", "resume"]


@pytest.mark.slow
def test_a_file_that_takes_long_to_read_delays_nobody_and_is_given_up(
    tokenizer: Tokenizer,
) -> None:
    slow = b"<a " * 1_900_000  # the limit is 2,000,000 tags
    start_fork_server()
    with running(copying(tokenizer)[0]) as server, ThreadPoolExecutor(3) as pool:
        assert server.upload("a.txt", b"the tree", **GOOD).status == 200
        num_files = server.service.file_processes._num_files_by_client
        # reading takes more than a second; other processes may take the time for the answers
        for timeout_seconds in (0.4, 0.8, 1.6, 3.2, 6.4):
            server.service.file_processes._timeout_seconds = timeout_seconds
            uploads = [pool.submit(server.upload, "a.html", slow, **GOOD) for _ in range(2)]
            num_answers = 0  # answers while a file is read
            while not all(upload.done() for upload in uploads):
                is_reading = num_files.total() > 0
                assert server.translate("the tree") == "the tree"
                num_answers += is_reading and num_files.total() > 0
            assert uploads[0].result().status == 503
            assert "cut it into several" in uploads[0].result().json["error"]
            assert num_files.total() == 0
            if num_answers >= 10:
                break
        assert num_answers >= 10
        server.service.file_processes._timeout_seconds = PATIENCE_SECONDS
        uploads = [pool.submit(server.upload, "a.txt", b"the tree", **GOOD) for _ in range(3)]
        assert [upload.result().status for upload in uploads] == [200] * 3
        num_files["127.0.0.1"] = 8
        assert server.upload("a.txt", b"the tree", **GOOD).status == 429


def test_the_number_of_open_files_is_limited_for_each_client_and_in_total(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start_nothing(_: OpenFile) -> None:
        """Start no process: the limits do not depend on it."""

    async def open_files() -> None:
        files = FileProcesses(PATIENCE_SECONDS)
        async with AsyncExitStack() as stack:
            for number in range(32):
                client = f"client {number // 8}"
                await stack.enter_async_context(files.open(client, "a.txt", b"", ReadOptions()))
                if number == 7:  # other clients may still open files
                    await assert_refused(files, client)
            await assert_refused(files, "another client")
        async with files.open("client 0", "a.txt", b"", ReadOptions()):
            assert files._num_files_by_client == {"client 0": 1}
        assert not files._num_files_by_client

    async def assert_refused(files: FileProcesses, client: str) -> None:
        with pytest.raises(TooManyRequestsError, match="too many files"):
            async with files.open(client, "a.txt", b"", ReadOptions()):
                pass

    monkeypatch.setattr(OpenFile, "start", start_nothing)
    asyncio.run(open_files())


class SleepingReader(_FileReader):
    """Sleeps instead of reading. If nothing kills it, it creates the file and ends."""

    def read(self, max_sentences: int, max_text_sentences: int) -> NoReturn:
        time.sleep(20)
        Path(self._name).touch()
        sys.exit()


def test_a_process_that_takes_too_long_for_a_file_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_process, "FORK_CONTEXT", multiprocessing.get_context("fork"))
    created = tmp_path / "a.txt"

    async def read(threads: ThreadPoolExecutor) -> None:
        reader = SleepingReader(str(created), b"the tree", ReadOptions())
        file = OpenFile(reader, threads, timeout_seconds=0.01)
        await file.start()
        with pytest.raises(HttpError, match="cannot be read within 0.01 s; cut it into several"):
            await file.call("read", 10, 10)
        file.close()

    with ThreadPoolExecutor(1) as threads:
        asyncio.run(read(threads))
    assert not created.exists()


def test_a_process_that_still_starts_when_its_file_is_closed_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client closes its connection while a thread starts the process."""
    is_forked = threading.Event()
    gate = threading.Event()

    class SlowPopen(Popen):
        @property
        def sentinel(self) -> int:
            is_forked.set()
            gate.wait(PATIENCE_SECONDS)
            return self._descriptor

        @sentinel.setter
        def sentinel(self, descriptor: int) -> None:
            self._descriptor = descriptor

    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(file_process, "FORK_CONTEXT", context)
    monkeypatch.setattr(context.Process, "_Popen", staticmethod(SlowPopen))

    async def close_early(threads: ThreadPoolExecutor) -> OpenFile:
        file = OpenFile(_FileReader("a.txt", b"", ReadOptions()), threads, PATIENCE_SECONDS)
        starting = asyncio.ensure_future(file.start())
        await asyncio.to_thread(is_forked.wait)
        starting.cancel()
        file.close()
        gate.set()
        return file

    with ThreadPoolExecutor(1) as threads:
        file = asyncio.run(close_early(threads))
    assert file._process.exitcode == -signal.SIGKILL
    assert file._process not in multiprocessing.active_children()
    assert file._connection.closed
    assert file._reader_connection.closed


def test_a_connection_is_not_closed_while_a_thread_reads_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_process, "FORK_CONTEXT", multiprocessing.get_context("fork"))
    has_read = threading.Event()
    gate = threading.Event()

    def receive() -> object:
        try:
            return receive_from_process()
        finally:
            has_read.set()
            gate.wait(PATIENCE_SECONDS)

    reader = SleepingReader(str(tmp_path / "a.txt"), b"the tree", ReadOptions())
    with ThreadPoolExecutor(1) as threads:
        file = OpenFile(reader, threads, timeout_seconds=0.01)
        receive_from_process = file._connection.recv
        monkeypatch.setattr(file._connection, "recv", receive)

        async def read() -> None:
            await file.start()
            with pytest.raises(HttpError, match="cannot be read within"):
                await file.call("read", 10, 10)
            file.close()

        asyncio.run(read())
        assert has_read.wait(PATIENCE_SECONDS)
        assert not file._connection.closed
        gate.set()
    assert file._connection.closed


def test_the_log_says_whether_accepted_requests_are_finished(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="nmt")
    server = Server(uvicorn.Config("app"))
    for stop_signal in (signal.SIGTERM, signal.SIGINT):  # a signal after SIGINT forces the end
        server.stop(stop_signal)
        assert (server.should_exit, server.force_exit) == (True, False)
    server.stop(signal.SIGTERM)
    assert server.force_exit
    assert caplog.messages == [
        "SIGTERM: finishing the requests that were accepted",
        "SIGINT: finishing the requests that were accepted",
        "SIGTERM: stopping without finishing the accepted requests",
    ]
