"""The report of a corpus: its counts, its advice, its table and its page."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from test_statistics import measure
from tiny import sentences, tokenizer_config

from nmt.config import CorpusConfig, DataConfig, PreprocessConfig
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.preprocess.chunks import Location
from nmt.preprocess.clean_chunk import PairCounts
from nmt.preprocess.duplicates import COMPARED_UNITS
from nmt.preprocess.report import Report, build_report, render_data_report, report_table
from nmt.preprocess.statistics import HeldOutFinder, Statistics

SRC = sentences(300, seed=1)
TGT = [" ".join(line.split()[::-1]) for line in SRC]
NEW = ["tree tree house house tree", "über über größer über green über"]


def measure_corpus(
    tokenizer: Tokenizer,
    src: Sequence[str] = SRC,
    tgt: Sequence[str] = TGT,
    *,
    held_out: HeldOutFinder | None = None,
    **counts: Any,
) -> Statistics:
    """Measure a corpus of which all pairs were kept, unless `counts` differs."""
    statistics = measure(tokenizer, list(src), list(tgt), held_out)
    statistics.pairs = PairCounts(**{"read": len(src), "kept": len(src), **counts})
    return statistics


def report(
    tokenizer: Tokenizer,
    train: Statistics | dict[str, Statistics] | None = None,
    *,
    data: DataConfig | None = None,
    duplicates: tuple[int, int, int] | None = None,
) -> Report:
    """Report on training corpora, and on validation text that is new.

    `duplicates` has the numbers of repeated pairs, sources and targets.
    """
    if train is None:
        train = measure_corpus(tokenizer)
    corpora = train if isinstance(train, dict) else {"": train}
    repeats = None
    if duplicates is not None:
        repeats = dict(zip(COMPARED_UNITS, duplicates, strict=True))
    return build_report(
        {"train": corpora, "valid": {"": measure_corpus(tokenizer, NEW, NEW)}},
        config=PreprocessConfig(data=data or DataConfig(src_lang="en", tgt_lang="de")),
        tokenizers=tokenizer,
        duplicates=repeats,
    )


def test_each_defect_brings_its_advice_and_clean_text_none(tokenizer: Tokenizer) -> None:
    def advise(src: Sequence[str] = SRC, tgt: Sequence[str] = TGT, **options: Any) -> list[str]:
        return report(tokenizer, measure_corpus(tokenizer, src, tgt, **options))["advice"]

    def advise_on_duplicates(numbers: tuple[int, int, int]) -> list[str]:
        return report(tokenizer, duplicates=numbers)["advice"]

    held_out = HeldOutFinder({"valid": (NEW, NEW)})
    overlapping = advise(
        [*SRC, NEW[0].upper(), NEW[1]], [*TGT, NEW[0] + " !", "a"], held_out=held_out
    )
    weightless = DataConfig(corpora={"a": CorpusConfig(weight=0.0)})
    unmixed = report(tokenizer, {"a": measure_corpus(tokenizer)}, data=weightless)["advice"]
    drops = {"too long": 30, "empty side": 10}
    damaged = [line + "\ufffd" for line in SRC]
    assert advise() == []
    for expected, advice in {
        "were dropped, most for 'too long' (30)": advise(read=340, dropped=drops),
        "1 of 2 valid pairs (50.0%) are in the training text": overlapping,
        "(first a.src:301)": overlapping,
        "2 of 2 valid sources": overlapping,
        "filter.duplicates=pair": advise_on_duplicates((100, 150, 120)),
        "filter.duplicates=src": advise_on_duplicates((10, 150, 120)),
        "are single bytes, most for U+4F60": advise([*SRC, "你" * 99], [*TGT, "a"]),
        "are odd (first U+FFFD REPLACEMENT CHARACTER": advise(damaged),
        "filter.max_foreign": advise([*SRC, "мир " * 50], [*TGT, "a"]),
        "target tokens for each source token": advise(SRC, [4 * line for line in SRC]),
        "filter.max_ratio=3": advise(SRC, ["a"] * 30 + TGT[30:]),
        "an epoch has no training pairs": unmixed,
        "raise tokenizer.vocab_size": advise(["qxjzwvkp"] * 300),
    }.items():
        text = "\n".join(advice)
        assert expected in text, (expected, text)
        assert text.count("filter.duplicates") <= 1, text  # once for each cause


def test_unknown_tokens_above_a_thousandth_bring_advice() -> None:
    plain = train_tokenizer(SRC + TGT, tokenizer_config(vocab_size=60, byte_fallback=False))
    assert report(plain)["advice"] == []
    defective = report(plain, measure_corpus(plain, [*SRC, "你 好 " * 5], [*TGT, "a"]))
    assert any("source tokens are unknown" in line for line in defective["advice"])
    side = defective["train"]["src"]
    assert side["unknown_share"] == round(side["unknown_tokens"] / side["tokens"], 6) > 0.001
    assert side["uncovered"][0]["code"] in ("U+4F60", "U+597D")


def test_odd_characters_and_characters_without_a_piece_are_counted(tokenizer: Tokenizer) -> None:
    lines = ["a\u200bb 你 \ue000\ufffd\t é"] * 3
    corpus = measure_corpus(tokenizer, SRC + lines, TGT + lines)
    side = report(tokenizer, corpus)["train"]["src"]
    odd = {entry["code"]: (entry["count"], entry["why"]) for entry in side["odd"]}
    assert odd == {
        "U+0009": (3, "control"),
        "U+200B": (3, "invisible"),
        "U+4F60": (3, "other script"),
        "U+E000": (3, "private use"),
        "U+FFFD": (3, "replacement"),
    }
    assert side["odd_characters"] == 15
    uncovered = {entry["code"] for entry in side["uncovered"]}
    assert "U+4F60" in uncovered
    assert not {"U+0061", "U+0020", "U+00FC"} & uncovered
    total = sum(map(len, SRC + lines))
    missing = sum(entry["count"] for entry in side["uncovered"])
    assert side["covered_share"] == pytest.approx(1 - missing / total)
    assert side["characters"] == total


def test_pairs_are_steep_beyond_three_times_the_tokens(tokenizer: Tokenizer) -> None:
    def num_tokens(line: str) -> int:
        return len(tokenizer.encode(line)) + 1  # EOS

    lines = [" ".join(["tree"] * times) for times in range(1, 12)]
    ratios = []
    for line in lines:
        ratio = num_tokens(line) / num_tokens(lines[0])
        ratios.append(ratio)
        for src, tgt in ((line, lines[0]), (lines[0], line)):
            train = report(tokenizer, measure_corpus(tokenizer, [src] * 9, [tgt] * 9))["train"]
            assert train["steep_pairs"] == (9 if ratio > 3 else 0), ratio
    assert 3 < min(ratio for ratio in ratios if ratio > 3) < 3.9


def test_quantiles_and_bars_describe_the_lengths(tokenizer: Tokenizer) -> None:
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    for lines in (SRC, [" ".join(SRC[: 1 + n % 20]) for n in range(300)]):
        description = report(tokenizer, measure_corpus(tokenizer, lines))["train"]["src"]["lengths"]
        lengths = np.sort([len(tokenizer.encode(line)) + 1 for line in lines])
        for name, share in shares.items():
            assert description[name] == lengths[int(np.ceil(share * 300)) - 1], name
        width = description["bar_width"]
        assert description["bars"] == np.bincount(lengths // width).tolist()
        assert len(description["bars"]) <= 50
        assert width == 1 or len(description["bars"]) > 25


EVIL = '<script src="http://evil/x.js">alert(1)</script>&\u202e'


def evil_report(tokenizer: Tokenizer) -> Report:
    """Report on a corpus whose names and text would harm a page that does not escape them."""
    data = DataConfig(src_lang=EVIL, tgt_lang=EVIL)
    data.corpora = {EVIL: CorpusConfig(), "b": CorpusConfig()}  # set after the checks of DataConfig
    evil = measure_corpus(
        tokenizer,
        [*SRC[:-1], NEW[0]],
        [*TGT[:-1], NEW[0]],
        held_out=HeldOutFinder({"valid": (NEW, NEW)}),
        read=340,
        dropped={EVIL: 40},
        replaced={EVIL: 1},
        examples={EVIL: [Location(EVIL, 7, 3)]},
    )
    corpora = {EVIL: evil, "b": measure_corpus(tokenizer)}
    return report(tokenizer, corpora, data=data, duplicates=(9, 9, 9))


class Page(HTMLParser):
    """Collects tags and attributes, and checks that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the newest tag, which must have this name; void tags call this too."""
        assert self.open.pop() == tag


def test_the_page_is_complete_loads_nothing_and_shows_the_counts(
    tokenizer: Tokenizer,
) -> None:
    content = evil_report(tokenizer)
    text = render_data_report(content)
    assert text == render_data_report(json.loads(json.dumps(content)))  # the report is plain JSON
    page = Page(text)
    assert page.open == []
    assert {"svg", "table", "style", "rect"} <= page.tags
    assert not page.tags & {"script", "link", "img", "iframe", "object", "a"}
    assert not page.attributes & {"src", "href", "onload", "onclick", "style"}
    for forbidden in ("url(", "@import", "\u202e", "<script"):
        assert forbidden not in text
    assert "prefers-color-scheme: dark" in text
    assert text.count("&lt;script") > 5  # the corpus, the reason, the location
    for split in ("train", "valid"):
        read = f'<td class="number">{content[split]["read"]:,}</td>'
        assert f'{read}<td class="number">{content[split]["kept"]:,}</td>' in text
    for side in ("src", "tgt"):
        assert f'<td class="number">{content["train"][side]["tokens"]:,}</td>' in text
        for count in filter(None, content["train"][side]["lengths"]["bars"]):
            assert f"tokens: {count:,} pairs</title>" in text
    for line in content["advice"]:
        assert EVIL in line or html.escape(line) in text


def test_the_table_fits_a_screen(tokenizer: Tokenizer) -> None:
    data = DataConfig(src_lang="en", tgt_lang="de")
    names = [f"corpus-with-a-long-name-{i}" for i in range(30)]
    data.corpora = {name: CorpusConfig(weight=i / 10) for i, name in enumerate(names)}
    reasons = {f"reason {i}": 1 for i in range(9)}
    held_out = HeldOutFinder({"valid": (SRC, TGT)})
    corpus = measure_corpus(tokenizer, held_out=held_out, read=400, dropped=reasons)
    corpora = dict.fromkeys(names, corpus)
    content = report(tokenizer, corpora, data=data, duplicates=(9000, 9000, 9000))
    times = [corpus["times"] for corpus in content["train"]["corpora"].values()]
    assert times == [corpus.weight for corpus in data.corpora.values()]
    lines = report_table(content).split("\n")
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    table = "\n".join(lines)
    assert table.count("\n› corpus") == 8
    assert "\n› 22 more" in table
