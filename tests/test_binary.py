"""Token ids on disk: what is written is read, without a copy, by us and by other Arrow readers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from nmt.data import binary
from nmt.data.binary import ParallelData, open_split, write_pairs
from nmt.errors import DataError

SMALL, LARGE = 1 << 16, (1 << 16) + 1  # the last vocabulary for uint16, the first for int32


def random_pairs(count: int, vocab_size: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Draw pairs of ids up to the largest, some sides empty."""
    draw = np.random.default_rng(seed)
    pairs = [
        tuple(draw.integers(0, vocab_size, int(draw.integers(0, 9))).tolist() for _ in range(2))
        for _ in range(count)
    ]
    pairs[-1] = ([vocab_size - 1], [0, vocab_size - 1])
    return pairs


def as_lists(pairs: Any) -> list[tuple[list[int], list[int]]]:
    return [(src.tolist(), tgt.tolist()) for src, tgt in pairs]


@pytest.mark.parametrize(("vocab_size", "kind"), [(SMALL, np.uint16), (LARGE, np.int32)])
def test_ids_come_back_in_the_smallest_type(tmp_path: Path, vocab_size: int, kind: Any) -> None:
    pairs = random_pairs(50, vocab_size)
    assert write_pairs(tmp_path / "train-00000.arrow", pairs, vocab_size) == 50
    data = open_split(tmp_path, "train")
    assert len(data) == 50
    assert as_lists(data) == pairs
    assert data[0][0].dtype == data[0][1].dtype == kind


def test_ids_above_the_type_are_refused_not_wrapped(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowInvalid):
        write_pairs(tmp_path / "x.arrow", [([70_000], [1])], SMALL)


def test_several_files_and_record_batches_are_one_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binary, "_ROWS_A_BATCH", 7)
    pairs = random_pairs(60, 300)
    for number, (start, end) in enumerate([(0, 20), (20, 20), (20, 21), (21, 60)]):
        write_pairs(tmp_path / f"train-{number:05d}.arrow", pairs[start:end], 300)
    write_pairs(tmp_path / "valid-00000.arrow", pairs[:3], 300)
    data = open_split(tmp_path, "train")
    assert len(data) == 60
    assert [as_lists([data[i]])[0] for i in range(60)] == pairs
    assert as_lists(data) == pairs
    assert len(open_split(tmp_path, "valid")) == 3


def test_lengths_count_eos_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "_ROWS_A_BATCH", 7)
    pairs = random_pairs(30, 300)
    write_pairs(tmp_path / "train-00000.arrow", pairs, 300)
    lengths = open_split(tmp_path, "train").lengths()
    assert lengths.tolist() == [[len(src) + 1, len(tgt) + 1] for src, tgt in pairs]
    assert lengths.dtype == np.int32


def test_other_arrow_readers_open_the_file(tmp_path: Path) -> None:
    import datasets

    pairs, path = random_pairs(30, 300), tmp_path / "train-00000.arrow"
    write_pairs(path, pairs, 300)
    expected = [{"src": src, "tgt": tgt} for src, tgt in pairs]
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    assert table.to_pylist() == expected
    assert table.schema.field("src").type == pa.list_(pa.uint16())
    assert list(datasets.Dataset.from_file(str(path))) == expected


def test_sentences_are_views_of_the_memory_map(tmp_path: Path) -> None:
    path = tmp_path / "train-00000.arrow"
    write_pairs(path, random_pairs(2000, 300), 300)
    before = pa.total_allocated_bytes()
    data = open_split(tmp_path, "train")
    assert pa.total_allocated_bytes() - before < 10_000  # the file has some 40,000 bytes of ids
    for side in data[1999]:
        assert not side.flags.owndata
        assert not side.flags.writeable
    one, other = data[1998], data[1998]
    assert np.shares_memory(one[0], other[0])
    assert np.shares_memory(one[1], other[1])


def test_a_pair_outside_the_data_is_an_index_error(tmp_path: Path) -> None:
    write_pairs(tmp_path / "train-00000.arrow", random_pairs(3, 300), 300)
    data = open_split(tmp_path, "train")
    with pytest.raises(IndexError):
        data[3]


# --- damage


def test_no_file_and_no_pairs_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nmt-preprocess"):
        open_split(tmp_path, "train")
    write_pairs(tmp_path / "train-00000.arrow", [], 300)
    with pytest.raises(DataError, match="no sentence pairs"):
        open_split(tmp_path, "train")


@pytest.mark.parametrize("content", [b"", b"text\n" * 100, b"\xff" * 1000, b"\0" * 1000])
def test_a_file_of_another_kind_is_one_line_of_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train-00000.arrow"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_split(tmp_path, "train")
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_an_error_wherever_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binary, "_ROWS_A_BATCH", 4)
    path = tmp_path / "train-00000.arrow"
    write_pairs(path, random_pairs(12, 300), 300)
    whole = path.read_bytes()
    num_pairs = set()
    for end in range(0, len(whole), 8):
        path.write_bytes(whole[:end])
        with contextlib.suppress(DataError):
            num_pairs.add(len(ParallelData([path])))
    assert num_pairs <= {12}  # the last bytes only say that nothing follows
    path.write_bytes(whole[: len(whole) - 100])
    with pytest.raises(DataError, match=r"^.*train-00000\.arrow is damaged .*$") as caught:
        ParallelData([path])
    assert "\n" not in str(caught.value)


def test_an_arrow_file_with_other_columns_is_one_line_of_error(tmp_path: Path) -> None:
    table = pa.table({"src": [[1, 2]], "target": [[3]]})
    with pa.ipc.new_stream(tmp_path / "train-00000.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="train-00000"):
        open_split(tmp_path, "train")
