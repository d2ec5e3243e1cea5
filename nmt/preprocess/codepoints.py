"""The characters of many lines as arrays: counted, cut to words, and summed up to a signature of
each line that case, punctuation and spaces do not change.

No loop here goes over the characters of a text; some go over the different characters in it.
"""

# N lines, C characters of all lines, line ends counted

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

from nmt.preprocess.tally import Ints, Tally

Signatures = np.ndarray[Any, np.dtype[np.uint64]]

_LINE_END = 10
_IGNORED = ("P", "Z", "C", "Sk")  # categories: punctuation, spaces, control, accents as quotes
_IS_SPACE = np.zeros(0x110000, dtype=bool)
_IS_SPACE[[code for code in range(0x3001) if chr(code).isspace()]] = True  # the last is U+3000


class CodePoints:
    """The code points of lines without line ends."""

    def __init__(self, texts: Sequence[str]) -> None:
        joined = "\n".join([*texts, ""])
        self._codes: Ints = np.frombuffer(joined.encode("utf-32-le"), np.uint32).astype(np.int64)
        counts = np.bincount(self._codes)  # (largest code point + 1,)
        self._present: Ints = np.flatnonzero(counts)
        self._counts: Ints = counts[self._present]

    def tally(self) -> Tally:
        """Count each character; line ends are none."""
        inside = self._present != _LINE_END
        return Tally(self._present[inside], self._counts[inside])

    def num_words(self) -> int:
        """Count what stands between spaces of any kind."""
        is_space = np.zeros(len(self._codes), dtype=bool)  # (C,)
        for code in self._present[_IS_SPACE[self._present]].tolist():  # two or three as a rule
            is_space |= self._codes == code
        starts = np.count_nonzero(is_space[:-1] & ~is_space[1:])
        return int(starts) + int(len(is_space) > 0 and not is_space[0])

    def signatures(self) -> Signatures:
        """Return a number for each line (N,), the same for lines of the same `normal_form`."""
        if len(self._codes) == 0:
            return np.zeros(0, np.uint64)
        weights = np.zeros(int(self._present[-1]) + 1, np.uint64)
        weights[self._present] = [_weight(code) for code in self._present.tolist()]
        ends = np.flatnonzero(self._codes == _LINE_END)  # (N,)
        starts = np.concatenate([[0], ends[:-1] + 1])
        # a sum, which the order of characters does not change: whoever finds two lines of one
        # signature has to compare their normal forms
        return np.add.reduceat(weights.take(self._codes), starts)


def normal_form(text: str) -> str:
    """Drop punctuation and spaces, ignore case and how a character is composed."""
    return text.translate(_FOLDS)


class _Folds(dict[int, str]):
    """What `normal_form` makes of each character, found out when it first comes."""

    def __missing__(self, code: int) -> str:
        folded = unicodedata.normalize("NFKD", chr(code)).casefold()
        kept = (c for c in folded if not unicodedata.category(c).startswith(_IGNORED))
        self[code] = "".join(kept)
        return self[code]


_FOLDS = _Folds()


@functools.cache
def _weight(code: int) -> int:
    """Return the sum, modulo 2^64, of a scattered number for each character of the normal form."""
    return sum(_scatter(ord(c)) for c in normal_form(chr(code))) % (1 << 64)


def _scatter(number: int) -> int:
    """Mix the bits of a number to 64 others (splitmix64; Steele et al., 2014)."""
    mask = (1 << 64) - 1
    number = (number + 1) * 0x9E3779B97F4A7C15 & mask
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
    return number ^ number >> 31
