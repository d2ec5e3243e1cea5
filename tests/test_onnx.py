"""Exports to ONNX, in processes without torch and nmt, against our own search."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import (
    HOSTILE,
    LIMIT,
    exported,
    native,
    prefer_padding,
    random_model,
    short_sentences,
    without_nmt,
)
from pages import fenced_blocks
from serving import change_config
from tiny import (
    BOS,
    PAD,
    assert_near,
    hidden_states,
    plain,
    random_source,
    random_target,
    sentences,
    tiny_model,
    tokenizer_config,
)
from variants import SINGLE, VARIANTS

from nmt.checkpoint import load_info
from nmt.config import (
    ExportConfig,
    ExportFormat,
    Norm,
    Normalization,
    Quantization,
    SearchConfig,
)
from nmt.data.text import replace_line_breaks
from nmt.data.tokenizer import MappedTokenizer, Tokenizer, TokenizerPair, Vocabulary
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ConfigError, ModelError, NmtError
from nmt.export import onnx as export_onnx
from nmt.model.attention import padding_mask
from nmt.translate.translator import Translator

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

LINES = [*short_sentences(12), *HOSTILE]
LEFT_OUT = {*SINGLE, "ssru, modern"}  # format=onnx refuses grouped heads beside SSRUs
SHALLOW = {"num_encoder_layers": 1, "num_decoder_layers": 1}  # takes half of the time
COMPARED = {name: SHALLOW | v for name, v in VARIANTS.items() if name not in LEFT_OUT}
GREEDY = SearchConfig(beam_size=1, normalization=Normalization.none)
ONNX = ExportFormat.onnx


def make_task(folder: Path, quantization: Quantization = Quantization.float32) -> dict[str, Any]:
    """Export a model, and describe it to run_exported.py."""
    source_eos = load_info(folder).model.source_eos
    return {
        "folder": str(exported(folder, ONNX, quantization=quantization)),
        "lines": LINES,
        "end": [3] if source_eos else [],
        "limit": LIMIT,
    }


@torch.inference_mode()
def test_steps_with_a_cache_equal_one_pass_of_the_plain_model() -> None:
    src, lengths = random_source([5, 2, 7])
    tgt = random_target(3, 6)
    src_mask = padding_mask(lengths, src.size(1))
    forbidden = [PAD, BOS]
    deep_decoder = SHALLOW | {"num_decoder_layers": 3}
    for name, changes in [*COMPARED.items(), ("deep decoder", deep_decoder)]:
        model = plain(tiny_model(**changes))
        expected = model.logits(hidden_states(model, src, lengths, tgt)).log_softmax(dim=-1)
        expected[:, :, forbidden] = float("-inf")
        keys, values = export_onnx.Encoder(model)(src, src_mask[:, 0, 0])
        decoder = export_onnx.DecoderStep(model, forbidden)
        past_keys = keys[:, :, :, :0]
        past_values = values[:, :, :, :0]
        for step in range(tgt.size(1)):
            log_probs, past_keys, past_values, _ = decoder(
                tgt[:, step], src_mask[:, 0, 0], keys, values, past_keys, past_values
            )
            assert_near(log_probs, expected[:, step], (name, step))


@pytest.mark.slow
def test_onnx_runtime_finds_our_tokens_without_torch(
    tmp_path: Path, tokenizer: Tokenizer, trained_models: dict[str, Path]
) -> None:
    small = train_tokenizer(sentences(90), tokenizer_config(vocab_size=40, byte_fallback=False))
    variants = {
        **COMPARED,
        "wide decoder": {"decoder_d_ff": 40, "num_decoder_layers": 3},
        "own output": {"tied_output": False, "output_bias": True, "norm": Norm.pre},
        "no source EOS": {"source_eos": False},
    }
    post = trained_models["post-sinusoidal"]
    folders = {
        **trained_models,
        **{name: random_model(tmp_path / name, tokenizer, **v) for name, v in variants.items()},
        "separate": random_model(tmp_path / "separate", TokenizerPair(small, tokenizer)),
        "prefers padding": prefer_padding(tmp_path / "padding", post, tokenizer),
    }
    results = without_nmt(ONNX, [make_task(folder) for folder in folders.values()])
    num_ties = 0
    for (name, folder), result in zip(folders.items(), results, strict=True):
        for i, [ours] in enumerate(native(folder, LINES, GREEDY)):
            length = len(ours.tokens)
            log_prob = 0.0
            for step in range(length):
                if result["tokens"][step][i] != ours.tokens[step]:
                    assert result["margins"][step][i] < 1e-4, (name, LINES[i], step)
                    num_ties += 1
                    break
                log_prob += result["log_probs"][step][i]
            else:
                assert log_prob == pytest.approx(ours.log_prob, abs=1e-3), (name, LINES[i])
    assert num_ties <= 3


def run_readmes(folders: list[Path]) -> list[str]:
    """Run the Python of each export's README, in one process without torch and nmt; return what
    each prints.
    """
    lines = ["import os, sys", "sys.modules |= {'torch': None, 'nmt': None}"]
    for folder in folders:
        code = fenced_blocks((folder / "README.md").read_text(encoding="utf-8"), "python")[0]
        lines += [f"os.chdir({str(folder)!r})", f"exec({code!r}, {{}})", "print('\\0', end='')"]
    command = [sys.executable, "-I", "-c", "\n".join(lines)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    outputs = result.stdout.split("\0")[:-1]
    return [output.removesuffix("\n") for output in outputs]


@pytest.mark.slow
def test_the_code_of_the_readme_translates_as_we_do(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pieces = tokenizer.all_pieces()
    names = tokenizer.pieces(tokenizer.control_ids)

    def number(pieces: list[str], prefix: list[int]) -> MappedTokenizer:
        """Give the pieces the ids of their order in `pieces`."""
        vocabulary = Vocabulary(pieces, *map(pieces.index, names), prefix, prefix)
        return MappedTokenizer(tokenizer.model, vocabulary, prefix)

    prefixed = number(pieces[::-1], [9])
    shared = TokenizerPair(prefixed, prefixed, shares_vocabulary=True)
    separate = TokenizerPair(number(pieces, []), prefixed)
    no_eos = {"source_eos": False}
    folders = [
        random_model(tmp_path / "joint", tokenizer, seed=5),
        random_model(tmp_path / "no EOS", tokenizer, seed=5, **no_eos),
        random_model(tmp_path / "separate", TokenizerPair(tokenizer, tokenizer), seed=4),
        random_model(tmp_path / "mapped", separate, seed=6),
        random_model(tmp_path / "shared", shared, seed=6),
        random_model(tmp_path / "tags", tokenizer, seed=3),
    ]
    tags = {"src_tag": "the", "tgt_tag": "house"}
    change_config(folders[-1], directions=[{"src_lang": "xx", "tgt_lang": "yy", **tags}])
    outputs = run_readmes([exported(folder, ONNX) for folder in folders])
    for folder, printed in zip(folders, outputs, strict=True):
        translator = Translator.load(folder, device="cpu", backend="native")
        [ours] = translator.translate(["A sentence."], beam_size=1, loop_guard=False)
        assert ours.strip(), folder
        assert replace_line_breaks(printed) == ours, folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "min_equal"), [(Quantization.int8, 10), (Quantization.float16, 12)]
)
def test_smaller_weights_give_nearly_the_same_translations(
    trained_models: dict[str, Path], quantization: Quantization, min_equal: int
) -> None:
    for folder in trained_models.values():
        tasks = [make_task(folder), make_task(folder, quantization)]
        tokens = [np.array(result["tokens"]).T for result in without_nmt(ONNX, tasks)]
        num_equal = 0
        for line in range(12):
            length = len(native(folder, LINES[line : line + 1], GREEDY)[0][0].tokens)
            num_equal += (tokens[0][line, :length] == tokens[1][line, :length]).all()
        assert num_equal >= min_equal
        sizes = [(Path(task["folder"]) / "decoder.onnx").stat().st_size for task in tasks]
        assert sizes[1] < 0.75 * sizes[0]


def test_a_file_states_its_operators_and_holds_every_matrix_once(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = random_model(tmp_path / "model", tokenizer, d_model=64, d_ff=64, **SHALLOW)
    output = exported(folder, ONNX, max_positions=20)
    for name in ("encoder.onnx", "decoder.onnx"):
        model = onnx.load(output / name)
        onnx.checker.check_model(model, full_check=True)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
        sizes = [list(tensor.dims) for tensor in model.graph.initializer]
        assert sum(sorted(size) == [64, tokenizer.vocab_size] for size in sizes) == 1
    assert (output / "decoder.onnx").stat().st_size < (folder / "model.safetensors").stat().st_size


def test_settings_that_onnx_lacks_are_refused_by_name(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="format=onnx takes float32, float16 or int8"):
        ExportConfig(format=ONNX, quantization=Quantization.bfloat16)
    folder = random_model(tmp_path / "model", tokenizer)
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "onnxruntime", None)  # importing it is an error
        with pytest.raises(NmtError, match=r"pip install nmt\[onnx\]"):
            exported(folder, ONNX)
    monkeypatch.setattr(export_onnx, "_MAX_BYTES", 1000)
    with pytest.raises(ModelError, match="the model exceeds 2 GiB, .* use format=ctranslate2"):
        exported(folder, ONNX)
