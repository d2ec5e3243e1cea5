r"""Divide sources into spans, the input of one shard each, and read a span in chunks of pairs.

Lines end at the byte \n only. Memory is bounded for lines of any length.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nmt.data.languages import Tags
from nmt.data.text import check_file, read_errors
from nmt.errors import DataError

PAIRS_A_CHUNK = 5_000
BYTES_A_CHUNK = 2 << 20
MAX_LINE_BYTES = 1 << 20
"""The text of longer lines is discarded; their positions are kept."""

_BLOCK_BYTES = 1 << 20  # at most MAX_LINE_BYTES


class Format(Enum):
    """How the files of a source store pairs."""

    pair = "pair"  # line i of one file and line i of another
    tsv = "tsv"
    jsonl = "jsonl"


@dataclass(frozen=True)
class Source:
    """Uncompressed files that hold pairs of one corpus, line by line."""

    corpus: str  # its name in data.corpora, or ""
    format: Format
    paths: tuple[Path, ...]  # two for a pair, source and target; else one
    names: tuple[str, ...]  # as the user named them, for messages
    columns: tuple[int, int] = (1, 2)  # of TSV, from 1
    fields: tuple[str, str] = ("src", "tgt")  # of JSON
    tags: Tags = Tags()


class Location(NamedTuple):
    """A position in the input: the file as the user named it, line and byte from 1."""

    file: str
    line: int
    byte: int | None = None  # in the line, if a single byte is invalid

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}"
        return text if self.byte is None else f"{text}:{self.byte}"

    def to_report(self) -> dict[str, Any]:
        """Return the location as `report.json` has it."""
        fields = self._asdict()
        if self.byte is None:
            del fields["byte"]
        return fields


@dataclass(frozen=True)
class Span:
    """Consecutive pairs of a corpus, the input of one shard."""

    corpus: str
    number: int  # in its corpus
    order: int  # among the spans of all corpora
    first_pair: int  # in its corpus
    num_pairs: int
    source: int  # index of the source of its corpus in which the span starts
    first_line: int  # in that source, from 1
    offsets: tuple[int, ...]  # where that line starts in the files of that source, in bytes

    @property
    def name(self) -> str:
        """The name of its files, without suffix."""
        return "-".join(filter(None, ["train", self.corpus, f"{self.number:05d}"]))


@dataclass(frozen=True)
class Chunk:
    """Consecutive pairs of one source."""

    source: Source
    first_pair: int  # its number in the corpus, from 0
    first_line: int  # its number in the source, from 1
    num_pairs: int
    raw: tuple[bytes, ...]  # by file: `num_pairs` lines, each ended by \n
    # line and side (0 or 1) of each line above MAX_LINE_BYTES, which is empty in `raw`
    overlong: tuple[tuple[int, int], ...]

    def location(self, row: int, side: int = 0, byte: int | None = None) -> Location:
        """Return the location of a row (from 0) of the source (side 0) or target (side 1)."""
        names = self.source.names
        return Location(names[side % len(names)], self.first_line + row, byte)


def find_spans(corpora: Mapping[str, Sequence[Source]], size: int = sys.maxsize) -> list[Span]:
    """Count the lines of all sources and divide each corpus into spans of `size` pairs.

    Raises `DataError` if the sides differ in length and for files that cannot be read.
    """
    spans: list[Span] = []
    for corpus, sources in corpora.items():
        starts: list[tuple[int, int, tuple[int, ...]]] = []  # source, first line, offsets
        num_pairs = 0
        for number, source in enumerate(sources):
            first = -num_pairs % size  # line of the source that begins a span, from 0
            num_lines, offsets = _find_lines(source.paths[0], source.names[0], first, size)
            by_file = [offsets]
            for path, name in zip(source.paths[1:], source.names[1:], strict=True):
                num_tgt_lines, offsets = _find_lines(path, name, first, size)
                by_file.append(offsets)
                if num_lines != num_tgt_lines:
                    raise DataError(
                        f"{source.names[0]} has {num_lines} lines, {name} {num_tgt_lines}; "
                        "extract the pair again, line by line"
                    )
            for i, file_offsets in enumerate(zip(*by_file, strict=True)):
                starts.append((number, first + i * size + 1, file_offsets))
            num_pairs += num_lines
        for number, (source_number, first_line, file_offsets) in enumerate(starts):
            span = Span(
                corpus=corpus,
                number=number,
                order=len(spans),
                first_pair=number * size,
                num_pairs=min(size, num_pairs - number * size),
                source=source_number,
                first_line=first_line,
                offsets=file_offsets,
            )
            spans.append(span)
    return spans


def _find_lines(path: Path, name: str, first: int, step: int) -> tuple[int, list[int]]:
    """Count the lines of a file; return also the offsets of lines `first`, `first + step`, ..."""
    check_file(path)
    num_ends = 0
    num_bytes = 0
    last_byte = b"\n"
    offsets = [0] if first == 0 else []
    line = first or step  # the next line whose offset is needed
    with read_errors(name), path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            lines = np.arange(line, num_ends + len(ends) + 1, step)  # that start in this block
            offsets += (num_bytes + 1 + ends[lines - num_ends - 1]).tolist()
            line += step * len(lines)
            num_ends += len(ends)
            num_bytes += len(block)
            last_byte = block[-1:]
    num_lines = num_ends + (last_byte != b"\n")
    return num_lines, offsets[: len(range(first, num_lines, step))]


def read_chunks(sources: Sequence[Source]) -> Iterator[Chunk]:
    """Yield all pairs of `sources`; see `find_spans` and `read_span`."""
    for span in find_spans({"": sources}):
        yield from read_span(sources, span)


def read_span(sources: Sequence[Source], span: Span) -> Iterator[Chunk]:
    """Yield the pairs of a span, whose corpus has these sources, in chunks.

    A chunk has at most `PAIRS_A_CHUNK` pairs and `BYTES_A_CHUNK` bytes, or a single pair.
    """
    next_pair = span.first_pair
    end = span.first_pair + span.num_pairs
    line = span.first_line
    offsets = span.offsets
    for source in sources[span.source :]:
        if next_pair == end:
            return
        with ExitStack() as stack:
            files = []
            for side, path in enumerate(source.paths):
                offset = offsets[side] if offsets else 0
                files.append(_LineFile(path, source.names[side], line, offset))
                stack.callback(files[-1].close)
            while next_pair < end:
                num_lines = min(end - next_pair, PAIRS_A_CHUNK)
                for file in files:
                    file.fill()
                    num_lines = min(num_lines, len(file.ends))
                if num_lines == 0:
                    break
                num_bytes = np.sum([file.ends[:num_lines] for file in files], axis=0)
                num_pairs = max(1, int(np.searchsorted(num_bytes, BYTES_A_CHUNK, side="right")))
                overlong = []
                for side, file in enumerate(files):
                    in_chunk = [n for n in file.overlong if line <= n < line + num_pairs]
                    overlong += [(number, side) for number in in_chunk]
                raw = tuple(file.take(num_pairs) for file in files)
                yield Chunk(source, next_pair, line, num_pairs, raw, tuple(sorted(overlong)))
                line += num_pairs
                next_pair += num_pairs
        line = 1
        offsets = ()
    if next_pair < end:
        raise DataError(f"{sources[-1].names[0]} became shorter while it was read; start again")


class _LineFile:
    """Buffers whole lines of one file, from a given line on."""

    def __init__(self, path: Path, name: str, first_line: int, offset: int) -> None:
        self._name = name
        with read_errors(name):
            self._file = path.open("rb", buffering=0)
            self._file.seek(offset)
        self._is_over = False
        self._next_line = first_line  # number of the next line that is buffered
        self._text = b""  # the buffered lines
        self._unfinished = b""  # the start of the line after them
        self.ends = np.empty(0, np.int64)  # where the buffered lines end
        self.overlong: list[int] = []  # numbers of lines that were emptied, from 1

    def close(self) -> None:
        self._file.close()

    def fill(self) -> None:
        """Buffer a whole chunk, so that the content of a chunk does not depend on block sizes."""
        while len(self.ends) < PAIRS_A_CHUNK and len(self._text) < BYTES_A_CHUNK and self._read():
            pass

    def take(self, num_lines: int) -> bytes:
        """Remove and return the first buffered lines."""
        end = int(self.ends[num_lines - 1])
        lines = self._text[:end]
        self._text = self._text[end:]
        self.ends = self.ends[num_lines:] - end
        return lines

    def _read(self) -> bool:
        """Read a block; return False at the end of the file."""
        if self._is_over:
            return False
        with read_errors(self._name):
            block = self._file.read(_BLOCK_BYTES)
        if not block:
            self._is_over = True
            block = b"\n" if self._unfinished else b""  # ends the last line
        text = self._unfinished + block
        first_end = text.find(b"\n")
        if first_end > MAX_LINE_BYTES:  # only the first line can be longer than a block
            self.overlong.append(self._next_line)
            text = text[first_end:]
        end = text.rfind(b"\n") + 1
        self._unfinished = text[end:][: MAX_LINE_BYTES + 1]  # enough to know that it is overlong
        ends = np.flatnonzero(np.frombuffer(text, np.uint8, end) == ord("\n")) + 1
        self.ends = np.concatenate([self.ends, ends + len(self._text)])
        self._text += text[:end]
        self._next_line += len(ends)
        return True
