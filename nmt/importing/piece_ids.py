"""Read the vocabularies of an imported model, and make its tokenizers.

A tokenizer needs a vocabulary and a SentencePiece model.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from nmt.config import ImportConfig, resolve_path
from nmt.data.tokenizer import (
    LANGUAGE_PATTERN,
    MappedTokenizer,
    Tokenizer,
    TokenizerPair,
    Tokenizers,
    Vocabulary,
    read_model,
    unused_piece,
)
from nmt.errors import ConfigError, ModelError, suggest_names
from nmt.importing.settings import read_text

# an escape of YAML, such as \x41, \u0041, \U00000041 or \n
_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<character>.))"
)
_ESCAPED_CHARACTERS = {  # meaning of a letter after a backslash in YAML's double quotes
    "a": "\a",
    "b": "\b",
    "t": "\t",
    "n": "\n",
    "v": "\v",
    "f": "\f",
    "r": "\r",
    "0": "\0",
    "e": "\x1b",
    "N": "\x85",
    "_": "\xa0",
    "L": "\u2028",
    "P": "\u2029",
}
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which UTF-8 cannot encode
_MAX_UNUSED_ROWS = 1024
"""Number of rows at the end of an embedding that may have no piece, since its size is often rounded
up. A large embedding may have more of them, up to an eighth of its rows.
"""


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the control symbols, and perhaps of a language that every text begins with."""

    pad: int
    unk: int
    decoder_start: int  # the first input of the decoder
    eos: int
    language: int | None = None

    @property
    def control_ids(self) -> list[int]:
        """Ids of padding, UNK, the start of decoding and EOS."""
        return [self.pad, self.unk, self.decoder_start, self.eos]

    @property
    def prefix(self) -> list[int]:
        """Ids that every text begins with."""
        return [] if self.language is None else [self.language]


@dataclass(frozen=True)
class SideVocabulary:
    """The vocabulary and the SentencePiece model of the source or the target."""

    spm_path: Path  # the file of the SentencePiece model
    pieces: list[str]  # piece i has the id i
    special_ids: SpecialIds


def add_ids(pieces: Iterable[str]) -> list[tuple[str, int]]:
    """Return pairs of piece and id for pieces in the order of their ids."""
    return [(piece, i) for i, piece in enumerate(pieces)]


def sort_pieces(path: Path, pieces_and_ids: Iterable[tuple[str, Any]], size: int) -> list[str]:
    """Sort the pieces of a vocabulary by their ids, and check that their ids are 0 to `size` - 1.

    `pieces_and_ids` is the content of the file `path`, and `size` the number of rows of the
    embedding. The last rows may have no piece: their ids get the piece `<unused ID>`. Raises
    `ModelError` for other missing ids, for an id or a piece that occurs twice, and for an id of
    `size` or above.
    """
    piece_of_id: dict[int, str] = {}
    for piece, i in pieces_and_ids:
        if not isinstance(piece, str) or _SURROGATE.search(piece):
            raise ModelError(f"{path}: the piece {piece!r:.60} of id {i!r:.60} is not text")
        has_row = type(i) is int and 0 <= i < size
        is_taken = has_row and piece_of_id.get(i, piece) != piece  # by another piece
        if not has_row or is_taken:
            raise ModelError(
                f"{path} gives {piece!r} the id {i!r}, which is taken or no row of the embedding "
                f"({size} rows); the files do not belong together"
            )
        piece_of_id[i] = piece
    missing_ids = sorted(set(range(size)) - piece_of_id.keys())
    if missing_ids:
        # the pieces then have the ids 0, 1, ... without a gap
        is_only_at_end = missing_ids[0] == len(piece_of_id)
        if not is_only_at_end or len(missing_ids) > max(_MAX_UNUSED_ROWS, size // 8):
            raise ModelError(
                f"{path} has no piece of id {missing_ids[0]}; the vocabulary has a hole"
            )
    for i in missing_ids:
        piece_of_id[i] = unused_piece(i)
    if len(set(piece_of_id.values())) < size:
        raise ModelError(f"{path} gives a piece two ids; the files do not belong together")
    return [piece_of_id[i] for i in range(size)]


def read_yaml_vocabulary(path: Path) -> list[tuple[str, Any]]:
    """Return the pieces and ids of a vocabulary of Marian, whose lines are `piece: id`.

    Long pieces take two lines, `? piece` and `: id`. This is not a YAML parser, which would read
    some pieces as numbers, dates or line breaks.
    """
    pieces_and_ids: list[tuple[str, Any]] = []
    long_piece = ""
    for line in read_text(path).replace("\r\n", "\n").split("\n"):
        if line.startswith("? "):
            long_piece = line.removeprefix("? ")
            continue
        if not line.strip():
            continue
        piece, colon, number = line.rpartition(":")
        if not colon or not number.strip().isdecimal():
            raise ModelError(f"{path}: {line[:60]!r} is not a piece with an id; copy it again")
        if not piece:  # the line is ": id"
            piece = long_piece
        pieces_and_ids.append((_unquote(piece), int(number)))
    return pieces_and_ids


def _unquote(text: str) -> str:
    """Remove the quotes and escapes of a YAML scalar."""
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) > 1 and text[0] == text[-1] == '"':
        return _ESCAPE.sub(_unescape, text[1:-1])
    return text


def _unescape(match: re.Match[str]) -> str:
    """Return the character for a match of `_ESCAPE`."""
    digits = match["x"] or match["u"] or match["U"]
    if digits:
        code_point = int(digits, 16)
        return chr(min(code_point, sys.maxunicode))  # a damaged file may have larger numbers
    return _ESCAPED_CHARACTERS.get(match["character"], match["character"])


def find_spm(
    folder: Path, config: ImportConfig, name_pairs: Sequence[tuple[str, str]]
) -> tuple[Path, Path]:
    """Return the paths of the SentencePiece models of source and target.

    Returns the files that `config` names, or else the first of `name_pairs` that the folder
    contains. Raises `ModelError` if it contains no pair.
    """
    if config.src_tokenizer is not None:
        src_path = resolve_path(config.src_tokenizer)
        return src_path, resolve_path(config.tgt_tokenizer or config.src_tokenizer)
    for src_name, tgt_name in name_pairs:
        if (folder / src_name).exists() and (folder / tgt_name).exists():
            return folder / src_name, folder / tgt_name
    names = dict.fromkeys(chain.from_iterable(name_pairs))  # without repetitions, in order
    raise ModelError(
        f"{folder} holds no SentencePiece model ({' or '.join(names)}); give src_tokenizer=FILE, "
        "and tgt_tokenizer=FILE if the target has another one"
    )


def find_id(id_of_piece: Mapping[str, int], piece: str, path: Path) -> int:
    """Return the id of a control symbol in the vocabulary at `path`.

    Raises `ModelError` if it is missing.
    """
    if piece not in id_of_piece:
        raise ModelError(f"{path} lacks the control symbol {piece!r}; copy it again")
    return id_of_piece[piece]


def find_language(id_of_piece: Mapping[str, int], setting_name: str, lang: str | None) -> int:
    """Return the id of the language `lang`, the value of a setting such as `src_lang`.

    M2M100 has pieces such as `__en__`, and NLLB such as `eng_Latn`. Raises a `ConfigError` that
    suggests similar languages if the vocabulary lacks this one.
    """
    for piece in (f"__{lang}__", str(lang)):
        # the pattern excludes ordinary pieces, such as the piece "en" of M2M100
        if piece in id_of_piece and LANGUAGE_PATTERN.fullmatch(piece):
            return id_of_piece[piece]
    languages = [piece.strip("_") for piece in id_of_piece if LANGUAGE_PATTERN.fullmatch(piece)]
    value = "null" if lang is None else lang
    raise ConfigError(f"{setting_name}={value}: {suggest_names(value, languages)}")


def make_tokenizers(
    src: SideVocabulary, tgt: SideVocabulary, *, shares_embedding: bool
) -> Tokenizers:
    """Make the tokenizers of a model from its vocabularies and SentencePiece models.

    With `shares_embedding`, source and target must have the same vocabulary. If the SentencePiece
    models have the same ids as the imported model, as in exports of nmt, they are used unchanged.
    Otherwise, a `Vocabulary` maps their ids to the ids of the imported model.
    """
    folder = src.spm_path.parent
    for side in (src, tgt):
        ids = side.special_ids.control_ids
        if min(ids) < 0 or max(ids) >= len(side.pieces):
            raise ModelError(
                f"{folder}: control symbols have the ids {ids}, and the vocabulary of "
                f"{len(side.pieces)} pieces lacks some of them; copy it again"
            )
    if shares_embedding and src.pieces != tgt.pieces:
        raise ModelError(f"{folder} has one embedding and two vocabularies; copy it again")
    src_tokenizer = Tokenizer(read_model(src.spm_path))
    tgt_tokenizer = Tokenizer(read_model(tgt.spm_path))
    keeps_ids = _has_equal_ids(src_tokenizer, src) and _has_equal_ids(tgt_tokenizer, tgt)
    if keeps_ids and not shares_embedding:
        return TokenizerPair(src_tokenizer, tgt_tokenizer)
    has_one_model = src_tokenizer.model == tgt_tokenizer.model
    if keeps_ids and has_one_model:
        return src_tokenizer
    # In all other cases, the tokenizers map ids, even if their SentencePiece ids are correct: two
    # SentencePiece models may share one vocabulary.

    def map_ids(tokenizer: Tokenizer, side: SideVocabulary) -> Tokenizer:
        """Return a tokenizer that gives each piece the id of the imported model."""
        vocabulary = Vocabulary(
            pieces=side.pieces,
            pad_id=side.special_ids.pad,
            unk_id=side.special_ids.unk,
            bos_id=side.special_ids.decoder_start,
            eos_id=side.special_ids.eos,
            src_prefix=src.special_ids.prefix,
            tgt_prefix=tgt.special_ids.prefix,
        )
        return MappedTokenizer(tokenizer.model, vocabulary, side.special_ids.prefix)

    return TokenizerPair(
        src=map_ids(src_tokenizer, src),
        tgt=map_ids(tgt_tokenizer, tgt),
        shares_vocabulary=shares_embedding,
    )


def _has_equal_ids(tokenizer: Tokenizer, side: SideVocabulary) -> bool:
    """Return whether a SentencePiece model has the same ids as the imported model."""
    special_ids = side.special_ids
    return (
        tokenizer.all_pieces() == side.pieces
        and tokenizer.control_ids == special_ids.control_ids
        and special_ids.language is None
    )
