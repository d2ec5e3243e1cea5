"""Exported folders in CTranslate2 and in transformers, in processes without nmt, against our own
search and model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import (
    HOSTILE,
    LIMIT,
    exported,
    foreign_models,
    native,
    prefer_padding,
    random_model,
    short_sentences,
    without_nmt,
)
from safetensors.torch import load_file
from tiny import assert_near, hidden_states, sentences, tokenizer_config
from variants import MODERN, OWN, SINGLE

from nmt.checkpoint import load_info, load_model_tokenizers
from nmt.config import (
    Activation,
    ExportFormat,
    Norm,
    Normalization,
    Positions,
    PreprocessConfig,
    Quantization,
    SearchConfig,
    TokenizerConfig,
    TokenizerType,
)
from nmt.data.batch import pad, pad_source
from nmt.data.tokenizer import Tokenizer, TokenizerPair, Tokenizers
from nmt.data.vocabulary import (
    open_tokenizers,
    pad_vocabulary,
    train_tokenizer,
    train_tokenizers,
)
from nmt.errors import ModelError
from nmt.export.export_model import find_unsupported
from nmt.translate.attention import KINDS
from nmt.translate.engines.native import load_models
from nmt.translate.translator import Translator

pytestmark = pytest.mark.slow

# the trained models
POST = "post-sinusoidal"
PRE = "pre-sinusoidal_concat"
SHAPES: dict[str, dict[str, Any]] = {  # of random models
    "pre, deep decoder": {"norm": Norm.pre, "num_encoder_layers": 1, "num_decoder_layers": 3},
    "shallow decoder": {"num_decoder_layers": 1, "d_model": 14, "num_heads": 7},
    "shallow encoder": {"num_encoder_layers": 1, "d_model": 10, "d_ff": 7, "num_heads": 1},
    "wide decoder": {"decoder_d_ff": 40},
    "Tensor2Tensor's positions": {"positions": Positions.sinusoidal_concat},
    "own output": {"tied_output": False, "output_bias": True, "activation": Activation.gelu},
    "M2M100": {
        "norm": Norm.pre,
        "positions": Positions.sinusoidal_concat,
        "position_offset": 1,
        "activation": Activation.silu,
        "scale_embedding": False,
        "tied_output": False,
    },
}
SMALL_SUMS = {"sharpness": 1e-3, "scale_embedding": False, "tied_output": False}  # epsilon counts
SHALLOW = {"num_encoder_layers": 1, "num_decoder_layers": 1}  # takes half of the time
SHAPES |= {name: SHALLOW | changes for name, changes in OWN.items() if name not in SINGLE}
SHAPES |= {"small sums": {**MODERN, **SMALL_SUMS}}
ONLY_CTRANSLATE2 = ("foreign", "small sums")
PRE_NORM = {
    PRE: "Pegasus",
    "learned, pre": "Pegasus",
    "pre, deep decoder": "Pegasus",
    "M2M100": "M2M100",
}
LINES = [*short_sentences(12), *HOSTILE]
NUM_SURE = 12  # the first lines, which the trained models end before the limit
SEARCH = {
    "greedy": SearchConfig(beam_size=1, normalization=Normalization.none),
    "none": SearchConfig(normalization=Normalization.none),
    "average": SearchConfig(normalization=Normalization.average),
}
SMALLER = [kind for kind in Quantization if kind is not Quantization.float32]


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    trained_models: dict[str, Path],
    tokenizer: Tokenizer,
) -> dict[str, Path]:
    """Trained models, random models, and models with other vocabularies."""
    root = tmp_path_factory.mktemp("folders")
    foreign = open_tokenizers(foreign_models(root))
    small = train_tokenizer(sentences(90), tokenizer_config(vocab_size=40, byte_fallback=False))
    return {
        **trained_models,
        **{name: random_model(root / name, tokenizer, **shape) for name, shape in SHAPES.items()},
        "prefers padding": prefer_padding(root / "padding", trained_models[POST], tokenizer),
        "separate": random_model(root / "separate", TokenizerPair(small, tokenizer)),
        "foreign": random_model(root / "foreign", foreign),  # with other ids on each side
        "padded": random_model(root / "padded", pad_vocabulary(tokenizer, 128)),
        "T5's ids": random_model(root / "t5", foreign.tgt),  # BOS at the end
        "words": random_model(root / "words", train_words()),
    }


def train_words() -> Tokenizer:
    """Train a tokenizer of whole words, to which some words of LINES are unknown."""
    settings = TokenizerConfig(type=TokenizerType.word, min_freq=9)
    lines = [f"{line}, ({line})." for line in sentences(90)]
    tokenizer = train_tokenizers(PreprocessConfig(tokenizer=settings), lambda side: lines)
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


def options(library: ExportFormat, name: str, kind: str) -> dict[str, Any]:
    """Return the options of a library for a search of ours with the model `name`."""
    beam_size = 1 if kind == "greedy" else 4
    penalty = 1.0 if kind == "average" else 0.0
    if library is ExportFormat.huggingface:
        search = {"max_length": LIMIT + 1, "early_stopping": "never", "num_beams": beam_size}
        return search | ({"length_penalty": penalty} if beam_size > 1 else {})
    search = {
        "max_decoding_length": LIMIT,
        "min_decoding_length": 0,
        "return_end_token": True,
        "beam_size": beam_size,
        "patience": 4,
        "length_penalty": penalty,
    }
    if name not in (POST, PRE):  # a random model may choose them
        search["suppress_sequences"] = [["<pad>"], ["<s>"]]
    return search


def kinds_of(name: str) -> list[str]:
    """Return the searches whose results are compared: beams only where a model is sure."""
    return list(SEARCH) if name in (POST, PRE) else ["greedy"]


def refuses(library: ExportFormat, name: str, folder: Path) -> bool:
    """Return whether a library has no such model."""
    reasons = find_unsupported(load_info(folder).model, library)
    assert not reasons or name in OWN or name in ONLY_CTRANSLATE2, (name, reasons)
    return bool(reasons) or (library is ExportFormat.huggingface and name in ONLY_CTRANSLATE2)


def tokenizers(folder: Path) -> Tokenizers:
    return load_model_tokenizers(folder, load_info(folder))


def decoder_input(folder: Path) -> torch.Tensor:
    """Return the ids of LINES as a teacher gives them, (B, T)."""
    tgt = tokenizers(folder).tgt
    return pad(tgt.encode_batch(LINES), pad_id=tgt.pad_id, bos=tgt.bos_id)


@pytest.fixture(scope="module")
def outputs(folders: dict[str, Path]) -> dict[ExportFormat, dict[Any, Any]]:
    """Translations of LINES by each library, in one process each, by model or quantization."""
    outputs: dict[ExportFormat, dict[Any, Any]] = {}
    for library in (ExportFormat.ctranslate2, ExportFormat.huggingface):
        is_marian = library is ExportFormat.huggingface
        tasks = {
            name: {
                "folder": str(exported(folder, library)),
                "lines": LINES,
                "options": [options(library, name, kind) for kind in kinds_of(name)],
                "targets": decoder_input(folder).tolist(),
            }
            for name, folder in folders.items()
            if not (is_marian and refuses(library, name, folder))
        }
        for kind in [] if is_marian else SMALLER:
            output = str(exported(folders[POST], library, quantization=kind))
            tasks[kind] = {**tasks[POST], "folder": output}
        results = without_nmt(library, list(tasks.values()))
        outputs[library] = dict(zip(tasks, results, strict=True))
    return outputs


def test_both_libraries_find_our_ids_scores_and_text(
    folders: dict[str, Path], outputs: dict[ExportFormat, dict[Any, Any]]
) -> None:
    for name, folder in folders.items():
        tgt = tokenizers(folder).tgt
        for i, kind in enumerate(kinds_of(name)):
            best = [hypotheses[0] for hypotheses in native(folder, LINES, SEARCH[kind])]
            num_lines = len(LINES) if kind == "greedy" else NUM_SURE
            if name in (POST, PRE):
                num_sure = sum(h.finished and h.log_prob > -2.5 for h in best[:NUM_SURE])
                assert num_sure >= 0.8 * NUM_SURE, f"{name} is not trained well enough"
            for library, results in outputs.items():
                if name not in results:
                    continue
                theirs = results[name]["translations"][i][:num_lines]
                for ours, translation in zip(best, theirs, strict=False):
                    case = library.value, name, kind, ours.tokens
                    if library is ExportFormat.ctranslate2:
                        assert translation["pieces"] == tgt.pieces(ours.tokens), case
                    else:
                        ids = translation["ids"]
                        assert ids[: len(ours.tokens)] == ours.tokens, case
                        assert set(ids[len(ours.tokens) :]) <= {tgt.pad_id, tgt.eos_id}, case
                    if name not in SHAPES:  # random models write line breaks
                        assert translation["text"] == tgt.decode(ours.tokens), case
                    if kind != "greedy":
                        assert translation["score"] == pytest.approx(ours.score, abs=1e-3), case


def test_log_probabilities_in_ctranslate2_are_ours(
    folders: dict[str, Path], outputs: dict[ExportFormat, dict[Any, Any]]
) -> None:
    for name in [POST, PRE, *SHAPES]:
        tgt = tokenizers(folders[name]).tgt
        rows = tgt.encode_batch(LINES)
        model = load_models([folders[name]], device="cpu").backend.stepper.model
        with torch.inference_mode():
            hidden = hidden_states(model, *pad_source(rows, tgt), decoder_input(folders[name]))
            log_probs = model.logits(hidden).log_softmax(-1)  # (B, T, V)
        for i, theirs in enumerate(outputs[ExportFormat.ctranslate2][name]["log_probs"]):
            tokens = torch.tensor([*rows[i], tgt.eos_id])
            ours = log_probs[i, : len(tokens)].gather(1, tokens[:, None])[:, 0]
            assert_near(torch.tensor(theirs), ours, name, atol=1e-4)


def test_logits_ids_and_weights_in_transformers_are_ours(
    folders: dict[str, Path], outputs: dict[ExportFormat, dict[Any, Any]]
) -> None:
    for name, output in outputs[ExportFormat.huggingface].items():
        kind = f"{PRE_NORM[name]}ForConditionalGeneration" if name in PRE_NORM else "MarianMTModel"
        assert (output["kind"], output["missing"], output["unexpected"]) == (kind, [], []), name
        tokenizer = tokenizers(folders[name])
        rows = tokenizer.src.encode_batch(LINES)
        assert output["input_ids"] == [[*row, tokenizer.src.eos_id] for row in rows], name
        model = load_models([folders[name]], device="cpu").backend.stepper.model
        src, src_lengths = pad_source(rows, tokenizer.src)
        with torch.inference_mode():
            hidden = hidden_states(model, src, src_lengths, decoder_input(folders[name]))
            ours = model.logits(hidden)
        is_token = decoder_input(folders[name]) != tokenizer.tgt.pad_id
        theirs = torch.tensor(output["logits"])
        assert_near(theirs[is_token], ours[is_token], name, atol=1e-4, rtol=0)


def test_attention_in_transformers_is_ours(
    folders: dict[str, Path], outputs: dict[ExportFormat, dict[Any, Any]]
) -> None:
    for name, output in outputs[ExportFormat.huggingface].items():
        [ours] = Translator.load(folders[name], device="cpu", backend="native").attention(
            LINES[:1], LINES[:1]
        )
        for kind in KINDS:
            weights = getattr(ours, kind)
            theirs = torch.tensor(output["attentions"][kind])  # (L, H, T or S and padding, same)
            theirs = theirs[..., : weights.size(2), : weights.size(3)]
            assert_near(theirs, weights, (name, kind), atol=1e-5, rtol=0)


def test_smaller_weights_give_nearly_the_same_translations(
    folders: dict[str, Path], outputs: dict[ExportFormat, dict[Any, Any]]
) -> None:
    texts = {}
    for name in (POST, *SMALLER):
        greedy = outputs[ExportFormat.ctranslate2][name]["translations"][0][:NUM_SURE]
        texts[name] = np.array([translation["text"] for translation in greedy])
    for quantization in SMALLER:
        share = (texts[quantization] == texts[POST]).mean()
        assert share >= 0.8, quantization  # int8 depends on the processor
    for kind in (Quantization.float16, Quantization.bfloat16):
        output = exported(folders[POST], ExportFormat.huggingface, quantization=kind)
        weights = load_file(output / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, kind.value)}
        assert json.loads((output / "config.json").read_text("utf-8"))["torch_dtype"] == kind.value


def test_the_files_name_vocabularies_and_special_tokens(
    folders: dict[str, Path], tokenizer: Tokenizer
) -> None:
    def content(name: str, library: ExportFormat, file: str) -> Any:
        return json.loads((exported(folders[name], library) / file).read_text(encoding="utf-8"))

    library = ExportFormat.ctranslate2
    for name, number in ((POST, 1), ("separate", 2)):
        assert len([*exported(folders[name], library).glob("*vocabulary.json")]) == number
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    assert content(POST, library, "shared_vocabulary.json") == pieces
    library = ExportFormat.huggingface
    for name, is_shared in ((POST, True), ("separate", False)):
        config = content(name, library, "config.json")
        assert config["share_encoder_decoder_embeddings"] is is_shared
    ids = {"pad": tokenizer.pad_id, "bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    for file in ("config.json", "generation_config.json"):
        config = content(POST, library, file)
        assert {key: config[f"{key}_token_id"] for key in ids} == ids
        assert config["decoder_start_token_id"] == tokenizer.bos_id
    names = content(POST, library, "tokenizer_config.json")
    ids["unk"] = tokenizer.unk_id
    assert {key: pieces.index(names[f"{key}_token"]) for key in ids} == ids
    assert content(POST, library, "vocab.json") == {piece: i for i, piece in enumerate(pieces)}
    with pytest.raises(ModelError, match="use format=ctranslate2"):  # control symbols elsewhere
        exported(folders["foreign"], library)


def test_the_papers_positions_are_those_that_marian_computes(folders: dict[str, Path]) -> None:
    """transformers saves a model without the table and computes it again."""
    output = exported(folders[POST], ExportFormat.huggingface)
    table = load_file(output / "model.safetensors")["model.encoder.embed_positions.weight"]
    positions, d_model = table.shape
    pos = torch.arange(positions, dtype=torch.float64).unsqueeze(1)
    angles = pos / 10000 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    marian = torch.cat([angles.sin(), angles.cos()], dim=1).float()
    torch.testing.assert_close(table, marian, atol=1e-6, rtol=0)
