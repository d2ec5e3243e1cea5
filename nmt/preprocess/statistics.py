"""Count pairs, tokens and characters for the report, and find sentences of held-out sets.

Each chunk is counted on its own. The sums do not depend on the division into chunks.

A training pair is compared with a pair of a held-out set in three units:

- "sources": their sources match.
- "targets": their targets match.
- "pairs": both match.

There are two match levels. At "exact", texts match if they are equal. At "normalised", they match
if their normal forms are equal. So an exact match is counted at both levels.
"""

# In shapes, N is the number of pairs of a chunk and V the size of the vocabulary.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nmt.data.shards import FlatIds
from nmt.data.tokenizer import Tokenizer
from nmt.preprocess.characters import CharacterStatistics, Ints, Signatures, is_among, normal_form
from nmt.preprocess.clean_chunk import NUM_EXAMPLES, CleanChunk, PairCounts

NUM_EXACT_LENGTHS = 256  # lengths below this have a bin each
# longer lengths are divided into octaves: 256 to 511, 512 to 1023, 1024 to 2047, ...
_BINS_PER_OCTAVE = 16
_NUM_OCTAVES = 12  # the last bin starts at about a million tokens
NUM_BINS = NUM_EXACT_LENGTHS + _NUM_OCTAVES * _BINS_PER_OCTAVE
MATCH_LEVELS = ("exact", "normalised")
# kinds of tokens, as `token_kinds` returns them
PLAIN = 0
_UNKNOWN = 1
_BYTE = 2
TokenKinds = np.ndarray[Any, np.dtype[np.uint8]]
RowsByText = dict[str, set[int]]
LinesBySide = tuple[Sequence[str], Sequence[str]]  # source lines, target lines


class _SplitTables(NamedTuple):
    """For one match level, maps each text of a held-out split to the rows that have it."""

    by_src: RowsByText
    by_tgt: RowsByText


@dataclass
class SideStatistics:
    """The counts of one side of a corpus."""

    tokens: int = 0  # EOS does not count
    words: int = 0  # separated by spaces
    unknown_tokens: int = 0  # <unk>
    byte_tokens: int = 0  # tokens such as <0xE2>, for the bytes of characters without a piece
    longest: int = 0  # length of the longest line in tokens, EOS included
    characters: Counter[int] = field(default_factory=Counter)  # the keys are code points

    def merge(self, side: SideStatistics) -> None:
        """Add the counts of the next text."""
        self.tokens += side.tokens
        self.words += side.words
        self.unknown_tokens += side.unknown_tokens
        self.byte_tokens += side.byte_tokens
        self.longest = max(self.longest, side.longest)
        self.characters.update(side.characters)


@dataclass
class Overlap:
    """The matches of training pairs with a held-out split, at one match level and for one unit."""

    matches: int = 0  # number of training pairs that match a row of the split
    rows: set[int] = field(default_factory=set)  # rows of the split that a training pair matches
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add_match(self, rows: set[int], example: dict[str, Any]) -> None:
        """Add a training pair that matches `rows` of the split."""
        self.matches += 1
        self.rows |= rows
        if len(self.examples) < NUM_EXAMPLES:
            self.examples.append(example)

    def merge(self, overlap: Overlap) -> None:
        """Add the matches of the next training pairs."""
        self.matches += overlap.matches
        self.rows |= overlap.rows
        self.examples = [*self.examples, *overlap.examples][:NUM_EXAMPLES]


@dataclass
class Statistics:
    """The counts of a text after filtering. Only the field `pairs` also counts dropped pairs."""

    pairs: PairCounts = field(default_factory=PairCounts)
    src: SideStatistics = field(default_factory=SideStatistics)
    tgt: SideStatistics = field(default_factory=SideStatistics)
    num_pairs_by_bins: Counter[int] = field(default_factory=Counter)
    """Number of pairs by the bins of their two lengths, see `length_bins`. The key is source bin *
    NUM_BINS + target bin."""
    overlaps: dict[str, Overlap] = field(default_factory=dict)
    """The keys are a split, a match level and a unit, such as "valid exact pairs". A key without
    matches is left out."""

    @property
    def sides(self) -> tuple[SideStatistics, SideStatistics]:
        """The counts of source and target."""
        return self.src, self.tgt

    def merge(self, statistics: Statistics) -> None:
        """Add the counts of the next text."""
        self.pairs.merge(statistics.pairs)
        self.src.merge(statistics.src)
        self.tgt.merge(statistics.tgt)
        self.num_pairs_by_bins.update(statistics.num_pairs_by_bins)
        for name, overlap in statistics.overlaps.items():
            self.overlaps.setdefault(name, Overlap()).merge(overlap)

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON can store.

        Counters become lists of key and count, since JSON keys cannot be numbers.
        """
        sides = []
        for side in self.sides:
            counts = dict(vars(side))
            counts["characters"] = sorted(side.characters.items())
            sides.append(counts)
        overlaps = {}
        for name, overlap in self.overlaps.items():
            overlaps[name] = {**vars(overlap), "rows": sorted(overlap.rows)}
        return {
            "pairs": vars(self.pairs),
            "sides": sides,
            "lengths": sorted(self.num_pairs_by_bins.items()),
            "overlaps": overlaps,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Statistics:
        """Rebuild the statistics from the result of `to_json`."""
        sides = []
        for side in content["sides"]:
            counts = dict(side)
            counts["characters"] = Counter(dict(side["characters"]))
            sides.append(SideStatistics(**counts))
        overlaps = {}
        for name, overlap in content["overlaps"].items():
            rows = set(overlap["rows"])
            overlaps[name] = Overlap(overlap["matches"], rows, overlap["examples"])
        return cls(
            pairs=PairCounts.from_json(content["pairs"]),
            src=sides[0],
            tgt=sides[1],
            num_pairs_by_bins=Counter(dict(content["lengths"])),
            overlaps=overlaps,
        )


def token_kinds(tokenizer: Tokenizer) -> TokenKinds:
    """Return whether each id (V,) is `PLAIN`, unknown or a byte."""
    kinds = np.full(tokenizer.vocab_size, PLAIN, np.uint8)
    kinds[tokenizer.byte_ids] = _BYTE
    kinds[tokenizer.unk_id] = _UNKNOWN
    return kinds


def count_chunk(
    chunk: CleanChunk,
    encoded_sides: tuple[FlatIds, FlatIds],
    kinds: tuple[TokenKinds, TokenKinds],
    held_out_finder: HeldOutFinder | None,
) -> Statistics:
    """Count the pairs of a chunk, and look for held-out lines if there is a `held_out_finder`.

    `encoded_sides` has for each side the ids of all lines, without EOS, and the index at which each
    line starts (N + 1,). `kinds` has for each side the result of `token_kinds` (V,).
    """
    statistics = Statistics(chunk.counts)
    if not chunk.src:
        return statistics
    src_characters = CharacterStatistics(chunk.src)
    tgt_characters = CharacterStatistics(chunk.tgt)
    src, tgt = encoded_sides
    statistics.src = _count_side(src_characters, src, kinds[0])
    statistics.tgt = _count_side(tgt_characters, tgt, kinds[1])
    src_bins = length_bins(_lengths_with_eos(src))
    tgt_bins = length_bins(_lengths_with_eos(tgt))
    bins_of_pairs = src_bins * NUM_BINS + tgt_bins  # (N,)
    statistics.num_pairs_by_bins = Counter(bins_of_pairs.tolist())
    if held_out_finder is not None:
        signatures = (src_characters.signatures(), tgt_characters.signatures())  # hashes of lines
        statistics.overlaps = held_out_finder.find_overlaps(chunk, signatures)
    return statistics


def _count_side(
    characters: CharacterStatistics, encoded: FlatIds, kinds: TokenKinds
) -> SideStatistics:
    """Count one side of a chunk. `kinds` (V,) has the kind of each id."""
    ids, _ = encoded  # the ids of all lines
    num_by_kind = np.bincount(kinds.take(ids), minlength=3)  # (3,)
    return SideStatistics(
        tokens=len(ids),
        words=characters.num_words(),
        unknown_tokens=int(num_by_kind[_UNKNOWN]),
        byte_tokens=int(num_by_kind[_BYTE]),
        longest=int(_lengths_with_eos(encoded).max()),
        characters=characters.tally(),
    )


def _lengths_with_eos(encoded: FlatIds) -> Ints:
    """Return the number of tokens of each line, EOS included, (N,)."""
    _, offsets = encoded  # the index at which each line starts, and the end, (N + 1,)
    return np.diff(offsets).astype(np.int64) + 1


class HeldOutFinder:
    """Finds the lines of held-out splits in training text.

    Lines match exactly, or by their normal forms: without case, punctuation and spaces. A signature
    is a hash of the normal form, which NumPy computes quickly. So texts are only compared if their
    signatures are equal.
    """

    def __init__(self, splits: Mapping[str, LinesBySide]) -> None:
        self._tables: dict[str, dict[str, _SplitTables]] = {}  # keys: split, then match level
        src_lines: list[str] = []
        tgt_lines: list[str] = []
        for split, (src, tgt) in splits.items():
            normalised = _SplitTables(
                by_src=_rows_by_text(map(normal_form, src)),
                by_tgt=_rows_by_text(map(normal_form, tgt)),
            )
            # Lines of punctuation alone have the normal form "", and would match each other.
            normalised.by_src.pop("", None)
            normalised.by_tgt.pop("", None)
            exact = _SplitTables(by_src=_rows_by_text(src), by_tgt=_rows_by_text(tgt))
            self._tables[split] = {"exact": exact, "normalised": normalised}
            src_lines += src
            tgt_lines += tgt
        self._src_signatures = np.unique(CharacterStatistics(src_lines).signatures())
        self._tgt_signatures = np.unique(CharacterStatistics(tgt_lines).signatures())

    def find_overlaps(
        self, chunk: CleanChunk, signatures: tuple[Signatures, Signatures]
    ) -> dict[str, Overlap]:
        """Find the pairs of a chunk that match rows of a split, by split, match level and unit.

        `signatures` holds the signatures of source lines (N,) and of target lines (N,).
        """
        overlaps: dict[str, Overlap] = {}
        src_may_match = is_among(signatures[0], self._src_signatures)  # (N,)
        tgt_may_match = is_among(signatures[1], self._tgt_signatures)
        for i in np.flatnonzero(src_may_match | tgt_may_match).tolist():
            location = chunk.locate_pair(i)
            src = chunk.src[i]
            tgt = chunk.tgt[i]
            texts = {"exact": (src, tgt), "normalised": (normal_form(src), normal_form(tgt))}
            for split, tables in self._tables.items():
                for level, unit, held_out_rows in _find_matches(tables, texts):
                    overlap = overlaps.setdefault(f"{split} {level} {unit}", Overlap())
                    example = {
                        "file": location.file,
                        "line": location.line,
                        "held_out_line": min(held_out_rows) + 1,
                    }
                    overlap.add_match(held_out_rows, example)
        return overlaps


def _find_matches(
    tables: Mapping[str, _SplitTables], texts: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, str, set[int]]]:
    """Find the rows of a held-out split that match a training pair.

    Yields match level, unit and rows for each level and unit with a match. The keys of `tables` and
    `texts` are match levels. `texts` has the source and the target of the training pair.
    """
    src_rows: set[int] = set()  # rows of the split with this source
    tgt_rows: set[int] = set()
    for level in MATCH_LEVELS:
        src_text, tgt_text = texts[level]
        matching_src_rows = tables[level].by_src.get(src_text, set())
        matching_tgt_rows = tables[level].by_tgt.get(tgt_text, set())
        # An exact match is also a match of the level "normalised". The tables of that level do not
        # have lines such as "...", whose normal form is empty. So each level keeps the rows of the
        # level before.
        src_rows = src_rows | matching_src_rows
        tgt_rows = tgt_rows | matching_tgt_rows
        matches = {"pairs": src_rows & tgt_rows, "sources": src_rows, "targets": tgt_rows}
        for unit, rows in matches.items():
            if rows:
                yield level, unit, rows


def _rows_by_text(texts: Iterable[str]) -> RowsByText:
    """Return the rows of each distinct text."""
    rows: RowsByText = {}
    for row, text in enumerate(texts):
        rows.setdefault(text, set()).add(row)
    return rows


def length_bins(lengths: Ints) -> Ints:
    """Return the bin (N,) of each length (N,).

    Each length below `NUM_EXACT_LENGTHS`, 256, has its own bin. From there on, each range from a
    length to its double (256 to 511, 512 to 1023, ...) is an octave with `_BINS_PER_OCTAVE` bins.
    """
    long_lengths = np.maximum(lengths, NUM_EXACT_LENGTHS)  # avoids the logarithm of 0
    octaves = np.log2(long_lengths / NUM_EXACT_LENGTHS)
    num_bins_above = np.floor(octaves * _BINS_PER_OCTAVE).astype(np.int64)
    long_bins = NUM_EXACT_LENGTHS + num_bins_above
    long_bins = np.minimum(long_bins, NUM_BINS - 1)
    return np.where(lengths < NUM_EXACT_LENGTHS, lengths, long_bins)


def bin_starts() -> Ints:
    """Return the smallest length of each bin, and the end of the last bin."""
    exact_starts = np.arange(NUM_EXACT_LENGTHS)
    num_long_bins = NUM_BINS - NUM_EXACT_LENGTHS
    # number of octaves, with fractions, from `NUM_EXACT_LENGTHS` to each start
    octaves = np.arange(num_long_bins + 1) / _BINS_PER_OCTAVE
    long_starts = NUM_EXACT_LENGTHS * 2**octaves
    rounded_starts = np.ceil(long_starts).astype(np.int64)  # the smallest whole lengths
    return np.concatenate([exact_starts, rounded_starts])
