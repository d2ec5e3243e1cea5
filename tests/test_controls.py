"""Controls of search: against CTranslate2 and transformers, and in every kind of call."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exporting import LIMIT, exported, native, short_sentences
from searching import (
    ALLOWED_SYMBOLS,
    TOKENIZER,
    TOY_SETTINGS,
    ToySettings,
    ToyStepper,
    assert_same,
    config,
    enumerate_hypotheses,
    find,
    normalized,
    score_by_formula,
    source_ids,
    toy_log_probs,
    toy_source,
)
from serving import GOOD, loaded, running
from tiny import BOS, EOS, UNK
from torch import Tensor
from translating import translate, write_lines

from nmt import Translator
from nmt.config import ExportFormat, Normalization, SearchConfig, Stop
from nmt.data.batch import pad_source
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.search.constraints import to_target_ids
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.search import search
from nmt.translate.batch_search import BatchSearch, SearchResult, Segment
from nmt.translate.engines.native import load_models

LINES = short_sentences(200)
PLAIN = SearchConfig(beam_size=4, normalization=Normalization.none)
GREEDY = replace(PLAIN, beam_size=1)
PIECES = ["\u2581the", "\u2581house", "<unk>"]
QUICK_AND_SLOW_SETTINGS = TOY_SETTINGS[2:4] + [
    pytest.param(toy, marks=pytest.mark.slow) for toy in TOY_SETTINGS[:2] + TOY_SETTINGS[4:]
]


@pytest.fixture(scope="module")
def folder(trained_model_dir: Path) -> Path:
    return trained_model_dir


def best_ids(results: list[list[Hypothesis]]) -> list[list[int]]:
    return [hypotheses[0].tokens for hypotheses in results]


def search_with_ctranslate2(folder: Path, tokenizer: Tokenizer, **options: Any) -> list[Any]:
    """Return the results of CTranslate2's own search for LINES."""
    import ctranslate2

    engine = ctranslate2.Translator(str(exported(folder, ExportFormat.ctranslate2)))
    return engine.translate_batch(  # type: ignore[no-any-return]
        [tokenizer.pieces(row) for row in tokenizer.encode_batch(LINES)],
        max_decoding_length=LIMIT,
        min_decoding_length=0,
        return_end_token=True,
        return_scores=True,
        length_penalty=0,
        **options,
    )


def search_with_transformers(folder: Path, tokenizer: Tokenizer, **options: Any) -> list[list[int]]:
    """Return the best ids that the beam search of transformers finds for LINES."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(exported(folder, ExportFormat.huggingface))
    src, lengths = pad_source(tokenizer.encode_batch(LINES), tokenizer)
    with torch.inference_mode():
        sequences = model.generate(
            input_ids=src,
            attention_mask=torch.arange(src.size(1)) < lengths.unsqueeze(1),
            max_length=LIMIT + 1,
            length_penalty=0.0,
            early_stopping="never",
            **options,
        )
    ids = []
    for row in sequences[:, 1:].tolist():
        end = row.index(tokenizer.eos_id) + 1 if tokenizer.eos_id in row else len(row)
        ids.append(row[:end])
    return ids


# --- suppressed pieces


def test_search_finds_the_best_hypotheses_without_a_suppressed_piece() -> None:
    source = toy_source(4, 2, 3)
    settings = config(400, 0.6, suppress=["a", "<unk>"])
    for row, hypotheses in enumerate(find(ToyStepper(), source, settings)):
        all_hypotheses = enumerate_hypotheses(source_ids(source, row), 5, settings)
        assert_same(hypotheses, [h for h in all_hypotheses if not {1, 4} & set(h.tokens)])


@pytest.mark.slow
def test_suppressed_pieces_give_the_ids_of_both_libraries(
    folder: Path, tokenizer: Tokenizer
) -> None:
    suppressed = [tokenizer.all_pieces().index(piece) for piece in PIECES]
    pieces = [["<pad>"], ["<s>"], *[[piece] for piece in PIECES]]
    greedy = best_ids(native(folder, LINES, replace(GREEDY, suppress=PIECES)))
    beam = best_ids(native(folder, LINES, replace(PLAIN, suppress=PIECES)))
    plain = best_ids(native(folder, LINES, PLAIN))
    assert sum(ids != plain_ids for ids, plain_ids in zip(beam, plain, strict=True)) > 50
    assert not set(suppressed) & {token for ids in beam + greedy for token in ids}
    results = search_with_ctranslate2(folder, tokenizer, beam_size=1, suppress_sequences=pieces)
    assert [tokenizer.pieces(ids) for ids in greedy] == [r.hypotheses[0] for r in results]
    for ids, num_beams in ((greedy, 1), (beam, 4)):
        options = {"num_beams": num_beams, "suppress_tokens": suppressed}
        assert search_with_transformers(folder, tokenizer, **options) == ids, num_beams


@pytest.mark.slow
def test_unknown_pieces_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    for backend in ("native", "ctranslate2", "auto"):
        translator = Translator.load(folder, device="cpu", backend=backend)
        with pytest.raises(ConfigError, match=r"^suppress: 'the' is not a piece .*; did you mean"):
            translator.translate(LINES, suppress=["the"])
        with pytest.raises(ConfigError, match=r"^suppress: no translation could end without </s>"):
            translator.translate(LINES, suppress=["</s>"])
    path = tmp_path / "pieces.txt"
    path.write_text("\n".join(PIECES), encoding="utf-8")
    source = write_lines(tmp_path / "in", LINES[:20])
    arguments = [f"model_dir={folder}", f"input={source}", f"output={tmp_path / 'out'}"]
    assert translate(*arguments, f"suppress={path}") == 0
    native = Translator.load(folder, device="cpu", backend="native")
    expected = native.translate(LINES[:20], suppress=PIECES)
    assert (tmp_path / "out").read_text(encoding="utf-8").split("\n")[:-1] == expected
    with running(loaded(folder)) as server:
        for pieces, status in ((["the"], 409), (["</s>"], 409), ([""], 400), ("the", 400)):
            body = {"text": "a", "search": {"suppress": pieces}, **GOOD}
            answer = server.post("/v1/translate", **body)
            assert answer.status == status, answer
            assert "suppress" in answer.json["error"]


# --- repeats of the source


def test_an_ngram_may_occur_as_often_as_in_the_source() -> None:
    sources = [[5, 4, 5, 4, 5], [4, 4, 4], [UNK, 5], []]
    for size in (1, 2):
        settings = config(400, 0.6, no_repeat_ngram=size, allow_source_repeats=True)
        results = search(ToyStepper(), SearchRequest(sources, settings), TOKENIZER)
        for source, hypotheses in zip(sources, results, strict=True):
            allowed_counts = ngram_counts(source, size)
            expected = []
            for hypothesis in enumerate_hypotheses((*source, EOS), 5, settings):
                text = [token for token in hypothesis.tokens if token != EOS]
                counts = ngram_counts(text, size)
                if all(n <= max(1, allowed_counts[ngram]) for ngram, n in counts.items()):
                    expected.append(hypothesis)
            assert_same(hypotheses, expected)


def ngram_counts(tokens: list[int], size: int) -> Counter[str]:
    """Count n-grams in a way of its own: as substrings of the ids, which have one digit."""
    text = "".join(map(str, tokens))
    return Counter(text[i : i + size] for i in range(len(text) - size + 1))


def test_source_ids_are_compared_as_pieces() -> None:
    src = SimpleNamespace(pieces=lambda ids: ["xyz"[i] for i in ids])
    tgt = SimpleNamespace(all_pieces=lambda: ["z", "a", "x"])
    assert to_target_ids([[0, 1, 2, 2]], SimpleNamespace(src=src, tgt=tgt)) == [[2, -1, 0, 0]]  # type: ignore[arg-type]
    assert to_target_ids([[4, 5]], TOKENIZER) == [[4, 5]]


# --- diverse beam search


def diverse_by_lists(
    source: tuple[int, ...], limit: int, settings: SearchConfig, toy: ToySettings
) -> list[Hypothesis]:
    """Search one sentence in groups, by the formula of Vijayakumar et al. (2018): a group ranks by
    log P minus `diversity_penalty` times the number of hypotheses of earlier groups that have
    chosen the same token in this step. A group drops hypotheses by the rule of `stop`.
    """
    group_size = settings.beam_size // settings.beam_groups
    live: list[list[tuple[float, tuple[int, ...]]]] = [
        [(0.0, ())] for _ in range(settings.beam_groups)
    ]
    finished: list[list[Hypothesis]] = [[] for _ in live]
    for length in range(1, limit + 1):
        token_counts: Counter[int] = Counter()
        for group, hypotheses in enumerate(live):
            extended = []
            for log_prob, tokens in hypotheses:
                log_probs = toy_log_probs(source, (BOS, *tokens), toy)
                for symbol in ALLOWED_SYMBOLS:
                    rank = (
                        log_prob
                        + log_probs[symbol]
                        - settings.diversity_penalty * token_counts[symbol]
                    )
                    extended.append((rank, log_prob + log_probs[symbol], (*tokens, symbol)))
            extended.sort(reverse=True)
            for _, _, tokens in extended[:group_size]:
                if tokens[-1] == EOS:
                    finished[group].append(score_by_formula(tokens, source, settings, toy))
            going_on = [(log_prob, tokens) for _, log_prob, tokens in extended if tokens[-1] != EOS]
            going_on = going_on[:group_size]
            token_counts.update(tokens[-1] for _, tokens in going_on)
            best = sorted(finished[group], key=lambda h: -h.score)[:group_size]
            if len(best) == group_size and length < limit:
                last_length = limit if settings.stop is Stop.exact else length + 1
                lengths = range(length + 1, last_length + 1)
                score_to_beat = best[-1].score
                going_on = [
                    hypothesis
                    for hypothesis in going_on
                    if max(normalized(hypothesis[0], n, settings) for n in lengths) > score_to_beat
                ]
            live[group] = going_on
    results: dict[tuple[int, ...], Hypothesis] = {}
    for group, hypotheses in enumerate(live):
        unfinished = [score_by_formula(tokens, source, settings, toy) for _, tokens in hypotheses]
        of_group = sorted(finished[group] + unfinished, key=lambda h: (not h.finished, -h.score))
        results.update((tuple(h.tokens), h) for h in of_group[:group_size])
    return sorted(results.values(), key=lambda h: (not h.finished, -h.score))


@pytest.mark.parametrize("toy", QUICK_AND_SLOW_SETTINGS)
def test_diverse_beam_search_equals_the_formula_of_the_paper(toy: ToySettings) -> None:
    source = toy_source(4, 2, 6, 3)
    plain = find(ToyStepper(toy), source, config(6, b=6))
    num_changed = 0
    for beam_size, num_groups in ((2, 2), (6, 3), (6, 2), (4, 4)):
        for penalty, stop in ((0.0, Stop.exact), (0.5, Stop.first), (2.0, Stop.exact)):
            changes = {"beam_groups": num_groups, "diversity_penalty": penalty, "stop": stop}
            settings = config(beam_size, b=6, **changes)
            results = find(ToyStepper(toy), source, settings)
            for row, hypotheses in enumerate(results):
                expected = diverse_by_lists(source_ids(source, row), 6, settings, toy)
                assert_same(hypotheses, expected, case=changes)
                if beam_size == 6:
                    num_changed += {tuple(h.tokens) for h in hypotheses} != {
                        tuple(h.tokens) for h in plain[row]
                    }
            best = find(ToyStepper(toy), source, settings, n_best=beam_size)
            assert [h[0].tokens for h in best] == [h[0].tokens for h in results]
    assert num_changed > 6


def test_a_sentence_is_encoded_once_for_all_groups() -> None:
    class CountingStepper(ToyStepper):
        num_encoded = 0

        def start(self, src: Tensor, src_lengths: Tensor, *, with_attention: bool = False) -> Any:
            self.num_encoded += len(src)
            return super().start(src, src_lengths, with_attention=with_attention)

    stepper = CountingStepper()
    find(stepper, toy_source(4, 2), config(4, beam_groups=4))
    assert stepper.num_encoded == 2


def test_wrong_groups_are_refused() -> None:
    for changes, message in (
        ({"beam_groups": 3}, "beam_groups=3: must divide beam_size=4"),
        ({"beam_groups": 2, "sampling": True}, "beam_groups=2: does not work with sampling"),
        ({"beam_groups": 2, "glossary": ["a\tb"]}, "beam_groups=2: does not work with .*glossary"),
        ({"diversity_penalty": 1.0}, "diversity_penalty=1.0: needs beam_groups=2"),
    ):
        with pytest.raises(ConfigError, match=message):
            SearchConfig(**changes)


# --- every control in every kind of call

CONTROLS: dict[str, dict[str, Any]] = {
    "suppress": {"suppress": PIECES},
    "allow_source_repeats": {"allow_source_repeats": True, "no_repeat_ngram": 1},
    "beam_groups": {"beam_groups": 2},
    "alternatives": {"alternatives": 3},
    "prefix_bias": {"prefix_bias": 0.4},
}
SHORT = {"max_length_a": 0.0, "max_length_b": LIMIT}


@pytest.fixture(params=CONTROLS)
def control(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONTROLS[request.param] | SHORT


@pytest.mark.slow
def test_a_translation_depends_on_its_own_line_and_prefix_only(
    folder: Path, control: dict[str, Any]
) -> None:
    translator = Translator.load(folder, device="cpu", backend="native")
    lines = LINES[:12]
    prefixes = [["", "Haus", "the green"][i % 3] for i in range(len(lines))]
    together = translator.n_best(lines, prefixes=prefixes, **control)
    for i, translations in enumerate(together):
        [alone] = translator.n_best([lines[i]], prefixes=[prefixes[i]], **control)
        assert [t.text for t in alone] == [t.text for t in translations]
    best = [translations[0].text for translations in together]
    assert translator.translate(lines, prefixes=prefixes, max_tokens=40, **control) == best
    assert list(translator.translate_stream(lines, prefixes=prefixes, **control)) == best
    without = translator.n_best(lines, **control)
    for i in range(0, len(lines), 3):  # an empty prefix forces nothing
        assert [t.text for t in without[i]] == [t.text for t in together[i]]


@pytest.mark.slow
def test_sentences_that_join_have_the_translations_of_a_batch(
    folder: Path, control: dict[str, Any]
) -> None:
    backend = load_models([folder], device="cpu").backend
    rows = backend.tokenizers.src.encode_batch(LINES[:9])
    settings = SearchConfig(**control)
    request = SearchRequest(rows, settings)
    if not backend.can_join(request):
        assert any(settings_forbid_joining(settings))
        return
    search = BatchSearch(backend, settings, n_best=4, max_tokens=4096)
    waiting = [Segment(row, []) for row in rows[3:]]
    delivered: dict[int, SearchResult] = {}
    search.translate_arriving(
        [Segment(row, []) for row in rows[:3]],
        lambda num_searched: [waiting.pop(0) for _ in range(min(2, len(waiting)))],
        delivered.update,
    )
    for i, hypotheses in enumerate(backend.search(request)):
        assert_same(delivered[i], hypotheses, tolerance=1e-4)  # type: ignore[arg-type]


def settings_forbid_joining(settings: SearchConfig) -> list[bool]:
    """Return which settings of the controls need the number of a sentence or its first step."""
    return [
        settings.allow_source_repeats,
        settings.beam_groups > 1,
        settings.alternatives > 0,
    ]


@pytest.mark.slow
def test_an_ensemble_of_a_model_and_itself_translates_like_the_model(
    folder: Path, control: dict[str, Any]
) -> None:
    single = Translator.load(folder, device="cpu", backend="native")
    ensemble = Translator.load([folder, folder], device="cpu")
    lines = LINES[:12]
    assert ensemble.translate(lines, **control) == single.translate(lines, **control)


@pytest.mark.slow
def test_samples_obey_a_control_or_it_is_refused(folder: Path, control: dict[str, Any]) -> None:
    translator = Translator.load(folder, device="cpu", backend="native")
    settings = control | {"sampling": True, "beam_size": 3}
    if "beam_groups" in control or "alternatives" in control:
        name = next(iter(control))
        with pytest.raises(ConfigError, match=rf"^{name}=[23]: .* sampling"):
            translator.translate(LINES, **settings)
        return
    if "suppress" in control:
        for samples in translator.n_best(LINES[:12], **settings):
            tokens = {token for sample in samples for token in sample.tokens}
            assert not tokens & set(PIECES)
    assert translator.n_best(LINES[:4], **settings) == translator.n_best(LINES[:4], **settings)


@pytest.mark.slow
def test_auto_takes_the_engine_that_has_the_control(
    folder: Path, control: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    auto = Translator.load(folder, device="cpu", backend="auto", quantization="float32")
    fast = Translator.load(folder, device="cpu", backend="ctranslate2", quantization="float32")
    lines = LINES[:12]
    translations = auto.translate(lines, **control)
    name = next(iter(control))
    if f"native, since {name}" in caplog.text:
        with pytest.raises(ConfigError, match=rf"^{name}=.*; use backend=native$"):
            fast.translate(lines, **control)
        fast = Translator.load(folder, device="cpu", backend="native")
    assert translations == fast.translate(lines, **control)


@pytest.mark.slow
def test_the_server_translates_with_a_control_like_the_translator(
    folder: Path, control: dict[str, Any]
) -> None:
    translator = Translator.load(folder, device="cpu", backend="native")
    search = control | {"max_length_a": 0}
    lines = LINES[:12]
    expected = translator.translate(lines, **control)
    with running(loaded(folder)) as server:
        answer = server.post("/v1/translate", text=lines, search=search, **GOOD)
        assert [t["text"] for t in answer.json["translations"]] == expected
        text = "\n".join(lines)
        answer = server.post("/v1/translate", text=text, search=search, stream=True, **GOOD)
        assert answer.body.decode().count('"text"') == len(lines)
