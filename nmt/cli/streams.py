"""Inputs and outputs of nmt-translate and nmt-score: files, stdin, stdout, pipes and devices."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from nmt.config import resolve_path
from nmt.data.text import (
    ArrivingLines,
    is_compressed,
    is_stream,
    open_bytes,
    read_input,
    read_stream,
)
from nmt.errors import ConfigError


def find_output(output: str, inputs: Iterable[str]) -> Path | None:
    """Return the file to write, or None for a stream: stdout, a pipe or a device.

    Raises a `ConfigError` if the path cannot be a file or is one of the inputs.
    """
    if output == "-":
        if sys.stdout is None:
            raise ConfigError("stdout is closed; give output=FILE")
        return None
    path = resolve_path(output)
    if not path.parent.is_dir():
        raise ConfigError(f"output={output}: {path.parent} does not exist; make the folder first")
    if path.is_dir():
        raise ConfigError(f"output={output}: is a folder; give the path of a file")
    if is_stream(path):
        return None
    file = path.resolve()  # replace the file that a link points to, not the link
    for name in inputs:
        if name != "-" and resolve_path(name).resolve() == file:
            raise ConfigError(f"output={output}: is the input; give the path of another file")
    return file


def check_input(path: str) -> None:
    """Raise an error if a file cannot be read; call this before loading a model."""
    if not is_stream(path):
        with open_bytes(resolve_path(path)):
            pass


def open_output(output: str, stack: contextlib.ExitStack) -> IO[bytes]:
    """Open stdout, a pipe or a device for writing; `stack` closes it."""
    if output == "-":
        return sys.stdout.buffer
    return stack.enter_context(resolve_path(output).open("wb"))


def open_input(path: str, stack: contextlib.ExitStack) -> tuple[Iterator[str], Callable[[], bool]]:
    """Open an input; return its lines and a function.

    The function returns whether a line can be read without waiting. For a file, this is always
    true. For a terminal, pipe or socket, the next line may not have arrived.
    """
    status = _stdin_status() if path == "-" else None
    is_terminal_or_pipe = status is not None and not stat.S_ISREG(status.st_mode)
    if is_terminal_or_pipe:
        arriving_lines = ArrivingLines(sys.stdin.buffer.fileno())
        return read_stream(arriving_lines, "stdin"), arriving_lines.has_more
    is_pipe = path != "-" and is_stream(path) and not is_compressed(path)
    if not is_pipe:
        return read_input(path), lambda: True
    pipe = stack.enter_context(resolve_path(path).open("rb", buffering=0))
    arriving_lines = ArrivingLines(pipe.fileno())
    return read_stream(arriving_lines, path), arriving_lines.has_more


def input_size(path: str) -> int | None:
    """Return the size of an uncompressed file in bytes, or None for other inputs."""
    if path == "-":
        status = _stdin_status()
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        return status.st_size
    if is_compressed(path) or is_stream(path):
        return None
    return resolve_path(path).stat().st_size


def _stdin_status() -> os.stat_result | None:
    """Return the status of stdin, or None if it is closed or has no file descriptor."""
    try:
        return os.fstat(sys.stdin.buffer.fileno())
    except (AttributeError, OSError):
        return None
