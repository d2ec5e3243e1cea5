"""Cut a stream of lines into windows and encode them.

The lines of a window are sorted by length and translated together, so that memory does not grow
with the length of the input. Where a window ends depends only on the lines: a job that is resumed
after a kill has the same windows again.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from nmt.config import TooLong
from nmt.data.languages import Tags, encode_sources, encode_starts
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ConfigError, DataError
from nmt.translate.batch_search import Segment
from nmt.translate.long_lines import split_line
from nmt.translate.options import LineOptions

WINDOW_LINES = 2048
_FIRST_LINES = 64  # of the first window of a stream
_MAX_CHARACTERS = 1 << 21  # a window ends with the line that exceeds them


@dataclass(frozen=True)
class Window:
    """Lines that are translated together."""

    first_line: int  # number of lines before the window
    lines: list[str]
    prefixes: list[str] | None = None  # texts that the translations start with
    context: tuple[str, ...] = ()  # the lines before the window that its lines may need
    num_bytes: int = 0  # of the input, up to the end of the window
    sha256: str = ""  # of the input and the prefixes, up to the end of the window

    @property
    def next_line(self) -> int:
        """The number of lines up to the end of the window."""
        return self.first_line + len(self.lines)


class WindowReader:
    """Reads lines and yields them in windows; counts and hashes the lines it has read.

    Args:
        lines: the lines of the input, without their ends.
        prefixes: one text for each line that its translation starts with.
        window_lines: maximum number of lines of a window.
        context: number of preceding lines that a window gets.
        has_more: says whether another line can be read now. It is given for a stream: there a
            window ends when no further line is waiting, and the first windows are small and
            double in size, so that output starts soon.
    """

    def __init__(
        self,
        lines: Iterable[str],
        prefixes: Iterable[str] | None = None,
        *,
        window_lines: int = WINDOW_LINES,
        context: int = 0,
        has_more: Callable[[], bool] | None = None,
    ) -> None:
        self.num_lines = 0
        self.num_bytes = 0
        self._lines = iter(lines)
        self._prefixes = None if prefixes is None else iter(prefixes)
        self._window_lines = window_lines
        self._context: deque[str] = deque(maxlen=context)
        self._has_more = has_more
        self._line_hash = hashlib.sha256()
        self._prefix_hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """The fingerprint of the lines and prefixes that have been read."""
        return self._line_hash.hexdigest() + self._prefix_hash.hexdigest()

    def skip(self, num_lines: int | None) -> None:
        """Read `num_lines` lines and their prefixes, or fewer if the input ends; None: all."""
        for line in islice(self._lines, num_lines):
            self._count(line)
            self._context.append(line)
            self._read_prefixes(1)

    def __iter__(self) -> Iterator[Window]:
        """Yield windows from the current line on.

        Raises `DataError` when the numbers of prefixes and lines differ.
        """
        while True:
            first_line = self.num_lines
            lines = self._read_lines()
            prefixes = self._read_prefixes(max(len(lines), 1))
            if prefixes is not None and len(prefixes) != len(lines):
                difference = "fewer" if len(prefixes) < len(lines) else "more"
                raise DataError(
                    f"there are {difference} prefixes than lines; give one line for each"
                )
            if not lines:
                return
            context = tuple(self._context)
            yield Window(first_line, lines, prefixes, context, self.num_bytes, self.sha256)
            self._context.extend(lines)

    def _read_lines(self) -> list[str]:
        """Read the lines of the next window."""
        end = (self.num_lines // self._window_lines + 1) * self._window_lines
        if self._has_more is not None and self.num_lines < self._window_lines:
            end = min(end, self.num_lines + max(self.num_lines, _FIRST_LINES))
        lines: list[str] = []
        num_characters = 0
        for line in self._lines:
            self._count(line)
            lines.append(line)
            num_characters += len(line)
            if self.num_lines == end or num_characters > _MAX_CHARACTERS:
                break
            if self._has_more is not None and not self._has_more():
                break
        return lines

    def _read_prefixes(self, num_prefixes: int) -> list[str] | None:
        if self._prefixes is None:
            return None
        prefixes = list(islice(self._prefixes, num_prefixes))
        for prefix in prefixes:
            self._prefix_hash.update(prefix.encode("utf-8") + b"\n")
        return prefixes

    def _count(self, line: str) -> None:
        data = line.encode("utf-8") + b"\n"
        self._line_hash.update(data)
        self.num_lines += 1
        self.num_bytes += len(data)


def check_lines(name: str, lines: Iterable[str]) -> Iterator[str]:
    """Return an iterator over `lines`.

    Raises a `ConfigError` for a single text, whose characters would count as lines. Raises a
    `TypeError` for an item that is not a text when the iterator reaches it.
    """
    if isinstance(lines, str):
        raise ConfigError(f"{name} is one text; give a list of lines, such as [text]")
    if not isinstance(lines, Iterable):
        raise TypeError(f"{name}={lines!r}: give a list of texts, or any iterable of them")

    def iterate() -> Iterator[str]:
        for i, line in enumerate(lines):
            if not isinstance(line, str):
                rule = f"must be a text (str), not {type(line).__name__}"
                raise TypeError(f"{name}[{i}]={line!r}: {rule}")
            yield line

    return iterate()


@dataclass(frozen=True)
class EncodedWindow:
    """A window with the token ids of its lines."""

    window: Window
    segments: list[list[Segment]]  # of each line: none if it is empty, several if it is long
    num_truncated: list[int]  # tokens that were removed from the end of each line


def encode_window(window: Window, tokenizer: Tokenizers, options: LineOptions) -> EncodedWindow:
    """Encode the lines of a window; split or truncate those that are too long.

    A prefix applies to the first segment of its line. Raises `DataError` for a line that is too
    long with `too_long=error`.
    """
    max_tokens = options.max_source_length - 1  # without EOS
    tags = options.tags
    rows = encode_sources(tokenizer.src, window.lines, tags, first_line=window.first_line)
    prefixes = window.prefixes or [""] * len(rows)
    line_starts = encode_starts(tokenizer.tgt, prefixes, tags.tgt)
    [segment_start] = encode_starts(tokenizer.tgt, [""], tags.tgt)
    segments = []
    num_truncated = [0] * len(rows)
    for i, ids in enumerate(rows):
        segment_ids = [ids] if ids else []
        if len(ids) > max_tokens:
            if options.too_long is TooLong.error:
                raise DataError(
                    f"line {window.first_line + i + 1} has {len(ids)} tokens, more than "
                    f"max_source_length={max_tokens + 1} allows with the end of the sentence; "
                    "shorten it, or set too_long=split"
                )
            if options.too_long is TooLong.truncate:
                segment_ids = [ids[:max_tokens]]
                num_truncated[i] = len(ids) - max_tokens
            else:
                segment_ids = _split_tagged(window.lines[i], max_tokens, tokenizer.src, tags)
        starts = [line_starts[i]] + [segment_start] * (len(segment_ids) - 1)
        pairs = zip(segment_ids, starts, strict=False)
        segments.append([Segment(source_ids, start) for source_ids, start in pairs])
    return EncodedWindow(window, segments, num_truncated)


def _split_tagged(line: str, max_tokens: int, tokenizer: Tokenizer, tags: Tags) -> list[list[int]]:
    """Return the ids of the segments of a line, each with the tag that the line begins with."""
    for tag in tags.choices:
        if line.startswith(tag):
            line = line.removeprefix(tag)
            tags = Tags(tag)
            break
    return split_line(line, max_tokens, partial(encode_sources, tokenizer, tags=tags))
