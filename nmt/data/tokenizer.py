"""The subword tokenizers of a model: one SentencePiece model for both languages, or one for each.
They are the vocabularies, unless a model of another toolkit numbers their pieces in its own way.

Text goes in and ids come out, never pieces, so no text can become a control symbol. Models are made
in `nmt/data/vocabulary.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

import sentencepiece

from nmt.data.text import on_one_line
from nmt.errors import DataError, ModelError
from nmt.runtime.files import write_json
from nmt.runtime.manifest import verify
from nmt.runtime.metadata import read_json, to_dataclass

JOINT, SOURCE, TARGET = "tokenizer.model", "tokenizer.src.model", "tokenizer.tgt.model"
VOCABULARY = "tokenizer.vocab.json"
SRC_VOCABULARY, TGT_VOCABULARY = "tokenizer.src.vocab.json", "tokenizer.tgt.vocab.json"


LANGUAGE = re.compile(r"__(\w+)__|[a-z]{3}_[A-Z][a-z]{3}")
"""The pieces of languages in M2M100 and NLLB: `__en__`, `eng_Latn`."""


class Tokenizer:
    """A loaded SentencePiece model; by itself it is that of both languages. A target that begins
    with one of `tags` is decoded without it.
    """

    vocabulary: Vocabulary | None = None  # of a `MappedTokenizer`
    few_texts = 32  # starting threads takes a millisecond, as long as encoding so many

    def __init__(self, model: bytes, tags: Sequence[str] = ()) -> None:
        self.model = model
        self._tags = tags
        self._processor = open_model(model)
        self.vocab_size: int = self._processor.vocab_size()
        self.pad_id: int = self._processor.pad_id()
        self.unk_id: int = self._processor.unk_id()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.src = self.tgt = self
        self.src_vocab_size: int | None = None  # of a vocabulary that the source has for itself
        self.prefix: list[int] = []  # ids that every text begins with, such as its language's
        self.languages: dict[str, int] = {}  # of a vocabulary with `prefix`: pieces in its place
        self._pieces: list[str] = []  # asking SentencePiece each time takes ten times as long

    @classmethod
    def load(cls, path: Path, tags: Sequence[str] = ()) -> Tokenizer:
        """Read a `tokenizer.model`; a missing or damaged one is a `ModelError`."""
        if not path.is_file():
            raise ModelError(f"{path} does not exist; the folder is no model or data folder of nmt")
        tokenizer = cls(read_model(path), tags)
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
            if len(texts) < self.few_texts:  # a list starts threads, whatever their number
                return [self.encode(text) for text in texts]
            ids: list[list[int]] = self._processor.encode(list(texts), num_threads=num_threads)
        except (TypeError, RuntimeError):  # SentencePiece does not name the text
            for text in texts:  # which may be of a window: a number would not say where it is
                if found := re.search("[\ud800-\udfff]", text):
                    raise DataError(
                        f"the text {text[:40]!a} has half a surrogate pair at character "
                        f"{found.start()}; decode it with errors='replace'"
                    ) from None
            raise
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into a line of text, without control symbols and a tag at its start; line breaks
        become spaces.
        """
        text: str = self._processor.decode(list(ids))
        for tag in self._tags:
            if text.startswith(tag):
                text = text.removeprefix(tag).removeprefix(" ")
                break
        return on_one_line(text)

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
class Vocabulary:
    """Ids that are not those of the SentencePiece model, but of the model that was imported."""

    pieces: list[str]  # piece i has the id i; no two are equal
    pad_id: int
    unk_id: int
    bos_id: int  # what decoding starts from: in some models the id of padding, or of EOS
    eos_id: int
    src_prefix: list[int] = field(default_factory=list)  # ids before every source
    tgt_prefix: list[int] = field(default_factory=list)  # ids before every target

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a `tokenizer.vocab.json`; a damaged one is a `ModelError`."""
        try:
            found = to_dataclass(cls, read_json(path), path)
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist; copy the model folder again") from None
        used = [found.pad_id, found.unk_id, found.bos_id, found.eos_id]
        used += [*found.src_prefix, *found.tgt_prefix]
        if not 0 <= min(used) <= max(used) < len(set(found.pieces)) == len(found.pieces):
            raise ModelError(f"{path}: ids and pieces do not fit; copy the model folder again")
        return found


class MappedTokenizer(Tokenizer):
    """A SentencePiece model whose pieces have the ids of a `Vocabulary`.

    Pieces that it lacks are unknown. A tag such as `>>fra<<` before a text is one piece, if it has
    that; one of its `languages` and a space take the place of `prefix`.
    """

    few_texts = sys.maxsize  # threads would have nothing to do

    def __init__(self, model: bytes, vocabulary: Vocabulary, prefix: Sequence[int]) -> None:
        super().__init__(model)
        names = self.all_pieces()
        self._bytes = [name for i, name in enumerate(names) if self._processor.is_byte(i)]
        self._unknown = self._processor.unk_id()
        self.vocabulary, self.prefix = vocabulary, list(prefix)
        self.vocab_size, self._pieces = len(vocabulary.pieces), vocabulary.pieces
        self.pad_id, self.unk_id = vocabulary.pad_id, vocabulary.unk_id
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        control = {*self.control_ids, *vocabulary.src_prefix, *vocabulary.tgt_prefix}
        if vocabulary.src_prefix and vocabulary.tgt_prefix:
            names_of = enumerate(self._pieces)
            self.languages = {name: i for i, name in names_of if LANGUAGE.fullmatch(name)}
        control.update(self.languages.values())
        # no text becomes one of these, and none is shown
        self._ids = {name: i for i, name in enumerate(self._pieces) if i not in control}
        self._hidden = control - {self.unk_id}
        self._map = [self._ids.get(name, self.unk_id) for name in names]

    @property
    def sha256(self) -> str:
        """Fingerprint of the vocabulary and of what stands before a text."""
        content = json.dumps([asdict(self.vocabulary), self.prefix], sort_keys=True)  # type: ignore[arg-type]
        return hashlib.sha256(self.model + content.encode("utf-8")).hexdigest()

    @property
    def byte_ids(self) -> list[int]:
        """Ids of the bytes that stand for unknown characters; none without byte fallback."""
        return [self._ids[name] for name in self._bytes if name in self._ids]

    def encode(self, text: str) -> list[int]:
        """Turn one sentence into ids, `prefix` first, without BOS and EOS; or into none. A language
        alone is its id.
        """
        language, _, rest = text.partition(" ")
        if language in self.languages:
            return [self.languages[language], *self._encode(rest)]
        ids = self._encode(text)
        return [*self.prefix, *ids] if ids else []

    def _encode(self, text: str) -> list[int]:
        """Turn a text into ids without `prefix`."""
        tag = text[: text.find("<<") + 2] if text.startswith(">>") else ""
        ids = [self._ids[tag]] if tag in self._ids else []
        text = text[len(tag) :] if ids else text
        found = self._processor.encode(text)
        if self._unknown in found:  # what SentencePiece lacks the vocabulary may have
            pieces = self._processor.encode(text, out_type=str)
            ids += [self._ids.get(piece, self.unk_id) for piece in pieces]
        else:
            ids += [self._map[i] for i in found]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into one line of text, see `Tokenizer.decode`."""
        pieces = [self._pieces[i] for i in ids if i not in self._hidden]
        text: str = self._processor.decode(pieces) if pieces else ""
        # pieces that this model lacks, such as those of the source, keep their ▁
        return on_one_line(text.removeprefix("▁").replace("▁", " "))


@dataclass(frozen=True)
class SeparateTokenizers:
    """One SentencePiece model for each language."""

    src: Tokenizer
    tgt: Tokenizer
    is_joint: bool = False  # both have one `Vocabulary`, and so one embedding

    @property
    def src_vocab_size(self) -> int | None:
        """Size of the vocabulary that the source has for itself."""
        return None if self.is_joint else self.src.vocab_size

    @property
    def sha256(self) -> str:
        """Fingerprint of both vocabularies."""
        both = f"{self.src.sha256} {self.tgt.sha256}"
        return hashlib.sha256(both.encode("ascii")).hexdigest()


Tokenizers: TypeAlias = Tokenizer | SeparateTokenizers
"""What a data or model folder holds; `.src` and `.tgt` are the same where it is joint."""


def load_tokenizers(
    folder: Path, sha256: str | None = None, tags: Sequence[str] = ()
) -> Tokenizers:
    """Read the tokenizers of a data or model folder; `tags` are those of targets.

    Missing or damaged ones are a `ModelError`, and so are others than those with the fingerprint
    `sha256`.
    """
    verify(folder, JOINT, SOURCE, TARGET, VOCABULARY, SRC_VOCABULARY, TGT_VOCABULARY)
    tokenizers: Tokenizers
    joint, src_path = folder / VOCABULARY, folder / SRC_VOCABULARY
    if joint.is_file() or src_path.is_file():
        is_joint = joint.is_file()
        paths = [joint, joint] if is_joint else [src_path, folder / TGT_VOCABULARY]
        one, other = map(Vocabulary.load, paths)
        src = MappedTokenizer(read_model(folder / SOURCE), one, one.src_prefix)
        tgt = MappedTokenizer(read_model(folder / TARGET), other, other.tgt_prefix)
        tokenizers = SeparateTokenizers(src, tgt, is_joint)
    elif (folder / SOURCE).is_file():
        sides = Tokenizer.load(folder / SOURCE), Tokenizer.load(folder / TARGET, tags)
        tokenizers = SeparateTokenizers(*sides)
    else:
        tokenizers = Tokenizer.load(folder / JOINT, tags)
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
        names = [VOCABULARY] if tokenizers.is_joint else [SRC_VOCABULARY, TGT_VOCABULARY]
        for name, side in zip(names, (tokenizers.src, tokenizers.tgt), strict=False):
            if side.vocabulary is not None:
                write_json(folder / name, asdict(side.vocabulary))


def read_model(path: Path) -> bytes:
    """Return the SentencePiece model at `path`; a missing or damaged one is a `ModelError`."""
    try:
        model = path.read_bytes()
        open_model(model)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; give a SentencePiece model") from None
    except RuntimeError:
        raise ModelError(f"{path} is no SentencePiece model; copy or make it again") from None
    return model


def open_model(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Load a SentencePiece model; what is none is a `RuntimeError`."""
    if not model:
        raise RuntimeError("there is no model in an empty file")  # SentencePiece takes it for one
    return sentencepiece.SentencePieceProcessor(model_proto=model)
