"""Put the inline tags of a block, the text between two block tags, into its translation.

An element is placed around the target words that attend to the source characters inside it:

    source     a <b>red house</b> by the sea      <b> holds the characters 2 to 11
    target     am Meer ein rotes Haus
    attends    am: by, Meer: sea, ein: a, rotes: red, Haus: house
    result     am Meer ein <b>rotes Haus</b>

If other words separate the words of an element, its tags go around the longest run of its words. A
target word that belongs to no element is free. If no target word attends to the text of an element,
its tags go around the free word that attends closest to the element. Without a free word, the tags
are left out. An element without text, such as an image, goes before the first target word
that attends to text after the element. Nested elements are placed among the words of the outer
element in the same way, so that tags stay nested. If an element is a part of a word, such as the 2
in CO<sub>2</sub>, its tags go around the same text in the translation of the word.
"""

from __future__ import annotations

import html
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from types import MappingProxyType

from nmt.documents.texts import find_token_spans
from nmt.translate.results import LineResult

_MAX_WORD_CHARACTERS = 64  # maximum length of the source words that `divide_words` handles


@dataclass
class Element:
    """An inline element, or something without text such as an image, in the text of a block."""

    opening: str  # the start tag
    start: int  # index in the block's text of the content's first character
    end: int  # index after the content's last character
    name: str = ""
    closing: str = ""  # the end tag
    children: list[Element] = field(default_factory=list)


@dataclass(frozen=True)
class Span:
    """A range of words of the translation, by their indices."""

    start: int
    end: int  # index after the last word


@dataclass(frozen=True)
class Region:
    """A part of the translation, as a range of words and as a range of characters."""

    first_word: int
    end_word: int  # index after the last word
    start: int  # index of the first character
    end: int  # index after the last character


@dataclass(frozen=True)
class TargetWord:
    """A word of the translation, or a character of a script without spaces."""

    start: int
    end: int
    source_position: int  # index in the block's text of the character that it attends to most


def align_words(
    result: LineResult,
    rank: int,
    *,
    sentence: str,
    prefix: str,
    source_start: int,
    target_start: int,
) -> Iterator[TargetWord]:
    """Yield the words of translation number `rank` of a sentence.

    The sentence starts at `source_start` in its block, the translation at `target_start` in the
    translation of the block. `prefix` is the text that the model read before the sentence.
    """
    if not result.translations:
        return
    last_rank = len(result.translations) - 1
    translation = result.translations[min(rank, last_rank)]
    text = translation.text
    target_spans = find_token_spans(translation.tokens, text)
    source_spans = find_token_spans(result.source_tokens, prefix + sentence)
    alignment = translation.alignment or []
    # lists with an item for each target token that has visible characters
    token_starts: list[int] = []  # index of the first character of the token in `text`
    source_positions: list[int] = []  # index of the character that the token attends to
    for token_index, (start, end) in enumerate(target_spans):
        if start == end:
            continue
        source_index = None  # index of the source token that the token attends to
        if token_index < len(alignment):
            source_index = alignment[token_index]
        if source_index is not None and source_index < len(source_spans):
            source_token_start, _ = source_spans[source_index]
            position = source_token_start - len(prefix)
        else:  # takes the character at the same fraction of the sentence
            position = start * len(sentence) // max(len(text), 1)
        # a token that attends to the prefix or to EOS gets the first or the last character
        position = min(position, len(sentence) - 1)
        position = max(position, 0)
        token_starts.append(start)
        source_positions.append(position)
    for word_start, word_end in _split_words(text):
        position = 0
        if source_positions:
            # the last token that starts at or before the start of the word
            index = bisect_right(token_starts, word_start) - 1
            position = source_positions[index]
        yield TargetWord(
            start=target_start + word_start,
            end=target_start + word_end,
            source_position=source_start + position,
        )


def _split_words(text: str) -> Iterator[tuple[int, int]]:
    """Yield the characters of each word of a text, as (start, end).

    A wide character, as in Chinese, is a word. An ideographic space (U+3000) is not.
    """
    start = None
    for i, character in enumerate(text):
        is_space = character.isspace()
        is_wide = _is_wide(character)
        if start is not None and (is_space or is_wide):
            yield start, i
            start = None
        if is_space:
            continue
        if is_wide:
            yield i, i + 1
        elif start is None:
            start = i
    if start is not None:
        yield start, len(text)


def _is_wide(character: str) -> bool:
    """Return whether a character is wide or full-width, as in Chinese."""
    return unicodedata.east_asian_width(character) in ("W", "F")


def divide_words(
    words: Sequence[TargetWord], root: Element, source: str, target: str
) -> list[TargetWord]:
    """Split off the texts of elements that are only a part of a word.

    An example is CO<sub>2</sub>, which is one source word. A target word CO2 that attends to it is
    divided into CO and 2, and the 2 attends to the element. A target word that does not contain the
    text of the element is not divided.
    """
    elements: dict[int, list[Element]] = {}  # keyed by the start of the source word
    source_ends: dict[int, int] = {}  # the end of each of these source words
    for element in _list_elements(root):
        start, end = _find_source_word(element, source)
        is_whole_word = start == element.start and end == element.end
        if not is_whole_word:
            elements.setdefault(start, []).append(element)
            source_ends[start] = end
    source_starts = sorted(source_ends)
    divided: list[TargetWord] = []
    for word in words:
        # the last of these source words that starts at or before the position, or -1
        index = bisect_right(source_starts, word.source_position) - 1
        if index < 0 or word.source_position >= source_ends[source_starts[index]]:
            divided.append(word)  # attends to another source word
            continue
        start = source_starts[index]
        divided += _divide_word(word, elements[start], start, source, target)
    return divided


def _list_elements(root: Element) -> Iterator[Element]:
    """Yield all elements inside `root`, in the order of their start tags."""
    for child in root.children:
        yield child
        yield from _list_elements(child)


def _find_source_word(element: Element, source: str) -> tuple[int, int]:
    """Return the range of characters of the source word around an element, as (start, end).

    If the element is empty or contains a space, or if the word is too long, returns the range of
    the element. A word ends before a wide character, as in `_split_words`.
    """
    start = element.start
    end = element.end
    first_characters = source[start : min(end, start + _MAX_WORD_CHARACTERS)]
    if start == end or any(character.isspace() for character in first_characters):
        return start, end
    while _continues_word(source, start - 1) and end - start <= _MAX_WORD_CHARACTERS:
        start -= 1
    while _continues_word(source, end) and end - start <= _MAX_WORD_CHARACTERS:
        end += 1
    if end - start > _MAX_WORD_CHARACTERS:
        return element.start, element.end
    return start, end


def _continues_word(text: str, index: int) -> bool:
    """Return whether a text has a character at `index` that is neither a space nor wide."""
    if not 0 <= index < len(text):
        return False
    return not text[index].isspace() and not _is_wide(text[index])


def _divide_word(
    word: TargetWord, elements: Sequence[Element], source_start: int, source: str, target: str
) -> list[TargetWord]:
    """Divide a target word at the texts of `elements`.

    The elements are parts of the source word that begins at `source_start`.
    """
    divided: list[TargetWord] = []
    start = word.start  # the characters from here on are in no word of `divided` yet
    position = word.source_position
    source_end = 0  # end of the last element whose text was found
    for element in elements:
        if element.start < source_end:  # nested in the element that ends there
            continue
        text_start = _find_text(element, source, target, start, word.end)
        if text_start < 0:
            continue
        if element.start <= position < element.end:
            # the target characters before the element must attend to text outside of it
            position = source_start if source_start < element.start else element.end
        if start < text_start:
            divided.append(TargetWord(start, text_start, position))
        start = text_start + element.end - element.start
        inner_word = TargetWord(text_start, start, element.start)
        inner_elements = [child for child in element.children if child.start < child.end]
        divided += _divide_word(inner_word, inner_elements, element.start, source, target)
        source_end = element.end
        position = element.end
    if start < word.end:
        divided.append(TargetWord(start, word.end, position))
    return divided


def _find_text(element: Element, source: str, target: str, start: int, end: int) -> int:
    """Return where `target[start:end]` has the text of an element, or -1.

    The text must be joined to a letter or digit on the same sides as in the source. For example, in
    2021<sup>1</sup> the 1 follows a digit and precedes none, so that only the last digit of 20211
    matches.
    """
    text = source[element.start : element.end]
    starts_inside_word = _is_between_letters(source, element.start)
    ends_inside_word = _is_between_letters(source, element.end)
    text_start = target.find(text, start, end)
    while text_start >= 0:
        text_end = text_start + len(text)
        has_same_start = _is_between_letters(target, text_start) == starts_inside_word
        has_same_end = _is_between_letters(target, text_end) == ends_inside_word
        if has_same_start and has_same_end:
            return text_start
        text_start = target.find(text, text_start + 1, end)
    return -1


def _is_between_letters(text: str, index: int) -> bool:
    """Return whether the characters before and at `index` are both letters or digits."""
    if not 0 < index < len(text):
        return False
    return text[index - 1].isalnum() and text[index].isalnum()


class TagPlacer:
    """Places the elements of a block in its translation.

    Args:
        source: the text of the block.
        target: its translation.
        words: the words of the translation, in order.
        keeps_elements: whether an element with text stays if the translation has no word for it.
        translated_tags: start tags with translated attributes, by their source.
    """

    def __init__(
        self,
        source: str,
        target: str,
        words: Sequence[TargetWord],
        *,
        keeps_elements: bool = False,
        translated_tags: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._source = source
        self._target = target
        self._words = words
        self._keeps_elements = keeps_elements
        self._translated_tags = translated_tags

    def place_all(self, root: Element) -> str:
        """Return the translation as HTML. `root` holds the elements of the block."""
        whole_target = Region(
            first_word=0, end_word=len(self._words), start=0, end=len(self._target)
        )
        return self._place(root, whole_target)

    def _place(self, element: Element, region: Region) -> str:
        """Return the inner HTML of an element that holds this region of the translation."""
        html_parts = []
        position = region.start  # all characters of the target before this one are rendered
        spans = self._find_words(element.children, region)
        # the children in the order of the translation
        target_order = sorted(range(len(spans)), key=lambda index: spans[index].start)
        for index in target_order:
            child = element.children[index]
            span = spans[index]  # the words of the child
            if span.start < span.end:
                start = self._words[span.start].start
                end = self._words[span.end - 1].end
            else:
                start = self._find_position(child, span.start, element, region)
                start = max(start, position)
                end = start
            html_parts.append(html.escape(self._target[position:start], quote=False))
            position = end
            inner_html = self._place(child, Region(span.start, span.end, start, end))
            if not inner_html and self._has_text(child) and not self._keeps_elements:
                continue  # the translation has no word for the element
            opening = self._translated_tags.get(child.opening, child.opening)
            html_parts.append(opening + inner_html + child.closing)
            # an element without words may come directly before a word of the translation
            has_no_words = start == end
            is_at_end = end >= region.end
            if has_no_words and not is_at_end and self._needs_space(element.children, index, end):
                html_parts.append(" ")
        html_parts.append(html.escape(self._target[position : region.end], quote=False))
        return "".join(html_parts)

    def _has_text(self, element: Element) -> bool:
        return bool(self._source[element.start : element.end].strip())

    def _needs_space(self, children: Sequence[Element], index: int, position: int) -> bool:
        """Return whether a space after an element of the source is missing at `position`.

        If another element without text follows directly, the space comes after that element.
        """
        end = children[index].end
        if index + 1 < len(children):
            next_child = children[index + 1]
            if next_child.start == end and next_child.end == end:
                return False
        next_character = self._source[end : end + 1]  # "" at the end
        return next_character.isspace() and not self._target[position].isspace()

    def _find_position(
        self, child: Element, next_word: int, parent: Element, region: Region
    ) -> int:
        """Return the index of the character before which to insert an element without words.

        `next_word` is the index of the first word after the element.
        """
        previous_character = self._source[max(child.start - 1, 0) : child.start]  # "" at the start
        follows_text_directly = bool(previous_character.strip())
        is_before_first_word = next_word == region.first_word
        if follows_text_directly and not is_before_first_word:
            # no space precedes the element in the source, so it follows the previous word directly
            return self._words[next_word - 1].end
        if child.start == parent.start and is_before_first_word:
            return region.start
        if next_word >= region.end_word:
            return region.end
        return self._words[next_word].start

    def _find_words(self, children: Sequence[Element], region: Region) -> list[Span]:
        """Return the words of each child.

        A child without words gets an empty span at the first word that attends to text after the
        child. The child goes before this word.
        """
        spans = self._find_runs(children, region)
        self._add_closest_words(spans, children, region)
        run_starts: dict[int, int] = {}  # keyed by each word of a run but the first
        for run in spans.values():
            for word_index in range(run.start + 1, run.end):
                run_starts[word_index] = run.start
        words = self._words[region.first_word : region.end_word]
        # The first position at or after the start of a child is also the first running maximum at
        # or after it. `bisect_left` requires ascending values: the maxima ascend, the positions may
        # not.
        positions = [word.source_position for word in words]
        furthest_positions = list(accumulate(positions, max))
        for index, child in enumerate(children):
            if index not in spans:
                next_word = region.first_word + bisect_left(furthest_positions, child.start)
                if next_word in run_starts:  # goes before the run of another element, not into it
                    next_word = run_starts[next_word]
                spans[index] = Span(next_word, next_word)
        return [spans[index] for index in range(len(children))]

    def _add_closest_words(
        self, spans: dict[int, Span], children: Sequence[Element], region: Region
    ) -> None:
        """Add a span for each child that has text but no words: the closest free word."""
        used_indices: set[int] = set()  # words that belong to a child
        for span in spans.values():
            used_indices.update(range(span.start, span.end))
        free_indices = []  # words that belong to no child
        for word_index in range(region.first_word, region.end_word):
            if word_index not in used_indices:
                free_indices.append(word_index)
        free_indices.sort(key=lambda word_index: self._words[word_index].source_position)
        positions = [self._words[word_index].source_position for word_index in free_indices]
        for index, child in enumerate(children):
            if not free_indices or index in spans or not self._has_text(child):
                continue
            closest = bisect_left(positions, child.start)  # the first word at or after the child
            if closest == len(free_indices):
                closest -= 1
            elif closest > 0:
                # the position before is compared with the child's start, the one after with its end
                distance_before = child.start - positions[closest - 1]
                distance_after = positions[closest] - child.end
                if distance_before < distance_after:
                    closest -= 1
            word_index = free_indices.pop(closest)
            del positions[closest]
            spans[index] = Span(word_index, word_index + 1)

    def _find_runs(self, children: Sequence[Element], region: Region) -> dict[int, Span]:
        """Map the index of each child that has words to the longest run of its words.

        The first of several longest runs counts. A word that belongs to no child counts as a word
        of a child if the words before and after it belong to that child.
        """
        starts = [child.start for child in children]  # ascending: children do not overlap
        owners: list[int | None] = []  # the index of the child that each word belongs to
        for word in self._words[region.first_word : region.end_word]:
            # the last child that starts at or before the position, or -1
            index = bisect_right(starts, word.source_position) - 1
            if index >= 0 and word.source_position < children[index].end:
                owners.append(index)
            else:
                owners.append(None)
        # give a single word between two words of a child to the child
        for i in range(1, len(owners) - 1):
            if owners[i] is None and owners[i - 1] == owners[i + 1]:
                owners[i] = owners[i - 1]
        longest: dict[int, Span] = {}
        start = region.first_word
        for owner, run in groupby(owners):  # runs of words with the same owner
            end = start + len(list(run))
            if owner is not None:
                best = longest.setdefault(owner, Span(start, end))
                if end - start > best.end - best.start:
                    longest[owner] = Span(start, end)
            start = end
        return longest
