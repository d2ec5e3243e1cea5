"""Files and folders that are either whole or not there: written beside their place, synced, renamed
into it.
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
_LEFTOVER = re.compile(r"(?:\.[A-Za-z0-9-]+)?\.\d+\.(?:tmp|old)$")


def write_json(path: Path, content: Any) -> None:
    """Write JSON with sorted keys, so that equal content is equal bytes."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


@contextlib.contextmanager
def disk_errors(what: object, remedy: str) -> Iterator[None]:
    """Turn an error of the disk into one line that says what cannot be written and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise NmtError(f"{what} cannot be written: {reason}; {remedy}") from None


@contextlib.contextmanager
def replace_folder(folder: Path, *, marker: str) -> Iterator[Path]:
    """Give an empty folder to fill, which takes the place of `folder` when the block ends without
    an exception, with a manifest of its files.

    `marker` is a JSON file with `format_version` that every such folder holds: anything else that
    is in the way is not ours and is refused.
    """
    folder = folder.resolve()  # a link stays, and what it points to is replaced
    check_place(folder, marker)
    remove_abandoned(folder)
    temporary = _beside(folder)
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        with disk_errors(folder, "nothing was changed"):
            temporary.mkdir(parents=True)
            yield temporary
            put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in new_parents:  # those that stayed empty go again
            with contextlib.suppress(OSError):
                parent.rmdir()


def put_in_place(new: Path, folder: Path) -> None:
    """Write the manifest of `new`, bring it to disk and give it the name `folder`.

    What had the name before goes. Killed at any moment, the name stands for one of the two; what
    is left of the other is at no place but the one where the next command removes it.
    """
    write_manifest(new)
    share_and_sync(new)
    temporary = _beside(folder)
    if new != temporary:
        os.rename(new, temporary)
    if folder.exists():
        _exchange(temporary, folder)
        sync(folder.parent)
        shutil.rmtree(temporary)
    else:
        os.rename(temporary, folder)
        sync(folder.parent)


def _exchange(one: Path, other: Path) -> None:
    """Exchange two names in one step; two steps where system or file system cannot."""
    names = [os.fsencode(one), os.fsencode(other)]
    failed = errno.ENOSYS
    if sys.platform != "win32":
        libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(libc, "renameat2"):  # Linux; flag 2 is RENAME_EXCHANGE
            here = -100  # AT_FDCWD
            failed = libc.renameat2(here, names[0], here, names[1], 2) and ctypes.get_errno()
        elif hasattr(libc, "renamex_np"):  # macOS; flag 2 is RENAME_SWAP
            failed = libc.renamex_np(*names, 2) and ctypes.get_errno()
    if failed in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        old = _beside(other, "old")
        os.rename(other, old)
        os.rename(one, other)
        os.rename(old, one)
    elif failed:
        raise OSError(failed, os.strerror(failed), str(other))


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Give a path to write; it takes the place of `path` unless the block raises."""
    remove_abandoned(path)
    temporary = _beside(path)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_link(link: Path, target: str) -> None:
    """Point the symbolic link `link` at the relative path `target` in one step."""
    temporary = _beside(link)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def remove_folder(folder: Path) -> None:
    """Remove `folder`, which a kill in between leaves whole or as a leftover."""
    temporary = _beside(folder)
    os.rename(folder, temporary)
    shutil.rmtree(temporary)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes began to write in `folder`, and put back what they were about to
    replace; nobody else may be writing there.
    """
    for path in (*folder.glob(".*.old"), *folder.glob(".*.tmp")):
        _clear(path)


def remove_abandoned(path: Path) -> None:
    """Remove what killed processes of this machine began to write in the place of `path`, and put
    back what they were about to replace.
    """
    for suffix in ("old", "tmp"):
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.{suffix}"):
            owner = re.fullmatch(r"(?:(.+)\.)?(\d+)", leftover.name[len(path.name) + 2 : -4])
            if owner and owner[1] in (None, _HOST) and not _is_running(int(owner[2])):
                _clear(leftover)


def _clear(leftover: Path) -> None:
    """Remove a leftover; an old folder or file without a successor gets its name back."""
    place = leftover.with_name(_LEFTOVER.sub("", leftover.name[1:]))
    if leftover.name.endswith(".old") and not place.exists():
        os.rename(leftover, place)
    elif leftover.is_dir() and not leftover.is_symlink():
        shutil.rmtree(leftover, ignore_errors=True)
    else:
        leftover.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    """Say whether a process of this machine lives and is not this one."""
    if process == os.getpid() or sys.platform == "win32":  # where signal 0 would end it
        return process != os.getpid()
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True


def check_place(folder: Path, marker: str) -> None:
    """Raise an `NmtError` for a folder that no other can replace: something foreign, a mount point,
    or the current folder, which would be gone for the shell.
    """
    if folder.is_file() or _is_foreign(folder, marker):
        raise NmtError(f"{folder} exists and holds no {marker} of nmt; choose another folder")
    if os.path.ismount(folder) or (folder.exists() and folder.samefile(os.curdir)):
        what = "a mount point" if os.path.ismount(folder) else "the current folder"
        raise NmtError(f"{folder} is {what}, which cannot be replaced; choose a folder in it")


def _is_foreign(folder: Path, marker: str) -> bool:
    """Say whether `folder` holds something, but no such JSON file with `format_version`."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    with contextlib.suppress(OSError, NmtError):
        return "format_version" not in read_json(folder / marker)
    return True


def _beside(path: Path, suffix: str = "tmp") -> Path:
    """Return the temporary name that this process uses for `path`."""
    return path.with_name(f".{path.name}.{_HOST}.{os.getpid()}.{suffix}")


def share_and_sync(folder: Path) -> None:
    """Let those read the files who may read the folder, since safetensors writes for the owner
    alone, and bring all files and names below it to disk.
    """
    mode = folder.stat().st_mode & 0o666
    for path in (*folder.rglob("*"), folder):
        if path.is_file():
            path.chmod(mode)
        sync(path)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
