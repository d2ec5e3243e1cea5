"""The text of `--help`, made from the command and the dataclass of its settings; needs neither
Hydra nor torch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from enum import Enum
from importlib import resources
from typing import Any

from nmt.cli.command import Command

_COLUMN = 34
NAME = "NAME"  # stands for a name that the user chooses


def command_help(command: Command) -> str:
    """Say what the command reads and writes, with examples and every setting."""
    examples = "\n".join(f"  {example}" for example in command.examples)
    options = "\n".join(_option_lines(command.schema, ""))
    groups = "\n".join(f"  {g + '=NAME':<{_COLUMN}}{', '.join(choices(g))}" for g in command.groups)
    parts = [
        f"nmt-{command.name}: {command.summary}",
        f"reads:  {command.reads}\nwrites: {command.writes}",
        f"examples:\n{examples}",
        f"ready-made settings:\n{groups}" if groups else "",
        f"settings, as key=value (default in brackets):\n{options}",
        "exit status: 0 done, 2 a mistake in what was given, 1 a bug, 130 interrupted",
    ]
    return "\n\n".join(part for part in parts if part)


def choices(group: str) -> list[str]:
    """List the YAML files of a config group."""
    folder = resources.files("nmt.configs") / group
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )


def _option_lines(schema: type[Any], prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        key, default = prefix + field.name, field.default
        if default is dataclasses.MISSING:
            assert field.default_factory is not dataclasses.MISSING
            default = field.default_factory()
        if dataclasses.is_dataclass(default):
            yield from _option_lines(type(default), key + ".")
        elif isinstance(default, dict):
            yield from _named_lines(key, hints[field.name], field.metadata["help"])
        else:
            name = f"{key} [{_shown(default)}]"
            gap = "\n" + " " * (_COLUMN + 2) if len(name) >= _COLUMN else ""
            yield f"  {name:<{0 if gap else _COLUMN}}{gap}{field.metadata['help']}"


def _named_lines(key: str, hint: Any, help: str) -> Iterator[str]:
    """Show the settings in a group whose names the user chooses."""
    value = typing.get_args(hint)[1]
    yield f"  {key + '.' + NAME:<{_COLUMN}}{help}"
    if dataclasses.is_dataclass(value):
        yield from _option_lines(typing.cast(type[Any], value), f"{key}.{NAME}.")


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(_shown, value)) + "]"
    return "null" if value is None else str(value)
