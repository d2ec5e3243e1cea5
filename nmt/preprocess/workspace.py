"""The job of a run of preprocessing, its stages, and its work folder.

A stage processes spans of the text (see `nmt.preprocess.chunks`), and writes a record for each span
when it is finished. The work folder of a data folder `NAME` is `.NAME.work` in the same parent
folder. Files in it are replaced atomically, so that an interrupted run can be continued.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
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

from nmt.config import PreprocessConfig, resolve_path, settings_to_compare
from nmt.data.tokenizer import find_tokenizers
from nmt.errors import ConfigError, DamagedError, DataError, NmtError
from nmt.preprocess.chunks import Chunk, DataSource, Span, read_span
from nmt.runtime.cluster import open_workers
from nmt.runtime.files import (
    check_replaceable,
    disk_errors,
    publish_folder,
    remove_abandoned,
    removing_empty_parents,
    replace_json,
)
from nmt.runtime.manifest import read_entries, write_manifest
from nmt.runtime.metadata import read_json
from nmt.runtime.pool import count_workers
from nmt.runtime.progress import Progress
from nmt.runtime.reading import check_tree, read_regular_file

log = logging.getLogger(__name__)

MARKER = "meta.json"  # a folder with this file is a data folder
_OVERWRITE_ADVICE = (
    "nothing was replaced, since runs that were trained on this folder need its data; give another "
    "data_dir, or overwrite=true"
)
_FINGERPRINT_FILE = "job.json"
_LOCK_FILE = "lock"
_FORMAT_VERSION = 6  # a run does not continue in a work folder of another version


@dataclass(frozen=True)
class Job:
    """The settings, text and work folder of a run."""

    config: PreprocessConfig
    work: Workspace
    sources: Mapping[str, list[DataSource]]  # keys: the names of the training corpora, sorted
    held_out: Mapping[str, list[DataSource]]  # keys: valid and test

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings, input files and tokenizers that determine the data folder.

        Of the settings, includes the ones with `on_resume="refuse"`, which is the default.
        """
        model_files: list[Path] = []
        for name in (self.config.tokenizer.model, self.config.tokenizer.tgt_model):
            if name is None:
                continue
            path = resolve_path(name)
            files = [path]
            if path.is_dir():  # a run or a data folder
                files = sorted(find_tokenizers(path).glob("tokenizer.*"))
            model_files += [file for file in files if file.exists()]
        inputs = {}
        source_lists = [*self.sources.values(), *self.held_out.values()]
        for source in chain.from_iterable(source_lists):
            for path in source.paths:
                status = path.stat()
                inputs[str(path)] = [status.st_size, status.st_mtime_ns]
        return {
            "format": _FORMAT_VERSION,
            **settings_to_compare(self.config),
            "inputs": inputs,
            "models": [hashlib.sha256(read_regular_file(path)).hexdigest() for path in model_files],
        }


Task = Callable[[Span, Iterator[Chunk]], dict[str, Any]]
"""Processes the chunks of a span, writes files, and returns the record of the span."""


def run_stage(
    job: Job, spans: Sequence[Span], stage: str, make_task: Callable[[Job], Task]
) -> None:
    """Run a task for each span that has no record of this stage, on local or remote workers.

    Each worker calls `make_task` once. A task must write the same bytes if it is run again for the
    same span, as after an interruption.
    """
    folder = job.work.records / stage
    folder.mkdir(exist_ok=True)
    # Lists the folder, and does not test whether each record exists: some network file systems
    # cache the answer that a file is missing.
    finished_names = {path.stem for path in folder.iterdir()}
    remaining_spans = [span for span in spans if span.name not in finished_names]
    if not remaining_spans:
        return
    num_pairs = sum(span.num_pairs for span in spans)
    num_remaining_pairs = sum(span.num_pairs for span in remaining_spans)
    num_workers = min(count_workers(job.config.num_threads), len(remaining_spans))
    make_span_runner = partial(_make_span_runner, job, folder, make_task)
    workers = open_workers(job.config.scheduler, num_workers, make_span_runner, folder=folder)
    num_done = num_pairs - num_remaining_pairs
    with Progress(stage, "pairs", total=num_pairs, done=num_done) as progress, workers:
        for span, num_bytes in workers.map(remaining_spans):
            progress.update(span.num_pairs, text_bytes=num_bytes)
        progress.finish()


def _make_span_runner(
    job: Job, folder: Path, make_task: Callable[[Job], Task]
) -> Callable[[Span], int]:
    """Return a function that runs the task for a span and writes its record.

    The function returns the number of bytes of text that it read.
    """
    task = make_task(job)

    def run_span(span: Span) -> int:
        num_bytes = 0

        def read_and_count() -> Iterator[Chunk]:
            nonlocal num_bytes
            for chunk in read_span(job.sources[span.corpus], span):
                num_bytes += sum(len(lines) for lines in chunk.lines_by_file)
                yield chunk

        record = task(span, read_and_count())
        replace_json(folder / f"{span.name}.json", record)
        return num_bytes

    return run_span


def read_records(job: Job, spans: Iterable[Span], stage: str) -> Iterator[dict[str, Any]]:
    """Yield the records of these spans, which a stage has written."""
    for span in spans:
        path = job.work.records / stage / f"{span.name}.json"
        yield read_json(path)


class Workspace:
    """The work folder of the data folder `data_dir`."""

    def __init__(self, folder: Path, data_dir: Path) -> None:
        self.folder = folder
        self.data_dir = data_dir
        self.data = folder / "data"  # becomes `data_dir` when it is complete
        self.records = folder / "records"  # the records of finished spans, a folder for each stage
        self.hashes = folder / "hashes"  # hashes of the training pairs, to find repeated ones
        self.spool = folder / "spool"  # plain files with the text of pipes, archives and datasets
        self.plan = folder / "plan"  # tokenizers, their sample, and held-out sets
        self._fingerprint: dict[str, Any] = {}  # fingerprint of an interrupted run's job
        with contextlib.suppress(FileNotFoundError, DamagedError):
            self._fingerprint = read_json(folder / _FINGERPRINT_FILE)
        self.is_first_run = not self._fingerprint  # no earlier run has started the job

    def start(self, fingerprint: dict[str, Any]) -> None:
        """Create the folders of a job. Removes the results of an earlier run of another job."""
        if fingerprint == self._fingerprint and self.data.exists():
            log.info("continuing an earlier run in %s", self.folder)
        else:
            self._start_over(fingerprint)
        for folder in (self.data, self.records, self.hashes, self.plan):
            folder.mkdir(exist_ok=True)
        for path in self.folder.rglob("*.tmp"):
            path.unlink(missing_ok=True)
        replace_json(self.folder / _FINGERPRINT_FILE, fingerprint)
        self._fingerprint = fingerprint

    def _start_over(self, fingerprint: dict[str, Any]) -> None:
        """Remove the results of the earlier job except the spool. Logs changed settings."""
        if self._fingerprint:
            keys = sorted({*self._fingerprint, *fingerprint})
            changed = [key for key in keys if self._fingerprint.get(key) != fingerprint.get(key)]
            if changed:
                log.info("%s changed since the last run: starting over", ", ".join(changed))
            else:
                log.info("starting over")
        for path in self.folder.iterdir():
            if path.is_file() and path.name != _LOCK_FILE:
                path.unlink()
            elif path.is_dir() and path != self.spool:
                shutil.rmtree(path)

    def check_existing_pairs(self, num_pairs: int) -> None:
        """Raise a `ConfigError` if `data_dir` holds another number of training pairs.

        This comparison needs no encoded data, so it comes first. `finish` compares all data.
        """
        try:
            num_existing_pairs = read_json(self.data_dir / "report.json")["train"]["read"]
        except (FileNotFoundError, DamagedError, KeyError, TypeError):
            return
        if num_existing_pairs != num_pairs:
            raise ConfigError(
                f"{self.data_dir} holds the data of {num_existing_pairs:,} training pairs, and the "
                f"new text has {num_pairs:,}; {_OVERWRITE_ADVICE}"
            )

    def finish(self, *, overwrite: bool) -> None:
        """Replace `data_dir` with the new data folder, and remove the work folder.

        Unless `overwrite` is set, raises an `NmtError` if `data_dir` holds other data. The work
        folder then stays, so that a second run with overwrite=true only replaces `data_dir`.
        """
        if (self.data_dir / MARKER).exists() and not overwrite:
            write_manifest(self.data)
            if _list_data_files(self.data) != _list_data_files(self.data_dir):
                raise NmtError(f"{self.data_dir} holds other data; {_OVERWRITE_ADVICE}")
        publish_folder(self.data, self.data_dir)
        self.remove()

    def remove(self) -> None:
        """Remove the work folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def has_results(self) -> bool:
        """Return whether the work folder holds files that the next run can use."""
        paths = chain(self.records.glob("*"), self.plan.glob("*"), self.spool.glob("*"))
        return next(paths, None) is not None


def _list_data_files(folder: Path) -> dict[str, Any]:
    """Return the size and checksum of each file of a data folder except the report."""
    try:
        entries = read_entries(folder)
    except DamagedError:
        return {}
    return {name: entry for name, entry in entries.items() if not name.startswith("report.")}


@contextlib.contextmanager
def open_workspace(data_dir: Path) -> Iterator[Workspace]:
    """Create and lock the work folder of a data folder.

    After an error the work folder is kept if the next run can use its files. Raises `NmtError` if
    `data_dir` is another kind of folder, and `ConfigError` if another run uses it.
    """
    data_dir = data_dir.resolve()  # if it is a link, its target is replaced and the link stays
    check_replaceable(data_dir, MARKER)
    for path in data_dir.glob("*"):
        if path.is_dir():
            raise NmtError(f"{path} would be lost with the data folder; move it elsewhere first")
    folder = data_dir.with_name(f".{data_dir.name}.work")
    with removing_empty_parents(folder):
        _make_work_folder(folder, data_dir)
        with _locked(folder):
            work = Workspace(folder, data_dir)
            remove_abandoned(data_dir)
            try:
                yield work
            except (ConfigError, DataError):
                if work.is_first_run:  # the user will change the settings or the text
                    work.remove()
                raise
            except OSError as error:
                # an error without a file name, such as a full disk, is about the work folder
                if error.filename is not None:
                    is_in_work_folder = folder in Path(error.filename).parents
                    if not is_in_work_folder:
                        raise
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise NmtError(
                    f"{data_dir} cannot be written: {reason}; fix this, and run the same command "
                    "to continue"
                ) from None
            finally:
                if not work.has_results():
                    work.remove()


def _make_work_folder(folder: Path, data_dir: Path) -> None:
    """Create the work folder, or check the one that an interrupted run left."""
    with disk_errors(data_dir, "choose another data_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder, data_dir):
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    check_tree(folder)
    for parent, folder_names, _ in os.walk(folder):  # ignores folders that vanish
        for name in folder_names:
            if "." in name:  # in a work folder, only names of files have a full stop
                raise DamagedError(f"{Path(parent, name)} is a folder, not a file; remove it")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a work folder during the block. Raises `ConfigError` if another process locked it."""
    lock = FileLock(folder / _LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except (Timeout, FileNotFoundError):  # the folder is missing if another run just finished
        raise ConfigError(
            f"{folder} is in use by another nmt-preprocess; wait for it, or give another data_dir"
        ) from None
    except OSError as error:  # some network file systems have no locks
        log.warning("%s cannot be locked (%s): do not start a second run", folder, error)
    try:
        yield
    finally:
        lock.release()  # does nothing without a lock
