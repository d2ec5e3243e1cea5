"""Text of any source comes as the same pairs: files, patterns, streams, corpora, datasets."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import sys
import threading
from pathlib import Path
from typing import Any

import datasets
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
from nmt.data.text import bundled_corpus
from nmt.errors import ConfigError, DataError
from nmt.preprocess.chunks import Source, read_chunks
from nmt.preprocess.clean import clean
from nmt.preprocess.sources import find_sources, has_split, pair_up, spool

Pairs = list[tuple[str, str]]
PAIRS = [("a tree", "ein Baum"), ("two", "zwei"), ("green", "grün")]


def settings(train: SplitConfig | None = None, **changes: Any) -> PreprocessConfig:
    data = {"src_lang": "en", "tgt_lang": "de", "train": train or SplitConfig(), **changes}
    return PreprocessConfig(data=DataConfig(**data))


def find(place: Path, **split: Any) -> list[Source]:
    """Find the sources of training text; what must be is spooled in a folder of `place`."""
    return find_sources(settings(SplitConfig(**split)), "train", place / "spool")


def read(sources: list[Source]) -> Pairs:
    """Read the text of sources, cleaned as training text is."""
    cleaned = [clean(chunk, settings(), held_out=False) for chunk in read_chunks(sources)]
    return [pair for part in cleaned for pair in zip(part.src, part.tgt, strict=True)]


def lines(texts: list[str]) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def test_every_format_gives_the_same_pairs(tmp_path: Path) -> None:
    src, tgt = (lines([pair[side] for pair in PAIRS]) for side in (0, 1))
    tsv, wide = (lines([row.format(*p) for p in PAIRS]) for row in ("{}\t{}", "1\t{1}\t\t{0}"))
    records = lines([json.dumps({"en": src, "de": tgt, "id": 1}) for src, tgt in PAIRS])
    named = lines([json.dumps({"q": src, "a": tgt}) for src, tgt in PAIRS])
    for suffix in SUFFIXES:
        parts = enumerate((src, tgt, tsv, wide, records, named))
        files = [[str(write(tmp_path / f"{i}.{suffix}", text))] for i, text in parts]
        mixed = [find(tmp_path / suffix, tsv=files[2])]
        mixed = [find(tmp_path / suffix, src=files[0], tgt=files[1]), *mixed, *mixed]
        if suffix == "txt":  # as the held-out sets of several corpora may be
            assert read(sum(mixed, [])) == read(sum(mixed[::-1], [])) == 3 * PAIRS
        for split in (
            SplitConfig(src=files[0], tgt=files[1]),
            SplitConfig(tsv=files[2]),
            SplitConfig(tsv=files[3], columns=[4, 2]),
            SplitConfig(jsonl=files[4]),
            SplitConfig(jsonl=files[5], fields=["q", "a"]),
        ):
            assert read(find(tmp_path / suffix, **vars(split))) == PAIRS, split
        assert (tmp_path / suffix / "spool").exists() is (suffix != "txt")  # packed ones


def test_several_files_are_read_in_the_order_they_are_named(tmp_path: Path) -> None:
    files = [str(write(tmp_path / f"{name}.tsv", lines([f"{name}\tx"]))) for name in "bac"]
    for names, expected in ((files, "bac"), ([files[0], str(tmp_path / "?.tsv")], "babc")):
        assert "".join(pair[0] for pair in read(find(tmp_path, tsv=names))) == expected


# --- patterns


def test_patterns_pair_what_their_wildcards_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = (write(tmp_path / "a.en", b"x\n"), write(tmp_path / "a.de", b"x\n"))
    (found,) = find(tmp_path, src=["a*.en"], tgt=["a.de"])  # which names files as the user does
    assert (found.names, found.paths) == (("a.en", "a.de"), paths)
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
        found = pair_up(src.split(), tgt.split(), "data.train")
        assert ", ".join(map(" ".join, found)) == expected
    for src, tgt, expected in [
        ("n-*.en", "m-*", "m-3 has no counterpart"),
        ("m-*", "n-*.en", "m-3 has no counterpart"),
        ("n*.en", "de_n-*", "3 source files.*2 target"),
        ("n-*.en", "odd.*", r"^src and tgt: 2 source files \(n-1\.en .*1 target"),
        ("n-1.en n.en", "odd.fr", r"^data\.train: 2 source files \(n-1\.en .*1 target"),
        ("n.en", "de_n-?", "1 source files.*2 target"),
        ("nothing*", "odd.fr", r"nothing\* matches no file"),
        ("[!x]*", "odd.fr", r"\[!x\]\* matches no file"),  # * and ? alone are wild
    ]:
        with pytest.raises(DataError, match=expected):
            pair_up(src.split(), tgt.split(), "data.train")


# --- named corpora


def test_named_corpora_come_in_the_order_of_their_names_with_their_tags(tmp_path: Path) -> None:
    files = [str(write(tmp_path / f"{name}.tsv", lines([f"{name}\tx"]))) for name in "abc"]
    corpora = {
        "web": CorpusConfig(tsv=[files[0]], weight=0),
        "news": CorpusConfig(tsv=files[1:], src_tag="<2de>"),
    }
    config = settings(corpora=corpora)
    found = find_sources(config, "train", tmp_path)
    tagged = ("news", ("<2de>", "", ()))
    assert [(s.corpus, s.tags) for s in found] == [tagged] * 2 + [("web", ("", "", ()))]
    assert [pair[0] for pair in read(found)] == ["b", "c", "a"]
    assert has_split(config.data, "train")
    assert not has_split(config.data, "valid")
    config.data.corpora["empty"] = CorpusConfig(weight=2)
    with pytest.raises(ConfigError, match=r"data\.corpora\.empty names no text"):
        find_sources(config, "train", tmp_path)


def test_a_corpus_that_comes_along_is_spooled_whole(tmp_path: Path) -> None:
    for corpus, split, seed in [(Corpus.numbers, "test", 0), (Corpus.copy, "valid", 2)]:
        config = PreprocessConfig(data=DataConfig(corpus=corpus), seed=seed)
        assert has_split(config.data, split)
        found = find_sources(config, split, tmp_path)
        assert read(found) == bundled_corpus(corpus, seed)[split]


# --- streams

OLD = 1_000_000_000  # a time in nanoseconds that no file of a test gets by itself
TSV = lines(["\t".join(pair) for pair in PAIRS])


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> io.BytesIO:
    stream = io.BytesIO(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
    return stream


def test_stdin_can_be_one_side_or_a_file_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tgt = write(tmp_path / "tgt", lines([pair[1] for pair in PAIRS]))
    pipe(monkeypatch, lines([pair[0] for pair in PAIRS]))
    found = find(tmp_path, src=["-"], tgt=[str(tgt)])
    assert read(found) == PAIRS
    assert found[0].names == ("stdin", str(tgt))
    pipe(monkeypatch, TSV)
    assert read(find(tmp_path, tsv=["-"])) == PAIRS


def test_a_damaged_archive_is_named_as_the_user_wrote_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gz", random.Random(0).randbytes(100_000))
    os.truncate(path, 50_000)
    with pytest.raises(DataError, match=r"a\.gz: not a whole gzip file"):
        find(tmp_path, tsv=[str(path)])


def test_stdin_is_spooled_anew_only_when_it_differs(
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
    pipes, writers = [tmp_path / "src.gz", tmp_path / "tgt.gz"], []
    for side, path in enumerate(pipes):
        os.mkfifo(path)
        content = pack(lines([pair[side] for pair in PAIRS]), path.suffix[1:])
        writers.append(threading.Thread(target=path.write_bytes, args=[content]))
        writers[-1].start()
    found = find(tmp_path, src=[str(pipes[0])], tgt=[str(pipes[1])])
    for writer in writers:
        writer.join()
    assert read(found) == PAIRS
    assert found[0].names == tuple(map(str, pipes))


def test_what_is_missing_is_said_before_a_stream_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = HeldOutConfig(tsv=[str(tmp_path / "a")])
    with pytest.raises(DataError, match=r"a does not exist; make it with: make text$"):
        find_sources(settings(train=train, made_by="make text"), "train", tmp_path)
    stream = pipe(monkeypatch, b"a\tb\n")
    train, missing = HeldOutConfig(tsv=["-"]), HeldOutConfig(tsv=[str(tmp_path / "none.tsv")])
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
    flat = [{"de": de, "en": en} for en, de in pairs]
    return pa.Table.from_pylist([{"translation": row} for row in flat] if nested else flat)


def write_dataset(path: Path, pairs: Pairs, kind: str, *, nested: bool = True) -> Path:
    """Write a file of two rows a block: Parquet, either of Arrow's formats, or JSON."""
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
    """The layout of wmt/wmt14: a folder of Parquet files a configuration, a column of structs."""
    for config, split in itertools.product(("de-en", "cs-en"), SIZES):
        pairs = [(en if config == "de-en" else "cs", de) for en, de in pairs_of(split)]
        for i, part in enumerate((pairs[:1], pairs[1:])):
            name = f"wmt14/{config}/{split}-{i:05}-of-00002.parquet"
            write_dataset(tmp_path / name, part, "parquet")
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
        found = read_dataset(tmp_path, ours, dataset=str(wmt14), dataset_config="de-en")
        assert found == pairs_of(theirs), (ours, has_readme)
    for kind in ("jsonl", "parquet"):  # bentrevett/multi30k: a file a split, fields of languages
        folder = tmp_path / f"multi30k-{kind}"
        for split, name in (("train", "train"), ("validation", "val"), ("test", "test")):
            write_dataset(folder / f"{name}.{kind}", pairs_of(split), kind, nested=False)
        for ours, theirs in OURS.items():
            assert read_dataset(tmp_path, ours, dataset=str(folder)) == pairs_of(theirs)
        found = read_dataset(tmp_path, dataset=str(folder), dataset_split="test")
        assert found == pairs_of("test")
        found = read_dataset(tmp_path, dataset=str(folder), fields=["de", "en"])
        assert found == [(de, en) for en, de in pairs_of("train")]


def test_single_files_and_folders_of_save_to_disk_give_their_pairs(tmp_path: Path) -> None:
    for kind, nested in itertools.product(("parquet", "stream", "file"), (True, False)):
        path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
        write_dataset(path, pairs_of("train"), kind, nested=nested)
        assert read_dataset(tmp_path, dataset=str(path)) == pairs_of("train"), (kind, nested)
    saved = datasets.Dataset.from_list(table_of(pairs_of("test"), nested=True).to_pylist())
    for name, whole in (("one", saved), ("splits", datasets.DatasetDict({"test": saved}))):
        whole.save_to_disk(str(tmp_path / name))
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
    path, raw = tmp_path / "a.parquet", pa.array([b"gr\xfcn", b"b"], pa.binary())
    for columns, expected in [
        (([None, "a", None], ["b", "c", None]), (b"\na\n\n", b"b\nc\n\n")),
        (([1, 2], raw), (b"1\n2\n", b"gr\xfcn\nb\n")),
    ]:
        pq.write_table(pa.table({"en": columns[0], "de": columns[1]}), path)
        (source,) = find(tmp_path, dataset=str(path))
        assert tuple(file.read_bytes() for file in source.paths) == expected
    with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path))}/a\.parquet:1: byte 3"):
        read([source])


def test_what_a_dataset_lacks_is_said_with_what_it_has(tmp_path: Path, wmt14: Path) -> None:
    add_readme(wmt14)
    text = write_dataset(tmp_path / "text" / "a.jsonl", pairs_of("test"), "jsonl")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.md").write_text("nothing", encoding="utf-8")
    for changes, expected in [
        ({"dataset_split": "validaton"}, "has no split validaton; did you mean validation"),
        ({"dataset_config": "de-fr"}, "de-fr.*Available.*de-en"),
        ({"fields": ["en", "fr"]}, r"\(de-en\) has the fields de, en;.*now en, fr"),
        ({"fields": ["translation", "en"]}, "holds struct.*not text"),
        ({"dataset": str(text)}, "a.jsonl is no .parquet or .arrow file.*jsonl"),
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
        for place in (path.parent, path)[: 1 if name == "jsonl" else 2]:  # a folder, a file
            with pytest.raises(DataError, match=f"{re.escape(str(place))} cannot be read") as error:
                find(tmp_path, dataset=str(place))
            assert "\n" not in str(error.value)
