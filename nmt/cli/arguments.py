"""Parse the words after the name of a command.

Checks and completes keys, and translates keys and flags of other toolkits. Values remain text until
`nmt.cli.compose` converts them to the types of settings.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
import typing
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from nmt.cli.commands import NAME, Command, Setting
from nmt.config import ADVICE_FOR_KEY, OUR_KEY, Picture, resolve_path, translate_flag
from nmt.errors import ConfigError, suggest_names

YAML_SUFFIXES = (".yaml", ".yml")
# the config groups are folders of YAML files; an argument such as model=base chooses one file
GROUPS = ("model", "data", "augment", "experiment")
_SWEEP_FLAGS = ("--multirun", "-m")
_CONFIG_FLAGS = ("--cfg", "-c")
_COMPLETION_FLAGS = ("--shell-completion", "-sc")
_FOLDER_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp")
_FLAGS_WITH_VALUE = (*_CONFIG_FLAGS, *_COMPLETION_FLAGS, *_FOLDER_FLAGS)
# matches advice that begins with one of our keys, such as "write max_updates=100000"
_ADVISED_KEY = re.compile(r"write (?P<key>[\w.]+)=")
# see `_is_setting_or_flag`
_SETTING_OR_FLAG = re.compile(r"[+]*[\w./@:-]+=|-(?!\d)")
_LIKELY_KEYS = {  # for each command, the keys that the user probably means by words without a key
    "preprocess": ("data.train.src", "data.train.tgt"),
    "train": ("data_dir",),
    "average": ("run_dir",),
    "translate": ("input", "output"),
    "distill": ("input", "output"),
    "backtranslate": ("input", "output"),
    "evaluate": ("hypotheses", "references"),
    "score": ("src", "tgt"),
    "export": ("model_dir",),
    "import": ("input", "output"),
    "serve": ("model_dir",),
    "visualize": ("run_dir",),
}


@dataclass(frozen=True)
class Argument:
    """`key=value` of the command line: a setting, or a YAML file chosen for a config group."""

    key: str  # a full key, such as search.beam_size, or a config group
    value: str
    type_hint: Any = str  # the type of the setting
    is_recorded: bool = False  # whether `value` is the recorded config of a run


@dataclass
class CommandLine:
    """The words after the name of a command, by their purpose."""

    arguments: list[Argument] = field(default_factory=list)
    config_folders: list[Path] = field(default_factory=list)  # folders of the user's YAML files
    hydra_words: list[str] = field(default_factory=list)  # flags and settings for Hydra
    is_sweep: bool = False  # --multirun
    shows_config: bool = False  # --cfg


def read_arguments(words: list[str], command: Command) -> CommandLine:
    """Parse the words after the name of a command; raise a `ConfigError` for an unknown key."""
    command_line = CommandLine()
    remaining_words = deque(words)
    newest_flag: Argument | None = None  # set if the previous words were a flag and its value
    while remaining_words:
        word = remaining_words.popleft()
        flag_before_word = newest_flag
        newest_flag = None
        name, equals, value = word.partition("=")
        if name in _FLAGS_WITH_VALUE and not equals and remaining_words:
            value = remaining_words.popleft()
        if name in _SWEEP_FLAGS:
            command_line.is_sweep = True
        elif name in _CONFIG_FLAGS:
            command_line.shows_config = True
        elif name in _COMPLETION_FLAGS:
            command_line.hydra_words += [name, value]
        elif name in _FOLDER_FLAGS or name.lstrip("+") == "hydra.searchpath":
            command_line.config_folders += _read_folders(value)
        elif word.startswith(("hydra.", "hydra/", "+hydra", "++hydra")):
            command_line.hydra_words.append(word)
        elif word.startswith("-"):  # --beam-size 4, --beam_size=4 or --sampling
            if not equals:
                has_value = bool(remaining_words) and not _is_setting_or_flag(remaining_words[0])
                value = remaining_words.popleft() if has_value else "true"
            key = name.lstrip("-").replace("-", "_")
            newest_flag = parse_argument(f"{key}={value}", command)
            command_line.arguments.append(newest_flag)
        elif not equals and not _is_bare_flag(word):  # no setting, but a lone key or value
            advice = ""
            if flag_before_word is not None:
                advice = _advise_on_second_value(word, flag_before_word)
            if not advice:
                advice = _advise_on_word(word, list(remaining_words), command)
            raise ConfigError(f"{word} is not a setting; {advice}")
        else:
            command_line.arguments.append(parse_argument(word, command))
    return command_line


def _is_setting_or_flag(word: str) -> bool:
    """Return whether a word is a setting, such as `+seed=1`, or a flag, such as `--help`.

    Other words are values. A negative number is a value.
    """
    return _SETTING_OR_FLAG.match(word) is not None


def _is_bare_flag(word: str) -> bool:
    """Return whether a word without a value is a flag of another toolkit, such as bf16."""
    key, _ = translate_flag(word, "true")
    return key != word


def _read_folders(value: str) -> list[Path]:
    """Parse the path of a folder, or a list of folders in Hydra's notation: [file://a,b]."""
    names = [item.strip(" '\"") for item in value.strip("[]").split(",")]
    return [resolve_path(name.removeprefix("file://")) for name in names]


def parse_argument(word: str, command: Command) -> Argument:
    """Parse `key=value` or a flag such as `bf16`; raise a `ConfigError` if the key is unknown.

    Ignores a `+` before the key, which Hydra requires before some keys. Does not check the value of
    a config group, which `resolve_choices` does later.
    """
    key, equals, value = word.lstrip("+").partition("=")
    if not equals:  # a flag; `read_arguments` refuses other words without a value
        key, value = translate_flag(word, "true")
    group = OUR_KEY.get(key, key)
    if group in GROUPS:
        _check_group(group, value, command)
        return Argument(group, value)
    key, value = translate_flag(key, value)
    settings = _fill_names(key, command)
    if any(full_key.startswith(f"{key}.") for full_key in settings):  # a group of settings
        _check_mapping(key, value, settings)
        return Argument(key, value, dict)
    full_key = _complete_key(key, value, settings, command)
    return Argument(full_key, value, settings[full_key].type_hint)


def _advise_on_second_value(word: str, flag: Argument) -> str:
    """Return advice on a word after a flag and its value.

    Returns "" if the word may be something else, for which `_advise_on_word` has better advice.
    """
    if is_list(flag.type_hint):
        return "write " + shlex.quote(f"{flag.key}=[{flag.value},{word}]")
    return f"{flag.key} takes one value" if word.isdigit() else ""


def _advise_on_word(word: str, next_words: list[str], command: Command) -> str:
    """Return advice on a word without an equals sign.

    The word may be a key whose value follows in `next_words`, or the name of a file or folder.
    """
    key, _, value = word.partition(":")  # key:value, `key: value`, `key = value` or `key value`
    if key in {setting.key for setting in command.accepted_settings}:
        candidates = [value, *next_words, "VALUE"]
        values = [text for text in candidates if text not in ("", "=", ":")]
        return "write " + shlex.quote(f"{key}={values[0]}")
    if Path(word).suffix in YAML_SUFFIXES and "experiment" in command.config_groups:
        return "write " + shlex.quote(f"experiment={word}")
    if command.name == "visualize" and word in [picture.value for picture in Picture]:
        return f"write what={word}"
    if "." in word or "/" in word or Path(word).exists():
        keys = _LIKELY_KEYS[command.name]
        values = [word]
        for text in next_words:
            if text.startswith("-"):
                break  # a flag, whose value follows
            if not _is_setting_or_flag(text):
                values.append(text)
        settings = []
        for position, likely_key in enumerate(keys):
            file_name = values[position] if position < len(values) else "FILE"
            settings.append(f"{likely_key}={file_name}")
        return f"write {shlex.join(settings)}"
    if command.name == "translate" and " " in word:
        return f"write input=FILE, or: echo {shlex.quote(word)} | nmt-translate"
    return f"write key=value (nmt-{command.name} --help lists the keys)"


def _check_group(group: str, value: str, command: Command) -> None:
    """Raise a `ConfigError` unless the command accepts the config group."""
    if group in command.config_groups:
        return
    advice = ""
    if group == "model" and any(setting.key == "model_dir" for setting in command.settings):
        advice = f"; it reads a folder: model_dir={value}"
    raise ConfigError(f"{group}={value}: does nothing in nmt-{command.name}{advice}")


def _fill_names(key: str, command: Command) -> dict[str, Setting]:
    """Return the settings of a command by key. Replaces `NAME` in keys by the name in `key`.

    For the key `mix.news`, `mix.NAME` becomes `mix.news`.
    """
    key_segments = key.split(".")
    settings = {}
    for setting in command.accepted_settings:
        if dataclasses.is_dataclass(setting.type_hint):  # a group, such as data.corpora.NAME
            continue
        filled_segments = setting.key.split(".")
        for i, segment in enumerate(filled_segments):
            if segment == NAME and i < len(key_segments):
                filled_segments[i] = key_segments[i]
        settings[".".join(filled_segments)] = setting
    return settings


def _check_mapping(key: str, value: str, settings: dict[str, Setting]) -> None:
    """Raise a `ConfigError` unless a group may be set as a whole, as in mix={news:2}.

    Only a group in which the user chooses the names may be set as a whole. The error shows the key
    of a member as an example.
    """
    members = [name for name in settings if name.startswith(f"{key}.")]
    has_user_names = members[0].startswith(f"{key}.{NAME}")
    if has_user_names and value.startswith("{"):
        return
    example = members[0]
    for name in members:  # the user probably means the member that accepts the value
        type_hint = settings[name].type_hint
        is_choice = isinstance(type_hint, type) and issubclass(type_hint, Enum)
        if is_choice and value in [choice.value for choice in type_hint]:
            example = f"{name}={value}"
    raise ConfigError(f"{key} is a group of settings; set one of them, such as {example}")


def _complete_key(key: str, value: str, settings: dict[str, Setting], command: Command) -> str:
    """Return the full key of the setting that `key` names.

    `key` may be a full key, the end of a full key, or a key of another toolkit. Raises a
    `ConfigError` that suggests other keys unless exactly one setting matches.
    """
    for candidate in (key, OUR_KEY.get(key, key)):
        if candidate in settings:
            return candidate
        matches = []
        for full_key, setting in settings.items():
            # a key that contains a name of the user, such as data.corpora.news.src, must be full
            if full_key.endswith(f".{candidate}") and NAME not in setting.key:
                matches.append(full_key)
        if len(matches) == 1:
            return matches[0]
    advice = _advise_on_key(key, value, settings, command)
    raise ConfigError(f"{key}: nmt-{command.name} has no such setting; {advice}")


def _advise_on_key(key: str, value: str, settings: dict[str, Setting], command: Command) -> str:
    """Return advice for a key that is not a setting of a command.

    Keys of other toolkits have their own advice, which is skipped if it begins with a key that the
    command lacks. For other keys, suggests similar keys. Keys with a name of the user, such as
    mix.NAME, are only suggested for keys of their group.
    """
    command_keys = {*settings, *command.config_groups}
    for advice in ADVICE_FOR_KEY.get(key, []):
        match = _ADVISED_KEY.match(advice)
        if match is None or match["key"] in command_keys:
            return advice.format(value=shlex.quote(value))
    first_words = {name.partition(".")[0] for name in settings}
    similar_words = difflib.get_close_matches(key.partition(".")[0], first_words)
    names = []
    for name, setting in settings.items():
        if NAME not in setting.key or name.partition(".")[0] in similar_words:
            names.append(name)
    normalized_key = key.lower().replace("-", "_")
    return suggest_names(normalized_key, names, f"nmt-{command.name} --help lists all")


def is_list(type_hint: Any) -> bool:
    """Return whether the type of a setting is `list[...]` or `list[...] | None`."""
    accepted_types = (type_hint, *typing.get_args(type_hint))  # a union accepts its members
    return any(typing.get_origin(accepted_type) is list for accepted_type in accepted_types)
