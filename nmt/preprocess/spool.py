"""Files that hold what can be read only once, so that preprocessing may read it again.

Spooled anew after an interruption, a file whose content is the same stays as it is, with its time:
what was made from it is still good. Knows bytes alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Literal

from nmt.files import sync

_BLOCK_BYTES = 1 << 20


class Spool:
    """A file to write, which takes the place of `path` when the block ends without an exception.

    As long as what is written is what already stands there, nothing is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._num_same = 0  # bytes that the old file has too
        self._old: IO[bytes] | None = None
        self._new: IO[bytes] | None = None

    def __enter__(self) -> Spool:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.is_file():
            self._old = self._path.open("rb")
        return self

    def write(self, data: bytes) -> None:
        """Write the next bytes."""
        if self._new is None:
            if self._old is not None and self._old.read(len(data)) == data:
                self._num_same += len(data)
                return
            self._new = self._open_new()
        self._new.write(data)

    def copy(self, stream: IO[bytes]) -> None:
        """Write all that a stream has."""
        while block := stream.read(_BLOCK_BYTES):
            self.write(block)

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> Literal[False]:
        if kind is None and self._new is None and (self._old is None or self._old.read(1)):
            self._new = self._open_new()
        if self._old is not None:
            self._old.close()
        if self._new is not None:
            self._new.close()
            if kind is None:
                sync(self._temporary)
                os.replace(self._temporary, self._path)
            else:
                self._temporary.unlink()
        return False

    def _open_new(self) -> IO[bytes]:
        """Start a new file with what was the same; the old one is no more."""
        if self._old is None:
            return self._temporary.open("wb")
        os.replace(self._path, self._temporary)
        os.truncate(self._temporary, self._num_same)
        return self._temporary.open("ab")
