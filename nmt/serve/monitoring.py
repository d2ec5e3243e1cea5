"""Counters and histograms in Prometheus' text format, and the access log."""

from __future__ import annotations

import bisect
import json
import logging
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from typing import Any

access_log = logging.getLogger("nmt.access")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Counter:
    """A number that only grows, one for each set of labels."""

    def __init__(self, name: str, help: str, *labels: str) -> None:
        self.name, self.help, self._labels = name, help, labels
        self._values: Tally[tuple[str, ...]] = Tally()
        if not labels:
            self._values[()] = 0

    def add(self, amount: float = 1, *values: str) -> None:
        """Add to the number with those values of the labels."""
        self._values[values] += amount  # type: ignore[assignment]

    def lines(self) -> Iterator[str]:
        """Yield it as Prometheus reads it."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} counter"
        for values, amount in sorted(self._values.items()):
            labels = ",".join(
                f'{label}="{value}"' for label, value in zip(self._labels, values, strict=True)
            )
            yield f"{self.name}{{{labels}}} {amount}" if labels else f"{self.name} {amount}"


class Histogram:
    """How many of the values seen are at most so large, for fixed bounds."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name, self.help, self._bounds = name, help, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        """Yield it as Prometheus reads it."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} histogram"
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{bound}"}} {total}'
        yield f"{self.name}_sum {self._sum}"
        yield f"{self.name}_count {total}"


class Metrics:
    """What the server counts."""

    def __init__(self) -> None:
        self.requests = Counter(
            "nmt_requests_total", "Requests answered.", "method", "route", "status"
        )
        self.characters = Counter("nmt_characters_total", "Characters of texts to translate.")
        self.sentences = Counter("nmt_sentences_total", "Sentences translated.")
        self.failed_sentences = Counter(
            "nmt_failed_sentences_total", "Sentences that the model failed with."
        )
        self.source_tokens = Counter("nmt_source_tokens_total", "Source tokens, EOS counted.")
        self.engine_seconds = Counter("nmt_engine_seconds_total", "Time the engine was busy.")
        self.refused = Counter("nmt_refused_total", "Requests refused, by reason.", "reason")
        self.disconnects = Counter("nmt_disconnects_total", "Clients that did not wait.")
        self.reloads = Counter("nmt_reloads_total", "Reloads of the models.", "result")
        self.batch_sentences = Histogram("nmt_batch_sentences", "Sentences of a round.", _SIZES)
        self.queue_seconds = Histogram(
            "nmt_queue_seconds", "Time until the engine took a request's first part.", _SECONDS
        )
        self.request_seconds = Histogram(
            "nmt_request_seconds", "Time to answer a request that translates.", _SECONDS
        )
        self.started = time.time()
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a number that is read when somebody asks."""
        self._gauges[name] = (help, read)

    def render(self) -> str:
        """Return everything as Prometheus reads it."""
        kinds = [kind for kind in vars(self).values() if isinstance(kind, (Counter, Histogram))]
        lines = [line for kind in kinds for line in kind.lines()]
        lines += ["# TYPE nmt_start_time_seconds gauge", f"nmt_start_time_seconds {self.started}"]
        for name, (help, read) in self._gauges.items():
            lines += [f"# HELP {name} {help}", f"# TYPE {name} gauge", f"{name} {read()}"]
        return "\n".join(lines) + "\n"


def log_access(fields: dict[str, Any]) -> None:
    """Write one JSON line about a request."""
    access_log.info("%s", json.dumps(fields, ensure_ascii=False, default=str))
