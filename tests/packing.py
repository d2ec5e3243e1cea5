"""Files as users have them, plain or compressed, for tests of what reads them."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pyarrow as pa

SUFFIXES = ["txt", "gz", "bz2", "xz", "zst"]


def pack(content: bytes, suffix: str) -> bytes:
    """Compress as a file of this suffix, without the dot, is."""
    if suffix == "gz":
        return gzip.compress(content)
    if suffix == "bz2":
        return bz2.compress(content)
    if suffix == "xz":
        return lzma.compress(content)
    return bytes(pa.compress(content, codec="zstd", asbytes=True)) if suffix == "zst" else content


def write(path: Path, content: bytes) -> Path:
    """Write `content`, compressed as the suffix of `path` says."""
    path.write_bytes(pack(content, path.suffix.removeprefix(".")))
    return path
