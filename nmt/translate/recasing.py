"""Lines in capitals or in title case, which models rarely see in training.

Such a line is translated as a sentence in ordinary case, and its translation gets the case of the
line.
"""

from __future__ import annotations

import re
import unicodedata

from nmt.data.perturb import CASES

_MIN_CAPITALS = 5  # a shorter text may be an abbreviation
_MIN_CAPITAL_SHARE = 0.8  # of all letters; others may be marks such as the apostrophe of Uzbek
_MIN_TITLE_WORDS = 3  # fewer may be a name
# In Tatoeba, all of 180 shorter sentences of capitalized words are no titles: "Haben Sie Kinder?"
_MIN_TITLE_SENTENCE_WORDS = 5
_ENDS_SENTENCE = re.compile(r"[.!?…][\"'”’»)\]]*$")
_SENTENCE_START = re.compile(r"(?:^|[.!?…]\s)\W*\w")


def find_case(text: str) -> str:
    """Return "upper" for a text in capitals, "title" for one in title case, and otherwise ""."""
    if text.isupper():
        # an acronym in Chinese or Arabic, whose letters have no case, does not count
        num_capitals = sum(map(str.isupper, text))
        num_letters = sum(map(str.isalpha, text))
        has_case = num_capitals >= _MIN_CAPITAL_SHARE * num_letters
        return "upper" if has_case and num_capitals >= _MIN_CAPITALS else ""
    words = text.split()
    # Lo: letters without case, such as Chinese ones; marks such as the ʻ of Hawaiian are Lm
    if any(word[0].islower() or unicodedata.category(word[0]) == "Lo" for word in words):
        return ""
    is_sentence = _ENDS_SENTENCE.search(text.rstrip()) is not None
    min_words = _MIN_TITLE_SENTENCE_WORDS if is_sentence else _MIN_TITLE_WORDS
    return "title" if sum(map(_is_capitalized, words)) >= min_words else ""


def to_sentence_case(text: str) -> str:
    """Turn a text in capitals or in title case into one or more sentences in ordinary case.

    In a title, words with further capitals, such as NASA, do not change.
    """
    if text.isupper():
        lowered = text.lower()
    else:
        lowered = re.sub(r"\S+", lambda match: _lower_title_word(match[0]), text)
    return _SENTENCE_START.sub(lambda match: match[0].upper(), lowered)


def apply_case(text: str, case: str) -> str:
    """Return a translation in a case that `find_case` found in its source."""
    return CASES[case](text)


def _is_capitalized(word: str) -> bool:
    """Return whether the first letter of a word is its only capital."""
    return word[0].isupper() and word[1:] == word[1:].lower()


def _lower_title_word(word: str) -> str:
    """Lower a capitalized word; return others unchanged."""
    return word.lower() if _is_capitalized(word) else word
