"""Files to translate: plain text, subtitles, HTML and tables; and translated files to download."""

from __future__ import annotations

import contextlib
import csv
import html
import io
import re
import secrets
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nmt.errors import DataError, suggest_names
from nmt.serve.markup import HtmlText, parse_html
from nmt.serve.texts import PlainText, SourceText, parse_plain_text
from nmt.translate.results import LineResult

FORMATS = (".txt", ".srt", ".html", ".htm", ".csv", ".tsv")
_MAX_TEXTS = 1_000_000  # in a file; each takes half a kilobyte
_SPACES = r"[^\S\n]*"  # no line end
_CUE_TIMES = rf"{_SPACES}(?:\d+:)?\d+:\d+[,.]\d+\s*-->"
_NEXT_CUE = rf"{_CUE_TIMES}|{_SPACES}\d+{_SPACES}\n{_CUE_TIMES}"  # with or without a number
_CUE = re.compile(  # a line of times, and lines of text up to an empty line or the next cue
    rf"^{_CUE_TIMES}.*\n(?P<text>(?:(?!{_NEXT_CUE}){_SPACES}\S.*\n?)+)", re.MULTILINE
)
_TAG = re.compile(r"<[A-Za-z/!]")
_POSITION_TAGS = re.compile(r"^(?:\{\\[^{}]*\} *)+")  # {\an8} shows the subtitle at the top
_WORD = re.compile(r"(?:<[A-Za-z/!][^<>]*>|[^ ])+")  # a tag with its spaces belongs to a word
_QUOTED_CELL = re.compile(r'(?:^|(?<=\t))"(?:[^"]|"")*"(?=\t|\r?$)', re.MULTILINE)
_SPEAKER_DASH = re.compile(r"\s*[-–—]\s")


@dataclass(frozen=True)
class Document:
    """The texts of a file, and a function that builds the file from their translations."""

    texts: list[SourceText]
    assemble: Callable[[list[str]], str]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How the texts of a file or request are read."""

    split_sentences: bool = True
    prefix: str = ""  # the text that the model reads before each sentence
    columns: Sequence[str] = ()
    """Columns of a table to translate, by number from 1 or by name in the first row; () for all."""


def read_text(options: ReadOptions, text: str, *, is_html: bool = False) -> SourceText:
    """Cut a text into sentences."""
    if is_html:
        return parse_html(text, split_sentences=options.split_sentences, prefix=options.prefix)
    return parse_plain_text(text, split_sentences=options.split_sentences)


def read_document(name: str, content: bytes, options: ReadOptions) -> Document:
    """Read a file in the format of its name's suffix.

    Raises `DataError` if the format is unknown, the content is not valid, or there is too much.
    """
    suffix = Path(name).suffix.lower()
    if suffix not in FORMATS:
        raise DataError(f"{suffix or name}: no such file format; valid: {', '.join(FORMATS)}")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"the file is not UTF-8 (byte {error.start + 1}); convert it") from None
    byte_order_mark = "\ufeff" if text.startswith("\ufeff") else ""  # kept
    text = text.removeprefix(byte_order_mark)
    if text.count("<") > 2 * _MAX_TEXTS:
        raise DataError(f"the file has more than {2 * _MAX_TEXTS} tags; cut it into several")
    if suffix in (".csv", ".tsv"):
        document = _read_table(text, suffix, options)
    elif suffix == ".srt":
        document = Document(_read_subtitles(text, options), "".join)
    elif suffix == ".txt":
        lines = text.splitlines(keepends=True)
        _check_count(len(lines))
        document = Document([read_text(options, line) for line in lines], "".join)
    else:
        page = parse_html(text, split_sentences=options.split_sentences, prefix=options.prefix)
        document = Document([HtmlText([content]) for content in page.contents], "".join)
    return Document(document.texts, lambda texts: byte_order_mark + document.assemble(texts))


def _check_count(num_texts: int) -> None:
    if num_texts > _MAX_TEXTS:
        raise DataError(f"the file has more than {_MAX_TEXTS} texts; cut it into several")


@dataclass(frozen=True)
class _Subtitle:
    """Lines of one speaker, translated as one text and wrapped to the same number of lines."""

    text: SourceText
    position_tags: str  # before the text, as in the source
    num_lines: int
    newline: str
    has_entities: bool
    """Whether the source writes & and < as entities of HTML. If not, the translation does not."""

    @property
    def sentences(self) -> list[str]:
        """See `SourceText`."""
        return self.text.sentences

    @property
    def needs_alignment(self) -> bool:
        """See `SourceText`."""
        return self.text.needs_alignment

    def render(self, results: Sequence[LineResult], rank: int = 0) -> str:
        """See `SourceText.render`."""
        text = self.text.render(results, rank)
        if isinstance(self.text, HtmlText) and not self.has_entities:
            text = html.unescape(text)
        return self.position_tags + _wrap(text, self.num_lines, self.newline)


def _read_subtitles(text: str, options: ReadOptions) -> list[SourceText]:
    """Read SubRip. Numbers, times and empty lines become texts without sentences.

    The package srt is not used: its pattern takes cubic time for a long number, so that one
    request could stop the server.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    texts: list[SourceText] = []
    position = 0
    for cue in _CUE.finditer(text):
        start = cue.start("text")
        lines = cue["text"].rstrip("\r\n").split("\n")
        texts.append(PlainText([], [text[position:start]]))
        for number, speaker_lines in enumerate(_split_speakers(lines)):
            if number > 0:
                texts.append(PlainText([], [newline]))
            texts.append(_read_subtitle(speaker_lines, newline, options))
        _check_count(len(texts))
        position = start + len("\n".join(lines))
    texts.append(PlainText([], [text[position:]]))
    return texts


def _split_speakers(lines: Sequence[str]) -> list[list[str]]:
    """Start a new list at each line that begins with a dash, which marks another speaker."""
    speakers: list[list[str]] = [[]]
    for line in lines:
        if _SPEAKER_DASH.match(line) and speakers[-1]:
            speakers.append([])
        speakers[-1].append(line.strip())
    return speakers


def _read_subtitle(lines: Sequence[str], newline: str, options: ReadOptions) -> _Subtitle:
    line = " ".join(lines)
    text = _POSITION_TAGS.sub("", line)
    return _Subtitle(
        read_text(options, text, is_html=bool(_TAG.search(text))),
        position_tags=line.removesuffix(text),
        num_lines=len(lines),
        newline=newline,
        has_entities=html.unescape(text) != text,
    )


def _wrap(text: str, num_lines: int, newline: str) -> str:
    """Break a text at spaces into lines of about the same length.

    A word goes on a line if at least half of it fits.
    """
    words = deque(_WORD.findall(text))
    num_characters = sum(len(word) + 1 for word in words)  # on this line and those after it
    lines: list[str] = []
    for num_lines_left in range(num_lines, 0, -1):
        if not words:
            break
        target_length = (num_characters - 1) / num_lines_left
        line = words.popleft()
        while words and (num_lines_left == 1 or len(line) + 1 + len(words[0]) / 2 <= target_length):
            line += " " + words.popleft()
        lines.append(line)
        num_characters -= len(line) + 1
    return newline.join(lines)


def _read_table(text: str, suffix: str, options: ReadOptions) -> Document:
    """Read CSV or TSV. The first row is not translated if `columns` are its names."""
    first_line = text.split("\n", 1)[0]
    delimiter = "\t" if suffix == ".tsv" else max(",;\t|", key=first_line.count)
    has_quotes = suffix == ".csv" or _has_quoted_cells(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    rows = _parse_rows(text, delimiter, has_quotes=has_quotes)
    cells = _find_cells(rows, options.columns)
    _check_count(len(cells))

    def assemble(translations: list[str]) -> str:
        translated_rows = [list(row) for row in rows]
        for (row, column), translation in zip(cells, translations, strict=True):
            translated_rows[row][column] = translation
        if not has_quotes:
            return "".join(delimiter.join(row) + newline for row in translated_rows)
        stream = io.StringIO(newline="")
        csv.writer(stream, delimiter=delimiter, lineterminator=newline).writerows(translated_rows)
        return stream.getvalue()

    return Document([read_text(options, rows[row][column]) for row, column in cells], assemble)


def _parse_rows(text: str, delimiter: str, *, has_quotes: bool) -> list[list[str]]:
    """Return the cells of a table, by row. Raises `DataError` for a broken table."""
    csv.field_size_limit(1 << 24)  # for every reader of this process
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
        strict=True,
    )
    try:
        return list(reader)
    except csv.Error as error:
        raise DataError(f"the table cannot be read: {error}") from None


def _has_quoted_cells(text: str) -> bool:
    """Return whether quotes in a TSV file quote whole cells. In most files they are plain text."""
    unquoted = _QUOTED_CELL.sub("", text)
    return unquoted != text and '"' not in unquoted


def _find_cells(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> list[tuple[int, int]]:
    """Return row and column of each cell to translate, which has a letter and is in `columns`."""
    first_row = 0
    if all(_is_column_number(name) for name in columns):
        column_indices = [int(name) - 1 for name in columns]
    else:
        header = rows[0] if rows else []
        first_row = 1  # names of columns are not translated
        column_indices = [_find_column(header, name) for name in columns]
    cells = []
    for row_index, row in enumerate(rows[first_row:], first_row):
        for column in column_indices or range(len(row)):
            if column < len(row) and any(map(str.isalpha, row[column])):
                cells.append((row_index, column))
    return cells


def _find_column(header: Sequence[str], name: str) -> int:
    if name not in header:
        raise DataError(f"columns: the first row has no {name}; {suggest_names(name, header)}")
    return header.index(name)


def _is_column_number(name: str) -> bool:
    """Return whether a column is given by its number; a longer one than six digits is a name."""
    return name.isascii() and name.isdigit() and len(name) <= 6 and int(name) > 0


@dataclass
class Downloads:
    """Translated files in a temporary folder.

    Files are deleted after `keep_seconds`, the oldest ones earlier if all files together are
    larger than `max_bytes`, and all when the server ends.
    """

    keep_seconds: float
    max_bytes: int
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="nmt-serve-")))
    _files: dict[str, _StoredFile] = field(default_factory=dict)  # by key, the oldest first

    def add(self, name: str, content: str) -> str:
        """Store a file. Return its key, the end of a URL that cannot be guessed."""
        safe_name = re.sub(r"[^\w.()+ -]", "_", Path(name).name)[-100:].lstrip(".") or "file"
        secret = secrets.token_urlsafe(24)
        self.folder.mkdir(mode=0o700, exist_ok=True)  # programs that clean /tmp may have deleted it
        path = self.folder / secret
        try:
            num_bytes = path.write_bytes(content.encode())
        except OSError:
            path.unlink(missing_ok=True)  # a full disk has cut it off
            raise
        key = f"{secret}/{safe_name}"
        self._files[key] = _StoredFile(path, num_bytes, time.monotonic() + self.keep_seconds)
        self.expire()
        return key

    def find(self, key: str) -> Path | None:
        """Return the path of a file, or None if there is no such file any longer."""
        self.expire()
        file = self._files.get(key)
        return file.path if file is not None and file.path.is_file() else None

    def expire(self) -> None:
        """Delete files that are too old or too large together."""
        current_time = time.monotonic()
        total_bytes = sum(file.num_bytes for file in self._files.values())
        for key, file in list(self._files.items()):
            if file.expires_at <= current_time or total_bytes > self.max_bytes:
                total_bytes -= file.num_bytes
                del self._files[key]
                with contextlib.suppress(OSError):
                    file.path.unlink()

    def close(self) -> None:
        """Delete all files."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class _StoredFile:
    path: Path
    num_bytes: int
    expires_at: float  # on the monotonic clock
