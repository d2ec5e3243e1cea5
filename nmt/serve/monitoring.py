"""Metrics of the server for Prometheus, and the access log."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

access_log = logging.getLogger("nmt.access")

_SECOND_BUCKETS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)
_BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SECONDS_BETWEEN_RECORDS = 60  # see `OncePerMinute`

# leave out the creation times of counters, since all counters begin at nmt_start_time_seconds
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """Counters, histograms and gauges of one server."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.requests = Counter(
            "nmt_requests_total",
            "Requests answered.",
            ["method", "route", "status"],
            registry=registry,
        )
        self.characters = Counter(
            "nmt_characters_total", "Characters of texts to translate.", registry=registry
        )
        self.sentences = Counter("nmt_sentences_total", "Sentences translated.", registry=registry)
        self.failed_sentences = Counter(
            "nmt_failed_sentences_total",
            "Sentences that the model failed to translate.",
            registry=registry,
        )
        self.source_tokens = Counter(
            "nmt_source_tokens_total", "Source tokens, including EOS.", registry=registry
        )
        self.engine_seconds = Counter(
            "nmt_engine_seconds_total", "Time the engine was busy.", registry=registry
        )
        self.refused = Counter(
            "nmt_refused_total", "Requests refused, by reason.", ["reason"], registry=registry
        )
        self.disconnects = Counter(
            "nmt_disconnects_total",
            "Clients that disconnected before their response.",
            registry=registry,
        )
        self.reloads = Counter(
            "nmt_reloads_total", "Reloads of the models.", ["result"], registry=registry
        )
        self.batch_sentences = Histogram(
            "nmt_batch_sentences",
            "Number of sentences in a batch.",
            buckets=_BATCH_SIZE_BUCKETS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "nmt_queue_seconds",
            "Time until the engine took the first segment of a request.",
            buckets=_SECOND_BUCKETS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "nmt_request_seconds",
            "Time to answer a request that translates.",
            buckets=_SECOND_BUCKETS,
            registry=registry,
        )
        start_time = Gauge(
            "nmt_start_time_seconds", "Time at which the server started.", registry=registry
        )
        start_time.set_to_current_time()

    def add_counter(self, name: str, description: str, read_value: Callable[[], float]) -> None:
        """Add a counter. `render` calls `read_value` for its value."""
        self._registry.register(_CallbackCounter(name, description, read_value))

    def add_gauge(self, name: str, description: str, read_value: Callable[[], float]) -> None:
        """Add a gauge. `render` calls `read_value` for its value."""
        Gauge(name, description, registry=self._registry).set_function(read_value)

    def render(self) -> str:
        """Return all metrics in the text format of Prometheus."""
        return prometheus_client.generate_latest(self._registry).decode()


@dataclass(frozen=True)
class _CallbackCounter(Collector):
    """A counter whose value a function returns."""

    name: str
    description: str
    read_value: Callable[[], float]

    def collect(self) -> Iterator[CounterMetricFamily]:
        """See `Collector`."""
        yield CounterMetricFamily(self.name, self.description, value=self.read_value())


def log_access(fields: dict[str, Any]) -> None:
    """Write one JSON line about a request to the access log. Escapes unprintable characters."""
    line = json.dumps(fields, ensure_ascii=False, default=str)
    if not line.isprintable():
        line = "".join(map(_escape_unprintable, line))
    access_log.info("%s", line)


def _escape_unprintable(character: str) -> str:
    """Return an unprintable character as a JSON escape, such as \\u2028, and others unchanged."""
    if character.isprintable():
        return character
    return json.dumps(character)[1:-1]  # without quotes


class OncePerMinute(logging.Filter):
    """Drops records that the same line of code logged less than a minute ago."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[tuple[str, int], float] = {}  # keyed by file and line of the code

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record. See `logging.Filter`."""
        code_line = (record.pathname, record.lineno)
        if record.created - self._logged_at.get(code_line, 0.0) < _SECONDS_BETWEEN_RECORDS:
            return False
        self._logged_at[code_line] = record.created
        return True
