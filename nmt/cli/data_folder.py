"""What commands know of a data folder: what it was made of, what to type next, and how nmt-train
prepares one that is not there.
"""

from __future__ import annotations

import itertools
import logging

from nmt.cli.commands import command_line
from nmt.config import (
    DEFAULT_DATA_DIR,
    DEFAULT_RUN_DIR,
    PreprocessConfig,
    TrainConfig,
    find_changes,
    resolve,
)
from nmt.data.binary import read_meta
from nmt.errors import DataError, first_of
from nmt.preprocess.prepare import prepare

log = logging.getLogger(__name__)
_SHOWN = 3  # settings in a message
Preparation = tuple[PreprocessConfig, list[str]]  # and the arguments of nmt-preprocess for it


def check_replaced(config: PreprocessConfig) -> None:
    """Raise a `DataError` when other data is in the data folder that nobody named."""
    is_named = config.data_dir != DEFAULT_DATA_DIR or config.report_only
    made_of = {} if is_named else _made_of(config.data_dir)
    if made_of and (changes := find_changes(made_of, config)):
        raise DataError(
            f"{DEFAULT_DATA_DIR} holds other data ({first_of(changes, _SHOWN)}); give "
            f"data_dir=FOLDER, or remove {DEFAULT_DATA_DIR} first"
        )


def train_command(config: PreprocessConfig) -> str:
    """Return the command that trains on the data folder, in a run folder that is free."""
    if config.experiment is not None:
        return command_line("train", experiment=config.experiment, data_dir=config.data_dir)
    is_usual = config.data_dir == DEFAULT_DATA_DIR
    first = DEFAULT_RUN_DIR if is_usual else f"runs/{resolve(config.data_dir).name}"
    folders = (f"{first}-{number}" for number in itertools.count(2))
    run_dir = next(f for f in itertools.chain([first], folders) if not resolve(f).exists())
    places = {} if is_usual else {"data_dir": config.data_dir}
    if run_dir != DEFAULT_RUN_DIR:
        places["run_dir"] = run_dir
    return command_line("train", ["model=tiny"], **places)


def ensure_data(config: TrainConfig, preparation: Preparation | None, *, may_write: bool) -> None:
    """Prepare the data folder of a run when it is not there, as `preparation` says; raise a
    `DataError` for a folder that was made otherwise, or that is not there and must not be written.
    """
    place, made_of = resolve(config.data_dir), _made_of(config.data_dir)
    missing = f"{place} {'is no data folder' if place.is_dir() else 'does not exist'}; make it with"
    if preparation is None:
        if made_of is None:
            files = [f"data.{s}.{side}=FILE" for s in ("train", "valid") for side in ("src", "tgt")]
            own = [*files, f"data_dir={config.data_dir}"]  # the other is of text that is included
            hint = command_line("preprocess", [] if config.data_dir == DEFAULT_DATA_DIR else own)
            raise DataError(f"{missing}: {hint}")
        return
    data, arguments = preparation
    hint = command_line("preprocess", arguments)
    if made_of is None:
        if not may_write:
            raise DataError(f"{missing}: {hint}")
        log.info("%s is not there; preparing it, as this does: %s", config.data_dir, hint)
        prepare(data)
        log.info("wrote %s; %s/report.html describes it", config.data_dir, config.data_dir)
        return
    has_keys = any(not a.startswith(("experiment=", "data_dir=")) for a in arguments)
    if made_of and (has_keys or made_of.get("experiment") != config.experiment):
        changes = find_changes(made_of, data)
        if "experiment" not in made_of and not has_keys:  # own text with a ready-made recipe
            changes = [change for change in changes if change.startswith("data.corpus ")]
        if changes:
            raise DataError(
                f"{config.data_dir} was made of other data ({first_of(changes, _SHOWN)}); choose "
                f"another data_dir, or make it again with: {hint}"
            )


def _made_of(data_dir: str) -> dict[str, str] | None:
    """Return what a data folder remembers, one of an older nmt nothing; None without a folder."""
    place = resolve(data_dir)
    return read_meta(place).made_of if (place / "meta.json").exists() else None
