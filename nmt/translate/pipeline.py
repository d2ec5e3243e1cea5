"""From a stream of lines to the bytes of the output, window by window."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nmt.config import OutputFormat, SearchConfig
from nmt.translate.job import Counts, Digest
from nmt.translate.output import to_line
from nmt.translate.results import LineResult
from nmt.translate.shards import Shard
from nmt.translate.translator import LineOptions, Translator
from nmt.translate.windows import Window, cut_windows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """The output of one window, and where the input stands after it."""

    data: bytes
    lines: int  # of the input
    sha256: str  # of those lines
    read_bytes: int
    counts: Counts  # of this window


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How a stream is translated and written."""

    translator: Translator
    search: SearchConfig
    options: LineOptions
    output_format: OutputFormat
    window_lines: int
    shard: Shard

    def chunks(
        self,
        source: Digest,
        *,
        first_line: int = 0,
        small_first: bool = False,
        has_more: Callable[[], bool],
    ) -> Iterator[Chunk]:
        """Translate the windows of this process, in order; `source` stands at `first_line`.

        For `small_first` and `has_more` see `cut_windows`.
        """
        marks: deque[tuple[str, int]] = deque()  # filled by the thread that reads
        windows = cut_windows(
            source.lines,
            source.prefixes,
            window_lines=self.window_lines,
            first_line=first_line,
            small_first=small_first,
            has_more=has_more,
        )

        def own() -> Iterator[Window]:
            for window in windows:
                if self.shard.owns(window.first_line, self.window_lines):
                    marks.append((source.sha256, source.num_bytes))
                    yield window

        translated = self.translator.translate_windows(
            own(), self.search, self.options, with_prefixes=source.prefixes is not None
        )
        for window, results in translated:
            data = b"".join(
                to_line(result, window.first_line + i, self.output_format)
                for i, result in enumerate(results)
            )
            counts = _count(results, window.first_line)
            yield Chunk(data, window.next_line, *marks.popleft(), counts)


def _count(results: Sequence[LineResult], first_line: int) -> Counts:
    """Count what is to be known of a window's lines, and name those that failed."""
    for i, result in enumerate(results):
        if result.error is not None:
            log.warning(
                "line %d cannot be translated and becomes empty: %s",
                first_line + i + 1,
                result.error,
            )
    return Counts(
        failed=sum(result.error is not None for result in results),
        met_limit=sum(result.is_cut for result in results),
        too_long=sum(result.num_parts > 1 or result.num_left_out > 0 for result in results),
    )
