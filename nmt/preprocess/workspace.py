"""A run of preprocessing: its job, its stages, and its work folder, `.NAME.work` beside the data
folder. Every file in it is complete, unless its name ends in .tmp.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nmt.config import PreprocessConfig, resolve, settings_to_compare
from nmt.errors import ConfigError, DataError, NmtError
from nmt.preprocess.chunks import Chunk, Source, Span, read_span
from nmt.runtime.cluster import open_workers
from nmt.runtime.files import (
    check_replaceable,
    disk_errors,
    put_in_place,
    remove_abandoned,
    replace_file,
    write_json,
)
from nmt.runtime.pool import count_workers
from nmt.runtime.progress import Progress

log = logging.getLogger(__name__)

MARKER = "meta.json"
_JOB, _LOCK = "job.json", "lock"
_FORMAT = 5  # of the work folder


@dataclass(frozen=True)
class Job:
    """The settings, text and work folder of a run."""

    config: PreprocessConfig
    work: Workspace
    sources: Mapping[str, list[Source]]  # of the training corpora, by name in order
    held_out: Mapping[str, list[Source]]  # of valid and test

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings, input files and tokenizers that decide the bytes of a data folder.

        The settings are those that declare `on_resume="refuse"`, the default.
        """
        models: list[Path] = []
        for name in (self.config.tokenizer.model, self.config.tokenizer.tgt_model):
            if name is None:
                continue
            path = resolve(name)
            files = sorted(path.glob("tokenizer.*")) if path.is_dir() else [path]
            models += [file for file in files if file.is_file()]
        sources = chain(*self.sources.values(), *self.held_out.values())
        status = {str(path): path.stat() for source in sources for path in source.paths}
        return {
            "format": _FORMAT,
            **settings_to_compare(self.config),
            "inputs": {path: [s.st_size, s.st_mtime_ns] for path, s in status.items()},
            "models": [hashlib.sha256(path.read_bytes()).hexdigest() for path in models],
        }


Task = Callable[[Span, Iterator[Chunk]], dict[str, Any]]


def run_stage(job: Job, spans: Sequence[Span], stage: str, start: Callable[[Job], Task]) -> None:
    """Run a task for each span without a record of this stage, on local or remote workers.

    `start` returns the task on each worker. It reads the chunks of its span, writes its own files
    and returns the record. A repeated task writes the same bytes.
    """
    folder = job.work.units / stage
    folder.mkdir(exist_ok=True)
    # listed once: some shared file systems cache for a while that a file is missing
    done = {path.name for path in folder.iterdir()}
    due = [span for span in spans if f"{span.name}.json" not in done]
    total = sum(span.num_pairs for span in spans)
    before = total - sum(span.num_pairs for span in due)
    num_workers = min(count_workers(job.config.num_threads), len(due))
    if not due:
        return
    make = partial(_start_task, job, folder, start)
    workers = open_workers(job.config.scheduler, num_workers, make, folder=folder)
    with Progress(stage, "pairs", total=total, done=before) as progress, workers:
        for span, num_bytes in workers.map(due):
            progress.update(span.num_pairs, text_bytes=num_bytes)
        progress.finish()


def _start_task(job: Job, folder: Path, start: Callable[[Job], Task]) -> Callable[[Span], int]:
    """Return a function that runs a task, writes its record and returns the bytes of its text."""
    task = start(job)

    def run(span: Span) -> int:
        sizes = []

        def chunks() -> Iterator[Chunk]:
            for chunk in read_span(job.sources[span.corpus], span):
                sizes.append(sum(map(len, chunk.raw)))
                yield chunk

        job.work.write(folder / f"{span.name}.json", task(span, chunks()))
        return sum(sizes)

    return run


def read_records(job: Job, spans: Iterable[Span], stage: str) -> Iterator[dict[str, Any]]:
    """Yield the records of these spans."""
    for span in spans:
        path = job.work.units / stage / f"{span.name}.json"
        yield json.loads(path.read_text(encoding="utf-8"))


class Workspace:
    """The work folder and its folders."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder = folder
        self.place = place  # of the data folder
        self.data = folder / "data"  # becomes the data folder
        self.units = folder / "units"  # records of spans, by stage
        self.hashes = folder / "hashes"
        self.spool = folder / "spool"
        self.plan = folder / "plan"
        self._job: dict[str, Any] = {}  # the fingerprint of the job that the folder belongs to
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._job = json.loads((folder / _JOB).read_text(encoding="utf-8"))
        self.is_fresh = not self._job

    def start(self, job: dict[str, Any]) -> None:
        """Create the folders for the job with this fingerprint; remove the files of other jobs."""
        if job == self._job and self.data.exists():
            log.info("continuing an earlier run in %s", self.folder)
        else:
            if self._job:
                names = {*self._job, *job}
                changed = sorted(name for name in names if self._job.get(name) != job.get(name))
                reason = f"{', '.join(changed)} changed since the last run: " if changed else ""
                log.info("%sstarting over", reason)
            for path in self.folder.iterdir():
                if path.name not in (_LOCK, self.spool.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        for folder in (self.data, self.units, self.hashes, self.plan):
            folder.mkdir(exist_ok=True)
        for path in self.folder.rglob("*.tmp"):
            path.unlink(missing_ok=True)
        self.write(self.folder / _JOB, job)
        self._job = job

    def write(self, path: Path, content: Any) -> None:
        """Write a JSON file, atomically."""
        with replace_file(path) as temporary:
            write_json(temporary, content)

    def finish(self) -> None:
        """Replace the data folder with the new one, and remove the work folder."""
        put_in_place(self.data, self.place)
        self.remove()

    def remove(self, *, unless_useful: bool = False) -> None:
        """Remove the work folder; with `unless_useful` only if the next run cannot continue it."""
        results = (any(folder.glob("*")) for folder in (self.units, self.plan, self.spool))
        if not (unless_useful and any(results)):
            shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def open_workspace(place: Path) -> Iterator[Workspace]:
    """Open and lock the work folder of the data folder `place`.

    After an error the work folder stays if the next run can continue it. Raises `NmtError` if
    `place` is no data folder or another run uses it.
    """
    place = place.resolve()  # a link stays, and what it points to is replaced
    check_replaceable(place, MARKER)
    for path in filter(Path.is_dir, place.glob("*")):
        raise NmtError(f"{path} would be lost with the data folder; move it elsewhere first")
    folder = place.with_name(f".{place.name}.work")
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    with disk_errors(place, "choose another"):
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder, place):
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    try:
        with _locked(folder):
            work = Workspace(folder, place)
            remove_abandoned(place)
            try:
                yield work
            except (ConfigError, DataError):
                if work.is_fresh:  # the user will change what was asked for
                    work.remove()
                raise
            except OSError as error:
                if error.filename is not None and folder not in Path(error.filename).parents:
                    raise  # a file of the user
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise NmtError(
                    f"{place} cannot be written: {reason}; fix that and give the same command "
                    "again, which goes on with what is done"
                ) from None
            finally:
                work.remove(unless_useful=True)
    finally:
        for parent in new_parents:  # those that stayed empty go again
            with contextlib.suppress(OSError):
                parent.rmdir()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process."""
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except (Timeout, FileNotFoundError):  # the latter when another has just finished
        raise ConfigError(
            f"{folder} is in use by another nmt-preprocess; wait for it, or set data_dir"
        ) from None
    except OSError as error:  # some file systems of clusters have no locks
        log.warning("no lock can be had (%s): start no second run of this folder", error)
    try:
        yield
    finally:
        lock.release()
