"""Text, line by line: of files (plain, .gz, .xz, .zst), of stdin, and of corpora that come along.

Lines end at the byte \\n and nowhere else, so that both sides of a pair always have the same
number. Preprocessing opens files here too, but reads them in chunks.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import itertools
import lzma
import os
import random
import re
import select
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from nmt.config import Corpus, resolve
from nmt.errors import DataError, NmtError

Pair = tuple[str, str]
_KINDS = {".gz": "gzip", ".xz": "xz", ".zst": "Zstandard"}
_STARTS = {".gz": b"\x1f\x8b\x08", ".xz": b"\xfd7zXZ\0", ".zst": b"\x28\xb5\x2f\xfd"}
_FOREIGN = re.compile(r"(?i)\.(zip|bz2|7z|rar|lz4|br|tgz|txz|tar(\.\w+)?)$")  # nobody unpacks these
# What str.splitlines() and many tools take for the end of a line, inside one of ours; and NUL
_LINE_BREAK = re.compile("[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\x00]")
_BLOCK_BYTES = 1 << 16
_PATIENCE_SECONDS = 0.05  # between two lines of one writer


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, through the decompressor that its suffix names.

    Raises `DataError` for a missing or damaged file and a folder, `NmtError` for what the disk
    does not give.
    """
    check_file(path)
    with unpacking(str(path)), path.open("rb") as file, unpacked(file, path.suffix) as stream:
        yield stream


def unpacked(file: IO[bytes], suffix: str) -> IO[bytes]:
    """Read an open file through what `suffix` names: .gz, .xz, .zst, else as it is."""
    suffix = suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(file, "rb"))
    if suffix == ".xz":
        return cast(IO[bytes], io.BufferedReader(_XzStreams(file), _BLOCK_BYTES))
    if suffix == ".zst":
        import pyarrow as pa  # which other files need not wait for

        raw = pa.input_stream(file, compression="zstd")
        return cast(IO[bytes], io.BufferedReader(raw))  # which finds lines, as pyarrow cannot
    return file


class _XzStreams(io.RawIOBase):
    """The streams of an .xz file, one after the other, with zeros between and after them.

    Python's `lzma` takes these zeros, and whatever else is no stream, for the end of the file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._stream = lzma.LZMADecompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        content = b""
        while not content:
            if self._stream.eof:
                block = self._stream.unused_data.lstrip(b"\0")
                while not block:
                    if not (zeros := self._file.read(_BLOCK_BYTES)):
                        return 0
                    block = zeros.lstrip(b"\0")
                self._stream = lzma.LZMADecompressor()
            else:
                needs_input = self._stream.needs_input
                block = self._file.read(_BLOCK_BYTES) if needs_input else b""
                if needs_input and not block:
                    raise EOFError(
                        "Compressed file ended before the end-of-stream marker was reached"
                    )
            content = self._stream.decompress(block, len(buffer))
        buffer[: len(content)] = content
        return len(content)


def packed(file: IO[bytes], suffix: str) -> IO[bytes]:
    """Write to an open file through what `suffix` names, as `unpacked` reads it."""
    suffix = suffix.lower()
    if suffix == ".gz":  # without name and time: the same text gives the same bytes
        return cast(IO[bytes], gzip.GzipFile("", "wb", fileobj=file, mtime=0))
    if suffix == ".xz":
        return lzma.open(file, "wb")
    if suffix == ".zst":
        import pyarrow as pa

        return cast(IO[bytes], pa.output_stream(file, compression="zstd"))
    return file


def is_packed(path: str | Path) -> bool:
    """Return whether the suffix of a file names a compression."""
    return Path(path).suffix.lower() in _KINDS


def is_stream(name: str | Path) -> bool:
    """Return whether a file can be read only once: - for stdin, a named pipe, a device, or what a
    shell makes of <(command).
    """
    path = resolve(name)
    return name == "-" or (path.exists() and not path.is_file() and not path.is_dir())


def check_file(path: Path) -> None:
    """Raise a `DataError` unless `path` is a file or stream, and no archive of a kind that nobody
    unpacks, no packed file under a plain name, and no UTF-16.
    """
    if not path.is_file() and not is_stream(path):
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}; give the path of a text file")
    if found := _FOREIGN.search(path.name):
        raise DataError(f"{path}: nmt reads .gz, .xz and .zst; unpack this {found[0]} first")
    if path.is_file() and not is_packed(path):
        with unpacking(str(path)), path.open("rb") as file:
            start = file.read(_BLOCK_BYTES)
        for suffix, magic in _STARTS.items():
            if start.startswith(magic):
                raise DataError(f"{path} is a {_KINDS[suffix]} file; name it {path.name}{suffix}")
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and b"\0" in start:
            raise DataError(f"{path} is UTF-16; convert it with iconv -f utf-16 -t utf-8")


@contextlib.contextmanager
def unpacking(name: str) -> Iterator[None]:
    """Turn what decompressors raise for a damaged or cut file into a `DataError` that names it, and
    what a disk raises, which may pass, into an `NmtError`.
    """
    try:
        yield
    # a ValueError is Arrow's
    except (EOFError, zlib.error, lzma.LZMAError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise NmtError(f"{name} cannot be read: {error.strerror}") from None
        kind = _KINDS.get(Path(name).suffix.lower(), "compressed")
        reason = " ".join(str(error).split())
        raise DataError(f"{name}: not a whole {kind} file ({reason}); fetch it again") from None


def on_one_line(text: str) -> str:
    """Return `text` with spaces for line breaks and NUL."""
    return _LINE_BREAK.sub(" ", text)


def read_stream(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a byte stream in UTF-8, without BOM and trailing \\r, other line breaks as
    spaces; `name` stands in error messages.
    """
    with unpacking(name):
        for number, raw in enumerate(stream, start=1):
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte {error.start + 1} (0x{raw[error.start]:02x})"
                raise DataError(
                    f"{name}:{number}: {byte} is not UTF-8; convert the file, for example with "
                    "iconv -f latin1 -t utf-8"
                ) from None
            text = text.removesuffix("\n").removeprefix("\ufeff").removesuffix("\r")
            yield on_one_line(text)


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
    with open_bytes(resolve(path)) as stream:
        return sum(1 for _ in stream)


def pair_lines(
    src_lines: Iterator[str], tgt_lines: Iterator[str], *, names: tuple[str, str]
) -> Iterator[Pair]:
    """Yield pairs of aligned lines; streams that are not equally long are a `DataError`."""
    both = itertools.zip_longest(src_lines, tgt_lines)
    for num_pairs, (source, target) in enumerate(both):
        if source is None or target is None:
            num_src = num_pairs + (source is not None) + sum(1 for _ in src_lines)
            num_tgt = num_pairs + (target is not None) + sum(1 for _ in tgt_lines)
            raise DataError(
                f"{names[0]} has {num_src} lines, {names[1]} {num_tgt}; "
                "extract the pair again, line by line"
            )
        yield source, target


class WaitingLines:
    """The lines of a pipe or terminal as they come, so that an answer need not wait for more of
    them: bytes that end with \\n but for the last. One reader alone.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._rest = bytearray()  # of a line that has no end yet
        self._is_over = False

    def __iter__(self) -> Iterator[bytes]:
        while not self._is_over:
            while self._lines:
                yield self._lines.popleft()
            select.select([self._descriptor], [], [])  # some pass on pipes that do not block
            data = os.read(self._descriptor, 1 << 16)
            self._is_over = not data
            *lines, end = data.split(b"\n")
            for line in lines:
                self._rest += line + b"\n"
                self._lines.append(bytes(self._rest))
                self._rest.clear()
            self._rest += end
        if self._rest:
            yield bytes(self._rest)

    def has_more(self) -> bool:
        """Say whether a line, or the end, is there or comes within an instant."""
        if self._lines or self._is_over:
            return True
        return bool(select.select([self._descriptor], [], [], _PATIENCE_SECONDS)[0])


def bundled_corpus(corpus: Corpus, seed: int) -> dict[str, list[Pair]]:
    """Return train, valid and test pairs of a corpus that comes along; `seed` is that of `copy`."""
    if corpus is Corpus.numbers:  # written by scripts/make_numbers.py
        packed = Path(__file__).with_name("numbers.tsv.bz2").read_bytes()
        rows = bz2.decompress(packed).decode("utf-8").split("\n")
        pairs = [(src, tgt) for src, tgt in (row.split("\t") for row in rows if row)]
        ends = (10_000, 10_300, 10_800)
    else:  # the first example of "The Annotated Transformer" (Rush 2018): the target is the source
        draw, ends = random.Random(seed), (5000, 5200, 5700)
        distinct: dict[str, None] = {}  # in the order of drawing
        while len(distinct) < ends[-1]:
            distinct[" ".join(draw.choices("abcdefghij", k=draw.randint(8, 12)))] = None
        pairs = [(row, row) for row in distinct]
    train, valid, test = ends
    return {"train": pairs[:train], "valid": pairs[train:valid], "test": pairs[valid:test]}
