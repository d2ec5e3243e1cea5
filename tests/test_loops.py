"""The guard against loops: which translations are searched again, and what replaces them."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from exporting import random_model
from tiny import EOS, sentences
from translating import translate, write_lines

from nmt.config import SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.translate.engines.base import Backend
from nmt.translate.engines.native import load_models
from nmt.translate.loops import MAX_REPEATS, is_looping, replace_loops
from nmt.translate.translator import Translator


def search_without_loops(backend: Backend, request: SearchRequest) -> list[list[Hypothesis]]:
    return replace_loops(backend, request, backend.search(request))


def provoking_lines() -> list[str]:
    """Return 100 lines that make models loop: repeated words, emoji, capitals, other scripts."""
    draw = random.Random(1)
    lines = [
        "the " * 20,
        " " * 500 + "a",
        "no " * 10,
        "ha " * 11,
        "1 " * 12,
        "(applause) " * 3,
        "!" * 18,
        "\N{GRINNING FACE}",
        "\N{PARTY POPPER}\N{THUMBS UP SIGN}\N{FIRE}",
        "Это тест",
        "你好" * 4,
        "https://example.org/3264/a?b=50",
        "===== " * 3,
        "a" * 24,
    ]
    words = " ".join(sentences(50)).split()
    while len(lines) < 100:
        word = draw.choice(words)
        count = draw.randint(3, 30)
        candidates = (
            f"{word} " * count,
            f"{word} {draw.choice(words)} " * count,
            draw.choice("\N{PARTY POPPER}\N{FIRE}★→§") * count,
            " ".join(draw.choices(words, k=40)),
            word.upper() * count,
        )
        lines.append(draw.choice(candidates))
    return lines


@pytest.fixture(scope="module")
def looping_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A model with random weights, which loops on most lines."""
    return random_model(tmp_path_factory.mktemp("random") / "model", tokenizer, 3)


def count_loops(translator: Translator, *, loop_guard: bool) -> int:
    """Return how many of the provoking lines have a translation that loops."""
    lines = provoking_lines()
    results = translator.n_best(lines, beam_size=2, max_length_b=20, loop_guard=loop_guard)
    num_loops = 0
    for line, [best, *_] in zip(lines, results, strict=True):
        source = translator.tokenizer.src.encode(line)
        source_pieces = translator.tokenizer.src.pieces(source)
        num_loops += is_looping(source_pieces, best.tokens, MAX_REPEATS)
    return num_loops


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "ctranslate2"])
def test_few_of_100_lines_that_provoke_loops_still_loop(looping_model: Path, backend: str) -> None:
    translator = Translator.load(looping_model, backend=backend)
    assert count_loops(translator, loop_guard=False) > 20
    assert count_loops(translator, loop_guard=True) <= 2


def test_clean_translations_are_not_searched_again(
    trained_model_dir: Path,
) -> None:
    translator = Translator.load(trained_model_dir, backend="native")
    lines = sorted({" ".join(line.split()[:3]) for line in sentences(100)})
    guarded = translator.n_best(lines, beam_size=2)
    plain = translator.n_best(lines, beam_size=2, loop_guard=False)
    num_clean = 0
    for with_guard, without_guard in zip(guarded, plain, strict=True):
        if not with_guard[0].searched_again:
            num_clean += 1
            assert with_guard == without_guard
    assert num_clean > 0.9 * len(lines)


@pytest.mark.slow
def test_greedy_search_without_scores_gives_the_same_translations(looping_model: Path) -> None:
    backend = load_models([looping_model], device="cpu").backend
    tokenizer = load_models([looping_model], device="cpu").tokenizer
    sources = tokenizer.src.encode_batch(provoking_lines()[:50])
    for changes in ({}, {"alignment": True}, {"repetition_penalty": 1.5}):
        config = SearchConfig(beam_size=1, max_length_b=20, **changes)
        request = SearchRequest(sources, config)
        scored = search_without_loops(backend, request)
        unscored = search_without_loops(backend, replace(request, with_scores=False))
        num_unscored = 0
        for [expected], [hypothesis] in zip(scored, unscored, strict=True):
            num_unscored += math.isnan(hypothesis.score)
            assert hypothesis.tokens == expected.tokens
            assert hypothesis.alignment == expected.alignment
            assert hypothesis.searched_again == expected.searched_again
        assert (num_unscored > 0) == (not config.has_constraints)
        assert any(hypothesis.searched_again for [hypothesis] in unscored)


def test_the_output_says_which_lines_were_searched_again(
    looping_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in", ["a tree", "the " * 20])
    options = [f"model_dir={looping_model}", f"input={source}", "format=json", "backend=native"]
    assert translate(options) == 0
    output, log = capfd.readouterr()
    best = [json.loads(line)["hypotheses"][0] for line in output.splitlines()]
    num_searched_again = sum("searched_again" in hypothesis for hypothesis in best)
    assert num_searched_again > 0
    assert f"{num_searched_again} translations looped or met the length limit" in log
    assert translate([*options, "loop_guard=false"]) == 0
    output, log = capfd.readouterr()
    assert "searched_again" not in output
    assert "searched again" not in log


def test_a_sentence_has_the_same_translation_in_every_batch(looping_model: Path) -> None:
    model = load_models([looping_model])
    config = SearchConfig(beam_size=2, max_length_b=20)
    sources = model.tokenizer.src.encode_batch(provoking_lines()[:3])
    request = SearchRequest(sources, config, n_best=1)
    together = search_without_loops(model.backend, request)
    for i, hypotheses in enumerate(together):
        [alone] = search_without_loops(model.backend, request.select([i]))
        assert [h.tokens for h in alone] == [h.tokens for h in hypotheses], i


def make_hypothesis(tokens: list[int], log_prob: float) -> Hypothesis:
    return Hypothesis(
        tokens=tokens,
        log_prob=log_prob,
        score=log_prob,
        finished=tokens[-1] == EOS,
        token_log_probs=[],
    )


def test_a_loop_is_replaced_and_a_cut_translation_only_by_a_likelier_one(
    looping_model: Path,
) -> None:
    model = load_models([looping_model])
    config = SearchConfig(beam_size=1, max_length_a=0, max_length_b=8)
    request = SearchRequest([[5, 6, 7]], config)
    loop = make_hypothesis([9] * 8, -1.0)
    cut = make_hypothesis([9, 10, 11, 12], -1.0)
    unlikely = make_hypothesis([9, 10, 11, 12], -1e6)
    without_score = make_hypothesis([9, 10, 11, 12], math.nan)

    def result(hypothesis: Hypothesis, request: SearchRequest = request) -> Hypothesis:
        [[best]] = replace_loops(model.backend, request, [[hypothesis]])
        return best

    assert result(loop).searched_again
    assert result(unlikely).searched_again
    assert result(cut) is cut
    assert result(without_score) is without_score
    same_loop = replace(request, sources=[[9] * 8])  # the source repeats as often
    assert result(make_hypothesis([9] * 7 + [EOS], -1.0), same_loop).tokens == [9] * 7 + [EOS]
    for changes in ({"sampling": True}, {"loop_guard": False}, {"no_repeat_ngram": 3}):
        assert result(loop, replace(request, config=replace(config, **changes))) is loop
