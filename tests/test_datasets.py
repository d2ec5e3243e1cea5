"""Hugging Face datasets in the layouts of the hub, Parquet and Arrow files, as parallel text."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_sources import read, settings

from nmt.config import SplitConfig
from nmt.errors import DataError
from nmt.preprocess.chunks import read_chunks
from nmt.preprocess.clean import clean
from nmt.preprocess.sources import find_sources

SIZES = {"train": 5, "validation": 3, "test": 2}
OURS = {"train": "train", "valid": "validation", "test": "test"}
Pairs = list[tuple[str, str]]


def pairs_of(split: str) -> Pairs:
    return [(f"{split} {i} tree", f"{split} {i} Bäume") for i in range(SIZES[split])]


def records(pairs: Pairs, *, nested: bool) -> list[dict[str, Any]]:
    flat = [{"de": de, "en": en} for en, de in pairs]
    return [{"translation": record} for record in flat] if nested else flat


def write_parquet(path: Path, pairs: Pairs, *, nested: bool) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records(pairs, nested=nested)), path, row_group_size=2)
    return path


def write_jsonl(path: Path, pairs: Pairs) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records(pairs, nested=False))
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def wmt14(tmp_path: Path) -> Path:
    """The layout of wmt/wmt14: a folder of Parquet files a configuration, a column of structs."""
    folder = tmp_path / "wmt14"
    for config, mark in (("de-en", ""), ("cs-en", "cs ")):
        for split in SIZES:
            pairs = [(mark + en, de) for en, de in pairs_of(split)]
            half = len(pairs) // 2
            for i, part in enumerate((pairs[:half], pairs[half:])):
                name = f"{config}/{split}-{i:05}-of-00002.parquet"
                write_parquet(folder / name, part, nested=True)
    return folder


def add_readme(folder: Path) -> None:
    """Declare the configurations, as the hub's README.md does."""
    lines = ["---", "configs:"]
    for config in ("cs-en", "de-en"):
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in SIZES:
            lines += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


@pytest.fixture(params=["jsonl", "parquet"])
def multi30k(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The layout of bentrevett/multi30k: a file a split, fields of the languages."""
    folder = tmp_path / "multi30k"
    folder.mkdir()
    for split, name in (("train", "train"), ("validation", "val"), ("test", "test")):
        if request.param == "jsonl":
            write_jsonl(folder / f"{name}.jsonl", pairs_of(split))
        else:
            write_parquet(folder / f"{name}.parquet", pairs_of(split), nested=False)
    return folder


def read_dataset(tmp_path: Path, split: str = "train", **changes: Any) -> Pairs:
    config = settings(**{split: SplitConfig(**changes)})
    return read(find_sources(config, split, tmp_path / "spool"))


@pytest.mark.parametrize("has_readme", [True, False])
@pytest.mark.parametrize("split", OURS)
def test_the_layout_of_wmt14_gives_the_pairs_of_a_configuration(
    tmp_path: Path, wmt14: Path, split: str, has_readme: bool
) -> None:
    if has_readme:
        add_readme(wmt14)
    found = read_dataset(tmp_path, split, dataset=str(wmt14), dataset_config="de-en")
    assert found == pairs_of(OURS[split])


@pytest.mark.parametrize("split", OURS)
def test_the_layout_of_multi30k_gives_the_pairs_of_a_split(
    tmp_path: Path, multi30k: Path, split: str
) -> None:
    assert read_dataset(tmp_path, split, dataset=str(multi30k)) == pairs_of(OURS[split])
    found = read_dataset(tmp_path, split, dataset=str(multi30k), dataset_split="test")
    assert found == pairs_of("test")
    found = read_dataset(tmp_path, split, dataset=str(multi30k), fields=["de", "en"])
    assert found == [(de, en) for en, de in pairs_of(OURS[split])]


def write_arrow(path: Path, table: pa.Table, *, is_stream: bool) -> Path:
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_a_single_file_gives_its_pairs(tmp_path: Path, kind: str, nested: bool) -> None:
    pairs = pairs_of("train")
    if kind == "parquet":
        path = write_parquet(tmp_path / "a.parquet", pairs, nested=nested)
    else:
        table = pa.Table.from_pylist(records(pairs, nested=nested))
        path = write_arrow(tmp_path / "a.arrow", table, is_stream=kind == "stream")
    assert read_dataset(tmp_path, dataset=str(path)) == pairs


@pytest.mark.parametrize("has_splits", [True, False])
def test_a_folder_of_save_to_disk_gives_its_pairs(tmp_path: Path, has_splits: bool) -> None:
    saved = datasets.Dataset.from_list(records(pairs_of("test"), nested=True))
    whole = datasets.DatasetDict({"test": saved}) if has_splits else saved
    whole.save_to_disk(str(tmp_path / "saved"))
    assert read_dataset(tmp_path, "test", dataset=str(tmp_path / "saved")) == pairs_of("test")


ODD = [("x\ny\u2028z", "1\r\n2"), ("a\n", "\n"), ("", "leer"), ("\ufeffBOM", "\ttab")]


def test_line_breaks_in_texts_become_spaces_and_move_no_other_pair(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [*ODD, ("last", "letzte")], nested=True)
    config = settings(SplitConfig(dataset=str(path)))
    (source,) = find_sources(config, "train", tmp_path / "spool")
    (chunk,) = read_chunks([source])
    assert chunk.num_pairs == len(ODD) + 1
    cleaned = clean(chunk, config, held_out=True)
    texts = [("x y z", "1  2"), ("a ", " "), ("", "leer"), ("BOM", "\ttab"), ("last", "letzte")]
    assert list(zip(cleaned.src, cleaned.tgt, strict=True)) == texts
    assert cleaned.counts.replaced["U+2028"] == 5


def test_a_missing_text_is_an_empty_line(tmp_path: Path) -> None:
    table = pa.table({"en": pa.array([None, "a", None]), "de": pa.array(["b", "c", None])})
    pq.write_table(table, tmp_path / "a.parquet")
    config = settings(SplitConfig(dataset=str(tmp_path / "a.parquet")))
    (source,) = find_sources(config, "train", tmp_path / "spool")
    assert [path.read_bytes() for path in source.paths] == [b"\na\n\n", b"b\nc\n\n"]


def test_numbers_are_text_too_and_bytes_are_left_to_cleaning(tmp_path: Path) -> None:
    table = pa.table({"en": [1, 2], "de": pa.array([b"gr\xfcn", b"b"], pa.binary())})
    pq.write_table(table, tmp_path / "a.parquet")
    config = settings(SplitConfig(dataset=str(tmp_path / "a.parquet")))
    (source,) = find_sources(config, "train", tmp_path / "spool")
    assert [path.read_bytes() for path in source.paths] == [b"1\n2\n", b"gr\xfcn\nb\n"]
    with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path))}/a\.parquet:1: byte 3"):
        read([source])


def test_a_dataset_that_is_the_same_stays_as_it_was_spooled(tmp_path: Path, wmt14: Path) -> None:
    train = SplitConfig(dataset=str(wmt14), dataset_config="de-en")
    (source,) = find_sources(settings(train), "train", tmp_path / "spool")
    os.utime(source.paths[0], ns=(10**9, 10**9))
    find_sources(settings(train), "train", tmp_path / "spool")
    assert source.paths[0].stat().st_mtime_ns == 10**9
    train.dataset_config = "cs-en"
    find_sources(settings(train), "train", tmp_path / "spool")
    assert source.paths[0].stat().st_mtime_ns != 10**9
    assert source.paths[0].read_text("utf-8").startswith("cs train 0")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dataset_split": "validaton"}, "has no split validaton; did you mean validation"),
        ({"dataset_config": "de-fr"}, "de-fr.*Available.*de-en"),
        ({"fields": ["en", "fr"]}, r"\(de-en\) has the fields de, en;.*now en, fr"),
        ({"fields": ["translation", "en"]}, "holds struct.*not text"),
    ],
)
def test_what_a_dataset_lacks_is_said_with_what_it_has(
    tmp_path: Path, wmt14: Path, changes: dict[str, Any], expected: str
) -> None:
    add_readme(wmt14)
    with pytest.raises(DataError, match=expected) as error:
        read_dataset(tmp_path, **{"dataset": str(wmt14), "dataset_config": "de-en", **changes})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "one.parquet", "one.arrow"])
def test_a_damaged_dataset_is_a_data_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    pairs = pairs_of("train") * 100
    if path.suffix == ".jsonl":
        write_jsonl(path, pairs)
    elif path.suffix == ".parquet":
        write_parquet(path, pairs, nested=True)
    else:
        table = pa.Table.from_pylist(records(pairs, nested=True))
        write_arrow(path, table, is_stream=True)
    os.truncate(path, path.stat().st_size // 2 - 3)  # not at the end of a line
    dataset = str(path if name.startswith("one") else tmp_path)
    with pytest.raises(DataError, match=f"dataset {re.escape(dataset)} cannot be read") as error:
        read_dataset(tmp_path, dataset=dataset)
    assert "\n" not in str(error.value)


def test_a_text_file_is_no_dataset(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", pairs_of("test"))
    with pytest.raises(DataError, match="a.jsonl is no .parquet or .arrow file.*jsonl"):
        read_dataset(tmp_path, dataset=str(path))


def test_a_folder_without_data_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("nothing", encoding="utf-8")
    with pytest.raises(DataError, match=f"dataset {re.escape(str(tmp_path))} cannot be read"):
        read_dataset(tmp_path, dataset=str(tmp_path))
