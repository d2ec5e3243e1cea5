"""Run programs that compute scores, such as COMET in an environment of its own."""

from __future__ import annotations

import math
import shlex
import subprocess
from collections.abc import Sequence

from nmt.errors import ConfigError, DataError


def run_score_command(
    key: str, command: str, lines: Sequence[str], *, timeout_seconds: float | None = None
) -> list[float]:
    """Return the numbers that a program prints for lines of JSON.

    The program starts once, reads all lines and prints one number for each. Its messages on stderr
    appear on stderr of this process. `key` is the setting that names the program. Raises
    `ConfigError` if the program cannot start, fails or takes too long. Raises `DataError` unless
    the output is one finite number for each line.
    """
    program = shlex.split(command)
    text = "".join(f"{line}\n" for line in lines)
    try:
        result = subprocess.run(
            program,
            input=text.encode(),
            stdout=subprocess.PIPE,
            check=False,
            timeout=timeout_seconds,
        )
    except OSError as error:
        raise ConfigError(f"{key}={command}: {error.strerror}: {program[0]}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{key}={command}: took more than {timeout_seconds:g} seconds for {len(lines)} lines"
        ) from None
    if result.returncode:
        raise ConfigError(
            f"{key}={command}: ended with status {result.returncode}; its messages say why"
        )
    output = result.stdout.decode("utf-8", "replace").split()
    if len(output) != len(lines):
        raise DataError(
            f"{key}={command}: printed {len(output)} numbers for {len(lines)} lines; "
            "print one number for each line of JSON, and messages to stderr"
        )
    return [_parse_score(key, command, word) for word in output]


def _parse_score(key: str, command: str, word: str) -> float:
    """Convert a printed word to a number. Raises `DataError` if it is not a finite number."""
    try:
        score = float(word)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(
            f"{key}={command}: printed {word!r:.50}; print one number for each line of JSON, and "
            "messages to stderr"
        )
    return score
