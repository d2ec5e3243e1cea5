"""Merge the defaults of a command with YAML files, and parse values, with Hydra.

The import of Hydra takes longer than the imports of all modules of `nmt.cli`. Other modules
therefore import this one only where they need it.
"""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from nmt.errors import ConfigError, to_one_line

HYDRA_SETTINGS: dict[str, Any] = {  # Hydra writes no files and does not change the current folder
    "output_subdir": None,
    "run": {"dir": "."},
    "sweep": {"dir": "runs", "subdir": "."},
    "job": {"chdir": False},
}
_IS_HYDRA_1_3 = hydra.__version__.startswith("1.3")
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if _IS_HYDRA_1_3 else {}
# config groups of Hydra that only sweeps and flags of Hydra need; other runs start 20 to 35 ms
# faster without them
_SWEEP_GROUPS_OF_HYDRA = ("env", "help", "hydra_help", "launcher", "output", "sweeper")


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise an error of Hydra as a `ConfigError` whose message is one line."""
    try:
        yield
    except HydraException as error:
        # drop the lines that OmegaConf appends
        reason, _, _ = str(error).partition("\n    full_key:")
        raise ConfigError(to_one_line(reason)) from None


@one_line_errors()
def merge_files(
    name: str, corpus: str, defaults: dict[str, Any], group_choices: list[str]
) -> DictConfig:
    """Merge the defaults of a command with YAML files.

    Args:
        name: the name of the command.
        corpus: the default choice of the group `data`.
        defaults: the values of all settings without YAML files.
        group_choices: the chosen files, such as `model=tiny`.
    """
    with contextlib.ExitStack() as stack:
        if GlobalHydra.instance().is_initialized():  # in a job of a sweep
            # store the defaults, which Hydra composes again for the next job
            store_defaults(name, corpus, defaults)
        else:
            # store no defaults: Hydra would copy them several times, and they are merged below
            store_defaults(name, corpus, {}, unused_groups=_SWEEP_GROUPS_OF_HYDRA)
            stack.enter_context(hydra.initialize_config_module("nmt.configs", **VERSION_BASE))
        from_files = hydra.compose(name, group_choices)
    return typing.cast(DictConfig, OmegaConf.merge(OmegaConf.create(defaults), from_files))


def store_defaults(
    name: str, corpus: str, defaults: dict[str, Any], unused_groups: Iterable[str] = ()
) -> None:
    """Store the config of a command for Hydra: `defaults`, and the default choices of groups.

    `corpus` is the default choice of the group `data`. `unused_groups` are groups of Hydra to leave
    out.
    """
    defaults_list: list[Any] = [
        "_self_",  # our defaults; Hydra merges the following YAML files into them in this order
        {"data": corpus},
        {"model": "base"},
        {"augment": None},
        {"experiment": None},
        {"override hydra/hydra_logging": "none"},  # our loggers write to stderr
        {"override hydra/job_logging": "none"},
    ]
    for group in unused_groups:
        defaults_list.append({f"override hydra/{group}": None})
    store_config(name, {"defaults": defaults_list, "hydra": HYDRA_SETTINGS, **defaults})


def store_config(name: str, node: Any, **options: Any) -> None:
    """Store a config for Hydra, replacing a config of the same name."""
    if not _IS_HYDRA_1_3:  # later versions warn when they replace a config without this option
        options["replace"] = True
    ConfigStore.instance().store(name, node, **options)


@one_line_errors()
def parse_override(text: str) -> Override:
    """Parse `key=value` in Hydra's grammar; raise a `ConfigError` if it is not valid."""
    return OverridesParser.create().parse_override(text)
