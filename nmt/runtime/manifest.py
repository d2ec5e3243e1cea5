"""Manifests: `manifest.json` lists the files of a folder with their sizes and checksums.

The checksums are 128-bit XXH3 hashes, which are computed as fast as memory is read. They detect
flipped bits and files that belong to another folder. They do not protect against an attacker, who
can update the manifest, too; see `nmt.runtime.signatures`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from nmt.errors import DamagedError, ModelError
from nmt.runtime.metadata import read_json, read_yaml
from nmt.runtime.reading import open_regular, read_regular_file

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SIGNATURE = "model.sig"  # the signature of the manifest; the manifest does not list this file
FORMAT_VERSION = 1
_BLOCK_BYTES = 1 << 18
_is_verifying = True


def write_manifest(folder: Path) -> None:
    """Write `manifest.json` for all files in `folder` and its subfolders, except a signature."""
    manifest = folder / MANIFEST
    paths = {path for path in folder.rglob("*") if path.is_file()}
    paths -= {manifest, folder / SIGNATURE}
    manifest.write_bytes(render_manifest(folder, paths))


def render_manifest(folder: Path, paths: Iterable[Path]) -> bytes:
    """Return the content of `manifest.json` for these files in `folder`."""
    entries = {}
    for path in sorted(paths):
        entry = {"bytes": path.stat().st_size, "xxh3": _compute_checksum(path)}
        entries[path.relative_to(folder).as_posix()] = entry
    return _render_entries(entries)


def set_verify(verify_files: bool) -> None:
    """Choose whether this process compares files with their manifests; by default, it does."""
    global _is_verifying
    _is_verifying = verify_files


def verify_checksums(folder: Path, *names: str) -> None:
    """Compare the files `names` of a folder with its manifest; without `names`, all listed files.

    Raises `DamagedError` for the first file that differs. A missing file is also an error without
    `names`. If `names` lists a missing file, the caller must report it. Files that the manifest
    does not list are not checked.
    """
    if not _is_verifying:
        return
    entries = read_entries(folder)
    checked_names = names or tuple(entries)
    for name in checked_names:
        path = folder / name
        if not path.exists():
            if not names:
                raise DamagedError(f"{path} is missing; copy or make the folder again")
            continue
        if name in entries and not _is_intact(path, entries[name]):
            raise _damaged_file_error(path)


def compute_checksums(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the checksums of files of `folder`.

    Raises `ModelError` for a missing file. Raises `DamagedError` if the checksum of a file differs
    from the manifest, unless `set_verify` has disabled checks.
    """
    entries = read_entries(folder) if _is_verifying else {}
    checksums = []
    for name in names:
        path = folder / name
        if not path.exists():
            raise ModelError(f"{path} does not exist; copy the model folder again")
        checksum = _compute_checksum(path)
        if name in entries and entries[name]["xxh3"] != checksum:
            raise _damaged_file_error(path)
        checksums.append(checksum)
    return checksums


def log_missing_manifest(folder: Path) -> None:
    """Log a note if a folder has no manifest, since nmt cannot detect damage to its files."""
    if not (folder / MANIFEST).exists():
        log.info("%s has no %s, so damaged files would not be detected", folder, MANIFEST)


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """Read `config.yaml` of a run. Raises `FileNotFoundError` or `DamagedError`."""
    path = run_dir / "config.yaml"
    entry = None
    if _is_verifying:
        entry = read_entries(run_dir).get(path.name)
    if entry is not None and not _is_intact(path, entry):
        raise DamagedError(f"{path} is damaged; if you changed it, remove {run_dir / MANIFEST}")
    return read_yaml(path)


def read_entries(folder: Path) -> dict[str, Any]:
    """Return the size and checksum of each listed file, by its path; {} without a manifest.

    Raises `DamagedError` if the manifest itself was changed: it includes a checksum of its entries,
    which `_render_entries` computes again.
    """
    path = folder / MANIFEST
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    entries = content.get("files")
    if not isinstance(entries, dict):
        raise _damaged_manifest_error(path)
    if read_regular_file(path) != _render_entries(entries):
        raise _damaged_manifest_error(path)
    return entries


def _is_intact(path: Path, entry: dict[str, Any]) -> bool:
    """Return whether a file has the size and the checksum of its entry."""
    has_same_size = path.stat().st_size == entry["bytes"]
    return bool(has_same_size and _compute_checksum(path) == entry["xxh3"])


def _damaged_manifest_error(path: Path) -> DamagedError:
    """Return the error for a manifest that was changed."""
    return DamagedError(
        f"{path} is damaged: it differs from the file that nmt wrote; copy or make the folder "
        "again, or set verify=false to use it unchecked"
    )


def _damaged_file_error(path: Path) -> DamagedError:
    """Return the error for a file that differs from the manifest."""
    return DamagedError(
        f"{path} is damaged: its size or checksum differs from {MANIFEST}; "
        "copy or make the folder again, or set verify=false to use it unchecked"
    )


def _compute_checksum(path: Path) -> str:
    """Return the XXH3 hash of a file."""
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _render_entries(entries: dict[str, Any]) -> bytes:
    """Return the content of a manifest, which includes a checksum of its entries."""
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(entries, sort_keys=True).encode())
    content = {"format_version": FORMAT_VERSION, "files": entries, "xxh3": checksum}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
