"""Compose the config of a command from its command line, with Hydra and OmegaConf.

Hydra merges the defaults of a command with the YAML files of the chosen config groups. The YAML
file of an experiment contains settings of data, training and search. A command uses only the
settings in its dataclass. The settings of the command line come last. Except in a sweep, this
module parses them itself, so that values need no quotes.

Importing Hydra and merging files takes 0.1 s. Most commands without YAML files do neither, see
`_needs_hydra` and `parse_value`.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

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
from nmt.cli.commands import COMMANDS, Command, list_yaml_names, script_command
from nmt.cli.yaml_files import (
    TRAINING_KEYS,
    convert,
    describe_choice,
    find_yaml_files,
    resolve_choices,
)
from nmt.config import DEFAULT_RUN_DIR, PreprocessConfig, TrainConfig, resolve_path
from nmt.errors import ConfigError, to_one_line
from nmt.runtime.manifest import set_verify
from nmt.runtime.signatures import set_verify_key

log = logging.getLogger(__name__)
_HELD_OUT_SPLITS = ("valid", "test")
_SPLITS = ("train", *_HELD_OUT_SPLITS)
_FILE_KEYS = ("src", "tgt", "tsv", "jsonl", "tmx", "xliff")  # settings of a split that name files
_DATASET_KEYS = ("dataset", "dataset_config", "dataset_split")
# all settings of a split that depend on its text
_TEXT_KEYS = (*_FILE_KEYS, *_DATASET_KEYS, "alignments", "score", "scores")
_MAX_COMMAS_IN_NAME = 15  # a file name in a list may have this number of commas, see `_split_list`
# text in single or double quotation marks; a backslash precedes a quotation mark in it
_QUOTED = re.compile(r"(?s)'([^'\\]|\\.)*'|\"([^\"\\]|\\.)*\"")
# defaults of a command that uses the model of a run, see `_uses_run_model`
_RUN_MODEL_DEFAULTS = {"run_dir": DEFAULT_RUN_DIR, "model_dir": "${run_dir}"}
_structured_configs: dict[type[Any], DictConfig] = {}  # keyed by dataclass, see `_structured`


@dataclass(frozen=True)
class DataPreparation:
    """How nmt-train prepares a missing data folder."""

    config: PreprocessConfig
    arguments: list[str]  # `key=value`; with these, nmt-preprocess prepares the same data folder


@dataclass(frozen=True)
class ComposedCommand:
    """The config of a command."""

    config: Any  # an instance of the command's dataclass
    config_yaml: str = ""  # the config as YAML, only for nmt-train
    preparation: DataPreparation | None = None  # only for nmt-train


def compose_command(
    command: Command, words: list[str], run: Callable[[ComposedCommand], Any]
) -> ComposedCommand | None:
    """Compose the config of `command` from the words after its name.

    Returns None if nothing is left to run: a sweep has called `run` for each combination of
    values, `--cfg` has printed the config, or shell completion has printed words.
    """
    command_line = read_arguments(words, command)
    files = find_yaml_files(command_line.config_folders)
    arguments = []
    for argument in command_line.arguments:
        arguments.append(resolve_choices(argument, files, is_sweep=command_line.is_sweep))
    if command.name == "train" and not command_line.is_sweep:
        arguments = _add_recorded_config(arguments)
    # for completion, the shell runs the command with `--shell-completion query=...`
    if any(word.startswith("query=") for word in command_line.hydra_words):
        completions = complete_values(os.environ.get("COMP_LINE", ""), command)
        if completions:  # else Hydra completes the key
            print("\n".join(completions))
            return None
    try:
        if command_line.is_sweep or command_line.hydra_words:
            _run_with_hydra(command, command_line, arguments, run)
        elif command_line.shows_config:
            content = _to_content(_compose(command, arguments))
            settings = to_settings(content, command.schema)
            print(OmegaConf.to_yaml(settings), end="")
        else:
            return _compose_arguments(command, arguments)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from None
    return None


def _run_with_hydra(
    command: Command,
    command_line: CommandLine,
    arguments: list[Argument],
    run: Callable[[ComposedCommand], Any],
) -> None:
    """Let Hydra run a sweep, or complete a word of the shell; see `run_hydra`."""
    from nmt.cli.hydra_compose import store_defaults
    from nmt.cli.sweep import run_hydra

    # Hydra composes a config from the stored defaults before it calls `compose` for a run
    defaults = _command_defaults(command.name, _uses_run_model(command, arguments))
    store_defaults(command.name, _default_corpus(command, arguments), defaults)
    compose = functools.partial(_compose_arguments, command)
    run_hydra(command, command_line, arguments, compose, run)


def _one_line(error: OmegaConfBaseException) -> str:
    """Return the message of an error of OmegaConf in one line, with the setting's key."""
    key = error.full_key
    # drop the lines that OmegaConf appends
    reason, _, _ = str(error).partition("\n    full_key:")
    message = to_one_line(reason)
    return f"{key}: {message}" if key and key not in message else message


def complete_values(command_line: str, command: Command) -> list[str]:
    """Return `key=value` for each value of the setting at the end of `command_line`.

    Returns an empty list unless the type of the setting is an enum. For values, the completion of
    Hydra only suggests the default.
    """
    last_word = command_line.split(" ")[-1]
    key, equals, _ = last_word.partition("=")
    if not equals:
        return []
    try:
        type_hint = parse_argument(f"{key}=", command).type_hint
    except ConfigError:  # an unknown key
        return []
    for accepted_type in (type_hint, *typing.get_args(type_hint)):
        if isinstance(accepted_type, type) and issubclass(accepted_type, Enum):
            return [f"{key}={choice.value}" for choice in accepted_type]
    return []


def _add_recorded_config(arguments: list[Argument]) -> list[Argument]:
    """Add the recorded config of an existing run as the experiment, unless YAML files are chosen.

    The other arguments override the recorded settings.
    """
    values = {argument.key: argument.value for argument in arguments}
    chooses_yaml_files = any(group in values for group in GROUPS)
    if "run_dir" not in values or chooses_yaml_files:
        return arguments
    path = resolve_path(values["run_dir"]) / "config.yaml"
    if not path.is_file():
        return arguments
    log.info("going on with the settings in %s", os.path.relpath(path))
    recorded = resolve_choices(Argument("experiment", str(path)), {}, is_sweep=False)
    return [replace(recorded, is_recorded=True), *arguments]


def _compose_arguments(
    command: Command, arguments: list[Argument], subfolder: str = ""
) -> ComposedCommand:
    """Compose the config of a command from its parsed arguments.

    Appends `subfolder` to `run_dir`. Also sets whether this process verifies checksums and
    signatures.
    """
    composed = _compose(command, arguments)
    if subfolder:
        composed.run_dir = str(Path(composed.run_dir, subfolder))
    content = _to_content(composed)
    settings = to_settings(content, command.schema)
    config: Any = OmegaConf.to_object(settings)
    set_verify(getattr(config, "verify", True))
    verify_key = getattr(config, "verify_key", None)
    set_verify_key(None if verify_key is None else resolve_path(verify_key))
    if command.name == "train":
        preparation = _make_preparation(content, config, arguments)
        return ComposedCommand(config, OmegaConf.to_yaml(settings), preparation)
    if command.name == "preprocess":
        _complete_script(config)
    return ComposedCommand(config)


def _make_preparation(
    content: dict[str, Any], config: TrainConfig, arguments: Iterable[Argument]
) -> DataPreparation:
    """Return how to prepare the data folder of a training run.

    The config of nmt-preprocess gets the data folder, the experiment and the number of threads of
    the run, and the settings in `content` that nmt-train does not have. Its other settings keep
    their defaults, since nmt-train uses their keys in another sense, such as `seed`.
    """
    training_keys = {setting.name for setting in fields(TrainConfig)}
    data_settings = {key: value for key, value in content.items() if key not in training_keys}
    settings = to_settings(data_settings, PreprocessConfig)
    preprocess_config = typing.cast(PreprocessConfig, OmegaConf.to_object(settings))
    preprocess_config.data_dir = config.data_dir
    preprocess_config.experiment = config.experiment
    preprocess_config.num_threads = config.num_threads
    _complete_script(preprocess_config)
    values = {argument.key: argument.value for argument in arguments}
    if config.experiment is None:
        values.pop("experiment", None)  # it was added by `_add_recorded_config`
    elif "experiment" in values:
        values["experiment"] = config.experiment  # the path of a user's file, not its Hydra name
    preprocess_arguments = []
    for key, value in values.items():
        top_level_key, _, _ = key.partition(".")
        if key in ("experiment", "data_dir") or top_level_key not in training_keys:
            preprocess_arguments.append(f"{key}={value}")
    return DataPreparation(preprocess_config, preprocess_arguments)


def _complete_script(config: PreprocessConfig) -> None:
    """Let the command `data.made_by`, which makes missing files, run from the current folder."""
    if config.data.made_by:
        config.data.made_by = script_command(config.data.made_by)


# --- composition


def _compose(command: Command, arguments: list[Argument]) -> DictConfig:
    """Merge the defaults of a command, the chosen YAML files and the user's settings."""
    chosen_files = {}
    settings = []
    for argument in arguments:
        if argument.key in GROUPS:
            chosen_files[argument.key] = argument.value  # replaces an earlier choice
        else:
            settings.append(argument)
    composed = _compose_files(command, arguments, chosen_files)
    OmegaConf.set_struct(composed, False)  # allow new keys, such as mix.news
    for argument in arguments:
        if argument.key == "experiment" and not argument.is_recorded:
            composed.experiment = describe_choice(argument.value)
    if command.name in ("preprocess", "train"):
        for key in _replaced_text_keys(settings):
            OmegaConf.update(composed, key, None)
    if command.name != "train":
        for key in TRAINING_KEYS:
            composed.pop(key, None)
    for setting in settings:
        value = parse_value(setting.value, setting.type_hint)
        OmegaConf.update(composed, setting.key, value, force_add=True)
    return composed


def _compose_files(
    command: Command, arguments: Iterable[Argument], chosen_files: dict[str, str]
) -> DictConfig:
    """Merge the defaults of a command and its YAML files, chosen by config group."""
    uses_run_model = _uses_run_model(command, arguments)
    if not _needs_hydra(command, arguments):
        # `to_settings` adds the defaults of the dataclass
        return OmegaConf.create(_RUN_MODEL_DEFAULTS if uses_run_model else {})
    corpus = _default_corpus(command, arguments)
    group_choices = tuple(f"{group}={name}" for group, name in chosen_files.items())
    has_only_our_files = all(name in list_yaml_names(group) for group, name in chosen_files.items())
    if has_only_our_files:
        return copy.deepcopy(
            _compose_our_files(command.name, corpus, uses_run_model, group_choices)
        )
    return _compose_with_hydra(command.name, corpus, uses_run_model, group_choices)


def _needs_hydra(command: Command, arguments: Iterable[Argument]) -> bool:
    """Return whether Hydra has to compose the config of a command.

    The default YAML files, such as `model/base.yaml`, only have settings of nmt-train,
    nmt-preprocess and nmt-visualize. Other commands need Hydra for an experiment, and for values
    that refer to other settings, as in `output='out-${beam_size}'`, or call a resolver of Hydra, as
    in `output='${now:%Y-%m-%d}.txt'`.
    """
    has_default_files = command.config_groups != ("experiment",)
    if has_default_files:
        return True
    return any(argument.key in GROUPS or "${" in argument.value for argument in arguments)


def _default_corpus(command: Command, arguments: Iterable[Argument]) -> str:
    """Return the default choice of the group `data`."""
    keys = {argument.key for argument in arguments}
    names_data = any(key == "experiment" or key.startswith("data.") for key in keys)
    if command.name == "preprocess" and not names_data:
        return "numbers"
    return "files"


def _uses_run_model(command: Command, arguments: Iterable[Argument]) -> bool:
    """Return whether the default of `model_dir` is the run in `run_dir`."""
    defaults = _schema_defaults(command.name)
    if "model_dir" not in defaults or "run_dir" in defaults:
        return False
    always_needs_model = defaults["model_dir"] is not None
    if always_needs_model:
        return True
    # nmt-evaluate needs a model unless it gets hypotheses. An experiment has a run, whose model is
    # then the default.
    keys = {argument.key for argument in arguments}
    return "experiment" in keys and "hypotheses" not in keys


def _compose_with_hydra(
    name: str, corpus: str, uses_run_model: bool, group_choices: tuple[str, ...]
) -> DictConfig:
    """Merge the defaults and the YAML files of a command."""
    from nmt.cli.hydra_compose import merge_files

    defaults = _command_defaults(name, uses_run_model)
    return merge_files(name, corpus, defaults, list(group_choices))


# cached, since a process may compose several configs, and the files in configs/ do not change
_compose_our_files = functools.cache(_compose_with_hydra)


def _command_defaults(name: str, uses_run_model: bool) -> dict[str, Any]:
    """Return the defaults of the settings of a command."""
    defaults = _schema_defaults(name)
    if uses_run_model:
        return {**defaults, **_RUN_MODEL_DEFAULTS}
    return defaults


@functools.cache
def _schema_defaults(name: str) -> dict[str, Any]:
    """Return the defaults of a command; for nmt-train, also the defaults of nmt-preprocess."""
    defaults = OmegaConf.to_container(_structured(COMMANDS[name].schema))
    settings = typing.cast(dict[str, Any], defaults)
    if name == "train":
        return {**_schema_defaults("preprocess"), **settings}
    return settings


def _replaced_text_keys(settings: Iterable[Argument]) -> list[str]:
    """Return the keys whose values in YAML files are dropped, since `settings` name other text.

    Training files in `settings` replace the text of all splits. The settings `num_pairs` stay,
    since they then take held-out pairs out of the new training text. Files of a held-out split
    replace the text and `num_pairs` of this split.
    """
    splits = set()
    for setting in settings:
        group, _, name = setting.key.rpartition(".")
        if name in _FILE_KEYS:
            splits.add(group.removeprefix("data."))
    keys = [f"data.{split}.num_pairs" for split in splits.intersection(_HELD_OUT_SPLITS)]
    if "train" in splits:
        splits.update(_SPLITS)
    for split in splits.intersection(_SPLITS):
        keys += [f"data.{split}.{key}" for key in _TEXT_KEYS]
    return keys


def parse_value(text: str, type_hint: Any) -> Any:
    """Parse the value of a setting of type `type_hint`.

    Lists are written as [a,b] and mappings as {name:{key:value}}. Hydra parses mappings, lists with
    quotes and text in quotes. Other text is returned unchanged, also if it is a number.
    """
    if text == "null":
        return None
    is_bracketed = is_list(type_hint) and text.startswith("[") and text.endswith("]")
    is_list_with_quotes = is_bracketed and ("'" in text or '"' in text)
    if type_hint is dict or _QUOTED.fullmatch(text) or is_list_with_quotes:
        from nmt.cli.hydra_compose import parse_override

        return parse_override(f"key={text}").value()
    if is_bracketed:
        return _split_list(text[1:-1])
    return text


def _split_list(text: str) -> list[str]:
    """Split a list at its commas, except for commas in the name of an existing file."""
    words = text.split(",")
    items = []
    start = 0
    while start < len(words):
        end = start + 1
        max_end = min(end + _MAX_COMMAS_IN_NAME, len(words))
        for longer_end in range(max_end, end, -1):  # the longest name first
            file_name = ",".join(words[start:longer_end]).strip()
            if os.path.exists(os.path.expanduser(file_name)):
                end = longer_end
                break
        items.append(",".join(words[start:end]).strip())
        start = end
    return items if items != [""] else []


def _to_content(composed: DictConfig) -> dict[str, Any]:
    """Return a config as dictionaries, with the values of its interpolations."""
    return typing.cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))


def to_settings(content: dict[str, Any], schema: type[Any]) -> DictConfig:
    """Return the settings in `content` that `schema` has, converted to the types of `schema`."""
    values = {}
    for key, type_hint in typing.get_type_hints(schema).items():
        if key in content:
            values[key] = convert(content[key], type_hint, key)
    return typing.cast(DictConfig, OmegaConf.merge(_structured(schema), values))


def _structured(schema: type[Any]) -> DictConfig:
    """Return the typed defaults of a dataclass.

    They are cached and must not be changed. `OmegaConf.merge` copies them.
    """
    if schema not in _structured_configs:
        _structured_configs[schema] = OmegaConf.structured(schema)
    return _structured_configs[schema]
