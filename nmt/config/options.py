"""How a setting is declared, checked and compared when a command resumes its work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from nmt.errors import ConfigError, nearest

DEFAULT_DATA_DIR = "data/prepared"
DEFAULT_RUN_DIR = "runs/default"
MAX_NUMBER = 10**9  # upper bound of numbers without a bound of their own
LARGEST_SEED = 2**63 - 1
E = TypeVar("E", bound=Enum)

# How a command continues earlier work after the value of a setting has changed:
# "refuse": not continue it (nmt-train stops with an error, other commands start over and say so),
# "log": continue and log the change, "free": continue.
OnResume = Literal["refuse", "log", "free"]


class OutputFormat(str, Enum):
    """Format of the results on stdout."""

    text = "text"
    json = "json"


@dataclass(frozen=True)
class Range:
    """Values that a number may have: `low` and `high` are included, `above` and `below` are not."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def contains(self, value: float) -> bool:
        """Return whether `value` is in the range; NaN is in none."""
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """Return the rule that an error message gives."""
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
    on_resume: OnResume | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a setting.

    `default` is the default value, or the dataclass or dict type that constructs it. `help` is its
    line in `--help`. `on_resume` says how a command treats a changed value when it resumes its
    work; None takes the declaration of the group that holds the setting, or "refuse" if no group
    has one. The other parameters are the bounds of a number, see `Range`.
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
    """A group of settings, which is checked when it is made."""

    prefix: ClassVar[str] = ""  # of its keys in error messages

    def __post_init__(self) -> None:
        """Check the ranges of numbers, then what `check` requires.

        None is in every range. Numbers without an upper bound end at `MAX_NUMBER`, beyond which
        sums and products of settings could overflow.
        """
        for setting in fields(self):
            value, bounds = getattr(self, setting.name), setting.metadata["range"]
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                has_limit = bounds.high is not None or bounds.below is not None
                is_small = has_limit or abs(value) <= MAX_NUMBER
                self.require(is_small, setting.name, f"must be at most {MAX_NUMBER:,}")
                self.require(bounds.contains(value), setting.name, str(bounds))
        self.check()

    def check(self) -> None:
        """Raise a `ConfigError` for settings that are impossible or contradict each other."""

    def require(self, condition: bool, key: str, rule: str) -> None:
        """Raise a `ConfigError` that names a key, its value and the rule unless `condition`."""
        if not condition:
            require(condition, self.prefix + key, attrgetter(key)(self), rule)


def require(condition: bool, key: str, value: object, rule: str) -> None:
    """Raise a `ConfigError` that names key, value and rule unless `condition` holds."""
    if not condition:
        typed = str(value).lower() if isinstance(value, bool) else to_primitive(value)
        raise ConfigError(f"{key}={typed}: {rule}")


def choose(choices: type[E], key: str, value: str | E) -> E:
    """Return the member of an enum that `value` names; raise a `ConfigError` that lists them."""
    try:
        return choices(value)
    except ValueError:
        names = [choice.value for choice in choices]
        raise ConfigError(f"{key}={value}: no such choice; {nearest(str(value), names)}") from None


# --- what a resumed command compares


def iterate_settings(
    config: Any, prefix: str = "", on_resume: OnResume = "refuse"
) -> Iterator[tuple[str, Any, OnResume]]:
    """Yield the dotted key, the value and the behavior on resume of every setting of `config`.

    Groups are replaced by their settings, also groups with names of the user, such as
    `data.corpora.news.weight`.
    """
    for setting in fields(config):
        behavior = setting.metadata["on_resume"] or on_resume
        yield from _iterate_value(prefix + setting.name, getattr(config, setting.name), behavior)


def _iterate_value(
    key: str, value: Any, on_resume: OnResume
) -> Iterator[tuple[str, Any, OnResume]]:
    if is_dataclass(value):
        yield from iterate_settings(value, f"{key}.", on_resume)
    elif isinstance(value, dict):
        for name, member in value.items():
            yield from _iterate_value(f"{key}.{name}", member, on_resume)
    else:
        yield key, value, on_resume


def settings_to_compare(config: Any) -> dict[str, Any]:
    """Return the settings of `config` that are not free on resume, by key, as primitives."""
    settings = iterate_settings(config)
    return {key: to_primitive(value) for key, value, on_resume in settings if on_resume != "free"}


def settings_to_log(config: Any) -> set[str]:
    """Return the keys of settings whose changes a resumed command logs."""
    return {key for key, _, on_resume in iterate_settings(config) if on_resume == "log"}


def to_primitive(value: Any) -> Any:
    """Return an enum as its value and a list as the user types it; JSON can hold the result."""
    if isinstance(value, list):
        return ",".join(str(to_primitive(item)) for item in value)
    return value.value if isinstance(value, Enum) else value


# --- paths


def normalize_stream(name: str) -> str:
    """Return `-` for the names that Unix has for stdin and stdout, which not all can be opened."""
    return "-" if name in ("/dev/stdin", "/dev/stdout", "/dev/fd/0", "/dev/fd/1") else name


def resolve(path: str | Path) -> Path:
    """Expand `~` and make `path` absolute against the current folder."""
    return Path(os.path.abspath(os.path.expanduser(str(path))))
