"""Replace files and folders atomically: write to a temporary name in the same folder, sync, rename.

The temporary name of new content is `.NAME.HOST.PID.tmp`. While a folder is replaced, its old
version may have the name `.NAME.HOST.PID.old`. A process that is killed leaves these files behind.
The next command that writes NAME removes them. If NAME is missing, it renames the old version back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmt.errors import NmtError
from nmt.runtime.manifest import write_manifest
from nmt.runtime.metadata import read_json

_HOST = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40] or "host"
# arguments of Linux's renameat2
_AT_FDCWD = -100  # relative paths start at the working directory
_RENAME_EXCHANGE = 2  # exchange two paths


def write_json(path: Path, content: Any) -> None:
    """Write JSON with sorted keys, so that equal content gives equal bytes."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


def describe_folder_problem(folder: Path, otherwise: str) -> str:
    """Return a phrase for an error message: "is a file" or "does not exist".

    For a folder that exists, returns `otherwise`.
    """
    if folder.is_dir():
        return otherwise
    return "is a file" if folder.exists() else "does not exist"


@contextlib.contextmanager
def disk_errors(output: object, advice: str) -> Iterator[None]:
    """Turn an `OSError` of the `with` block into an `NmtError` with `output` and `advice`.

    `output` is a path or its description. The block must write only there, since the message says
    that `output` cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise NmtError(f"{output} cannot be written: {reason}; {advice}") from None


@contextlib.contextmanager
def replace_folder(folder: Path, *, marker: str) -> Iterator[Path]:
    """Yield an empty folder. After the block, write its manifest and replace `folder` with it.

    If the block raises, `folder` stays as it is. `marker` is a JSON file with the key
    `format_version`, which every folder of this kind contains. Raises the errors of
    `check_replaceable`. Any `OSError` of the block becomes an `NmtError` about `folder`, so read
    other files before the block.
    """
    folder = folder.resolve()  # replace the folder that a link points to, not the link
    check_replaceable(folder, marker)
    remove_abandoned(folder)
    temporary = _temporary_name(folder)
    with removing_empty_parents(folder), disk_errors(folder, "nothing was changed"):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            publish_folder(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def removing_empty_parents(path: Path) -> Iterator[None]:
    """Remove parent folders of `path` that were created during the block, if they are empty."""
    missing_parents = [parent for parent in path.parents if not parent.exists()]
    try:
        yield
    finally:
        for parent in missing_parents:
            with contextlib.suppress(OSError):  # not empty
                parent.rmdir()


def publish_folder(new_folder: Path, folder: Path) -> None:
    """Write the manifest of `new_folder`, sync it to disk, and replace `folder` with it.

    `replace_folder` calls this function at the end of its `with` block. Call it directly if several
    commands fill a folder. If the process is killed, `folder` has its old or its new content. On
    systems that cannot exchange two folders in one step, it may also be missing, until
    `remove_abandoned` restores it.
    """
    write_manifest(new_folder)
    make_readable_and_sync(new_folder)
    temporary = _temporary_name(folder)
    if new_folder != temporary:  # `replace_folder` already uses the temporary name
        os.rename(new_folder, temporary)
    if folder.exists():
        _exchange(temporary, folder)
        sync(folder.parent)
        shutil.rmtree(temporary)  # the old folder, which has this name since the exchange
    else:
        os.rename(temporary, folder)
        sync(folder.parent)


def _exchange(new_folder: Path, folder: Path) -> None:
    """Exchange the names of two folders, in one step if the system can."""
    if _exchange_in_one_step(new_folder, folder):
        return
    old_folder = _temporary_name(folder, "old")  # a name for the time of the exchange
    os.rename(folder, old_folder)
    os.rename(new_folder, folder)
    os.rename(old_folder, new_folder)


def _exchange_in_one_step(new_folder: Path, folder: Path) -> bool:
    """Exchange the names of two folders; return False if the system or file system cannot."""
    if sys.platform == "win32":
        return False
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):  # a function of Linux
        return False
    status = libc.renameat2(
        _AT_FDCWD, os.fsencode(new_folder), _AT_FDCWD, os.fsencode(folder), _RENAME_EXCHANGE
    )
    if status == 0:
        return True
    error_code = ctypes.get_errno()
    if error_code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(error_code, os.strerror(error_code), str(folder))


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to. The written file replaces `path` unless the block raises."""
    remove_abandoned(path)
    temporary = _temporary_name(path)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_json(path: Path, content: Any) -> None:
    """Write a JSON file like `write_json`, and replace `path` atomically."""
    with replace_file(path) as temporary:
        write_json(temporary, content)


def replace_link(link: Path, target: str) -> None:
    """Point the symbolic link `link` to the relative path `target`, atomically."""
    temporary = _temporary_name(link)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def remove_folder(folder: Path) -> None:
    """Remove a folder. If the process is killed, it is unchanged or has a temporary name."""
    temporary = _temporary_name(folder)
    os.rename(folder, temporary)
    shutil.rmtree(temporary)


def remove_all_temporary(folder: Path) -> None:
    """Remove the temporary files in `folder`, and restore originals that are missing.

    No other process may be writing there.
    """
    for pattern in (".*.old", ".*.tmp"):
        for leftover in folder.glob(pattern):
            _remove_or_restore(leftover)


def remove_abandoned(path: Path) -> None:
    """Remove the temporary files of `path` that killed processes of this machine left behind.

    If `path` itself is missing, because a process was killed while it replaced `path`, restores it.
    """
    prefix = f".{path.name}.{_HOST}."
    for suffix in (".old", ".tmp"):
        for leftover in path.parent.glob(f"{glob.escape(prefix)}*{suffix}"):
            pid = leftover.name.removeprefix(prefix).removesuffix(suffix)
            if pid.isdigit() and not _is_running(int(pid)):
                _remove_or_restore(leftover)


def _remove_or_restore(leftover: Path) -> None:
    """Rename an old version back if its original is missing; remove any other leftover."""
    # the name is .NAME.HOST.PID.SUFFIX; NAME may have dots, so divide from the right
    name_parts = leftover.name.removeprefix(".").rsplit(".", maxsplit=3)
    original = leftover.with_name(name_parts[0])
    if leftover.suffix == ".old" and not original.exists():
        os.rename(leftover, original)
    elif leftover.is_dir() and not leftover.is_symlink():
        shutil.rmtree(leftover, ignore_errors=True)
    else:
        leftover.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    """Return whether another process with this id runs on this machine."""
    if pid == os.getpid():  # an earlier process had the same id, which is common in containers
        return False
    if sys.platform == "win32":  # os.kill would end the process
        return True
    try:
        os.kill(pid, 0)  # only checks that the process exists
    except ProcessLookupError:
        return False
    except PermissionError:  # it is the process of another user
        pass
    return True


def check_replaceable(folder: Path, marker: str) -> None:
    """Raise `NmtError` if `folder` is foreign, is a mount point, or is the current folder.

    A foreign folder has files, but not the `marker` that `replace_folder` describes.
    """
    if folder.is_file() or _is_foreign(folder, marker):
        raise NmtError(f"{folder} exists and has no {marker} of nmt; choose another folder")
    if os.path.ismount(folder):
        raise NmtError(f"{folder} is a mount point and cannot be replaced; choose a folder in it")
    if folder.exists() and folder.samefile(os.curdir):
        raise NmtError(f"{folder} is the current folder of the shell; choose a folder in it")


def _is_foreign(folder: Path, marker: str) -> bool:
    """Return whether `folder` has files, but no JSON file `marker` with `format_version`."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    try:
        content = read_json(folder / marker)
    except (OSError, NmtError):  # missing or damaged
        return True
    return "format_version" not in content


def _temporary_name(path: Path, suffix: str = "tmp") -> Path:
    """Return the temporary name that this process uses for `path`."""
    return path.with_name(f".{path.name}.{_HOST}.{os.getpid()}.{suffix}")


def make_readable_and_sync(folder: Path) -> None:
    """Make all files of a folder readable for everybody who may read the folder, and sync them.

    safetensors creates files that only their owner may read.
    """
    permissions = folder.stat().st_mode & 0o666  # without the bits for executing
    for path in (*folder.rglob("*"), folder):
        if path.is_file():
            path.chmod(permissions)
        sync(path)


def sync(path: Path) -> None:
    """Wait until the system has written a file, or the list of files of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
