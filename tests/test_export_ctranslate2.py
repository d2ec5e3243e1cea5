"""Exported folders in CTranslate2, in a process without nmt, against our own search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exporting import HOSTILE, LIMIT, exported, native, random_model, short_sentences, without_nmt

from nmt.config import ExportFormat, Norm, Normalization, Positions, Quantization, SearchConfig
from nmt.data.tokenizer import Tokenizer

NAMES = [f"{norm.value}-{layout.value}" for norm in Norm for layout in Positions]
LINES = short_sentences(30)
COMMON = {"max_decoding_length": LIMIT, "min_decoding_length": 0, "return_end_token": True}
BEAM = {"beam_size": 4, "num_hypotheses": 4, "patience": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"beam_size": 1, "length_penalty": 0},
    "none": {**BEAM, "length_penalty": 0},
    "average": {**BEAM, "length_penalty": 1},
}
SEARCH = {
    "greedy": SearchConfig(beam_size=1, normalization=Normalization.none),
    "none": SearchConfig(normalization=Normalization.none),
    "average": SearchConfig(normalization=Normalization.average),
}
SMALLER = [kind for kind in Quantization if kind is not Quantization.float32]
FORBIDDEN = {"suppress_sequences": [["<pad>"], ["<s>"]]}  # a random model may choose these


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    shape = {"num_encoder_layers": 1, "num_decoder_layers": 3, "d_model": 14, "num_heads": 7}
    place = tmp_path_factory.mktemp("random")
    return random_model(place / "random", tokenizer, norm=Norm.pre, **shape)


@pytest.fixture(scope="module")
def outputs(trained_models: dict[str, Path], random_folder: Path) -> dict[Any, Any]:
    """What CTranslate2 makes of lines, by model and options, all from one process."""
    tasks: dict[Any, tuple[Path, list[str], dict[str, Any]]] = {}
    for name, folder in trained_models.items():
        output = exported(folder, ExportFormat.ctranslate2)
        for kind, options in OPTIONS.items():
            tasks[name, kind] = output, LINES, options
        tasks[name, "hostile"] = output, HOSTILE, OPTIONS["greedy"]
    for kind in SMALLER:
        output = exported(trained_models[NAMES[0]], ExportFormat.ctranslate2, quantization=kind)
        tasks[kind] = output, LINES, OPTIONS["greedy"]
    output = exported(random_folder, ExportFormat.ctranslate2)
    tasks["random"] = output, LINES, {**OPTIONS["greedy"], **FORBIDDEN}
    job = [
        {"folder": str(output), "lines": lines, "options": {**COMMON, **options}}
        for output, lines, options in tasks.values()
    ]
    return dict(zip(tasks, without_nmt("run_ctranslate2.py", job), strict=True))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_trained_model_gives_the_same_ids_and_scores(
    name: str, kind: str, trained_models: dict[str, Path], outputs: Any, tokenizer: Tokenizer
) -> None:
    ours = native(trained_models[name], LINES, SEARCH[kind])
    for hypotheses, theirs in zip(ours, outputs[name, kind], strict=True):
        assert tokenizer.pieces(hypotheses[0].tokens) == theirs["pieces"][0]
        assert theirs["scores"][0] == pytest.approx(hypotheses[0].score, abs=1e-3)
        assert theirs["text"] == tokenizer.decode(hypotheses[0].tokens)


@pytest.mark.parametrize("name", NAMES)
def test_the_trained_models_are_sure_of_what_they_write(
    name: str, trained_models: dict[str, Path]
) -> None:
    best = [found[0] for found in native(trained_models[name], LINES, SEARCH["greedy"])]
    assert sum(h.finished and h.log_prob > -2.5 for h in best) >= 0.8 * len(best)


def test_a_random_model_gives_the_same_greedy_ids(
    random_folder: Path, outputs: Any, tokenizer: Tokenizer
) -> None:
    ours = native(random_folder, LINES, SEARCH["greedy"])
    theirs = [result["pieces"][0] for result in outputs["random"]]
    assert [tokenizer.pieces(hypotheses[0].tokens) for hypotheses in ours] == theirs


@pytest.mark.parametrize("name", NAMES)
def test_text_that_looks_like_control_symbols_is_translated_as_ours(
    name: str, trained_models: dict[str, Path], outputs: Any, tokenizer: Tokenizer
) -> None:
    ours = native(trained_models[name], HOSTILE, SEARCH["greedy"])
    theirs = [result["pieces"][0] for result in outputs[name, "hostile"]]
    assert [tokenizer.pieces(hypotheses[0].tokens) for hypotheses in ours] == theirs


def test_pieces_of_any_text_are_the_ids_that_we_feed(tokenizer: Tokenizer) -> None:
    ids = {piece: i for i, piece in enumerate(tokenizer.pieces(range(tokenizer.vocab_size)))}
    assert len(ids) == tokenizer.vocab_size
    for line in HOSTILE:
        row = tokenizer.encode(line)
        assert [ids[piece] for piece in tokenizer.pieces(row)] == row
        assert not {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} & set(row)


@pytest.mark.parametrize("kind", SMALLER, ids=lambda kind: kind.value)
def test_smaller_weights_give_nearly_the_same_translations(
    kind: Quantization, outputs: Any
) -> None:
    texts = [result["text"] for result in outputs[kind]]
    wanted = [result["text"] for result in outputs[NAMES[0], "greedy"]]
    same = sum(a == b for a, b in zip(texts, wanted, strict=True))
    assert same >= 0.9 * len(wanted)


def test_the_files_name_the_special_tokens(
    trained_models: dict[str, Path], tokenizer: Tokenizer
) -> None:
    output = exported(trained_models[NAMES[0]], ExportFormat.ctranslate2)
    vocabulary = json.loads((output / "shared_vocabulary.json").read_text("utf-8"))
    assert vocabulary == tokenizer.pieces(range(tokenizer.vocab_size))
    config = json.loads((output / "config.json").read_text("utf-8"))
    assert config["add_source_eos"] is True
    assert config["decoder_start_token"] == config["bos_token"] == "<s>"
    assert (config["eos_token"], config["unk_token"]) == ("</s>", "<unk>")
