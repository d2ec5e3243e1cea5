"""Cut XML into tokens. Joining the tokens of a document gives its unchanged source."""

from __future__ import annotations

import codecs
import enum
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple
from xml.parsers import expat

from nmt.errors import DataError

# such as <?xml version="1.0" encoding="UTF-8"
_ENCODING = re.compile(rb"""<\?xml[^>]*?\sencoding\s*=\s*["']([A-Za-z0-9._-]+)["']""")
_VALID_ENCODINGS = re.compile(r"(?i)utf-?8|us-ascii|iso-8859-\d+|windows-125\d")
# characters that XML 1.0 does not allow: control characters, surrogates, U+FFFE and U+FFFF
_INVALID_CHARACTERS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BLOCK_BYTES = 1 << 16


class XmlKind(enum.Enum):
    """The kinds of tokens."""

    OPENING = enum.auto()
    CLOSING = enum.auto()
    EMPTY = enum.auto()  # an element that is one tag, <a/>
    TEXT = enum.auto()  # characters or a reference such as &amp;
    OTHER = enum.auto()  # a comment, declaration, processing instruction or mark of CDATA


class XmlToken(NamedTuple):
    """A part of the source."""

    kind: XmlKind
    raw: str
    namespace: str = ""  # namespace of an element
    name: str = ""  # name of an element; its prefix is removed
    attributes: dict[str, str] = {}  # noqa: RUF012  # never changed
    """Keyed by name without prefix. If several have the same name, only the last one is here."""
    text: str = ""  # the characters of a text; references are replaced

    @property
    def prefix(self) -> str:
        """The namespace prefix of a tag as in the source, such as `w:`, or an empty text."""
        tag_content = self.raw.strip("</")  # such as w:p w:id="1">
        tag_name = re.split(r"[\s/>]", tag_content, maxsplit=1)[0]  # such as w:p
        prefix, colon, _ = tag_name.rpartition(":")
        return prefix + colon


class XmlEncoding(NamedTuple):
    """How the text of an XML file is encoded."""

    codec: str
    byte_order_mark: bytes = b""

    def encode(self, text: str) -> bytes:
        """Encode a file. Characters that the encoding lacks become references."""
        return self.byte_order_mark + text.encode(self.codec, errors="xmlcharrefreplace")


# encodings by the first bytes of a file
_ENCODINGS_BY_START = {
    codecs.BOM_UTF8: XmlEncoding("utf-8", codecs.BOM_UTF8),
    codecs.BOM_UTF16_LE: XmlEncoding("utf-16-le", codecs.BOM_UTF16_LE),
    codecs.BOM_UTF16_BE: XmlEncoding("utf-16-be", codecs.BOM_UTF16_BE),
    "<".encode("utf-16-le"): XmlEncoding("utf-16-le"),
    "<".encode("utf-16-be"): XmlEncoding("utf-16-be"),
}


def decode_xml(content: bytes) -> tuple[str, XmlEncoding]:
    """Return the text of an XML file, without a byte order mark, and its encoding.

    Raises `DataError` for an encoding that is unknown or wrong.
    """
    encoding = _find_encoding(content)
    try:
        text = content.removeprefix(encoding.byte_order_mark).decode(encoding.codec)
    except (UnicodeDecodeError, LookupError) as error:
        raise DataError(f"the file is not in its encoding {encoding.codec}: {error}") from None
    return text, encoding


def _find_encoding(content: bytes) -> XmlEncoding:
    """Return the encoding that the first bytes of a file show, or the one that it declares."""
    for start, encoding in _ENCODINGS_BY_START.items():
        if content.startswith(start):
            return encoding
    declaration = _ENCODING.match(content)
    codec = declaration[1].decode() if declaration else "utf-8"
    if codec.lower().startswith("utf-16"):  # such a file begins as in `_ENCODINGS_BY_START`
        raise DataError(f"the file is not in its encoding {codec}; correct its first line")
    if not _VALID_ENCODINGS.fullmatch(codec):
        raise DataError(f"the encoding {codec} is not supported; convert the file to UTF-8")
    return XmlEncoding(codec)


def remove_invalid(text: str) -> str:
    """Remove the characters that XML cannot contain, not even as references."""
    return _INVALID_CHARACTERS.sub("", text)


def tokenize_xml(text: str) -> Iterator[XmlToken]:
    """Yield the tokens of an XML document.

    Raises `DataError` for a document that is not well-formed, and for declarations of entities,
    which can expand to any amount of text.
    """
    content = text.encode()
    parser = _TokenParser()
    num_parsed = 0
    block_bytes = _BLOCK_BYTES
    while num_parsed < len(content):
        parser.parse(content[num_parsed : num_parsed + block_bytes])
        num_parsed += block_bytes
        num_tokens = 0
        for token in parser.take_tokens(content, end=None):
            num_tokens += 1
            yield token
        # Expat reads an incomplete tag or comment again with each block. Larger blocks keep the
        # time linear in the length of the tag or comment.
        block_bytes = _BLOCK_BYTES if num_tokens > 0 else 2 * block_bytes
    parser.parse(b"", is_final=True)
    yield from parser.take_tokens(content, end=len(content))


class _TokenParser:
    """Collects the starts of tokens. A token ends where the next token starts."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # positions in bytes
        self._tokens: list[XmlToken] = []  # begin at `_starts`; `take_tokens` adds their source
        self._tag_start = -1  # position of the last start tag
        self._parser = expat.ParserCreate("utf-8", "}")  # "}" follows the namespace in names
        self._parser.namespace_prefixes = True
        self._parser.StartElementHandler = self._add_start_tag
        self._parser.EndElementHandler = self._add_end_tag
        self._parser.CharacterDataHandler = self._add_text
        self._parser.DefaultHandler = self._add_other
        self._parser.EntityDeclHandler = self._refuse_entity

    def parse(self, block: bytes, *, is_final: bool = False) -> None:
        """Read the next bytes."""
        try:
            self._parser.Parse(block, is_final)
        except expat.ExpatError as error:
            raise DataError(f"the file is not valid XML: {error}") from None

    def take_tokens(self, content: bytes, end: int | None) -> Iterator[XmlToken]:
        """Yield the complete tokens.

        `end` is the length of the file after the last block was parsed, and None before that.
        """
        tokens = self._tokens
        ends = self._starts[1:]  # the last token has no end until the next one starts
        if end is not None:
            ends.append(end)
        for start, token_end, token in zip(self._starts, ends, tokens, strict=False):
            if start < token_end:
                raw = content[start:token_end].decode()
                if token.kind is XmlKind.OPENING and raw.endswith("/>"):
                    token = token._replace(kind=XmlKind.EMPTY)
                yield token._replace(raw=raw)
        num_complete = len(ends)
        self._starts = self._starts[num_complete:]
        self._tokens = tokens[num_complete:]

    def _add(self, token: XmlToken) -> None:
        """Record that a token starts at the current position of expat."""
        self._starts.append(self._parser.CurrentByteIndex)
        self._tokens.append(token)

    def _add_start_tag(self, element: str, attributes: dict[str, str]) -> None:
        """Record a start tag."""
        self._tag_start = self._parser.CurrentByteIndex
        namespace, name = _split_name(element)
        attributes_by_name = {}
        for key, value in attributes.items():
            _, attribute_name = _split_name(key)
            attributes_by_name[attribute_name] = value
        self._add(XmlToken(XmlKind.OPENING, "", namespace, name, attributes_by_name))

    def _add_end_tag(self, element: str) -> None:
        """Record an end tag."""
        if self._parser.CurrentByteIndex != self._tag_start:  # <a/> is one token
            namespace, name = _split_name(element)
            self._add(XmlToken(XmlKind.CLOSING, "", namespace, name))

    def _add_text(self, text: str) -> None:
        self._add(XmlToken(XmlKind.TEXT, "", text=text))

    def _add_other(self, data: str) -> None:
        self._add(XmlToken(XmlKind.OTHER, ""))

    def _refuse_entity(self, entity: str, *details: object) -> None:
        raise DataError(
            f"the file declares the entity {entity}, which could expand to any amount of text; "
            "remove the declaration"
        )


@functools.lru_cache(1024)
def _split_name(name: str) -> tuple[str, str]:
    """Divide `namespace}name}prefix`, as expat names elements, into namespace and name."""
    namespace, brace, local_name = name.partition("}")
    if not brace:
        return "", namespace
    return namespace, local_name.partition("}")[0]
