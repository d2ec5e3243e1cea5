"""Find or count repeated training pairs, in constant memory.

Each task writes the 64-bit hashes of its pairs to sorted files. To compare them, the range of
hashes is divided into intervals of about half a million pairs, and one interval at a time is read
from all files. Among 10^9 pairs two different pairs share a hash with a probability of 3 %.
"""

# N pairs

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from nmt.config import Duplicates
from nmt.runtime.files import replace_file

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Rows = np.ndarray[Any, np.dtype[np.integer[Any]]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

UNITS = ("pairs", "sources", "targets")
"""The texts that are compared: both sides of a pair, or one."""

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio; it has to be odd
PAIRS_PER_FILE = 1 << 19
PAIRS_PER_INTERVAL = 1 << 19


def hash_sides(src: Sequence[str], tgt: Sequence[str]) -> Hashes:
    """Return the hashes (N, 3) of each pair, its source and its target."""
    sources = _hash(src)
    targets = _hash(tgt)
    return np.stack([sources + targets * _ODD, sources, targets], axis=1)


def hash_duplicates(src: Sequence[str], tgt: Sequence[str], compared: Duplicates) -> Hashes:
    """Return hashes (N,) that are equal for duplicates; `compared` is pair, src or tgt."""
    if compared is Duplicates.pair:
        return hash_sides(src, tgt)[:, 0]
    return _hash(src if compared is Duplicates.src else tgt)


def _hash(texts: Sequence[str]) -> Hashes:
    xxh3 = xxhash.xxh3_64_intdigest
    return np.fromiter((xxh3(text.encode()) for text in texts), np.uint64, len(texts))


def hash_forms(src: Sequence[str], tgt: Sequence[str]) -> Hashes:
    """Return the hashes (N, 2) of normal forms of both sides; 0 for the empty form."""
    hashes = np.stack([_hash(src), _hash(tgt)], axis=1)
    hashes[hashes == _hash([""])] = 0
    return hashes


class HashWriter(AbstractContextManager["HashWriter"]):
    """Writes the hashes of one task into `folder`, over the hashes of an earlier run."""

    def __init__(self, folder: Path, task: int) -> None:
        self._folder = folder
        self._task = task
        self._pending: dict[str, list[np.ndarray[Any, Any]]] = {}  # by column
        self._num_pending = 0
        self._num_files = 0

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self._num_pending:
            self._write()

    def add_sides(self, hashes: Hashes) -> None:
        """Add the hashes (N, 3) of `hash_sides`, to count repeated pairs."""
        self._add(dict(zip(UNITS, hashes.T, strict=True)))

    def add_rows(self, hashes: Hashes, rows: Rows, forms: Hashes | None = None) -> None:
        """Add hashes (N,) and the rows (N,) in the task, in reading order, to find duplicates.

        `forms` (N, 2) are the hashes of `hash_forms`, with which pairs are left out later.
        """
        columns: dict[str, np.ndarray[Any, Any]] = {"pairs": hashes, "rows": rows.astype("<u4")}
        if forms is not None:
            columns["forms"] = forms
        self._add(columns)

    def _add(self, columns: dict[str, np.ndarray[Any, Any]]) -> None:
        for name, column in columns.items():
            self._pending.setdefault(name, []).append(column)
        self._num_pending += len(columns["pairs"])
        if self._num_pending >= PAIRS_PER_FILE:
            self._write()

    def _write(self) -> None:
        """Write the pending hashes, sorted: rows with their pairs, or each column by itself."""
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
    numbers = dict.fromkeys(UNITS, 0)
    for unit in UNITS:
        for slices in _read_intervals(list(folder.glob(f"*.{unit}"))):
            hashes = np.sort(_concatenate(slices, "hashes"))
            numbers[unit] += int(np.count_nonzero(hashes[1:] == hashes[:-1]))
    return numbers


def find_duplicates(folder: Path, held_out: Hashes | None = None) -> None:
    """Write to `folder` which rows of each task repeat an earlier pair.

    Pairs with a normal form in `held_out`, which the filters drop first, are left out.
    """
    for path in folder.glob("*.seen"):  # of an interrupted run
        path.unlink()
    files = sorted(folder.glob("*.pairs"), key=lambda path: [*map(int, path.name.split(".")[:2])])
    for slices in _read_intervals(files):
        hashes = _concatenate(slices, "hashes")
        rows = _concatenate(slices, "rows")
        tasks = _concatenate(slices, "tasks")
        if held_out is not None:
            stays = ~np.isin(_concatenate(slices, "forms"), held_out).any(axis=1)
            hashes = hashes[stays]
            rows = rows[stays]
            tasks = tasks[stays]
        order = np.argsort(hashes, kind="stable")  # keeps the reading order of equal hashes
        is_equal = hashes[order[1:]] == hashes[order[:-1]]
        repeated = np.sort(order[1:][is_equal])
        for task in np.unique(tasks[repeated]).tolist():
            with folder.joinpath(f"{task}.seen").open("ab") as stream:
                rows[repeated[tasks[repeated] == task]].tofile(stream)


def read_seen(folder: Path, task: int, num_rows: int) -> Flags:
    """Return which rows (num_rows,) of a task repeat an earlier pair, after `find_duplicates`."""
    seen = np.zeros(num_rows, bool)
    path = folder / f"{task}.seen"
    if path.exists():
        seen[np.fromfile(path, "<u4")] = True
    return seen


@dataclass(frozen=True)
class _Slice:
    """The hashes of one file in an interval."""

    path: Path
    start: int  # of the interval in the file
    hashes: Hashes

    @property
    def tasks(self) -> Any:
        """The task that wrote the file, for each hash, (N,)."""
        return np.full(len(self.hashes), int(self.path.name.split(".")[0]))

    @property
    def rows(self) -> Any:
        """The rows of the hashes in the task, (N,)."""
        return self._read("rows", "<u4")

    @property
    def forms(self) -> Any:
        """The hashes of the normal forms of the same pairs, (N, 2)."""
        return self._read("forms", "(2,)<u8")

    def _read(self, column: str, dtype: str) -> Any:
        values = np.memmap(self.path.with_suffix(f".{column}"), dtype, mode="r")
        return values[self.start : self.start + len(self.hashes)].copy()


def _concatenate(slices: list[_Slice], name: str) -> Any:
    """Concatenate an array of all slices of an interval, (N,) or (N, 2)."""
    return np.concatenate(list(map(attrgetter(name), slices)))


def _read_intervals(paths: list[Path]) -> Iterator[list[_Slice]]:
    """Divide files of sorted hashes at the same values; yield the slices of each interval."""
    num_pairs = sum(path.stat().st_size for path in paths) // 8
    num_intervals = -(-num_pairs // PAIRS_PER_INTERVAL)
    starts = [0] * len(paths)
    for number in range(1, num_intervals + 1):
        largest = np.uint64(number * (1 << 64) // num_intervals - 1)
        slices = []
        for i, path in enumerate(paths):
            hashes = np.memmap(path, "<u8", mode="r")
            end = int(np.searchsorted(hashes, largest, side="right"))
            # a copy, so that only one file is mapped at a time
            slices.append(_Slice(path, starts[i], hashes[starts[i] : end].copy()))
            starts[i] = end
        yield slices
