"""`metric_command` of nmt-evaluate: scores and tests of significance by another program."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from toy import command
from translating import write_lines

from nmt.command_metric import CommandMetric
from nmt.config import EvaluateConfig, Metric
from nmt.errors import ConfigError, DataError
from nmt.evaluate import compare, evaluate

# the share of the words of a translation that one of the references has
SHARED_WORDS = """
import json, sys
for line in sys.stdin:
    pair = json.loads(line)
    words = set(" ".join(pair["refs"]).split())
    translation = pair["mt"].split()
    bonus = 0.25 if pair.get("src") == "twice" else 0
    print(sum(word in words for word in translation) / len(translation) + bonus)
"""
REFERENCES = [[f"word{i} other{i}" for i in range(40)], [f"second{i}" for i in range(40)]]
GOOD = [f"word{i} second{i}" for i in range(40)]
HALF = [f"word{i} wrong" for i in range(40)]


@pytest.fixture
def shared_words(tmp_path: Path) -> str:
    script = tmp_path / "my metric.py"
    script.write_text(SHARED_WORDS, encoding="utf-8")
    return shlex.join([sys.executable, str(script)])


def python_command(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def test_the_score_is_the_mean_of_the_printed_numbers(shared_words: str) -> None:
    sources = ["twice", *[""] * 39]
    metric = CommandMetric(shared_words, sources)
    scores = evaluate(HALF, REFERENCES, metrics=[Metric.ter], command_metric=metric)
    assert [score.name for score in scores] == ["TER", "command"]
    assert scores[1].value == pytest.approx((40 * 0.5 + 0.25) / 40)
    assert shared_words in scores[1].signature


def test_differences_are_tested_as_those_of_other_metrics(shared_words: str) -> None:
    metric = CommandMetric(shared_words)
    [same] = compare(HALF, REFERENCES, baseline=HALF, metrics=[], command_metric=metric)
    assert (same.difference, same.p_value) == (0, 1)
    [better] = compare(GOOD, REFERENCES, baseline=HALF, metrics=[], command_metric=metric)
    assert better.difference == 0.5
    assert better.p_value < 0.01
    mixed = [*GOOD[:3], *HALF[3:]]
    [changed] = compare(mixed, REFERENCES, baseline=HALF, metrics=[], command_metric=metric)
    assert changed.difference == pytest.approx(0.5 * 3 / 40)
    assert changed.p_value >= 0.25  # 2^(1 - 3): three lines differ
    line_differences = np.array([0.5] * 3 + [0.0] * 37)
    draws = np.random.default_rng(0).choice(line_differences, (4000, 40)).mean(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    assert changed.difference_low == pytest.approx(low, abs=0.006)
    assert changed.difference_high == pytest.approx(high, abs=0.006)


def test_nmt_evaluate_prints_the_metric(
    shared_words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hypotheses = write_lines(tmp_path / "hyp", GOOD)
    references = write_lines(tmp_path / "ref", REFERENCES[0])
    source = write_lines(tmp_path / "src", ["twice"] * 40)
    files = [f"hypotheses={hypotheses}", f"references={references}", "metrics=ter"]
    arguments = [*files, f"metric_command={shared_words}"]
    assert command("evaluate", arguments) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[1] for row in rows if row[0] == "command"] == ["0.5000"]
    assert [len(row[1].split(".")[1]) for row in rows if row[0] == "TER"] == [2]
    assert command("evaluate", arguments, f"src={source}", "format=json") == 0
    assert json.loads(capsys.readouterr().out)["scores"][1]["value"] == 0.75
    assert command("evaluate", files, f"src={source}") == 2  # which nothing would read
    assert "src=" in capsys.readouterr().err
    assert command("evaluate", files, "metric_command=absent-program x") == 2
    assert "starts a program that is not installed" in capsys.readouterr().err


def test_a_command_that_fails_or_prints_something_else_is_an_error() -> None:
    for code, error, message in (
        ("raise SystemExit(3)", ConfigError, "ended with status 3"),
        ("print(1)", DataError, "printed 1 numbers for 40 lines"),
        ("print('x ' * 40)", DataError, "printed 'x'"),
        ("print('nan ' * 40)", DataError, "printed 'nan'"),
        ("import sys; sys.stdin.close(); print('1 ' * 39)", DataError, "printed 39 numbers"),
    ):
        metric = CommandMetric(python_command(code))
        with pytest.raises(error, match=f"^metric_command=.*{message}"):
            evaluate(GOOD, REFERENCES, metrics=[], command_metric=metric)
    with pytest.raises(ConfigError, match=r"metric_command=.*a program that is not installed"):
        EvaluateConfig(hypotheses=["a"], references=["b"], metric_command="'open").check()
