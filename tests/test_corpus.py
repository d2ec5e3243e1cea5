r"""Reading parallel text: a line ends only at the byte \n, so pairs stay together.

Every line of the corpus below contains its number, and nearly every line has a character that some
readers take for the end of a line or of the file.
"""

from __future__ import annotations

import io
import itertools
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packing import SUFFIXES, pack, write

from nmt.data.text import (
    ArrivingLines,
    count_lines,
    open_bytes,
    pair_lines,
    read_blocks,
    read_lines,
    read_stream,
)
from nmt.errors import DataError

ODD = {
    "line separator": "\u2028",
    "paragraph separator": "\u2029",
    "next line": "\x85",
    "vertical tab": "\v",
    "form feed": "\f",
    "file separator": "\x1c",
    "group separator": "\x1d",
    "record separator": "\x1e",
    "carriage return": "\r",
    "two of them": "\r\r",
    "end of file in DOS": "\x1a",
    "nul": "\0",
    "byte order mark": "\ufeff",
    "no-break space": "\u00a0",
    "zero-width joiner": "\u200d",
    "emoji": "😀",
}
UNCHANGED = {"\x1a", "\ufeff", "\u00a0", "\u200d", "😀"}  # everything else becomes a space


TEXT = [t.replace("?", odd) for odd in ODD.values() for t in ("?{n} x", "{n} x?y", "{n} x?")]
TEXT += ["", " ", "{n} CRLF\r", "\r", "{n} last"]
LINES = [line.replace("{n}", str(n)).encode() for n, line in enumerate(TEXT)]
FORMS = {
    "plain": b"".join(line + b"\n" for line in LINES),
    "no newline at the end": b"\n".join(LINES),
    "CRLF": b"".join(line.removesuffix(b"\r") + b"\r\n" for line in LINES),
    "BOM": b"\xef\xbb\xbf" + b"\n".join(LINES),
}


def test_lines_are_as_many_as_newlines_and_keep_their_numbers(tmp_path: Path) -> None:
    for form, suffix in itertools.product(FORMS, SUFFIXES):
        lines = list(read_lines(write(tmp_path / f"text.{suffix}", FORMS[form])))
        assert len(lines) == len(LINES), (form, suffix)
        for i, line in enumerate(lines):
            expected = [str(i)] if LINES[i].strip() else []
            assert re.findall(r"\d+", line) == expected, (form, suffix)
            assert len(line.splitlines()) <= 1, (form, suffix)
            assert "\0" not in line, (form, suffix)


def test_lines_end_at_newlines_and_at_the_end_of_the_file() -> None:
    cuts = [(b"", []), (b"\n", [""]), (b"a", ["a"]), (b"a\n\n", ["a", ""]), (b"\nb", ["", "b"])]
    cuts += [(b"\xef\xbb\xbfa b\r\nc\r\n\r\n", ["a b", "c", ""])]
    for odd in ODD.values():  # each character stays or becomes a space
        expected_odd = odd if odd in UNCHANGED else " " * len(odd)
        cuts.append((f"a{odd}b\n".encode(), [f"a{expected_odd}b"]))
    for content, expected in cuts:
        assert list(read_stream(io.BytesIO(content), "stdin")) == expected
        reader, writer = os.pipe()
        for byte in content:
            os.write(writer, bytes([byte]))
        os.close(writer)
        assert list(read_stream(ArrivingLines(reader), "stdin")) == expected
        os.close(reader)


def test_lines_of_a_pipe_come_as_they_are_written() -> None:
    reader, writer = os.pipe()
    lines = ArrivingLines(reader)
    assert not lines.has_more()
    os.write(writer, b"one\ntwo\nthr")
    assert lines.has_more()
    assert [next(iter(lines)), next(iter(lines))] == [b"one\n", b"two\n"]
    os.write(writer, b"ee\n" + b"x" * 1000)
    assert next(iter(lines)) == b"three\n"
    assert not lines.has_more()
    os.close(writer)
    assert lines.has_more()
    assert list(lines) == [b"x" * 1000]
    os.close(reader)


def test_unequal_files_are_refused_with_both_counts(tmp_path: Path) -> None:
    counts = [(10, 9), (9, 10), (0, 3), (3, 0), (1, 5)]
    for (num_src, num_tgt), suffix in itertools.product(counts, SUFFIXES):
        src = write(tmp_path / f"src.{suffix}", b"x\n" * num_src)
        tgt = write(tmp_path / f"tgt.{suffix}", b"y\n" * num_tgt)
        with pytest.raises(DataError) as caught:
            list(pair_lines(read_lines(src), read_lines(tgt), names=(str(src), str(tgt))))
        assert f"{src} has {num_src} lines, {tgt} {num_tgt};" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_text_that_is_not_utf8_is_refused_with_file_line_and_byte(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        path = write(tmp_path / f"latin.{suffix}", b"ok\nGr\xc3\xbcn und Gr\xfc\xdfe\nok\n")
        reader = read_lines(path)
        assert next(reader) == "ok"
        with pytest.raises(DataError, match=rf"{re.escape(str(path))}:2: byte 13 \(0xfc\)"):
            next(reader)
    for content in (b"a\xed\xa0\x80", b"\xc0\x80", b"a\xff", b"\xe2\x82"):
        with pytest.raises(DataError, match="stdin:1: byte"):
            list(read_stream(io.BytesIO(content), "stdin"))


# --- invalid files


KINDS = {"bz2": "bzip2", "gz": "gzip", "xz": "xz", "zst": "Zstandard"}


def test_a_truncated_or_damaged_archive_is_refused(tmp_path: Path) -> None:
    text = "".join(f"{i} {random.Random(i).random()}\n" for i in range(1000)).encode()
    for suffix, kind in KINDS.items():
        path = tmp_path / f"text.{suffix}"
        packed = pack(text, suffix)
        broken = [packed[:num_bytes] for num_bytes in (1, 5, 100, 5000, -8, -1)]
        if suffix != "zst":  # its checksum is optional
            for offset in (0, 2, 30, 3000, -6, -2):
                content = bytearray(packed)
                for i in range(4 if offset > 2 else 1):
                    content[offset + i] ^= 0xFF
                broken.append(bytes(content))
        for number, content in enumerate(broken):
            path.write_bytes(content)
            for read in (lambda p: list(read_lines(p)), count_lines):
                with pytest.raises(DataError, match=f"^{path}: ") as caught:
                    read(str(path))
                assert number >= 6 or f"not a whole {kind} file" in str(caught.value)
                assert "\n" not in str(caught.value)


def test_archives_that_were_joined_are_read_to_the_end(tmp_path: Path) -> None:
    for suffix in KINDS:
        path = tmp_path / f"text.{suffix}"
        path.write_bytes(pack(b"a\nb", suffix) + pack(b"c\n", suffix))
        assert list(read_lines(path)) == ["a", "bc"], suffix
        upper = path.rename(tmp_path / f"TEXT.{suffix.upper()}")
        assert list(read_lines(upper)) == ["a", "bc"], suffix
        assert count_lines(str(upper)) == 2, suffix


def test_files_without_text_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{re.escape(str(tmp_path / 'none'))} does not exist"):
        list(read_lines(tmp_path / "none"))
    with pytest.raises(DataError, match="is a folder"):
        list(read_lines(tmp_path))
    for name in ("a.zip", "a.tar.gz", "a.tgz", "a.tbz", "a.tar", "A.ZIP"):
        (tmp_path / name).write_bytes(b"x\n")
        with pytest.raises(
            DataError, match=rf"{name}: nmt reads \.gz, \.bz2, \.xz and \.zst; unpack"
        ):
            list(read_lines(tmp_path / name))
    for name in ("a.zip.txt", "tar", "a.tar.b.gz", "bz2"):  # which only look like archives
        assert list(read_lines(write(tmp_path / name, b"x\n"))) == ["x"]


def test_bytes_without_a_line_end_are_counted_from_the_last_line_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nmt.data.text._LARGE_BLOCK_BYTES", 8)
    monkeypatch.setattr("nmt.data.text._MAX_BYTES_WITHOUT_LINE_END", 10)
    blocks = [b"aaaaaa\nb", b"cccccccc", b"dddddddd"]
    assert list(read_blocks(io.BytesIO(b"".join(blocks[:2])), "file")) == blocks[:2]
    with pytest.raises(DataError, match="file is not text: it has 17 bytes without a line end"):
        list(read_blocks(io.BytesIO(b"".join(blocks)), "file"))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_error_of_the_reader_is_not_reported_as_a_damaged_file(
    tmp_path: Path, suffix: str
) -> None:
    path = write(tmp_path / f"corpus.{suffix}", b"four\n")
    with pytest.raises(ValueError, match="invalid literal"), open_bytes(path) as stream:
        int(stream.read())


def test_text_whose_lines_do_not_end_is_refused() -> None:
    block = b"x" * (1 << 20)

    class Device(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return block

    with pytest.raises(DataError, match="device is not text: .* without a line end"):
        for _ in read_blocks(Device(), "device"):
            pass
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as file, ThreadPoolExecutor() as thread:
        written = thread.submit(file.write, block * 5)
        with pytest.raises(DataError, match="pipe:1: the line has more than the 4,194,304 bytes"):
            list(read_stream(ArrivingLines(reader), "pipe"))
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            written.result()
