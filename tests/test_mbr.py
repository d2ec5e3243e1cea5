"""Minimum Bayes risk: the ranking of candidates, and translations that it chooses."""

from __future__ import annotations

import importlib.util
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from exporting import short_sentences, trained_model
from translating import translate, write_lines

from nmt import Translator
from nmt.config import SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.translate.mbr import check_mbr, rank_by_mbr
from nmt.translate.results import LineResult, Translation


def line_result(texts: list[str]) -> LineResult:
    translations = []
    for i, text in enumerate(texts):
        translations.append(Translation(text, score=-i, log_prob=-i, tokens=[], finished=True))
    return LineResult(translations)


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


def test_candidates_are_ranked_by_their_mean_similarity_to_all() -> None:
    rng = random.Random(2)
    words = ["house", "houses", "home", "tree", "trees", "red", "ready"]
    for _ in range(30):
        texts = [" ".join(rng.choices(words, k=rng.randint(3, 6))) for _ in range(6)]
        texts[5] = texts[0]  # which counts twice
        ranked = rank_by_mbr(line_result(texts), n_best=6)
        utilities = [mean_chrf(item.text, texts) for item in ranked.translations]
        assert utilities == sorted(utilities, reverse=True), texts
        assert sorted(item.text for item in ranked.translations) == sorted(texts)


def test_equal_candidates_and_single_ones_keep_their_order() -> None:
    result = line_result(["b", "a", "a"])
    ranked = rank_by_mbr(result, n_best=2).translations
    assert [item.score for item in ranked] == [-1, -2]
    for texts in ([], ["only one"]):
        assert rank_by_mbr(line_result(texts), n_best=1) == line_result(texts)


def test_too_few_candidates_and_a_missing_package_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = SearchConfig(beam_size=4)
    check_mbr(0, search)
    check_mbr(4, search)
    check_mbr(5, SearchConfig(sampling=True))
    with pytest.raises(ConfigError, match="mbr=5 is more than beam_size=4; raise beam_size, or"):
        check_mbr(5, search)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_mbr(0, search)
    with pytest.raises(ConfigError, match=r"pip install nmt\[mbr\]"):
        check_mbr(4, search)


@pytest.mark.slow
def test_translations_are_the_best_candidates(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = trained_model(tmp_path / "model", tokenizer)
    lines = ["", *short_sentences(12)]
    translator = Translator.load(model, device="cpu", backend="native")
    candidates = translator.n_best(lines, beam_size=4)
    expected = []
    for translations in candidates:
        best = rank_by_mbr(LineResult(translations), n_best=2)
        expected.append([item.text for item in best.translations])
    first = [texts[0] for texts in expected]
    assert first != [translations[0].text for translations in candidates]
    assert translator.translate(lines, beam_size=4, mbr=4) == first
    source = write_lines(tmp_path / "in", lines)
    output = tmp_path / "out"
    arguments = [f"model_dir={model}", f"input={source}", f"output={output}", "backend=native"]
    assert translate(*arguments, "beam_size=4", "mbr=4", "n_best=2", "format=json") == 0
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    written = [[item["text"] for item in record["hypotheses"]] for record in records]
    assert written == expected
    sampled = translator.translate(lines, sampling=True, epsilon=0.02, mbr=8, seed=3)
    assert sampled == translator.translate(lines, sampling=True, epsilon=0.02, mbr=8, seed=3)
    with pytest.raises(ConfigError, match="mbr=1: must be 0, or at least n_best"):
        translator.n_best(lines, beam_size=4, mbr=1)
    assert translate(*arguments, "beam_size=4", "mbr=5") == 2
