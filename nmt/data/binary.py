"""A data folder: shards of token ids as Arrow IPC streams, the lengths of all pairs of a split in
one file, and the index of both in `meta.json`. Everything is memory-mapped, and any Arrow reader
opens the shards.
"""

# N pairs

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nmt.data import Lengths
from nmt.data.mixing import CorpusRange
from nmt.errors import DataError

Ids = np.ndarray[Any, np.dtype[Any]]

FORMAT_VERSION = 2  # 1 had no index: its shards are those that the folder holds
_ROWS_A_BATCH = 50_000  # fixed, so that bytes do not depend on how the pairs arrive
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # the end-of-stream marker of Arrow's IPC format


@dataclass
class ShardFile:
    """The entry of one file in an index; tokens do not count EOS, but `longest` does, a side."""

    file: str
    pairs: int = 0
    src_tokens: int = 0
    tgt_tokens: int = 0
    longest: int = 0
    bytes: int = 0
    sha256: str = ""


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


class ShardWriter:
    """Writes one file, in a `with` block; `shard` describes it afterwards.

    The file is there as soon as the block begins: write beside the place and rename. Equal pairs
    give equal bytes, however they are cut into calls of `add`.
    """

    def __init__(
        self, path: Path, *, src_vocab_size: int, tgt_vocab_size: int, has_text: bool = False
    ) -> None:
        # the smallest integer types that both Arrow's and numpy's users expect for these ids
        sizes = {"src": src_vocab_size, "tgt": tgt_vocab_size}
        kinds = {side: pa.uint16() if n <= 1 << 16 else pa.int32() for side, n in sizes.items()}
        fields = [(side, pa.list_(kind)) for side, kind in kinds.items()]
        fields += [("src_text", pa.string()), ("tgt_text", pa.string())] if has_text else []
        self._path, self._schema = path, pa.schema(fields)
        self._waiting: list[pa.RecordBatch] = []
        self.shard = ShardFile(path.name)

    def __enter__(self) -> ShardWriter:
        self._file = pa.OSFile(str(self._path), "wb")
        self._writer = pa.ipc.new_stream(self._file, self._schema)
        return self

    def add(
        self,
        src_ids: Ids,
        src_offsets: Ids,
        tgt_ids: Ids,
        tgt_offsets: Ids,
        *,
        src_text: Sequence[str] | None = None,
        tgt_text: Sequence[str] | None = None,
    ) -> None:
        """Append N pairs: the ids of side i are `ids[offsets[i] : offsets[i + 1]]`, without BOS and
        EOS; offsets (N + 1,) start at 0. Texts are given when the file has them.
        """
        sides = ((src_ids, src_offsets), (tgt_ids, tgt_offsets))
        texts = [text for text in (src_text, tgt_text) if text is not None]
        num_pairs, start = len(src_offsets) - 1, 0
        while start < num_pairs:
            end = min(num_pairs, start + _ROWS_A_BATCH - self.shard.pairs % _ROWS_A_BATCH)
            columns = []
            for kind, (ids, offsets) in zip(self._schema.types, sides, strict=False):
                cuts = offsets[start : end + 1]
                values = _to_arrow(ids[cuts[0] : cuts[-1]]).cast(kind.value_type)  # or refuses
                places = _to_arrow((cuts - cuts[0]).astype(np.int32))
                columns.append(pa.ListArray.from_arrays(places, values))
                self.shard.longest = max(self.shard.longest, int(np.diff(cuts).max()) + 1)
            columns += [pa.array(text[start:end], pa.string()) for text in texts]
            self._waiting.append(pa.record_batch(columns, schema=self._schema))
            self.shard.pairs += end - start
            if self.shard.pairs % _ROWS_A_BATCH == 0:
                self._write()
            start = end
        self.shard.src_tokens += len(src_ids)
        self.shard.tgt_tokens += len(tgt_ids)

    def _write(self) -> None:
        """Write the pairs that wait as one record batch."""
        table = pa.Table.from_batches(self._waiting, self._schema).combine_chunks()
        self._writer.write_table(table)
        self._waiting.clear()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is not None:
                return
            if self._waiting:
                self._write()
            self._writer.close()
        digest = hashlib.sha256()
        with self._path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        self.shard.bytes, self.shard.sha256 = self._path.stat().st_size, digest.hexdigest()


class MappedShard:
    """The pairs of one file, without a copy.

    Raises `DataError` for a file that is missing, cut or something else.
    """

    def __init__(self, path: Path) -> None:
        self._starts, self._batches = [0], []
        options = pa.ipc.IpcReadOptions(use_threads=False)  # a process forked later would lack them
        try:
            with pa.memory_map(str(path)) as source:
                # pyarrow takes a stream that was cut between two batches for a whole one
                last = max(source.size() - len(_END), 0)
                if source.read_at(len(_END), last) != _END:
                    raise pa.ArrowInvalid("it ends too early")
                with pa.ipc.open_stream(source, options=options) as reader:
                    if reader.schema.names[:2] != ["src", "tgt"]:
                        raise pa.ArrowInvalid(f"its columns are {reader.schema.names}")
                    batches = [batch for batch in reader if batch.num_rows]
        except FileNotFoundError:
            raise _unusable(path, "is missing") from None
        except (pa.ArrowInvalid, OSError) as error:
            raise _unusable(path, f"is damaged ({' '.join(str(error).split())})") from None
        for batch in batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
            src, tgt = batch.column(0), batch.column(1)
            views = map(_view, (src.values, src.offsets, tgt.values, tgt.offsets))
            self._batches.append(tuple(views))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> tuple[Ids, Ids]:
        """Return source and target ids of a pair."""
        number = bisect_right(self._starts, row) - 1
        row -= self._starts[number]
        src, src_offsets, tgt, tgt_offsets = self._batches[number]
        return (
            src[src_offsets[row] : src_offsets[row + 1]],
            tgt[tgt_offsets[row] : tgt_offsets[row + 1]],
        )

    def lengths(self) -> Lengths:
        """Return the number of tokens of source and target, EOS included, (N, 2)."""
        parts = [np.empty((0, 2), dtype=np.int32)]
        for _, src_offsets, _, tgt_offsets in self._batches:
            parts.append(np.stack([np.diff(src_offsets), np.diff(tgt_offsets)], axis=1) + 1)
        return np.concatenate(parts)


def _to_arrow(values: Ids) -> pa.Array:
    """Wrap an array; `pa.array` would import pandas to ask whether it is one of its own."""
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _view(array: pa.Array) -> Ids:
    """View the values of an array; its own method to do so imports pandas, some 30 MB."""
    return np.frombuffer(array.buffers()[1], dtype=str(array.type), count=len(array))


def _unusable(path: Path, what: str = "is damaged") -> DataError:
    return DataError(f"{path} {what}; run nmt-preprocess again")


def read_meta(data_dir: Path) -> dict[str, Any]:
    """Read `meta.json`; a folder that is none of ours, or a newer one, is a `DataError`."""
    path = data_dir / "meta.json"
    if not path.is_file():
        what = "is no data folder" if data_dir.is_dir() else "does not exist"
        raise DataError(f"{data_dir} {what}; nmt-preprocess makes one of your text")
    try:
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = meta["format_version"]
    except (ValueError, KeyError, TypeError):
        raise _unusable(path) from None
    if version > FORMAT_VERSION:
        raise DataError(
            f"{data_dir} has format_version {version}, this nmt reads up to "
            f"{FORMAT_VERSION}; update nmt or preprocess again"
        )
    return meta


def _read_index(data_dir: Path, split: str) -> list[CorpusIndex]:
    """Return the corpora of a split; a folder of version 1 has one, whose pairs are counted."""
    meta = read_meta(data_dir)
    if meta["format_version"] == 1:
        if not (paths := sorted(data_dir.glob(f"{split}-*.arrow"))):
            raise DataError(
                f"{data_dir} has no {split}-*.arrow; make the folder with nmt-preprocess"
            )
        sizes = [(path, len(MappedShard(path)), path.stat().st_size) for path in paths]
        shards = [ShardFile(path.name, pairs=pairs, bytes=size) for path, pairs, size in sizes]
        return [CorpusIndex("", 1.0, shards)]
    try:
        if split not in meta["splits"]:
            raise DataError(f"{data_dir} has no {split} pairs; give data.{split} to nmt-preprocess")
        return [
            CorpusIndex(c["corpus"], c["weight"], [ShardFile(**shard) for shard in c["shards"]])
            for c in meta["splits"][split]
        ]
    except (KeyError, TypeError):
        raise _unusable(data_dir / "meta.json") from None


def write_index(folder: Path, index: Mapping[str, Sequence[CorpusIndex]]) -> dict[str, Any]:
    """Write `SPLIT.lengths.npy` for shards that lie in `folder`, by split; return what `meta.json`
    holds about them: `format_version`, `splits`, `num_pairs` and `data_sha256`.
    """
    digest = hashlib.sha256()
    for split, corpora in sorted(index.items()):
        shards = [shard for corpus in corpora for shard in corpus.shards]
        longest = max((shard.longest for shard in shards), default=0)
        kind = "<u2" if longest < 1 << 16 else "<i4"
        shape = (sum(shard.pairs for shard in shards), 2)
        with (folder / f"{split}.lengths.npy").open("wb") as file:
            header = {"descr": kind, "fortran_order": False, "shape": shape}
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
    """The pairs of `train` or `valid` of a data folder; a file is mapped when its first pair is
    asked for.

    Threads may share it. What another process is sent are paths; it maps the files itself.
    """

    def __init__(self, data_dir: Path, split: str) -> None:
        self._place = (data_dir, split)
        index = _read_index(data_dir, split)
        shards = [shard for corpus in index for shard in corpus.shards]
        self._paths = [data_dir / shard.file for shard in shards]
        for path, shard in zip(self._paths, shards, strict=True):
            if not path.exists():
                raise _unusable(path, "is missing")
            if (size := path.stat().st_size) != shard.bytes:
                raise _unusable(path, f"is damaged: it has {size:,} bytes for {shard.bytes:,}")
        self._shards: list[MappedShard | None] = [None] * len(shards)
        self._starts: list[int] = np.cumsum([0, *(shard.pairs for shard in shards)]).tolist()
        starts = np.cumsum([0, *(corpus.num_pairs for corpus in index)]).tolist()
        self.corpora = [
            CorpusRange(corpus.corpus, start, corpus.num_pairs, corpus.weight)
            for corpus, start in zip(index, starts, strict=False)
        ]
        if len(self) == 0:
            raise DataError(f"{data_dir} holds no sentence pairs; preprocess the corpus again")
        self.lengths = self._map_lengths()  # tokens of source and target, EOS included, (N, 2)

    def __reduce__(self) -> tuple[type[ParallelData], tuple[Path, str]]:
        return ParallelData, self._place

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> tuple[Ids, Ids]:
        """Return source and target ids of a pair, without BOS and EOS."""
        number = bisect_right(self._starts, index) - 1
        shard = self._shards[number] or self._map(number)
        return shard[index - self._starts[number]]

    def _map(self, number: int) -> MappedShard:
        """Map a file; when two threads do, either result is as good."""
        path, shard = self._paths[number], MappedShard(self._paths[number])
        expected = self._starts[number + 1] - self._starts[number]
        if len(shard) != expected:
            raise _unusable(path, f"is damaged: it has {len(shard)} pairs for {expected}")
        self._shards[number] = shard
        return shard

    def _map_lengths(self) -> Lengths:
        data_dir, split = self._place
        path = data_dir / f"{split}.lengths.npy"
        if not path.exists() and read_meta(data_dir)["format_version"] == 1:
            return np.concatenate([self._map(i).lengths() for i in range(len(self._paths))])
        try:
            # a plain view: np.memmap is slow to index
            lengths: Lengths = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except FileNotFoundError:
            raise _unusable(path, "is missing") from None
        except (ValueError, OSError, EOFError):
            raise _unusable(path) from None
        if lengths.shape != (len(self), 2):
            what = f"is damaged: it has the shape {lengths.shape} for {len(self)} pairs"
            raise _unusable(path, what)
        return lengths
