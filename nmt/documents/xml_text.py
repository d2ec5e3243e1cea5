"""`XmlText`, a source text in XML, and functions for the tokens of XML."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nmt.documents.texts import WrappedText
from nmt.documents.xml_tokens import XmlKind, XmlToken, remove_invalid
from nmt.translate.results import LineResult

_CDATA_MARKS = ("<![CDATA[", "]]>")


@dataclass(frozen=True)
class XmlText(WrappedText):
    """A text with markup. See `SourceText`."""

    removed_markup: Sequence[str] = ()
    """Markup that is removed from the translation, such as elements without text."""

    def render(self, results: Sequence[LineResult], rank: int = 0, prefix: str = "") -> str:
        """See `SourceText.render`."""
        rendered = remove_invalid(self.text.render(results, rank, prefix))
        for markup in self.removed_markup:
            rendered = rendered.replace(markup, "")
        return rendered


def escape(text: str) -> str:
    """Escape a text as the content of an element."""
    return html.escape(text, quote=False)


def is_cdata_mark(token: XmlToken) -> bool:
    """Return whether a token begins or ends a CDATA section."""
    return token.raw in _CDATA_MARKS


def find_element_end(tokens: Sequence[XmlToken], start: int) -> int:
    """Return the index after the element that begins at `start`.

    If the token at `start` begins no element, this is the index after the token.
    """
    depth = 0
    for index in range(start, len(tokens)):
        if tokens[index].kind is XmlKind.OPENING:
            depth += 1
        elif tokens[index].kind is XmlKind.CLOSING:
            depth -= 1
        if depth <= 0:
            return index + 1
    return len(tokens)


def consume_element(first: XmlToken, tokens: Iterator[XmlToken]) -> list[XmlToken]:
    """Return the tokens of an element from its start tag, `first`, to its end tag.

    Reads all tokens after `first` from the iterator.
    """
    element = [first]
    depth = 1
    while depth:
        token = next(tokens)
        element.append(token)
        if token.kind is XmlKind.OPENING:
            depth += 1
        elif token.kind is XmlKind.CLOSING:
            depth -= 1
    return element


def join_raw(tokens: Sequence[XmlToken]) -> str:
    """Return the source of tokens."""
    return "".join(token.raw for token in tokens)
