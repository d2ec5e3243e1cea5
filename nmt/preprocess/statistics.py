"""What the doctor's report knows of a text, counted a chunk at a time.

A `Statistics` is as small for a billion pairs as for a thousand, and those of chunks add up to the
same however the text was cut. It knows nothing of drops, and draws no conclusions.
"""

# N pairs of a chunk, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from nmt.preprocess.codepoints import CodePoints
from nmt.preprocess.overlap import HeldOut, SplitOverlap
from nmt.preprocess.tally import Ints, Tally

EXACT_LENGTHS = 256  # shorter ones are counted by length, others in bins
_BINS_AN_OCTAVE = 16
NUM_BINS = EXACT_LENGTHS + 12 * _BINS_AN_OCTAVE  # the last begins just below a million tokens
Sides = tuple[list[str], list[str]]
Encoded = tuple[
    np.ndarray[Any, Any], np.ndarray[Any, Any]
]  # ids of all lines, and offsets (N + 1,)


class Vocabulary(Protocol):
    """What the statistics need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """The number of ids."""

    @property
    def unk_id(self) -> int:
        """The id of what is unknown."""

    @property
    def byte_ids(self) -> Sequence[int]:
        """The ids that stand for a byte."""


class SideStatistics:
    """The counts of one side."""

    def __init__(self) -> None:
        self.num_tokens = 0  # without EOS
        self.num_words = 0  # between spaces
        self.num_unknown = 0  # tokens <unk>
        self.num_bytes = 0  # tokens that stand for a byte of a character without a piece
        self.longest = 0  # tokens, EOS included
        self.characters = Tally()  # by code point

    def merge(self, other: SideStatistics) -> None:
        """Add the counts of other text."""
        for name in ("num_tokens", "num_words", "num_unknown", "num_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest = max(self.longest, other.longest)
        self.characters.add(other.characters)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**vars(self), "characters": self.characters.to_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> SideStatistics:
        """Read what `to_json` returned."""
        side = cls()
        vars(side).update(content, characters=Tally.from_json(content["characters"]))
        return side


class Statistics:
    """The counts of pairs that were kept."""

    def __init__(self) -> None:
        self.num_pairs = 0
        self.sides = (SideStatistics(), SideStatistics())
        self.lengths = Tally()  # pairs by source bin * NUM_BINS + target bin, see `length_bins`
        self.overlaps: dict[str, SplitOverlap] = {}  # by held-out split

    def merge(self, other: Statistics) -> None:
        """Add the counts of the text that comes after."""
        self.num_pairs += other.num_pairs
        self.lengths.add(other.lengths)
        for mine, its in zip(self.sides, other.sides, strict=True):
            mine.merge(its)
        for name, overlap in other.overlaps.items():
            if name in self.overlaps:
                self.overlaps[name].merge(overlap)
            else:
                self.overlaps[name] = SplitOverlap.from_json(overlap.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "num_pairs": self.num_pairs,
            "sides": [side.to_json() for side in self.sides],
            "lengths": self.lengths.to_json(),
            "overlaps": {name: overlap.to_json() for name, overlap in self.overlaps.items()},
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Statistics:
        """Read what `to_json` returned."""
        statistics = cls()
        statistics.num_pairs = content["num_pairs"]
        src, tgt = map(SideStatistics.from_json, content["sides"])
        statistics.sides = (src, tgt)
        statistics.lengths = Tally.from_json(content["lengths"])
        overlaps = content["overlaps"].items()
        statistics.overlaps = {name: SplitOverlap.from_json(part) for name, part in overlaps}
        return statistics


class Measurer:
    """Counts chunks; one a process.

    Args:
        src_vocabulary: the tokenizer of the source.
        tgt_vocabulary: that of the target, which may be the same.
        held_out: what to look for in the text; None looks for nothing.
    """

    def __init__(
        self, src_vocabulary: Vocabulary, tgt_vocabulary: Vocabulary, held_out: HeldOut | None
    ) -> None:
        self._kinds = (_token_kinds(src_vocabulary), _token_kinds(tgt_vocabulary))
        self._held_out = held_out

    def measure(
        self, texts: Sides, encoded: tuple[Encoded, Encoded], *, file: str, lines: Ints
    ) -> Statistics:
        """Count the pairs of a chunk.

        Args:
            texts: source and target lines (N,) each, without line ends.
            encoded: of each side all ids, without EOS, and where each line starts (N + 1,).
            file: where they are from, for examples.
            lines: their numbers in that file (N,).
        """
        statistics = Statistics()
        statistics.num_pairs = len(texts[0])
        if statistics.num_pairs == 0:
            return statistics
        codes = (CodePoints(texts[0]), CodePoints(texts[1]))
        lengths = [np.diff(offsets).astype(np.int64) + 1 for _, offsets in encoded]  # 2 x (N,)
        for i, side in enumerate(statistics.sides):
            side.characters = codes[i].tally()
            side.num_words = codes[i].num_words()
            side.num_tokens = len(encoded[i][0])
            kinds = np.bincount(self._kinds[i].take(encoded[i][0]), minlength=3)  # (3,)
            side.num_unknown, side.num_bytes = int(kinds[_UNKNOWN]), int(kinds[_BYTE])
            side.longest = int(lengths[i].max())
        bins = [length_bins(part) for part in lengths]
        statistics.lengths = Tally.of(bins[0] * NUM_BINS + bins[1])
        if self._held_out is not None:
            signatures = (codes[0].signatures(), codes[1].signatures())
            found = self._held_out.find(texts, signatures, file=file, lines=lines)
            statistics.overlaps = found
        return statistics


_PLAIN, _UNKNOWN, _BYTE = range(3)


def _token_kinds(vocabulary: Vocabulary) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Say of every id (V,) whether it is unknown, a byte or neither."""
    kinds = np.full(vocabulary.vocab_size, _PLAIN, np.uint8)
    kinds[list(vocabulary.byte_ids)] = _BYTE
    kinds[vocabulary.unk_id] = _UNKNOWN
    return kinds


def length_bins(lengths: Ints) -> Ints:
    """Return the bin (N,) of each length in tokens from 0: its own below `EXACT_LENGTHS`, then 16
    an octave.
    """
    octaves = np.log2(np.maximum(lengths, 1) / EXACT_LENGTHS)
    bins = EXACT_LENGTHS + np.floor(octaves * _BINS_AN_OCTAVE).astype(np.int64)
    bins = np.minimum(bins, NUM_BINS - 1)
    return np.where(lengths < EXACT_LENGTHS, lengths, bins)


def bin_starts() -> Ints:
    """Return the least length of each bin, and the end of the last."""
    steps = np.arange(NUM_BINS - EXACT_LENGTHS + 1) / _BINS_AN_OCTAVE
    long = np.ceil(EXACT_LENGTHS * 2**steps).astype(np.int64)
    return np.concatenate([np.arange(EXACT_LENGTHS), long])
