"""backend=ctranslate2 against the native one: hypotheses, scores, options, and what it refuses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import HOSTILE, exported, prefer_padding, random_model, save, short_sentences
from searching import assert_same as assert_same_hypotheses
from tiny import EOS, sentences, tiny_model
from toy import command

from nmt import Translator
from nmt.config import DType, ExportFormat, Norm, Normalization, Positions, SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError, DataError, DeviceError, ModelError, NmtError
from nmt.runtime.files import write_json
from nmt.runtime.manifest import write_manifest
from nmt.runtime.metadata import read_json
from nmt.search.hypotheses import Hypothesis, score
from nmt.search.request import SearchRequest
from nmt.search.stepper import ModelStepper
from nmt.translate.engines.base import Backend
from nmt.translate.engines.ctranslate2 import load_ctranslate2
from nmt.translate.engines.native import NativeBackend, load_models

pytestmark = pytest.mark.slow

LINES = short_sentences(20)
SMALL = replace(SearchConfig(), max_length_b=10)
Engines = tuple[Backend, Backend, Tokenizer]
Rows = list[list[int]]
NAMES = ["post-sinusoidal", "pre-sinusoidal_concat"]


def load(folder: Path, **changes: Any) -> Engines:
    """Return the native backend and CTranslate2's for one model folder."""
    models = load_models([folder], device="cpu")
    output = exported(folder, ExportFormat.ctranslate2, **changes)
    theirs = load_ctranslate2(output, device="cpu", dtype=DType.float32, num_threads=1)
    return models.backend, theirs.backend, models.tokenizer


@pytest.fixture(scope="module", params=NAMES)
def engines(request: pytest.FixtureRequest, trained_models: dict[str, Path]) -> Engines:
    return load(trained_models[request.param])


def log_probs(engine: Backend, rows: Rows, targets: Rows) -> list[list[float]]:
    return [h.token_log_probs for h in engine.score(rows, targets, SMALL, 4096)]


def rescored(engine: Backend, row: list[int], found: Sequence[Hypothesis]) -> list[list[float]]:
    """Score hypotheses of one sentence as given targets."""
    bare = [h.tokens[:-1] if h.finished else h.tokens for h in found]
    scores = log_probs(engine, [row] * len(found), bare)
    return [some[: len(h.tokens)] for some, h in zip(scores, found, strict=True)]


def assert_same(
    ours: Sequence[Hypothesis], theirs: Sequence[Hypothesis], case: object = ""
) -> None:
    assert_same_hypotheses(theirs, ours, tolerance=1e-3, case=case)


def searched(engine: Backend, rows: Rows, *more: Any, **named: Any) -> list[list[Hypothesis]]:
    return engine.search(SearchRequest(rows, *more, **named))


def test_the_best_hypothesis_is_the_native_one_where_lengths_do_not_count(engines: Engines) -> None:
    native, other, tokenizer = engines
    rows = tokenizer.encode_batch(LINES)
    cases: list[dict[str, Any]] = [
        {"beam_size": 1},
        {"beam_size": 1, "min_length": 6},
        {"beam_size": 1, "max_length_a": 0.5, "max_length_b": 2, "alignment": True},
        {"length_penalty": 0.0},
        {"normalization": Normalization.none, "alignment": True},
        {"max_length_a": 0.5, "max_length_b": 2},
    ]
    for changes in cases:
        config = replace(SMALL, **changes)
        other.check(config)
        found = zip(searched(native, rows, config), searched(other, rows, config), strict=True)
        # at a limit native prefers a translation that ends, if it is among the K, to a cut one
        pairs = [(ours, theirs) for ours, theirs in found if ours[0].finished == theirs[0].finished]
        assert len(pairs) > 0.8 * len(rows), changes
        for ours, theirs in pairs:
            assert_same(ours[:1], theirs[:1], changes)
    for changes in (
        {"length_penalty": -0.5},
        {"length_penalty": 0.6, "alignment": True},
        {"length_penalty": 1.0},
        {"normalization": Normalization.average},
    ):  # where they do, none is better than the native one, and most are the same
        config, num_same = replace(SMALL, **changes), 0
        found = zip(searched(native, rows, config), searched(other, rows, config), strict=True)
        for ours, theirs in found:
            assert theirs[0].score < ours[0].score + 1e-3
            if ours[0].tokens == theirs[0].tokens:
                assert_same(ours[:1], theirs[:1], changes)
                num_same += 1
        assert num_same >= 0.9 * len(rows), changes


def test_scores_are_those_of_the_model_and_the_order_that_of_our_rule(engines: Engines) -> None:
    native, other, tokenizer = engines
    rows = tokenizer.encode_batch(LINES)
    cases: list[dict[str, Any]] = [{}, {"max_length_a": 0.5, "max_length_b": 2}, {"min_length": 4}]
    for changes in cases:
        config = replace(SMALL, **changes)
        for row, found in zip(rows, searched(other, rows, config), strict=True):
            assert len({tuple(h.tokens) for h in found}) == len(found) == config.beam_size
            for h, expected in zip(found, rescored(native, row, found), strict=True):
                assert h.finished == (h.tokens[-1] == tokenizer.eos_id)
                assert len(h.tokens) > config.min_length or not h.finished
                assert h.token_log_probs == pytest.approx(expected, abs=1e-3)
                assert h.log_prob == pytest.approx(sum(h.token_log_probs))
                assert h.score == pytest.approx(score(h.log_prob, len(h.tokens), config))
            if not config.min_length:  # with it, the end symbol's share counts for the others
                for one, following in itertools.pairwise(found):
                    assert (one.finished, one.score + 0.02) >= (following.finished, following.score)


class Recorded:
    """An engine that notes which of its methods are taken."""

    def __init__(self, engine: Any, calls: list[str]) -> None:
        self._engine, self._calls = engine, calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(name)
        return getattr(self._engine, name)


def test_without_scores_the_same_hypotheses_come_from_one_search(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, other, tokenizer = engines
    rows, calls = tokenizer.encode_batch(LINES), list[str]()
    configs = [replace(SMALL, beam_size=beam_size) for beam_size in (1, 4)]
    wanted = [searched(other, rows, config) for config in configs]
    monkeypatch.setattr(other, "_engine", Recorded(other._engine, calls))  # type: ignore[attr-defined]
    for config, whole in zip(configs, wanted, strict=True):
        for n_best in (None, 1):
            found = searched(other, rows, config, with_scores=False, n_best=n_best)
            for hypotheses, scored in zip(found, whole, strict=True):
                assert [h.tokens for h in hypotheses] == [h.tokens for h in scored[:n_best]]
    assert calls == ["translate_batch"] * 4


def test_each_sentence_of_a_batch_has_its_own_length_limit(engines: Engines) -> None:
    _, other, tokenizer = engines
    rows = tokenizer.encode_batch([*LINES, "the tree " * 12])  # whose limit is that of the batch
    config = replace(SMALL, max_length_a=0.5, max_length_b=1)
    for n_best in (1, 4):
        found = searched(other, rows, config, n_best=n_best)
        for row, hypotheses in zip(rows, found, strict=True):
            alone = searched(other, [row], config, n_best=n_best)[0]
            assert all(len(h.tokens) <= len(row) // 2 + 1 for h in hypotheses)
            is_cut = any(not h.finished for h in hypotheses)
            if is_cut and n_best == 1:  # of a beam that goes on for its neighbors
                assert len(hypotheses[0].tokens) == len(row) // 2 + 1
            # with other neighbors an empty translation may be found beside one that is cut, or not
            elif is_cut or n_best == 1 and hypotheses[0].tokens != [EOS]:
                assert_same(alone, hypotheses)


def test_padding_and_the_start_symbol_are_never_generated(
    trained_models: dict[str, Path], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    native, other, _ = load(prefer_padding(tmp_path / "model", trained_models[NAMES[0]], tokenizer))
    rows = tokenizer.encode_batch(LINES)
    for beam_size in (1, 4):
        config = replace(SMALL, beam_size=beam_size)
        for ours, theirs in zip(
            searched(native, rows, config), searched(other, rows, config), strict=True
        ):
            assert not {tokenizer.pad_id, tokenizer.bos_id} & {i for h in theirs for i in h.tokens}
            assert ours[0].tokens == theirs[0].tokens or beam_size > 1  # others share what they had


def test_a_sentence_without_a_prefix_is_not_searched_as_one_with(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """CTranslate2 drops the end symbol behind a prefix unless it is the most probable token."""
    model = tiny_model(3, vocab_size=tokenizer.vocab_size)
    rows = tokenizer.encode_batch(["the tree", "a house"])
    native = NativeBackend(ModelStepper(model), tokenizer)
    first = searched(native, rows[:1], replace(SMALL, beam_size=1))[0][0].tokens[0]
    with torch.no_grad():
        model.embedding.weight[tokenizer.eos_id] = 0.95 * model.embedding.weight[first]
    native, other, _ = load(save(tmp_path / "model", model, tokenizer))
    assert [tokenizer.eos_id] in [h.tokens for h in searched(native, rows[:1], SMALL)[0]]
    found = searched(other, rows, SMALL, [[], [first]])
    assert_same(searched(other, rows[:1], SMALL)[0], found[0])
    assert [tokenizer.eos_id] in [h.tokens for h in found[0]]


def test_forced_prefixes_of_each_line_are_part_of_the_result(engines: Engines) -> None:
    native, other, tokenizer = engines
    rows = tokenizer.encode_batch(LINES)
    prefixes = [tokenizer.encode("Haus grün")[: i % 3] for i in range(len(rows))]
    for changes in ({"beam_size": 1}, {}, {"beam_size": 1, "max_length_a": 0, "max_length_b": 1}):
        config = replace(SMALL, **changes)  # the last limit is shorter than a prefix
        wanted, found = (searched(engine, rows, config, prefixes) for engine in (native, other))
        for ours, theirs, prefix in zip(wanted, found, prefixes, strict=True):
            assert_same(ours[:1], theirs[:1], changes)
            assert all(h.tokens[: len(prefix)] == prefix for h in theirs)
    with pytest.raises(ConfigError, match="forced prefix of sentence 0"):
        searched(other, rows[:1], SMALL, [[tokenizer.eos_id]])


def test_no_sentence_depends_on_its_neighbours(
    engines: Engines,
) -> None:
    _, other, tokenizer = engines
    rows = tokenizer.encode_batch([*LINES, *sentences(5), "the " * 150])
    config = replace(SMALL, alignment=True)
    together = searched(other, rows, config)
    for row, found in zip(rows, together, strict=True):
        assert_same(searched(other, [row], config)[0][:1], found[:1])


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
        native, other, _ = load(folder)
        ours, theirs = log_probs(native, rows, targets), log_probs(other, rows, targets)
        for one, another, target in zip(ours, theirs, targets, strict=True):
            assert len(another) == len(target) + 1
            assert another == pytest.approx(one, abs=1e-3), (norm, shape)
    config = replace(SMALL, beam_size=1, alignment=True)
    for num_layers in (3, 6):
        shape = {"num_encoder_layers": 1, "num_decoder_layers": num_layers}
        native, other, _ = load(random_model(tmp_path / f"deep{num_layers}", tokenizer, **shape))
        found = [searched(engine, rows[:8], config) for engine in (native, other)]
        for [one], [another] in zip(*found, strict=True):
            assert (one.tokens, one.alignment) == (another.tokens, another.alignment), num_layers


def test_sampling_draws_what_has_probability(
    engines: Engines,
) -> None:
    native, other, tokenizer = engines
    rows = tokenizer.encode_batch(LINES[:4])
    config = replace(SMALL, sampling=True, beam_size=5, temperature=2.0, top_k=8, top_p=0.9)
    found = searched(other, rows, config)
    assert [len(draws) for draws in found] == [5] * 4
    assert len({tuple(h.tokens) for draws in found for h in draws}) > 4
    assert not any(h.tokens[-1] == tokenizer.pad_id for draws in found for h in draws)
    for row, draws in zip(rows, found, strict=True):
        for h, expected in zip(draws, rescored(native, row, draws), strict=True):
            assert h.token_log_probs == pytest.approx(expected, abs=1e-3)
    greedy = [h.tokens for [h] in searched(other, rows, replace(SMALL, beam_size=1))]
    for changes in ({"top_k": 1}, {"top_p": 0.01}, {"temperature": 0.001}):
        settings = replace(SMALL, sampling=True, beam_size=2, **changes)
        assert [[h.tokens for h in draws] for draws in searched(other, rows, settings)] == [
            [tokens, tokens] for tokens in greedy
        ]


def test_what_it_cannot_do_is_refused_before_the_first_line(
    trained_models: dict[str, Path],
) -> None:
    _, other, _ = load(trained_models[NAMES[0]])
    for changes, scoring, message in (
        ({"coverage_penalty": 0.2}, False, "coverage_penalty=0.2: backend=ctranslate2 has no"),
        ({"word_reward": 1.0}, False, "word_reward=1.0: backend=ctranslate2 has no"),
        ({"alignment": True}, True, "alignment=true: .* has no alignment in scoring"),
        ({"coverage_penalty": 0.2}, True, "coverage_penalty=0.2: .* in scoring"),
    ):
        with pytest.raises(ConfigError, match=rf"^{message}.*use backend=native$"):
            other.check(replace(SMALL, **changes), scoring=scoring)
    other.check(replace(SMALL, alignment=True))
    other.check(replace(SMALL, word_reward=1.0), scoring=True)


def test_more_tokens_than_positions_are_an_error_and_never_cut(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    native, other, _ = load(random_model(tmp_path / "model", tokenizer), max_positions=12)
    row = (tokenizer.encode("the house " * 12))[:11]
    config = replace(SMALL, max_length_b=50)
    [[best, *_]] = searched(other, [row], config)
    assert len(best.tokens) == 11
    assert not best.finished
    assert log_probs(other, [row], [row])[0] == pytest.approx(
        log_probs(native, [row], [row])[0], abs=1e-3
    )
    for call in (
        lambda: searched(other, [[*row, row[0]]], config),
        lambda: log_probs(other, [row], [[*row, row[0]]]),
    ):
        with pytest.raises(DataError, match="12 tokens and the exported model takes 11; .*max_pos"):
            call()


def test_a_long_source_is_read_whole(trained_models: dict[str, Path], tokenizer: Tokenizer) -> None:
    """CTranslate2 by itself cuts after 1,024 tokens."""
    native, other, _ = load(trained_models[NAMES[0]])
    row = (
        (tokenizer.encode("the") * 1030) + tokenizer.encode("tree") + tokenizer.encode("the") * 300
    )
    config = replace(SMALL, beam_size=1, max_length_a=0, max_length_b=6, alignment=True)
    ours, theirs = searched(native, [row], config)[0], searched(other, [row], config)[0]
    assert max(ours[0].alignment or []) > 1024
    assert_same(ours, theirs)
    target = tokenizer.encode("small")
    scored = log_probs(other, [row, row[:1024]], [target, target])
    assert scored[0] == pytest.approx(log_probs(native, [row], [target])[0], abs=1e-3)
    assert scored[1] != pytest.approx(scored[0], abs=1e-6)


def test_the_translator_gives_the_same_text_from_several_threads(
    trained_models: dict[str, Path],
) -> None:
    folder = trained_models[NAMES[0]]
    output = exported(folder, ExportFormat.ctranslate2)
    other = Translator.load(output, backend="ctranslate2", device="cpu", num_threads=2)
    wanted = Translator.load(folder, device="cpu").translate([*LINES, ""])
    assert other.backend.num_workers == 2
    assert other.translate([*LINES, ""], max_tokens=30) == wanted
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(other.translate, [[*LINES, ""]] * 3))
    assert results == [wanted] * 3


def test_other_folders_and_devices_are_refused_in_one_line(
    trained_models: dict[str, Path],
) -> None:
    folder = trained_models[NAMES[0]]
    settings = {"device": "cpu", "dtype": DType.float32, "num_threads": 1}
    with pytest.raises(ModelError, match=rf"make one with nmt-export model_dir={folder} format="):
        load_ctranslate2(folder, **settings)
    with pytest.raises(ModelError, match="needs one of format=ctranslate2$"):
        load_ctranslate2(exported(folder, ExportFormat.huggingface), **settings)
    output = exported(folder, ExportFormat.ctranslate2)
    with pytest.raises(DeviceError, match="^device=cuda:9: this machine has"):
        load_ctranslate2(output, **settings | {"device": "cuda:9"})
    message = "^dtype=float16: CTranslate2 has none on this cpu; use dtype=float32$"
    with pytest.raises(DeviceError, match=message):
        load_ctranslate2(output, **settings | {"dtype": DType.float16})
    config = read_json(output / "config.json")
    for key, value in (("layer_norm_epsilon", -1), ("layer_norm_epsilon", True),
                       ("layer_norm_epsilon", 10**9), ("decoder_start_token", None),
                       ("add_source_eos", 0)):  # fmt: skip
        write_json(output / "config.json", config | {key: value})
        write_manifest(output)
        with pytest.raises(NmtError, match=rf"config\.json.*{key} is {value}"):
            load_ctranslate2(output, **settings)
    write_json(output / "config.json", config)
    (output / "model.bin").write_bytes((output / "model.bin").read_bytes()[:5000])
    write_manifest(output)
    with pytest.raises(ModelError, match="cannot be loaded by CTranslate2"):
        load_ctranslate2(output, **settings)


def test_nmt_score_gives_the_native_scores(trained_models: dict[str, Path], tmp_path: Path) -> None:
    folder = trained_models[NAMES[0]]
    for name, lines in (("src", ["", *LINES, ""]), ("tgt", ["a", *reversed(LINES), ""])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    records = []
    models = {"native": folder, "ctranslate2": exported(folder, ExportFormat.ctranslate2)}
    for backend, model in models.items():
        places = [f"{name}={tmp_path / name}" for name in ("src", "tgt")]
        options = [f"model_dir={model}", f"backend={backend}", "num_threads=1", "device=cpu"]
        options += ["format=json", "word_reward=0.3", f"output={tmp_path / backend}"]
        assert command("score", *places, *options) == 0
        lines = (tmp_path / backend).read_text(encoding="utf-8").splitlines()
        records.append([json.loads(line) for line in lines])
    for ours, theirs in zip(*records, strict=True):
        for name in ("index", "tokens"):
            assert theirs[name] == ours[name]
        for name in ("log_prob", "per_token", "score", "token_log_probs"):
            assert theirs[name] == pytest.approx(ours[name], abs=1e-3)
    one = Translator.load(models["ctranslate2"], backend="ctranslate2", device="cpu")
    found = one.score(LINES, list(reversed(LINES)), word_reward=0.3)
    assert [t.score for t in found] == [record["score"] for record in records[1][1:-1]]
