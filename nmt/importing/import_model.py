"""Imports a model: finds out which toolkit wrote it, reads it, and writes a model folder.

Everything is read and checked before anything is written, and that appears in one step.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from nmt.checkpoint import ModelInfo, build_model, save_model
from nmt.config import ImportConfig, ImportFormat, resolve
from nmt.errors import ConfigError, ModelError
from nmt.importing import fairseq, huggingface, marian, opennmt
from nmt.importing.settings import Imported

log = logging.getLogger(__name__)
_READERS = {
    ImportFormat.huggingface: huggingface.read,
    ImportFormat.marian: marian.read,
    ImportFormat.opennmt: opennmt.read,
    ImportFormat.fairseq: fairseq.read,
}
# what reading raises where a file holds something of another kind than every writer puts there
_UNEXPECTED: tuple[type[Exception], ...]
_UNEXPECTED = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError)
_UNEXPECTED += (TypeError, ValueError)


def import_model(config: ImportConfig) -> Path:
    """Write the model at `config.input` to `config.output`, and return that folder.

    Raises a `ModelError` for files that are missing, damaged, do not fit each other, hold code or
    describe another model than nmt has, and a `ConfigError` for settings that do not fit them.
    """
    path, output = resolve(str(config.input)), resolve(config.output)
    if not path.exists():
        raise ModelError(f"input={path} does not exist; give a folder or a file with a model")
    path = path.parent if path.name == huggingface.CONFIG else path
    name = config.format if config.format is not ImportFormat.auto else find_format(path)
    try:
        imported = _READERS[name](path, config)
        info = model_info(imported)
        build_model(info, imported.weights, torch.device("cpu"))  # names and shapes fit
    except _UNEXPECTED as error:
        log.debug("%s", path, exc_info=True)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise ModelError(f"{path} is no model of {name.value} ({reason}); copy it again") from error
    save_model(output, imported.weights, info, imported.tokenizers)
    return output


def find_format(path: Path) -> ImportFormat:
    """Return the toolkit that wrote the files; a `ConfigError` for what none did."""
    if path.is_dir() and (path / huggingface.CONFIG).is_file():
        return ImportFormat.huggingface
    files = [path] if path.is_file() else sorted(path.iterdir())
    if any(file.suffix in (".npz", ".bin") for file in files):
        return ImportFormat.marian
    if any(file.suffix == ".pt" for file in files):
        folder = path if path.is_dir() else path.parent
        is_fairseq = any(folder.glob("dict.*.txt")) or (folder / "dict.txt").is_file()
        return ImportFormat.fairseq if is_fairseq else ImportFormat.opennmt
    names = ", ".join(choice.value for choice in _READERS)
    raise ConfigError(f"input={path} holds no model that is known; set format to one of {names}")


def model_info(imported: Imported) -> ModelInfo:
    """Return what is written of an imported model beside its weights."""
    tokenizers = imported.tokenizers
    return ModelInfo(
        model=imported.model,
        search=imported.search,
        vocab_size=tokenizers.tgt.vocab_size,
        src_lang=imported.src_lang or "src",
        tgt_lang=imported.tgt_lang or "tgt",
        tokenizer_sha256=tokenizers.sha256,
        updates=0,
        src_vocab_size=tokenizers.src_vocab_size,
    )
