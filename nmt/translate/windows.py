"""Divide the lines of an input into windows, and encode windows.

The lines of a window are sorted by length and translated together. However long the input is,
memory holds up to three windows. Windows depend only on the lines, so that a job that resumes after
a kill reads the same windows.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from nmt.config import TooLong
from nmt.data.hints import remove_unfinished_hint
from nmt.data.languages import (
    Tags,
    encode_sources,
    encode_tag,
    encode_target_prefixes,
    split_tag,
)
from nmt.data.tokenizer import Tokenizer, Tokenizers, refuse_surrogates
from nmt.errors import ConfigError, DataError
from nmt.search.glossary import load_glossary
from nmt.search.protect import protected_spans
from nmt.translate.batch_search import Segment
from nmt.translate.long_lines import split_line
from nmt.translate.options import LineOptions
from nmt.translate.prepared_lines import PreparedLine, prepare_line

WINDOW_LINES = 2048
_FIRST_WINDOW_LINES = 64  # maximum number of lines of the first window of a stream
_MAX_CHARACTERS = 1 << 21  # a window ends after the line that exceeds this number of characters


@dataclass(frozen=True)
class Window:
    """Lines that are translated together."""

    first_line: int  # index in the input of the first line of the window
    lines: list[str]
    prefixes: list[str] | None = None  # text that the translation of each line starts with
    context: tuple[str, ...] = ()  # lines directly before the window
    num_bytes: int = 0  # size of the input up to the end of the window
    sha256: str = ""  # hashes of the lines and the prefixes up to the end of the window

    @property
    def next_line(self) -> int:
        """Index in the input of the first line after the window."""
        return self.first_line + len(self.lines)


class WindowReader:
    """Iterates over an input in windows; counts and hashes the lines that it has read.

    Args:
        lines: the lines of the input, without line ends.
        prefixes: for each line, the text that its translation starts with.
        window_lines: maximum number of lines of a window.
        context: maximum number of lines in `Window.context`.
        has_more: for a stream, returns whether another line can be read without waiting. If not,
            the window ends. The first windows of a stream are small and double in size, so that
            output starts soon.
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
        """The hash of the lines read so far, followed by the hash of the prefixes."""
        return self._line_hash.hexdigest() + self._prefix_hash.hexdigest()

    def skip(self, num_lines: int | None) -> None:
        """Read `num_lines` lines (None: all) and their prefixes, or fewer if the input ends."""
        for line in islice(self._lines, num_lines):
            self._count_and_hash(line)
            self._context.append(line)
            self._read_prefixes(1)

    def __iter__(self) -> Iterator[Window]:
        """Yield windows from the current line on.

        Raises `DataError` if the numbers of prefixes and lines differ.
        """
        while True:
            first_line = self.num_lines
            lines = self._read_lines()
            # when no line is left, try to read one more prefix, to notice if there are too many
            num_prefixes = max(len(lines), 1)
            prefixes = self._read_prefixes(num_prefixes)
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
        # Windows end at multiples of their size. A job that resumes within a window continues with
        # the remaining part of the window.
        window_index = self.num_lines // self._window_lines
        end_line = (window_index + 1) * self._window_lines
        if self._has_more is not None and window_index == 0:
            # Each window of a stream has as many lines as all windows before it: 64, 64, 128, ...
            num_new_lines = max(self.num_lines, _FIRST_WINDOW_LINES)
            end_line = min(end_line, self.num_lines + num_new_lines)
        lines: list[str] = []
        num_characters = 0
        for line in self._lines:
            self._count_and_hash(line)  # adds 1 to `num_lines`
            lines.append(line)
            num_characters += len(line)
            if self.num_lines == end_line or num_characters > _MAX_CHARACTERS:
                break
            if self._has_more is not None and not self._has_more():
                break
        return lines

    def _read_prefixes(self, num_prefixes: int) -> list[str] | None:
        """Read up to `num_prefixes` prefixes, and hash them; return None without prefixes."""
        if self._prefixes is None:
            return None
        prefixes = list(islice(self._prefixes, num_prefixes))
        for prefix in prefixes:
            self._prefix_hash.update(_to_bytes(prefix))
        return prefixes

    def _count_and_hash(self, line: str) -> None:
        """Count a line that was read, and add it to the hash."""
        data = _to_bytes(line)
        self._line_hash.update(data)
        self.num_lines += 1
        self.num_bytes += len(data)


def _to_bytes(line: str) -> bytes:
    """Return a line in UTF-8; raise `DataError` if it has half of a surrogate pair."""
    try:
        return line.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        refuse_surrogates([line])  # raises a `DataError` with the position
        raise


def check_lines(name: str, lines: Iterable[str]) -> Iterator[str]:
    """Return an iterator over `lines` that raises a `TypeError` for an item that is not a text.

    `name` is the name of the argument in messages. Raises a `ConfigError` at once if `lines` is a
    single text, whose items would be its characters.
    """
    if isinstance(lines, str):
        raise ConfigError(f"{name} is one text; give a list of lines, such as [text]")
    if not isinstance(lines, Iterable):
        raise TypeError(f"{name}={lines!r}: give a list of texts, or any iterable of them")

    def checked_lines() -> Iterator[str]:
        for i, line in enumerate(lines):
            if not isinstance(line, str):
                problem = f"must be a text (str), not {type(line).__name__}"
                raise TypeError(f"{name}[{i}]={line!r}: {problem}")
            yield line

    return checked_lines()


@dataclass(frozen=True)
class EncodedWindow:
    """A window with the token ids of its lines."""

    window: Window
    segments: list[list[Segment]]  # one list per line: empty if the line is empty or copied
    num_truncated: list[int]  # number of tokens removed from the end of each line
    lines: list[PreparedLine]  # prepared, before long ones are split or truncated
    num_target_tag_tokens: int  # number of tokens of the tag that all translations begin with
    has_hints: bool = False  # whether `segments` may contain hints of a glossary


def encode_window(window: Window, tokenizers: Tokenizers, options: LineOptions) -> EncodedWindow:
    """Encode the lines of a window; split or truncate lines that are too long.

    The prefix of a line applies to its first segment. With `too_long=error`, raises a `DataError`
    for a line that is too long.
    """
    tags = options.tags
    prefixes = window.prefixes or [""] * len(window.lines)
    prepared_lines = []
    for line, prefix in zip(window.lines, prefixes, strict=True):
        prepared_line = prepare_line(line, options, tokenizers.src, has_prefix=bool(prefix))
        prepared_lines.append(prepared_line)
    texts = [prepared_line.text for prepared_line in prepared_lines]
    encoder = _SourceEncoder(tokenizers.src, options)
    line_ids = encoder.encode(texts, tags, first_line=window.first_line)
    # a translation starts with the tag, if there is one, and then with the prefix of the user
    tag_ids = encode_tag(tokenizers.tgt, tags.tgt)
    line_prefixes = [tag_ids] * len(texts)
    if window.prefixes:
        line_prefixes = encode_target_prefixes(tokenizers.tgt, window.prefixes, tags.tgt)
    segments = []
    num_truncated = [0] * len(line_ids)
    for i, ids in enumerate(line_ids):
        segment_ids = []
        if ids:
            segment_ids = encoder.divide(texts[i], ids, line_number=window.first_line + i + 1)
            if options.too_long is TooLong.truncate:
                [remaining_ids] = segment_ids  # a truncated line is a single segment
                num_truncated[i] = len(ids) - len(remaining_ids)
        line_segments = []
        for segment_index, source_ids in enumerate(segment_ids):
            is_continuation = segment_index > 0
            prefix_ids = tag_ids if is_continuation else line_prefixes[i]
            line_segments.append(Segment(source_ids, prefix_ids, is_continuation))
        segments.append(line_segments)
    return EncodedWindow(
        window,
        segments,
        num_truncated,
        prepared_lines,
        num_target_tag_tokens=len(tag_ids),
        has_hints=bool(options.hints),
    )


class _SourceEncoder:
    """Encodes lines with the hints of a glossary, and divides lines that are too long."""

    def __init__(self, tokenizer: Tokenizer, options: LineOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._max_tokens = options.max_source_length - 1  # without EOS
        self._hint_glossary = load_glossary(options.hints)

    def encode(self, lines: Sequence[str], tags: Tags, first_line: int = 0) -> list[list[int]]:
        """Return the ids of each line with its hints; see `encode_sources`."""
        hinted_lines = [self._hint_glossary.add_hints(line) for line in lines]
        return encode_sources(self._tokenizer, hinted_lines, tags, first_line=first_line)

    def divide(self, line: str, ids: list[int], *, line_number: int) -> list[list[int]]:
        """Return the ids of each segment of a line, given the ids of the whole line.

        `line_number` counts from 1, for error messages.
        """
        if len(ids) <= self._max_tokens:
            return [ids]
        if self._options.too_long is TooLong.error:
            raise DataError(
                f"line {line_number} has {len(ids)} tokens and EOS, more than "
                f"max_source_length={self._max_tokens + 1} allows; shorten it, or set "
                "too_long=split"
            )
        if self._options.too_long is TooLong.split:
            return self._split(line)
        truncated_ids = ids[: self._max_tokens]
        if self._options.hints:
            truncated_ids = remove_unfinished_hint(truncated_ids, self._tokenizer)
        return [truncated_ids]

    def _split(self, line: str) -> list[list[int]]:
        """Split a line, and return the ids of its segments.

        If the line begins with one of `tags.src_choices`, each segment gets that tag.
        """
        tag, text = split_tag(line, self._options.tags)
        segment_tags = self._options.tags
        if tag:
            segment_tags = Tags(src=tag)
        encode = partial(self.encode, tags=segment_tags)
        return split_line(text, self._max_tokens, encode, self._find_undivided_spans)

    def _find_undivided_spans(self, text: str) -> list[range]:
        """Return the spans in which a text is not divided.

        These are the terms of the glossary and, with `protect`, placeholders, tags and addresses.
        Spans that overlap are merged.
        """
        options = self._options
        spans = load_glossary(options.hints or options.required_terms).find_spans(text)
        if options.protect:
            spans += protected_spans(text)
        merged: list[range] = []
        for span in sorted(spans, key=lambda span: span.start):
            if merged and span.start < merged[-1].stop:
                previous = merged[-1]
                merged[-1] = range(previous.start, max(previous.stop, span.stop))
            else:
                merged.append(span)
        return merged
