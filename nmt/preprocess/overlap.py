"""Finds sentences of the validation and test sets in the training text: the same to the byte, or
the same but for case, punctuation and spaces.

Signatures of whole chunks pick the few lines that may match; only these are compared one by one.
"""

# N lines of a chunk, R rows of a held-out split

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nmt.preprocess.codepoints import CodePoints, Signatures, normal_form
from nmt.preprocess.tally import Ints

STRICTNESS = ("exact", "normalised")
KINDS = ("pairs", "sources", "targets")
NUM_EXAMPLES = 5
Rows = frozenset[int]
_NO_ROWS: Rows = frozenset()


class SplitOverlap:
    """What of one held-out split of `num_rows` came in training text.

    `matches` (2, 3): training pairs that match, by strictness and kind; `seen` (2, 3, R): which
    rows of the split were matched. Whatever is exact counts as normalised too.
    """

    def __init__(self, num_rows: int) -> None:
        self.matches: Ints = np.zeros((2, 3), np.int64)
        self.seen: np.ndarray[Any, np.dtype[np.bool_]] = np.zeros((2, 3, num_rows), dtype=bool)
        self.examples: dict[str, list[dict[str, Any]]] = {}  # by "exact pairs" and so on

    def count(self, strictness: int, kind: int, rows: Rows, place: tuple[str, int]) -> None:
        """Count a training pair that matches `rows` of the split, at `place` (file, line)."""
        self.matches[strictness, kind] += 1
        self.seen[strictness, kind, list(rows)] = True
        examples = self.examples.setdefault(f"{STRICTNESS[strictness]} {KINDS[kind]}", [])
        if len(examples) < NUM_EXAMPLES:
            file, line = place
            examples.append({"file": file, "line": line, "held_out_line": min(rows) + 1})

    def merge(self, other: SplitOverlap) -> None:
        """Add what was found in text that comes after."""
        self.matches += other.matches
        self.seen |= other.seen
        for name, examples in other.examples.items():
            self.examples[name] = [*self.examples.get(name, []), *examples][:NUM_EXAMPLES]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        seen = [[np.flatnonzero(rows).tolist() for rows in kinds] for kinds in self.seen]
        return {
            "num_rows": self.seen.shape[2],
            "matches": self.matches.tolist(),
            "seen": seen,
            "examples": {name: list(places) for name, places in self.examples.items()},
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> SplitOverlap:
        """Read what `to_json` returned."""
        overlap = cls(content["num_rows"])
        overlap.matches += np.array(content["matches"], np.int64)
        for strictness, kinds in enumerate(content["seen"]):
            for kind, rows in enumerate(kinds):
                overlap.seen[strictness, kind, rows] = True
        overlap.examples = {name: list(places) for name, places in content["examples"].items()}
        return overlap


class HeldOut:
    """The lines of the held-out splits, by text.

    Args:
        splits: source and target lines, cleaned, of each split.
    """

    def __init__(self, splits: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> None:
        self._splits = {name: tuple(map(_Lines, sides)) for name, sides in splits.items()}
        self._sizes = {name: len(sides[0]) for name, sides in splits.items()}
        self._signatures = [
            np.unique(np.concatenate([CodePoints(sides[i]).signatures() for sides in _all(splits)]))
            for i in range(2)
        ]

    def find(
        self,
        texts: tuple[Sequence[str], Sequence[str]],
        signatures: tuple[Signatures, Signatures],
        *,
        file: str,
        lines: Ints,
    ) -> dict[str, SplitOverlap]:
        """Look for the pairs of a chunk in every split.

        Args:
            texts: source and target (N,) each.
            signatures: of these lines.
            file: where they are from.
            lines: their numbers there (N,).
        """
        found = {name: SplitOverlap(size) for name, size in self._sizes.items()}
        may_match = [_is_among(signatures[i], self._signatures[i]) for i in range(2)]  # (N,) each
        for row in np.flatnonzero(may_match[0] | may_match[1]).tolist():
            place = file, int(lines[row])
            for name, overlap in found.items():
                sides = self._splits[name]
                hits = [
                    side.find(text[row]) if may[row] else (_NO_ROWS, _NO_ROWS)
                    for side, text, may in zip(sides, texts, may_match, strict=True)
                ]
                _count(overlap, hits, place)
        return found


class _Lines:
    """One side of a split: the rows that hold a text, or its normal form."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.exact = _rows_by(list(texts))
        self.normal = _rows_by([normal_form(text) for text in texts])
        self.normal.pop("", None)  # lines of punctuation alone are only the same when exact

    def find(self, text: str) -> tuple[Rows, Rows]:
        """Return the rows with this text, and those with its normal form."""
        exact = self.exact.get(text, _NO_ROWS)
        return exact, exact | self.normal.get(normal_form(text), _NO_ROWS)


def _is_among(signatures: Signatures, known: Signatures) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Say which are among `known`, which rise; numpy's isin would sort both."""
    if len(known) == 0:
        return np.zeros(len(signatures), dtype=bool)
    places = np.minimum(np.searchsorted(known, signatures), len(known) - 1)
    return known[places] == signatures  # type: ignore[no-any-return]


def _all(splits: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> Sequence[Any]:
    return list(splits.values()) or [([], [])]


def _rows_by(texts: list[str]) -> dict[str, Rows]:
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        rows.setdefault(text, []).append(row)
    return {text: frozenset(numbers) for text, numbers in rows.items()}


def _count(
    overlap: SplitOverlap, hits: Sequence[tuple[Rows, Rows]], place: tuple[str, int]
) -> None:
    for strictness in range(2):
        src, tgt = hits[0][strictness], hits[1][strictness]
        for kind, rows in enumerate((src & tgt, src, tgt)):
            if rows:
                overlap.count(strictness, kind, rows, place)
