"""One file of a data folder: pairs of token ids as an Arrow IPC stream with the columns `src` and
`tgt`, written from flat arrays and read by memory map. Any Arrow reader opens the same file.
"""

# N pairs

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from nmt.errors import DataError

Ids = np.ndarray[Any, np.dtype[Any]]

_ROWS_A_BATCH = 50_000  # fixed, so that bytes do not depend on how the pairs arrive
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # the end-of-stream marker of Arrow's IPC format


@dataclass(frozen=True)
class ShardFile:
    """The entry of one file in an index; tokens do not count EOS, but `longest` does, a side."""

    file: str
    pairs: int
    src_tokens: int
    tgt_tokens: int
    longest: int
    bytes: int
    sha256: str


def length_type(longest: int) -> np.dtype[Any]:
    """Choose the smallest type for lengths up to `longest`."""
    return np.dtype(np.uint16 if longest < 1 << 16 else np.int32)


def damaged(path: Path, reason: str) -> DataError:
    """Return the error for a part of a data folder that cannot be used."""
    return DataError(f"{path} is damaged{reason}; run nmt-preprocess again")


def missing(path: Path) -> DataError:
    """Return the error for a part of a data folder that is not there."""
    return DataError(f"{path} is missing; run nmt-preprocess again")


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
        self.shard = ShardFile(path.name, 0, 0, 0, 0, 0, "")
        self._start_batch()

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
        num_pairs, start = len(src_offsets) - 1, 0
        while start < num_pairs:
            end = min(num_pairs, start + _ROWS_A_BATCH - self._num_waiting)
            for side, (ids, offsets) in enumerate(((src_ids, src_offsets), (tgt_ids, tgt_offsets))):
                self._ids[side].append(ids[offsets[start] : offsets[end]])
                self._lengths[side].append(np.diff(offsets[start : end + 1]))
            for text, part in zip(self._texts, (src_text, tgt_text), strict=False):
                text += part[start:end]  # type: ignore[index]
            self._num_waiting += end - start
            if self._num_waiting == _ROWS_A_BATCH:
                self._write_batch()
            start = end

    def _start_batch(self) -> None:
        self._ids: tuple[list[Ids], list[Ids]] = ([], [])
        self._lengths: tuple[list[Ids], list[Ids]] = ([], [])
        self._texts: list[list[str]] = [[] for _ in self._schema.names[2:]]
        self._num_waiting = 0

    def _write_batch(self) -> None:
        columns, longest = [], self.shard.longest
        for side in (0, 1):
            ids, lengths = np.concatenate(self._ids[side]), np.concatenate(self._lengths[side])
            offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
            np.cumsum(lengths, out=offsets[1:])
            values = _to_arrow(ids).cast(self._schema.field(side).type.value_type)  # or refuses
            columns.append(pa.ListArray.from_arrays(_to_arrow(offsets), values))
            longest = max(longest, int(lengths.max()) + 1)
        columns += [pa.array(text, pa.string()) for text in self._texts]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self.shard = replace(
            self.shard,
            pairs=self.shard.pairs + self._num_waiting,
            src_tokens=self.shard.src_tokens + sum(map(len, self._ids[0])),
            tgt_tokens=self.shard.tgt_tokens + sum(map(len, self._ids[1])),
            longest=longest,
        )
        self._start_batch()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if error is None:
                if self._num_waiting:
                    self._write_batch()
                self._writer.close()
        if error is None:
            digest = hashlib.sha256()
            with self._path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            size = self._path.stat().st_size
            self.shard = replace(self.shard, bytes=size, sha256=digest.hexdigest())


class MappedShard:
    """The pairs of one file, without a copy: list `i` of a record batch is
    `values[offsets[i] : offsets[i + 1]]`.

    Raises `DataError` for a file that is missing, cut or something else.
    """

    def __init__(self, path: Path) -> None:
        batches = _record_batches(path)
        sizes = [batch.num_rows for batch in batches]
        self._starts: list[int] = np.cumsum([0, *sizes], dtype=np.int64).tolist()
        columns = [[batch.column(side) for batch in batches] for side in (0, 1)]
        self._values = [[_view(c.values) for c in column] for column in columns]
        self._offsets = [[_view(c.offsets) for c in column] for column in columns]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> tuple[Ids, Ids]:
        """Return source and target ids of a pair."""
        batch = bisect_right(self._starts, row) - 1
        row -= self._starts[batch]
        src, tgt = self._offsets[0][batch], self._offsets[1][batch]
        return (
            self._values[0][batch][src[row] : src[row + 1]],
            self._values[1][batch][tgt[row] : tgt[row + 1]],
        )

    def lengths(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the number of tokens of source and target, EOS included, (N, 2)."""
        table = np.empty((len(self), 2), dtype=np.int32)
        for side, column in enumerate(self._offsets):
            for start, offsets in zip(self._starts, column, strict=False):
                table[start : start + len(offsets) - 1, side] = np.diff(offsets) + 1
        return table


def _to_arrow(values: Ids) -> pa.Array:
    """Wrap an array; `pa.array` would import pandas to ask whether it is one of its own."""
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _view(array: pa.Array) -> Ids:
    """View the values of an array; its own method to do so imports pandas, some 30 MB."""
    return np.frombuffer(array.buffers()[1], dtype=str(array.type), count=len(array))


def _record_batches(path: Path) -> list[pa.RecordBatch]:
    try:
        with pa.memory_map(str(path)) as source:
            # pyarrow takes a stream that was cut between two batches for a whole one
            last = max(source.size() - len(_END), 0)
            if source.read_at(len(_END), last) != _END:
                raise pa.ArrowInvalid("it ends too early")
            # no threads of pyarrow, which a process that is forked later would lack
            with pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(use_threads=False)) as r:
                if r.schema.names[:2] != ["src", "tgt"]:
                    raise pa.ArrowInvalid(f"its columns are {r.schema.names}")
                return [batch for batch in r if batch.num_rows]
    except FileNotFoundError:
        raise missing(path) from None
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(path, f" ({' '.join(str(error).split())})") from None
