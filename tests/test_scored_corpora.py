"""Corpora with scores: formats, filter.min_score, duplicates, rules for pairs, scores of pairs."""

from __future__ import annotations

import gzip
import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dirt import clean_and_filter, make_chunk
from exporting import random_model, short_sentences
from preprocessing import preprocess, read_back, read_report, write_text
from test_rerank import swap_languages
from toy import command
from translating import write_lines

from nmt.config import DataConfig, FilterConfig, PreprocessConfig, SplitConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.preprocess.chunks import Format
from nmt.preprocess.text_rules import (
    have_equal_addresses,
    have_equal_currencies,
    have_equal_numbers,
    letter_share,
    longest_word,
)
from nmt.translate.contrast import OtherLines

Pairs = list[tuple[str, str]]
SMALL = ["tokenizer.vocab_size=290", "num_threads=1", "shard_pairs=40"]


def draw_scored(count: int, seed: int = 1) -> list[tuple[str, str, float]]:
    """Draw pairs with scores; most pairs occur several times, some scores too."""
    draw = random.Random(seed)
    words = ["red", "green", "house", "tree", "sees"]
    rows = []
    for _ in range(count):
        pair = " ".join(draw.choices(words, k=2)), " ".join(draw.choices(words, k=1))
        rows.append((*pair, round(draw.random(), 1)))
    return rows


def best_rows(rows: list[tuple[str, str, float]], key: Any) -> Pairs:
    """The first pair with the highest score among those with an equal key, in order."""
    best: dict[Any, int] = {}
    for i, row in enumerate(rows):
        if key(row) not in best or row[2] > rows[best[key(row)]][2]:
            best[key(row)] = i
    return [rows[i][:2] for i in sorted(best.values())]


def write_valid(folder: Path) -> list[str]:
    rows = [f"{src}\t{tgt}" for src, tgt, _ in draw_scored(10, seed=9)]
    return [f"data.valid.tsv={write_text(folder / 'valid.tsv', rows)}"]


# rules


def test_numbers_are_equal_in_any_order_script_and_grouping() -> None:
    for src, tgt, expected in (
        ("no digits", "keine", True),
        ("at 5:30 on 12 May", "am 12. Mai um 5:30", True),
        ("1,000.50", "1.000,50", True),
        ("1000 houses", "1.000 Häuser", True),
        ("10 000 000", "10,000,000", True),
        ("in 2019 300 people", "300 Menschen im Jahr 2019", True),
        ("٣ and 14", "3 und 14", True),
        ("7", "7 7", False),
        ("17", "71", False),
        ("1,5", "15", False),
        ("007", "7", False),
        ("A4", "A5", False),
        ("9" * 5000, "9" * 5000, True),
        ("²", "", True),  # is not a decimal digit
    ):
        assert have_equal_numbers(src, tgt) is expected, (src, tgt)
        assert have_equal_numbers(tgt, src) is expected, (tgt, src)


def test_addresses_are_equal_up_to_the_punctuation_after_them() -> None:
    for src, tgt, expected in (
        ("see https://x.org/a?b=1.", "siehe https://x.org/a?b=1", True),
        ("(www.x.org)", "www.x.org!", True),
        ("mail a.b@x.org, please", "bitte an a.b@x.org.", True),
        ("https://x.org", "https://x.de", False),
        ("https://x.org", "hier", False),
        ("w/o address", "a@", True),
        ("请访问https://x.cn。谢谢", "Visit https://x.cn. Thanks", True),
        ("写信到a@b.cn谢谢", "Write to a@b.cn, thanks", True),
        ("请访问https://x.cn谢谢", "Visit https://y.cn", False),
    ):
        assert have_equal_addresses(src, tgt) is expected, (src, tgt)


def test_currencies_differ_only_if_both_sides_have_signs() -> None:
    for src, tgt, expected in (
        ("$5", "5 $", True),
        ("$5", "5 €", False),
        ("$5", "5 Dollar", True),
        ("€5 and £3", "£3 und €5", True),
        ("€5 and £3", "£3 und 5 Euro", False),
        ("＄5", "$5", True),
    ):
        assert have_equal_currencies(src, tgt) is expected, (src, tgt)


def test_letters_and_words_are_measured_without_spaces() -> None:
    assert letter_share("ab 12") == 0.5
    assert letter_share("हिन्दी") == 1.0  # with combining marks
    assert letter_share(" ") == 0.0
    assert longest_word("a bcd  ef\u00a0ghijk") == 5
    assert longest_word("") == 0


def test_each_rule_drops_its_pairs() -> None:
    pairs = [
        ("a house", "ein Haus"),
        ("2 houses", "3 Häuser"),
        ("see www.x.org", "siehe www.y.org"),
        ("$ 5", "€ 5"),
        ("a ......", "ein Haus"),
        ("a house", "ein " + "x" * 30),
    ]
    sides = [list(map(str.encode, side)) for side in zip(*pairs, strict=True)]
    chunk = make_chunk(sides, Format.pair)
    for setting, reason, dropped in (
        ({"numbers": True}, "different numbers", 1),
        ({"urls": True}, "different addresses", 2),
        ({"currency": True}, "different currencies", 3),
        ({"min_letters": 0.4}, "few letters", 4),
        ({"max_word_length": 20}, "long word", 5),
    ):
        config = PreprocessConfig(filter=FilterConfig(**setting))
        if reason == "few letters":
            expected = [pair for i, pair in enumerate(pairs) if i not in (3, 4)]
        else:
            expected = [pair for i, pair in enumerate(pairs) if i != dropped]
        cleaned = clean_and_filter(chunk, config)
        assert list(zip(cleaned.src, cleaned.tgt, strict=True)) == expected
        assert list(cleaned.counts.dropped) == [reason]
        held_out = clean_and_filter(chunk, config, held_out=True)
        assert len(held_out.src) == len(pairs)


# formats and filter.min_score


@pytest.mark.slow
def test_bicleaner_opusfilter_and_json_give_the_same_corpus(tmp_path: Path) -> None:
    rows = draw_scored(100)
    bicleaner = []
    records = []
    scores = []
    for number, (src, tgt, score) in enumerate(rows):
        # bicleaner appends the score to the columns: two addresses, source, target
        bicleaner.append(f"http://a.org/{number}\thttp://b.org\t{src}\t{tgt}\t{score:.3f}")
        records.append(json.dumps({"translation": {"src": src, "tgt": tgt}, "score": score}))
        # a line of `opusfilter score`, whose filters give numbers, lists and objects
        filters = {"LengthRatioFilter": 1.5, "LanguageIDFilter": [0.1, score]}
        scores.append(json.dumps(filters | {"AlphabetRatioFilter": {"src": score}}))
    expected = [(src, tgt) for src, tgt, score in rows if score >= 0.4]
    assert 0 < len(expected) < len(rows)
    tsv = write_text(tmp_path / "bicleaner.tsv", bicleaner)
    jsonl = write_text(tmp_path / "scored.jsonl", records)
    opusfilter = write_text(tmp_path / "scores.jsonl", scores)
    plain = write_text(tmp_path / "scores", [str(row[2]) for row in rows])
    (tmp_path / "scores.gz").write_bytes(gzip.compress(plain.read_bytes()))
    src = write_text(tmp_path / "train.src", [row[0] for row in rows])
    tgt = write_text(tmp_path / "train.tgt", [row[1] for row in rows])
    text = [f"data.train.src={src}", f"data.train.tgt={tgt}"]
    for number, arguments in enumerate(
        (
            [f"data.train.tsv={tsv}", "data.train.columns=[3,4]", "data.train.score=5"],
            [f"data.train.jsonl={jsonl}", "data.train.score=score"],
            [*text, f"data.train.scores={opusfilter}", "data.train.score=LanguageIDFilter.1"],
            [*text, f"data.train.scores={opusfilter}", "data.train.score=AlphabetRatioFilter.src"],
            [*text, f"data.train.scores={plain}"],
            [*text, f"data.train.scores={tmp_path / 'scores.gz'}"],
        )
    ):
        folder = tmp_path / f"data-{number}"
        options = [*SMALL, *write_valid(tmp_path), "filter.min_score=0.4"]
        preprocess(folder, *arguments, *options)
        assert list(read_back(folder)) == expected, arguments
        assert '"low score"' in json.dumps(read_report(folder))


@pytest.mark.slow
def test_duplicates_keep_the_best_score_in_all_shards(tmp_path: Path) -> None:
    rows = draw_scored(300)
    lines = [f"{src}\t{tgt}\t{score}" for src, tgt, score in rows]
    tsv = write_text(tmp_path / "train.tsv", lines)
    unscored = write_text(tmp_path / "b.tsv", [f"{src}\t{tgt}" for src, tgt, _ in rows[:50]])
    keys = {"pair": lambda row: row[:2], "src": lambda row: row[0], "tgt": lambda row: row[1]}
    for name, key in keys.items():
        options = [*SMALL, *write_valid(tmp_path), f"filter.duplicates={name}"]
        folder = tmp_path / name
        preprocess(folder, f"data.train.tsv={tsv}", "data.train.score=3", *options)
        assert list(read_back(folder)) == best_rows(rows, key), name
        first = tmp_path / f"{name}-first"
        preprocess(first, f"data.train.tsv={tsv}", *options)
        assert list(read_back(first)) == best_rows([(*row[:2], 0.0) for row in rows], key)
    # pairs without scores yield to those with one, although their corpus is read first
    corpora = [f"data.corpora.a.tsv={unscored}", f"data.corpora.b.tsv={tsv}"]
    folder = tmp_path / "both"
    options = [*SMALL, *write_valid(tmp_path), "filter.duplicates=pair", "filter.min_score=0"]
    preprocess(folder, *corpora, "data.corpora.b.score=3", *options)
    assert list(read_back(folder)) == best_rows(rows, keys["pair"])


@pytest.mark.slow
def test_lines_without_a_score_are_malformed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{src}\t{tgt}\t{score}" for src, tgt, score in draw_scored(60)]
    for bad in ("a b\tc", "a b\tc\t", "a b\tc\tgood", "a b\tc\tnan", "a b\tc\tinf"):
        tsv = write_text(tmp_path / "train.tsv", [*lines[:30], bad, *lines[30:]])
        options = [f"data.train.tsv={tsv}", "data.train.score=3", *SMALL, *write_valid(tmp_path)]
        arguments = [*options, f"data_dir={tmp_path / 'refused'}"]
        assert command("preprocess", *arguments) == 2
        error = capsys.readouterr().err
        assert f"{tsv}:31: " in error, bad
        assert len([line for line in error.splitlines() if ":31: " in line]) == 1
        folder = tmp_path / "kept"
        preprocess(folder, *options, "data.invalid=drop", "overwrite=true")
        assert len(list(read_back(folder))) == 60
    src = write_text(tmp_path / "src", ["a", "b"])
    scores = write_text(tmp_path / "scores", ["1"])
    text = [f"data.train.src={src}", f"data.train.tgt={src}", *write_valid(tmp_path)]
    refused = [*text, *SMALL, f"data_dir={tmp_path / 'refused'}"]
    assert command("preprocess", *refused, f"data.train.scores={scores}") == 2
    assert "2 lines" in capsys.readouterr().err
    assert command("preprocess", *refused, f"data.train.scores=[{scores},{scores}]") == 2
    assert "2 files for 1 files of text" in capsys.readouterr().err


def test_errors_name_the_column_or_field_without_a_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tsv = write_text(tmp_path / "train.tsv", ["a b\tc d\t"])
    settings = [f"data.train.tsv={tsv}", "data.train.score=3", *write_valid(tmp_path), *SMALL]
    assert command("preprocess", *settings, f"data_dir={tmp_path / 'refused'}") == 2
    assert "train.tsv:1: no score in column 3; " in capsys.readouterr().err
    src = write_text(tmp_path / "src", ["a b", "c d"])
    text = [f"data.train.src={src}", f"data.train.tgt={src}", *write_valid(tmp_path), *SMALL]
    for path, message in (
        ("Bleu", 'scores:1: no score in the field "Bleu"; fix the line'),
        ("Ratio.2", 'scores:1: no score in the field "Ratio.2"; '),
        ("Ratio", "scores:1: no score, but '[0.5, 0.9]'; "),
        ("Name", "scores:1: no score, but 'x'; "),
        ("Text", "scores:2: no score, but 'bad'; "),  # the first line has a number
    ):
        records = [{"Ratio": [0.5, 0.9], "Name": "x", "Text": score} for score in ("0.5", "bad")]
        scores = write_text(tmp_path / "scores", [json.dumps(record) for record in records])
        settings = [f"data.train.scores={scores}", f"data.train.score={path}"]
        assert command("preprocess", *text, *settings, f"data_dir={tmp_path / 'refused'}") == 2
        assert message in capsys.readouterr().err


def test_settings_of_scores_that_contradict_each_other_are_errors() -> None:
    for settings, message in (
        ({"score": "3"}, "score=3: needs tsv, jsonl or scores"),
        ({"tsv": ["a"], "score": "0"}, "score=0: must be the number of a column"),
        ({"tsv": ["a"], "score": "x"}, "score=x: must be the number of a column"),
        ({"tsv": ["a"], "scores": ["b"]}, "scores=b: needs src and tgt"),
    ):
        with pytest.raises(ConfigError, match=message):
            SplitConfig(**settings)
    with pytest.raises(ConfigError, match=r"filter.min_score=0.5: needs scores"):
        PreprocessConfig(data=DataConfig(), filter=FilterConfig(min_score=0.5))


# the dual score


def run_score(
    folder: Path, model: Path, sources: list[str], targets: list[str], *options: str
) -> list[str]:
    """Score pairs with nmt-score, and return the lines of its output. Files are in `folder`."""
    src = write_lines(folder / "src", sources)
    tgt = write_lines(folder / "tgt", targets)
    output = folder / "scores"
    files = [f"src={src}", f"tgt={tgt}", f"output={output}", "device=cpu"]
    assert command("score", f"model_dir={model}", *files, *options) == 0
    return output.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_dual_scores_follow_from_the_cross_entropies_of_both_models(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = random_model(tmp_path / "forward", tokenizer)
    random_weights = random_model(tmp_path / "other", tokenizer, seed=4)
    reverse = swap_languages(random_weights, tmp_path / "reverse", tokenizer)
    sources = ["", "", *short_sentences(30)]
    targets = ["", "a", *reversed(short_sentences(30))]
    score = partial(run_score, tmp_path)
    per_token = score(forward, sources, targets, "measure=per_token")
    reverse_per_token = score(reverse, targets, sources, "measure=per_token")
    expected = []
    for a, b in zip(map(float, per_token), map(float, reverse_per_token), strict=True):
        expected.append(math.exp(-(abs(a - b) - (a + b) / 2)))
    dual = ["measure=dual", f"reverse_model={reverse}"]
    for window in (7, 8192):
        options = [*dual, f"window_lines={window}"]
        scores = list(map(float, score(forward, sources, targets, *options)))
        assert scores == pytest.approx(expected, rel=1e-4)
    assert scores[0] == 1.0  # two empty lines
    records = score(forward, sources, targets, f"reverse_model={reverse}", "format=json")
    assert [json.loads(line)["dual"] for line in records] == pytest.approx(scores, rel=1e-6)
    files = [f"model_dir={forward}", f"src={tmp_path / 'src'}", f"tgt={tmp_path / 'tgt'}"]
    for options, message in (
        (["measure=dual"], "measure=dual: needs reverse_model=FOLDER"),
        (
            [f"reverse_model={reverse}"],
            "only works with measure=dual, measure=contrast or format=json",
        ),
        (["measure=dual", f"reverse_model={forward}"], "the model translates xx to yy"),
    ):
        assert command("score", *files, *options) == 2
        assert message in capsys.readouterr().err


# the contrast with other lines


def test_other_lines_differ_from_the_line_and_have_about_its_length() -> None:
    other_lines = OtherLines(2, "sources")
    before, after = other_lines.choose(["a", "bb", "a", "ccc", "dddd", " "])
    assert before == ["bb", "a", "bb", "bb", "bb", "a"]
    assert after == ["ccc", "ccc", "ccc", "dddd", "ccc", "bb"]
    # the next window has one line, so its other lines are from the window before
    assert other_lines.choose(["ee"]) == [["bb"], ["ccc"]]
    assert other_lines.choose(["ee", "ee"]) == [["bb", "bb"], ["ccc", "ccc"]]
    assert OtherLines(5, "sources").choose(["a", "bb"]) == [["bb", "a"]]
    with pytest.raises(ConfigError, match="measure=contrast: all targets are equal"):
        OtherLines(2, "targets").choose(["a", "a", ""])


@pytest.mark.slow
def test_contrast_is_the_difference_to_the_scores_with_other_lines(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = random_model(tmp_path / "forward", tokenizer)
    random_weights = random_model(tmp_path / "other", tokenizer, seed=4)
    reverse = swap_languages(random_weights, tmp_path / "reverse", tokenizer)
    sources = short_sentences(30)
    targets = list(reversed(sources))

    score = partial(run_score, tmp_path)

    def per_token(model: Path, sources: list[str], targets: list[str]) -> Any:
        return np.array(list(map(float, score(model, sources, targets, "measure=per_token"))))

    contrast = per_token(forward, sources, targets)
    for other_sources in OtherLines(3, "sources").choose(sources):
        contrast -= per_token(forward, other_sources, targets) / 3
    reverse_contrast = per_token(reverse, targets, sources)
    for other_targets in OtherLines(3, "targets").choose(targets):
        reverse_contrast -= per_token(reverse, other_targets, sources) / 3
    options = ["measure=contrast", "contrast_lines=3"]
    one_model = score(forward, sources, targets, *options)
    assert list(map(float, one_model)) == pytest.approx(contrast, abs=1e-4)
    options.append(f"reverse_model={reverse}")
    both_models = score(forward, sources, targets, *options)
    expected = (contrast + reverse_contrast) / 2
    assert list(map(float, both_models)) == pytest.approx(expected, abs=1e-4)
    assert np.abs(expected - contrast).max() > 0.01
    records = score(forward, sources, targets, *options, "format=json")
    assert [str(json.loads(line)["contrast"]) for line in records] == both_models
    files = [f"src={tmp_path / 'src'}", f"tgt={tmp_path / 'tgt'}", "device=cpu"]
    write_lines(tmp_path / "src", ["a"] * 3)
    write_lines(tmp_path / "tgt", ["b", "c", "d"])
    for options, message in (
        (["measure=contrast"], "measure=contrast: all sources are equal"),
        (["measure=contrast", "window_lines=1"], "window_lines=1: measure=contrast compares"),
        (["contrast_lines=3"], "contrast_lines=3: needs measure=contrast"),
    ):
        assert command("score", f"model_dir={forward}", *files, *options) == 2
        assert message in capsys.readouterr().err
