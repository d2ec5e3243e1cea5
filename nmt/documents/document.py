"""`Document`, a file to translate: its texts, and how to build it from their translations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nmt.documents.markup import parse_html
from nmt.documents.texts import SourceText, parse_plain_text
from nmt.errors import DataError

MAX_TEXTS = 1_000_000  # maximum for a file; each text takes half a kilobyte of memory


@dataclass(frozen=True)
class Document:
    """The texts of a file, and a function that builds the file from their translations."""

    texts: list[SourceText]
    assemble: Callable[[list[str]], bytes]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How the texts of a file or request are read."""

    split_sentences: bool = True
    columns: Sequence[str] = ()
    """Columns of a table to translate: numbers from 1, or names in the first row. () means all."""
    tgt_lang: str = ""
    """Language of the translation, for files that have to state it; empty if it is unknown."""


def read_text(options: ReadOptions, text: str, *, is_html: bool = False) -> SourceText:
    """Cut a text into sentences."""
    if is_html:
        return parse_html(text, split_sentences=options.split_sentences)
    return parse_plain_text(text, split_sentences=options.split_sentences)


def join_texts(texts: Sequence[str]) -> bytes:
    """Return the content of a file that consists of `texts`."""
    return "".join(texts).encode()


def check_count(num_texts: int) -> None:
    """Raise a `DataError` if a file has too many texts."""
    if num_texts > MAX_TEXTS:
        raise DataError(f"the file has more than {MAX_TEXTS} texts; cut it into several")
