"""Counts what became of the pairs of a corpus, and remembers where.

It knows no rule: names of reasons and kinds come from those who apply them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

NUM_EXAMPLES = 5


class Place(NamedTuple):
    """Where something is: the file as the user wrote it, line and byte from 1."""

    file: str
    line: int
    byte: int | None = None  # in the line, where one byte is to blame

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + ("" if self.byte is None else f":{self.byte}")


@dataclass
class Counts:
    """What became of some pairs; sums over chunks with `merge`, in the order of reading."""

    read: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # pairs, by reason
    replaced: dict[str, int] = field(default_factory=dict)  # characters or bytes, by kind
    examples: dict[str, list[Place]] = field(default_factory=dict)  # the first, by reason and kind

    def drop(self, reason: str, number: int, places: list[Place]) -> None:
        """Count dropped pairs of one chunk; `places` are the first of them."""
        self.dropped[reason] = self.dropped.get(reason, 0) + number
        self._remember(reason, places)

    def replace(self, kind: str, number: int, places: list[Place]) -> None:
        """Count what was stripped or replaced in one chunk; `places` are the first lines."""
        self.replaced[kind] = self.replaced.get(kind, 0) + number
        self._remember(kind, places)

    def merge(self, other: Counts) -> None:
        """Add the counts of pairs that come after these."""
        self.read += other.read
        self.kept += other.kept
        for mine, theirs in ((self.dropped, other.dropped), (self.replaced, other.replaced)):
            for name, number in theirs.items():
                mine[name] = mine.get(name, 0) + number
        for name, places in other.examples.items():
            self.examples[name] = (self.examples.get(name, []) + places)[:NUM_EXAMPLES]

    def _remember(self, name: str, places: list[Place]) -> None:
        """Add places of the same chunk; one that is later may have been found before."""
        known = dict.fromkeys(self.examples.get(name, []) + places)
        self.examples[name] = sorted(known, key=lambda place: place.line)[:NUM_EXAMPLES]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file, names sorted; places as [file, line, byte]."""
        plain = asdict(self)
        return {k: dict(sorted(v.items())) if isinstance(v, dict) else v for k, v in plain.items()}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Counts:
        """Read what `to_json` gave."""
        examples = {
            name: [Place(*place) for place in places] for name, places in plain["examples"].items()
        }
        return cls(**{**plain, "examples": examples})
