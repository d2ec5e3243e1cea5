"""The subword tokenizers of a model: one SentencePiece model for both languages, or one for each.

The SentencePiece models define the ids, except in models imported from toolkits with other ids.
Text is encoded to ids directly. If it were split into pieces first, a text such as "</s>" would
become a control symbol. `nmt/data/vocabulary.py` trains the models, or adds symbols to existing
models.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

import sentencepiece

from nmt.data.text import replace_line_breaks
from nmt.errors import DataError, ModelError
from nmt.runtime.files import write_json
from nmt.runtime.manifest import verify_checksums
from nmt.runtime.metadata import read_json, to_dataclass
from nmt.runtime.reading import read_regular_file

JOINT_MODEL = "tokenizer.model"
SRC_MODEL = "tokenizer.src.model"
TGT_MODEL = "tokenizer.tgt.model"
VOCABULARY = "tokenizer.vocab.json"
SRC_VOCABULARY = "tokenizer.src.vocab.json"
TGT_VOCABULARY = "tokenizer.tgt.vocab.json"

LANGUAGE_PATTERN = re.compile(r"__(?!(?:source|target|done)__)(\w+)__|[a-z]{3}_[A-Z][a-z]{3}")
"""Pieces for languages in M2M100 (`__en__`) and NLLB (`eng_Latn`). Does not match the symbols of
hints, such as `__source__`.
"""
_UNUSED_PREFIX = "<unused "  # start of the names of `unused_piece`


def unused_piece(token: int) -> str:
    """Return the piece of an unused id, which only rounds up the size of the vocabulary."""
    return f"{_UNUSED_PREFIX}{token}>"


def is_unused_piece(piece: str) -> bool:
    """Return whether a piece is a result of `unused_piece`."""
    return piece.startswith(_UNUSED_PREFIX)


class Tokenizer:
    """A SentencePiece model.

    A tokenizer can serve both languages. It therefore has the attributes `src` and `tgt` of a
    `TokenizerPair`, and both are the tokenizer itself.

    Args:
        model: content of the model file.
        removed_tags: `decode` removes these texts, such as `<2de>`, from the start of a text.
        vocabulary: pieces and ids of a `MappedTokenizer`.
        prefix_ids: ids that a `MappedTokenizer` puts before every text, such as a language.
    """

    min_texts_for_threads = 32  # for fewer texts, starting threads would take most of the time

    def __init__(
        self,
        model: bytes,
        removed_tags: Sequence[str] = (),
        *,
        vocabulary: Vocabulary | None = None,
        prefix_ids: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary  # see `is_imported`
        self.prefix_ids = list(prefix_ids)
        self.src = self
        self.tgt = self
        self.src_vocab_size: int | None = None  # see `TokenizerPair.src_vocab_size`
        self._removed_tags = removed_tags
        self._processor = open_model(model)
        if vocabulary is None:
            vocabulary = _read_vocabulary(self._processor)
        self.vocab_size = len(vocabulary.pieces)
        self.pad_id = vocabulary.pad_id
        self.unk_id = vocabulary.unk_id
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.language_ids = vocabulary.language_ids  # keyed by piece; each can replace `prefix_ids`
        self._pieces = vocabulary.pieces
        self._undecoded_ids: set[int] = set()  # ids that `decode` leaves out in `MappedTokenizer`

    @staticmethod
    def load(path: Path, removed_tags: Sequence[str] = ()) -> Tokenizer:
        """Read a `tokenizer.model`. Raises `ModelError` if it is missing or damaged."""
        if not path.exists():
            raise ModelError(
                f"{path} does not exist; the folder is not a model or data folder of nmt"
            )
        tokenizer = Tokenizer(read_model(path), removed_tags)
        if min(tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) < 0:  # -1: no such symbol
            raise ModelError(
                f"{path} lacks a control symbol (pad, bos or eos); give it to nmt-preprocess as "
                "tokenizer.model, which adds missing symbols"
            )
        return tokenizer

    @property
    def sha256(self) -> str:
        """Fingerprint of the vocabulary, to check that data and model belong together."""
        return hashlib.sha256(self.model).hexdigest()

    @property
    def byte_ids(self) -> list[int]:
        """Ids of the pieces for single bytes. The list is empty without byte fallback."""
        return _find_byte_ids(self._processor)

    def encode(self, text: str) -> list[int]:
        """Encode one sentence, without BOS and EOS."""
        if not text:  # for speed, since most models have an empty tag before each text
            return []
        return self._processor.encode(text)  # type: ignore[no-any-return]

    def encode_batch(self, texts: Sequence[str], num_threads: int = -1) -> list[list[int]]:
        """Encode sentences. With `num_threads=-1`, uses all CPU threads.

        Raises `DataError` for a text with half of a surrogate pair, which is invalid Unicode.
        """
        try:
            if len(texts) < self.min_texts_for_threads:
                return [self.encode(text) for text in texts]
            return self._processor.encode(list(texts), num_threads=num_threads)  # type: ignore[no-any-return]
        except (TypeError, RuntimeError):  # SentencePiece does not say which text is invalid
            refuse_surrogates(texts)
            raise

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids into one line of text, without control symbols and without a tag at the start.

        Line breaks become spaces.
        """
        return self._clean(self._processor.decode(list(ids)))

    def decode_replacing(self, ids: Sequence[int], words: Mapping[int, str]) -> str:
        """Decode ids as `decode` does, but replace some of them by words.

        `words` has the word for each position in `ids` that is replaced.
        """
        pieces: list[str] = []
        for position, piece in enumerate(self.pieces(ids)):
            if position in words:
                # in some models, a space is the end of a piece instead of its beginning
                has_space = bool(pieces) and pieces[-1].endswith("▁")
                space = "" if has_space else "▁"
                pieces.append(space + words[position])
            elif ids[position] not in self._undecoded_ids:
                pieces.append(piece)
        # `words` are not pieces of the model, so that SentencePiece leaves their ▁ unchanged
        text: str = self._processor.decode(pieces) if pieces else ""
        return self._clean(text.removeprefix("▁").replace("▁", " "))

    def _clean(self, text: str) -> str:
        """Remove a tag at the start, and replace line breaks by spaces."""
        for tag in self._removed_tags:
            if text.startswith(tag):
                return replace_line_breaks(text.removeprefix(tag).removeprefix(" "))
        return replace_line_breaks(text)

    def split(self, text: str) -> list[str]:
        """Return the pieces of a text, with ▁ for a space. An unknown piece is the text itself."""
        return self._processor.encode(text, out_type=str)  # type: ignore[no-any-return]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the pieces of ids, for display."""
        return [self._pieces[i] for i in ids]

    def all_pieces(self) -> list[str]:
        """Return the vocabulary. Piece i has the id i."""
        return self._pieces

    @property
    def is_imported(self) -> bool:
        """Whether the ids come from an imported `vocabulary` instead of SentencePiece."""
        return self.vocabulary is not None

    @functools.cached_property
    def unused_ids(self) -> list[int]:
        """Ids that occur in no text. They only round up the size of the vocabulary."""
        return [i for i, piece in enumerate(self._pieces) if is_unused_piece(piece)]

    @property
    def used_size(self) -> int:
        """Size of the vocabulary without the unused ids at its end."""
        size = self.vocab_size
        while size - 1 in self.unused_ids:
            size -= 1
        return size

    @property
    def control_ids(self) -> list[int]:
        """Ids of padding, of unknown pieces, of BOS and of EOS."""
        return [self.pad_id, self.unk_id, self.bos_id, self.eos_id]


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of a model and their ids, which in imported models differ from SentencePiece's."""

    pieces: list[str]  # piece i has the id i, and no two pieces are equal
    pad_id: int
    unk_id: int
    bos_id: int  # the first input of the decoder; in some models equal to `pad_id` or `eos_id`
    eos_id: int
    src_prefix: list[int] = field(default_factory=list)  # ids before every source
    tgt_prefix: list[int] = field(default_factory=list)  # ids before every target

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a `tokenizer.vocab.json`. Raises `ModelError` if it is missing or damaged."""
        try:
            vocabulary = to_dataclass(cls, read_json(path), path)
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist; copy the model folder again") from None
        ids = [vocabulary.pad_id, vocabulary.unk_id, vocabulary.bos_id, vocabulary.eos_id]
        ids += vocabulary.src_prefix + vocabulary.tgt_prefix
        size = len(vocabulary.pieces)
        has_invalid_id = min(ids) < 0 or max(ids) >= size
        has_equal_pieces = len(set(vocabulary.pieces)) < size
        if has_invalid_id or has_equal_pieces:
            raise ModelError(f"{path}: ids and pieces do not match; copy the model folder again")
        return vocabulary

    @property
    def language_ids(self) -> dict[str, int]:
        """Ids of the language pieces, if the model reads one before every source and target."""
        if not self.src_prefix or not self.tgt_prefix:
            return {}
        return {
            piece: i for i, piece in enumerate(self.pieces) if LANGUAGE_PATTERN.fullmatch(piece)
        }


class MappedTokenizer(Tokenizer):
    """A SentencePiece model whose pieces have the ids of a `Vocabulary`.

    Pieces that the vocabulary lacks get the id of unknown pieces. A tag such as `>>fra<<` at the
    start of a text is one piece if the vocabulary has it. If a text begins with a piece of
    `language_ids` and a space, such as `__en__ `, the id of this piece replaces `prefix_ids`.
    """

    vocabulary: Vocabulary
    min_texts_for_threads = sys.maxsize  # the ids are mapped in Python, where threads do not help

    def __init__(
        self,
        model: bytes,
        vocabulary: Vocabulary,
        prefix_ids: Sequence[int],
        removed_tags: Sequence[str] = (),
    ) -> None:
        super().__init__(model, removed_tags, vocabulary=vocabulary, prefix_ids=prefix_ids)
        symbol_ids = {*self.control_ids, *self.unused_ids, *self.language_ids.values()}
        symbol_ids.update(vocabulary.src_prefix, vocabulary.tgt_prefix)
        self._undecoded_ids = symbol_ids - {self.unk_id}
        self._ids_by_piece = {
            piece: i for i, piece in enumerate(vocabulary.pieces) if i not in symbol_ids
        }
        model_vocabulary = _read_vocabulary(self._processor)
        model_pieces = model_vocabulary.pieces
        self._model_unk_id = model_vocabulary.unk_id
        self._byte_pieces = [model_pieces[i] for i in _find_byte_ids(self._processor)]
        # for each id of the SentencePiece model, the id of its piece in the vocabulary
        self._mapped_ids = [self._ids_by_piece.get(piece, self.unk_id) for piece in model_pieces]

    @property
    def sha256(self) -> str:
        """Fingerprint of the vocabulary and of `prefix_ids`."""
        content = json.dumps([asdict(self.vocabulary), self.prefix_ids], sort_keys=True)
        return hashlib.sha256(self.model + content.encode("utf-8")).hexdigest()

    @property
    def byte_ids(self) -> list[int]:
        """Ids of the pieces for single bytes. The list is empty without byte fallback."""
        return [
            self._ids_by_piece[piece] for piece in self._byte_pieces if piece in self._ids_by_piece
        ]

    def encode(self, text: str) -> list[int]:
        """Encode one sentence, `prefix_ids` first, without BOS and EOS.

        An empty text has no ids. A text that is only a language piece has the id of this piece.
        """
        first_word, _, text_after_word = text.partition(" ")
        if first_word in self.language_ids:
            return [self.language_ids[first_word], *self._encode_unprefixed(text_after_word)]
        ids = self._encode_unprefixed(text)
        return [*self.prefix_ids, *ids] if ids else []

    def _encode_unprefixed(self, text: str) -> list[int]:
        """Encode a text, which may begin with a tag such as `>>fra<<`. Adds no `prefix_ids`."""
        ids: list[int] = []
        tag_match = re.match(">>.*?<<", text)
        if tag_match is not None and tag_match[0] in self._ids_by_piece:
            ids.append(self._ids_by_piece[tag_match[0]])
            text = text[tag_match.end() :]
        model_ids = self._processor.encode(text)
        if self._model_unk_id not in model_ids:
            return ids + [self._mapped_ids[i] for i in model_ids]
        # A text that is unknown to the SentencePiece model may be a piece of the vocabulary.
        pieces = self._processor.encode(text, out_type=str)
        return ids + [self._ids_by_piece.get(piece, self.unk_id) for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids into one line of text, see `Tokenizer.decode`."""
        pieces = [self._pieces[i] for i in ids if i not in self._undecoded_ids]
        text: str = self._processor.decode(pieces) if pieces else ""
        # If both languages share the vocabulary, it has pieces that the SentencePiece model of the
        # target lacks. SentencePiece does not decode the ▁ of such pieces to a space.
        return self._clean(text.removeprefix("▁").replace("▁", " "))


@dataclass(frozen=True)
class TokenizerPair:
    """One SentencePiece model for each language."""

    src: Tokenizer
    tgt: Tokenizer
    shares_vocabulary: bool = False  # whether both use the ids of one `Vocabulary`

    @property
    def src_vocab_size(self) -> int | None:
        """Size of the source vocabulary, or None if source and target share ids and embeddings."""
        return None if self.shares_vocabulary else self.src.vocab_size

    @property
    def sha256(self) -> str:
        """Fingerprint of both vocabularies."""
        return hashlib.sha256(f"{self.src.sha256} {self.tgt.sha256}".encode("ascii")).hexdigest()


Tokenizers: TypeAlias = Tokenizer | TokenizerPair
"""The tokenizers of a data or model folder, with the attributes `src` and `tgt`."""


def find_tokenizers(folder: Path) -> Path:
    """Return `folder`, or the folder of its average or latest checkpoint if it is a run."""
    if any(folder.glob("tokenizer.*")):
        return folder
    for name in ("average", "checkpoints/latest"):
        if any(folder.glob(f"{name}/tokenizer.*")):
            return folder / name
    return folder


def load_tokenizers(
    folder: Path, sha256: str | None = None, removed_tags: Sequence[str] = ()
) -> Tokenizers:
    """Read the tokenizers of a data or model folder.

    Decoding a target removes one of `removed_tags` from its start. Raises `ModelError` if the
    tokenizers are missing or damaged, or if their fingerprint is not `sha256`.
    """
    verify_checksums(
        folder, JOINT_MODEL, SRC_MODEL, TGT_MODEL, VOCABULARY, SRC_VOCABULARY, TGT_VOCABULARY
    )
    tokenizers: Tokenizers
    if (folder / VOCABULARY).exists() or (folder / SRC_VOCABULARY).exists():
        tokenizers = _load_mapped(folder, removed_tags)
    elif (folder / SRC_MODEL).exists():
        src = Tokenizer.load(folder / SRC_MODEL)
        tokenizers = TokenizerPair(src, Tokenizer.load(folder / TGT_MODEL, removed_tags))
    else:
        tokenizers = Tokenizer.load(folder / JOINT_MODEL, removed_tags)
    if sha256 is not None and sha256 != tokenizers.sha256:
        raise ModelError(
            f"the tokenizer in {folder} has changed since the folder was made; copy or make the "
            "folder again"
        )
    return tokenizers


def _load_mapped(folder: Path, removed_tags: Sequence[str]) -> TokenizerPair:
    """Read the tokenizers of an imported model, with one vocabulary or with two."""
    shares_vocabulary = (folder / VOCABULARY).exists()
    if shares_vocabulary:
        src_vocabulary = Vocabulary.load(folder / VOCABULARY)
        tgt_vocabulary = src_vocabulary
    else:
        src_vocabulary = Vocabulary.load(folder / SRC_VOCABULARY)
        tgt_vocabulary = Vocabulary.load(folder / TGT_VOCABULARY)
    return TokenizerPair(
        src=MappedTokenizer(
            read_model(folder / SRC_MODEL), src_vocabulary, src_vocabulary.src_prefix
        ),
        tgt=MappedTokenizer(
            read_model(folder / TGT_MODEL),
            tgt_vocabulary,
            tgt_vocabulary.tgt_prefix,
            removed_tags,
        ),
        shares_vocabulary=shares_vocabulary,
    )


def save_tokenizers(folder: Path, tokenizers: Tokenizers) -> None:
    """Write the SentencePiece models, and the vocabularies of an imported model, into `folder`."""
    if isinstance(tokenizers, Tokenizer):
        (folder / JOINT_MODEL).write_bytes(tokenizers.model)
        return
    (folder / SRC_MODEL).write_bytes(tokenizers.src.model)
    (folder / TGT_MODEL).write_bytes(tokenizers.tgt.model)
    if tokenizers.src.vocabulary is not None:
        name = VOCABULARY if tokenizers.shares_vocabulary else SRC_VOCABULARY
        write_json(folder / name, asdict(tokenizers.src.vocabulary))
    if tokenizers.tgt.vocabulary is not None and not tokenizers.shares_vocabulary:
        write_json(folder / TGT_VOCABULARY, asdict(tokenizers.tgt.vocabulary))


def read_model(path: Path) -> bytes:
    """Read the bytes of a SentencePiece model. Raises `ModelError` if it is missing or damaged."""
    try:
        model = read_regular_file(path)
        processor = open_model(model)
        # a damaged model may load without an error, and raise when it is used
        processor.id_to_piece(list(range(processor.vocab_size())))
        processor.decode([max(processor.unk_id(), 0)])
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; give a SentencePiece model") from None
    except (RuntimeError, ValueError, LookupError):
        raise ModelError(f"{path} is not a SentencePiece model; copy or make it again") from None
    return model


def refuse_surrogates(texts: Sequence[str]) -> None:
    """Raise `DataError` if a text has half of a surrogate pair."""
    for text in texts:
        match = re.search("[\ud800-\udfff]", text)
        if match is not None:
            raise DataError(
                f"the text {text[:40]!a} has half a surrogate pair at character "
                f"{match.start()}; decode it with errors='replace'"
            ) from None


def open_model(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Load a SentencePiece model. Raises `RuntimeError` if the bytes are invalid."""
    if not model:
        raise RuntimeError("an empty file is not a model")  # SentencePiece accepts it
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def _read_vocabulary(processor: sentencepiece.SentencePieceProcessor) -> Vocabulary:
    """Return the pieces and ids of a SentencePiece model."""
    return Vocabulary(
        pieces=processor.id_to_piece(list(range(processor.vocab_size()))),
        pad_id=processor.pad_id(),
        unk_id=processor.unk_id(),
        bos_id=processor.bos_id(),
        eos_id=processor.eos_id(),
    )


def _find_byte_ids(processor: sentencepiece.SentencePieceProcessor) -> list[int]:
    """Return the ids that a SentencePiece model has for single bytes."""
    return [i for i in range(processor.vocab_size()) if processor.is_byte(i)]
