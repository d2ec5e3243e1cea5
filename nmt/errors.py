"""Exit statuses, and the errors that a user can fix: one line that states what is wrong, with which
value, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

EXIT_DONE = 0
EXIT_BUG = 1  # Python's own after a traceback
EXIT_USER = 2  # a mistake in what was given
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: training was stopped by a signal and saved
EXIT_INTERRUPTED = 130  # Ctrl-C


class NmtError(Exception):
    """A mistake of the user; the command line shows its message alone and exits with 2."""

    exit_status = EXIT_USER


class ConfigError(NmtError):
    """A configuration value that is unknown, out of range or contradicts another."""


class DataError(NmtError):
    """A corpus or data folder that is missing, empty, misaligned or damaged."""


class ModelError(NmtError):
    """A run, checkpoint or model folder that is missing, damaged or does not fit."""


class DamagedError(DataError, ModelError):
    """A file that is not what was written."""


class DeviceError(NmtError):
    """A device or number format that this machine does not have."""


class RankError(Exception):
    """A process of the run failed for a reason other than a user's mistake, and has logged it."""

    exit_status = EXIT_BUG


class PeerError(RankError):
    """Another process of the run has exited or did not answer in time."""


class StoppedError(Exception):
    """The run was stopped by a signal and has saved; the same command resumes it."""

    exit_status = EXIT_STOPPED


LINE_ERRORS = (NmtError, RankError, StoppedError)  # shown as one line, without a traceback


def nearest(name: str, valid: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error message: which of `valid` the user may have meant by `name`, or,
    when none is near, `otherwise`, by default all.
    """
    options = sorted(valid)
    ends = sorted((option for option in options if option.endswith(f".{name}")), key=len)
    close = ends[:3] or difflib.get_close_matches(name, options, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return otherwise or "valid: " + ", ".join(options)


def first_of(items: Sequence[object], most: int) -> str:
    """Return up to `most` of `items` for a message, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
