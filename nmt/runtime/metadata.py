"""Read JSON and YAML files that may be damaged or hostile, and convert JSON to dataclasses.

All values are checked before any code uses them: a damaged size could, for example, make a program
allocate too much memory.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from dataclasses import MISSING
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml

from nmt.errors import ConfigError, DamagedError, to_one_line
from nmt.runtime.reading import read_regular_file

T = TypeVar("T")

_MAX_YAML_BYTES = 1 << 16
_MAX_YAML_DEPTH = 50
_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises `FileNotFoundError`, or `DamagedError` if the file is too large or is not a JSON object
    in UTF-8.
    """
    try:
        content = json.loads(read_regular_file(path).decode("utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged ({error}); copy or make the folder again") from None
    return content


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the settings of a run from a YAML file.

    Raises `FileNotFoundError`, or `DamagedError` if the file is too large or is not a YAML mapping.
    """
    try:
        content = parse_yaml(read_regular_file(path, max_bytes=_MAX_YAML_BYTES))
        if not isinstance(content, dict):
            raise ValueError("no settings")
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = to_one_line(error, 100)
        raise DamagedError(
            f"{path} is not a config of a run ({reason}); copy the run again"
        ) from None
    return content


class _LoaderWithoutAliases(yaml.SafeLoader):  # type: ignore[misc]
    """Parses YAML, but raises `YAMLError` for aliases (`*name`) and for deep nesting.

    Nested aliases can expand to more values than memory holds. The time to parse nested values
    grows with the square of the depth.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias")
        if self._depth == _MAX_YAML_DEPTH:
            raise yaml.YAMLError("it is nested too deeply")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def parse_yaml(text: str | bytes) -> Any:
    """Parse YAML without aliases. Raises `YAMLError`, `ValueError` or `RecursionError`."""
    if len(text) > _MAX_YAML_BYTES:
        raise ValueError(f"it has more than {_MAX_YAML_BYTES:,} characters")
    return yaml.load(text, _LoaderWithoutAliases)


def pop_version(content: dict[str, Any], path: Path, newest: int) -> int:
    """Remove `format_version` from the content of `path` and return it.

    Raises `DamagedError` if it is missing, or larger than `newest`.
    """
    version = content.pop("format_version", None)
    if not isinstance(version, int) or version < 1:
        raise DamagedError(
            f"{path} is not a file of nmt (no format_version); copy the folder again"
        )
    if version > newest:
        raise DamagedError(
            f"{path.parent} has format_version {version}, this nmt reads up to {newest}; update nmt"
        )
    return version


def to_dataclass(cls: type[T], content: object, path: Path, key: str = "") -> T:
    """Convert parsed JSON to an instance of the dataclass `cls`.

    Every key must be a field, and every value must have the type of its field. Numbers must be
    finite, and integers below 2^63.

    Args:
        cls: the dataclass.
        content: the parsed JSON.
        path: the file, for error messages.
        key: the key of `content` in the file, for error messages; empty for the whole file.

    Raises:
        DamagedError: if `content` does not fit, or if the dataclass raises a `ConfigError`. The
            message has the path and the key of the value that does not fit.
    """
    try:
        instance: T = _convert(cls, content, key)
    except (ConfigError, _MismatchError) as error:
        raise DamagedError(f"{path} does not fit this nmt: {error}") from None
    return instance


class _MismatchError(Exception):
    """A key is unknown or missing, or a value does not have the type of its field."""


def _convert(type_hint: Any, value: Any, key: str) -> Any:
    """Convert parsed JSON to a type; raise `_MismatchError` with the key if that is impossible."""
    if type_hint is Any:
        return value
    origin = typing.get_origin(type_hint)
    arguments = typing.get_args(type_hint)
    if origin in (typing.Union, types.UnionType):
        # the only unions in dataclasses of nmt are optional types, such as `int | None`
        if value is None:
            return None
        [value_type] = set(arguments) - {types.NoneType}
        return _convert(value_type, value, key)
    if dataclasses.is_dataclass(type_hint):
        return _convert_fields(type_hint, value, key)
    if origin is list:
        _require(isinstance(value, list), key, "a list", value)
        [element_type] = arguments
        return [_convert(element_type, item, f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        _require(isinstance(value, dict), key, "an object", value)
        _, value_type = arguments
        return {name: _convert(value_type, item, f"{key}.{name}") for name, item in value.items()}
    if issubclass(type_hint, Enum):
        choices = {choice.value: choice for choice in type_hint}
        is_choice = isinstance(value, str) and value in choices
        _require(is_choice, key, f"one of {list(choices)}", value)
        return choices[value]
    return _convert_scalar(type_hint, value, key)


def _convert_scalar(type_hint: Any, value: Any, key: str) -> Any:
    """Convert to bool, int, float or str, and check bounds. An integer is valid for a float."""
    # not `isinstance`, since True and False are instances of int
    is_integer = type(value) is int
    has_exact_type = type(value) is type_hint
    is_integer_for_float = is_integer and type_hint is float
    is_valid = has_exact_type or is_integer_for_float
    _require(is_valid, key, _TYPE_NAMES[type_hint], value)
    if is_integer:
        _require(abs(value) < 2**63, key, "below 2^63", value)
    if isinstance(value, float):
        _require(math.isfinite(value), key, "finite", value)
    return type_hint(value)


def _convert_fields(cls: Any, values: Any, key: str) -> Any:
    """Convert a JSON object to an instance of the dataclass `cls`."""
    _require(isinstance(values, dict), key, "an object", values)
    type_hints = _get_type_hints(cls)
    prefix = f"{key}." if key else ""
    for name in values:
        if name not in type_hints:
            raise _MismatchError(f"{prefix}{name} is unknown to this version")
    for field in dataclasses.fields(cls):
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if field.name not in values and not has_default:
            raise _MismatchError(f"{prefix}{field.name} is missing")
    arguments = {}
    for name, value in values.items():
        arguments[name] = _convert(type_hints[name], value, prefix + name)
    return cls(**arguments)


_get_type_hints = functools.cache(typing.get_type_hints)


def _require(is_valid: bool, key: str, expected: str, value: object) -> None:
    """Raise a `_MismatchError` that names the key and the expected value, unless `is_valid`."""
    if not is_valid:
        excerpt = " ".join(repr(value).split())[:60]
        raise _MismatchError(f"{key or 'its content'} is {excerpt}, must be {expected}")
