"""Lines without words, which are copied instead of translated."""

from __future__ import annotations

import re

from nmt.data.text import EMAIL, UNSPACED, UNSPACED_LETTERS

_ADDRESS_SIGNS = ("://", "www.", "@")  # each address has one of them
# Chinese letters after a slash belong to the address. Before a slash, Chinese letters belong to it
# if they form a label of the host name: "https://例子.cn", but not "https://x.cn谢谢".
_ADDRESS = (
    rf"(?:[a-z]+://|www\.)(?=\S)"
    rf"(?:[^\s/?#{UNSPACED}]|[{UNSPACED_LETTERS}]+(?=[./?#]))*(?:[/?#][^\s、。，！？；]*)?"
    rf"|{EMAIL}"
)


def has_no_words(line: str) -> bool:
    """Return whether a line consists of web and e-mail addresses, emoji and other symbols.

    Returns False for an empty line.
    """
    tokens = line.split()
    return bool(tokens) and all(map(_is_address_or_symbols, tokens))


def _is_address_or_symbols(token: str) -> bool:
    """Return whether a text without spaces is an address, or has neither letters nor digits."""
    if not any(map(str.isalnum, token)):
        return True
    # the pattern is compiled at its first use, which takes 8 ms; most text has no address
    has_sign = any(sign in token for sign in _ADDRESS_SIGNS)
    return has_sign and re.fullmatch(_ADDRESS, token) is not None
