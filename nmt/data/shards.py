"""One file of a data folder: pairs of token ids as an Arrow IPC stream with the columns `src` and
`tgt`, written from flat arrays and read by memory map.

Any Arrow reader opens the same file. It knows neither the folder around it nor what ids mean.
"""

# N pairs

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import pyarrow as pa

from nmt.errors import DataError

Ids = np.ndarray[Any, np.dtype[Any]]

_ROWS_A_BATCH = 50_000  # fixed, so that bytes do not depend on how the pairs arrive
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # the end-of-stream marker of Arrow's IPC format


@dataclass(frozen=True)
class Shard:
    """What an index says of one file; tokens do not count EOS, but `longest` does, a side."""

    file: str
    pairs: int
    src_tokens: int
    tgt_tokens: int
    longest: int
    bytes: int
    sha256: str


def id_type(vocab_size: int) -> pa.DataType:
    """Choose the smallest integer type that both Arrow's and numpy's users expect for these ids."""
    return pa.uint16() if vocab_size <= 1 << 16 else pa.int32()


def length_type(longest: int) -> np.dtype[Any]:
    """Choose the smallest type for lengths up to `longest`."""
    return np.dtype(np.uint16 if longest < 1 << 16 else np.int32)


class ShardWriter:
    """Writes one file, in a `with` block; `shard` tells of it afterwards.

    The file is there as soon as the block begins: write beside the place and rename. Equal pairs
    give equal bytes, however they are cut into calls of `add`.
    """

    def __init__(
        self, path: Path, *, src_vocab_size: int, tgt_vocab_size: int, has_text: bool = False
    ) -> None:
        columns = {
            "src": pa.list_(id_type(src_vocab_size)),
            "tgt": pa.list_(id_type(tgt_vocab_size)),
        }
        if has_text:
            columns |= {"src_text": pa.string(), "tgt_text": pa.string()}
        self._path, self._schema = path, pa.schema(list(columns.items()))
        self._num_pairs = self._longest = 0
        self._num_tokens = [0, 0]
        self._forget_waiting()

    def __enter__(self) -> ShardWriter:
        self._file = _HashedFile(self._path.open("wb"))
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._file, mode="w"), self._schema)
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

    def _write_batch(self) -> None:
        columns = []
        for side in (0, 1):
            ids, lengths = np.concatenate(self._ids[side]), np.concatenate(self._lengths[side])
            offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
            np.cumsum(lengths, out=offsets[1:])
            values = _arrow(ids, self._schema.field(side).type.value_type)
            columns.append(pa.ListArray.from_arrays(_arrow(offsets, pa.int32()), values))
            self._num_tokens[side] += len(ids)
            self._longest = max(self._longest, int(lengths.max()) + 1)
        columns += [pa.array(text, pa.string()) for text in self._texts]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._num_pairs += self._num_waiting
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        self._ids: tuple[list[Ids], list[Ids]] = ([], [])
        self._lengths: tuple[list[Ids], list[Ids]] = ([], [])
        self._texts: list[list[str]] = [[] for _ in self._schema.names[2:]]
        self._num_waiting = 0

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

    @property
    def shard(self) -> Shard:
        """What the index says of the file."""
        return Shard(
            file=self._path.name,
            pairs=self._num_pairs,
            src_tokens=self._num_tokens[0],
            tgt_tokens=self._num_tokens[1],
            longest=self._longest,
            bytes=self._file.num_bytes,
            sha256=self._file.digest.hexdigest(),
        )


def _arrow(values: Ids, kind: pa.DataType) -> pa.Array:
    """Return values as Arrow's; `pa.array` would import pandas to ask whether they are its."""
    own = pa.from_numpy_dtype(values.dtype)
    array = pa.Array.from_buffers(own, len(values), [None, pa.py_buffer(values)])
    return array.cast(kind)  # which refuses what does not fit


class _HashedFile:
    """A file that is hashed as it is written; what pyarrow asks of a Python file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest, self.num_bytes = file, hashlib.sha256(), 0

    def write(self, content: Any) -> int:
        self.digest.update(content)
        self.num_bytes += len(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def __enter__(self) -> None:
        self._file.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


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


def _view(array: pa.Array) -> Ids:
    """View the values of an array; its own method to do so imports pandas, some 30 MB."""
    return np.frombuffer(array.buffers()[1], dtype=str(array.type), count=len(array))


def _record_batches(path: Path) -> list[pa.RecordBatch]:
    try:
        with pa.memory_map(str(path)) as source:
            # pyarrow takes a stream that was cut between two batches for a whole one
            if (
                source.size() < len(_END)
                or source.read_at(len(_END), source.size() - len(_END)) != _END
            ):
                raise pa.ArrowInvalid("it ends too early")
            # no threads of pyarrow, which a process that is forked later would lack
            with pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(use_threads=False)) as r:
                if r.schema.names[:2] != ["src", "tgt"]:
                    raise pa.ArrowInvalid(f"its columns are {r.schema.names}")
                return [batch for batch in r if batch.num_rows]
    except FileNotFoundError:
        raise DataError(f"{path} is missing; run nmt-preprocess again") from None
    except (pa.ArrowInvalid, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is damaged ({reason}); run nmt-preprocess again") from None
