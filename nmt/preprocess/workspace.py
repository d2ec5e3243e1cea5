"""The work folder of a data folder that is being made: what is done, and for which job.

It stands beside the data folder, as `.NAME.work`, and becomes it at the end. What is in it was
written whole or carries a name that ends in .tmp. It knows nothing of what the files mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmt.errors import ConfigError, DataError, NmtError
from nmt.files import is_foreign, share_files, sync, sync_tree, write_json

log = logging.getLogger(__name__)

MARKER = "meta.json"
_JOB, _LOCK = "job.json", "lock"


class Workspace:
    """The folders inside of the work folder, and what was found there."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder = folder
        self.place = place  # of the data folder
        self.data = folder / "data"  # what becomes the data folder
        self.units = folder / "units"  # what each part of the training corpus came to
        self.hashes = folder / "hashes"
        self.spool = folder / "spool"
        self.plan = folder / "plan"
        self.is_fresh = not (folder / _JOB).exists()
        self._old = folder / "old"  # the data folder that is about to go

    def start(self, job: dict[str, Any]) -> None:
        """Make the folders for `job`; what another job left there goes first."""
        known = self._read_job()
        if known is None or known != job or not self.data.exists():
            if known is not None:
                log.info("%sbegin anew", _difference(known, job))
            self._clear()
        else:
            log.info("go on with what an earlier run has done in %s", self.folder)
        for folder in (self.data, self.units, self.hashes, self.plan):
            folder.mkdir(exist_ok=True)
        for path in self.folder.rglob("*.tmp"):
            path.unlink()
        self.write(self.folder / _JOB, job)

    def join(self, job: dict[str, Any]) -> None:
        """Check that the plan in the folder is that of `job`."""
        known = self._read_job()
        if known is None:
            raise _no_plan(self.place)
        if known != job:
            raise ConfigError(
                f"{_difference(known, job)}give the settings and files that the plan of "
                f"{self.place} was made with, or run step=plan again"
            )

    def write(self, path: Path, content: Any) -> None:
        """Write JSON that is either whole or not there."""
        temporary = path.with_name(path.name + ".tmp")
        write_json(temporary, content)
        sync(temporary)
        os.replace(temporary, path)

    def has_results(self) -> bool:
        """Say whether there is something that the next run need not do again."""
        return any(any(folder.glob("*")) for folder in (self.units, self.plan, self.spool))

    def finish(self) -> None:
        """Put the data folder in its place; the old one goes, and the work folder."""
        share_files(self.data)
        sync_tree(self.data)
        if self.place.exists():
            os.rename(self.place, self._old)
        os.rename(self.data, self.place)
        sync(self.place.parent)
        self.remove()

    def put_back(self) -> None:
        """Put the old data folder back where a kill hit between two renames."""
        if self._old.exists() and not self.place.exists():
            os.rename(self._old, self.place)

    def remove(self) -> None:
        """Remove the work folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name not in (_LOCK, self.spool.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _read_job(self) -> dict[str, Any] | None:
        try:
            job: dict[str, Any] = json.loads((self.folder / _JOB).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return job


@contextlib.contextmanager
def open_scratch() -> Iterator[Workspace]:
    """Give a work folder among the temporary files, for a run that leaves nothing."""
    with tempfile.TemporaryDirectory(prefix="nmt-") as folder:
        yield Workspace(Path(folder), Path(folder))


@contextlib.contextmanager
def open_workspace(place: Path, *, part: str | None) -> Iterator[Workspace]:
    """Give the work folder of the data folder `place`, locked.

    With `part`, the name of a part of a job, others may have the folder too, for other parts; it
    must be there. Raises `NmtError` where something foreign is in the way or another process is at
    work. What was done stays there after an error, unless it can be of no use.
    """
    place = place.resolve()  # a link stays, and what it points to is replaced
    if place.is_file() or is_foreign(place, MARKER):
        raise NmtError(f"{place} exists and holds no {MARKER} of nmt; choose another folder")
    folder = place.with_name(f".{place.name}.work")
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    if part is None:
        _make(folder, place)
    elif not folder.is_dir():
        raise _no_plan(place)
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, new_parents)
        stack.enter_context(_locked(folder, _LOCK, shared=part is not None))
        if part is not None:
            stack.enter_context(_locked(folder, f"{_LOCK}-{part}", shared=False))
        work = Workspace(folder, place)
        if part is None:
            work.put_back()
        stack.enter_context(_tidy(work, is_shared=part is not None))
        yield work


@contextlib.contextmanager
def _tidy(work: Workspace, *, is_shared: bool) -> Iterator[None]:
    """Keep after an error what the next run can go on with; say in one line what the disk said."""
    try:
        yield
    except (ConfigError, DataError):
        if work.is_fresh and not is_shared:  # the user will change what was asked for
            work.remove()
        raise
    except OSError as error:
        if error.filename is not None and work.folder not in Path(error.filename).parents:
            raise  # a file of the user
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise NmtError(
            f"{work.place} cannot be written: {reason}; mend that and give the same command "
            "again, which goes on with what is done"
        ) from None
    finally:
        if not is_shared and work.folder.is_dir() and not work.has_results():
            work.remove()


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _no_plan(place: Path) -> ConfigError:
    return ConfigError(f"{place} has no plan; run this command with step=plan first, without shard")


def _difference(known: dict[str, Any], job: dict[str, Any]) -> str:
    names = sorted(k for k in {*known, *job} if known.get(k) != job.get(k))
    return f"{', '.join(names)} changed since the last run: " if names else ""


def _make(folder: Path, place: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder, place):
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise NmtError(f"{place} cannot be written: {error.strerror}; choose another") from None


@contextlib.contextmanager
def _locked(folder: Path, name: str, *, shared: bool) -> Iterator[None]:
    path = folder / name
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(path.open("ab"))
            _lock(stream.fileno(), fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            is_ours = os.path.samestat(os.fstat(stream.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):  # the latter when it has just finished
            is_ours = False
        if not is_ours:
            raise ConfigError(
                f"{folder} is in use by another nmt-preprocess; wait for it, or set data_dir"
            )
        yield


def _lock(descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # some file systems of clusters have no locks
        log.warning("no lock can be had (%s): start no second run of this folder", error.strerror)
