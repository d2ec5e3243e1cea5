r"""Divide sources into spans, the input of one shard each, and read a span in chunks of pairs.

Lines end at the byte \n only. Memory is bounded for lines of any length.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nmt.data.languages import Tags
from nmt.data.text import check_file, explain_read_errors, read_blocks
from nmt.errors import DataError

PAIRS_PER_CHUNK = 5_000
BYTES_PER_CHUNK = 2 << 20
MAX_LINE_BYTES = 1 << 20
"""The text of longer lines is discarded; their positions are kept."""

# A file is read in blocks of this size. It is at most MAX_LINE_BYTES, so that only the first line
# that ends in a block can be longer than MAX_LINE_BYTES.
_BLOCK_BYTES = 1 << 20


class Format(Enum):
    """How the files of a source store pairs, one per line."""

    pair = "pair"  # line i of one file and line i of another
    tsv = "tsv"
    jsonl = "jsonl"


@dataclass(frozen=True)
class Source:
    """Uncompressed files that hold pairs of one corpus, line by line."""

    corpus: str  # its name in data.corpora, or ""
    format: Format
    paths: tuple[Path, ...]
    """Either one file with all columns, or separate files in this order: source, target, and the
    optional alignments and scores."""
    names: tuple[str, ...]  # the user's names of these files, for messages
    columns: tuple[int, ...] = (1, 2)  # TSV columns from 1: source, target, perhaps alignment
    fields: tuple[str, ...] = ("src", "tgt")  # JSON fields: source, target, perhaps alignment
    has_alignment_file: bool = False  # whether the third file is an alignment
    score: str | None = None  # column of the score in TSV, from 1, or its field in JSON
    tags: Tags = Tags()
    key: str = ""  # key of its settings, such as data.train, for messages

    @property
    def alignment_side(self) -> int:
        """Index in `paths` of the file with the alignments, if there are any."""
        return 2 if self.has_alignment_file else 0


class Location(NamedTuple):
    """A position in the input: the file as the user named it, line and byte from 1."""

    file: str
    line: int
    byte: int | None = None  # the invalid byte in the line, if the error is about one

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}"
        return text if self.byte is None else f"{text}:{self.byte}"

    def to_report(self) -> dict[str, Any]:
        """Return the fields as `report.json` stores them."""
        fields = self._asdict()
        if self.byte is None:
            del fields["byte"]
        return fields


@dataclass(frozen=True)
class Span:
    """Consecutive pairs of a corpus, the input of one shard."""

    corpus: str
    number: int  # index among the spans of its corpus
    order: int  # index among the spans of all corpora
    first_pair: int  # number of the first pair in the corpus, from 0
    num_pairs: int
    source: int  # the span starts in the `Source` with this index in the list of its corpus
    first_line: int  # number of the first line in that source, from 1
    offsets: tuple[int, ...]  # byte at which that line starts, in each file of the source

    @property
    def name(self) -> str:
        """File name for this span, without suffix."""
        corpus = f"{self.corpus}-" if self.corpus else ""
        return f"train-{corpus}{self.number:05d}"


@dataclass(frozen=True)
class Chunk:
    """Consecutive pairs of one source."""

    source: Source
    first_pair: int  # number of the first pair in the corpus, from 0
    first_line: int  # number of the first line in the source, from 1
    num_pairs: int
    raw: tuple[bytes, ...]  # for each file, `num_pairs` lines, each ended by \n
    overlong: tuple[tuple[int, int], ...]
    """Line number and file (index in `raw`) of each line above MAX_LINE_BYTES. Such a line is empty
    in `raw`."""

    def location(self, row: int, side: int = 0, byte: int | None = None) -> Location:
        """Return the location of a row (from 0) on a side: 0 for the source, 1 for the target.

        If each side is a file, `side` is the index of any file of the source.
        """
        names = self.source.names
        file_index = side if len(names) > 1 else 0
        return Location(names[file_index], self.first_line + row, byte)


def find_spans(
    corpora: Mapping[str, Sequence[Source]], pairs_per_span: int = sys.maxsize
) -> list[Span]:
    """Count the lines of all sources, and divide each corpus into spans.

    Raises `DataError` if the sides differ in length and for files that cannot be read.
    """
    spans: list[Span] = []
    for corpus, sources in corpora.items():
        spans += _find_corpus_spans(corpus, sources, pairs_per_span, first_order=len(spans))
    return spans


def _find_corpus_spans(
    corpus: str, sources: Sequence[Source], size: int, first_order: int
) -> list[Span]:
    """Return the spans of a corpus, each with `size` pairs, except perhaps the last one."""
    num_pairs = 0
    spans: list[Span] = []
    for source_index, source in enumerate(sources):
        # Index (from 0) of the line at which the first new span starts. The lines before it
        # complete the last span of the previous source, which has num_pairs % size pairs so far.
        first_index = -num_pairs % size
        num_lines = 0
        offsets_by_file = []
        for path, name in zip(source.paths, source.names, strict=True):
            num_file_lines, offsets = _find_line_offsets(path, name, first_index, size)
            offsets_by_file.append(offsets)
            if len(offsets_by_file) == 1:
                num_lines = num_file_lines
            elif num_file_lines != num_lines:
                raise DataError(
                    f"{source.names[0]} has {num_lines} lines, {name} {num_file_lines}; "
                    "extract the pair again, line by line"
                )
        # all files have the same number of lines, so their i-th offsets belong to the same line
        for i, offsets_of_line in enumerate(zip(*offsets_by_file, strict=True)):
            span = Span(
                corpus=corpus,
                number=len(spans),
                order=first_order + len(spans),
                first_pair=len(spans) * size,
                num_pairs=size,
                source=source_index,
                first_line=first_index + i * size + 1,
                offsets=offsets_of_line,
            )
            spans.append(span)
        num_pairs += num_lines
    if spans:
        spans[-1] = replace(spans[-1], num_pairs=num_pairs - spans[-1].first_pair)
    return spans


def _find_line_offsets(path: Path, name: str, first_index: int, step: int) -> tuple[int, list[int]]:
    """Count the lines of a file, and return the byte offsets of some of them.

    These are the lines `first_index`, `first_index + step` and so forth, counted from 0.
    """
    check_file(path)
    num_line_ends = 0
    num_bytes = 0
    last_byte = b"\n"
    offsets = []
    next_index = first_index  # the next line whose offset is needed
    if first_index == 0:  # no line end precedes the first line
        offsets.append(0)
        next_index = step
    with explain_read_errors(name), path.open("rb", buffering=0) as file:
        for block in read_blocks(file, name):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            # Line i starts after line end i - 1, so this block has the starts of the lines from
            # num_line_ends + 1 to num_line_ends + len(ends).
            indices = np.arange(next_index, num_line_ends + len(ends) + 1, step)
            preceding_ends = ends[indices - num_line_ends - 1]  # indices in this block
            offsets += (num_bytes + preceding_ends + 1).tolist()
            next_index += step * len(indices)
            num_line_ends += len(ends)
            num_bytes += len(block)
            last_byte = block[-1:]
    num_lines = num_line_ends
    if last_byte != b"\n":
        num_lines += 1
    # A line end at the end of the file has an offset after it, but no line starts there.
    num_offsets = len(range(first_index, num_lines, step))
    return num_lines, offsets[:num_offsets]


def read_chunks(sources: Sequence[Source]) -> Iterator[Chunk]:
    """Yield all pairs of `sources`. See `find_spans` and `read_span`."""
    for span in find_spans({"": sources}):
        yield from read_span(sources, span)


def read_span(sources: Sequence[Source], span: Span) -> Iterator[Chunk]:
    """Yield the pairs of a span in chunks. `sources` are the sources of its corpus.

    A chunk has at most `PAIRS_PER_CHUNK` pairs and `BYTES_PER_CHUNK` bytes, or a single pair.
    """
    next_pair = span.first_pair
    end_pair = span.first_pair + span.num_pairs
    first_line = span.first_line
    offsets = span.offsets
    for source in sources[span.source :]:
        if next_pair == end_pair:
            return
        for chunk in _read_source(source, next_pair, end_pair, first_line, offsets):
            yield chunk
            next_pair += chunk.num_pairs
        # continue with the first line of the next source
        first_line = 1
        offsets = (0, 0, 0, 0)  # a source has at most four files
    if next_pair < end_pair:
        raise DataError(f"{sources[-1].names[0]} became shorter while it was read; start again")


def _read_source(
    source: Source, next_pair: int, end_pair: int, next_line: int, offsets: Sequence[int]
) -> Iterator[Chunk]:
    """Yield the pairs of a source from `next_pair` to `end_pair`, or to the end of its files.

    `next_line` is the line (from 1) of the first pair, and `offsets` its byte in each file.
    """
    with ExitStack() as stack:
        files = []
        for side, path in enumerate(source.paths):
            files.append(_LineFile(path, source.names[side], next_line, offsets[side]))
            stack.callback(files[-1].close)
        while next_pair < end_pair:
            num_lines = min(end_pair - next_pair, PAIRS_PER_CHUNK)
            for file in files:
                file.fill_buffer()
                num_lines = min(num_lines, len(file.ends))
            if num_lines == 0:
                break
            # num_bytes[n - 1] is the number of bytes of the first n lines of all files
            num_bytes = np.sum([file.ends[:num_lines] for file in files], axis=0)
            num_fitting = int(np.searchsorted(num_bytes, BYTES_PER_CHUNK, side="right"))
            num_pairs = max(1, num_fitting)
            overlong = []
            for side, file in enumerate(files):
                for line in file.overlong:
                    if next_line <= line < next_line + num_pairs:
                        overlong.append((line, side))
            yield Chunk(
                source=source,
                first_pair=next_pair,
                first_line=next_line,
                num_pairs=num_pairs,
                raw=tuple(file.pop_lines(num_pairs) for file in files),
                overlong=tuple(sorted(overlong)),
            )
            next_line += num_pairs
            next_pair += num_pairs


class _LineFile:
    """Reads one file, from line `first_line` at byte `offset` on, and buffers whole lines."""

    def __init__(self, path: Path, name: str, first_line: int, offset: int) -> None:
        self._name = name
        with explain_read_errors(name):
            self._file = path.open("rb", buffering=0)
            self._file.seek(offset)
        self._at_end = False
        self._buffer = b""  # whole lines
        self._incomplete_line = b""  # the start of the line after the buffered ones
        self._next_line = first_line  # the number of that line, from 1
        self.ends = np.empty(0, np.int64)  # byte after the \n of each buffered line
        self.overlong: list[int] = []  # numbers of overlong lines, from 1

    def close(self) -> None:
        self._file.close()

    def fill_buffer(self) -> None:
        """Read until the buffer holds enough for any chunk, or to the end of the file.

        The division into chunks therefore does not depend on the block size.
        """
        while len(self.ends) < PAIRS_PER_CHUNK and len(self._buffer) < BYTES_PER_CHUNK:
            if not self._read_block():
                break

    def pop_lines(self, num_lines: int) -> bytes:
        """Remove the first `num_lines` lines from the buffer and return them."""
        end = int(self.ends[num_lines - 1])
        lines = self._buffer[:end]
        self._buffer = self._buffer[end:]
        self.ends = self.ends[num_lines:] - end
        return lines

    def _read_block(self) -> bool:
        """Append a block of the file to the buffer. Returns False at the end of the file."""
        if self._at_end:
            return False
        with explain_read_errors(self._name):
            block = self._file.read(_BLOCK_BYTES)
        if not block:
            self._at_end = True
            block = b"\n" if self._incomplete_line else b""  # a last line without \n gets one
        text = self._incomplete_line + block
        first_end = text.find(b"\n")
        # Only the first line can be overlong: the lines after it lie within one block.
        if first_end > MAX_LINE_BYTES:
            self.overlong.append(self._next_line)
            text = text[first_end:]
        end = text.rfind(b"\n") + 1
        # one byte more than the maximum suffices to recognize an overlong line
        self._incomplete_line = text[end : end + MAX_LINE_BYTES + 1]
        ends = np.flatnonzero(np.frombuffer(text, np.uint8, count=end) == ord("\n")) + 1
        self.ends = np.concatenate([self.ends, ends + len(self._buffer)])
        self._buffer += text[:end]
        self._next_line += len(ends)
        return True
