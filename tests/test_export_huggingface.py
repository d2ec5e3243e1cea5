"""Exported folders in transformers, in a process without nmt, against our own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import hidden_states
from exporting import (
    HOSTILE,
    LIMIT,
    exported,
    fond_of_padding,
    native,
    random_model,
    short_sentences,
    without_nmt,
)
from safetensors.torch import load_file

from nmt.config import ExportFormat, Normalization, Positions, Quantization, SearchConfig
from nmt.data.batch import pad, pad_source
from nmt.data.tokenizer import Tokenizer
from nmt.translate.backend import load_models

TRAINED = [f"post-{layout.value}" for layout in Positions]
RANDOM = {
    "shallow decoder": {"num_decoder_layers": 1, "d_model": 14, "num_heads": 7},
    "shallow encoder": {"num_encoder_layers": 1, "d_model": 10, "d_ff": 7, "num_heads": 1},
    "Tensor2Tensor's positions": {"positions": Positions.sinusoidal_concat},
}
FOND = "fond of padding"
LINES = [*short_sentences(12), *HOSTILE]
NUM_SURE = 12  # the first lines, which the trained models end before the limit
GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "none": {"num_beams": 4, "length_penalty": 0.0},
    "average": {"num_beams": 4, "length_penalty": 1.0},
}
COMMON = {"max_length": LIMIT + 1, "early_stopping": "never", "num_return_sequences": 1}
SEARCH = {
    "greedy": SearchConfig(beam_size=1, normalization=Normalization.none),
    "none": SearchConfig(normalization=Normalization.none),
    "average": SearchConfig(normalization=Normalization.average),
}


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    trained_models: dict[str, Path],
    tokenizer: Tokenizer,
) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("random")
    found = {name: trained_models[name] for name in TRAINED}
    found |= {k: random_model(place / k, tokenizer, **shape) for k, shape in RANDOM.items()}
    return found | {FOND: fond_of_padding(place / FOND, trained_models[TRAINED[0]], tokenizer)}


@pytest.fixture(scope="module")
def outputs(folders: dict[str, Path], tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """What transformers makes of LINES, all from one process."""
    tasks = []
    for name, folder in folders.items():
        kinds = list(GENERATE.values()) if name in TRAINED else [GENERATE["greedy"]]
        options = [{**COMMON, **kind} for kind in kinds]
        output = str(exported(folder, ExportFormat.huggingface))
        targets = decoder_input(tokenizer).tolist()
        tasks.append({"folder": output, "lines": LINES, "targets": targets, "options": options})
    return dict(zip(folders, without_nmt("run_transformers.py", tasks), strict=True))


def decoder_input(tokenizer: Tokenizer) -> torch.Tensor:
    """Return the ids of LINES as a teacher gives them, (B, T)."""
    return pad(tokenizer.encode_batch(LINES), pad_id=tokenizer.pad_id, bos=tokenizer.bos_id)


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
def test_logits_are_those_of_our_model(
    name: str, folders: dict[str, Path], outputs: Any, tokenizer: Tokenizer
) -> None:
    model = load_models([folders[name]], device="cpu").backend.stepper.model
    src, src_lengths = pad_source(tokenizer.encode_batch(LINES), tokenizer)
    with torch.inference_mode():
        hidden = hidden_states(model, src, src_lengths, decoder_input(tokenizer))
        ours = model.logits(hidden)
    torch.testing.assert_close(torch.tensor(outputs[name]["logits"]), ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
def test_every_weight_has_its_place(name: str, outputs: Any) -> None:
    assert outputs[name]["kind"] == "MarianMTModel"
    assert outputs[name]["missing"] == outputs[name]["unexpected"] == []


@pytest.mark.parametrize("kind", GENERATE)
@pytest.mark.parametrize("name", TRAINED)
def test_generate_gives_the_same_ids_and_scores(
    name: str, kind: str, folders: dict[str, Path], outputs: Any, tokenizer: Tokenizer
) -> None:
    found = outputs[name]["found"][list(GENERATE).index(kind)]
    ours = native(folders[name], LINES[:NUM_SURE], SEARCH[kind])
    for i, hypotheses in enumerate(ours):
        best = hypotheses[0]
        assert best.finished
        assert found["ids"][i][1 : 1 + len(best.tokens)] == best.tokens
        assert set(found["ids"][i][1 + len(best.tokens) :]) <= {tokenizer.pad_id, tokenizer.eos_id}
        if found["scores"]:
            assert found["scores"][i] == pytest.approx(best.score, abs=1e-3)
        if kind == "greedy":
            assert outputs[name]["texts"][i] == tokenizer.decode(best.tokens)


@pytest.mark.parametrize("name", [*RANDOM, FOND])
def test_an_unsure_model_gives_the_same_greedy_ids(
    name: str, folders: dict[str, Path], outputs: Any
) -> None:
    ours = native(folders[name], LINES, SEARCH["greedy"])
    found = outputs[name]["found"][0]["ids"]
    for ids, hypotheses in zip(found, ours, strict=True):
        assert ids[1 : 1 + len(hypotheses[0].tokens)] == hypotheses[0].tokens


@pytest.mark.parametrize("name", TRAINED)
def test_text_that_looks_like_control_symbols_has_our_ids(
    name: str, outputs: Any, tokenizer: Tokenizer
) -> None:
    ours = [[*row, tokenizer.eos_id] for row in tokenizer.encode_batch(LINES)]
    assert outputs[name]["input_ids"] == ours


@pytest.mark.parametrize("kind", [Quantization.float16, Quantization.bfloat16])
def test_weights_are_stored_as_asked(kind: Quantization, trained_models: dict[str, Path]) -> None:
    output = exported(trained_models[TRAINED[0]], ExportFormat.huggingface, quantization=kind)
    weights = load_file(output / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, kind.value)}
    assert json.loads((output / "config.json").read_text("utf-8"))["torch_dtype"] == kind.value


def test_the_files_name_the_special_tokens(
    trained_models: dict[str, Path], tokenizer: Tokenizer
) -> None:
    output = exported(trained_models[TRAINED[0]], ExportFormat.huggingface)
    ids = {"pad": tokenizer.pad_id, "bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    for name in ("config.json", "generation_config.json"):
        config = json.loads((output / name).read_text("utf-8"))
        assert {key: config[f"{key}_token_id"] for key in ids} == ids
        assert config["decoder_start_token_id"] == tokenizer.bos_id
    vocabulary = json.loads((output / "vocab.json").read_text("utf-8"))
    assert sorted(vocabulary.values()) == list(range(tokenizer.vocab_size))
    names = json.loads((output / "tokenizer_config.json").read_text("utf-8"))
    ids["unk"] = tokenizer.unk_id
    assert {key: vocabulary[names[f"{key}_token"]] for key in ids} == ids


def test_the_paper_s_positions_are_those_that_marian_computes(
    trained_models: dict[str, Path],
) -> None:
    """So that what transformers saves again, without the table, is the same model."""
    output = exported(trained_models["post-sinusoidal"], ExportFormat.huggingface)
    table = load_file(output / "model.safetensors")["model.encoder.embed_positions.weight"]
    positions, d_model = table.shape
    pos = torch.arange(positions, dtype=torch.float64).unsqueeze(1)
    angles = pos / 10000 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    marian = torch.cat([angles.sin(), angles.cos()], dim=1).float()
    torch.testing.assert_close(table, marian, atol=1e-6, rtol=0)
