"""Read HTML as a source text: inline tags stay around the words that they belong to.

The text between two block tags is one block, whatever inline tags and line ends it holds. Each
attribute that people read, such as `alt`, is a text of its own.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html.entities import html5
from itertools import groupby, islice

from nmt.documents.html_tokens import WHITE_SPACE, Attribute, Token, TokenKind, tokenize
from nmt.documents.inline_tags import Element, TagPlacer, TargetWord, align_words, divide_words
from nmt.documents.texts import PlainText, get_translation_text, parse_plain_text
from nmt.translate.results import LineResult

_SPACES = re.compile(f"[{WHITE_SPACE}]+")
# A character reference in the value of an attribute. Unlike in text, a name without a semicolon is
# none before "=", a letter or a digit: in "?a=1&copy=2", &copy is the name of a parameter.
_REFERENCE = re.compile(
    r"&(?:#\d+;?|#[xX][\da-fA-F]+;?|[A-Za-z][A-Za-z\d]*(?:;|(?![=A-Za-z\d;])))", re.ASCII
)
_QUOTES = {'"': "&quot;", "'": "&#39;"}  # the quotation marks of attributes, and their references
_MAX_DEPTH = 32  # maximum nesting of elements; the tags of deeper elements are placed without text


@dataclass(frozen=True)
class MarkupText:
    """A document or fragment of HTML or XML. See `SourceText`."""

    contents: list[str | Block | AttributeText]
    """Texts to translate, and the markup between them, which stays as it is."""

    @property
    def sentences(self) -> list[str]:
        """See `SourceText`."""
        sentences: list[str] = []
        for content in self.contents:
            if not isinstance(content, str):
                sentences += content.sentences
        return sentences

    @property
    def needs_alignment(self) -> bool:
        """See `SourceText`."""
        blocks = [content for content in self.contents if isinstance(content, Block)]
        return any(len(block.root.children) > 0 for block in blocks)

    def render(self, results: Sequence[LineResult], rank: int = 0, prefix: str = "") -> str:
        """See `SourceText.render`."""
        remaining_results = iter(results)
        rendered = []
        for content in self.contents:
            if isinstance(content, str):
                rendered.append(content)
            else:
                content_results = list(islice(remaining_results, len(content.sentences)))
                rendered.append(content.render(content_results, rank, prefix))
        return "".join(rendered)


def parse_html(text: str, *, split_sentences: bool = True) -> MarkupText:
    """Find the blocks of text in HTML. Broken markup counts as text or stays where it is."""
    return parse_tokens(tokenize(text), split_sentences=split_sentences)


def parse_tokens(
    source_tokens: Iterable[Token],
    *,
    split_sentences: bool = True,
    preserves_space: bool = False,
    keeps_elements: bool = False,
) -> MarkupText:
    """Find the blocks between boundaries.

    Args:
        source_tokens: the tokens of a document.
        split_sentences: whether to split blocks into sentences.
        preserves_space: whether spaces and line ends count, as in `<pre>`.
        keeps_elements: whether an element stays even if the translation has no word for it.
    """
    contents: list[str | Block | AttributeText] = []
    for is_boundary, group in groupby(source_tokens, key=_is_boundary):
        tokens = list(group)
        text = "".join(token.raw for token in tokens if token.kind is TokenKind.TEXT)
        if is_boundary or not html.unescape(text).strip():  # nothing to translate
            contents += _parse_markup(tokens, split_sentences=split_sentences)
        else:
            start, end = _find_inner_tokens(tokens)
            contents += _parse_markup(tokens[:start], split_sentences=split_sentences)
            block = _parse_block(
                tokens[start:end],
                split_sentences=split_sentences,
                preserves_space=preserves_space,
                keeps_elements=keeps_elements,
            )
            contents.append(block)
            contents += _parse_markup(tokens[end:], split_sentences=split_sentences)
    return MarkupText(_join_strings(contents))


def _join_strings(
    contents: Iterable[str | Block | AttributeText],
) -> list[str | Block | AttributeText]:
    """Join the markup between two texts to one string."""
    joined: list[str | Block | AttributeText] = []
    markup: list[str] = []
    for content in contents:
        if isinstance(content, str):
            markup.append(content)
        else:
            joined += ["".join(markup), content]
            markup = []
    return [*joined, "".join(markup)]


def _parse_markup(
    tokens: Iterable[Token], *, split_sentences: bool
) -> Iterator[str | AttributeText]:
    """Yield the markup of tokens without text, and each attribute to translate as a text."""
    for token in tokens:
        position = 0  # in the source of the token
        for attribute in token.attributes:
            text = _parse_attribute(token, attribute, split_sentences=split_sentences)
            yield token.raw[position : attribute.start]
            yield text
            position = attribute.end
        yield token.raw[position:]


def _parse_attribute(token: Token, attribute: Attribute, *, split_sentences: bool) -> AttributeText:
    """Read the value of an attribute."""
    source = token.raw[attribute.start : attribute.end]
    value = source[1:-1] if source[0] in _QUOTES else source
    if attribute.name != "title":  # browsers show the line ends of titles only
        value = _SPACES.sub(" ", value)
    value = _REFERENCE.sub(_resolve_reference, value)
    text = parse_plain_text(value, split_sentences=split_sentences)
    return AttributeText(text, value, source)


def _resolve_reference(match: re.Match[str]) -> str:
    """Return the character of a match of `_REFERENCE`, or the match for an unknown name."""
    reference = match[0]
    if reference.startswith("&#"):
        return html.unescape(reference)
    return html5.get(reference.removeprefix("&"), reference)


def _is_boundary(token: Token) -> bool:
    return token.kind is TokenKind.BOUNDARY


def _find_inner_tokens(tokens: Sequence[Token]) -> tuple[int, int]:
    """Return the index of the first token of a block, and the index after its last token.

    The tokens before and after are markup at the ends of the block: elements without text, and tags
    of elements that contain all the text.
    """
    start = 0
    end = len(tokens)
    end_tags = _match_tags(tokens)
    while True:  # a block has at least one text, which ends this loop
        if tokens[start].kind is TokenKind.ATOM:
            start += 1
        elif tokens[end - 1].kind is TokenKind.ATOM:
            end -= 1
        elif end_tags.get(start) == end - 1:
            start += 1
            end -= 1
        else:
            break
    return start, end


def _match_tags(tokens: Sequence[Token]) -> dict[int, int]:
    """Return the index of the end tag of each element, by the index of its start tag.

    Tags are matched by their order, whatever their names are.
    """
    end_tags: dict[int, int] = {}
    open_indices: list[int] = []
    for index, token in enumerate(tokens):
        if token.kind is TokenKind.OPENING:
            open_indices.append(index)
        elif token.kind is TokenKind.CLOSING and open_indices:
            end_tags[open_indices.pop()] = index
    return end_tags


@dataclass(frozen=True)
class AttributeText:
    """The value of an attribute. See `SourceText`."""

    text: PlainText
    value: str
    source: str  # the value as in the tag, with its quotation marks, if it has any

    @property
    def sentences(self) -> list[str]:
        """See `SourceText`."""
        return self.text.sentences

    def render(self, results: Sequence[LineResult], rank: int, prefix: str) -> str:
        """Return the translation in quotation marks. An untranslated value stays unchanged."""
        translation = self.text.render(results, rank)
        if translation == self.value:
            return self.source
        quote = self.source[0] if self.source[0] in _QUOTES else '"'
        escaped = html.escape(translation, quote=False).replace(quote, _QUOTES[quote])
        return quote + escaped + quote


@dataclass(frozen=True)
class Block:
    """Text between two block tags, and the inline elements in it."""

    text: PlainText
    characters: str  # the sentences and the gaps between them, as a browser shows them
    root: Element  # holds the elements of the block
    leading_space: str  # white space of the source that `characters` lacks
    trailing_space: str
    keeps_elements: bool
    tags: dict[str, MarkupText]  # tags with attributes to translate, by their source

    @property
    def sentences(self) -> list[str]:
        """See `SourceText`. The sentences of the text come first, then the ones of attributes."""
        sentences = list(self.text.sentences)
        for tag in self.tags.values():
            sentences += tag.sentences
        return sentences

    def render(self, results: Sequence[LineResult], rank: int, prefix: str) -> str:
        """Return the translation as HTML."""
        num_sentences = len(self.text.sentences)
        attribute_results = iter(results[num_sentences:])
        results = results[:num_sentences]
        translated_tags = {}
        for source, tag in self.tags.items():
            tag_results = list(islice(attribute_results, len(tag.sentences)))
            translated_tags[source] = tag.render(tag_results, rank, prefix)
        if self.root.children:
            rendered = self._place_tags(results, rank, prefix, translated_tags)
        else:
            rendered = html.escape(self.text.render(results, rank), quote=False)
        return self.leading_space + rendered + self.trailing_space

    def _place_tags(
        self,
        results: Sequence[LineResult],
        rank: int,
        prefix: str,
        translated_tags: dict[str, str],
    ) -> str:
        """Return the translation with the inline elements around the words that belong to them."""
        translations = [get_translation_text(result, rank) for result in results]
        gaps = self.text.target_gaps(translations)
        target = ""
        words: list[TargetWord] = []
        source_start = 0
        for index, result in enumerate(results):
            sentence = self.text.sentences[index]
            source_start += len(self.text.gaps[index])
            target += gaps[index]
            words += align_words(
                result,
                rank,
                sentence=sentence,
                prefix=prefix,
                source_start=source_start,
                target_start=len(target),
            )
            target += translations[index]
            source_start += len(sentence)
        target += gaps[-1]
        words = divide_words(words, self.root, self.characters, target)
        placer = TagPlacer(
            self.characters,
            target,
            words,
            keeps_elements=self.keeps_elements,
            translated_tags=translated_tags,
        )
        return placer.place_all(self.root)


def _parse_block(
    tokens: Sequence[Token], *, split_sentences: bool, preserves_space: bool, keeps_elements: bool
) -> Block:
    """Build a block from inline tokens.

    Unless `preserves_space` is set, white space is collapsed as in a browser.
    """
    characters, root = _parse_elements(tokens, preserves_space=preserves_space)
    leading_space = ""
    trailing_space = ""
    if not preserves_space:
        if tokens[0].kind is TokenKind.TEXT:
            first_text = tokens[0].raw
            text_without_space = first_text.lstrip(WHITE_SPACE)
            leading_space = first_text.removesuffix(text_without_space)
        if tokens[-1].kind is TokenKind.TEXT:
            last_text = tokens[-1].raw
            text_without_space = last_text.rstrip(WHITE_SPACE)
            trailing_space = last_text.removeprefix(text_without_space)
    if trailing_space:
        characters = characters.rstrip(" ")
    tags = {}
    for token in tokens:
        if token.attributes:
            markup = _parse_markup([token], split_sentences=split_sentences)
            tags[token.raw] = MarkupText(list(markup))
    return Block(
        text=parse_plain_text(characters, split_sentences=split_sentences),
        characters=characters,
        root=root,
        leading_space=leading_space,
        trailing_space=trailing_space,
        keeps_elements=keeps_elements,
        tags=tags,
    )


def _parse_elements(tokens: Sequence[Token], *, preserves_space: bool) -> tuple[str, Element]:
    """Return the text of inline tokens, and a root whose children are the elements in the text.

    Unless `preserves_space` is set, removes spaces at the start of the text and after other spaces.
    """
    root = Element("", start=0, end=0)
    open_elements = [root]  # the innermost is the last
    characters = ""
    ends_in_space = True
    for token in tokens:
        if token.kind is TokenKind.TEXT:
            text = html.unescape(token.raw)
            if not preserves_space:
                text = _SPACES.sub(" ", text)
                if ends_in_space:
                    text = text.removeprefix(" ")
            characters += text
            if text:
                ends_in_space = text.endswith(" ")
        elif token.kind is TokenKind.CLOSING and token.name == open_elements[-1].name:
            element = open_elements.pop()
            element.closing = token.raw
            element.end = len(characters)
        else:  # a start tag, an element without text, or an end tag without a start tag
            position = len(characters)
            element = Element(token.raw, start=position, end=position, name=token.name)
            open_elements[-1].children.append(element)
            if token.kind is not TokenKind.OPENING:
                ends_in_space = False  # keeps a space after an image
            elif len(open_elements) <= _MAX_DEPTH:
                open_elements.append(element)
    while len(open_elements) > 1:  # an element without an end tag has no content
        element = open_elements.pop()
        open_elements[-1].children += element.children
        element.children = []
        element.end = element.start
    root.end = len(characters)
    return characters, root
