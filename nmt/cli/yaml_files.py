"""Find the user's YAML files of config groups, check their content, and store them for Hydra.

A config group is a folder of YAML files, and an argument such as `model=base` chooses one of them.
The files of a group that belong to nmt are in `configs/`.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nmt.cli.arguments import GROUPS, YAML_SUFFIXES, Argument, is_list
from nmt.cli.commands import COMMANDS, list_yaml_names
from nmt.config import (
    ADVICE_FOR_KEY,
    OUR_KEY,
    ModelConfig,
    TrainConfig,
    choose,
    translate_value,
)
from nmt.errors import ConfigError, suggest_names, to_one_line
from nmt.runtime.reading import MAX_BYTES, open_regular

# These keys of YAML files apply only to nmt-train. Other commands ignore them, since there the keys
# have another meaning.
TRAINING_KEYS = ("dtype", "max_tokens", "seed")
# keyed by config group: advice for `GROUP=PATH` if the path exists, but is not a YAML file
_ADVICE_FOR_PATH = {
    "model": "write init_from={path} to start from a trained model",
    "data": "write data.train.src=FILE data.train.tgt=FILE for text, or data_dir={path} for a data "
    "folder of nmt-preprocess",
}
_stored_paths: dict[str, Path] = {}  # files of the user, keyed by their names in Hydra


def find_yaml_files(folders: Iterable[Path]) -> dict[tuple[str, str], Path]:
    """Find the YAML files in folders of the user; return them by config group and name.

    `FOLDER/model/x.yaml` is for `model=x`, and `FOLDER/x.yaml` for `experiment=x`. Also stores each
    `FOLDER/GROUP/x.yaml` for Hydra, so that other files can include it by `defaults`.
    """
    files = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; give --config-dir a folder of YAML files")
        for path in sorted(folder.glob("*.yaml")):
            files["experiment", path.stem] = path
        for group in GROUPS:
            for path in sorted((folder / group).glob("*.yaml")):
                files[group, path.stem] = path
                _store_file(group, path)
    return files


def resolve_choices(
    argument: Argument, files: dict[tuple[str, str], Path], *, is_sweep: bool
) -> Argument:
    """Return an argument such as `model=my.yaml` with the name of the YAML file in Hydra.

    In a sweep, an argument may choose several files, separated by commas. Returns arguments for
    settings unchanged.
    """
    if argument.key not in GROUPS:
        return argument
    names = argument.value.split(",") if is_sweep else [argument.value]
    hydra_names = [_resolve_choice(argument.key, name, files) for name in names]
    return Argument(argument.key, ",".join(hydra_names))


def _resolve_choice(group: str, name: str, files: dict[tuple[str, str], Path]) -> str:
    """Find a YAML file and return its name in Hydra; store a file of the user for Hydra.

    Looks for `name` among the `files` of the user, then as a path, then in `configs/`.
    """
    path = Path(name).expanduser()
    if (group, name) in files:
        path = files[group, name]
    if path.is_file() and path.suffix in YAML_SUFFIXES:
        return _store_file(group, path)
    our_names = list_yaml_names(group)
    if name not in our_names:
        user_names = [file_name for file_group, file_name in files if file_group == group]
        advice = suggest_names(name, [*our_names, *user_names])
        if Path(f"{name}.yaml").is_file():
            advice = f"did you mean {name}.yaml?"
        elif group in _ADVICE_FOR_PATH and name and path.exists():
            advice = _ADVICE_FOR_PATH[group].format(path=name)
        raise ConfigError(
            f"{group}={name}: there is no such choice and no such YAML file; {advice}"
        )
    return name


def describe_choice(name: str) -> str:
    """Return the path of a user's file, given its name in Hydra; return other names unchanged."""
    if name in _stored_paths:
        return os.path.relpath(_stored_paths[name])
    return name


def _store_file(group: str, path: Path) -> str:
    """Check a user's YAML file and store it for Hydra; return its name in Hydra."""
    # imported only here, since commands without YAML files do not need Hydra, which takes time
    from nmt.cli.hydra_compose import store_config

    try:
        with open_regular(path, max_bytes=MAX_BYTES) as file:
            content: Any = OmegaConf.to_container(OmegaConf.load(file))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {to_one_line(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no settings; write lines of key: value")
    if group == "model":
        content = _nest_model_settings(content)
    check_content(content, path)
    name = path.stem
    if name in list_yaml_names(group):
        # the file in configs/ keeps its name, since other files may include it
        name = f"{path.parent.name}-{name}"
    store_config(name, content, group=group, package="_global_")
    _stored_paths[name] = path
    return name


def _nest_model_settings(content: dict[Any, Any]) -> dict[Any, Any]:
    """Move top-level settings of the architecture, such as `d_model`, into the group `model`."""
    model_keys = {setting.name for setting in dataclasses.fields(ModelConfig)}
    if "model" in content or model_keys.isdisjoint(content):
        return content
    model_settings = {key: value for key, value in content.items() if key in model_keys}
    other_settings = {key: value for key, value in content.items() if key not in model_keys}
    return {"model": model_settings, **other_settings}


def check_content(content: dict[Any, Any], path: Path) -> None:
    """Raise a `ConfigError` for an unknown key or an invalid value in a YAML file.

    Several commands may use the file. Every key must be a setting of at least one command.
    """
    schemas = [command.schema for command in COMMANDS.values()]
    keys: set[str] = set()
    for schema in schemas:
        keys.update(setting.name for setting in dataclasses.fields(schema))
    for key, value in content.items():
        if key != "defaults" and key not in keys:
            our_key = OUR_KEY.get(key, str(key))
            suggestion = suggest_names(our_key, keys, "nmt-train --help lists all")
            if key in ADVICE_FOR_KEY:
                first_advice = ADVICE_FOR_KEY[key][0]
                suggestion = first_advice.format(value=value)
            raise ConfigError(f"{path} sets {key}, which no command has; {suggestion}")
    for schema in schemas:
        type_hints = typing.get_type_hints(schema)
        for key, value in content.items():
            is_ignored = key in TRAINING_KEYS and schema is not TrainConfig
            if key not in type_hints or is_ignored:
                continue
            try:
                # raises an error for an invalid value or nested key
                convert(value, type_hints[key], key)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None


# --- convert values of YAML and of the command line


def convert(value: Any, type_hint: Any, key: str) -> Any:
    """Check a value for a setting of type `type_hint`, and convert it to a form for OmegaConf.

    A single text becomes a list if the setting is a list. Whole numbers may be written as 100k, 1e5
    or 1.0. For a number that may be null, auto means null. The settings of a group are checked and
    converted, too. A number that is written as text remains text: "100k" becomes "100000", which
    OmegaConf converts to a number.
    """
    if value == "auto" and _is_optional_number(type_hint):
        return None
    if isinstance(value, str):
        if is_list(type_hint):
            return convert([value], type_hint, key)
        text = translate_value(value, type_hint)
        _check_text(text, type_hint, key)
        return text
    if isinstance(value, list):
        _check_items(value, type_hint, key)
    if isinstance(value, float):  # YAML reads 1e5 as a float
        if int in _accepted_types(type_hint) and value.is_integer():
            return int(value)
        return value
    if isinstance(value, dict):
        return _convert_group(value, type_hint, key)
    if value is not None and dataclasses.is_dataclass(type_hint):
        raise ConfigError(f"{key}={value}: {key} is a group of settings; give it keys and values")
    return value


def _accepted_types(type_hint: Any) -> list[Any]:
    """Return the types that a setting of type `type_hint` accepts: of a union, the members, too."""
    return [type_hint, *typing.get_args(type_hint)]


def _is_optional_number(type_hint: Any) -> bool:
    """Return whether a setting of type `type_hint` is a number or null."""
    return type_hint in (int | None, float | None)


def _check_text(text: str, type_hint: Any, key: str) -> None:
    """Raise a `ConfigError` for text that a setting of type `type_hint` does not accept."""
    accepted_types = _accepted_types(type_hint)
    for accepted_type in accepted_types:
        if isinstance(accepted_type, type) and issubclass(accepted_type, Enum):
            choose(accepted_type, key, text)  # raises an error for another text
    if str in accepted_types:
        return
    if int in accepted_types:
        try:
            int(text)
        except ValueError:
            raise ConfigError(f"{key}={text}: must be a whole number") from None
    if float in accepted_types:
        try:
            float(text)
        except ValueError:
            raise ConfigError(f"{key}={text}: must be a number") from None


def _check_items(items: list[Any], type_hint: Any, key: str) -> None:
    """Raise a `ConfigError` for text that may not be an item of a list of type `type_hint`."""
    texts = [item for item in items if isinstance(item, str)]
    for accepted_type in _accepted_types(type_hint):
        if typing.get_origin(accepted_type) is list:
            [item_type] = typing.get_args(accepted_type)
            for text in texts:
                _check_text(text, item_type, key)


def _convert_group(content: dict[Any, Any], type_hint: Any, key: str) -> dict[str, Any]:
    """Convert the members of a group. Its type is a dataclass, or a dict with the user's names."""
    members = {str(name): value for name, value in content.items()}  # YAML reads 2023 as a number
    if typing.get_origin(type_hint) is dict:
        _, value_hint = typing.get_args(type_hint)
        member_hints = dict.fromkeys(members, value_hint)
    elif dataclasses.is_dataclass(type_hint):
        member_hints = typing.get_type_hints(type_hint)
    else:
        raise ConfigError(f"{key} is not a group of settings; give it a value")
    converted = {}
    for name, value in members.items():
        if name not in member_hints:
            valid_keys = [f"{key}.{option}" for option in member_hints]
            suggestion = suggest_names(f"{key}.{name}", valid_keys)
            raise ConfigError(f"{key}.{name}: there is no such setting; {suggestion}")
        converted[name] = convert(value, member_hints[name], f"{key}.{name}")
    return converted
