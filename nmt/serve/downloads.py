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


@dataclass
class Downloads:
    """Translated files in a temporary folder.

    Files are deleted after `keep_seconds`, the oldest ones earlier if all files together are
    larger than `max_bytes`, and all when the server ends.
    """

    keep_seconds: float
    max_bytes: int
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="nmt-serve-")))
    _files: dict[str, _StoredFile] = field(default_factory=dict)  # oldest first; keys: see `add`

    def add(self, name: str, content: bytes) -> str:
        """Store a file. Return its key, the end of a URL that cannot be guessed."""
        safe_name = re.sub(r"[^\w.()+ -]", "_", Path(name).name)[-100:].lstrip(".") or "file"
        secret = secrets.token_urlsafe(24)
        self.folder.mkdir(mode=0o700, exist_ok=True)  # programs that clean /tmp may have deleted it
        path = self.folder / secret
        try:
            num_bytes = path.write_bytes(content)
        except OSError:
            path.unlink(missing_ok=True)  # a full disk has cut it off
            raise
        key = f"{secret}/{safe_name}"
        self._files[key] = _StoredFile(path, num_bytes, time.monotonic() + self.keep_seconds)
        self.expire()
        return key

    def find(self, key: str) -> Path | None:
        """Return the path of a file, or None if there is no such file any longer."""
        self.expire()
        file = self._files.get(key)
        return file.path if file is not None and file.path.is_file() else None

    def expire(self) -> None:
        """Delete files that are too old or too large together."""
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
    path: Path
    num_bytes: int
    expires_at: float  # on the monotonic clock
