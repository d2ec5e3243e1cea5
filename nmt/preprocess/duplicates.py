"""Find or count repeated training pairs, in constant memory.

Processes share the work. A task takes one span, a range of consecutive pairs of a corpus (see
`nmt.preprocess.chunks`), and writes the 64-bit hashes of its pairs to sorted files. The range of
hashes is then divided into intervals with about half a million pairs each. One interval at a time
is read from all files, so equal hashes are always compared. Among 10^9 different pairs, the
probability that any two share a hash is 3 %.
"""

# In shapes, N is a number of pairs.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from nmt.config import Duplicates
from nmt.errors import DamagedError
from nmt.runtime.files import replace_file
from nmt.runtime.reading import open_regular

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Rows = np.ndarray[Any, np.dtype[np.integer[Any]]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

COMPARED_UNITS = ("pairs", "sources", "targets")
"""Repeats are counted for whole pairs, for sources and for targets."""

# Factor of the target's hash in the hash of a pair: 2^64 / golden ratio. It is odd, so that
# different hashes have different products. Without a factor, the pairs (a, b) and (b, a) would have
# the same hash.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
PAIRS_PER_FILE = 1 << 19  # a file is written when at least this many pairs are pending
# A pair takes at most 16 bytes, in a file of `forms`. A file ends with a whole chunk, so it may
# have more than PAIRS_PER_FILE pairs, but less than twice as many.
_MAX_FILE_BYTES = 2 * 16 * PAIRS_PER_FILE
PAIRS_PER_INTERVAL = 1 << 19
_REPEATS_SUFFIX = ".seen"  # suffix of the files that `find_duplicates` writes
# `forms` has two little-endian numbers of 64 bits in a row, for source and target
_COLUMN_DTYPES = {"rows": "<u4", "forms": "(2,)<u8", "scores": "<f8"}


def hash_all_units(src: Sequence[str], tgt: Sequence[str]) -> Hashes:
    """Return the hashes (N, 3) of each pair, its source and its target: the `COMPARED_UNITS`."""
    src_hashes = _hash(src)
    tgt_hashes = _hash(tgt)
    pair_hashes = src_hashes + tgt_hashes * _MULTIPLIER
    return np.stack([pair_hashes, src_hashes, tgt_hashes], axis=1)


def hash_compared_unit(src: Sequence[str], tgt: Sequence[str], compared: Duplicates) -> Hashes:
    """Return the hashes (N,) of pairs, sources or targets, as `compared` says."""
    if compared is Duplicates.src:
        return _hash(src)
    if compared is Duplicates.tgt:
        return _hash(tgt)
    return hash_all_units(src, tgt)[:, 0]


def _hash(texts: Sequence[str]) -> Hashes:
    """Return the hash of each text (N,)."""
    hashes = (xxhash.xxh3_64_intdigest(text.encode()) for text in texts)
    return np.fromiter(hashes, np.uint64, len(texts))


def hash_normal_forms(forms: Sequence[str]) -> Hashes:
    """Return the hashes (N,) of results of `nmt.preprocess.characters.normal_form`.

    The hash of an empty form is 0, which matches no held-out sentence: held-out sentences with an
    empty form are not hashed.
    """
    hashes = _hash(forms)
    empty_hash = _hash([""])[0]
    hashes[hashes == empty_hash] = 0
    return hashes


class HashWriter(AbstractContextManager["HashWriter"]):
    """Writes the hashes of one task to sorted files `TASK.NUMBER.COLUMN` in `folder`.

    Overwrites the files that an interrupted run of the same task left.
    """

    def __init__(self, folder: Path, task: int) -> None:
        self._folder = folder
        self._task = task
        self._pending: dict[str, list[np.ndarray[Any, Any]]] = {}  # keys: names of columns
        self._num_pending = 0
        self._num_files = 0

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self._num_pending:
            self._write()

    def add_all_units(self, hashes: Hashes) -> None:
        """Add the hashes (N, 3) that `hash_all_units` returned, to count repeats."""
        self._add({name: hashes[:, i] for i, name in enumerate(COMPARED_UNITS)})

    def add_rows(
        self,
        hashes: Hashes,
        rows: Rows,
        forms: Hashes | None = None,
        scores: np.ndarray[Any, np.dtype[np.float64]] | None = None,
    ) -> None:
        """Add the hashes (N,) of pairs, to find duplicates.

        `rows` (N,) are the numbers of the pairs in the span, in increasing order. `forms` (N, 2)
        are the results of `hash_normal_forms` for source and target, by which `find_duplicates`
        recognizes held-out sentences. Of equal pairs, `find_duplicates` keeps the pair with the
        highest score in `scores` (N,).
        """
        columns: dict[str, np.ndarray[Any, Any]] = {"pairs": hashes, "rows": rows.astype("<u4")}
        if forms is not None:
            columns["forms"] = forms
        if scores is not None:
            columns["scores"] = scores
        self._add(columns)

    def _add(self, columns: dict[str, np.ndarray[Any, Any]]) -> None:
        """Add columns of pairs. Writes a file if at least `PAIRS_PER_FILE` pairs are pending."""
        for name, column in columns.items():
            self._pending.setdefault(name, []).append(column)
        self._num_pending += len(columns["pairs"])
        if self._num_pending >= PAIRS_PER_FILE:
            self._write()

    def _write(self) -> None:
        """Write the pending hashes, sorted.

        If there are rows, sorts all columns by the hash of the pair. Otherwise, sorts each column
        on its own.
        """
        order = None
        if "rows" in self._pending:
            order = np.argsort(np.concatenate(self._pending["pairs"]), kind="stable")
        for name, arrays in self._pending.items():
            column = np.concatenate(arrays)
            column = np.sort(column) if order is None else column[order]
            path = self._folder / f"{self._task}.{self._num_files}.{name}"
            with replace_file(path) as temporary:
                column.tofile(temporary)
        self._pending = {}
        self._num_pending = 0
        self._num_files += 1


def count_repeats(folder: Path) -> dict[str, int]:
    """Count the pairs, sources and targets that repeat an earlier one, over all tasks."""
    num_repeats = dict.fromkeys(COMPARED_UNITS, 0)
    for column in COMPARED_UNITS:
        for slices in _read_intervals(list(folder.glob(f"*.{column}"))):
            hashes = np.sort(np.concatenate([hash_slice.hashes for hash_slice in slices]))
            is_repeat = hashes[1:] == hashes[:-1]  # equal to the previous hash
            num_repeats[column] += int(np.count_nonzero(is_repeat))
    return num_repeats


def find_duplicates(
    folder: Path, held_out: Hashes | None = None, *, has_scores: bool = False
) -> None:
    """For each task, write the rows that repeat a pair to `TASK.seen` in `folder`.

    Of equal pairs, all but one are repeats. The first pair stays, or with `has_scores` the first
    pair with the highest score. `held_out` has the hashes of the normal forms of held-out
    sentences. Pairs with such a sentence are ignored, since another filter drops them.
    """
    for path in folder.glob(f"*{_REPEATS_SUFFIX}"):  # left by an interrupted run
        path.unlink()
    files = sorted(folder.glob("*.pairs"), key=_task_and_number)
    for slices in _read_intervals(files):
        hashes = np.concatenate([hash_slice.hashes for hash_slice in slices])
        tasks = np.concatenate([hash_slice.tasks for hash_slice in slices])
        rows = _read_column(slices, "rows")
        scores = _read_column(slices, "scores") if has_scores else np.zeros(len(hashes))
        if held_out is not None:
            is_held_out = np.isin(_read_column(slices, "forms"), held_out)  # (N, 2), by side
            is_relevant = ~is_held_out.any(axis=1)
            hashes = hashes[is_relevant]
            rows = rows[is_relevant]
            tasks = tasks[is_relevant]
            scores = scores[is_relevant]
        # The last key comes first: this sorts by hash. Pairs with equal hashes are sorted by
        # descending score, and pairs with equal scores stay in reading order.
        order = np.lexsort((-scores, hashes))  # (N,), indices of pairs
        sorted_hashes = hashes[order]
        is_repeat = sorted_hashes[1:] == sorted_hashes[:-1]  # (N - 1,), for all pairs but the first
        repeats = order[1:][is_repeat]  # indices of pairs
        repeats.sort()  # back to reading order
        repeated_rows = rows[repeats]
        repeated_tasks = tasks[repeats]
        for task in np.unique(repeated_tasks).tolist():
            with folder.joinpath(f"{task}{_REPEATS_SUFFIX}").open("ab") as stream:
                repeated_rows[repeated_tasks == task].tofile(stream)


def read_repeats(folder: Path, task: int, num_rows: int) -> Flags:
    """Read the result of `find_duplicates`: a mask (num_rows,) of the rows that it wrote."""
    is_repeat = np.zeros(num_rows, bool)
    path = folder / f"{task}{_REPEATS_SUFFIX}"
    if path.exists():
        with open_regular(path, max_bytes=4 * num_rows) as file:
            is_repeat[np.fromfile(file, "<u4")] = True
    return is_repeat


def _task_and_number(path: Path) -> tuple[int, int]:
    """Return the task that wrote a file of hashes, and the number of the file in the task."""
    task, file_number, _ = path.name.split(".")
    return int(task), int(file_number)


@dataclass(frozen=True)
class _Slice:
    """The part of a file of hashes that falls into one interval."""

    path: Path
    start: int  # index in the file
    hashes: Hashes

    @property
    def tasks(self) -> Any:
        """The task that wrote the file, for each hash, (N,)."""
        return np.full(len(self.hashes), _task_and_number(self.path)[0])

    def read(self, column: str) -> Any:
        """Read another column of the same pairs: rows (N,), forms (N, 2) or scores (N,)."""
        values = _map_file(self.path.with_suffix(f".{column}"), _COLUMN_DTYPES[column])
        end = self.start + len(self.hashes)
        return values[self.start : end].copy()


def _map_file(path: Path, dtype: str) -> np.ndarray[Any, Any]:
    """Map a file that `HashWriter` wrote. Raises `DamagedError` for other files."""
    try:
        with open_regular(path, max_bytes=_MAX_FILE_BYTES) as file:
            return np.memmap(file, dtype, mode="r")
    except ValueError as error:
        work_dir = path.parent.parent  # the files of hashes are in one of its subfolders
        raise DamagedError(f"{path} is damaged ({error}); remove {work_dir}") from None


def _read_column(slices: list[_Slice], column: str) -> Any:
    """Read a column of all slices as one array."""
    return np.concatenate([hash_slice.read(column) for hash_slice in slices])


def _read_intervals(paths: list[Path]) -> Iterator[list[_Slice]]:
    """Divide the range of hashes into intervals. Yield for each interval a slice of every file.

    The hashes in each file are sorted.
    """
    num_pairs = sum(path.stat().st_size for path in paths) // 8  # a hash has 8 bytes
    num_intervals = math.ceil(num_pairs / PAIRS_PER_INTERVAL)
    starts = [0] * len(paths)
    # hashes are spread evenly from 0 to 2^64 - 1, so intervals of equal width have about the same
    # number of pairs
    num_hash_values = 1 << 64
    for interval_number in range(1, num_intervals + 1):
        next_interval_start = interval_number * num_hash_values // num_intervals
        largest_hash = np.uint64(next_interval_start - 1)  # the largest hash in this interval
        slices = []
        for i, path in enumerate(paths):
            hashes = _map_file(path, "<u8")
            end = int(np.searchsorted(hashes, largest_hash, side="right"))
            # a copy, so that only one file is mapped at a time
            slices.append(_Slice(path, starts[i], hashes[starts[i] : end].copy()))
            starts[i] = end
        yield slices
