"""Write the output of a translation job so that the job can resume after a kill.

`OUTPUT.partial`, next to the output, contains the lines translated so far. `OUTPUT.partial.json`
contains their number and a description of the job: the models, the settings, and a hash of the
input lines. The JSON file is written after the lines are safe on disk, so that it is correct even
after a power failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nmt import __version__
from nmt.checkpoint import EXPORT_INFO, find_model
from nmt.config import FileTranslationConfig, SearchConfig, resolve_path, settings_to_compare
from nmt.data.text import compress, is_compressed
from nmt.errors import ConfigError, DamagedError, NmtError
from nmt.runtime.files import disk_errors, replace_file, sync, write_json
from nmt.runtime.metadata import read_json
from nmt.runtime.reading import open_regular, open_without_waiting
from nmt.translate.results import LineCounts
from nmt.translate.windows import Window, WindowReader

try:
    import fcntl
except ImportError:  # Windows, where a second process with the same output is not detected
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

_FORMAT_VERSION = 2
_MIN_SECONDS_BETWEEN_SAVES = 1.0
_READ_BYTES = 1 << 20  # bytes that are read and hashed at a time


def describe_job(config: FileTranslationConfig, search: SearchConfig) -> dict[str, Any]:
    """Return the models and settings that must be the same when a job resumes.

    These include all settings of `search`, and the settings of `config` whose `on_resume` is
    "refuse", the default.
    """
    return {
        "nmt": __version__,  # another version may translate differently
        "model": [_fingerprint(name) for name in config.model_dir],
        "reverse_model": [_fingerprint(name) for name in config.reverse_model or []],
        **settings_to_compare(config),
        **settings_to_compare(search),
    }


def _fingerprint(name: str) -> str:
    """Return the SHA-256 of the names and bytes of the files of a model folder."""
    folder = resolve_path(name)
    if not (folder / EXPORT_INFO).exists():  # a run may contain several models
        folder = find_model(folder)
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name == "trainer.pt":  # the state of training is not used
            continue
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with open_regular(path) as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


@dataclass
class JobState:
    """The progress of a job."""

    lines: int = 0  # number of translated input lines
    bytes: int = 0  # size of the output of these lines
    sha256: str = ""  # hash of these lines and their prefixes (`Window.sha256`)
    counts: LineCounts = field(default_factory=LineCounts)


class PartialFile:
    """The file to which a job appends its output until the output is complete.

    In a `with` block, call `resume`, then `append` for each window, then `finish`. The block locks
    the file for this process. If an error ends the block, the state is saved.
    """

    def __init__(
        self, output: Path, job: dict[str, Any], counts_type: type[LineCounts] = LineCounts
    ) -> None:
        self.path = partial_path(output)
        self.state = JobState(counts=counts_type())
        self._output = output
        self._job = job
        self._counts_type = counts_type
        self._save_time = time.monotonic()

    def __enter__(self) -> PartialFile:
        with self._disk_errors():
            # `open_without_waiting`: if the path is a pipe, do not wait for a reader
            self._stream = open(self.path, "ab", buffering=0, opener=open_without_waiting)
        if not self._lock():
            self._stream.close()
            raise ConfigError(
                f"{self.path} is being written by another process; wait for it, or set another "
                "output"
            )
        problem = self._load_state()
        if problem:
            log.warning(
                "%s cannot be continued (%s); starting over without its %d lines",
                self.path,
                problem,
                self.state.lines,
            )
            self.state = JobState(counts=self._counts_type())
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            # saving may fail as well: if the disk caused the error, or if the file is closed
            with contextlib.suppress(NmtError, ValueError):
                if self.state.lines:
                    self._save()
                    log.info("kept %d lines; repeat the command to resume", self.state.lines)
                else:
                    remove_partial(self._output)
        # closing may report output that was lost; the saved state does not include this output
        with contextlib.suppress(OSError):
            self._stream.close()

    def resume(self, open_input: Callable[[], WindowReader], *, is_stream: bool) -> WindowReader:
        """Return a reader of the input that has skipped the lines translated before.

        Starts over if these lines have changed. For a stream, which cannot be read twice, raises a
        `ConfigError` instead.
        """
        reader = open_input()
        reader.skip(self.state.lines)
        if self.state.lines:
            has_all_lines = reader.num_lines == self.state.lines
            if has_all_lines and reader.sha256 == self.state.sha256:
                log.info("resuming after line %d", self.state.lines)
            elif is_stream:
                raise ConfigError(
                    f"the input does not begin with the {self.state.lines} lines whose "
                    f"translations are in {self.path}; give the same text again, or remove that "
                    "file to start over"
                )
            else:
                log.warning("%s belongs to another input; starting over", self.path)
                reader = open_input()
                self.state = JobState(counts=self._counts_type())
        with self._disk_errors():
            self._stream.truncate(self.state.bytes)
        return reader

    def append(self, data: bytes, counts: LineCounts, window: Window) -> None:
        """Add the output of `window`."""
        with self._disk_errors():
            # The file is unbuffered, since closing a buffered file on a full disk fails once more.
            # Without a buffer, `write` may write only a part.
            unwritten = memoryview(data)
            while unwritten:
                num_written = self._stream.write(unwritten)
                unwritten = unwritten[num_written:]
        self.state.lines = window.next_line
        self.state.sha256 = window.sha256
        self.state.bytes += len(data)
        self.state.counts.add(counts)
        if time.monotonic() - self._save_time >= _MIN_SECONDS_BETWEEN_SAVES:
            self._save()

    def finish(
        self, reader: WindowReader, write_output: Callable[[JobState], None] | None = None
    ) -> LineCounts:
        """Replace the output with the complete file in one step, and return the counts.

        If `write_output` is not None, calls it to write the output instead. The job may be killed
        while `write_output` runs; a resumed job calls it again.
        """
        self.state.lines = reader.num_lines
        self.state.sha256 = reader.sha256
        self._save()
        if write_output is not None:
            write_output(self.state)
        elif is_compressed(self._output):
            with (
                replace_file(self._output) as temporary,
                temporary.open("wb") as file,
                compress(file, self._output.suffix) as stream,
                self.path.open("rb") as text,
            ):
                shutil.copyfileobj(text, stream)
        else:
            os.replace(self.path, self._output)
        sync(self._output.parent)
        remove_partial(self._output)
        return self.state.counts

    def _lock(self) -> bool:
        """Lock the file; return False if another process has locked it, or has renamed it."""
        try:
            if fcntl is not None:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            opened_file = os.fstat(self._stream.fileno())
            named_file = self.path.stat()  # another file, if the opened one was renamed
            return os.path.samestat(opened_file, named_file)
        except (BlockingIOError, FileNotFoundError):  # locked, or renamed
            return False

    def _load_state(self) -> str:
        """Load the saved state, if any; return why this job cannot use it, or ""."""
        try:
            content = read_json(_state_path(self.path))
            if content.pop("format_version") != _FORMAT_VERSION:
                return "written by another version of nmt"
            job = content.pop("job")
            counts = self._counts_type(**content.pop("counts"))
            self.state = JobState(**content, counts=counts)
        except FileNotFoundError:
            return ""
        except (DamagedError, KeyError, TypeError, AttributeError):
            return "its state is damaged"
        if self.path.stat().st_size < self.state.bytes:
            return "it is too short"
        all_keys = dict.fromkeys([*job, *self._job])  # without duplicates, in this order
        changed_keys = [key for key in all_keys if job.get(key) != self._job.get(key)]
        return f"other {', '.join(changed_keys)}" if changed_keys else ""

    def _save(self) -> None:
        """Save the state, after the lines that it counts are safe on disk."""
        with self._disk_errors():
            os.fsync(self._stream.fileno())
            content = {"format_version": _FORMAT_VERSION, "job": self._job, **asdict(self.state)}
            # a fixed name, so that repeated kills leave at most one file
            temporary = _state_path(self.path, ".tmp")
            write_json(temporary, content)
            sync(temporary)
            os.replace(temporary, _state_path(self.path))
        self._save_time = time.monotonic()

    def _disk_errors(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which errors of the disk name the file and the remedy."""
        return disk_errors(self.path, "fix this and repeat the command, which resumes")


def remove_partial(output: Path) -> None:
    """Remove the files that an unfinished job left next to `output`."""
    path = partial_path(output)
    for file in (path, _state_path(path), _state_path(path, ".tmp")):
        file.unlink(missing_ok=True)


def partial_path(output: Path) -> Path:
    """Return the file that a job writes until `output` is complete."""
    return output.with_name(f"{output.name}.partial")


def _state_path(path: Path, suffix: str = "") -> Path:
    """Return the file that holds the state of the partial file `path`."""
    return path.with_name(f"{path.name}.json{suffix}")
