"""nmt-preprocess writes every pair, with both sides together, and the same bytes each time."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from preprocessing import (
    ODD,
    name_files,
    preprocess,
    read_back,
    read_report,
    tree,
    write_corpus,
    write_text,
)
from toy import command

from nmt.config import PreprocessConfig, TokenizerConfig
from nmt.data.binary import read_meta
from nmt.data.tokenizer import Tokenizer
from nmt.preprocess import clean, encode, plan, scan
from nmt.preprocess.chunks import Chunk
from nmt.preprocess.plan import estimate_scan_limit, find_sample_limit, sample_size
from nmt.preprocess.scan import MAX_KEY, sample_keys


@pytest.fixture(scope="module")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, and a data folder made of it in shards of 70 pairs."""
    folder = tmp_path_factory.mktemp("preprocess")
    preprocess(folder / "data", write_corpus(folder))
    return folder


def read_lines(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\n")[:-1]


def is_dropped(line: str) -> bool:
    return not line.strip() or "\0" in line or "too long" in line


def line_number(text: str) -> int:
    """Return the number at the start of a line of `write_corpus`."""
    match = re.match(r"\d+", text)
    assert match is not None, text
    return int(match[0])


def test_every_training_line_keeps_its_number_and_its_partner(corpus_dir: Path) -> None:
    src_lines = read_lines(corpus_dir / "train.src.txt")
    tgt_lines = read_lines(corpus_dir / "train.tgt.txt")
    expected = []
    for number, (src, tgt) in enumerate(zip(src_lines, tgt_lines, strict=True)):
        if not is_dropped(src) and not is_dropped(tgt):
            expected.append((number, number))
    pairs = read_back(corpus_dir / "data")
    assert [(line_number(src), line_number(tgt)) for src, tgt in pairs] == expected
    report = read_report(corpus_dir / "data")["train"]
    assert report["read"] == len(src_lines)
    assert report["kept"] == len(expected) == report["read"] - sum(report["dropped"].values())
    assert set(report["dropped"]) == {"empty side", "NUL character", "too long"}
    for reason, text in (("NUL character", "\0"), ("too long", "too long")):
        for example in report["examples"][reason]:  # which names the line that was dropped
            assert text in read_lines(Path(example["file"]))[example["line"] - 1]
        assert len(report["examples"][reason]) == min(5, report["dropped"][reason])


def test_every_held_out_line_is_kept(corpus_dir: Path) -> None:
    held_out = read_report(corpus_dir / "data")["valid"]
    assert (held_out["read"], held_out["kept"], held_out["dropped"]) == (12, 12, {})
    for side in ("src", "tgt"):
        assert len(read_lines(corpus_dir / f"data/valid.{side}")) == 12
    assert len(list(read_back(corpus_dir / "data", "valid"))) == 12


def test_other_libraries_read_the_shards_that_meta_lists(corpus_dir: Path) -> None:
    paths = sorted((corpus_dir / "data").glob("train-*.arrow"))
    names = [path.name for path in paths]
    assert names == [f"train-{n:05d}.arrow" for n in range(5)]
    with pa.OSFile(str(paths[1])) as source, pa.ipc.open_stream(source) as reader:
        rows = reader.read_all().to_pylist()
    assert Dataset.from_file(str(paths[1])).to_list() == rows
    meta = read_meta(corpus_dir / "data")
    tokenizer = Tokenizer.load(corpus_dir / "data/tokenizer.model")
    (index,) = meta.splits["train"]
    assert [shard.file for shard in index.shards] == names
    assert index.shards[1].pairs == len(rows)
    assert meta.tokenizer_sha256 == tokenizer.sha256
    assert meta.vocab_size == tokenizer.vocab_size == 330


def test_each_corpus_has_its_own_shards_and_tags(tmp_path: Path) -> None:
    settings = ["tokenizer.vocab_size=330", "filter.max_ratio=9", "shard_pairs=60"]
    settings += ["data.corpora.web.src_tag=<web>", "data.corpora.web.weight=2"]
    for name in ("news", "web"):
        write_corpus(tmp_path, 100, name=name)
        settings += name_files(tmp_path, name, f"corpora.{name}")
    data = preprocess(tmp_path / "data", settings, name_files(tmp_path, "valid"))
    news, web = read_meta(data).splits["train"]
    assert (news.corpus, news.weight, len(news.shards)) == ("news", 1.0, 2)
    assert (web.corpus, web.weight, len(web.shards)) == ("web", 2.0, 2)
    files = [shard.file for shard in web.shards]
    assert files == ["train-web-00000.arrow", "train-web-00001.arrow"]
    is_tagged = [src.startswith("<web>") for src, _ in read_back(data)]
    assert is_tagged == [False] * news.num_pairs + [True] * web.num_pairs


@pytest.mark.slow
def test_a_line_with_only_its_tag_is_empty(tmp_path: Path) -> None:
    lines = [f"word {n}\twort {n}" for n in range(30)]
    lines[3] = "\u200b\twort 3"  # normalized away
    lines[4] = "word 4\t\u200b \u200b"
    write_text(tmp_path / "a.tsv", lines)
    settings = [f"data.corpora.a.tsv={tmp_path}/a.tsv", "data.valid.num_pairs=2"]
    settings.append("tokenizer.vocab_size=300")
    for tag in ("", "data.corpora.a.tgt_lang=de", "data.corpora.a.tgt_tag=<bt>"):
        if tag:
            settings.append(tag)
        dropped = read_report(preprocess(tmp_path / "data", settings))["train"]["dropped"]
        assert dropped == {"empty side": 2, "held out": 2}, tag


def test_duplicates_except_the_first_are_dropped(tmp_path: Path) -> None:
    for side in ("src", "tgt"):
        lines = [f"{n % 5500} {side}" for n in range(6000)]  # two chunks
        write_text(tmp_path / f"train.{side}.txt", lines)
        write_text(tmp_path / f"valid.{side}.txt", lines[:3])
    files = name_files(tmp_path, "train") + name_files(tmp_path, "valid")
    settings = ["tokenizer.vocab_size=280", "shard_pairs=5900", "filter.duplicates=pair"]
    data = preprocess(tmp_path / "data", files, settings, "num_threads=2")
    assert [line_number(src) for src, _ in read_back(data)] == list(range(5500))
    assert read_report(data)["train"]["dropped"] == {"duplicate": 500}


def test_many_drops_are_a_warning(
    corpus_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    preprocess(tmp_path / "data", write_corpus(corpus_dir), "max_length=9")
    output = capfd.readouterr()
    assert "empty side" in output.out
    assert re.search(r"warning: \d\d\.\d % .* most of them for: too long", output.err)


def test_held_out_pairs_are_not_among_the_many_drops(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [f"word{n}\twort{n}" if n % 10 else f"word{n}\t" for n in range(200)]
    write_text(tmp_path / "train.tsv", lines)
    settings = [f"data.train.tsv={tmp_path}/train.tsv", "data.valid.num_pairs=60"]
    preprocess(tmp_path / "data", settings, "tokenizer.vocab_size=290")
    warning = "warning: 10.0 % of the training pairs were dropped, most of them for: empty side"
    assert warning in capfd.readouterr().err


def test_sides_that_are_swapped_in_training_alone_are_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = {"src": ["red", "green", "big", "house"], "tgt": ["rot", "grün", "groß", "Haus"]}
    draw = random.Random(1)
    for split, size in (("train", 90), ("valid", 9)):
        rows = [draw.choices(range(4), k=6) for _ in range(size)]
        for side, names in words.items():
            lines = [" ".join([str(n), *(names[i] for i in row)]) for n, row in enumerate(rows)]
            write_text(tmp_path / f"{split}.{side}.txt", lines)
    settings = name_files(tmp_path, "valid")
    train = name_files(tmp_path, "train")
    swapped = [
        f"data.corpora.a.src={tmp_path}/train.tgt.txt",
        f"data.corpora.a.tgt={tmp_path}/train.src.txt",
    ]
    preprocess(tmp_path / "data", settings, train)
    assert "to be swapped" not in capfd.readouterr().err
    preprocess(tmp_path / "data", settings, swapped)
    warning = (
        r"warning: source and target of data\.corpora\.a seem to be swapped: 100 % of the words"
    )
    assert re.search(warning, capfd.readouterr().err)


def test_text_is_read_three_times_and_cleaned_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"line {n % 2900}" for n in range(3000)]
    for side in ("src", "tgt"):
        write_text(tmp_path / f"train.{side}.txt", lines)
    num_opened = Counter[str]()
    num_cleaned = Counter[int]()
    open_path = Path.open
    clean_chunk = clean.clean

    def count_open(path: Path, *args: Any, **options: Any) -> Any:
        num_opened[path.name] += "buffering" in options  # only set where text is read
        return open_path(path, *args, **options)

    def count_clean(chunk: Chunk, config: PreprocessConfig, *, held_out: bool) -> Any:
        if chunk.source.paths[0].name == "train.src.txt":
            num_cleaned[chunk.first_line] += chunk.num_pairs
        return clean_chunk(chunk, config, held_out=held_out)

    monkeypatch.setattr(Path, "open", count_open)
    for module in (clean, encode, scan):
        monkeypatch.setattr(module, "clean", count_clean)
    settings = ["data.valid.num_pairs=5", "data.test.num_pairs=4", "filter.duplicates=src"]
    files = name_files(tmp_path, "train")
    preprocess(tmp_path / "data", files, settings, "tokenizer.vocab_size=300")
    assert (num_opened["train.src.txt"], num_opened["train.tgt.txt"]) == (3, 3)
    assert num_cleaned == {1: 2 * 3000}


def test_a_data_folder_is_replaced_only_on_request(
    corpus_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = write_corpus(corpus_dir)
    data = preprocess(tmp_path / "data", settings)
    expected = tree(data)
    target = f"data_dir={data}"
    assert command("preprocess", "num_threads=1", settings, target, "max_length=9") == 2
    assert "holds other data; nothing was replaced, since runs" in capsys.readouterr().err
    assert tree(data) == expected
    # the data folder stays for the same command with overwrite=true
    preprocess(data, settings, "max_length=9")
    replaced = tree(data)
    assert replaced != expected
    assert not list(tmp_path.glob(".data.work"))
    for side in ("src", "tgt"):
        write_text(tmp_path / f"train.{side}.txt", [f"{n} red house" for n in range(50)])
    files = name_files(tmp_path, "train") + name_files(tmp_path, "train", "valid")
    assert command("preprocess", "num_threads=1", files, target) == 2
    assert "training pairs, and the new text has 50; nothing" in capsys.readouterr().err
    assert tree(data) == replaced
    # the same data again
    assert command("preprocess", "num_threads=1", settings, target, "max_length=9") == 0
    assert tree(data) == replaced


@pytest.mark.parametrize("limit", [0, pytest.param(1 << 63, marks=pytest.mark.slow)])
def test_a_limit_that_leaves_too_few_pairs_for_the_sample_changes_nothing(
    corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    settings = [*write_corpus(corpus_dir), "tokenizer.max_sentences=300"]  # of 600
    expected = tree(preprocess(tmp_path / "data", settings))
    monkeypatch.setattr(plan, "estimate_scan_limit", lambda size, num_pairs: limit)
    assert tree(preprocess(tmp_path / "data", settings)) == expected
    assert expected["tokenizer.model"] != (corpus_dir / "data/tokenizer.model").read_bytes()


def test_a_shard_without_pairs_has_no_file(tmp_path: Path) -> None:
    lines = [""] * 70 + [f"{n} red house" for n in range(100)]
    for side in ("src", "tgt"):
        write_text(tmp_path / f"train.{side}.txt", lines)
    files = name_files(tmp_path, "train") + name_files(tmp_path, "train", "valid")
    data = preprocess(tmp_path / "data", files, "tokenizer.vocab_size=300", "shard_pairs=70")
    num_pairs = {shard.file: shard.pairs for shard in read_meta(data).splits["train"][0].shards}
    assert num_pairs == {"train-00001.arrow": 70, "train-00002.arrow": 30}
    assert {path.name for path in data.glob("train-*.arrow")} == num_pairs.keys()


@pytest.mark.slow
def test_text_is_kept_with_the_ids_on_request(corpus_dir: Path, tmp_path: Path) -> None:
    data = preprocess(tmp_path / "data", write_corpus(corpus_dir), "keep_text=true")
    pairs = list(read_back(data))
    assert pairs == list(read_back(corpus_dir / "data"))
    rows = []
    for path in sorted(data.glob("train-*.arrow")):
        rows += Dataset.from_file(str(path)).to_list()
    for row, (src, tgt) in zip(rows, pairs, strict=True):
        assert row["src_text"].split()[0] == src.split()[0]
        assert row["tgt_text"].split()[0] == tgt.split()[0]
        for character in ODD[:7]:
            assert character not in row["src_text"] + row["tgt_text"]


@pytest.mark.slow
def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, nmt.cli.tasks, nmt.preprocess.prepare\n"
        "assert not {'torch', 'distributed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


NUM_PAIRS = 20_000


def test_keys_come_from_splitmix64() -> None:
    """The published generator; seed and corpus give its state."""
    mask = (1 << 64) - 1

    def splitmix64(state: int, number: int) -> int:
        z = (state + number * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert [splitmix64(1234567, n) for n in (1, 2)] == [6457827717110365317, 3203168211198807973]
    digest = hashlib.blake2b(b"7 news", digest_size=8).digest()
    expected = [splitmix64(int.from_bytes(digest, "little"), number) for number in range(5)]
    assert sample_keys(7, "news", np.arange(5)).tolist() == expected


def test_the_pairs_with_the_smallest_keys_are_drawn() -> None:
    keys = sample_keys(1, "news", np.arange(NUM_PAIRS))
    for size in (1, 700, NUM_PAIRS - 1, NUM_PAIRS, 10 * NUM_PAIRS):
        sample = np.flatnonzero(keys < find_sample_limit(keys, size))
        assert sample.tolist() == sorted(np.argsort(keys)[:size].tolist()), size
        # the pairs below the first limit, which a span writes, are enough
        assert (keys < np.uint64(estimate_scan_limit(size, NUM_PAIRS))).sum() >= min(
            size, NUM_PAIRS
        )
    assert estimate_scan_limit(1000, 10**7) < MAX_KEY // 1000


def test_keys_depend_on_seed_and_corpus_and_are_spread_evenly() -> None:
    samples: list[Any] = []
    for seed, corpus in ((1, "a"), (2, "a"), (1, "b")):
        keys = sample_keys(seed, corpus, np.arange(NUM_PAIRS))
        assert len(np.unique(keys)) == NUM_PAIRS
        samples.append(np.argsort(keys)[:1000])
        counts = np.bincount(samples[-1] // (NUM_PAIRS // 10))  # about 100 in each tenth
        assert 60 < counts.min() <= counts.max() < 150
    for sample, other_sample in itertools.combinations(samples, 2):
        assert len(np.intersect1d(sample, other_sample)) < 150


def test_a_joint_tokenizer_takes_half_of_its_sentences_from_each_side() -> None:
    assert sample_size(TokenizerConfig(max_sentences=9)) == 4
    assert sample_size(TokenizerConfig(max_sentences=1)) == 1
    assert sample_size(TokenizerConfig(max_sentences=9, separate=True)) == 9
