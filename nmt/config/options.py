"""How a setting is declared and checked, and the choices that several commands share."""

from __future__ import annotations

import os
from dataclasses import field, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from nmt.errors import ConfigError, nearest

DEFAULT_DATA_DIR = "data/prepared"
DEFAULT_RUN_DIR = "runs/default"
MOST = 10**9  # of a number whose range has no upper bound of its own
LARGEST_SEED = 2**63 - 1
CORES = "CPU threads; 0: the cores that are idle at the start"
NUMBER_FORMAT = "of matrix multiplications: float32, bfloat16, float16, auto"
VERIFY = "compare files with the checksums in the manifest of their folder"
E = TypeVar("E", bound=Enum)


class DType(str, Enum):
    """Number format of matrix multiplications; weights, softmax, loss and scores stay float32."""

    auto = "auto"  # bfloat16 where the GPU has it, float32 elsewhere
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"  # training scales the loss, since small gradients would become zero


class Normalization(str, Enum):
    """What the log-probability of a hypothesis is divided by (docs/search.md)."""

    wu = "wu"  # ((5 + length) / 6)^length_penalty, Wu et al. (2016), equation 14
    average = "average"  # its length
    none = "none"


class OutputFormat(str, Enum):
    """How results are written to stdout."""

    text = "text"
    json = "json"


def option(default: Any, help: str, **bounds: float) -> Any:
    """Declare a setting: its default (for a type what it constructs), the line of `--help`, and its
    range: `low` and `high` are in it, `above` and `below` are not; `check_ranges` applies them.
    """
    names = ("low", "high", "above", "below")
    assert set(bounds) <= set(names)
    metadata = {"help": help, "range": tuple(map(bounds.get, names))}
    if isinstance(default, (list, type)):
        factory = default.copy if isinstance(default, list) else default
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_ranges(config: Any, prefix: str = "") -> None:
    """Raise a `ConfigError` for the first number of `config` that is out of its range; null is in
    every range, NaN in none.
    """
    for setting in fields(config):
        value = getattr(config, setting.name)
        low, high, above, below = setting.metadata["range"]
        if value is None or not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if high is below is None:  # numbers beyond it end badly, and nobody needs them
            require(abs(value) <= MOST, prefix + setting.name, value, f"must be at most {MOST:,}")
        if low is above is None:  # no range has an upper bound alone
            continue
        is_valid = value >= low if above is None else value > above
        rule = "must not be negative" if low == 0 else f"must be at least {low}"
        if above is not None:
            rule = f"must be above {above}" + ("" if high is None else f" and at most {high}")
        elif high is not None:
            rule = f"must be from {low} to {high}"
        elif below is not None:
            rule = f"must be from {low} to below {below}"
            is_valid = is_valid and value < below
        is_valid = is_valid and (high is None or value <= high)
        require(is_valid, prefix + setting.name, value, rule)


def require(valid: bool, key: str, value: object, rule: str) -> None:
    """Raise a `ConfigError` that names key, value and rule unless `valid`."""
    if not valid:
        shown = value.value if isinstance(value, Enum) else value
        raise ConfigError(f"{key}={shown}: {rule}")


def choose(kind: type[E], key: str, value: str | E) -> E:
    """Return the choice that `value` names; raise a `ConfigError` that names key and choices."""
    try:
        return kind(value)
    except ValueError:
        names = [choice.value for choice in kind]
        raise ConfigError(f"{key}={value}: no such choice; {nearest(str(value), names)}") from None


def unnamed(stream: str) -> str:
    """Return - for a name that Unix has for stdin or stdout, which may be no file to open."""
    return "-" if stream in ("/dev/stdin", "/dev/stdout", "/dev/fd/0", "/dev/fd/1") else stream


def resolve(path: str | Path) -> Path:
    """Expand `~` and make `path` absolute against the current folder."""
    return Path(os.path.abspath(os.path.expanduser(str(path))))
