"""The pairs of one split of a data folder, by number: token ids and lengths, memory-mapped.

It holds where things lie, not what they are; it knows nothing of text.
"""

# N pairs

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nmt.data.bucketing import Lengths
from nmt.data.folder import CorpusIndex, read_index, read_lengths
from nmt.data.shards import Ids, MappedShard, length_type
from nmt.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """One corpus: the pairs `start` to `start + num_pairs` of the split."""

    name: str  # "" when the split has one without a name
    start: int
    num_pairs: int
    weight: float


class ParallelData:
    """The pairs of one split; a file is mapped when its first pair is asked for.

    Threads may share it. What another process is sent are paths; it maps the files itself.
    """

    def __init__(self, data_dir: Path, split: str) -> None:
        self._data_dir, self._split = data_dir, split
        index = read_index(data_dir, split)
        if index is None:
            self._open_files(sorted(data_dir.glob(f"{split}-*.arrow")))
        else:
            self._open_index(index)
        if len(self) == 0:
            raise DataError(f"{data_dir} holds no sentence pairs; preprocess the corpus again")

    def _open_index(self, index: Sequence[CorpusIndex]) -> None:
        shards = [shard for corpus in index for shard in corpus.shards]
        self._paths = [self._data_dir / shard.file for shard in shards]
        for path, shard in zip(self._paths, shards, strict=True):
            _check_size(path, shard.bytes)
        self._shards: list[MappedShard | None] = [None] * len(shards)
        self._starts = _starts([shard.pairs for shard in shards])
        starts = _starts([corpus.num_pairs for corpus in index])
        self.corpora = [
            Corpus(corpus.corpus, start, corpus.num_pairs, corpus.weight)
            for corpus, start in zip(index, starts, strict=False)
        ]
        self._lengths: Lengths | None = read_lengths(self._data_dir, self._split, len(self))

    def _open_files(self, paths: list[Path]) -> None:
        """Open a folder of version 1, which has no index; the files themselves are counted."""
        if not paths:
            raise DataError(
                f"{self._data_dir} has no {self._split}-*.arrow; make the folder with "
                "nmt-preprocess"
            )
        mapped = [MappedShard(path) for path in paths]
        self._paths, self._shards = paths, [*mapped]
        self._starts = _starts([len(shard) for shard in mapped])
        self.corpora = [Corpus("", 0, len(self), 1.0)]
        self._lengths = None

    def __getstate__(self) -> dict[str, Any]:
        return {"place": (self._data_dir, self._split)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["place"])  # type: ignore[misc]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> tuple[Ids, Ids]:
        """Return source and target ids of a pair, without BOS and EOS."""
        number = bisect_right(self._starts, index) - 1
        shard = self._shards[number] or self._map(number)
        return shard[index - self._starts[number]]

    def __iter__(self) -> Iterator[tuple[Ids, Ids]]:
        return (self[i] for i in range(len(self)))

    def lengths(self) -> Lengths:
        """Return the number of tokens of source and target, EOS included, (N, 2), read-only."""
        if self._lengths is None:
            found = np.concatenate([self._map(i).lengths() for i in range(len(self._paths))])
            self._lengths = found.astype(length_type(int(found.max())))
        return self._lengths

    def _map(self, number: int) -> MappedShard:
        """Map a file; when two threads do, either result is as good."""
        shard, path = MappedShard(self._paths[number]), self._paths[number]
        expected = self._starts[number + 1] - self._starts[number]
        if len(shard) != expected:
            raise DataError(
                f"{path} is damaged: it has {len(shard)} pairs for {expected}; "
                "run nmt-preprocess again"
            )
        self._shards[number] = shard
        return shard


def open_split(data_dir: Path, split: str) -> ParallelData:
    """Open `train` or `valid` of a data folder."""
    return ParallelData(data_dir, split)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return where each part starts, and the end."""
    return [0, *np.cumsum(sizes, dtype=np.int64).tolist()]


def _check_size(path: Path, num_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path} is missing; run nmt-preprocess again") from None
    if found != num_bytes:
        raise DataError(
            f"{path} is damaged: it has {found:,} bytes for {num_bytes:,}; run nmt-preprocess again"
        )
