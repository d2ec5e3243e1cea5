"""Export to Bergamot, the engine of Firefox's translations and of translateLocally.

The folder has the model in Marian's binary format, its SentencePiece models, `config.yml`, and the
lexical shortlist in Marian's binary format, if one was learned. Layouts follow `common/binary.cpp`,
`common/types.h` and `data/shortlist.cpp` of browsermt/marian-dev. With `quantization=int8`, the
matrices have the form that its `marian-conv --gemm-type intgemm8` writes.
"""

# V source pieces, E candidates in all lists of a shortlist

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from nmt.checkpoint import ModelInfo
from nmt.config import ExportConfig, Quantization, resolve_path
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ConfigError, ModelError
from nmt.export.calibration import OUTPUT, measure_activations
from nmt.export.huggingface import Weights
from nmt.export.marian import SETTINGS, MarianModel, convert_model
from nmt.export.shortlist import Candidates

# Marian's codes for types; the last byte is the size of a number in bytes
FLOAT32 = 0x0404
INT8 = 0x0101
INTGEMM8 = 0x4101  # int8 matrix, followed by its scale
_FILE_VERSION = 1
_ALIGNMENT = 256  # bytes
_SHORTLIST_MAGIC = 0xF11A48D5013417F5
# target ids 0 to 49 are candidates for every sentence; these include all control symbols
_NUM_COMMON_IDS = 50
_MASK64 = (1 << 64) - 1


class BinaryTensor(NamedTuple):
    """A tensor of a binary file."""

    name: str
    type: int  # `FLOAT32`, `INT8` or `INTGEMM8`
    shape: tuple[int, ...]
    content: bytes


def write_bergamot(
    folder: Path, info: ModelInfo, weights: Weights, tokenizers: Tokenizers, config: ExportConfig
) -> None:
    """Write the model, SentencePiece models and `config.yml` into `folder`.

    Raises `ModelError` if Marian cannot represent the model. Bergamot reads no vocabulary besides
    the SentencePiece model, so `ModelError` is also raised if its ids are not the ids of the model.
    Raises `ConfigError` if `quantization=int8` does not support the size of a matrix.
    """
    model = convert_model(info, weights, tokenizers, config)
    src_spm_pieces = Tokenizer(tokenizers.src.model).all_pieces()
    tgt_spm_pieces = Tokenizer(tokenizers.tgt.model).all_pieces()
    if src_spm_pieces != model.src_pieces or tgt_spm_pieces != model.tgt_pieces:
        raise ModelError(
            "format=bergamot needs the ids of the SentencePiece model, and this model has "
            "others; use format=marian"
        )
    if config.quantization is Quantization.int8:
        _check_sizes(model)
    tensors = _make_tensors(model, config.quantization)
    if config.calibration_data is not None:
        data_dir = resolve_path(config.calibration_data)
        limits = measure_activations(model.info, model.weights, tokenizers, data_dir)
        tensors += _make_multipliers(limits, _output_matrix_name(model))
    tensors.append(BinaryTensor(SETTINGS, INT8, (len(model.settings),), model.settings))
    (folder / model_file_name(info, config)).write_bytes(encode_tensors(tensors))
    settings = make_settings(info, tokenizers, config)
    src_vocabulary, tgt_vocabulary = settings["vocabs"]
    (folder / src_vocabulary).write_bytes(tokenizers.src.model)
    (folder / tgt_vocabulary).write_bytes(tokenizers.tgt.model)
    text = yaml.safe_dump(settings, sort_keys=False)
    (folder / "config.yml").write_text(text, encoding="utf-8", newline="\n")


def make_settings(info: ModelInfo, tokenizers: Tokenizers, config: ExportConfig) -> dict[str, Any]:
    """Return the content of `config.yml`."""
    pair = language_pair(info)
    if tokenizers.src.model == tokenizers.tgt.model:
        vocabularies = [f"vocab.{pair}.spm", f"vocab.{pair}.spm"]
    else:
        vocabularies = [f"srcvocab.{pair}.spm", f"trgvocab.{pair}.spm"]
    settings: dict[str, Any] = {
        "relative-paths": True,
        "models": [model_file_name(info, config)],
        "vocabs": vocabularies,
        "beam-size": info.search.beam_size,
        "normalize": info.search.length_exponent,
        "word-penalty": 0.0 - info.search.word_reward,  # negation would turn 0.0 into -0.0
        "max-length-break": 128,
        "mini-batch-words": 1024,
        "workspace": 128,
        "max-length-factor": 2.0,
        # without log-softmax: greedy search needs only the largest logit, beam search adds scores
        "skip-cost": info.search.beam_size == 1,
        "cpu-threads": 0,
        "quiet": True,
        "quiet-translation": True,
        "gemm-precision": gemm_precision(config),
    }
    if config.shortlist_data is not None:
        # 0: do not check the file. marian-decoder parses numbers only, so `False` would fail.
        settings["shortlist"] = [shortlist_file_name(info), 0]
    return settings


def _make_tensors(model: MarianModel, quantization: Quantization) -> list[BinaryTensor]:
    """Return the tensors of a model."""
    tensors = []
    for name, array in model.arrays.items():
        if quantization is Quantization.int8 and _is_matrix(name):
            tensors.append(_quantize(name, array))
        else:
            content = array.astype("<f4").tobytes()
            tensors.append(BinaryTensor(name, FLOAT32, array.shape, content))
    return tensors


def _make_multipliers(limits: dict[str, float], output_name: str) -> list[BinaryTensor]:
    """Return the multipliers of activations, from the limits that `measure_activations` returns."""
    tensors = []
    limits_by_name = dict(limits)
    # Marian calls the output matrix `OUTPUT` with a shortlist, and `output_name` without one
    limits_by_name[output_name] = limits[OUTPUT]
    for name, limit in limits_by_name.items():
        multiplier = struct.pack("<f", _int8_multiplier(limit))
        tensors.append(BinaryTensor(f"{name}_QuantMultA", FLOAT32, (1, 1), multiplier))
    return tensors


def _is_matrix(name: str) -> bool:
    """Return whether an array is a matrix: the weight of a linear layer or an embedding."""
    return _is_embedding(name) or re.search("_W.?$", name) is not None


def _is_embedding(name: str) -> bool:
    return "Wemb" in name


def _output_matrix_name(model: MarianModel) -> str:
    """Return the name of the output matrix."""
    names = ("decoder_ff_logit_out_W", "decoder_Wemb", "Wemb")
    return next(name for name in names if name in model.arrays)


def _check_sizes(model: MarianModel) -> None:
    """Raise `ConfigError` for a matrix of a size that Bergamot cannot multiply in int8."""
    output_name = _output_matrix_name(model)
    for name, array in model.arrays.items():
        is_only_looked_up = _is_embedding(name) and name != output_name
        if is_only_looked_up or not _is_matrix(name):
            continue
        num_inputs, num_outputs = array.shape
        if _is_embedding(name):
            num_outputs, num_inputs = array.shape
        if num_inputs % 64 or num_outputs % 8:
            raise ConfigError(
                f"format=bergamot cannot multiply {name} in int8: it has {num_inputs} inputs and "
                f"{num_outputs} outputs, which are not multiples of 64 and 8; use "
                "quantization=float32"
            )


def _quantize(name: str, array: np.ndarray[Any, Any]) -> BinaryTensor:
    """Return a matrix in int8.

    The content of a linear layer is transposed, while its shape is not.
    """
    largest = np.abs(array).max()
    multiplier = np.float32(_int8_multiplier(largest))
    integers = np.round(array * multiplier).astype(np.int8)
    if not _is_embedding(name):
        integers = integers.T
    content = integers.tobytes() + struct.pack("<f", multiplier)
    return BinaryTensor(name, INTGEMM8, array.shape, content)


def _int8_multiplier(limit: float) -> float:
    """Return the factor that maps `limit` to 127. If all numbers are 0, any factor will do."""
    return 127 / limit if limit > 0 else 1.0


def model_file_name(info: ModelInfo, config: ExportConfig) -> str:
    """Return the name of the model file, whose ending tells Bergamot's JavaScript the precision."""
    endings = {
        "float32": "bin",
        "int8shiftAll": "intgemm8.bin",
        "int8shiftAlphaAll": "intgemm.alphas.bin",
    }
    ending = endings[gemm_precision(config)]
    return f"model.{language_pair(info)}.{ending}"


def gemm_precision(config: ExportConfig) -> str:
    """Return Bergamot's name for the precision of matrix multiplications."""
    if config.quantization is Quantization.float32:
        return "float32"
    if config.calibration_data is None:
        return "int8shiftAll"
    return "int8shiftAlphaAll"


def language_pair(info: ModelInfo) -> str:
    """Return the languages of a model for names of files, such as `ende`."""
    return f"{info.src_lang or 'src'}{info.tgt_lang or 'trg'}"


def shortlist_file_name(info: ModelInfo) -> str:
    """Return the name of the shortlist of a model."""
    return f"lex.50.50.{language_pair(info)}.s2t.bin"


def encode_tensors(tensors: list[BinaryTensor]) -> bytes:
    """Return the content of a file with Marian's binary format, version 1."""
    contents = []
    header = struct.pack("<2Q", _FILE_VERSION, len(tensors))
    for tensor in tensors:
        content = tensor.content
        if tensor.type != INT8:
            num_pad_bytes = -len(content) % _ALIGNMENT
            content += bytes(num_pad_bytes)  # zeros up to a multiple of _ALIGNMENT
        contents.append(content)
        name_length = len(tensor.name.encode("utf-8")) + 1  # with the zero byte after the name
        header += struct.pack("<4Q", name_length, tensor.type, len(tensor.shape), len(content))
    for tensor in tensors:
        header += tensor.name.encode("utf-8") + b"\0"
    for tensor in tensors:
        header += np.array(tensor.shape, dtype="<i4").tobytes()
    # The content begins at a multiple of _ALIGNMENT, after at least one byte of padding.
    header_length = len(header) + 8  # 8 bytes for the length of the padding
    padding_length = _ALIGNMENT - header_length % _ALIGNMENT
    header += struct.pack("<Q", padding_length) + bytes(padding_length)
    return header + b"".join(contents)


def encode_shortlist(candidates: Candidates, tokenizers: Tokenizers) -> bytes:
    """Return the content of a lexical shortlist with Marian's binary format.

    The file has a list of target ids for each source id. Every source sentence ends with EOS, so
    the list of EOS has the candidates that all sentences share. Marian refuses a file whose last
    lists are empty, so every list has the target EOS.
    """
    # these sizes exclude the padding that the import of a Marian model adds as the last id
    src_vocab_size = Tokenizer(tokenizers.src.model).vocab_size
    tgt_vocab_size = Tokenizer(tokenizers.tgt.model).vocab_size
    lists = []
    for token, translations in enumerate(candidates.by_source[:src_vocab_size]):
        ids = {tokenizers.tgt.eos_id, *translations}
        if token == tokenizers.src.eos_id:
            ids.update(candidates.common)
        lists.append(sorted(i for i in ids if i < tgt_vocab_size))
    lengths = [len(ids) for ids in lists]
    offsets = np.cumsum([0, *lengths]).astype("<u8")  # (V + 1,)
    target_ids = np.concatenate(lists).astype("<u4")  # (E,)
    sizes = struct.pack("<4Q", _NUM_COMMON_IDS, _NUM_COMMON_IDS, len(offsets), len(target_ids))
    content = sizes + offsets.tobytes() + target_ids.tobytes()
    return struct.pack("<2Q", _SHORTLIST_MAGIC, _checksum(content)) + content


def _checksum(content: bytes) -> int:
    """Return Marian's `hashMem` of the 64-bit words of `content`. Ignores an incomplete word."""
    num_words = len(content) // 8
    words = np.frombuffer(content, dtype="<u8", count=num_words)
    seed = 0
    for word in words.tolist():
        total = word + 0x9E3779B9 + (seed << 6) + (seed >> 2)
        seed ^= total & _MASK64
    return seed
