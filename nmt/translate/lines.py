"""Lines of text on their way to an engine and back.

A stream is cut into windows that are translated at a time, so that memory does not grow with its
length; a window into segments, token ids of lines or of parts of long ones; and their hypotheses
become the translations of lines, as text or JSON.

Where a window ends depends on the lines alone, so that a job that is resumed after a kill finds the
same windows again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any, TypeVar

from nmt.config import OutputFormat, TooLong, require
from nmt.data.languages import Tags, encode_sources, encode_starts
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ConfigError, DataError
from nmt.search.hypotheses import Hypothesis
from nmt.translate.batch_search import Failure, SearchResult, Segment
from nmt.translate.long_lines import join_parts, split_line

log = logging.getLogger(__name__)

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
    before: tuple[str, ...] = ()  # lines before the first one, where they are kept

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


class HashedInput:
    """Lines and their prefixes, with the number, bytes and SHA-256 of those read so far; a window
    has the last `context` lines before it.
    """

    def __init__(
        self, lines: Iterable[str], prefixes: Iterable[str] | None = None, context: int = 0
    ) -> None:
        self._last = deque[str](maxlen=context)
        self.num_lines = 0
        self.num_bytes = 0
        self._hashes = [hashlib.sha256(), hashlib.sha256()]  # of lines, of prefixes
        self._lines = self._read(lines, self._hashes[0])
        self._prefixes = None if prefixes is None else self._read(prefixes, self._hashes[1])

    @property
    def sha256(self) -> str:
        """The fingerprint of what has been read so far."""
        return "".join(digest.hexdigest() for digest in self._hashes)

    def skip(self, num_lines: int) -> None:
        """Read so many lines and their prefixes, or all there are."""
        for line in islice(self._lines, num_lines):
            self._last.append(line)
            if self._prefixes is not None:
                next(self._prefixes, None)

    def windows(
        self, window_lines: int, *, has_more: Callable[[], bool] | None = None
    ) -> Iterator[Window]:
        """Yield the windows from here on; to a stream, for which `has_more` is given, with
        `small_first`: see `cut_windows`.
        """
        for window in cut_windows(
            self._lines,
            self._prefixes,
            window_lines=window_lines,
            first_line=self.num_lines,
            small_first=has_more is not None,
            has_more=has_more or (lambda: True),
        ):
            before = tuple(self._last)
            yield replace(window, sha256=self.sha256, read_bytes=self.num_bytes, before=before)
            self._last.extend(window.lines)

    def _read(self, lines: Iterable[str], digest: Any) -> Iterator[str]:
        for line in lines:
            data = line.encode("utf-8") + b"\n"
            digest.update(data)
            if digest is self._hashes[0]:
                self.num_lines += 1
                self.num_bytes += len(data)
            yield line


def check_lines(name: str, lines: Iterable[str]) -> Iterator[str]:
    """Return `lines`; raise a `ConfigError` for a single text, whose characters they would be, and
    a `TypeError` for what is no text, once it is reached.
    """
    if isinstance(lines, str):
        raise ConfigError(f"{name} is one text; give a list of lines, such as [text]")
    if not isinstance(lines, Iterable):
        raise TypeError(f"{name}={lines!r}: give a list of texts, or any iterable of them")

    def checked() -> Iterator[str]:
        for i, line in enumerate(lines):
            if not isinstance(line, str):
                wanted = f"a text (str), not {type(line).__name__}"
                raise TypeError(f"{name}[{i}]={line!r}: must be {wanted}")
            yield line

    return checked()


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
    max_source_length: int = MAX_SOURCE_LENGTH  # tokens, EOS and tag included
    tags: Tags = Tags()  # noqa: RUF009  # immutable
    context: int = 0  # lines before each, at most, that it is translated with

    def __post_init__(self) -> None:
        for key, least in (("max_tokens", 1), ("max_source_length", _LEAST_SOURCE_LENGTH)):
            value = getattr(self, key)
            require(value is None or value >= least, key, value, f"must be at least {least}")


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
    lines, most, tags = window.lines, options.max_source_length - 1, options.tags
    segments: list[list[Segment]] = []
    num_left_out: dict[int, int] = {}
    encode = partial(encode_sources, tokenizer.src, tags=tags)
    [begin] = encode_starts(tokenizer.tgt, [""], tags.tgt)
    prefixes = encode_starts(tokenizer.tgt, window.prefixes or [""] * len(lines), tags.tgt)
    for i, ids in enumerate(encode(lines, first_line=window.first_line)):
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
                tag = next(filter(lines[i].startswith, tags.choices), "")  # of every part
                own = partial(encode_sources, tokenizer.src, tags=Tags(tag)) if tag else encode
                parts = split_line(lines[i].removeprefix(tag), most, own)
        forced = [prefixes[i], *[begin] * len(parts)]
        segments.append([Segment(*pair) for pair in zip(parts, forced, strict=False)])
    return EncodedWindow(window, segments, num_left_out)


def prefetch(items: Iterable[T], *, leave_seconds: float = 0.5) -> Iterator[T]:
    """Yield `items`, each made in a thread while the one before is worked on.

    What making one raises is raised here. At most one waits, and one is being made. Left early, it
    waits at most `leave_seconds` for that one: Python aborts when it ends while a thread is in
    torch.
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
    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
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
        thread.join(leave_seconds)


@dataclass(frozen=True)
class Translation:
    """One hypothesis as text.

    Of a line that was cut into segments, `tokens` and what belongs to them hold all segments one
    after the other, each but the last with its EOS, and the scores are sums.
    """

    text: str
    score: float  # as docs/search.md defines it
    log_prob: float  # nats, of all tokens, EOS counted
    tokens: list[str]  # pieces, without EOS
    finished: bool  # False when the length limit cut it off
    token_log_probs: list[float] = field(default_factory=list)
    """Nats, one a token, and one more for EOS when `finished`."""
    alignment: list[int] | None = None
    """For each token a position in the source tokens, from 0, each segment's EOS included."""


EMPTY = Translation("", 0.0, 0.0, [], True)


@dataclass(frozen=True)
class LineResult:
    """The translations of one line, or why there are none."""

    translations: list[Translation]
    """Best first; a single empty one for an empty line, none where `error` is set."""
    error: str | None = None
    num_parts: int = 1  # segments; more than 1 when the line was longer than `max_source_length`
    num_left_out: int = 0  # source tokens that were cut off
    source_tokens: list[str] = field(default_factory=list)
    """Pieces, each segment with its EOS; what `alignment` points to."""

    @property
    def text(self) -> str:
        """The best translation; empty where there is none."""
        return self.translations[0].text if self.translations else ""


@dataclass
class LineCounts:
    """What happened to lines, for the end of the job."""

    failed: int = 0
    met_limit: int = 0
    too_long: int = 0

    def add(self, other: LineCounts) -> None:
        """Add the counts of another part of the job."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


def to_results(
    encoded: EncodedWindow,
    outcomes: Sequence[SearchResult],
    tokenizer: Tokenizers,
    *,
    n_best: int,
    alignment: bool,
) -> list[LineResult]:
    """Return the result of each line of a window, from the outcomes of all its segments in turn."""
    remaining = iter(outcomes)
    results = []
    for i, segments in enumerate(encoded.segments):
        found = [next(remaining) for _ in segments]
        failed = [outcome for outcome in found if isinstance(outcome, Failure)]
        num_left_out = encoded.num_left_out.get(i, 0)
        if not segments:
            results.append(LineResult([EMPTY]))
        elif failed:
            results.append(LineResult([], failed[0].reason, len(segments), num_left_out))
        else:
            ranked = [outcome for outcome in found if not isinstance(outcome, Failure)]
            starts = [0, *accumulate(len(segment.ids) + 1 for segment in segments)]
            translations = [  # the k-th of each segment, or its last where it has fewer
                join_hypotheses([best[: k + 1][-1] for best in ranked], starts, tokenizer.tgt)
                for k in range(min(n_best, max(map(len, ranked))))
            ]
            ids = [t for s in segments for t in (*s.ids, tokenizer.src.eos_id)] if alignment else []
            pieces = tokenizer.src.pieces(ids)
            results.append(LineResult(translations, None, len(segments), num_left_out, pieces))
    return results


def join_hypotheses(
    parts: Sequence[Hypothesis], starts: Sequence[int], tokenizer: Tokenizer
) -> Translation:
    """Return the translation of a line whose segments begin at `starts` in its source tokens."""
    bare = [part.tokens[:-1] if part.finished else part.tokens for part in parts]
    ids = [token for part in parts[:-1] for token in part.tokens] + bare[-1]
    texts = [tokenizer.decode(tokens) for tokens in bare]
    pairs = zip(parts, starts, strict=False)
    places = [start + place for part, start in pairs for place in part.alignment or []]
    return Translation(
        texts[0] if len(texts) == 1 else join_parts(text.strip() for text in texts),
        sum(part.score for part in parts),
        sum(part.log_prob for part in parts),
        tokenizer.pieces(ids),
        all(part.finished for part in parts),
        [value for part in parts for value in part.token_log_probs],
        places[: len(ids)] if parts[0].alignment is not None else None,
    )


def render(
    window: Window, results: Sequence[LineResult], output_format: OutputFormat, n_best: int = 1
) -> tuple[bytes, LineCounts]:
    """Return a line of output for each line of the window, and counts; log the lines that failed.

    Plain text is the best translation, JSON one object a line. Several translations as text have
    a line each, as Moses writes them.
    """
    lines = []
    for index, result in enumerate(results, start=window.first_line):
        if result.error is not None:
            message = "line %d cannot be translated and becomes empty: %s"
            log.warning(message, index + 1, result.error)
        if output_format is OutputFormat.json:
            lines.append(json.dumps(_to_json(result, index), ensure_ascii=False))
        elif n_best == 1:
            lines.append(result.text)
        else:
            lines += [
                f"{index} ||| {t.text} ||| log_prob={t.log_prob} ||| {t.score}"
                for t in result.translations or [EMPTY]
            ]
    best = [result.translations[0] for result in results if result.translations]
    return "".join(f"{line}\n" for line in lines).encode(), LineCounts(
        failed=sum(result.error is not None for result in results),
        met_limit=sum(not translation.finished for translation in best),
        too_long=sum(result.num_parts > 1 or result.num_left_out > 0 for result in results),
    )


def _to_json(result: LineResult, index: int) -> dict[str, Any]:
    some = {
        "error": result.error,
        "num_parts": result.num_parts if result.num_parts > 1 else None,
        "num_left_out": result.num_left_out,
        "source_tokens": result.source_tokens,
    }
    names = ("text", "score", "log_prob", "tokens", "token_log_probs", "finished", "alignment")
    rows = [[(name, getattr(t, name)) for name in names] for t in result.translations]
    translations = [{name: value for name, value in row if value is not None} for row in rows]
    shown = {name: value for name, value in some.items() if value}
    return {"index": index, **shown, "hypotheses": translations}
