"""A translation job that goes on where it was killed.

Beside the output stands `OUTPUT.partial`, the lines so far, and `OUTPUT.partial.json`, which says
how far they go and what they belong to: the model, the settings, and the input up to there. It is
written after the lines are safe on disk, so what it says is true even after a power cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nmt.errors import ConfigError, NmtError
from nmt.files import sync, write_json

log = logging.getLogger(__name__)

_FORMAT_VERSION = 1
_SAVE_SECONDS = 1.0  # between two states on disk, at least


@dataclass
class Counts:
    """What happened to lines, for the end of the job."""

    failed: int = 0
    met_limit: int = 0
    too_long: int = 0

    def add(self, other: Counts) -> None:
        """Add the counts of another part of the job."""
        self.failed += other.failed
        self.met_limit += other.met_limit
        self.too_long += other.too_long


@dataclass
class State:
    """How far a part of a job has come."""

    lines: int = 0  # of the input, read and dealt with
    bytes: int = 0  # of the part's file
    sha256: str = ""  # of those lines of the input and their prefixes
    is_done: bool = False
    counts: Counts = field(default_factory=Counts)


class Digest:
    """Hands lines on and knows how many there were, their bytes and their SHA-256."""

    def __init__(self, lines: Iterable[str], prefixes: Iterable[str] | None = None) -> None:
        self.num_lines = 0
        self.num_bytes = 0
        self._hashes = [hashlib.sha256(), hashlib.sha256()]  # of lines, of prefixes
        self.lines = self._lines(lines)
        self.prefixes = None if prefixes is None else self._prefixes(prefixes)

    @property
    def sha256(self) -> str:
        """The fingerprint of what has been read so far."""
        return "".join(digest.hexdigest() for digest in self._hashes)

    def skip(self, num_lines: int) -> None:
        """Read so many lines and their prefixes, or all there are."""
        for _ in zip(range(num_lines), self.lines, strict=False):
            if self.prefixes is not None:
                next(self.prefixes, None)

    def _lines(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            data = line.encode("utf-8") + b"\n"
            self._hashes[0].update(data)
            self.num_lines += 1
            self.num_bytes += len(data)
            yield line

    def _prefixes(self, prefixes: Iterable[str]) -> Iterator[str]:
        for prefix in prefixes:
            self._hashes[1].update(prefix.encode("utf-8") + b"\n")
            yield prefix


class PartFile:
    """The file that a job, or one of several processes that share it, appends its lines to.

    As a context it holds the file alone, and keeps what is done when an error ends it.
    """

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self.path = path
        self.job = job
        self.state = State()
        self.difference = ""  # why an earlier state is of no use
        self._saved_seconds = time.monotonic()

    def __enter__(self) -> PartFile:
        with _named(self.path):
            self._stream = self.path.open("ab", buffering=0)
            try:
                self._lock()
            except BaseException:
                self._stream.close()
                raise
        self.state, self.difference = read_state(self.path, self.job)
        self.state.is_done = False  # there may be more input by now
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            with contextlib.suppress(NmtError, ValueError):  # the disk, which is why we are here
                self._keep()
        with contextlib.suppress(OSError):  # of lines that no saved state counts
            self._stream.close()

    def start(self, *, over: bool) -> None:
        """Leave in the file what its state counts; nothing when the job starts over."""
        if over:
            self.state = State()
        with _named(self.path):
            self._stream.truncate(self.state.bytes)

    def append(self, data: bytes, *, lines: int, sha256: str, counts: Counts) -> None:
        """Add output; with it `lines` lines of the input are done, whose fingerprint is given."""
        with _named(self.path):
            rest = memoryview(data)
            while rest:  # nothing is kept back that a full disk would refuse once more
                rest = rest[self._stream.write(rest) :]
        self.state.lines, self.state.sha256 = lines, sha256
        self.state.bytes += len(data)
        self.state.counts.add(counts)
        if time.monotonic() - self._saved_seconds >= _SAVE_SECONDS:
            self._save()

    def complete(self, lines: int, sha256: str) -> None:
        """Note that the input ends here, and bring all to disk."""
        self.state.lines, self.state.sha256, self.state.is_done = lines, sha256, True
        self._save()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(self._stream.fileno()), self.path.stat())
        except (BlockingIOError, FileNotFoundError):  # the latter when it was just renamed
            is_ours = False
        if not is_ours:
            raise ConfigError(
                f"{self.path} is being written by another process; wait for it, or set another "
                "output"
            )

    def _save(self) -> None:
        with _named(self.path):
            os.fsync(self._stream.fileno())
            content = {"format_version": _FORMAT_VERSION, "job": self.job, **asdict(self.state)}
            temporary = state_path(self.path, ".tmp")  # one name: a kill leaves no more than one
            write_json(temporary, content)
            sync(temporary)
            os.replace(temporary, state_path(self.path))
        self._saved_seconds = time.monotonic()

    def _keep(self) -> None:
        if self.state.lines:
            self._save()
            log.info("%d lines are kept; the same command goes on from there", self.state.lines)
        else:
            for file in (state_path(self.path), state_path(self.path, ".tmp"), self.path):
                file.unlink(missing_ok=True)


def read_state(path: Path, job: dict[str, Any]) -> tuple[State, str]:
    """Return the state of a part file that belongs to `job`; else a fresh one, and what differs."""
    try:
        content = json.loads(state_path(path).read_text(encoding="utf-8"))
        if content.pop("format_version") != _FORMAT_VERSION:
            return State(), "the version of nmt"
        other = content.pop("job")
        counts = Counts(**content.pop("counts"))
        state = State(**content, counts=counts)
        is_whole = path.stat().st_size >= state.bytes
    except FileNotFoundError:
        return State(), ""
    except (ValueError, KeyError, TypeError, AttributeError):
        return State(), "its state, which is damaged"
    differences = [key for key in {**other, **job} if other.get(key) != job.get(key)]
    if differences or not is_whole:
        return State(), ", ".join(differences) or "its size"
    return state, ""


def fingerprint(folder: Path) -> str:
    """Return the SHA-256 of the names and bytes of a model folder's files, but for a trainer's
    state.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != "trainer.pt":
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def state_path(path: Path, suffix: str = "") -> Path:
    """Name the file that says how far the part file `path` goes."""
    return path.with_name(path.name + ".json" + suffix)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn an error of the disk into one line that says what to do."""
    try:
        yield
    except OSError as error:
        raise NmtError(
            f"{path} cannot be written: {error.strerror}; mend that and give the same command "
            "again, which goes on with what is done"
        ) from None
