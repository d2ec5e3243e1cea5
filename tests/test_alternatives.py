"""`alternatives` and `prefix_bias`: against CTranslate2 and all hypotheses, and in the server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exporting import LIMIT, exported, native, short_sentences
from searching import (
    TOKENIZER,
    Sentence,
    ToyStepper,
    assert_same,
    config,
    enumerate_hypotheses,
    normalized,
    token_ids,
    toy_log_probs,
)
from serving import GOOD, Running, loaded, running
from tiny import BOS, EOS
from translating import translate, write_lines

from nmt import Translator
from nmt.config import ExportFormat, Normalization, SearchConfig
from nmt.config.search import GlossaryMode
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.search import search
from nmt.translate.engines.ctranslate2 import check_search, load_ctranslate2
from nmt.translate.engines.native import load_models

LINES = short_sentences(200)
PREFIXES = ["", "Haus", "the green", "a small"] * 50
PLAIN = SearchConfig(
    beam_size=4, normalization=Normalization.none, max_length_a=0, max_length_b=LIMIT
)
SOURCES: list[Sentence] = [(5, 4, 5), (4,), (5, 5, 4, 4)]
PREFIX_IDS: list[Sentence] = [(), (4,), (5, 4)]


@pytest.fixture(scope="module")
def folder(trained_model_dir: Path) -> Path:
    return trained_model_dir


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(loaded(folder)) as server:
        yield server


# --- against the exhaustive search


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_alternative_is_the_best_translation_with_its_first_token(count: int) -> None:
    settings = config(400, 0.6, alternatives=count)
    request = SearchRequest(SOURCES, settings, prefixes=PREFIX_IDS)
    results = search(ToyStepper(), request, TOKENIZER)
    for source, prefix, alternatives in zip(SOURCES, PREFIX_IDS, results, strict=True):
        first_log_probs = toy_log_probs((*source, EOS), (BOS, *prefix))
        first_tokens = sorted((1, 4, 5), key=lambda token: -first_log_probs[token])[:count]
        all_hypotheses = enumerate_hypotheses((*source, EOS), 5, config(400, 0.6))
        expected = []
        for token in first_tokens:
            start = [*prefix, token]
            expected.append(next(h for h in all_hypotheses if h.tokens[: len(start)] == start))
        assert_same(alternatives, expected)


@pytest.mark.parametrize("bias", [0.05, 0.5, 0.95])
def test_the_bias_gives_the_probabilities_of_its_formula(bias: float) -> None:
    settings = config(400, 0.6, prefix_bias=bias)
    request = SearchRequest(SOURCES, settings, prefixes=PREFIX_IDS)
    results = search(ToyStepper(), request, TOKENIZER)
    for source, prefix, hypotheses in zip(SOURCES, PREFIX_IDS, results, strict=True):
        expected = []
        for hypothesis in enumerate_hypotheses((*source, EOS), 5, settings):
            expected.append(biased(hypothesis, prefix, bias, settings))
        expected.sort(key=lambda h: (h.finished, h.score), reverse=True)
        assert_same(hypotheses[:40], expected[:40])


def biased(
    hypothesis: Hypothesis, prefix: Sentence, bias: float, settings: SearchConfig
) -> Hypothesis:
    """Score a hypothesis again: p is (1 - b) p + b for the prefix, (1 - b) p for other tokens."""
    log_probs = []
    for i, token in enumerate(hypothesis.tokens):
        probability = math.exp(hypothesis.token_log_probs[i])
        if i < len(prefix) and hypothesis.tokens[:i] == list(prefix[:i]):
            probability = (1 - bias) * probability + bias * (token == prefix[i])
        log_probs.append(math.log(probability))
    total = sum(log_probs)
    score = normalized(total, len(log_probs), settings)
    return replace(hypothesis, token_log_probs=log_probs, log_prob=total, score=score)


def test_the_start_of_a_prefix_such_as_a_tag_stays_forced() -> None:
    prefixes = [(4, *prefix) for prefix in PREFIX_IDS]
    forced = SearchRequest(SOURCES, config(400, 0.6), prefixes=prefixes)
    request = replace(forced, config=config(400, 0.6, prefix_bias=0.01), num_forced=1)
    results = search(ToyStepper(), request, TOKENIZER)
    for hypotheses in results:
        assert {h.tokens[0] for h in hypotheses} == {4}
    assert len({h.tokens[1] for h in results[2]}) > 1
    assert_same(results[0], search(ToyStepper(), forced, TOKENIZER)[0])


# --- against CTranslate2


@pytest.mark.slow
@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("prefixes", [(), PREFIXES])
def test_alternatives_equal_the_results_of_ctranslate2(
    folder: Path, tokenizer: Tokenizer, beam_size: int, prefixes: list[str]
) -> None:
    settings = replace(PLAIN, beam_size=beam_size, alternatives=5)
    request = SearchRequest(
        tokenizer.encode_batch(LINES), settings, prefixes=tokenizer.encode_batch(list(prefixes))
    )
    ours = load_models([folder], device="cpu").backend.search(request)
    options = {"beam_size": beam_size, "num_hypotheses": 5, "return_alternatives": True}
    assert token_ids(ours) == search_with_ctranslate2(folder, tokenizer, prefixes, **options)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [0.1, 0.5, 0.9])
def test_biased_translations_equal_the_results_of_ctranslate2(
    folder: Path, tokenizer: Tokenizer, bias: float
) -> None:
    prefixes = tokenizer.encode_batch(PREFIXES)
    settings = replace(PLAIN, prefix_bias=bias)
    request = SearchRequest(tokenizer.encode_batch(LINES), settings, prefixes=prefixes)
    ours = load_models([folder], device="cpu").backend.search(request)
    theirs = search_with_ctranslate2(
        folder, tokenizer, PREFIXES, beam_size=4, prefix_bias_beta=bias
    )
    assert [h[0].tokens for h in ours] == [hypotheses[0] for hypotheses in theirs]
    if bias > 0.1:  # a small bias changes no translation of this model
        unbiased = native(folder, LINES, PLAIN)
        assert [h[0].tokens for h in ours] != [h[0].tokens for h in unbiased]


def search_with_ctranslate2(
    folder: Path, tokenizer: Tokenizer, prefixes: list[str], **options: Any
) -> list[list[list[int]]]:
    """Return the ids that CTranslate2's own search finds for LINES."""
    import ctranslate2

    engine = ctranslate2.Translator(str(exported(folder, ExportFormat.ctranslate2)))
    pieces = tokenizer.all_pieces()
    ids = {piece: token for token, piece in enumerate(pieces)}
    results = engine.translate_batch(
        [tokenizer.pieces(row) for row in tokenizer.encode_batch(LINES)],
        [tokenizer.pieces(row) for row in tokenizer.encode_batch(list(prefixes))] or None,
        max_decoding_length=LIMIT,
        min_decoding_length=0,
        return_end_token=True,
        length_penalty=0,
        suppress_sequences=[["<pad>"], ["<s>"]],
        **options,
    )
    translations = []
    for result in results:
        translations.append([[ids[piece] for piece in pieces] for pieces in result.hypotheses])
    return translations


@pytest.mark.slow
def test_our_engine_of_ctranslate2_has_the_same_results(folder: Path, tokenizer: Tokenizer) -> None:
    converted = load_ctranslate2(folder, device="cpu", dtype="float32", num_threads=1).backend  # type: ignore[arg-type]
    backend = load_models([folder], device="cpu").backend
    request = SearchRequest(
        tokenizer.encode_batch(LINES), PLAIN, prefixes=tokenizer.encode_batch(PREFIXES), n_best=3
    )
    for changes in ({"alternatives": 3}, {"prefix_bias": 0.5}):
        changed = replace(request, config=replace(PLAIN, **changes))
        ours = [hypotheses[0].tokens for hypotheses in backend.search(changed)]
        theirs = [hypotheses[0].tokens for hypotheses in converted.search(changed)]
        num_same = sum(map(list.__eq__, ours, theirs))
        assert num_same >= 190, changes  # of 200; int8 where the CPU has VNNI
    greedy = replace(PLAIN, beam_size=1)
    for settings, message in (
        (replace(greedy, prefix_bias=0.5), "prefix_bias=0.5: .* in greedy search"),
        (replace(PLAIN, alternatives=2, alignment=True), "alignment=true: .* for alternatives"),
    ):
        with pytest.raises(ConfigError, match=message):
            converted.check(settings)
    tagged = replace(request, config=replace(PLAIN, prefix_bias=0.5), num_forced=1)
    with pytest.raises(ConfigError, match=r"prefix_bias=0\.5: .* target tags; use backend=native$"):
        converted.search(tagged)


# --- in calls, files and the server


EXAMPLES: dict[str, dict[str, Any]] = {
    "forbid": {"forbid": ["a"]},
    "suppress": {"suppress": ["<unk>"]},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "no_repeat_ngram": {"no_repeat_ngram": 2},
    "allow_source_repeats": {"no_repeat_ngram": 2, "allow_source_repeats": True},
    "beam_groups": {"beam_groups": 2},
    "glossary": {"glossary": ["a\tb"]},
    "glossary_mode=soft": {"glossary": ["a\tb"], "glossary_mode": GlossaryMode.soft},
    "protect": {"protect": True},
    "alternatives": {"alternatives": 3},
    "prefix_bias": {"prefix_bias": 0.5},
}


def table_rows() -> dict[str, dict[str, str]]:
    """Return the table of docs/control.md: the cells of each setting by the heads of columns."""
    page = (Path(__file__).parents[1] / "docs/control.md").read_text(encoding="utf-8")
    lines = page.split("## What works together\n", 1)[1].strip().splitlines()
    rows = []
    for line in lines:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    by_setting = {}
    for cells in rows[2:]:
        for name in cells[0].split(", "):
            by_setting[name.strip("`")] = dict(zip(rows[0], cells, strict=True))
    return by_setting


def test_the_table_of_settings_says_what_works_together(tokenizer: Tokenizer) -> None:
    rows = table_rows()
    assert set(rows) == set(EXAMPLES)
    for name, row in rows.items():
        assert {row[head] for head in ("streams", "ensembles", "prefixes")} == {"yes"}
        settings = EXAMPLES[name]
        if row["sampling"] == "refused":
            with pytest.raises(ConfigError, match=rf"^{name}="):
                SearchConfig(sampling=True, **settings)
        else:
            SearchConfig(sampling=True, **settings)
        with_beam = SearchConfig(beam_size=4, **settings)
        if row["CTranslate2"] == "refused":
            with pytest.raises(ConfigError, match=rf"^{name}=.*; use backend=native$"):
                check_search(with_beam)
        else:
            check_search(with_beam)
        if row["CTranslate2"] == "with a beam":
            with pytest.raises(ConfigError, match=rf"^{name}=.*; use backend=native$"):
                check_search(replace(with_beam, beam_size=1))
        prefixes = [[5]] if name == "prefix_bias" else []
        request = SearchRequest([[5]], with_beam, prefixes=prefixes)
        assert request.can_join(tokenizer) is (row["joining a running search"] == "yes"), name


def test_alternatives_do_not_work_with_a_prefix_bias_or_reranking(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^alternatives=3: does not work with .*prefix_bias"):
        SearchConfig(alternatives=3, prefix_bias=0.2)
    translator = Translator.load(folder, device="cpu", backend="native")
    with pytest.raises(ConfigError, match=r"^rerank=.*mbr: does not work with alternatives"):
        translator.n_best(["the"], alternatives=3, rerank="mbr")


@pytest.mark.slow
def test_only_the_first_part_of_a_long_line_has_alternatives(folder: Path) -> None:
    translator = Translator.load(folder, device="cpu", backend="native")
    line = "the house. a tree. the tree. a house"
    options: dict[str, Any] = {"max_source_length": 8, "alternatives": 3}
    alternatives = translator.n_best([line], **options)[0]
    assert len({translation.text for translation in alternatives}) == 3
    plain = translator.translate([line], max_source_length=8)[0]
    ends = {translation.text.split(" ", 1)[1][-8:] for translation in alternatives}
    assert ends == {plain[-8:]}


@pytest.mark.slow
def test_files_have_as_many_translations_as_alternatives(folder: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", LINES[:20])
    prefixes = write_lines(tmp_path / "prefixes", PREFIXES[:20])
    out = tmp_path / "out"
    arguments = [f"model_dir={folder}", f"input={source}", f"output={out}", f"prefixes={prefixes}"]
    for backend in ("native", "ctranslate2"):
        assert translate(*arguments, f"backend={backend}", "alternatives=3") == 0
        rows = [line.split(" ||| ") for line in out.read_text(encoding="utf-8").splitlines()]
        assert [row[0] for row in rows] == [str(i) for i in range(20) for _ in range(3)]
        starts = [PREFIXES[int(row[0])] for row in rows]
        assert all(row[1].startswith(start) for row, start in zip(rows, starts, strict=True))
    assert translate(*arguments, "alternatives=3", "format=json") == 0
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {len(record["hypotheses"]) for record in records} == {3}
    assert translate(*arguments, "alternatives=3", "n_best=2") == 2
    assert translate(*arguments, "prefix_bias=0.3") == 0


@pytest.mark.slow
def test_the_server_has_prefixes_and_alternatives(server: Running, folder: Path) -> None:
    translator = Translator.load(folder, device="cpu", backend="native")
    for prefix in ("", "the", "Haus grün"):
        search_settings = {"alternatives": 3}
        body = {"text": "the house", "prefix": prefix, "search": search_settings, **GOOD}
        answer = server.post("/v1/translate", **body, scores=True)
        [sentence] = answer.json["translations"][0]["sentences"]
        [expected] = translator.n_best(["the house"], prefixes=[prefix], alternatives=3)
        assert [h["text"] for h in sentence["hypotheses"]] == [t.text for t in expected]
        assert [h["tokens"] for h in sentence["hypotheses"]] == [t.tokens for t in expected]
        biased_answer = server.post(
            "/v1/translate", text="the house", prefix=prefix, search={"prefix_bias": 0.5}, **GOOD
        )
        expected_text = translator.translate(["the house"], prefixes=[prefix], prefix_bias=0.5)
        assert [biased_answer.json["translations"][0]["text"]] == expected_text


@pytest.mark.slow
def test_a_prefix_of_several_sentences_is_refused(server: Running) -> None:
    for text in ("The house. A tree. The", ["the", "a"], ""):
        answer = server.post("/v1/translate", text=text, prefix="the", **GOOD)
        assert answer.status in (400, 409), answer
    answer = server.post("/v1/translate", text="The house. A tree.", prefix="the", **GOOD)
    assert "prefix is for one plain sentence, not for 2; send" in answer.json["error"]
    answer = server.post("/v1/translate", text="the house", prefix="the", format="html", **GOOD)
    assert answer.status == 409
    assert "prefix needs format=text" in answer.json["error"]
    answer = server.post(
        "/v1/translate", text="The house. A tree.", prefix="the", split_sentences=False, **GOOD
    )
    assert answer.json["translations"][0]["text"].startswith("the")
    for search_settings, status in (
        ({"alternatives": 99}, 400),
        ({"alternatives": 3, "prefix_bias": 0.1}, 409),
        ({"prefix_bias": 1}, 400),
    ):
        answer = server.post("/v1/translate", text="the", search=search_settings, **GOOD)
        assert answer.status == status, answer
