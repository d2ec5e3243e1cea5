"""backend=ctranslate2 against CTranslate2 called directly and against the native engine."""

from __future__ import annotations

import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from exporting import HOSTILE, exported, prefer_padding, random_model, short_sentences
from searching import assert_same
from tiny import sentences
from toy import command

from nmt import Translator
from nmt.config import DType, ExportFormat, Norm, Normalization, Positions, SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError, DataError, DeviceError, ModelError, NmtError
from nmt.runtime.files import write_json
from nmt.runtime.manifest import write_manifest
from nmt.runtime.metadata import read_json
from nmt.search.constraints import ForbiddenTokens
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.translate.engines.base import Backend
from nmt.translate.engines.ctranslate2 import CTranslate2Backend, load_ctranslate2
from nmt.translate.engines.native import load_models

pytestmark = pytest.mark.slow

LINES = short_sentences(20)
SMALL = SearchConfig(max_length_b=10)
GREEDY = replace(SMALL, beam_size=1)
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": DType.float32, "num_threads": 1}
Engines = tuple[Backend, CTranslate2Backend, Tokenizer]
Rows = list[list[int]]
NAMES = ["post-sinusoidal", "pre-sinusoidal_concat"]


def load(folder: Path, **changes: Any) -> Engines:
    """Return the native engine, CTranslate2's, and the tokenizer of one model folder."""
    models = load_models([folder], device="cpu")
    converted = load_ctranslate2(exported(folder, ExportFormat.ctranslate2, **changes), **SETTINGS)
    assert isinstance(converted.backend, CTranslate2Backend)
    return models.backend, converted.backend, models.tokenizer


@pytest.fixture(scope="module", params=NAMES)
def engines(request: pytest.FixtureRequest, trained_models: dict[str, Path]) -> Engines:
    return load(trained_models[request.param])


def log_probs(engine: Backend, rows: Rows, targets: Rows) -> list[list[float]]:
    return [h.token_log_probs for h in engine.score(rows, targets, SMALL, 4096)]


def translate(
    engine: Backend, rows: Rows, config: SearchConfig, **options: Any
) -> list[list[Hypothesis]]:
    return engine.search(SearchRequest(rows, config, **options))


def translate_directly(
    converted: CTranslate2Backend, rows: Rows, tokenizer: Tokenizer, **arguments: Any
) -> list[Any]:
    """Call CTranslate2's own search."""
    return converted._engine.translate_batch(
        [tokenizer.pieces(row) for row in rows],
        suppress_sequences=[["<pad>"], ["<s>"]],
        max_input_length=0,
        return_end_token=True,
        return_scores=True,
        **arguments,
    )


def test_hypotheses_order_and_scores_are_those_of_a_direct_call(engines: Engines) -> None:
    _, converted, tokenizer = engines
    rows = tokenizer.encode_batch([*LINES, *sentences(5)])
    longest = max(len(row) for row in rows)
    prefixes = [tokenizer.encode("Haus grün")[: i % 3] for i in range(len(rows))]
    prefix_pieces = [tokenizer.pieces(prefix) for prefix in prefixes]
    average = {"normalization": Normalization.average}
    short = {"max_length_a": 0.5, "max_length_b": 2}
    beam = {"beam_size": 4, "num_hypotheses": 4, "max_decoding_length": longest + 10}
    beam |= {"length_penalty": 0.42, "min_decoding_length": 0}
    short_limit = {"max_decoding_length": longest // 2 + 2}
    cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ({}, {}, {}),
        ({"length_penalty": 0.0}, {}, {"length_penalty": 0}),
        ({"length_penalty": -0.5}, {}, {"length_penalty": -0.35}),
        (average, {}, {"length_penalty": 1}),
        (
            {"normalization": Normalization.none},
            {"n_best": 1},
            {"length_penalty": 0, "num_hypotheses": 1},
        ),
        ({}, {"n_best": 2}, {"num_hypotheses": 2}),
        ({"beam_size": 3}, {"n_best": 9}, {"beam_size": 3, "num_hypotheses": 3}),
        (short, {}, short_limit),
        ({"min_length": 6}, {}, {"min_decoding_length": 6}),
        ({"beam_size": 1}, {}, {"beam_size": 1, "num_hypotheses": 1}),
        ({}, {"prefixes": prefixes}, {"target_prefix": prefix_pieces}),
    ]
    for changes, options, arguments in cases:
        config = replace(SMALL, **changes)
        converted.check(config)
        call = beam | arguments
        results = translate_directly(converted, rows, tokenizer, **call)
        translations = translate(converted, rows, config, **options)
        for result, hypotheses in zip(results, translations, strict=True):
            assert [tokenizer.pieces(h.tokens) for h in hypotheses] == result.hypotheses, changes
            assert [h.score for h in hypotheses] == result.scores, changes
            for h in hypotheses:
                log_prob = h.score * len(h.tokens) ** call["length_penalty"]
                assert h.log_prob == pytest.approx(log_prob)
                assert h.finished == (h.tokens[-1] == tokenizer.eos_id)
                assert h.token_log_probs == []


def test_without_length_normalization_the_best_hypothesis_is_the_native_one(
    engines: Engines,
) -> None:
    native, converted, tokenizer = engines
    rows = tokenizer.encode_batch([*LINES, *sentences(5), "the " * 150])
    for changes in (
        {"beam_size": 1},
        {"beam_size": 1, "alignment": True},
        {"length_penalty": 0.0},
        {"normalization": Normalization.none, "alignment": True},
    ):
        config = replace(SMALL, **changes)
        native_results = translate(native, rows, config)
        for i, [hypothesis, *_] in enumerate(translate(converted, rows, config)):
            expected = native_results[i][0]
            if expected.finished:
                assert hypothesis.tokens == expected.tokens, (changes, i)
                assert hypothesis.alignment == expected.alignment, (changes, i)
                # PAD and BOS are excluded before the softmax there
                assert hypothesis.log_prob == pytest.approx(expected.log_prob, rel=0.05)


def test_without_scores_the_hypotheses_are_the_same(engines: Engines) -> None:
    _, converted, tokenizer = engines
    rows = tokenizer.encode_batch(LINES)
    for config in (GREEDY, SMALL):
        scored = translate(converted, rows, config)
        for i, hypotheses in enumerate(translate(converted, rows, config, with_scores=False)):
            assert [h.tokens for h in hypotheses] == [h.tokens for h in scored[i]]
            assert all(math.isnan(h.score) and math.isnan(h.log_prob) for h in hypotheses)


def test_padding_and_the_start_symbol_are_never_generated(
    trained_models: dict[str, Path], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = prefer_padding(tmp_path / "model", trained_models[NAMES[0]], tokenizer)
    native, converted, _ = load(folder)
    rows = tokenizer.encode_batch(LINES)
    for config in (GREEDY, SMALL):
        for hypotheses in translate(converted, rows, config):
            for h in hypotheses:
                assert not {tokenizer.pad_id, tokenizer.bos_id} & set(h.tokens)
    expected = [h.tokens for [h] in translate(native, rows, GREEDY)]
    assert [h.tokens for [h] in translate(converted, rows, GREEDY)] == expected


def test_forced_prefixes_of_each_line_are_part_of_the_result(engines: Engines) -> None:
    native, converted, tokenizer = engines
    rows = tokenizer.encode_batch(LINES)
    prefixes = [tokenizer.encode("Haus grün")[: i % 3] for i in range(len(rows))]
    short = replace(SMALL, max_length_a=0, max_length_b=1)  # shorter than a prefix
    for config in (SMALL, short):
        results = translate(converted, rows, config, prefixes=prefixes)
        for prefix, hypotheses in zip(prefixes, results, strict=True):
            for h in hypotheses:
                assert h.tokens[: len(prefix)] == prefix
    expected = [h.tokens for [h] in translate(native, rows, GREEDY, prefixes=prefixes)]
    assert [h.tokens for [h] in translate(converted, rows, GREEDY, prefixes=prefixes)] == expected
    with pytest.raises(ConfigError, match="forced prefix of sentence 0"):
        translate(converted, rows[:1], SMALL, prefixes=[[tokenizer.eos_id]])


def test_no_sentence_depends_on_its_neighbors(engines: Engines) -> None:
    _, converted, tokenizer = engines
    rows = tokenizer.encode_batch([*LINES, *sentences(5), "the " * 150])
    config = replace(SMALL, alignment=True)
    for row, hypotheses in zip(rows, translate(converted, rows, config), strict=True):
        if hypotheses[0].finished:
            [expected] = translate(converted, [row], config)
            assert_same(hypotheses[:1], expected[:1], tolerance=1e-3)


def test_scores_and_alignment_are_the_native_ones_for_models_of_all_shapes(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    shapes: list[dict[str, Any]] = [
        {"num_decoder_layers": 1, "d_model": 14, "num_heads": 7},
        {"num_encoder_layers": 1, "num_decoder_layers": 3, "d_model": 10, "num_heads": 5},
        {"d_model": 6, "d_ff": 5, "num_heads": 1, "positions": Positions.sinusoidal_concat},
    ]
    rows = tokenizer.encode_batch([*sentences(8), *HOSTILE, "a"])
    targets = [*rows[1:], []]
    for number, (norm, shape) in enumerate(itertools.product(Norm, shapes)):
        folder = random_model(tmp_path / str(number), tokenizer, norm=norm, **shape)
        native, converted, _ = load(folder)
        expected = log_probs(native, rows, targets)
        for i, scores in enumerate(log_probs(converted, rows, targets)):
            assert len(scores) == len(targets[i]) + 1
            assert scores == pytest.approx(expected[i], abs=1e-3), (norm, shape)
    config = replace(GREEDY, max_length_a=0, alignment=True)  # one length limit for all rows
    for name, shape in {
        "3": {"num_decoder_layers": 3},
        "6": {"num_decoder_layers": 6},
        "shifted": {"num_decoder_layers": 2, "alignment_heads": 1, "alignment_shift": True},
    }.items():
        model_dir = random_model(tmp_path / name, tokenizer, num_encoder_layers=1, **shape)
        native, converted, _ = load(model_dir)
        for beam_size in (1, 4):
            config = replace(config, beam_size=beam_size)
            native_results = translate(native, rows[:8], config)
            for i, hypotheses in enumerate(translate(converted, rows[:8], config)):
                assert hypotheses[0].tokens == native_results[i][0].tokens, name
                assert hypotheses[0].alignment == native_results[i][0].alignment, name


def test_samples_follow_the_settings(engines: Engines) -> None:
    _, converted, tokenizer = engines
    rows = tokenizer.encode_batch(LINES[:4])
    config = replace(SMALL, sampling=True, beam_size=5, temperature=2.0, top_k=8, top_p=0.9)
    results = translate(converted, rows, config)
    assert [len(samples) for samples in results] == [5] * 4
    assert len({tuple(h.tokens) for samples in results for h in samples}) > 4
    greedy = [h.tokens for [h] in translate(converted, rows, GREEDY)]
    for changes in ({"top_p": 0.01}, {"temperature": 0.001}):
        config = replace(SMALL, sampling=True, beam_size=2, **changes)
        for i, samples in enumerate(translate(converted, rows, config)):
            assert [h.tokens for h in samples] == [greedy[i]] * 2, changes


def test_unsupported_settings_are_refused_before_the_first_line(
    trained_models: dict[str, Path],
) -> None:
    _, converted, _ = load(trained_models[NAMES[0]])
    for changes, scoring, message in (
        ({"coverage_penalty": 0.2}, False, "coverage_penalty=0.2: .* has no coverage_penalty"),
        ({"coverage_penalty": 0.2}, True, "coverage_penalty=0.2: .* has no coverage_penalty"),
        ({"word_reward": 1.0}, False, "word_reward=1.0: .* has no word_reward"),
        ({"sampling": True, "min_p": 0.1}, False, "min_p=0.1: .* has no min_p"),
        ({"sampling": True, "epsilon": 0.1}, False, "epsilon=0.1: .* has no epsilon"),
        ({"glossary": ["a\tb"]}, False, "glossary=.*: .* has no glossary"),
        ({"alignment": True}, True, "alignment=true: .* has no alignment in scoring"),
        (
            {"sampling": True, "top_k": 1},
            False,
            "top_k=1: .* has no top_k below 2 for several samples",
        ),
    ):
        with pytest.raises(ConfigError, match=rf"^{message}; use backend=native$") as caught:
            converted.check(replace(SMALL, **changes), scoring=scoring)
        assert "backend=ctranslate2" in str(caught.value)
    converted.check(replace(SMALL, alignment=True))
    converted.check(replace(SMALL, word_reward=1.0), scoring=True)
    with pytest.raises(ConfigError, match=r"^constraints=.* has no constraints; use backend=nat"):
        translate(converted, [[5]], SMALL, constraints=[ForbiddenTokens([6])])


def test_more_tokens_than_positions_are_an_error_and_never_cut(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    native, converted, _ = load(random_model(tmp_path / "model", tokenizer), max_positions=12)
    row = tokenizer.encode("the house " * 12)[:11]
    too_long = [*row, row[0]]
    config = replace(SMALL, max_length_b=50)
    [[best, *_]] = translate(converted, [row], config)
    assert len(best.tokens) == 11
    assert not best.finished
    expected = log_probs(native, [row], [row])[0]
    assert log_probs(converted, [row], [row])[0] == pytest.approx(expected, abs=1e-3)
    message = "12 tokens and the exported model takes 11; .*max_pos"
    with pytest.raises(DataError, match=message):
        translate(converted, [too_long], config)
    with pytest.raises(DataError, match=message):
        log_probs(converted, [row], [too_long])


def test_a_long_source_is_read_whole(trained_models: dict[str, Path], tokenizer: Tokenizer) -> None:
    """CTranslate2 by itself cuts after 1,024 tokens."""
    native, converted, _ = load(trained_models[NAMES[0]])
    the = tokenizer.encode("the")
    row = the * 1030 + tokenizer.encode("tree") + the * 300
    config = replace(GREEDY, max_length_a=0, max_length_b=6, alignment=True)
    [[expected]] = translate(native, [row], config)
    [[hypothesis]] = translate(converted, [row], config)
    assert hypothesis.tokens == expected.tokens
    assert hypothesis.alignment == expected.alignment
    assert max(expected.alignment or []) > 1024
    target = tokenizer.encode("small")
    long, short = log_probs(converted, [row, row[:1024]], [target, target])
    assert long == pytest.approx(log_probs(native, [row], [target])[0], abs=1e-3)
    assert short != pytest.approx(long, abs=1e-6)


def test_the_translator_gives_the_same_text_from_several_threads(
    trained_models: dict[str, Path],
) -> None:
    folder = trained_models[NAMES[0]]
    output = exported(folder, ExportFormat.ctranslate2)
    translator = Translator.load(output, backend="ctranslate2", device="cpu", num_threads=2)
    lines = [*LINES, ""]
    # without a length penalty, since the engines normalize scores by different formulas
    native = Translator.load(folder, device="cpu", backend="native")
    expected = native.translate(lines, length_penalty=0.0)
    assert translator.backend.num_workers == 2
    assert translator.translate(lines, length_penalty=0.0, max_tokens=30) == expected
    translate_lines = partial(translator.translate, length_penalty=0.0)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(translate_lines, [lines] * 3)) == [expected] * 3


def test_other_folders_and_devices_are_refused_in_one_line(
    trained_models: dict[str, Path],
) -> None:
    folder = trained_models[NAMES[0]]
    with pytest.raises(ModelError, match="does not exist; give a run, a checkpoint or a model"):
        load_ctranslate2(folder / "missing", **SETTINGS)
    with pytest.raises(ModelError, match="needs one of format=ctranslate2$"):
        load_ctranslate2(exported(folder, ExportFormat.huggingface), **SETTINGS)
    output = exported(folder, ExportFormat.ctranslate2)
    with pytest.raises(DeviceError, match="^device=cuda:9: this machine has"):
        load_ctranslate2(output, **SETTINGS | {"device": "cuda:9"})
    message = "^dtype=float16: CTranslate2 does not support it on this cpu; use dtype=float32$"
    with pytest.raises(DeviceError, match=message):
        load_ctranslate2(output, **SETTINGS | {"dtype": DType.float16})
    config = read_json(output / "config.json")
    for key, value in (
        ("layer_norm_epsilon", -1),
        ("layer_norm_epsilon", True),
        ("layer_norm_epsilon", 10**9),
        ("decoder_start_token", None),
        ("add_source_eos", 0),
    ):
        write_json(output / "config.json", config | {key: value})
        write_manifest(output)
        with pytest.raises(NmtError, match=rf"config\.json.*{key} is {value}"):
            load_ctranslate2(output, **SETTINGS)
    write_json(output / "config.json", config)
    (output / "model.bin").write_bytes((output / "model.bin").read_bytes()[:5000])
    write_manifest(output)
    with pytest.raises(
        ModelError, match=r"model\.bin is not an export of this model \(it ends too early\)"
    ):
        load_ctranslate2(output, **SETTINGS)


def test_nmt_score_gives_the_native_scores(trained_models: dict[str, Path], tmp_path: Path) -> None:
    folder = trained_models[NAMES[0]]
    for name, lines in (("src", ["", *LINES, ""]), ("tgt", ["a", *reversed(LINES), ""])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    models = {"native": folder, "ctranslate2": exported(folder, ExportFormat.ctranslate2)}
    records: dict[str, list[dict[str, Any]]] = {}
    for backend, model in models.items():
        output = tmp_path / backend
        files = [f"src={tmp_path / 'src'}", f"tgt={tmp_path / 'tgt'}", f"output={output}"]
        options = [f"model_dir={model}", f"backend={backend}", "num_threads=1", "device=cpu"]
        assert command("score", files, options, "format=json", "word_reward=0.3") == 0
        lines = output.read_text(encoding="utf-8").splitlines()
        records[backend] = [json.loads(line) for line in lines]
    assert len(records["ctranslate2"]) == len(records["native"])
    for i, expected in enumerate(records["native"]):
        record = records["ctranslate2"][i]
        for name in ("index", "tokens"):
            assert record[name] == expected[name]
        for name in ("log_prob", "per_token", "score", "token_log_probs"):
            assert record[name] == pytest.approx(expected[name], abs=1e-3)
    translator = Translator.load(models["ctranslate2"], backend="ctranslate2", device="cpu")
    scores = [pair.score for pair in translator.score(LINES, LINES[::-1], word_reward=0.3)]
    assert scores == [record["score"] for record in records["ctranslate2"][1:-1]]
