"""A data folder as `meta.json` describes it: the index of its shards, and the lengths of all pairs
in one file beside them.

It knows nothing of text, and of the ids only where their files are.
"""

# N pairs

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nmt.data.bucketing import Lengths
from nmt.data.shards import MappedShard, Shard, length_type
from nmt.errors import DataError

FORMAT_VERSION = 2  # 1 had no index: its shards are those that the folder holds


@dataclass(frozen=True)
class CorpusIndex:
    """The shards of one corpus of a split, in the order of their pairs."""

    corpus: str  # "" for data.train and for held-out splits
    weight: float  # how often an epoch draws each pair, before temperature
    shards: list[Shard]

    @property
    def num_pairs(self) -> int:
        """Pairs of all shards."""
        return sum(shard.pairs for shard in self.shards)


Index = Mapping[str, Sequence[CorpusIndex]]  # by split


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
        raise DataError(f"{path} is damaged; run nmt-preprocess again") from None
    if version > FORMAT_VERSION:
        raise DataError(
            f"{data_dir} has format_version {version}, this nmt reads up to "
            f"{FORMAT_VERSION}; update nmt or preprocess again"
        )
    return meta


def read_index(data_dir: Path, split: str) -> list[CorpusIndex] | None:
    """Return the corpora of a split; None for a folder of version 1, which has no index."""
    meta = read_meta(data_dir)
    if meta["format_version"] == 1:
        return None
    try:
        found = meta["splits"].get(split)
        if found is not None:
            return [
                CorpusIndex(c["corpus"], c["weight"], [Shard(**shard) for shard in c["shards"]])
                for c in found
            ]
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{data_dir / 'meta.json'} is damaged; run nmt-preprocess again") from None
    raise DataError(f"{data_dir} has no {split} pairs; give data.{split} to nmt-preprocess")


def write_index(folder: Path, index: Index) -> dict[str, Any]:
    """Write `SPLIT.lengths.npy` for shards that lie in `folder`; return what `meta.json` says of
    them: `format_version`, `splits`, `num_pairs` and `data_sha256`.
    """
    digest = hashlib.sha256()
    for split, corpora in sorted(index.items()):
        shards = [shard for corpus in corpora for shard in corpus.shards]
        _write_lengths(folder, split, shards)
        for corpus in corpora:
            for shard in corpus.shards:
                digest.update(f"{split} {corpus.corpus} {shard.sha256}\n".encode())
    return {
        "format_version": FORMAT_VERSION,
        "splits": {
            split: [asdict(corpus) for corpus in corpora] for split, corpora in index.items()
        },
        "num_pairs": {split: sum(c.num_pairs for c in corpora) for split, corpora in index.items()},
        "data_sha256": digest.hexdigest(),
    }


def _write_lengths(folder: Path, split: str, shards: Sequence[Shard]) -> None:
    kind = length_type(max((shard.longest for shard in shards), default=0)).newbyteorder("<")
    shape = (sum(shard.pairs for shard in shards), 2)
    with lengths_path(folder, split).open("wb") as file:
        header = {"descr": kind.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for shard in shards:
            file.write(MappedShard(folder / shard.file).lengths().astype(kind).tobytes())


def read_lengths(data_dir: Path, split: str, num_pairs: int) -> Lengths:
    """Map the lengths of all pairs of a split, EOS included, (N, 2)."""
    path = lengths_path(data_dir, split)
    try:
        # a plain view: np.memmap is slow to index
        lengths: Lengths = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError:
        raise DataError(f"{path} is missing; run nmt-preprocess again") from None
    except (ValueError, OSError, EOFError):
        raise DataError(f"{path} is damaged; run nmt-preprocess again") from None
    if lengths.shape != (num_pairs, 2):
        raise DataError(
            f"{path} is damaged: it has the shape {lengths.shape} for {num_pairs} pairs; "
            "run nmt-preprocess again"
        )
    return lengths


def lengths_path(folder: Path, split: str) -> Path:
    """Return where the lengths of a split lie."""
    return folder / f"{split}.lengths.npy"
