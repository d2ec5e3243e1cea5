"""What nmt-preprocess writes: the same bytes however the work is shared, and no pair slipped."""

from __future__ import annotations

import hashlib
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
from preprocessing import ODD, read_back, read_report, tree, write_corpus, write_text
from toy import command

from nmt.config import PreprocessConfig, TokenizerConfig
from nmt.data.binary import read_meta
from nmt.data.tokenizer import Tokenizer
from nmt.preprocess import clean, encode, plan, scan
from nmt.preprocess.chunks import Chunk
from nmt.preprocess.plan import first_limit, sample_end, sample_size
from nmt.preprocess.scan import ALL_KEYS, sample_keys


@pytest.fixture(scope="module")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, and a data folder made of it in shards of 70 pairs."""
    folder = tmp_path_factory.mktemp("preprocess")
    arguments = [*write_corpus(folder), "shard_pairs=70", f"data_dir={folder / 'data'}"]
    assert command("preprocess", *arguments) == 0
    return folder


def arguments(corpus_dir: Path, data_dir: Path, *changes: str) -> list[str]:
    """Return the arguments that made the data folder of `corpus_dir`, for another folder."""
    return [*write_corpus(corpus_dir), "shard_pairs=70", f"data_dir={data_dir}", *changes]


def test_every_line_keeps_its_number_and_its_partner_and_held_out_ones_stay(
    corpus_dir: Path,
) -> None:
    kept = [
        [int(re.match(r"\d+", line)[0]) for line in pair] for pair in read_back(corpus_dir / "data")
    ]  # type: ignore[index]
    assert all(src == tgt for src, tgt in kept)
    lines = [
        (corpus_dir / f"train.{side}.txt").read_bytes().decode().split("\n")[:-1]
        for side in ("src", "tgt")
    ]
    good = [
        n
        for n, pair in enumerate(zip(*lines, strict=True))
        if all(line.strip() and "\0" not in line and "too long" not in line for line in pair)
    ]
    assert [src for src, _ in kept] == good
    report = read_report(corpus_dir / "data")["train"]
    assert report["read"] == len(lines[0])
    assert report["kept"] == len(good) == report["read"] - sum(report["dropped"].values())
    assert set(report["dropped"]) == {"empty side", "NUL character", "too long"}
    for reason, part in (("NUL character", b"\0"), ("too long", b"too long")):
        for example in report["examples"][reason]:  # which names the line that was dropped
            line = Path(example["file"]).read_bytes().split(b"\n")[example["line"] - 1]
            assert part in line
        assert len(report["examples"][reason]) == min(5, report["dropped"][reason])
    held_out = read_report(corpus_dir / "data")["valid"]
    assert (held_out["read"], held_out["kept"], held_out["dropped"]) == (12, 12, {})
    for side in ("src", "tgt"):
        assert (corpus_dir / f"data/valid.{side}").read_bytes().count(b"\n") == 12
    assert len(list(read_back(corpus_dir / "data", "valid"))) == 12


def test_other_libraries_read_the_shards_that_meta_lists(corpus_dir: Path) -> None:
    paths = sorted((corpus_dir / "data").glob("train-*.arrow"))
    assert [path.name for path in paths] == [f"train-{n:05d}.arrow" for n in range(5)]
    with pa.OSFile(str(paths[1])) as source, pa.ipc.open_stream(source) as reader:
        rows = reader.read_all().to_pylist()
    assert Dataset.from_file(str(paths[1])).to_list() == rows
    meta, tokenizer = (
        read_meta(corpus_dir / "data"),
        Tokenizer.load(corpus_dir / "data/tokenizer.model"),
    )
    (shards,) = meta.splits["train"]
    assert [shard.file for shard in shards.shards] == [path.name for path in paths]
    assert shards.shards[1].pairs == len(rows)
    assert meta.tokenizer_sha256 == tokenizer.sha256
    assert meta.vocab_size == tokenizer.vocab_size == 330


def test_corpora_are_shards_of_their_own_with_their_tags(tmp_path: Path) -> None:
    changes = []
    for name in ("news", "web"):
        named = write_corpus(tmp_path, 100, name=name)
        changes += [a.replace(".", ".corpora.", 1) for a in named if a.startswith(f"data.{name}")]
    changes += ["data.corpora.web.src_tag=<web>", "data.corpora.web.weight=2", "shard_pairs=60"]
    others = [a for a in write_corpus(tmp_path) if not a.startswith("data.train")]
    assert command("preprocess", *others, *changes, f"data_dir={tmp_path / 'data'}") == 0
    index = read_meta(tmp_path / "data").splits["train"]
    assert [(c.corpus, c.weight, len(c.shards)) for c in index] == [
        ("news", 1.0, 2),
        ("web", 2.0, 2),
    ]
    files = [shard.file for shard in index[1].shards]
    assert files == ["train-web-00000.arrow", "train-web-00001.arrow"]
    sizes = [corpus.num_pairs for corpus in index]
    tagged = [src.startswith("<web>") for src, _ in read_back(tmp_path / "data")]
    assert tagged == [False] * sizes[0] + [True] * sizes[1]


@pytest.mark.slow
def test_a_line_that_is_nothing_but_its_tag_is_empty(tmp_path: Path) -> None:
    lines = [f"word {n}\twort {n}" for n in range(30)]
    lines[3], lines[4] = "\u200b\twort 3", "word 4\t\u200b \u200b"  # normalized away
    corpus = f"data.corpora.a.tsv={write_text(tmp_path / 'a.tsv', lines)}"
    tags = ["data.corpora.a.tgt_lang=de", "data.corpora.a.tgt_tag=<bt>", "data.valid.num_pairs=2"]
    for number, more in enumerate(([], tags[:1], tags[:2])):
        folder = tmp_path / str(number)
        settings = ["tokenizer.vocab_size=300", *more, tags[2], f"data_dir={folder}"]
        assert command("preprocess", corpus, *settings, "num_threads=1") == 0
        dropped = read_report(folder)["train"]["dropped"]
        assert dropped == {"empty side": 2, "held out": 2}, more


def test_duplicates_are_dropped_but_for_the_first(tmp_path: Path) -> None:
    for side in ("src", "tgt"):
        lines = [f"{n % 5500} {side}" for n in range(6000)]  # two chunks
        write_text(tmp_path / f"train.{side}", lines)
        write_text(tmp_path / f"valid.{side}", lines[:3])
    sources = [
        f"data.{s}.{e}={tmp_path / s}.{e}" for s in ("train", "valid") for e in ("src", "tgt")
    ]
    settings = ["tokenizer.vocab_size=280", "shard_pairs=5900", "filter.duplicates=pair"]
    places = [f"data_dir={tmp_path / 'data'}", "num_threads=2"]
    assert command("preprocess", *sources, *settings, *places) == 0
    assert [int(src.split()[0]) for src, _ in read_back(tmp_path / "data")] == list(range(5500))
    assert read_report(tmp_path / "data")["train"]["dropped"] == {"duplicate": 500}


def test_many_drops_are_a_warning(
    corpus_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("preprocess", *arguments(corpus_dir, tmp_path / "data", "max_length=9")) == 0
    output = capfd.readouterr()
    assert "empty side" in output.out
    assert re.search(r"warning: \d\d\.\d % .* most of them for: too long", output.err)


def test_text_is_read_three_times_and_cleaned_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"line {n % 2900}" for n in range(3000)]
    paths = [write_text(tmp_path / f"train.{side}", lines) for side in ("src", "tgt")]
    num_opened = Counter[str]()
    num_cleaned = Counter[int]()
    open_path, clean_chunk = Path.open, clean.clean

    def count_open(path: Path, *args: Any, **options: Any) -> Any:
        num_opened[path.name] += "buffering" in options  # how text is read, not peeked into
        return open_path(path, *args, **options)

    def count_clean(chunk: Chunk, config: PreprocessConfig, *, held_out: bool) -> Any:
        if chunk.source.paths[0] == paths[0]:
            num_cleaned[chunk.first_line] += chunk.num_pairs
        return clean_chunk(chunk, config, held_out=held_out)

    monkeypatch.setattr(Path, "open", count_open)
    for module in (clean, encode, scan):
        monkeypatch.setattr(module, "clean", count_clean)
    train = [f"data.train.{path.suffix[1:]}={path}" for path in paths]
    settings = ["data.valid.num_pairs=5", "data.test.num_pairs=4", "filter.duplicates=src"]
    sizes = ["tokenizer.vocab_size=300", "num_threads=1", f"data_dir={tmp_path / 'data'}"]
    assert command("preprocess", *train, *settings, *sizes) == 0
    assert (num_opened["train.src"], num_opened["train.tgt"]) == (3, 3)
    assert num_cleaned == {1: 2 * 3000}


@pytest.mark.parametrize("limit", [0, pytest.param(1 << 63, marks=pytest.mark.slow)])
def test_a_limit_that_leaves_too_few_pairs_for_the_sample_changes_nothing(
    corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    data = tmp_path / "data"
    few = "tokenizer.max_sentences=300"  # of 600
    assert command("preprocess", *arguments(corpus_dir, data, few)) == 0
    found = tree(data)
    monkeypatch.setattr(plan, "first_limit", lambda *_: limit)
    assert command("preprocess", *arguments(corpus_dir, data, few)) == 0
    assert tree(data) == found
    assert found["tokenizer.model"] != (corpus_dir / "data/tokenizer.model").read_bytes()


def test_a_shard_without_pairs_has_no_file(tmp_path: Path) -> None:
    rows = ["", *[""] * 69, *(f"{n} red house" for n in range(100))]
    paths = [write_text(tmp_path / side, rows) for side in ("src", "tgt")]
    files = [f"data.{split}.{path.name}={path}" for split in ("train", "valid") for path in paths]
    more = ["tokenizer.vocab_size=300", "num_threads=1", "shard_pairs=70"]
    assert command("preprocess", *files, *more, f"data_dir={tmp_path / 'd'}") == 0
    shards = read_meta(tmp_path / "d").splits["train"][0].shards
    assert [(shard.file, shard.pairs) for shard in shards] == [
        ("train-00001.arrow", 70),
        ("train-00002.arrow", 30),
    ]
    found = {path.name for path in (tmp_path / "d").glob("train-*.arrow")}
    assert found == {shard.file for shard in shards}


@pytest.mark.slow
def test_text_is_kept_beside_the_ids_on_request(corpus_dir: Path, tmp_path: Path) -> None:
    assert command("preprocess", *arguments(corpus_dir, tmp_path / "data", "keep_text=true")) == 0
    texts = [
        (row["src_text"], row["tgt_text"])
        for path in sorted((tmp_path / "data").glob("train-*.arrow"))
        for row in Dataset.from_file(str(path)).to_list()
    ]
    read = list(read_back(tmp_path / "data"))
    assert [[t.split()[0] for t in pair] for pair in texts] == [
        [t.split()[0] for t in pair] for pair in read
    ]
    assert read == list(read_back(corpus_dir / "data"))
    assert not any(odd in text for pair in texts for text in pair for odd in ODD[:7])


@pytest.mark.slow
def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, nmt.cli.tasks, nmt.preprocess.prepare\n"
        "assert not {'torch', 'distributed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


NUM_PAIRS = 20_000


def test_keys_are_those_of_splitmix64() -> None:
    """The generator as published, from a state that the seed and the corpus name."""
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


def test_the_smallest_keys_which_seed_and_corpus_decide_are_drawn() -> None:
    keys = sample_keys(1, "news", np.arange(NUM_PAIRS))
    for size in (1, 700, NUM_PAIRS - 1, NUM_PAIRS, 10 * NUM_PAIRS):
        drawn = np.flatnonzero(keys < sample_end(keys, size))
        assert drawn.tolist() == sorted(np.argsort(keys)[:size].tolist()), size
        # a span need not write more than what is below the first limit
        assert (keys < np.uint64(first_limit(size, NUM_PAIRS))).sum() >= min(size, NUM_PAIRS)
    assert first_limit(1000, 10**7) < ALL_KEYS // 1000
    keys_of = [sample_keys(*key, np.arange(NUM_PAIRS)) for key in ((1, "a"), (2, "a"), (1, "b"))]
    for i, keys in enumerate(keys_of):
        assert len(np.unique(keys)) == NUM_PAIRS
        first = set(np.argsort(keys)[:1000].tolist())
        assert len(first & set(np.argsort(keys_of[i - 1])[:1000].tolist())) < 150
        shares = np.bincount(np.array([*first]) // (NUM_PAIRS // 10))  # each part has 100 or so
        assert 60 < shares.min() <= shares.max() < 150
    configs = (
        TokenizerConfig(max_sentences=9),  # of both sides
        TokenizerConfig(max_sentences=1),
        TokenizerConfig(max_sentences=9, separate=True),  # of each side
    )
    assert [sample_size(config) for config in configs] == [4, 1, 9]
