"""Lines without words, which are copied instead of translated."""

from __future__ import annotations

import re

from nmt.data.text import EMAIL, UNSPACED, UNSPACED_LETTERS

# After a slash, Chinese letters belong to the address. Before it, only complete labels of a host
# name do: in "https://x.cn谢谢", they begin a sentence.
_ADDRESS = re.compile(
    rf"(?:[a-z]+://|www\.)(?=\S)"
    rf"(?:[^\s/?#{UNSPACED}]|[{UNSPACED_LETTERS}]+(?=[./?#]))*(?:[/?#][^\s、。，！？；]*)?"
    rf"|{EMAIL}"
)


def has_no_words(line: str) -> bool:
    """Return whether a line consists of web and e-mail addresses, emoji and other symbols."""
    words = line.split()
    return bool(words) and all(map(_is_address_or_symbols, words))


def _is_address_or_symbols(word: str) -> bool:
    """Return whether a word has neither letters nor digits, or is an address."""
    return not any(map(str.isalnum, word)) or _ADDRESS.fullmatch(word) is not None
