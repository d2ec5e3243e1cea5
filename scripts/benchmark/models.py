"""One trained model in the formats of all engines, so that all translate with the same weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torch
from corpus import PreparedCorpus
from settings import Settings

from nmt.checkpoint import find_model, load_weights
from nmt.config import ExportConfig, ModelConfig
from nmt.errors import NmtError
from nmt.export.folder import export
from nmt.options import ExportFormat, Quantization

# enough for translations of sensible length
_RECIPE = ["optimizer.warmup_steps=400", "optimizer.learning_rate_scale=0.6", "keep_last=1"]
_RECIPE += ["average_last=1", "valid_bleu=false"]
_UPDATE_TOKENS = {"cpu": 1000, "cuda": 16000}
_SIZES = ("num_encoder_layers", "num_decoder_layers", "d_model", "d_ff", "num_heads")
_EXPORTS = {
    "ctranslate2-float32": (ExportFormat.ctranslate2, Quantization.float32),
    "ctranslate2-int8": (ExportFormat.ctranslate2, Quantization.int8),
    "ctranslate2-float16": (ExportFormat.ctranslate2, Quantization.float16),
    "huggingface": (ExportFormat.huggingface, Quantization.float32),
}


def train(
    name: str, model: ModelConfig, corpus: PreparedCorpus, settings: Settings, updates: int
) -> Path:
    """Train a model for a few minutes, once for a cache; return its folder."""
    run_dir = corpus.folder / f"run-{name}-{updates}"
    if not (run_dir / "done").exists():
        settings.say(f"training a model to translate with, {updates} updates:")
        sizes = [f"model.{key}={getattr(model, key)}" for key in _SIZES]
        paces = [f"{what}_every_updates={updates}" for what in ("validate", "checkpoint")]
        places = [f"data_dir={corpus.data_dir}", f"run_dir={run_dir}", f"max_updates={updates}"]
        tokens = _UPDATE_TOKENS[settings.device]
        paces += [f"tokens_per_update={tokens}", f"max_tokens={tokens}", "devices=1"]
        command = [sys.executable, "-m", "nmt.cli.main", "train", *places, *sizes, *paces]
        command.append(f"device={settings.device}")
        if subprocess.run([*command, *_RECIPE], check=False).returncode:
            raise NmtError(f"the model could not be trained; see above, and {run_dir}")
        (run_dir / "done").touch()
    return run_dir


def convert(folder: Path, output: Path) -> dict[str, str]:
    """Write the model folder in every format to `output`; return the folders by format."""
    model_dir = find_model(folder)
    folders = {"native": model_dir}
    for name, (kind, quantization) in _EXPORTS.items():
        folders[name] = output / name
        export(model_dir, folders[name], ExportConfig(format=kind, quantization=quantization))
    folders["fairseq"] = output / "fairseq"
    folders["fairseq"].mkdir(parents=True, exist_ok=True)
    torch.save(load_weights(model_dir), folders["fairseq"] / "weights.pt")
    shutil.copy(model_dir / "tokenizer.model", folders["fairseq"])
    return {name: str(path) for name, path in folders.items()}
