"""Read tables in CSV and TSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from nmt.documents.document import Document, ReadOptions, check_count, join_texts, read_text
from nmt.errors import DataError, suggest_names

_MAX_ROW_CHARACTERS = 1 << 16  # the separator is looked for in this part of the first row
# A cell in quotation marks, such as "a ""quoted"" word". The first pattern allows several
# separators, and the second only tabs.
_QUOTED_TEXT = re.compile(r'(?:^|(?<=[,;\t|]))"(?:[^"]|"")*"(?=[,;\t|\r\n]|$)')
_QUOTED_CELL = re.compile(r'(?:^|(?<=\t))"(?:[^"]|"")*"(?=\t|\r?$)', re.MULTILINE)


def read_table(text: str, options: ReadOptions, *, suffix: str) -> Document:
    """Read CSV or TSV.

    If `columns` are names, the first row has these names and is not translated.
    """
    # the most frequent character of the first row separates the cells
    unquoted_text = _QUOTED_TEXT.sub("", text[:_MAX_ROW_CHARACTERS])
    first_line = unquoted_text.split("\n", 1)[0]
    delimiter = "\t" if suffix == ".tsv" else max(",;\t|", key=first_line.count)
    has_quotes = suffix == ".csv" or _has_quoted_cells(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    rows = _parse_rows(text, delimiter, has_quotes=has_quotes)
    cells = _find_cells(rows, options.columns)
    check_count(len(cells))

    def assemble(translations: list[str]) -> bytes:
        translated_rows = [list(row) for row in rows]
        for (row, column), translation in zip(cells, translations, strict=True):
            translated_rows[row][column] = translation
        if not has_quotes:
            return join_texts([delimiter.join(row) + newline for row in translated_rows])
        stream = io.StringIO(newline="")
        csv.writer(stream, delimiter=delimiter, lineterminator=newline).writerows(translated_rows)
        return stream.getvalue().encode()

    texts = [read_text(options, rows[row][column]) for row, column in cells]
    return Document(texts, assemble)


def _parse_rows(text: str, delimiter: str, *, has_quotes: bool) -> list[list[str]]:
    """Return the rows of a table, lists of cells. Raises `DataError` for a broken table."""
    csv.field_size_limit(1 << 24)  # limits cells for all readers of this process
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
        strict=True,
    )
    try:
        return list(reader)
    except csv.Error as error:
        raise DataError(f"the table cannot be read: {error}") from None


def _has_quoted_cells(text: str) -> bool:
    """Return whether quotes in a TSV file quote whole cells. In most files they are plain text."""
    unquoted = _QUOTED_CELL.sub("", text)
    return unquoted != text and '"' not in unquoted


def _find_cells(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> list[tuple[int, int]]:
    """Return row and column of each cell to translate: all cells in `columns` with a letter."""
    first_row = 0
    if all(_is_column_number(name) for name in columns):
        column_indices = [int(name) - 1 for name in columns]
    else:
        header = rows[0] if rows else []
        first_row = 1  # names of columns are not translated
        column_indices = [_find_column(header, name) for name in columns]
    cells = []
    for row_index, row in enumerate(rows[first_row:], first_row):
        for column in column_indices or range(len(row)):
            if column < len(row) and any(map(str.isalpha, row[column])):
                cells.append((row_index, column))
    return cells


def _find_column(header: Sequence[str], name: str) -> int:
    """Return the index of the column with this name. Raises `DataError` if there is none."""
    if name not in header:
        raise DataError(f"columns: the first row has no {name}; {suggest_names(name, header)}")
    return header.index(name)


def _is_column_number(name: str) -> bool:
    """Return whether a column is given by its number. A number has at most six digits."""
    return name.isascii() and name.isdigit() and len(name) <= 6 and int(name) > 0
