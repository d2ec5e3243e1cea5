"""What the report knows of a text, counted a chunk at a time: pairs, tokens, words, characters,
lengths, and the sentences of validation and test sets that are in it. Counts of chunks add up to
the same however the text was cut.
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
from nmt.preprocess.clean import NUM_EXAMPLES, Cleaned, PairCounts
from nmt.preprocess.duplicates import KINDS

EXACT_LENGTHS = 256  # shorter ones are counted by length, others in bins
_BINS_AN_OCTAVE = 16
NUM_BINS = EXACT_LENGTHS + 12 * _BINS_AN_OCTAVE  # the last begins just below a million tokens
STRICTNESS = ("exact", "normalised")
PLAIN, _UNKNOWN, _BYTE = range(3)  # kinds of tokens
Kinds = np.ndarray[Any, np.dtype[np.uint8]]
RowsByText = dict[str, set[int]]
Texts = tuple[Sequence[str], Sequence[str]]  # source and target lines
FlatIds = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # ids of all lines, offsets (N + 1,)


@dataclass
class SideStatistics:
    """The counts of one side, as the report names them."""

    tokens: int = 0  # without EOS
    words: int = 0  # between spaces
    unknown_tokens: int = 0  # <unk>
    byte_tokens: int = 0  # that stand for a byte of a character without a piece
    longest: int = 0  # tokens, EOS included
    characters: Counter[int] = field(default_factory=Counter)  # by code point


@dataclass
class Overlap:
    """What of a held-out split is in training text, by one way to compare."""

    matches: int = 0  # training pairs that match
    rows: set[int] = field(default_factory=set)  # of the split that were matched
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, matches: int, rows: Iterable[int], examples: list[dict[str, Any]]) -> None:
        """Count training pairs that match these rows."""
        self.matches += matches
        self.rows.update(rows)
        self.examples = [*self.examples, *examples][:NUM_EXAMPLES]


@dataclass
class Statistics:
    """The counts of a text; all but those of `pairs` are of pairs that were kept."""

    pairs: PairCounts = field(default_factory=PairCounts)
    sides: tuple[SideStatistics, SideStatistics] = field(
        default_factory=lambda: (SideStatistics(), SideStatistics())
    )
    lengths: Counter[int] = field(default_factory=Counter)
    """Pairs by source bin * NUM_BINS + target bin, see `length_bins`."""
    overlaps: dict[str, Overlap] = field(default_factory=dict)
    """By split, strictness and kind, such as "valid exact pairs"; those with matches."""

    def merge(self, other: Statistics) -> None:
        """Add the counts of the text that comes after."""
        self.pairs.merge(other.pairs)
        self.lengths.update(other.lengths)
        for mine, theirs in zip(self.sides, other.sides, strict=True):
            for name in ("tokens", "words", "unknown_tokens", "byte_tokens"):
                setattr(mine, name, getattr(mine, name) + getattr(theirs, name))
            mine.longest = max(mine.longest, theirs.longest)
            mine.characters.update(theirs.characters)
        for name, found in other.overlaps.items():
            self.overlaps.setdefault(name, Overlap()).add(**vars(found))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        sides = [vars(side) | {"characters": _columns(side.characters)} for side in self.sides]
        overlaps = {n: vars(o) | {"rows": sorted(o.rows)} for n, o in self.overlaps.items()}
        lengths = _columns(self.lengths)
        return dict(pairs=vars(self.pairs), sides=sides, lengths=lengths, overlaps=overlaps)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Statistics:
        """Read what `to_json` returned."""
        pairs = PairCounts.from_json(content["pairs"])
        statistics = cls(pairs, lengths=_counter(content["lengths"]))
        for side, counts in zip(statistics.sides, content["sides"], strict=True):
            vars(side).update(counts | {"characters": _counter(counts["characters"])})
        for name, o in content["overlaps"].items():
            statistics.overlaps[name] = Overlap(o["matches"], set(o["rows"]), o["examples"])
        return statistics


def _columns(counts: Counter[int]) -> list[list[int]]:
    """Return the keys, which JSON keeps as numbers only in lists, and their counts."""
    keys = sorted(counts)
    return [keys, [counts[key] for key in keys]]


def _counter(columns: list[list[int]]) -> Counter[int]:
    return Counter(dict(zip(*columns, strict=True)))


def token_kinds(tokenizer: Tokenizer) -> Kinds:
    """Return of which kind each id is (V,): unknown, a byte or `PLAIN`."""
    kinds = np.full(tokenizer.vocab_size, PLAIN, np.uint8)
    kinds[tokenizer.byte_ids] = _BYTE
    kinds[tokenizer.unk_id] = _UNKNOWN
    return kinds


def measure(
    cleaned: Cleaned,
    encoded: tuple[FlatIds, FlatIds],
    kinds: tuple[Kinds, Kinds],
    held_out: HeldOut | None,
) -> Statistics:
    """Count the pairs of a chunk, and look for held-out lines where they are given.

    `encoded` are all ids of each side, without EOS, and where each line starts (N + 1,); `kinds`
    are those of `token_kinds` (V,).
    """
    statistics = Statistics(cleaned.counts)
    if not cleaned.src:
        return statistics
    codes = (CodePoints(cleaned.src), CodePoints(cleaned.tgt))
    bins = []
    for i, (side, (ids, offsets)) in enumerate(zip(statistics.sides, encoded, strict=True)):
        lengths = np.diff(offsets).astype(np.int64) + 1  # (N,)
        numbers = np.bincount(kinds[i].take(ids), minlength=3)  # (3,)
        side.characters = codes[i].tally()
        side.words = codes[i].num_words()
        side.tokens = len(ids)
        side.unknown_tokens, side.byte_tokens = int(numbers[_UNKNOWN]), int(numbers[_BYTE])
        side.longest = int(lengths.max())
        bins.append(length_bins(lengths))
    statistics.lengths = Counter((bins[0] * NUM_BINS + bins[1]).tolist())
    if held_out is not None:
        signatures = (codes[0].signatures(), codes[1].signatures())
        statistics.overlaps = held_out.find(cleaned, signatures)
    return statistics


class HeldOut:
    """The lines of the held-out splits, by text: finds them in training text, the same to the byte,
    or the same but for case, punctuation and spaces. Signatures of whole chunks pick the few lines
    that may match; only these are compared one by one.
    """

    def __init__(self, splits: Mapping[str, Texts]) -> None:
        self._rows: dict[str, list[list[RowsByText]]] = {}  # by split, strictness and side
        for split, sides in splits.items():
            forms = [_rows_by_text(map(normal_form, lines)) for lines in sides]
            for rows in forms:
                rows.pop("", None)  # lines of punctuation alone are only the same when exact
            self._rows[split] = [[_rows_by_text(lines) for lines in sides], forms]
        every = ([line for sides in splits.values() for line in sides[i]] for i in range(2))
        self._signatures = [np.unique(CodePoints(lines).signatures()) for lines in every]

    def find(
        self, cleaned: Cleaned, signatures: tuple[Signatures, Signatures]
    ) -> dict[str, Overlap]:
        """Look for the pairs of a chunk in every split; signatures are those of each side (N,)."""
        found: dict[str, Overlap] = {}
        may_match = np.zeros(len(cleaned.src), dtype=bool)  # (N,)
        for known, mine in zip(self._signatures, signatures, strict=True):
            may_match |= is_among(known, mine)
        for row in np.flatnonzero(may_match).tolist():
            pair = cleaned.src[row], cleaned.tgt[row]
            file, line, _ = cleaned.chunk.place(int(cleaned.rows[row]))
            forms = normal_form(pair[0]), normal_form(pair[1])
            for split, tables in self._rows.items():
                src, tgt = set[int](), set[int]()
                ways = zip(STRICTNESS, tables, (pair, forms), strict=True)
                for strictness, (src_rows, tgt_rows), keys in ways:
                    src |= src_rows.get(keys[0], set())
                    tgt |= tgt_rows.get(keys[1], set())
                    for kind, rows in zip(KINDS, (src & tgt, src, tgt), strict=True):
                        if rows:
                            example = dict(file=file, line=line, held_out_line=min(rows) + 1)
                            overlap = found.setdefault(f"{split} {strictness} {kind}", Overlap())
                            overlap.add(1, rows, [example])
        return found


def _rows_by_text(texts: Iterable[str]) -> RowsByText:
    rows: RowsByText = {}
    for row, text in enumerate(texts):
        rows.setdefault(text, set()).add(row)
    return rows


def length_bins(lengths: Ints) -> Ints:
    """Return the bin (N,) of each length: its own below `EXACT_LENGTHS`, then 16 an octave."""
    octaves = np.log2(np.maximum(lengths, 1) / EXACT_LENGTHS)
    bins = EXACT_LENGTHS + np.floor(octaves * _BINS_AN_OCTAVE).astype(np.int64)
    bins = np.minimum(bins, NUM_BINS - 1)
    return np.where(lengths < EXACT_LENGTHS, lengths, bins)


def bin_starts() -> Ints:
    """Return the least length of each bin, and the end of the last."""
    steps = np.arange(NUM_BINS - EXACT_LENGTHS + 1) / _BINS_AN_OCTAVE
    long = np.ceil(EXACT_LENGTHS * 2**steps).astype(np.int64)
    return np.concatenate([np.arange(EXACT_LENGTHS), long])
