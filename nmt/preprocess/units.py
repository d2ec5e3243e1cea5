"""Reads the training corpora unit by unit, in one pass, and passes over units that nobody wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from nmt.preprocess.chunks import ChunkReader
from nmt.preprocess.pieces import Piece, Unit
from nmt.preprocess.sources import total_disk_bytes
from nmt.preprocess.workspace import Job
from nmt.progress import Progress


class UnitReader:
    """Reads all corpora of a job; `num_pairs` tells at the end how many pairs each has."""

    def __init__(self, job: Job, num_pairs: Mapping[str, int] | None = None) -> None:
        self._job, self._known = job, num_pairs
        self.num_pairs: dict[str, int] = {}
        self._disk_bytes = 0  # of the corpora that are done

    def read(self, is_wanted: Callable[[Unit], bool]) -> Iterator[Piece]:
        """Yield the chunks of the units that are wanted; with pairs counted before, stop a corpus
        after the last of them.
        """
        for corpus, sources in self._job.sources.items():
            known = None if self._known is None else self._known[corpus]
            with ChunkReader(sources) as reader:
                last = self._last(corpus, known, is_wanted)
                self.num_pairs[corpus] = 0
                yield from self._read_corpus(corpus, reader, is_wanted, last)
            if known is not None:
                self.num_pairs[corpus] = known
            self._disk_bytes += total_disk_bytes(sources)

    def _last(self, corpus: str, known: int | None, is_wanted: Callable[[Unit], bool]) -> float:
        if known is None:
            return float("inf")
        units = self._job.units(corpus, known)
        return max((unit.number for unit in units if is_wanted(unit)), default=-1)

    def _read_corpus(
        self, corpus: str, reader: ChunkReader, is_wanted: Callable[[Unit], bool], last: float
    ) -> Iterator[Piece]:
        size, number, num_pairs = self._job.config.shard_pairs, 0, self._job.config.shard_pairs
        while number <= last and num_pairs == size:
            unit = self._job.unit(corpus, number)
            if is_wanted(unit):
                num_pairs = 0
                for chunk in reader.read(size):
                    num_pairs += chunk.num_pairs
                    yield Piece(unit, chunk, self._disk_bytes + chunk.disk_bytes)
            else:
                num_pairs = reader.skip(size)
            self.num_pairs[corpus] += num_pairs
            number += 1


def start_progress(job: Job, name: str) -> Progress:
    """Start to show how far a pass over all corpora is."""
    disk_bytes = sum(total_disk_bytes(sources) for sources in job.sources.values())
    return Progress(name, "pairs", total_bytes=disk_bytes)


def note(progress: Progress, piece: Piece) -> None:
    """Note that a piece is done."""
    text_bytes = sum(map(len, piece.chunk.raw))
    num_pairs, read_bytes = piece.chunk.num_pairs, piece.disk_bytes
    progress.update(num_pairs, read_bytes=read_bytes, text_bytes=text_bytes)
