"""Reads the text that is translated, scored and compared, line by line.

Lines end at the byte \\n and nowhere else, so that both sides of a pair always have the same
number. It knows nothing of tokens, nor of preprocessing, which reads chunks.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from nmt.config import resolve
from nmt.data.reading import open_bytes, unpacking
from nmt.errors import DataError

Pair = tuple[str, str]
# What str.splitlines() and many tools take for the end of a line, inside one of ours; and NUL
_LINE_BREAK = re.compile("[\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\x00]")


def clean_line(raw: bytes, place: str) -> str:
    """Decode one line without its \\n: UTF-8, no BOM, no trailing \\r, other line breaks inside
    become a space.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise DataError(
            f"{place}: byte {error.start + 1} (0x{byte:02x}) is not UTF-8; convert the file, "
            "for example with iconv -f latin1 -t utf-8"
        ) from None
    return on_one_line(text.removeprefix("\ufeff").removesuffix("\r"))


def on_one_line(text: str) -> str:
    """Return `text` with spaces for line breaks and NUL."""
    return _LINE_BREAK.sub(" ", text)


def read_stream(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a byte stream; `name` stands in error messages."""
    with unpacking(name):
        for number, raw in enumerate(stream, start=1):
            yield clean_line(raw.removesuffix(b"\n"), f"{name}:{number}")


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a file, plain, .gz, .xz or .zst."""
    path = resolve(path)
    with open_bytes(path) as stream:
        yield from read_stream(stream, str(path))


def read_input(path: str) -> Iterator[str]:
    """Yield the lines of a file, or of stdin for "-"."""
    if path != "-":
        return read_lines(path)
    if sys.stdin is None:
        raise DataError("stdin is closed; give the path of a file")
    return read_stream(sys.stdin.buffer, "stdin")


def count_lines(path: str) -> int:
    """Count the lines of a file without decoding them."""
    with open_bytes(resolve(path)) as stream, unpacking(path):
        return sum(1 for _ in stream)


def pair_lines(
    src_lines: Iterator[str], tgt_lines: Iterator[str], *, names: tuple[str, str]
) -> Iterator[Pair]:
    """Yield the pairs of two aligned streams; raise a `DataError` with both counts when they are
    not equally long.
    """
    end = object()
    for num_pairs, (source, target) in enumerate(
        itertools.zip_longest(src_lines, tgt_lines, fillvalue=end)
    ):
        if source is end or target is end:
            num_src = num_pairs + (source is not end) + sum(1 for _ in src_lines)
            num_tgt = num_pairs + (target is not end) + sum(1 for _ in tgt_lines)
            raise DataError(
                f"{names[0]} has {num_src} lines, {names[1]} {num_tgt}; "
                "extract the pair again, line by line"
            )
        yield cast(str, source), cast(str, target)
