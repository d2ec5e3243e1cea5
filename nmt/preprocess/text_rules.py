"""Compare the numbers, addresses and currency signs of a pair, and measure letters and words."""

from __future__ import annotations

import re
import unicodedata

import regex  # type: ignore[import-untyped]

from nmt.data.text import EMAIL, SPACED_CHARACTER, URL_CHARACTERS

_DIGITS = re.compile(r"\d+")
# a number with separators of thousands: full stop, comma, apostrophe or space
_GROUPED_NUMBER = re.compile(r"(?<!\d)\d{1,3}(?:[.,'\u2019 \u00a0\u202f]\d{3})+(?!\d)")
_LETTERS = regex.compile(r"[\p{L}\p{M}]")
_CURRENCY_SIGNS = regex.compile(r"\p{Sc}")
# A web or e-mail address. Searching takes linear time: within a long word, the lookbehinds allow a
# match to begin at one character only, not at each.
_ADDRESS = re.compile(
    rf"(?:(?<![a-z])[a-z]+://|www\.){URL_CHARACTERS}+|(?<!{SPACED_CHARACTER})(?<![.+-]){EMAIL}"
)
# punctuation at the end of an address belongs to the sentence around it
_PUNCTUATION_AFTER_ADDRESS = ".,;:!?'\")]}>\u00bb\u201c\u201d\u2019"


def have_equal_numbers(src: str, tgt: str) -> bool:
    """Return whether both texts have the same digit strings, in any order.

    Digits of all scripts are equal to 0 to 9. Separators of thousands may differ: 1,000 equals 1000
    and 1.000.
    """
    if _digit_strings(src) == _digit_strings(tgt):
        return True
    return _digit_strings(_join_thousands(src)) == _digit_strings(_join_thousands(tgt))


def have_equal_addresses(src: str, tgt: str) -> bool:
    """Return whether both texts have the same web and e-mail addresses, in any order."""
    return _addresses(src) == _addresses(tgt)


def have_equal_currencies(src: str, tgt: str) -> bool:
    """Return whether both texts have the same currency signs, or one of them has none.

    The translation may write the currency as a word.
    """
    src_signs = _currency_signs(src)
    tgt_signs = _currency_signs(tgt)
    if not src_signs or not tgt_signs:
        return True
    return src_signs == tgt_signs


def letter_share(text: str) -> float:
    """Return the share of letters and combining marks in the characters other than spaces."""
    num_characters = sum(map(len, text.split()))
    return len(_LETTERS.findall(text)) / max(num_characters, 1)


def longest_word(text: str) -> int:
    """Return the number of characters of the longest word. Words are separated by spaces."""
    return max(map(len, text.split()), default=0)


def _digit_strings(text: str) -> list[str]:
    """Return the digit strings of a text, sorted."""
    return sorted(_to_ascii(digits) for digits in _DIGITS.findall(text))


def _to_ascii(digits: str) -> str:
    """Return digits of any script as 0 to 9."""
    return "".join(str(unicodedata.decimal(digit)) for digit in digits)


def _join_thousands(text: str) -> str:
    """Remove the separators of thousands in numbers."""
    return _GROUPED_NUMBER.sub(lambda match: re.sub(r"\D", "", match[0]), text)


def _addresses(text: str) -> list[str]:
    """Return the addresses in a text without the punctuation after them, sorted."""
    return sorted(address.rstrip(_PUNCTUATION_AFTER_ADDRESS) for address in _ADDRESS.findall(text))


def _currency_signs(text: str) -> set[str]:
    """Return the currency signs of a text. Full-width signs become ordinary signs."""
    return {unicodedata.normalize("NFKC", sign) for sign in _CURRENCY_SIGNS.findall(text)}
