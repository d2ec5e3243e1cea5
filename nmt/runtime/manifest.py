"""Checksums by which damage is noticed: of the files in a folder, in its `manifest.json`; of each
line of a file that grows, at the end of the line, and its newest line beside it.

They are XXH3, of files with 128 bits and of lines with 64: it finds flipped bits and mixed-up files
at the speed of memory, and is no protection against somebody who changes it too.
"""

from __future__ import annotations

import json
import logging
import re
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
_MOST_BYTES = 1 << 30  # of `metrics.jsonl`
# matches where a bit of the checksum is flipped too, and nothing that an older nmt wrote
_SEALED = re.compile(rb'(.*), "....": ".{16}"\}', re.DOTALL)


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


def seal(content: dict[str, Any]) -> bytes:
    """Return a line of JSON whose last key is the checksum of the others, of which there is one."""
    text = json.dumps(content).encode()
    return text[:-1] + f', "xxh3": "{xxhash.xxh3_64_hexdigest(text)}"}}\n'.encode()


def unseal(line: bytes) -> dict[str, Any]:
    """Read a line of `seal`, or one of an older nmt without a checksum; `ValueError` if damaged."""
    found = _SEALED.fullmatch(line.rstrip(b"\n"))
    try:
        content = json.loads(found[1] + b"}" if found else line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    if found and _settings["verify"] and seal(content) != line.rstrip(b"\n") + b"\n":
        raise ValueError("another checksum")
    return content


def read_records(path: Path, *, leave_out_damaged: bool = False) -> list[dict[str, Any]]:
    """Read the records of `metrics.jsonl`; a last line that is being written is left out.

    Raises `DamagedError`, or logs it, for a damaged line and where the line of `mark_end` is
    missing, and raises it for a file that is too large.
    """
    end = path.with_suffix(".end")
    newest = b""
    if _settings["verify"] and end.is_file():
        with end.open("rb") as file:
            newest = file.read(_BLOCK)  # before the lines, of which there may be more then
    if path.stat().st_size > _MOST_BYTES:
        raise DamagedError(f"{path} has more than {_MOST_BYTES >> 30} GB; move it elsewhere")
    records, is_whole = [], not newest.endswith(b"\n")  # which is being written
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") and b'"}' not in line:
                break
            is_whole |= line == newest
            try:
                records.append(_check_record(unseal(line)))
            except ValueError as error:
                text = f"{path}, line {number} is damaged ({error})"
                if not leave_out_damaged:
                    raise DamagedError(f"{text}; remove the line, or copy the file again") from None
                log.warning("%s; it is left out", text)
    if not is_whole:
        text = f"{path} was cut, or is of another run: it lacks the line of {end.name}"
        if not leave_out_damaged:
            raise DamagedError(f"{text}; copy the file again, or remove {end.name} to use it so")
        log.warning("%s; what it has is kept", text)
    return records


def mark_end(path: Path, line: bytes) -> None:
    """Note the newest line of `metrics.jsonl` beside it, or that it is being written (`b""`)."""
    path.with_suffix(".end").write_bytes(line)


def _check_record(record: dict[str, Any]) -> dict[str, Any]:
    update = record.get("update")
    if type(update) is not int or not 0 <= update < 1 << 63:
        raise ValueError("no update")
    for name, value in record.items():
        if not isinstance(value, str if name in ("event", "batch") else (int, float)):
            raise ValueError(f"{name} is no number")
    return record


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
