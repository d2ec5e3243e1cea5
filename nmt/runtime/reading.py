"""Open files of model, data and run folders, which anyone may have written or replaced.

Opening a pipe would wait for its writer, and reading a device might never end. All code that reads
such files opens them with this module, or checks them with it before a library opens them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from nmt.errors import DamagedError

_ZIP_END_BYTES = 22  # the record at the end of a zip file, without its comment
_ZIP64_END_BYTES = 76  # the records before it in large files
_BYTES_PER_ZIP_MEMBER = 256  # in the directory of a zip file, with the name
MAX_BYTES = 1 << 28  # of a file that is read whole; an index of 100,000 shards has 20 MB
_REMEDY = "copy or make the folder again"
_NON_BLOCKING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)  # 0 on Windows


@contextlib.contextmanager
def open_regular(path: Path, *, max_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    Raises `FileNotFoundError` and `PermissionError`. Raises `DamagedError` for a folder, a pipe or
    a device, for a file of more than `max_bytes`, and if the disk cannot be read.
    """
    try:
        with open(path, "rb", opener=open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError(f"{path} is a pipe or a device, not a file; {_REMEDY}")
            if max_bytes is not None and status.st_size > max_bytes:
                raise DamagedError(
                    f"{path} has {status.st_size:,} bytes, more than the {max_bytes:,} that nmt "
                    f"reads; {_REMEDY}"
                )
            yield file
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from None


def open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the other end of a pipe: an `opener` for `open`."""
    return os.open(path, flags | _NON_BLOCKING)


def read_regular(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a whole file; see `open_regular`."""
    with open_regular(path, max_bytes=max_bytes) as file:
        return file.read(max_bytes)  # files of /proc have the size 0


def check_regular(path: Path) -> None:
    """Raise the errors of `open_regular` before a library opens `path`."""
    with open_regular(path):
        pass


def check_tree(folder: Path) -> None:
    """Raise `DamagedError` if a folder or one of its subfolders holds a pipe or a device."""
    for path in folder.rglob("*"):
        if path.exists() and not path.is_dir() and not path.is_file():
            raise DamagedError(f"{path} is a pipe or a device, not a file; remove it")


def list_zip_members(file: IO[bytes], *, max_members: int) -> list[zipfile.ZipInfo]:
    """List the members of a zip file; raise `ValueError` for more than `max_members`.

    The size of the directory is checked first, since reading a large one takes long.
    """
    tail_bytes = (1 << 16) + _ZIP_END_BYTES + _ZIP64_END_BYTES
    file.seek(max(0, file.seek(0, os.SEEK_END) - tail_bytes))
    tail = file.read()
    num_bytes = 0
    for signature, start, end in ((b"PK\5\6", 12, 16), (b"PK\6\6", 40, 48)):
        position = tail.rfind(signature)
        if position >= 0:
            field = tail[position + start : position + end]
            num_bytes = max(num_bytes, int.from_bytes(field, "little"))
    if num_bytes > max_members * _BYTES_PER_ZIP_MEMBER:
        raise ValueError(f"a zip directory of {num_bytes:,} bytes")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if len(members) > max_members:
        raise ValueError(f"{len(members):,} tensors, more than any model has")
    return members
