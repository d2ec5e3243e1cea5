"""Exports to Bergamot: the binary files, read again by their description, and by slimt."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from exporting import exported, random_model, short_sentences, trained_model
from folders import write_folder
from importing import imported
from marian_student import MarianStudent, quantize
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
from nmt.data.tokenizer import Tokenizer, TokenizerPair
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ConfigError, ModelError
from nmt.export.bergamot import FLOAT32, INT8, Item, encode_items

BERGAMOT = ExportFormat.bergamot
STUDENT = {"decoder": Decoder.ssru, "positions": Positions.sinusoidal_concat}
INTGEMM8 = 0x4101  # int8, transposed, with the multiplier at the end
MAGIC = 0xF11A48D5013417F5


def read_binary(path: Path) -> dict[str, Any]:
    """Read a binary file of Marian: settings as bytes, other tensors as arrays."""
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
    lists = [part.tolist() for part in np.split(entries, offsets[1:-1])]
    for ids in lists:
        assert ids == sorted(set(ids))
    return lists


def test_the_binary_file_has_the_tensors_of_the_npz(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pair = TokenizerPair(tokenizer, train_tokenizer(sentences(90), tokenizer_config()))
    for name, vocabularies, changes in (
        ("student", tokenizer, STUDENT),
        ("separate", pair, {"activation": Activation.silu}),
    ):
        folder = random_model(tmp_path / name, vocabularies, **changes)
        output = exported(folder, BERGAMOT)
        tensors = read_binary(output / "model.xxyy.bin")
        npz = np.load(exported(folder, ExportFormat.marian) / "model.npz")
        assert set(tensors) == set(npz.files)
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
        assert config["skip-cost"] is False  # beam search adds log-probabilities, not logits
    change_config(folder, search={"beam_size": 1})
    config = yaml.safe_load((exported(folder, BERGAMOT) / "config.yml").read_text())
    assert config["skip-cost"] is True


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
    before = read_binary(exported(model_dir, BERGAMOT) / "model.xxyy.bin")
    after = read_binary(exported(tmp_path / "tuned", BERGAMOT) / "model.xxyy.bin")
    assert len(before["Wemb"]) == tokenizer.vocab_size
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert np.array_equal(tensor, after[name]), name


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


def test_what_bergamot_has_no_form_for_is_refused_by_name(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match="format=bergamot takes float32"):
        ExportConfig(format=BERGAMOT, quantization=Quantization.int8)
    with pytest.raises(ConfigError, match="shortlist_data=x: needs format=ctranslate2 or berg"):
        ExportConfig(format=ExportFormat.marian, shortlist_data="x")
    wide = random_model(tmp_path / "wide", tokenizer, decoder_d_ff=40, **STUDENT)
    refusal = r"format=bergamot does not support model.decoder_d_ff=40 \(only null\); use .*=mar"
    with pytest.raises(ConfigError, match=refusal):
        exported(wide, BERGAMOT)
    pre_norm = random_model(tmp_path / "pre-norm", tokenizer, norm=Norm.pre, **STUDENT)
    with pytest.raises(ConfigError, match=r"not support model.norm=pre \(only post\); use .*=mar"):
        exported(pre_norm, BERGAMOT)
    model_dir = imported(write_marian(tmp_path / "theirs", 1))
    with pytest.raises(ModelError, match="ids of the SentencePiece model, and this model has oth"):
        exported(model_dir, BERGAMOT)


# --- slimt, which reads int8 only


def encode_int8(arrays: dict[str, Any], multipliers: dict[str, float]) -> bytes:
    """Return a binary file with int8 matrices, as `marian-conv --gemm-type intgemm8alpha` does."""
    items = []
    for name, array in arrays.items():
        if name == "Wemb" or name in multipliers:
            integers, scale = quantize(array.astype("f8"))
            stored = integers if name == "Wemb" else integers.T
            content = stored.astype("i1").tobytes() + struct.pack("<f", 1 / scale)
            content += bytes(-len(content) % 256)
            items.append(Item(name, INTGEMM8, array.shape, content))
        else:
            items.append(Item(name, FLOAT32, array.shape, array.astype("<f4").tobytes()))
    for name, multiplier in multipliers.items():
        content = struct.pack("<f", multiplier)
        items.append(Item(f"{name}_QuantMultA", FLOAT32, (1, 1), content))
    return encode_items(items)


def find_candidates(src: Sequence[int], lists: list[list[int]], vocab_size: int) -> list[int]:
    """Return the candidates of a sentence, whose number slimt rounds up to a multiple of 8."""
    ids = set(range(50)).union(*(lists[token] for token in src))
    for token in range(50, vocab_size):
        if len(ids) % 8 == 0:
            break
        ids.add(token)
    return sorted(ids)


def translate_by_slimt(folder: Path, model: Path, lines: list[str]) -> list[str]:
    """Translate with the vocabulary and the shortlist in `folder`; skip without slimt."""
    spec = importlib.util.find_spec("slimt")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("slimt is not installed")
    [library] = Path(spec.submodule_search_locations[0]).glob("_slimt*.so")
    task = {
        "library": str(library),
        "model": str(model),
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
    assert "[warn]" not in result.stderr, result.stderr  # tensors that are missing or unknown
    translations: list[str] = json.loads(result.stdout)
    return translations


@pytest.mark.slow
def test_slimt_translates_with_the_files_of_a_student(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(sentences(300), tokenizer_config(vocab_size=320))
    (tmp_path / "data").mkdir()
    write_data(tmp_path / "data", tokenizer, [(9, 9)] * 300)
    shape = {"d_model": 64, "d_ff": 64, "num_heads": 8}
    folder = trained_model(tmp_path / "model", tokenizer, **STUDENT, **shape)
    output = exported(folder, BERGAMOT, shortlist_data=str(tmp_path / "data"))
    arrays = read_binary(output / "model.xxyy.bin")
    del arrays["special:model.yml"]
    lists = read_shortlist(output / "lex.50.50.xxyy.s2t.bin")
    eos = tokenizer.eos_id
    lines = short_sentences(40)
    rows = [[*tokenizer.encode(line), eos] for line in lines]
    student = MarianStudent(arrays, num_heads=8, has_target_positions=False)
    for row in rows:  # finds the largest activations
        candidates = find_candidates(row, lists, tokenizer.vocab_size)
        student.translate(row, eos=eos, candidates=candidates)
    multipliers = {name: 127 / largest for name, largest in student.largest.items()}
    int8_path = tmp_path / "int8.bin"
    int8_path.write_bytes(encode_int8(arrays, multipliers))
    student = MarianStudent(
        arrays, num_heads=8, multipliers=multipliers, has_target_positions=False
    )
    num_equal = 0
    for row, theirs in zip(rows, translate_by_slimt(output, int8_path, lines), strict=True):
        candidates = find_candidates(row, lists, tokenizer.vocab_size)
        ids = student.translate(row, eos=eos, candidates=candidates)
        num_equal += theirs == tokenizer.decode([token for token in ids if token != eos])
    assert num_equal >= 36  # of 40; sums in another order round to other integers
