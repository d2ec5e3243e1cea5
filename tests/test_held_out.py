"""Validation and test sets that are taken out of the training text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from preprocessing import WORDS, preprocess, read_back, read_report, run_and_die, tree, write_text
from toy import command

from nmt.config import SplitBy
from nmt.data.binary import read_held_out
from nmt.preprocess import held_out
from nmt.preprocess.characters import normal_form
from nmt.preprocess.scan import NUM_KEYS, held_out_key

VOCABULARY = "tokenizer.vocab_size=340"
Pairs = list[tuple[str, str]]


def write_pairs(path: Path, size: int = 600) -> Pairs:
    """Write pairs, of which many equal another on one side except for case and punctuation."""
    draw = random.Random(path.name)
    pairs: Pairs = []
    for number in range(size):
        src = " ".join(draw.choices(WORDS, k=draw.randint(3, 7)))
        tgt = " ".join(draw.choices(WORDS, k=draw.randint(3, 7)))
        if number % 3 == 0 and pairs:
            old = draw.choice(pairs)
            src, tgt = draw.choice([(old[0].upper() + "!", tgt), (src, f"„{old[1]}“"), old])
        pairs.append((src, tgt))
    write_text(path, [f"{src}\t{tgt}" for src, tgt in pairs])
    return pairs


def read_pairs(folder: Path, split: str) -> Pairs:
    """Return the text of a held-out set."""
    pairs: Pairs = []
    for text in read_held_out(folder, split):
        pairs += zip(text.sources, text.targets, strict=True)
    return pairs


def forms(pairs: Iterable[tuple[str, str]]) -> set[str]:
    """Return the normal forms of the sentences of both sides."""
    return set(map(normal_form, itertools.chain.from_iterable(pairs)))


def test_no_sentence_is_in_two_sets_and_no_other_pair_is_lost(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "a.tsv")
    sizes = ["data.valid.num_pairs=40", "data.test.num_pairs=25"]
    data = preprocess(tmp_path / "d", f"data.train.tsv={tmp_path}/a.tsv", sizes, VOCABULARY)
    valid = read_pairs(data, "valid")
    test = read_pairs(data, "test")
    assert (len(valid), len(test)) == (40, 25)
    assert set(valid + test) <= set(pairs)
    train = list(read_back(data))
    assert forms(valid).isdisjoint(forms(test))
    held_out_forms = forms(valid + test)
    assert forms(train).isdisjoint(held_out_forms)
    expected = [pair for pair in pairs if forms([pair]).isdisjoint(held_out_forms)]
    assert len(train) == len(expected)
    assert forms(train) == forms(expected)
    report = read_report(data)
    assert report["train"]["dropped"] == {"held out": len(pairs) - len(expected)}
    assert report["overlap"]["valid"]["normalised"]["sources"]["held_out_rows"] == 0


def test_more_validation_pairs_leave_the_test_set_unchanged(tmp_path: Path) -> None:
    write_pairs(tmp_path / "a.tsv", 120)
    settings = [f"data.train.tsv={tmp_path}/a.tsv", "data.test.num_pairs=10"]
    settings.append("tokenizer.vocab_size=300")
    small = preprocess(tmp_path / "small", settings, "data.valid.num_pairs=5")
    large = preprocess(tmp_path / "large", settings, "data.valid.num_pairs=25")
    assert read_pairs(small, "test") == read_pairs(large, "test")


@pytest.mark.slow
def test_sets_do_not_depend_on_order_processes_and_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = write_pairs(tmp_path / "a.tsv")
    settings = ["data.valid.num_pairs=30", "data.test.num_pairs=30", VOCABULARY, "num_threads=1"]
    settings.append(f"data.train.tsv={tmp_path}/a.tsv")
    expected = preprocess(tmp_path / "one", settings)
    valid = read_pairs(expected, "valid")
    test = read_pairs(expected, "test")
    assert tree(preprocess(tmp_path / "two", settings, "num_threads=2")) == tree(expected)
    for number in (2, 3, 4, 6):
        assert run_and_die(number, settings, f"data_dir={tmp_path}/killed") == -9, number
    assert tree(preprocess(tmp_path / "killed", settings)) == tree(expected)
    shards = preprocess(tmp_path / "shards", settings, "num_threads=2", "shard_pairs=250")
    assert read_pairs(shards, "valid") == valid
    assert read_pairs(shards, "test") == test
    write_text(tmp_path / "a.tsv", [f"{src}\t{tgt}" for src, tgt in reversed(pairs)])
    assert read_pairs(preprocess(tmp_path / "reversed", settings), "test") == test
    monkeypatch.setattr(held_out, "_SPARE_CANDIDATES", 0)  # the first scan finds too few candidates
    small = preprocess(tmp_path / "small", settings)
    assert read_pairs(small, "valid") == valid
    assert read_pairs(small, "test") == test
    large = preprocess(tmp_path / "large", settings, "data.valid.num_pairs=60")
    assert read_pairs(large, "test") == test


@pytest.mark.slow
def test_a_share_of_the_pairs_is_taken_and_corpora_keep_their_tags(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "a.tsv")
    write_pairs(tmp_path / "b.tsv")
    write_text(tmp_path / "c.tsv", [f"{tgt}\t{src}" for src, tgt in pairs])
    settings = ["data.valid.num_pairs=0.1", VOCABULARY]
    for name, language in (("a", "de"), ("b", "fr"), ("c", "en")):
        settings.append(f"data.corpora.{name}.tsv={tmp_path}/{name}.tsv")
        settings.append(f"data.corpora.{name}.tgt_lang={language}")
    data = preprocess(tmp_path / "d", settings)
    tags = [text.direction.src_tag for text in read_held_out(data, "valid")]
    assert tags == ["<2de>", "<2fr>", "<2en>"]
    valid = read_pairs(data, "valid")
    assert 60 < len(valid) < 240  # a tenth of 1,800, without similar pairs
    held_out_forms = forms(valid)
    for src, tgt in read_back(data):  # nor in the other direction
        assert normal_form(src.split("> ", 1)[1]) not in held_out_forms
        assert normal_form(tgt) not in held_out_forms


def test_a_share_takes_the_pairs_of_a_fixed_range_of_keys(tmp_path: Path) -> None:
    draw = random.Random(5)
    pairs = [(f"{draw.random()}", f"{draw.random()}") for _ in range(300)]  # no equal sentences
    settings = ["data.test.num_pairs=0.1", "data.valid.num_pairs=0.1", VOCABULARY]
    for count in (200, 300):
        path = write_text(
            tmp_path / f"{count}.tsv", [f"{src}\t{tgt}" for src, tgt in pairs[:count]]
        )
        data = preprocess(tmp_path / f"{count}", f"data.train.tsv={path}", settings)
        test = []
        valid = []
        for pair in pairs[:count]:
            src_form, tgt_form = map(normal_form, pair)
            share = held_out_key(src_form, tgt_form, SplitBy.pair, seed=0) / NUM_KEYS
            if share < 0.1:
                test.append(pair)
            elif share < 0.2:
                valid.append(pair)
        assert set(read_pairs(data, "test")) == set(test)
        assert set(read_pairs(data, "valid")) == set(valid)


def test_a_source_stays_in_its_set_when_a_later_text_has_more_translations(tmp_path: Path) -> None:
    draw = random.Random(6)
    sources = [" ".join(draw.choices(WORDS, k=6)) for _ in range(150)]
    old_pairs = [(src, f"{draw.random()}") for src in sources for _ in range(2)]
    new_pairs = [(src, f"{draw.random()}") for src in sources for _ in range(4)]
    settings = ["data.test.num_pairs=0.2", "data.valid.num_pairs=0.1", "data.split_by=src"]
    sets: dict[str, list[set[str]]] = {}
    for name, pairs in (("old", old_pairs), ("new", old_pairs + new_pairs)):
        path = write_text(tmp_path / f"{name}.tsv", [f"{src}\t{tgt}" for src, tgt in pairs])
        data = preprocess(tmp_path / name, f"data.train.tsv={path}", settings, VOCABULARY)
        train = {src for src, _ in read_back(data)}
        sets[name] = [{src for src, _ in read_pairs(data, split)} for split in ("valid", "test")]
        sets[name].append(train.intersection(sources))
        assert sum(map(len, sets[name])) == len(set(sources))
    assert sets["old"] == sets["new"]
    assert 10 < len(sets["old"][1]) < 60


def test_both_directions_hold_out_the_same_pairs(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "a.tsv")
    write_text(tmp_path / "reversed.tsv", [f"{tgt}\t{src}" for src, tgt in pairs])
    by_src = ["data.split_by=src", f"data.train.tsv={tmp_path}/a.tsv"]
    by_tgt = ["data.split_by=tgt", f"data.train.tsv={tmp_path}/reversed.tsv"]
    sizes = ["data.valid.num_pairs=20", "data.test.num_pairs=20", VOCABULARY]
    forward = preprocess(tmp_path / "forward", by_src, sizes)
    backward = preprocess(tmp_path / "backward", by_tgt, sizes)
    for split in ("valid", "test"):
        expected = [(tgt, src) for src, tgt in read_pairs(forward, split)]
        assert read_pairs(backward, split) == expected


@pytest.mark.slow
def test_sets_that_cannot_be_taken_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_pairs(tmp_path / "a.tsv", 50)
    train = f"data.train.tsv={tmp_path}/a.tsv"
    valid = f"data.valid.tsv={tmp_path}/a.tsv"
    for arguments, message in (
        ([train, "data.valid.num_pairs=100"], "num_pairs=100: the training text has only "),
        ([train, "data.valid.num_pairs=1.5"], "num_pairs=1.5: must be a whole number, or a share"),
        ([train, "data.valid.num_pairs=9", valid], "tsv and num_pairs"),
        (
            [train, "data.valid.num_pairs=9", "data.test.num_pairs=0.1"],
            "both be numbers of pairs, or shares",
        ),
        (
            [train, "data.valid.num_pairs=0.5", "data.test.num_pairs=0.5"],
            "shares that add up to less than 1",
        ),
        (["data=numbers", "data.valid.num_pairs=9"], "comes with its text; leave out data.valid"),
        (
            ["experiment=numbers", train],
            "data.corpus=numbers: comes with its text; leave out data.t",
        ),
        (["data=copy", f"data.corpora.a.tsv={tmp_path}/a.tsv"], "out data.corpora, or set data=f"),
    ):
        assert command("preprocess", arguments, VOCABULARY, f"data_dir={tmp_path}/d") == 2
        assert message in capfd.readouterr().err, arguments
    assert not (tmp_path / "d").exists()


def test_the_whole_text_is_searched_if_few_pairs_can_be_taken(tmp_path: Path) -> None:
    draw = random.Random(0)
    lines = []
    for _ in range(2600):
        punctuation = "".join(draw.choices("!?.,;:()", k=5))  # no words, so nothing to compare
        lines.append(f"{punctuation}\t{punctuation}")
    for number, row in enumerate(draw.sample(range(2600), 12)):
        lines[row] = f"word{number}\tWort{number}"
    train = f"data.train.tsv={write_text(tmp_path / 'a.tsv', lines)}"
    data = preprocess(tmp_path / "d", train, "data.valid.num_pairs=12", VOCABULARY)
    assert len(read_pairs(data, "valid")) == 12


@pytest.mark.slow
def test_the_whole_text_is_searched_if_the_candidates_have_few_sources(tmp_path: Path) -> None:
    lines = [f"src{number % 40}\ttgt{number}" for number in range(16_000)]
    train = f"data.train.tsv={write_text(tmp_path / 'a.tsv', lines)}"
    settings = ["data.split_by=src", "data.valid.num_pairs=30", VOCABULARY]
    data = preprocess(tmp_path / "d", train, settings)
    assert len(read_pairs(data, "valid")) == 30


@pytest.mark.slow
def test_a_second_scan_collects_no_more_candidates_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_limits = []

    def scan(*arguments: Any) -> None:
        key_limits.append(arguments[-1].held_out_below)
        scan_text(*arguments)

    scan_text = held_out.scan
    monkeypatch.setattr(held_out, "scan", scan)
    lines = [f"src{number % 4000}\ttgt{number}" for number in range(20_000)]
    train = f"data.train.tsv={write_text(tmp_path / 'a.tsv', lines)}"
    settings = ["data.split_by=src", "data.valid.num_pairs=100", VOCABULARY]
    data = preprocess(tmp_path / "d", train, settings)
    assert len(read_pairs(data, "valid")) == 100
    assert len(key_limits) == 1, key_limits  # beside the first scan, which `plan.py` makes
    assert key_limits[0] < 0.7 * NUM_KEYS, key_limits
