"""Exports to Marian, against nmt-import, our own search and the converter of CTranslate2."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import exported, native, random_model, short_sentences, trained_model
from importing import imported
from serving import change_config
from test_import_toolkits import check, write_marian
from tiny import sentences

from nmt.checkpoint import load_info, load_weights
from nmt.config import (
    Activation,
    Decoder,
    ExportConfig,
    ExportFormat,
    Norm,
    Normalization,
    NormLayer,
    Positions,
    Quantization,
    SearchConfig,
)
from nmt.data.tokenizer import (
    MappedTokenizer,
    Tokenizer,
    TokenizerPair,
    Tokenizers,
    Vocabulary,
)
from nmt.errors import ConfigError, ModelError

MARIAN = ExportFormat.marian
GREEDY = SearchConfig(beam_size=1, normalization=Normalization.none)


def find_ids(folder: Path, lines: list[str]) -> list[list[int]]:
    """Return the ids that greedy search finds for each line."""
    return [hypotheses[0].tokens for hypotheses in native(folder, lines, GREEDY)]


def test_marian_models_have_the_same_weights_after_import_and_export(tmp_path: Path) -> None:
    shapes: dict[str, dict[str, Any]] = {
        "tied": {},
        "tied to the output": {"tied": "output", "activation": "relu", "enc": 3, "dec": 1},
        "not tied": {"tied": "none"},
        "wide decoder": {"settings": {"transformer-decoder-dim-ffn": 40}},
        "pre-norm": {"pre": True, "enc": 2},
        "student": {"ssru": True, "activation": "relu"},
        "pre-norm student": {"ssru": True, "pre": True},
    }
    for seed, (name, shape) in enumerate(shapes.items()):
        theirs = write_marian(tmp_path / name, seed, **shape)
        model_dir = imported(theirs)
        output = exported(model_dir, MARIAN)
        weights = load_weights(model_dir)
        for key, tensor in load_weights(imported(output)).items():
            assert torch.equal(tensor, weights[key]), (name, key)
        if name == "pre-norm":  # exported as `transformer-new`, with other names
            continue
        original = np.load(theirs / "model.npz")
        copied = np.load(output / "model.npz")
        position_table = set() if "student" in name else {"Wpos"}
        assert set(copied.files) == set(original.files) | position_table
        for key in set(original.files) - {"special:model.yml"}:
            assert copied[key].tobytes() == original[key].tobytes(), (name, key)
            assert copied[key].shape == original[key].shape


@pytest.mark.parametrize("norm", [Norm.post, Norm.pre])
def test_our_students_translate_as_before_when_they_are_imported(
    tmp_path: Path, tokenizer: Tokenizer, norm: Norm
) -> None:
    changes = {"decoder": Decoder.ssru, "positions": Positions.sinusoidal_concat, "norm": norm}
    lines = sentences(5)
    for pair in (tokenizer, TokenizerPair(tokenizer, tokenizer)):
        model_dir = random_model(tmp_path / type(pair).__name__, pair, **changes)
        model = imported(exported(model_dir, MARIAN))
        assert find_ids(model, lines) == find_ids(model_dir, lines)


def test_the_readme_says_which_programs_read_the_model(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    new_type = (
        "\n- The model has `type: transformer-new`, which `ct2-marian-converter` does not read"
    )
    table = "\n- The table of positions has 2048 rows"
    converter_table = "\n- `ct2-marian-converter` reads the positions of up to 2048 tokens from"
    vocabularies = "- `source.vocab.yml` and `target.vocab.yml` list the pieces"
    for_converter = f"\n{vocabularies}, as `ct2-marian-converter` needs them.\n- nmt reads NUL"
    not_for_converter = f"\n{vocabularies}.\n- nmt reads NUL"
    marian_positions = {"positions": Positions.sinusoidal_concat}
    for name, changes, expected in (
        ("default", {}, {new_type, table, not_for_converter}),
        ("Marian's", marian_positions, {converter_table, for_converter}),
        ("pre-norm", {"norm": Norm.pre, **marian_positions}, {new_type, not_for_converter}),
        ("student", {"decoder": Decoder.ssru, **marian_positions}, {not_for_converter}),
    ):
        folder = random_model(tmp_path / name, tokenizer, **changes)
        text = (exported(folder, MARIAN) / "README.md").read_text(encoding="utf-8")
        notes = {new_type, table, converter_table, for_converter, not_for_converter}
        assert {note for note in notes if note in text} == expected, name
        assert ("Marian](https://github.com/marian-nmt/marian) 1.12.23 or" in text) == (
            new_type in expected
        )


def make_models(folder: Path, tokenizer: Tokenizer) -> dict[str, Path]:
    """Write random models with all positions and norms that Marian can compute, by name."""
    pair = TokenizerPair(tokenizer, tokenizer)
    concat = {"positions": Positions.sinusoidal_concat}
    silu = {"activation": Activation.silu}
    untied = {"tied_output": False, "output_bias": True}
    learned = {"positions": Positions.learned, "num_positions": 30}
    halves = {"positions": Positions.sinusoidal_halves}
    variants: dict[str, tuple[Tokenizers, dict[str, Any]]] = {
        "post": (tokenizer, concat),
        "post, two vocabularies": (pair, {**concat, **silu}),
        "post, untied": (tokenizer, {**concat, **untied}),
        "pre": (tokenizer, {"norm": Norm.pre, **concat}),
        "pre, paper's positions": (tokenizer, {"norm": Norm.pre, **silu, "decoder_d_ff": 40}),
        "pre, untied, two vocabularies": (pair, {"norm": Norm.pre, **untied, **halves}),
        "paper's positions": (tokenizer, {}),
        "learned positions": (pair, {**learned, **silu}),
        "learned positions, untied": (tokenizer, {**learned, **untied}),
        "offset": (tokenizer, {**concat, "position_offset": 2}),
        "not scaled": (tokenizer, {**concat, "scale_embedding": False}),
        "pre, not scaled": (pair, {"norm": Norm.pre, "scale_embedding": False}),
        "student": (tokenizer, {**concat, "decoder": Decoder.ssru}),
        "pre-norm student": (tokenizer, {**concat, "decoder": Decoder.ssru, "norm": Norm.pre}),
    }
    return {
        name: random_model(folder / name, tokenizers, num_decoder_layers=2, **changes)
        for name, (tokenizers, changes) in variants.items()
    }


def assert_equal_files(folder: Path, expected: Path, name: str) -> None:
    """Assert that two exports have the same arrays and settings, byte for byte."""
    arrays = np.load(folder / "model.npz")
    expected_arrays = np.load(expected / "model.npz")
    assert set(arrays.files) == set(expected_arrays.files), name
    for key in arrays.files:
        assert arrays[key].tobytes() == expected_arrays[key].tobytes(), (name, key)


def test_our_models_translate_as_before_when_they_are_imported(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    lines = sentences(20)
    for name, model_dir in make_models(tmp_path, tokenizer).items():
        first = exported(model_dir, MARIAN, max_positions=200)
        model = imported(first)
        expected = native(model_dir, lines, GREEDY)
        for ours, theirs in zip(expected, native(model, lines, GREEDY), strict=True):
            assert theirs[0].tokens == ours[0].tokens, name
            # the export gives padding and BOS the probability 0, which changes the others a little
            assert theirs[0].log_prob == pytest.approx(ours[0].log_prob, rel=0.1), name
        positions = load_info(model_dir).model.positions
        if positions is Positions.sinusoidal:  # exported with the dimensions in another order
            positions = Positions.sinusoidal_halves
        assert load_info(model).model.positions is positions, name
        assert_equal_files(exported(model, MARIAN, max_positions=200), first, name)


def test_the_newer_type_has_the_names_of_its_layers_in_marian(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    models = make_models(tmp_path, tokenizer)
    encoder = "TransformerBatchEncoder->encoder"
    layer = f"{encoder}->layers->at(1)->as<marian::nn::TransformerEncoderLayer>()"
    for name, norm, inner, outer in (
        ("pre", "preprocessor", "at(0)->as<marian::nn::LinearReluDropout>", "at(1)"),
        ("pre, paper's positions", "preprocessor", "at(0)->as<marian::nn::Linear>", "at(3)"),
        ("offset", "postprocessor", "at(0)->as<marian::nn::LinearReluDropout>", "at(1)"),
    ):
        names = set(np.load(exported(models[name], MARIAN) / "model.npz").files)
        expected = {
            f"{layer}->selfAttentionBlock->selfAttention->oProj->weight",
            f"{layer}->selfAttentionBlock->{norm}->norm->bias",
            f"{layer}->filterBlock->layers->{inner}()->weight",
            f"{layer}->filterBlock->layers->{outer}->as<marian::nn::Linear>()->bias",
            f"{layer}->filterBlock->{norm}->norm->weight",
        }
        assert expected <= names, name
        assert (f"{encoder}->postprocessor->norm->weight" in names) == (norm == "preprocessor")
        has_table = name != "pre"
        assert (f"{encoder}->positionEmbedding->embeddings" in names) == has_table


@pytest.mark.slow
def test_post_norm_models_translate_in_ctranslate2_as_in_nmt(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    from ctranslate2.converters import MarianConverter  # takes a second

    for name, model_dir in make_models(tmp_path, tokenizer).items():
        if not name.startswith("post"):
            continue
        output = exported(model_dir, MARIAN)
        vocabularies = [str(output / f"{side}.vocab.yml") for side in ("source", "target")]
        converted = tmp_path / f"{name}-ct2"
        MarianConverter(str(output / "model.npz"), vocabularies).convert(str(converted))
        check(name, imported(output), converted, pad="")


# reads lines, and writes a hypothesis of each with its log-probability
MARIAN_SCRIPT = """
import sys, pymarian
options = "--quiet --quiet-translation --cpu-threads 1 --beam-size 1 --normalize 0 --n-best"
translator = pymarian.Translator(f"-c decoder.yml {options}")
for hypothesis in translator.translate(sys.stdin.read().splitlines()):
    print(hypothesis)
"""


@pytest.mark.slow
def test_marian_finds_the_translations_and_scores_of_native_search(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    if importlib.util.find_spec("pymarian") is None:
        pytest.skip("pymarian is not installed")
    lines = short_sentences(100)
    marian = {"positions": Positions.sinusoidal_concat}
    learned = {"positions": Positions.learned, "num_positions": 30}
    for name, changes in {
        "post": marian,
        "pre": {**marian, "norm": Norm.pre},
        "pre, paper's positions": {"norm": Norm.pre, "activation": Activation.silu},
        "learned positions": learned,
        "offset": {**marian, "position_offset": 2, "tied_output": False},
        "pre, not scaled": {**marian, "norm": Norm.pre, "scale_embedding": False},
        "pre-norm student": {**marian, "decoder": Decoder.ssru, "norm": Norm.pre},
    }.items():
        model_dir = trained_model(tmp_path / name, tokenizer, num_decoder_layers=2, **changes)
        output = exported(model_dir, MARIAN, max_positions=200)
        command = [sys.executable, "-c", MARIAN_SCRIPT]
        pipes = {"input": "\n".join(lines), "capture_output": True, "text": True, "cwd": output}
        result = subprocess.run(command, check=False, **pipes)
        assert result.returncode == 0, result.stderr
        theirs = result.stdout.splitlines()
        assert len(theirs) == len(lines)
        num_compared = 0
        for line, hypotheses in zip(theirs, native(model_dir, lines, GREEDY), strict=True):
            if not hypotheses[0].finished:
                continue  # Marian has another length limit
            _, text, _, score = line.split(" ||| ")
            # Marian has a smaller epsilon in layer norms and approximates functions such as exp
            assert float(score) == pytest.approx(hypotheses[0].log_prob, abs=0.05), name
            assert text == tokenizer.decode(hypotheses[0].tokens[:-1]), name
            num_compared += 1
        assert num_compared > 80, name


def test_settings_that_marian_lacks_are_refused_by_name(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match="format=marian takes float32"):
        ExportConfig(format=MARIAN, quantization=Quantization.int8)
    unsupported: dict[str, Any] = {
        "norm_layer": NormLayer.rms,
        "activation": Activation.swiglu,
        "positions": Positions.rotary,
        "decoder": Decoder.ssru,  # with the positions of the paper
    }
    for name, value in unsupported.items():
        folder = random_model(tmp_path / name, tokenizer, **{name: value})
        setting = "positions=sinusoidal " if name == "decoder" else name
        with pytest.raises(ConfigError, match=f"format=marian does not support model.{setting}"):
            exported(folder, MARIAN)
    folder = random_model(tmp_path / "tags", tokenizer)
    tags = {"src_tag": "the", "tgt_tag": "house"}
    change_config(folder, directions=[{"src_lang": "xx", "tgt_lang": "yy", **tags}])
    with pytest.raises(ModelError, match="does not support language tokens"):
        exported(folder, MARIAN)
    pieces = list(tokenizer.all_pieces())  # a copy: all tests share the tokenizer
    pieces[tokenizer.eos_id] = "<end>"
    marian_tokenizer = MappedTokenizer(
        tokenizer.model, Vocabulary(pieces, *tokenizer.control_ids), ()
    )
    pair = TokenizerPair(marian_tokenizer, marian_tokenizer, shares_vocabulary=True)
    folder = random_model(tmp_path / "names", pair)
    with pytest.raises(ModelError, match="this model has <unk> and <end>"):
        exported(folder, MARIAN)
    assert not list(tmp_path.glob("*-marian-*"))
