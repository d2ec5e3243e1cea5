"""Chunks of whole lines: pairs never slip, whatever the lines, the blocks and the borders."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packing import write

from nmt.errors import DataError
from nmt.preprocess import chunks
from nmt.preprocess.chunks import Chunk, Format, Source, find_spans, read_chunks, read_span

Row = tuple[bytes, ...]


def source(*paths: Path) -> Source:
    kind = Format.pair if len(paths) == 2 else Format.tsv
    return Source("", kind, paths, tuple(path.name for path in paths))


def rows(some: list[Chunk]) -> list[Row]:
    """Take chunks apart into lines, and check what they say of themselves."""
    found = []
    for chunk in some:
        sides = [raw.split(b"\n") for raw in chunk.raw]
        assert all(side.pop() == b"" and len(side) == chunk.num_pairs > 0 for side in sides)
        found += list(zip(*sides, strict=True))
    return found


def join(lines: list[bytes], draw: random.Random) -> bytes:
    """End each line, the last one only sometimes."""
    text = b"".join(line + b"\n" for line in lines)
    return text[:-1] if lines and lines[-1] and draw.random() < 0.5 else text


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read 64 bytes at a time, the longest a line may have."""
    monkeypatch.setattr(chunks, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(chunks, "MAX_LINE_BYTES", 64)


def bound(monkeypatch: pytest.MonkeyPatch, num_pairs: int, num_bytes: int) -> None:
    """Set the limits of a chunk."""
    monkeypatch.setattr(chunks, "PAIRS_A_CHUNK", num_pairs)
    monkeypatch.setattr(chunks, "BYTES_A_CHUNK", num_bytes)


def random_lines(number: int, draw: random.Random) -> list[bytes]:
    sizes = [0, 1, 5, 30, 63, 64, 65, 128, 200]
    return [bytes(draw.choices(b"ab\r\x85\0\xff ", k=draw.choice(sizes))) for _ in range(number)]


def blanked(lines: list[bytes]) -> list[bytes]:
    return [b"" if len(line) > 64 else line for line in lines]


@pytest.mark.usefixtures("_small_blocks")
def test_any_lines_come_back_in_pairs_with_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(20):
        check_reading(tmp_path, monkeypatch, random.Random(seed))


def check_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: random.Random) -> None:
    sources, expected, overlong, numbers = [], [], [], []
    for name in range(3):
        sides = [random_lines(number, draw) for number in [draw.choice([0, 1, 7, 40])] * 2]
        paths = [tmp_path / f"{name}.{i}" for i in range(2)]
        pairs = zip(paths, sides, strict=True)
        sources.append(source(*(write(path, join(lines, draw)) for path, lines in pairs)))
        expected += list(zip(*map(blanked, sides), strict=True))
        numbers += range(1, len(sides[0]) + 1)
        overlong += [[len(line) > 64 for line in pair] for pair in zip(*sides, strict=True)]
    bounds = draw.choice([1, 5, 50]), draw.choice([1, 90, 999])
    bound(monkeypatch, *bounds)
    found = list(read_chunks(sources))
    assert rows(found) == expected
    first = [0, *itertools.accumulate(chunk.num_pairs for chunk in found)]
    assert [chunk.first_pair for chunk in found] == first[:-1]
    for chunk in found:
        lines = range(chunk.first_line, chunk.first_line + chunk.num_pairs)
        here = slice(chunk.first_pair, chunk.first_pair + chunk.num_pairs)
        assert numbers[here] == list(lines)
        flags = zip(lines, overlong[here], strict=True)
        long = [(line, side) for line, pair in flags for side in (0, 1) if pair[side]]
        assert chunk.overlong == tuple(long)
        assert chunk.num_pairs <= bounds[0]
        assert chunk.num_pairs == 1 or sum(map(len, chunk.raw)) <= bounds[1]


@pytest.mark.usefixtures("_small_blocks")
def test_spans_of_any_size_hold_all_pairs_and_each_is_read_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(monkeypatch, 7, 1000)
    for seed in range(20):
        draw = random.Random(seed)
        sources, expected, overlong = [], [], []
        for name in range(4):
            sides = [random_lines(number, draw) for number in [draw.choice([0, 1, 20, 33])] * 2]
            pairs = zip(("a", "b"), sides, strict=True)
            sources.append(
                source(*(write(tmp_path / f"{name}{x}", join(y, draw)) for x, y in pairs))
            )
            expected += list(zip(*map(blanked, sides), strict=True))
            overlong += [sum(len(line) > 64 for line in pair) for pair in zip(*sides, strict=True)]
        for size in (1, 10, 20, 33, 1000):
            spans = find_spans({"x": [], "y": sources}, size)
            assert [s.first_pair for s in spans] == list(range(0, len(expected), size))
            assert [(s.corpus, s.number, s.order) for s in spans] == [
                ("y", n, n) for n in range(len(spans))
            ]
            for span in draw.sample(spans, len(spans)):
                found = list(read_span(sources, span))
                end = span.first_pair + span.num_pairs
                assert rows(found) == expected[span.first_pair : end], (seed, size)
                assert end == min(span.first_pair + size, len(expected))
                assert found[0].first_pair == span.first_pair
                lost = sum(len(chunk.overlong) for chunk in found)
                assert lost == sum(overlong[span.first_pair : end])


def test_chunks_depend_on_the_text_alone_not_on_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b"".join(b"%d %s\n" % (i, b"x" * (i % 50)) for i in range(2000))
    paths, seen = [write(tmp_path / side, text) for side in "ab"], []
    bound(monkeypatch, 300, 5000)
    for num_bytes in (100, 4096, 1 << 20):
        monkeypatch.setattr(chunks, "_BLOCK_BYTES", num_bytes)
        chunks_read = read_chunks([source(*paths)])
        seen.append([(c.first_line, c.num_pairs, c.raw) for c in chunks_read])
    assert len(seen[0]) > 10
    assert all(other == seen[0] for other in seen)


def test_a_chunk_has_as_many_bytes_as_the_limit_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / side, b"abcd\n" * 5) for side in "ab"]
    for limit, sizes in ((20, [2, 2, 1]), (19, [1] * 5), (21, [2, 2, 1]), (30, [3, 2])):
        bound(monkeypatch, 300, limit)
        assert [chunk.num_pairs for chunk in read_chunks([source(*paths)])] == sizes, limit


def test_a_line_is_what_a_newline_ends_or_the_rest(tmp_path: Path) -> None:
    texts = {b"": [], b"\n": [b""], b"a": [b"a"], b"a\n\n": [b"a", b""], b"\n\nb": [b"", b"", b"b"]}
    for content, expected in texts.items():
        found = list(read_chunks([source(write(tmp_path / "a.tsv", content))]))
        assert rows(found) == [(line,) for line in expected], content


def test_unequal_files_are_refused_with_both_counts(tmp_path: Path) -> None:
    good = source(*(write(tmp_path / name, b"x\n" * 5) for name in ("good.en", "good.de")))
    for num_src, num_tgt in ((10, 9), (9, 10), (0, 3), (3, 0), (1, 20000)):
        src = write(tmp_path / "bad.en", b"x\n" * num_src)
        bad = source(src, write(tmp_path / "bad.de", b"y\n" * num_tgt))
        expected = re.escape(f"bad.en has {num_src} lines, bad.de {num_tgt}; extract")
        with pytest.raises(DataError, match=expected):
            list(read_chunks([good, bad]))


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    some = [source(write(tmp_path / "a.tsv", b"one\ntwo\nthree\n"))]
    (span,) = find_spans({"": some})
    os.truncate(tmp_path / "a.tsv", 8)
    with pytest.raises(DataError, match="^a.tsv became shorter"):
        list(read_span(some, span))


_READ = """
import resource, sys
from pathlib import Path
from nmt.preprocess.chunks import Format, Source, read_chunks
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[1:]:
    paths = Path(name), Path(name + ".tgt")
    parts = [
        (chunk.num_pairs, chunk.overlong, [raw[:12] for raw in chunk.raw])
        for chunk in read_chunks([Source("", Format.pair, paths, ("a", "b"))])
    ]
    overlong = [line for _, places, _ in parts for line, _ in places]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(memory, sum(number for number, _, _ in parts), overlong, parts[0][2])
"""


@pytest.mark.slow
def test_long_lines_take_no_memory_and_shift_no_other(tmp_path: Path) -> None:
    paths = []
    for name, holes in {"gigantic": [100_000_000], "longest": [1 << 20] * 100}.items():
        paths.append(tmp_path / name)
        with paths[-1].open("wb") as stream:
            stream.write(b"one\n")
            for num_bytes in holes:  # of zeros, which take no disk
                stream.seek(num_bytes, os.SEEK_CUR)
                stream.write(b"\n")
            stream.write(b"three\n")
        (tmp_path / f"{name}.tgt").write_bytes(b"eins\n" * (len(holes) + 2))
    command = [sys.executable, "-c", _READ, *map(str, paths)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    expected = "3 [2] [b'one\\n\\nthree\\n'", "102 [] [b'one\\n\\x00"
    for line, found in zip(out.splitlines(), expected, strict=True):
        kilobytes, rest = line.split(" ", 1)
        assert int(kilobytes) < 20_000
        assert rest.startswith(found)
