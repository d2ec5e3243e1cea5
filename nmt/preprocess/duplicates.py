"""Finds training pairs that have come before, exactly, in memory that does not grow with them.

Each unit of reading writes the hashes of its pairs to files, sorted. To compare, the range of
hashes is cut into parts of about half a million; one part at a time is read from all files.
128 bits make a false match of any two of 10^9 pairs less likely than 10^-20. It knows nothing of
where pairs come from: a pair is a row of a unit, and units have numbers in the order of reading.
"""

# N pairs

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nmt.config import Duplicates

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Rows = np.ndarray[Any, np.dtype[np.integer[Any]]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

Bits = np.ndarray[Any, np.dtype[np.uint8]]

_BYTES_A_PAIR = 20  # a hash and a row
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio; any odd number would do
PAIRS_A_FILE = 1 << 19
PAIRS_A_PART = 1 << 19


def hash_texts(texts: Sequence[str]) -> Hashes:
    """Return 128 bits (N, 2) for each text (BLAKE2b, RFC 7693)."""
    blake2b = hashlib.blake2b
    digests = [blake2b(text.encode(), digest_size=16).digest() for text in texts]
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


def join_hashes(src: Hashes, tgt: Hashes) -> Hashes:
    """Return 128 bits (N, 2) for each pair of hashed texts; swapped sides give others."""
    return src + tgt * _ODD


def hash_pairs(src: Sequence[str], tgt: Sequence[str], kind: Duplicates) -> Hashes:
    """Return the hashes (N, 2) that are the same for duplicates of this kind, which is not keep."""
    if kind is Duplicates.pair:
        return join_hashes(hash_texts(src), hash_texts(tgt))
    return hash_texts(src if kind is Duplicates.src else tgt)


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
        if kind is None and self._num_waiting:
            self._write()

    def add(self, rows: Rows, hashes: Hashes) -> None:
        """Add pairs (N,), (N, 2) in the order of reading; `rows` count from 0 in the unit."""
        self._waiting.append((hashes, rows.astype("<u4")))
        self._num_waiting += len(rows)
        if self._num_waiting >= PAIRS_A_FILE:
            self._write()

    def _write(self) -> None:
        hashes = np.concatenate([hashes for hashes, _ in self._waiting])
        rows = np.concatenate([rows for _, rows in self._waiting])
        order = np.argsort(hashes[:, 0], kind="stable")
        columns = (column[order] for column in (hashes[:, 0], hashes[:, 1], rows))
        path = self._folder / f"{self._unit}.{self._num_files}.hashes"
        write_beside(path, columns)
        self._waiting, self._num_waiting = [], 0
        self._num_files += 1


def find_duplicates(folder: Path) -> int:
    """Note in `folder` which rows of each unit came before, and return their number.

    Until all duplicates are found the notes stay in memory, at most one bit for each pair that was
    read.
    """
    seen: dict[int, Bits] = {}
    total = 0
    for units, rows in _find_repeated(folder):
        total += len(rows)
        for unit in np.unique(units).tolist():
            seen[unit] = _mark(seen.get(unit, np.zeros(0, np.uint8)), rows[units == unit])
    for unit, bits in seen.items():
        write_beside(_seen_path(folder, unit), [bits])
    return total


def read_seen(folder: Path, unit: int, num_rows: int) -> Flags:
    """Return which rows (num_rows,) of a unit came before, as `find_duplicates` noted it."""
    seen = np.zeros(num_rows, bool)
    path = _seen_path(folder, unit)
    if path.exists():
        bits = np.unpackbits(np.fromfile(path, np.uint8), bitorder="little")[:num_rows]
        seen[: len(bits)] = bits
    return seen


def part_ends(num_pairs: int) -> list[np.uint64]:
    """Cut the range of hashes to parts of about `PAIRS_A_PART` pairs; return the last of each."""
    num_parts = -(-num_pairs // PAIRS_A_PART)
    return [np.uint64(part * (1 << 64) // num_parts - 1) for part in range(1, num_parts + 1)]


def write_beside(path: Path, columns: Iterable[np.ndarray[Any, Any]]) -> None:
    """Write arrays, one after the other, to a file that is there only when it is whole."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as stream:
        for column in columns:
            stream.write(np.ascontiguousarray(column).data)
    os.replace(beside, path)


def _find_repeated(folder: Path) -> Iterator[tuple[Rows, Rows]]:
    """Yield unit and row (N,) of the pairs that came before, part by part."""
    files = sorted(folder.glob("*.hashes"), key=_unit_and_number)
    num_pairs = sum(path.stat().st_size for path in files) // _BYTES_A_PAIR
    starts = [0] * len(files)
    for end in part_ends(num_pairs):
        pieces = []
        for place, path in enumerate(files):
            high, low, rows = _open(path)
            stop = int(np.searchsorted(high, end, side="right"))
            here = slice(starts[place], stop)
            starts[place] = stop
            units = np.full(stop - here.start, _unit_and_number(path)[0])
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


def _unit_and_number(path: Path) -> tuple[int, int]:
    """Read from the name of a file of hashes where it stands in the order of reading."""
    unit, number, _ = path.name.split(".")
    return int(unit), int(number)


def _seen_path(folder: Path, unit: int) -> Path:
    return folder / f"{unit}.seen"
