"""From arguments to a typed config, with Hydra and OmegaConf.

Hydra composes the same YAML files for every command, since a model or an experiment sets data,
training and search in one file; each command then takes the keys of its own dataclass. Keys that
the user types must be keys of that dataclass.
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

from nmt.cli.commands import COMMANDS, NAME, Command, choices, settings
from nmt.errors import ConfigError, nearest
from nmt.manifest import set_verify

GROUPS = ("model", "data", "experiment")
# Hydra's own flags that a value follows
VALUE_FLAGS = ["--cfg", "-c", "--info", "-i", "--package", "-p", "--shell-completion", "-sc"]
_SPLITS = ("train", "valid", "test")
_TEXT = ("src", "tgt", "tsv", "jsonl", "dataset", "dataset_config", "dataset_split")
_LOGS = ("hydra_logging", "job_logging")  # disabled, since our loggers write to stderr
_PRIMARY: dict[str, Any] = {  # of every command; its settings and their defaults come on top
    "defaults": [
        "_self_",
        {"data": "numbers"},
        {"model": "base"},
        {"experiment": None},
        *({f"override hydra/{name}": "disabled"} for name in _LOGS),
    ],
    "hydra": {
        "output_subdir": None,
        "run": {"dir": "."},
        "sweep": {"dir": "runs", "subdir": "."},
        "job": {"chdir": False},
        **{name: {"disable_existing_loggers": False} for name in _LOGS},
    },
}


def with_config(command: Command, arguments: list[str], run: Callable[..., None]) -> None:
    """Compose the config of `command` from `arguments` and call `run(config, its YAML)`."""
    defaults = OmegaConf.to_container(OmegaConf.structured(command.schema))
    ConfigStore.instance().store(command.name, {**_PRIMARY, **typing.cast(Any, defaults)})
    overrides = [
        argument if previous in VALUE_FLAGS else check_argument(argument, command)
        for previous, argument in zip(["", *arguments], arguments, strict=False)
    ]
    keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    has_files = any(key.startswith("data.") for key in keys) and not keys & {"data", "experiment"}
    if command.name == "preprocess" and has_files:
        overrides.insert(0, "data=files")
    overrides = [*_other_text(keys), *overrides]
    try:
        if any(override.startswith(("-", "hydra", "+hydra")) for override in overrides):
            _run_hydra(command, overrides, run)
            return
        with hydra.initialize_config_module("nmt.configs", version_base="1.3"):
            configs = to_config(hydra.compose(command.name, overrides), command.schema)
    except (HydraException, OmegaConfBaseException) as error:
        key, text = getattr(error, "full_key", None), str(error).split("\n    full_key:")[0]
        text = " ".join(text.split())
        raise ConfigError(f"{key}: {text}" if key and key not in text else text) from None
    run(*configs)


def _other_text(keys: set[str]) -> list[str]:
    """Return overrides that leave out text which a YAML names where files are typed: of that split,
    and with files for training of every split.
    """
    typed = {
        split
        for split in _SPLITS
        if keys & {f"data.{split}.{kind}" for kind in ("src", "tgt", "tsv", "jsonl")}
    }
    splits = _SPLITS if "train" in typed else tuple(typed)
    return [f"data.{split}.{key}=null" for split in splits for key in _TEXT]


def _run_hydra(command: Command, overrides: list[str], run: Callable[..., None]) -> None:
    """Give flags and settings of Hydra's own, such as those of a sweep, to Hydra: half as fast."""
    errors: list[BaseException] = []

    def job(composed: DictConfig) -> None:  # once, or for each run of a sweep
        if not errors:
            try:
                run(*to_config(composed, command.schema))
            except Exception as error:  # Hydra would print it
                errors.append(error)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises exceptions instead of printing them
    sys.argv = [f"nmt-{command.name}", *overrides]
    hydra.main(version_base="1.3", config_path="pkg://nmt.configs", config_name=command.name)(job)()
    if errors:
        raise errors[0]


def to_config(composed: DictConfig, schema: type[Any]) -> tuple[Any, str]:
    """Return the composed keys that `schema` has as its dataclass, and as YAML."""
    known = {field.name for c in COMMANDS.values() for field in dataclasses.fields(c.schema)}
    for key in map(str, composed):
        if key not in known:
            raise ConfigError(f"the YAML sets {key}, which no command has; {nearest(key, known)}")
    hints = typing.get_type_hints(schema)
    given = typing.cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    chosen = {key: _fitted(given[key], hint, key) for key, hint in hints.items() if key in given}
    typed = OmegaConf.merge(OmegaConf.structured(schema), chosen)
    set_verify(composed.get("verify", True) is not False)
    return OmegaConf.to_object(typed), OmegaConf.to_yaml(typed)


def _fitted(value: Any, hint: Any, key: str) -> Any:
    """Check the keys in `value` against its type; as on the command line, one text may stand for a
    list of one.
    """
    if _is_list(hint) and isinstance(value, str):
        return [value]
    if not isinstance(value, dict):
        return value
    value = {str(name): item for name, item in value.items()}  # YAML reads 2023 as a number
    if typing.get_origin(hint) is dict:
        inner = dict.fromkeys(value, typing.get_args(hint)[1])
    elif dataclasses.is_dataclass(hint):
        inner = typing.get_type_hints(hint)
    else:
        raise ConfigError(f"{key}: is no group of settings; give it a value")
    for name in value:
        if name not in inner:
            near = nearest(f"{key}.{name}", [f"{key}.{option}" for option in inner])
            raise ConfigError(f"{key}.{name}: there is no such setting; {near}")
    return {name: _fitted(item, inner[name], f"{key}.{name}") for name, item in value.items()}


def check_argument(argument: str, command: Command) -> str:
    """Check the key of an argument, drop a needless +, quote text that Hydra would parse."""
    if argument.startswith(("-", "hydra.", "hydra/", "+hydra", "~")):
        return argument
    key, equals, value = argument.removeprefix("+").removeprefix("+").partition("=")
    if not equals:
        raise ConfigError(
            f"{argument} is no setting; write key=value (see nmt-{command.name} --help)"
        )
    if key in GROUPS:
        if value not in choices(key):
            near = nearest(value, choices(key))
            raise ConfigError(f"{key}={value}: there is none of this name; {near}")
        return f"{key}={value}"
    hint, is_named = _find_setting(key, value, command)
    if (
        value != "null"
        and hint in (str, str | None)
        and not re.fullmatch(r"(?s)'.*'|\".*\"", value)
    ):
        value = _quote(value)
    elif value != "null" and _is_list(hint) and not value.startswith("["):
        value = f"[{_quote(value)}]"
    elif _is_list(hint) and value.endswith("]") and not re.search("['\"]|^\\[\\s*\\]$", value):
        value = f"[{','.join(_quote(element.strip()) for element in value[1:-1].split(','))}]"
    return f"{'++' if is_named else ''}{key}={value}"  # ++ adds a name or changes its value


def _find_setting(key: str, value: str, command: Command) -> tuple[Any, bool]:
    """Return the type of the setting `key`, and whether it has a name of the user's choice in it;
    raise an error for a group, and for an unknown key one that names the nearest.
    """
    words = key.split(".")
    known = {}  # with the user's words where a key leaves the name to the user
    for setting in settings(command.schema):
        if not dataclasses.is_dataclass(setting.hint):
            parts = setting.key.split(".")
            filled = [*words, *parts[len(words) :]]
            names = zip(parts, filled, strict=False)
            known[".".join(word if part == NAME else part for part, word in names)] = setting
    if inside := [option for option in known if option.startswith(f"{key}.")]:
        if value.startswith("{") and inside[0].startswith(f"{key}.{NAME}"):
            return dict, True  # several at once: {name: ...}
        raise ConfigError(f"{key} is a group of settings; set one of them, such as {inside[0]}")
    if key not in known:
        near = nearest(key, known)
        raise ConfigError(f"{key}: nmt-{command.name} has no such setting; {near}")
    parts = known[key].key.split(".")
    for part, name in zip(parts, words, strict=True):
        if part == NAME and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*|[1-9][0-9]*", name):
            rule = "begin with a letter, then letters, digits, _ and -"  # to Hydra
            raise ConfigError(f"{key}: {name!r} cannot be a name; {rule}")
    return known[key].hint, NAME in parts


def _is_list(hint: Any) -> bool:
    """Return whether a setting holds a list, or a list or null."""
    return any(typing.get_origin(choice) is list for choice in (hint, *typing.get_args(hint)))


def _quote(text: str) -> str:
    """Quote `text` for Hydra, where backslashes count only before a quote."""
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"
