"""Reads metadata that may be damaged, or made to do harm, into dataclasses: size, types, keys and
bounds are checked before anything is computed or allocated from them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml

from nmt.errors import ConfigError, DamagedError

T = TypeVar("T")

_MOST_BYTES = 1 << 28  # of a JSON file; an index of 100,000 shards has 20 MB
_MOST_YAML_BYTES, _DEEPEST_YAML = 1 << 16, 30
_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises `FileNotFoundError`, and `DamagedError` for a file that is too large, not UTF-8, no JSON,
    nested too deeply, or no object.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise DamagedError(f"{path} has more than {_MOST_BYTES >> 20} MB, so it is no file of nmt")
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise DamagedError(f"{path} is damaged ({reason}); copy or make the folder again") from None
    if not isinstance(content, dict):
        raise DamagedError(f"{path} is damaged (no JSON object); copy or make the folder again")
    return content


def parse_yaml(text: bytes, path: Path) -> dict[str, Any]:
    """Read the YAML of a mapping from `path`, without aliases and deep nesting; `DamagedError`."""
    try:
        if len(text) > _MOST_YAML_BYTES:
            raise ValueError(f"more than {_MOST_YAML_BYTES >> 10} kB")
        depth = 0
        for name in (type(token).__name__ for token in yaml.scan(text)):
            depth += name.endswith("StartToken") - name.endswith("EndToken")
            if name == "AliasToken" or depth > _DEEPEST_YAML:
                raise ValueError("aliases, or nested too deeply")
        content = yaml.safe_load(text)
        if not isinstance(content, dict):
            raise ValueError("no settings")
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:100]
        raise DamagedError(f"{path} is no config of a run ({reason}); copy the run again") from None
    return content


def pop_version(content: dict[str, Any], path: Path, newest: int) -> int:
    """Take `format_version` out of what was read from `path`.

    Raises `DamagedError` for one that is none, or newer than `newest`.
    """
    version = content.pop("format_version", None)
    if not isinstance(version, int) or version < 1:
        raise DamagedError(f"{path} is no file of nmt (no format_version); copy the folder again")
    if version > newest:
        raise DamagedError(
            f"{path.parent} has format_version {version}, this nmt reads up to {newest}; update nmt"
        )
    return version


def to_dataclass(kind: type[T], content: object, path: Path, key: str = "") -> T:
    """Make the dataclass `kind` of parsed JSON that was read from `path`, at `key`.

    Every key must be a field and every value of its type; numbers are finite, whole ones have at
    most 63 bits. Raises `DamagedError`, which names file and key; so does a `ConfigError` of the
    class itself.
    """
    try:
        made: T = _convert(kind, content, key)
    except (ConfigError, _MismatchError) as error:
        raise DamagedError(f"{path} does not fit this nmt: {error}") from None
    return made


class _MismatchError(Exception):
    """A value at a key is not of its type."""


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Return `value` as the type `hint`."""
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _convert(next(kind for kind in arguments if kind is not type(None)), value, key)
    if dataclasses.is_dataclass(hint):
        return _convert_fields(hint, value, key)
    if origin is list:
        _require(isinstance(value, list), key, "a list", value)
        return [_convert(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        _require(isinstance(value, dict), key, "an object", value)
        return {name: _convert(arguments[1], v, f"{key}.{name}") for name, v in value.items()}
    if issubclass(hint, Enum):
        choices = {choice.value: choice for choice in hint}
        _require(isinstance(value, str) and value in choices, key, f"one of {[*choices]}", value)
        return choices[value]
    is_number = hint is float and isinstance(value, int) and not isinstance(value, bool)
    _require(type(value) is hint or is_number, key, _SCALARS[hint], value)
    if isinstance(value, (int, float)):
        is_near = math.isfinite(value) if isinstance(value, float) else abs(value) < 1 << 63
        _require(is_near, key, "below 2^63", value)
    return float(value) if is_number else value


def _convert_fields(kind: Any, given: Any, key: str) -> Any:
    _require(isinstance(given, dict), key, "an object", given)
    hints, prefix = _hints(kind), f"{key}." if key else ""
    for name in given:
        _require(name in hints, prefix + str(name), "no key of this version", given[name])
    for field in dataclasses.fields(kind):
        has_default = field.default is not field.default_factory  # one of them is not MISSING
        _require(field.name in given or has_default, prefix + field.name, "given", None)
    return kind(**{name: _convert(hints[name], v, prefix + name) for name, v in given.items()})


_hints = functools.cache(typing.get_type_hints)


def _require(valid: bool, key: str, expected: str, value: object) -> None:
    if not valid:
        shown = " ".join(repr(value).split())[:60]
        raise _MismatchError(f"{key or 'its content'} is {shown}, must be {expected}")
