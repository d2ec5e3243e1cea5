"""The data folder of a run: how nmt-train prepares it, and the command that trains on it."""

from __future__ import annotations

import itertools
import logging

from nmt.cli.commands import command_line
from nmt.config import DEFAULT_DATA_DIR, DEFAULT_RUN_DIR, PreprocessConfig, TrainConfig, resolve
from nmt.errors import DataError
from nmt.preprocess.prepare import prepare

log = logging.getLogger(__name__)
Preparation = tuple[PreprocessConfig, list[str]]  # and the arguments of nmt-preprocess for it


def ensure_data(config: TrainConfig, preparation: Preparation | None, *, may_write: bool) -> None:
    """Prepare the data folder of a run as `preparation` says, unless it exists.

    A folder that exists is used as it is. Raises a `DataError` that names the command to run when
    the folder is missing and cannot be prepared, or must not be written.
    """
    folder = resolve(config.data_dir)
    if (folder / "meta.json").exists():
        return
    problem = "is no data folder" if folder.is_dir() else "does not exist"
    if preparation is None:
        arguments = [f"data.{s}.{side}=FILE" for s in ("train", "valid") for side in ("src", "tgt")]
        arguments.append(f"data_dir={config.data_dir}")
        if config.data_dir == DEFAULT_DATA_DIR:
            arguments = []  # text that comes with nmt
        hint = command_line("preprocess", arguments)
        raise DataError(f"{folder} {problem}; make it with: {hint}")
    data, arguments = preparation
    hint = command_line("preprocess", arguments)
    if not may_write:
        raise DataError(f"{folder} {problem}; make it with: {hint}")
    log.info("%s does not exist; preparing it, as this does: %s", config.data_dir, hint)
    prepare(data)
    log.info("wrote %s; %s/report.html describes it", config.data_dir, config.data_dir)


def train_command(config: PreprocessConfig) -> str:
    """Return the command that trains on the data folder in a run folder that does not exist yet."""
    if config.experiment is not None:
        return command_line("train", experiment=config.experiment, data_dir=config.data_dir)
    settings = {}
    run_dir = DEFAULT_RUN_DIR
    if config.data_dir != DEFAULT_DATA_DIR:
        settings["data_dir"] = config.data_dir
        run_dir = f"runs/{resolve(config.data_dir).name}"
    names = itertools.chain([run_dir], (f"{run_dir}-{number}" for number in itertools.count(2)))
    unused = next(name for name in names if not resolve(name).exists())
    if unused != DEFAULT_RUN_DIR:
        settings["run_dir"] = unused
    return command_line("train", ["model=tiny"], **settings)
