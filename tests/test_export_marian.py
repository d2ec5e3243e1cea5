"""Exports to Marian, against nmt-import, our own search and the converter of CTranslate2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import exported, native, random_model
from importing import imported
from serving import change_config
from test_import_toolkits import check, use_positions_of_ctranslate2, write_marian
from tiny import sentences

from nmt.checkpoint import load_weights
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
from nmt.data.tokenizer import MappedTokenizer, Tokenizer, TokenizerPair, Vocabulary
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
        original = np.load(theirs / "model.npz")
        copied = np.load(output / "model.npz")
        assert set(copied.files) == set(original.files)
        for key in set(original.files) - {"special:model.yml"}:
            assert copied[key].tobytes() == original[key].tobytes(), (name, key)
            assert copied[key].shape == original[key].shape
        weights = load_weights(model_dir)
        for key, tensor in load_weights(imported(output)).items():
            assert torch.equal(tensor, weights[key]), (name, key)


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


def test_the_readme_names_the_converter_of_ctranslate2_unless_it_refuses_the_model(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    student = {"decoder": Decoder.ssru, "positions": Positions.sinusoidal_concat}
    line = "- `source.vocab.yml` and `target.vocab.yml` list the pieces"
    for changes, ending in (({}, ", as `ct2-marian-converter` needs them."), (student, ".")):
        folder = random_model(tmp_path / str(len(changes)), tokenizer, **changes)
        text = (exported(folder, MARIAN) / "README.md").read_text(encoding="utf-8")
        assert f"\n{line}{ending}\n- nmt reads NUL" in text


def test_the_readme_says_which_programs_compute_the_model_exactly(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    converters_differ = "\n- CTranslate2 computes positions with other wavelengths"
    marian_differs = "\n- Marian and nmt-import compute positions with other wavelengths"
    marian_fails = "\n- Marian 1.12 normalizes only the queries"
    marian_positions = {"positions": Positions.sinusoidal_concat}
    for name, changes, expected in (
        ("default", {}, {marian_differs}),
        ("exact in Marian", marian_positions, {converters_differ}),
        ("pre-norm", {"norm": Norm.pre, **marian_positions}, {converters_differ, marian_fails}),
        ("student", {"decoder": Decoder.ssru, "norm": Norm.pre, **marian_positions}, set()),
    ):
        folder = random_model(tmp_path / name, tokenizer, **changes)
        text = (exported(folder, MARIAN) / "README.md").read_text(encoding="utf-8")
        warnings = {
            line for line in (converters_differ, marian_differs, marian_fails) if line in text
        }
        assert warnings == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("norm", [Norm.post, Norm.pre])
def test_our_models_translate_in_ctranslate2_and_imported_as_before(
    tmp_path: Path, tokenizer: Tokenizer, norm: Norm
) -> None:
    from ctranslate2.converters import MarianConverter  # takes a second

    models = {
        "shared": random_model(tmp_path / "shared", tokenizer, norm=norm),
        "separate": random_model(
            tmp_path / "separate",
            TokenizerPair(tokenizer, tokenizer),
            norm=norm,
            activation=Activation.silu,
            positions=Positions.sinusoidal_halves,
        ),
        "untied": random_model(
            tmp_path / "untied", tokenizer, norm=norm, tied_output=False, output_bias=True
        ),
    }
    lines = sentences(40)
    for name, model_dir in models.items():
        output = exported(model_dir, MARIAN)
        model = imported(output)
        use_positions_of_ctranslate2(model)
        assert find_ids(model, lines) == find_ids(model_dir, lines), name
        vocabularies = [str(output / f"{side}.vocab.yml") for side in ("source", "target")]
        converted = tmp_path / f"{name}-ct2"
        MarianConverter(str(output / "model.npz"), vocabularies).convert(str(converted))
        check(name, model, converted, pad="")


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
