"""Read sentence pairs from the XML files of translation tools: TMX 1.4, XLIFF 1.2 and XLIFF 2.

Expat reads a file in blocks, so that memory does not depend on its size. Files with entity
declarations are refused, since entities can expand to any amount of text.

In TMX, a unit (`tu`) has a variant (`tuv`) for each language, and its text is in `seg`. In XLIFF, a
unit has the elements `source` and `target`, and the languages are attributes of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.parsers import expat

from nmt.data.xliff_states import UNTRANSLATED_STATES, read_state
from nmt.errors import DataError, list_first

MAX_TEXT_LENGTH = 1 << 20  # in characters
# The limits keep memory bounded: expat stores a tag or comment until its end, and the names of open
# elements.
_MAX_MARKUP_BYTES = 1 << 23
_MAX_DEPTH = 1000
# Elements within a text that contain markup of the original document, such as <b>: paired tags
# (bpt, ept), isolated tags (it), placeholders (ph) and unknown tags (ut).
_MARKUP = {"bpt", "ept", "it", "ph", "ut"}
_UNITS = {"tu", "trans-unit", "segment"}  # elements with a pair: in TMX, XLIFF 1.2 and XLIFF 2
# elements whose texts are skipped: alternative translations, text between segments, notes
_SKIPPED = {"alt-trans", "ignorable", "notes"}
_DELETED = "x-sdl-deleted"  # type of a mark around text that a reviewer deleted, in Trados
# attributes of `file` in XLIFF 1.2, and of the root in XLIFF 2
_SOURCE_LANGUAGES = ("source-language", "srcLang")
_TARGET_LANGUAGES = ("target-language", "trgLang")


def read_pairs(
    blocks: Iterable[bytes],
    name: str,
    languages: tuple[str, str],
    *,
    keep_markup: bool,
) -> Iterator[tuple[str, str]]:
    """Yield the pairs of source and target text in a TMX or XLIFF file.

    Args:
        blocks: content of the file.
        name: name of the file, for messages.
        languages: language codes of source and target, or "" for the languages that an XLIFF file
            states. The code `en` selects the text of `en`, or else the first text with a code such
            as `en-US`. The code `en-US` selects only that variant.
        keep_markup: keep the content of elements for markup, such as `<ph>`, as text. The content
            of all other elements within a text is always kept. Tags are always removed.

    Skips a unit that lacks one of the texts. Also skips a unit that is marked as not translated and
    whose target is a copy of the source. Raises `DataError` for a damaged file, entity
    declarations, text of more than `MAX_TEXT_LENGTH` characters, very long tags and comments, very
    many nested elements, and a file without any pair.
    """
    reader = _Reader(name, languages, keep_markup)
    num_pairs = 0
    for block in blocks:
        reader.parse(block)
        num_pairs += len(reader.pairs)
        yield from reader.pairs
        reader.pairs.clear()
    reader.finish()
    num_pairs += len(reader.pairs)
    yield from reader.pairs
    if num_pairs == 0:
        languages_seen = list_first(sorted(reader.languages_seen), 8)
        problem = f"has no pair of {languages[0]} and {languages[1]}"
        if languages == ("", ""):  # allowed for XLIFF files, which state their languages
            problem = "does not say which language is the source"
        raise DataError(
            f"{name} {problem}; set data.src_lang and data.tgt_lang to two of its languages: "
            f"{languages_seen or 'there are none'}"
        )


class _Reader:
    """Collects the pairs of a file from the events of an XML parser."""

    def __init__(self, name: str, languages: tuple[str, str], keep_markup: bool) -> None:
        self.name = name
        self.languages = languages  # source and target language that the caller asks for
        self.keep_markup = keep_markup
        self.pairs: list[tuple[str, str]] = []
        self.languages_seen: set[str] = set()
        # Source and target language that an XLIFF file states. `languages` has precedence.
        self._root_languages = ("", "")  # stated by the root element, as in XLIFF 2
        self._file_languages = ("", "")  # stated by the current element `file`, or else by the root
        self._unit_texts: dict[str, str] = {}  # texts of the current unit, by normalized language
        self._language = ""  # language of the current text
        self._text: list[str] | None = None  # strings of the current text, or None outside of texts
        self._num_text_characters = 0  # length of the current text
        self._num_received_bytes = 0  # number of bytes that the parser has received
        self._depth = 0  # number of open elements
        self._unit_states: list[str] = []  # states of the current unit and its target
        # Each of these depths is 0 outside of such an element, and counts the open elements from
        # the outermost such element on.
        self._markup_depth = 0  # elements in `_MARKUP`
        self._deleted_depth = 0  # marks of the type `_DELETED`
        self._skip_depth = 0  # elements in `_SKIPPED`
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._add_text
        self._parser.EntityDeclHandler = self._refuse_entity
        self._parser.SkippedEntityHandler = self._refuse_reference

    def parse(self, block: bytes) -> None:
        """Read a block; add the pairs that end in it to `pairs`."""
        self._call_parser(block, is_final=False)
        self._num_received_bytes += len(block)
        # The parser stops at a tag or comment that has not ended, and reads it again with the next
        # block. From version 2.6, expat waits until twice as many of its bytes have arrived. Until
        # then, the index is -1.
        index = self._parser.CurrentByteIndex
        if index >= 0 and self._num_received_bytes - index > _MAX_MARKUP_BYTES:
            raise DataError(
                f"{self.name} has a tag or comment of more than {_MAX_MARKUP_BYTES:,} bytes, or "
                f"without an end, at line {self._parser.CurrentLineNumber}"
            )

    def finish(self) -> None:
        """Parse the rest of the file, and check that it is complete."""
        self._call_parser(b"", is_final=True)

    def _call_parser(self, block: bytes, *, is_final: bool) -> None:
        """Parse a block, or end the parsing. Raises `DataError` for invalid XML."""
        try:
            self._parser.Parse(block, is_final)
        # expat raises LookupError or ValueError for an encoding that it does not know
        except (expat.ExpatError, LookupError, ValueError) as error:
            raise DataError(f"{self.name} is not valid XML: {error}") from None

    def _refuse_entity(self, entity: str, *details: object) -> None:
        """Raise a `DataError` for the declaration of an entity."""
        raise DataError(
            f"{self.name} declares the entity {entity}, which could expand to any amount of text; "
            "remove the declaration"
        )

    def _refuse_reference(self, entity: str, is_parameter: bool) -> None:
        """Raise a `DataError` for a reference to an entity that the file does not declare.

        If the file names a document type (DTD), expat would skip the reference, since the DTD may
        declare the entity.
        """
        raise DataError(
            f"{self.name} is not valid XML: undefined entity {entity} at line "
            f"{self._parser.CurrentLineNumber}; replace it with its text"
        )

    def _start(self, element: str, attributes: dict[str, str]) -> None:
        """Handle the start tag of an element."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise DataError(f"{self.name} has more than {_MAX_DEPTH:,} nested elements")
        element = element.rpartition(":")[2]  # removes the prefix of a namespace
        if self._text is not None:
            self._start_in_text(element, attributes)
            return
        if self._skip_depth or element in _SKIPPED:
            self._skip_depth += 1
        elif element == "xliff":
            self._root_languages = _read_languages(attributes, ("", ""))
        elif element == "file":
            source, target = _read_languages(attributes, self._root_languages)
            self._file_languages = (source, target or self._guess_target(source))
        elif element in _UNITS:
            self._unit_texts = {}
            self._unit_states = [read_state(element, attributes)]
        elif element == "tuv":
            self._language = attributes.get("xml:lang") or attributes.get("lang") or ""
        elif element == "seg":
            self._start_text(self._language)
        elif element == "source":
            self._start_text(self._file_languages[0])
        elif element == "target":
            self._unit_states.append(read_state(element, attributes))
            self._start_text(self._file_languages[1])

    def _start_in_text(self, element: str, attributes: dict[str, str]) -> None:
        """Handle the start tag of an element within a text."""
        if self._deleted_depth or attributes.get("mtype") == _DELETED:
            self._deleted_depth += 1
        elif self._markup_depth or element in _MARKUP:
            self._markup_depth += 1
        elif element == "cp":  # a character that XML cannot contain
            self._add_text(" ")

    def _guess_target(self, source: str) -> str:
        """Return the target language of a file that states only its source language.

        This assumes that the file has the two languages of the caller, in either order.
        """
        src_lang, tgt_lang = self.languages
        if _normalize(source) == _normalize(src_lang):
            return tgt_lang
        is_opposite_direction = _primary_subtag(source) == _primary_subtag(tgt_lang)
        if is_opposite_direction:
            return src_lang
        return tgt_lang

    def _start_text(self, language: str) -> None:
        """Begin to collect a text of the current unit."""
        self._language = language
        self._text = []
        self._num_text_characters = 0

    def _add_text(self, text: str) -> None:
        """Handle a string between two tags. It may be a part of the current text."""
        is_dropped_markup = self._markup_depth > 0 and not self.keep_markup
        if self._text is None or is_dropped_markup or self._deleted_depth:
            return
        self._num_text_characters += len(text)
        if self._num_text_characters > MAX_TEXT_LENGTH:
            raise DataError(f"{self.name} has a text of more than {MAX_TEXT_LENGTH:,} characters")
        self._text.append(text)

    def _end(self, element: str) -> None:
        """Handle the end tag of an element. At the end of a unit, adds its pair to `pairs`."""
        self._depth -= 1
        element = element.rpartition(":")[2]
        if self._text is not None:
            if self._deleted_depth:
                self._deleted_depth -= 1
            elif self._markup_depth:
                self._markup_depth -= 1
            elif element in ("seg", "source", "target"):
                text = " ".join("".join(self._text).split())
                # of several texts in a language, the first one is kept
                self._unit_texts.setdefault(_normalize(self._language), text)
                self.languages_seen.add(self._language)
                self._text = None
        elif self._skip_depth:
            self._skip_depth -= 1
        elif element in _UNITS:
            source = self._find_text(self.languages[0] or self._file_languages[0])
            target = self._find_text(self.languages[1] or self._file_languages[1])
            is_untranslated = any(state in UNTRANSLATED_STATES for state in self._unit_states)
            is_untranslated_copy = is_untranslated and source == target
            if source and target and not is_untranslated_copy:
                self.pairs.append((source, target))

    def _find_text(self, language: str) -> str:
        """Return the text of the current unit in a language, or else in a variant of it."""
        normalized = _normalize(language)
        if normalized in self._unit_texts:
            return self._unit_texts[normalized]
        for unit_language, text in self._unit_texts.items():
            if unit_language.startswith(f"{normalized}-"):
                return text
        return ""


def _read_languages(attributes: dict[str, str], inherited: tuple[str, str]) -> tuple[str, str]:
    """Return the source and target language of an element of XLIFF that may state them."""
    source, target = inherited
    for key in _SOURCE_LANGUAGES:
        source = attributes.get(key, source)
    for key in _TARGET_LANGUAGES:
        target = attributes.get(key, target)
    return source, target


def _normalize(language: str) -> str:
    """Return the code of a language in the form `en-us`."""
    return language.replace("_", "-").lower()


def _primary_subtag(language: str) -> str:
    """Return the code of a language without script and region, such as `en` for `en-US`."""
    return _normalize(language).split("-")[0]
