"""Finds training pairs that have come before, exactly, in memory that does not grow with them.

Each unit of reading writes the hashes of its pairs to files, sorted. To compare, the range of
hashes is cut into parts of about a million; a part is read from all files, and sorted, at a time.
128 bits make a false match of any two of 10^9 pairs less likely than 10^-20. It knows nothing of
where pairs come from: a pair is a row of a unit, units are numbered in the order of reading.
"""

# N pairs

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nmt.options import Duplicates

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Rows = np.ndarray[Any, np.dtype[np.integer[Any]]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

Bits = np.ndarray[Any, np.dtype[np.uint8]]

_BYTES_A_PAIR = 20  # a hash and a row
_PAIRS_A_FILE = 1 << 20
_PAIRS_A_PART = 1 << 20


def hash_pairs(src: Sequence[str], tgt: Sequence[str], kind: Duplicates) -> Hashes:
    """Return 128 bits (N, 2) for each pair, or for its source or target alone (BLAKE2b, RFC 7693).

    No text holds a line break. `keep` hashes the pair, so that duplicates can be counted.
    """
    if kind is Duplicates.src:
        texts: Sequence[str] = src
    elif kind is Duplicates.tgt:
        texts = tgt
    else:
        texts = [f"{one}\n{other}" for one, other in zip(src, tgt, strict=True)]
    blake2b = hashlib.blake2b
    digests = [blake2b(text.encode(), digest_size=16).digest() for text in texts]
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


class UnitHashes:
    """Writes the hashes of one unit into `folder`; a context manager.

    A unit that is written again, with the same pairs, replaces its files.
    """

    def __init__(self, folder: Path, unit: int) -> None:
        self._folder = folder
        self._unit = unit
        self._waiting: list[tuple[Hashes, Rows]] = []
        self._num_waiting = 0
        self._num_files = 0

    def __enter__(self) -> UnitHashes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and self._waiting:
            self._write()

    def add(self, rows: Rows, hashes: Hashes) -> None:
        """Add pairs (N,), (N, 2) in the order of reading; `rows` count from 0 in the unit."""
        self._waiting.append((hashes, rows))
        self._num_waiting += len(rows)
        if self._num_waiting >= _PAIRS_A_FILE:
            self._write()

    def _write(self) -> None:
        hashes = np.concatenate([hashes for hashes, _ in self._waiting])
        rows = np.concatenate([rows for _, rows in self._waiting]).astype("<u4")
        order = np.argsort(hashes[:, 0], kind="stable")
        columns = [hashes[order, 0], hashes[order, 1], rows[order]]
        path = self._folder / f"{self._unit:08d}-{self._num_files:04d}.hashes"
        _write_bytes(path, b"".join(column.tobytes() for column in columns))
        self._waiting, self._num_waiting = [], 0
        self._num_files += 1


def count_duplicates(folder: Path) -> int:
    """Count the pairs in all hash files that came before."""
    return sum(len(rows) for _, rows in _find_repeated(folder))


def find_duplicates(folder: Path) -> int:
    """Note in `folder` which rows of each unit came before, and return their number.

    Until all are found the notes stay in memory, at most one bit for each pair that was read.
    """
    seen: dict[int, Bits] = {}
    number = 0
    for units, rows in _find_repeated(folder):
        number += len(rows)
        for unit in np.unique(units).tolist():
            seen[unit] = _mark(seen.get(unit, np.zeros(0, np.uint8)), rows[units == unit])
    for unit, bits in seen.items():
        _write_bytes(_notes(folder, unit), bits.tobytes())
    return number


def read_seen(folder: Path, unit: int, num_rows: int) -> Flags:
    """Return which rows (num_rows,) of a unit came before, as `find_duplicates` noted it."""
    path = _notes(folder, unit)
    bits = np.fromfile(path, np.uint8) if path.exists() else np.zeros(0, np.uint8)
    return np.unpackbits(bits, count=num_rows, bitorder="little").astype(bool)


def _find_repeated(folder: Path) -> Iterator[tuple[Rows, Rows]]:
    """Yield unit and row (N,) of the pairs that came before, part by part of the hashes."""
    paths = sorted(folder.glob("*.hashes"))
    num_pairs = sum(path.stat().st_size for path in paths) // _BYTES_A_PAIR
    num_parts = -(-num_pairs // _PAIRS_A_PART)
    starts = [0] * len(paths)
    for part in range(1, num_parts + 1):
        end = part * (1 << 64) // num_parts - 1  # the last hash of the part
        pieces = []
        for number, path in enumerate(paths):
            high, low, rows = _open(path)
            stop = int(np.searchsorted(high, np.uint64(end), side="right"))
            here = slice(starts[number], stop)
            starts[number] = stop
            units = np.full(stop - here.start, int(path.name.split("-")[0]), np.int64)
            # copies, so that no more than one file is mapped
            pieces.append((high[here].copy(), low[here].copy(), units, rows[here].copy()))
        yield _repeated(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def _repeated(high: Hashes, low: Hashes, units: Rows, rows: Rows) -> tuple[Rows, Rows]:
    """Return those with the hash of an earlier one; (N,) each, in the order of reading."""
    order = np.lexsort((low, high))  # keeps the order of equal ones
    high, low = high[order], low[order]
    same = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    repeated = np.sort(order[1:][same])
    return units[repeated], rows[repeated]


def _open(path: Path) -> tuple[Hashes, Hashes, Rows]:
    """Map the columns of a file of hashes."""
    data = np.memmap(path, np.uint8, mode="r")
    num_pairs = len(data) // _BYTES_A_PAIR
    high, low, rows = np.split(data, [8 * num_pairs, 16 * num_pairs])
    return high.view("<u8"), low.view("<u8"), rows.view("<u4")


def _mark(bits: Bits, rows: Rows) -> Bits:
    """Set the bits of `rows`, which are different ones."""
    num_bytes = max(len(bits), int(rows.max()) // 8 + 1)
    bits = np.pad(bits, (0, num_bytes - len(bits)))
    np.bitwise_or.at(bits, rows >> 3, (1 << (rows & 7)).astype(np.uint8))
    return bits


def _notes(folder: Path, unit: int) -> Path:
    return folder / f"{unit:08d}.seen"


def _write_bytes(path: Path, data: bytes) -> None:
    beside = path.with_suffix(".tmp")
    beside.write_bytes(data)
    os.replace(beside, path)
