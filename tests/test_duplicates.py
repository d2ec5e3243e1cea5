"""Duplicates are those that a set of texts finds, in whatever pieces they come."""

from __future__ import annotations

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
    hash_duplicates,
    hash_sides,
    read_seen,
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
    sizes = {task: draw.choice([0, 1, 12, 60]) for task in (0, 1, 2, 9, 10, 11, 100, 1_000_000_000)}
    return {
        task: [(draw.choice(words), draw.choice(words)) for _ in range(size)]
        for task, size in sizes.items()
    }


def write_tasks(folder: Path, tasks: dict[int, list[Pair]], kind: Duplicates, seed: int) -> None:
    draw = random.Random(seed)
    for name, pairs in tasks.items():
        with HashWriter(folder, name) as writer:
            start = 0
            while start < len(pairs):
                part = pairs[start : start + draw.randint(0, 9)]
                rows = np.arange(start, start + len(part)) * 3  # what lies between was dropped
                sides = [p[0] for p in part], [p[1] for p in part]
                writer.add(hash_duplicates(*sides, kind), rows)
                start += len(part)


@pytest.fixture(params=[(3, 5), (1 << 20, 1 << 20)], ids=["many parts", "one part"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "PAIRS_A_FILE", request.param[0])
    monkeypatch.setattr(duplicates, "PAIRS_A_PART", request.param[1])


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("kind", list(KEYS))
def test_all_but_the_first_in_the_order_of_reading_are_found(
    tmp_path: Path, kind: Duplicates
) -> None:
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        tasks = draw_tasks(seed)
        write_tasks(folder, tasks, kind, seed)
        number = find_duplicates(folder)
        assert find_duplicates(folder) == number  # as after an interruption
        known, total = set(), 0
        for name, pairs in tasks.items():
            seen = read_seen(folder, name, 3 * len(pairs) + 11)
            expected = np.zeros(len(seen), bool)
            for row, pair in enumerate(pairs):
                expected[3 * row] = KEYS[kind](pair) in known
                known.add(KEYS[kind](pair))
            np.testing.assert_array_equal(seen, expected)
            total += int(expected.sum())
        assert number == total > 0


@pytest.mark.usefixtures("_sizes")
def test_counts_are_those_of_sets(tmp_path: Path) -> None:
    tasks = draw_tasks(9)
    for name, pairs in tasks.items():
        with HashWriter(tmp_path, name) as writer:
            for start in range(0, len(pairs), 4):
                src, tgt = zip(*pairs[start : start + 4], strict=True)
                writer.add(hash_sides(src, tgt))
            writer.add(hash_sides([], []))
    pairs = [pair for task in tasks.values() for pair in task]
    assert count_repeats(tmp_path) == {
        "pairs": len(pairs) - len(set(pairs)),
        "sources": len(pairs) - len({src for src, _ in pairs}),
        "targets": len(pairs) - len({tgt for _, tgt in pairs}),
    }


def test_nothing_read_has_no_duplicates(tmp_path: Path) -> None:
    assert find_duplicates(tmp_path) == 0
    assert count_repeats(tmp_path) == {"pairs": 0, "sources": 0, "targets": 0}


def _write_and_fail(folder: Path, hashes: duplicates.Hashes) -> None:
    with HashWriter(folder, 1) as writer:
        writer.add(hashes, np.arange(2))
        raise ZeroDivisionError


def test_a_task_that_failed_leaves_no_file_and_can_be_written_again(tmp_path: Path) -> None:
    hashes = hash_duplicates(["a", "a"], ["b", "b"], Duplicates.pair)
    with pytest.raises(ZeroDivisionError):
        _write_and_fail(tmp_path, hashes)
    assert not list(tmp_path.iterdir())
    for _ in range(2):
        with HashWriter(tmp_path, 1) as writer:
            writer.add(hashes, np.arange(2))
    assert find_duplicates(tmp_path) == 1


def test_the_hash_of_a_pair_depends_on_both_texts_and_their_sides() -> None:
    src, tgt = ["a", "b", "a", "b", ""], ["b", "a", "a", "b", ""]
    hashes = hash_duplicates(src, tgt, Duplicates.pair)
    assert len(np.unique(hashes)) == 5
    np.testing.assert_array_equal(hash_sides(src, tgt)[:, :1], hashes)
    for side, kind in ((1, Duplicates.src), (2, Duplicates.tgt)):
        found = hash_duplicates(src, tgt, kind)[:, 0]
        np.testing.assert_array_equal(hash_sides(src, tgt)[:, side], found)


def test_the_ends_of_the_range_of_hashes_are_searched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "PAIRS_A_PART", 2)
    most, middle = 2**64 - 1, 2**63
    hashes = np.array([[7, most, 0, middle, 7, middle - 1, most, 0, middle, 8]], np.uint64).T
    with HashWriter(tmp_path, 1) as writer:
        writer.add(hashes, np.arange(10))
    assert find_duplicates(tmp_path) == 4
    assert np.flatnonzero(read_seen(tmp_path, 1, 10)).tolist() == [4, 6, 7, 8]
