"""Export to Bergamot, the engine of Firefox's translations and of translateLocally.

The folder has the model in Marian's binary format, its SentencePiece models, `config.yml`, and the
lexical shortlist in Marian's binary format, if one was learned. Weights are float32. Layouts follow
`common/binary.cpp`, `common/types.h` and `data/shortlist.cpp` of browsermt/marian-dev.
"""

# V source pieces, E entries of a shortlist

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from nmt.checkpoint import ModelInfo
from nmt.config import ExportConfig
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ModelError
from nmt.export.huggingface import Weights
from nmt.export.marian import SETTINGS, convert_model
from nmt.export.shortlist import Candidates

FLOAT32 = 0x0404  # Marian's numbers of types: a class, and the size in bytes
INT8 = 0x0101
_FILE_VERSION = 1
_ALIGNMENT = 256  # bytes
_SHORTLIST_MAGIC = 0xF11A48D5013417F5
_NUM_FIRST = (
    50  # target ids that are candidates for every sentence, from 0; has all control symbols
)
_MASK64 = (1 << 64) - 1


class Item(NamedTuple):
    """A tensor of a binary file."""

    name: str
    type: int  # `FLOAT32` or `INT8`
    shape: tuple[int, ...]
    content: bytes


def write_bergamot(
    folder: Path, info: ModelInfo, weights: Weights, tokenizers: Tokenizers, config: ExportConfig
) -> None:
    """Write `model.PAIR.bin`, SentencePiece models and `config.yml` into `folder`.

    Raises `ModelError` if Marian cannot represent the model, or if the ids of pieces are not those
    of the SentencePiece model, since Bergamot has no other vocabularies.
    """
    model = convert_model(info, weights, tokenizers, config)
    for tokenizer, pieces in (
        (tokenizers.src, model.src_pieces),
        (tokenizers.tgt, model.tgt_pieces),
    ):
        if Tokenizer(tokenizer.model).all_pieces() != pieces:
            raise ModelError(
                "format=bergamot needs the ids of the SentencePiece model, and this model has "
                "others; use format=marian"
            )
    pair = name_pair(info)
    items = []
    for name, array in model.arrays.items():
        items.append(Item(name, FLOAT32, array.shape, array.astype("<f4").tobytes()))
    items.append(Item(SETTINGS, INT8, (len(model.settings),), model.settings))
    (folder / f"model.{pair}.bin").write_bytes(encode_items(items))
    src_vocabulary = tgt_vocabulary = f"vocab.{pair}.spm"
    if tokenizers.src.model != tokenizers.tgt.model:
        src_vocabulary = f"srcvocab.{pair}.spm"
        tgt_vocabulary = f"trgvocab.{pair}.spm"
    (folder / src_vocabulary).write_bytes(tokenizers.src.model)
    (folder / tgt_vocabulary).write_bytes(tokenizers.tgt.model)
    settings: dict[str, Any] = {
        "relative-paths": True,
        "models": [f"model.{pair}.bin"],
        "vocabs": [src_vocabulary, tgt_vocabulary],
        "beam-size": info.search.beam_size,
        "normalize": info.search.length_exponent,
        "word-penalty": 0.0 - info.search.word_reward,
        "max-length-break": 128,
        "mini-batch-words": 1024,
        "workspace": 128,
        "max-length-factor": 2.0,
        "skip-cost": info.search.beam_size == 1,  # scores are logits, which beam search cannot add
        "cpu-threads": 0,
        "quiet": True,
        "quiet-translation": True,
        "gemm-precision": "float32",
    }
    if config.shortlist_data is not None:
        # the second number says whether to check the file; marian-decoder would not parse `false`
        settings["shortlist"] = [name_shortlist(info), 0]
    text = yaml.safe_dump(settings, sort_keys=False)
    (folder / "config.yml").write_text(text, encoding="utf-8", newline="\n")


def name_pair(info: ModelInfo) -> str:
    """Return the languages of a model, as names of files have them, such as `ende`."""
    return f"{info.src_lang or 'src'}{info.tgt_lang or 'trg'}"


def name_shortlist(info: ModelInfo) -> str:
    """Return the name of the shortlist of a model."""
    return f"lex.50.50.{name_pair(info)}.s2t.bin"


def encode_items(items: list[Item]) -> bytes:
    """Return the content of a file with Marian's binary format, version 1."""
    contents = []
    header = struct.pack("<2Q", _FILE_VERSION, len(items))
    for item in items:
        padding = -len(item.content) % _ALIGNMENT if item.type == FLOAT32 else 0
        contents.append(item.content + bytes(padding))
        name_length = len(item.name.encode("utf-8")) + 1
        header += struct.pack("<4Q", name_length, item.type, len(item.shape), len(contents[-1]))
    for item in items:
        header += item.name.encode("utf-8") + b"\0"
    for item in items:
        header += struct.pack(f"<{len(item.shape)}i", *item.shape)
    # Marian always pads, also if the content would already begin at a multiple
    padding = _ALIGNMENT - (len(header) + 8) % _ALIGNMENT
    return header + struct.pack("<Q", padding) + bytes(padding) + b"".join(contents)


def encode_shortlist(candidates: Candidates, tokenizers: Tokenizers) -> bytes:
    """Return the content of a lexical shortlist with Marian's binary format.

    Every source ends with EOS, so the candidates for all sentences are candidates of EOS. Every
    list has EOS, since Marian refuses a file whose last lists are empty.
    """
    # without the padding that the import of a Marian model adds as the last id
    src_vocab_size = Tokenizer(tokenizers.src.model).vocab_size
    tgt_vocab_size = Tokenizer(tokenizers.tgt.model).vocab_size
    lists = []
    for token, translations in enumerate(candidates.by_source[:src_vocab_size]):
        ids = {tokenizers.tgt.eos_id, *translations}
        if token == tokenizers.src.eos_id:
            ids.update(candidates.common)
        lists.append(sorted(i for i in ids if i < tgt_vocab_size))
    offsets = np.cumsum([0, *map(len, lists)]).astype("<u8")  # (V + 1,)
    entries = np.concatenate(lists).astype("<u4")  # (E,)
    sizes = struct.pack("<4Q", _NUM_FIRST, _NUM_FIRST, len(offsets), len(entries))
    content = sizes + offsets.tobytes() + entries.tobytes()
    return struct.pack("<2Q", _SHORTLIST_MAGIC, _checksum(content)) + content


def _checksum(content: bytes) -> int:
    """Return Marian's `hashMem` of the 64-bit words of `content`; a last half word is ignored."""
    seed = 0
    for word in np.frombuffer(content, dtype="<u8", count=len(content) // 8).tolist():
        seed ^= (word + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _MASK64
    return seed
