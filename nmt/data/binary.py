"""A data folder: shards of token ids as Arrow IPC streams, the lengths of all pairs of a split in
one file, and the index of both in `meta.json`. Everything is memory-mapped, and any Arrow reader
opens the shards.
"""

# N pairs

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nmt.config import require
from nmt.data import Lengths
from nmt.data.languages import LanguagePair
from nmt.data.mixing import CorpusRange
from nmt.data.text import read_lines
from nmt.errors import DataError
from nmt.runtime.manifest import verify
from nmt.runtime.metadata import pop_version, read_json, to_dataclass

Ids = np.ndarray[Any, np.dtype[Any]]
FlatIds = tuple[Ids, Ids]  # of all lines of a side, and where each line starts

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

    def __post_init__(self) -> None:
        is_name = self.file not in ("", ".", "..") and Path(self.file).name == self.file
        require(is_name, "file", self.file, "must be the name of a file in the data folder")
        require(self.pairs >= 0, "pairs", self.pairs, "must not be negative")


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


@dataclass(frozen=True)
class DataInfo:
    """What `meta.json` of a data folder holds."""

    format_version: int
    num_pairs: dict[str, int] = field(default_factory=dict)  # by split
    data_sha256: str = ""
    src_lang: str = ""
    tgt_lang: str = ""
    vocab_size: int = 0  # of the target
    tokenizer_sha256: str = ""
    max_length: int = 0
    temperature: float = 1.0
    src_vocab_size: int | None = None  # where the source has a vocabulary of its own
    splits: dict[str, list[CorpusIndex]] = field(default_factory=dict)  # version 1 has none
    directions: dict[str, LanguagePair] = field(default_factory=dict)  # by corpus, where tagged


class ShardWriter:
    """Writes one file, in a `with` block; `shard` describes it afterwards.

    The file is there as soon as the block begins: write beside the place and rename. Equal pairs
    give equal bytes, however they are cut into calls of `add`.
    """

    def __init__(
        self, path: Path, src_vocab_size: int, tgt_vocab_size: int, *, has_text: bool = False
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
        self, src: FlatIds, tgt: FlatIds, texts: tuple[Sequence[str], Sequence[str]] | None = None
    ) -> None:
        """Append N pairs, each side as ids and offsets (N + 1,) that start at 0: line i is
        `ids[offsets[i] : offsets[i + 1]]`, without BOS and EOS. Texts are given when the file has
        them.
        """
        num_pairs, start = len(src[1]) - 1, 0
        while start < num_pairs:
            end = min(num_pairs, start + _ROWS_A_BATCH - self.shard.pairs % _ROWS_A_BATCH)
            columns = []
            for kind, (ids, offsets) in zip(self._schema.types, (src, tgt), strict=False):
                cuts = offsets[start : end + 1]
                values = _to_arrow(ids[cuts[0] : cuts[-1]]).cast(kind.value_type)  # or refuses
                places = _to_arrow((cuts - cuts[0]).astype(np.int32))
                columns.append(pa.ListArray.from_arrays(places, values))
                self.shard.longest = max(self.shard.longest, int(np.diff(cuts).max()) + 1)
            columns += [pa.array(text[start:end], pa.string()) for text in texts or ()]
            self._waiting.append(pa.record_batch(columns, schema=self._schema))
            self.shard.pairs += end - start
            if self.shard.pairs % _ROWS_A_BATCH == 0:
                self._write()
            start = end
        self.shard.src_tokens += len(src[0])
        self.shard.tgt_tokens += len(tgt[0])

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
        content = np.memmap(self._path, np.uint8, mode="r")
        self.shard.bytes, self.shard.sha256 = len(content), hashlib.sha256(content.data).hexdigest()


class MappedShard:
    """The pairs of one file, without a copy.

    Raises `DataError` for a file that is missing, cut or something else.
    """

    def __init__(self, path: Path) -> None:
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
        self._starts: list[int] = np.cumsum([0, *(batch.num_rows for batch in batches)]).tolist()
        self._texts = [batch.columns[2:4] for batch in batches]
        self._batches = [  # as arrays; pyarrow's own method would import pandas, some 30 MB
            [
                np.frombuffer(array.buffers()[1], dtype=str(array.type), count=len(array))
                for array in (src.values, src.offsets, tgt.values, tgt.offsets)
            ]
            for src, tgt in (batch.columns[:2] for batch in batches)
        ]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> tuple[Ids, Ids]:
        """Return source and target ids of a pair."""
        number = bisect_right(self._starts, row) - 1
        src, src_offsets, tgt, tgt_offsets = self._batches[number]
        i = row - self._starts[number]
        return src[src_offsets[i] : src_offsets[i + 1]], tgt[tgt_offsets[i] : tgt_offsets[i + 1]]

    def texts(self, row: int) -> tuple[str, ...]:
        """Return the text of source and target of a pair, or nothing where it was not kept."""
        number = bisect_right(self._starts, row) - 1
        return tuple(column[row - self._starts[number]].as_py() for column in self._texts[number])

    def lengths(self) -> Lengths:
        """Return the number of tokens of source and target, EOS included, (N, 2)."""
        offsets = ((src_offsets, tgt_offsets) for _, src_offsets, _, tgt_offsets in self._batches)
        parts = [np.diff(sides, axis=1).T + 1 for sides in offsets]
        return np.concatenate([np.empty((0, 2), dtype=np.int32), *parts])


def _to_arrow(values: Ids) -> pa.Array:
    """Wrap an array; `pa.array` would import pandas to ask whether it is one of its own."""
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _unusable(path: Path, what: str = "is damaged") -> DataError:
    return DataError(f"{path} {what}; run nmt-preprocess again")


def read_meta(data_dir: Path) -> DataInfo:
    """Read `meta.json`; a folder that is none of ours, or a newer one, is a `DataError`."""
    path = data_dir / "meta.json"
    if not path.is_file():
        what = "is no data folder" if data_dir.is_dir() else "does not exist"
        raise DataError(f"{data_dir} {what}; nmt-preprocess makes one of your text")
    verify(data_dir, "meta.json")
    meta = read_json(path)
    version = pop_version(meta, path, FORMAT_VERSION)
    meta.pop("made_of", None)  # in data folders that an earlier version wrote
    return to_dataclass(DataInfo, {"format_version": version, **meta}, path)


def _read_index(data_dir: Path, split: str) -> list[CorpusIndex]:
    """Return the corpora of a split; a folder of version 1 has one, whose pairs are counted."""
    meta = read_meta(data_dir)
    if meta.format_version == 1:
        if not (paths := sorted(data_dir.glob(f"{split}-*.arrow"))):
            raise DataError(
                f"{data_dir} has no {split}-*.arrow; make the folder with nmt-preprocess"
            )
        sizes = [(path, len(MappedShard(path)), path.stat().st_size) for path in paths]
        shards = [ShardFile(path.name, pairs=pairs, bytes=size) for path, pairs, size in sizes]
        return [CorpusIndex("", 1.0, shards)]
    if split not in meta.splits:
        raise DataError(f"{data_dir} has no {split} pairs; give data.{split} to nmt-preprocess")
    return meta.splits[split]


def write_index(folder: Path, index: Mapping[str, Sequence[CorpusIndex]]) -> dict[str, Any]:
    """Write `SPLIT.lengths.npy` for shards that lie in `folder`, by split; return what `meta.json`
    holds about them: `format_version`, `splits`, `num_pairs` and `data_sha256`.
    """
    digest = hashlib.sha256()
    for split, corpora in sorted(index.items()):
        shards = [(corpus.corpus, shard) for corpus in corpora for shard in corpus.shards]
        longest = max((shard.longest for _, shard in shards), default=0)
        kind = "<u2" if longest < 1 << 16 else "<i4"
        shape = (sum(shard.pairs for _, shard in shards), 2)
        with (folder / f"{split}.lengths.npy").open("wb") as file:
            header = {"descr": kind, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for name, shard in shards:
                file.write(MappedShard(folder / shard.file).lengths().astype(kind).tobytes())
                digest.update(f"{split} {name} {shard.sha256}\n".encode())
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
        self.corpora: list[CorpusRange] = []
        for one in index:
            start = self.corpora[-1].end if self.corpora else 0
            self.corpora.append(CorpusRange(one.corpus, start, one.num_pairs, one.weight))
        if len(self) == 0:
            raise DataError(f"{data_dir} holds no sentence pairs; preprocess the corpus again")
        self.lengths = self._map_lengths()  # tokens of source and target, EOS included, (N, 2)

    def __reduce__(self) -> tuple[type[ParallelData], tuple[Path, str]]:
        return ParallelData, self._place

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> tuple[Ids, Ids]:
        """Return source and target ids of a pair, without BOS and EOS."""
        shard, row = self._find(index)
        return shard[row]

    def texts(self, index: int) -> tuple[str, ...]:
        """Return the text of source and target of a pair, or nothing without `keep_text`."""
        shard, row = self._find(index)
        return shard.texts(row)

    def _find(self, index: int) -> tuple[MappedShard, int]:
        number = bisect_right(self._starts, index) - 1
        return self._shards[number] or self._map(number), index - self._starts[number]

    def _map(self, number: int) -> MappedShard:
        """Map a file; when two threads do, either result is as good."""
        verify(self._place[0], self._paths[number].name)
        path, shard = self._paths[number], MappedShard(self._paths[number])
        expected = self._starts[number + 1] - self._starts[number]
        if len(shard) != expected:
            raise _unusable(path, f"is damaged: it has {len(shard)} pairs for {expected}")
        self._shards[number] = shard
        return shard

    def _map_lengths(self) -> Lengths:
        data_dir, split = self._place
        path = data_dir / f"{split}.lengths.npy"
        if not path.exists() and read_meta(data_dir).format_version == 1:
            return np.concatenate([self._map(i).lengths() for i in range(len(self._paths))])
        verify(data_dir, path.name)
        try:
            # a plain view: np.memmap is slow to index
            lengths: Lengths = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except FileNotFoundError:
            raise _unusable(path, "is missing") from None
        except (ValueError, OSError, EOFError):
            raise _unusable(path) from None
        if (shape := lengths.shape) != (len(self), 2):
            raise _unusable(path, f"is damaged: it has the shape {shape} for {len(self)} pairs")
        return lengths


@dataclass(frozen=True)
class HeldOutText:
    """The held-out pairs of one corpus; its name is empty for those of `data.valid` itself."""

    corpus: str
    direction: LanguagePair
    sources: list[str]
    targets: list[str]


def read_held_out(data_dir: Path, split: str) -> list[HeldOutText]:
    """Read the text of `valid` or `test` in a data folder, by corpus; a missing one is a
    `DataError`.
    """
    meta = read_meta(data_dir)
    usual = LanguagePair(meta.src_lang, meta.tgt_lang)
    corpora = ParallelData(data_dir, split).corpora
    files = [f"{split}.src", f"{split}.tgt"]
    verify(data_dir, *files)
    sides = [list(read_lines(data_dir / file)) for file in files]
    if [len(side) for side in sides] != [sum(corpus.num_pairs for corpus in corpora)] * 2:
        sizes = " and ".join(f"{file} {len(side)}" for file, side in zip(files, sides, strict=True))
        raise _unusable(data_dir, f"has other lines than pairs ({sizes})")
    return [
        HeldOutText(
            corpus.name,
            meta.directions.get(corpus.name, usual),
            *(side[corpus.start : corpus.start + corpus.num_pairs] for side in sides),
        )
        for corpus in corpora
    ]
