"""Chunks hold whole lines and pairs stay together, for any lines, block sizes and spans."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from packing import write

from nmt.errors import DataError
from nmt.preprocess import chunks as chunks_module
from nmt.preprocess.chunks import Chunk, DataSource, Format, find_spans, read_chunks, read_span

Row = tuple[bytes, ...]
MAX_LINE = 64  # of `_small_blocks`


def pair_source(src: Path, tgt: Path) -> DataSource:
    return DataSource("", Format.pair, (src, tgt), (src.name, tgt.name))


def tsv_source(path: Path, content: bytes) -> DataSource:
    path.write_bytes(content)
    return DataSource("", Format.tsv, (path,), (path.name,))


def write_pair(folder: Path, name: str, src: bytes, tgt: bytes) -> DataSource:
    """Write both files of a source."""
    return pair_source(write(folder / f"{name}.en", src), write(folder / f"{name}.de", tgt))


def read_rows(chunks: list[Chunk]) -> list[Row]:
    """Return the lines of each row of chunks, and check that chunks count them."""
    rows: list[Row] = []
    for chunk in chunks:
        sides = []
        for raw in chunk.lines_by_file:
            assert raw.endswith(b"\n")
            assert raw.count(b"\n") == chunk.num_pairs > 0
            sides.append(raw.removesuffix(b"\n").split(b"\n"))
        rows += zip(*sides, strict=True)
    return rows


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read blocks of 64 bytes, the maximum length of a line."""
    monkeypatch.setattr(chunks_module, "_BLOCK_BYTES", MAX_LINE)
    monkeypatch.setattr(chunks_module, "MAX_LINE_BYTES", MAX_LINE)


def bound(monkeypatch: pytest.MonkeyPatch, num_pairs: int, num_bytes: int) -> None:
    """Set the limits of a chunk."""
    monkeypatch.setattr(chunks_module, "PAIRS_PER_CHUNK", num_pairs)
    monkeypatch.setattr(chunks_module, "BYTES_PER_CHUNK", num_bytes)


def join(lines: list[bytes], draw: random.Random) -> bytes:
    """End each line, the last one only sometimes."""
    text = b"".join(line + b"\n" for line in lines)
    if lines and lines[-1] and draw.random() < 0.5:
        return text[:-1]
    return text


def random_lines(number: int, draw: random.Random) -> list[bytes]:
    sizes = [0, 1, 5, 30, 63, 64, 65, 128, 200]
    return [bytes(draw.choices(b"ab\r\x85\0\xff ", k=draw.choice(sizes))) for _ in range(number)]


class RandomCorpus:
    """Sources of random lines, with the rows and overlong lines that reading should find."""

    def __init__(
        self, folder: Path, draw: random.Random, *, num_sources: int, sizes: list[int]
    ) -> None:
        self.sources: list[DataSource] = []
        self.rows: list[Row] = []
        self.lines: list[int] = []  # the number of each row in its source, from 1
        self.overlong: list[list[tuple[int, int]]] = []  # line and side, of each row
        for name in range(num_sources):
            num_pairs = draw.choice(sizes)
            src = random_lines(num_pairs, draw)
            tgt = random_lines(num_pairs, draw)
            self.sources.append(write_pair(folder, str(name), join(src, draw), join(tgt, draw)))
            for line, pair in enumerate(zip(src, tgt, strict=True), start=1):
                self._add(line, pair)

    def _add(self, line: int, pair: tuple[bytes, bytes]) -> None:
        row = list(pair)
        overlong = []
        for side in (0, 1):
            if len(row[side]) > MAX_LINE:
                row[side] = b""
                overlong.append((line, side))
        self.rows.append(tuple(row))
        self.lines.append(line)
        self.overlong.append(overlong)


def chain_overlong(overlong: Iterable[Iterable[tuple[int, int]]]) -> list[tuple[int, int]]:
    return list(itertools.chain.from_iterable(overlong))


@pytest.mark.usefixtures("_small_blocks")
def test_any_lines_are_read_in_pairs_with_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        corpus = RandomCorpus(tmp_path, draw, num_sources=3, sizes=[0, 1, 7, 40])
        max_pairs = draw.choice([1, 5, 50])
        max_bytes = draw.choice([1, 90, 999])
        bound(monkeypatch, max_pairs, max_bytes)
        chunks = list(read_chunks(corpus.sources))
        assert read_rows(chunks) == corpus.rows, seed
        first_pair = 0
        for chunk in chunks:
            assert chunk.first_pair == first_pair
            end = first_pair + chunk.num_pairs
            lines = range(chunk.first_line, chunk.first_line + chunk.num_pairs)
            assert corpus.lines[first_pair:end] == list(lines)
            assert list(chunk.overlong) == chain_overlong(corpus.overlong[first_pair:end])
            assert chunk.num_pairs <= max_pairs
            assert chunk.num_pairs == 1 or sum(map(len, chunk.lines_by_file)) <= max_bytes
            first_pair = end


@pytest.mark.usefixtures("_small_blocks")
def test_spans_of_any_size_hold_all_pairs_and_each_is_read_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(monkeypatch, 7, 1000)
    for seed in range(8):
        draw = random.Random(seed)
        corpus = RandomCorpus(tmp_path, draw, num_sources=4, sizes=[0, 1, 20, 33])
        for size in (1, 10, 20, 33, 1000):
            spans = find_spans({"x": [], "y": corpus.sources}, size)
            assert [span.first_pair for span in spans] == list(range(0, len(corpus.rows), size))
            for number, span in enumerate(spans):
                assert (span.corpus, span.index_in_corpus, span.index_overall) == (
                    "y",
                    number,
                    number,
                )
            for span in draw.sample(spans, len(spans)):
                chunks = list(read_span(corpus.sources, span))
                end = span.first_pair + span.num_pairs
                assert end == min(span.first_pair + size, len(corpus.rows))
                assert chunks[0].first_pair == span.first_pair
                assert read_rows(chunks) == corpus.rows[span.first_pair : end], (seed, size)
                overlong = chain_overlong(corpus.overlong[span.first_pair : end])
                assert chain_overlong(chunk.overlong for chunk in chunks) == overlong


def test_chunks_do_not_depend_on_the_size_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b"".join(b"%d %s\n" % (i, b"x" * (i % 50)) for i in range(2000))
    source = write_pair(tmp_path, "a", text, text)
    bound(monkeypatch, 300, 5000)
    expected = list(read_chunks([source]))
    assert len(expected) > 10
    for num_bytes in (100, 4096, 1 << 20):
        monkeypatch.setattr(chunks_module, "_BLOCK_BYTES", num_bytes)
        assert list(read_chunks([source])) == expected, num_bytes


def test_a_chunk_has_no_more_bytes_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_pair(tmp_path, "a", b"abcd\n" * 5, b"abcd\n" * 5)
    for limit, sizes in ((20, [2, 2, 1]), (19, [1] * 5), (21, [2, 2, 1]), (30, [3, 2])):
        bound(monkeypatch, 300, limit)
        assert [chunk.num_pairs for chunk in read_chunks([source])] == sizes, limit


def test_lines_end_at_newlines_and_at_the_end_of_the_file(tmp_path: Path) -> None:
    texts = {b"": [], b"\n": [b""], b"a": [b"a"], b"a\n\n": [b"a", b""], b"\nb": [b"", b"b"]}
    for content, expected in texts.items():
        chunks = list(read_chunks([tsv_source(tmp_path / "a.tsv", content)]))
        assert read_rows(chunks) == [(line,) for line in expected], content


def test_unequal_files_are_refused_with_both_counts(tmp_path: Path) -> None:
    good = write_pair(tmp_path, "good", b"x\n" * 5, b"x\n" * 5)
    for num_src, num_tgt in ((10, 9), (9, 10), (0, 3), (3, 0), (1, 20000)):
        bad = write_pair(tmp_path, "bad", b"x\n" * num_src, b"y\n" * num_tgt)
        expected = re.escape(f"bad.en has {num_src} lines, bad.de {num_tgt}; extract")
        with pytest.raises(DataError, match=expected):
            list(read_chunks([good, bad]))


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    source = tsv_source(tmp_path / "a.tsv", b"one\ntwo\nthree\n")
    (span,) = find_spans({"": [source]})
    os.truncate(tmp_path / "a.tsv", 8)
    with pytest.raises(DataError, match="^a.tsv became shorter"):
        list(read_span([source], span))


_READ = """
import resource, sys
from pathlib import Path
from nmt.preprocess.chunks import Format, DataSource, read_chunks
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
paths = Path(sys.argv[1]), Path(sys.argv[1] + ".tgt")
num_pairs = 0
overlong = []
for chunk in read_chunks([DataSource("", Format.pair, paths, ("a", "b"))]):
    if num_pairs == 0:
        text = chunk.lines_by_file[0][:12]
    num_pairs += chunk.num_pairs
    overlong += chunk.overlong
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start, num_pairs, overlong, text)
"""


@pytest.mark.slow
def test_long_lines_take_no_memory_and_shift_no_other(tmp_path: Path) -> None:
    for num_lines, num_bytes, expected in (
        (1, 100_000_000, "3 [(2, 0)] b'one\\n\\nthree\\n'\n"),
        (100, 1 << 20, "102 [] b'one\\n\\x00"),
    ):
        path = tmp_path / str(num_lines)
        with path.open("wb") as stream:
            stream.write(b"one\n")
            for _ in range(num_lines):  # lines of zeros, which occupy no disk space
                stream.seek(num_bytes, os.SEEK_CUR)
                stream.write(b"\n")
            stream.write(b"three\n")
        path.with_suffix(".tgt").write_bytes(b"eins\n" * (num_lines + 2))
        command = [sys.executable, "-c", _READ, str(path)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        kilobytes, result = output.split(" ", 1)
        assert int(kilobytes) < 20_000
        assert result.startswith(expected)
