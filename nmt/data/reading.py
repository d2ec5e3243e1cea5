"""Opens files as bytes, plain or compressed as their name says (.gz, .xz, .zst).

Damage in an archive becomes one line that names the file. It knows nothing of lines and text.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from nmt.errors import DataError

_KINDS = {".gz": "gzip", ".xz": "xz", ".zst": "Zstandard"}
_FOREIGN = re.compile(
    r"\.(zip|bz2|7z|rar|lz4|br|tgz|txz|tar(\.\w+)?)$"
)  # would be read as nonsense


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file, through the decompressor that its suffix names; read it within `unpacking`.

    Raises `DataError` for a missing file, a folder and a file that may not be read.
    """
    check_file(path)
    with unpacking(str(path)):
        return unpacked(path, path.suffix)


def unpacked(file: Path | IO[bytes], suffix: str) -> IO[bytes]:
    """Open `file`, or read an open one, through what `suffix` names: .gz, .xz, .zst, else plain."""
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(file, "rb"))
    if suffix == ".xz":
        return lzma.open(file, "rb")
    if suffix == ".zst":
        import pyarrow as pa  # which other files need not wait for

        raw = pa.input_stream(str(file) if isinstance(file, Path) else file, compression="zstd")
        return cast(IO[bytes], io.BufferedReader(raw))  # which can tell lines, as pyarrow cannot
    return file.open("rb") if isinstance(file, Path) else file


def check_file(path: Path) -> None:
    """Raise a `DataError` unless `path` is a file, and no archive of a kind that nobody unpacks."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}; give the path of a text file")
    if found := _FOREIGN.search(path.name):
        raise DataError(f"{path}: nmt reads .gz, .xz and .zst; unpack this {found[0]} first")


@contextlib.contextmanager
def unpacking(name: str) -> Iterator[None]:
    """Turn what decompressors raise for a damaged or cut file into a `DataError` that names it."""
    try:
        yield
    # a ValueError is Arrow's
    except (EOFError, zlib.error, lzma.LZMAError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise DataError(f"{name} cannot be read: {error.strerror}") from None
        kind = _KINDS.get(Path(name).suffix, "compressed")
        reason = " ".join(str(error).split())
        raise DataError(f"{name}: not a whole {kind} file ({reason}); fetch it again") from None
