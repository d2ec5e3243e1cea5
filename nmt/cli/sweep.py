"""Run a sweep, or complete words in the shell, with Hydra.

A sweep runs a command once for each combination of values: twice for `max_tokens=2048,4096`. A
sweep of nmt-train ends with a table of its runs.
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
from hydra.types import RunMode
from omegaconf import DictConfig

from nmt.cli.arguments import GROUPS, Argument, CommandLine, parse_argument
from nmt.cli.commands import Command
from nmt.cli.hydra_compose import HYDRA_SETTINGS, VERSION_BASE, one_line_errors, parse_override
from nmt.config import resolve_path
from nmt.errors import ConfigError

log = logging.getLogger(__name__)

_MAX_RUN_NAME_LENGTH = 200  # number of characters


@one_line_errors()
def run_hydra(
    command: Command,
    command_line: CommandLine,
    arguments: list[Argument],
    compose: Callable[[list[Argument], str], Any],
    run: Callable[[Any], Any],
) -> None:
    """Let Hydra run a command, and print the table of the runs of a sweep.

    Hydra starts a job for each run of a sweep. It starts one job without a sweep, and none for
    shell completion. The first error of a job ends the sweep and is raised.

    Args:
        command: the command.
        command_line: the words after the name of the command. Its `hydra_words` are flags and
            settings of Hydra itself, such as `hydra/sweeper=optuna`.
        arguments: the settings of the command line. Config groups have names of YAML files as
            values, not paths.
        compose: makes a `ComposedCommand` from the arguments of a job and the name of its folder in
            `run_dir`. The name is empty unless each job has a folder.
        run: runs a `ComposedCommand` and returns its score.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra raise exceptions instead of printing them
    start_seconds = time.time()
    with tempfile.TemporaryDirectory(prefix="nmt-sweep-") as folder:
        jobs = _Jobs(command, arguments, compose, run, names_folder=Path(folder))
        overrides = [_to_override(argument) for argument in jobs.hydra_arguments]
        sys.argv = [f"nmt-{command.name}", *command_line.hydra_words, *overrides]
        if command_line.is_sweep:
            sys.argv.append("--multirun")
        decorate = hydra.main(
            config_path="pkg://nmt.configs", config_name=command.name, **VERSION_BASE
        )
        run_jobs = decorate(jobs.run_job)
        try:
            run_jobs()  # reads sys.argv
        except Exception:
            # A sweeper may fail because a job failed and returned no score. In this case, the error
            # of the job is raised below.
            if not jobs.errors:
                raise
        _report_sweep(jobs.read_run_dirs(), start_seconds)
    if jobs.errors:
        raise jobs.errors[0]


class _Jobs:
    """The jobs that Hydra starts, one for each run of a sweep.

    A launcher of Hydra may start jobs in other processes. Each job therefore writes the name of its
    run folder to a file in `names_folder`. See `run_hydra` for the other parameters.
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
        self.hydra_arguments: list[Argument] = []  # Hydra chooses one value of each for a job
        self._shared_arguments: list[Argument] = []  # equal in all jobs
        for argument in arguments:
            is_config_group = argument.key in GROUPS  # such as model=base
            if is_config_group or _is_sweep(argument):
                self.hydra_arguments.append(argument)
            else:
                self._shared_arguments.append(argument)
        self._command = command
        self._arguments = arguments
        self._compose = compose
        self._run = run
        self._names_folder = names_folder
        self._main_pid = os.getpid()

    def run_job(self, _: DictConfig) -> Any:
        """Run the command for the current job, unless an earlier job failed; return its score."""
        if self.errors:
            return None
        try:
            return self._run(self._compose_job())
        # any error: Hydra would print a report, so `run_hydra` raises the error after Hydra ended
        except Exception as error:
            if os.getpid() != self._main_pid:
                raise  # Hydra raises the error again in the main process
            self.errors.append(error)
            return None

    def _compose_job(self) -> Any:
        """Return the `ComposedCommand` of the current job, and write the name of its run folder."""
        job_config = HydraConfig.get()
        chosen_arguments = []  # `hydra_arguments` with the values that Hydra chose for this job
        for override in job_config.overrides.task:
            chosen_arguments.append(_parse_override(override, self._command))
        job_arguments = [*self._shared_arguments, *chosen_arguments]
        if job_config.mode is not RunMode.MULTIRUN or self._command.name != "train":
            return self._compose(job_arguments, "")
        run_name = _name_run(chosen_arguments, self._arguments)
        composed = self._compose(job_arguments, run_name)
        if not composed.config.dry_run:
            # leading zeros, so that the names sort in the order of the jobs
            name_file = self._names_folder / f"{job_config.job.num:09d}"
            name_file.write_text(composed.config.run_dir)
        return composed

    def read_run_dirs(self) -> list[str]:
        """Return the run folders of the jobs, in the order of the jobs."""
        return [path.read_text() for path in sorted(self._names_folder.iterdir())]


def _report_sweep(run_dirs: list[str], start_seconds: float) -> None:
    """Print the table of the runs that have metrics, and log the file with the best values.

    Sweepers such as Optuna write the file. A file of an earlier sweep is older than
    `start_seconds`, the time when this sweep started, and is ignored.
    """
    from nmt.visualize.run_table import run_table, summarize_run  # only sweeps need this import

    summaries = []
    for run_dir in run_dirs:
        path = resolve_path(run_dir)
        if (path / "metrics.jsonl").exists():
            summaries.append(summarize_run(path))
    if summaries:
        print(run_table(summaries))
    best_values = Path(HYDRA_SETTINGS["sweep"]["dir"], "optimization_results.yaml")
    if best_values.exists() and best_values.stat().st_mtime >= start_seconds:
        log.info("the best values that the sweeper found are in %s", best_values)


def _to_override(argument: Argument) -> str:
    """Return an argument in Hydra's grammar."""
    override = f"{argument.key}={argument.value}"
    is_config_group = argument.key in GROUPS  # such as model=base
    return override if is_config_group else f"++{override}"  # ++ allows new keys, such as mix.news


def _parse_override(text: str, command: Command) -> Argument:
    """Parse an override that Hydra passes to a job, such as `++max_tokens=2048`."""
    override = parse_override(text)
    value_text = override.value()  # Hydra has removed the quotes around a text
    if not isinstance(value_text, str):  # a number, list or mapping
        value_text = override.get_value_string()
    return parse_argument(f"{override.get_key_element()}={value_text}", command)


def _is_sweep(argument: Argument) -> bool:
    """Return whether an argument has several values in Hydra's grammar, as 1,2 or range(1,9).

    The name of an existing file is one value, even if it contains commas.
    """
    if os.path.exists(argument.value):
        return False
    try:
        override = parse_override(f"key={argument.value}")
    except ConfigError:  # the text does not follow Hydra's grammar
        return False
    return bool(override.is_sweep_override())


def _name_run(chosen_arguments: Iterable[Argument], arguments: Iterable[Argument]) -> str:
    """Return the folder name of one run of a sweep, such as `max_tokens=2048,seed=1`.

    The name contains the settings that differ between runs, except run_dir. `chosen_arguments` have
    the values that Hydra chose for this run. `arguments` are the arguments of the command line.
    """
    unnamed_keys = set()
    for argument in arguments:
        if argument.key == "run_dir" or not _is_sweep(argument):
            unnamed_keys.add(argument.key)
    values = {argument.key: argument.value for argument in chosen_arguments}
    settings = [f"{key}={values[key]}" for key in sorted(values.keys() - unnamed_keys)]
    name = re.sub(r"[^\w.=,+-]", "_", ",".join(settings).replace("'", ""))
    if len(name) > _MAX_RUN_NAME_LENGTH:
        raise ConfigError(f"a run of the sweep would be named {name}; sweep over fewer settings")
    return name
