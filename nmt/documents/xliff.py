"""Read XLIFF 1.2 and 2. Segments without a target get one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nmt.documents.document import Document, ReadOptions, check_count
from nmt.documents.html_tokens import Token, TokenKind
from nmt.documents.markup import parse_tokens
from nmt.documents.texts import PlainText, SourceText
from nmt.documents.xml_text import (
    XmlText,
    escape,
    find_end,
    is_cdata_mark,
    join_raw,
    take_element,
)
from nmt.documents.xml_tokens import XmlKind, XmlToken, decode_xml, encode_xml, tokenize_xml

_PAIRED = ("g", "pc", "mrk")  # elements around translatable text
_STARTS = ("bpt", "bx", "sc")  # codes that begin, such as bold text
_ENDS = ("ept", "ex", "ec")  # codes that end the formatting of a start code with the same number
_NUMBERS = ("rid", "startRef", "id")  # attributes that say which codes belong together


def read_xliff(content: bytes, options: ReadOptions) -> Document:
    """Read the segments without a target. Raises `DataError` if the file is not well-formed."""
    text, codec = decode_xml(content)
    texts = _XliffReader(options).read(tokenize_xml(text))
    return Document(texts, lambda translations: encode_xml("".join(translations), codec))


class _XliffReader:
    """Reads the units of an XLIFF file."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._texts: list[SourceText] = []
        self._markup: list[str] = []  # the markup since the last text
        self._untranslated: list[bool] = [False]
        """For the file and each open element, whether the units in it stay as they are."""

    def read(self, tokens: Iterator[XmlToken]) -> list[SourceText]:
        """Return the texts of the file, and the markup between them."""
        for token in tokens:
            if token.kind is XmlKind.OPENING:
                if token.name in ("trans-unit", "segment") and not self._is_untranslated(token):
                    self._read_unit(take_element(token, tokens))
                    check_count(len(self._texts))
                    continue
                self._untranslated.append(self._is_untranslated(token))
                if token.name == "xliff":
                    self._markup.append(_state_language(token, self._options.tgt_lang))
                    continue
            elif token.kind is XmlKind.CLOSING:
                self._untranslated.pop()
            self._markup.append(token.raw)
        self._end_markup()
        return self._texts

    def _is_untranslated(self, token: XmlToken) -> bool:
        translate = token.attributes.get("translate")
        return self._untranslated[-1] if translate is None else translate == "no"

    def _end_markup(self) -> None:
        self._texts.append(PlainText([], ["".join(self._markup)]))
        self._markup = []

    def _read_unit(self, tokens: list[XmlToken]) -> None:
        """Add a unit, in which the translation becomes the target."""
        elements = _find_children(tokens)
        source_start, source_end = elements.get("source", (0, 0))  # (0, 0) if it is missing
        target_start, target_end = elements.get("target", (0, 0))
        if source_end == 0 or _has_text(tokens[target_start:target_end]):
            self._markup.append(join_raw(tokens))
            return
        # In XLIFF 1.2, <seg-source> may repeat the source, divided into segments. The target is
        # then divided in the same way.
        copied_start, copied_end = elements.get("seg-source", (source_start, source_end))
        prefix = tokens[source_start].prefix
        if target_end:  # fills the empty target
            tail_start = target_end
            self._markup.append(join_raw(tokens[:target_start]))
            opening = _to_start_tag(tokens[target_start])
        else:
            tail_start = max(source_end, copied_end)
            self._markup.append(join_raw(tokens[:tail_start]))
            # repeats the white space before the source, so that the target starts a line too
            space_start = source_start
            while tokens[space_start - 1].kind is XmlKind.TEXT:
                space_start -= 1
            self._markup.append(join_raw(tokens[space_start:source_start]))
            opening = f"<{prefix}target>"
        self._markup.append(opening)
        self._read_segments(tokens[copied_start + 1 : copied_end - 1])
        self._markup += [f"</{prefix}target>", join_raw(tokens[tail_start:])]

    def _read_segments(self, tokens: Sequence[XmlToken]) -> None:
        """Add the content of a target: the content of its source with translated text."""
        segment_starts = [i for i, token in enumerate(tokens) if _starts_segment(token)]
        if not segment_starts:
            self._add_text(tokens)
            return
        position = 0
        for start in segment_starts:
            if start < position:  # it lies in another segment, which XLIFF does not allow
                continue
            end = find_end(tokens, start)
            self._markup.append(join_raw(tokens[position : start + 1]))
            self._add_text(tokens[start + 1 : end - 1])
            position = end - 1
        self._markup.append(join_raw(tokens[position:]))

    def _add_text(self, tokens: Sequence[XmlToken]) -> None:
        if not _has_text(tokens):
            self._markup.append(join_raw(tokens))
            return
        self._end_markup()
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


def _state_language(root: XmlToken, tgt_lang: str) -> str:
    """Return the tag of the root. In XLIFF 2, adds the language of the targets if it is missing."""
    is_version_2 = "srcLang" in root.attributes
    if not tgt_lang or not is_version_2 or "trgLang" in root.attributes:
        return root.raw
    end = "/>" if root.raw.endswith("/>") else ">"
    return f'{root.raw.removesuffix(end)} trgLang="{escape(tgt_lang.replace("_", "-"))}"{end}'


def _find_children(tokens: Sequence[XmlToken]) -> dict[str, tuple[int, int]]:
    """Return start and end of each child of a unit by its name. The first of several is taken."""
    children: dict[str, tuple[int, int]] = {}
    index = 1
    while index < len(tokens) - 1:
        end = find_end(tokens, index)
        if tokens[index].name:
            children.setdefault(tokens[index].name, (index, end))
        index = end
    return children


def _has_text(tokens: Sequence[XmlToken]) -> bool:
    """Return whether elements contain visible characters."""
    return any(token.kind is XmlKind.TEXT and token.text.strip() for token in tokens)


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
        elif not is_cdata_mark(token):
            end = find_end(tokens, index)
            kind = TokenKind.ATOM
            if token.name in _STARTS:
                kind = TokenKind.OPENING
            elif token.name in _ENDS:
                kind = TokenKind.CLOSING
            yield Token(kind, join_raw(tokens[index:end]), _find_number(token))
        index = end


def _contains_text(token: XmlToken) -> bool:
    """Return whether an element contains text to translate."""
    return token.name in _PAIRED and token.attributes.get("translate") != "no"


def _find_number(token: XmlToken) -> str:
    """Return "#" and the number of a code, if it has one: equal for the start and end of a pair.

    The "#" distinguishes numbers from names of elements.
    """
    for name in _NUMBERS:
        if name in token.attributes:
            return "#" + token.attributes[name]
    return "#"


def _pair_codes(tokens: Sequence[Token]) -> list[Token]:
    """Return the tokens, in which codes that are not properly nested become atoms."""
    paired = list(tokens)
    open_indices: list[int] = []  # indices of the elements and codes that have not ended

    def make_atom(index: int) -> None:
        paired[index] = replace(paired[index], kind=TokenKind.ATOM)

    for index, token in enumerate(paired):
        if token.kind is TokenKind.OPENING:
            open_indices.append(index)
        elif token.kind is TokenKind.CLOSING:
            if token.name.startswith("#"):
                if open_indices and paired[open_indices[-1]].name == token.name:
                    open_indices.pop()
                else:
                    make_atom(index)
                continue
            while paired[open_indices[-1]].name.startswith("#"):  # a code without an end
                make_atom(open_indices.pop())
            open_indices.pop()
    for index in open_indices:
        make_atom(index)
    return paired
