"""HTML whose text is translated: its tags stay, those inside a sentence around the words that the
translation of their words became, by the model's attention.

Text between two tags of blocks is translated as one, whatever inline tags and line ends are in it.
"""

from __future__ import annotations

import html
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby

from nmt.serve.texts import PlainText, plain_text, token_spans, translation_text
from nmt.translate.results import LineResult


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_INLINE = _names(
    "a abbr acronym b bdi bdo big cite del dfn em font i ins kbd label mark q rp rt ruby s small "
    "span strike strong sub sup time tt u"
)
_INLINE_VOID = _names("img wbr input")
_INLINE_OPAQUE = _names("code samp var svg math")  # of no language; kept as they are
_RAW = _names("script style iframe")  # their content is no markup
_OPAQUE = _names("script style iframe object noscript template")
_VOID = _names("area base br col embed hr link meta param source track") | _INLINE_VOID
_TAG = re.compile(r"</?([A-Za-z][A-Za-z0-9:-]*)(?:[^\"'>]|\"[^\"]*\"|'[^']*')*>")
_UNTRANSLATED = re.compile(  # in time linear in the length of a tag
    r"\btranslate\s*=\s*[\"']?no\b|\bclass\s*=\s*(?:\"[^\"]*\bnotranslate\b|'[^']*\bnotranslate\b"
    r"|[^\s>\"'=]*\bnotranslate\b)",
    re.IGNORECASE,
)
_LONGEST_TAG = 1 << 20  # characters, as of an image in the page
_WHITE = " \t\r\n\f"  # of HTML; other white space is text
_SPACE = re.compile(f"[{_WHITE}]+")
_LAYOUT = re.compile(r"([\t\r\n\f]+ *| {2,})")  # of preformatted text
_MAX_DEPTH = 32  # elements within each other; tags further inside keep their place alone


@dataclass(frozen=True)
class _Token:
    """A piece of the source: text, open, close, mark (inline, without text) or break."""

    kind: str
    raw: str
    name: str = ""  # of a tag, in lower case


@dataclass(eq=False)
class _Element:
    """An inline element, or something without text such as an image, in the text of a block."""

    opening: str
    closing: str
    start: int  # characters of the block's text
    end: int
    children: list[_Element] = field(default_factory=list)


@dataclass(frozen=True)
class _Unit:
    """A word of the translation, or a character of a script without spaces."""

    start: int
    end: int
    source: int  # character of the block's text that it translates


@dataclass(frozen=True)
class _Block:
    """Text that is translated as one, and the elements in it."""

    plain: PlainText
    root: _Element
    text: str
    lead: str  # white space around it
    trail: str


@dataclass(frozen=True)
class Html:
    """An HTML document or a piece of one; see `SourceText`."""

    pieces: list[str | _Block]
    prefix: str  # what stands before each sentence when it is translated

    @property
    def sentences(self) -> list[str]:
        """See `SourceText`."""
        blocks = [piece for piece in self.pieces if isinstance(piece, _Block)]
        return [sentence for block in blocks for sentence in block.plain.sentences]

    @property
    def needs_alignment(self) -> bool:
        """See `SourceText`."""
        return any(isinstance(piece, _Block) and piece.root.children for piece in self.pieces)

    def render(self, results: Sequence[LineResult], rank: int = 0) -> str:
        """See `SourceText.render`."""
        rest = iter(results)
        parts = []
        for piece in self.pieces:
            if isinstance(piece, str):
                parts.append(piece)
            else:
                own = [next(rest) for _ in piece.plain.sentences]
                parts += [piece.lead, _render(piece, own, rank, self.prefix), piece.trail]
        return "".join(parts)


def parse_html(text: str, *, split_sentences: bool = True, prefix: str = "") -> Html:
    """Find what is to be translated; broken markup is text, or stays where it is."""
    pieces: list[str | _Block] = []
    kept: list[str] = []  # since the last block
    run: list[_Token] = []
    for token in chain(_tokens(text), [_Token("break", "")]):
        if token.kind != "break":
            run.append(token)
            continue
        if any(other.kind == "text" and other.raw.strip() for other in run):
            pieces += ["".join(kept), _block(run, split_sentences)]
            kept = [token.raw]
        else:
            kept += [*(other.raw for other in run), token.raw]
        run = []
    return Html([*pieces, "".join(kept)], prefix)


def _tokens(text: str) -> Iterator[_Token]:
    """Cut HTML into tokens, in time linear in its length."""
    place = preformatted = 0
    num_tries = 16  # to find the end of a long tag: without a limit, many "<" take quadratic time
    while place < len(text):
        start = text.find("<", place)
        start = len(text) if start < 0 else start
        match = _TAG.match(text, start, start + 4096)
        if match is None and num_tries and text[start + 1 : start + 2].isalpha():
            match = _TAG.match(text, start, start + _LONGEST_TAG)
            num_tries -= match is None
        if match:
            end, name = match.end(), match[1].lower()
        elif text.startswith(("<!", "<?"), start):
            comment = text.startswith("<!--", start)
            end = text.find("-->" if comment else ">", start)
            end = len(text) if end < 0 else end + (3 if comment else 1)
            name = ""
        else:
            start = end = len(text) if start == len(text) else start + 1  # no tag: a sign
            yield from _text_tokens(text[place:start], preformatted > 0)
            place = end
            continue
        yield from _text_tokens(text[place:start], preformatted > 0)
        raw = text[start:end]
        is_end = raw.startswith("</")
        opaque = name in _OPAQUE | _INLINE_OPAQUE or bool(name and _UNTRANSLATED.search(raw))
        if opaque and not is_end and name not in _VOID and not raw.endswith("/>"):
            end = _end_of(text, name, end)
            raw = text[start:end]
        elif name == "pre":
            preformatted = max(0, preformatted + (-1 if is_end else 1))
        yield _Token(_kind(name, raw, is_end=is_end, opaque=opaque), raw, name)
        place = end


def _text_tokens(text: str, preformatted: bool) -> Iterator[_Token]:
    """Yield a text; in a preformatted one, what lines up words and lines is no part of it."""
    for number, part in enumerate(_LAYOUT.split(text) if preformatted else [text]):
        yield _Token("break" if number % 2 else "text", part)


def _kind(name: str, raw: str, *, is_end: bool, opaque: bool) -> str:
    inline = name in _INLINE | _INLINE_VOID | _INLINE_OPAQUE
    if not inline:
        return "mark" if not name and raw.startswith("<!--") else "break"
    if opaque or name in _VOID or raw.endswith("/>"):
        return "mark"
    return "close" if is_end else "open"


def visible_text(text: str, num_characters: int) -> str:
    """Return what is to be translated in HTML, about so many characters of it, for a guess at its
    language.
    """
    parts: list[str] = []
    for token in _tokens(text):
        if token.kind == "text":
            parts.append(" ".join(html.unescape(token.raw).split()))
            num_characters -= len(parts[-1])
        if num_characters <= 0:
            break
    return " ".join(filter(None, parts))


def _end_of(text: str, name: str, start: int) -> int:
    """Return where the element ends whose start tag ends at `start`, others of its name inside it
    counted, unless it holds no markup.
    """
    depth, slash = 1, "(/)" if name in _RAW else "(/?)"
    pattern = re.compile(rf"<{slash}{re.escape(name)}\b[^>]*>?", re.IGNORECASE | re.ASCII)
    for match in pattern.finditer(text, start):
        depth += -1 if match[1] else 1
        if not depth:
            return match.end()
    return len(text)


def _block(run: Sequence[_Token], split_sentences: bool) -> _Block:
    """Make a block of a run of inline tokens; white space counts as one space, as in a browser."""
    root = _Element("", "", 0, 0)
    stack = [root]
    parts, length, ends_in_space = [], 0, True
    for token in run:
        if token.kind == "text":
            part = _SPACE.sub(" ", html.unescape(token.raw))
            part = part[1:] if ends_in_space and part.startswith(" ") else part
            parts.append(part)
            length += len(part)
            ends_in_space = part.endswith(" ") if part else ends_in_space
        elif token.kind == "close" and len(stack) > 1 and stack[-1].closing == token.name:
            element = stack.pop()
            element.closing, element.end = token.raw, length
        else:
            element = _Element(token.raw, "", length, length)
            stack[-1].children.append(element)
            ends_in_space = ends_in_space and token.kind == "open"  # a space after an image counts
            if token.kind == "open" and len(stack) <= _MAX_DEPTH:
                element.closing = token.name  # until its end tag is found
                stack.append(element)
    for parent, element in zip(stack[-2::-1], stack[:0:-1], strict=True):  # without an end tag
        parent.children += element.children
        element.closing, element.end, element.children = "", element.start, []
    text = "".join(parts)
    root.end = length
    first, last = run[0], run[-1]
    start = len(first.raw) - len(first.raw.lstrip(_WHITE))
    lead = first.raw[:start] if first.kind == "text" else ""
    trail = last.raw[len(last.raw.rstrip(_WHITE)) :] if last.kind == "text" else ""
    text = text.rstrip(" ") if trail else text
    return _Block(plain_text(text, split_sentences=split_sentences), root, text, lead, trail)


def _render(block: _Block, results: Sequence[LineResult], rank: int, prefix: str) -> str:
    if not block.root.children:
        return html.escape(block.plain.render(results, rank), quote=False)
    parts: list[str] = []
    units: list[_Unit] = []
    length = source = 0
    columns = zip(
        block.plain.placed(results, rank),
        block.plain.gaps,
        block.plain.sentences,
        results,
        strict=False,
    )
    for (placed, gap_length), gap, sentence, result in columns:
        source += len(gap)
        start = length + gap_length
        units += _units(result, rank, prefix, sentence, start, source)
        parts.append(placed)
        length += len(placed)
        source += len(sentence)
    text = "".join(parts) + block.plain.gaps[-1]
    return _emit(block.root, text, units, (0, len(units)), (0, len(text)), block.text)


def _units(
    result: LineResult, rank: int, prefix: str, sentence: str, start: int, source: int
) -> Iterator[_Unit]:
    """Yield the words of a sentence's translation, which starts at `start`."""
    if not result.translations:
        return
    found = result.translations[min(rank, len(result.translations) - 1)]
    text = translation_text(result, rank)
    spans = token_spans(found.tokens, text)
    source_spans = token_spans(result.source_tokens, prefix + sentence)
    alignment = found.alignment or []
    places = []  # of each target token: first character, character of the source
    for i, (first, _) in enumerate(spans):
        if i < len(alignment) and alignment[i] < len(source_spans):
            place = source_spans[alignment[i]][0] - len(prefix)
        else:  # without attention, the same share of the sentence
            place = first * len(sentence) // max(len(text), 1)
        places.append((first, source + max(0, min(place, len(sentence) - 1))))
    token = 0
    for first, last in _words(text):
        while token + 1 < len(places) and places[token + 1][0] <= first:
            token += 1
        yield _Unit(start + first, start + last, places[token][1] if places else source)


def _words(text: str) -> Iterator[tuple[int, int]]:
    """Yield from where to where each word stands; a wide character, as of Chinese, is a word."""
    start = None
    for i, character in enumerate(text):
        is_wide = unicodedata.east_asian_width(character) in "WF"
        if start is not None and (is_wide or character.isspace()):
            yield start, i
            start = None
        if is_wide:
            yield i, i + 1
        elif start is None and not character.isspace():
            start = i
    if start is not None:
        yield start, len(text)


def _emit(
    element: _Element,
    text: str,
    units: Sequence[_Unit],
    rows: tuple[int, int],
    place: tuple[int, int],
    source: str,
) -> str:
    """Return the inside of an element that holds the units `rows`, the characters `place`."""
    runs = _runs(element, units, rows)
    parts, done = [], place[0]
    for number, child in sorted(enumerate(element.children), key=lambda item: runs[item[0]][0]):
        first, last = runs[number]
        if first < last:
            start, end = units[first].start, units[last - 1].end
        else:
            is_attached = bool(source[max(child.start - 1, 0) : child.start].strip())
            if is_attached and first > rows[0]:
                start = units[first - 1].end
            elif child.start == element.start and first == rows[0]:
                start = place[0]
            else:
                start = units[first].start if first < rows[1] else place[1]
            start = end = max(start, done)
        parts.append(html.escape(text[done:start], quote=False))
        inside = _emit(child, text, units, (first, last), (start, end), source)
        parts.append(child.opening + inside + child.closing)
        if start == end < place[1] and source[child.end : child.end + 1].isspace():
            parts.append("" if text[end].isspace() else " ")  # as after it in the source
        done = end
    parts.append(html.escape(text[done : place[1]], quote=False))
    return "".join(parts)


def _runs(
    element: _Element, units: Sequence[_Unit], rows: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return the units of each child: the longest run of those that translate its text, over a word
    in between that is of no child; without any, the place where they would be.
    """
    children, own = element.children, units[slice(*rows)]
    starts = [child.start for child in children]  # which do not overlap
    owners: list[int | None] = []
    for unit in own:
        number = bisect_right(starts, unit.source) - 1
        owners.append(number if number >= 0 and unit.source < children[number].end else None)
    for i in range(1, len(owners) - 1):
        if owners[i] is None and owners[i - 1] == owners[i + 1]:
            owners[i] = owners[i - 1]
    best: dict[int, tuple[int, int]] = {}
    for owner, group in groupby(range(len(owners)), key=owners.__getitem__):
        first, *others = group
        last = first + len(others) + 1
        if (
            owner is not None
            and last - first > best.get(owner, (0, 0))[1] - best.get(owner, (0, 0))[0]
        ):
            best[owner] = first, last
    reached = list(accumulate((unit.source for unit in own), max))
    around = {i: first for first, last in best.values() for i in range(first + 1, last)}
    runs = []
    for number, start in enumerate(starts):
        place = bisect_left(reached, start)
        place = around.get(place, place)
        first, last = best.get(number, (place, place))
        runs.append((first + rows[0], last + rows[0]))
    return runs
