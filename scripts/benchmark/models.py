"""One trained model in the formats of all engines, so that all translate with the same weights."""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import PreparedCorpus
from settings import Settings

from nmt.checkpoint import find_model, load_weights
from nmt.config import (
    ExportConfig,
    ExportFormat,
    ModelConfig,
    Optimizer,
    OptimizerConfig,
    Quantization,
    Schedule,
    TrainConfig,
)
from nmt.errors import NmtError
from nmt.export.export_model import export_model
from nmt.runtime.distributed import World
from nmt.training.train import train as train_model

_UPDATE_TOKENS = {"cpu": 1000, "cuda": 16000}
# On a CPU, Muon takes longer than 1,000 tokens for the matrices of larger models.
_MAX_D_MODEL_OF_MUON = {"cpu": 384, "cuda": math.inf}
_EXPORTS = {
    "ctranslate2-float32": (ExportFormat.ctranslate2, Quantization.float32),
    "ctranslate2-int8": (ExportFormat.ctranslate2, Quantization.int8),
    "ctranslate2-float16": (ExportFormat.ctranslate2, Quantization.float16),
    "huggingface": (ExportFormat.huggingface, Quantization.float32),
}


def train(name: str, model: ModelConfig, corpus: PreparedCorpus, settings: Settings) -> Path:
    """Train a model until its translations have sensible lengths, once per cache folder.

    Returns its run folder.
    """
    updates = settings.model_updates
    run_dir = corpus.folder / f"run-{name}-{updates}"
    if not (run_dir / "done").exists():
        settings.say(f"training a model to translate with, {updates} updates:")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        if model.d_model <= _MAX_D_MODEL_OF_MUON[settings.device]:
            optimizer = Optimizer.muon
            peak_learning_rate = 0.003
        else:
            optimizer = Optimizer.adam
            peak_learning_rate = 0.0005
        config = TrainConfig(
            data_dir=str(corpus.data_dir),
            run_dir=str(run_dir),
            model=model,
            optimizer=OptimizerConfig(
                name=optimizer,
                schedule=Schedule.cosine,
                peak_learning_rate=peak_learning_rate,
                warmup_steps=max(1, updates // 6),
            ),
            max_updates=updates,
            validate_every_updates=updates,
            checkpoint_every_updates=updates,
            tokens_per_update=_UPDATE_TOKENS[settings.device],
            max_tokens=_UPDATE_TOKENS[settings.device],
            valid_bleu=False,
        )
        train_model(config, "{}\n", World(), torch.device(settings.device))
        (run_dir / "done").touch()
    return run_dir


@dataclass(frozen=True)
class Exports:
    """One model in several formats."""

    folders: dict[str, str]  # by format
    failures: dict[str, str]  # why a format could not be written


def export_all(run_dir: Path, output: Path) -> Exports:
    """Write the model of a run to a folder for each format below `output`."""
    model_dir = find_model(run_dir)
    folders = {"native": str(model_dir)}
    failures = {}
    for name, (export_format, quantization) in _EXPORTS.items():
        config = ExportConfig(format=export_format, quantization=quantization)
        try:
            export_model(model_dir, output / name, config)
        except NmtError as error:
            failures[name] = str(error)
        else:
            folders[name] = str(output / name)
    fairseq_dir = output / "fairseq"
    fairseq_dir.mkdir(parents=True, exist_ok=True)
    torch.save(load_weights(model_dir), fairseq_dir / "weights.pt")
    shutil.copy(model_dir / "tokenizer.model", fairseq_dir)
    folders["fairseq"] = str(fairseq_dir)
    return Exports(folders, failures)
