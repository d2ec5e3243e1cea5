"""All sources give the same pairs: files, patterns, streams, corpora and datasets."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packing import SUFFIXES, pack, write

from nmt.config import (
    Corpus,
    CorpusConfig,
    DataConfig,
    HeldOutConfig,
    PreprocessConfig,
    SplitConfig,
)
from nmt.data.text import load_bundled_corpus
from nmt.errors import ConfigError, DataError
from nmt.preprocess.chunks import DataSource, read_chunks
from nmt.preprocess.clean import clean
from nmt.preprocess.sources import find_sources, has_split, pair_up, spool

Pairs = list[tuple[str, str]]
PAIRS = [("a tree", "ein Baum"), ("two", "zwei"), ("green", "grün")]


def settings(train: SplitConfig | None = None, **changes: Any) -> PreprocessConfig:
    data = {"src_lang": "en", "tgt_lang": "de", "train": train or SplitConfig(), **changes}
    return PreprocessConfig(data=DataConfig(**data))


def find(folder: Path, **split: Any) -> list[DataSource]:
    """Find the sources of training text, with temporary copies in `folder`."""
    return find_sources(settings(SplitConfig(**split)), "train", folder / "spool")


def read(sources: list[DataSource]) -> Pairs:
    """Read the text of sources, cleaned as training text is."""
    pairs: Pairs = []
    for chunk in read_chunks(sources):
        cleaned = clean(chunk, settings(), held_out=False)
        pairs += zip(cleaned.src, cleaned.tgt, strict=True)
    return pairs


def lines(texts: list[str]) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


SRC = lines([src for src, _ in PAIRS])
TGT = lines([tgt for _, tgt in PAIRS])
TSV = lines([f"{src}\t{tgt}" for src, tgt in PAIRS])


def write_tsv(folder: Path, name: str) -> str:
    """Write a file with one pair, whose source is `name`; return its path."""
    return str(write(folder / f"{name}.tsv", f"{name}\tx\n".encode()))


def test_every_format_gives_the_same_pairs(tmp_path: Path) -> None:
    contents = {
        "src": SRC,
        "tgt": TGT,
        "tsv": TSV,
        "wide": lines([f"1\t{tgt}\t\t{src}" for src, tgt in PAIRS]),
        "jsonl": lines([json.dumps({"en": src, "de": tgt, "id": 1}) for src, tgt in PAIRS]),
        "named": lines([json.dumps({"q": src, "a": tgt}) for src, tgt in PAIRS]),
    }
    for suffix in SUFFIXES:
        files = {}
        for name, content in contents.items():
            files[name] = [str(write(tmp_path / f"{name}.{suffix}", content))]
        for split in (
            {"src": files["src"], "tgt": files["tgt"]},
            {"tsv": files["tsv"]},
            {"tsv": files["wide"], "columns": [4, 2]},
            {"jsonl": files["jsonl"]},
            {"jsonl": files["named"], "fields": ["q", "a"]},
        ):
            assert read(find(tmp_path / suffix, **split)) == PAIRS, split
        assert (tmp_path / suffix / "spool").exists() is (suffix != "txt")  # decompressed files
        if suffix == "txt":  # held-out sets of several corpora may mix formats
            pair = find(tmp_path, src=files["src"], tgt=files["tgt"])
            tsv = find(tmp_path, tsv=files["tsv"])
            assert read(pair + tsv + tsv) == read(tsv + tsv + pair) == 3 * PAIRS


def test_several_files_are_read_in_the_order_they_are_named(tmp_path: Path) -> None:
    files = [write_tsv(tmp_path, name) for name in "bac"]
    for names, expected in ((files, "bac"), ([files[0], str(tmp_path / "?.tsv")], "babc")):
        assert "".join(src for src, _ in read(find(tmp_path, tsv=names))) == expected


# --- patterns


def test_patterns_pair_files_with_the_same_wildcard_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = (write(tmp_path / "a.en", b"x\n"), write(tmp_path / "a.de", b"x\n"))
    (source,) = find(tmp_path, src=["a*.en"], tgt=["a.de"])  # names files as the user does
    assert source.names == ("a.en", "a.de")
    assert source.paths == paths
    names = ["n-1.en", "n-2.en", "n.en", "de_n-1", "de_n-2", "de_n", "m-1", "m-3", "odd.fr"]
    for name in [*names, "[x].en", "1*.en", "12.en"]:
        write(Path(name), b"")
    Path("n-folder.en").mkdir()
    for src, tgt, expected in [
        ("n*.en", "de_n*", "n-1.en de_n-1, n-2.en de_n-2, n.en de_n"),
        ("n-?.en", "de_n-?", "n-1.en de_n-1, n-2.en de_n-2"),
        ("odd.*", "[x].*", "odd.fr [x].en"),
        ("1*.en", "[x].en", "1*.en [x].en"),
        ("n-1.en n.en", "de_n*1 odd.fr", "n-1.en de_n-1, n.en odd.fr"),
        ("n-1.en n-2.en", "de_n-?", "n-1.en de_n-1, n-2.en de_n-2"),
    ]:
        file_pairs = pair_up(src.split(), tgt.split(), "data.train")
        assert ", ".join(map(" ".join, file_pairs)) == expected
    for src, tgt, expected in [
        ("n-*.en", "m-*", "m-3 has no counterpart"),
        ("m-*", "n-*.en", "m-3 has no counterpart"),
        ("n*.en", "de_n-*", "3 source files.*2 target"),
        ("n-*.en", "odd.*", r"^src and tgt: 2 source files \(n-1\.en .*1 target"),
        ("n-1.en n.en", "odd.fr", r"^data\.train: 2 source files \(n-1\.en .*1 target"),
        ("n.en", "de_n-?", "1 source files.*2 target"),
        ("nothing*", "odd.fr", r"nothing\* matches no file"),
        ("[!x]*", "odd.fr", r"\[!x\]\* matches no file"),  # only * and ? are wildcards
    ]:
        with pytest.raises(DataError, match=expected):
            pair_up(src.split(), tgt.split(), "data.train")


# --- named corpora


def test_named_corpora_come_in_the_order_of_their_names_with_their_tags(tmp_path: Path) -> None:
    files = [write_tsv(tmp_path, name) for name in "abc"]
    corpora = {
        "web": CorpusConfig(tsv=[files[0]], weight=0),
        "news": CorpusConfig(tsv=files[1:], src_tag="<2de>"),
    }
    config = settings(corpora=corpora)
    sources = find_sources(config, "train", tmp_path)
    assert [source.corpus for source in sources] == ["news", "news", "web"]
    assert [source.tags.src for source in sources] == ["<2de>", "<2de>", ""]
    assert [src for src, _ in read(sources)] == ["b", "c", "a"]
    assert has_split(config.data, "train")
    assert not has_split(config.data, "valid")
    config.data.corpora["empty"] = CorpusConfig(weight=2)
    with pytest.raises(ConfigError, match=r"data\.corpora\.empty names no text"):
        find_sources(config, "train", tmp_path)


def test_a_bundled_corpus_is_spooled_whole(tmp_path: Path) -> None:
    for corpus, split, seed in [(Corpus.numbers, "test", 0), (Corpus.copy, "valid", 2)]:
        config = PreprocessConfig(data=DataConfig(corpus=corpus), seed=seed)
        assert has_split(config.data, split)
        sources = find_sources(config, split, tmp_path)
        assert read(sources) == load_bundled_corpus(corpus, seed)[split]


# --- streams

OLD = 1_000_000_000  # a modification time in nanoseconds that no new file has


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> io.BytesIO:
    stream = io.BytesIO(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
    return stream


def test_stdin_can_be_one_side_or_a_file_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tgt = write(tmp_path / "tgt", TGT)
    pipe(monkeypatch, SRC)
    sources = find(tmp_path, src=["-"], tgt=[str(tgt)])
    assert read(sources) == PAIRS
    assert sources[0].names == ("stdin", str(tgt))
    pipe(monkeypatch, TSV)
    assert read(find(tmp_path, tsv=["-"])) == PAIRS


def test_a_damaged_archive_is_named_as_the_user_wrote_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gz", random.Random(0).randbytes(100_000))
    os.truncate(path, 50_000)
    with pytest.raises(DataError, match=r"a\.gz: not a whole gzip file"):
        find(tmp_path, tsv=[str(path)])


def test_stdin_is_spooled_again_only_when_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_same = []
    for content in (b"a\tb\n", b"a\tb\n", b"a\tc\n", b"a\tb\nc\td\n", b"a\tb\n", b"", b""):
        pipe(monkeypatch, content)
        (path,) = find(tmp_path, tsv=["-"])[0].paths
        assert path.read_bytes() == content
        is_same.append(path.stat().st_mtime_ns == OLD)
        os.utime(path, ns=(OLD, OLD))
    assert is_same == [False, True, False, False, False, False, True]
    assert list(path.parent.iterdir()) == [path]


def test_named_pipes_are_spooled_each_by_itself(tmp_path: Path) -> None:
    src = tmp_path / "src.gz"
    tgt = tmp_path / "tgt.gz"
    writers = []
    for path, content in ((src, SRC), (tgt, TGT)):
        os.mkfifo(path)
        writers.append(threading.Thread(target=path.write_bytes, args=[pack(content, "gz")]))
        writers[-1].start()
    sources = find(tmp_path, src=[str(src)], tgt=[str(tgt)])
    for writer in writers:
        writer.join()
    assert read(sources) == PAIRS
    assert sources[0].names == (str(src), str(tgt))


def test_a_stream_without_end_and_a_device_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pipe(monkeypatch, b"a\tb\n" * 1_000_000)
    with subprocess.Popen(["yes"], stdout=os.open(fifo, os.O_RDWR)) as writer:
        try:
            for name in ("-", str(fifo)):
                config = settings(SplitConfig(tsv=[name]), max_stream_gb=0.003)
                with pytest.raises(DataError, match="than the 3,000,000 bytes .*max_stream_gb"):
                    find_sources(config, "train", tmp_path / "spool")
        finally:
            writer.kill()
    assert not list((tmp_path / "spool").iterdir())
    for device in ("/dev/urandom", "/dev/zero"):
        with pytest.raises(DataError, match="is a device, not a text"):
            find(tmp_path, tsv=[device])
    assert read(find(tmp_path, tsv=[os.devnull])) == []


def test_missing_files_are_named_before_a_stream_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = HeldOutConfig(tsv=[str(tmp_path / "a")])
    with pytest.raises(DataError, match=r"a does not exist; make it with: make text$"):
        find_sources(settings(train=train, made_by="make text"), "train", tmp_path)
    stream = pipe(monkeypatch, b"a\tb\n")
    train = HeldOutConfig(tsv=["-"])
    missing = HeldOutConfig(tsv=[str(tmp_path / "none.tsv")])
    for changes, error, expected in [
        ({"valid": missing}, DataError, "none.tsv does not exist"),
        ({"valid": train}, ConfigError, "2 files are -"),
        ({"test": HeldOutConfig(tsv=[str(tmp_path)])}, DataError, "is a folder"),
    ]:
        with pytest.raises(error, match=expected):
            find_sources(settings(train, **changes), "train", tmp_path)
    assert stream.tell() == 0
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="stdin is closed"):
        find_sources(settings(train), "train", tmp_path)


def test_an_interrupted_stream_leaves_no_half_file(tmp_path: Path) -> None:
    path = write(tmp_path / "file", b"abcdef")

    def spool_half(written: bytes) -> None:
        with spool(path) as stream:
            stream.write(written)
            raise KeyboardInterrupt

    for written in (b"abc", b"abd"):
        with pytest.raises(KeyboardInterrupt):
            spool_half(written)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"abcdef"}


# --- datasets

SIZES = {"train": 5, "validation": 3, "test": 2}
OURS = {"train": "train", "valid": "validation", "test": "test"}


def pairs_of(split: str) -> Pairs:
    return [(f"{split} {i} tree", f"{split} {i} Bäume") for i in range(SIZES[split])]


def table_of(pairs: Pairs, *, nested: bool) -> pa.Table:
    rows: list[dict[str, Any]] = [{"de": de, "en": en} for en, de in pairs]
    if nested:
        rows = [{"translation": row} for row in rows]
    return pa.Table.from_pylist(rows)


def write_dataset(path: Path, pairs: Pairs, kind: str, *, nested: bool = True) -> Path:
    """Write a file of Parquet, Arrow (stream or file) or JSON, in blocks of two rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = table_of(pairs, nested=nested)
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
    elif kind == "jsonl":
        path.write_bytes(lines([json.dumps(row) for row in table.to_pylist()]))
    else:
        new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


@pytest.fixture
def wmt14(tmp_path: Path) -> Path:
    """The layout of wmt/wmt14: a folder of Parquet files per configuration, a column of structs."""
    for split in SIZES:
        pairs = pairs_of(split)
        czech = [("cs", de) for _, de in pairs]
        for config, shards in {
            "de-en": (pairs[:1], pairs[1:]),
            "cs-en": (czech[:1], czech[1:]),
        }.items():
            for i, shard in enumerate(shards):
                name = f"wmt14/{config}/{split}-{i:05}-of-00002.parquet"
                write_dataset(tmp_path / name, shard, "parquet")
    return tmp_path / "wmt14"


def add_readme(folder: Path) -> None:
    """Declare the configurations, as the hub's README.md does."""
    text = ["---", "configs:"]
    for config in ("cs-en", "de-en"):
        text += [f"- config_name: {config}", "  data_files:"]
        for split in SIZES:
            text += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (folder / "README.md").write_bytes(lines([*text, "---"]))


def read_dataset(tmp_path: Path, split: str = "train", **changes: Any) -> Pairs:
    config = settings(**{split: HeldOutConfig(**changes)})
    return read(find_sources(config, split, tmp_path / "spool"))


@pytest.mark.slow
def test_the_layouts_of_the_hub_give_the_pairs_of_a_split(tmp_path: Path, wmt14: Path) -> None:
    for has_readme, (ours, theirs) in itertools.product((False, True), OURS.items()):
        if has_readme:
            add_readme(wmt14)
        pairs = read_dataset(tmp_path, ours, dataset=str(wmt14), dataset_config="de-en")
        assert pairs == pairs_of(theirs), (ours, has_readme)
    for kind in ("jsonl", "parquet"):  # bentrevett/multi30k: a file per split, a field per language
        folder = tmp_path / f"multi30k-{kind}"
        for split, name in (("train", "train"), ("validation", "val"), ("test", "test")):
            write_dataset(folder / f"{name}.{kind}", pairs_of(split), kind, nested=False)
        for ours, theirs in OURS.items():
            assert read_dataset(tmp_path, ours, dataset=str(folder)) == pairs_of(theirs)
        test_pairs = read_dataset(tmp_path, dataset=str(folder), dataset_split="test")
        assert test_pairs == pairs_of("test")
        swapped = read_dataset(tmp_path, dataset=str(folder), fields=["de", "en"])
        assert swapped == [(de, en) for en, de in pairs_of("train")]


def test_single_files_and_folders_of_save_to_disk_give_their_pairs(tmp_path: Path) -> None:
    import datasets  # takes a second

    for kind, nested in itertools.product(("parquet", "stream", "file"), (True, False)):
        path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
        write_dataset(path, pairs_of("train"), kind, nested=nested)
        assert read_dataset(tmp_path, dataset=str(path)) == pairs_of("train"), (kind, nested)
    saved = datasets.Dataset.from_list(table_of(pairs_of("test"), nested=True).to_pylist())
    for name, dataset in (("one", saved), ("splits", datasets.DatasetDict({"test": saved}))):
        dataset.save_to_disk(str(tmp_path / name))
        assert read_dataset(tmp_path, "test", dataset=str(tmp_path / name)) == pairs_of("test")


def test_line_breaks_in_texts_become_spaces_and_move_no_other_pair(tmp_path: Path) -> None:
    odd = [("x\ny\u2028z", "1\r\n2"), ("a\n", "\n"), ("", "leer"), ("\ufeffBOM", "\ttab")]
    path = write_dataset(tmp_path / "a.parquet", [*odd, ("last", "letzte")], "parquet")
    (chunk,) = read_chunks(find(tmp_path, dataset=str(path)))
    cleaned = clean(chunk, settings(), held_out=True)
    texts = [("x y z", "1  2"), ("a ", " "), ("", "leer"), ("BOM", "\ttab"), ("last", "letzte")]
    assert list(zip(cleaned.src, cleaned.tgt, strict=True)) == texts
    assert cleaned.counts.replaced["U+2028"] == 5


def test_fields_may_hold_nothing_numbers_or_bytes(tmp_path: Path) -> None:
    """A missing text is an empty line; bytes are left to cleaning."""
    path = tmp_path / "a.parquet"
    raw = pa.array([b"gr\xfcn", b"b"], pa.binary())
    for src, tgt, expected_src, expected_tgt in [
        ([None, "a", None], ["b", "c", None], b"\na\n\n", b"b\nc\n\n"),
        ([1, 2], raw, b"1\n2\n", b"gr\xfcn\nb\n"),
    ]:
        pq.write_table(pa.table({"en": src, "de": tgt}), path)
        (source,) = find(tmp_path, dataset=str(path))
        assert source.paths[0].read_bytes() == expected_src
        assert source.paths[1].read_bytes() == expected_tgt
    with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path))}/a\.parquet:1: byte 3"):
        read([source])


def test_errors_about_datasets_name_the_alternatives(tmp_path: Path, wmt14: Path) -> None:
    add_readme(wmt14)
    text = write_dataset(tmp_path / "text" / "a.jsonl", pairs_of("test"), "jsonl")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.md").write_text("nothing", encoding="utf-8")
    for changes, expected in [
        ({"dataset_split": "validaton"}, "has no split validaton; did you mean validation"),
        ({"dataset_config": "de-fr"}, "de-fr.*Available.*de-en"),
        ({"fields": ["en", "fr"]}, r"\(de-en\) has the fields de, en;.*now en, fr"),
        ({"fields": ["translation", "en"]}, "holds struct.*not text"),
        ({"dataset": str(text)}, "a.jsonl is not a .parquet or .arrow file.*jsonl"),
        ({"dataset": str(tmp_path / "none")}, "dataset .*none .*cannot be read"),
    ]:
        with pytest.raises(DataError, match=expected) as error:
            find(tmp_path, **{"dataset": str(wmt14), "dataset_config": "de-en", **changes})
        assert "\n" not in str(error.value)


def test_a_damaged_dataset_is_a_data_error(tmp_path: Path) -> None:
    for name in ("jsonl", "parquet", "stream"):
        suffix = "arrow" if name == "stream" else name
        path = write_dataset(tmp_path / name / f"train.{suffix}", pairs_of("train") * 100, name)
        os.truncate(path, path.stat().st_size // 2 - 3)  # not at the end of a line
        names = [path.parent] if name == "jsonl" else [path.parent, path]
        for dataset in map(str, names):
            with pytest.raises(DataError, match=f"{re.escape(dataset)} cannot be read") as error:
                find(tmp_path, dataset=dataset)
            assert "\n" not in str(error.value)


def test_a_hub_that_cannot_be_reached_is_one_line_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "https_proxy", "all_proxy", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")  # where no server listens
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)  # `datasets` would wait and try again
    with pytest.raises(DataError) as error:
        list(find(tmp_path, dataset="some/corpus"))
    assert not pauses
    expected = (
        r"dataset some/corpus is not a local file or folder, and 127\.0\.0\.1 cannot be reached "
        r"\(.+\); "
        r"on .*, make a copy with: hf download some/corpus --repo-type dataset --local-dir FOLDER; "
    )
    assert re.match(expected, str(error.value))
