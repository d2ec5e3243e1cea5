"""Compose the config of a command from its command line, with Hydra and OmegaConf.

Hydra merges the defaults of a command with the YAML files of the chosen config groups. An
experiment's YAML file has settings of data, training and search; each command uses the keys of its
own dataclass. Settings of the command line are set afterwards, without Hydra's parser, so that
their text needs no quotes. Hydra parses arguments only in a sweep, to list the values of a setting.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import typing
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.cli.arguments import (
    GROUPS,
    Argument,
    is_list,
    parse_argument,
    read_arguments,
)
from nmt.cli.commands import COMMANDS, Command, script_command
from nmt.cli.sweep import HYDRA_SETTINGS, VERSION_BASE, run_hydra
from nmt.cli.yaml_files import (
    convert,
    describe_choice,
    find_choices,
    find_yaml_files,
    store_config,
)
from nmt.config import DEFAULT_RUN_DIR, PreprocessConfig, TrainConfig, resolve_path
from nmt.errors import ConfigError
from nmt.runtime.manifest import set_verify
from nmt.runtime.signatures import set_verify_key

log = logging.getLogger(__name__)
_SPLITS = ("train", "valid", "test")
_FILE_KEYS = ("src", "tgt", "tsv", "jsonl", "tmx", "xliff")
_TEXT_KEYS = (*_FILE_KEYS, "dataset", "dataset_config", "dataset_split")
# config groups of Hydra that a single run does not need; without them it starts 20 to 35 ms faster
_UNUSED_HYDRA_GROUPS = ("env", "help", "hydra_help", "launcher", "output", "sweeper")
_TRAINING_KEYS = ("dtype", "max_tokens", "seed")  # YAML files set them for nmt-train only
_MAX_WORDS_IN_NAME = 16  # separated by commas, in the name of a file in a list
_QUOTED = re.compile(r"(?s)'([^'\\]|\\.)*'|\"([^\"\\]|\\.)*\"")


@dataclass(frozen=True)
class DataPreparation:
    """How nmt-train prepares its data folder when it does not exist."""

    config: PreprocessConfig
    arguments: list[str]  # of the nmt-preprocess command that does the same


@dataclass(frozen=True)
class ComposedCommand:
    """The config of a command."""

    config: Any  # an instance of the command's dataclass
    config_yaml: str  # the same settings
    preparation: DataPreparation | None = None  # of nmt-train


def compose_command(
    command: Command, words: list[str], run: Callable[[ComposedCommand], Any]
) -> ComposedCommand | None:
    """Compose the config of `command` from the words after its name.

    Returns None if nothing is left to run: a sweep has called `run` for each combination of
    values, or `--cfg job` has printed the config.
    """
    line = read_arguments(words, command)
    files = find_yaml_files(line.config_folders)
    arguments = [
        find_choices(argument, files, is_sweep=line.is_sweep) for argument in line.arguments
    ]
    if command.name == "train" and not line.is_sweep:
        arguments = _add_recorded_config(arguments)
    if any(word.startswith("query=") for word in line.hydra_words):
        values = complete_values(os.environ.get("COMP_LINE", ""), command)
        if values:
            print("\n".join(values))
            return None
    try:
        if line.is_sweep or line.hydra_words:
            _store_defaults(command, arguments, unused_groups=())
            compose = functools.partial(_compose_arguments, command)
            run_hydra(command, line, arguments, compose, run)
        elif line.shows_config:
            _, config_yaml = to_config(_compose(command, arguments), command.schema)
            print(config_yaml, end="")
        else:
            return _compose_arguments(command, arguments)
    except (HydraException, OmegaConfBaseException) as error:
        key = getattr(error, "full_key", None)
        reason, _, _ = str(error).partition("\n    full_key:")
        message = " ".join(reason.split())
        if key and key not in message:
            message = f"{key}: {message}"
        raise ConfigError(message) from None
    return None


def complete_values(command_line: str, command: Command) -> list[str]:
    """Return `key=value` for each value of the setting at the end of `command_line`.

    Returns an empty list unless it has a fixed choice of values. Hydra completes keys, but of
    values only the default.
    """
    key, equals, _ = command_line.split(" ")[-1].partition("=")
    if not equals:
        return []
    try:
        type_hint = parse_argument(f"{key}=", command).type_hint
    except ConfigError:  # an unknown key
        return []
    for choices in (type_hint, *typing.get_args(type_hint)):
        if isinstance(choices, type) and issubclass(choices, Enum):
            return [f"{key}={choice.value}" for choice in choices]
    return []


def _add_recorded_config(arguments: list[Argument]) -> list[Argument]:
    """Build on the settings that a run has recorded, if `run_dir` names a run that exists.

    They are added as the experiment, unless the arguments choose a YAML file themselves.
    """
    values = {argument.key: argument.value for argument in arguments}
    if "run_dir" not in values or not values.keys().isdisjoint(GROUPS):
        return arguments
    path = resolve_path(values["run_dir"]) / "config.yaml"
    if not path.is_file():
        return arguments
    log.info("going on with the settings in %s", os.path.relpath(path))
    recorded = find_choices(Argument("experiment", str(path)), {}, is_sweep=False)
    return [replace(recorded, is_recorded=True), *arguments]


def _compose_arguments(
    command: Command, arguments: list[Argument], subfolder: str = ""
) -> ComposedCommand:
    """Compose the config of a command from its parsed arguments.

    With a `subfolder`, nmt-train uses this folder in `run_dir` as run folder. Also sets whether the
    command verifies checksums.
    """
    composed = _compose(command, arguments)
    if subfolder:
        composed.run_dir = str(Path(composed.run_dir, subfolder))
    config, config_yaml = to_config(composed, command.schema)
    set_verify(getattr(config, "verify", True))
    verify_key = getattr(config, "verify_key", None)
    set_verify_key(None if verify_key is None else resolve_path(verify_key))
    if command.name == "train":
        preparation = _data_preparation(composed, config, arguments)
        return ComposedCommand(config, config_yaml, preparation)
    if command.name == "preprocess":
        _complete_script(config)
    return ComposedCommand(config, config_yaml)


def _data_preparation(
    composed: DictConfig, config: TrainConfig, arguments: Iterable[Argument]
) -> DataPreparation:
    """Return how nmt-preprocess makes the data folder of a training run.

    Its config has the settings in `composed` that nmt-train lacks, and shares the data folder, the
    experiment and the number of threads with the config of the run.
    """
    training_keys = {setting.name for setting in fields(TrainConfig)}
    content = {key: value for key, value in composed.items() if key not in training_keys}
    preprocess_config, _ = to_config(OmegaConf.create(content), PreprocessConfig)
    preprocess_config.data_dir = config.data_dir
    preprocess_config.experiment = config.experiment
    preprocess_config.num_threads = config.num_threads
    _complete_script(preprocess_config)
    values = {argument.key: argument.value for argument in arguments}
    if config.experiment is None:
        values.pop("experiment", None)  # the config that a run recorded
    elif "experiment" in values:
        values["experiment"] = config.experiment  # the path, if it is a file of the user
    preprocess_arguments = []
    for key, value in values.items():
        group, _, _ = key.partition(".")
        if key in ("experiment", "data_dir") or group not in training_keys:
            preprocess_arguments.append(f"{key}={value}")
    return DataPreparation(preprocess_config, preprocess_arguments)


def _complete_script(config: PreprocessConfig) -> None:
    """Complete the paths in `data.made_by`, the command that makes missing files."""
    if config.data.made_by:
        config.data.made_by = script_command(config.data.made_by)


# --- composition


def _compose(command: Command, arguments: list[Argument]) -> DictConfig:
    """Merge the defaults of a command, the chosen YAML files and the settings that the user gave.

    Inside a sweep, Hydra is initialized already.
    """
    is_in_sweep = GlobalHydra.instance().is_initialized()
    _store_defaults(command, arguments, () if is_in_sweep else _UNUSED_HYDRA_GROUPS)
    choices = {}
    overrides = []
    for argument in arguments:
        if argument.key in GROUPS:
            choices[argument.key] = argument.value
        else:
            overrides.append(argument)
    with ExitStack() as stack:
        if not is_in_sweep:
            stack.enter_context(hydra.initialize_config_module("nmt.configs", **VERSION_BASE))
        group_choices = [f"{group}={name}" for group, name in choices.items()]
        composed = hydra.compose(command.name, group_choices)
    OmegaConf.set_struct(composed, False)
    for argument in arguments:
        if argument.key == "experiment" and not argument.is_recorded:
            composed.experiment = describe_choice(argument.value)
    if command.name in ("preprocess", "train"):
        for key in _replaced_text_keys(overrides):
            OmegaConf.update(composed, key, None)
    else:
        for key in _TRAINING_KEYS:
            composed.pop(key, None)
    for override in overrides:
        value = parse_value(override.value, override.type_hint)
        OmegaConf.update(composed, override.key, value, force_add=True)
    return composed


def _store_defaults(
    command: Command, arguments: list[Argument], unused_groups: Iterable[str]
) -> None:
    """Store for Hydra the defaults of the command's settings and of the config groups."""
    keys = {argument.key for argument in arguments}
    defaults = _schema_defaults(command.name)
    if "model_dir" in defaults and "run_dir" not in defaults:
        has_default_model = defaults["model_dir"] is not None
        if has_default_model or ("experiment" in keys and "hypotheses" not in keys):
            # an experiment sets run_dir; commands that read a model read it from that run
            defaults = {**defaults, "run_dir": DEFAULT_RUN_DIR, "model_dir": "${run_dir}"}
    names_data = any(key == "experiment" or key.startswith("data.") for key in keys)
    uses_included_corpus = command.name == "preprocess" and not names_data
    defaults_list: list[Any] = [
        "_self_",
        {"data": "numbers" if uses_included_corpus else "files"},
        {"model": "base"},
        {"augment": None},
        {"experiment": None},
        {"override hydra/hydra_logging": "none"},  # our loggers write to stderr
        {"override hydra/job_logging": "none"},
    ]
    for group in unused_groups:
        defaults_list.append({f"override hydra/{group}": None})
    store_config(command.name, {"defaults": defaults_list, "hydra": HYDRA_SETTINGS, **defaults})


@functools.cache
def _schema_defaults(name: str) -> Any:
    """Return the defaults of a command; nmt-train also has the settings of nmt-preprocess."""
    defaults = OmegaConf.to_container(OmegaConf.structured(COMMANDS[name].schema))
    if name == "train":
        return {**_schema_defaults("preprocess"), **typing.cast(dict[str, Any], defaults)}
    return defaults


def _replaced_text_keys(overrides: Iterable[Argument]) -> list[str]:
    """Return the keys of text in YAML files to clear, because the user gives other files.

    Files for one split replace the text of this split, files for training the text of all splits.
    """
    splits = set()
    for override in overrides:
        group, _, setting = override.key.rpartition(".")
        if setting in _FILE_KEYS:
            splits.add(group.removeprefix("data."))
    if "train" in splits:
        splits.update(_SPLITS)
    keys = []
    for split in splits.intersection(_SPLITS):
        keys += [f"data.{split}.{key}" for key in _TEXT_KEYS]
    return keys


def parse_value(text: str, type_hint: Any) -> Any:
    """Parse the value of a setting of type `type_hint`.

    Text is not changed, commas and equals signs included, unless quotes enclose all of it. Lists
    are written as [a,b] and mappings as {name:{key:value}}. A comma in the name of an existing file
    needs no quotes. Numbers stay text until `convert`.
    """
    if text == "null":
        return None
    is_bracketed = is_list(type_hint) and text.startswith("[") and text.endswith("]")
    has_quotes = "'" in text or '"' in text
    if type_hint is dict or _QUOTED.fullmatch(text) or (is_bracketed and has_quotes):
        return OverridesParser.create().parse_override(f"key={text}").value()
    if is_bracketed:
        return _split_list(text[1:-1])
    return text


def _split_list(text: str) -> list[str]:
    """Split the items of a list at commas, but not at those in the names of existing files."""
    words = text.split(",")
    items = []
    start = 0
    while start < len(words):
        end = start + 1
        for longer_end in range(min(start + _MAX_WORDS_IN_NAME, len(words)), end, -1):
            if os.path.exists(os.path.expanduser(",".join(words[start:longer_end]).strip())):
                end = longer_end
                break
        items.append(",".join(words[start:end]).strip())
        start = end
    return items if items != [""] else []


def to_config(composed: DictConfig, schema: type[Any]) -> tuple[Any, str]:
    """Return an instance of `schema` with its keys of `composed`, and the same settings as YAML."""
    content: Any = OmegaConf.to_container(composed, resolve=True)
    values = {}
    for key, type_hint in typing.get_type_hints(schema).items():
        if key in content:
            values[key] = convert(content[key], type_hint, key)
    structured = OmegaConf.merge(OmegaConf.structured(schema), values)
    return OmegaConf.to_object(structured), OmegaConf.to_yaml(structured)
