"""The state that all routes of the server share, and the reloading of models."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import torch
from starlette.requests import Request

from nmt.config import ServeConfig, read_glossary, resolve_path
from nmt.errors import ConfigError, NmtError, escape_controls, to_one_line
from nmt.search.glossary import Glossary, parse_entry
from nmt.serve.access import Admission, BodyLimits, RequestContext, read_metrics_token
from nmt.serve.downloads import Downloads
from nmt.serve.file_process import FileProcesses
from nmt.serve.http_errors import ClientDisconnectedError
from nmt.serve.models import Models, TranslationOptions
from nmt.serve.monitoring import Metrics
from nmt.serve.scheduler import Scheduler
from nmt.serve.text_translation import TextTranslator, TranslatedText
from nmt.serve.worker_pool import count_workers

log = logging.getLogger(__name__)
T = TypeVar("T")
_MAX_DOWNLOADS = 64  # number of files that can be kept for download if each has the largest size


class Service:
    """The state that all routes share: models, glossaries, queues, limits and metrics."""

    def __init__(self, config: ServeConfig, models: Models) -> None:
        self.config = config
        self.models = models
        self.glossaries = load_glossaries(config.glossaries)
        self.metrics = Metrics()
        backends = [direction.translator.backend for direction in models.directions.values()]
        num_workers = max(backend.num_workers for backend in backends)
        # A round is one search of a batch (`nmt.serve.rounds`). Enough of them run at the same time
        # to keep all cores busy: one in each worker process, or one in each thread without workers.
        max_rounds = count_workers(config) or torch.get_num_threads()
        self.scheduler = Scheduler(
            config.max_queue,
            self.metrics,
            num_workers=num_workers,
            max_rounds=min(max_rounds, num_workers),
        )
        self.text_translator = TextTranslator(config, self.scheduler, self.metrics)
        self.admission = Admission(config)
        self.metrics_token = read_metrics_token(config.metrics_token)
        self.body_limits = BodyLimits(config.body_timeout_seconds)
        self.downloads = Downloads(config.file_minutes * 60, _MAX_DOWNLOADS * config.max_file_bytes)
        self.file_processes = FileProcesses(config.timeout_seconds)
        self.progress: dict[str, tuple[int, int]] = {}
        """For each request with a file, keyed by the id of the request: the number of finished
        sentences, and the number of all sentences."""
        self.reload_failed = False  # whether the latest reload failed, and older models are served
        self._reload_lock = asyncio.Lock()
        self._add_metrics()

    def _add_metrics(self) -> None:
        """Add the metrics whose values are read from the state of the service."""
        self.metrics.add_gauge(
            "nmt_queue_sentences",
            "Sentences that wait.",
            lambda: self.scheduler.queues.num_waiting,
        )
        self.metrics.add_counter(
            "nmt_worker_deaths_total",
            "Worker processes that died since the models were loaded.",
            lambda: self.models.pool.num_deaths if self.models.pool else 0,
        )
        self.metrics.add_gauge(
            "nmt_held_bytes",
            "Bytes of request bodies in memory.",
            lambda: self.body_limits.held_bytes,
        )

    async def reload(self) -> None:
        """Load all models and glossaries again. If that fails, keep the current ones.

        Requests that were accepted before the reload are answered with the old models. The old
        worker processes end when the last of these requests has been answered.
        """
        try:
            async with self._reload_lock:  # one reload at a time
                glossaries = await asyncio.to_thread(load_glossaries, self.config.glossaries)
                self.models = await asyncio.to_thread(Models.load, self.config)
                self.glossaries = glossaries
                gc.collect()  # the old models, which are large, are in reference cycles
        except Exception as error:  # reading a damaged file may raise an exception of any type
            self.reload_failed = True
            reason = to_one_line(error)
            if not isinstance(error, NmtError):  # the message may be empty, or only a key
                reason = f"{type(error).__name__}: {reason}"
            log.error("the models were not reloaded: %s", escape_controls(reason))
            self.metrics.reloads.labels("failed").inc()
        else:
            self.reload_failed = False
            log.info("the models were reloaded")
            self.metrics.reloads.labels("done").inc()

    async def translate(
        self,
        request: Request,
        context: RequestContext,
        texts: Sequence[str],
        options: TranslationOptions,
    ) -> list[TranslatedText]:
        """Translate the texts of a request; see `TextTranslator.translate`.

        Raises `ClientDisconnectedError` if the client disconnects.
        """
        translation = self.text_translator.translate(self.models, context, texts, options)
        return await run_unless_disconnected(request, translation)

    def close(self) -> None:
        """Stop the threads and processes, and delete the downloads."""
        self.scheduler.close()
        self.downloads.close()
        self.file_processes.close()
        if self.models.pool is not None:
            self.models.pool.close()


def load_glossaries(folder: str | None) -> dict[str, Glossary]:
    """Return the glossaries NAME.tsv of a folder, keyed by NAME. Raises `ConfigError`."""
    if folder is None:
        return {}
    path = resolve_path(folder)
    if not path.is_dir():
        raise ConfigError(f"glossaries={folder}: no such folder; create it, with files NAME.tsv")
    glossaries = {}
    for file in sorted(path.glob("*.tsv")):
        lines = read_glossary([str(file)])
        try:
            glossaries[file.stem] = Glossary(map(parse_entry, lines))
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
    return glossaries


async def run_unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel `work` when the client closes the connection.

    The body of the request must have been read. Raises `ClientDisconnectedError`.
    """
    request_task = asyncio.current_task()
    assert request_task is not None
    is_disconnected = False

    async def watch_client() -> None:
        """Cancel `work` when the client disconnects."""
        nonlocal is_disconnected
        await request.receive()  # after the body, the next message means a disconnected client
        is_disconnected = True
        request_task.cancel()

    # `work` runs in the current task, since another task would cost time in each request
    watcher = asyncio.ensure_future(watch_client())
    try:
        return await work
    except asyncio.CancelledError:
        if is_disconnected:
            raise ClientDisconnectedError from None
        raise
    finally:
        watcher.cancel()
