"""What the user types, read before Hydra does: keys checked, words of other toolkits understood,
text quoted that Hydra would parse, and the folders of the user's own YAML found.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nmt.cli.commands import NAME, Command, Setting
from nmt.config import ADVICE, SAME, plain_setting, plain_value, resolve
from nmt.errors import ConfigError, nearest

GROUPS = ("model", "data", "experiment")
# Hydra's own flags that a value follows, and those that stand alone
_VALUE_FLAGS = ("--cfg", "-c", "--info", "-i", "--package", "-p", "--shell-completion", "-sc")
_FLAGS = ("--multirun", "-m", "--run", "-r", "--resolve", "--hydra-help")
_FOLDER_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp")
_NO_VALUE = re.compile(r"[+~]*[\w./@:-]+=|-(?!\d)")  # a setting, or a flag; -1 is a value
_QUOTED = re.compile(r"(?s)'([^'\\]|\\.)*'|\"([^\"\\]|\\.)*\"")
_SWEEP = re.compile(r"(choice|range|interval|glob|shuffle|sort|tag)\(.*\)")


@dataclass
class Argument:
    """One setting that was typed."""

    key: str
    value: str
    override: str  # for Hydra
    is_for_data: bool = False  # of nmt-preprocess alone, which prepares data for nmt-train


@dataclass
class Arguments:
    """All that was typed."""

    arguments: list[Argument] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)  # of Hydra
    folders: list[Path] = field(default_factory=list)  # of the user's YAML


def read_arguments(words: list[str], command: Command) -> Arguments:
    """Read what follows the command's name; raise a `ConfigError` for what nobody understands."""
    read, rest = Arguments(), list(words)
    is_sweep = bool({"--multirun", "-m"} & set(words))
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in _FOLDER_FLAGS or name.lstrip("+") == "hydra.searchpath":
            value = value if equals else rest.pop(0) if rest else ""
            read.folders += [resolve(path.strip(" '\"").removeprefix("file://"))
                             for path in value.strip("[]").split(",")]  # fmt: skip
        elif name in _VALUE_FLAGS:
            read.flags += [word] if equals else [word, *rest[:1]]
            rest = rest if equals else rest[1:]
        elif word in _FLAGS:
            read.flags.append(word)
        else:
            if word.startswith("-"):  # --beam-size 4, --beam_size=4 or --sampling
                has_value = bool(rest) and not _NO_VALUE.match(rest[0])
                value = value if equals else rest.pop(0) if has_value else "true"
                word = f"{name.lstrip('-').replace('-', '_')}={value}"
            read.arguments.append(check_argument(word, command, is_sweep=is_sweep))
    return read


def check_argument(word: str, command: Command, *, is_sweep: bool = False) -> Argument:
    """Check the key of an argument, drop a needless +, quote text that Hydra would parse. The
    choices of a config group are checked when all are known.
    """
    if word.startswith(("hydra.", "hydra/", "+hydra", "++hydra", "~")):
        return Argument(word.lstrip("+~").partition("=")[0], "", word)
    key, equals, value = word.removeprefix("+").removeprefix("+").partition("=")
    if not equals:
        key, value = plain_setting(word, "true")
        if key == word:
            raise ConfigError(f"{word} is no setting; write key=value (nmt-{command.name} --help)")
    if (group := SAME.get(key, key)) in GROUPS:
        if group not in command.groups:
            is_folder = group == "model" and any(s.key == "model_dir" for s in command.settings)
            hint = f"; it reads a folder: model_dir={value}" if is_folder else ""
            raise ConfigError(f"{group}={value}: does nothing in nmt-{command.name}{hint}")
        return Argument(group, value, f"{group}={value}")
    key, value = plain_setting(key, value)
    key, setting, is_named = _find_setting(key, value, command)
    values = value.split(",") if is_sweep and not re.search(r"[\[({'\"]", value) else [value]
    is_function = is_sweep and _SWEEP.fullmatch(value)
    typed = value if is_function else ",".join(_hydra_value(v, setting.hint) for v in values)
    override = f"{'++' if is_named else ''}{key}={typed}"  # ++ adds a name or changes its value
    is_for_data = all(setting.key != own.key for own in command.settings)
    return Argument(key, value, override, is_for_data)


def _hydra_value(value: str, hint: Any) -> str:
    """Return a value as Hydra reads it, whole, and numbers as Python writes them."""
    if value == "null":
        return value
    if hint in (str, str | None) and not _QUOTED.fullmatch(value):
        return _quote(value)
    if is_list(hint) and not value.startswith("["):
        return f"[{_quote(value)}]"
    if is_list(hint) and value.endswith("]") and not re.search("['\"]|^\\[\\s*\\]$", value):
        return f"[{','.join(_quote(element.strip()) for element in value[1:-1].split(','))}]"
    return plain_value(value, hint)


def _find_setting(key: str, value: str, command: Command) -> tuple[str, Setting, bool]:
    """Return the whole name of the setting that `key` means, the setting, and whether it has a name
    of the user's choice in it; raise an error for a group, and for an unknown key one that names
    the nearest.
    """
    words = key.split(".")
    known: dict[str, Setting] = {}  # with the user's words where a key leaves the name to the user
    for setting in command.accepted:
        if not dataclasses.is_dataclass(setting.hint):
            parts = setting.key.split(".")
            filled = [*words, *parts[len(words) :]]
            names = zip(parts, filled, strict=False)
            known[".".join(word if part == NAME else part for part, word in names)] = setting
    if inside := [option for option in known if option.startswith(f"{key}.")]:
        if value.startswith("{") and inside[0].startswith(f"{key}.{NAME}"):
            setting = dataclasses.replace(known[inside[0]], hint=dict)
            return key, setting, True  # several at once: {name: ...}
        raise ConfigError(f"{key} is a group of settings; set one of them, such as {inside[0]}")
    for meant in (key, SAME.get(key, key)):
        same = [k for k, s in known.items() if k.endswith(f".{meant}") and NAME not in s.key]
        key = meant if meant in known else same[0] if len(same) == 1 else key
        if key in known:
            break
    else:
        advice = ADVICE.get(key, "").format(value=value)
        near = advice or nearest(key, known, f"nmt-{command.name} --help lists all")
        raise ConfigError(f"{key}: nmt-{command.name} has no such setting; {near}")
    parts = known[key].key.split(".")
    for part, name in zip(parts, key.split("."), strict=True):
        if part == NAME and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*|[1-9][0-9]*", name):
            rule = "begin with a letter, then letters, digits, _ and -"  # to Hydra
            raise ConfigError(f"{key}: {name!r} cannot be a name; {rule}")
    return key, known[key], NAME in parts


def is_list(hint: Any) -> bool:
    """Return whether a setting holds a list, or a list or null."""
    return any(typing.get_origin(choice) is list for choice in (hint, *typing.get_args(hint)))


def _quote(text: str) -> str:
    """Quote `text` for Hydra, where backslashes count only before a quote."""
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"
