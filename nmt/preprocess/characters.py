"""Counts of the characters of many lines, and comparison of lines by their normal form.

The normal form of a line ignores case, punctuation and spaces. For speed, Python loops visit only
the distinct characters of a text; NumPy processes all of its characters.
"""

# In shapes, N is the number of lines, C the number of characters of all lines with their line ends,
# and K the number of distinct signatures.

from __future__ import annotations

import functools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from nmt.data.tokenizer import Tokenizer
from nmt.preprocess.scripts import SCRIPTS, script_table

Ints = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Signatures = np.ndarray[Any, np.dtype[np.uint64]]
Shares = np.ndarray[Any, np.dtype[np.float64]]

_LINE_END = 10
# categories of Unicode: punctuation, spaces, control characters, free-standing accents
_IGNORED_CATEGORIES = ("P", "Z", "C", "Sk")
_IS_SPACE = np.zeros(0x110000, dtype=bool)
_IS_SPACE[[code for code in range(0x3001) if chr(code).isspace()]] = True  # U+3000 is the last


class CodePoints:
    """The code points of lines, which contain no line ends."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._codes, self._starts = _code_points(lines)
        self._counts: Ints = np.bincount(self._codes)  # (largest code point + 1,)
        self._distinct: Ints = np.flatnonzero(self._counts)

    def tally(self) -> Counter[int]:
        """Count each character, by code point."""
        counts = self._counts[self._distinct].tolist()
        tally = Counter(dict(zip(self._distinct.tolist(), counts, strict=True)))
        del tally[_LINE_END]
        return tally

    def num_words(self) -> int:
        """Count the words, which are separated by spaces of any kind."""
        is_space = _IS_SPACE[self._codes]  # (C,); the last character is a line end
        return int(np.count_nonzero(~is_space[:-1] & is_space[1:]))

    def signatures(self) -> Signatures:
        """Return a hash of each line (N,). Lines with equal normal forms have equal signatures.

        The order of the characters does not matter, so other lines may have the same signature.
        """
        weights = np.zeros(len(self._counts), np.uint64)
        weights[self._distinct] = [_weight(code) for code in self._distinct.tolist()]
        return np.add.reduceat(weights.take(self._codes), self._starts)


def _code_points(lines: Sequence[str]) -> tuple[Ints, Ints]:
    """Return the code points (C,) of lines with line ends, and the index where each starts (N,)."""
    text = "\n".join([*lines, ""])
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64)
    return codes, np.concatenate([[0], np.flatnonzero(codes == _LINE_END) + 1])[:-1]


class _FoldingTable(dict[int, str]):
    """Translation table of `normal_form`, whose entries are computed when first needed."""

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
def _weight(code: int) -> int:
    """Return the sum of hashes that a character adds to the signature of its line."""
    hashes = [xxhash.xxh3_64_intdigest(char.encode()) for char in normal_form(chr(code))]
    return sum(hashes) % (1 << 64)


def is_among(signatures: Signatures, sorted_signatures: Signatures) -> Flags:
    """Return which of the `signatures` (N,) occur in `sorted_signatures` (K,)."""
    if len(sorted_signatures) == 0:
        return np.zeros(len(signatures), bool)
    # without the last one, so that every index is valid
    indices = np.searchsorted(sorted_signatures[:-1], signatures)
    is_equal: Flags = sorted_signatures[indices] == signatures
    return is_equal


class LineSet:
    """A set of lines. Lines are equal if their normal forms are equal and not empty."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._forms = {normal_form(line) for line in lines} - {""}
        self._signatures = np.unique(CodePoints(lines).signatures())

    def mask(self, lines: Sequence[str]) -> Flags:
        """Return which of the lines (N,) are in the set."""
        is_member = np.zeros(len(lines), dtype=bool)
        if lines:
            may_match = is_among(CodePoints(lines).signatures(), self._signatures)
            for row in np.flatnonzero(may_match).tolist():
                is_member[row] = normal_form(lines[row]) in self._forms
        return is_member


def foreign_shares(lines: Sequence[str], scripts: Sequence[str]) -> Shares:
    """Return the share of letters outside of `scripts` in each line (N,); 0 without letters."""
    codes, starts = _code_points(lines)
    script_numbers = script_table().take(codes)  # (C,)
    is_foreign = np.ones(len(SCRIPTS) + 1, bool)
    is_foreign[0] = False  # characters without a script
    is_foreign[[SCRIPTS.index(name) + 1 for name in scripts]] = False
    num_foreign = np.add.reduceat(is_foreign.take(script_numbers), starts, dtype=np.int64)
    num_letters = np.add.reduceat(script_numbers > 0, starts, dtype=np.int64)
    return num_foreign / np.maximum(num_letters, 1)


_NUM_LISTED = 20  # characters in each list of the report
_MAIN_SHARE = 0.05  # letters of a script with a smaller share are reported as odd
_ODD_CATEGORIES = {"Cc": "control", "Cf": "invisible", "Co": "private use", "Cn": "unassigned"}


def describe_characters(counts: Counter[int], tokenizer: Tokenizer) -> dict[str, Any]:
    """Describe the characters of one side for the report; `counts` is by code point.

    A character is covered if the tokenizer encodes it without <unk> and byte tokens.
    """
    script_numbers = script_table()
    scripts = {code: SCRIPTS[script_numbers[code] - 1] for code in counts if script_numbers[code]}
    num_letters = Counter[str]()
    for code, script in scripts.items():
        num_letters[script] += counts[code]
    shares = {
        script: num_of_script / num_letters.total()
        for script, num_of_script in sorted(
            num_letters.items(), key=lambda item: (-item[1], item[0])
        )
    }
    odd_reasons = {}  # by code point
    for code in counts:
        category = unicodedata.category(chr(code))
        if code == 0xFFFD:
            odd_reasons[code] = "replacement"
        elif code in scripts:
            if shares[scripts[code]] < _MAIN_SHARE:
                odd_reasons[code] = "other script"
        elif category in _ODD_CATEGORIES:
            odd_reasons[code] = _ODD_CATEGORIES[category]
    # a character that normalization removes has no ids and counts as covered
    uncovered_ids = {tokenizer.unk_id, *tokenizer.byte_ids}
    ids_by_character = tokenizer.encode_batch([chr(code) for code in counts], 1)
    uncovered = [
        code
        for code, ids in zip(counts, ids_by_character, strict=True)
        if not uncovered_ids.isdisjoint(ids)
    ]
    total = counts.total()
    num_covered = total - sum(counts[code] for code in uncovered)
    odd_entries = _list_most_frequent(counts, odd_reasons)
    for entry in odd_entries:
        entry["why"] = odd_reasons[int(entry["code"][2:], 16)]
    return {
        "characters": total,
        "distinct_characters": len(counts),
        "scripts": shares,
        "covered_share": num_covered / total if total else 1.0,
        "uncovered": _list_most_frequent(counts, uncovered),
        "odd_characters": sum(counts[code] for code in odd_reasons),
        "odd": odd_entries,
    }


def _list_most_frequent(counts: Counter[int], codes: Iterable[int]) -> list[dict[str, Any]]:
    """Describe the most frequent of the characters `codes`."""
    entries = []
    for code in sorted(codes, key=lambda code: (-counts[code], code))[:_NUM_LISTED]:
        category = _ODD_CATEGORIES.get(unicodedata.category(chr(code)), "no name")
        name = "TAB" if code == 9 else unicodedata.name(chr(code), category)
        entries.append({"code": f"U+{code:04X}", "name": name, "count": counts[code]})
    return entries
