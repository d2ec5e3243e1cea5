"""Validation and test sets that are taken out of the training text."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from preprocessing import WORDS, read_back, read_report, run_and_die, tree, write_text
from toy import command

import nmt.preprocess.held_out
from nmt.data.binary import read_held_out
from nmt.preprocess.characters import normal_form

SMALL = ["tokenizer.vocab_size=340", "num_threads=1"]
Pairs = list[tuple[str, str]]


def write_pairs(path: Path, size: int = 600) -> Pairs:
    """Write pairs of which many are near others: the same on one side but for case and signs."""
    draw = random.Random(path.name)
    pairs: Pairs = []
    for number in range(size):
        src, tgt = (" ".join(draw.choices(WORDS, k=draw.randint(3, 7))) for _ in range(2))
        if number % 3 == 0 and pairs:
            old = draw.choice(pairs)
            src, tgt = draw.choice([(old[0].upper() + "!", tgt), (src, f"„{old[1]}“"), old])
        pairs.append((src, tgt))
    write_text(path, [f"{src}\t{tgt}" for src, tgt in pairs])
    return pairs


def held_out(folder: Path) -> dict[str, Pairs]:
    """Return the text of the held-out sets."""
    return {
        split: [
            pair
            for text in read_held_out(folder, split)
            for pair in zip(text.sources, text.targets, strict=True)
        ]
        for split in ("valid", "test")
    }


def forms(pairs: Pairs) -> set[str]:
    return {normal_form(text) for pair in pairs for text in pair}


def test_no_sentence_is_in_two_sets_and_no_other_pair_is_lost(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "a.tsv")
    wanted = ["data.valid.num_pairs=40", "data.test.num_pairs=25"]
    arguments = [f"data.train.tsv={tmp_path / 'a.tsv'}", *wanted, *SMALL]
    assert command("preprocess", *arguments, f"data_dir={tmp_path / 'd'}", "keep_text=true") == 0
    sets = held_out(tmp_path / "d")
    assert [len(found) for found in sets.values()] == [40, 25]
    assert all(pair in pairs for found in sets.values() for pair in found)
    train = list(read_back(tmp_path / "d"))
    for one, other in itertools.combinations([*map(forms, sets.values()), forms(train)], 2):
        assert not one & other
    taken = set.union(*map(forms, sets.values()))
    others = [pair for pair in pairs if not forms([pair]) & taken]
    assert len(train) == len(others)
    assert forms(train) == forms(others)
    report = read_report(tmp_path / "d")
    assert report["train"]["dropped"] == {"held out": len(pairs) - len(others)}
    assert report["overlap"]["valid"]["normalised"]["sources"]["held_out_rows"] == 0


def test_more_validation_pairs_leave_the_test_set_as_it_is(tmp_path: Path) -> None:
    write_pairs(tmp_path / "a.tsv", 120)
    tests = []
    for number in (5, 25):
        places = [f"data.train.tsv={tmp_path / 'a.tsv'}", f"data_dir={tmp_path / str(number)}"]
        sizes = [f"data.valid.num_pairs={number}", "data.test.num_pairs=10"]
        assert command("preprocess", *places, *sizes, "tokenizer.vocab_size=300", SMALL[1]) == 0
        tests.append(held_out(tmp_path / str(number))["test"])
    assert tests[0] == tests[1]


@pytest.mark.slow
def test_sets_are_the_same_whatever_the_order_the_processes_and_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = write_pairs(tmp_path / "a.tsv")
    wanted = ["data.valid.num_pairs=30", "data.test.num_pairs=30", "tokenizer.vocab_size=340"]
    arguments = [f"data.train.tsv={tmp_path / 'a.tsv'}", *wanted]

    def make(name: str, *more: str) -> Path:
        assert command("preprocess", *arguments, f"data_dir={tmp_path / name}", *more) == 0, name
        return tmp_path / name

    expected = make("one", "num_threads=1")
    assert tree(make("two", "num_threads=2")) == tree(expected)
    for number in (2, 3, 4, 6):
        place = f"data_dir={tmp_path / 'killed'}"
        assert run_and_die(number, *arguments, place, "num_threads=1") == -9, number
    assert tree(make("killed", "num_threads=1")) == tree(expected)
    assert held_out(make("shards", "num_threads=2", "shard_pairs=250")) == held_out(expected)
    write_text(tmp_path / "a.tsv", [f"{src}\t{tgt}" for src, tgt in reversed(pairs)])
    assert held_out(make("reversed", "num_threads=1"))["test"] == held_out(expected)["test"]
    monkeypatch.setattr(nmt.preprocess.held_out, "_SPARE", 0)  # most candidates are dropped early
    assert held_out(make("few", "num_threads=1")) == held_out(expected)
    more = make("more", "num_threads=1", "data.valid.num_pairs=60")  # the test set stays
    assert held_out(more)["test"] == held_out(expected)["test"]


@pytest.mark.slow
def test_share_is_that_of_the_pairs_and_corpora_keep_their_tags(tmp_path: Path) -> None:
    arguments = ["data.valid.num_pairs=0.1", *SMALL, f"data_dir={tmp_path / 'd'}"]
    texts = {}
    for name, language in (("a", "de"), ("b", "fr")):
        texts[name] = write_pairs(tmp_path / f"{name}.tsv")
        key = f"data.corpora.{name}"
        arguments += [f"{key}.tsv={tmp_path / name}.tsv", f"{key}.tgt_lang={language}"]
    swapped = [f"{tgt}\t{src}" for src, tgt in texts["a"]]
    write_text(tmp_path / "c.tsv", swapped)
    arguments += [f"data.corpora.c.tsv={tmp_path / 'c.tsv'}", "data.corpora.c.tgt_lang=en"]
    assert command("preprocess", *arguments) == 0
    found = read_held_out(tmp_path / "d", "valid")
    assert [text.direction.src_tag for text in found] == ["<2de>", "<2fr>", "<2en>"]
    assert 60 < sum(len(text.sources) for text in found) < 240  # a tenth of 1,800, less those near
    taken = {normal_form(line) for text in found for line in (*text.sources, *text.targets)}
    for src, tgt in read_back(tmp_path / "d"):  # nor in the other direction
        assert normal_form(src.split("> ", 1)[1]) not in taken
        assert normal_form(tgt) not in taken


@pytest.mark.slow
def test_what_cannot_be_taken_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_pairs(tmp_path / "a.tsv", 50)
    train = f"data.train.tsv={tmp_path / 'a.tsv'}"
    for arguments, message in (
        (["data.valid.num_pairs=100"], "data.valid.num_pairs=100: the training text has only "),
        (["data.valid.num_pairs=0"], "num_pairs=0.0: must be above 0"),
        (["data.valid.num_pairs=1.5"], "num_pairs=1.5: must be a whole number, or a share below"),
        (["data.valid.num_pairs=9", f"data.valid.tsv={tmp_path / 'a.tsv'}"], "tsv and num_pairs"),
        (["data.valid.num_pairs=9", "data.test.num_pairs=0.1"], "both be numbers, or both be"),
        (["data.valid.num_pairs=0.5", "data.test.num_pairs=0.5"], "be shares, below 1 together"),
        (["data=numbers", "data.valid.num_pairs=9"], "has all its text; leave out data.valid"),
        (["experiment=numbers", train], "data.corpus=numbers: has all its text; leave out data.tr"),
        (["data=copy", f"data.corpora.a.{train[11:]}"], "out data.corpora, or set data=files"),
    ):
        has_all = not {"data=numbers", "experiment=numbers", "data=copy"}.isdisjoint(arguments)
        more = [] if has_all else [train]
        assert command("preprocess", *more, *arguments, *SMALL, f"data_dir={tmp_path / 'd'}") == 2
        assert message in capfd.readouterr().err, arguments
    assert not (tmp_path / "d").exists()


def test_all_of_a_text_is_searched_where_few_pairs_can_be_taken(tmp_path: Path) -> None:
    draw = random.Random(0)
    signs = ["".join(draw.choices("!?.,;:()", k=5)) for _ in range(2600)]
    pairs = [f"{text}\t{text}" for text in signs]  # no words, so nothing to compare
    for number, row in enumerate(draw.sample(range(2600), 12)):
        pairs[row] = f"word{number}\tWort{number}"
    write_text(tmp_path / "a.tsv", pairs)
    more = ["data.valid.num_pairs=12", f"data.train.tsv={tmp_path / 'a.tsv'}", *SMALL]
    assert command("preprocess", *more, f"data_dir={tmp_path / 'd'}") == 0
    (valid,) = read_held_out(tmp_path / "d", "valid")
    assert len(valid.sources) == 12
