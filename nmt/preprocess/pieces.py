"""What the parent process hands to workers: places and bytes of pairs, and which file they go to.

It reads nothing, and imports nothing that a worker has no use for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

MAX_LINE_BYTES = 1 << 20
"""No sentence is longer; of such a line nothing is kept but its place."""


class Format(Enum):
    """How a pair stands in the files of a source."""

    pair = "pair"  # line i of one file and line i of another
    tsv = "tsv"
    jsonl = "jsonl"


@dataclass(frozen=True)
class Source:
    """Files that hold pairs of one corpus, line by line."""

    corpus: str  # its name in data.corpora, or ""
    format: Format
    paths: tuple[Path, ...]  # two for a pair, source and target; else one
    names: tuple[str, ...]  # what the user calls them, for messages
    columns: tuple[int, int] = (1, 2)  # of TSV, from 1
    fields: tuple[str, str] = ("src", "tgt")  # of JSON
    src_tag: str | None = None
    tgt_tag: str | None = None


@dataclass(frozen=True)
class Chunk:
    """Lines of one source that follow each other."""

    source: Source
    first_pair: int  # its number among those of all sources that are read, from 0
    first_line: int  # its number in the source, from 1
    num_pairs: int
    raw: tuple[bytes, ...]  # one text a file; all have `num_pairs` lines, each ended by \n
    overlong: tuple[int, ...]  # lines of more than MAX_LINE_BYTES, which are empty in `raw`
    disk_bytes: int  # read so far, from all sources, as they lie on disk


@dataclass(frozen=True)
class Unit:
    """`shard_pairs` pairs of a corpus, as read, which become one file."""

    corpus: str
    number: int  # in its corpus
    first_pair: int  # in its corpus
    order: int  # among the units of all corpora, with gaps

    @property
    def name(self) -> str:
        """What its files are called, without suffix."""
        return f"{corpus_prefix(self.corpus)}-{self.number:05d}"


@dataclass(frozen=True)
class Piece:
    """A chunk of a unit."""

    unit: Unit
    chunk: Chunk
    disk_bytes: int  # how far the files of all corpora are read

    @property
    def rows(self) -> slice:
        """Where in the unit the pairs of the chunk are."""
        start = self.chunk.first_pair - self.unit.first_pair
        return slice(start, start + self.chunk.num_pairs)


def corpus_prefix(corpus: str) -> str:
    """Return how the names of a corpus' files begin."""
    return f"train-{corpus}" if corpus else "train"
