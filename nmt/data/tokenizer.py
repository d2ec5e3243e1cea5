"""The subword tokenizers of a model: one SentencePiece model for both languages, or one for each.
They are the only vocabularies there are.

Text goes in and ids come out, never pieces, so no text can become a control symbol. Models are made
in `nmt/data/vocabulary.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import sentencepiece

from nmt.errors import DataError, ModelError
from nmt.manifest import verify

JOINT, SOURCE, TARGET = "tokenizer.model", "tokenizer.src.model", "tokenizer.tgt.model"

_FEW_TEXTS = 32  # starting threads takes a millisecond, as long as encoding so many


class Tokenizer:
    """A loaded SentencePiece model; by itself it is that of both languages."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = open_model(model)
        self.vocab_size: int = self._processor.vocab_size()
        self.pad_id: int = self._processor.pad_id()
        self.unk_id: int = self._processor.unk_id()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.src = self.tgt = self
        self.src_vocab_size: int | None = None  # of a vocabulary that the source has for itself
        self._pieces: list[str] = []  # asking SentencePiece each time takes ten times as long

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.model`; a missing or damaged one is a `ModelError`."""
        if not path.is_file():
            raise ModelError(f"{path} does not exist; the folder is no model or data folder of nmt")
        try:
            tokenizer = cls(path.read_bytes())
        except RuntimeError:
            raise ModelError(f"{path} is no SentencePiece model; copy or make it again") from None
        if min(tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) < 0:
            raise ModelError(
                f"{path} lacks a control symbol (pad, bos or eos); give it to nmt-preprocess as "
                "tokenizer.model, which adds what is missing"
            )
        return tokenizer

    @property
    def sha256(self) -> str:
        """Fingerprint of the vocabulary, for checks that data and model belong together."""
        return hashlib.sha256(self.model).hexdigest()

    @property
    def byte_ids(self) -> list[int]:
        """Ids of the bytes that stand for unknown characters; none without byte fallback."""
        return [i for i in range(self.vocab_size) if self._processor.is_byte(i)]

    def encode(self, text: str) -> list[int]:
        """Turn one sentence into ids, without BOS and EOS."""
        return self._processor.encode(text)  # type: ignore[no-any-return]

    def encode_batch(self, texts: Sequence[str], num_threads: int = -1) -> list[list[int]]:
        """Turn sentences into ids; -1 uses all processor threads.

        Raises `DataError` for a text that is none, with half of a surrogate pair in it.
        """
        try:
            if len(texts) < _FEW_TEXTS:  # a list starts threads, whatever their number
                return [self._processor.encode(text) for text in texts]
            ids: list[list[int]] = self._processor.encode(list(texts), num_threads=num_threads)
        except (TypeError, RuntimeError):  # SentencePiece does not name the text
            for number, text in enumerate(texts):
                if found := re.search("[\ud800-\udfff]", text):
                    raise DataError(
                        f"text {number}, from 0, has half a surrogate pair at character "
                        f"{found.start()}; decode it with errors='replace'"
                    ) from None
            raise
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into a line of text, without control symbols; line breaks become spaces."""
        text: str = self._processor.decode(list(ids))
        return text.replace("\n", " ").replace("\r", " ")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Show ids as pieces, for people to read."""
        return [self.all_pieces()[i] for i in ids]

    def all_pieces(self) -> list[str]:
        """Return the vocabulary; piece i has the id i."""
        self._pieces = self._pieces or self._processor.id_to_piece(list(range(self.vocab_size)))
        return self._pieces

    @property
    def control_ids(self) -> list[int]:
        """Ids of padding, unknown, start and end."""
        return [self.pad_id, self.unk_id, self.bos_id, self.eos_id]


@dataclass(frozen=True)
class SeparateTokenizers:
    """One SentencePiece model for each language."""

    src: Tokenizer
    tgt: Tokenizer

    @property
    def src_vocab_size(self) -> int:
        """Size of the vocabulary that the source has for itself."""
        return self.src.vocab_size

    @property
    def sha256(self) -> str:
        """Fingerprint of both vocabularies."""
        both = f"{self.src.sha256} {self.tgt.sha256}"
        return hashlib.sha256(both.encode("ascii")).hexdigest()


Tokenizers: TypeAlias = Tokenizer | SeparateTokenizers
"""What a data or model folder holds; `.src` and `.tgt` are the same where it is joint."""


def load_tokenizers(folder: Path, sha256: str | None = None) -> Tokenizers:
    """Read the tokenizers of a data or model folder.

    Missing or damaged ones are a `ModelError`, and so are others than those with the fingerprint
    `sha256`.
    """
    verify(folder, JOINT, SOURCE, TARGET)
    tokenizers: Tokenizers
    if (folder / SOURCE).is_file():
        src, tgt = Tokenizer.load(folder / SOURCE), Tokenizer.load(folder / TARGET)
        tokenizers = SeparateTokenizers(src, tgt)
    else:
        tokenizers = Tokenizer.load(folder / JOINT)
    if sha256 not in (None, tokenizers.sha256):
        raise ModelError(
            f"the tokenizer in {folder} is not the one that the folder was made with; "
            "copy or make the folder again"
        )
    return tokenizers


def save_tokenizers(folder: Path, tokenizers: Tokenizers) -> None:
    """Write `tokenizer.model`, or `tokenizer.src.model` and `tokenizer.tgt.model`."""
    if isinstance(tokenizers, Tokenizer):
        (folder / JOINT).write_bytes(tokenizers.model)
    else:
        (folder / SOURCE).write_bytes(tokenizers.src.model)
        (folder / TARGET).write_bytes(tokenizers.tgt.model)


def open_model(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Load a SentencePiece model; what is none is a `RuntimeError`."""
    if not model:
        raise RuntimeError("there is no model in an empty file")  # SentencePiece takes it for one
    return sentencepiece.SentencePieceProcessor(model_proto=model)
