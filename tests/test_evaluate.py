"""Scores equal sacreBLEU's own, unfit text is refused, paired tests can be trusted."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest, Result
from sacrebleu.tokenizers import tokenizer_ja_mecab
from toy import command, train, write_corpus

from nmt.errors import ConfigError, DataError
from nmt.evaluate import (
    Comparison,
    Metric,
    Significance,
    SignificanceMethod,
    as_json,
    as_table,
    bleu,
    build_bleu_metric,
    choose_bleu_tokenizer,
    compare,
    evaluate,
)

QUICK = {method: Significance(method=method, num_samples=200) for method in SignificanceMethod}


def corpus(num_lines: int, *, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    words = [f"word{i}" for i in range(50)]
    return [" ".join(rng.choices(words, k=rng.randint(6, 14))) + "." for _ in range(num_lines)]


def damaged(lines: list[str], share: float, *, seed: int = 2) -> list[str]:
    """Replace a share of the words; scores fall with the share."""
    rng = random.Random(seed)
    return [
        " ".join("wrong" if rng.random() < share else word for word in line.split())
        for line in lines
    ]


REFERENCE = corpus(200)
GOOD = damaged(REFERENCE, 0.1)
BAD = damaged(REFERENCE, 0.3, seed=3)


def bleu_comparison(
    system: list[str],
    baseline: list[str],
    method: SignificanceMethod,
    reference: list[str] = REFERENCE,
) -> Comparison:
    options = {"test": QUICK[method], "metrics": [Metric.bleu]}
    (result,) = compare(system, [reference], baseline=baseline, **options)
    return result


@pytest.mark.slow
def test_scores_and_signatures_equal_those_of_sacrebleu(tmp_path: Path) -> None:
    references = [REFERENCE, damaged(REFERENCE, 0.2, seed=4)]
    uppercase = [line.upper() for line in GOOD]
    for hypotheses, lowercase in ((GOOD, False), (uppercase, True)):
        options = {"tokenize": "intl", "lowercase": lowercase, "metrics": list(Metric)}
        scores = evaluate(hypotheses, references, **options)
        chrf = [CHRF(word_order=order, lowercase=lowercase) for order in (0, 2)]
        metrics = [BLEU(tokenize="intl", lowercase=lowercase), *chrf, TER()]
        expected = [metric.corpus_score(hypotheses, references) for metric in metrics]
        assert [score.name for score in scores] == ["BLEU", "chrF2", "chrF2++", "TER"]
        assert [score.value for score in scores] == [score.score for score in expected]
        signatures = [str(metric.get_signature()) for metric in metrics]
        assert [score.signature for score in scores] == signatures
    assert bleu(GOOD, references, tokenize="intl") == scores[0].value
    for name, lines in (("ref", REFERENCE), ("hyp", GOOD)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "ref", "-i", "hyp", "-m", "bleu", "chrf", "ter"]
    process = subprocess.run(
        [*command, "-w", "6"], cwd=tmp_path, capture_output=True, check=True, text=True
    )
    expected = [(e["name"], e["score"], e["signature"]) for e in json.loads(process.stdout)]
    scores = evaluate(GOOD, [REFERENCE])
    assert [(s.name, round(s.value, 6), s.signature) for s in scores] == expected


def test_details_of_scores_explain_their_values() -> None:
    half, chrf, ter = evaluate([line[: len(line) // 2] for line in GOOD], [REFERENCE])
    assert 0 < half.detail["brevity_penalty"] < 1
    assert half.detail["hypothesis_tokens"] < half.detail["reference_tokens"]
    assert chrf.detail == {}
    rate = 100 * ter.detail["num_edits"] / ter.detail["reference_tokens"]
    assert ter.value == pytest.approx(rate)
    perfect = evaluate(REFERENCE, [REFERENCE], metrics=list(Metric))
    assert [score.value for score in perfect] == pytest.approx([100, 100, 100, 0])


def test_unequal_counts_are_refused_with_both_numbers_and_empty_lines_are_scored() -> None:
    for hypotheses, references, message in (
        (GOOD[1:], [REFERENCE[1:], REFERENCE], "hypotheses: 199 lines, reference set 2: 200;"),
        ([], [[]], "0 lines"),
        (GOOD, [], "no references"),
    ):
        for score in (evaluate, bleu):
            with pytest.raises(DataError, match=message):
                score(hypotheses, references)
    with pytest.raises(DataError, match="baseline: 199 lines, reference set 1: 200;"):
        compare(GOOD, [REFERENCE], baseline=BAD[1:])
    assert bleu(["", *GOOD[1:]], [REFERENCE]) < bleu(GOOD, [REFERENCE])
    assert bleu([""] * 200, [REFERENCE]) == 0


def test_tokenized_text_is_refused_unless_forced() -> None:
    tokenized = [line[:-1] + " ." for line in GOOD[:101]] + GOOD[101:]
    with pytest.raises(DataError, match=r"hypotheses: 101 of 200 .*force=true"):
        evaluate(tokenized, [REFERENCE])
    with pytest.raises(DataError, match="references: 101"):
        evaluate(GOOD, [REFERENCE, tokenized])
    with pytest.raises(DataError, match="baseline: 101"):
        compare(GOOD, [REFERENCE], baseline=tokenized)
    assert evaluate(tokenized, [REFERENCE], force=True)
    assert bleu(tokenized, [REFERENCE]) > 0
    lines = [line[:-1] + " ." for line in GOOD[:100]] + GOOD[100:]
    assert evaluate(lines, [REFERENCE], metrics=[Metric.bleu]), "a hundred are accepted"


def test_the_tokenizer_follows_the_target_language_and_a_missing_one_names_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for language, tokenizer in {
        "zh_CN": "zh",
        "zho-Hans": "zh",
        "JA": "ja-mecab",
        "jpn_Jpan": "ja-mecab",
        "de": "13a",
        "ko": "ko-mecab",
        "kok": "13a",
    }.items():
        assert choose_bleu_tokenizer(language) == tokenizer
        assert tokenizer in BLEU.TOKENIZERS
    with pytest.raises(ConfigError, match=r"tokenize=ja-mecap .*did you mean ja-mecab"):
        evaluate(["a"], [["a"]], tokenize="ja-mecap")
    monkeypatch.setattr(tokenizer_ja_mecab, "MeCab", None)
    with pytest.raises(ConfigError, match=r"^[^\n]*pip install nmt\[ja\][^\n]*$"):
        build_bleu_metric("ja-mecab")


def test_a_warning_names_a_better_tokenizer_for_scripts_without_spaces(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for text, tokenize, remedy in (
        ("他喜欢看书。", "13a", "set tgt_lang=zh"),
        ("彼は本を読むのが好きです。", "13a", "set tgt_lang=ja"),
        ("เขาชอบอ่านหนังสือ", "intl", "set tokenize=char"),
        ("他喜欢看书。", "zh", ""),
        ("Er liest gern.", "13a", ""),
        ("Он любит читать 书.", "13a", ""),
        ("42", "13a", ""),
    ):
        caplog.clear()
        evaluate([text] * 5, [[text] * 5], tokenize=tokenize)
        assert remedy in caplog.text, text
        assert bool(caplog.text) == bool(remedy), (text, caplog.text)
        evaluate([text] * 5, [[text] * 5], tokenize=tokenize, metrics=[Metric.chrf])
        assert len(caplog.records) == bool(remedy), text


@pytest.mark.slow
def test_language_of_the_model_picks_the_tokenizer_and_a_missing_one_stops_training_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = write_corpus(tmp_path)
    for language in ("ja", "zh"):
        assert command("preprocess", arguments, f"data.tgt_lang={language}", "overwrite=true") == 0
        monkeypatch.setattr(tokenizer_ja_mecab, "MeCab", None)
        run = tmp_path / language
        status = train(tmp_path / "data", run, "max_updates=4", "validate_every_updates=4")
        assert status == (2 if language == "ja" else 0)
        if language == "ja":
            assert capfd.readouterr().err.endswith("pip install nmt[ja]\n")
            assert not run.exists()
    capfd.readouterr()
    texts = [f"src={tmp_path / 'test.src.txt'}", f"references={tmp_path / 'test.tgt.txt'}"]
    for more, tokenizer in (([], "zh"), (["tokenize=char"], "char"), (["metrics=chrf"], "")):
        assert command("evaluate", f"model_dir={run}", texts, "device=cpu", more) == 0
        assert (f"tok:{tokenizer}" in capfd.readouterr().out) == bool(tokenizer), more


def test_the_model_translates_with_the_search_settings_of_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def translate(lines: list[str], **options: object) -> list[str]:
        calls.append(options)
        return lines

    translator = SimpleNamespace(directions=[], translate=translate)
    load = lambda *_, **__: translator  # noqa: E731
    monkeypatch.setattr("nmt.translate.translator.Translator.load", load)
    (tmp_path / "two").write_text("a\nb\n", encoding="utf-8")
    files = [f"src={tmp_path / 'two'}", f"references={tmp_path / 'two'}", "metrics=chrf"]
    settings = ["beam_size=2", "length_penalty=0.3", "stop=first"]
    assert command("evaluate", "model_dir=m", files, settings) == 0
    [options] = calls
    expected = {"beam_size": 2, "length_penalty": 0.3, "stop": "first"}
    assert {key: options[key] for key in expected} == expected


@pytest.mark.slow
def test_files_that_do_not_fit_are_refused_before_anything_is_translated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(directions=[])  # cannot translate

    monkeypatch.setattr("nmt.translate.translator.Translator.load", load)
    (tmp_path / "two").write_text("a\nb\n", encoding="utf-8")
    (tmp_path / "one").write_text("a\n", encoding="utf-8")
    (tmp_path / "cut").write_text("a .\n" * 101, encoding="utf-8")
    beam = [f"hypotheses={tmp_path / 'two'}", f"references={tmp_path / 'two'}", "beam_size=2"]
    assert command("evaluate", beam) == 2
    assert "beam_size=2: does nothing without model_dir" in capfd.readouterr().err
    options = ["model_dir=m", f"src={tmp_path / 'two'}"]
    cut = [f"{key}={tmp_path / 'cut'}" for key in ("src", "references")]
    for more, message in (
        (cut, 'references: 101 of 101 lines end in " .", so the text looks tokenized'),
        ([f"references={tmp_path / 'one'}"], "src: 2 lines, reference set 1: 1; they must match"),
        ([f"references={tmp_path / 'two'}", "baseline=absent"], "absent does not exist"),
        (
            [f"references={tmp_path / 'two'}", f"baseline={tmp_path / 'one'}"],
            "baseline: 1 lines, reference set 1: 2; they must match",
        ),
    ):
        assert command("evaluate", options, more) == 2
        assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    "method",
    [
        SignificanceMethod.bootstrap,
        pytest.param(SignificanceMethod.approximate_randomization, marks=pytest.mark.slow),
    ],
)
def test_systems_that_hardly_differ_are_not_significant(
    monkeypatch: pytest.MonkeyPatch, method: SignificanceMethod
) -> None:
    monkeypatch.setenv("SACREBLEU_SEED", "7")  # comparisons must not change it
    same = bleu_comparison(GOOD, GOOD, method)
    assert os.environ["SACREBLEU_SEED"] == "7"
    assert same.p_value == 1
    assert (same.difference, same.difference_low, same.difference_high) == (0, 0, 0)
    assert bleu_comparison([REFERENCE[0], *BAD[1:]], BAD, method).p_value == 1
    equal = bleu_comparison(GOOD + BAD, BAD + GOOD, method, reference=REFERENCE * 2)
    assert equal.difference == 0
    assert equal.p_value > 0.2
    assert equal.difference_low < 0 < equal.difference_high


@pytest.mark.slow
def test_clearly_better_systems_are_significant_and_intervals_contain_the_scores() -> None:
    for method in SignificanceMethod:
        result = bleu_comparison(GOOD, BAD, method)
        assert result.p_value < 0.05
        assert result.difference_low > 0
        assert result.difference == pytest.approx(result.system - result.baseline)
        comparisons = compare(GOOD[:60], [REFERENCE[:60]], baseline=BAD[:60], test=QUICK[method])
        assert [c.name for c in comparisons] == ["BLEU", "chrF2", "TER"]
        for comparison in comparisons:
            assert abs(comparison.system - comparison.system_mean) < comparison.system_ci
            assert abs(comparison.baseline - comparison.baseline_mean) < comparison.baseline_ci
            assert comparison.difference_low < comparison.difference
            assert comparison.difference < comparison.difference_high


@pytest.mark.slow
def test_comparison_equals_the_paired_test_of_sacrebleu(monkeypatch: pytest.MonkeyPatch) -> None:
    similar = damaged(REFERENCE, 0.12, seed=6)
    systems: list[tuple[str, Sequence[str]]] = [("a", similar), ("b", GOOD)]
    for method, kind, extra in (
        (SignificanceMethod.bootstrap, "bs", -1),
        (SignificanceMethod.approximate_randomization, "ar", 1000),
    ):
        monkeypatch.delenv("SACREBLEU_SEED", raising=False)
        result = bleu_comparison(GOOD, similar, method)
        assert "SACREBLEU_SEED" not in os.environ
        monkeypatch.setenv("SACREBLEU_SEED", "7")
        assert bleu_comparison(GOOD, similar, method) == result, "depends on the environment"
        assert os.environ["SACREBLEU_SEED"] == "7"
        monkeypatch.setenv("SACREBLEU_SEED", "12345")
        signatures, table = PairedTest(systems, {"x": BLEU()}, [REFERENCE], kind, 200, extra)()
        baseline, system = table["BLEU"]
        assert isinstance(baseline, Result)
        assert isinstance(system, Result)
        assert (result.baseline, result.baseline_mean) == (baseline.score, baseline.mean)
        assert (result.system, result.system_ci) == (system.score, system.ci)
        assert (result.p_value, result.signature) == (system.p_value, str(signatures["BLEU"]))
        assert "seed:12345" in result.signature


def test_table_and_json_show_every_score_with_its_signature() -> None:
    scores = evaluate(GOOD, [REFERENCE])
    comparison = bleu_comparison(GOOD, BAD, SignificanceMethod.bootstrap)
    table = as_table(scores, [comparison])
    assert len(table.splitlines()) == 6
    for signature in (*(s.signature for s in scores), comparison.signature):
        assert signature in table
    assert f"{scores[0].value:.2f}" in table
    assert f"  {comparison.p_value:.4f}  " in table
    assert f"{comparison.difference:+.2f} [{comparison.difference_low:+.2f}, " in table
    assert f"{comparison.system:.2f} ({comparison.system_mean:.2f} ± " in table
    data = as_json(scores, [comparison])
    assert json.loads(json.dumps(data)) == data
    assert list(data) == ["unit", "confidence", "scores", "comparisons"]
    assert data["scores"][2]["value"] == scores[2].value
    assert data["comparisons"][0]["p_value"] == comparison.p_value
