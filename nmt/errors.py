"""Exit statuses, and exceptions that commands show as one line without a traceback.

The message of an error states the problem and the value, and says what to do about it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

# control characters of ASCII and Latin-1 except tab and line feed, and Unicode characters that end
# a line or change the writing direction
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

EXIT_DONE = 0
EXIT_BUG = 1  # Python's status after a traceback
EXIT_USER = 2  # wrong arguments, settings or input
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a signal stopped training after a checkpoint
EXIT_INTERRUPTED = 130  # Ctrl-C


class NmtError(Exception):
    """A mistake of the user. Commands print its message and exit with status 2."""

    exit_status = EXIT_USER


class ConfigError(NmtError):
    """A setting that is unknown, out of range or contradicts another setting."""


class DataError(NmtError):
    """A corpus or data folder that is missing, empty, misaligned or damaged."""


class ModelError(NmtError):
    """A run, checkpoint or model folder that is missing, damaged or incompatible."""


class DamagedError(DataError, ModelError):
    """A file whose content was changed or cut off after it was written."""


class DeviceError(NmtError):
    """A device or number format that this machine does not have."""


class RankError(Exception):
    """A rank failed with an error that is not the user's mistake. The rank has logged the error."""

    exit_status = EXIT_BUG


class PeerError(RankError):
    """Another process of the run exited or did not answer in time."""


class StoppedError(Exception):
    """A signal stopped the run after it saved a checkpoint; the same command resumes it."""

    exit_status = EXIT_STOPPED


ONE_LINE_ERRORS = (NmtError, RankError, StoppedError)
"""Exceptions that commands show as one line without a traceback."""


def escape_controls(text: str) -> str:
    """Replace control characters, except tabs and line feeds, by escapes such as \\x1b.

    Unescaped, a text of the user's data could control the terminal or forge lines of a log.
    """
    # `ascii` puts quotes around the escape
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def to_one_line(message: object, max_characters: int | None = None) -> str:
    """Write a message, such as the error of a library, on one line of at most `max_characters`."""
    return " ".join(str(message).split())[:max_characters]


def suggest_names(name: str, valid: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error message about an unknown name: "did you mean ...?"

    Proposes up to three of the `valid` names: the most similar one, and others that are nearly as
    similar. If no name is similar, returns `otherwise` or, if that is empty, all valid names.
    """
    options = sorted(valid)
    # the name may lack its group, such as warmup_steps for optimizer.warmup_steps
    same_ending = [option for option in options if option.endswith(f".{name}")]
    proposals = sorted(same_ending, key=len)[:3]
    if not proposals:
        proposals = _find_similar(name, options)
    if proposals:
        return "did you mean " + " or ".join(proposals) + "?"
    return otherwise or "valid: " + ", ".join(options)


def _find_similar(name: str, options: Sequence[str]) -> list[str]:
    """Return the option most similar to `name`, and up to two that are nearly as similar."""
    most_similar = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if not most_similar:
        return []
    similarity = difflib.SequenceMatcher(None, most_similar[0], name).ratio()
    cutoff = max(0.5, similarity - 0.15)
    return difflib.get_close_matches(name, options, n=3, cutoff=cutoff)


def list_first(items: Sequence[object], limit: int) -> str:
    """List the first `limit` items for a message, and say how many more there are."""
    listed = ", ".join(str(item) for item in items[:limit])
    if len(items) > limit:
        listed += f" and {len(items) - limit} more"
    return listed
