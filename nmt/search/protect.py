"""Find the texts that a translation must keep unchanged: placeholders, tags, addresses, emoji."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache, lru_cache
from typing import NamedTuple

from nmt.data.text import SPACED_CHARACTER, UNSPACED, UNSPACED_LETTERS, URL_CHARACTERS
from nmt.data.tokenizer import Tokenizer

# A letter or digit. Letters of scripts without spaces, such as Chinese, are not included, since
# they may directly precede and follow a protected text.
_W = SPACED_CHARACTER
_MARKS = r"""[".,;:!?)\]}'’»“”…]"""  # punctuation that may follow a web address
# Emoji and other pictures, such as stars, including skin tones and the letters of flags. The ranges
# leave out quotation marks, brackets, circled digits, and arrows that are not emoji.
_PICTURES = (
    r"\u231a\u231b\u23e9-\u23fa\u2600-\u275a\u2761-\u2767\u2795-\u2797\u27a1\u27b0\u27bf"
    r"\u2b05-\u2b07\u2b1b-\u2b2f\u2b50-\u2b55\U0001f000-\U0001f7ff\U0001f900-\U0001faff"
)
# symbols that only the variation selector \ufe0f makes emoji, such as the trade mark sign
_SYMBOLS = "©®™‼⁉ℹ↔-↪⌨⏏Ⓜ▪-◾⤴⤵〰〽㊗㊙"
_EMOJI_SIGN = rf"(?:[{_PICTURES}]|[{_SYMBOLS}]\ufe0f|[0-9\#*]\ufe0f?\u20e3)"  # last: keycaps
# characters within an emoji: joiner, variation selector, tags of flags
_EMOJI_PARTS = r"\u200d\ufe0e\ufe0f\U000e0020-\U000e007f"
EMOJI = rf"{_EMOJI_SIGN}(?:{_EMOJI_SIGN}|[{_EMOJI_PARTS}]){{0,63}}"
"""The pattern of a group of emoji and other pictures, without spaces."""

_PROTECTED = rf"""
    (?<![^\s("'<\[])(?:[a-z][a-z+.-]{{1,19}}://|www\.)[^\s<>"/{UNSPACED}]+/
      (?:[^\s<>"{UNSPACED}]|[{UNSPACED_LETTERS}])+(?<!{_MARKS})
      (?={_MARKS}{{0,3}}(?:[\s<>]|$))                     # web address between spaces
    | (?<!{_W})(?:[a-z][a-z+.-]{{1,19}}://|www\.){URL_CHARACTERS}+
      (?<!{_MARKS})                                      # web address next to Chinese text
    | (?<!{_W})(?<![.+-])(?:{_W}|[.+-]){{1,256}}
      @(?:{_W}|-){{1,256}}(?:\.(?:{_W}|-){{1,256}})+      # e-mail address
    | </?\w[\w:.-]*(?:\s[^<>]*)?/?>                      # <b>, </b>, <a href="...">
    | &(?:\#\d+|\#x[0-9a-fA-F]+|[A-Za-z]\w+);            # &nbsp;
    | [$\#%]?\{{\{{[^{{}}]*\}}\}}                         # {{{{ name }}}}
    | [$\#%]?\{{[^{{}}\s]*\}}                            # {{name}}, {{0:.2f}}, ${{name}}
    | (?<!\d)%\([\w.]+\)[-+\#0]*\d*(?:\.\d+)?[a-zA-Z]    # %(count)d
    | (?<!\d)%(?:\d+\$)?[-+\#0]*\d*(?:\.\d+)?(?:hh|ll|[hlLqjzt])?
      [diouxXeEfFgGaAcCsSp@](?![^\W_{UNSPACED}])          # %s, %d, %1$s, %.2f, %ld
    | (?<!\d)%%
    | (?<!{_W})(?<!%)%[A-Za-z_]{_W}+%?                    # %NAME, %name%
    | (?<!{_W})(?<!\$)\$[A-Za-z_]{_W}*                    # $name
    | {EMOJI}
    """


@cache  # compiled at its first use, since this takes 25 ms and most commands do not need it
def _protected_pattern() -> re.Pattern[str]:
    """Return a pattern for placeholders, tags, addresses and emoji.

    The lookbehinds keep an alternative from starting at each character of a long run of characters,
    so that a search takes linear time.
    """
    return re.compile(_PROTECTED, re.VERBOSE)


class ProtectedText(NamedTuple):
    """A part of a sentence that its translation must contain."""

    text: str
    follows_text: bool  # whether it directly follows a character other than a space

    @property
    def ends_with_word_character(self) -> bool:
        """Whether the text ends with a letter or digit, so that another one would continue it."""
        return self.text[-1].isalnum()


def protected_spans(sentence: str) -> list[range]:
    """Return the span of each placeholder, tag, address and group of emoji."""
    matches = _protected_pattern().finditer(sentence)
    return [range(match.start(), match.end()) for match in matches]


def find_protected(sentence: str) -> list[ProtectedText]:
    """Return the placeholders, tags, addresses and groups of emoji of a sentence, in order."""
    protected = []
    for match in _protected_pattern().finditer(sentence):
        start = match.start()
        follows_text = start > 0 and not sentence[start - 1].isspace()
        protected.append(ProtectedText(match.group(), follows_text))
    return protected


def has_only_protected(sentence: str) -> bool:
    """Return whether a sentence has protected texts, but no letters or digits outside of them."""
    remaining, num_protected = _protected_pattern().subn(" ", sentence)
    return num_protected > 0 and not any(char.isalnum() for char in remaining)


def lacks_protected(sentence: str, translation: str) -> bool:
    """Return whether a translation has a protected text less often than its source."""
    return len(find_missing(sentence, translation)) > 0


def find_missing(sentence: str, translation: str) -> list[ProtectedText]:
    """Return the protected texts of a sentence that occur less often in its translation."""
    all_protected = find_protected(sentence)
    counts = Counter(protected.text for protected in all_protected)
    distinct = {protected.text: protected for protected in all_protected}
    missing = []
    for text, protected in distinct.items():
        pattern = re.escape(text)
        if protected.ends_with_word_character:
            pattern += f"(?!{_W})"  # the text does not continue as another word
        if len(re.findall(pattern, translation)) < counts[text]:
            missing.append(protected)
    return missing


@lru_cache(maxsize=4096)
def encode_protected(protected: ProtectedText, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the ids of a protected text after a space and, if it `follows_text`, without a space.

    Returns `()` if the tokenizer does not decode the ids as this text.
    """
    num_prefix_ids = len(tokenizer.prefix_ids)
    ids = tokenizer.encode(protected.text)[num_prefix_ids:]
    if tokenizer.decode(ids) != protected.text:
        return ()
    spellings = [tuple(ids)]
    if protected.follows_text:
        spellings.append(without_space(ids, tokenizer.all_pieces()))
    return tuple(dict.fromkeys(spellings))


@lru_cache(maxsize=4)
def mark_protected_ends(tokenizer: Tokenizer) -> tuple[bool, ...]:
    """Return for each id whether a text such as `%s` is complete when the id follows it.

    A complete text is one that `lacks_protected` finds. Unlike a term of a glossary, it may be
    followed by a Korean or Thai letter.
    """
    byte_ids = set(tokenizer.byte_ids)
    ends_protected = []
    for token, piece in enumerate(tokenizer.all_pieces()):
        starts_with_letter = re.match(_W, piece) is not None
        ends_protected.append(not starts_with_letter and token not in byte_ids)
    return tuple(ends_protected)


def without_space(ids: list[int], pieces: list[str]) -> tuple[int, ...]:
    """Return the ids of a text without the space in front.

    Returns `ids` if the vocabulary does not have the first piece without a space.
    """
    first_piece = pieces[ids[0]].removeprefix("▁")
    if not first_piece:  # the space is a piece of its own
        return tuple(ids[1:])
    if first_piece in pieces:
        return (pieces.index(first_piece), *ids[1:])
    return tuple(ids)
