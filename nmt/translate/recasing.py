"""Change the case of lines in capitals or in title case, which models rarely see in training.

A line in capitals or in title case is translated as a sentence in ordinary case. Its translation
gets the case of the line.

Tags and placeholders in braces are separated from the words that they touch, as in
`<b>OPEN</b> FILE{n}`, and do not change. Words with addresses, entities and other placeholders keep
their case, and do not count when the case of a line is determined.

The tokenizer tells which words are names or acronyms. Its pieces are frequent in the training text,
so that it divides a word in its usual case into the fewest tokens.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from nmt.data.perturb import CASES
from nmt.data.tokenizer import Tokenizer

_MIN_CAPITALS = 5  # fewer capitals may be an abbreviation
_MIN_CAPITAL_SHARE = 0.8  # not 1, since some letters have no case, such as the apostrophe of Uzbek
_MIN_TITLE_WORDS = 3  # fewer words may be a name
# A sentence in title case has more words: of 180 sentences of capitalized words with fewer words in
# Tatoeba, such as "Haben Sie Kinder?", none is a title.
_MIN_TITLE_SENTENCE_WORDS = 5
_ENDS_SENTENCE = re.compile(r"[.!?…][\"'”’»)\]]*$")
_TAG = r"</?\w[^<>]*>"  # such as <b>, </b>, <0> and <a href="X Y">
_PLACEHOLDER = r"[$#%]?\{(?:\{[^{}]*\}|[^{}\s]*)\}"  # in braces: {name}, ${name}, {{ name }}
# Matches white space, a tag, or other characters, which may contain placeholders. The matches cover
# a text without gaps.
_CHUNK = re.compile(rf"(\s+)|({_TAG})|(?:[^\s<{{$#%]+|{_PLACEHOLDER}|[{{$#%]|(?!{_TAG})<)+")
_SPLIT_PLACEHOLDERS = re.compile(rf"({_PLACEHOLDER})")
# The groups are the start of a sentence up to its first letter, with any tags, then the first word,
# and then its first letter. A placeholder or an entity has no first letter. The letter is optional:
# if a search failed at the first of many full stops, it would read the text again from each of the
# others.
_SENTENCE_START = re.compile(
    rf"((?:^|[.!?…](?:\s|(?={_TAG})))(?:[^\w{{<%$&]|&(?!#?\w+;)|{_TAG})*)(?=([^\s<]*))(\w?)"
)
_ADDRESS = re.compile(r"(?i)^www\.|://|@")
# A word with an address, a placeholder such as %s or $name, an entity, or a single brace or angle
# bracket, which is neither a placeholder nor a tag. Where such a placeholder ends is not certain.
_LITERAL = re.compile(r"(?i)://|^www\.|@|[{}<>$]|(?:^|\D)%|&#?\w+;")
_UNKNOWN_COST = 1000  # more tokens than a word has


class _Chunk(NamedTuple):
    """A part of a text. Joining the chunks of a text gives the text."""

    text: str
    is_word: bool = False  # False for white space and for everything that keeps its case
    continues_word: bool = False  # as the "s" in {name}s and the "he" in <b>T</b>he


def find_case(text: str) -> str:
    """Return "upper" for a text in capitals, "title" for a text in title case, and otherwise ""."""
    text = _remove_tags(text)
    words = _list_word_starts(text)
    if _are_upper(words):
        # in Chinese or Arabic, whose letters have no case, the only capitals may be an acronym
        characters = "".join(words)
        num_capitals = sum(map(str.isupper, characters))
        num_letters = sum(map(str.isalpha, characters))
        has_case = num_capitals >= _MIN_CAPITAL_SHARE * num_letters
        is_upper = has_case and num_capitals >= _MIN_CAPITALS
        return "upper" if is_upper else ""
    # Letters without case, such as Chinese letters, have the category Lo. Marks such as the ʻ of
    # Hawaiian have the category Lm.
    if any(word[0].islower() or unicodedata.category(word[0]) == "Lo" for word in words):
        return ""
    is_sentence = _ENDS_SENTENCE.search(text.rstrip()) is not None
    min_words = _MIN_TITLE_SENTENCE_WORDS if is_sentence else _MIN_TITLE_WORDS
    return "title" if sum(map(_is_capitalized, words)) >= min_words else ""


def to_sentence_case(text: str, tokenizer: Tokenizer) -> str:
    """Return a text in capitals or in title case in the case of ordinary sentences.

    A word becomes the form with the fewest tokens of `tokenizer`: in lower case, with a capital, or
    unchanged. Of forms with equally few tokens, the first in this order is chosen. In title case,
    words with further capitals, such as NASA, do not change. Neither do tags, placeholders and
    addresses.
    """
    is_upper = _are_upper(_list_word_starts(_remove_tags(text)))

    def recase_word(word: str) -> str:
        if is_upper or _is_capitalized(word):
            return _usual_case(word, tokenizer)
        return word

    recased = _change_words(text, recase_word)
    return _SENTENCE_START.sub(_capitalize_start, recased)


def lower_placeholders(text: str) -> str:
    """Change placeholders in capitals, such as {NAME}, to lower case.

    In a line that was changed to capitals as a whole, their names are in capitals too, which a
    model can hardly copy. `restore_placeholders` gives the translation the names of the line.
    Returns the text unchanged if two placeholders differ only in their case.
    """
    placeholders = set(re.findall(_PLACEHOLDER, text))
    if len(set(map(str.lower, placeholders))) < len(placeholders):
        return text
    return re.sub(_PLACEHOLDER, lambda match: _lower_capitals(match[0]), text)


def restore_placeholders(translation: str, source: str) -> str:
    """Give the placeholders of a translation the case that they have in the source."""
    originals: set[str] = set(re.findall(_PLACEHOLDER, source))
    originals_by_name = {original.lower(): original for original in originals}

    def restore(match: re.Match[str]) -> str:
        placeholder: str = match[0]
        if placeholder in originals:
            return placeholder
        return originals_by_name.get(placeholder.lower(), placeholder)

    return re.sub(_PLACEHOLDER, restore, translation)


def _lower_capitals(text: str) -> str:
    """Return a text without lower-case letters in lower case, and another one unchanged."""
    return text.lower() if text.isupper() else text


def apply_case(text: str, case: str) -> str:
    """Return a translation in `case`, which `find_case` returned for its source."""
    change_word = CASES[case]
    if case == "title":
        return _change_words(text, change_word, only_starts=True)
    return _change_words(text, change_word)


def _change_words(
    text: str, change_word: Callable[[str], str], *, only_starts: bool = False
) -> str:
    """Change each word of a text. With `only_starts`, keeps words that continue another word."""
    changed = []
    for chunk in _split_chunks(text):
        is_skipped = only_starts and chunk.continues_word
        if chunk.is_word and not is_skipped:
            changed.append(change_word(chunk.text))
        else:
            changed.append(chunk.text)
    return "".join(changed)


def _split_chunks(text: str) -> Iterator[_Chunk]:
    """Split a text at white space, tags and placeholders in braces.

    An address may contain placeholders that look like tags, as in https://example.org/<name>/A.
    """
    continues_word = False
    has_address = False  # in the characters since the last white space
    for match in _CHUNK.finditer(text):
        space, tag = match.groups()
        if space:
            continues_word = False
            has_address = False
            yield _Chunk(space)
            continue
        if tag:
            yield _Chunk(tag)
            continue
        has_address = has_address or _ADDRESS.search(match[0]) is not None
        if has_address:
            yield _Chunk(match[0])
        else:
            yield from _split_placeholders(match[0], continues_word=continues_word)
        continues_word = True


def _split_placeholders(characters: str, *, continues_word: bool) -> Iterator[_Chunk]:
    """Split characters between spaces and tags at their placeholders in braces."""
    segments = _SPLIT_PLACEHOLDERS.split(characters)  # placeholders have odd indices
    if _LITERAL.search(" ".join(segments[::2])):
        yield _Chunk(characters)
        return
    for i, segment in enumerate(segments):
        is_word = i % 2 == 0 and segment != ""
        yield _Chunk(segment, is_word, continues_word or i > 0)


def _remove_tags(text: str) -> str:
    """Remove the tags of a text. They may be inside of a word, as in <b>T</b>he."""
    return re.sub(_TAG, "", text)


def _list_word_starts(text: str) -> list[str]:
    """Return the words of a text, without those that continue another word or a placeholder."""
    if "<" not in text and "{" not in text:  # nearly all texts; this is four times faster
        return [word for word in text.split() if not _LITERAL.search(word)]
    chunks = _split_chunks(text)
    return [chunk.text for chunk in chunks if chunk.is_word and not chunk.continues_word]


def _capitalize_start(match: re.Match[str]) -> str:
    """Return a match of `_SENTENCE_START` with a capital, or unchanged if an address follows."""
    start, first_word, first_letter = match.groups()
    is_address = _ADDRESS.search(first_word) is not None
    if not is_address:
        first_letter = first_letter.upper()
    return start + first_letter


def _are_upper(words: Sequence[str]) -> bool:
    """Return whether words contain capitals, and no lower-case letters."""
    return " ".join(words).isupper()


def _is_capitalized(word: str) -> bool:
    """Return whether the first letter of a word is its only capital."""
    return word[0].isupper() and word[1:] == word[1:].lower()


@lru_cache(maxsize=16384)
def _usual_case(word: str, tokenizer: Tokenizer) -> str:
    """Return the form of a word with the fewest tokens, see `to_sentence_case`."""
    lowered = word.lower()
    capitalized = re.sub(r"\w", lambda match: match[0].upper(), lowered, count=1)
    forms = (lowered, capitalized, word)  # `min` returns the first of several equal ones
    return min(forms, key=lambda form: _count_tokens(form, tokenizer))


def _count_tokens(word: str, tokenizer: Tokenizer) -> int:
    """Return the number of tokens of a word, and `_UNKNOWN_COST` for each unknown token."""
    ids = tokenizer.encode(word)
    return len(ids) + _UNKNOWN_COST * ids.count(tokenizer.unk_id)
