"""Declare settings, check their values, and compare them when a command resumes earlier work."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from nmt.errors import ConfigError, suggest_names

DEFAULT_DATA_DIR = "data/prepared"
DEFAULT_RUN_DIR = "runs/default"
MAX_NUMBER = 10**9  # upper bound of settings that declare none
_MAX_NUMBER_RULE = f"must be at most {MAX_NUMBER:,}"
_MAX_SHOWN_CHARACTERS = 200  # error messages show this much of a value
LARGEST_SEED = 2**63 - 1
_MAX_TEXT_BYTES = 1 << 26  # maximum size of a file that has a value of a setting per line
_WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]")  # begins with C:\ or C:/
EnumType = TypeVar("EnumType", bound=Enum)

# How a command that resumes earlier work treats a setting whose value has changed since then:
# "refuse": nmt-train stops with an error, and other commands start over;
# "log": the command resumes and logs the change;
# "accept": the command resumes.
ResumeRule = Literal["refuse", "log", "accept"]


class OutputFormat(str, Enum):
    """Format of the results on stdout."""

    text = "text"
    json = "json"


@dataclass(frozen=True)
class Range:
    """An interval of numbers: `low` and `high` are included, `above` and `below` are excluded.

    An interval has at most one lower bound and one upper bound. An interval with `below` also has
    `low`.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def contains(self, value: float) -> bool:
        """Return whether `value` is in the range. A range with any bound does not contain NaN."""
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """Describe the range for an error message, such as "must be at least 1"."""
        if self.above is not None:
            limit = "" if self.high is None else f" and at most {self.high}"
            return f"must be above {self.above}{limit}"
        if self.high is not None:
            return f"must be from {self.low} to {self.high}"
        if self.below is not None:
            return f"must be from {self.low} to below {self.below}"
        return f"must be at least {self.low}"


def option(
    default: Any,
    help: str,
    *,
    on_resume: ResumeRule | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a setting.

    Args:
        default: the default value, or a class (a dataclass or dict) that makes it.
        help: the line of the setting in `--help`.
        on_resume: the `ResumeRule`; None inherits the rule of the group of the setting, or "refuse"
            if the group has none.
        low, high, above, below: bounds of a number, see `Range`.
    """
    bounds = Range(low=low, high=high, above=above, below=below)
    metadata = {"help": help, "range": bounds, "on_resume": on_resume}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Settings:
    """A group of settings, whose values are checked when it is constructed."""

    # precedes the names of settings in error messages, such as "model." in "model.norm"
    key_prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check types and the ranges of numbers, then call `check`.

        Texts become members of enums. Numbers without an upper bound must be at most `MAX_NUMBER`:
        sums and products of larger numbers could overflow.
        """
        for setting in fields(self):
            value = getattr(self, setting.name)
            is_text = isinstance(value, str) and not isinstance(value, Enum)
            if is_text or isinstance(value, list):
                self._convert_texts(setting.name, value)
            bounds = setting.metadata["range"]
            if isinstance(value, (int, float)) and not isinstance(value, bool):  # a bool is an int
                # a range with an upper bound does not contain NaN
                if bounds.high is None and bounds.below is None:
                    self.require(not math.isnan(value), setting.name, "is not a number")
                    is_in_limit = value <= MAX_NUMBER
                    self.require(is_in_limit, setting.name, _MAX_NUMBER_RULE)
                if not bounds.contains(value):
                    # `str(bounds)` is slow, so only an error computes it
                    self.require(False, setting.name, str(bounds))
        self.check()

    def _convert_texts(self, name: str, value: str | list[Any]) -> None:
        """Replace a text, or each text of a list, by the member of an enum that has this value.

        Raises a `ConfigError` if no member has this value, and a `TypeError` for a text in place of
        a number, flag or list.
        """
        key = self.key_prefix + name
        settings_class: type = type(self)
        expected_type = _read_types(settings_class)[name]
        is_list = get_origin(expected_type) is list
        choices = get_args(expected_type)[0] if is_list else expected_type
        has_choices = isinstance(choices, type) and issubclass(choices, Enum)
        if isinstance(value, str) and (is_list or expected_type in (bool, int, float)):
            raise TypeError(f"{key}={value!r}: must be of type {expected_type.__name__}")
        if has_choices and isinstance(value, list):
            setattr(self, name, [choose(choices, key, item) for item in value])
        elif has_choices:
            setattr(self, name, choose(choices, key, value))

    def check(self) -> None:
        """Raise a `ConfigError` for contradictory settings; subclasses override this."""

    def require(self, condition: bool, key: str, problem: str) -> None:
        """Raise the `ConfigError` "KEY=VALUE: PROBLEM" for a setting unless `condition` holds.

        `key` may name a setting in a group, such as `optimizer.name`.
        """
        if not condition:
            raise _invalid_value(self.key_prefix + key, attrgetter(key)(self), problem)


@functools.cache  # `get_type_hints` is slow, and configs are made for each request of a server
def _read_types(settings_class: type) -> dict[str, Any]:
    """Return the type of each setting of a class; `int` for the type hint `int | None`."""
    types = {}
    for name, type_hint in get_type_hints(settings_class).items():
        if type(None) in get_args(type_hint):
            type_hint = get_args(type_hint)[0]
        types[name] = type_hint
    return types


def require_valid(is_valid: bool, key: str, value: object, problem: str) -> None:
    """Raise the `ConfigError` "KEY=VALUE: PROBLEM" unless `is_valid`."""
    if not is_valid:
        raise _invalid_value(key, value, problem)


def _invalid_value(key: str, value: object, problem: str) -> ConfigError:
    """Return the error for a setting whose value is invalid."""
    shown_value = str(to_primitive(value))
    if isinstance(value, bool):
        shown_value = shown_value.lower()  # the notation of YAML
    if len(shown_value) > _MAX_SHOWN_CHARACTERS:
        shown_value = shown_value[:_MAX_SHOWN_CHARACTERS] + "..."
    return ConfigError(f"{key}={shown_value}: {problem}")


def choose(choices: type[EnumType], key: str, value: str | EnumType) -> EnumType:
    """Return the enum member with this value; raise a `ConfigError` if no member has it."""
    try:
        return choices(value)
    except ValueError:
        names = [choice.value for choice in choices]
        raise ConfigError(
            f"{key}={value}: no such choice; {suggest_names(str(value), names)}"
        ) from None


# --- comparison with the settings of earlier work


def iterate_settings(
    config: Any, prefix: str = "", inherited_rule: ResumeRule = "refuse"
) -> Iterator[tuple[str, Any, ResumeRule]]:
    """Yield the key, the value and the resume rule of every setting of `config`.

    Settings in groups and in mappings have keys such as `data.corpora.news.weight`. `prefix`
    precedes all keys. Settings that declare no resume rule get `inherited_rule`.
    """
    for setting in fields(config):
        resume_rule = setting.metadata["on_resume"] or inherited_rule
        yield from _iterate_value(prefix + setting.name, getattr(config, setting.name), resume_rule)


def _iterate_value(
    key: str, value: Any, resume_rule: ResumeRule
) -> Iterator[tuple[str, Any, ResumeRule]]:
    """Yield one setting, or all settings of a group or mapping, see `iterate_settings`."""
    if is_dataclass(value):
        yield from iterate_settings(value, f"{key}.", resume_rule)
    elif isinstance(value, dict):
        for name, member in value.items():
            yield from _iterate_value(f"{key}.{name}", member, resume_rule)
    else:
        yield key, value, resume_rule


def settings_to_compare(config: Any) -> dict[str, Any]:
    """Return the settings that a resumed command compares with the earlier ones, as JSON values."""
    compared = {}
    for key, value, resume_rule in iterate_settings(config):
        if resume_rule != "accept":
            compared[key] = to_primitive(value)
    return compared


def settings_that_may_change(config: Any) -> set[str]:
    """Return the keys of the settings that may differ in a resumed command, which logs them."""
    return {key for key, _, resume_rule in iterate_settings(config) if resume_rule == "log"}


def to_primitive(value: Any) -> Any:
    """Convert a setting for JSON: an enum member to its value, a list to text with commas."""
    if isinstance(value, list):
        return ",".join(str(to_primitive(item)) for item in value)
    if isinstance(value, Enum):
        return value.value
    return value


# --- paths


def normalize_stream(name: str) -> str:
    """Return `-` for the Unix paths of stdin and stdout, some of which cannot be opened."""
    return "-" if name in ("/dev/stdin", "/dev/stdout", "/dev/fd/0", "/dev/fd/1") else name


def resolve_path(path: str | Path) -> Path:
    """Return an absolute path: expand `~`, and start relative paths at the current folder.

    Raises a `ConfigError` for a path such as `C:\\data` on other systems than Windows, where it
    would name a file in the current folder.
    """
    if os.name != "nt" and _WINDOWS_PATH.match(str(path)):
        drive, _, folders = str(path).replace("\\", "/").partition(":")
        raise ConfigError(
            f"{path} is a Windows path; Linux on Windows names it /mnt/{drive.lower()}{folders}"
        )
    return Path(os.path.abspath(os.path.expanduser(str(path))))


def read_text_file(path: str, setting: str) -> str:
    """Return the text of the file that a setting names.

    Raises `ConfigError` if it cannot be read, is too large or is not UTF-8.
    """
    try:
        with resolve_path(path).open("rb") as file:
            content = file.read(_MAX_TEXT_BYTES + 1)  # a device may be endless
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{setting}={path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{setting}={path}: is not UTF-8 (byte {error.start + 1}); convert it"
        ) from None
    if len(content) > _MAX_TEXT_BYTES:
        raise ConfigError(
            f"{setting}={path}: has more than {_MAX_TEXT_BYTES:,} bytes; give a smaller file"
        )
    return text
