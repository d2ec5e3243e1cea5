"""Counts of the characters of many lines, and comparison of lines by their normal form.

The normal form of a line is its text without case, punctuation and spaces. The signature of a line
is the sum of the hashes of the characters of its normal form. For speed, Python computes hashes
and other values once for each distinct character, and NumPy looks them up for all characters.
"""

# In shapes, N is the number of lines, C the number of characters of all lines with their line ends,
# and K the number of distinct signatures. A code is a code point of Unicode.

from __future__ import annotations

import functools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import has_word_pieces
from nmt.preprocess.scripts import SCRIPT_BY_NUMBER, script_numbers

Ints = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Signatures = np.ndarray[Any, np.dtype[np.uint64]]
Shares = np.ndarray[Any, np.dtype[np.float64]]

_LINE_END = ord("\n")
# categories of Unicode: punctuation, spaces, control characters, free-standing accents
_IGNORED_CATEGORIES = ("P", "Z", "C", "Sk")
# U+3000 is the last space of Unicode
_SPACE_CODES = [code for code in range(0x3001) if chr(code).isspace()]
_IS_SPACE = np.zeros(0x110000, dtype=bool)
_IS_SPACE[_SPACE_CODES] = True


class CharacterStatistics:
    """Counts characters and words of lines, and hashes the lines. No line contains a line end."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._codes, self._starts = _to_code_points(lines)
        self._counts: Ints = np.bincount(self._codes)  # (largest code point + 1,)
        self._distinct_codes: Ints = np.flatnonzero(self._counts)

    def tally(self) -> Counter[int]:
        """Count each character, by code point."""
        codes = self._distinct_codes.tolist()
        counts = self._counts[self._distinct_codes].tolist()
        count_by_code = Counter(dict(zip(codes, counts, strict=True)))
        del count_by_code[_LINE_END]  # `_to_code_points` adds line ends
        return count_by_code

    def num_words(self) -> int:
        """Count the words, which are separated by spaces of any kind."""
        is_space = _IS_SPACE[self._codes]  # (C,); the last character is a line end
        is_word_end = ~is_space[:-1] & is_space[1:]  # (C - 1,), a space follows a character
        return int(np.count_nonzero(is_word_end))

    def signatures(self) -> Signatures:
        """Return a hash of each line (N,). Lines with equal normal forms have equal signatures.

        Lines with the same characters in another order have the same signature too.
        """
        hash_by_code = np.zeros(len(self._counts), np.uint64)
        distinct_codes = self._distinct_codes
        hash_by_code[distinct_codes] = [_hash_character(code) for code in distinct_codes.tolist()]
        hashes = hash_by_code.take(self._codes)  # (C,)
        return np.add.reduceat(hashes, self._starts)  # (N,), the sum over each line


def _to_code_points(lines: Sequence[str]) -> tuple[Ints, Ints]:
    """Return the code points of lines (C,), and the index of the first one of each line (N,).

    A line end follows each line, so that an empty line has a code point too.
    """
    text = "\n".join([*lines, ""])
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64)
    is_line_end = codes == _LINE_END
    line_ends = np.flatnonzero(is_line_end)
    # the first line starts at 0, each other line after a line end; no line follows the last one
    starts = np.concatenate([[0], line_ends + 1])[:-1]
    return codes, starts


class _FoldingTable(dict[int, str]):
    """The table for `str.translate` in `normal_form`. It computes an entry on the first access."""

    def __missing__(self, code: int) -> str:
        folded = unicodedata.normalize("NFKD", chr(code)).casefold()
        self[code] = "".join(
            char
            for char in folded
            if not unicodedata.category(char).startswith(_IGNORED_CATEGORIES)
        )
        return self[code]


_FOLDING_TABLE = _FoldingTable()


def normal_form(text: str) -> str:
    """Return a text without case, punctuation and spaces, and with decomposed characters."""
    return text.translate(_FOLDING_TABLE)


@functools.cache
def _hash_character(code: int) -> int:
    """Return the hash of a character: the sum of the hashes of its normal form's characters."""
    hashes = [xxhash.xxh3_64_intdigest(char.encode()) for char in normal_form(chr(code))]
    return sum(hashes) % (1 << 64)  # the sums of uint64 in `signatures` wrap around, too


def is_among(signatures: Signatures, sorted_signatures: Signatures) -> Flags:
    """Return which of the `signatures` (N,) occur in `sorted_signatures` (K,)."""
    if len(sorted_signatures) == 0:
        return np.zeros(len(signatures), bool)
    # `searchsorted` returns K for a signature larger than all; the last one is compared instead
    indices = np.searchsorted(sorted_signatures, signatures)  # (N,)
    indices = np.minimum(indices, len(sorted_signatures) - 1)
    is_equal: Flags = sorted_signatures[indices] == signatures
    return is_equal


class LineSet:
    """A set of lines. Lines are equal if their normal forms are equal and not empty."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._forms = {normal_form(line) for line in lines}
        self._forms.discard("")
        self._signatures = np.unique(CharacterStatistics(lines).signatures())

    def contains(self, lines: Sequence[str]) -> Flags:
        """Return which of the lines (N,) are in the set."""
        is_member = np.zeros(len(lines), dtype=bool)
        if lines:
            may_match = is_among(CharacterStatistics(lines).signatures(), self._signatures)
            for row in np.flatnonzero(may_match).tolist():
                is_member[row] = normal_form(lines[row]) in self._forms
        return is_member


def foreign_shares(lines: Sequence[str], scripts: Sequence[str]) -> Shares:
    """Return the share of letters outside of `scripts` in each line (N,), or 0 without letters."""
    codes, starts = _to_code_points(lines)
    numbers = script_numbers().take(codes)  # (C,), the script of each character; 0 without one
    expected_scripts = ["", *scripts]  # "" is the name of characters without a script
    # indexed by the number of the script
    is_foreign_script = np.array([name not in expected_scripts for name in SCRIPT_BY_NUMBER])
    is_foreign = is_foreign_script.take(numbers)  # (C,)
    is_letter = numbers > 0  # (C,)
    num_foreign = np.add.reduceat(is_foreign, starts, dtype=np.int64)
    num_letters = np.add.reduceat(is_letter, starts, dtype=np.int64)
    return num_foreign / np.maximum(num_letters, 1)


_NUM_LISTED = 20  # length of each list of characters in the report
_MIN_SCRIPT_SHARE = 0.05
"""Minimum share of a script in all letters. The letters of a rarer script are odd."""
_REPLACEMENT = 0xFFFD  # the character that replaces bytes that are not UTF-8
# categories of Unicode whose characters are odd in a text, and often have no name
_ODD_CATEGORIES = {"Cc": "control", "Cf": "invisible", "Co": "private use", "Cn": "unassigned"}


def describe_characters(counts: Counter[int], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the section of the report about the characters of one side.

    `counts` has the number of each character, by code point. A character is covered if the
    tokenizer encodes it without <unk> and byte tokens.
    """
    shares = _script_shares(counts)
    odd_reasons = {}  # why a code point is odd
    for code in counts:
        reason = _odd_reason(code, shares)
        if reason is not None:
            odd_reasons[code] = reason
    uncovered = _uncovered_codes(counts, tokenizer)
    total = counts.total()
    num_covered = total - sum(counts[code] for code in uncovered)
    odd_characters = []
    for code in _most_frequent(counts, odd_reasons):
        odd_characters.append({**_describe_character(code, counts), "why": odd_reasons[code]})
    return {
        "characters": total,
        "distinct_characters": len(counts),
        "scripts": shares,
        "covered_share": num_covered / total if total else 1.0,
        "uncovered": [
            _describe_character(code, counts) for code in _most_frequent(counts, uncovered)
        ],
        "odd_characters": sum(counts[code] for code in odd_reasons),
        "odd": odd_characters,
    }


def _script_shares(counts: Counter[int]) -> dict[str, float]:
    """Return the share of each script in all letters that have a script, the largest first."""
    numbers = script_numbers()
    num_letters = Counter[str]()
    for code, count in counts.items():
        script = SCRIPT_BY_NUMBER[numbers[code]]
        if script:
            num_letters[script] += count
    scripts = sorted(num_letters, key=lambda script: (-num_letters[script], script))
    return {script: num_letters[script] / num_letters.total() for script in scripts}


def _odd_reason(code: int, script_shares: dict[str, float]) -> str | None:
    """Return why a character is odd in a text with these shares of scripts, or None."""
    if code == _REPLACEMENT:
        return "replacement"
    script = SCRIPT_BY_NUMBER[script_numbers()[code]]
    if script:  # the character is a letter
        return "other script" if script_shares[script] < _MIN_SCRIPT_SHARE else None
    return _ODD_CATEGORIES.get(unicodedata.category(chr(code)))


def _uncovered_codes(codes: Iterable[int], tokenizer: Tokenizer) -> list[int]:
    """Return the code points that the tokenizer encodes with <unk> or byte tokens.

    Leaves out characters that the normalization of the tokenizer removes: they have no ids. The
    list is empty for a tokenizer of whole words, which has no pieces of single characters.
    """
    if has_word_pieces(tokenizer.model):
        return []
    uncovered_ids = {tokenizer.unk_id, *tokenizer.byte_ids}
    codes = list(codes)  # they are read twice
    encoded = tokenizer.encode_batch([chr(code) for code in codes], num_threads=1)
    uncovered = []
    for code, ids in zip(codes, encoded, strict=True):
        if not uncovered_ids.isdisjoint(ids):
            uncovered.append(code)
    return uncovered


def _most_frequent(counts: Counter[int], codes: Iterable[int]) -> list[int]:
    """Return the most frequent of the code points, for a list of the report."""
    by_count = sorted(codes, key=lambda code: (-counts[code], code))  # the most frequent first
    return by_count[:_NUM_LISTED]


def _describe_character(code: int, counts: Counter[int]) -> dict[str, Any]:
    """Return the code, name and count of a character for the report."""
    category = unicodedata.category(chr(code))
    name = unicodedata.name(chr(code), _ODD_CATEGORIES.get(category, "no name"))
    if chr(code) == "\t":  # the most frequent control character; Unicode has no names for them
        name = "TAB"
    return {"code": f"U+{code:04X}", "name": name, "count": counts[code]}
