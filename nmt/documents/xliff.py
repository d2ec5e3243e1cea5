"""Read XLIFF 1.2 and 2. The translation of a segment without a target becomes its target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nmt.data.xliff_states import UNTRANSLATED_STATES, read_state
from nmt.documents.document import Document, ReadOptions, check_count
from nmt.documents.html_tokens import Token, TokenKind
from nmt.documents.markup import parse_tokens
from nmt.documents.texts import SourceText, make_untranslated
from nmt.documents.xml_text import (
    XmlText,
    consume_element,
    escape,
    find_element_end,
    is_cdata_mark,
    join_raw,
)
from nmt.documents.xml_tokens import XmlKind, XmlToken, decode_xml, tokenize_xml

_PAIRED = ("g", "pc", "mrk")  # elements around translatable text
# Codes are elements that represent formatting. A start code begins bold text, for example, and the
# end code with the same number ends it. The number of a code is the value of the first attribute of
# `_NUMBER_ATTRIBUTES` that the code has.
_START_CODES = ("bpt", "bx", "sc")
_END_CODES = ("ept", "ex", "ec")
_NUMBER_ATTRIBUTES = ("rid", "startRef", "id")


def read_xliff(content: bytes, options: ReadOptions) -> Document:
    """Read the segments that have no target yet. Their translations become the targets.

    A target that is a copy of the source counts as missing if the state of the target or of the
    unit says that it is not translated. Raises `DataError` if the file is not well-formed.
    """
    text, encoding = decode_xml(content)
    texts = _XliffReader(options).read(tokenize_xml(text))

    def join(translated_texts: Sequence[str]) -> bytes:
        return encoding.encode("".join(translated_texts))

    return Document(texts, join)


class _XliffReader:
    """Reads the units of an XLIFF file."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._texts: list[SourceText] = []
        self._markup: list[str] = []  # the markup since the last text
        self._untranslated_stack: list[bool] = [False]
        """Whether translate="no" holds: for the file, and for each open element."""

    def read(self, tokens: Iterator[XmlToken]) -> list[SourceText]:
        """Return the texts of the file, and the markup between them."""
        for token in tokens:
            raw = token.raw
            if token.kind is XmlKind.OPENING:
                is_untranslated = self._is_untranslated(token)
                if token.name in ("trans-unit", "segment") and not is_untranslated:
                    self._read_unit(consume_element(token, tokens))
                    check_count(len(self._texts))
                    continue
                self._untranslated_stack.append(is_untranslated)
                if token.name == "xliff":
                    raw = _add_target_language(token, self._options.tgt_lang)
            elif token.kind is XmlKind.CLOSING:
                self._untranslated_stack.pop()
            self._markup.append(raw)
        self._flush_markup()
        return self._texts

    def _is_untranslated(self, token: XmlToken) -> bool:
        """Return whether an element is not translated. By default, it inherits from its parent."""
        translate = token.attributes.get("translate")
        if translate is None:
            return self._untranslated_stack[-1]
        return translate == "no"

    def _flush_markup(self) -> None:
        """Move the collected markup to the texts, as a text without segments to translate."""
        self._texts.append(make_untranslated("".join(self._markup)))
        self._markup = []

    def _read_unit(self, tokens: list[XmlToken]) -> None:
        """Add a unit, with the translation of its source as the target.

        A translated unit, and a unit without a source, stay unchanged.
        """
        children = _find_children(tokens)
        source = children.get("source")
        target = children.get("target")
        if source is None or _is_translated(tokens, source, target):
            self._markup.append(join_raw(tokens))
            return
        # In XLIFF 1.2, <seg-source> may repeat the source, divided into segments. The target is
        # then divided in the same way.
        original = children.get("seg-source", source)
        prefix = tokens[source.start].prefix
        if target is not None:  # an empty target, which the translation fills
            target_end = target.stop
            self._markup.append(join_raw(tokens[: target.start]))
            self._markup.append(_to_start_tag(tokens[target.start]))
        else:  # a new target after the source
            target_end = max(source.stop, original.stop)
            self._markup.append(join_raw(tokens[:target_end]))
            # repeats the white space before the source, so that the target starts a line too
            self._markup.append(_find_preceding_text(tokens, source.start))
            self._markup.append(f"<{prefix}target>")
        content = tokens[original.start + 1 : original.stop - 1]  # without start and end tag
        self._read_segments(content)
        self._markup.append(f"</{prefix}target>")
        self._markup.append(join_raw(tokens[target_end:]))

    def _read_segments(self, tokens: Sequence[XmlToken]) -> None:
        """Add `tokens`, the content of a source, as the content of the target.

        The text of each segment is to be translated, or all text if there are no segments.
        """
        segment_starts = [i for i, token in enumerate(tokens) if _starts_segment(token)]
        if not segment_starts:
            self._add_text(tokens)
            return
        markup_start = 0
        for start in segment_starts:
            if start < markup_start:  # nested in another segment, which XLIFF does not allow
                continue
            end_tag = find_element_end(tokens, start) - 1
            self._markup.append(join_raw(tokens[markup_start : start + 1]))
            self._add_text(tokens[start + 1 : end_tag])
            markup_start = end_tag
        self._markup.append(join_raw(tokens[markup_start:]))

    def _add_text(self, tokens: Sequence[XmlToken]) -> None:
        """Add a text to translate. Text of white space only is not translated."""
        if not _has_text(tokens):
            self._markup.append(join_raw(tokens))
            return
        self._flush_markup()
        inline_tokens = _pair_codes(list(_read_inline(tokens)))
        text = parse_tokens(
            inline_tokens,
            split_sentences=self._options.split_sentences,
            preserves_space=True,
            keeps_elements=True,
        )
        self._texts.append(XmlText(text))


def _to_start_tag(token: XmlToken) -> str:
    """Return the start tag of an element. `<target/>` becomes `<target>`."""
    if token.kind is XmlKind.OPENING:
        return token.raw
    return token.raw.removesuffix("/>").rstrip() + ">"


def _add_target_language(root: XmlToken, tgt_lang: str) -> str:
    """Return the start tag of the root. In XLIFF 2, adds the target language as `trgLang`.

    Keeps a language that the file already states.
    """
    is_version_2 = "srcLang" in root.attributes
    has_target_language = "trgLang" in root.attributes
    if not tgt_lang or not is_version_2 or has_target_language:
        return root.raw
    end = "/>" if root.raw.endswith("/>") else ">"
    code = escape(tgt_lang.replace("_", "-"))
    return f'{root.raw.removesuffix(end)} trgLang="{code}"{end}'


def _find_preceding_text(tokens: Sequence[XmlToken], index: int) -> str:
    """Return the source of the text directly before the token `index`."""
    start = index
    while tokens[start - 1].kind is XmlKind.TEXT:
        start -= 1
    return join_raw(tokens[start:index])


def _find_children(tokens: Sequence[XmlToken]) -> dict[str, slice]:
    """Return the tokens of each child of a unit by its name.

    Of several children with the same name, the first is returned.
    """
    children: dict[str, slice] = {}
    index = 1  # the first token is the start tag of the unit
    while index < len(tokens) - 1:
        end = find_element_end(tokens, index)
        if tokens[index].name:
            children.setdefault(tokens[index].name, slice(index, end))
        index = end
    return children


def _has_text(tokens: Sequence[XmlToken]) -> bool:
    """Return whether elements contain visible characters."""
    return any(token.kind is XmlKind.TEXT and token.text.strip() for token in tokens)


def _is_translated(unit: Sequence[XmlToken], source: slice, target: slice | None) -> bool:
    """Return whether a unit has a target that is more than a marked copy of its source."""
    if target is None or not _has_text(unit[target]):
        return False
    return not _is_marked_copy(unit, source, target)


def _is_marked_copy(unit: Sequence[XmlToken], source: slice, target: slice) -> bool:
    """Return whether the target of a unit repeats the source and is marked as not translated."""
    elements = (unit[0], unit[target.start])
    states = [read_state(element.name, element.attributes) for element in elements]
    is_marked = not UNTRANSLATED_STATES.isdisjoint(states)
    return is_marked and _join_text(unit[source]) == _join_text(unit[target])


def _join_text(tokens: Sequence[XmlToken]) -> str:
    """Return the characters of elements, without their tags."""
    return "".join(token.text for token in tokens)


def _starts_segment(token: XmlToken) -> bool:
    is_opening = token.kind is XmlKind.OPENING
    return is_opening and token.name == "mrk" and token.attributes.get("mtype") == "seg"


def _read_inline(tokens: Sequence[XmlToken]) -> Iterator[Token]:
    """Yield the text and the codes of a segment."""
    index = 0
    while index < len(tokens):
        token = tokens[index]
        end = index + 1
        if token.kind is XmlKind.TEXT:
            yield Token(TokenKind.TEXT, escape(token.text))
        elif token.kind is XmlKind.OPENING and _contains_text(token):
            yield Token(TokenKind.OPENING, token.raw, token.name)
        elif token.kind is XmlKind.CLOSING:
            yield Token(TokenKind.CLOSING, token.raw, token.name)
        elif is_cdata_mark(token):
            pass  # the text of a CDATA section is escaped instead
        else:  # a code, or another element whose content is not translated
            end = find_element_end(tokens, index)
            kind = TokenKind.ATOM  # has no start or end code
            if token.name in _START_CODES:
                kind = TokenKind.OPENING
            elif token.name in _END_CODES:
                kind = TokenKind.CLOSING
            yield Token(kind, join_raw(tokens[index:end]), _find_number(token))
        index = end


def _contains_text(token: XmlToken) -> bool:
    """Return whether an element contains text to translate."""
    if token.name not in _PAIRED:
        return False
    is_protected = token.attributes.get("mtype") == "protected"  # in XLIFF 1.2
    return not is_protected and token.attributes.get("translate") != "no"


def _find_number(token: XmlToken) -> str:
    """Return the number of a code, such as "#3", or "#" if it has none.

    A start code and its end code have the same number. The "#" distinguishes numbers from names of
    elements.
    """
    for name in _NUMBER_ATTRIBUTES:
        if name in token.attributes:
            return "#" + token.attributes[name]
    return "#"


def _pair_codes(tokens: Sequence[Token]) -> list[Token]:
    """Turn the codes without a partner, and codes that are not properly nested, into atoms."""
    paired = list(tokens)
    open_indices: list[int] = []  # indices of the elements and codes that have not ended

    def make_atom(index: int) -> None:
        paired[index] = replace(paired[index], kind=TokenKind.ATOM)

    for index, token in enumerate(paired):
        if token.kind is TokenKind.OPENING:
            open_indices.append(index)
        elif token.kind is TokenKind.CLOSING and token.name.startswith("#"):
            if open_indices and paired[open_indices[-1]].name == token.name:
                open_indices.pop()
            else:
                make_atom(index)
        elif token.kind is TokenKind.CLOSING:
            # The XML is well-formed, so the start tag of this element is open. The start codes
            # after it have no end code within the element.
            while paired[open_indices[-1]].name.startswith("#"):
                make_atom(open_indices.pop())
            open_indices.pop()
    for index in open_indices:
        make_atom(index)
    return paired
