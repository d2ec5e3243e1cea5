"""Read PO and POT, the message catalogs of gettext. Only missing translations are added."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nmt.documents.document import Document, ReadOptions, check_count
from nmt.documents.html_tokens import Token, TokenKind
from nmt.documents.markup import parse_tokens
from nmt.documents.texts import SourceText, WrappedText, make_untranslated
from nmt.documents.xml_text import escape
from nmt.errors import DataError
from nmt.translate.results import LineResult

# such as `msgid "text"`, `msgstr[0] "text"` or, in further lines of a text, only `"text"`
_LINE = re.compile(
    r"\s*(?P<keyword>msg\w+(?:\[\d+\])?)?"
    r'\s*"(?P<text>(?:[^"\\]|\\.)*)"\s*'  # a quotation mark in the text follows a backslash
)
# in the header, such as `Content-Type: text/plain; charset=UTF-8`
_CHARSET = re.compile(rb"Content-Type:[^\n]*charset=([\w-]+)")
_VALID_CHARSETS = re.compile(
    r"(?i)utf-?8|ascii|us-ascii|iso-8859-\d+|windows-125\d|cp125\d|koi8-[ru]"
)
_ESCAPE = re.compile(r"\\(.)")  # such as \n
_CHARACTER_BY_ESCAPE = {"n": "\n", "t": "\t", "r": "\r"}
_ESCAPE_BY_CHARACTER = str.maketrans(
    {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
)
_TAG = r"</?[A-Za-z][^<>]*>"
_PERCENT = (  # placeholders of printf, for flags that `_PLACEHOLDERS` lacks, such as c-format
    r"%(?:\(\w+\))?"  # such as %(name)
    r"(?:\d+\$)?"  # the number of the argument, such as 1$
    r"[-+ #0']*(?:\*|\d+)?(?:\.(?:\*|\d+))?"  # flags, width and precision, such as -8.2
    r"(?:hh|h|ll|l|q|j|z|t|L)?\w"  # size and type, such as ld
    r"|%%"
)
# quotation marks and brackets around a placeholder belong to it
_OPENING_MARKS = r"""["'(\[«„“‘‚]*"""
_CLOSING_MARKS = r"""["')\]»”’]*"""
_BRACES = r"\{[^{}\s]*\}"
_PLACEHOLDERS = {  # the keys are flags of messages
    "python-brace-format": _BRACES,
    "perl-brace-format": _BRACES,
    "csharp-format": _BRACES,
    "java-format": _BRACES,
    "rust-format": _BRACES,
    "qt-format": r"%L?[1-9n]\d?",
    "kde-format": r"%[1-9]\d?",
}


@dataclass
class _Message:
    """A message, from its comments to its translations."""

    lines: list[str] = field(default_factory=list)  # each includes its line end
    flags: set[str] = field(default_factory=set)
    texts: dict[str, str] = field(default_factory=dict)  # the keys are keywords like msgstr[0]
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each keyword, the index of its first line, and the index after its last line."""

    def find_source(self, keyword: str) -> str:
        """Return the text whose translation belongs to `msgstr` or `msgstr[n]`."""
        plural = self.texts.get("msgid_plural")
        if plural is None or keyword == "msgstr":
            return self.texts["msgid"]
        # msgstr[0] is the singular, unless the language has only one form
        has_several_forms = "msgstr[1]" in self.texts
        if keyword == "msgstr[0]" and has_several_forms:
            return self.texts["msgid"]
        return plural


@dataclass(frozen=True)
class _Translation(WrappedText):
    """The lines of a `msgstr`, with the translation of `text`. See `SourceText`."""

    keyword: str
    newline: str

    def render(self, results: Sequence[LineResult], rank: int = 0, prefix: str = "") -> str:
        """See `SourceText.render`."""
        text = html.unescape(self.text.render(results, rank, prefix))
        lines = _split_lines(text) or [""]
        if len(lines) > 1:
            lines.insert(0, "")  # as gettext does, so that all lines of the text are aligned
        quoted = [f'"{line.translate(_ESCAPE_BY_CHARACTER)}"{self.newline}' for line in lines]
        return f"{self.keyword} {''.join(quoted)}"


def read_po(content: bytes, options: ReadOptions) -> Document:
    """Read the messages without a translation. Existing translations stay, even fuzzy ones.

    Raises `DataError` for a file that is not valid.
    """
    charset = _CHARSET.search(content)
    codec = charset[1].decode() if charset else "utf-8"
    if codec.upper() == "CHARSET":  # a template without a language
        codec = "utf-8"
    if not _VALID_CHARSETS.fullmatch(codec):
        raise DataError(f"the encoding {codec} is not supported; convert the file to UTF-8")
    try:
        text = content.decode(codec)
    except (UnicodeDecodeError, LookupError) as error:
        raise DataError(f"the file is not in its encoding {codec}: {error}") from None
    newline = "\r\n" if "\r\n" in text else "\n"
    texts: list[SourceText] = []
    for message in _split_messages(text):
        texts += _read_message(message, newline, options)
        check_count(len(texts))

    def assemble(translations: list[str]) -> bytes:
        try:
            return "".join(translations).encode(codec)
        except UnicodeEncodeError as error:
            character = error.object[error.start]
            raise DataError(
                f"the encoding {codec} lacks {character}; convert the file to UTF-8"
            ) from None

    return Document(texts, assemble)


def _split_messages(text: str) -> Iterator[_Message]:
    """Yield the messages. A message begins with its comments or its first keyword."""
    message = _Message()
    keyword = ""
    for number, line in enumerate(_split_lines(text), 1):
        line_without_mark = line.removeprefix("\ufeff")  # a byte order mark, in the first line
        stripped = line_without_mark.strip()
        if not stripped or stripped.startswith("#"):
            # after a msgstr, a comment or an empty line begins the next message
            if any(name.startswith("msgstr") for name in message.texts):
                yield message
                message = _Message()
            message.lines.append(line)
            if stripped.startswith("#,"):
                flags = stripped.removeprefix("#,").split(",")
                message.flags.update(flag.strip() for flag in flags)
            continue
        match = _LINE.fullmatch(line_without_mark)
        if match is None:
            raise DataError(f"line {number} is not valid in a PO file")
        if not match["keyword"] and not message.texts:  # continues a text, but none has begun
            raise DataError(f"line {number} is not valid in a PO file")
        if match["keyword"]:
            keyword = match["keyword"]
            if keyword in ("msgctxt", "msgid") and "msgid" in message.texts:
                yield message
                message = _Message()
            message.texts[keyword] = ""
            first_line = len(message.lines)
            message.spans[keyword] = (first_line, first_line)  # without lines so far
        message.texts[keyword] += _ESCAPE.sub(_unescape, match["text"])
        message.lines.append(line)
        first_line, _ = message.spans[keyword]
        message.spans[keyword] = (first_line, len(message.lines))
    yield message


def _split_lines(text: str) -> list[str]:
    """Split a text after each `\\n`, and at no other character."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _unescape(escaped: re.Match[str]) -> str:
    return _CHARACTER_BY_ESCAPE.get(escaped[1], escaped[1])


def _read_message(message: _Message, newline: str, options: ReadOptions) -> list[SourceText]:
    """Return a text for each missing translation, and the lines between them."""
    texts: list[SourceText] = []
    position = 0  # index of the first line that is in no text yet
    for keyword, translation in message.texts.items():
        is_missing = keyword.startswith("msgstr") and not translation
        is_header = not message.texts.get("msgid")
        if is_header or not is_missing:
            continue
        start, end = message.spans[keyword]
        texts.append(make_untranslated("".join(message.lines[position:start])))
        tokens = list(_tokenize(message.find_source(keyword), message.flags))
        text = parse_tokens(
            tokens,
            split_sentences=options.split_sentences,
            preserves_space=True,
            keeps_elements=True,
        )
        texts.append(_Translation(text, keyword, newline))
        position = end
    texts.append(make_untranslated("".join(message.lines[position:])))
    return texts


def _tokenize(text: str, flags: set[str]) -> Iterator[Token]:
    """Yield text, tags and placeholders, escaped as in HTML.

    Line ends and tabs separate texts. The flags of the message say whether %s, for example, is a
    placeholder.
    """
    patterns = [_TAG, r"[\n\t]+"]
    for flag in flags:
        if flag.endswith("-format") and not flag.startswith("no-"):
            placeholder = _PLACEHOLDERS.get(flag, _PERCENT)
            patterns.append(f"{_OPENING_MARKS}(?:{placeholder}){_CLOSING_MARKS}")
    position = 0
    for match in re.finditer("|".join(patterns), text):
        if match.start() > position:
            yield Token(TokenKind.TEXT, escape(text[position : match.start()]))
        position = match.end()
        yield _make_token(match[0])
    if position < len(text):
        yield Token(TokenKind.TEXT, escape(text[position:]))


def _make_token(source: str) -> Token:
    """Return the token of a tag, a placeholder, or line ends and tabs."""
    raw = escape(source)
    if source.isspace():
        return Token(TokenKind.BOUNDARY, raw)
    if not source.startswith("<") or source.endswith("/>"):
        return Token(TokenKind.ATOM, raw)
    content = source.strip("</>")
    name = content.split()[0]  # "a" for "<a href='x'>" and "</a>"
    if source.startswith("</"):
        return Token(TokenKind.CLOSING, raw, name)
    return Token(TokenKind.OPENING, raw, name)
