"""Read the paragraphs of office documents: OOXML (Word, PowerPoint) and OpenDocument.

A paragraph of OOXML consists of runs, each with its formatting. The most frequent formatting of a
text counts as plain. Runs with other formatting, links and fields become inline elements, which are
placed around the translation of their words as in HTML.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import NamedTuple

from nmt.documents.document import ReadOptions
from nmt.documents.html_tokens import Token, TokenKind
from nmt.documents.markup import MarkupText, parse_tokens
from nmt.documents.texts import SourceText, make_untranslated
from nmt.documents.xml_text import (
    XmlText,
    consume_element,
    escape,
    find_element_end,
    is_cdata_mark,
    join_raw,
)
from nmt.documents.xml_tokens import XmlKind, XmlToken, tokenize_xml
from nmt.errors import DataError

# Namespaces of the transitional and of the strict variant of OOXML, in this order.
_WORD_NAMESPACES = (
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "http://purl.oclc.org/ooxml/wordprocessingml/main",
)
_DRAWING_NAMESPACES = (
    "http://schemas.openxmlformats.org/drawingml/2006/main",
    "http://purl.oclc.org/ooxml/drawingml/main",
)
_RUN_NAMESPACES = _WORD_NAMESPACES + _DRAWING_NAMESPACES
_ODF_TEXT = "urn:oasis:names:tc:opendocument:xmlns:text:1.0"
# elements around runs
_CONTAINERS = ("hyperlink", "ins", "moveTo", "smartTag", "customXml", "dir", "bdo")
_SEPARATORS = ("tab", "br", "cr", "ptab")  # elements that separate two texts of a run
_DROPPED = ("proofErr", "lastRenderedPageBreak", "softHyphen")  # these apply to the source only
_UNTRANSLATED = ("tracked-changes", "annotation")  # deleted text and remarks
_ODF_INLINE_ELEMENTS = ("span", "a", "meta")
# A `TokenKind.ATOM` is markup within a sentence. A `TokenKind.BOUNDARY` separates two texts.
_KIND_OF_TAG = {
    XmlKind.OPENING: TokenKind.OPENING,
    XmlKind.CLOSING: TokenKind.CLOSING,
    XmlKind.EMPTY: TokenKind.ATOM,
}
# an attribute for the spell checker with its value, such as ` lang="en-US"`
_SPELLING_ATTRIBUTE = re.compile(
    r"""\s(lang|altLang|dirty|err|smtClean|noProof)=("[^"]*"|'[^']*')"""
)
# stands for a text box in a paragraph; the number is an index of `XmlPart.inner_parts`
_MARKER = re.compile(r"<\?nmt-text (\d+)\?>")
# A paragraph may contain a text box, which has paragraphs and further text boxes. Paragraphs that
# are nested in more text boxes than this are not translated.
_MAX_DEPTH = 8


@dataclass
class XmlPart:
    """The texts of an XML file, and of the text boxes in its paragraphs."""

    texts: list[SourceText] = field(default_factory=list)
    inner_parts: list[XmlPart] = field(default_factory=list)
    """The content of text boxes. In `texts`, a `_MARKER` stands in for each text box."""

    def list_texts(self) -> list[SourceText]:
        """Return all texts."""
        texts = list(self.texts)
        for text_box in self.inner_parts:
            texts += text_box.list_texts()
        return texts

    def join(self, translations: Iterator[str]) -> str:
        """Return the translated file.

        Takes one translation for each text, in the order of `list_texts`, from `translations`.
        """
        translated_texts = list(islice(translations, len(self.texts)))
        inner_texts = [text_box.join(translations) for text_box in self.inner_parts]
        file_with_markers = "".join(translated_texts)
        return _MARKER.sub(lambda marker: inner_texts[int(marker[1])], file_with_markers)


def read_office_part(text: str, options: ReadOptions) -> XmlPart:
    """Find the paragraphs of an XML file. Raises `DataError` if it is not well-formed."""
    if _MARKER.search(text):
        raise DataError("the file has an instruction <?nmt-text ...?>; remove it")
    return _PartReader(options).read(tokenize_xml(text))


class _PartReader:
    """Finds the paragraphs in the tokens of a file or of a text box."""

    def __init__(self, options: ReadOptions, depth: int = 0) -> None:
        """`depth` is the number of paragraphs around the tokens."""
        self._options = options
        self._depth = depth
        self._part = XmlPart()

    def read(self, tokens: Iterator[XmlToken]) -> XmlPart:
        """Return the texts of all paragraphs, and the markup between them."""
        markup: list[str] = []  # since the previous paragraph
        for token in tokens:
            if token.kind is not XmlKind.OPENING or self._depth > _MAX_DEPTH:
                markup.append(token.raw)
            elif token.name in _UNTRANSLATED:
                markup.append(join_raw(consume_element(token, tokens)))
            elif _is_paragraph(token):
                opening, *content, closing = consume_element(token, tokens)
                markup.append(opening.raw)
                self._part.texts.append(make_untranslated("".join(markup)))
                self._part.texts += self._read_paragraph(opening, content)
                markup = [closing.raw]
            else:
                markup.append(token.raw)
        self._part.texts.append(make_untranslated("".join(markup)))
        return self._part

    def _read_paragraph(self, opening: XmlToken, content: Sequence[XmlToken]) -> list[SourceText]:
        """Return the texts of a paragraph, and add its text boxes to `_part.inner_parts`."""
        if opening.namespace == _ODF_TEXT:
            return self._read_spans(content)
        return self._read_runs(content)

    def store_text_box(self, tokens: Sequence[XmlToken]) -> str:
        """Replace an element by a marker if it has paragraphs, as text boxes have.

        The paragraphs become an inner part. Returns the marker, or else the source of the element.
        """
        if not any(token.name in ("p", "h") for token in tokens):
            return join_raw(tokens)
        inner_part = _PartReader(self._options, self._depth + 1).read(iter(tokens))
        has_paragraphs = len(inner_part.texts) > 1  # otherwise, the only text is markup
        if not has_paragraphs:
            return join_raw(tokens)
        self._part.inner_parts.append(inner_part)
        return f"<?nmt-text {len(self._part.inner_parts) - 1}?>"

    def _read_runs(self, tokens: Sequence[XmlToken]) -> list[SourceText]:
        """Read the content of an OOXML paragraph."""
        nodes = _group_fields(list(_RunReader(self, tokens).read()))
        texts: list[SourceText] = []
        for is_separator, group in groupby(nodes, lambda node: node.kind is TokenKind.BOUNDARY):
            if is_separator:
                texts.append(make_untranslated("".join(node.content for node in group)))
            else:
                texts.append(_join_runs(list(group), self._options))
        return texts

    def _read_spans(self, tokens: Sequence[XmlToken]) -> list[SourceText]:
        """Read the content of an OpenDocument paragraph."""
        inline_tokens: list[Token] = []
        index = 0
        while index < len(tokens):
            token = tokens[index]
            is_inline_start = token.name in _ODF_INLINE_ELEMENTS and token.kind is XmlKind.OPENING
            if is_inline_start or token.kind is XmlKind.CLOSING:
                inline_tokens.append(Token(_KIND_OF_TAG[token.kind], token.raw, token.name))
                index += 1  # the next token is in the inline element, or after it
                continue
            end = find_element_end(tokens, index)
            element = tokens[index:end]
            index = end
            if token.kind is XmlKind.TEXT:
                inline_tokens.append(Token(TokenKind.TEXT, escape(token.text)))
            elif token.name == "s":
                inline_tokens.append(Token(TokenKind.TEXT, " "))
            elif token.name in ("tab", "line-break"):
                inline_tokens.append(Token(TokenKind.BOUNDARY, join_raw(element)))
            # page breaks and marks of CDATA are dropped: they apply to the source only
            elif not is_cdata_mark(token) and token.name != "soft-page-break":
                inline_tokens.append(Token(TokenKind.ATOM, self.store_text_box(element)))
        text = parse_tokens(inline_tokens, split_sentences=self._options.split_sentences)
        return [XmlText(text)]


def _is_paragraph(token: XmlToken) -> bool:
    """Return whether a start tag begins a paragraph or a heading."""
    if token.namespace == _ODF_TEXT:
        return token.name in ("p", "h")
    return token.name == "p" and token.namespace in _RUN_NAMESPACES


class _InlineNode(NamedTuple):
    """A text of an OOXML paragraph, or markup: a tag, or an element that is not translated."""

    kind: TokenKind
    content: str  # the escaped characters of a text, or the source of markup
    name: str = ""  # name of the element of a tag
    run_tags: _RunTags | None = None  # tags around a text; None for markup
    field_mark: str = ""  # role of the node in a field; see `_field_mark`

    @property
    def source(self) -> str:
        """The source of the node. A text is enclosed in the tags of its run."""
        if self.run_tags is None:
            return self.content
        return self.run_tags.opening + self.content + self.run_tags.closing


class _RunTags(NamedTuple):
    """The tags before and after the text of a run, with its formatting."""

    opening: str
    closing: str


class _RunReader:
    """Divides the content of an OOXML paragraph into nodes."""

    def __init__(self, part_reader: _PartReader, tokens: Sequence[XmlToken]) -> None:
        self._part_reader = part_reader
        self._tokens = tokens

    def read(self) -> Iterator[_InlineNode]:
        """Yield the nodes in order."""
        index = 0
        while index < len(self._tokens):
            token = self._tokens[index]
            is_run_markup = token.namespace in _RUN_NAMESPACES
            element_end = find_element_end(self._tokens, index)
            if is_run_markup and self._is_container_tag(index, element_end):
                tag_end = self._find_tag_end(index)
                name = "sdt" if token.name == "sdtContent" else token.name
                tag = join_raw(self._tokens[index:tag_end])
                yield _InlineNode(_KIND_OF_TAG[token.kind], tag, name)
                index = tag_end  # the next token is in the container, or after it
                continue
            element = self._tokens[index:element_end]
            if is_run_markup and token.kind is XmlKind.OPENING and token.name == "r":
                yield from self._read_run(element)
            elif token.name in ("pPr", "endParaRPr", "br"):
                yield _InlineNode(TokenKind.BOUNDARY, join_raw(element))
            # tokens without a name are white space and comments between runs, and are dropped
            elif token.name and token.name not in _DROPPED:
                yield _InlineNode(TokenKind.ATOM, self._part_reader.store_text_box(element))
            index = element_end

    def _is_container_tag(self, start: int, end: int) -> bool:
        """Return whether the element or tag at `start` to `end` begins or ends a container of runs.

        A content control, `<sdt>`, is a container if it has a child `<sdtContent>` with the runs. A
        field, `<fldSimple>`, is a container if it is a link.
        """
        name = self._tokens[start].name
        if name == "fldSimple":  # `read` skips other fields with their end tags
            is_end = self._tokens[start].kind is XmlKind.CLOSING
            return is_end or _is_link(self._tokens[start].attributes.get("instr", ""))
        if name != "sdt":
            return name in _CONTAINERS or name == "sdtContent"
        for index in range(start, end):
            token = self._tokens[index]
            if token.name == "sdtContent" and token.kind is XmlKind.OPENING:
                return True
        return False

    def _find_tag_end(self, index: int) -> int:
        """Return the index after a tag of a container.

        A content control is `<sdt>`, its properties, `<sdtContent>`, the runs, and
        `</sdtContent></sdt>`. All markup before the runs counts as one start tag, and all markup
        after them as one end tag.
        """
        token = self._tokens[index]
        if token.name == "sdt" and token.kind is XmlKind.OPENING:
            last_name = "sdtContent"
            last_kind = XmlKind.OPENING
        elif token.name == "sdtContent":
            last_name = "sdt"
            last_kind = XmlKind.CLOSING
        else:
            return index + 1
        for end in range(index, len(self._tokens)):
            if self._tokens[end].name == last_name and self._tokens[end].kind is last_kind:
                return end + 1
        return len(self._tokens)

    def _read_run(self, run: Sequence[XmlToken]) -> Iterator[_InlineNode]:
        """Yield the texts of a run and the markup between them."""
        opening, *content, closing = run
        properties = ""
        index = 0
        while index < len(content):
            token = content[index]
            child_end = find_element_end(content, index)
            child = content[index:child_end]
            index = child_end
            if token.name == "rPr":
                properties = _read_properties(child)
            elif token.name == "t":
                text = "".join(child_token.text for child_token in child)
                run_tags = _make_run_tags(opening, properties)
                yield _InlineNode(TokenKind.TEXT, escape(text), run_tags=run_tags)
            elif token.name == "noBreakHyphen":
                run_tags = _make_run_tags(opening, properties)
                yield _InlineNode(TokenKind.TEXT, "\u2011", run_tags=run_tags)
            elif token.name and token.name not in _DROPPED:
                markup = self._part_reader.store_text_box(child)
                markup_run = opening.raw + properties + markup + closing.raw
                kind = TokenKind.BOUNDARY if token.name in _SEPARATORS else TokenKind.ATOM
                yield _InlineNode(kind, markup_run, field_mark=_field_mark(child))


def _read_properties(element: Sequence[XmlToken]) -> str:
    """Return the formatting of a run without notes of the spell checker, or an empty text."""
    start_tag = _SPELLING_ATTRIBUTE.sub("", element[0].raw)
    # an attribute begins after a space, such as ` sz="24"`
    has_attributes = re.search(r"\s\w", start_tag) is not None
    # the children and the end tag, or nothing if the start tag is an empty element
    remaining_markup = [token.raw for token in element[1:] if token.name not in ("lang", "noProof")]
    has_children = len(remaining_markup) > 1
    if not has_attributes and not has_children:
        return ""
    return start_tag + "".join(remaining_markup)


def _make_run_tags(opening: XmlToken, properties: str) -> _RunTags:
    """Return the tags of a run, such as `<w:r><w:t xml:space="preserve">` and `</w:t></w:r>`.

    Leaves out revision numbers, so that runs with equal formatting have equal tags.
    """
    prefix = opening.prefix
    space = ' xml:space="preserve"' if opening.namespace in _WORD_NAMESPACES else ""
    return _RunTags(f"<{prefix}r>{properties}<{prefix}t{space}>", f"</{prefix}t></{prefix}r>")


def _field_mark(element: Sequence[XmlToken]) -> str:
    """Return the role of an element of a run in a field.

    A field has these roles, in this order:

    - "begin"
    - "link" or "instruction": its code
    - "separate": precedes its result, if it has one
    - "end"

    Other elements have the role "".
    """
    if element[0].name == "fldChar":
        return element[0].attributes.get("fldCharType", "")
    if element[0].name == "instrText":
        instruction = "".join(token.text for token in element)
        return "link" if _is_link(instruction) else "instruction"
    return ""


def _is_link(instruction: str) -> bool:
    """Return whether the code of a field says that it is a link."""
    return instruction.strip().startswith("HYPERLINK")


def _group_fields(nodes: Sequence[_InlineNode]) -> list[_InlineNode]:
    """Join the nodes of each field.

    A link becomes an element around its text. Any other field becomes one node that is not
    translated. If a field begins or ends in another paragraph, each of its marks in this paragraph
    separates two texts.
    """
    grouped: list[_InlineNode] = []
    starts: list[int] = []  # indices in `grouped` at which the open fields begin
    for node in nodes:
        grouped.append(node)
        if node.field_mark == "begin":
            starts.append(len(grouped) - 1)
        elif node.field_mark == "end" and starts:
            start = starts.pop()
            field_nodes = grouped[start:]
            del grouped[start:]
            grouped += _join_field(field_nodes)
    # Joined fields have no marks. The remaining marks belong to fields that begin or end in another
    # paragraph.
    for index, node in enumerate(grouped):
        if node.field_mark:
            grouped[index] = node._replace(kind=TokenKind.BOUNDARY)
    return grouped


def _join_field(nodes: Sequence[_InlineNode]) -> list[_InlineNode]:
    """Join the nodes of a complete field. The result has no field marks.

    A link becomes a start tag, the nodes of its text and an end tag. Any other field becomes one
    node.
    """
    marks = [node.field_mark for node in nodes]
    if "link" in marks and "separate" in marks:
        separator = marks.index("separate")
        code = "".join(node.source for node in nodes[: separator + 1])
        opening = _InlineNode(TokenKind.OPENING, code, "field")
        closing = _InlineNode(TokenKind.CLOSING, nodes[-1].source, "field")
        return [opening, *nodes[separator + 1 : -1], closing]
    return [_InlineNode(TokenKind.ATOM, "".join(node.source for node in nodes))]


def _join_runs(nodes: Sequence[_InlineNode], options: ReadOptions) -> SourceText:
    """Join the runs between two boundaries into one text.

    The most frequent formatting counts as plain. The tags of a plain run enclose the text.
    """
    lengths: Counter[_RunTags] = Counter()  # number of characters with each formatting
    for node in nodes:
        if node.run_tags is not None:
            lengths[node.run_tags] += len(node.content.strip())
    if not any(lengths.values()):
        return make_untranslated("".join(node.source for node in nodes))
    plain, _ = lengths.most_common(1)[0]
    tokens = _make_tokens(nodes, plain)
    text = parse_tokens(tokens, split_sentences=options.split_sentences, preserves_space=True)
    contents = [plain.opening, *text.contents, plain.closing]
    # Two tags without text between them leave an empty run, such as <w:r><w:t></w:t></w:r>.
    empty_runs = [run_tags.opening + run_tags.closing for run_tags in lengths]
    return XmlText(MarkupText(contents), removed_markup=empty_runs)


def _make_tokens(nodes: Sequence[_InlineNode], plain: _RunTags) -> list[Token]:
    """Return the tokens of a text within a plain run.

    Markup and runs with other formatting cannot be in this run. It therefore ends before them, and
    another plain run begins after them.
    """
    tokens: list[Token] = []
    for run_tags, group in groupby(nodes, lambda node: node.run_tags):
        if run_tags is None:  # markup
            for node in group:
                markup = plain.closing + node.content + plain.opening
                tokens.append(Token(node.kind, markup, node.name))
            continue
        text = "".join(node.content for node in group)
        if run_tags == plain or not text.strip():  # white space needs no formatting of its own
            tokens.append(Token(TokenKind.TEXT, text))
        else:
            tokens.append(Token(TokenKind.OPENING, plain.closing + run_tags.opening, "r"))
            tokens.append(Token(TokenKind.TEXT, text))
            tokens.append(Token(TokenKind.CLOSING, run_tags.closing + plain.opening, "r"))
    return tokens
