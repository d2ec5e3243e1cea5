"""Let Hydra run a sweep, or complete words in the shell.

Hydra parses the arguments of a sweep to list the values of each setting. A sweep of nmt-train ends
with a table of its runs.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from nmt.cli.arguments import GROUPS, Argument, CommandLine, parse_argument
from nmt.cli.commands import Command
from nmt.cli.yaml_files import IS_HYDRA_1_3
from nmt.config import resolve_path
from nmt.errors import ConfigError

log = logging.getLogger(__name__)
HYDRA_SETTINGS: dict[str, Any] = {
    "output_subdir": None,
    "run": {"dir": "."},
    "sweep": {"dir": "runs", "subdir": "."},
    "job": {"chdir": False},
}
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if IS_HYDRA_1_3 else {}
_MAX_RUN_NAME = 200  # characters in the name of a run of a sweep


def run_hydra(
    command: Command,
    line: CommandLine,
    arguments: list[Argument],
    compose: Callable[[list[Argument], str], Any],
    run: Callable[[Any], Any],
) -> None:
    """Let Hydra run a command, and print the table of the runs of a sweep.

    `compose` composes the config from the arguments of a run and its subfolder in `run_dir`, and
    `run` runs the command with this config. Hydra calls both for each run of a sweep, once for
    other flags, and not at all for shell completion. Raises the first error of a run.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises exceptions instead of printing them
    start_seconds = time.time()
    with tempfile.TemporaryDirectory(prefix="nmt-sweep-") as folder:
        jobs = _Jobs(command, arguments, compose, run, names_folder=Path(folder))
        flags = ["--multirun", *line.hydra_words] if line.is_sweep else line.hydra_words
        sys.argv = [f"nmt-{command.name}", *flags, *map(_to_override, jobs.swept)]
        main = hydra.main(config_path="pkg://nmt.configs", config_name=command.name, **VERSION_BASE)
        try:
            main(jobs.run_job)()
        except Exception:  # after a failed run, a sweeper lacks its score and may fail too
            if not jobs.errors:
                raise
        _report_sweep(jobs.read_run_dirs(), start_seconds)
    if jobs.errors:
        raise jobs.errors[0]


class _Jobs:
    """The jobs that Hydra starts: one for each run of a sweep.

    A launcher may start them as processes, so they write the names of their run folders to files
    in `names_folder`. For the other arguments see `run_hydra`.
    """

    def __init__(
        self,
        command: Command,
        arguments: list[Argument],
        compose: Callable[[list[Argument], str], Any],
        run: Callable[[Any], Any],
        *,
        names_folder: Path,
    ) -> None:
        self.errors: list[Exception] = []
        self.swept: list[Argument] = []  # which Hydra parses and passes to the jobs
        self._fixed: list[Argument] = []
        for argument in arguments:
            if argument.key in GROUPS or _is_sweep(argument):
                self.swept.append(argument)
            else:
                self._fixed.append(argument)
        self._command = command
        self._arguments = arguments
        self._compose = compose
        self._run = run
        self._names_folder = names_folder
        self._main_pid = os.getpid()

    def run_job(self, _: DictConfig) -> Any:
        """Run the command with the arguments of one job, unless a job before it failed."""
        if self.errors:
            return None
        try:
            return self._run(self._compose_job())
        except Exception as error:
            if os.getpid() != self._main_pid:  # Hydra passes the error on to the main process
                raise
            self.errors.append(error)  # `run_hydra` raises it, so that Hydra does not report it
            return None

    def _compose_job(self) -> Any:
        """Compose the config of the current job, and write the name of its run folder."""
        overrides = HydraConfig.get().overrides.task
        values = [_parse_override(text, self._command) for text in overrides]
        if HydraConfig.get().mode is not RunMode.MULTIRUN or self._command.name != "train":
            return self._compose([*self._fixed, *values], "")
        composed = self._compose([*self._fixed, *values], _name_run(values, self._arguments))
        if not composed.config.dry_run:
            name_file = self._names_folder / f"{HydraConfig.get().job.num:09d}"
            name_file.write_text(composed.config.run_dir)
        return composed

    def read_run_dirs(self) -> list[str]:
        """Return the run folders of the jobs, in the order of the jobs."""
        return [path.read_text() for path in sorted(self._names_folder.iterdir())]


def _report_sweep(run_dirs: list[str], start_seconds: float) -> None:
    """Print the table of the runs that have metrics, and log the file with the best values.

    Sweepers such as Optuna write this file. `start_seconds` is the time when the sweep started.
    """
    from nmt.visualize.run_table import run_table, summarize_run  # only a sweep needs it

    summaries = []
    for run_dir in map(resolve_path, run_dirs):
        if (run_dir / "metrics.jsonl").exists():
            summaries.append(summarize_run(run_dir))
    if summaries:
        print(run_table(summaries))
    results = Path(HYDRA_SETTINGS["sweep"]["dir"], "optimization_results.yaml")
    if results.exists() and results.stat().st_mtime >= start_seconds:
        log.info("the best values that the sweeper found are in %s", results)


def _to_override(argument: Argument) -> str:
    """Write a swept setting, or the choice of a config group, in Hydra's grammar."""
    prefix = "" if argument.key in GROUPS else "++"  # ++ also adds new keys, such as mix.NAME
    return f"{prefix}{argument.key}={argument.value}"


def _parse_override(text: str, command: Command) -> Argument:
    """Parse one override of one run of a sweep, which is in Hydra's grammar."""
    override = OverridesParser.create().parse_override(text)
    value = override.value()
    value_text = value if isinstance(value, str) else override.get_value_string()
    return parse_argument(f"{override.get_key_element()}={value_text}", command)


def _is_sweep(argument: Argument) -> bool:
    """Return whether a setting has several values in Hydra's grammar: 1,2 or range(1,9).

    The name of an existing file is one value, commas included.
    """
    if os.path.exists(argument.value):
        return False
    try:
        override = OverridesParser.create().parse_override(f"key={argument.value}")
    except HydraException:  # the text does not follow Hydra's grammar
        return False
    return bool(override.is_sweep_override())


def _name_run(values: Iterable[Argument], arguments: Iterable[Argument]) -> str:
    """Return the folder name of one run of a sweep: the swept keys but run_dir, with values.

    `values` are the arguments of this run, and `arguments` come from the command line.
    """
    swept = {argument.key: argument.value for argument in values}
    for argument in arguments:
        if argument.key == "run_dir" or not _is_sweep(argument):
            swept.pop(argument.key, None)
    settings = ",".join(f"{key}={value}" for key, value in sorted(swept.items()))
    name = re.sub(r"[^\w.=,+-]", "_", settings.replace("'", ""))
    if len(name) > _MAX_RUN_NAME:
        raise ConfigError(f"a run of the sweep would be named {name}; sweep over fewer settings")
    return name
