"""nmt-import refuses, in one line and before it writes, what it cannot honor, and runs no code."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
import torch
from exporting import exported, random_model
from importing import imported
from safetensors.torch import load_file, save_file
from test_import_huggingface import M2M100, MARIAN, write_m2m100, write_marian
from test_import_toolkits import write_fairseq, write_opennmt
from test_import_toolkits import write_marian as write_npz
from toy import command

from nmt.config import ExportFormat
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ModelError

Damage = Callable[[Path], object]


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)


def edit(name: str, **changes: Any) -> Damage:
    """Change settings in a file of JSON; None removes one."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8")) | changes
        kept = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(kept), encoding="utf-8")

    return damage


def reweigh(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the weights."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return damage


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def pickled(make: Callable[[Path], Any]) -> Damage:
    """Put a pickle in the place of safe weights."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(make(folder.with_name("trace")), folder / "pytorch_model.bin")

    return damage


def vocabulary(change: Callable[[dict[str, int]], object]) -> Damage:
    def damage(folder: Path) -> None:
        ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        change(ids)
        (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")

    return damage


def take_middle(ids: dict[str, int]) -> None:
    ids.pop(next(piece for piece, i in ids.items() if i == 7))


def nested(depth: int) -> list[Any]:
    """Return lists in a list, to a depth."""
    return [nested(depth - 1)] if depth else []


NAN = float("nan")
LAYER = "model.encoder.layers.0.fc1.weight"
HUGGINGFACE: dict[str, Damage] = {
    "model_type='bart' cannot be imported": edit("config.json", model_type="bart"),
    "activation_function='quick_gelu' cannot": edit(
        "config.json", activation_function="quick_gelu"
    ),
    "normalize_embedding=True cannot": edit("config.json", normalize_embedding=True),
    "decoder_attention_heads=4 cannot": edit("config.json", decoder_attention_heads=4),
    "d_model='wide' cannot": edit("config.json", d_model="wide"),
    "encoder_layers=None cannot": edit("config.json", encoder_layers=None),
    "bad_words_ids=": edit("generation_config.json", bad_words_ids=[[5]]),
    "lacks encoder.layers.2": edit("config.json", encoder_layers=3),
    "holds 16 tensors": edit("config.json", encoder_layers=1),
    "describes no model": edit("config.json", decoder_layers=0),
    r"has the shape \(9, 14\), its config says \(10, 14\)": edit(
        "config.json", encoder_ffn_dim=10, decoder_ffn_dim=10
    ),
    "lacks encoder.layers.0.fc1.weight": reweigh(lambda weights: weights.pop(LAYER)),
    "holds 1 tensors .* encoder.extra": reweigh(
        lambda weights: weights.update({"model.encoder.extra": torch.zeros(2)})
    ),
    "is int8; quantized": reweigh(lambda weights: weights.update({LAYER: weights[LAYER].char()})),
    "learned positions": reweigh(
        lambda weights: weights.update({"model.encoder.embed_positions.weight": torch.ones(9, 14)})
    ),
    "not the embedding, though": reweigh(
        lambda weights: weights.update({"lm_head.weight": torch.ones(5, 14)})
    ),
    "cannot be read": write("model.safetensors", b"\x08\0\0\0\0\0\0\0{}      "[:12]),
    "holds neither": lambda folder: (folder / "model.safetensors").unlink(),
    "the vocabulary has a hole": vocabulary(take_middle),
    "which is taken or no row": vocabulary(lambda ids: ids.update({"extra": 10_000})),
    "the id 7": vocabulary(lambda ids: ids.update({"extra": 7})),
    "lacks the control symbol '<unk>'": vocabulary(lambda ids: ids.update({"x": ids.pop("<unk>")})),
    "vocab.json is no JSON object": write("vocab.json", b"{"),
    "is no SentencePiece model": write("source.spm", b"hello"),
    "holds no SentencePiece model": lambda folder: (folder / "target.spm").unlink(),
    "wants to load .*system": pickled(Bomb),
    "no dictionary": pickled(lambda trace: [1, 2]),
    "something else than weights": pickled(lambda trace: {"a": 1}),
    "TypeError: expected string": pickled(lambda trace: {1: torch.zeros(2)}),
    "fc1.weight holds numbers that are not finite": reweigh(
        lambda weights: weights[LAYER].fill_(NAN)
    ),
    "is no text": vocabulary(lambda ids: ids.update({"\ud800": ids.pop("the", 7)})),
    "unk_token=.'<unk>'. cannot be imported": edit("tokenizer_config.json", unk_token=["<unk>"]),
    "ValueError: invalid literal": edit("tokenizer_config.json", added_tokens_decoder={"x": {}}),
    r"model_type=\[\[\[\[.*\.\.\..* cannot": edit("config.json", model_type=nested(200)),
}


def refused(folder: Path, message: str, capsys: pytest.CaptureFixture[str], *more: str) -> None:
    """Import `folder` and expect one line that matches, and nothing written."""
    place = folder.parent / "new" / "output"
    assert command("import", f"input={folder}", f"output={place}", *more) == 2, message
    lines = capsys.readouterr().err.strip().split("\n")
    assert re.search(message, lines[-1]), (message, lines)
    assert "Traceback" not in "".join(lines), message
    assert not place.parent.exists(), message
    assert not (folder.parent / "trace").exists(), message


def test_folders_of_transformers_that_do_not_fit_are_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    shape = {"d_model": 14, "d_ff": 9, "num_heads": 7, "num_decoder_layers": 1}
    ours = random_model(tmp_path / "ours", tokenizer, **shape)
    whole = exported(ours, ExportFormat.huggingface, max_positions=64)
    before = {path.name for path in imported(whole).parent.iterdir()}
    for i, (message, damage) in enumerate(HUGGINGFACE.items()):
        folder = tmp_path / f"damaged-{i}"
        shutil.copytree(whole, folder)
        damage(folder)
        with pytest.raises(ModelError, match=message) as error:
            imported(folder)
        assert "\n" not in str(error.value)
        before.add(folder.name)
    assert {path.name for path in tmp_path.iterdir()} == before  # nothing written, nor run


@pytest.mark.slow
def test_languages_that_a_model_has_not_name_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_m2m100(tmp_path / "m2m", 0, M2M100["m2m"])
    refused(folder, "tgt_lang=frr: did you mean .*fr", capsys, "tgt_lang=frr")


@pytest.mark.slow
def test_files_of_other_toolkits_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "transformer-decoder-autoreg='rnn' cannot": {"transformer-decoder-autoreg": "rnn"},
        "transformer-train-position-embeddings=True": {
            "transformer-train-position-embeddings": True
        },
        "transformer-ffn-activation='gelu'": {"transformer-ffn-activation": "gelu"},
        "transformer-postprocess-emb='n'": {"transformer-postprocess-emb": "n"},
        "transformer-preprocess, .* cannot": {"transformer-preprocess": "n"},
        "right-left=True cannot": {"right-left": True},
        "transformer-pool=True cannot": {"transformer-pool": True},
        "has the shape": {"transformer-dim-ffn": 25},
    }
    for i, (message, changes) in enumerate(settings.items()):
        folder = write_npz(tmp_path / f"marian-{i}", 0, settings=changes)
        refused(folder, message, capsys)
    bomb = "a: &a [x, x]\n" + "".join(
        f"{y}: &{y} [*{x}, *{x}]\n" for x, y in pairwise(ascii_lowercase)
    )
    (folder / "decoder.yml").write_text(f"{bomb}models: *z\n")
    refused(folder, r"decoder.yml: models=\[\[\[.* cannot be imported", capsys)
    (folder / "decoder.yml").unlink()
    for old, new in (("src.vocab.yml", "vocab.en.yml"), ("tgt.vocab.yml", "vocab.de.yml")):
        (folder / old).rename(folder / new)
    refused(folder, "to the source is unknown; .* vocabs: .vocab.de.yml, vocab.en.yml.", capsys)
    with zipfile.ZipFile(folder / "model.npz", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.npy", bytes(10_000_000))
    refused(folder, "unpacks to 10,0.* bytes", capsys)
    (folder / "model.npz").rename(folder / "model.bin")
    refused(folder, r"binary format", capsys)
    np.savez(folder / "model.npz", x=np.array([Bomb(tmp_path / "trace")], dtype=object))
    refused(folder, "is no .npz of numbers", capsys)
    with zipfile.ZipFile(folder / "model.npz", "w") as archive:
        archive.writestr("../../escaped.npy", b"x")
    refused(folder, "is no .npz of numbers|lacks special", capsys)
    assert not list(tmp_path.parent.glob("escaped*"))
    onmt = write_opennmt(tmp_path / "onmt", 0, version=3, is_shared=True)
    fairseq = write_fairseq(tmp_path / "fairseq", 0, is_pre_norm=True, is_tied=True)
    for folder, key, message, changes in (
        (onmt, "opt", "max_relative_positions=20", {"max_relative_positions": 20}),
        (onmt, "opt", "encoder_type='rnn'", {"encoder_type": "rnn"}),
        (fairseq, "args", "layernorm_embedding=True", {"layernorm_embedding": True}),
        (fairseq, "args", "decoder_learned_pos=True", {"decoder_learned_pos": True}),
        (fairseq, "args", "encoder_langtok='src'", {"encoder_langtok": "src"}),
        (fairseq, "args", "decoder_langtok=True", {"decoder_langtok": True}),
    ):
        (path,) = folder.glob("*.pt")
        whole = path.read_bytes()
        content = torch.load(path, weights_only=False)
        content[key] = argparse.Namespace(**vars(content[key]) | changes)
        torch.save(content, path)
        refused(folder, message, capsys)
        torch.save(content | {"extra": Bomb(tmp_path / "trace")}, path)
        refused(folder, "wants to load .*system", capsys)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            original = zipfile.ZipFile(io.BytesIO(whole))
            for name in original.namelist():
                archive.writestr(name, original.read(name))
        refused(folder, "compressed", capsys)
        path.write_bytes(whole[: len(whole) // 2])
        refused(folder, "cannot be read", capsys)
        path.write_bytes(whole)


@pytest.mark.slow
def test_the_input_has_to_be_a_model_and_the_output_must_not_be_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(tmp_path / "absent", "does not exist", capsys)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no known model", capsys)
    folder = write_marian(tmp_path / "whole", 0, MARIAN["relu, no bias"])
    before = sorted(path.name for path in folder.iterdir())
    for kind in ("auto", "huggingface"):  # a file of the folder stands for it
        given = [f"input={folder / 'config.json'}", f"format={kind}"]
        assert command("import", *given, f"output={tmp_path / kind}") == 0
    assert command("import", f"input={folder}", f"output={folder}") == 2
    assert "exists and holds no config.json of nmt" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == before
    assert command("import") == 2
