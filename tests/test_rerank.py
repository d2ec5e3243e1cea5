"""Reranking: minimum Bayes risk, the noisy channel and its weights, other programs."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import math
import random
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exporting import random_model, short_sentences
from toy import command
from translating import translate, write_lines

from nmt import Translator
from nmt.checkpoint import load_info, load_weights, save_model
from nmt.config import Metric, RerankConfig, SearchConfig, TranslateConfig
from nmt.data.languages import Tags
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError, DataError, NmtError
from nmt.evaluate import CandidateCounts
from nmt.translate.job import describe_job
from nmt.translate.rerank import make_reranker, rank_candidates
from nmt.translate.results import LineResult, Translation
from nmt.translate.tune_weights import ChannelWeights, choose_by_weights, find_weights

# prints a number for each candidate: its words, less those that the source has
NEW_WORDS = """
import json, sys
print("a message", file=sys.stderr)
for line in sys.stdin:
    pair = json.loads(line)
    words = pair["src"].split()
    print(len(pair["mt"].split()) - 2 * sum(word in words for word in pair["mt"].split()))
"""


def candidate(text: str, log_prob: float = 0.0, **values: Any) -> Translation:
    fields = {"score": log_prob, "tokens": text.split(), "finished": True, **values}
    return Translation(text=text, log_prob=log_prob, **fields)


def line_result(texts: list[str]) -> LineResult:
    return LineResult([candidate(text, -i) for i, text in enumerate(texts)])


def rank(config: RerankConfig, results: list[LineResult], *, n_best: int) -> list[LineResult]:
    sources = [f"source {i}" for i in range(len(results))]
    return rank_candidates(make_reranker(config, [], "cpu"), sources, results, n_best=n_best)


def python_command(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def new_words(source: str, text: str) -> int:
    """The number that `NEW_WORDS` prints."""
    return len(text.split()) - 2 * sum(word in source.split() for word in text.split())


def read_json(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# minimum Bayes risk


def count_ngrams(text: str, size: int) -> Counter[str]:
    characters = "".join(text.split())
    return Counter(characters[i : i + size] for i in range(len(characters) - size + 1))


def mean_chrf(text: str, references: list[str]) -> float:
    """chrF of a text, with the average n-gram counts of the references as its reference."""
    precisions = []
    recalls = []
    for size in range(1, 7):
        ngrams = count_ngrams(text, size)
        mean_counts: Counter[str] = Counter()
        for reference in references:
            for ngram, count in count_ngrams(reference, size).items():
                mean_counts[ngram] += count / len(references)  # type: ignore[assignment]
        num_matches = sum(min(count, mean_counts[ngram]) for ngram, count in ngrams.items())
        num_reference_ngrams = sum(mean_counts.values())
        if ngrams and num_reference_ngrams:
            precisions.append(num_matches / sum(ngrams.values()))
            recalls.append(num_matches / num_reference_ngrams)
    precision = sum(precisions) / max(len(precisions), 1)
    recall = sum(recalls) / max(len(recalls), 1)
    return 500 * precision * recall / max(4 * precision + recall, 1e-9)


def test_mbr_ranks_candidates_by_their_mean_similarity_to_all() -> None:
    rng = random.Random(2)
    words = ["house", "houses", "home", "tree", "trees", "red", "ready"]
    for _ in range(30):
        texts = [" ".join(rng.choices(words, k=rng.randint(3, 6))) for _ in range(6)]
        texts[5] = texts[0]  # which counts twice
        [ranked] = rank(RerankConfig(rerank="mbr"), [line_result(texts)], n_best=6)
        utilities = [mean_chrf(item.text, texts) for item in ranked.translations]
        assert utilities == sorted(utilities, reverse=True), texts
        assert sorted(item.text for item in ranked.translations) == sorted(texts)


def test_mbr_without_its_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install nmt\[mbr\]"):
        make_reranker(RerankConfig(rerank="mbr"), [], "cpu")


# the order of candidates


def test_equal_candidates_keep_their_order_and_unfinished_ones_are_last() -> None:
    config = RerankConfig(rerank="command", rerank_command=python_command(NEW_WORDS))
    results = [
        line_result(["one two", "a b", "longer than these"]),
        LineResult([]),
        line_result(["alone"]),
        LineResult([candidate("a b c d", finished=False), candidate("a")]),
    ]
    ranked = rank(config, results, n_best=2)
    texts = [[item.text for item in result.translations] for result in ranked]
    assert texts == [["longer than these", "one two"], [], ["alone"], ["a", "a b c d"]]
    assert [item.rerank_score for item in ranked[0].translations] == [3.0, 2.0]
    assert ranked[2] == results[2]  # which no program has seen


@pytest.mark.parametrize("protect", [False, True])
def test_candidates_without_a_protected_text_are_last(*, protect: bool) -> None:
    texts = ["Hallo {name}", "Hallo Anna", "Hallo Anna", "Hallo Anna", "Na, {name}"]
    result = line_result(texts)
    unfinished = replace(result.translations[4], finished=False)
    result = replace(result, translations=[*result.translations[:4], unfinished])
    reranker = make_reranker(RerankConfig(rerank="mbr"), [], "cpu")
    [ranked] = rank_candidates(reranker, ["Hi {name}"], [result], n_best=5, protect=protect)
    expected = [texts[0], *texts[1:4]] if protect else [*texts[1:4], texts[0]]
    assert [translation.text for translation in ranked.translations] == [*expected, texts[4]]


def test_the_tag_of_a_source_is_no_protected_text() -> None:
    result = line_result(["Hallo Anna", "Hallo Anna", "Hallo {name}"])
    reranker = make_reranker(RerankConfig(rerank="mbr"), [], "cpu")
    tags = Tags(src_choices=("<2de>",))
    [ranked] = rank_candidates(
        reranker, ["<2de> Hi {name}"], [result], n_best=1, protect=True, tags=tags
    )
    assert ranked.translations[0].text == "Hallo {name}"


def test_settings_that_contradict_each_other_are_errors() -> None:
    for settings, message in (
        ({"candidates": 4}, "candidates=4: only works with rerank=mbr, noisy_channel or command"),
        ({"rerank": "noisy_channel"}, "needs reverse_model=FOLDER"),
        ({"rerank": "mbr", "reverse_model": ["a"]}, "only works with rerank=noisy_channel"),
        ({"length_weight": 0.5}, "length_weight=0.5: only works with rerank=noisy_channel"),
        ({"rerank": "command"}, "needs rerank_command=PROGRAM"),
        ({"rerank_command": "cat"}, "only works with rerank=command"),
        ({"rerank": "command", "rerank_command": "absent-x"}, "program that is not installed"),
        ({"rerank": "msr"}, "rerank=msr: no such choice; did you mean mbr"),
    ):
        with pytest.raises(ConfigError, match=message):
            RerankConfig(**settings)
    config = RerankConfig(rerank="mbr", candidates=5)
    assert config.count_candidates(SearchConfig(beam_size=5)) == 5
    assert config.count_candidates(SearchConfig(sampling=True)) == 5
    with pytest.raises(
        ConfigError, match="candidates=5: is more than beam_size=4; set beam_size=5"
    ):
        config.count_candidates(SearchConfig(beam_size=4))
    with pytest.raises(ConfigError, match="context=2: does not work with rerank"):
        TranslateConfig(rerank="mbr", context=2)


@pytest.mark.slow
def test_translations_are_the_best_candidates(trained_model_dir: Path, tmp_path: Path) -> None:
    model = trained_model_dir
    lines = ["", *short_sentences(12)]
    translator = Translator.load(model, device="cpu", backend="native")
    candidates = translator.n_best(lines, beam_size=4)
    expected = []
    ranked = rank(RerankConfig(rerank="mbr"), [LineResult(c) for c in candidates], n_best=2)
    for best in ranked:
        expected.append([item.text for item in best.translations])
    first = [texts[0] for texts in expected]
    assert first != [translations[0].text for translations in candidates]
    assert translator.translate(lines, beam_size=4, rerank="mbr") == first
    source = write_lines(tmp_path / "in", lines)
    output = tmp_path / "out"
    arguments = [f"model_dir={model}", f"input={source}", f"output={output}", "backend=native"]
    options = ["beam_size=4", "rerank=mbr"]
    assert translate(*arguments, *options, "n_best=2", "format=json") == 0
    written = [[item["text"] for item in record["hypotheses"]] for record in read_json(output)]
    assert written == expected
    draws = {"sampling": True, "epsilon": 0.02, "seed": 3, "rerank": "mbr", "candidates": 8}
    assert translator.translate(lines, **draws) == translator.translate(lines, **draws)
    assert translate(*arguments, *options, "candidates=5") == 2
    assert translate(*arguments, *options, "candidates=2", "n_best=3") == 2


# the noisy channel


def swap_languages(model: Path, folder: Path, tokenizer: Tokenizer) -> Path:
    """Write a model for the languages of `model` in the other direction."""
    info = load_info(model)
    info = replace(info, src_lang=info.tgt_lang, tgt_lang=info.src_lang)
    save_model(folder, load_weights(model), info, tokenizer)
    return folder


@pytest.fixture(scope="module")
def channel(
    trained_model_dir: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """A forward model, its reverse model, and a text."""
    folder = tmp_path_factory.mktemp("channel")
    forward = trained_model_dir
    random_weights = random_model(folder / "random", tokenizer)
    reverse = swap_languages(random_weights, folder / "reverse", tokenizer)
    lines = ["", *short_sentences(20), "https://example.org"]  # two that are not searched
    source = write_lines(folder / "in", lines)
    arguments = [f"model_dir={forward}", f"input={source}", "backend=native", "beam_size=4"]
    return SimpleNamespace(
        forward=forward, reverse=reverse, lines=lines, source=source, arguments=arguments
    )


def nmt_score(
    model: Path, sources: Sequence[str], targets: Sequence[str], folder: Path
) -> list[float]:
    """The log-probabilities that nmt-score writes."""
    src = write_lines(folder / "src", list(sources))
    tgt = write_lines(folder / "tgt", list(targets))
    options = [f"src={src}", f"tgt={tgt}", f"output={folder / 'scores'}", "device=cpu"]
    assert command("score", f"model_dir={model}", *options) == 0
    return [float(line) for line in (folder / "scores").read_text().splitlines()]


@pytest.mark.slow
def test_the_channel_ranks_as_nmt_score_in_both_directions(
    channel: SimpleNamespace, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    output = tmp_path / "plain"
    plain = [*channel.arguments, "n_best=4", "format=json"]
    assert translate(*plain, f"output={output}") == 0
    candidates = [[c["text"] for c in record["hypotheses"]] for record in read_json(output)]
    sources: list[str] = []
    targets: list[str] = []
    for line, texts in zip(channel.lines, candidates, strict=True):
        sources += [line] * len(texts)
        targets += texts
    forward = nmt_score(channel.forward, sources, targets, tmp_path)
    reverse = nmt_score(channel.reverse, targets, sources, tmp_path)
    lengths = [len(ids) + 1 for ids in tokenizer.encode_batch(targets)]
    for a, b in ((1.0, 0.0), (0.3, 2.5), (-0.5, -1.0)):
        scores = [f + a * r + b * n for f, r, n in zip(forward, reverse, lengths, strict=True)]
        options = [f"reverse_model={channel.reverse}", f"reverse_weight={a}", f"length_weight={b}"]
        output = tmp_path / f"reranked {a}"
        assert translate(*plain, "rerank=noisy_channel", *options, f"output={output}") == 0
        start = 0
        for texts, record in zip(candidates, read_json(output), strict=True):
            expected = dict(zip(texts, scores[start : start + len(texts)], strict=True))
            start += len(texts)
            ranked = record["hypotheses"]
            assert sorted(item["text"] for item in ranked) == sorted(texts)
            if len(texts) == 1:  # empty, or copied
                assert "rerank_score" not in ranked[0]
                continue
            # search may choose other tokens than the tokenizer does for this text
            for item in ranked:
                if item["tokens"] == tokenizer.pieces(tokenizer.encode(item["text"])):
                    assert item["rerank_score"] == pytest.approx(expected[item["text"]], abs=1e-3)
            order = [item["rerank_score"] for item in ranked if item["finished"]]
            assert order == sorted(order, reverse=True)


@pytest.mark.slow
def test_streams_python_and_files_of_every_format_agree(
    channel: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    options = ["rerank=noisy_channel", f"reverse_model={channel.reverse}"]
    output = tmp_path / "out"
    assert translate(*channel.arguments, *options, f"output={output}") == 0
    best = output.read_text(encoding="utf-8").split("\n")[:-1]
    assert best[0] == ""
    assert best[-1] == channel.lines[-1]
    translator = Translator.load(channel.forward, device="cpu", backend="native")
    reranking = {"rerank": "noisy_channel", "reverse_model": channel.reverse, "beam_size": 4}
    assert translator.translate(channel.lines, **reranking) == best
    assert list(translator.translate_stream(iter(channel.lines), **reranking)) == best
    assert best != translator.translate(channel.lines, beam_size=4)
    stdin = SimpleNamespace(buffer=io.BytesIO(channel.source.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert translate(*channel.arguments, "input=-", *options) == 0
    assert capfdbinary.readouterr().out.decode().split("\n")[:-1] == best
    assert translate(*channel.arguments, *options, "n_best=2", f"output={output}") == 0
    rows = [line.split(" ||| ") for line in output.read_text(encoding="utf-8").splitlines()]
    first_texts: dict[str, str] = {}  # by the index of the line
    for index, text, *_ in rows:
        first_texts.setdefault(index, text)
    assert list(first_texts.values()) == best
    for row in rows[1:-1]:
        features = dict(feature.split("=") for feature in row[2].split())
        assert list(features) == ["log_prob", "score", "reverse_log_prob"]
        score = float(features["log_prob"]) + float(features["reverse_log_prob"])
        assert float(row[3]) == pytest.approx(score)
    windows = [*channel.arguments, *options, "window_lines=5", f"output={output}"]
    assert translate(*windows) == 0
    assert output.read_text(encoding="utf-8").split("\n")[:-1] == best
    assert command("distill", *windows, f"output={tmp_path / 'corpus'}", "device=cpu") == 0
    texts = [(tmp_path / f"corpus/{side}.txt").read_text("utf-8") for side in ("src", "tgt")]
    best_by_line = dict(zip(channel.lines, best, strict=True))
    assert [best_by_line[line] for line in texts[0].splitlines()] == texts[1].splitlines()


@pytest.mark.slow
def test_lines_in_capitals_are_ranked_in_ordinary_case(channel: SimpleNamespace) -> None:
    translator = Translator.load(channel.forward, device="cpu", backend="native")
    reranking = {"rerank": "noisy_channel", "reverse_model": channel.reverse, "beam_size": 4}
    lines = ["The small house", "A green tree"]
    ordinary = translator.n_best(lines, **reranking)
    capitals = translator.n_best([line.upper() for line in lines], **reranking)
    for translations, expected in zip(capitals, ordinary, strict=True):
        scores = [item.rerank_score for item in translations]
        assert [item.text for item in translations] == [item.text.upper() for item in expected]
        assert scores == pytest.approx([item.rerank_score for item in expected], abs=1e-4)


@pytest.mark.slow
def test_unsuitable_reverse_models_are_errors_before_text_is_read(
    channel: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*channel.arguments, "rerank=noisy_channel", f"output={tmp_path / 'out'}"]
    assert translate(*arguments, f"reverse_model={channel.forward}") == 2
    assert "the model translates xx to yy" in capsys.readouterr().err
    assert translate(*arguments, "reverse_model=absent") == 2
    assert "absent" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_job_describes_its_reverse_model_by_its_files(
    channel: SimpleNamespace, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    copy = swap_languages(channel.forward, tmp_path / "copy", tokenizer)
    settings = {"model_dir": [str(channel.forward)], "rerank": "noisy_channel"}

    def describe(reverse_model: Path) -> dict[str, Any]:
        config = TranslateConfig(**settings, reverse_model=[str(reverse_model)])
        return describe_job(config, SearchConfig())

    assert describe(copy) != describe(channel.reverse)
    assert describe(copy) == describe(copy)


# another program


@pytest.mark.slow
def test_a_program_chooses_the_candidates(channel: SimpleNamespace, tmp_path: Path) -> None:
    script = tmp_path / "new words.py"
    script.write_text(NEW_WORDS, encoding="utf-8")
    program = shlex.join([sys.executable, str(script)])
    translator = Translator.load(channel.forward, device="cpu", backend="native")
    plain = translator.n_best(channel.lines, beam_size=4)
    expected = []
    for line, translations in zip(channel.lines, plain, strict=True):
        ranked = sorted(
            translations, key=lambda t, line=line: (not t.finished, -new_words(line, t.text))
        )
        expected.append([item.text for item in ranked[:2]])
    output = tmp_path / "out"
    options = ["rerank=command", f"rerank_command={program}", f"output={output}", "n_best=2"]
    for window in (3, 2048):
        arguments = [*channel.arguments, *options, "format=json", f"window_lines={window}"]
        assert translate(*arguments) == 0
        records = read_json(output)
        assert [record["index"] for record in records] == list(range(len(channel.lines)))
        texts = [[item["text"] for item in record["hypotheses"]] for record in records]
        assert texts == expected
    reranking = {"rerank": "command", "rerank_command": program, "beam_size": 4}
    assert translator.translate(channel.lines, **reranking) == [texts[0] for texts in expected]


def test_a_program_that_fails_is_an_error() -> None:
    for code, error, message in (
        ("raise SystemExit(3)", ConfigError, "ended with status 3"),
        ("print(1)", DataError, "printed 1 numbers for 2 lines"),
        ("print('1 2 3')", DataError, "printed 3 numbers for 2 lines"),
        ("print('1 nan')", DataError, "printed 'nan'"),
        ("print('1 good')", DataError, "printed 'good'"),
        ("import time; time.sleep(60)", ConfigError, "took more than 0.5 seconds for 2 lines"),
        ("import os; os.kill(os.getpid(), 9)", ConfigError, "ended with status -9"),
    ):
        config = RerankConfig(
            rerank="command", rerank_command=python_command(code), rerank_timeout=0.5
        )
        if "sleep" not in code:
            config.rerank_timeout = 60.0
        with pytest.raises(error, match=f"^rerank_command=.*{message}") as raised:
            rank(config, [line_result(["a", "b"])], n_best=1)
        assert "\n" not in str(raised.value)
        assert isinstance(raised.value, NmtError)


# the weights of the channel


def draw_candidates(rng: np.random.Generator) -> list[list[Translation]]:
    candidates = []
    for _ in range(40):
        line = []
        for _ in range(int(rng.integers(1, 5))):
            text = " ".join(rng.choice(["a", "b", "c", "d"], size=int(rng.integers(2, 8))))
            log_probs = rng.normal(-8, 3, size=2).tolist()
            line.append(candidate(text, log_probs[0], reverse_log_prob=log_probs[1]))
        candidates.append(line)
    return candidates


def best_texts(candidates: list[list[Translation]], a: float, b: float) -> list[str]:
    def score(item: Translation) -> float:
        assert item.reverse_log_prob is not None
        return item.log_prob + a * item.reverse_log_prob + b * (len(item.tokens) + 1)

    return [max(line, key=score).text for line in candidates]


def choose(candidates: list[list[Translation]], a: float, b: float) -> Any:
    """Return the indices of the candidates that the weights choose."""
    texts = best_texts(candidates, a, b)
    indices = []
    for line, text in zip(candidates, texts, strict=True):
        indices.append([item.text for item in line].index(text))
    return np.array(indices)


@pytest.mark.parametrize("metric", [Metric.bleu, Metric.ter])
def test_weights_are_the_simplest_within_one_standard_error_of_the_best(metric: Metric) -> None:
    candidates = draw_candidates(np.random.default_rng(3))
    references = [best_texts(candidates, 0.7, 0.4)]  # which some weights reach
    texts = [[item.text for item in line] for line in candidates]
    counts = CandidateCounts(texts, references, metric=metric)
    best = counts.score(choose(candidates, 0.7, 0.4))
    assert best == pytest.approx(100 if metric is Metric.bleu else 0)
    best_resampled = counts.score_resamples(choose(candidates, 0.7, 0.4))

    def is_near_best(a: float, b: float) -> bool:
        choice = choose(candidates, a, b)
        standard_error = np.std(best_resampled - counts.score_resamples(choice))
        return bool(best - counts.score(choice) <= standard_error)

    weights = find_weights(candidates, counts)
    assert is_near_best(weights.reverse_weight, weights.length_weight)
    assert abs(weights.length_weight) < 0.4
    num_simpler = 0
    for a, b in itertools.product(np.arange(0, 31) / 10, np.arange(-10, 11) / 10):
        if (abs(b), a) < (abs(weights.length_weight), weights.reverse_weight):
            num_simpler += 1
            assert not is_near_best(a, b), (a, b)
    assert num_simpler > 0
    chosen_texts = [item.text for item in choose_by_weights(candidates, weights)]
    assert chosen_texts == best_texts(candidates, weights.reverse_weight, weights.length_weight)


def test_resampled_scores_have_the_score_as_their_mean_and_are_paired() -> None:
    candidates = draw_candidates(np.random.default_rng(5))
    texts = [[item.text for item in line] for line in candidates]
    counts = CandidateCounts(texts, [best_texts(candidates, 0.7, 0.4)], metric=Metric.ter)
    choice = choose(candidates, 0.0, 0.0)
    resampled = counts.score_resamples(choice)
    assert resampled.std() > 0
    assert abs(resampled.mean() - counts.score(choice)) < 4 * resampled.std() / math.sqrt(200)
    # the same resamples each time: those without a line do not depend on its candidate
    line = next(i for i, line_candidates in enumerate(candidates) if len(line_candidates) > 1)
    other_choice = choice.copy()
    other_choice[line] = 1 - min(choice[line], 1)
    is_equal = counts.score_resamples(other_choice) == resampled
    # a resample leaves out a line with the probability (1 - 1/n)^n, about 1/e
    assert is_equal.mean() > 0.25


def test_equal_scores_give_the_smallest_weights() -> None:
    candidates = draw_candidates(np.random.default_rng(4))
    flat = SimpleNamespace(score=lambda choice: math.pi, score_resamples=lambda choice: np.ones(2))
    assert find_weights(candidates, flat) == ChannelWeights(0.0, 0.0)


def test_weights_choose_among_complete_candidates_as_translation_does() -> None:
    lost = candidate("Hallo Anna", -1.0, reverse_log_prob=-1.0)
    complete = candidate("Na, {name}", -9.0, reverse_log_prob=-9.0)
    unfinished = candidate("{name} {name}", 0.0, reverse_log_prob=0.0, finished=False)
    alone = LineResult([candidate("Hi", -2.0)])  # not scored
    reranker = SimpleNamespace(
        score=lambda sources, candidates: [
            [replace(item, rerank_score=item.log_prob) for item in line] for line in candidates
        ]
    )
    for protect, line, expected in (
        (True, [lost, unfinished, complete], complete),
        (True, [unfinished, lost], lost),
        (False, [complete, unfinished, lost], lost),
    ):
        results = [LineResult(line), alone]
        sources = ["Hi {name}", "Hi"]
        ranked = rank_candidates(reranker, sources, results, n_best=3, protect=protect)
        assert ranked[0].text == expected.text
        candidates = [result.translations for result in ranked]
        for weights in (ChannelWeights(0.0, 0.0), ChannelWeights(3.0, 3.0)):
            chosen = choose_by_weights(candidates, weights)
            assert [item.text for item in chosen] == [expected.text, "Hi"]


@pytest.mark.slow
def test_nmt_evaluate_finds_weights_and_prints_what_they_give(
    channel: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"src={channel.source}", f"references={channel.source}", "force=true"]
    options = ["device=cpu", "beam_size=4", "metrics=[bleu,chrf]", f"model_dir={channel.forward}"]
    channel_options = ["rerank=noisy_channel", f"reverse_model={channel.reverse}"]
    arguments = [*files, *options, *channel_options]
    assert command("evaluate", *arguments, "tune=true", "format=json") == 0
    report = json.loads(capsys.readouterr().out)
    scores = {score["name"]: score["value"] for score in report["scores"]}
    assert list(scores) == ["search BLEU", "search chrF2", "reranked BLEU", "reranked chrF2"]
    assert scores["reranked BLEU"] >= scores["search BLEU"] - 1e-9
    assert command("evaluate", *files, *options, "format=json") == 0
    without_reranking = json.loads(capsys.readouterr().out)["scores"]
    assert without_reranking[0]["value"] == pytest.approx(scores["search BLEU"])
    weights = [f"{key}={value}" for key, value in report["weights"].items()]
    assert command("evaluate", *arguments, *weights, "format=json") == 0
    reranked = json.loads(capsys.readouterr().out)["scores"]
    assert reranked[0]["value"] == pytest.approx(scores["reranked BLEU"])
    assert command("evaluate", *arguments, "tune=true") == 0
    assert capsys.readouterr().out.splitlines()[-1] == " ".join(weights)
    assert command("evaluate", *files, *options, "tune=true") == 2
    assert "tune=true: needs rerank=noisy_channel" in capsys.readouterr().err
    hypotheses = [f"hypotheses={channel.source}", f"references={channel.source}"]
    assert command("evaluate", *hypotheses, "rerank=mbr") == 2
    assert "rerank=mbr: does nothing without model_dir" in capsys.readouterr().err
