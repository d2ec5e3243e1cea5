"""Runs the commands that need little more than one function of another package.

Each imports what it needs when it runs: preprocessing and scoring need no torch.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
from pathlib import Path

from nmt.cli.commands import command_line
from nmt.config import (
    AverageConfig,
    BestMetric,
    ExportConfig,
    ExportFormat,
    ImportConfig,
    PreprocessConfig,
    ServeConfig,
    resolve,
)
from nmt.errors import ConfigError, ModelError, NmtError

log = logging.getLogger(__name__)


def preprocess(config: PreprocessConfig) -> None:
    """Make the data folder, print its report and log what comes next."""
    from nmt.cli.data_folder import train_command
    from nmt.preprocess.prepare import prepare
    from nmt.preprocess.report import report_table

    print(report_table(prepare(config)))
    if not config.report_only:
        log.info("wrote %s; next: %s", config.data_dir, train_command(config))


def average(config: AverageConfig) -> None:
    """Choose the checkpoints, average them, and log which they were."""
    from nmt.average import average

    run_dir = resolve(config.run_dir)
    folders = [resolve(folder) for folder in config.checkpoints] or _checkpoints(config, run_dir)
    output = config.output or _average_place(config)
    if (resolve(output) / "trainer.pt").exists():
        raise ModelError(f"output={output} is a checkpoint of a run; choose another folder")
    average(folders, resolve(output))
    log.info("averaged %s", ", ".join(folder.name for folder in folders))
    is_usual = not config.checkpoints and config.output is None
    model_dir = config.run_dir if is_usual else output
    log.info("wrote %s; next: %s", output, command_line("translate", model_dir=model_dir))


def _average_place(config: AverageConfig) -> str:
    """Return where the average goes that nobody named a place for: to the run that it is of."""
    if not config.checkpoints:
        return f"{config.run_dir}/average"
    parents = {resolve(folder).parent for folder in config.checkpoints}
    place = os.path.relpath(min(parents).parent / "average")
    is_one_run = [parent.name for parent in parents] == ["checkpoints"]
    if not is_one_run or resolve(place).exists():
        why = f"{place} is there already" if is_one_run else "are not of one run"
        given = ",".join(config.checkpoints)
        raise ConfigError(f"checkpoints={given}: {why}; give output=FOLDER")
    return place


def _checkpoints(config: AverageConfig, run_dir: Path) -> list[Path]:
    """Choose among the checkpoints of a run, by default as its config does."""
    from nmt.average import best_checkpoints, last_checkpoints
    from nmt.checkpoint import list_checkpoints
    from nmt.runtime.manifest import read_config

    path = run_dir / "config.yaml"
    if not path.is_file():
        what = "is no run folder (no config.yaml)" if run_dir.is_dir() else "does not exist"
        raise ModelError(f"{run_dir} {what}; give run_dir=FOLDER or checkpoints=[FOLDER,...]")
    try:
        trained = read_config(run_dir)
        metric, usual = BestMetric[trained["best_metric"]], int(trained["average_last"])
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path} is no config of a run; give checkpoints=[FOLDER,...]") from None
    if config.best is not None:
        return best_checkpoints(run_dir, config.best, metric)
    available = len(list_checkpoints(run_dir))
    return last_checkpoints(run_dir, config.last or min(usual, max(available, 1)))


def export(config: ExportConfig) -> None:
    """Convert the model; log where it is and how to use it."""
    from nmt.checkpoint import find_model, other_models
    from nmt.export.export_model import export_model

    folder = find_model(resolve(config.model_dir))
    kind = f"{config.format.value}-{config.quantization.value}"
    named = config.model_dir.rstrip("/")
    if Path(named).name in ("", ".."):  # a dot, beside which no name can be made
        named = str(resolve(named or "/").resolve())
    output = config.output or f"{named}-{kind}"
    export_model(folder, resolve(output), config)
    size = sum(path.stat().st_size for path in resolve(output).iterdir()) / 1e6
    others = other_models(resolve(config.model_dir), folder)
    log.info(
        "exported %s to %s (%s, %.1f MB)%s", folder, output, kind.replace("-", ", "), size, others
    )
    if config.format is ExportFormat.ctranslate2:
        command = command_line("translate", backend="ctranslate2", model_dir=output)
        log.info("next: %s, or without nmt as its README.md shows", command)
    elif config.format is ExportFormat.argos:
        [package] = resolve(output).glob("*.argosmodel")
        log.info("next: %s", shlex.join(["argospm", "install", str(package)]))
    else:
        log.info("its README.md shows how to translate with transformers")


def import_model(config: ImportConfig) -> None:
    """Import the model; log what it is and how to use it."""
    from nmt.checkpoint import load_info
    from nmt.importing.import_model import import_model

    output = import_model(config)
    info = load_info(output)
    model, sizes = info.model, f"{info.src_vocab_size or info.vocab_size} and {info.vocab_size}"
    depths = f"{model.num_encoder_layers}+{model.num_decoder_layers}"
    log.info(
        "imported %s: %s layers of %d dimensions, %s-norm, vocabularies of %s pieces",
        *(config.input, depths, model.d_model, model.norm.value, sizes),
    )
    log.info("next: nmt-translate model_dir=%s < FILE", config.output)


def serve(config: ServeConfig) -> None:
    """Serve translations over HTTP until a signal ends it."""
    for name in ("starlette", "uvicorn", "python_multipart", "babel"):
        if importlib.util.find_spec(name) is None:
            raise NmtError(f"nmt-serve needs {name}; install it with: pip install nmt[serve]")
    from nmt.serve.app import serve

    serve(config)
