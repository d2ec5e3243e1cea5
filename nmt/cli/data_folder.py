"""Prepare the data folder of a run; compose the `nmt-train` command for a data folder."""

from __future__ import annotations

import logging
from pathlib import Path

from nmt.cli.commands import COMMANDS, shell_command
from nmt.cli.compose import DataPreparation, compose_command
from nmt.config import (
    DEFAULT_DATA_DIR,
    DEFAULT_RUN_DIR,
    Corpus,
    PreprocessConfig,
    TrainConfig,
    resolve_path,
)
from nmt.data.binary import read_meta
from nmt.data.languages import DEFAULT_LANGUAGES, describe_languages
from nmt.errors import DataError
from nmt.runtime.files import describe_folder_problem

log = logging.getLogger(__name__)
_TEXT_ARGUMENTS = (
    "data.train.src=FILE",
    "data.train.tgt=FILE",
    "data.valid.src=FILE",
    "data.valid.tgt=FILE",
)


def ensure_data(config: TrainConfig, preparation: DataPreparation, *, may_write: bool) -> None:
    """Prepare the data folder of a run if the folder is missing.

    Raises a `DataError` that says what to do, unless `may_write` is set and the settings name
    training text. An existing folder must have the languages of the command line.
    """
    folder = resolve_path(config.data_dir)
    if (folder / "meta.json").exists():
        _check_languages(folder, preparation)
        return
    # imported only here, since most runs have a data folder, and need no module of nmt.preprocess
    from nmt.preprocess.prepare import prepare
    from nmt.preprocess.sources import has_split

    problem = describe_folder_problem(folder, "is not a data folder")
    if folder.exists() and not folder.is_dir():
        raise DataError(
            f"{folder} {problem}; give data_dir=FOLDER, a data folder of nmt-preprocess"
        )
    has_text = has_split(preparation.config.data, "train")
    if has_text:
        command = shell_command("preprocess", preparation.arguments)
    elif config.data_dir == DEFAULT_DATA_DIR:
        command = shell_command("preprocess")  # prepares the included corpus
    elif (resolve_path(config.run_dir) / "config.yaml").exists():
        # perhaps data_dir is relative to the folder in which the run was first started
        raise DataError(
            f"{folder} {problem}; give data_dir=FOLDER, the data of run_dir={config.run_dir}"
        )
    else:
        command = shell_command("preprocess", [*_TEXT_ARGUMENTS, f"data_dir={config.data_dir}"])
    can_prepare = has_text and may_write
    if not can_prepare:
        raise DataError(f"{folder} {problem}; make it with: {command}")
    log.info("%s does not exist; preparing it, the same as: %s", config.data_dir, command)
    prepare(preparation.config)
    log.info("wrote %s; %s/report.html describes it", config.data_dir, config.data_dir)


def _check_languages(folder: Path, preparation: DataPreparation) -> None:
    """Raise a `DataError` if the command line names other languages than a data folder has."""
    typed_keys = {argument.partition("=")[0] for argument in preparation.arguments}
    language_keys = [key for key in ("src_lang", "tgt_lang") if f"data.{key}" in typed_keys]
    if not language_keys:
        return
    languages = describe_languages(preparation.config.data)
    meta = read_meta(folder)
    for key in language_keys:
        if getattr(meta, key) not in (languages[key], *DEFAULT_LANGUAGES):
            raise DataError(
                f"{folder} has pairs from {meta.src_lang} to {meta.tgt_lang}; for "
                f"data.{key}={languages[key]}, give another data_dir and run_dir"
            )


def train_command(config: PreprocessConfig) -> str:
    """Return the `nmt-train` command for the data folder, with an unused run folder."""
    settings: dict[str, str] = {}
    model_folder = config.tokenizer.model
    if model_folder is not None and not resolve_path(model_folder).is_dir():
        model_folder = None  # the setting names the file of a tokenizer
    if config.experiment is not None:
        settings["experiment"] = config.experiment
        settings["data_dir"] = config.data_dir
        train_config = _compose_train_config(config)
        if train_config.init_from is not None and model_folder is not None:
            # fine-tune the model whose tokenizer encoded the data
            settings["init_from"] = model_folder
        default_run_dir = train_config.run_dir
        run_dir = default_run_dir
    else:
        if config.tokenizer.extend is not None and model_folder is not None:
            settings["init_from"] = model_folder  # the model whose tokenizer was extended
        else:
            # the included corpora are so small that the smallest model learns them
            is_included = config.data.corpus is not Corpus.files
            settings["model"] = "tiny" if is_included else "small"
        default_run_dir = DEFAULT_RUN_DIR
        run_dir = default_run_dir
        if config.data_dir != DEFAULT_DATA_DIR:
            settings["data_dir"] = config.data_dir
            run_dir = f"runs/{resolve_path(config.data_dir).name}"
    run_dir = _find_unused_name(run_dir)
    if run_dir != default_run_dir:
        settings["run_dir"] = run_dir
    return shell_command("train", **settings)


def _find_unused_name(folder: str) -> str:
    """Return `folder` if it does not exist, else `folder-2`, `folder-3` or the next unused name."""
    name = folder
    number = 2
    while resolve_path(name).exists():
        name = f"{folder}-{number}"
        number += 1
    return name


def _compose_train_config(config: PreprocessConfig) -> TrainConfig:
    """Return the config of nmt-train for the experiment of a data folder."""
    words = [f"experiment={config.experiment}", f"data_dir={config.data_dir}"]
    # `compose_command` calls the function only for a sweep, which these words do not request
    composed = compose_command(COMMANDS["train"], words, lambda _: None)
    assert composed is not None
    train_config: TrainConfig = composed.config
    return train_config
