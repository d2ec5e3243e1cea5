r"""Cuts sources into spans, each the input of one shard, and a span into chunks of whole lines,
both sides with the same number of them.

A line ends at the byte \n and nowhere else. Memory is bounded whatever the length of a line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nmt.data.languages import Tags
from nmt.data.text import check_file, unpacking
from nmt.errors import DataError

PAIRS_A_CHUNK = 5_000
BYTES_A_CHUNK = 2 << 20
MAX_LINE_BYTES = 1 << 20
"""No sentence is longer; of such a line nothing is kept but its place."""

_BLOCK_BYTES = 1 << 20  # at most MAX_LINE_BYTES


class Format(Enum):
    """How a pair stands in the files of a source."""

    pair = "pair"  # line i of one file and line i of another
    tsv = "tsv"
    jsonl = "jsonl"


@dataclass(frozen=True)
class Source:
    """Plain files that hold pairs of one corpus, line by line."""

    corpus: str  # its name in data.corpora, or ""
    format: Format
    paths: tuple[Path, ...]  # two for a pair, source and target; else one
    names: tuple[str, ...]  # what the user calls them, for messages
    columns: tuple[int, int] = (1, 2)  # of TSV, from 1
    fields: tuple[str, str] = ("src", "tgt")  # of JSON
    tags: Tags = Tags()


class Place(NamedTuple):
    """Where something is: the file as the user wrote it, line and byte from 1."""

    file: str
    line: int
    byte: int | None = None  # in the line, where one byte is to blame

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + ("" if self.byte is None else f":{self.byte}")


@dataclass(frozen=True)
class Span:
    """Pairs of a corpus that follow each other, as read; they become one file."""

    corpus: str
    number: int  # in its corpus
    order: int  # among the spans of all corpora
    first_pair: int  # in its corpus
    num_pairs: int
    source: int  # in which it starts, among those of its corpus
    first_line: int  # of that source, from 1
    offsets: tuple[int, ...]  # of that line in the files of that source, in bytes

    @property
    def name(self) -> str:
        """What its files are called, without suffix."""
        return "-".join(filter(None, ["train", self.corpus, f"{self.number:05d}"]))


@dataclass(frozen=True)
class Chunk:
    """Lines of one source that follow each other."""

    source: Source
    first_pair: int  # its number in the corpus, from 0
    first_line: int  # its number in the source, from 1
    num_pairs: int
    raw: tuple[bytes, ...]  # one text a file; all have `num_pairs` lines, each ended by \n
    # line and side (0 or 1) of what has more than MAX_LINE_BYTES, which is empty in `raw`
    overlong: tuple[tuple[int, int], ...]

    def place(self, row: int, side: int = 0, byte: int | None = None) -> Place:
        """Return the place of a row of the chunk (from 0) in the source (side 0) or target (1)."""
        names = self.source.names
        return Place(names[side % len(names)], self.first_line + row, byte)


def find_spans(corpora: Mapping[str, Sequence[Source]], size: int = sys.maxsize) -> list[Span]:
    """Read all sources to find the spans of `size` pairs of each corpus.

    Raises `DataError` for sides of different length and for files that cannot be read.
    """
    spans: list[Span] = []
    for corpus, sources in corpora.items():
        num_pairs, starts = 0, list[tuple[int, int, tuple[int, ...]]]()
        for number, source in enumerate(sources):
            first = -num_pairs % size  # line of the source that begins a span, from 0
            names = source.names
            counted = [
                _find_lines(*file, first, size) for file in zip(source.paths, names, strict=True)
            ]
            (num_lines, _), (num_others, _) = counted[0], counted[-1]
            if num_lines != num_others:
                raise DataError(
                    f"{names[0]} has {num_lines} lines, {names[1]} {num_others}; "
                    "extract the pair again, line by line"
                )
            offsets = zip(*(offsets for _, offsets in counted), strict=True)
            starts += [(number, first + i * size + 1, place) for i, place in enumerate(offsets)]
            num_pairs += num_lines
        for number, start in enumerate(starts):
            first, order = number * size, len(spans)
            num_here = min(size, num_pairs - first)
            spans.append(Span(corpus, number, order, first, num_here, *start))
    return spans


def _find_lines(path: Path, name: str, first: int, step: int) -> tuple[int, list[int]]:
    """Count the lines of a file, and find where the lines `first`, `first + step` ... begin."""
    check_file(path)
    num_ends, num_bytes, last, offsets = 0, 0, b"\n", [0] if first == 0 else []
    line = first or step
    with unpacking(name), path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            here = np.arange(line, num_ends + len(ends) + 1, step)
            offsets += (num_bytes + 1 + ends[here - num_ends - 1]).tolist()
            line += step * len(here)
            num_ends, num_bytes, last = num_ends + len(ends), num_bytes + len(block), block[-1:]
    num_lines = num_ends + (last != b"\n")
    return num_lines, offsets[: len(range(first, num_lines, step))]


def read_chunks(sources: Sequence[Source]) -> Iterator[Chunk]:
    """Yield all pairs of `sources`; see `find_spans` and `read_span`."""
    for span in find_spans({"": sources}):
        yield from read_span(sources, span)


def read_span(sources: Sequence[Source], span: Span) -> Iterator[Chunk]:
    """Yield the pairs of a span of these sources of its corpus, in chunks of at most
    `PAIRS_A_CHUNK` pairs and `BYTES_A_CHUNK` bytes, but of one pair at least.
    """
    next_pair, end = span.first_pair, span.first_pair + span.num_pairs
    line, offsets = span.first_line, span.offsets
    for source in sources[span.source :]:
        if next_pair == end:
            return
        with ExitStack() as stack:
            files = []
            offsets = offsets or (0,) * len(source.paths)
            for path, name, offset in zip(source.paths, source.names, offsets, strict=True):
                files.append(_LineFile(path, name, line, offset))
                stack.callback(files[-1].close)
            while next_pair < end:
                for file in files:
                    file.fill()
                most = min(end - next_pair, PAIRS_A_CHUNK, *(len(file.ends) for file in files))
                if most == 0:
                    break
                sizes = np.sum([file.ends[:most] for file in files], axis=0)
                number = max(1, int(np.searchsorted(sizes, BYTES_A_CHUNK, side="right")))
                lines = range(line, line + number)
                long = [(line, side) for side, file in enumerate(files) for line in file.overlong]
                overlong = tuple(sorted(place for place in long if place[0] in lines))
                raw = tuple(file.take(number) for file in files)
                yield Chunk(source, next_pair, line, number, raw, overlong)
                line, next_pair = line + number, next_pair + number
        line, offsets = 1, ()
    if next_pair < end:
        raise DataError(f"{sources[-1].names[0]} became shorter while it was read; start again")


class _LineFile:
    """One file from a line on: a buffer of whole lines, and the start of the line after them."""

    def __init__(self, path: Path, name: str, first_line: int, offset: int) -> None:
        self._name = name
        with unpacking(name):
            self._file = path.open("rb", buffering=0)
            self._file.seek(offset)
        self._is_over = False
        self._next_line = first_line  # to be read
        self._text = b""  # the lines that wait
        self._rest = b""
        self.ends = np.empty(0, np.int64)  # where the waiting lines end
        self.overlong: list[int] = []  # their numbers, from 1; such lines are empty

    def close(self) -> None:
        self._file.close()

    def fill(self) -> None:
        """Read a chunk or to the end, so that what a chunk holds does not depend on blocks."""
        while len(self.ends) < PAIRS_A_CHUNK and len(self._text) < BYTES_A_CHUNK and self._read():
            pass

    def take(self, num_lines: int) -> bytes:
        end = int(self.ends[num_lines - 1])
        lines, self._text = self._text[:end], self._text[end:]
        self.ends = self.ends[num_lines:] - end
        return lines

    def _read(self) -> bool:
        """Read a block; return False when there was none left."""
        if self._is_over:
            return False
        with unpacking(self._name):
            block = self._file.read(_BLOCK_BYTES)
        if not block:
            self._is_over = True
            block = b"\n" if self._rest else b""  # ends the last line
        text = self._rest + block
        if (end := text.find(b"\n")) > MAX_LINE_BYTES:  # others are shorter than a block
            self.overlong.append(self._next_line)
            text = text[end:]
        end = text.rfind(b"\n") + 1
        self._rest = text[end:][: MAX_LINE_BYTES + 1]  # enough to show that it is overlong
        ends = np.flatnonzero(np.frombuffer(text, np.uint8, end) == ord("\n")) + 1
        self.ends = np.concatenate([self.ends, ends + len(self._text)])
        self._text += text[:end]
        self._next_line += len(ends)
        return True
