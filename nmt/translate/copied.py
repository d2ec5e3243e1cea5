"""Text without words, which is copied instead of translated: whole lines and ends of lines."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from nmt.data.perturb import END_MARKS
from nmt.data.text import EMAIL, UNSPACED, UNSPACED_LETTERS
from nmt.search.protect import EMOJI

_ADDRESS_SIGNS = ("://", "www.", "Www.", "WWW.", "@")  # each address has one of them
# Chinese letters after a slash belong to the address. Before a slash, Chinese letters belong to it
# if they form a label of the host name: "https://例子.cn", but not "https://x.cn谢谢".
_ADDRESS = (
    rf"(?:(?i:[a-z][a-z+.-]*)://|(?i:www)\.)(?=\S)"
    rf"(?:[^\s/?#{UNSPACED}]|[{UNSPACED_LETTERS}]+(?=[./?#]))*(?:[/?#][^\s、。，！？；]*)?"
    rf"|{EMAIL}"
)
_MARKS = tuple("".join(END_MARKS))
_MARKS_AFTER_ADDRESS = tuple("""?!,;:…)]}"'”’»›""")
_MAX_END_WORDS = 16  # maximum number of words to copy at each end of a line
_MAX_EMOJI_CHARACTERS = 256  # maximum length of the emoji at the end of a word


def has_no_words(line: str) -> bool:
    """Return whether a line consists of web and e-mail addresses, emoji and other symbols.

    Returns False for an empty line.
    """
    tokens = line.split()
    return bool(tokens) and all(map(_is_address_or_symbols, tokens))


def _is_address_or_symbols(token: str) -> bool:
    """Return whether a text without spaces is an address, emoji, or has no letters and digits."""
    if not any(map(str.isalnum, token)) or _is_address(token):
        return True
    # keycaps have a digit, and \u2139 is a letter
    return not token.isascii() and re.fullmatch(EMOJI, token) is not None


def _is_address(token: str) -> bool:
    """Return whether a text without spaces is a web or e-mail address."""
    # the pattern is compiled at its first use, which takes 8 ms; most text has no address
    has_sign = any(sign in token for sign in _ADDRESS_SIGNS)
    return has_sign and re.fullmatch(_ADDRESS, token) is not None


class CopiedEnds(NamedTuple):
    """The text at both ends of a line that is copied instead of translated."""

    start: str = ""  # emoji, with the spaces after them
    end: str = ""  # emoji and addresses, with the spaces before them

    def continues(self, middle: str) -> bool:
        """Return whether an address belongs to the last sentence of `middle`, which has no mark.

        If so, a full stop that the model adds to the translation of `middle` is wrong:

            Visit https://example.org    ->    Besuchen Sie https://example.org
        """
        has_address = any(sign in self.end for sign in _ADDRESS_SIGNS)
        return has_address and not middle.endswith(_MARKS)


def split_ends(line: str) -> tuple[CopiedEnds, str]:
    """Return the ends of a line that are copied, and the middle, which is translated.

    Emoji are copied at both ends, web and e-mail addresses only at the end, where the words before
    them usually form a sentence:

        👉 Read this: https://example.org    ->    ("👉 ", " https://example.org"), "Read this:"

    If the middle would have no letters or digits, the ends are empty.
    """
    has_address = any(sign in line for sign in _ADDRESS_SIGNS)
    if line.isascii() and not has_address:
        return CopiedEnds(), line
    leading_emoji, _ = _emoji_patterns()
    middle_start = 0
    leading_match = leading_emoji.match(line)
    if leading_match is not None:
        middle_start = leading_match.end()
    middle_end = max(_find_middle_end(line), middle_start)
    middle = line[middle_start:middle_end]
    if not any(map(str.isalnum, middle)):
        return CopiedEnds(), line
    return CopiedEnds(line[:middle_start], line[middle_end:]), middle


def _find_middle_end(line: str) -> int:
    """Return the index of the spaces before the emoji and addresses at the end of a line.

    Without these, returns the length of the line.
    """
    _, trailing_emoji = _emoji_patterns()
    middle_end = len(line)
    for _ in range(_MAX_END_WORDS):
        words = line[:middle_end].rsplit(maxsplit=1)
        if not words:
            break
        word = words[-1]
        word_end = len(line[:middle_end].rstrip())
        word_start = word_end - len(word)
        # a mark other than a full stop, such as in "Is it at www.example.org?", is translated
        if _is_address(word) and not word.endswith(_MARKS_AFTER_ADDRESS):
            end_start = word_start
        else:
            search_start = max(word_start, word_end - _MAX_EMOJI_CHARACTERS)
            emoji = trailing_emoji.search(line, search_start, word_end)
            if emoji is None:
                break
            end_start = emoji.start()
            follows_number = line[word_start:end_start][-1:].isdigit()
            if follows_number and line[end_start].isdigit():  # a number that ends in a keycap
                break
        middle_end = len(line[:end_start].rstrip())
        if end_start > word_start:  # the emoji directly follow a word, such as "Great!👍"
            break
    return middle_end


@cache
def _emoji_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of the emoji at the start of a line, and at the end of a word."""
    leading_emoji = re.compile(rf"\s*(?:{EMOJI}\s*){{1,{_MAX_END_WORDS}}}")
    trailing_emoji = re.compile(rf"{EMOJI}\Z")
    return leading_emoji, trailing_emoji
