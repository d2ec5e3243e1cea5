"""A translation to a file, which is resumed where it was killed.

Beside the output stands `OUTPUT.partial`, the lines so far, and `OUTPUT.partial.json`, which says
how far they go and what they belong to: the model, the settings, and the input up to there. It is
written after the lines are safe on disk, so what it says is true even after a power cut.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nmt import __version__
from nmt.checkpoint import find_model
from nmt.config import Engine, SearchConfig, TranslationConfig, resolve, settings_to_compare
from nmt.data.text import is_packed, packed
from nmt.errors import ConfigError, NmtError
from nmt.runtime.files import disk_errors, replace_file, sync, write_json
from nmt.translate.lines import HashedInput, LineCounts, Window

try:
    import fcntl
except ImportError:  # Windows, where a second process with the same output is not noticed
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

_FORMAT_VERSION = 1
_SAVE_SECONDS = 1.0  # between two states on disk, at least


def describe_job(config: TranslationConfig, search: SearchConfig) -> dict[str, Any]:
    """Return the models and the settings that a resumed job is compared with.

    The settings are those of `config` that declare `on_resume="refuse"`, the default, and the ones
    of `search`, which replace settings that `config` leaves to the model.
    """
    folders = [resolve(folder) for folder in config.model_dir]
    if config.backend is Engine.native:
        folders = [find_model(folder) for folder in folders]
    return {
        "nmt": __version__,
        "model": [_fingerprint(folder) for folder in folders],
        **settings_to_compare(config),
        **settings_to_compare(search),
    }


def _fingerprint(folder: Path) -> str:
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


@dataclass
class PartState:
    """How far a job has come."""

    lines: int = 0  # of the input, read and dealt with
    bytes: int = 0  # of the file
    sha256: str = ""  # of those lines of the input and their prefixes
    counts: LineCounts = field(default_factory=LineCounts)


class PartFile:
    """The file that a job appends its lines to.

    As a context it holds the file alone, and keeps what is done when an error ends it.
    """

    def __init__(
        self, output: Path, job: dict[str, Any], counts: type[LineCounts] = LineCounts
    ) -> None:
        self.output, self.job, self._counts = output, job, counts
        self.path = part_path(output)
        self.state = PartState(counts=counts())
        self._saved_seconds = time.monotonic()

    def __enter__(self) -> PartFile:
        with _writing(self.path):
            self._stream = self.path.open("ab", buffering=0)
        try:
            if fcntl is not None:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(self._stream.fileno()), self.path.stat())
        except (BlockingIOError, FileNotFoundError):  # the latter when it was just renamed
            is_ours = False
        if not is_ours:
            self._stream.close()
            raise ConfigError(
                f"{self.path} is being written by another process; wait for it, or set another "
                "output"
            )
        self.state, difference = _read_state(self.path, self.job, self._counts)
        if difference:
            log.warning("%s is of another job (%s); starting over", self.path, difference)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            with contextlib.suppress(NmtError, ValueError):  # the disk, which is why we are here
                if self.state.lines:
                    self._save()
                    count = self.state.lines
                    log.info("%d lines are kept; the same command goes on from there", count)
                else:
                    remove_part(self.output)
        with contextlib.suppress(OSError):  # of lines that no saved state counts
            self._stream.close()

    def resume(self, read: Callable[[], HashedInput], *, is_stream: bool) -> HashedInput:
        """Read the input to where an earlier process stopped, or from its start when that is of no
        use, and leave in the file the translation of what was read.
        """
        source, done = read(), self.state
        source.skip(done.lines)
        if done.lines and (source.num_lines, source.sha256) != (done.lines, done.sha256):
            if is_stream:
                raise ConfigError(
                    f"the input does not begin with the {done.lines} lines that {self.path} "
                    "translates; give the same text again, or remove that file to start over"
                )
            log.warning("%s is of another input; starting over", self.path)
            source, self.state = read(), PartState(counts=self._counts())
        elif done.lines:
            log.info("going on after line %d", done.lines)
        with _writing(self.path):
            self._stream.truncate(self.state.bytes)
        return source

    def append(self, data: bytes, counts: LineCounts, window: Window) -> None:
        """Add the output of `window`; with it the input up to its end is done."""
        with _writing(self.path):
            rest = memoryview(data)
            while rest:  # nothing is kept back that a full disk would refuse once more
                rest = rest[self._stream.write(rest) :]
        self.state.lines, self.state.sha256 = window.next_line, window.sha256
        self.state.bytes += len(data)
        self.state.counts.add(counts)
        if time.monotonic() - self._saved_seconds >= _SAVE_SECONDS:
            self._save()

    def finish(
        self, source: HashedInput, publish: Callable[[PartState], None] | None = None
    ) -> LineCounts:
        """Record that the input ends here, and make the output appear in one step; return the
        counts. `publish` writes something else from the part file in the place of `output`; after a
        kill it is called again.
        """
        self.state.lines, self.state.sha256 = source.num_lines, source.sha256
        self._save()
        output = self.output
        if publish is not None:
            publish(self.state)
        elif is_packed(output):
            with (
                replace_file(output) as temporary,
                temporary.open("wb") as file,
                packed(file, output.suffix) as stream,
                self.path.open("rb") as text,
            ):
                shutil.copyfileobj(text, stream)
        else:
            os.replace(self.path, output)
        sync(output.parent)
        remove_part(output)
        return self.state.counts

    def _save(self) -> None:
        with _writing(self.path):
            os.fsync(self._stream.fileno())
            content = {"format_version": _FORMAT_VERSION, "job": self.job, **asdict(self.state)}
            temporary = _state_path(self.path, ".tmp")  # one name: a kill leaves no more than one
            write_json(temporary, content)
            sync(temporary)
            os.replace(temporary, _state_path(self.path))
        self._saved_seconds = time.monotonic()


def _read_state(path: Path, job: dict[str, Any], counts: type[LineCounts]) -> tuple[PartState, str]:
    """Return the state of a part file that belongs to `job`; else a fresh one, and what differs."""
    try:
        content = json.loads(_state_path(path).read_text(encoding="utf-8"))
        if content.pop("format_version") != _FORMAT_VERSION:
            return PartState(counts=counts()), "the version of nmt"
        other = content.pop("job")
        state = PartState(**content | {"counts": counts(**content["counts"])})
        is_whole = path.stat().st_size >= state.bytes
    except FileNotFoundError:
        return PartState(counts=counts()), ""
    except (ValueError, KeyError, TypeError, AttributeError):
        return PartState(counts=counts()), "its state, which is damaged"
    differences = [key for key in {**other, **job} if other.get(key) != job.get(key)]
    if differences or not is_whole:
        return PartState(counts=counts()), ", ".join(differences) or "its size"
    return state, ""


def remove_part(output: Path) -> None:
    """Remove what a job left beside `output`, if anything."""
    path = part_path(output)
    for file in (path, _state_path(path), _state_path(path, ".tmp")):
        file.unlink(missing_ok=True)


def part_path(output: Path) -> Path:
    """Return the file that a job writes until `output` is whole."""
    return output.with_name(f"{output.name}.partial")


def _state_path(path: Path, suffix: str = "") -> Path:
    """Return the path of the file that says how far the part file `path` goes."""
    return path.with_name(path.name + ".json" + suffix)


def _writing(path: Path) -> contextlib.AbstractContextManager[None]:
    remedy = "fix that and give the same command again, which goes on with what is done"
    return disk_errors(path, remedy)
