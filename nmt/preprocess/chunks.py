r"""Cuts sources into chunks of whole lines, both sides of a chunk with the same number of them.

A line ends at the byte \n and nowhere else. Bytes are not looked at further: text, columns and
filters come later. Memory is bounded whatever the length of a line.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from nmt.data.text import check_file, unpacked, unpacking
from nmt.errors import DataError

PAIRS_A_CHUNK = 5_000
BYTES_A_CHUNK = 2 << 20
MAX_LINE_BYTES = 1 << 20
"""No sentence is longer; of such a line nothing is kept but its place."""

_BLOCK_BYTES = 1 << 20
_NO_LINE = b"\n"  # no line holds one


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
    src_tag: str | None = None
    tgt_tag: str | None = None


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
    disk_bytes: int  # read so far, from all sources, as they lie on disk

    def place(self, row: int, side: int = 0, byte: int | None = None) -> Place:
        """Return the place of a row of the chunk (from 0) in the source (side 0) or target (1)."""
        names = self.source.names
        return Place(names[side if len(names) > 1 else 0], self.first_line + row, byte)


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
    disk_bytes: int  # how far the files of all corpora are read

    @property
    def rows(self) -> slice:
        """Where in the task the pairs of the chunk are."""
        start = self.chunk.first_pair - self.task.first_pair
        return slice(start, start + self.chunk.num_pairs)


class ChunkReader:
    """Reads sources one after the other, from the first pair to the last; a context manager."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        pairs_a_chunk: int = PAIRS_A_CHUNK,
        bytes_a_chunk: int = BYTES_A_CHUNK,
    ) -> None:
        self._sources = iter(sources)
        self._pairs_a_chunk = pairs_a_chunk
        self._bytes_a_chunk = bytes_a_chunk
        self._num_pairs = 0  # read
        self._closed_bytes = 0  # of the sources that are done
        self._open: _OpenSource | None = None

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    def skip(self, num_pairs: int) -> int:
        """Pass over pairs and return their number, less than asked for only at the end."""
        return sum(chunk.num_pairs for chunk in self.read(num_pairs))

    def read(self, num_pairs: int | None = None) -> Iterator[Chunk]:
        """Yield the next `num_pairs` pairs, or all, in chunks of at most `pairs_a_chunk` pairs and
        `bytes_a_chunk` bytes, but of one pair at least.

        Raises `DataError` for sides of different length, with both counts, and for files that
        cannot be read.
        """
        left = num_pairs
        while left != 0:
            if self._open is None:
                if (source := next(self._sources, None)) is None:
                    return
                self._open = _OpenSource(source)
            most = self._pairs_a_chunk if left is None else min(left, self._pairs_a_chunk)
            first_line = self._open.next_line
            sides = self._open.take(most, self._bytes_a_chunk)
            if not sides:
                self._close()
                continue
            yield Chunk(
                self._open.source,
                first_pair=self._num_pairs,
                first_line=first_line,
                num_pairs=len(sides[0]),
                raw=tuple(b"\n".join(lines) + b"\n" for lines in sides),
                overlong=self._open.overlong(first_line),
                disk_bytes=self._closed_bytes + self._open.disk_bytes,
            )
            self._num_pairs += len(sides[0])
            left = None if left is None else left - len(sides[0])

    def _close(self) -> None:
        if self._open is not None:
            self._closed_bytes += self._open.disk_bytes
            self._open.close()
            self._open = None


def read_chunks(sources: Sequence[Source]) -> Iterator[Chunk]:
    """Yield all pairs of `sources`; see `ChunkReader.read`."""
    with ChunkReader(sources) as reader:
        yield from reader.read()


class _OpenSource:
    """The files of one source, and the line they are at."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.next_line = 1
        with contextlib.ExitStack() as stack:
            self._files = [
                stack.enter_context(_LineFile(path, name))
                for path, name in zip(source.paths, source.names, strict=True)
            ]
            self.close = stack.pop_all().close
        self._pairs = itertools.zip_longest(*self._files, fillvalue=_NO_LINE)
        self._held: list[tuple[bytes, ...]] = []  # a pair that did not fit into the last chunk

    @property
    def disk_bytes(self) -> int:
        return sum(file.disk_bytes for file in self._files)

    def take(self, num_pairs: int, num_bytes: int) -> list[tuple[bytes, ...]]:
        """Return the lines of each file, without their ends, for the next pairs: as many as asked
        for and there, and fit; at the end of the source there are none.
        """
        pairs: list[tuple[bytes, ...]] = []
        for pair in itertools.chain(self._held, self._pairs):
            num_bytes -= sum(map(len, pair)) + len(pair)
            if pairs and num_bytes < 0 or _NO_LINE in pair:
                self._held = [pair]
                break
            pairs.append(pair)
            if len(pairs) == num_pairs:
                self._held = []
                break
        else:
            self._held = []
        if self._held and not pairs:
            self._refuse()
        self.next_line += len(pairs)
        return list(zip(*pairs, strict=True))

    def overlong(self, first_line: int) -> tuple[int, ...]:
        """Return the overlong lines from `first_line` to the last that was taken."""
        lines = set().union(*(file.overlong for file in self._files))
        return tuple(sorted(line for line in lines if first_line <= line < self.next_line))

    def _refuse(self) -> None:
        names = self.source.names
        num_src, num_tgt = (file.num_lines + sum(1 for _ in file) for file in self._files)
        raise DataError(
            f"{names[0]} has {num_src} lines, {names[1]} {num_tgt}; "
            "extract the pair again, line by line"
        )


class _LineFile:
    """An iterator over the lines of a file, without their ends; overlong ones come empty."""

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        check_file(path)
        with unpacking(name):
            self._file = path.open("rb")
            self._stream = unpacked(self._file, path.suffix)
        self._thread = ThreadPoolExecutor(1)  # unpacks a block while the one before is cut
        self._ahead = self._thread.submit(self._fetch)
        self.disk_bytes = 0  # read
        self.num_lines = 0
        self.overlong: list[int] = []
        self._lines = self._cut()

    def __enter__(self) -> _LineFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.shutdown()
        self._stream.close()
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        return self._lines

    def _cut(self) -> Iterator[bytes]:
        rest = b""  # the start of the line that the next block goes on with
        while block := self._read():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                yield self._checked(line)
            rest = rest[: MAX_LINE_BYTES + 1]  # as much as shows that it is overlong
        if rest:
            yield self._checked(rest)

    def _checked(self, line: bytes) -> bytes:
        self.num_lines += 1
        if len(line) <= MAX_LINE_BYTES:
            return line
        self.overlong.append(self.num_lines)
        return b""

    def _read(self) -> bytes:
        with unpacking(self._name):
            block, self.disk_bytes = self._ahead.result()
        if block:
            self._ahead = self._thread.submit(self._fetch)
        return block

    def _fetch(self) -> tuple[bytes, int]:
        return self._stream.read(_BLOCK_BYTES), self._file.tell()
