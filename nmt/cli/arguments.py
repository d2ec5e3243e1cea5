"""Reads the words after a command's name: completes and checks keys, and translates words of other
toolkits. Values stay text here; `nmt.cli.compose` converts them to the types of their settings.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nmt.cli.commands import NAME, Command, Setting
from nmt.config import ADVICE, SAME, resolve, translate_flag
from nmt.errors import ConfigError, nearest

GROUPS = ("model", "data", "experiment")  # config groups: folders of YAML files to choose from
_SWEEP_FLAGS = ("--multirun", "-m")
_CONFIG_FLAGS = ("--cfg", "-c")
_COMPLETION_FLAGS = ("--shell-completion", "-sc")
_FOLDER_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp")
_FLAGS_WITH_VALUE = (*_CONFIG_FLAGS, *_COMPLETION_FLAGS, *_FOLDER_FLAGS)
_SETTING_OR_FLAG = re.compile(r"[+]*[\w./@:-]+=|-(?!\d)")  # -1 is neither


@dataclass(frozen=True)
class Argument:
    """A setting, or the choice of a YAML file of a config group, that the user typed."""

    key: str  # the whole key
    value: str
    hint: Any = str  # type of the setting


@dataclass
class CommandLine:
    """All words that the user typed after the command's name."""

    arguments: list[Argument] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)  # with YAML files of the user
    hydra: list[str] = field(default_factory=list)  # flags and settings of Hydra itself
    is_sweep: bool = False
    shows_config: bool = False


def read_arguments(words: list[str], command: Command) -> CommandLine:
    """Read the words after a command's name; raise a `ConfigError` for unknown ones."""
    line = CommandLine()
    remaining = deque(words)
    while remaining:
        word = remaining.popleft()
        name, equals, value = word.partition("=")
        if name in _FLAGS_WITH_VALUE and not equals and remaining:
            value = remaining.popleft()
        if name in _SWEEP_FLAGS:
            line.is_sweep = True
        elif name in _CONFIG_FLAGS:
            line.shows_config = True
        elif name in _COMPLETION_FLAGS:
            line.hydra += [name, value]
        elif name in _FOLDER_FLAGS or name.lstrip("+") == "hydra.searchpath":
            line.folders += _read_folders(value)
        elif word.startswith(("hydra.", "hydra/", "+hydra", "++hydra")):
            line.hydra.append(word)
        elif word.startswith("-"):  # --beam-size 4, --beam_size=4 or --sampling
            if not equals:
                has_value = bool(remaining) and not _SETTING_OR_FLAG.match(remaining[0])
                value = remaining.popleft() if has_value else "true"
            key = name.lstrip("-").replace("-", "_")
            line.arguments.append(parse_argument(f"{key}={value}", command))
        else:
            line.arguments.append(parse_argument(word, command))
    return line


def _read_folders(value: str) -> list[Path]:
    """Return the folders in one path or in Hydra's notation, [file://a,b]."""
    names = value.strip("[]").split(",")
    return [resolve(name.strip(" '\"").removeprefix("file://")) for name in names]


def parse_argument(word: str, command: Command) -> Argument:
    """Return the setting or choice that `key=value` means for a command.

    A `+` before the key, which plain Hydra needs for some keys, makes no difference. Whether a
    config group has the chosen file is checked later, when the folders of the user are known.
    """
    key, equals, value = word.lstrip("+").partition("=")
    if not equals:
        key, value = translate_flag(word, "true")
        if key == word:
            raise ConfigError(
                f"{word} is no setting; write key=value (nmt-{command.name} --help lists the keys)"
            )
    group = SAME.get(key, key)
    if group in GROUPS:
        if group not in command.groups:
            takes_model = any(setting.key == "model_dir" for setting in command.settings)
            is_folder = group == "model" and takes_model
            hint = f"; it reads a folder: model_dir={value}" if is_folder else ""
            raise ConfigError(f"{group}={value}: does nothing in nmt-{command.name}{hint}")
        return Argument(group, value)
    key, value = translate_flag(key, value)
    settings = _fill_names(key, command)
    if any(name.startswith(f"{key}.") for name in settings):
        _check_mapping(key, value, settings)
        return Argument(key, value, dict)
    name = _complete_key(key, value, settings, command)
    return Argument(name, value, settings[name].hint)


def _fill_names(key: str, command: Command) -> dict[str, Setting]:
    """Return the settings of a command by key, with the words of `key` instead of `NAME`."""
    words = key.split(".")
    settings = {}
    for setting in command.accepted:
        if dataclasses.is_dataclass(setting.hint):
            continue
        names = setting.key.split(".")
        for position, word in enumerate(words[: len(names)]):
            if names[position] == NAME:
                names[position] = word
        settings[".".join(names)] = setting
    return settings


def _check_mapping(key: str, value: str, settings: dict[str, Setting]) -> None:
    """Raise a `ConfigError` unless `key` is a group that takes names, such as mix={news:2}."""
    members = [name for name in settings if name.startswith(f"{key}.")]
    if not (value.startswith("{") and members[0].startswith(f"{key}.{NAME}")):
        raise ConfigError(f"{key} is a group of settings; set one of them, such as {members[0]}")


def _complete_key(key: str, value: str, settings: dict[str, Setting], command: Command) -> str:
    """Return the whole key of a setting from its key, its end or a word of another toolkit."""
    for word in (key, SAME.get(key, key)):
        if word in settings:
            return word
        endings = [
            name
            for name, setting in settings.items()
            if name.endswith(f".{word}") and NAME not in setting.key
        ]
        if len(endings) == 1:
            return endings[0]
    advice = ADVICE.get(key, "").format(value=value)
    hint = advice or nearest(key, settings, f"nmt-{command.name} --help lists all")
    raise ConfigError(f"{key}: nmt-{command.name} has no such setting; {hint}")


def is_list(hint: Any) -> bool:
    """Return whether a setting holds a list, or a list or null."""
    return any(typing.get_origin(choice) is list for choice in (hint, *typing.get_args(hint)))
