"""Finds training pairs that have come before, in memory that does not grow with them, or counts
them where none is dropped.

Each shard task writes the 64-bit hashes of its pairs to sorted files. To compare, the range of
hashes is cut into parts of about half a million; one part at a time is read from all files. Among
10^9 pairs there are two different ones with the same hash with a probability of 3 %.
"""

# N pairs

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from nmt.config import Duplicates
from nmt.runtime.files import replace_file

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Rows = np.ndarray[Any, np.dtype[np.integer[Any]]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

KINDS = ("pairs", "sources", "targets")
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio; any odd number would do
PAIRS_A_FILE = 1 << 19
PAIRS_A_PART = 1 << 19


def hash_sides(src: Sequence[str], tgt: Sequence[str]) -> Hashes:
    """Return the hashes (N, 3) of each pair, its source and its target; order matters."""
    sources, targets = _hash(src), _hash(tgt)
    return np.stack([sources + targets * _ODD, sources, targets], axis=1)


def hash_duplicates(src: Sequence[str], tgt: Sequence[str], kind: Duplicates) -> Hashes:
    """Return the hashes (N, 1) that are the same for duplicates of this kind, which is not keep."""
    if kind is Duplicates.pair:
        return hash_sides(src, tgt)[:, :1]
    return _hash(src if kind is Duplicates.src else tgt)[:, None]


def _hash(texts: Sequence[str]) -> Hashes:
    xxh3 = xxhash.xxh3_64_intdigest
    return np.fromiter((xxh3(text.encode()) for text in texts), np.uint64, len(texts))


class HashWriter(AbstractContextManager["HashWriter"]):
    """Writes the hashes of one task into `folder`, over those of an earlier run."""

    def __init__(self, folder: Path, task: int) -> None:
        self._folder, self._task = folder, task
        self._waiting: list[tuple[Hashes, Rows | None]] = []
        self._num_waiting = self._num_files = 0

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and self._num_waiting:
            self._write()

    def add(self, hashes: Hashes, rows: Rows | None = None) -> None:
        """Add pairs: (N, 3) to count repeated ones, or (N, 1) to find them, in the order of
        reading, with their rows (N,) in the task from 0.
        """
        self._waiting.append((hashes, rows))
        self._num_waiting += len(hashes)
        if self._num_waiting >= PAIRS_A_FILE:
            self._write()

    def _write(self) -> None:
        hashes = np.concatenate([hashes for hashes, _ in self._waiting])
        columns: dict[str, np.ndarray[Any, Any]]
        if rows := [rows for _, rows in self._waiting if rows is not None]:
            order = np.argsort(hashes[:, 0], kind="stable")
            columns = {"pairs": hashes[order, 0], "rows": np.concatenate(rows)[order].astype("<u4")}
        else:
            columns = dict(zip(KINDS, np.sort(hashes, axis=0).T, strict=True))
        for name, column in columns.items():
            path = self._folder / f"{self._task}.{self._num_files}.{name}"
            with replace_file(path) as temporary:
                column.tofile(temporary)
        self._waiting, self._num_waiting = [], 0
        self._num_files += 1


def count_repeats(folder: Path) -> dict[str, int]:
    """Count the pairs, sources and targets that came before, in the files of all tasks."""
    numbers = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        for parts in _parts(list(folder.glob(f"*.{kind}"))):
            part = np.sort(np.concatenate([hashes for _, _, hashes in parts]))
            numbers[kind] += int(np.count_nonzero(part[1:] == part[:-1]))
    return numbers


def find_duplicates(folder: Path) -> None:
    """Note in `folder` which rows of each task came before."""
    for path in folder.glob("*.seen"):  # of a run that was interrupted here
        path.unlink()
    files = sorted(folder.glob("*.pairs"), key=lambda path: [*map(int, path.name.split(".")[:2])])
    for parts in _parts(files):
        hashes = np.concatenate([hashes for _, _, hashes in parts])
        order = np.argsort(hashes, kind="stable")  # keeps the order of reading of equal ones
        same = hashes[order[1:]] == hashes[order[:-1]]
        is_repeated = np.zeros(len(hashes), bool)
        is_repeated[order[1:][same]] = True
        ends = np.cumsum([len(hashes) for _, _, hashes in parts])[:-1]
        for (path, start, _), mask in zip(parts, np.split(is_repeated, ends), strict=True):
            rows = np.memmap(path.with_suffix(".rows"), "<u4", mode="r")
            with folder.joinpath(path.name.split(".")[0] + ".seen").open("ab") as stream:
                rows[start : start + len(mask)][mask].tofile(stream)


def read_seen(folder: Path, task: int, num_rows: int) -> Flags:
    """Return which rows (num_rows,) of a task came before, as `find_duplicates` noted it."""
    seen = np.zeros(num_rows, bool)
    if (path := folder / f"{task}.seen").exists():
        seen[np.fromfile(path, "<u4")] = True
    return seen


def _parts(paths: list[Path]) -> Iterator[list[tuple[Path, int, Hashes]]]:
    """Cut files of sorted hashes at the same values, into parts of about `PAIRS_A_PART` pairs.

    Yields for each part the files, where the part starts in them, and its hashes.
    """
    num_pairs = sum(path.stat().st_size for path in paths) // 8
    num_parts = -(-num_pairs // PAIRS_A_PART)
    starts = [0] * len(paths)
    for number in range(1, num_parts + 1):
        last = np.uint64(number * (1 << 64) // num_parts - 1)
        parts = []
        for i, path in enumerate(paths):
            hashes = np.memmap(path, "<u8", mode="r")
            stop = int(np.searchsorted(hashes, last, side="right"))
            # a copy, so that no more than one file is mapped
            parts.append((path, starts[i], hashes[starts[i] : stop].copy()))
            starts[i] = stop
        yield parts
