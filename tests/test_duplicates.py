"""Duplicates are those that a set of texts finds, in whatever pieces they come."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from nmt.config import Duplicates
from nmt.preprocess import duplicates, repeats
from nmt.preprocess.duplicates import (
    UnitHashes,
    find_duplicates,
    hash_pairs,
    join_hashes,
    read_seen,
)
from nmt.preprocess.repeats import UnitRepeats, count_repeats, hash_sides

Pair = tuple[str, str]
KEYS = {
    Duplicates.pair: lambda pair: pair,
    Duplicates.src: lambda pair: pair[0],
    Duplicates.tgt: lambda pair: pair[1],
}


def draw_units(seed: int) -> dict[int, list[Pair]]:
    """Draw units, whose numbers do not sort as text; some are empty."""
    draw = random.Random(seed)
    words = [f"wört {number}" for number in range(20)]
    sizes = {unit: draw.choice([0, 1, 12, 60]) for unit in (0, 1, 2, 9, 10, 11, 100, 1_000_000_000)}
    return {
        unit: [(draw.choice(words), draw.choice(words)) for _ in range(size)]
        for unit, size in sizes.items()
    }


def write_units(folder: Path, units: dict[int, list[Pair]], kind: Duplicates, seed: int) -> None:
    draw = random.Random(seed)
    for name, pairs in units.items():
        with UnitHashes(folder, name) as writer:
            start = 0
            while start < len(pairs):
                part = pairs[start : start + draw.randint(0, 9)]
                rows = np.arange(start, start + len(part)) * 3  # what lies between was dropped
                writer.add(rows, hash_pairs([p[0] for p in part], [p[1] for p in part], kind))
                start += len(part)


@pytest.fixture(params=[(3, 5), (1 << 20, 1 << 20)], ids=["many parts", "one part"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (duplicates, repeats):
        monkeypatch.setattr(module, "PAIRS_A_FILE", request.param[0])
    monkeypatch.setattr(duplicates, "PAIRS_A_PART", request.param[1])


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("kind", list(KEYS))
def test_all_but_the_first_in_the_order_of_reading_are_found(
    tmp_path: Path, kind: Duplicates
) -> None:
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        units = draw_units(seed)
        write_units(folder, units, kind, seed)
        number = find_duplicates(folder)
        known, total = set(), 0
        for name, pairs in units.items():
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
    units = draw_units(9)
    for name, pairs in units.items():
        with UnitRepeats(tmp_path, name) as writer:
            for start in range(0, len(pairs), 4):
                src, tgt = zip(*pairs[start : start + 4], strict=True)
                writer.add(hash_sides(src, tgt))
            writer.add(hash_sides([], []))
    pairs = [pair for unit in units.values() for pair in unit]
    assert count_repeats(tmp_path) == {
        "pairs": len(pairs) - len(set(pairs)),
        "sources": len(pairs) - len({src for src, _ in pairs}),
        "targets": len(pairs) - len({tgt for _, tgt in pairs}),
    }


def test_nothing_read_has_no_duplicates(tmp_path: Path) -> None:
    assert find_duplicates(tmp_path) == 0
    assert count_repeats(tmp_path) == {"pairs": 0, "sources": 0, "targets": 0}


def _write_and_fail(folder: Path, hashes: duplicates.Hashes) -> None:
    with UnitHashes(folder, 1) as writer:
        writer.add(np.arange(2), hashes)
        raise ZeroDivisionError


def test_a_unit_that_failed_leaves_no_file_and_can_be_written_again(tmp_path: Path) -> None:
    hashes = hash_pairs(["a", "a"], ["b", "b"], Duplicates.pair)
    with pytest.raises(ZeroDivisionError):
        _write_and_fail(tmp_path, hashes)
    assert not list(tmp_path.iterdir())
    for _ in range(2):
        with UnitHashes(tmp_path, 1) as writer:
            writer.add(np.arange(2), hashes)
    assert find_duplicates(tmp_path) == 1


def test_the_whole_hash_counts() -> None:
    """Both halves depend on every text; swapped sides are another pair."""
    src, tgt = ["a", "b", "a", "b", ""], ["b", "a", "a", "b", ""]
    hashes = hash_pairs(src, tgt, Duplicates.pair)
    assert len(np.unique(hashes)) == 10
    one = hash_pairs(src, tgt, Duplicates.src)
    np.testing.assert_array_equal(join_hashes(one, hash_pairs(src, tgt, Duplicates.tgt)), hashes)
    np.testing.assert_array_equal(hash_sides(src, tgt)[:, 0], hashes[:, 0])


def test_equal_halves_are_no_equal_hashes(tmp_path: Path) -> None:
    most = 2**64 - 1  # the end of the last part belongs to it
    rows = [[7, 1], [7, 2], [7, 1], [7, 3], [7, 2], [8, 1], [most, 0], [most, 0]]
    with UnitHashes(tmp_path, 1) as writer:
        writer.add(np.arange(8), np.array(rows, np.uint64))
    assert find_duplicates(tmp_path) == 3
    assert np.flatnonzero(read_seen(tmp_path, 1, 8)).tolist() == [2, 4, 7]
