"""The service behind all routes: admission of requests, translation, and reloading of models."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from starlette.requests import Request

from nmt.config import ServeConfig, read_glossary, resolve_path
from nmt.errors import ConfigError, escape_controls
from nmt.search.glossary import Glossary, parse_entry
from nmt.serve.access import (
    BodyLimits,
    HttpError,
    Key,
    KeyRing,
    RateLimits,
    UnsupportedLanguageError,
    client_network,
    read_keys,
)
from nmt.serve.documents import Downloads, ReadOptions, read_text
from nmt.serve.file_process import FileProcesses
from nmt.serve.html_tokens import extract_visible_text
from nmt.serve.models import DETECTION_CHARACTERS, Direction, Models
from nmt.serve.monitoring import Metrics
from nmt.serve.queues import BatchOptions, QueueFullError, TooManySentencesError
from nmt.serve.scheduler import Scheduler
from nmt.serve.texts import SourceText, Translatable, group_texts, is_emoji_only
from nmt.serve.workers import count_workers
from nmt.translate.options import LineOptions
from nmt.translate.results import LineResult

log = logging.getLogger(__name__)
T = TypeVar("T")
TranslatableT = TypeVar("TranslatableT", bound=Translatable)

_WINDOW_SENTENCES = 128  # sentences of a document that the scheduler gets at a time
_INLINE_CHARACTERS = 4000  # larger requests are read and answered outside of the event loop
_MAX_QUEUE_TRIES = 31  # attempts to queue a window of a document, a second or more apart


class ClientDisconnectedError(Exception):
    """The client closed the connection before the server answered."""


@dataclass
class RequestContext:
    """The sender of a request, and its fields in the access log."""

    id: str
    client: str  # name of the key or network; limits and fairness apply to it
    key: Key | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # added to the line of the access log


@dataclass(frozen=True, kw_only=True)
class TranslationOptions:
    """How to translate the texts of a request."""

    source: str  # a language code, or "auto"
    target: str
    is_html: bool = False
    n_best: int = 1
    with_scores: bool = False
    split_sentences: bool | None = None  # None for the setting of the server
    search: dict[str, Any] = field(default_factory=dict)  # changes of the model's search settings
    glossary: Glossary | None = None


class ResolvedDirection(NamedTuple):
    """The direction in which a text is translated."""

    source: str  # language code
    confidence: float  # 0 to 100, of the detection of the source; 0 if it was given
    direction: Direction | None  # None if the text stays unchanged


@dataclass
class TranslatedText:
    """A text of a request and the translations of its sentences."""

    text: str
    source: str
    confidence: float
    direction: Direction | None
    source_text: SourceText
    results: list[LineResult] = field(default_factory=list)

    def render_translation(self, rank: int = 0) -> str:
        """Return the text with the translation of this rank for each sentence; 0 is the best."""
        return self.text if self.direction is None else self.source_text.render(self.results, rank)

    def list_alternatives(self, max_alternatives: int) -> list[str]:
        """Return up to `max_alternatives` other translations, best first."""
        num_ranks = max((len(result.translations) for result in self.results), default=0)
        unique_texts = dict.fromkeys(self.render_translation(rank) for rank in range(num_ranks))
        return list(unique_texts)[1 : max_alternatives + 1]


class Service:
    """The state of the server and what its routes have in common."""

    def __init__(self, config: ServeConfig, models: Models) -> None:
        self.config = config
        self.models = models
        self.glossaries = load_glossaries(config.glossaries)
        self.metrics = Metrics()
        backends = [direction.translator.backend for direction in models.directions.values()]
        num_workers = max(backend.num_workers for backend in backends)
        max_rounds = count_workers(config) or torch.get_num_threads()
        self.scheduler = Scheduler(
            config.max_queue,
            self.metrics,
            num_workers=num_workers,
            max_rounds=min(max_rounds, num_workers),
        )
        self.body_limits = BodyLimits(config.body_timeout_seconds)
        self.downloads = Downloads(config.file_minutes * 60, 64 * config.max_file_bytes)
        self.files = FileProcesses(config.timeout_seconds)
        self.progress: dict[str, tuple[int, int]] = {}  # finished and all sentences, by request id
        self._keys = None if config.api_keys is None else KeyRing(read_keys(config.api_keys))
        self._rate_limits = RateLimits()
        self._reload_lock = asyncio.Lock()
        self.reload_failed = False  # whether the latest reload failed; older models are served then
        self._add_metrics()

    def _add_metrics(self) -> None:
        self.metrics.add_gauge(
            "nmt_queue_sentences",
            "Sentences that wait.",
            lambda: self.scheduler.queues.num_waiting,
        )
        self.metrics.add_counter(
            "nmt_worker_deaths_total",
            "Worker processes of these models that died.",
            lambda: self.models.pool.num_deaths if self.models.pool else 0,
        )
        self.metrics.add_gauge(
            "nmt_held_bytes", "Bodies held.", lambda: self.body_limits.held_bytes
        )

    @property
    def has_keys(self) -> bool:
        """Whether the server has API keys."""
        return self._keys is not None

    async def reload(self) -> None:
        """Load all models and glossaries again, or keep the current ones if loading fails.

        Requests that were accepted before the reload are answered with the old models.
        """
        try:
            async with self._reload_lock:  # if signals follow each other, the last reload counts
                glossaries = await asyncio.to_thread(load_glossaries, self.config.glossaries)
                self.models = await asyncio.to_thread(Models.load, self.config)
                self.glossaries = glossaries
                gc.collect()  # the old models are in reference cycles, and large
        except Exception as error:  # a damaged file of a model may raise any exception
            self.reload_failed = True
            reason = " ".join(str(error).split()) or type(error).__name__
            log.error("the models were not reloaded: %s", escape_controls(reason))
            self.metrics.reloads.labels("failed").inc()
        else:
            self.reload_failed = False
            log.info("the models were reloaded")
            self.metrics.reloads.labels("done").inc()

    def admit(self, request: Request, context: RequestContext, api_key: object) -> None:
        """Check the API key and the rate of a request.

        `api_key` is the parameter of the request with this name. If it is missing or empty, the key
        is read from the Authorization header. Raises a 400, 403 or 429 `HttpError`.
        """
        secret = request.headers.get("authorization", "").removeprefix("Bearer ")
        if isinstance(api_key, str) and api_key:
            secret = api_key
        requests_per_minute = self.config.requests_per_minute
        if self._keys is not None and secret:
            context.key = self._keys.find(context.client, secret.strip())
            if context.key is None:
                raise HttpError(403, "Invalid API key")
            context.client = context.key.name
            requests_per_minute = context.key.requests_per_minute or 0
        elif self._keys is not None and self.config.key_required:
            raise HttpError(400, "This server needs an API key; ask its operator for one")
        self._rate_limits.check(context.client, requests_per_minute)

    def char_limit(self, context: RequestContext, *, is_file: bool = False) -> int:
        """Return the maximum number of characters of a request, 0 for no limit.

        Files and streams, `is_file`, are limited in bytes; only an API key can limit their
        characters.
        """
        if context.key is not None and context.key.char_limit is not None:
            return context.key.char_limit
        return 0 if is_file else self.config.char_limit

    def should_split_sentences(self, options: TranslationOptions) -> bool:
        """Return whether the texts of a request are split into sentences."""
        if options.split_sentences is None:
            return self.config.split_sentences
        return options.split_sentences

    def check_languages(self, options: TranslationOptions) -> None:
        """Raise a 400 `HttpError` if the languages of a request are not served."""
        if options.source == "auto":
            _find_served_codes(self.models, options)
        else:
            self.resolve_direction("text", options)

    def resolve_direction(self, text: str, options: TranslationOptions) -> ResolvedDirection:
        """Return the direction of a text; detect its language if the source is auto.

        Raises a 400 `HttpError` if the languages are not served.
        """
        models = self.models
        source, target = _find_served_codes(models, options)
        if is_emoji_only(text):
            return ResolvedDirection(source or "en", 0.0, None)
        confidence = 0.0
        if source is None:
            sample = extract_visible_text(text, DETECTION_CHARACTERS) if options.is_html else text
            source, confidence = models.choose_source(sample, target)
        direction = models.directions.get((source, target))
        if direction is None and source != target:
            raise HttpError(400, f"{target} is not a target of {source} on this server")
        return ResolvedDirection(source, confidence, direction)

    async def translate(
        self,
        request: Request,
        context: RequestContext,
        texts: Sequence[str],
        options: TranslationOptions,
    ) -> list[TranslatedText]:
        """Translate the texts of a request. Stops if the client disconnects.

        A sentence that cannot be translated has a result with an `error`.
        """
        return await run_unless_disconnected(request, self._translate(context, texts, options))

    async def _translate(
        self, context: RequestContext, texts: Sequence[str], options: TranslationOptions
    ) -> list[TranslatedText]:
        num_characters = sum(map(len, texts))
        self.metrics.characters.inc(num_characters)
        context.fields["characters"] = num_characters
        if self.config.log_texts:
            context.fields["texts"] = list(texts)
        translated_texts = await call_for_texts(texts, self._read_texts, texts, options)
        groups: dict[Direction, list[TranslatedText]] = defaultdict(list)
        for text in translated_texts:
            if text.direction is not None:
                groups[text.direction].append(text)

        async def translate_group(direction: Direction, group: list[TranslatedText]) -> None:
            source_texts = [text.source_text for text in group]
            results = await self.translate_sentences(context, direction, source_texts, options)
            for text, text_results in zip(group, results, strict=True):
                text.results = text_results

        await asyncio.gather(*[translate_group(*group) for group in groups.items()])
        return translated_texts

    def _read_texts(
        self, texts: Sequence[str], options: TranslationOptions
    ) -> list[TranslatedText]:
        """Resolve the direction of each text and split it into sentences, not yet translated."""
        translated_texts = []
        split_sentences = self.should_split_sentences(options)
        for text in texts:
            source, confidence, direction = self.resolve_direction(text, options)
            prefix = direction.prefix if direction else ""
            read_options = ReadOptions(split_sentences=split_sentences, prefix=prefix)
            source_text = read_text(read_options, text, is_html=options.is_html)
            translated_texts.append(
                TranslatedText(text, source, confidence, direction, source_text)
            )
        return translated_texts

    async def translate_sentences(
        self,
        context: RequestContext,
        direction: Direction,
        source_texts: Sequence[Translatable],
        options: TranslationOptions,
    ) -> list[list[LineResult]]:
        """Return the results of the sentences of each text."""
        needs_alignment = any(text.needs_alignment for text in source_texts)
        sentences = [sentence for text in source_texts for sentence in text.sentences]
        if options.glossary is not None:
            lines = options.glossary.select_lines(sentences)
            options = replace(options, search={**options.search, "glossary": lines})
        batch_options = self.make_batch_options(direction, options, alignment=needs_alignment)
        context.fields["sentences"] = context.fields.get("sentences", 0) + len(sentences)
        timeout_seconds = self.config.timeout_seconds
        try:
            results = await self.scheduler.translate(
                context.client, batch_options, sentences, timeout_seconds=timeout_seconds
            )
        except QueueFullError as error:
            raise self._make_queue_full_error(error) from None
        except TooManySentencesError as error:
            raise HttpError(400, str(error)) from None
        except TimeoutError:
            self.metrics.refused.labels("deadline").inc()
            message = f"no translation within {timeout_seconds:g} s; try again later"
            raise HttpError(503, message, retry_seconds=10) from None
        remaining = iter(results)
        return [[next(remaining) for _ in text.sentences] for text in source_texts]

    async def call_function(
        self, direction: Direction, function: Callable[..., T], *args: Any
    ) -> T:
        """Return `function(translator, *args)`, called where the model is loaded."""
        try:
            return await self.scheduler.rounds.call_function(direction.translator, function, *args)
        except QueueFullError as error:
            raise self._make_queue_full_error(error) from None

    def _make_queue_full_error(self, error: QueueFullError) -> HttpError:
        """Return the 429 error for a full queue, and count it in the metrics."""
        self.metrics.refused.labels("queue").inc()
        return HttpError(429, f"Slowdown: {error}", retry_seconds=error.retry_seconds)

    def make_batch_options(
        self, direction: Direction, options: TranslationOptions, *, alignment: bool
    ) -> BatchOptions:
        """Return the batch options for a request; sentences with equal options can share a batch.

        The beam is never widened to `n_best`, as this could change the best translation.
        """
        cache_key = (options.n_best, options.with_scores, alignment)
        if not options.search and cache_key in direction.batch_options:
            return direction.batch_options[cache_key]
        changes = options.search | ({"alignment": True} if alignment else {})
        search = direction.translator.search_config(**changes)
        n_best = options.n_best if search.sampling else min(options.n_best, search.beam_size)
        line_options = LineOptions(
            n_best=n_best,
            with_scores=options.with_scores,
            max_source_length=self.config.max_source_length,
        )
        batch_options = BatchOptions(direction.translator, search, line_options, direction.tags)
        if not options.search:
            direction.batch_options[cache_key] = batch_options
        return batch_options

    @property
    def max_window_sentences(self) -> int:
        """Maximum number of sentences of a document that the scheduler gets at a time."""
        return min(_WINDOW_SENTENCES, max(self.config.max_queue // 2, 1))

    async def stream(
        self,
        context: RequestContext,
        direction: Direction,
        source_texts: Iterable[SourceText],
        options: TranslationOptions,
    ) -> AsyncIterator[str]:
        """Yield the translation of each text, in order. See `translate_windows`."""
        windows = group_texts(source_texts, self.max_window_sentences)

        async def next_window() -> list[SourceText] | None:
            return await asyncio.to_thread(next, windows, None)

        results = self.translate_windows(context, direction, next_window, options)
        async for window, text_results in results:
            for source_text, sentence_results in zip(window, text_results, strict=True):
                yield source_text.render(sentence_results)

    async def translate_windows(
        self,
        context: RequestContext,
        direction: Direction,
        next_window: Callable[[], Awaitable[Sequence[TranslatableT] | None]],
        options: TranslationOptions,
    ) -> AsyncIterator[tuple[Sequence[TranslatableT], list[list[LineResult]]]]:
        """Yield the windows of a document with the results of each text, in order.

        Two windows are in the scheduler at a time. Raises a 500 `HttpError` if a sentence fails.
        """
        pending: deque[tuple[Sequence[TranslatableT], asyncio.Task[list[list[LineResult]]]]] = (
            deque()
        )
        is_at_end = False
        try:
            while pending or not is_at_end:
                if len(pending) < 2 and not is_at_end:
                    window = await next_window()
                    if window is None:
                        is_at_end = True
                    else:
                        work = self._translate_window(context, direction, window, options)
                        pending.append((window, asyncio.ensure_future(work)))
                    continue
                window, task = pending.popleft()
                results = await task
                for text_results in results:
                    check_results(text_results)
                yield window, results
        finally:
            for _, task in pending:
                task.cancel()

    async def _translate_window(
        self,
        context: RequestContext,
        direction: Direction,
        window: Sequence[Translatable],
        options: TranslationOptions,
    ) -> list[list[LineResult]]:
        """Translate a window of a document. Waits and tries again if the queue is full."""
        for _ in range(_MAX_QUEUE_TRIES - 1):
            try:
                return await self.translate_sentences(context, direction, window, options)
            except HttpError as error:
                if error.status != 429:
                    raise
                await asyncio.sleep(error.retry_seconds or 1)
        return await self.translate_sentences(context, direction, window, options)

    def close(self) -> None:
        """Stop the threads and processes, and delete the downloads."""
        self.scheduler.close()
        self.downloads.close()
        self.files.close()
        if self.models.pool is not None:
            self.models.pool.close()


def load_glossaries(folder: str | None) -> dict[str, Glossary]:
    """Load the files NAME.tsv of a folder, by name. Raises `ConfigError` for an invalid one."""
    if folder is None:
        return {}
    path = resolve_path(folder)
    if not path.is_dir():
        raise ConfigError(f"glossaries={folder}: no such folder; create it, with files NAME.tsv")
    glossaries = {}
    for file in sorted(path.glob("*.tsv")):
        try:
            glossaries[file.stem] = Glossary(map(parse_entry, read_glossary([str(file)])))
        except (ConfigError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: {error}") from None
    return glossaries


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
    disconnect = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and disconnect.exception() is None:
            raise ClientDisconnectedError
        return await task
    finally:
        task.cancel()
        disconnect.cancel()


async def call_for_texts(texts: Sequence[str], function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, which processes `texts`.

    For large texts, calls it in a thread, so that the event loop can serve other requests.
    """
    if sum(map(len, texts)) + 40 * len(texts) <= _INLINE_CHARACTERS:
        return function(*args)
    return await asyncio.to_thread(function, *args)


def get_client_name(request: Request) -> str:
    """Return the address or network of the client, by which its requests are limited."""
    return client_network(request.client.host if request.client else "unknown")


def _find_served_codes(models: Models, options: TranslationOptions) -> tuple[str | None, str]:
    """Return the served codes of source and target; None for a source to be detected.

    Raises a 400 `HttpError` if a language is not served.
    """
    source = None
    if options.source != "auto":
        source = models.find_code(options.source)
        if source is None:
            raise UnsupportedLanguageError(options.source, models.sources)
    target = models.find_code(options.target)
    if target is None:
        raise UnsupportedLanguageError(options.target, models.codes)
    return source, target
