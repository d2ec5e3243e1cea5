"""From arguments to a typed config, by Hydra and OmegaConf.

Hydra composes YAML files for all commands alike, since a model or an experiment speaks of data,
training and search in one file; each command then takes the keys of its own dataclass. Keys that
the user types must be among these.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import typing
from collections.abc import Callable
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.cli.command import Command
from nmt.cli.commands import COMMANDS
from nmt.cli.help import choices
from nmt.errors import ConfigError, NmtError, RankError, StoppedError, nearest

GROUPS = ("model", "data", "experiment")
QUIET = (NmtError, RankError, StoppedError, OSError, KeyboardInterrupt)  # no traceback by Hydra
VALUE_FLAGS = ("--cfg", "-c", "--info", "-i", "--package", "-p")  # Hydra's own, followed by a value


def with_config(command: Command, arguments: list[str], run: Callable[[Any, str], None]) -> None:
    """Compose the config of `command` from `arguments` and call `run(config, its YAML)`."""
    _register_schemas()
    overrides = [
        argument if previous in VALUE_FLAGS else check_argument(argument, command)
        for previous, argument in zip(["", *arguments], arguments, strict=False)
    ]
    if command.name == "preprocess" and not _chooses_corpus(overrides):
        overrides.insert(0, "data=files")
    job = _Job(command, run)
    task = hydra.main(
        version_base="1.3", config_path="pkg://nmt.configs", config_name=command.name
    )(job)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands exceptions on instead of printing them
    sys.argv = [f"nmt-{command.name}", *overrides]
    try:
        task()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from None
    if job.error is not None:
        raise job.error


class _Job:
    """What Hydra calls, once or for each run of a sweep; keeps an error that Hydra would print."""

    def __init__(self, command: Command, run: Callable[[Any, str], None]) -> None:
        self.schema = command.schema
        self.run = run
        self.error: BaseException | None = None

    def __call__(self, composed: DictConfig) -> None:
        if self.error is None:
            try:
                self.run(*to_config(composed, self.schema))
            except (OmegaConfBaseException, *QUIET) as error:
                wrong_value = isinstance(error, OmegaConfBaseException)
                self.error = ConfigError(_one_line(error)) if wrong_value else error


def to_config(composed: DictConfig, schema: type[Any]) -> tuple[Any, str]:
    """Return the composed keys that `schema` has as its dataclass, and as YAML."""
    known = {
        field.name for command in COMMANDS.values() for field in dataclasses.fields(command.schema)
    }
    for key in map(str, composed):
        if key not in known:
            raise ConfigError(f"the YAML sets {key}, which no command has; {nearest(key, known)}")
    mine = [field.name for field in dataclasses.fields(schema)]
    hints = typing.get_type_hints(schema)
    chosen = {key: _listed(composed[key], hints[key]) for key in mine}
    typed = OmegaConf.merge(OmegaConf.structured(schema), chosen)
    return OmegaConf.to_object(typed), OmegaConf.to_yaml(typed)


def _listed(value: Any, hint: Any) -> Any:
    """Let a YAML file, as the command line, give one text where several may stand."""
    return [value] if _is_list(hint) and isinstance(value, str) else value


def _is_list(hint: Any) -> bool:
    """Say whether a setting holds a list, or a list or null."""
    choices = (hint, *typing.get_args(hint))
    return any(typing.get_origin(choice) is list for choice in choices)


def _register_schemas() -> None:
    """Offer the defaults of each dataclass as plain YAML, which other files may add keys to."""
    for name, command in COMMANDS.items():
        plain = OmegaConf.to_container(OmegaConf.structured(command.schema))
        ConfigStore.instance().store(group="schema", name=name, node=plain, package="_global_")


def check_argument(argument: str, command: Command) -> str:
    """Check the key of an argument, drop a needless +, quote text that Hydra would take apart."""
    if argument.startswith(("-", "hydra.", "hydra/", "+hydra", "~")):
        return argument
    key, equals, value = argument.removeprefix("+").removeprefix("+").partition("=")
    if not equals:
        raise ConfigError(
            f"{argument} is no setting; write key=value (see nmt-{command.name} --help)"
        )
    if key in GROUPS:
        _check_choice(key, value)
        return f"{key}={value}"
    kind = _type_of(key, command)
    if kind == "text" and value != "null" and not _is_quoted(value):
        value = _quote(value)
    elif kind == "list" and value != "null" and not value.startswith("["):
        value = f"[{_quote(value)}]"
    return f"{key}={value}"


def _check_choice(group: str, name: str) -> None:
    if name not in choices(group):
        raise ConfigError(
            f"{group}={name}: there is none of this name; {nearest(name, choices(group))}"
        )


def _type_of(key: str, command: Command) -> str:
    """Return text, list or other for the setting `key`; an unknown one is an error that names the
    nearest.
    """
    schema: Any = command.schema
    known = []
    for part in key.split("."):
        hints = typing.get_type_hints(schema) if dataclasses.is_dataclass(schema) else {}
        if part not in hints:
            options = _all_keys(command.schema)
            raise ConfigError(
                f"{key}: nmt-{command.name} has no such setting; {nearest(key, options)}"
            )
        known.append(part)
        schema = hints[part]
    if dataclasses.is_dataclass(schema):
        first = _all_keys(schema, f"{key}.")[0]
        raise ConfigError(f"{key} is a group of settings; set one of them, such as {first}")
    if schema in (str, str | None):
        return "text"
    return "list" if _is_list(schema) else "other"


def _all_keys(schema: Any, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in typing.get_type_hints(schema).items():
        nested = dataclasses.is_dataclass(hint)
        keys += _all_keys(hint, f"{prefix}{name}.") if nested else [prefix + name]
    return keys


def _is_quoted(text: str) -> bool:
    return len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""


def _quote(text: str) -> str:
    """Quote `text` for Hydra, where backslashes count only before a quote."""
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def _chooses_corpus(overrides: list[str]) -> bool:
    """Say whether no file is named, so that the corpus is the default one or a chosen one."""
    chosen = any(o.startswith(("data=", "experiment=")) for o in overrides)
    return chosen or not any(o.startswith("data.") for o in overrides)


def _one_line(error: BaseException) -> str:
    key = getattr(error, "full_key", None)
    message = str(error).split("\n    full_key:")[0]
    text = " ".join(message.split())
    return f"{key}: {text}" if key and key not in text else text
