"""The text of `--help`, from the descriptions and settings of the commands; imports neither Hydra
nor torch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from typing import Any

from nmt.cli.commands import COMMANDS, Command

_COLUMN = 34
NAME = "NAME"  # stands for a name that the user chooses


@dataclass(frozen=True)
class Setting:
    """One key that can be set; `default` is "" for the heading of a group with the user's names."""

    key: str  # such as model.d_model or data.corpora.NAME.src
    hint: Any
    default: str
    help: str


def settings(schema: type[Any], prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of a dataclass, those of its groups too."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        key, hint, help = prefix + field.name, hints[field.name], field.metadata["help"]
        if dataclasses.is_dataclass(hint):
            yield from settings(typing.cast(type[Any], hint), key + ".")
        elif typing.get_origin(hint) is dict:
            inner = typing.get_args(hint)[1]
            yield Setting(f"{key}.{NAME}", inner, "", help)
            if dataclasses.is_dataclass(inner):
                yield from settings(typing.cast(type[Any], inner), f"{key}.{NAME}.")
        else:
            default = field.default
            if default is dataclasses.MISSING:
                default = typing.cast(Any, field.default_factory)()
            yield Setting(key, hint, f"[{_shown(default)}]", help)


def command_help(command: Command) -> str:
    """Describe what the command reads and writes, with examples and every setting."""
    lines = []
    for setting in settings(command.schema):
        name = f"{setting.key} {setting.default}".strip()
        gap = "\n" + " " * (_COLUMN + 2) if len(name) >= _COLUMN else ""
        lines.append(f"  {name:<{0 if gap else _COLUMN}}{gap}{setting.help}")
    groups = [f"  {g + '=NAME':<{_COLUMN}}{', '.join(choices(g))}" for g in command.groups]
    parts = [
        f"nmt-{command.name}: {command.summary}",
        f"reads:  {command.reads}\nwrites: {command.writes}",
        "\n  ".join(["examples:", *command.examples]),
        "\n".join(["ready-made settings:", *groups]) if groups else "",
        "\n".join(["settings, as key=value (default in brackets):", *lines]),
        "exit status: 0 done, 2 a mistake in what was given, 1 a bug, 75 training stopped by a\n"
        "signal and saved, 130 interrupted",
    ]
    return "\n\n".join(part for part in parts if part)


def list_commands() -> str:
    """Describe all commands, one line each."""
    lines = "\n".join(f"  {name:<12}{command.summary}" for name, command in COMMANDS.items())
    return f"""nmt: train and use Transformer translation models

usage: nmt COMMAND [key=value ...]     (the same as nmt-COMMAND)

{lines}

nmt COMMAND --help shows what a command reads and writes, with examples.
A first run on an included corpus:
  nmt-preprocess && nmt-train +model=tiny && nmt-average && nmt-translate"""


def choices(group: str) -> list[str]:
    """List the YAML files of a config group."""
    files = (resources.files("nmt.configs") / group).iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(_shown, value)) + "]"
    return "null" if value is None else str(value)
