"""Duplicates of hashed pairs equal duplicates in a set of texts, however the text is divided."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from nmt.config import Duplicates
from nmt.preprocess import duplicates
from nmt.preprocess.duplicates import (
    HashWriter,
    count_repeats,
    find_duplicates,
    hash_all_units,
    hash_compared_unit,
    read_repeats,
)

Pair = tuple[str, str]
KEYS = {
    Duplicates.pair: lambda pair: pair,
    Duplicates.src: lambda pair: pair[0],
    Duplicates.tgt: lambda pair: pair[1],
}


def draw_tasks(seed: int) -> dict[int, list[Pair]]:
    """Draw tasks, whose numbers do not sort as text; some are empty."""
    draw = random.Random(seed)
    words = [f"wört {number}" for number in range(20)]
    tasks = {}
    for task in (0, 2, 9, 10, 100, 1_000_000_000):
        size = draw.choice([0, 1, 12, 40])
        src = draw.choices(words, k=size)
        tasks[task] = list(zip(src, draw.choices(words, k=size), strict=True))
    return tasks


def write_tasks(folder: Path, tasks: dict[int, list[Pair]], kind: Duplicates) -> None:
    """Write hashes of four pairs at a time; `keep` writes the hashes of `count_repeats`."""
    folder.mkdir()
    for task, pairs in tasks.items():
        with HashWriter(folder, task) as writer:
            for start in range(0, len(pairs), 4):
                src, tgt = zip(*pairs[start : start + 4], strict=True)
                rows = np.arange(start, start + len(src)) * 3  # two of three pairs were dropped
                if kind is Duplicates.keep:
                    writer.add_all_units(hash_all_units(src, tgt))
                else:
                    writer.add_rows(hash_compared_unit(src, tgt, kind), rows)
            if kind is Duplicates.keep:
                writer.add_all_units(hash_all_units([], []))


@pytest.mark.parametrize("sizes", [(3, 25), (1 << 20, 1 << 20)], ids=["many files", "one file"])
def test_all_but_the_first_in_the_order_of_reading_are_found_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    monkeypatch.setattr(duplicates, "PAIRS_PER_FILE", sizes[0])
    monkeypatch.setattr(duplicates, "PAIRS_PER_INTERVAL", sizes[1])
    for seed, kind in enumerate(KEYS):
        folder = tmp_path / kind.value
        tasks = draw_tasks(seed)
        write_tasks(folder, tasks, kind)
        find_duplicates(folder)
        for path in folder.glob("*.seen"):  # as after an interruption
            path.write_bytes(path.read_bytes() + b"\0")
        find_duplicates(folder)
        earlier = set()
        for task, pairs in tasks.items():
            expected = np.zeros(3 * len(pairs) + 11, bool)
            for row, pair in enumerate(pairs):
                expected[3 * row] = KEYS[kind](pair) in earlier
                earlier.add(KEYS[kind](pair))
            np.testing.assert_array_equal(read_repeats(folder, task, len(expected)), expected)
        assert len(earlier) < sum(map(len, tasks.values()))
    write_tasks(tmp_path / "counted", tasks, Duplicates.keep)
    pairs = list(itertools.chain.from_iterable(tasks.values()))
    numbers = count_repeats(tmp_path / "counted")
    for name, key in zip(("pairs", "sources", "targets"), KEYS.values(), strict=True):
        assert numbers[name] == len(pairs) - len(set(map(key, pairs))), name


def test_a_task_that_failed_leaves_no_file_and_can_be_written_again(tmp_path: Path) -> None:
    find_duplicates(tmp_path)
    assert count_repeats(tmp_path) == {"pairs": 0, "sources": 0, "targets": 0}
    hashes = hash_compared_unit(["a", "a"], ["b", "b"], Duplicates.pair)

    def write_and_fail() -> None:
        with HashWriter(tmp_path, 1) as writer:
            writer.add_rows(hashes, np.arange(2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    assert not list(tmp_path.iterdir())
    for _ in range(2):
        with HashWriter(tmp_path, 1) as writer:
            writer.add_rows(hashes, np.arange(2))
    find_duplicates(tmp_path)
    assert read_repeats(tmp_path, 1, 2).tolist() == [False, True]


def test_swapped_sides_are_another_pair() -> None:
    hashes = hash_all_units(["a", "b", "a", "b", ""], ["b", "a", "a", "b", ""])
    assert len(np.unique(hashes[:, 0])) == 5


def test_the_ends_of_the_range_of_hashes_are_searched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "PAIRS_PER_INTERVAL", 2)
    maximum = 2**64 - 1
    middle = 2**63
    values = [7, maximum, 0, middle, 7, middle - 1, maximum, 0, middle, 8]
    hashes = np.array(values, np.uint64)
    with HashWriter(tmp_path, 1) as writer:
        writer.add_rows(hashes, np.arange(10))
    find_duplicates(tmp_path)
    assert np.flatnonzero(read_repeats(tmp_path, 1, 10)).tolist() == [4, 6, 7, 8]
