"""The vocabulary of an imported model: pieces and ids from its files, and the SentencePiece models
that cut text into these pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.config import ImportConfig, resolve
from nmt.data.tokenizer import (
    LANGUAGE,
    UNUSED_PREFIX,
    MappedTokenizer,
    Tokenizer,
    TokenizerPair,
    Tokenizers,
    Vocabulary,
    read_model,
)
from nmt.errors import ConfigError, ModelError, nearest
from nmt.importing.settings import read_text

_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_ESCAPED = {  # escapes of YAML's double-quoted scalars; other characters are kept
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
_MAX_UNNAMED = 1024  # rows at the end of an embedding that only round up its size


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the control symbols of a vocabulary, and of the language before every text."""

    pad: int
    unk: int
    start: int  # the first input of the decoder
    eos: int
    language: int | None = None

    @property
    def control_ids(self) -> list[int]:
        """Ids of padding, unknown, start and end."""
        return [self.pad, self.unk, self.start, self.eos]

    @property
    def prefix(self) -> list[int]:
        """Ids before every text."""
        return [] if self.language is None else [self.language]


@dataclass(frozen=True)
class Side:
    """The vocabulary of the source or target."""

    spm: Path  # the SentencePiece model
    pieces: list[str]  # piece i has the id i
    special: SpecialIds


def list_pieces(path: Path, ids: Iterable[tuple[str, Any]], size: int) -> list[str]:
    """Return the pieces in the order of their ids, `size` of them; the last ones may be unnamed.

    Raises `ModelError` for a missing id, an id with two pieces, or an id of `size` or above.
    """
    names: dict[int, str] = {}
    for piece, i in ids:
        if not isinstance(piece, str) or _SURROGATE.search(piece):
            raise ModelError(f"{path}: the piece {piece!r:.60} of id {i!r:.60} is no text")
        is_id = isinstance(i, int) and not isinstance(i, bool) and 0 <= i < size
        if not is_id or names.setdefault(i, piece) != piece:
            raise ModelError(
                f"{path} gives {piece!r} the id {i!r}, which is taken or no row of the embedding "
                f"({size} rows); the files do not belong together"
            )
    missing = sorted(set(range(size)) - names.keys())
    if missing and (missing[0] != len(names) or len(missing) > max(_MAX_UNNAMED, size // 8)):
        raise ModelError(f"{path} has no piece of id {missing[0]}; the vocabulary has a hole")
    names |= {i: f"{UNUSED_PREFIX}{i}>" for i in missing}
    if len(set(names.values())) < size:
        raise ModelError(f"{path} gives a piece two ids; the files do not belong together")
    return [names[i] for i in range(size)]


def read_yaml_vocabulary(path: Path) -> list[tuple[str, Any]]:
    """Return the pieces and ids of Marian's YAML: lines `piece: id`, or `? piece` and `: id`.

    A YAML parser would read some pieces as numbers, dates or line breaks.
    """
    ids: list[tuple[str, Any]] = []
    piece = ""
    for line in read_text(path).split("\n"):
        if line.startswith("? "):
            piece = line[2:]
            continue
        if not line.strip():
            continue
        name, colon, number = line.removesuffix("\r").rpartition(":")
        if not colon or not number.strip().isdecimal():
            raise ModelError(f"{path}: {line[:60]!r} is no piece with an id; copy it again")
        ids.append((_unquote(name or piece), int(number)))
    return ids


def _unquote(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) > 1 and text[0] == text[-1] == '"':
        return _ESCAPE.sub(_unescape, text[1:-1])
    return text


def _unescape(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    if digits:
        return chr(min(int(digits, 16), 0x10FFFF))
    return _ESCAPED.get(match[4], match[4])


def find_spm(folder: Path, config: ImportConfig, *names: tuple[str, str]) -> tuple[Path, Path]:
    """Return the SentencePiece models of source and target: the files of the settings, or the
    first pair of `names` in the folder.
    """
    if config.src_tokenizer is not None:
        src_path = resolve(config.src_tokenizer)
        return src_path, resolve(config.tgt_tokenizer or config.src_tokenizer)
    for src, tgt in names:
        if (folder / src).exists() and (folder / tgt).exists():
            return folder / src, folder / tgt
    tried = " or ".join(dict.fromkeys(name for pair in names for name in pair))
    raise ModelError(
        f"{folder} holds no SentencePiece model ({tried}); give src_tokenizer=FILE, and "
        "tgt_tokenizer=FILE if the target has another one"
    )


def find_id(ids: Mapping[str, int], name: str, path: Path) -> int:
    """Return the id of a control symbol; raise `ModelError` if it is missing."""
    if name not in ids:
        raise ModelError(f"{path} lacks the control symbol {name!r}; copy it again")
    return ids[name]


def find_language(ids: Mapping[str, int], key: str, lang: str | None) -> int:
    """Return the id of a language; raise `ConfigError` that names similar ones if it is missing.

    M2M100 writes the language en as `__en__`; its ordinary piece "en" is part of words.
    """
    for piece in (f"__{lang}__", f"{lang}"):
        if piece in ids and LANGUAGE.fullmatch(piece):
            return ids[piece]
    languages = [piece.strip("_") for piece in ids if LANGUAGE.fullmatch(piece)]
    text = "null" if lang is None else lang
    raise ConfigError(f"{key}={text}: {nearest(text, languages)}")


def make_tokenizers(src: Side, tgt: Side, *, is_joint: bool) -> Tokenizers:
    """Make the tokenizers of a model; `is_joint` says that one embedding serves both sides.

    If the ids equal the ids of the SentencePiece models, as in exports of nmt, no mapping is
    stored.
    """
    folder = src.spm.parent
    for side in (src, tgt):
        ids = side.special.control_ids
        if not 0 <= min(ids) <= max(ids) < len(side.pieces):
            raise ModelError(f"{folder}: control symbols {ids} of {len(side.pieces)} pieces")
    if is_joint and src.pieces != tgt.pieces:
        raise ModelError(f"{folder} has one embedding and two vocabularies; copy it again")
    src_tokenizer = Tokenizer(read_model(src.spm))
    tgt_tokenizer = Tokenizer(read_model(tgt.spm))
    if _has_own_ids(src_tokenizer, src) and _has_own_ids(tgt_tokenizer, tgt):
        if not is_joint:
            return TokenizerPair(src_tokenizer, tgt_tokenizer)
        if src_tokenizer.model == tgt_tokenizer.model:
            return src_tokenizer
    tokenizers = []
    for side, tokenizer in ((src, src_tokenizer), (tgt, tgt_tokenizer)):
        vocabulary = Vocabulary(
            pieces=side.pieces,
            pad_id=side.special.pad,
            unk_id=side.special.unk,
            bos_id=side.special.start,
            eos_id=side.special.eos,
            src_prefix=src.special.prefix,
            tgt_prefix=tgt.special.prefix,
        )
        tokenizers.append(MappedTokenizer(tokenizer.model, vocabulary, side.special.prefix))
    return TokenizerPair(tokenizers[0], tokenizers[1], shares_vocabulary=is_joint)


def _has_own_ids(tokenizer: Tokenizer, side: Side) -> bool:
    """Return whether the ids of a SentencePiece model are the ids of the imported model."""
    special = side.special
    return (
        tokenizer.all_pieces() == side.pieces
        and tokenizer.control_ids == special.control_ids
        and special.language is None
    )
