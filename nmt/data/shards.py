"""Shards: files with token ids of sentence pairs, and optionally their text.

A shard is an Arrow IPC stream, which any Arrow reader can open. `MappedShard` maps it to memory.
"""

# N is a number of pairs. In this file, a row is the index of a pair in its shard.

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nmt.config import require_valid
from nmt.data import Lengths
from nmt.errors import DataError, to_one_line
from nmt.runtime.reading import check_regular

IdArray = np.ndarray[Any, np.dtype[Any]]
FlatNumbers = tuple[IdArray, IdArray]
"""N lists of numbers: one array with all numbers, and the offsets of the lists (N + 1,).

List i is `numbers[offsets[i] : offsets[i + 1]]`.
"""
FlatIds = FlatNumbers
"""The token ids of one side of N pairs, one list for each line."""

_BATCH_ROWS = 50_000  # number of pairs of a record batch; the last one of a shard may have fewer
_MAX_PAIRS = 1 << 40
_ID_COLUMNS = ["src", "tgt"]
_TEXT_COLUMNS = ["src_text", "tgt_text"]  # optional
_ALIGNMENT_COLUMN = "alignment"  # optional: source word, target word, source word, ...
_ID_TYPES = (pa.list_(pa.uint16()), pa.list_(pa.int32()))  # for small and large vocabularies
_ALIGNMENT_TYPE = _ID_TYPES[0]  # word numbers are small
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # marker in Arrow's IPC format


@dataclass
class ShardFile:
    """The description of one shard in `meta.json`."""

    file: str
    pairs: int = 0
    src_tokens: int = 0  # number of tokens without EOS
    tgt_tokens: int = 0
    longest: int = 0  # number of tokens of the longest side, EOS included
    bytes: int = 0
    sha256: str = ""

    def __post_init__(self) -> None:
        is_name = self.file not in ("", ".", "..") and Path(self.file).name == self.file
        require_valid(is_name, "file", self.file, "must be the name of a file in the data folder")
        is_in_range = 0 <= self.pairs <= _MAX_PAIRS
        require_valid(is_in_range, "pairs", self.pairs, f"must be from 0 to {_MAX_PAIRS:,}")


class ShardWriter:
    """Writes one shard in a `with` block. After the block, `shard` describes the file.

    The file exists as soon as the block begins, so callers write to a temporary name and rename the
    file. The bytes depend only on the pairs, not on how they are divided among calls of `add`.
    """

    def __init__(
        self,
        path: Path,
        src_vocab_size: int,
        tgt_vocab_size: int,
        *,
        has_text: bool = False,
        has_alignment: bool = False,
    ) -> None:
        fields = [("src", _id_list_type(src_vocab_size)), ("tgt", _id_list_type(tgt_vocab_size))]
        if has_text:
            fields += [(name, pa.string()) for name in _TEXT_COLUMNS]
        if has_alignment:
            fields.append((_ALIGNMENT_COLUMN, _ALIGNMENT_TYPE))
        self._path = path
        self._schema = pa.schema(fields)
        self._pending: list[pa.RecordBatch] = []  # rows that wait for a full record batch
        self.shard = ShardFile(path.name)

    def __enter__(self) -> ShardWriter:
        self._file = pa.OSFile(str(self._path), "wb")
        self._writer = pa.ipc.new_stream(self._file, self._schema)
        return self

    def add(
        self,
        src: FlatIds,
        tgt: FlatIds,
        texts: tuple[Sequence[str], Sequence[str]] | None = None,
        alignment: FlatNumbers | None = None,
    ) -> None:
        """Append N pairs.

        The ids of `src` and `tgt` have no BOS and EOS, and their offsets start at 0. `texts` are
        required if the file has text columns. `alignment` is required if the file has an alignment
        column, and has a list of word numbers for each pair.
        """
        _, src_offsets = src
        num_pairs = len(src_offsets) - 1
        start = 0
        while start < num_pairs:
            num_pending_rows = self.shard.pairs % _BATCH_ROWS
            num_missing_rows = _BATCH_ROWS - num_pending_rows  # until the record batch is full
            end = min(num_pairs, start + num_missing_rows)
            columns = [
                self._make_column("src", src, start, end),
                self._make_column("tgt", tgt, start, end),
            ]
            for lines in texts or ():
                columns.append(pa.array(lines[start:end], pa.string()))
            if alignment is not None:
                columns.append(self._make_column(_ALIGNMENT_COLUMN, alignment, start, end))
            self._pending.append(pa.record_batch(columns, schema=self._schema))
            self.shard.pairs += end - start
            if self.shard.pairs % _BATCH_ROWS == 0:
                self._write_batch()
            start = end
        self.shard.src_tokens += len(src[0])
        self.shard.tgt_tokens += len(tgt[0])

    def _make_column(self, name: str, lists: FlatNumbers, start: int, end: int) -> pa.ListArray:
        """Convert lists `start` up to `end` to Arrow. For lists of ids, update `shard.longest`."""
        numbers, offsets = lists
        offsets = offsets[start : end + 1]
        if name in _ID_COLUMNS:
            max_length = int(np.diff(offsets).max()) + 1  # 1 for EOS
            self.shard.longest = max(self.shard.longest, max_length)
        number_type = self._schema.field(name).type.value_type
        column_numbers = numbers[offsets[0] : offsets[-1]]
        # raises if the type is too small for a number
        values = _to_arrow(column_numbers).cast(number_type)
        value_offsets = _to_arrow((offsets - offsets[0]).astype(np.int32))
        return pa.ListArray.from_arrays(value_offsets, values)

    def _write_batch(self) -> None:
        """Write the pending pairs as one record batch."""
        table = pa.Table.from_batches(self._pending, self._schema).combine_chunks()
        self._writer.write_table(table)
        self._pending.clear()

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            self._file.close()  # the caller removes the incomplete file
            return
        with self._file:
            if self._pending:
                self._write_batch()
            self._writer.close()
        content = np.memmap(self._path, np.uint8, mode="r")
        self.shard.bytes = len(content)
        self.shard.sha256 = hashlib.sha256(content.data).hexdigest()


class MappedShard:
    """A memory-mapped shard. Raises `DataError` if the file is missing or damaged."""

    def __init__(self, path: Path) -> None:
        options = pa.ipc.IpcReadOptions(use_threads=False)  # threads would not survive a later fork
        # the first row of each record batch, and as the last item the number of all rows
        self._batch_starts = [0]
        # each list has one item for each record batch
        self._batches: list[tuple[FlatIds, FlatIds]] = []  # source and target
        self._alignments: list[FlatNumbers] = []  # empty if the file has no alignments
        self._texts: list[list[pa.Array]] = []  # source and target, or [] without text
        try:
            check_regular(path)
            # the columns keep the file mapped after the block
            with pa.memory_map(str(path)) as source:
                # pyarrow accepts a stream that was truncated between two batches
                marker_start = max(source.size() - len(_END_OF_STREAM), 0)
                if source.read_at(len(_END_OF_STREAM), marker_start) != _END_OF_STREAM:
                    raise pa.ArrowInvalid("it ends too early")
                with pa.ipc.open_stream(source, options=options) as reader:
                    _check_schema(reader.schema)
                    for batch in reader:
                        self._add_batch(batch)
        except FileNotFoundError:
            raise unusable_file_error(path, "is missing") from None
        except (pa.ArrowException, OSError, ValueError) as error:
            raise unusable_file_error(path, f"is damaged ({to_one_line(error)})") from None

    def _add_batch(self, batch: pa.RecordBatch) -> None:
        """Check a record batch, and add its columns to the lists of all batches."""
        batch.validate(full=True)  # offsets of lists, and UTF-8
        if any(column.null_count for column in batch.columns):
            raise pa.ArrowInvalid("a value is missing")
        if not batch.num_rows:
            return
        names = batch.schema.names
        self._batch_starts.append(self._batch_starts[-1] + batch.num_rows)
        self._texts.append([batch.column(name) for name in _TEXT_COLUMNS if name in names])
        if _ALIGNMENT_COLUMN in names:
            numbers, offsets = _to_numpy(batch.column(_ALIGNMENT_COLUMN))
            lengths = np.diff(offsets)
            if (lengths % 2 == 1).any():  # a link consists of two numbers
                raise pa.ArrowInvalid("an alignment has half a link")
            self._alignments.append((numbers, offsets))
        src = _to_numpy(batch.column("src"))
        tgt = _to_numpy(batch.column("tgt"))
        self._batches.append((src, tgt))

    def __len__(self) -> int:
        return self._batch_starts[-1]

    def __getitem__(self, row: int) -> tuple[IdArray, IdArray]:
        """Return source and target ids of a pair."""
        batch_index, i = self._find_row(row)
        (src, src_offsets), (tgt, tgt_offsets) = self._batches[batch_index]
        src_ids = src[src_offsets[i] : src_offsets[i + 1]]
        tgt_ids = tgt[tgt_offsets[i] : tgt_offsets[i + 1]]
        return src_ids, tgt_ids

    def alignment(self, row: int) -> IdArray | None:
        """Return the links of a pair (L, 2), each a source word and a target word.

        Returns None if the file has no column of alignments.
        """
        if not self._alignments:
            return None
        batch_index, i = self._find_row(row)
        numbers, offsets = self._alignments[batch_index]
        return numbers[offsets[i] : offsets[i + 1]].reshape(-1, 2)

    def texts(self, row: int) -> tuple[str, ...]:
        """Return the text of source and target of a pair, or () if the file has no text."""
        batch_index, i = self._find_row(row)
        return tuple(column[i].as_py() for column in self._texts[batch_index])

    def _find_row(self, row: int) -> tuple[int, int]:
        """Return the index of the record batch of a row, and the index of the row in the batch."""
        batch_index = bisect_right(self._batch_starts, row) - 1
        return batch_index, row - self._batch_starts[batch_index]

    def largest_ids(self) -> tuple[int, int]:
        """Return the largest id of the source and of the target.

        A damaged file may have negative ids. They count as very large ids. The caller detects them
        by comparing the result with the size of the vocabulary.
        """
        largest_src = 0
        largest_tgt = 0
        for (src, _), (tgt, _) in self._batches:
            largest_src = max(largest_src, int(_as_unsigned(src).max(initial=0)))
            largest_tgt = max(largest_tgt, int(_as_unsigned(tgt).max(initial=0)))
        return largest_src, largest_tgt

    def lengths(self) -> Lengths:
        """Return the number of tokens of source and target, EOS included, (N, 2)."""
        lengths = [np.empty((0, 2), dtype=np.int32)]  # a shard may have no record batch
        for (_, src_offsets), (_, tgt_offsets) in self._batches:
            src_lengths = np.diff(src_offsets) + 1  # 1 for EOS
            tgt_lengths = np.diff(tgt_offsets) + 1
            lengths.append(np.stack([src_lengths, tgt_lengths], axis=1))  # (rows, 2)
        return np.concatenate(lengths)


def _as_unsigned(ids: IdArray) -> IdArray:
    """Reinterpret the bytes of ids as unsigned integers: -1 becomes the largest one."""
    unsigned_type = f"u{ids.itemsize}"  # such as u4 for int32
    return ids.view(unsigned_type)


def _check_schema(schema: pa.Schema) -> None:
    """Raise `ArrowInvalid` unless a file has columns of ids.

    Columns of text and a column of alignments are optional.
    """
    names = [name for name in schema.names if name != _ALIGNMENT_COLUMN]
    valid_names = (_ID_COLUMNS, _ID_COLUMNS + _TEXT_COLUMNS)  # without and with text
    is_valid = names in valid_names
    for column in schema:
        if column.name in _TEXT_COLUMNS:
            has_valid_type = column.type == pa.string()
        else:
            has_valid_type = column.type in _ID_TYPES  # an alignment is a list of numbers too
        is_valid = is_valid and has_valid_type
    if not is_valid:
        columns = [f"{column.name}: {column.type}" for column in schema]
        raise pa.ArrowInvalid(f"its columns are {', '.join(columns)}")


def _id_list_type(vocab_size: int) -> pa.DataType:
    """Return the type of a column of ids: lists of uint16 if all ids fit, otherwise of int32."""
    id_type = pa.uint16() if vocab_size <= 1 << 16 else pa.int32()
    return pa.list_(id_type)


def _to_arrow(values: IdArray) -> pa.Array:
    """Wrap an array without a copy. `pa.array` would import pandas, which takes 30 MB."""
    arrow_type = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(arrow_type, len(values), [None, pa.py_buffer(values)])


def _to_numpy(column: pa.ListArray) -> FlatNumbers:
    """Return the numbers and offsets of a column of lists without a copy."""
    return _share_memory(column.values), _share_memory(column.offsets)


def _share_memory(array: pa.Array) -> IdArray:
    """Return a NumPy array with the memory of an Arrow array. `to_numpy` would import pandas."""
    _, values = array.buffers()  # the first buffer says which values are missing
    return np.frombuffer(values, dtype=str(array.type), count=len(array))


def unusable_file_error(path: Path, problem: str = "is damaged") -> DataError:
    """Return the error for a file of a data folder that is missing or damaged."""
    return DataError(f"{path} {problem}; run nmt-preprocess again")
