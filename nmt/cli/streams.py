"""What commands read from and write to: files, stdin and stdout, which may be slow."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from nmt.config import resolve
from nmt.data.text import WaitingLines, read_input, read_stream
from nmt.errors import ConfigError
from nmt.files import replace_file


def open_input(path: str) -> tuple[Iterator[str], Callable[[], bool]]:
    """Open the input; also return a function that says whether more of it is there already."""
    details = _stdin_status() if path == "-" else None
    if details is not None and not stat.S_ISREG(details.st_mode):  # a terminal, pipe or socket
        waiting = WaitingLines(sys.stdin.buffer.fileno())
        return read_stream(waiting, "stdin"), waiting.has_more
    return read_input(path), lambda: True


def num_bytes(path: str) -> int | None:
    """Return the size of the text, where it can be known."""
    if path == "-":
        details = _stdin_status()
        return details.st_size if details and stat.S_ISREG(details.st_mode) else None
    return None if path.endswith(".gz") else resolve(path).stat().st_size


def is_typed(path: str) -> bool:
    """Return whether a person types the input."""
    return path == "-" and sys.stdin is not None and sys.stdin.buffer.isatty()


def _stdin_status() -> os.stat_result | None:
    """Return the status of stdin, None when it is closed or no file of the system."""
    try:
        return os.fstat(sys.stdin.buffer.fileno())
    except (AttributeError, OSError):
        return None


def find_output(output: str) -> Path | None:
    """Return the file to write, None for a stream: stdout, a pipe or a device. Refuse what cannot
    be written to; meant to be called before the model is loaded.
    """
    if output == "-":
        if sys.stdout is None:
            raise ConfigError("stdout is closed; give output=FILE")
        return None
    path = resolve(output)
    if not path.parent.is_dir():
        raise ConfigError(f"output={output}: {path.parent} does not exist; make the folder first")
    if path.is_dir():
        raise ConfigError(f"output={output}: is a folder; give the path of a file")
    path = path.resolve()  # a link stays, and what it points to is replaced
    return None if path.exists() and not path.is_file() else path


@contextlib.contextmanager
def open_output(output: str) -> Iterator[IO[bytes]]:
    """Open stdout for "-", otherwise a pipe or device."""
    if output != "-":
        with resolve(output).open("wb") as stream:
            yield stream
    else:
        yield sys.stdout.buffer


def write_lines(lines: Iterable[str], output: str) -> None:
    """Write to a stream as lines come, or to a file that is renamed into its place when whole."""
    path = find_output(output)
    if path is None:
        with open_output(output) as stream:
            for line in lines:
                stream.write(line.encode("utf-8") + b"\n")
                stream.flush()
    else:
        with replace_file(path) as temporary, temporary.open("wb") as stream:
            stream.writelines(line.encode("utf-8") + b"\n" for line in lines)
