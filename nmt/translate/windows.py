"""Cuts a stream of lines into windows that are translated at a time, so that memory does not grow
with its length, and a window into segments: token ids of lines, or of parts of long ones.

Where a window ends depends on the lines alone, so that a job that is resumed after a kill, or is
shared by several processes, finds the same windows again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from nmt.config import TooLong, require
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError, DataError
from nmt.translate.long_lines import split_line

WINDOW_LINES = 2048
MAX_SOURCE_LENGTH = 256
"""Tokens; what `nmt-preprocess` keeps of training text by default, EOS included."""
_FIRST_LINES = 64
_MAX_CHARACTERS = 1 << 21  # a window ends with the line that goes beyond
_LEAST_SOURCE_LENGTH = 8  # a character is at most 4 bytes, each a token at worst
T = TypeVar("T")


@dataclass(frozen=True)
class Window:
    """Lines that are translated together."""

    first_line: int  # lines before these
    lines: list[str]
    prefixes: list[str] | None  # forced starts of their translations
    sha256: str = ""  # of the input up to the end of the window, where somebody asks for it
    read_bytes: int = 0  # of the input up to there

    @property
    def next_line(self) -> int:
        """The lines that are done when this window is."""
        return self.first_line + len(self.lines)


def cut_windows(
    lines: Iterable[str],
    prefixes: Iterable[str] | None = None,
    *,
    window_lines: int = WINDOW_LINES,
    first_line: int = 0,
    small_first: bool = True,
    has_more: Callable[[], bool] = lambda: True,
) -> Iterator[Window]:
    """Yield the windows of a stream whose first line is number `first_line`.

    With `small_first` the first windows are small and double, so that results come soon; larger
    ones hold less padding. `has_more` says whether a line waits to be read; where none does, the
    window ends. Raises `DataError` when there are not as many prefixes as lines.
    """
    stream = iter(lines)
    forced = None if prefixes is None else iter(prefixes)
    while True:
        end = (first_line // window_lines + 1) * window_lines
        if small_first and first_line < window_lines:
            end = min(first_line + max(first_line, _FIRST_LINES), window_lines)
        texts: list[str] = []
        room = _MAX_CHARACTERS
        for line in stream:
            texts.append(line)
            room -= len(line)
            if first_line + len(texts) == end or room < 0 or not has_more():
                break
        starts = None if forced is None else list(islice(forced, max(len(texts), 1)))
        if starts is not None and len(starts) != len(texts):
            few = "fewer" if len(starts) < len(texts) else "more"
            raise DataError(f"there are {few} prefixes than lines; give one line for each")
        if not texts:
            return
        yield Window(first_line, texts, starts)
        first_line += len(texts)


def check_lines(name: str, lines: Iterable[str]) -> Iterable[str]:
    """Return `lines`; raise a `ConfigError` for a single text, whose characters they would be."""
    if isinstance(lines, str):
        raise ConfigError(f"{name} is one text; give a list of lines, such as [text]")
    return lines


@dataclass(frozen=True, kw_only=True)
class LineOptions:
    """How lines go through the model; none of this changes what a sentence becomes, but for those
    that are too long.
    """

    n_best: int = 1  # translations of a line, at most; no more than the beam size
    with_scores: bool = True  # without, those of some engines are missing, and nan
    max_tokens: int | None = None
    """Bound on a batch: rows * beam * longest source, EOS included; None is the engine's own."""
    too_long: TooLong = TooLong.split  # what happens to a line above max_source_length
    max_source_length: int = MAX_SOURCE_LENGTH  # tokens, EOS included

    def __post_init__(self) -> None:
        for key, least in (("max_tokens", 1), ("max_source_length", _LEAST_SOURCE_LENGTH)):
            value = getattr(self, key)
            require(value is None or value >= least, key, value, f"must be at least {least}")


@dataclass(frozen=True)
class Segment:
    """One line, or a part of a long one."""

    ids: list[int]  # of the source, without EOS, at least one
    prefix: list[int]  # target ids that the translation starts with; may be empty


@dataclass(frozen=True)
class EncodedWindow:
    """A window whose lines are token ids."""

    window: Window
    segments: list[list[Segment]]  # of each line: none for an empty one, several for a long one
    num_left_out: dict[int, int]  # tokens cut off, by place in the window


def encode_window(window: Window, tokenizer: Tokenizers, options: LineOptions) -> EncodedWindow:
    """Turn lines into ids, cut as `options` say; a forced prefix goes to the first segment.

    Raises `DataError` for a line that is too long under `too_long=error`.
    """
    lines, most = window.lines, options.max_source_length - 1
    segments: list[list[Segment]] = []
    num_left_out: dict[int, int] = {}
    prefixes = None if window.prefixes is None else tokenizer.tgt.encode_batch(window.prefixes)
    for i, ids in enumerate(tokenizer.src.encode_batch(lines)):
        parts = [ids] if ids else []
        if len(ids) > most:
            if options.too_long is TooLong.error:
                raise DataError(
                    f"line {window.first_line + i + 1} has {len(ids)} tokens, more than "
                    f"max_source_length={most + 1} allows with the end of the sentence; "
                    "shorten it, or set too_long=split"
                )
            if options.too_long is TooLong.truncate:
                parts, num_left_out[i] = [ids[:most]], len(ids) - most
            else:
                parts = split_line(lines[i], most, tokenizer.src.encode_batch)
        forced = prefixes[i] if prefixes is not None else []
        segments.append([Segment(part, [] if k else forced) for k, part in enumerate(parts)])
    return EncodedWindow(window, segments, num_left_out)


def prefetch(items: Iterable[T]) -> Iterator[T]:
    """Yield `items`, each made in a thread while the one before is worked on.

    What making one raises is raised here. At most one waits, and one is being made.
    """
    waiting: queue.Queue[tuple[T | None, BaseException | None] | None] = queue.Queue(maxsize=1)
    is_over = threading.Event()

    def fill() -> None:
        try:
            for item in items:
                waiting.put((item, None))
                if is_over.is_set():
                    return
            waiting.put(None)
        except BaseException as error:
            waiting.put((None, error))

    # a daemon: it may wait for a line that never comes when the reader of our output is gone
    threading.Thread(target=fill, daemon=True).start()
    try:
        while (found := waiting.get()) is not None:
            item, error = found
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        is_over.set()
        while not waiting.empty():  # a thread that waits to hand on its item goes on, and ends
            waiting.get_nowait()
