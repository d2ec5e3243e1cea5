"""Changes of text that imitate how people write: capitals, missing punctuation, typos, emoji.

Each function draws from the random number generator among its arguments. Equal generators give
equal text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from random import Random

from nmt.config import Perturbation

END_MARKS = (".。．।۔", "?？؟", "!！", "…", ";；؛", ":：")
"""Marks at the end of a sentence. The marks in one string are equivalent in their languages."""
MAX_TYPOS = 4  # largest number of typos in a text
_KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_SIMILAR = {"o": "0", "0": "o", "l": "1", "1": "l", "i": "1", "s": "5", "e": "3", "a": "@"}
_LATIN = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"
# NFKC normalization, the default of tokenizers, changes no character of _ALPHABETS and _SYMBOLS
_ALPHABETS = (
    _LATIN,
    _LATIN.upper(),
    "αβγδεζηθικλμνξοπρστυφχψω",
    "абвгдежзиклмнопрстуфхцчшщэюя",
    _DIGITS,
)
# ranges of code points: the first code point, and the one after the last
_EMOJI_RANGES = ((0x1F300, 0x1F320), (0x1F400, 0x1F4FD), (0x1F600, 0x1F640), (0x1F680, 0x1F6C5))
_SYMBOLS = "★☆♥♦♣♠✓✗→←↑↓⇒§¶†‡•◆●○■□▲▼€£¥±×÷≠≤≥∞√∑#@&%*+=~^|\\/<>[]{}"
_TOP_DOMAINS = ("com", "org", "net", "de", "fr", "io")
_UNITS = ("kg", "km", "°C", "%", "€", "MB", "kWh", "px")


def has_case(text: str) -> bool:
    """Return whether most letters of a text have an upper or lower case.

    Chinese and Arabic letters, for example, have none.
    """
    num_cased = sum(letter.isupper() or letter.islower() for letter in text)
    num_letters = sum(map(str.isalpha, text))
    return num_cased > num_letters / 2


def to_title(text: str) -> str:
    """Capitalize the first character of each word. Words are separated by whitespace."""
    first_character = r"(?<!\S)\S"  # not after a character other than whitespace
    return re.sub(first_character, lambda match: match[0].upper(), text)


CASES: dict[str, Callable[[str], str]] = {
    "upper": str.upper,
    "title": to_title,
    "lower": str.lower,
}


def remove_end_marks(src: str, tgt: str) -> tuple[str, str]:
    """Remove the final punctuation of two texts if both end with equivalent marks.

    If nothing of one text would be left, both texts stay unchanged.
    """
    for marks in END_MARKS:
        if src.endswith(tuple(marks)) and tgt.endswith(tuple(marks)):
            stripped_src = src.rstrip(marks).rstrip()
            stripped_tgt = tgt.rstrip(marks).rstrip()
            if stripped_src and stripped_tgt:
                return stripped_src, stripped_tgt
    return src, tgt


def perturb_line(
    src: str, references: Sequence[str], perturbation: Perturbation, rng: Random
) -> tuple[str, list[str]]:
    """Perturb a source, and change its references if the correct translation changes with it.

    Typos do not change the references. The final punctuation is removed only if the source and
    all references end with equivalent marks. The case changes only if most letters of the source
    have a case.
    """
    if perturbation is Perturbation.typos:
        return add_typos(src, MAX_TYPOS, rng), list(references)
    if perturbation is Perturbation.noise:
        word = draw_word_to_copy(rng)
        return f"{src} {word}", [f"{reference} {word}" for reference in references]
    if perturbation is Perturbation.punct:
        return _remove_end_marks_of_all(src, references)
    if not has_case(src):
        return src, list(references)
    change_case = CASES[perturbation.value]  # upper, title or lower
    return change_case(src), [change_case(reference) for reference in references]


def _remove_end_marks_of_all(src: str, references: Sequence[str]) -> tuple[str, list[str]]:
    """Remove the final punctuation of a source and its references; see `perturb_line`."""
    stripped_src = src
    stripped_references = []
    for reference in references:
        stripped_src, stripped_reference = remove_end_marks(src, reference)
        has_removed = stripped_src != src
        if not has_removed:
            return src, list(references)
        stripped_references.append(stripped_reference)
    return stripped_src, stripped_references


# --- typos


def add_typos(text: str, count: int, rng: Random) -> str:
    """Make `count` random typos in the letters of a text.

    A text with fewer than two letters stays unchanged. Chinese, Japanese and Korean characters do
    not count as letters. Some typos change nothing, such as a swap at the end of the text.
    """
    for _ in range(count):
        positions = [i for i, character in enumerate(text) if _is_alphabetic(character)]
        if len(positions) < 2:
            break
        make_typo = rng.choice(_TYPOS)
        text = make_typo(text, rng.choice(positions), rng)
    return text


def _is_alphabetic(character: str) -> bool:
    """Return whether a character is a letter, but not a Chinese, Japanese or Korean one."""
    is_wide = unicodedata.east_asian_width(character) in ("W", "F")  # wide or full-width
    return character.isalpha() and not is_wide


def _replace(text: str, position: int, replacement: str) -> str:
    """Replace the character at `position`."""
    return text[:position] + replacement + text[position + 1 :]


def _swap(text: str, position: int, rng: Random) -> str:
    """Exchange a character and the next one."""
    pair = text[position : position + 2]
    return text[:position] + pair[::-1] + text[position + 2 :]


def _leave_out(text: str, position: int, rng: Random) -> str:
    """Remove a character."""
    return _replace(text, position, "")


def _repeat(text: str, position: int, rng: Random) -> str:
    """Write a character twice."""
    return _replace(text, position, 2 * text[position])


def _hit_neighbor(text: str, position: int, rng: Random) -> str:
    """Replace a character by a neighbor on the keyboard."""
    return _replace(text, position, _draw_neighbor(text[position], rng))


def _add_neighbor(text: str, position: int, rng: Random) -> str:
    """Insert a neighbor on the keyboard after a character."""
    letter = text[position]
    return _replace(text, position, letter + _draw_neighbor(letter, rng))


def _draw_neighbor(letter: str, rng: Random) -> str:
    """Draw a letter from the keys next to `letter`, or return `letter` if it has no key."""
    neighbors: list[str] = []
    for row, keys in enumerate(_KEYBOARD):
        column = keys.find(letter.lower())
        if column < 0:
            continue
        # the 3 x 3 keys around the letter
        first_row = max(0, row - 1)
        first_column = max(0, column - 1)
        for near_keys in _KEYBOARD[first_row : row + 2]:
            neighbors.extend(near_keys[first_column : column + 2])
        neighbors.remove(letter.lower())
    if not neighbors:
        return letter
    neighbor = rng.choice(neighbors)
    return neighbor.upper() if letter.isupper() else neighbor


def _use_similar(text: str, position: int, rng: Random) -> str:
    """Replace a character by one that looks alike."""
    letter = text[position]
    return _replace(text, position, _SIMILAR.get(letter.lower(), letter))


def _join_repeated(text: str, position: int, rng: Random) -> str:
    """Remove one letter of the first doubled letter at or after `position`."""
    match = re.search(r"(\w)\1", text[position:])
    if match is None:
        return text
    return _leave_out(text, position + match.start(), rng)


def _skip_space(text: str, position: int, rng: Random) -> str:
    """Leave out the next space."""
    space = text.find(" ", position)
    if space < 0:
        return text
    return _leave_out(text, space, rng)


def _add_space(text: str, position: int, rng: Random) -> str:
    """Insert a space before a character."""
    return text[:position] + " " + text[position:]


_TYPOS: tuple[Callable[[str, int, Random], str], ...] = (
    _swap,
    _leave_out,
    _repeat,
    _hit_neighbor,
    _add_neighbor,
    _use_similar,
    _join_repeated,
    _skip_space,
    _add_space,
)


def misplace_space(text: str, rng: Random) -> str:
    """Misplace the space after a punctuation mark within the text.

    Removes the space, adds another one before the mark, or moves the space there.
    """
    matches = list(re.finditer(r"(?<=\w)([,.;:!?]) (?=\w)", text))
    if not matches:
        return text
    match = rng.choice(matches)
    mark = match[1]
    replacement = rng.choice((mark, f" {mark} ", f" {mark}"))
    return text[: match.start()] + replacement + text[match.end() :]


# --- text to copy


def draw_words_to_copy(rng: Random) -> str:
    """Return 1 to 6 words that a translation has to copy, separated by spaces."""
    return " ".join(draw_word_to_copy(rng) for _ in range(rng.randint(1, 6)))


def draw_word_to_copy(rng: Random) -> str:
    """Return random letters, emoji or symbols, or a random address, placeholder or quantity."""
    return rng.choice(_WORDS_TO_COPY)(rng)


def _draw_letters(rng: Random) -> str:
    return "".join(rng.choices(rng.choice(_ALPHABETS), k=rng.randint(2, 5)))


def _draw_emoji(rng: Random) -> str:
    characters = []
    for _ in range(rng.randint(1, 3)):
        first, end = rng.choice(_EMOJI_RANGES)
        characters.append(chr(rng.randrange(first, end)))
    return "".join(characters)


def _draw_symbols(rng: Random) -> str:
    return "".join(rng.choices(_SYMBOLS, k=rng.randint(1, 3)))


def _draw_name(rng: Random) -> str:
    return "".join(rng.choices(_LATIN + _DIGITS, k=rng.randint(2, 8)))


def _draw_url(rng: Random) -> str:
    scheme = rng.choice(("https://", "http://", "https://www.", "www."))
    host = f"{_draw_name(rng)}.{rng.choice(_TOP_DOMAINS)}"
    path = "".join("/" + _draw_name(rng) for _ in range(rng.randint(0, 3)))
    query = rng.choice(("", f"?{_draw_name(rng)}={_draw_name(rng)}", f"#{_draw_name(rng)}"))
    return scheme + host + path + query


def _draw_email(rng: Random) -> str:
    return f"{_draw_name(rng)}@{_draw_name(rng)}.{rng.choice(_TOP_DOMAINS)}"


def _draw_placeholder(rng: Random) -> str:
    template = rng.choice(("{NAME}", "${NAME}", "{{ NAME }}", "<NAME>", "%(NAME)s", "%NAME"))
    return template.replace("NAME", _draw_name(rng))


def _draw_quantity(rng: Random) -> str:
    return f"{rng.randint(1, 9999)} {rng.choice(_UNITS)}"


_WORDS_TO_COPY: tuple[Callable[[Random], str], ...] = (
    _draw_letters,
    _draw_emoji,
    _draw_symbols,
    _draw_url,
    _draw_email,
    _draw_placeholder,
    _draw_quantity,
)


def insert_word(src: str, tgt: str, word: str, rng: Random) -> tuple[str, str]:
    """Insert a word at corresponding points of two texts.

    The word is inserted at both starts, at both ends, or after a word that each text contains
    exactly once, such as a name or a number. All possible points are equally probable.
    """
    src_words = src.split(" ")
    tgt_words = tgt.split(" ")
    # indices in `src_words` and `tgt_words`
    points = [(0, 0), (len(src_words), len(tgt_words))]
    for i, shared_word in enumerate(src_words):
        if src_words.count(shared_word) == 1 and tgt_words.count(shared_word) == 1:
            points.append((i + 1, tgt_words.index(shared_word) + 1))
    src_point, tgt_point = rng.choice(points)
    src_words.insert(src_point, word)
    tgt_words.insert(tgt_point, word)
    return " ".join(src_words), " ".join(tgt_words)
