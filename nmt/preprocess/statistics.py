"""Count pairs, tokens and characters for the report, and find sentences of held-out sets.

Each chunk is counted on its own. The sums do not depend on the division into chunks.

A training pair may match a row of a held-out set by its source ("sources"), by its target
("targets"), or by both ("pairs"): these are the units. There are two match levels. Texts that are
equal match at the level "exact". Texts with equal normal forms match at the level "normalised", so
an exact match is counted at both levels.
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
from nmt.preprocess.clean import NUM_EXAMPLES, CleanChunk, PairCounts

NUM_EXACT_LENGTHS = 256  # lengths below this have a bin each
_BINS_PER_OCTAVE = 16
_NUM_OCTAVES = 12  # the last bin starts just below a million tokens
NUM_BINS = NUM_EXACT_LENGTHS + _NUM_OCTAVES * _BINS_PER_OCTAVE
MATCH_LEVELS = ("exact", "normalised")
# kinds of tokens
PLAIN = 0
_UNKNOWN = 1
_BYTE = 2
TokenKinds = np.ndarray[Any, np.dtype[np.uint8]]
RowsByText = dict[str, set[int]]
LinesBySide = tuple[Sequence[str], Sequence[str]]  # source lines, target lines


class _SplitTables(NamedTuple):
    """The rows of a held-out split by their source and by their target, at one match level."""

    by_src: RowsByText
    by_tgt: RowsByText


@dataclass
class SideStatistics:
    """The counts of one side of a text."""

    tokens: int = 0  # EOS does not count
    words: int = 0  # separated by spaces
    unknown_tokens: int = 0  # <unk>
    byte_tokens: int = 0  # tokens such as <0xE2>, one per byte of a character without a piece
    longest: int = 0  # length of the longest line in tokens, EOS included
    characters: Counter[int] = field(default_factory=Counter)  # the keys are code points

    def merge(self, later: SideStatistics) -> None:
        """Add the counts of the next text."""
        self.tokens += later.tokens
        self.words += later.words
        self.unknown_tokens += later.unknown_tokens
        self.byte_tokens += later.byte_tokens
        self.longest = max(self.longest, later.longest)
        self.characters.update(later.characters)


@dataclass
class Overlap:
    """The matches of training pairs with a held-out split, at one match level and for one unit."""

    matches: int = 0  # number of training pairs that match
    rows: set[int] = field(default_factory=set)  # rows of the split that are matched
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add_match(self, rows: set[int], example: dict[str, Any]) -> None:
        """Add a training pair that matches `rows` of the split."""
        self.matches += 1
        self.rows |= rows
        if len(self.examples) < NUM_EXAMPLES:
            self.examples.append(example)

    def merge(self, later: Overlap) -> None:
        """Add the matches of the next training pairs."""
        self.matches += later.matches
        self.rows |= later.rows
        self.examples = [*self.examples, *later.examples][:NUM_EXAMPLES]


@dataclass
class Statistics:
    """The counts of a text. Only `pairs` counts dropped pairs too."""

    pairs: PairCounts = field(default_factory=PairCounts)
    src: SideStatistics = field(default_factory=SideStatistics)
    tgt: SideStatistics = field(default_factory=SideStatistics)
    lengths: Counter[int] = field(default_factory=Counter)
    """Number of pairs by their two lengths. The key is source bin * NUM_BINS + target bin; see
    `length_bins`."""
    overlaps: dict[str, Overlap] = field(default_factory=dict)
    """Overlaps with matches, by split, match level and unit, such as "valid exact pairs"."""

    @property
    def sides(self) -> tuple[SideStatistics, SideStatistics]:
        """The counts of source and target."""
        return self.src, self.tgt

    def merge(self, later: Statistics) -> None:
        """Add the counts of the next text."""
        self.pairs.merge(later.pairs)
        self.src.merge(later.src)
        self.tgt.merge(later.tgt)
        self.lengths.update(later.lengths)
        for name, overlap in later.overlaps.items():
            self.overlaps.setdefault(name, Overlap()).merge(overlap)

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON can store.

        Counters become lists of key and count, since JSON keys cannot be numbers.
        """
        sides = []
        for side in self.sides:
            sides.append({**vars(side), "characters": sorted(side.characters.items())})
        overlaps = {}
        for name, overlap in self.overlaps.items():
            overlaps[name] = {**vars(overlap), "rows": sorted(overlap.rows)}
        return {
            "pairs": vars(self.pairs),
            "sides": sides,
            "lengths": sorted(self.lengths.items()),
            "overlaps": overlaps,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Statistics:
        """Rebuild the statistics from the result of `to_json`."""
        sides = []
        for side in content["sides"]:
            characters = Counter(dict(side["characters"]))
            sides.append(SideStatistics(**{**side, "characters": characters}))
        overlaps = {}
        for name, overlap in content["overlaps"].items():
            rows = set(overlap["rows"])
            overlaps[name] = Overlap(overlap["matches"], rows, overlap["examples"])
        return cls(
            pairs=PairCounts.from_json(content["pairs"]),
            src=sides[0],
            tgt=sides[1],
            lengths=Counter(dict(content["lengths"])),
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
    held_out: HeldOut | None,
) -> Statistics:
    """Count the pairs of a chunk, and look for held-out lines if `held_out` is given.

    `encoded_sides` has for each side the ids of all lines, without EOS, and the index at which each
    line starts (N + 1,). `kinds` has for each side the result of `token_kinds` (V,).
    """
    statistics = Statistics(chunk.counts)
    if not chunk.src:
        return statistics
    src_characters = CharacterStatistics(chunk.src)
    tgt_characters = CharacterStatistics(chunk.tgt)
    src_lengths = _count_side(statistics.src, src_characters, encoded_sides[0], kinds[0])
    tgt_lengths = _count_side(statistics.tgt, tgt_characters, encoded_sides[1], kinds[1])
    bins = length_bins(src_lengths) * NUM_BINS + length_bins(tgt_lengths)
    statistics.lengths = Counter(bins.tolist())
    if held_out is not None:
        signatures = (src_characters.signatures(), tgt_characters.signatures())
        statistics.overlaps = held_out.find_overlaps(chunk, signatures)
    return statistics


def _count_side(
    side: SideStatistics, characters: CharacterStatistics, encoded: FlatIds, kinds: TokenKinds
) -> Ints:
    """Count one side of a chunk. Returns the length of each line, EOS included, (N,)."""
    ids, offsets = encoded
    lengths = np.diff(offsets).astype(np.int64) + 1
    counts = np.bincount(kinds.take(ids), minlength=3)  # (3,), a count for each kind
    side.characters = characters.tally()
    side.words = characters.num_words()
    side.tokens = len(ids)
    side.unknown_tokens = int(counts[_UNKNOWN])
    side.byte_tokens = int(counts[_BYTE])
    side.longest = int(lengths.max())
    return lengths


class HeldOut:
    """Finds the lines of held-out splits in training text.

    Lines match exactly, or by their normal forms: without case, punctuation and spaces. Lines with
    equal normal forms have equal signatures, which are hashes that NumPy computes quickly. Only
    lines with the signature of a held-out line are therefore compared one by one.
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
            # the normal form of punctuation is "", which would match all other punctuation
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
        for row in np.flatnonzero(src_may_match | tgt_may_match).tolist():
            location = chunk.raw_chunk.locate(int(chunk.kept_rows[row]))
            src = chunk.src[row]
            tgt = chunk.tgt[row]
            texts = {"exact": (src, tgt), "normalised": (normal_form(src), normal_form(tgt))}
            for split, tables in self._tables.items():
                for level, unit, rows in _find_matches(tables, texts):
                    overlap = overlaps.setdefault(f"{split} {level} {unit}", Overlap())
                    example = {
                        "file": location.file,
                        "line": location.line,
                        "held_out_line": min(rows) + 1,
                    }
                    overlap.add_match(rows, example)
        return overlaps


def _find_matches(
    tables: Mapping[str, _SplitTables], texts: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, str, set[int]]]:
    """Yield match level, unit and rows of a held-out split for each match of a training pair.

    The keys of `tables` and `texts` are match levels. `texts` are the source and the target.
    """
    src_rows: set[int] = set()  # rows of the split with this source
    tgt_rows: set[int] = set()
    for level in MATCH_LEVELS:
        src_text, tgt_text = texts[level]
        # An exact match is a normalised match too, also where the normal form is "".
        src_rows = src_rows | tables[level].by_src.get(src_text, set())
        tgt_rows = tgt_rows | tables[level].by_tgt.get(tgt_text, set())
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

    Each length below `NUM_EXACT_LENGTHS` has its own bin. Each octave above has
    `_BINS_PER_OCTAVE` bins.
    """
    # for shorter lengths 0, since their bins are not used
    octaves = np.log2(np.maximum(lengths, NUM_EXACT_LENGTHS) / NUM_EXACT_LENGTHS)
    bins = NUM_EXACT_LENGTHS + np.floor(octaves * _BINS_PER_OCTAVE).astype(np.int64)
    bins = np.minimum(bins, NUM_BINS - 1)
    return np.where(lengths < NUM_EXACT_LENGTHS, lengths, bins)


def bin_starts() -> Ints:
    """Return the smallest length of each bin, and the end of the last bin."""
    octaves = np.arange(NUM_BINS - NUM_EXACT_LENGTHS + 1) / _BINS_PER_OCTAVE
    long_starts = np.ceil(NUM_EXACT_LENGTHS * 2**octaves).astype(np.int64)
    return np.concatenate([np.arange(NUM_EXACT_LENGTHS), long_starts])
