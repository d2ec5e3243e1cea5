"""Token ids on disk, written and read without a copy, by nmt and by other Arrow readers."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from folders import flat, write_folder, write_shard

from nmt.data import shards
from nmt.data.binary import CorpusShards, ParallelData, write_lengths
from nmt.data.mixing import CorpusRange
from nmt.data.shards import MappedShard, ShardWriter
from nmt.errors import DataError
from nmt.runtime.files import write_json

SMALL = 1 << 16
LARGE = (1 << 16) + 1  # the last vocabulary for uint16, the first for int32


def random_pairs(count: int, vocab_size: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Draw pairs of ids up to the largest, some sides empty."""
    draw = np.random.default_rng(seed)
    pairs = []
    for src_length, tgt_length in draw.integers(0, 9, (count, 2)):
        src = draw.integers(0, vocab_size, src_length).tolist()
        tgt = draw.integers(0, vocab_size, tgt_length).tolist()
        pairs.append((src, tgt))
    pairs[-1] = ([vocab_size - 1], [0, vocab_size - 1])
    return pairs


def as_lists(pairs: Any) -> list[tuple[list[int], list[int]]]:
    return [(src.tolist(), tgt.tolist()) for src, tgt in pairs]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even small files have several record batches."""
    monkeypatch.setattr(shards, "_BATCH_ROWS", 7)


# --- one file


def test_ids_come_back_in_the_smallest_type_of_their_side(tmp_path: Path) -> None:
    for vocab_size, kind in ((SMALL, np.uint16), (LARGE, np.int32)):
        pairs = random_pairs(50, vocab_size)
        write_shard(tmp_path / "x.arrow", pairs, vocab_size)
        shard = MappedShard(tmp_path / "x.arrow")
        assert len(shard) == 50
        assert as_lists(shard) == pairs
        assert shard[0][0].dtype == shard[0][1].dtype == kind
    with ShardWriter(tmp_path / "x", src_vocab_size=LARGE, tgt_vocab_size=300) as writer:
        writer.add(flat([[LARGE - 1]]), flat([[299]]))
    write_shard(tmp_path / "empty", [([], [1]), ([], [2])], 300)
    assert as_lists([MappedShard(tmp_path / "empty")[1]]) == [([], [2])]
    src, tgt = MappedShard(tmp_path / "x")[0]
    assert (src.dtype, tgt.dtype) == (np.int32, np.uint16)
    with pytest.raises(pa.ArrowInvalid):  # refused, not wrapped
        write_shard(tmp_path / "x.arrow", [([70_000], [1])], SMALL)


def test_bytes_do_not_depend_on_how_the_pairs_arrive(tmp_path: Path) -> None:
    pairs = random_pairs(40, 300)
    src, tgt = map(list, zip(*pairs, strict=True))
    ids = {"src": src, "tgt": tgt}
    all_texts = {"src_text": [f"{text} é" for text in src], "tgt_text": list(map(str, tgt))}
    sizes = {"src_vocab_size": 300, "tgt_vocab_size": 300}
    for texts in ({}, all_texts):
        for name, cuts in {"one": [40], "two": [1, 7, 8, 8, 21, 35, 40]}.items():
            with ShardWriter(tmp_path / name, has_text=bool(texts), **sizes) as writer:
                for start, end in itertools.pairwise([0, *cuts]):
                    chunk_texts = [lines[start:end] for lines in texts.values()]
                    writer.add(flat(src[start:end]), flat(tgt[start:end]), chunk_texts)
        content = (tmp_path / "two").read_bytes()
        assert (tmp_path / "one").read_bytes() == content
        table = pa.ipc.open_stream(content).read_all()
        assert max(map(len, table.to_batches())) == 7
        assert table.to_pydict() == ids | texts
        assert as_lists(MappedShard(tmp_path / "two")) == pairs
    shard = writer.shard
    assert (shard.file, shard.pairs) == ("two", 40)
    assert (shard.bytes, shard.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert shard.src_tokens == sum(map(len, src))
    assert shard.tgt_tokens == sum(map(len, tgt))
    assert shard.longest == max(map(len, src + tgt)) + 1


def test_a_record_batch_has_as_many_pairs_as_in_the_folders_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    side = np.zeros(50_001, np.int64), np.arange(50_002)
    with ShardWriter(tmp_path / "x", src_vocab_size=9, tgt_vocab_size=9) as writer:
        writer.add(side, side)
    with pa.OSFile(str(tmp_path / "x")) as source, pa.ipc.open_stream(source) as reader:
        assert [batch.num_rows for batch in reader] == [50_000, 1]


# --- a folder


def test_corpora_shards_and_record_batches_are_one_list_that_threads_share(tmp_path: Path) -> None:
    pairs = random_pairs(60, 300)
    corpora = {"news": pairs[:21], "none": [], "web": pairs[21:]}
    write_folder(tmp_path, corpora, 300, weights={"web": 0.5}, pairs_a_shard=20)
    data = ParallelData(tmp_path, "train")
    assert len(data) == 60
    with ThreadPoolExecutor(8) as pool:
        assert as_lists(pool.map(data.__getitem__, range(60))) == as_lists(data) == pairs
    for side in data[59]:
        assert not side.flags.owndata
        assert not side.flags.writeable
    assert data.corpora == [
        CorpusRange("news", 0, 21, 1.0),
        CorpusRange("none", 21, 0, 1.0),
        CorpusRange("web", 21, 39, 0.5),
    ]
    assert as_lists(ParallelData(tmp_path, "valid")) == pairs[:21]
    with pytest.raises(IndexError):
        data[60]


def test_lengths_count_eos_in_the_smallest_type(tmp_path: Path) -> None:
    for longest, kind in ((20, "<u2"), (65_534, "<u2"), (65_535, "<i4")):
        pairs = [*random_pairs(30, 300), ([5] * longest, [6])]
        write_folder(tmp_path, {"": pairs}, 300, pairs_a_shard=8)
        lengths = ParallelData(tmp_path, "train").lengths
        assert lengths.tolist() == [[len(src) + 1, len(tgt) + 1] for src, tgt in pairs]
        assert lengths.dtype == np.dtype(kind)
        assert isinstance(lengths.base, np.memmap)
        assert not lengths.flags.writeable


def test_opening_reads_no_shard_and_a_damaged_one_fails_at_its_first_pair(tmp_path: Path) -> None:
    pairs = random_pairs(30, 300)
    write_folder(tmp_path, {"": pairs}, 300, pairs_a_shard=10)
    path = tmp_path / "train--00001.arrow"
    path.write_bytes(b"\xff" * path.stat().st_size)
    data = ParallelData(tmp_path, "train")
    assert as_lists([data[9], data[20]]) == [pairs[9], pairs[20]]
    with pytest.raises(DataError, match=r"^\S*train--00001\.arrow is damaged .*nmt-preprocess"):
        data[10]
    path = tmp_path / "train--00000.arrow"
    path.unlink()
    _change_index(tmp_path, bytes=write_shard(path, random_pairs(5, 300), 300).bytes)
    with pytest.raises(
        DataError, match=r"train--00000\.arrow is damaged: it has 5 pairs instead of 10"
    ):
        ParallelData(tmp_path, "train")[0]


# --- processes


def anonymous_bytes() -> int:
    """Return the memory of this process that is not a file, its own or shared since a fork."""
    match = re.search(r"^Anonymous: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    assert match is not None
    return int(match[1]) * 1024


def read_all(pickled: bytes, channel: Any) -> None:
    """Read every pair; send their sum, and the bytes that this took."""
    bytes_before = anonymous_bytes()
    data = pickle.loads(pickled)
    total = int(data.lengths.sum())
    for src, tgt in data:
        total += int(src.sum() + tgt.sum())
    channel.send((total, anonymous_bytes() - bytes_before))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="asks Linux for memory")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_worker_reads_everything_and_adds_a_few_megabytes(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(0).integers(0, 300, 8_000_000, dtype=np.uint16)
    offsets = np.arange(0, len(ids) + 1, 200)
    monkeypatch.setattr(shards, "_BATCH_ROWS", 5_000)
    with ShardWriter(tmp_path / "a", src_vocab_size=300, tgt_vocab_size=300) as writer:
        writer.add((ids, offsets), (ids, offsets))
    index = {"train": [CorpusShards("", 1.0, [writer.shard])]}
    write_json(tmp_path / "meta.json", {**write_lengths(tmp_path, index), "vocab_size": 300})
    data = ParallelData(tmp_path, "train")
    assert data[0][0].tolist() == ids[:200].tolist()  # mapped here, which must not travel
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=read_all, args=(pickled, sender))
    worker.start()
    sender.close()  # so that a worker that dies leaves an end, not silence
    total, num_bytes = receiver.recv()
    worker.join()
    assert total == 2 * (int(ids.sum()) + 40_000 * 201)
    assert num_bytes < 3e6  # of 32 MB of ids


# --- damage


def test_no_pairs_and_no_split_and_a_newer_folder_are_data_errors(tmp_path: Path) -> None:
    newer = {"format_version": 3, "splits": {}}
    for content, split, text in [
        (None, "train", "is not a data folder; .*nmt-preprocess"),
        (newer, "train", "has format_version 3, this nmt reads up to 2; update"),
        ({}, "train", "no sentence pairs"),
        ({}, "test", r"no test pairs; give data\.test"),
    ]:
        if content == {}:
            write_folder(tmp_path, {"": []}, 300)
        elif content:
            write_json(tmp_path / "meta.json", content)
        with pytest.raises(DataError, match=text):
            ParallelData(tmp_path, split)


def _change_index(folder: Path, **changes: Any) -> None:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    meta["splits"]["train"][0]["shards"][0].update(changes)
    write_json(folder / "meta.json", meta)


SHARD = "train--00001.arrow"
LENGTHS = "train.lengths.npy"
DAMAGES = {
    "missing": lambda d: (d / SHARD).unlink(),
    "cut": lambda d: os.truncate(d / SHARD, (d / SHARD).stat().st_size - 64),
    "lengths missing": lambda d: (d / LENGTHS).unlink(),
    "lengths cut": lambda d: os.truncate(d / LENGTHS, (d / LENGTHS).stat().st_size - 1),
    "lengths empty": lambda d: (d / LENGTHS).write_bytes(b""),
    "lengths of another": lambda d: np.save(d / LENGTHS, np.ones((5, 2), "u2")),
    "index": lambda d: _change_index(d, pairs=11),
    "field": lambda d: _change_index(d, color="red"),
}


def test_damage_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    for name, damage in DAMAGES.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        write_folder(folder, {"": random_pairs(30, 300)}, 300, pairs_a_shard=10)
        damage(folder)
        expected = (
            r"^\S+ is (missing|damaged).*run nmt-preprocess|^\S+ does not fit this nmt: splits"
        )
        with pytest.raises(DataError, match=expected) as caught:
            ParallelData(folder, "train")
        assert "\n" not in str(caught.value), name


def test_a_file_that_is_cut_or_of_another_kind_is_one_line_of_error(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    write_shard(path, random_pairs(20, 300), 300)
    content = path.read_bytes()
    replacements = [b"text\n" * 100, b"\xff" * 1000, b"\0" * 1000]
    for end in range(0, len(content), 8):
        replacements.append(content[:end])
    for replacement in replacements:
        path.write_bytes(replacement)
        with pytest.raises(DataError, match=r"x\.arrow is damaged") as caught:
            MappedShard(path)
        assert "\n" not in str(caught.value)
    table = pa.table({"src": [[1, 2]], "target": [[3]]})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"x\.arrow is damaged .*target: list"):
        MappedShard(path)
