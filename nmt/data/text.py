"""Read text line by line, from files (plain, .gz, .bz2, .xz, .zst), stdin and the bundled corpora.

Lines end at the byte \\n only, so that both sides of a pair have the same number of lines.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from nmt.config import Corpus, resolve_path
from nmt.errors import DataError, NmtError, to_one_line

Pair = tuple[str, str]
_FORMATS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
_OPEN_FUNCTIONS: dict[str, Callable[..., object]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_SIGNATURES = {  # the first bytes of a file of each format
    ".gz": b"\x1f\x8b\x08",
    ".bz2": b"BZh",
    ".xz": b"\xfd7zXZ\0",
    ".zst": b"\x28\xb5\x2f\xfd",
}
_UNSUPPORTED_SUFFIX = re.compile(r"(?i)\.(zip|7z|rar|lz4|br|tgz|txz|tbz2?|tar(\.\w+)?)$")
# Characters at which str.splitlines() and many tools end a line, and NUL
_LINE_BREAK = re.compile("[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\x00]")
UNSPACED_LETTERS = (  # Thai, Lao, Burmese, Khmer; Chinese and Japanese; Korean
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fff\u3040-\u9fff\uac00-\ud7af"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
"""For patterns: letters of scripts without spaces, and of Korean, where particles follow an address
without a space.
"""
UNSPACED = f"{UNSPACED_LETTERS}\u3000-\u303f\ufe30-\ufe4f\uff00-\uffef"
"""For patterns: letters and punctuation that may follow an address or a placeholder without a
space.
"""
SPACED_CHARACTER = rf"[^\W{UNSPACED}]"
"""For patterns: a letter or digit of other scripts, or an underscore."""
URL_CHARACTERS = (
    rf'(?:[^\s<>"{UNSPACED}]'
    rf"|(?<=[/=_:+.%&#~-])[{UNSPACED_LETTERS}]+"  # letters after a sign
    rf"|[{UNSPACED_LETTERS}]+(?=[/?&=#%_]))"  # letters before a sign
)
"""For patterns: a character of a web address, or consecutive letters of scripts without spaces.

These letters count as part of the address only directly before or after a sign such as a slash.
Elsewhere, they may begin the text that follows the address.
"""
EMAIL = (
    rf"(?:{SPACED_CHARACTER}|[.+-]){{1,256}}"
    rf"@(?:{SPACED_CHARACTER}|-){{1,256}}\.(?:{SPACED_CHARACTER}|[.-]){{1,256}}"
)
"""For patterns: an e-mail address. The limits save memory in very long words."""
_BLOCK_BYTES = 1 << 16  # size of the start of a file, where `check_file` looks for its format
_LARGE_BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 4 << 20  # longest line to translate, score or evaluate
_MAX_BYTES_WITHOUT_LINE_END = 1 << 28  # more is not text, but a device or a sparse file
_MAX_WAIT_SECONDS = 0.05  # longest pause between lines that are translated together


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading. Decompress it if its suffix names a compression.

    Raises `DataError` if the file is missing, damaged or a folder, and `NmtError` if the disk
    cannot be read. The `with` block must not write files: an `OSError` in the block is reported as
    an error of reading.
    """
    check_file(path)
    with (
        explain_read_errors(str(path)),
        path.open("rb") as file,
        decompress(file, path.suffix) as stream,
    ):
        yield stream


def decompress(file: IO[bytes], suffix: str) -> IO[bytes]:
    """Return a stream that decompresses an open file if `suffix` names a compression.

    Raises `LZMAError` for xz that begins with zeros.
    """
    suffix = suffix.lower()
    if suffix == ".xz":
        first_bytes = cast(io.BufferedReader, file).peek(1)
        # lzma would skip leading zeros: for minutes in a sparse file, forever in /dev/zero
        if first_bytes.startswith(b"\0"):
            raise lzma.LZMAError("it begins with zeros")
    if suffix in _OPEN_FUNCTIONS:
        return cast(IO[bytes], _OPEN_FUNCTIONS[suffix](file, "rb"))
    if suffix == ".zst":
        import pyarrow as pa  # slow to import

        raw = pa.input_stream(file, compression="zstd")
        return cast(IO[bytes], io.BufferedReader(raw))  # pyarrow's stream cannot read lines
    return file


def compress(file: IO[bytes], suffix: str) -> IO[bytes]:
    """Return a stream that compresses into an open file if `suffix` names a compression."""
    suffix = suffix.lower()
    if suffix == ".gz":
        # without file name and time, so that equal text gives equal bytes
        return cast(IO[bytes], gzip.GzipFile("", "wb", fileobj=file, mtime=0))
    if suffix in _OPEN_FUNCTIONS:
        return cast(IO[bytes], _OPEN_FUNCTIONS[suffix](file, "wb"))
    if suffix == ".zst":
        import pyarrow as pa  # slow to import

        return cast(IO[bytes], pa.output_stream(file, compression="zstd"))
    return file


def is_compressed(path: str | Path) -> bool:
    """Return whether the suffix of a file names a compression."""
    return Path(path).suffix.lower() in _FORMATS


def is_stream(name: str | Path) -> bool:
    """Return whether a file can be read only once: stdin (-), a named pipe or a device."""
    if name == "-":
        return True
    path = resolve_path(name)
    return path.exists() and not path.is_file() and not path.is_dir()


def check_file(path: Path) -> None:
    """Raise a `DataError` unless `path` is a file that nmt can read.

    Rejects missing files, folders, archives such as .zip, UTF-16, and compressed files that lack
    the suffix of the compression.
    """
    if not path.is_file() and not is_stream(path):
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {problem}; give the path of a text file")
    match = _UNSUPPORTED_SUFFIX.search(path.name)
    if match is not None:
        raise DataError(f"{path}: nmt reads .gz, .bz2, .xz and .zst; unpack this {match[0]} first")
    if path.is_file() and not is_compressed(path):
        with explain_read_errors(str(path)), path.open("rb") as file:
            first_bytes = file.read(_BLOCK_BYTES)
        for suffix, signature in _SIGNATURES.items():
            if first_bytes.startswith(signature):
                raise DataError(f"{path} is a {_FORMATS[suffix]} file; name it {path.name}{suffix}")
        has_utf16_bom = first_bytes.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        if has_utf16_bom and b"\0" in first_bytes:
            raise DataError(f"{path} is UTF-16; convert it with iconv -f utf-16 -t utf-8")


@contextlib.contextmanager
def explain_read_errors(name: str) -> Iterator[None]:
    """Turn exceptions of reading in the `with` block into errors that name the file.

    An exception of a decompressor becomes a `DataError`, an exception of the disk an `NmtError`.
    """
    try:
        yield
    # All decompressors raise EOFError for a file that was cut off. For other damage, gzip raises
    # OSError or zlib.error, lzma raises LZMAError, and bz2 and Arrow raise OSError. Errors of the
    # disk are OSErrors, too. They have an errno, and errors of decompressors do not.
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise NmtError(f"{name} cannot be read: {error.strerror}") from None
        format = _FORMATS.get(Path(name).suffix.lower(), "compressed")
        reason = to_one_line(error)
        raise DataError(f"{name}: not a whole {format} file ({reason}); fetch it again") from None


def replace_line_breaks(text: str) -> str:
    """Replace line breaks and NUL with spaces."""
    return _LINE_BREAK.sub(" ", text)


def read_blocks(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """Yield a byte stream in blocks of 1 MiB. Raises `DataError` if a line exceeds 256 MiB."""
    line_bytes = 0  # number of bytes after the last \n
    while block := stream.read(_LARGE_BLOCK_BYTES):
        last_line_end = block.rfind(b"\n")
        if last_line_end == -1:  # the block has no \n
            line_bytes += len(block)
        else:
            line_bytes = len(block) - last_line_end - 1
        if line_bytes > _MAX_BYTES_WITHOUT_LINE_END:
            raise DataError(
                f"{name} is not text: it has {line_bytes:,} bytes without a line end; give another "
                "file"
            )
        yield block


def _read_raw_lines(stream: IO[bytes] | ArrivingLines, name: str) -> Iterator[bytes]:
    """Yield the lines of a byte stream. Raises `DataError` for a line above `MAX_LINE_BYTES`.

    The error is raised before the line ends, since a device or a sparse file may have an endless
    line, which would fill the memory.
    """
    lines: Iterable[bytes] = stream
    if not isinstance(stream, ArrivingLines):  # `ArrivingLines` limits its lines itself
        lines = _limited_lines(stream)
    for line_number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{name}:{line_number}: the line has more than the {MAX_LINE_BYTES:,} bytes that "
                "nmt reads; divide it into sentences"
            )
        yield line


def _limited_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a byte stream, and a line above `MAX_LINE_BYTES` in several parts.

    The first part has `MAX_LINE_BYTES` + 1 bytes, so that the caller can refuse the line.
    """
    while line := stream.readline(MAX_LINE_BYTES + 1):
        yield line


def read_stream(stream: IO[bytes] | ArrivingLines, name: str) -> Iterator[str]:
    """Yield the lines of a byte stream, decoded as UTF-8.

    Removes a BOM at the start of a line and a \\r at its end. Other line breaks become spaces.
    Error messages call the stream `name`.
    """
    with explain_read_errors(name):
        for line_number, raw_line in enumerate(_read_raw_lines(stream, name), start=1):
            try:
                text = raw_line.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte {error.start + 1} (0x{raw_line[error.start]:02x})"
                raise DataError(
                    f"{name}:{line_number}: {byte} is not UTF-8; convert the file, for example "
                    "with iconv -f latin1 -t utf-8"
                ) from None
            text = text.removesuffix("\n").removeprefix("\ufeff").removesuffix("\r")
            yield replace_line_breaks(text)


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a file, which may be compressed."""
    path = resolve_path(path)
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
    with open_bytes(resolve_path(path)) as stream:
        return sum(1 for _ in _read_raw_lines(stream, path))


def pair_lines(
    src_lines: Iterator[str], tgt_lines: Iterator[str], *, names: tuple[str, str]
) -> Iterator[Pair]:
    """Yield pairs of aligned lines. Raises `DataError` if one side has more lines."""
    pairs = itertools.zip_longest(src_lines, tgt_lines)
    for num_pairs, (source, target) in enumerate(pairs):
        if source is None or target is None:
            num_src = num_pairs
            num_tgt = num_pairs
            # the longer side has the line that was just read, and the lines after it
            if source is None:
                num_tgt += 1 + sum(1 for _ in tgt_lines)
            else:
                num_src += 1 + sum(1 for _ in src_lines)
            raise DataError(
                f"{names[0]} has {num_src} lines, {names[1]} {num_tgt}; extract the pair again, "
                "line by line"
            )
        yield source, target


class ArrivingLines:
    """Yields each line of a pipe or terminal, as bytes, as soon as it arrives.

    All lines but the last end with \\n. A line above `MAX_LINE_BYTES` comes in parts. Only one
    thread may read an instance.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._unfinished = bytearray()  # the start of a line whose end has not arrived
        self._has_ended = False

    def __iter__(self) -> Iterator[bytes]:
        while not self._has_ended:
            while self._lines:
                yield self._lines.popleft()
            # wait for data, even if the descriptor is non-blocking
            select.select([self._descriptor], [], [])
            data = os.read(self._descriptor, 1 << 16)
            self._has_ended = len(data) == 0
            chunks = data.split(b"\n")
            last_chunk = chunks.pop()  # no \n follows it; empty if `data` ends with \n
            for chunk in chunks:  # each completes a line
                self._unfinished += chunk + b"\n"
                self._lines.append(bytes(self._unfinished))
                self._unfinished.clear()
            self._unfinished += last_chunk
            if len(self._unfinished) > MAX_LINE_BYTES:  # `_read_raw_lines` rejects it
                self._lines.append(bytes(self._unfinished))
                self._unfinished.clear()
        # `_lines` is empty, since the last read returned no data
        if self._unfinished:
            yield bytes(self._unfinished)

    def has_more(self) -> bool:
        """Return whether the next line, or the end of the input, arrives within 50 ms."""
        if self._lines or self._has_ended:
            return True
        readable, _, _ = select.select([self._descriptor], [], [], _MAX_WAIT_SECONDS)
        return bool(readable)


def load_bundled_corpus(corpus: Corpus, seed: int) -> dict[str, list[Pair]]:
    """Return train, valid and test pairs of a bundled corpus.

    The corpus `copy` is random and depends on `seed`. The corpus `numbers` is always the same.
    """
    if corpus is Corpus.numbers:  # written by scripts/make_numbers.py
        compressed = Path(__file__).with_name("numbers.tsv.bz2").read_bytes()
        text = bz2.decompress(compressed).decode("utf-8")
        pairs = []
        for line in text.removesuffix("\n").split("\n"):
            source, target = line.split("\t")
            pairs.append((source, target))
        # 10,000 pairs for training, 300 for validation, all others for test
        return {"train": pairs[:10_000], "valid": pairs[10_000:10_300], "test": pairs[10_300:]}
    # the first example of "The Annotated Transformer" (Rush, 2018): the target is the source
    rng = random.Random(seed)
    numbers = [str(number) for number in range(1, 11)]
    distinct_lines: dict[str, None] = {}  # an ordered set
    while len(distinct_lines) < 5700:  # 5000 for training, 200 for validation, 500 for test
        length = rng.randint(8, 12)
        line = " ".join(rng.choices(numbers, k=length))
        distinct_lines[line] = None
    pairs = [(line, line) for line in distinct_lines]
    return {"train": pairs[:5000], "valid": pairs[5000:5200], "test": pairs[5200:]}
