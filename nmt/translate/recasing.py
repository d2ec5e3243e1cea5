"""Change the case of lines in capitals or in title case, which models rarely see in training.

A line in capitals or in title case is translated as a sentence in ordinary case. Its translation
gets the case of the line.

Words with placeholders, tags and addresses keep their case, and do not count.

The tokenizer tells which words are names or acronyms. Its pieces are frequent in the training text,
so that it divides a word in its usual case into the fewest tokens.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache

from nmt.data.perturb import CASES
from nmt.data.tokenizer import Tokenizer

_MIN_CAPITALS = 5  # fewer capitals may be an abbreviation
_MIN_CAPITAL_SHARE = 0.8  # of all letters; some have no case, such as the apostrophe of Uzbek
_MIN_TITLE_WORDS = 3  # fewer words may be a name
# A sentence in title case has more words: of 180 sentences of capitalized words with fewer words in
# Tatoeba, such as "Haben Sie Kinder?", none is a title.
_MIN_TITLE_SENTENCE_WORDS = 5
_ENDS_SENTENCE = re.compile(r"[.!?…][\"'”’»)\]]*$")
# The start of a sentence up to its first letter, with its first word as a group. A placeholder such
# as {name} or a tag has no first letter. The letter is optional: if a search failed at the first of
# many full stops, it would read the text again from each of the others.
_SENTENCE_START = re.compile(r"(?:^|[.!?…]\s)[^\w{<%$]*(?=(\S*))\w?")
_ADDRESS = re.compile(r"^www\.|://|@")
# a word with an address, a placeholder such as {name}, %s or $name, a tag or an entity
_LITERAL = re.compile(r"(?i)://|^www\.|@|[{}<>$]|(?:^|\D)%|&#?\w+;")
_UNKNOWN_COST = 1000  # more tokens than a word has


def find_case(text: str) -> str:
    """Return "upper" for a text in capitals, "title" for a text in title case, and otherwise ""."""
    words = [word for word in text.split() if not _LITERAL.search(word)]
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
    words with further capitals, such as NASA, do not change. Neither do words with placeholders,
    tags and addresses.
    """
    is_upper = _are_upper([word for word in text.split() if not _LITERAL.search(word)])

    def recase_word(word: str) -> str:
        if is_upper or _is_capitalized(word):
            return _usual_case(word, tokenizer)
        return word

    recased = _change_words(text, recase_word)
    return _SENTENCE_START.sub(_capitalize_start, recased)


def apply_case(text: str, case: str) -> str:
    """Return a translation in `case`, which `find_case` returned for its source."""
    return _change_words(text, CASES[case])


def _change_words(text: str, change_word: Callable[[str], str]) -> str:
    """Change each word of a text, except words with placeholders, tags and addresses."""

    def change_match(match: re.Match[str]) -> str:
        word = match[0]
        return word if _LITERAL.search(word) else change_word(word)

    return re.sub(r"\S+", change_match, text)


def _capitalize_start(match: re.Match[str]) -> str:
    """Return a match of `_SENTENCE_START` with a capital, or unchanged if an address follows."""
    start, first_word = match[0], match[1]
    return start if _ADDRESS.search(first_word) else start.upper()


def _are_upper(words: Sequence[str]) -> bool:
    """Return whether words have letters, and these are capitals or have no case."""
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
