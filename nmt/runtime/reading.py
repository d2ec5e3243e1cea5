"""Open files of model, data and run folders, which anyone may have written or replaced.

Opening a pipe would wait for its writer, and reading a device might never end. So all files of
these folders are opened with this module, or checked by it before a library opens them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

from nmt.errors import DamagedError

_ZIP_END_BYTES = 22  # size of the record at the end of a zip file, without its comment
_MAX_ZIP_COMMENT_BYTES = 1 << 16
_ZIP64_END_BYTES = 76  # size of the additional end records of a large zip file
_BYTES_PER_ZIP_MEMBER = 256  # maximum size of an entry in the directory of a zip file
# maximum size of a file that is read whole; for example, meta.json has 20 MB for 100,000 shards
MAX_BYTES = 1 << 28
_ADVICE = "copy or make the folder again"
# flags of `os.open`: do not wait for a pipe, nor make a terminal the controlling terminal
_NON_BLOCKING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


class _ZipEndRecord(NamedTuple):
    """A record at the end of a zip file, which states the size of the directory of the file."""

    signature: bytes
    size_start: int  # position in the record at which the size of the directory starts
    size_end: int


_ZIP_END_RECORDS = (
    _ZipEndRecord(b"PK\5\6", size_start=12, size_end=16),
    _ZipEndRecord(b"PK\6\6", size_start=40, size_end=48),  # only in large files
)


@contextlib.contextmanager
def open_regular(path: Path, *, max_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading in a `with` block.

    Raises `FileNotFoundError` and `PermissionError` like `open`, and `DamagedError` for a folder, a
    pipe, a device, a file of more than `max_bytes`, or any other `OSError`.
    """
    try:
        with open(path, "rb", opener=open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError(f"{path} is a pipe or a device, not a file; {_ADVICE}")
            if max_bytes is not None and status.st_size > max_bytes:
                raise DamagedError(
                    f"{path} has {status.st_size:,} bytes, more than the {max_bytes:,} that nmt "
                    f"reads; {_ADVICE}"
                )
            yield file
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}; {_ADVICE}") from None


def open_without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting for the other end of a pipe: an `opener` for `open`."""
    return os.open(path, flags | _NON_BLOCKING)


def read_regular_file(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a whole file; see `open_regular`."""
    with open_regular(path, max_bytes=max_bytes) as file:
        return file.read(max_bytes)  # a file of /proc may hold more than its size, which is 0


def check_regular(path: Path) -> None:
    """Check a file that a library will open; raise the errors of `open_regular`."""
    with open_regular(path):
        pass


def check_tree(folder: Path) -> None:
    """Raise `DamagedError` if a folder or one of its subfolders holds a pipe or a device."""
    for parent, _, file_names in os.walk(folder):  # skips folders that another process removes
        for name in file_names:
            path = Path(parent, name)
            try:
                mode = path.stat().st_mode
            except OSError:  # another process has removed it, or it is a link to nothing
                continue
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise DamagedError(f"{path} is a pipe or a device, not a file; remove it")


def list_zip_members(file: IO[bytes], *, max_members: int) -> list[zipfile.ZipInfo]:
    """List the members of a zip file; raise `ValueError` for more than `max_members`.

    First checks the size of the zip directory, since parsing a large directory takes long.
    """
    tail_bytes = _MAX_ZIP_COMMENT_BYTES + _ZIP_END_BYTES + _ZIP64_END_BYTES
    file_bytes = file.seek(0, os.SEEK_END)
    file.seek(max(0, file_bytes - tail_bytes))
    tail = file.read()
    directory_bytes = 0
    for record in _ZIP_END_RECORDS:
        position = tail.rfind(record.signature)
        if position >= 0:
            size_field = tail[position + record.size_start : position + record.size_end]
            directory_bytes = max(directory_bytes, int.from_bytes(size_field, "little"))
    if directory_bytes > max_members * _BYTES_PER_ZIP_MEMBER:
        raise ValueError(f"a zip directory of {directory_bytes:,} bytes")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if len(members) > max_members:
        raise ValueError(f"{len(members):,} tensors, more than any model has")
    return members
