"""Cut a stream of lines into windows and encode them.

The lines of a window are sorted by length and translated together. Memory holds one or two windows,
however long the input is. Windows depend only on the lines, so a job that resumes after a kill gets
the same windows again.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from nmt.config import TooLong
from nmt.data.languages import (
    Tags,
    encode_sources,
    encode_starts,
    split_tag,
    tag_lines,
)
from nmt.data.terminology import remove_unfinished_hint
from nmt.data.tokenizer import Tokenizer, Tokenizers, refuse_surrogates
from nmt.errors import ConfigError, DataError
from nmt.search.glossary import load_glossary
from nmt.search.protect import find_protected, has_only_protected, protected_spans
from nmt.translate.batch_search import Segment
from nmt.translate.copied import has_no_words
from nmt.translate.long_lines import FindSpans, split_line
from nmt.translate.options import LineOptions
from nmt.translate.recasing import find_case, to_sentence_case

WINDOW_LINES = 2048
_FIRST_WINDOW_LINES = 64  # number of lines of the first window of a stream
_MAX_CHARACTERS = 1 << 21  # a window ends with the line that exceeds this


@dataclass(frozen=True)
class Window:
    """Lines that are translated together."""

    first_line: int  # number of lines before the window
    lines: list[str]
    prefixes: list[str] | None = None  # text that the translation of each line starts with
    context: tuple[str, ...] = ()  # lines directly before the window
    num_bytes: int = 0  # size of the input up to the end of the window
    sha256: str = ""  # hash of the input and the prefixes up to the end of the window

    @property
    def next_line(self) -> int:
        """Number of the first line after the window."""
        return self.first_line + len(self.lines)


class WindowReader:
    """Iterates over the lines of an input in windows; counts and hashes the lines read so far.

    Args:
        lines: the lines of the input, without line ends.
        prefixes: for each line, the text that its translation starts with.
        window_lines: maximum number of lines of a window.
        context: number of lines before a window to include in `Window.context`.
        has_more: for a stream, returns whether another line can be read without waiting. A window
            ends where this is False. The first windows of a stream are small and double in size, so
            that output starts soon.
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
        """Two hashes, one after the other: of the lines and of the prefixes read so far."""
        return self._line_hash.hexdigest() + self._prefix_hash.hexdigest()

    def skip(self, num_lines: int | None) -> None:
        """Read `num_lines` lines (None: all) and their prefixes, or fewer if the input ends."""
        for line in islice(self._lines, num_lines):
            self._add_to_hash(line)
            self._context.append(line)
            self._read_prefixes(1)

    def __iter__(self) -> Iterator[Window]:
        """Yield windows from the current line on.

        Raises `DataError` when the numbers of prefixes and lines differ.
        """
        while True:
            first_line = self.num_lines
            lines = self._read_lines()
            # after the last line, read one prefix, since a further prefix is an error
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
        # Windows end at multiples of their size. If a job resumes after part of a window, the first
        # window is the remaining part.
        end_line = (self.num_lines // self._window_lines + 1) * self._window_lines
        if self._has_more is not None and self.num_lines < self._window_lines:
            # as many lines as all windows before together
            num_new_lines = max(self.num_lines, _FIRST_WINDOW_LINES)
            end_line = min(end_line, self.num_lines + num_new_lines)
        lines: list[str] = []
        num_characters = 0
        for line in self._lines:
            self._add_to_hash(line)
            lines.append(line)
            num_characters += len(line)
            if self.num_lines == end_line or num_characters > _MAX_CHARACTERS:
                break
            if self._has_more is not None and not self._has_more():
                break
        return lines

    def _read_prefixes(self, num_prefixes: int) -> list[str] | None:
        """Read and hash prefixes, fewer if the input ends; return None without prefixes."""
        if self._prefixes is None:
            return None
        prefixes = list(islice(self._prefixes, num_prefixes))
        for prefix in prefixes:
            self._prefix_hash.update(_to_bytes(prefix))
        return prefixes

    def _add_to_hash(self, line: str) -> None:
        """Hash and count a line that was read."""
        data = _to_bytes(line)
        self._line_hash.update(data)
        self.num_lines += 1
        self.num_bytes += len(data)


def _to_bytes(line: str) -> bytes:
    """Return a line in UTF-8; raise `DataError` if it has half of a surrogate pair."""
    try:
        return line.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        refuse_surrogates([line])
        raise


def check_lines(name: str, lines: Iterable[str]) -> Iterator[str]:
    """Return an iterator over `lines` that checks the type of each one.

    `name` is the argument in messages. Raises a `ConfigError` at once for a single text, which
    would be iterated by character, and a `TypeError` when the iterator reaches an item that is not
    a text.
    """
    if isinstance(lines, str):
        raise ConfigError(f"{name} is one text; give a list of lines, such as [text]")
    if not isinstance(lines, Iterable):
        raise TypeError(f"{name}={lines!r}: give a list of texts, or any iterable of them")

    def checked_lines() -> Iterator[str]:
        for i, line in enumerate(lines):
            if not isinstance(line, str):
                rule = f"must be a text (str), not {type(line).__name__}"
                raise TypeError(f"{name}[{i}]={line!r}: {rule}")
            yield line

    return checked_lines()


@dataclass(frozen=True)
class EncodedWindow:
    """A window with the token ids of its lines."""

    window: Window
    segments: list[list[Segment]]  # one list per line: empty if the line is empty or copied
    num_truncated: list[int]  # number of tokens removed from the end of each line
    texts: list[str]  # the lines as they are translated: recased, but not split or truncated
    cases: list[str]  # the case for the translation of each line, see `find_case`
    copied: list[str]  # the text of each line that is copied instead of translated, else ""
    has_hints: bool = False  # whether `segments` contain hints of a glossary; `texts` never do


def encode_window(window: Window, tokenizer: Tokenizers, options: LineOptions) -> EncodedWindow:
    """Encode the lines of a window; split or truncate lines that are too long.

    The prefix of a line applies to its first segment. With `too_long=error`, raises a `DataError`
    for a line that is too long.
    """
    max_tokens = options.max_source_length - 1  # one is left for EOS
    tags = options.tags
    prefixes = window.prefixes or [""] * len(window.lines)
    lines = list(window.lines)
    cases = [""] * len(lines)
    copied = [""] * len(lines)
    glossary = load_glossary(options.hints or options.required_terms)
    for i, line in enumerate(window.lines):
        tag, text = split_tag(line, tags)
        if not text.strip():  # also a line with only a tag is empty
            lines[i] = ""
        if prefixes[i]:  # the translation has to continue the prefix as the user wrote it
            continue
        if options.copy_symbols and is_copied(text, protect=options.protect):
            copied[i] = text
        if options.recase:
            cases[i] = choose_case(text, protect=options.protect)
        if cases[i]:
            recased = glossary.keep_case(text, to_sentence_case(text))
            [lines[i]] = tag_lines([recased], tag)
    hint_glossary = load_glossary(options.hints)

    def add_hints(texts: Sequence[str]) -> Sequence[str]:
        return [hint_glossary.add_hints(text) for text in texts]

    line_ids = encode_sources(tokenizer.src, add_hints(lines), tags, first_line=window.first_line)
    # For lines without a prefix of the user, and for all segments of a line but the first. Empty
    # if the model needs no tag.
    [tag_prefix] = encode_starts(tokenizer.tgt, [""], tags.tgt)
    line_prefixes = [tag_prefix] * len(lines)
    if window.prefixes:
        line_prefixes = encode_starts(tokenizer.tgt, window.prefixes, tags.tgt)
    segments = []
    num_truncated = [0] * len(line_ids)
    for i, ids in enumerate(line_ids):
        segment_sources = [ids] if ids and not copied[i] else []  # ids of each segment
        if len(ids) > max_tokens and not copied[i]:
            if options.too_long is TooLong.error:
                raise DataError(
                    f"line {window.first_line + i + 1} has {len(ids)} tokens, more than "
                    f"max_source_length={max_tokens + 1} allows, which counts EOS; "
                    "shorten it, or set too_long=split"
                )
            if options.too_long is TooLong.truncate:
                kept_ids = ids[:max_tokens]
                if hint_glossary.lines:
                    kept_ids = remove_unfinished_hint(kept_ids, tokenizer.src)
                segment_sources = [kept_ids]
                num_truncated[i] = len(ids) - len(kept_ids)
            else:
                find_spans = partial(_find_spans, options=options)
                segment_sources = _split_tagged(
                    lines[i], max_tokens, tokenizer.src, tags, add_hints, find_spans
                )
        line_segments = []
        for number, source_ids in enumerate(segment_sources):
            is_continuation = number > 0
            prefix = tag_prefix if is_continuation else line_prefixes[i]
            line_segments.append(Segment(source_ids, prefix, is_continuation))
        segments.append(line_segments)
    return EncodedWindow(
        window, segments, num_truncated, lines, cases, copied, has_hints=bool(hint_glossary.lines)
    )


def is_copied(line: str, *, protect: bool) -> bool:
    """Return whether to copy a line, with `copy_symbols`: one without words.

    With `protect`, placeholders and tags do not count as words.
    """
    return has_no_words(line) or (protect and has_only_protected(line))


def choose_case(line: str, *, protect: bool) -> str:
    """Return the case of the translation of a line, see `find_case`.

    With `protect`, a line with placeholders, tags or addresses stays as it is.
    """
    return "" if protect and find_protected(line) else find_case(line)


def _find_spans(text: str, options: LineOptions) -> list[range]:
    """Return the terms of the glossary and, with `protect`, the placeholders and addresses.

    Spans that overlap become one.
    """
    spans = load_glossary(options.hints or options.required_terms).find_spans(text)
    if options.protect:
        spans += protected_spans(text)
    merged: list[range] = []
    for span in sorted(spans, key=lambda span: span.start):
        if merged and span.start < merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged


def _split_tagged(
    line: str,
    max_tokens: int,
    tokenizer: Tokenizer,
    tags: Tags,
    add_hints: Callable[[Sequence[str]], Sequence[str]],
    find_spans: FindSpans,
) -> list[list[int]]:
    """Split a line and return the ids of its segments, with hints.

    If the line begins with one of `tags.choices`, each segment gets that tag.
    """
    tag, text = split_tag(line, tags)
    segment_tags = Tags(tag) if tag else tags

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return encode_sources(tokenizer, add_hints(texts), segment_tags)

    return split_line(text, max_tokens, encode, find_spans)
