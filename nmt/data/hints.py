"""Hints in source text, which tell a model how to translate some words (docs/control.md).

A model learns in training to follow hints (Dinu et al., 2019). A hint is ordinary text with three
symbols, so that every engine can translate it:

    The__source__ dog__target__ Hund__done__ runs.

The space before a word comes after the symbol. SentencePiece therefore divides the word into the
same pieces as without a hint. `nmt.data.terminology` adds hints to training pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError

SOURCE = "__source__"  # the symbols of OpusTrainer
TARGET = "__target__"
DONE = "__done__"

_HINT = re.compile(f"{SOURCE}(.*?){TARGET} .*?{DONE}")


class Term(NamedTuple):
    """A term in a source text, from the character `start` up to `end`."""

    start: int
    end: int
    target: str  # the translation of the term


def check_hint_symbols(setting: str, tokenizer: Tokenizer) -> None:
    """Raise a `ConfigError` that names `setting` unless the tokenizer can read hints."""
    # imported only here, since it imports protobuf, which takes time
    from nmt.data.vocabulary import has_word_pieces, user_symbols

    if has_word_pieces(tokenizer.model):  # such a model does not separate symbols from words
        raise ConfigError(f"{setting} needs a vocabulary of tokenizer.type=bpe or unigram")
    symbols = set(user_symbols(tokenizer.model))
    if not symbols.issuperset([SOURCE, TARGET, DONE]):
        raise ConfigError(
            f"{setting} needs a vocabulary with the symbols of hints; run nmt-preprocess with "
            f"tokenizer.symbols=[{SOURCE},{TARGET},{DONE}]"
        )


def add_hints(text: str, terms: Iterable[Term]) -> str:
    """Add a hint for each term to a source text. The terms are sorted and do not overlap."""
    hinted = ""
    position = 0
    for term in terms:
        # the space before the term comes after the symbol (see the start of this file)
        text_before = text[position : term.start]
        word_before = text_before.rstrip()
        space = text_before[len(word_before) :]
        if term.start == 0:  # the tokenizer puts a space before a text
            space = " "
        source = text[term.start : term.end]
        hinted += f"{word_before}{SOURCE}{space}{source}{TARGET} {term.target}{DONE}"
        position = term.end
    return hinted + text[position:]


def remove_unfinished_hint(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a truncated source. If the truncation cut through a hint, remove the hint.

    The source words of the hint stay. Only its symbols and its target are removed.
    """
    pieces = tokenizer.pieces(ids)
    if SOURCE not in pieces:
        return list(ids)
    distance_from_end = pieces[::-1].index(SOURCE)
    hint_start = len(pieces) - 1 - distance_from_end  # the last hint begins here
    last_hint = pieces[hint_start:]
    if DONE in last_hint:
        return list(ids)
    term_end = len(pieces)
    if TARGET in last_hint:
        term_end = hint_start + last_hint.index(TARGET)
    ids_before = list(ids[:hint_start])
    # the tokenizer puts this space before a text, and the first source word has its own space
    if hint_start > 0 and pieces[hint_start - 1] == "▁":
        ids_before.pop()
    term_ids = list(ids[hint_start + 1 : term_end])
    return ids_before + term_ids


def remove_hints_from_text(text: str) -> str:
    """Remove the hints from the text of a source."""
    return _HINT.sub(r"\1", text).lstrip()


class PlainPieces(NamedTuple):
    """The pieces of a source without hints."""

    pieces: list[str]
    positions: list[int]
    """An index in `pieces` for each piece of the source with hints. The symbols and the target of a
    hint, which are not in `pieces`, have the index of the first piece of the term.
    """


def remove_hints(pieces: Iterable[str]) -> PlainPieces:
    """Remove the hints from the pieces of a source."""
    plain: list[str] = []
    positions = []
    term_start = 0
    is_in_target = False  # from TARGET to DONE
    for piece in pieces:
        if piece == SOURCE:
            # the tokenizer puts this space before a text, and the term has its own space
            if plain and plain[-1] == "▁":
                plain.pop()
            term_start = len(plain)
        if piece == TARGET:
            is_in_target = True
        if is_in_target or piece == SOURCE:
            positions.append(term_start)
        else:
            positions.append(len(plain))
            plain.append(piece)
        if piece == DONE:
            is_in_target = False
    return PlainPieces(plain, positions)
