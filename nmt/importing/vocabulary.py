"""The vocabulary of an imported model: pieces and ids of its files, and the SentencePiece models
that cut text into these pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.config import ImportConfig, resolve
from nmt.data.tokenizer import (
    LANGUAGE,
    MappedTokenizer,
    SeparateTokenizers,
    Tokenizer,
    Tokenizers,
    Vocabulary,
    read_model,
)
from nmt.errors import ConfigError, ModelError, nearest
from nmt.importing.settings import read_text

_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_NAMED = "\a\b\t\n\v\f\r\0\x1b\x85\xa0\u2028\u2029"  # in YAML, in the order of their names:
_ESCAPED = dict(zip("abtnvfr0eN_LP", _NAMED, strict=True))
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which no UTF-8 holds
_MOST_UNNAMED = 1024  # rows of an embedding after its last piece, which round its size up


@dataclass(frozen=True)
class SpecialIds:
    """The control symbols of one side, and what stands before its texts: a language."""

    pad: int
    unk: int
    start: int  # what decoding starts from
    eos: int
    prefix: Sequence[int] = ()


def list_pieces(path: Path, ids: Iterable[tuple[str, Any]], size: int) -> list[str]:
    """Return the pieces in the order of their ids, `size` of them; the last ones may have no name.

    Raises a `ModelError` for a hole, an id with two pieces, or ids beyond `size`.
    """
    names: dict[int, str] = {}
    for piece, i in ids:
        if not isinstance(piece, str) or not piece.isascii() and _SURROGATE.search(piece):
            raise ModelError(f"{path}: the piece {piece!r:.60} of id {i!r:.60} is no text")
        is_id = isinstance(i, int) and not isinstance(i, bool) and 0 <= i < size
        if not is_id or names.setdefault(i, piece) != piece:
            raise ModelError(
                f"{path} gives {piece!r} the id {i!r}, which is taken or no row of the embedding "
                f"({size} rows); the files do not belong together"
            )
    known = set(names.values())
    if len(known) < len(names):
        raise ModelError(f"{path} gives a piece two ids; the files do not belong together")
    missing = sorted(set(range(size)) - names.keys())
    if missing and (missing[0] != len(names) or len(missing) > max(_MOST_UNNAMED, size // 8)):
        raise ModelError(f"{path} has no piece of id {missing[0]}; the vocabulary has a hole")
    for i in missing:
        names[i] = f"<unused {i}>"
        if names[i] in known:
            raise ModelError(f"{path} has no piece of id {i}; the vocabulary has a hole")
    return [names[i] for i in range(size)]


def read_yaml_vocabulary(path: Path) -> list[tuple[str, Any]]:
    """Return the pieces and ids of Marian's YAML, `piece: id` a line or `? piece` and `: id`.

    YAML itself would read some pieces as numbers, dates or line breaks.
    """
    found: list[tuple[str, Any]] = []
    piece = ""
    for line in read_text(path).split("\n"):
        if line.startswith("? "):
            piece = line[2:]
            continue
        name, colon, number = line.removesuffix("\r").rpartition(":")
        if not line.strip():
            continue
        if not colon or not number.strip().isdecimal():
            raise ModelError(f"{path}: {line[:60]!r} is no piece with an id; copy it again")
        found.append((_unquote(name or piece), int(number)))
    return found


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


def spm_files(folder: Path, config: ImportConfig, *names: tuple[str, str]) -> tuple[Path, Path]:
    """Return the SentencePiece models of source and target: those of the settings, or the first
    pair of `names` in the folder.
    """
    given = [config.src_tokenizer, config.tgt_tokenizer or config.src_tokenizer]
    if given[0] is not None:
        return resolve(given[0]), resolve(str(given[1]))
    for src, tgt in names:
        if (folder / src).is_file() and (folder / tgt).is_file():
            return folder / src, folder / tgt
    shown = " or ".join(dict.fromkeys(name for pair in names for name in pair))
    raise ModelError(
        f"{folder} holds no SentencePiece model ({shown}); give src_tokenizer=FILE, and "
        "tgt_tokenizer=FILE if that of the target is another"
    )


def find_id(pieces: Mapping[str, int], name: str, path: Path) -> int:
    """Return the id of a control symbol; a missing one is a `ModelError`."""
    if name not in pieces:
        raise ModelError(f"{path} lacks the control symbol {name!r}; copy it again")
    return pieces[name]


def find_language(pieces: Mapping[str, int], key: str, lang: str | None) -> int:
    """Return the id of the piece that stands for a language; raise a `ConfigError` that names the
    nearest ones for another.
    """
    for name in (f"{lang}", f"__{lang}__"):
        if name in pieces:
            return pieces[name]
    names = [piece.strip("_") for piece in pieces if LANGUAGE.fullmatch(piece)]
    shown = "null" if lang is None else lang
    raise ConfigError(f"{key}={shown}: {nearest(shown, names)}")


def make_tokenizers(
    spm: tuple[Path, Path], pieces: tuple[list[str], list[str]], special: Sequence[SpecialIds], *,
    is_joint: bool,
) -> Tokenizers:  # fmt: skip
    """Make the tokenizers of source and target; where ids are those of the SentencePiece models, as
    in what nmt exports, plain ones.
    """
    models = [read_model(path) for path in spm]
    prefixes = [list(side.prefix) for side in special]
    control = [(side.pad, side.unk, side.start, side.eos) for side in special]
    for ids, names in zip(control, pieces, strict=True):
        if not 0 <= min(ids) <= max(ids) < len(names):
            raise ModelError(f"{spm[0].parent}: control symbols {ids} of {len(names)} pieces")
    plain = [Tokenizer(model) for model in models]
    has_ids = all(
        side.all_pieces() == names and side.control_ids == list(ids)
        for side, names, ids in zip(plain, pieces, control, strict=True)
    )
    if has_ids and not any(prefixes) and not (is_joint and models[0] != models[1]):
        return plain[0] if is_joint else SeparateTokenizers(plain[0], plain[1])
    src, tgt = (
        MappedTokenizer(model, Vocabulary(names, *ids, *prefixes), prefix)
        for model, names, ids, prefix in zip(models, pieces, control, prefixes, strict=True)
    )
    return SeparateTokenizers(src, tgt, is_joint)
