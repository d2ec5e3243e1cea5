r"""Divide training text into spans of pairs, and read a span in chunks.

A span becomes one shard. A chunk is held in memory as a whole, so its pairs and bytes are bounded.
Lines end at the byte \n only.
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
"""Longer lines are overlong: they become empty lines, and `Chunk.overlong` lists them."""

# Number of bytes that are read from a file at once. It must not exceed MAX_LINE_BYTES. Then only
# the first line that ends in a block can be overlong: every other line that ends in the block also
# starts in it, so it is no longer than the block.
_BLOCK_BYTES = 1 << 20


class Format(Enum):
    """How the files of a source store pairs, one per line."""

    pair = "pair"  # line i of one file and line i of another
    tsv = "tsv"
    jsonl = "jsonl"


@dataclass(frozen=True)
class DataSource:
    """One or more uncompressed files that hold pairs of a corpus, line by line."""

    corpus: str  # its name in data.corpora, or ""
    format: Format
    paths: tuple[Path, ...]
    """Either one file with all columns, or separate files in this order: source language, target
    language, and the optional alignments and scores."""
    names: tuple[str, ...]  # the user's names of these files, for messages
    columns: tuple[int, ...] = (1, 2)  # TSV columns from 1: source, target, perhaps alignment
    fields: tuple[str, ...] = ("src", "tgt")  # JSON fields: source, target, perhaps alignment
    has_alignment_file: bool = False  # whether the third file is an alignment
    score: str | None = None  # column of the score in TSV, from 1, or its field in JSON
    tags: Tags = Tags()  # put before the sources and targets when they are encoded
    settings_key: str = ""  # key of its settings, such as data.train, for messages

    @property
    def alignment_file_index(self) -> int:
        """Index in `paths` of the file that can hold alignments: the third, or the only file."""
        return 2 if self.has_alignment_file else 0


class Location(NamedTuple):
    """A position in the input: the file as the user named it, line and byte from 1."""

    file: str
    line: int
    byte: int | None = None  # position of an invalid byte in the line, if the line has one

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
    index_in_corpus: int
    index_overall: int  # index among the spans of all corpora
    first_pair: int  # number of the first pair in the corpus, from 0
    num_pairs: int
    source_index: int  # the span starts in `sources[source_index]`, see `read_span`
    first_line: int  # number of the first line in that source, from 1
    offsets: tuple[int, ...]  # byte at which that line starts, in each file of that source

    @property
    def name(self) -> str:
        """File name for this span, without suffix."""
        if not self.corpus:
            return f"train-{self.index_in_corpus:05d}"
        return f"train-{self.corpus}-{self.index_in_corpus:05d}"


@dataclass(frozen=True)
class Chunk:
    """Consecutive pairs of one source."""

    source: DataSource
    first_pair: int  # number of the first pair in the corpus, from 0
    first_line: int  # number of the first line in the source, from 1
    num_pairs: int
    lines_by_file: tuple[bytes, ...]  # for each file, `num_pairs` lines, each ended by \n
    overlong: tuple[tuple[int, int], ...]
    """Line number and file index of each overlong line, which is empty in `lines_by_file`."""

    def locate(self, row: int, file_index: int = 0, byte: int | None = None) -> Location:
        """Return the location of a row (from 0) in a file.

        `file_index` is an index in `source.paths`: 0 for the source language, 1 for the target
        language. It has no effect if one file has all columns.
        """
        names = self.source.names
        if len(names) == 1:
            file_index = 0
        return Location(names[file_index], self.first_line + row, byte)


def find_spans(
    corpora: Mapping[str, Sequence[DataSource]], pairs_per_span: int = sys.maxsize
) -> list[Span]:
    """Count the lines of all sources, and divide each corpus into spans.

    Raises `DataError` if the sides differ in length and for files that cannot be read.
    """
    spans: list[Span] = []
    for corpus, sources in corpora.items():
        spans += _find_corpus_spans(corpus, sources, pairs_per_span, num_earlier_spans=len(spans))
    return spans


def _find_corpus_spans(
    corpus: str, sources: Sequence[DataSource], pairs_per_span: int, num_earlier_spans: int
) -> list[Span]:
    """Return the spans of a corpus, each with `pairs_per_span` pairs. The last one may be shorter.

    `num_earlier_spans` is the number of spans of the corpora before it.
    """
    num_pairs = 0
    spans: list[Span] = []
    for source_index, source in enumerate(sources):
        # The first rows of this source complete the last span of the previous source. After 8 pairs
        # in spans of 5, that span lacks -8 % 5 = 2 pairs, and a new span starts at row 2.
        first_row = -num_pairs % pairs_per_span
        num_lines = 0
        offsets_by_file = []
        for path, name in zip(source.paths, source.names, strict=True):
            num_file_lines, offsets = _find_span_offsets(path, name, first_row, pairs_per_span)
            offsets_by_file.append(offsets)
            if len(offsets_by_file) == 1:
                num_lines = num_file_lines
            elif num_file_lines != num_lines:
                raise DataError(
                    f"{source.names[0]} has {num_lines} lines, {name} {num_file_lines}; "
                    "extract the pair again, line by line"
                )
        # all files have the same number of lines, so their i-th offsets belong to the same span
        for i, offsets_of_span in enumerate(zip(*offsets_by_file, strict=True)):
            span = Span(
                corpus=corpus,
                index_in_corpus=len(spans),
                index_overall=num_earlier_spans + len(spans),
                first_pair=len(spans) * pairs_per_span,
                num_pairs=pairs_per_span,
                source_index=source_index,
                first_line=first_row + i * pairs_per_span + 1,  # lines count from 1
                offsets=offsets_of_span,
            )
            spans.append(span)
        num_pairs += num_lines
    if spans:
        spans[-1] = replace(spans[-1], num_pairs=num_pairs - spans[-1].first_pair)
    return spans


def _find_span_offsets(
    path: Path, name: str, first_row: int, pairs_per_span: int
) -> tuple[int, list[int]]:
    """Count the lines of a file, and return the byte at which each span starts.

    The spans start at the rows `first_row`, `first_row + pairs_per_span` and so forth, from 0.
    """
    check_file(path)
    num_line_ends = 0
    num_bytes = 0
    last_byte = b"\n"
    offsets = []
    next_row = first_row  # where the next span starts
    if first_row == 0:  # no \n precedes row 0, so the loop does not find it
        offsets.append(0)
        next_row = pairs_per_span
    with explain_read_errors(name), path.open("rb", buffering=0) as file:
        for block in read_blocks(file, name):
            newlines = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            # Row i starts after newline i - 1 of the file. This is newline i - 1 - num_line_ends
            # of the block, since earlier blocks have num_line_ends newlines.
            last_row = num_line_ends + len(newlines)
            rows = np.arange(next_row, last_row + 1, pairs_per_span)
            preceding_newlines = newlines[rows - 1 - num_line_ends]
            offsets += (num_bytes + preceding_newlines + 1).tolist()
            next_row += pairs_per_span * len(rows)
            num_line_ends += len(newlines)
            num_bytes += len(block)
            last_byte = block[-1:]
    num_lines = num_line_ends
    if last_byte != b"\n":
        num_lines += 1
    if offsets and offsets[-1] == num_bytes:
        offsets.pop()  # no line starts at the end of the file
    return num_lines, offsets


def read_chunks(sources: Sequence[DataSource]) -> Iterator[Chunk]:
    """Yield all pairs of `sources`. See `find_spans` and `read_span`."""
    for span in find_spans({"": sources}):
        yield from read_span(sources, span)


def read_span(sources: Sequence[DataSource], span: Span) -> Iterator[Chunk]:
    """Yield the pairs of a span in chunks. `sources` are the sources of its corpus.

    A chunk has at most `PAIRS_PER_CHUNK` pairs and `BYTES_PER_CHUNK` bytes. A longer pair is
    a chunk of its own.
    """
    next_pair = span.first_pair
    end_pair = span.first_pair + span.num_pairs
    first_line = span.first_line
    offsets = span.offsets
    for source in sources[span.source_index :]:
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
    source: DataSource, next_pair: int, end_pair: int, next_line: int, offsets: Sequence[int]
) -> Iterator[Chunk]:
    """Yield the pairs of a source from `next_pair` to `end_pair`, or to the end of its files.

    `next_line` is the line (from 1) of the first pair, and `offsets` its byte in each file.
    """
    with ExitStack() as stack:
        files = []
        for file_index, path in enumerate(source.paths):
            name = source.names[file_index]
            files.append(_LineFile(path, name, next_line, offsets[file_index]))
            stack.callback(files[-1].close)
        while next_pair < end_pair:
            num_lines = min(end_pair - next_pair, PAIRS_PER_CHUNK)
            for file in files:
                file.fill_buffer()
                num_lines = min(num_lines, len(file.line_ends))
            if num_lines == 0:
                break
            # (num_lines,): bytes of all files up to the end of each line
            chunk_bytes = np.sum([file.line_ends[:num_lines] for file in files], axis=0)
            num_fitting = int(np.searchsorted(chunk_bytes, BYTES_PER_CHUNK, side="right"))
            num_pairs = max(1, num_fitting)
            overlong = []
            for file_index, file in enumerate(files):
                for line in file.overlong:
                    if next_line <= line < next_line + num_pairs:
                        overlong.append((line, file_index))
            yield Chunk(
                source=source,
                first_pair=next_pair,
                first_line=next_line,
                num_pairs=num_pairs,
                lines_by_file=tuple(file.pop_lines(num_pairs) for file in files),
                overlong=tuple(sorted(overlong)),
            )
            next_line += num_pairs
            next_pair += num_pairs


class _LineFile:
    """Reads one file and buffers whole lines.

    Reading starts at byte `offset`, where the line with the number `first_line` starts.
    """

    def __init__(self, path: Path, name: str, first_line: int, offset: int) -> None:
        self._name = name
        with explain_read_errors(name):
            self._file = path.open("rb", buffering=0)
            self._file.seek(offset)
        self._at_end = False
        self._buffer = b""  # whole lines
        self._incomplete_line = b""  # the start of the line after the buffered lines
        self._next_line = first_line  # number of the incomplete line, from 1
        self.line_ends = np.empty(0, np.int64)  # position in the buffer after the \n of each line
        self.overlong: list[int] = []  # numbers of overlong lines, from 1

    def close(self) -> None:
        self._file.close()

    def fill_buffer(self) -> None:
        """Read until the buffer holds the lines of the largest chunk, or to the end of the file.

        Chunks therefore do not depend on the size of the blocks that are read.
        """
        while len(self.line_ends) < PAIRS_PER_CHUNK and len(self._buffer) < BYTES_PER_CHUNK:
            if not self._read_block():
                break

    def pop_lines(self, num_lines: int) -> bytes:
        """Remove the first `num_lines` lines from the buffer and return them."""
        end = int(self.line_ends[num_lines - 1])
        lines = self._buffer[:end]
        self._buffer = self._buffer[end:]
        self.line_ends = self.line_ends[num_lines:] - end
        return lines

    def _read_block(self) -> bool:
        """Append a block of the file to the buffer. Returns False at the end of the file."""
        if self._at_end:
            return False
        with explain_read_errors(self._name):
            block = self._file.read(_BLOCK_BYTES)
        if not block:
            self._at_end = True
            if not self._incomplete_line:
                return False
            block = b"\n"  # completes the last line
        text = self._incomplete_line + block
        first_newline = text.find(b"\n")
        # only the first line can be overlong, see `_BLOCK_BYTES`
        if first_newline > MAX_LINE_BYTES:
            self.overlong.append(self._next_line)
            text = text[first_newline:]  # empties the line, but keeps its \n
        lines_end = text.rfind(b"\n") + 1
        # Memory is bounded: from MAX_LINE_BYTES + 1 bytes, a line is known to be overlong.
        incomplete_end = lines_end + MAX_LINE_BYTES + 1
        self._incomplete_line = text[lines_end:incomplete_end]
        is_newline = np.frombuffer(text, np.uint8, count=lines_end) == ord("\n")
        line_ends = np.flatnonzero(is_newline) + 1
        self.line_ends = np.concatenate([self.line_ends, line_ends + len(self._buffer)])
        self._buffer += text[:lines_end]
        self._next_line += len(line_ends)
        return True
