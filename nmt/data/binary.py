"""A data folder: the index of its shards in `meta.json`, the lengths of all pairs of a split in one
file, and the pairs themselves by number, all memory-mapped. It knows nothing of text.
"""

# N pairs

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nmt.data import Lengths
from nmt.data.arrow import Ids, MappedShard, ShardFile, damaged, length_type, missing
from nmt.data.mixing import CorpusRange
from nmt.errors import DataError

FORMAT_VERSION = 2  # 1 had no index: its shards are those that the folder holds


@dataclass(frozen=True)
class CorpusIndex:
    """The shards of one corpus of a split, in the order of their pairs."""

    corpus: str  # "" for data.train and for held-out splits
    weight: float  # how often an epoch draws each pair, before temperature
    shards: list[ShardFile]

    @property
    def num_pairs(self) -> int:
        """Pairs of all shards."""
        return sum(shard.pairs for shard in self.shards)


def read_meta(data_dir: Path) -> dict[str, Any]:
    """Read `meta.json`; a folder that is none of ours, or a newer one, is a `DataError`."""
    path = data_dir / "meta.json"
    if not path.is_file():
        what = "is no data folder" if data_dir.is_dir() else "does not exist"
        raise DataError(f"{data_dir} {what}; make it with: nmt-preprocess data_dir={data_dir}")
    try:
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = meta["format_version"]
    except (ValueError, KeyError, TypeError):
        raise damaged(path, "") from None
    if version > FORMAT_VERSION:
        raise DataError(
            f"{data_dir} has format_version {version}, this nmt reads up to "
            f"{FORMAT_VERSION}; update nmt or preprocess again"
        )
    return meta


def read_index(data_dir: Path, split: str) -> list[CorpusIndex]:
    """Return the corpora of a split; a folder of version 1 has one, whose files are counted."""
    meta = read_meta(data_dir)
    if meta["format_version"] == 1:
        if not (paths := sorted(data_dir.glob(f"{split}-*.arrow"))):
            raise DataError(
                f"{data_dir} has no {split}-*.arrow; make the folder with nmt-preprocess"
            )
        counted = ((path, len(MappedShard(path)), path.stat().st_size) for path in paths)
        shards = [ShardFile(path.name, pairs, 0, 0, 0, size, "") for path, pairs, size in counted]
        return [CorpusIndex("", 1.0, shards)]
    try:
        found = meta["splits"].get(split)
        if found is not None:
            return [
                CorpusIndex(c["corpus"], c["weight"], [ShardFile(**shard) for shard in c["shards"]])
                for c in found
            ]
    except (KeyError, TypeError, AttributeError):
        raise damaged(data_dir / "meta.json", "") from None
    raise DataError(f"{data_dir} has no {split} pairs; give data.{split} to nmt-preprocess")


def write_index(folder: Path, index: Mapping[str, Sequence[CorpusIndex]]) -> dict[str, Any]:
    """Write `SPLIT.lengths.npy` for shards that lie in `folder`, by split; return what `meta.json`
    holds about them: `format_version`, `splits`, `num_pairs` and `data_sha256`.
    """
    digest = hashlib.sha256()
    for split, corpora in sorted(index.items()):
        shards = [shard for corpus in corpora for shard in corpus.shards]
        kind = length_type(max((shard.longest for shard in shards), default=0)).newbyteorder("<")
        shape = (sum(shard.pairs for shard in shards), 2)
        with (folder / f"{split}.lengths.npy").open("wb") as file:
            header = {"descr": kind.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for shard in shards:
                file.write(MappedShard(folder / shard.file).lengths().astype(kind).tobytes())
        for corpus in corpora:
            for shard in corpus.shards:
                digest.update(f"{split} {corpus.corpus} {shard.sha256}\n".encode())
    return {
        "format_version": FORMAT_VERSION,
        "splits": {split: [asdict(c) for c in corpora] for split, corpora in index.items()},
        "num_pairs": {split: sum(c.num_pairs for c in corpora) for split, corpora in index.items()},
        "data_sha256": digest.hexdigest(),
    }


class ParallelData:
    """The pairs of one split; a file is mapped when its first pair is asked for.

    Threads may share it. What another process is sent are paths; it maps the files itself.
    """

    def __init__(self, data_dir: Path, split: str) -> None:
        self._data_dir, self._split = data_dir, split
        index = read_index(data_dir, split)
        shards = [shard for corpus in index for shard in corpus.shards]
        self._paths = [data_dir / shard.file for shard in shards]
        for path, shard in zip(self._paths, shards, strict=True):
            if not path.exists():
                raise missing(path)
            if (size := path.stat().st_size) != shard.bytes:
                raise damaged(path, f": it has {size:,} bytes for {shard.bytes:,}")
        self._shards: list[MappedShard | None] = [None] * len(shards)
        self._starts = _starts([shard.pairs for shard in shards])
        starts = _starts([corpus.num_pairs for corpus in index])
        self.corpora = [
            CorpusRange(corpus.corpus, start, corpus.num_pairs, corpus.weight)
            for corpus, start in zip(index, starts, strict=False)
        ]
        self._lengths = _map_lengths(data_dir, split, len(self))
        if len(self) == 0:
            raise DataError(f"{data_dir} holds no sentence pairs; preprocess the corpus again")

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
        shard = MappedShard(self._paths[number])
        expected = self._starts[number + 1] - self._starts[number]
        if len(shard) != expected:
            raise damaged(self._paths[number], f": it has {len(shard)} pairs for {expected}")
        self._shards[number] = shard
        return shard


def open_split(data_dir: Path, split: str) -> ParallelData:
    """Open `train` or `valid` of a data folder."""
    return ParallelData(data_dir, split)


def _map_lengths(data_dir: Path, split: str, num_pairs: int) -> Lengths | None:
    """Map the lengths of all pairs of a split, EOS included, (N, 2)."""
    path = data_dir / f"{split}.lengths.npy"
    if not path.exists() and read_meta(data_dir)["format_version"] == 1:
        return None  # counted when they are asked for
    try:
        # a plain view: np.memmap is slow to index
        lengths: Lengths = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError:
        raise missing(path) from None
    except (ValueError, OSError, EOFError):
        raise damaged(path, "") from None
    if lengths.shape != (num_pairs, 2):
        raise damaged(path, f": it has the shape {lengths.shape} for {num_pairs} pairs")
    return lengths


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return where each part starts, and the end."""
    return [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
