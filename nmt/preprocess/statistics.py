"""Count pairs, tokens, words, characters and lengths of a text for the report, chunk by chunk, and
find sentences of held-out sets in it. The sums do not depend on the division into chunks.
"""

# N pairs of a chunk, V vocabulary

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nmt.data.tokenizer import Tokenizer
from nmt.preprocess.characters import CodePoints, Ints, Signatures, is_among, normal_form
from nmt.preprocess.chunks import Location
from nmt.preprocess.clean import NUM_EXAMPLES, CleanChunk, PairCounts
from nmt.preprocess.duplicates import UNITS

EXACT_LENGTHS = 256  # shorter lengths have a bin each
_BINS_PER_OCTAVE = 16
NUM_BINS = EXACT_LENGTHS + 12 * _BINS_PER_OCTAVE  # the last bin starts just below a million tokens
STRICTNESS = ("exact", "normalised")
PLAIN, _UNKNOWN, _BYTE = range(3)  # kinds of tokens
TokenKinds = np.ndarray[Any, np.dtype[np.uint8]]
RowsByText = dict[str, set[int]]
Texts = tuple[Sequence[str], Sequence[str]]  # source and target lines
FlatIds = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # ids of all lines, offsets (N + 1,)


@dataclass
class SideStatistics:
    """The counts of one side, under their names in the report."""

    tokens: int = 0  # without EOS
    words: int = 0  # separated by spaces
    unknown_tokens: int = 0  # <unk>
    byte_tokens: int = 0  # bytes of characters without a piece
    longest: int = 0  # tokens, EOS included
    characters: Counter[int] = field(default_factory=Counter)  # by code point

    def merge(self, following: SideStatistics) -> None:
        """Add the counts of other text."""
        self.tokens += following.tokens
        self.words += following.words
        self.unknown_tokens += following.unknown_tokens
        self.byte_tokens += following.byte_tokens
        self.longest = max(self.longest, following.longest)
        self.characters.update(following.characters)


@dataclass
class Overlap:
    """Training pairs that match pairs of a held-out split, by one way to compare."""

    matches: int = 0  # training pairs
    rows: set[int] = field(default_factory=set)  # matched pairs of the split
    examples: list[dict[str, Any]] = field(default_factory=list)

    def merge(self, following: Overlap) -> None:
        """Add the matches of the training pairs that follow."""
        self.matches += following.matches
        self.rows |= following.rows
        self.examples = [*self.examples, *following.examples][:NUM_EXAMPLES]


@dataclass
class Statistics:
    """The counts of a text. All but `pairs` count only pairs that are kept."""

    pairs: PairCounts = field(default_factory=PairCounts)
    src: SideStatistics = field(default_factory=SideStatistics)
    tgt: SideStatistics = field(default_factory=SideStatistics)
    lengths: Counter[int] = field(default_factory=Counter)
    """Pairs by source bin * NUM_BINS + target bin, see `length_bins`."""
    overlaps: dict[str, Overlap] = field(default_factory=dict)
    """By split, strictness and unit, such as "valid exact pairs"; without empty ones."""

    @property
    def sides(self) -> tuple[SideStatistics, SideStatistics]:
        """The counts of source and target."""
        return self.src, self.tgt

    def merge(self, following: Statistics) -> None:
        """Add the counts of the text that follows."""
        self.pairs.merge(following.pairs)
        self.src.merge(following.src)
        self.tgt.merge(following.tgt)
        self.lengths.update(following.lengths)
        for name, overlap in following.overlaps.items():
            self.overlaps.setdefault(name, Overlap()).merge(overlap)

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON can store; it has no keys that are numbers."""
        sides = [
            {**vars(side), "characters": sorted(side.characters.items())} for side in self.sides
        ]
        overlaps = {
            name: {**vars(overlap), "rows": sorted(overlap.rows)}
            for name, overlap in self.overlaps.items()
        }
        return {
            "pairs": vars(self.pairs),
            "sides": sides,
            "lengths": sorted(self.lengths.items()),
            "overlaps": overlaps,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Statistics:
        """Rebuild the statistics from the result of `to_json`."""
        src, tgt = [
            SideStatistics(**{**side, "characters": Counter(dict(side["characters"]))})
            for side in content["sides"]
        ]
        overlaps = {
            name: Overlap(overlap["matches"], set(overlap["rows"]), overlap["examples"])
            for name, overlap in content["overlaps"].items()
        }
        return cls(
            pairs=PairCounts.from_json(content["pairs"]),
            src=src,
            tgt=tgt,
            lengths=Counter(dict(content["lengths"])),
            overlaps=overlaps,
        )


def token_kinds(tokenizer: Tokenizer) -> TokenKinds:
    """Return whether each id (V,) is `PLAIN`, unknown or a byte."""
    kinds = np.full(tokenizer.vocab_size, PLAIN, np.uint8)
    kinds[tokenizer.byte_ids] = _BYTE
    kinds[tokenizer.unk_id] = _UNKNOWN
    return kinds


def measure(
    chunk: CleanChunk,
    encoded: tuple[FlatIds, FlatIds],
    kinds: tuple[TokenKinds, TokenKinds],
    held_out: HeldOut | None,
) -> Statistics:
    """Count the pairs of a chunk, and look for held-out lines if `held_out` is given.

    Each side of `encoded` has the ids of all lines, without EOS, and where each line starts
    (N + 1,); `kinds` (V,) are the results of `token_kinds`.
    """
    statistics = Statistics(chunk.counts)
    if not chunk.src:
        return statistics
    src_codes = CodePoints(chunk.src)
    tgt_codes = CodePoints(chunk.tgt)
    src_lengths = _measure_side(statistics.src, src_codes, encoded[0], kinds[0])
    tgt_lengths = _measure_side(statistics.tgt, tgt_codes, encoded[1], kinds[1])
    bins = length_bins(src_lengths) * NUM_BINS + length_bins(tgt_lengths)
    statistics.lengths = Counter(bins.tolist())
    if held_out is not None:
        signatures = (src_codes.signatures(), tgt_codes.signatures())
        statistics.overlaps = held_out.find_overlaps(chunk, signatures)
    return statistics


def _measure_side(
    side: SideStatistics, codes: CodePoints, encoded: FlatIds, kinds: TokenKinds
) -> Ints:
    """Count one side of a chunk; return the length of each line, EOS included, (N,)."""
    ids, offsets = encoded
    lengths = np.diff(offsets).astype(np.int64) + 1
    counts = np.bincount(kinds.take(ids), minlength=3)  # by kind, (3,)
    side.characters = codes.tally()
    side.words = codes.num_words()
    side.tokens = len(ids)
    side.unknown_tokens = int(counts[_UNKNOWN])
    side.byte_tokens = int(counts[_BYTE])
    side.longest = int(lengths.max())
    return lengths


class HeldOut:
    """Finds the lines of held-out splits in training text.

    Lines match exactly, or by their normal forms: without case, punctuation and spaces. Signatures
    of whole chunks select the few lines that may match; only these are compared one by one.
    """

    def __init__(self, splits: Mapping[str, Texts]) -> None:
        # by split: for each strictness the rows by source text and by target text
        self._rows: dict[str, list[tuple[RowsByText, RowsByText]]] = {}
        src_lines: list[str] = []
        tgt_lines: list[str] = []
        for split, (src, tgt) in splits.items():
            exact = (_rows_by_text(src), _rows_by_text(tgt))
            normalised = (
                _rows_by_text(map(normal_form, src)),
                _rows_by_text(map(normal_form, tgt)),
            )
            for rows in normalised:
                rows.pop("", None)  # lines of punctuation match only exactly
            self._rows[split] = [exact, normalised]
            src_lines += src
            tgt_lines += tgt
        self._src_signatures = np.unique(CodePoints(src_lines).signatures())
        self._tgt_signatures = np.unique(CodePoints(tgt_lines).signatures())

    def find_overlaps(
        self, chunk: CleanChunk, signatures: tuple[Signatures, Signatures]
    ) -> dict[str, Overlap]:
        """Look for the pairs of a chunk in every split; `signatures` (N,) are given by side."""
        overlaps: dict[str, Overlap] = {}
        may_match = is_among(signatures[0], self._src_signatures)  # (N,)
        may_match |= is_among(signatures[1], self._tgt_signatures)
        for row in np.flatnonzero(may_match).tolist():
            location = chunk.raw_chunk.location(int(chunk.kept_rows[row]))
            pair = (chunk.src[row], chunk.tgt[row])
            forms = (normal_form(pair[0]), normal_form(pair[1]))
            for split, tables in self._rows.items():
                src: set[int] = set()  # rows of the split with this source
                tgt: set[int] = set()
                for i, (src_text, tgt_text) in enumerate([pair, forms]):
                    src |= tables[i][0].get(src_text, set())  # exact matches are also normalised
                    tgt |= tables[i][1].get(tgt_text, set())
                    for unit, rows in zip(UNITS, (src & tgt, src, tgt), strict=True):
                        if rows:
                            name = f"{split} {STRICTNESS[i]} {unit}"
                            overlap = overlaps.setdefault(name, Overlap())
                            overlap.merge(_overlap_of_line(location, rows))
        return overlaps


def _overlap_of_line(location: Location, rows: set[int]) -> Overlap:
    """Return the overlap of one training pair with rows of a held-out split."""
    example = {"file": location.file, "line": location.line, "held_out_line": min(rows) + 1}
    return Overlap(1, rows, [example])


def _rows_by_text(texts: Iterable[str]) -> RowsByText:
    rows: RowsByText = {}
    for row, text in enumerate(texts):
        rows.setdefault(text, set()).add(row)
    return rows


def length_bins(lengths: Ints) -> Ints:
    """Return the bin (N,) of each length: its own below `EXACT_LENGTHS`, then 16 an octave."""
    octaves = np.log2(np.maximum(lengths, 1) / EXACT_LENGTHS)
    bins = EXACT_LENGTHS + np.floor(octaves * _BINS_PER_OCTAVE).astype(np.int64)
    bins = np.minimum(bins, NUM_BINS - 1)
    return np.where(lengths < EXACT_LENGTHS, lengths, bins)


def bin_starts() -> Ints:
    """Return the least length of each bin, and the end of the last."""
    steps = np.arange(NUM_BINS - EXACT_LENGTHS + 1) / _BINS_PER_OCTAVE
    long = np.ceil(EXACT_LENGTHS * 2**steps).astype(np.int64)
    return np.concatenate([np.arange(EXACT_LENGTHS), long])
