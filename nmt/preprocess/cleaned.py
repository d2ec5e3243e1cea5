"""The pairs of a chunk on their way through the filters, and the names of their lines.

It knows no rule and no filter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nmt.preprocess.counts import NUM_EXAMPLES, Counts, Place

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Rows = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Where:
    """Names the lines of a chunk of one file."""

    file: str  # as the user wrote it
    first_line: int  # from 1

    def place(self, row: int, byte: int | None = None) -> Place:
        """Return the place of a row of the chunk, from 0."""
        return Place(self.file, self.first_line + row, byte)


@dataclass
class Cleaned:
    """The pairs of a chunk that are kept so far."""

    src: list[str]
    tgt: list[str]
    rows: Rows  # where in the chunk each pair was, from 0
    places: tuple[Where, Where]  # of source and target
    counts: Counts = field(default_factory=Counts)

    @property
    def lines(self) -> Rows:
        """The line of each pair in its file, from 1."""
        return self.rows + self.places[0].first_line

    def drop(
        self,
        reason: str,
        at_src: Mask,
        at_tgt: Mask | None = None,
        *,
        places: list[Place] | None = None,
    ) -> Mask:
        """Drop pairs for something in the source or target, and return which of them stay.

        `places` names the first of them, where more is known than side and line.
        """
        keep = ~at_src if at_tgt is None else ~(at_src | at_tgt)
        dropped = np.flatnonzero(~keep)
        if len(dropped) == 0:
            return keep
        if places is None:
            first = dropped[:NUM_EXAMPLES].tolist()
            places = [self.places[not at_src[i]].place(int(self.rows[i])) for i in first]
        self.counts.drop(reason, len(dropped), places)
        self.counts.kept -= len(dropped)
        stay = np.flatnonzero(keep).tolist()
        self.src, self.tgt = [self.src[i] for i in stay], [self.tgt[i] for i in stay]
        self.rows = self.rows[keep]
        return keep
