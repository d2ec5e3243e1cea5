"""Import a model of another toolkit: recognize the toolkit, read the model, write a model folder.

The model folder is written in one step, after the model has been read and checked.
"""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

import torch

from nmt.checkpoint import ModelInfo, build_model, find_model, load_info, save_model
from nmt.config import ImportConfig, ImportFormat, resolve_path
from nmt.errors import ConfigError, ModelError, NmtError, to_one_line
from nmt.importing import fairseq, huggingface, marian, opennmt

log = logging.getLogger(__name__)
_READERS = {
    ImportFormat.huggingface: huggingface.read,
    ImportFormat.marian: marian.read,
    ImportFormat.opennmt: opennmt.read,
    ImportFormat.fairseq: fairseq.read,
}
# errors that readers raise for files with values of unexpected types
_READER_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


def import_model(config: ImportConfig) -> Path:
    """Convert the model at `config.input`. Returns the model folder, `config.output`.

    Raises `ModelError` for files that are missing or damaged, do not belong together, hold code or
    describe an architecture that nmt does not have. Raises `ConfigError` for settings that do not
    fit the model.
    """
    path = resolve_path(str(config.input))
    output = resolve_path(config.output)
    if not path.exists():
        raise ModelError(f"input={path} does not exist; give a folder or a file with a model")
    _check_output(output)
    _check_importable(path, config)
    if path.name == huggingface.CONFIG:  # the user named this file, and not its folder
        path = path.parent
    toolkit = find_format(path) if config.format is ImportFormat.auto else config.format
    try:
        imported = _READERS[toolkit](path, config)
        info = ModelInfo(
            model=imported.model,
            search=imported.search,
            vocab_size=imported.tokenizers.tgt.vocab_size,
            src_lang=imported.src_lang or "src",
            tgt_lang=imported.tgt_lang or "tgt",
            tokenizer_sha256=imported.tokenizers.sha256,
            updates=0,
            src_vocab_size=imported.tokenizers.src_vocab_size,
        )
        build_model(info, imported.weights, torch.device("cpu"))  # checks names and shapes
    except _READER_ERRORS as error:
        log.debug("%s", path, exc_info=True)
        reason = f"{type(error).__name__}: {to_one_line(error, 100)}"
        raise ModelError(
            f"{path} is not a model of {toolkit.value} ({reason}); copy it again"
        ) from error
    save_model(output, imported.weights, info, imported.tokenizers)
    return output


def _check_importable(path: Path, config: ImportConfig) -> None:
    """Raise a `ConfigError` for a model of nmt or of CTranslate2."""
    is_model_of_nmt = True
    try:
        load_info(find_model(path))
    except NmtError:
        is_model_of_nmt = False
    if is_model_of_nmt:
        raise ConfigError(
            f"input={config.input} is a model of nmt already; use it, such as in nmt-translate "
            f"{shlex.quote(f'model_dir={config.input}')}"
        )
    vocabularies = list(path.glob("*vocabulary.json"))
    vocabularies += path.glob("*vocabulary.txt")
    if (path / "model.bin").exists() and vocabularies:
        raise ConfigError(
            f"input={config.input} is a model of CTranslate2; give the model that it was made from"
        )


def _check_output(output: Path) -> None:
    """Raise a `ModelError` if `output` holds a model that nmt-train trained."""
    try:
        num_updates = load_info(output).updates
    except NmtError:  # missing, or a folder that `save_model` refuses to replace
        return
    if num_updates:
        raise ModelError(
            f"output={output} holds a model that was trained for {num_updates:,} updates; choose "
            "another folder"
        )


def find_format(path: Path) -> ImportFormat:
    """Return the toolkit that wrote the files. Raises `ConfigError` if none is recognized."""
    if (path / huggingface.CONFIG).exists():
        return ImportFormat.huggingface
    if path.is_dir():
        folder = path
        files = list(path.iterdir())
    else:
        folder = path.parent
        files = [path]
    suffixes = {file.suffix for file in files}
    if ".npz" in suffixes or ".bin" in suffixes:
        return ImportFormat.marian
    if ".pt" in suffixes:
        # fairseq stores its vocabularies in files next to the model, OpenNMT-py in the model
        if any(folder.glob("dict.*.txt")) or (folder / "dict.txt").exists():
            return ImportFormat.fairseq
        return ImportFormat.opennmt
    names = ", ".join(toolkit.value for toolkit in _READERS)
    raise ConfigError(f"input={path} holds no known model; set format to one of {names}")
