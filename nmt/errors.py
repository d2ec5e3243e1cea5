"""Errors that are the user's to mend: one line that says what is wrong, with which value, and what
to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NmtError(Exception):
    """A mistake of the user; the command line shows its message alone and exits with 2."""


class ConfigError(NmtError):
    """A configuration value that is unknown, out of range or contradicts another."""


class DataError(NmtError):
    """A corpus or data folder that is missing, empty, misaligned or damaged."""


class ModelError(NmtError):
    """A run, checkpoint or model folder that is missing, damaged or does not fit."""


class DeviceError(NmtError):
    """A device or number format that this machine does not have."""


class RankError(Exception):
    """A process of the run failed in a way that is no mistake of the user; it has said how."""


class PeerError(RankError):
    """Another process of the run is gone or did not answer in time."""


class StoppedError(Exception):
    """The run was asked to stop by a signal and has saved; the same command goes on."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Say which of `valid` the user may have meant by `name`, as the end of an error message."""
    options = sorted(valid)
    close = difflib.get_close_matches(name, options, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "valid: " + ", ".join(options)
