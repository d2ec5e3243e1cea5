"""Write plain and compressed files, for tests of the code that reads them."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pyarrow as pa

SUFFIXES = ["txt", "gz", "bz2", "xz", "zst"]


def pack(content: bytes, suffix: str) -> bytes:
    """Compress bytes in the format of a suffix, such as `gz`; `txt` leaves them unchanged."""
    if suffix == "gz":
        return gzip.compress(content)
    if suffix == "bz2":
        return bz2.compress(content)
    if suffix == "xz":
        return lzma.compress(content)
    return bytes(pa.compress(content, codec="zstd", asbytes=True)) if suffix == "zst" else content


def write(path: Path, content: bytes) -> Path:
    """Write `content`, compressed in the format of the suffix of `path`."""
    path.write_bytes(pack(content, path.suffix.removeprefix(".")))
    return path
