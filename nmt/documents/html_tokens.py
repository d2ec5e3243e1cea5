"""Cut HTML into texts, inline tags and the boundaries of blocks; find attributes to translate."""

from __future__ import annotations

import enum
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import accumulate


def _split_names(names: str) -> frozenset[str]:
    return frozenset(names.split())


_INLINE_ELEMENTS = _split_names(
    "a abbr acronym b bdi bdo big cite code del dfn em font i img input ins kbd label mark math q "
    "rp rt ruby s samp small span strike strong sub sup svg time tt u var wbr"
)
_VOID_ELEMENTS = _split_names(  # these have no end tag
    "area base br col embed hr img input link meta param source track wbr"
)
_OPAQUE_ELEMENTS = _split_names(  # their content is not translated
    "code iframe math noscript object samp script style svg template var"
)
_TEXT_ATTRIBUTES = _split_names("alt aria-label placeholder title")  # people read their values
_NAMED_ELEMENTS = _split_names("link script style")  # their titles are names, such as of themes
WHITE_SPACE = " \t\r\n\f"
"""The white space of HTML. Other spaces belong to text, and to names and values of attributes."""
_QUOTES = "\"'"
# the name of an attribute, and if it has one, its value, including any quotation marks
_ATTRIBUTE = re.compile(
    rf"([^{WHITE_SPACE}/>][^{WHITE_SPACE}/>=]*)"
    rf"(?:[{WHITE_SPACE}]*=[{WHITE_SPACE}]*"
    rf"""("[^"]*"|'[^']*'|[^{WHITE_SPACE}>"'][^{WHITE_SPACE}>]*))?"""
)
_PRE_SPACING = re.compile(r"([\t\r\n\f]+ *| {2,})")  # aligns words and lines in <pre>
# After each tag without a ">", another pass reads the remaining text. Beyond these limits, the
# remaining text counts as plain text.
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
class Attribute:
    """An attribute whose value is translated."""

    name: str  # in lower case
    start: int  # index in the source of the tag; the range includes any quotation marks
    end: int


@dataclass(frozen=True)
class Token:
    """A part of the source. Joining the tokens of a document gives its unchanged source."""

    kind: TokenKind
    raw: str
    name: str = ""  # name of the element in lower case
    attributes: tuple[Attribute, ...] = ()  # attributes of the start tag to translate


def tokenize(text: str) -> Iterator[Token]:
    """Yield the tokens of an HTML document or fragment."""
    parser = _TokenParser(text)
    parser.parse()
    # HTMLParser does not report markup such as "</>". At the start of a document, it is text.
    starts = [_TokenStart(0, TokenKind.TEXT), *parser.starts]
    ends = [start.position for start in starts[1:]]
    ends.append(len(text))
    for start, end in zip(starts, ends, strict=True):
        raw = text[start.position : end]
        if start.is_preformatted:
            yield from _split_preformatted(raw)
        elif raw:
            yield Token(start.kind, raw, start.name, start.attributes)


def _split_preformatted(text: str) -> Iterator[Token]:
    """Split a text in <pre> at its spacing."""
    for segment in _PRE_SPACING.split(text):
        if _PRE_SPACING.fullmatch(segment):
            yield Token(TokenKind.BOUNDARY, segment)
        elif segment:
            yield Token(TokenKind.TEXT, segment)


def extract_visible_text(text: str, num_characters: int) -> str:
    """Return at least `num_characters` characters of text from the start of a document.

    Returns all text of a shorter document. Reads only as much of a long document as necessary.
    """
    num_read = 8192
    while num_read < len(text):
        end = max(0, text.rfind("<", 0, num_read))  # does not cut a tag in two
        visible = _extract_text(text[:end])
        if len(visible) >= num_characters:
            return visible
        num_read *= 8  # grows geometrically, so that all reads together take linear time
    return _extract_text(text)


def _extract_text(document: str) -> str:
    """Return the text to translate of a document on one line."""
    words: list[str] = []
    for token in tokenize(document):
        if token.kind is TokenKind.TEXT:
            words += html.unescape(token.raw).split()
    return " ".join(words)


@dataclass(frozen=True)
class _TokenStart:
    """The start of a token, which ends where the next token starts."""

    position: int
    kind: TokenKind
    name: str = ""
    is_preformatted: bool = False  # text in <pre>
    attributes: tuple[Attribute, ...] = ()


class _TokenParser(HTMLParser):
    """Records where tokens start. An opaque element is one token with all its content."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.starts: list[_TokenStart] = []
        self._text = text
        self._opaque_name = ""  # name of the open opaque element
        self._opaque_depth = 0  # number of open elements with this name
        self._pre_depth = 0  # number of open <pre> elements
        self._pass_start = 0  # the position in the text at which HTMLParser started
        self._line_starts: list[int] = []  # relative to _pass_start
        self._has_cdata_ends = True  # False if a "]]>" was searched for and not found

    def parse(self) -> None:
        """Parse the whole text in linear time.

        HTMLParser stops before a tag or a comment that has no end. A comment without an end takes
        the rest of the text, as in a browser. The "<" of a tag without an end is text, and another
        pass starts after it.
        """
        position = 0
        max_read = len(self._text) + _MAX_REREAD_CHARACTERS  # characters that all passes may read
        for _ in range(_MAX_UNCLOSED_TAGS):
            max_read -= len(self._text) - position  # a pass may read all the text that is left
            if max_read < 0:
                return
            self._parse_from(position)
            position = self._current_position()
            if position == len(self._text):
                return
            if self._text.startswith("<!--", position):
                self._start_token(TokenKind.ATOM)
                return
            self._start_token(TokenKind.TEXT)
            if self._text[position] != "<":
                return
            position += 1

    def _parse_from(self, position: int) -> None:
        """Let HTMLParser read the text from a position on, until it stops."""
        text = self._text[position:]
        self.reset()
        self._pass_start = position
        line_lengths = [len(line) + 1 for line in text.split("\n")]
        self._line_starts = list(accumulate(line_lengths, initial=0))
        self.feed(text)

    def _current_position(self) -> int:
        """Return the position in the text that HTMLParser has reached."""
        line_number, column = self.getpos()  # lines count from 1
        line_start = self._line_starts[line_number - 1]
        return self._pass_start + line_start + column

    def _start_token(
        self, kind: TokenKind, name: str = "", attributes: tuple[Attribute, ...] = ()
    ) -> None:
        """Record that a token starts here, except inside an opaque element.

        `kind` is used for text and inline elements. The tags of other elements are boundaries.
        """
        if self._opaque_depth > 0:
            return
        if name and name not in _INLINE_ELEMENTS:
            kind = TokenKind.BOUNDARY
        elif name in _VOID_ELEMENTS:
            kind = TokenKind.ATOM
        is_preformatted = kind is TokenKind.TEXT and self._pre_depth > 0
        self.starts.append(
            _TokenStart(self._current_position(), kind, name, is_preformatted, attributes)
        )

    def handle_data(self, data: str) -> None:
        """See `HTMLParser`."""
        self._start_token(TokenKind.TEXT)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See `HTMLParser`."""
        if self._opaque_depth > 0:
            if tag == self._opaque_name:
                self._opaque_depth += 1
            return
        attributes = dict(attrs)
        is_opaque = tag in _OPAQUE_ELEMENTS or _is_untranslated(attributes)
        kind = TokenKind.ATOM if is_opaque else TokenKind.OPENING
        self._start_token(kind, tag, self._find_attributes(tag, attributes))
        if is_opaque and tag not in _VOID_ELEMENTS:
            self._opaque_name = tag
            self._opaque_depth = 1
        elif tag == "pre":
            self._pre_depth += 1

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See `HTMLParser`. The tag ends in "/>"."""
        self._start_token(TokenKind.ATOM, tag, self._find_attributes(tag, dict(attrs)))

    def _find_attributes(
        self, element: str, attributes: dict[str, str | None]
    ) -> tuple[Attribute, ...]:
        """Return the attributes to translate of the start tag that the parser has reached."""
        names = _choose_attributes(element, attributes)
        if not names:
            return ()
        translated_attributes = []
        for match in _ATTRIBUTE.finditer(self.get_starttag_text() or ""):
            name = match[1].lower()
            if name not in names:
                continue
            names.remove(name)  # a second attribute with this name has no effect
            has_text = (match[2] or "").strip(_QUOTES + WHITE_SPACE) != ""
            if has_text:
                translated_attributes.append(Attribute(name, match.start(2), match.end(2)))
        return tuple(translated_attributes)

    def handle_endtag(self, tag: str) -> None:
        """See `HTMLParser`."""
        if self._opaque_depth > 0:
            if tag == self._opaque_name:
                self._opaque_depth -= 1
            return
        # an opaque element's own end tag was handled above, so this tag has no start tag
        is_stray_tag = tag in _OPAQUE_ELEMENTS
        kind = TokenKind.ATOM if is_stray_tag else TokenKind.CLOSING
        self._start_token(kind, tag)
        if tag == "pre":
            self._pre_depth = max(0, self._pre_depth - 1)

    def handle_comment(self, data: str) -> None:
        """See `HTMLParser`, which reads other markup such as "</3>" as a comment too."""
        is_comment = self._text.startswith("<!--", self._current_position())
        kind = TokenKind.ATOM if is_comment else TokenKind.BOUNDARY
        self._start_token(kind)

    def handle_decl(self, decl: str) -> None:
        """See `HTMLParser`."""
        self._start_token(TokenKind.BOUNDARY)

    def handle_pi(self, data: str) -> None:
        """See `HTMLParser`."""
        self._start_token(TokenKind.BOUNDARY)

    def parse_html_declaration(self, i: int) -> int:
        """Read a CDATA section of XHTML as a comment."""
        if self._has_cdata_ends and self.rawdata.startswith("<![CDATA[", i):
            end = self.rawdata.find("]]>", i)
            if end >= 0:
                self._start_token(TokenKind.ATOM)
                return end + len("]]>")
            self._has_cdata_ends = False  # searching again would take quadratic time
        return super().parse_html_declaration(i)

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """Read `<![...>` as a comment, as HTML does. The base class often raises an error."""
        return self.parse_bogus_comment(i)


def _choose_attributes(element: str, attributes: dict[str, str | None]) -> set[str]:
    """Return the names of the attributes of an element to translate."""
    if not attributes or _is_untranslated(attributes):
        return set()
    if element == "meta":
        metadata_name = (attributes.get("name") or "").strip().lower()
        return {"content"} if metadata_name == "description" else set()
    names = set(_TEXT_ATTRIBUTES & attributes.keys())
    if element in _NAMED_ELEMENTS:
        names.discard("title")
    return names


def _is_untranslated(attributes: dict[str, str | None]) -> bool:
    """Return whether the attributes of an element exclude its content from translation."""
    classes = (attributes.get("class") or "").lower().split()
    translate = (attributes.get("translate") or "").lower()
    return translate == "no" or "notranslate" in classes
