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
from nmt.cli.help import NAME, choices
from nmt.errors import ConfigError, NmtError, RankError, StoppedError, nearest

GROUPS = ("model", "data", "experiment")
QUIET = (NmtError, RankError, StoppedError, OSError, KeyboardInterrupt)  # no traceback by Hydra
VALUE_FLAGS = ("--cfg", "-c", "--info", "-i", "--package", "-p")  # Hydra's own, followed by a value


def with_config(command: Command, arguments: list[str], run: Callable[..., None]) -> None:
    """Compose the config of `command` from `arguments` and call `run(config, its YAML)`."""
    _register_schema(command)
    overrides = [
        argument if previous in VALUE_FLAGS else check_argument(argument, command)
        for previous, argument in zip(["", *arguments], arguments, strict=False)
    ]
    if command.name == "preprocess" and not _chooses_corpus(overrides):
        overrides.insert(0, "data=files")
    job = _Job(command, run)
    try:
        if any(map(_is_for_hydra, overrides)):
            _run_hydra(command, overrides, job)
        else:  # composing is all there is to do, and takes half the time
            with hydra.initialize_config_module("nmt.configs", version_base="1.3"):
                composed = hydra.compose(command.name, overrides)
            job(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from None
    if job.error is not None:
        raise job.error


def _is_for_hydra(argument: str) -> bool:
    """Say whether an argument is a flag or setting of Hydra's own, such as those of a sweep."""
    return argument.startswith(("-", "hydra", "+hydra"))


def _run_hydra(command: Command, overrides: list[str], job: _Job) -> None:
    task = hydra.main(
        version_base="1.3", config_path="pkg://nmt.configs", config_name=command.name
    )(job)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands exceptions on instead of printing them
    sys.argv = [f"nmt-{command.name}", *overrides]
    task()


class _Job:
    """What Hydra calls, once or for each run of a sweep; keeps an error that Hydra would print."""

    def __init__(self, command: Command, run: Callable[..., None]) -> None:
        self.command = command
        self.run = run
        self.error: BaseException | None = None

    def __call__(self, composed: DictConfig) -> None:
        if self.error is None:
            try:
                self.run(*to_config(composed, self.command.schema))
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
    hints = typing.get_type_hints(schema)
    given: dict[str, Any] = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    chosen = {key: _fitted(given[key], hint, key) for key, hint in hints.items() if key in given}
    typed = OmegaConf.merge(OmegaConf.structured(schema), chosen)
    return OmegaConf.to_object(typed), OmegaConf.to_yaml(typed)


def _fitted(value: Any, hint: Any, key: str) -> Any:
    """Check the keys in `value` against its type; let a YAML file, as the command line, give one
    text where several may stand.
    """
    if _is_list(hint) and isinstance(value, str):
        return [value]
    is_names = typing.get_origin(hint) is dict
    if not isinstance(value, dict):
        return value
    if not is_names and not dataclasses.is_dataclass(hint):
        raise ConfigError(f"{key}: is no group of settings; give it a value")
    value = {str(name): item for name, item in value.items()}  # YAML reads 2023 as a number
    if is_names:
        inner = dict.fromkeys(value, typing.get_args(hint)[1])
    else:
        inner = typing.get_type_hints(hint)
    for name in value:
        if name not in inner:
            options = [f"{key}.{option}" for option in inner]
            wish = f"{key}.{name}"
            raise ConfigError(f"{wish}: there is no such setting; {nearest(wish, options)}")
    return {name: _fitted(item, inner[name], f"{key}.{name}") for name, item in value.items()}


def _is_list(hint: Any) -> bool:
    """Say whether a setting holds a list, or a list or null."""
    choices = (hint, *typing.get_args(hint))
    return any(typing.get_origin(choice) is list for choice in choices)


def _register_schema(command: Command) -> None:
    """Offer the defaults of the dataclass as plain YAML, which other files may add keys to."""
    plain = OmegaConf.to_container(OmegaConf.structured(command.schema))
    ConfigStore.instance().store(group="schema", name=command.name, node=plain, package="_global_")


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
    hint, is_named = _hint_of(key, command)
    _check_group(key, value, hint)
    if hint in (str, str | None) and value != "null" and not _is_quoted(value):
        value = _quote(value)
    elif _is_list(hint) and value != "null":
        value = _quote_list(value)
    return f"{'++' if is_named else ''}{key}={value}"  # ++ adds a name or changes what it has


def _check_choice(group: str, name: str) -> None:
    if name not in choices(group):
        raise ConfigError(
            f"{group}={name}: there is none of this name; {nearest(name, choices(group))}"
        )


def _hint_of(key: str, command: Command) -> tuple[Any, bool]:
    """Return the type of the setting `key`, and whether it is in a group whose names the user
    chooses; an unknown one is an error that names the nearest.
    """
    hint: Any = command.schema
    is_named = False
    for part in key.split("."):
        if typing.get_origin(hint) is dict:
            _check_name(key, part)
            hint = typing.get_args(hint)[1]
            continue
        hints = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
        if part not in hints:
            options = [_with_names(option, key) for option in _all_keys(command.schema)]
            raise ConfigError(
                f"{key}: nmt-{command.name} has no such setting; {nearest(key, options)}"
            )
        hint = hints[part]
        is_named = is_named or typing.get_origin(hint) is dict
    return hint, is_named


def _check_name(key: str, name: str) -> None:
    """Refuse a name that Hydra cannot read in the key of an argument."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*|[1-9][0-9]*", name) is None:
        raise ConfigError(
            f"{key}: {name!r} cannot be a name; begin with a letter, then letters, digits, _ and -"
        )


def _with_names(option: str, key: str) -> str:
    """Put the words of `key` where `option` leaves the name to the user."""
    words = key.split(".")
    parts = enumerate(option.split("."))
    return ".".join(words[i] if part == NAME and i < len(words) else part for i, part in parts)


def _check_group(key: str, value: str, hint: Any) -> None:
    """Refuse one value for many settings; those of names of the user's may come as {name: ...}."""
    is_names = typing.get_origin(hint) is dict
    if dataclasses.is_dataclass(hint) or (is_names and not value.startswith("{")):
        first = _options(hint, key)[0]
        raise ConfigError(f"{key} is a group of settings; set one of them, such as {first}")


def _all_keys(schema: Any) -> list[str]:
    hints = typing.get_type_hints(schema)
    return [option for name, hint in hints.items() for option in _options(hint, name)]


def _options(hint: Any, key: str) -> list[str]:
    """List the settings in a setting of this type: itself, or those of a group."""
    if typing.get_origin(hint) is dict:
        return _options(typing.get_args(hint)[1], f"{key}.{NAME}")
    if dataclasses.is_dataclass(hint):
        return [f"{key}.{option}" for option in _all_keys(hint)]
    return [key]


def _is_quoted(text: str) -> bool:
    return len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""


def _quote_list(value: str) -> str:
    """Quote the elements of [a,b], or one that stands alone, unless the user has."""
    if not (value.startswith("[") and value.endswith("]")):
        return value if value.startswith("[") else f"[{_quote(value)}]"
    inside = value[1:-1]
    if not inside.strip() or "'" in inside or '"' in inside:
        return value
    return "[" + ",".join(_quote(element.strip()) for element in inside.split(",")) + "]"


def _quote(text: str) -> str:
    """Quote `text` for Hydra, where backslashes count only before a quote."""
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def _chooses_corpus(overrides: list[str]) -> bool:
    """Say whether no file is named, so that the corpus is the default one or a chosen one."""
    keys = [override.lstrip("+") for override in overrides]
    chosen = any(key.startswith(("data=", "experiment=")) for key in keys)
    return chosen or not any(key.startswith("data.") for key in keys)


def _one_line(error: BaseException) -> str:
    key = getattr(error, "full_key", None)
    message = str(error).split("\n    full_key:")[0]
    text = " ".join(message.split())
    return f"{key}: {text}" if key and key not in text else text
