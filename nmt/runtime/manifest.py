"""Manifests: `manifest.json` lists the files of a folder with their sizes and checksums.

The checksums are XXH3 with 128 bits, which detect flipped bits and mixed-up files at the speed of
memory. They do not protect against somebody who changes the manifest too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from nmt.errors import DamagedError
from nmt.runtime.metadata import parse_yaml, read_json

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_settings = {"verify": True}
_BLOCK = 1 << 18


def write_manifest(folder: Path) -> None:
    """Write `manifest.json` for all other files in `folder` and below it."""
    paths = (p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    (folder / MANIFEST).write_bytes(render_manifest(folder, paths))


def render_manifest(folder: Path, paths: Iterable[Path]) -> bytes:
    """Return the content of `manifest.json` for files in `folder` and below it."""
    return _render({p.relative_to(folder).as_posix(): _describe(p) for p in sorted(paths)})


def set_verify(wanted: bool) -> None:
    """Let `verify` compare files, as it does from the start, or pass all."""
    _settings["verify"] = wanted


def verify(folder: Path, *names: str) -> None:
    """Compare files of `folder` with its manifest: those of these names, or all that it lists.

    Raises `DamagedError` for the first that differs. A folder without a manifest, which an older
    nmt wrote, passes; so does a file that the manifest does not list.
    """
    if not _settings["verify"]:
        return
    files = _read(folder)
    for name in names or files:
        path = folder / name
        if name in files and path.is_file() and _describe(path) != files[name]:
            raise DamagedError(
                f"{path} is damaged: its size or checksum is not that of {MANIFEST}; "
                "copy or make the folder again, or set verify=false to use it as it is"
            )
        if not names and not path.is_file():
            raise DamagedError(f"{path} is missing; copy or make the folder again")


def note_unverified(folder: Path) -> None:
    """Log that a folder was written without a manifest."""
    if not (folder / MANIFEST).is_file():
        log.info("%s has no %s, so that damage would not be noticed", folder, MANIFEST)


def read_config(run_dir: Path) -> dict[str, Any]:
    """Read `config.yaml` of a run; raise `FileNotFoundError`, or `DamagedError`."""
    path = run_dir / "config.yaml"
    if path.stat().st_size >= _BLOCK:
        return parse_yaml(bytes(_BLOCK), path)  # which refuses it
    expected = _read(run_dir).get(path.name) if _settings["verify"] else None
    if expected not in (None, _describe(path)):
        raise DamagedError(f"{path} is damaged; if you changed it, remove {run_dir / MANIFEST}")
    return parse_yaml(path.read_bytes(), path)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    files = content.get("files")
    if not isinstance(files, dict) or path.read_bytes() != _render(files):
        raise DamagedError(
            f"{path} is damaged: it is not what was written; copy or make the folder again, or set "
            "verify=false to use it as it is"
        )
    return files


def _describe(path: Path) -> dict[str, Any]:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "xxh3": digest.hexdigest()}


def _render(files: dict[str, Any]) -> bytes:
    """Return the manifest, with a checksum of itself."""
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())
    content = {"format_version": FORMAT_VERSION, "files": files, "xxh3": checksum}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
