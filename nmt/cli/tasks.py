"""Run `nmt-preprocess`, `nmt-average`, `nmt-export`, `nmt-import` and `nmt-serve`.

Each function imports the packages of its command, so that preprocessing does not load torch.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import sys
from pathlib import Path

from nmt.cli.commands import shell_command
from nmt.config import (
    AverageConfig,
    BestMetric,
    ExportConfig,
    ExportFormat,
    ImportConfig,
    PreprocessConfig,
    ServeConfig,
    resolve_path,
)
from nmt.errors import ConfigError, ModelError, NmtError

log = logging.getLogger(__name__)

# Address space that a server needs before it loads models: 1.1 GB on two cores, and more on more
# cores.
_MIN_SERVER_BYTES = 1536 << 20


def preprocess(config: PreprocessConfig) -> None:
    """Write the data folder, print its report and log the next command."""
    from nmt.cli.data_folder import train_command
    from nmt.preprocess.prepare import prepare
    from nmt.preprocess.report import report_table

    print(report_table(prepare(config)))
    log.info("wrote %s; next: %s", config.data_dir, train_command(config))


def average(config: AverageConfig) -> None:
    """Average the weights of checkpoints; log the names of the checkpoints and the next command."""
    from nmt.average import average as average_weights

    if config.checkpoints:
        folders = [resolve_path(folder) for folder in config.checkpoints]
    else:
        folders = _choose_checkpoints(config)
    output = config.output or _default_average_folder(config)
    if (resolve_path(output) / "trainer.pt").exists():  # only training checkpoints have this file
        raise ModelError(f"output={output} is a checkpoint of a run; choose another folder")
    average_weights(folders, resolve_path(output))
    log.info("averaged %s", ", ".join(folder.name for folder in folders))
    model_dir = output
    if not config.checkpoints and config.output is None:
        model_dir = config.run_dir  # nmt-translate finds RUN/average in a run folder
    log.info("wrote %s; next: %s", output, shell_command("translate", model_dir=model_dir))


def _default_average_folder(config: AverageConfig) -> str:
    """Return the default output folder, which is `average` in the folder of the run.

    The run is the one of `checkpoints` or, without these, `run_dir`. Raises `ConfigError` if the
    checkpoints are not all of one run, or if their run has an average already.
    """
    if not config.checkpoints:
        return f"{config.run_dir}/average"
    setting_and_value = f"checkpoints={','.join(config.checkpoints)}"
    parent = resolve_path(config.checkpoints[0]).parent
    have_one_parent = all(resolve_path(folder).parent == parent for folder in config.checkpoints)
    if not have_one_parent or parent.name != "checkpoints":
        raise ConfigError(
            f"{setting_and_value}: the folders are not of one run; give output=FOLDER"
        )
    folder = os.path.relpath(parent.parent / "average")
    if resolve_path(folder).exists():
        raise ConfigError(f"{setting_and_value}: {folder} exists already; give output=FOLDER")
    return folder


def _choose_checkpoints(config: AverageConfig) -> list[Path]:
    """Return the checkpoints of a run to average.

    With `best=N`, returns the N checkpoints with the best validation scores. Otherwise, returns the
    N newest, where N is `last` or, by default, the setting `average_last` of the run.
    """
    from nmt.average import find_best_checkpoints, find_newest_checkpoints
    from nmt.checkpoint import list_checkpoints
    from nmt.runtime.files import describe_folder_problem
    from nmt.runtime.manifest import read_run_config

    run_dir = resolve_path(config.run_dir)
    path = run_dir / "config.yaml"
    if not path.exists():
        problem = describe_folder_problem(run_dir, otherwise="is not a run folder (no config.yaml)")
        raise ModelError(f"{run_dir} {problem}; give run_dir=FOLDER or checkpoints=[FOLDER,...]")
    try:
        settings = read_run_config(run_dir)
        metric = BestMetric[settings["best_metric"]]
        average_last = int(settings["average_last"])
    except (KeyError, TypeError, ValueError):
        raise ModelError(
            f"{path} is not a config of a run; give checkpoints=[FOLDER,...]"
        ) from None
    if config.best is not None:
        return find_best_checkpoints(run_dir, config.best, metric)
    if config.last is not None:
        return find_newest_checkpoints(run_dir, config.last)
    num_checkpoints = len(list_checkpoints(run_dir))
    if 0 < num_checkpoints < average_last:
        log.info("the run has %d of average_last=%d checkpoints", num_checkpoints, average_last)
    count = min(average_last, num_checkpoints)
    # at least 1, so that `find_newest_checkpoints` raises an error for a run without checkpoints
    return find_newest_checkpoints(run_dir, max(1, count))


def export(config: ExportConfig) -> None:
    """Export the model; log the folder and how to use it."""
    from nmt.checkpoint import describe_other_models, find_model
    from nmt.export.export_model import export_model

    folder = find_model(resolve_path(config.model_dir))
    output = config.output or _default_export_folder(config)
    export_model(folder, resolve_path(output), config)
    num_bytes = sum(path.stat().st_size for path in resolve_path(output).rglob("*"))
    # such as "; not used: checkpoints/best (800 updates)"
    note_on_other_models = describe_other_models(resolve_path(config.model_dir), folder)
    log.info(
        "exported %s to %s (%s, %s, %.1f MB)%s",
        folder,
        output,
        config.format.value,
        config.quantization.value,
        num_bytes / 1e6,
        note_on_other_models,
    )
    if config.format is ExportFormat.ctranslate2:
        command = shell_command("translate", backend="ctranslate2", model_dir=output)
        log.info("next: %s; its README.md shows how to translate without nmt", command)
    elif config.format is ExportFormat.argos:
        [package] = resolve_path(output).glob("*.argosmodel")
        log.info("next: %s", shlex.join(["argospm", "install", str(package)]))
    elif config.format is ExportFormat.web:
        command = shlex.join(["python", "-m", "http.server", "--directory", output])
        log.info("next: %s", command)
    else:
        libraries = {
            ExportFormat.huggingface: "transformers",
            ExportFormat.onnx: "onnxruntime",
            ExportFormat.marian: "Marian",
            ExportFormat.bergamot: "Bergamot",
        }
        log.info("its README.md shows how to translate with %s", libraries[config.format])


def _default_export_folder(config: ExportConfig) -> str:
    """Return the default output folder, next to the model: MODEL_DIR-FORMAT-QUANTIZATION."""
    suffix = f"{config.format.value}-{config.quantization.value}"
    return os.path.relpath(f"{resolve_path(config.model_dir)}-{suffix}")


def import_model(config: ImportConfig) -> None:
    """Import the model; log its size and how to use it."""
    from nmt.checkpoint import load_info
    from nmt.importing.import_model import import_model as write_imported_model

    output = write_imported_model(config)
    info = load_info(output)
    src_vocab_size = info.src_vocab_size
    if src_vocab_size is None:  # source and target share a vocabulary
        src_vocab_size = info.vocab_size
    log.info(
        "imported %s: %d+%d layers of %d dimensions, %s-norm, vocabularies of %d and %d pieces",
        config.input,
        info.model.num_encoder_layers,
        info.model.num_decoder_layers,
        info.model.d_model,
        info.model.norm.value,
        src_vocab_size,
        info.vocab_size,
    )
    log.info("next: %s", shell_command("translate", model_dir=config.output))


def serve(config: ServeConfig) -> None:
    """Serve translations over HTTP until a signal ends the server."""
    for name in (
        "starlette",
        "uvicorn",
        "httptools",
        "python_multipart",
        "babel",
        "prometheus_client",
    ):
        if importlib.util.find_spec(name) is None:
            raise NmtError(f"nmt-serve needs {name}; install it with: pip install nmt[serve]")
    _check_address_space()  # before the import, which loads torch
    from nmt.serve import server

    try:
        server.serve(config)
    except MemoryError:
        raise NmtError(
            "memory ran out; raise its limit, or serve fewer or smaller models"
        ) from None


def _check_address_space() -> None:
    """Raise an `NmtError` if `ulimit -v` leaves too little memory for torch and its libraries.

    Otherwise, their imports would fail with tracebacks.
    """
    if sys.platform == "win32":
        return
    import resource  # not on Windows

    max_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if max_bytes != resource.RLIM_INFINITY and max_bytes < _MIN_SERVER_BYTES:
        raise NmtError(
            f"the process may use {max_bytes >> 20} MiB of address space (ulimit -v); nmt-serve "
            f"needs at least {_MIN_SERVER_BYTES >> 20} MiB plus twice the size of its models"
        )
