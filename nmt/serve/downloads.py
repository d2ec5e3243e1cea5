"""Translated files to download."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

_MAX_NAME_CHARACTERS = 100  # longer names of files are cut in URLs
_SECRET_BYTES = 24  # size of the random part of a URL


@dataclass
class Downloads:
    """Translated files in a temporary folder.

    Files are deleted after `keep_seconds`, and when the server ends. If all files together are
    larger than `max_bytes`, the oldest files are deleted earlier.
    """

    keep_seconds: float
    max_bytes: int
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="nmt-serve-")))
    _files: dict[str, _StoredFile] = field(default_factory=dict)  # by key (see `add`), oldest first

    def add(self, name: str, content: bytes) -> str:
        """Store a file. Return its key SECRET/NAME, which is the end of the URL to download it."""
        safe_name = re.sub(r"[^\w.()+ -]", "_", Path(name).name)
        safe_name = safe_name[-_MAX_NAME_CHARACTERS:].lstrip(".") or "file"
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        self.folder.mkdir(mode=0o700, exist_ok=True)  # a cleanup of /tmp may have deleted it
        path = self.folder / secret
        try:
            num_bytes = path.write_bytes(content)
        except OSError:
            path.unlink(missing_ok=True)  # on a full disk, the file is incomplete
            raise
        key = f"{secret}/{safe_name}"
        self._files[key] = _StoredFile(path, num_bytes, time.monotonic() + self.keep_seconds)
        self.expire()
        return key

    def find(self, key: str) -> Path | None:
        """Return the path of a file, or None if it does not exist or was deleted."""
        self.expire()
        file = self._files.get(key)
        if file is None or not file.path.is_file():
            return None
        return file.path

    def expire(self) -> None:
        """Delete files that are too old, and the oldest files if all are too large together."""
        current_time = time.monotonic()
        total_bytes = sum(file.num_bytes for file in self._files.values())
        for key, file in list(self._files.items()):
            if file.expires_at <= current_time or total_bytes > self.max_bytes:
                total_bytes -= file.num_bytes
                del self._files[key]
                with contextlib.suppress(OSError):
                    file.path.unlink()

    def close(self) -> None:
        """Delete all files."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class _StoredFile:
    """A file in the folder."""

    path: Path
    num_bytes: int
    expires_at: float  # a time of `time.monotonic()`
