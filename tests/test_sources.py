"""Text of any source comes as the same pairs: files, patterns, streams, corpora that come along."""

from __future__ import annotations

import io
import json
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from packing import SUFFIXES, pack, write

from nmt.config import Corpus, CorpusConfig, DataConfig, PreprocessConfig, SplitConfig, Step
from nmt.data.text import bundled_corpus
from nmt.errors import ConfigError, DataError
from nmt.preprocess.chunks import Format, Source, read_chunks
from nmt.preprocess.clean import clean
from nmt.preprocess.sources import find_sources, has_split, pair_up
from nmt.preprocess.spool import spool

PAIRS = [("a tree", "ein Baum"), ("two", "zwei"), ("green", "grün")]


def settings(train: SplitConfig | None = None, **changes: Any) -> PreprocessConfig:
    data = {"src_lang": "en", "tgt_lang": "de", "train": train or SplitConfig(), **changes}
    return PreprocessConfig(data=DataConfig(**data))


def read(sources: list[Source]) -> list[tuple[str, str]]:
    """Read the text of sources, cleaned as training text is."""
    cleaned = [clean(chunk, settings(), held_out=False) for chunk in read_chunks(sources)]
    return [pair for part in cleaned for pair in zip(part.src, part.tgt, strict=True)]


def lines(texts: list[str]) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def write_pairs(folder: Path, suffix: str) -> dict[str, SplitConfig]:
    """Write the same pairs in every format; return the settings that name them."""
    sides = [write(folder / f"{i}.{suffix}", lines([p[i] for p in PAIRS])) for i in range(2)]
    tsv = write(folder / f"tsv.{suffix}", lines([f"{src}\t{tgt}" for src, tgt in PAIRS]))
    wide = write(folder / f"wide.{suffix}", lines([f"1\t{tgt}\t\t{src}" for src, tgt in PAIRS]))
    records = [json.dumps({"en": src, "de": tgt, "id": 1}) for src, tgt in PAIRS]
    jsonl = write(folder / f"jsonl.{suffix}", lines(records))
    records = [json.dumps({"q": src, "a": tgt}) for src, tgt in PAIRS]
    named = write(folder / f"named.{suffix}", lines(records))
    return {
        "pair": SplitConfig(src=[str(sides[0])], tgt=[str(sides[1])]),
        "tsv": SplitConfig(tsv=[str(tsv)]),
        "columns": SplitConfig(tsv=[str(wide)], columns=[4, 2]),
        "jsonl": SplitConfig(jsonl=[str(jsonl)]),
        "fields": SplitConfig(jsonl=[str(named)], fields=["q", "a"]),
    }


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_same_pairs(tmp_path: Path, suffix: str) -> None:
    for name, split in write_pairs(tmp_path, suffix).items():
        found = find_sources(settings(split), "train", tmp_path / "spool")
        assert read(found) == PAIRS, name
    assert not (tmp_path / "spool").exists()


def test_several_files_are_read_in_the_order_they_are_named(tmp_path: Path) -> None:
    files = [str(write(tmp_path / f"{name}.tsv", lines([f"{name}\tx"]))) for name in "bac"]
    found = find_sources(settings(SplitConfig(tsv=files)), "train", tmp_path)
    assert [pair[0] for pair in read(found)] == ["b", "a", "c"]
    pattern = SplitConfig(tsv=[str(tmp_path / "[!x]*.tsv"), files[0], str(tmp_path / "?.tsv")])
    with pytest.raises(DataError, match=r"\[!x\]\*\.tsv matches no file"):  # * and ? alone are wild
        find_sources(settings(pattern), "train", tmp_path)
    pattern.tsv = [files[0], str(tmp_path / "?.tsv")]
    found = find_sources(settings(pattern), "train", tmp_path)
    assert [pair[0] for pair in read(found)] == ["b", "a", "b", "c"]


def test_messages_name_files_as_the_user_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.en", "a.de"):
        write(tmp_path / name, b"x\n")
    (found,) = find_sources(settings(SplitConfig(src=["*.en"], tgt=["a.de"])), "train", tmp_path)
    assert found.names == ("a.en", "a.de")
    assert found.paths == (tmp_path / "a.en", tmp_path / "a.de")


# --- patterns


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    names = [
        "n-1.en",
        "n-2.en",
        "n.en",
        "de_n-1",
        "de_n-2",
        "de_n",
        "odd.fr",
        "[x].en",
        "1*.en",
        "12.en",
    ]
    for name in names:
        write(tmp_path / name, b"")
    (tmp_path / "folder.en").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("src", "tgt", "expected"),
    [
        ("n*.en", "de_n*", "n-1.en de_n-1, n-2.en de_n-2, n.en de_n"),
        ("n-?.en", "de_n-?", "n-1.en de_n-1, n-2.en de_n-2"),
        ("odd.*", "[x].*", "odd.fr [x].en"),
        ("n-*.en", "n-?.en", "n-1.en n-1.en, n-2.en n-2.en"),
        ("1*.en", "[x].en", "1*.en [x].en"),
        ("n-1.en n.en", "de_n*1 odd.fr", "n-1.en de_n-1, n.en odd.fr"),
        ("n-1.en n-2.en", "de_n-?", "n-1.en de_n-1, n-2.en de_n-2"),
    ],
)
def test_patterns_pair_what_their_wildcards_stand_for(
    folder: Path, src: str, tgt: str, expected: str
) -> None:
    found = pair_up(src.split(), tgt.split(), "data.train")
    assert ", ".join(map(" ".join, found)) == expected


@pytest.mark.parametrize(
    ("src", "tgt", "expected"),
    [
        ("n-*.en", "de_*-1", "has no counterpart|source files"),
        ("n*.en", "de_n-*", "n.*has no counterpart|source files"),
        ("n-1.en n.en", "odd.fr", r"data\.train: 2 source files \(n-1\.en .*1 target"),
        ("n.en", "de_n-?", "1 source files.*2 target"),
        ("nothing*", "odd.fr", r"nothing\* matches no file"),
    ],
)
def test_files_without_a_counterpart_are_refused(
    folder: Path, src: str, tgt: str, expected: str
) -> None:
    with pytest.raises(DataError, match=expected):
        pair_up(src.split(), tgt.split(), "data.train")


def test_a_missing_shard_on_one_side_is_named(folder: Path) -> None:
    write(folder / "n-3.en", b"")
    write(folder / "de_n-4", b"")
    with pytest.raises(DataError, match="de_n-4 has no counterpart"):
        pair_up(["n-*.en"], ["de_n-*"], "data.train")


# --- named corpora


def test_named_corpora_come_in_the_order_of_their_names_with_their_tags(tmp_path: Path) -> None:
    files = [str(write(tmp_path / f"{name}.tsv", lines([f"{name}\tx"]))) for name in "abc"]
    corpora = {
        "web": CorpusConfig(tsv=[files[0]], weight=0),
        "news": CorpusConfig(tsv=files[1:], src_tag="<2de>"),
    }
    config = settings(corpora=corpora)
    found = find_sources(config, "train", tmp_path)
    assert [(s.corpus, s.src_tag) for s in found] == [
        ("news", "<2de>"),
        ("news", "<2de>"),
        ("web", None),
    ]
    assert [pair[0] for pair in read(found)] == ["b", "c", "a"]
    assert has_split(config.data, "train")
    assert not has_split(config.data, "valid")


def test_a_corpus_without_text_is_refused(tmp_path: Path) -> None:
    config = settings(corpora={"news": CorpusConfig(weight=2)})
    with pytest.raises(ConfigError, match=r"data\.corpora\.news names no text"):
        find_sources(config, "train", tmp_path)


def test_a_corpus_that_comes_along_is_spooled_whole(tmp_path: Path) -> None:
    for corpus, split, seed in [
        (Corpus.numbers, "train", 1),
        (Corpus.numbers, "test", 0),
        (Corpus.copy, "valid", 2),
    ]:
        config = PreprocessConfig(data=DataConfig(corpus=corpus), seed=seed)
        assert has_split(config.data, split)
        (found,) = find_sources(config, split, tmp_path)
        assert found.format is Format.pair
        assert read([found]) == bundled_corpus(corpus, seed)[split]


def test_a_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    train = SplitConfig(src=[str(tmp_path / "a")], tgt=[str(tmp_path / "b")])
    with pytest.raises(DataError, match=r"a does not exist; make it with: make text$"):
        find_sources(settings(train=train, made_by="make text"), "train", tmp_path)


# --- streams

OLD = 1_000_000_000  # a time in nanoseconds that no file of a test gets by itself


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> io.BytesIO:
    stream = io.BytesIO(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
    return stream


def test_stdin_can_be_one_side_or_a_file_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tgt = write(tmp_path / "tgt", lines([pair[1] for pair in PAIRS]))
    pipe(monkeypatch, lines([pair[0] for pair in PAIRS]))
    found = find_sources(settings(SplitConfig(src=["-"], tgt=[str(tgt)])), "train", tmp_path / "s")
    assert read(found) == PAIRS
    assert found[0].names == ("stdin", str(tgt))
    pipe(monkeypatch, lines(["\t".join(pair) for pair in PAIRS]))
    assert read(find_sources(settings(SplitConfig(tsv=["-"])), "train", tmp_path / "s")) == PAIRS


def test_stdin_is_spooled_anew_only_when_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(SplitConfig(tsv=["-"]))
    is_same = []
    for content in (b"a\tb\n", b"a\tb\n", b"a\tb\nc\td\n", b"a\tb\n", b"c\td\n", b"c\td\n", b""):
        pipe(monkeypatch, content)
        (path,) = find_sources(config, "train", tmp_path)[0].paths
        assert path.read_bytes() == content
        is_same.append(path.stat().st_mtime_ns == OLD)
        os.utime(path, ns=(OLD, OLD))
    assert is_same == [False, True, False, False, False, True, False]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("part", [{"shard": "2/3"}, {"step": Step.merge}])
def test_a_part_of_a_shared_job_reads_what_the_plan_has_spooled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: dict[str, Any]
) -> None:
    config = settings(SplitConfig(tsv=["-"]))
    for key, value in part.items():
        setattr(config, key, value)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="with step=plan first"):
        find_sources(config, "train", tmp_path)
    pipe(monkeypatch, lines(["\t".join(pair) for pair in PAIRS]))
    find_sources(settings(SplitConfig(tsv=["-"])), "train", tmp_path)
    monkeypatch.setattr(sys, "stdin", None)
    assert read(find_sources(config, "train", tmp_path)) == PAIRS


def test_named_pipes_are_spooled_each_by_itself(tmp_path: Path) -> None:
    pipes, writers = [tmp_path / "src.gz", tmp_path / "tgt.gz"], []
    for side, path in enumerate(pipes):
        os.mkfifo(path)
        content = pack(lines([pair[side] for pair in PAIRS]), path.suffix[1:])
        writers.append(threading.Thread(target=path.write_bytes, args=[content]))
        writers[-1].start()
    split = SplitConfig(src=[str(pipes[0])], tgt=[str(pipes[1])])
    found = find_sources(settings(split), "train", tmp_path / "spool")
    for writer in writers:
        writer.join()
    assert read(found) == PAIRS
    assert found[0].names == tuple(map(str, pipes))


def test_what_is_missing_is_said_before_a_stream_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = pipe(monkeypatch, b"a\tb\n")
    train, valid = SplitConfig(tsv=["-"]), SplitConfig(tsv=[str(tmp_path / "none.tsv")])
    with pytest.raises(DataError, match="none.tsv does not exist"):
        find_sources(settings(train, valid=valid), "train", tmp_path)
    with pytest.raises(ConfigError, match="2 files are -"):
        find_sources(settings(train, valid=train), "train", tmp_path)
    with pytest.raises(DataError, match="is a folder"):
        find_sources(settings(train, test=SplitConfig(tsv=[str(tmp_path)])), "train", tmp_path)
    assert stream.tell() == 0
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="stdin is closed"):
        find_sources(settings(train), "train", tmp_path)


@pytest.mark.parametrize("seed", range(30))
def test_a_spooled_file_is_what_was_written_and_untouched_if_it_was_that(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    path = tmp_path / "spool" / "file"
    old, new = (b"x" * draw.choice([0, 9]) + draw.choice([b"", b"a", b"bc"]) for _ in range(2))
    for content in (old, new):
        with spool(path) as stream:
            for start in range(0, len(content), 4):
                stream.write(content[start : start + 4])
        assert path.read_bytes() == content
        is_same = path.stat().st_mtime_ns == OLD
        os.utime(path, ns=(OLD, OLD))
    assert is_same == (old == new)


@pytest.mark.parametrize("written", [b"abc", b"abd"])
def test_an_interrupted_stream_leaves_no_half_file(tmp_path: Path, written: bytes) -> None:
    path = write(tmp_path / "file", b"abcdef")

    def spool_half() -> None:
        with spool(path) as stream:
            stream.write(written)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spool_half()
    left = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert left == {"file": b"abcdef"}
