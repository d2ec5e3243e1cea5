"""Writes the lines of a result to stdout or to a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from nmt.config import resolve
from nmt.errors import ConfigError
from nmt.files import replace_file


def check_output(output: str) -> None:
    """Refuse what cannot be written to; meant to be called before the model is loaded."""
    if output == "-":
        if sys.stdout is None:
            raise ConfigError("stdout is closed; give output=FILE")
        return
    path = resolve(output)
    if not path.parent.is_dir():
        raise ConfigError(f"output={output}: {path.parent} does not exist; make the folder first")
    if path.is_dir():
        raise ConfigError(f"output={output}: is a folder; give the path of a file")


def write_lines(lines: Iterable[str], output: str) -> None:
    """Write to stdout as lines come, or to a file that is renamed into its place when whole."""
    if output == "-":
        for line in lines:
            sys.stdout.buffer.write(line.encode("utf-8") + b"\n")
            sys.stdout.buffer.flush()
        return
    path = resolve(output).resolve()  # a link stays, and what it points to is replaced
    if path.exists() and not path.is_file():
        _write_file(path, lines)  # a pipe or a device cannot be replaced
    else:
        with replace_file(path) as temporary:
            _write_file(temporary, lines)


def _write_file(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(line + "\n" for line in lines)
