"""What every route works with: the models, the scheduler, and who is asking for what."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from starlette.requests import Request

from nmt.config import Engine, ServeConfig
from nmt.errors import NmtError
from nmt.serve.access import Bodies, HttpError, Key, RateLimits, find_key, network_of, read_keys
from nmt.serve.documents import Downloads, ReadOptions, read_text
from nmt.serve.markup import visible_text
from nmt.serve.models import DETECTED_CHARACTERS, Direction, Models
from nmt.serve.monitoring import Metrics
from nmt.serve.queues import BatchOptions, QueueFullError, TooManySentencesError
from nmt.serve.scheduler import Scheduler
from nmt.serve.texts import SourceText, is_emoji_only
from nmt.serve.workers import WorkerPool, WorkersBackend
from nmt.translate.options import LineOptions
from nmt.translate.results import LineResult

log = logging.getLogger(__name__)
T = TypeVar("T")

_WINDOW_SENTENCES = 128  # of a document, given to the scheduler at a time
_WINDOW_TEXTS = 1024  # at most, however few sentences they have
_INLINE_CHARACTERS = 20_000  # longer texts are read outside the event loop
_QUEUE_TRIES = 30  # of a document that meets a full queue, a second or more apart


class ClientDisconnectedError(Exception):
    """The client has closed the connection before its answer."""


@dataclass
class RequestContext:
    """One request: who asks, and what the access log says of it."""

    id: str
    client: str  # a key's name or a network; what fairness and limits count by
    key: Key | None = None
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TranslationOptions:
    """How a request wants its texts translated."""

    source: str  # a code, or auto
    target: str
    is_html: bool = False
    n_best: int = 1
    with_scores: bool = False
    split_sentences: bool | None = None  # None is the server's setting
    search: dict[str, Any] = field(default_factory=dict)  # changes of the model's settings


@dataclass(frozen=True)
class Answer:
    """A text and what became of its sentences."""

    source_text: SourceText
    results: list[LineResult]
    direction: Direction | None  # None: the text is its own translation
    text: str
    source: str
    confidence: float  # 0 to 100, of the source when it was detected

    def translation(self, rank: int = 0) -> str:
        """Return the text with translation number `rank` of each sentence."""
        return self.text if self.direction is None else self.source_text.render(self.results, rank)

    def alternatives(self, most: int) -> list[str]:
        """Return up to `most` other translations, best first."""
        count = max((len(result.translations) for result in self.results), default=0)
        texts = dict.fromkeys(self.translation(rank) for rank in range(count))
        return list(texts)[1 : most + 1]


class Service:
    """The state of the server."""

    def __init__(self, config: ServeConfig, models: Models) -> None:
        self.config = config
        self.models = models
        self.metrics = Metrics()
        backends = [direction.translator.backend for direction in models.directions.values()]
        num_rounds = max(backend.num_workers for backend in backends)
        if config.backend is Engine.ctranslate2:
            num_rounds += 1  # one waits in the engine, whose threads then never do
        self.scheduler = Scheduler(config.max_queue, self.metrics, num_rounds)
        self.bodies = Bodies(config.body_timeout_seconds)
        self.downloads = Downloads(config.file_minutes * 60, 64 * config.max_file_bytes)
        self.progress: dict[str, tuple[int, int]] = {}  # of files: sentences done, of how many
        self._keys = [] if config.api_keys is None else read_keys(config.api_keys)
        self._limits = RateLimits()
        self._reloading = asyncio.Lock()
        # for requests without settings of search
        self._options: dict[tuple[Direction, int, bool, bool], BatchOptions] = {}
        self.metrics.add_gauge(
            "nmt_queue_sentences", "Sentences that wait.", lambda: self.scheduler.queues.num_waiting
        )
        self.metrics.add_gauge(
            "nmt_worker_deaths",
            "Worker processes of these models that died.",
            lambda: sum(pool.num_deaths for pool in pools_of(self.models)),
        )
        self.metrics.add_gauge("nmt_held_bytes", "Bodies held.", lambda: self.bodies.held_bytes)

    @property
    def has_keys(self) -> bool:
        """Whether there are API keys."""
        return bool(self._keys)

    async def reload(self) -> None:
        """Load all models again; requests that were accepted before end with the old ones, and a
        folder that cannot be loaded changes nothing.
        """
        try:
            async with self._reloading:  # the models of the last signal stay
                self.models = await asyncio.to_thread(Models.load, self.config)
            self._options.clear()
        except (NmtError, OSError, RuntimeError) as error:  # such as a lack of GPU memory
            log.error("the models were not reloaded: %s", error)
            self.metrics.reloads.labels("failed").inc()
        else:
            log.info("the models were reloaded")
            self.metrics.reloads.labels("done").inc()

    def admit(self, request: Request, context: RequestContext, given: object) -> None:
        """Check key and rate of a request; `given` is its parameter api_key."""
        header = request.headers.get("authorization", "")
        secret = given if isinstance(given, str) and given else header.removeprefix("Bearer ")
        if self._keys and secret:
            context.key = find_key(self._keys, secret.strip())
            if context.key is None:
                self._limits.check(context.client, self.config.requests_per_minute)
                raise HttpError(403, "Invalid API key")
            context.client = context.key.name
        elif self._keys and self.config.key_required:
            raise HttpError(400, "This server needs an API key; ask its operator for one")
        limit = self.config.requests_per_minute
        if context.key is not None:
            limit = context.key.requests_per_minute or 0
        self._limits.check(context.client, limit)

    def char_limit(self, context: RequestContext, *, is_file: bool = False) -> int:
        """Return the most characters of a request, 0 for no limit; of a file or a stream, whose
        size in bytes is limited, a key's own.
        """
        if context.key is not None and context.key.char_limit is not None:
            return context.key.char_limit
        return 0 if is_file else self.config.char_limit

    def resolve_directions(
        self, texts: Sequence[str], options: TranslationOptions
    ) -> list[tuple[str, float, Direction | None]]:
        """Return for each text its source, how sure that is, and the model; None for a text that
        stays. Raises a 400 `HttpError` for a language that is not served.
        """
        models = self.models
        target = models.find_code(options.target)
        source = None if options.source == "auto" else models.find_code(options.source)
        if options.source != "auto" and source is None:
            raise HttpError(400, f"{options.source} is not supported")
        if target is None:
            raise HttpError(400, f"{options.target} is not supported")
        found: list[tuple[str, float, Direction | None]] = []
        for text in texts:
            if is_emoji_only(text):
                found.append((source or "en", 0.0, None))
                continue
            code, confidence = source, 0.0
            if code is None:
                sample = visible_text(text, DETECTED_CHARACTERS) if options.is_html else text
                code, confidence = models.choose_source(sample, target)
            direction = models.directions.get((code, target))
            if direction is None and code != target:
                raise HttpError(400, f"{target} is not a target of {code} on this server")
            found.append((code, confidence, direction))
        return found

    async def translate(
        self,
        request: Request,
        context: RequestContext,
        texts: Sequence[str],
        options: TranslationOptions,
    ) -> list[Answer]:
        """Translate the texts of one request; gives up when its client does. A sentence that fails
        has its `error` in the results.
        """
        return await run_unless_disconnected(request, self._translate(context, texts, options))

    async def _translate(
        self, context: RequestContext, texts: Sequence[str], options: TranslationOptions
    ) -> list[Answer]:
        num_characters = sum(map(len, texts))
        self.metrics.characters.inc(num_characters)
        context.fields["characters"] = num_characters
        if self.config.log_texts:
            context.fields["texts"] = list(texts)
        if num_characters > _INLINE_CHARACTERS or len(texts) > 100:
            found = await asyncio.to_thread(self.resolve_directions, texts, options)
            source_texts = await asyncio.to_thread(self.split_texts, texts, found, options)
        else:
            found = self.resolve_directions(texts, options)
            source_texts = self.split_texts(texts, found, options)
        groups: dict[Direction, list[int]] = {}
        for i, (_, _, direction) in enumerate(found):
            if direction is not None:
                groups.setdefault(direction, []).append(i)
        results: list[list[LineResult]] = [[] for _ in texts]

        async def translate_group(direction: Direction, numbers: list[int]) -> None:
            own = [source_texts[i] for i in numbers]
            for i, some in zip(
                numbers,
                await self.translate_sentences(context, direction, own, options),
                strict=True,
            ):
                results[i] = some

        work = [translate_group(*item) for item in groups.items()]
        if len(work) == 1:
            await work[0]  # gathering has a task for each
        else:
            await asyncio.gather(*work)
        return [
            Answer(source_text, some, direction, text, code, confidence)
            for source_text, some, text, (code, confidence, direction) in zip(
                source_texts, results, texts, found, strict=True
            )
        ]

    def split_texts(
        self,
        texts: Sequence[str],
        found: Sequence[tuple[str, float, Direction | None]],
        options: TranslationOptions,
    ) -> list[SourceText]:
        """Cut texts into sentences."""
        split = (
            self.config.split_sentences
            if options.split_sentences is None
            else options.split_sentences
        )
        return [
            read_text(
                ReadOptions(split_sentences=split, prefix=direction.prefix if direction else ""),
                text,
                is_html=options.is_html,
            )
            for text, (_, _, direction) in zip(texts, found, strict=True)
        ]

    async def translate_sentences(
        self,
        context: RequestContext,
        direction: Direction,
        source_texts: Sequence[SourceText],
        options: TranslationOptions,
    ) -> list[list[LineResult]]:
        """Return the results of the sentences of each text."""
        needs_alignment = any(source_text.needs_alignment for source_text in source_texts)
        batch_options = self.make_batch_options(direction, options, alignment=needs_alignment)
        lines = [line for source_text in source_texts for line in source_text.sentences]
        context.fields["sentences"] = context.fields.get("sentences", 0) + len(lines)
        try:
            found = iter(
                await self.scheduler.translate(
                    context.client,
                    batch_options,
                    lines,
                    timeout_seconds=self.config.timeout_seconds,
                )
            )
        except QueueFullError as error:
            raise self._refusal(error) from None
        except TooManySentencesError as error:
            raise HttpError(400, str(error)) from None
        except TimeoutError:
            self.metrics.refused.labels("deadline").inc()
            text = f"no translation within {self.config.timeout_seconds:g} s; try again later"
            raise HttpError(503, text, retry_seconds=10) from None
        return [[next(found) for _ in source_text.sentences] for source_text in source_texts]

    async def call_function(
        self, direction: Direction, function: Callable[..., T], *args: Any
    ) -> T:
        """Return what `function(translator, *args)` returns where the model is."""
        try:
            return await self.scheduler.call_function(direction.translator, function, *args)
        except QueueFullError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: QueueFullError) -> HttpError:
        self.metrics.refused.labels("queue").inc()
        return HttpError(429, f"Slowdown: {error}", retry_seconds=error.retry_seconds)

    def make_batch_options(
        self, direction: Direction, options: TranslationOptions, *, alignment: bool
    ) -> BatchOptions:
        """Return what sentences of a request share with those that they are batched with.

        More results than the beam has are not found: `n_best` never changes which is the first.
        """
        known = (direction, options.n_best, options.with_scores, alignment)
        if not options.search and known in self._options:
            return self._options[known]
        translator = direction.translator
        changes = options.search | ({"alignment": True} if alignment else {})
        search = translator.search_config(**changes)
        n_best = options.n_best if search.sampling else min(options.n_best, search.beam_size)
        lines = LineOptions(
            n_best=n_best,
            with_scores=options.with_scores,
            max_source_length=self.config.max_source_length,
        )
        batch_options = BatchOptions(translator, search, lines, direction.tags)
        if (
            not options.search and direction in self.models.directions.values()
        ):  # not of a reload ago
            self._options[known] = batch_options
        return batch_options

    async def stream(
        self,
        context: RequestContext,
        direction: Direction,
        source_texts: Iterable[SourceText],
        options: TranslationOptions,
    ) -> AsyncIterator[str]:
        """Yield the translation of each text of a document, in order, with two windows of it in
        the scheduler at a time. Raises a 500 `HttpError` for a sentence that fails.
        """
        windows = _windows(source_texts, min(_WINDOW_SENTENCES, max(self.config.max_queue // 2, 1)))
        ahead: list[tuple[list[SourceText], asyncio.Task[list[list[LineResult]]]]] = []
        try:
            for window in chain(windows, (None, None)):
                if window is not None:
                    work = self._patiently(context, direction, window, options)
                    ahead.append((window, asyncio.ensure_future(work)))
                if ahead and (window is None or len(ahead) > 1):
                    done, task = ahead.pop(0)
                    for source_text, results in zip(done, await task, strict=True):
                        check_results(results)
                        yield source_text.render(results)
        finally:
            for _, task in ahead:
                task.cancel()

    async def _patiently(
        self,
        context: RequestContext,
        direction: Direction,
        source_texts: Sequence[SourceText],
        options: TranslationOptions,
    ) -> list[list[LineResult]]:
        """Translate a part of a document, which waits where the queue is full."""
        for left in range(_QUEUE_TRIES, -1, -1):
            try:
                return await self.translate_sentences(context, direction, source_texts, options)
            except HttpError as error:
                if error.status != 429 or not left:
                    raise
                await asyncio.sleep(error.retry_seconds or 1)
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """Let go of threads and files."""
        self.scheduler.close()
        self.downloads.close()
        for pool in pools_of(self.models):
            pool.close()


def check_results(results: Sequence[LineResult]) -> None:
    """Raise a 500 `HttpError` if a sentence failed."""
    for result in results:
        if result.error is not None:
            raise HttpError(500, f"a sentence cannot be translated: {result.error}")


async def run_unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it when the client closes the connection.

    The body of the request must have been read. Raises `ClientDisconnectedError`.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and gone.exception() is None:
            raise ClientDisconnectedError
        return await task
    finally:
        task.cancel()
        gone.cancel()


def client_of(request: Request) -> str:
    """Return what a request's address counts as."""
    return network_of(request.client.host if request.client else "unknown")


def pools_of(models: Models) -> set[WorkerPool]:
    """Return the worker processes of these models, if any."""
    backends = [direction.translator.backend for direction in models.directions.values()]
    return {backend.pool for backend in backends if isinstance(backend, WorkersBackend)}


def _windows(source_texts: Iterable[SourceText], most: int) -> Iterator[list[SourceText]]:
    """Put texts together as long as they have at most so many sentences."""
    window: list[SourceText] = []
    count = 0
    for source_text in source_texts:
        size = len(source_text.sentences)
        if window and (count + size > most or len(window) == _WINDOW_TEXTS):
            yield window
            window, count = [], 0
        window.append(source_text)
        count += size
    yield window
