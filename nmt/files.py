"""Files and folders that are either whole or not there: written beside their place, synced, renamed
into it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmt.errors import NmtError


def write_json(path: Path, content: Any) -> None:
    """Write JSON with sorted keys, so that equal content is equal bytes."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


@contextlib.contextmanager
def replace_folder(folder: Path, *, marker: str) -> Iterator[Path]:
    """Give an empty folder to fill, which takes the place of `folder` when the block ends without
    an exception.

    `marker` is a JSON file with `format_version` that every such folder holds: anything else that
    is in the way is not ours and is refused.
    """
    folder = folder.resolve()  # a link stays, and what it points to is replaced
    if folder.is_file() or is_foreign(folder, marker):
        raise NmtError(f"{folder} exists and holds no {marker} of nmt; choose another folder")
    temporary, old = _beside(folder, "tmp"), _beside(folder, "old")
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process of this number that was killed
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise NmtError(f"{folder} cannot be written: {error.strerror}; choose another") from None
    try:
        yield temporary
        share_and_sync(temporary)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(folder, old)
        os.rename(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in new_parents:  # those that stayed empty go again
            with contextlib.suppress(OSError):
                parent.rmdir()


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Give a path to write; it takes the place of `path` unless the block raises."""
    temporary = _beside(path, "tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_link(link: Path, target: str) -> None:
    """Point the symbolic link `link` at the relative path `target` in one step."""
    temporary = _beside(link, "tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def remove_folder(folder: Path) -> None:
    """Remove `folder`, which a kill in between leaves whole or as a leftover."""
    temporary = _beside(folder, "tmp")
    os.rename(folder, temporary)
    shutil.rmtree(temporary)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes began to write in `folder`, and put back what they were about to
    replace; nobody else may be writing there.
    """
    for old in folder.glob(".*.old"):
        place = folder / old.name[1:].rsplit(".", 2)[0]
        if not place.exists():
            os.rename(old, place)
    for path in (*folder.glob(".*.tmp"), *folder.glob(".*.old")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def is_foreign(folder: Path, marker: str) -> bool:
    """Say whether `folder` holds something, but no such JSON file with `format_version`."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    try:
        content = json.loads((folder / marker).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not isinstance(content, dict) or "format_version" not in content


def _beside(path: Path, suffix: str) -> Path:
    """Return the temporary name that this process uses for `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.{suffix}")


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
