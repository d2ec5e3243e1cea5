"""Cut HTML into texts, inline tags and the boundaries of blocks."""

from __future__ import annotations

import enum
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import accumulate, pairwise


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_INLINE = _names(
    "a abbr acronym b bdi bdo big cite code del dfn em font i img input ins kbd label mark math q "
    "rp rt ruby s samp small span strike strong sub sup svg time tt u var wbr"
)
_VOID = _names("area base br col embed hr img input link meta param source track wbr")
_OPAQUE = _names("code iframe math noscript object samp script style svg template var")
_LAYOUT = re.compile(r"([\t\r\n\f]+ *| {2,})")  # alignment of words and lines in <pre>
# An unclosed tag costs a pass over the text after it; beyond these limits, the rest is text
_MAX_UNCLOSED_TAGS = 16
_MAX_REREAD_CHARACTERS = 50_000


class TokenKind(enum.Enum):
    """How a token takes part in the translation."""

    TEXT = enum.auto()
    OPENING = enum.auto()  # start tag of an inline element
    CLOSING = enum.auto()  # end tag of an inline element
    ATOM = enum.auto()  # inline, without text to translate: an image, code, a comment
    BOUNDARY = enum.auto()  # separates blocks of text: a paragraph, a script, <br>


@dataclass(frozen=True)
class Token:
    """A part of the source. The tokens of a document together are its source, unchanged."""

    kind: TokenKind
    raw: str
    name: str = ""  # of the element, in lower case


def tokenize(text: str) -> Iterator[Token]:
    """Yield the tokens of an HTML document or fragment."""
    tokenizer = _Tokenizer(text)
    tokenizer.read()
    document_start = _TokenStart(0, TokenKind.TEXT)  # HTMLParser does not report "</>"
    document_end = _TokenStart(len(text), TokenKind.BOUNDARY)
    for token, following in pairwise([document_start, *tokenizer.starts, document_end]):
        raw = text[token.position : following.position]
        if not raw:
            continue
        if not token.is_preformatted:
            yield Token(token.kind, raw, token.name)
            continue
        for number, segment in enumerate(_LAYOUT.split(raw)):
            is_layout = number % 2 == 1  # the pattern has a group: split() returns separators too
            yield Token(TokenKind.BOUNDARY if is_layout else TokenKind.TEXT, segment)


def visible_text(text: str, num_characters: int) -> str:
    """Return the start of the text to translate, at least `num_characters` of it if there are.

    Only as much of a long document is read as that takes.
    """
    num_read = 8192
    while True:
        is_whole = num_read >= len(text)
        end = len(text) if is_whole else max(0, text.rfind("<", 0, num_read))  # cuts no tag in two
        texts = [
            " ".join(html.unescape(token.raw).split())
            for token in tokenize(text[:end])
            if token.kind is TokenKind.TEXT
        ]
        visible = " ".join(filter(None, texts))
        if is_whole or len(visible) >= num_characters:
            return visible
        num_read *= 8


@dataclass(frozen=True)
class _TokenStart:
    """A token that ends where the next one starts."""

    position: int
    kind: TokenKind
    name: str = ""
    is_preformatted: bool = False  # text in <pre>


class _Tokenizer(HTMLParser):
    """Record where tokens start. An opaque element is one token with all its content."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.starts: list[_TokenStart] = []
        self._text = text
        self._opaque_name = ""
        self._opaque_depth = 0  # open elements of that name
        self._pre_depth = 0
        self._first_position = 0  # of the text that HTMLParser reads
        self._line_starts: list[int] = []

    def read(self) -> None:
        """Read the whole text in linear time.

        HTMLParser stops before a tag or a comment without an end. A comment takes the rest of the
        text, as in a browser. The "<" of a tag is text, and another pass starts after it.
        """
        position = 0
        num_reread = -len(self._text)  # the first pass is free
        for _ in range(_MAX_UNCLOSED_TAGS):
            num_reread += len(self._text) - position
            if num_reread > _MAX_REREAD_CHARACTERS:
                return
            self._read_from(position)
            position = self._position
            if position == len(self._text):
                return
            is_comment = self._text.startswith("<!--", position)
            self._add(TokenKind.ATOM if is_comment else TokenKind.TEXT)
            if is_comment or self._text[position] != "<":
                return
            position += 1

    def _read_from(self, position: int) -> None:
        text = self._text[position:]
        self.reset()
        self._first_position = position
        line_lengths = [len(line) + 1 for line in text.split("\n")]
        self._line_starts = list(accumulate(line_lengths, initial=0))
        self.feed(text)

    @property
    def _position(self) -> int:
        line_number, column = self.getpos()
        return self._first_position + self._line_starts[line_number - 1] + column

    def _add(self, kind: TokenKind, name: str = "") -> None:
        if self._opaque_depth == 0:
            is_preformatted = kind is TokenKind.TEXT and self._pre_depth > 0
            self.starts.append(_TokenStart(self._position, kind, name, is_preformatted))

    def handle_data(self, data: str) -> None:
        """See `HTMLParser`."""
        self._add(TokenKind.TEXT)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See `HTMLParser`."""
        if self._opaque_depth > 0:
            self._opaque_depth += tag == self._opaque_name
            return
        is_opaque = tag in _OPAQUE or _is_untranslated(dict(attrs))
        if tag not in _INLINE:
            kind = TokenKind.BOUNDARY
        elif is_opaque or tag in _VOID:
            kind = TokenKind.ATOM
        else:
            kind = TokenKind.OPENING
        self._add(kind, tag)
        if is_opaque and tag not in _VOID:
            self._opaque_name = tag
            self._opaque_depth = 1
        elif tag == "pre":
            self._pre_depth += 1

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See `HTMLParser`. The tag ends in "/>"."""
        self._add(TokenKind.ATOM if tag in _INLINE else TokenKind.BOUNDARY, tag)

    def handle_endtag(self, tag: str) -> None:
        """See `HTMLParser`."""
        if self._opaque_depth > 0:
            self._opaque_depth -= tag == self._opaque_name
            return
        if tag not in _INLINE:
            kind = TokenKind.BOUNDARY
        elif tag in _OPAQUE or tag in _VOID:
            kind = TokenKind.ATOM
        else:
            kind = TokenKind.CLOSING
        self._add(kind, tag)
        if tag == "pre":
            self._pre_depth = max(0, self._pre_depth - 1)

    def handle_comment(self, data: str) -> None:
        """See `HTMLParser`, which reads other markup such as "</3>" as a comment too."""
        is_comment = self._text.startswith("<!--", self._position)
        self._add(TokenKind.ATOM if is_comment else TokenKind.BOUNDARY)

    def handle_decl(self, decl: str) -> None:
        """See `HTMLParser`."""
        self._add(TokenKind.BOUNDARY)

    def handle_pi(self, data: str) -> None:
        """See `HTMLParser`."""
        self._add(TokenKind.BOUNDARY)

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """Read `<![...>` as a comment, which it is in HTML; the base class fails with most."""
        return self.parse_bogus_comment(i)


def _is_untranslated(attributes: dict[str, str | None]) -> bool:
    """Return whether the attributes of an element exclude its content from translation."""
    classes = (attributes.get("class") or "").lower().split()
    return (attributes.get("translate") or "").lower() == "no" or "notranslate" in classes
