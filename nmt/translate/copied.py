"""Lines without words, which are copied instead of translated."""

from __future__ import annotations

from nmt.data.text import ADDRESS


def has_no_words(line: str) -> bool:
    """Return whether a line consists of web and e-mail addresses, emoji and other symbols."""
    words = line.split()
    return bool(words) and all(map(_is_address_or_symbols, words))


def _is_address_or_symbols(word: str) -> bool:
    """Return whether a word has neither letters nor digits, or is an address."""
    return not any(map(str.isalnum, word)) or ADDRESS.fullmatch(word) is not None
