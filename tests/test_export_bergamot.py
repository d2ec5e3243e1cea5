"""Exports to Bergamot: the binary files, read again by their description, by slimt, and by the
engine itself.
"""

from __future__ import annotations

import importlib.util
import json
import re
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from exporting import exported, random_model, short_sentences, trained_model
from folders import write_folder
from importing import imported
from npm import needs_node, unpack_package
from numpy_marian import NumpyMarian
from serving import change_config
from test_import_toolkits import write_marian
from tiny import sentences, tokenizer_config
from toy import write_data

from nmt.checkpoint import load_info, load_model_tokenizers, load_weights, save_model
from nmt.config import (
    Activation,
    Decoder,
    ExportConfig,
    ExportFormat,
    Norm,
    Positions,
    Quantization,
)
from nmt.data.binary import ParallelData
from nmt.data.tokenizer import Tokenizer, TokenizerPair
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ConfigError, ModelError
from nmt.export.bergamot import FLOAT32, INT8, INTGEMM8
from nmt.translate.translator import Translator

BERGAMOT = ExportFormat.bergamot
MARIAN_POSITIONS = {"positions": Positions.sinusoidal_concat}
STUDENT = {"decoder": Decoder.ssru, **MARIAN_POSITIONS}
MAGIC = 0xF11A48D5013417F5
ALPHAS = "model.xxyy.intgemm.alphas.bin"
ENGINE = "@browsermt/bergamot-translator@0.4.9"


def read_binary(path: Path) -> dict[str, Any]:
    """Read a binary file of Marian: settings as bytes, other tensors as arrays of floats."""
    content = path.read_bytes()
    version, count = struct.unpack_from("<2Q", content)
    assert version == 1
    position = 16
    headers = list(struct.iter_unpack("<4Q", content[position : position + 32 * count]))
    position += 32 * count
    names = []
    for name_length, *_ in headers:
        name = content[position : position + name_length]
        assert name.endswith(b"\0")
        names.append(name[:-1].decode())
        position += name_length
    shapes = []
    for _, _, num_dimensions, _ in headers:
        shapes.append(struct.unpack_from(f"<{num_dimensions}i", content, position))
        position += 4 * num_dimensions
    [padding] = struct.unpack_from("<Q", content, position)
    position += 8 + padding
    tensors: dict[str, Any] = {}
    for name, shape, (_, number, _, length) in zip(names, shapes, headers, strict=True):
        if number == FLOAT32:
            assert position % 256 == 0, name
            count = int(np.prod(shape))
            tensors[name] = np.frombuffer(content, "<f4", count, position).reshape(shape)
        elif number == INTGEMM8:
            assert position % 256 == 0, name
            count = int(np.prod(shape))
            [multiplier] = struct.unpack_from("<f", content, position + count)
            values = np.frombuffer(content, "i1", count, position) / np.float32(multiplier)
            is_transposed = "Wemb" not in name
            tensors[name] = (
                values.reshape(shape[::-1]).T if is_transposed else values.reshape(shape)
            )
        else:
            assert number == INT8
            tensors[name] = content[position : position + length]
            assert shape == (length,)
        position += length
    assert position == len(content)
    return tensors


def read_shortlist(path: Path) -> list[list[int]]:
    """Read the candidates of each source id; check the header."""
    content = path.read_bytes()
    magic, checksum, first, best, num_offsets, num_entries = struct.unpack_from("<6Q", content)
    assert (magic, first, best) == (MAGIC, 50, 50)
    seed = 0
    for (word,) in struct.iter_unpack("<Q", content[16 : len(content) // 8 * 8]):
        seed ^= (word + 0x9E3779B9 + (seed << 6) + (seed >> 2)) % 2**64
    assert seed == checksum
    offsets = np.frombuffer(content, "<u8", num_offsets, 48)
    entries = np.frombuffer(content, "<u4", num_entries, 48 + 8 * num_offsets)
    assert len(content) == 48 + 8 * num_offsets + 4 * num_entries
    assert offsets[-1] == num_entries
    assert (offsets[:-1] < num_entries).all()  # Marian refuses other files
    lists = [ids.tolist() for ids in np.split(entries, offsets[1:-1])]
    for ids in lists:
        assert ids == sorted(set(ids))
    return lists


def test_the_binary_file_has_the_tensors_of_the_npz(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pair = TokenizerPair(tokenizer, train_tokenizer(sentences(90), tokenizer_config()))
    for name, vocabularies, changes in (
        ("student", tokenizer, STUDENT),
        ("separate", pair, {"activation": Activation.silu, **MARIAN_POSITIONS}),
    ):
        folder = random_model(tmp_path / name, vocabularies, **changes)
        output = exported(folder, BERGAMOT)
        tensors = read_binary(output / "model.xxyy.bin")
        npz = np.load(exported(folder, ExportFormat.marian) / "model.npz")
        assert set(tensors) == set(npz.files) - {"Wpos"}
        for key, tensor in tensors.items():
            if key == "special:model.yml":
                assert tensor == npz[key].tobytes()
            else:
                assert tensor.shape == npz[key].shape
                assert (tensor == npz[key]).all(), key
        config = yaml.safe_load((output / "config.yml").read_text())
        assert config["models"] == ["model.xxyy.bin"]
        for file, side in zip(config["vocabs"], (vocabularies.src, vocabularies.tgt), strict=True):
            assert (output / file).read_bytes() == side.model
        assert len(set(config["vocabs"])) == 1 + (name == "separate")
        assert "shortlist" not in config
        assert config["gemm-precision"] == "float32"
        assert config["skip-cost"] is False  # beam search adds log-probabilities, not logits
    change_config(folder, search={"beam_size": 1})
    config = yaml.safe_load((exported(folder, BERGAMOT) / "config.yml").read_text())
    assert config["skip-cost"] is True


@pytest.fixture(scope="module")
def tokenizer_for_int8() -> Tokenizer:
    return train_tokenizer(sentences(300), tokenizer_config(vocab_size=320))


def test_matrices_in_int8_are_those_of_float32_to_half_a_step(
    tmp_path: Path, tokenizer_for_int8: Tokenizer
) -> None:
    int8 = {"quantization": Quantization.int8}
    src_tokenizer = train_tokenizer(sentences(90), tokenizer_config())
    assert src_tokenizer.vocab_size % 8  # only read, not multiplied with
    pair = TokenizerPair(src_tokenizer, tokenizer_for_int8)
    for name, tokenizers, changes, output_name in (
        ("student", tokenizer_for_int8, STUDENT, "Wemb"),
        ("attention", tokenizer_for_int8, {}, "Wemb"),
        ("untied", tokenizer_for_int8, {"tied_output": False}, "decoder_ff_logit_out_W"),
        ("separate", pair, {}, "decoder_Wemb"),
    ):
        folder = random_model(tmp_path / name, tokenizers, d_model=64, d_ff=128, **changes)
        exact = read_binary(exported(folder, BERGAMOT) / "model.xxyy.bin")
        tensors = read_binary(exported(folder, BERGAMOT, **int8) / "model.xxyy.intgemm8.bin")
        assert tensors.keys() == exact.keys()
        for key, tensor in tensors.items():
            if key == "special:model.yml" or not re.search(r"_W.?$|Wemb", key):
                assert np.array_equal(tensor, exact[key]), (name, key)
            else:
                step = np.abs(exact[key]).max() / 127
                assert np.abs(tensor - exact[key]).max() <= 0.501 * step, (name, key)
        data_dir = tmp_path / f"{name}-data"
        data_dir.mkdir()
        meta = {"tokenizer_sha256": tokenizers.sha256, "max_length": 9}
        write_folder(data_dir, {"": [([5, 6, 7], [8, 9])]}, 320, **meta)
        output = exported(folder, BERGAMOT, calibration_data=str(data_dir), **int8)
        scaled = read_binary(output / ALPHAS).keys() - exact.keys()
        multiplied = {key for key in exact if re.search("_W.?$", key)} | {"none", output_name}
        assert scaled == {f"{key}_QuantMultA" for key in multiplied}, name
        config = yaml.safe_load((output / "config.yml").read_text())
        assert config["gemm-precision"] == "int8shiftAlphaAll"
        assert config["models"] == [ALPHAS]


def test_scales_are_measured_on_the_activations_of_marians_formulas(
    tmp_path: Path, tokenizer_for_int8: Tokenizer
) -> None:
    (tmp_path / "data").mkdir()
    write_data(tmp_path / "data", tokenizer_for_int8, [(9, 7), (4, 5), (12, 11), (7, 9)])
    folder = random_model(tmp_path / "model", tokenizer_for_int8, d_model=64, d_ff=64, **STUDENT)
    arrays = read_binary(exported(folder, BERGAMOT) / "model.xxyy.bin")
    del arrays["special:model.yml"]
    num_heads = load_info(folder).model.num_heads
    largest = defaultdict(list)
    pairs = ParallelData(tmp_path / "data", "train")
    for index in range(len(pairs)):
        src, tgt = pairs[index]
        student = NumpyMarian(arrays, num_heads)
        student.logits(student.encode([*src, tokenizer_for_int8.eos_id]), tgt)
        for name, value in student.largest.items():
            largest[name].append(value)
    data_dir = str(tmp_path / "data")
    int8 = {"quantization": Quantization.int8, "calibration_data": data_dir}
    tensors = read_binary(exported(folder, BERGAMOT, **int8) / ALPHAS)
    for name, values in largest.items():
        expected = 127 / (np.mean(values) + 1.1 * np.std(values))
        assert tensors[f"{name}_QuantMultA"].item() == pytest.approx(expected, rel=1e-4), name
    assert tensors["Wemb_QuantMultA"] == tensors["none_QuantMultA"]


def test_the_shortlist_has_the_candidates_of_ctranslate2(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "data").mkdir()
    write_data(tmp_path / "data", tokenizer, [(9, 9)] * 200)
    folder = random_model(tmp_path / "model", tokenizer)
    data_dir = str(tmp_path / "data")
    output = exported(folder, BERGAMOT, shortlist_data=data_dir)
    [name, should_check] = yaml.safe_load((output / "config.yml").read_text())["shortlist"]
    assert should_check == 0
    lists = read_shortlist(output / name)
    vmap = exported(folder, ExportFormat.ctranslate2, shortlist_data=data_dir) / "vmap.txt"
    pieces = tokenizer.all_pieces()
    eos = tokenizer.eos_id
    assert len(lists) == len(pieces)
    num_lines = 0
    for line in vmap.read_text(encoding="utf-8").splitlines():
        piece, names = line.split("\t")
        expected = {pieces.index(name) for name in names.split(" ")}
        ids = lists[pieces.index(piece)] if piece else lists[eos]
        assert expected <= set(ids) <= expected | set(lists[eos]), piece
        num_lines += 1
    assert num_lines > 100


def imported_student(folder: Path, tokenizer: Tokenizer) -> Path:
    """Import a student of Marian that has the ids of its SentencePiece model."""
    student = random_model(folder, tokenizer, **STUDENT)
    return imported(exported(student, ExportFormat.marian), src_lang="xx", tgt_lang="yy")


def test_a_fine_tuned_import_is_exported_without_its_padding(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model_dir = imported_student(tmp_path / "student", tokenizer)
    info = load_info(model_dir)
    weights = load_weights(model_dir)
    weights["embedding.weight"][-1] = 0.1  # label smoothing gives the row a gradient
    tokenizers = load_model_tokenizers(model_dir, info)
    save_model(tmp_path / "tuned", weights, info, tokenizers)
    imported_arrays = read_binary(exported(model_dir, BERGAMOT) / "model.xxyy.bin")
    exported_arrays = read_binary(exported(tmp_path / "tuned", BERGAMOT) / "model.xxyy.bin")
    assert len(imported_arrays["Wemb"]) == tokenizer.vocab_size
    assert imported_arrays.keys() == exported_arrays.keys()
    for name, tensor in imported_arrays.items():
        assert np.array_equal(tensor, exported_arrays[name]), name


def test_the_shortlist_of_an_imported_model_lacks_its_padding(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model_dir = imported_student(tmp_path / "student", tokenizer)
    meta = {"tokenizer_sha256": load_info(model_dir).tokenizer_sha256, "max_length": 9}
    (tmp_path / "data").mkdir()
    pairs = [([5, 6, 7], [8, 9])] * 20
    write_folder(tmp_path / "data", {"": pairs}, tokenizer.vocab_size + 1, **meta)
    output = exported(model_dir, BERGAMOT, shortlist_data=str(tmp_path / "data"))
    lists = read_shortlist(output / "lex.50.50.xxyy.s2t.bin")
    assert len(lists) == tokenizer.vocab_size
    assert max(map(max, lists)) < tokenizer.vocab_size


def test_settings_that_bergamot_lacks_are_refused_by_name(
    tmp_path: Path, tokenizer: Tokenizer, tokenizer_for_int8: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match="format=bergamot takes float32 or int8"):
        ExportConfig(format=BERGAMOT, quantization=Quantization.float16)
    with pytest.raises(ConfigError, match="format=marian takes float32"):
        ExportConfig(format=ExportFormat.marian, quantization=Quantization.int8)
    for changes in ({"format": BERGAMOT}, {"quantization": Quantization.int8}):
        with pytest.raises(ConfigError, match="calibration_data=x: only format=bergamot with"):
            ExportConfig(calibration_data="x", **changes)
    pre_norm = random_model(tmp_path / "pre-norm", tokenizer, norm=Norm.pre, **STUDENT)
    with pytest.raises(ConfigError, match=r"not support model.norm=pre \(only post\); use .*=mar"):
        exported(pre_norm, BERGAMOT)
    for name, vocabulary, matrix in (
        ("narrow", tokenizer_for_int8, "encoder_l1_ffn_W2 in int8: it has 40 inputs"),
        ("odd", tokenizer, "Wemb in int8: it has 64 inputs and 330 outputs"),
    ):
        folder = random_model(tmp_path / name, vocabulary, d_model=64, d_ff=40, **STUDENT)
        with pytest.raises(ConfigError, match=f"format=bergamot cannot multiply {matrix}"):
            exported(folder, BERGAMOT, quantization=Quantization.int8)
        with pytest.raises(ConfigError, match="format=bergamot cannot multiply"):
            # refused before the folder of the calibration is read
            exported(folder, BERGAMOT, quantization=Quantization.int8, calibration_data="absent")
    with pytest.raises(ConfigError, match="shortlist_data=x: needs format=ctranslate2 or berg"):
        ExportConfig(format=ExportFormat.marian, shortlist_data="x")
    wide = random_model(tmp_path / "wide", tokenizer, decoder_d_ff=40, **STUDENT)
    refusal = r"format=bergamot does not support model.decoder_d_ff=40 \(only null\); use .*=mar"
    with pytest.raises(ConfigError, match=refusal):
        exported(wide, BERGAMOT)
    model_dir = imported(write_marian(tmp_path / "theirs", 1))
    with pytest.raises(ModelError, match="ids of the SentencePiece model, and this model has oth"):
        exported(model_dir, BERGAMOT)


# --- slimt, which reads int8 only


def find_candidates(src: Sequence[int], lists: list[list[int]], vocab_size: int) -> list[int]:
    """Return the candidates of a sentence, whose number slimt rounds up to a multiple of 8."""
    ids = set(range(50)).union(*(lists[token] for token in src))
    for token in range(50, vocab_size):
        if len(ids) % 8 == 0:
            break
        ids.add(token)
    return sorted(ids)


def translate_by_slimt(folder: Path, lines: list[str]) -> list[str]:
    """Translate with the files in `folder`; skip without slimt."""
    spec = importlib.util.find_spec("slimt")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("slimt is not installed")
    [library] = Path(spec.submodule_search_locations[0]).glob("_slimt*.so")
    task = {
        "library": str(library),
        "model": str(folder / ALPHAS),
        "vocabulary": str(folder / "vocab.xxyy.spm"),
        "shortlist": str(folder / "lex.50.50.xxyy.s2t.bin"),
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 8,
        "lines": lines,
    }
    command = [sys.executable, "-I", str(Path(__file__).with_name("run_slimt.py"))]
    result = subprocess.run(
        command, check=False, input=json.dumps(task), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    unused = {"Wemb_QuantMultA", "special:model.yml"}  # without a shortlist, Bergamot reads them
    assert set(re.findall(r"\[warn\].* (\S+)", result.stderr)) == unused, result.stderr
    translations: list[str] = json.loads(result.stdout)
    return translations


@pytest.mark.slow
def test_slimt_translates_with_the_files_of_a_student(
    tmp_path: Path, tokenizer_for_int8: Tokenizer
) -> None:
    tokenizer = tokenizer_for_int8
    data_dir = write_copies(tmp_path / "data", tokenizer)
    shape = {"d_model": 64, "d_ff": 64, "num_heads": 8}
    folder = trained_model(tmp_path / "model", tokenizer, **STUDENT, **shape)
    arrays = read_binary(exported(folder, BERGAMOT) / "model.xxyy.bin")
    del arrays["special:model.yml"]
    options = {"shortlist_data": data_dir, "calibration_data": data_dir}
    output = exported(folder, BERGAMOT, quantization=Quantization.int8, **options)
    lists = read_shortlist(output / "lex.50.50.xxyy.s2t.bin")
    multipliers = {}
    for name, tensor in read_binary(output / ALPHAS).items():
        if name.endswith("_QuantMultA"):
            multipliers[name.removesuffix("_QuantMultA")] = tensor.item()
    student = NumpyMarian(arrays, num_heads=8, multipliers=multipliers, has_target_positions=False)
    eos = tokenizer.eos_id
    lines = short_sentences(40)
    num_equal = 0
    for line, theirs in zip(lines, translate_by_slimt(output, lines), strict=True):
        row = [*tokenizer.encode(line), eos]
        candidates = find_candidates(row, lists, tokenizer.vocab_size)
        ids = student.translate(row, eos=eos, candidates=candidates)
        num_equal += theirs == tokenizer.decode([token for token in ids if token != eos])
    assert num_equal >= 36  # of 40; sums in another order round to other integers


# --- the engine: WebAssembly in Node.js


def write_copies(folder: Path, tokenizer: Tokenizer) -> str:
    """Write a data folder of sentences and their copies, and return its name."""
    pairs = []
    for line in short_sentences(300):
        ids = tokenizer.encode(line)
        pairs.append((ids, ids))
    meta = {"tokenizer_sha256": tokenizer.sha256, "max_length": 99}
    folder.mkdir()
    write_folder(folder, {"": pairs}, tokenizer.vocab_size, **meta)
    return str(folder)


def translate_by_engine(folder: Path, lines: list[str]) -> list[str]:
    """Translate with the code in README.md of `folder`, which finds the engine's package above."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```javascript\n(.*?)```", text, re.DOTALL)
    (folder / "translate.mjs").write_text(code, encoding="utf-8")
    text = "".join(f"{line}\n" for line in lines)
    command = ["node", "translate.mjs"]
    pipes = {"input": text, "capture_output": True, "text": True, "cwd": folder}
    result = subprocess.run(command, check=False, timeout=600, **pipes)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@needs_node
@pytest.mark.slow
def test_the_engine_translates_as_native_search_does(
    tmp_path: Path, tokenizer_for_int8: Tokenizer
) -> None:
    package = unpack_package(ENGINE, tmp_path / "node_modules")
    (package / "worker/package.json").write_text('{"type": "commonjs"}')  # as README.md says
    data_dir = write_copies(tmp_path / "data", tokenizer_for_int8)
    float32: dict[str, Any] = {}
    shortlist = {"shortlist_data": data_dir}
    int8 = {"quantization": Quantization.int8}
    all_options = {**int8, **shortlist, "calibration_data": data_dir}
    shape = {"d_model": 64, "d_ff": 64, "num_heads": 8}
    tokenizer = tokenizer_for_int8
    lines = short_sentences(40)
    for name, changes, runs in (
        ("student", STUDENT, [(1, float32), (1, shortlist), (1, int8), (4, shortlist)]),
        ("attention", MARIAN_POSITIONS, [(1, float32), (4, float32)]),
    ):
        folder = trained_model(tmp_path / name, tokenizer, **changes, **shape)
        for beam_size, options in (*runs, (1, all_options)):
            change_config(folder, search={"beam_size": beam_size, "length_penalty": 1.0})
            translator = Translator.load(folder, backend="native")
            translations = translator.translate(lines, loop_guard=False)
            expected = {}
            for line, translation in zip(lines, translations, strict=True):
                if len(tokenizer.encode(translation)) < 2 * len(tokenizer.encode(line)):
                    expected[line] = translation  # else, the engine stops earlier
            assert len(expected) > 20
            theirs = translate_by_engine(exported(folder, BERGAMOT, **options), list(expected))
            num_equal = sum(a == b for a, b in zip(theirs, expected.values(), strict=True))
            least = len(expected)
            # with a beam, the engine may repeat words up to its own limit of the length
            if beam_size > 1 or "quantization" in options:
                least = int(0.9 * len(expected))
            assert num_equal >= least, (name, beam_size, options, theirs)
