"""Files to translate, each read and assembled by its own process.

Reading a file of 16 MB takes up to a minute. A thread would hold Python's global lock for most of
this time, and delay all other requests. A process is killed when it takes too long, and when its
client closes the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakValueDictionary

from nmt.documents.document import Document, ReadOptions, join_texts
from nmt.documents.formats import read_document
from nmt.documents.texts import SourceText, list_sentences, split_into_windows
from nmt.errors import DataError, NmtError
from nmt.serve.http_errors import HttpError, TooManyRequestsError
from nmt.serve.worker_process import set_parent_death_signal
from nmt.translate.results import LineResult

_MAX_FILES = 32  # number of files in translation at the same time
_MAX_FILES_PER_CLIENT = 8
_MAX_READS = 4  # number of files that are read at the same time, at most one of each client
_MAX_TEXT_CHARACTERS = 1 << 18  # for a line, paragraph or cell of a file; its tokens take 10 MB
_SAMPLE_CHARACTERS = 4000  # length of the start of a file from which its language is detected
_RETRY_SECONDS = 10  # clients that have too many open files may try again after this time
_LOWEST_PRIORITY = 19  # the lowest priority that a process can get by `os.nice`
FORK_CONTEXT: Any = multiprocessing.get_context(
    "spawn" if sys.platform == "win32" else "forkserver"
)


def start_fork_server() -> None:
    """Start the fork server, from which all processes are forked.

    Call this early, since the fork server imports modules for two seconds.
    """
    if sys.platform != "win32":
        FORK_CONTEXT.set_forkserver_preload([__name__])
        multiprocessing.forkserver.ensure_running()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class FileSummary:
    """Information about a file that the server needs before the translation."""

    num_sentences: int
    num_characters: int  # number of characters of the sentences
    language_sample: str  # the first sentences, to detect the language


@dataclass(frozen=True)
class FileWindow:
    """The sentences of consecutive texts of a file, which are translated together."""

    sentences: list[str]
    needs_alignment: bool


class OpenFile:
    """A file in its own process. `call` runs methods of a `_FileReader` there.

    A call raises the `NmtError` that the reader raises. If the call takes more than
    `timeout_seconds` or the process dies, it raises an `HttpError`.
    """

    def __init__(
        self, reader: _FileReader, threads: ThreadPoolExecutor, timeout_seconds: float
    ) -> None:
        self._connection, self._reader_connection = FORK_CONTEXT.Pipe()
        arguments = (self._reader_connection, reader)
        self._process = FORK_CONTEXT.Process(target=_run_reader, args=arguments, daemon=True)
        self._threads = threads
        self._timeout_seconds = timeout_seconds
        self._started: Future[None] | None = None  # done when the process has started
        self._newest_reply: Future[Any] | None = None

    async def start(self) -> None:
        """Start the process."""
        self._started = self._threads.submit(self._process.start)
        await asyncio.wrap_future(self._started)
        # The process has its own copy of this end of the pipe. While the server's copy is open,
        # `recv` does not notice that the process has died.
        self._reader_connection.close()

    async def call(self, method: str, *args: Any) -> Any:
        """Return the result of a method of the reader."""
        reply = self._threads.submit(self._send_and_receive, (method, args))
        self._newest_reply = reply
        try:
            result = await asyncio.wait_for(asyncio.wrap_future(reply), self._timeout_seconds)
        except asyncio.TimeoutError:
            raise HttpError(
                503,
                f"the file cannot be read within {self._timeout_seconds:g} s; cut it into several",
            ) from None
        except (EOFError, OSError):
            raise HttpError(500, "the process that reads the file has died") from None
        if isinstance(result, Exception):
            raise result
        return result

    def _send_and_receive(self, message: tuple[str, tuple[Any, ...]]) -> Any:
        """Send the name and the arguments of a method; return its result."""
        self._connection.send(message)
        return self._connection.recv()

    def close(self) -> None:
        """Kill the process, as soon as it has started. A call that still runs fails."""
        _call_when_done(self._started, self._kill_process)
        # Closed only after the thread has stopped reading: the system may give the file descriptor
        # to a new connection, whose data the thread would then read.
        _call_when_done(self._newest_reply, self._connection.close)

    def _kill_process(self) -> None:
        """Kill the process, unless it could not be started."""
        if self._process.pid is not None:
            self._process.kill()
            # `Process.close` is not called: another thread, which starts a process, may still read
            # from the file descriptor of this process.
            self._process.join()
        self._reader_connection.close()


def _call_when_done(future: Future[Any] | None, function: Callable[[], None]) -> None:
    """Call a function after a future, if there is one, has ended."""
    if future is None:
        function()
    else:
        future.add_done_callback(lambda _: function())


class FileProcesses:
    """The processes of all files, with limits on their number."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._threads = ThreadPoolExecutor(_MAX_FILES, thread_name_prefix="file")
        self._num_files_by_client: Counter[str] = Counter()
        self._read_slots = asyncio.Semaphore(_MAX_READS)
        self._client_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def open(
        self, client: str, name: str, content: bytes, options: ReadOptions
    ) -> AsyncIterator[OpenFile]:
        """Open a file of a client. Raises a 429 `HttpError` if too many are open."""
        counter = self._num_files_by_client
        if counter[client] >= _MAX_FILES_PER_CLIENT or counter.total() >= _MAX_FILES:
            raise TooManyRequestsError("too many files at a time", retry_seconds=_RETRY_SECONDS)
        file = OpenFile(_FileReader(name, content, options), self._threads, self._timeout_seconds)
        counter[client] += 1
        try:
            await file.start()
            yield file
        finally:
            file.close()
            counter[client] -= 1
            if not counter[client]:
                del counter[client]  # so that the counter does not grow with each client

    @contextlib.asynccontextmanager
    async def hold_read_slot(self, client: str) -> AsyncIterator[None]:
        """Wait for a slot for reading files, and hold it. A client has at most one slot."""
        # the dictionary has weak references: it drops a lock that no request of the client uses
        lock = self._client_locks.setdefault(client, asyncio.Lock())
        async with lock, self._read_slots:
            yield

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def prepare_forked_process() -> None:
    """Let this process end with the server, share memory, and leave CPU time to translation."""
    gc.freeze()  # garbage collection would write to memory pages, which are then no longer shared
    if sys.platform.startswith("linux"):
        set_parent_death_signal(signal.SIGKILL)  # the parent is the fork server
    if sys.platform != "win32":
        os.nice(_LOWEST_PRIORITY)


def _run_reader(connection: Connection, reader: _FileReader) -> None:
    """Call methods of a reader until the server closes its end of the connection."""
    prepare_forked_process()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            method, args = connection.recv()
            try:
                result = getattr(reader, method)(*args)
            # any other exception is a bug and ends the process, which `OpenFile.call` notices
            except (NmtError, MemoryError) as error:
                result = error
            connection.send(result)


class _FileReader:
    """Reads a file and assembles its translation.

    Call `read`, then `next_window` and `render` for each window, then `assemble`. `next_window` may
    be called before `render` was called for earlier windows.
    """

    def __init__(self, name: str, content: bytes, options: ReadOptions) -> None:
        self._name = name
        self._content = content
        self._options = options
        self._texts: deque[SourceText] = deque()  # the texts of windows that are not rendered
        self._translations: list[str] = []
        self._document = Document([], join_texts)
        self._windows: Iterator[list[SourceText]] = iter([])

    def read(self, max_sentences: int, max_text_sentences: int) -> FileSummary:
        """Read the file, and divide it into windows of up to `max_sentences` sentences.

        Raises `DataError` for a text of more than `max_text_sentences` sentences or of too many
        characters, whose tokens would take much memory in the server.
        """
        self._document = read_document(self._name, self._content, self._options)
        self._windows = split_into_windows(self._document.texts, max_sentences)
        for text in self._document.texts:
            _check_length(text.sentences, max_text_sentences)
        sentences = list_sentences(self._document.texts)
        num_characters = sum(len(sentence) for sentence in sentences)
        # each sentence has at least one character, so this number of sentences is enough
        first_sentences = " ".join(sentences[:_SAMPLE_CHARACTERS])
        language_sample = first_sentences[:_SAMPLE_CHARACTERS]
        return FileSummary(len(sentences), num_characters, language_sample)

    def next_window(self) -> FileWindow | None:
        """Return the next sentences to translate, or None at the end."""
        texts = next(self._windows, None)
        if texts is None:
            return None
        self._texts.extend(texts)
        needs_alignment = any(text.needs_alignment for text in texts)
        return FileWindow(list_sentences(texts), needs_alignment)

    def render(self, results: Sequence[LineResult], prefix: str) -> None:
        """Render the texts of the oldest window that is not rendered, with its results.

        `prefix` is the text before each sentence in the input of the model.
        """
        remaining_results = deque(results)
        while self._texts:
            text = self._texts[0]
            if len(text.sentences) > len(remaining_results):
                break  # the first text of the next window, which has no results yet
            self._texts.popleft()
            text_results = [remaining_results.popleft() for _ in text.sentences]
            self._translations.append(text.render(text_results, prefix=prefix))

    def assemble(self) -> bytes:
        """Return the translated file."""
        return self._document.assemble(self._translations)


def _check_length(sentences: Sequence[str], max_sentences: int) -> None:
    """Raise `DataError` if a text is too long for a window."""
    if len(sentences) > max_sentences:
        raise DataError(
            f"a text of the file has {len(sentences)} sentences, more than {max_sentences}, the "
            "limit of a client; write it on several lines"
        )
    num_characters = sum(len(sentence) for sentence in sentences)
    if num_characters > _MAX_TEXT_CHARACTERS:
        raise DataError(
            f"a text of the file has {num_characters:,} characters, more than "
            f"{_MAX_TEXT_CHARACTERS:,}; write it on several lines"
        )
