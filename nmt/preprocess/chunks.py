"""Cuts sources into chunks of whole lines, both sides of a chunk with the same number of them.

A line ends at the byte \\n and nowhere else. Bytes are not looked at further: text, columns and
filters are the business of those who clean. Memory is bounded whatever the length of a line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from nmt.data.text import check_file, unpacked, unpacking
from nmt.errors import DataError
from nmt.preprocess.pieces import MAX_LINE_BYTES, Chunk, Source

PAIRS_A_CHUNK = 5_000
BYTES_A_CHUNK = 2 << 20

_BLOCK_BYTES = 1 << 20
_NEWLINE = ord("\n")
Ends = np.ndarray[Any, np.dtype[np.int64]]


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
        self._num_pairs = 0  # passed over or read
        self._closed_bytes = 0  # of the sources that are done
        self._open: _OpenSource | None = None

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    def skip(self, num_pairs: int) -> int:
        """Pass over pairs and return their number, less than asked for only at the end."""
        goal = self._num_pairs + num_pairs
        while self._num_pairs < goal and (source := self._current()) is not None:
            self._num_pairs += source.skip(goal - self._num_pairs)
        return num_pairs - (goal - self._num_pairs)

    def read(self, num_pairs: int | None = None) -> Iterator[Chunk]:
        """Yield the next `num_pairs` pairs, or all, in chunks of at most `pairs_a_chunk` pairs and
        `bytes_a_chunk` bytes, but of one pair at least.

        Raises `DataError` for sides of different length, with both counts, and for files that
        cannot be read.
        """
        left = num_pairs
        while left != 0 and (source := self._current()) is not None:
            most = self._pairs_a_chunk if left is None else min(left, self._pairs_a_chunk)
            taken = source.take(most, self._bytes_a_chunk)
            disk_bytes = self._closed_bytes + source.disk_bytes
            yield Chunk(source.source, first_pair=self._num_pairs, disk_bytes=disk_bytes, **taken)
            self._num_pairs += taken["num_pairs"]
            left = None if left is None else left - taken["num_pairs"]

    def _current(self) -> _OpenSource | None:
        """Return the source that has the next pair, if any."""
        while self._open is None or not self._open.fill(self._pairs_a_chunk, self._bytes_a_chunk):
            self._close()
            source = next(self._sources, None)
            if source is None:
                return None
            self._open = _OpenSource(source)
        return self._open

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
        self._next_line = 1
        with contextlib.ExitStack() as stack:
            self._sides = [
                stack.enter_context(_Side(path, name))
                for path, name in zip(source.paths, source.names, strict=True)
            ]
            self.close = stack.pop_all().close

    @property
    def disk_bytes(self) -> int:
        return sum(side.disk_bytes for side in self._sides)

    def fill(self, num_lines: int, num_bytes: int) -> bool:
        """Read ahead; say whether there is another pair."""
        for side in self._sides:
            side.fill(num_lines, num_bytes)
        have = [side.num_lines > 0 for side in self._sides]
        if any(have) and not all(have):
            self._refuse()
        return all(have)

    def skip(self, num_pairs: int) -> int:
        num_pairs = min([num_pairs, *(side.num_lines for side in self._sides)])
        self._take(num_pairs)
        return num_pairs

    def take(self, num_pairs: int, num_bytes: int) -> dict[str, Any]:
        """Return what a chunk says of the next pairs: as many as asked for and there, and fit."""
        num_pairs = min([num_pairs, *(side.num_lines for side in self._sides)])
        sizes = np.sum([side.sizes(num_pairs) for side in self._sides], axis=0)
        num_pairs = max(1, int(np.searchsorted(sizes, num_bytes, side="right")))
        first_line = self._next_line
        raw, overlong = self._take(num_pairs)
        return {
            "first_line": first_line,
            "num_pairs": num_pairs,
            "raw": raw,
            "overlong": overlong,
        }

    def _take(self, num_pairs: int) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        raw = tuple(side.take(num_pairs) for side in self._sides)
        self._next_line += num_pairs
        overlong = [side.pop_overlong(before=self._next_line) for side in self._sides]
        return raw, tuple(sorted(set().union(*overlong)))

    def _refuse(self) -> None:
        names = self.source.names
        num_src, num_tgt = (self._next_line - 1 + side.count_rest() for side in self._sides)
        raise DataError(
            f"{names[0]} has {num_src} lines, {names[1]} {num_tgt}; "
            "extract the pair again, line by line"
        )


class _Side:
    """One file: a buffer of whole lines, and the start of the line after them."""

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        check_file(path)
        with unpacking(name):
            self._file = path.open("rb")
            self._stream = unpacked(self._file, path.suffix)
        self._thread = ThreadPoolExecutor(1)  # unpacks a block while the one before is cut
        self._ahead = self._thread.submit(self._fetch)
        self.disk_bytes = 0  # read
        self._lines = b""
        self._ends = np.empty(0, np.int64)  # where the lines of the buffer end
        self._next = 0  # the line of the buffer that comes next
        self._rest = b""
        self._num_read = 0
        self._overlong: list[int] = []
        self._is_swallowing = False  # the rest of an overlong line
        self._is_over = False

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.shutdown()
        self._stream.close()
        self._file.close()

    @property
    def num_lines(self) -> int:
        """Lines that wait in the buffer."""
        return len(self._ends) - self._next

    @property
    def _start(self) -> int:
        return int(self._ends[self._next - 1]) if self._next else 0

    def fill(self, num_lines: int, num_bytes: int) -> None:
        """Read until as many lines or bytes wait, or the file is over.

        What a chunk holds then depends on the text alone, not on how blocks cut it.
        """
        while (
            not self._is_over
            and self.num_lines < num_lines
            and len(self._lines) - self._start < num_bytes
        ):
            self._read()

    def sizes(self, num_lines: int) -> Ends:
        """Return the bytes of the next line, the next two lines, and so on."""
        return self._ends[self._next : self._next + num_lines] - self._start

    def take(self, num_lines: int) -> bytes:
        start = self._start
        self._next += num_lines
        return self._lines[start : self._start]

    def pop_overlong(self, *, before: int) -> set[int]:
        popped = {line for line in self._overlong if line < before}
        self._overlong = [line for line in self._overlong if line >= before]
        return popped

    def count_rest(self) -> int:
        """Count the lines from here to the end, which are gone then."""
        num_lines = self.num_lines
        while not self._is_over:
            self._next = len(self._ends)
            self._read()
            num_lines += self.num_lines
        return num_lines

    def _read(self) -> None:
        with unpacking(self._name):
            block, self.disk_bytes = self._ahead.result()
        if block:
            self._ahead = self._thread.submit(self._fetch)
        else:
            self._is_over = True
            block = b"\n" if self._rest or self._is_swallowing else b""  # ends the last line
        data = self._without_overlong(self._rest + block)
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        new = np.flatnonzero(np.frombuffer(data, np.uint8, end) == _NEWLINE) + 1
        self._num_read += len(new)
        start = self._start
        self._ends = np.concatenate([self._ends[self._next :], new + len(self._lines)]) - start
        self._lines = self._lines[start:] + data[:end]
        self._next = 0

    def _fetch(self) -> tuple[bytes, int]:
        return self._stream.read(_BLOCK_BYTES), self._file.tell()

    def _without_overlong(self, data: bytes) -> bytes:
        """Empty the first line of `data` when it is overlong; the others are within one block."""
        end = data.find(b"\n")
        if not self._is_swallowing and (end if end >= 0 else len(data)) <= MAX_LINE_BYTES:
            return data
        self._is_swallowing = end < 0
        if end < 0:
            return b""
        self._overlong.append(self._num_read + 1)
        return data[end:]
