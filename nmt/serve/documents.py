"""Files to translate: plain text, subtitles, HTML and tables; and those that wait to be fetched."""

from __future__ import annotations

import contextlib
import csv
import html
import io
import itertools
import re
import secrets
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nmt.errors import DataError, nearest
from nmt.serve.markup import HtmlText, parse_html
from nmt.serve.texts import SourceText, plain_text
from nmt.translate.results import LineResult

FORMATS = (".txt", ".srt", ".html", ".htm", ".csv", ".tsv")
_TIMES = re.compile(r"\s*(?:\d+:)?\d+:\d+[,.]\d+\s*-->")
_TAGS = re.compile(r"<[A-Za-z/!]")
_POSITION = re.compile(r"^(?:\{\\[^{}]*\} *)+")  # such as {\an8}: where a subtitle is shown
_WORD = re.compile(r"(?:<[A-Za-z/!][^<>]*>|[^ ])+")  # a tag's spaces are inside one
_QUOTED = re.compile(r'(?:^|(?<=\t))"(?:[^"]|"")*"(?=\t|\r?$)', re.MULTILINE)
_DASH = re.compile(r"\s*[-–—]\s")
_MAX_PIECES = 1_000_000  # of a file: each takes half a kilobyte


@dataclass(frozen=True)
class Document:
    """A file as pieces, each translated by itself, and how they become a file again."""

    pieces: list[SourceText]
    assemble: Callable[[list[str]], str]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How the texts of a file are read."""

    split_sentences: bool = True
    prefix: str = ""  # what stands before each sentence when it is translated
    columns: Sequence[str] = ()  # of a table: names in its first row or numbers from 1; all if none
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def piece(self, text: str, *, is_html: bool = False) -> SourceText:
        """Read one text. Raises `DataError` for one too many."""
        if next(self._numbers) >= _MAX_PIECES:
            raise DataError(f"the file has more than {_MAX_PIECES} texts; cut it into several")
        if is_html:
            return parse_html(text, split_sentences=self.split_sentences, prefix=self.prefix)
        return plain_text(text, split_sentences=self.split_sentences)


def read_text(options: ReadOptions, text: str, *, is_html: bool = False) -> SourceText:
    """Cut a text into sentences."""
    return options.piece(text, is_html=is_html)


def read_document(name: str, content: bytes, reading: ReadOptions) -> Document:
    """Read a file by its name's ending. Raises `DataError` for one that is unknown or not UTF-8."""
    suffix = Path(name).suffix.lower()
    if suffix not in FORMATS:
        raise DataError(f"{suffix or name}: no such file format; valid: {', '.join(FORMATS)}")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"the file is not UTF-8 (byte {error.start + 1}); convert it") from None
    mark = text[: text.startswith("\ufeff")]  # some programs know by it that a file is UTF-8
    found = _read(text[len(mark) :], suffix, reading)
    return replace(found, assemble=lambda texts: mark + found.assemble(texts))


def _read(text: str, suffix: str, reading: ReadOptions) -> Document:
    if text.count("<") > 2 * _MAX_PIECES:
        raise DataError(f"the file has more than {2 * _MAX_PIECES} tags; cut it into several")
    if suffix == ".srt":
        return _read_subtitles(text, reading)
    if suffix in (".csv", ".tsv"):
        return _read_table(text, suffix, reading)
    if suffix in (".html", ".htm"):
        whole = parse_html(text, split_sentences=reading.split_sentences, prefix=reading.prefix)
        return Document([HtmlText([part]) for part in whole.parts], "".join)
    lines = text.splitlines(keepends=True)
    return Document([reading.piece(line) for line in lines], "".join)


@dataclass(frozen=True)
class _Cue:
    """The text of one subtitle, whose lines are one text; wrapped again to as many lines."""

    inner: SourceText
    num_lines: int
    newline: str
    has_entities: bool  # as HTML; others may show & as it is

    @property
    def sentences(self) -> list[str]:
        """See `SourceText`."""
        return self.inner.sentences

    @property
    def needs_alignment(self) -> bool:
        """See `SourceText`."""
        return self.inner.needs_alignment

    def render(self, results: Sequence[LineResult], rank: int = 0) -> str:
        """See `SourceText.render`."""
        text = self.inner.render(results, rank)
        if isinstance(self.inner, HtmlText) and not self.has_entities:
            text = html.unescape(text)
        return _wrap(text, self.num_lines, self.newline)


def _read_subtitles(text: str, reading: ReadOptions) -> Document:
    """Read SubRip: numbers and times stay; the lines of a speaker are one text."""
    newline = "\r\n" if "\r\n" in text else "\n"
    pieces: list[SourceText] = []
    parts: list[str | None] = []  # None is the next piece
    waiting: list[str] = []
    is_text = False

    def flush() -> None:
        if waiting:
            whole = " ".join(line.strip() for line in waiting)
            joined = _POSITION.sub("", whole)
            inner = reading.piece(joined, is_html=bool(_TAGS.search(joined)))
            has_entities = html.unescape(joined) != joined
            pieces.append(_Cue(inner, len(waiting), newline, has_entities))
            parts.extend((whole[: len(whole) - len(joined)], None, newline))
            waiting.clear()

    for line in text.split("\n"):
        line = line.removesuffix("\r")
        if is_text and _TIMES.match(line):  # of the next one, without an empty line before it
            number = waiting.pop() if waiting and waiting[-1].strip().isdigit() else None
            flush()
            parts += [*([] if number is None else [number, newline]), line, newline]
        elif is_text and line.strip():
            if _DASH.match(line):  # another speaker
                flush()
            waiting.append(line)
        else:
            flush()
            is_text = bool(_TIMES.match(line))
            parts += [line, newline]
    flush()
    parts.pop()  # after the last line there is no line end

    def assemble(texts: list[str]) -> str:
        rest = iter(texts)
        return "".join(next(rest) if part is None else part for part in parts)

    return Document(pieces, assemble)


def _wrap(text: str, num_lines: int, newline: str) -> str:
    """Break a text into lines of about the same length, at spaces."""
    words = deque(_WORD.findall(text))
    num_left = sum(len(word) + 1 for word in words)  # characters
    lines: list[str] = []
    for left in range(num_lines, 0, -1):
        if not words:
            break
        goal, length, line = (num_left - 1) / left, 0, list[str]()
        while words and (not line or left == 1 or length + len(words[0]) / 2 <= goal):
            line.append(words.popleft())
            length += len(line[-1]) + 1
        lines.append(" ".join(line))
        num_left -= length
    return newline.join(lines)


def _read_table(text: str, suffix: str, reading: ReadOptions) -> Document:
    """Read CSV or TSV; `columns` are translated, the first row not if it names them."""
    first = text.split("\n", 1)[0]
    delimiter = "\t" if suffix == ".tsv" else max(",;\t|", key=first.count)
    unquoted = _QUOTED.sub("", text) if suffix == ".tsv" else ""
    is_bare = unquoted == text or '"' in unquoted  # as most TSV, where " is a sign like others
    style: dict[str, Any] = {"delimiter": delimiter, "strict": True}
    style |= {"quoting": csv.QUOTE_NONE} if is_bare else {}
    csv.field_size_limit(1 << 24)  # of all readers
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), **style))
    except csv.Error as error:
        raise DataError(f"the table cannot be read: {error}") from None
    header = rows[0] if rows else []
    chosen, has_names = _columns(header, reading.columns)
    places = [
        (r, c)
        for r in range(int(has_names), len(rows))
        for c in (chosen if reading.columns else range(len(rows[r])))
        if c < len(rows[r]) and any(character.isalpha() for character in rows[r][c])
    ]
    newline = "\r\n" if "\r\n" in text else "\n"

    def assemble(texts: list[str]) -> str:
        result = [list(row) for row in rows]
        for (r, c), cell in zip(places, texts, strict=True):
            result[r][c] = cell
        if is_bare:
            return "".join(delimiter.join(row) + newline for row in result)
        stream = io.StringIO(newline="")
        csv.writer(stream, delimiter=delimiter, lineterminator=newline).writerows(result)
        return stream.getvalue()

    return Document([reading.piece(rows[r][c]) for r, c in places], assemble)


def _columns(header: Sequence[str], wanted: Sequence[str]) -> tuple[list[int], bool]:
    """Return the places of the columns wanted, and whether they are named by the first row."""
    if all(name.isascii() and name.isdigit() and int(name[:6]) >= 1 for name in wanted):
        return [int(name[:6]) - 1 for name in wanted], False
    for name in wanted:
        if name not in header:
            raise DataError(f"columns: the first row has no {name}; {nearest(name, header)}")
    return [header.index(name) for name in wanted], True


@dataclass
class Downloads:
    """Translated files in a folder of their own. They are deleted after a while, the oldest when
    all together are too large, and when the server ends.
    """

    keep_seconds: float
    max_bytes: int
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="nmt-serve-")))
    _expiry: dict[str, float] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)  # in bytes, the oldest first

    def add(self, name: str, content: str) -> str:
        """Store a file; return its name in a URL, which nobody can guess."""
        shown = re.sub(r"[^\w.()+ -]", "_", Path(name).name)[-100:].lstrip(".") or "file"
        key = f"{secrets.token_urlsafe(24)}/{shown}"
        self.folder.mkdir(mode=0o700, exist_ok=True)  # what tidies up /tmp may have deleted it
        path = self.folder / key.split("/")[0]
        path.write_bytes(data := content.encode())
        self._expiry[key], self._sizes[key] = time.monotonic() + self.keep_seconds, len(data)
        self.expire()
        return key

    def find(self, key: str) -> Path | None:
        """Return the file of that name; None when there is none, or no longer."""
        self.expire()
        return self.folder / key.split("/")[0] if key in self._expiry else None

    def expire(self) -> None:
        """Delete what is too old, or too much."""
        now = time.monotonic()
        for key, until in list(self._expiry.items()):
            if until <= now or sum(self._sizes.values()) > self.max_bytes:
                del self._expiry[key], self._sizes[key]
                with contextlib.suppress(OSError):
                    (self.folder / key.split("/")[0]).unlink()

    def close(self) -> None:
        """Delete everything."""
        shutil.rmtree(self.folder, ignore_errors=True)
