"""The pairs of a chunk that were not dropped, and counts of dropped pairs and repaired errors."""

# In shapes, N is the number of pairs of a chunk that were not dropped so far.

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nmt.preprocess.chunks import Chunk, Location

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Rows = np.ndarray[Any, np.dtype[np.int64]]
Scores = np.ndarray[Any, np.dtype[np.float64]]

NUM_EXAMPLES = 5  # number of locations in the report for each reason to drop or replace


@dataclass
class PairCounts:
    """Numbers of pairs that were read, kept and dropped, and of characters that were replaced."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # pairs, by reason
    replaced: Counter[str] = field(default_factory=Counter)  # characters or bytes, by rule
    examples: dict[str, list[Location]] = field(default_factory=dict)
    """The first locations for each reason and rule, at most `NUM_EXAMPLES`."""

    def add_dropped(self, reason: str, num_pairs: int, examples: list[Location]) -> None:
        """Count pairs that were dropped. `examples` are the first locations in a chunk."""
        if num_pairs:
            self.kept -= num_pairs
            self.dropped[reason] += num_pairs
            self._add_examples(reason, examples)

    def add_replaced(self, rule: str, number: int, examples: list[Location]) -> None:
        """Count characters or bytes that were replaced. `examples` are as in `add_dropped`."""
        if number:
            self.replaced[rule] += number
            self._add_examples(rule, examples)

    def _add_examples(self, name: str, examples: list[Location]) -> None:
        """Add locations on one side of a chunk, and keep the first ones by line.

        The locations on the other side may have been added before.
        """
        distinct = dict.fromkeys(self.examples.get(name, []) + examples)
        by_line = sorted(distinct, key=lambda location: location.line)
        self.examples[name] = by_line[:NUM_EXAMPLES]

    def merge(self, counts: PairCounts) -> None:
        """Add the counts of the next chunk. Chunks are merged in the order of their lines."""
        self.read += counts.read
        self.kept += counts.kept
        self.dropped.update(counts.dropped)
        self.replaced.update(counts.replaced)
        for name, examples in counts.examples.items():
            self.examples[name] = (self.examples.get(name, []) + examples)[:NUM_EXAMPLES]

    def list_reasons(self) -> str:
        """Return the reasons for dropping, the most frequent first, with counts and an example."""
        return ", ".join(
            f"{number} {reason} ({self.examples[reason][0]} first)"
            for reason, number in self.dropped.most_common()
        )

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> PairCounts:
        """Rebuild counts whose `vars` were written as JSON."""
        examples = {}
        for name, locations in content["examples"].items():
            examples[name] = [Location._make(values) for values in locations]
        return cls(
            read=content["read"],
            kept=content["kept"],
            dropped=Counter(content["dropped"]),
            replaced=Counter(content["replaced"]),
            examples=examples,
        )


@dataclass(frozen=True)
class LineError:
    """An invalid line of a chunk."""

    row: int  # index in the chunk
    side: int  # 0 for the source, 1 for the target, 2 for the alignment; 0 if one file holds all
    message: str
    byte: int | None = None  # position of the first invalid byte in the line, from 1
    other_fields: tuple[str, ...] = ()  # text fields of a JSON object without source and target


@dataclass
class CleanChunk:
    """The pairs of a chunk that were not dropped."""

    raw_chunk: Chunk
    src: list[str]
    tgt: list[str]
    kept_rows: Rows  # (N,) the position of each pair in `raw_chunk`, from 0
    counts: PairCounts
    scores: Scores | None = None  # (N,); None for a source without scores
    alignments: list[str] | None = None  # the links of each pair, such as 0-0 1-2, if given

    @property
    def line_numbers(self) -> Rows:
        """The line number of each pair in its file (N,), from 1."""
        return self.kept_rows + self.raw_chunk.first_line

    @property
    def corpus(self) -> str:
        """The name of the corpus in data.corpora, or ""."""
        return self.raw_chunk.source.corpus

    def locate_error(self, error: LineError) -> Location:
        """Return the location of an error in the user's files."""
        return self.raw_chunk.locate(error.row, error.side, error.byte)

    def locate_pair(self, index: int, side: int = 0) -> Location:
        """Return the location in the user's files of one side of the pair with this index in N."""
        return self.raw_chunk.locate(int(self.kept_rows[index]), side)

    def drop(self, reason: str, drop_src: Mask, drop_tgt: Mask | None = None) -> Mask:
        """Drop the pairs whose source or target is marked, and count them under `reason`.

        The masks have the shape (N,). Returns a mask of the remaining pairs (N,).
        """
        is_dropped = drop_src
        if drop_tgt is not None:
            is_dropped = drop_src | drop_tgt
        examples = []
        for i in np.flatnonzero(is_dropped)[:NUM_EXAMPLES].tolist():
            side = 0 if drop_src[i] else 1
            examples.append(self.locate_pair(i, side))
        return self._remove(reason, is_dropped, examples)

    def drop_errors(self, reason: str, errors: Collection[LineError]) -> None:
        """Drop the pairs with an error on either side."""
        error_by_row: dict[int, LineError] = {}
        for error in sort_by_line(errors):
            error_by_row.setdefault(error.row, error)  # keeps the first error
        is_dropped = np.isin(self.kept_rows, list(error_by_row))
        example_rows = self.kept_rows[is_dropped][:NUM_EXAMPLES].tolist()
        examples = [self.locate_error(error_by_row[row]) for row in example_rows]
        self._remove(reason, is_dropped, examples)

    def _remove(self, reason: str, is_dropped: Mask, examples: list[Location]) -> Mask:
        """Remove and count the marked pairs (N,). Returns a mask of the remaining pairs (N,)."""
        keep: Mask = ~is_dropped
        num_dropped = int(is_dropped.sum())
        if num_dropped:
            self.counts.add_dropped(reason, num_dropped, examples)
            indices = np.flatnonzero(keep).tolist()
            self.src = [self.src[i] for i in indices]
            self.tgt = [self.tgt[i] for i in indices]
            if self.alignments is not None:
                self.alignments = [self.alignments[i] for i in indices]
            self.kept_rows = self.kept_rows[keep]
            if self.scores is not None:
                self.scores = self.scores[keep]
        return keep

    def count_repairs(self, reason: str, errors: Collection[LineError], number: int) -> None:
        """Count repaired errors under `reason`.

        `number` is the number of replaced characters, bytes or lines, which may be larger than the
        number of errors.
        """
        examples = [self.locate_error(error) for error in sort_by_line(errors)]
        self.counts.add_replaced(reason, number, examples)


def sort_by_line(errors: Collection[LineError]) -> list[LineError]:
    """Sort errors by row, and errors in the same row by side."""
    return sorted(errors, key=lambda error: (error.row, error.side))
