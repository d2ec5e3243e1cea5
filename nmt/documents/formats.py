"""The file formats that can be translated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import PurePath

from nmt.documents import document
from nmt.documents.document import Document, ReadOptions, check_count, join_texts, read_text
from nmt.documents.markup import MarkupText, parse_html
from nmt.documents.packages import DOCX, EPUB, OPEN_DOCUMENT, PPTX, read_package
from nmt.documents.po import read_po
from nmt.documents.subtitles import read_subtitles
from nmt.documents.suffixes import FORMATS
from nmt.documents.tables import read_table
from nmt.documents.xliff import read_xliff
from nmt.errors import DataError


def read_document(name: str, content: bytes, options: ReadOptions) -> Document:
    """Read a file in the format of its name's suffix.

    Raises `DataError` if the format is unknown, the content is not valid, or the file is too large.
    """
    suffix = PurePath(name).suffix.lower()
    if suffix in _TEXT_READERS:
        return _read_text(_TEXT_READERS[suffix], content, options)
    if suffix in _READERS:
        return _READERS[suffix](content, options)
    raise DataError(f"{suffix or name}: no such file format; valid: {', '.join(FORMATS)}")


def _read_text(
    read: Callable[[str, ReadOptions], Document], content: bytes, options: ReadOptions
) -> Document:
    """Decode a file in UTF-8, and read it with the function `read`."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"the file is not UTF-8 (byte {error.start + 1}); convert it") from None
    byte_order_mark = "\ufeff" if text.startswith("\ufeff") else ""  # the translation keeps it
    text = text.removeprefix(byte_order_mark)
    # in HTML, each tag becomes a token before the texts can be counted; an element has two tags
    max_tags = 2 * document.MAX_TEXTS
    if text.count("<") > max_tags:
        raise DataError(f"the file has more than {max_tags} tags; cut it into several")
    file = read(text, options)
    return Document(file.texts, lambda texts: byte_order_mark.encode() + file.assemble(texts))


def _read_lines(text: str, options: ReadOptions) -> Document:
    lines = text.splitlines(keepends=True)
    check_count(len(lines))
    return Document([read_text(options, line) for line in lines], join_texts)


def _read_html(text: str, options: ReadOptions) -> Document:
    page = parse_html(text, split_sentences=options.split_sentences)
    return Document([MarkupText([content]) for content in page.contents], join_texts)


_TEXT_READERS: dict[str, Callable[[str, ReadOptions], Document]] = {  # the keys are suffixes
    ".txt": _read_lines,
    ".srt": read_subtitles,
    ".html": _read_html,
    ".htm": _read_html,
    ".csv": partial(read_table, suffix=".csv"),
    ".tsv": partial(read_table, suffix=".tsv"),
}
# The keys are suffixes. These formats are archives, or name their encoding inside the file.
_READERS: dict[str, Callable[[bytes, ReadOptions], Document]] = {
    ".docx": partial(read_package, package_format=DOCX),
    ".pptx": partial(read_package, package_format=PPTX),
    ".odt": partial(read_package, package_format=OPEN_DOCUMENT),
    ".odp": partial(read_package, package_format=OPEN_DOCUMENT),
    ".epub": partial(read_package, package_format=EPUB),
    ".xlf": read_xliff,
    ".xliff": read_xliff,
    ".sdlxliff": read_xliff,
    ".mqxliff": read_xliff,
    ".po": read_po,
    ".pot": read_po,
}
