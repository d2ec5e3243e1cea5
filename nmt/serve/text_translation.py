"""Translates the texts and documents of requests, sentence by sentence, with the scheduler.

In this file, the context of a sentence consists of the sentences before it in its document. Models
of documents read a sentence together with its context (`ServeConfig.context`). The
`request_context` is the state of an HTTP request, such as its client.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from nmt.config import ServeConfig
from nmt.documents.document import ReadOptions, read_text
from nmt.documents.texts import SourceText, Translatable, list_sentences, split_into_windows
from nmt.search.protect import find_protected
from nmt.serve.access import RequestContext
from nmt.serve.http_errors import HttpError, TooManyRequestsError
from nmt.serve.models import Direction, Models, TranslationOptions
from nmt.serve.monitoring import Metrics
from nmt.serve.queues import BatchOptions, QueueFullError, TooManySentencesError
from nmt.serve.scheduler import Scheduler
from nmt.translate.context import (
    add_context,
    find_common_separator,
    join_lines,
    prepare_groups,
    replace_missing,
    select_last_lines,
)
from nmt.translate.prepared_lines import PreparedLine
from nmt.translate.restoring import restore_line
from nmt.translate.results import LineResult
from nmt.translate.windows import Window

T = TypeVar("T")
TextResults = list[list[LineResult]]
"""For each text, the results of its sentences."""
TranslatableT = TypeVar("TranslatableT", bound=Translatable)

_WINDOW_SENTENCES = 128  # number of sentences of a document that the scheduler gets at a time
_INLINE_CHARACTERS = 4000  # larger requests are read and answered outside of the event loop
_CHARACTERS_PER_TEXT = 40  # each text costs as much time as this number of further characters
_MAX_QUEUE_TRIES = 31  # number of attempts to queue a window, a second or more apart
_MAX_WINDOWS = 2  # number of windows of a document in the scheduler at the same time
_RETRY_SECONDS = 10  # clients whose request took too long may try again after this time


@dataclass
class TranslatedText:
    """A text of a request and the translations of its sentences."""

    text: str
    source: str  # language code
    confidence: float  # see `ResolvedDirection.confidence`
    direction: Direction | None  # None if the text is not translated
    source_text: SourceText  # the text, split into sentences
    results: list[LineResult] = field(default_factory=list)  # one for each sentence

    @property
    def is_complete(self) -> bool:
        """Whether every sentence has a translation."""
        return all(result.error is None for result in self.results)

    def render_translation(self, rank: int = 0) -> str:
        """Return the translated text.

        `rank` selects one of the translations of each sentence: 0 for the best, 1 for the second
        best.
        """
        if self.direction is None:
            return self.text
        return self.source_text.render(self.results, rank, self.direction.source_prefix)

    def list_alternatives(self, max_alternatives: int) -> list[str]:
        """Return up to `max_alternatives` translations other than the best, best first."""
        num_ranks = max((len(result.translations) for result in self.results), default=0)
        texts = [self.render_translation(rank) for rank in range(num_ranks)]
        unique_texts = list(dict.fromkeys(texts))
        return unique_texts[1 : max_alternatives + 1]


class TextTranslator:
    """Translates texts and documents. Raises an `HttpError` if the scheduler refuses a request."""

    def __init__(self, config: ServeConfig, scheduler: Scheduler, metrics: Metrics) -> None:
        self._config = config
        self._scheduler = scheduler
        self._metrics = metrics
        max_client_sentences = scheduler.queues.max_per_client
        self.max_window_sentences = min(_WINDOW_SENTENCES, max_client_sentences)
        """Maximum number of sentences of a document that the scheduler gets at a time."""

    def should_split_sentences(self, options: TranslationOptions) -> bool:
        """Return whether the texts of a request are split into sentences."""
        if options.split_sentences is None:
            return self._config.split_sentences
        return options.split_sentences

    def protect_if_needed(
        self, options: TranslationOptions, sentences: Sequence[str]
    ) -> TranslationOptions:
        """Return options with `protect` only if it is on and a sentence needs it.

        This setting makes search keep placeholders, tags, addresses and emoji, but also makes it
        slower. A request turns it on or off, or else the setting of the server applies.
        """
        is_on = options.search_changes.get("protect", self._config.protect)
        if not is_on:
            return options
        is_needed = any(find_protected(sentence) for sentence in sentences)
        if not is_needed and "protect" not in options.search_changes:
            # unchanged, since `Direction` caches the batch options of requests without such changes
            return options
        search_changes = {**options.search_changes, "protect": is_needed}
        return replace(options, search_changes=search_changes)

    def make_batch_options(
        self, direction: Direction, options: TranslationOptions, *, alignment: bool = False
    ) -> BatchOptions:
        """Return the options for searching sentences in a direction."""
        return direction.make_batch_options(
            options, alignment=alignment, max_source_length=self._config.max_source_length
        )

    async def translate(
        self,
        models: Models,
        request_context: RequestContext,
        texts: Sequence[str],
        options: TranslationOptions,
    ) -> list[TranslatedText]:
        """Translate texts. The result of a sentence that fails has an `error`."""
        num_characters = sum(map(len, texts))
        self._metrics.characters.inc(num_characters)
        request_context.fields["characters"] = num_characters
        if self._config.log_texts:
            request_context.fields["texts"] = list(texts)
        read_texts = partial(self._read_texts, models, texts, options)
        translated_texts = await call_in_thread_if_long(texts, read_texts)
        texts_by_direction: dict[Direction, list[TranslatedText]] = defaultdict(list)
        for text in translated_texts:
            if text.direction is not None:
                texts_by_direction[text.direction].append(text)

        async def translate_in_direction(
            direction: Direction, direction_texts: list[TranslatedText]
        ) -> None:
            """Translate the sentences of texts, and store the results in the texts."""
            source_texts = [text.source_text for text in direction_texts]
            _count_sentences(request_context, source_texts)
            results = await self.translate_sentences(
                request_context, direction, source_texts, options
            )
            for text, text_results in zip(direction_texts, results, strict=True):
                text.results = text_results

        coroutines = []
        for direction, direction_texts in texts_by_direction.items():
            coroutines.append(translate_in_direction(direction, direction_texts))
        if len(coroutines) == 1:  # the usual case, in which `gather` would only cost time
            await coroutines[0]
        else:
            await asyncio.gather(*coroutines)
        return translated_texts

    def _read_texts(
        self, models: Models, texts: Sequence[str], options: TranslationOptions
    ) -> list[TranslatedText]:
        """Choose the direction of each text, and split the text into sentences."""
        translated_texts = []
        split_sentences = self.should_split_sentences(options)
        for text in texts:
            source, confidence, direction = models.resolve_direction(text, options)
            read_options = ReadOptions(split_sentences=split_sentences)
            source_text = read_text(read_options, text, is_html=options.is_html)
            translated_texts.append(
                TranslatedText(text, source, confidence, direction, source_text)
            )
        return translated_texts

    async def translate_sentences(
        self,
        request_context: RequestContext,
        direction: Direction,
        source_texts: Sequence[Translatable],
        options: TranslationOptions,
        *,
        are_consecutive: bool = False,
    ) -> TextResults:
        """Return the results of the sentences of each text.

        With `are_consecutive`, the texts are paragraphs of one document: the context of a sentence
        may begin in an earlier text.
        """
        needs_alignment = any(text.needs_alignment for text in source_texts)
        # With context, the translation of a sentence is cut out of the translation of the sentence
        # and its context. Scores, alternatives, a prefix and an alignment cannot be cut.
        can_divide = (
            not options.with_scores
            and options.n_best == 1
            and not options.prefix
            and not needs_alignment
        )
        separator = ""  # sentences are translated without context
        if self._config.context > 0 and can_divide:
            separator = find_common_separator(direction.translator.tokenizer)
        sentences = list_sentences(source_texts)
        if options.glossary is not None:
            lines = options.glossary.select_lines(sentences)
            search_changes = {**options.search_changes, "glossary": lines}
            options = replace(options, search_changes=search_changes)
        if separator:
            if are_consecutive:
                documents = [sentences]
            else:
                documents = [text.sentences for text in source_texts]
            results = await self._translate_with_context(
                request_context, direction, documents, options, separator=separator
            )
        else:
            results = await self._search(
                request_context, direction, sentences, options, alignment=needs_alignment
            )
        results_by_text = []
        start = 0
        for text in source_texts:
            end = start + len(text.sentences)
            results_by_text.append(results[start:end])
            start = end
        return results_by_text

    async def _translate_with_context(
        self,
        request_context: RequestContext,
        direction: Direction,
        documents: Sequence[list[str]],
        options: TranslationOptions,
        *,
        separator: str,
    ) -> list[LineResult]:
        """Return the result of each sentence, translated together with its context.

        `documents` are lists of sentences.
        """
        sentences = list(chain.from_iterable(documents))
        # only to prepare the groups: `_search` chooses `protect` again, for the texts that it gets
        protection_options = self.protect_if_needed(options, sentences)
        batch_options = self.make_batch_options(direction, protection_options)
        line_options = replace(batch_options.encoding_options, context=self._config.context)

        def prepare() -> tuple[list[list[str]], list[PreparedLine]]:
            """Prepare each sentence with its context; see `prepare_groups`."""
            groups = []
            for document in documents:
                groups += add_context(Window(first_line=0, lines=document), line_options)
            return prepare_groups(groups, direction.translator.tokenizer, line_options)

        groups, last_lines = await call_in_thread_if_long(sentences, prepare)
        results = await self._search_with_context(
            request_context, direction, groups, options, separator=separator
        )
        return list(map(restore_line, results, last_lines))

    async def _search_with_context(
        self,
        request_context: RequestContext,
        direction: Direction,
        groups: Sequence[Sequence[str]],
        options: TranslationOptions,
        *,
        separator: str,
    ) -> list[LineResult]:
        """Translate each group as one line, and return the result of its last sentence.

        `groups` are the texts that `prepare_groups` returns. If the translation of a group cannot
        be divided, translates its last sentence again, without context.
        """
        lines = join_lines(groups, separator)
        group_results = await self._search(
            request_context, direction, lines, options, are_prepared=True
        )
        last_results = select_last_lines(group_results, groups, separator)
        retried_indices = [i for i, result in enumerate(last_results) if result is None]
        retried_results: list[LineResult] = []
        if retried_indices:
            sentences = [groups[i][-1] for i in retried_indices]
            retried_results = await self._search(
                request_context, direction, sentences, options, are_prepared=True
            )
        return replace_missing(last_results, retried_results, separator)

    async def _search(
        self,
        request_context: RequestContext,
        direction: Direction,
        sentences: list[str],
        options: TranslationOptions,
        *,
        alignment: bool = False,
        are_prepared: bool = False,
    ) -> list[LineResult]:
        """Return the result of each sentence. Raises an `HttpError` if the scheduler refuses."""
        options = self.protect_if_needed(options, sentences)
        batch_options = self.make_batch_options(direction, options, alignment=alignment)
        if are_prepared:
            line_options = replace(batch_options.line_options, recase=False, copy_symbols=False)
            batch_options = replace(batch_options, line_options=line_options)
        timeout_seconds = self._config.timeout_seconds
        try:
            return await self._scheduler.translate(
                request_context.client,
                batch_options,
                sentences,
                timeout_seconds=timeout_seconds,
                prefix=options.prefix,
            )
        except QueueFullError as error:
            raise self._refuse(error) from None
        except TooManySentencesError as error:
            raise HttpError(400, str(error)) from None
        except TimeoutError:
            self._metrics.refused.labels("deadline").inc()
            message = f"no translation within {timeout_seconds:g} s; try again later"
            raise HttpError(503, message, retry_seconds=_RETRY_SECONDS) from None

    async def call_function(
        self, direction: Direction, function: Callable[..., T], *args: Any
    ) -> T:
        """Return `function(translator, *args)`, called where the model is loaded."""
        round_runner = self._scheduler.rounds
        try:
            return await round_runner.call_function(direction.translator, function, *args)
        except QueueFullError as error:
            raise self._refuse(error) from None

    def _refuse(self, error: QueueFullError) -> TooManyRequestsError:
        """Count a request that does not fit in the queue, and return the error to answer."""
        self._metrics.refused.labels("queue").inc()
        return TooManyRequestsError(str(error), retry_seconds=error.retry_seconds)

    async def stream(
        self,
        request_context: RequestContext,
        direction: Direction,
        source_texts: Iterable[SourceText],
        options: TranslationOptions,
    ) -> AsyncIterator[str]:
        """Yield the translation of each text, in order. See `translate_windows`."""
        windows = split_into_windows(source_texts, self.max_window_sentences)

        async def next_window() -> list[SourceText] | None:
            return await asyncio.to_thread(next, windows, None)

        results = self.translate_windows(request_context, direction, next_window, options)
        async for window, text_results in results:
            for source_text, sentence_results in zip(window, text_results, strict=True):
                yield source_text.render(sentence_results, prefix=direction.source_prefix)

    async def translate_windows(
        self,
        request_context: RequestContext,
        direction: Direction,
        next_window: Callable[[], Awaitable[Sequence[TranslatableT] | None]],
        options: TranslationOptions,
    ) -> AsyncIterator[tuple[Sequence[TranslatableT], TextResults]]:
        """Yield the windows of a document with the results of each text, in order.

        `next_window` returns the next texts of the document, or None at the end. Raises a 500
        `HttpError` if a sentence fails.
        """
        # windows and the tasks that translate them, in order
        pending: deque[tuple[Sequence[TranslatableT], asyncio.Task[TextResults]]] = deque()
        is_at_end = False
        try:
            while True:
                while len(pending) < _MAX_WINDOWS and not is_at_end:
                    new_window = await next_window()
                    if new_window is None:
                        is_at_end = True
                    else:
                        translation = self._translate_window(
                            request_context, direction, new_window, options
                        )
                        task = asyncio.ensure_future(translation)
                        pending.append((new_window, task))
                if not pending:
                    return
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
        request_context: RequestContext,
        direction: Direction,
        window: Sequence[Translatable],
        options: TranslationOptions,
    ) -> TextResults:
        """Translate a window of a document. If the queue is full, waits and tries again."""
        _count_sentences(request_context, window)
        num_tries = 0
        while True:
            try:
                return await self.translate_sentences(
                    request_context, direction, window, options, are_consecutive=True
                )
            except TooManyRequestsError as error:
                num_tries += 1
                if num_tries == _MAX_QUEUE_TRIES:
                    raise
                await asyncio.sleep(error.retry_seconds or 1)


def _count_sentences(request_context: RequestContext, texts: Sequence[Translatable]) -> None:
    """Add the number of sentences of texts to the log entry of a request."""
    num_sentences = sum(len(text.sentences) for text in texts)
    request_context.fields["sentences"] = request_context.fields.get("sentences", 0) + num_sentences


def check_results(results: Sequence[LineResult]) -> None:
    """Raise a 500 `HttpError` if a sentence failed."""
    for result in results:
        if result.error is not None:
            raise HttpError(500, f"a sentence cannot be translated: {result.error}")


async def call_in_thread_if_long(texts: Sequence[str], function: Callable[[], T]) -> T:
    """Return `function()`, which processes `texts`.

    If the texts are long, calls the function in a thread, so that the event loop can serve other
    requests.
    """
    num_characters = sum(map(len, texts))
    if num_characters + _CHARACTERS_PER_TEXT * len(texts) <= _INLINE_CHARACTERS:
        return function()
    return await asyncio.to_thread(function)
