"""Counts for the report how many pairs, sources and targets came before, where none is dropped.

As in duplicates.py, sorted hashes are compared part by part. 64 bits do for a count: among 10^9
pairs less than one in thirty counts is wrong, by one.
"""

# N pairs

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nmt.preprocess.duplicates import (
    PAIRS_A_FILE,
    hash_texts,
    join_hashes,
    part_ends,
    write_beside,
)

KINDS = ("pairs", "sources", "targets")
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


def hash_sides(src: Sequence[str], tgt: Sequence[str]) -> Hashes:
    """Return 64 bits (N, 3) for each pair, its source and its target."""
    sources, targets = hash_texts(src), hash_texts(tgt)
    return np.stack([join_hashes(sources, targets), sources, targets], axis=1)[:, :, 0]


class UnitRepeats:
    """Writes the hashes of one unit into `folder`; a context manager.

    A unit that is written again, with the same pairs, replaces its files.
    """

    def __init__(self, folder: Path, unit: int) -> None:
        self._folder = folder
        self._unit = unit
        self._waiting: list[Hashes] = []
        self._num_files = 0

    def __enter__(self) -> UnitRepeats:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and any(map(len, self._waiting)):
            self._write()

    def add(self, hashes: Hashes) -> None:
        """Add pairs (N, 3), in any order."""
        self._waiting.append(hashes)
        if sum(map(len, self._waiting)) >= PAIRS_A_FILE:
            self._write()

    def _write(self) -> None:
        columns = np.sort(np.concatenate(self._waiting), axis=0)
        for kind, column in zip(KINDS, columns.T, strict=True):
            name = f"{self._unit}.{self._num_files}.{kind}"
            write_beside(self._folder / name, [column])
        self._waiting = []
        self._num_files += 1


def count_repeats(folder: Path) -> dict[str, int]:
    """Count what came before, by kind, in the files of all units."""
    return {kind: _count(list(folder.glob(f"*.{kind}"))) for kind in KINDS}


def _count(paths: list[Path]) -> int:
    sizes = [path.stat().st_size // 8 for path in paths]
    starts = [0] * len(paths)
    number = 0
    for end in part_ends(sum(sizes)):
        pieces = []
        for place, path in enumerate(paths):
            hashes = np.memmap(path, "<u8", mode="r")
            stop = int(np.searchsorted(hashes, end, side="right"))
            pieces.append(hashes[starts[place] : stop].copy())
            starts[place] = stop
        part = np.sort(np.concatenate(pieces))
        number += int(np.count_nonzero(part[1:] == part[:-1]))
    return number
