"""From the words of a command line to a typed config, with Hydra and OmegaConf.

Hydra merges the defaults of a command with the YAML files of the chosen config groups. An
experiment sets data, training and search in one file, and each command takes the keys of its own
dataclass. Settings that the user typed are then set by their keys, so their text needs no quotes.
Hydra itself only reads arguments in a sweep, to list the values that a setting takes.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.cli.arguments import (
    GROUPS,
    Argument,
    CommandLine,
    is_list,
    parse_argument,
    read_arguments,
)
from nmt.cli.commands import COMMANDS, Command, script_line
from nmt.cli.yaml_files import (
    IS_HYDRA_1_3,
    convert,
    describe_choice,
    find_choices,
    find_yaml_files,
    store_config,
)
from nmt.config import DEFAULT_RUN_DIR, PreprocessConfig, TrainConfig
from nmt.errors import ConfigError
from nmt.runtime.manifest import set_verify

_SPLITS = ("train", "valid", "test")
_FILES = ("src", "tgt", "tsv", "jsonl")
_TEXT = (*_FILES, "dataset", "dataset_config", "dataset_split")
_HYDRA: dict[str, Any] = {
    "output_subdir": None,
    "run": {"dir": "."},
    "sweep": {"dir": "runs", "subdir": "."},
    "job": {"chdir": False},
}
# config groups of Hydra that a single run does not need; without them it starts 20 to 35 ms sooner
_UNUSED_GROUPS = ("env", "help", "hydra_help", "launcher", "output", "sweeper")
_VERSION: dict[str, Any] = {"version_base": "1.3"} if IS_HYDRA_1_3 else {}
_TRAINING_KEYS = ("dtype", "max_tokens", "seed")  # in YAML files they are settings of nmt-train
_MAX_NAME = 200  # characters in the name of a run of a sweep
_QUOTED = re.compile(r"(?s)'([^'\\]|\\.)*'|\"([^\"\\]|\\.)*\"")


@dataclass(frozen=True)
class DataPreparation:
    """How nmt-train prepares its data folder when it does not exist."""

    config: PreprocessConfig
    arguments: list[str]  # of the nmt-preprocess command that does the same


def compose_configs(
    command: Command, words: list[str], run: Callable[..., Any]
) -> tuple[Any, ...] | None:
    """Compose the config of `command` from the words that follow its name.

    Returns the arguments of the function that runs the command: its config, and for nmt-train also
    the config as YAML and the `DataPreparation`. Returns None if nothing is left to run: a sweep
    has called `run` with these arguments for each combination of values, or `--cfg job` has
    printed the config.
    """
    line = read_arguments(words, command)
    files = find_yaml_files(line.folders)
    arguments = [find_choices(argument, files, line.is_sweep) for argument in line.arguments]
    try:
        if line.is_sweep or line.hydra:
            _run_hydra(command, line, arguments, run)
        elif line.shows_config:
            print(to_config(_compose(command, arguments), command.schema)[1], end="")
        else:
            return _to_configs(command, arguments)
    except (HydraException, OmegaConfBaseException) as error:
        key = getattr(error, "full_key", None)
        text = " ".join(str(error).split("\n    full_key:")[0].split())
        raise ConfigError(f"{key}: {text}" if key and key not in text else text) from None
    return None


def _to_configs(
    command: Command, arguments: list[Argument], subfolder: str = ""
) -> tuple[Any, ...]:
    """Return the arguments of the function that runs the command; see `compose_configs`.

    With a `subfolder`, the run folder of nmt-train is this folder in `run_dir`.
    """
    composed = _compose(command, arguments)
    if subfolder:
        composed.run_dir = str(Path(composed.run_dir, subfolder))
    config, config_yaml = to_config(composed, command.schema)
    set_verify(getattr(config, "verify", True))
    if command.name == "train":
        return config, config_yaml, _data_preparation(composed, config, arguments)
    if command.name == "preprocess":
        _complete_script(config)
    return (config,)


def _data_preparation(
    composed: DictConfig, config: TrainConfig, arguments: Iterable[Argument]
) -> DataPreparation:
    """Return the config of nmt-preprocess for the data of a training run."""
    training_keys = {setting.name for setting in fields(TrainConfig)}
    content = {key: value for key, value in composed.items() if key not in training_keys}
    data, _ = to_config(OmegaConf.create(content), PreprocessConfig)
    data.data_dir = config.data_dir
    data.experiment = config.experiment
    data.num_threads = config.num_threads
    _complete_script(data)
    typed = {argument.key: argument.value for argument in arguments}
    if "experiment" in typed:
        typed["experiment"] = str(config.experiment)  # the path of a file of the user
    shared_keys = ("experiment", "data_dir")
    words = [
        f"{key}={value}"
        for key, value in typed.items()
        if key in shared_keys or key.split(".")[0] not in training_keys
    ]
    return DataPreparation(data, words)


def _complete_script(config: PreprocessConfig) -> None:
    """Let the command that makes missing files name the script as it can be run from here."""
    if config.data.made_by:
        config.data.made_by = script_line(config.data.made_by)


# --- composition


def _compose(command: Command, arguments: list[Argument]) -> DictConfig:
    """Merge the defaults of a command, the chosen YAML files and the settings that were typed."""
    is_in_sweep = GlobalHydra.instance().is_initialized()
    _store_defaults(command, arguments, () if is_in_sweep else _UNUSED_GROUPS)
    choices = {}
    typed = []
    for argument in arguments:
        if argument.key in GROUPS:
            choices[argument.key] = argument.value
        else:
            typed.append(argument)
    with ExitStack() as stack:
        if not is_in_sweep:
            stack.enter_context(hydra.initialize_config_module("nmt.configs", **_VERSION))
        overrides = [f"{group}={name}" for group, name in choices.items()]
        composed = hydra.compose(command.name, overrides)
    OmegaConf.set_struct(composed, False)
    if "experiment" in choices:
        composed.experiment = describe_choice(choices["experiment"])
    if command.name in ("preprocess", "train"):
        for key in _replaced_text(typed):
            OmegaConf.update(composed, key, None)
    else:
        for key in _TRAINING_KEYS:
            composed.pop(key, None)
    for setting in typed:
        value = parse_value(setting.value, setting.hint)
        OmegaConf.update(composed, setting.key, value, force_add=True)
    return composed


def _store_defaults(
    command: Command, arguments: list[Argument], unused_groups: Iterable[str]
) -> None:
    """Give Hydra the defaults of the command's settings and of the config groups."""
    keys = {argument.key for argument in arguments}
    defaults = _schema_defaults(command.name)
    if "model_dir" in defaults and "run_dir" not in defaults:
        has_model = defaults["model_dir"] is not None
        if has_model or ("experiment" in keys and "hypotheses" not in keys):
            # an experiment sets run_dir, and its run is the model of the other commands
            defaults = {**defaults, "run_dir": DEFAULT_RUN_DIR, "model_dir": "${run_dir}"}
    names_data = any(key == "experiment" or key.startswith("data.") for key in keys)
    is_bare = command.name == "preprocess" and not names_data
    primary: list[Any] = [
        "_self_",
        {"data": "numbers" if is_bare else "files"},
        {"model": "base"},
        {"experiment": None},
        {"override hydra/hydra_logging": "none"},  # our loggers write to stderr
        {"override hydra/job_logging": "none"},
    ]
    for group in unused_groups:
        primary.append({f"override hydra/{group}": None})
    store_config(command.name, {"defaults": primary, "hydra": _HYDRA, **defaults})


@functools.cache
def _schema_defaults(name: str) -> Any:
    """Return the defaults of a command's settings; nmt-train also takes settings of its data."""
    defaults = OmegaConf.to_container(OmegaConf.structured(COMMANDS[name].schema))
    if name == "train":
        return {**_schema_defaults("preprocess"), **typing.cast(dict[str, Any], defaults)}
    return defaults


def _replaced_text(typed: Iterable[Argument]) -> list[str]:
    """Return the keys of text in YAML files that typed files replace.

    Files for one split replace its text, and files for training replace the text of all splits.
    """
    splits = set()
    for argument in typed:
        group, _, setting = argument.key.rpartition(".")
        if setting in _FILES:
            splits.add(group.removeprefix("data."))
    if "train" in splits:
        splits.update(_SPLITS)
    keys = []
    for split in splits.intersection(_SPLITS):
        keys += [f"data.{split}.{key}" for key in _TEXT]
    return keys


def parse_value(text: str, hint: Any) -> Any:
    """Return the value that typed text means for a setting of type `hint`.

    Text is not changed, commas and equals signs included, unless quotes enclose all of it. Lists
    are written as [a,b] and mappings as {name:{key:value}}. Numbers stay text, see `convert`.
    """
    if text == "null":
        return None
    is_bracketed = is_list(hint) and text.startswith("[") and text.endswith("]")
    has_quotes = "'" in text or '"' in text
    if hint is dict or _QUOTED.fullmatch(text) or (is_bracketed and has_quotes):
        return OverridesParser.create().parse_override(f"key={text}").value()
    if is_bracketed:
        items = [item.strip() for item in text[1:-1].split(",")]
        return items if items != [""] else []
    return text


def to_config(composed: DictConfig, schema: type[Any]) -> tuple[Any, str]:
    """Return the keys of `composed` that `schema` has as this dataclass, and as YAML."""
    content: Any = OmegaConf.to_container(composed, resolve=True)
    hints = typing.get_type_hints(schema)
    values = {key: convert(content[key], hints[key], key) for key in content.keys() & hints.keys()}
    typed = OmegaConf.merge(OmegaConf.structured(schema), values)
    return OmegaConf.to_object(typed), OmegaConf.to_yaml(typed)


# --- sweeps and other functions of Hydra


def _run_hydra(
    command: Command, line: CommandLine, arguments: list[Argument], run: Callable[..., Any]
) -> None:
    """Let Hydra call `run`: once, for each run of a sweep, or not at all (shell completion)."""
    swept = []
    fixed = []
    for argument in arguments:
        if argument.key in GROUPS or _is_sweep(argument):
            swept.append(argument)
        else:
            fixed.append(argument)
    errors: list[BaseException] = []

    def run_job(_: DictConfig) -> Any:
        if errors:  # a sweep ends with its first error
            return None
        values = [_parse_override(text, command) for text in HydraConfig.get().overrides.task]
        is_named = HydraConfig.get().mode is RunMode.MULTIRUN and command.name == "train"
        try:
            subfolder = _name_run(values, arguments) if is_named else ""
            return run(*_to_configs(command, [*fixed, *values], subfolder))
        except Exception as error:  # Hydra would print it
            errors.append(error)

    _store_defaults(command, arguments, unused_groups=())
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises exceptions instead of printing them
    flags = ["--multirun", *line.hydra] if line.is_sweep else line.hydra
    sys.argv = [f"nmt-{command.name}", *flags, *map(_to_override, swept)]
    main = hydra.main(config_path="pkg://nmt.configs", config_name=command.name, **_VERSION)
    try:
        main(run_job)()
    finally:  # a sweeper may fail because a run returned no score
        if errors:
            raise errors[0]


def _to_override(argument: Argument) -> str:
    """Write a swept setting, or the choice of a config group, in Hydra's grammar."""
    prefix = "" if argument.key in GROUPS else "++"  # ++ also adds a key with a name of the user
    return f"{prefix}{argument.key}={argument.value}"


def _parse_override(text: str, command: Command) -> Argument:
    """Return the argument for one override of one run of a sweep, in Hydra's grammar."""
    override = OverridesParser.create().parse_override(text)
    value = override.value()
    typed = value if isinstance(value, str) else override.get_value_string()
    return parse_argument(f"{override.get_key_element()}={typed}", command)


def _is_sweep(argument: Argument) -> bool:
    """Return whether a setting has several values in Hydra's grammar: 1,2 or range(1,9)."""
    try:
        override = OverridesParser.create().parse_override(f"key={argument.value}")
    except HydraException:  # text
        return False
    return bool(override.is_sweep_override())


def _name_run(values: Iterable[Argument], arguments: Iterable[Argument]) -> str:
    """Return the name of one run of a sweep: the settings that the sweep changes, with values."""
    swept = {argument.key: argument.value for argument in values}
    for argument in arguments:
        if argument.key == "run_dir" or not _is_sweep(argument):
            swept.pop(argument.key, None)
    settings = ",".join(f"{key}={value}" for key, value in sorted(swept.items()))
    name = re.sub(r"[^\w.=,+-]", "_", settings.replace("'", ""))
    if len(name) > _MAX_NAME:
        raise ConfigError(f"a run of the sweep would be named {name}; sweep over fewer settings")
    return name
