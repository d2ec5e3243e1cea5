"""Sentence pairs as token ids on disk: Arrow IPC streams with the columns `src` and `tgt`, opened
by memory map.

Any Arrow reader opens the same files. It knows nothing of text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nmt.errors import DataError

IdPair = tuple[Sequence[int], Sequence[int]]
_ROWS_A_BATCH = 10_000
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # the end-of-stream marker of Arrow's IPC format


def id_type(vocab_size: int) -> pa.DataType:
    """Choose the smallest integer type that both Arrow's and numpy's users expect for these ids."""
    return pa.uint16() if vocab_size <= 1 << 16 else pa.int32()


def write_pairs(path: Path, pairs: Iterable[IdPair], vocab_size: int) -> int:
    """Write pairs of ids to `path` and return their number."""
    column = pa.list_(id_type(vocab_size))
    schema = pa.schema([("src", column), ("tgt", column)])
    num_pairs = 0
    pairs = iter(pairs)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while rows := list(islice(pairs, _ROWS_A_BATCH)):
            columns = [pa.array([row[side] for row in rows], column) for side in (0, 1)]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            num_pairs += len(rows)
    return num_pairs


class _Column:
    """One column of all files: list `i` is `values[offsets[i] : offsets[i + 1]]` of its chunk,
    without a copy.
    """

    def __init__(self, chunks: list[pa.ListArray]) -> None:
        self.values = [chunk.values.to_numpy(zero_copy_only=True) for chunk in chunks]
        self.offsets = [chunk.offsets.to_numpy(zero_copy_only=True) for chunk in chunks]

    def lengths(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.concatenate([np.diff(offsets) for offsets in self.offsets]).astype(np.int32)

    def get(self, chunk: int, row: int) -> np.ndarray[Any, Any]:
        start, end = self.offsets[chunk][row : row + 2]
        return self.values[chunk][start:end]  # type: ignore[no-any-return]


class ParallelData:
    """The pairs of one split, memory-mapped: holds offsets, not sentences."""

    def __init__(self, paths: Sequence[Path]) -> None:
        batches = [batch for path in paths for batch in _record_batches(path)]
        sizes = [batch.num_rows for batch in batches]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        if len(self) == 0:
            raise DataError(
                f"{paths[0].parent} holds no sentence pairs; preprocess the corpus again"
            )
        self._src = _Column([batch.column("src") for batch in batches])
        self._tgt = _Column([batch.column("tgt") for batch in batches])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return source and target ids of a pair, without BOS and EOS."""
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = int(index - self._starts[chunk])
        return self._src.get(chunk, row), self._tgt.get(chunk, row)

    def __iter__(self) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        return (self[i] for i in range(len(self)))

    def lengths(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the number of tokens of source and target, EOS included, (N, 2)."""
        return np.stack([self._src.lengths(), self._tgt.lengths()], axis=1) + np.int32(1)


def _record_batches(path: Path) -> list[pa.RecordBatch]:
    try:
        with pa.memory_map(str(path)) as source:
            # pyarrow takes a stream that was cut between two batches for a whole one
            if (
                source.size() < len(_END)
                or source.read_at(len(_END), source.size() - len(_END)) != _END
            ):
                raise pa.ArrowInvalid("it ends too early")
            with pa.ipc.open_stream(source) as reader:
                if reader.schema.names != ["src", "tgt"]:
                    raise pa.ArrowInvalid(f"its columns are {reader.schema.names}")
                return [batch for batch in reader if batch.num_rows]
    except (pa.ArrowInvalid, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is damaged ({reason}); run nmt-preprocess again") from None


def open_split(data_dir: Path, split: str) -> ParallelData:
    """Open `train` or `valid` of a data folder."""
    paths = sorted(data_dir.glob(f"{split}-*.arrow"))
    if not paths:
        raise DataError(f"{data_dir} has no {split}-*.arrow; make the folder with nmt-preprocess")
    return ParallelData(paths)
