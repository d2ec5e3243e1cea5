r"""Cuts sources into chunks of whole lines, both sides of a chunk with the same number of them.

A line ends at the byte \n and nowhere else. Memory is bounded whatever the length of a line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nmt.data.languages import Tags
from nmt.data.text import check_file, unpacked, unpacking
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
    """Files that hold pairs of one corpus, line by line."""

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
class Chunk:
    """Lines of one source that follow each other."""

    source: Source
    first_pair: int  # its number among those of all sources that are read, from 0
    first_line: int  # its number in the source, from 1
    num_pairs: int
    raw: tuple[bytes, ...]  # one text a file; all have `num_pairs` lines, each ended by \n
    overlong: tuple[int, ...]  # lines of more than MAX_LINE_BYTES, which are empty in `raw`
    disk_bytes: int  # how far the files of all corpora are read, as they lie on disk

    def place(self, row: int, side: int = 0, byte: int | None = None) -> Place:
        """Return the place of a row of the chunk (from 0) in the source (side 0) or target (1)."""
        names = self.source.names
        return Place(names[side % len(names)], self.first_line + row, byte)


@dataclass(frozen=True)
class ShardTask:
    """`shard_pairs` pairs of a corpus, as read, which become one file."""

    corpus: str
    number: int  # in its corpus
    first_pair: int  # in its corpus
    order: int  # among the tasks of all corpora, with gaps

    @property
    def name(self) -> str:
        """What its files are called, without suffix."""
        return "-".join(filter(None, ["train", self.corpus, f"{self.number:05d}"]))


@dataclass(frozen=True)
class TaskChunk:
    """A chunk of the input of a task."""

    task: ShardTask
    chunk: Chunk

    @property
    def rows(self) -> slice:
        """Where in the task the pairs of the chunk are."""
        start = self.chunk.first_pair - self.task.first_pair
        return slice(start, start + self.chunk.num_pairs)


class ChunkReader:
    """Reads sources one after the other, after `disk_bytes` of other corpora."""

    def __init__(self, sources: Sequence[Source], disk_bytes: int = 0) -> None:
        self._sources = iter(sources)
        self._source: Source | None = None  # the one that is open
        self._files: list[_LineFile] = []
        self._next_line = 1  # of this source
        self._num_pairs = 0  # read from all
        self._closed_bytes = disk_bytes  # of the sources that are done

    def close(self) -> None:
        """Close the source that is open."""
        for file in self._files:
            file.close()

    def read(self, num_pairs: int = sys.maxsize) -> Iterator[Chunk]:
        """Yield the next `num_pairs` pairs, or all, in chunks of at most `PAIRS_A_CHUNK` pairs and
        `BYTES_A_CHUNK` bytes, but of one pair at least.

        Raises `DataError` for sides of different length and for files that cannot be read.
        """
        while num_pairs > 0 and (source := self._fill()) is not None:
            most = min(num_pairs, PAIRS_A_CHUNK, *(len(file.ends) for file in self._files))
            sizes = np.sum([file.ends[:most] for file in self._files], axis=0)
            number = max(1, int(np.searchsorted(sizes, BYTES_A_CHUNK, side="right")))
            lines = range(self._next_line, self._next_line + number)
            overlong = {line for file in self._files for line in file.overlong if line in lines}
            yield Chunk(
                source,
                first_pair=self._num_pairs,
                first_line=self._next_line,
                num_pairs=number,
                raw=tuple(file.take(number) for file in self._files),
                overlong=tuple(sorted(overlong)),
                disk_bytes=self._closed_bytes + sum(file.disk_bytes for file in self._files),
            )
            self._next_line += number
            self._num_pairs += number
            num_pairs -= number

    def _fill(self) -> Source | None:
        """Read ahead, and return the source that has the next pair, if any."""
        while True:
            for file in self._files:
                file.fill()
            waiting = [len(file.ends) for file in self._files]
            if waiting and all(waiting):
                return self._source
            if self._source is not None and any(waiting):
                names = self._source.names
                num_src, num_tgt = (self._next_line - 1 + f.count_rest() for f in self._files)
                raise DataError(
                    f"{names[0]} has {num_src} lines, {names[1]} {num_tgt}; "
                    "extract the pair again, line by line"
                )
            self._closed_bytes += sum(file.disk_bytes for file in self._files)
            self.close()
            self._files, self._next_line = [], 1
            self._source = next(self._sources, None)
            if self._source is None:
                return None
            for path, name in zip(self._source.paths, self._source.names, strict=True):
                self._files.append(_LineFile(path, name))


def read_chunks(sources: Sequence[Source]) -> Iterator[Chunk]:
    """Yield all pairs of `sources`; see `ChunkReader.read`."""
    with closing(ChunkReader(sources)) as reader:
        yield from reader.read()


class _LineFile:
    """One file: a buffer of whole lines, and the start of the line after them."""

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        check_file(path)
        with unpacking(name):
            self._file = path.open("rb")
            self._stream = unpacked(self._file, path.suffix)
        self._thread = ThreadPoolExecutor(1)  # unpacks a block while the one before is cut
        self._ahead = self._thread.submit(self._fetch)
        self._is_over = False
        self._num_lines = 0  # read
        self._text = b""  # the lines that wait
        self._rest = b""
        self.ends = np.empty(0, np.int64)  # where the waiting lines end
        self.overlong: list[int] = []  # their numbers, from 1; such lines are empty
        self.disk_bytes = 0  # read

    def close(self) -> None:
        self._thread.shutdown()
        self._stream.close()
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

    def count_rest(self) -> int:
        """Count the lines from here to the end, which are gone then."""
        num_before = self._num_lines - len(self.ends)
        while self._read():
            self._text, self.ends = b"", self.ends[:0]
        return self._num_lines - num_before

    def _read(self) -> bool:
        """Read a block; return False when there was none left."""
        if self._is_over:
            return False
        with unpacking(self._name):
            block, self.disk_bytes = self._ahead.result()
        if block:
            self._ahead = self._thread.submit(self._fetch)
        else:
            self._is_over = True
            block = b"\n" if self._rest else b""  # ends the last line
        text = self._rest + block
        if (end := text.find(b"\n")) > MAX_LINE_BYTES:  # others are shorter than a block
            self.overlong.append(self._num_lines + 1)
            text = text[end:]
        end = text.rfind(b"\n") + 1
        self._rest = text[end:][: MAX_LINE_BYTES + 1]  # enough to show that it is overlong
        ends = np.flatnonzero(np.frombuffer(text, np.uint8, end) == ord("\n")) + 1
        self.ends = np.concatenate([self.ends, ends + len(self._text)])
        self._text += text[:end]
        self._num_lines += len(ends)
        return True

    def _fetch(self) -> tuple[bytes, int]:
        return self._stream.read(_BLOCK_BYTES), self._file.tell()
