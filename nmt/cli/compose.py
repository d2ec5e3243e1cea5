"""From arguments to a typed config, with Hydra and OmegaConf.

Hydra composes the same YAML files for every command, since a model or an experiment sets data,
training and search in one file; each command then takes the keys of its own dataclass. Keys that
the user types must be keys of that dataclass; `nmt.cli.arguments` reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nmt.cli.arguments import GROUPS, Argument, is_list, read_arguments
from nmt.cli.commands import COMMANDS, Command, choices, script_line
from nmt.config import DEFAULT_RUN_DIR, PreprocessConfig, plain_value
from nmt.errors import ConfigError, nearest
from nmt.runtime.manifest import set_verify

_SPLITS = ("train", "valid", "test")
_TEXT = ("src", "tgt", "tsv", "jsonl", "dataset", "dataset_config", "dataset_split")
_HYDRA: dict[str, Any] = {
    "output_subdir": None,
    "run": {"dir": "."},
    "sweep": {"dir": "runs", "subdir": "."},
    "job": {"chdir": False},
}
_UNUSED = ("env", "help", "hydra_help", "launcher", "output", "sweeper")  # 20 to 35 ms
_IS_1_3 = hydra.__version__.startswith("1.3")  # later ones warn of what it needs, or lacks
_VERSION: dict[str, Any] = {"version_base": "1.3"} if _IS_1_3 else {}
_REPLACE: dict[str, Any] = {} if _IS_1_3 else {"replace": True}
_MOST_NAME = 200  # characters of the folder of one run of a sweep
_OF_DATA = ("data", "experiment")
_OF_TRAINING = ("dtype", "max_tokens", "seed")  # in YAML, where other commands have them too
_PATHS: dict[str, Path] = {}  # of the user's YAML, by the name that Hydra knows


def with_config(command: Command, arguments: list[str], run: Callable[..., Any]) -> None:
    """Compose the config of `command` from `arguments` and call `run(config)`; for nmt-train with
    its YAML too, and with the `Preparation` of its data folder or None.
    """
    read = read_arguments(arguments, command)
    own = {key: path for folder in read.folders for key, path in _find_own(folder)}
    for (group, _), path in own.items():
        if path.parent.name == group:  # others may name it in their defaults
            _register(group, path)
    try:
        for argument in read.arguments:
            if argument.key in GROUPS:
                _register_choices(argument, own)
        if read.flags or any(argument.key.startswith("hydra") for argument in read.arguments):
            _run_hydra(command, read.flags, read.arguments, run)
        else:
            run(*_compose(command, read.arguments))
    except (HydraException, OmegaConfBaseException) as error:
        key, text = getattr(error, "full_key", None), str(error).split("\n    full_key:")[0]
        text = " ".join(text.split())
        raise ConfigError(f"{key}: {text}" if key and key not in text else text) from None


def _compose(command: Command, arguments: list[Argument]) -> tuple[Any, ...]:
    """Return what the command is called with."""
    _store(command, arguments, left_out=_UNUSED)
    with ExitStack() as stack:
        if not GlobalHydra.instance().is_initialized():  # as it is in a run of a sweep
            stack.enter_context(hydra.initialize_config_module("nmt.configs", **_VERSION))
        composed = hydra.compose(command.name, _overrides(command, arguments))
    return _configs(command, composed, arguments)


def _configs(command: Command, composed: DictConfig, arguments: list[Argument]) -> tuple[Any, ...]:
    """Return the config, and for nmt-train its YAML and how its data folder is prepared."""
    OmegaConf.set_struct(composed, False)
    if command.name not in ("train", "preprocess"):
        for key in {*_OF_TRAINING} - {argument.key for argument in arguments}:
            composed.pop(key, None)
    for argument in arguments:
        if argument.key == "experiment":
            name = argument.override.partition("=")[2]
            path = os.path.relpath(_PATHS[name]) if name in _PATHS else name
            argument.value = composed.experiment = path
    config, config_yaml = to_config(composed, command.schema)
    if command.name == "preprocess" and config.data.made_by:
        config.data.made_by = script_line(config.data.made_by)
    if command.name != "train":
        return (config,)
    data = [replace(a, is_for_data=False) for a in arguments if a.is_for_data or a.key in _OF_DATA]
    if not data:
        return config, config_yaml, None
    preparation: PreprocessConfig = _compose(COMMANDS["preprocess"], data)[0]
    preparation.data_dir, preparation.num_threads = config.data_dir, config.num_threads
    typed = [f"{a.key}={a.value}" for a in data]
    if any(a.key == "data_dir" for a in arguments):
        typed.append(f"data_dir={config.data_dir}")
    return config, config_yaml, (preparation, typed)


def _overrides(command: Command, arguments: list[Argument]) -> list[str]:
    """Return what Hydra is given: what was typed, and for nmt-preprocess what leaves out text that
    a YAML names where files are typed: of that split, and with files for training of every split.
    """
    given = [argument.override for argument in arguments if not argument.is_for_data]
    if command.name != "preprocess":
        return given
    keys = {argument.key for argument in arguments}
    files = ("src", "tgt", "tsv", "jsonl")
    typed = {split for split in _SPLITS if keys & {f"data.{split}.{kind}" for kind in files}}
    splits = _SPLITS if "train" in typed else tuple(typed)
    return [*(f"data.{split}.{key}=null" for split in splits for key in _TEXT), *given]


def _store(command: Command, arguments: list[Argument], left_out: tuple[str, ...] = ()) -> None:
    """Give Hydra the defaults of the command's settings, and of the config groups; what is
    `left_out` are groups of Hydra's own.
    """
    keys = {argument.key for argument in arguments}
    defaults = _defaults(command.name)
    if "model_dir" in defaults and "run_dir" not in defaults:  # where an experiment trains
        has_model = defaults["model_dir"] is not None
        if has_model or ("experiment" in keys and "hypotheses" not in keys):
            defaults = {**defaults, "run_dir": DEFAULT_RUN_DIR, "model_dir": "${run_dir}"}
    is_bare = not any(key == "experiment" or key.startswith("data.") for key in keys)
    primary: list[Any] = [
        "_self_",
        {"data": "numbers" if is_bare else "files"},
        {"model": "base"},
        {"experiment": None},
        {"override hydra/hydra_logging": "none"},  # our loggers write to stderr
        {"override hydra/job_logging": "none"},
        *({f"override hydra/{group}": None} for group in left_out),
    ]
    node = {"defaults": primary, "hydra": _HYDRA, **defaults}
    ConfigStore.instance().store(command.name, node, **_REPLACE)


@functools.cache
def _defaults(name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.structured(COMMANDS[name].schema))


# --- Hydra's own flags and sweeps


def _run_hydra(
    command: Command, flags: list[str], arguments: list[Argument], run: Callable[..., Any]
) -> None:
    """Give flags and settings of Hydra's own, such as those of a sweep, to Hydra: half as fast."""
    errors: list[BaseException] = []
    _store(command, arguments)

    def job(composed: DictConfig) -> Any:  # once, or for each run of a sweep
        if errors:
            return None
        try:
            if HydraConfig.get().mode is RunMode.MULTIRUN and command.name == "train":
                _name_run(composed, arguments)
            chosen = HydraConfig.get().runtime.choices
            now = [  # one choice of those that a sweep goes over
                replace(a, override=f"{a.key}={chosen[a.key]}") if a.key in GROUPS else a
                for a in arguments
            ]
            return run(*_configs(command, composed, now))
        except Exception as error:  # Hydra would print it
            errors.append(error)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises exceptions instead of printing them
    sys.argv = [f"nmt-{command.name}", *flags, *_overrides(command, arguments)]
    main = hydra.main(config_path="pkg://nmt.configs", config_name=command.name, **_VERSION)
    try:
        main(job)()
    finally:  # a sweeper may fail for want of a score
        if errors:
            raise errors[0]


def _name_run(composed: DictConfig, arguments: list[Argument]) -> None:
    """Give one run of a sweep a folder of its own, named after what is swept, in `run_dir`."""
    typed = OverridesParser.create().parse_overrides([a.override for a in arguments])
    fixed = {o.get_key_element() for o in typed if not o.is_sweep_override()}
    jobs = OverridesParser.create().parse_overrides(list(HydraConfig.get().overrides.task))
    swept = {o.get_key_element().lstrip("+"): o for o in jobs if o.get_key_element() not in fixed}
    if names := sorted(swept.keys() - {"run_dir"}):
        parts = [f"{name}={swept[name].get_value_string()}" for name in names]
        name = re.sub(r"[^\w.=,+-]", "_", ",".join(parts).replace("'", ""))
        if len(name) > _MOST_NAME:
            raise ConfigError(
                f"a run of the sweep would be named {name}; sweep over fewer settings"
            )
        composed.run_dir = str(Path(composed.run_dir, name))


# --- the user's own YAML


def _find_own(folder: Path) -> Iterator[tuple[tuple[str, str], Path]]:
    """Yield (group, name) and path of the YAML files of a folder; those that are in the folder of
    no group are experiments.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder of configs")
    for group, place in (("experiment", folder), *((group, folder / group) for group in GROUPS)):
        yield from (((group, path.stem), path) for path in sorted(place.glob("*.yaml")))


def _register_choices(argument: Argument, own: Mapping[tuple[str, str], Path]) -> None:
    """Check the choices of a group, of which several are a sweep; one may be in a folder of the
    user, or the path of a YAML file.
    """
    group, known, names = argument.key, choices(argument.key), argument.value.split(",")
    for index, name in enumerate(names):
        path = own.get((group, name), Path(name).expanduser())
        if path.is_file():
            names[index] = _register(group, path)
        elif name not in known:
            near = nearest(name, [*known, *(other for kind, other in own if kind == group)])
            raise ConfigError(
                f"{group}={name}: there is none of this name, and no such YAML file; {near}"
            )
    argument.override = f"{group}={','.join(names)}"


def _register(group: str, path: Path) -> str:
    """Check a YAML file of the user and store it for Hydra; return its name there."""
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no settings; write lines of key: value")
    for key in content.keys() - {"defaults"}:
        _check_known(str(key), path)
    for command in COMMANDS.values():
        hints = typing.get_type_hints(command.schema)
        try:
            for key in content.keys() & hints.keys():
                _fitted(content[key], hints[key], key)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    name = path.stem if path.stem not in choices(group) else f"{path.parent.name}-{path.stem}"
    ConfigStore.instance().store(
        group=group, name=name, node=content, package="_global_", **_REPLACE
    )
    _PATHS[name] = path
    return name


# --- typed configs


def _check_known(key: str, place: object) -> None:
    """Raise a `ConfigError` for a key of YAML that is no setting of any command."""
    known = {f.name for command in COMMANDS.values() for f in dataclasses.fields(command.schema)}
    if key not in known:
        near = nearest(key, known, "nmt-train --help lists all")
        raise ConfigError(f"{place} sets {key}, which no command has; {near}")


def to_config(composed: DictConfig, schema: type[Any]) -> tuple[Any, str]:
    """Return the composed keys that `schema` has as its dataclass, and as YAML."""
    for key in map(str, composed):
        _check_known(key, "the YAML")
    hints = typing.get_type_hints(schema)
    given: Any = OmegaConf.to_container(composed, resolve=True)
    chosen = {key: _fitted(given[key], hint, key) for key, hint in hints.items() if key in given}
    typed = OmegaConf.merge(OmegaConf.structured(schema), chosen)
    set_verify(composed.get("verify", True) is not False)
    return OmegaConf.to_object(typed), OmegaConf.to_yaml(typed)


def _fitted(value: Any, hint: Any, key: str) -> Any:
    """Check the keys in `value` against its type; as on the command line, one text may stand for a
    list of one, and 100k or 1e5 for a whole number.
    """
    if isinstance(value, str):
        return [value] if is_list(hint) else plain_value(value, hint)
    if isinstance(value, float):  # YAML reads 1e5 as one
        is_whole = int in (hint, *typing.get_args(hint)) and value.is_integer()
        return int(value) if is_whole else value
    if not isinstance(value, dict):
        if value is not None and dataclasses.is_dataclass(hint):
            raise ConfigError(f"{key}={value}: is a group of settings; give it keys and values")
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
