"""Show translations and attention weights in notebooks, as HTML that needs no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nmt.translate.results import Translation

_BLUE = "rgb(0 114 178 / {:.2f})"  # Okabe and Ito's blue, readable on light and dark pages
_CELL = '<td style="text-align:left">{}</td>'


class NBestList(list[Translation]):
    """The translations of a line, best first, which a notebook shows as a table.

    `source_tokens` are the pieces of the line, with EOS. They are empty without `alignment`.
    """

    def __init__(self, translations: Sequence[Translation], source_tokens: Sequence[str]) -> None:
        super().__init__(translations)
        self.source_tokens = source_tokens

    def _repr_html_(self) -> str:
        """Return a table of translations and scores, and the alignment of the best one."""
        rows = []
        for rank, translation in enumerate(self, start=1):
            cells = [str(rank), escape(translation.text), f"{translation.score:.3f}"]
            rows.append("".join(map(_CELL.format, cells)))
        html = _table(["", "translation", "score"], rows)
        if self and self[0].alignment is not None and self.source_tokens:
            html += _alignment_table(self[0], self.source_tokens)
        return html


def _alignment_table(translation: Translation, source_tokens: Sequence[str]) -> str:
    """Return a table with the source token of each token of a translation."""
    assert translation.alignment is not None
    tokens = [escape(token) for token in translation.tokens]
    sources = [escape(source_tokens[i]) for i in translation.alignment[: len(tokens)]]
    token_row = "".join(map(_CELL.format, tokens))
    source_row = "".join(map(_CELL.format, sources))
    return _table([], [token_row, source_row])


def heat_map(
    rows: Sequence[str], columns: Sequence[str], weights: Sequence[Sequence[float]]
) -> str:
    """Return a table of weights (rows, columns) from 0 to 1; larger weights have darker cells."""
    table_rows = []
    for token, row_weights in zip(rows, weights, strict=True):
        cells = [_CELL.format(escape(token))]
        for column, weight in zip(columns, row_weights, strict=True):
            title = f"{escape(token)} → {escape(column)}: {weight:.3f}"
            color = _BLUE.format(weight)
            cells.append(f'<td title="{title}" style="background:{color}">{weight:.2f}</td>')
        table_rows.append("".join(cells))
    return _table(["", *columns], table_rows)


def _table(header: Sequence[str], rows: Sequence[str]) -> str:
    """Return a table; `header` is text, and `rows` are the HTML of cells."""
    head = "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
