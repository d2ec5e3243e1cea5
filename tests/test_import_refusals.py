"""nmt-import refuses unsupported or damaged models in one line, writes nothing and runs no code."""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
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
from test_import_huggingface import (
    M2M100,
    MARIAN,
    read_json,
    write_json,
    write_m2m100,
    write_marian,
)
from test_import_toolkits import write_fairseq, write_opennmt
from test_import_toolkits import write_marian as write_npz
from toy import command

from nmt.checkpoint import load_info
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
        content = read_json(folder / name) | changes
        content = {key: value for key, value in content.items() if value is not None}
        write_json(folder / name, content)

    return damage


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the weights."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return damage


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def pickled(make: Callable[[Path], Any]) -> Damage:
    """Replace the safe weights by a pickle."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(make(folder.with_name("trace")), folder / "pytorch_model.bin")

    return damage


def edit_ids(change: Callable[[dict[str, int]], object]) -> Damage:
    """Change the ids of the vocabulary."""

    def damage(folder: Path) -> None:
        ids = read_json(folder / "vocab.json")
        change(ids)
        write_json(folder / "vocab.json", ids)

    return damage


def remove_middle(ids: dict[str, int]) -> None:
    ids.pop(next(piece for piece, i in ids.items() if i == 7))


def nested(depth: int) -> list[Any]:
    """Return a list in a list in a list, `depth` levels."""
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
    "lacks encoder.layers.0.fc1.weight": edit_weights(lambda weights: weights.pop(LAYER)),
    "holds 1 tensors .* encoder.extra": edit_weights(
        lambda weights: weights.update({"model.encoder.extra": torch.zeros(2)})
    ),
    "is int8; quantized": edit_weights(
        lambda weights: weights.update({LAYER: weights[LAYER].char()})
    ),
    "learned positions": edit_weights(
        lambda weights: weights.update({"model.encoder.embed_positions.weight": torch.ones(9, 14)})
    ),
    "not the embedding, though": edit_weights(
        lambda weights: weights.update({"lm_head.weight": torch.ones(5, 14)})
    ),
    "model.safetensors is damaged": write("model.safetensors", b"\x08\0\0\0\0\0\0\0{}      "[:12]),
    "holds neither": lambda folder: (folder / "model.safetensors").unlink(),
    "the vocabulary has a hole": edit_ids(remove_middle),
    "which is taken or no row": edit_ids(lambda ids: ids.update({"extra": 10_000})),
    "the id 7": edit_ids(lambda ids: ids.update({"extra": 7})),
    "lacks the control symbol '<unk>'": edit_ids(lambda ids: ids.update({"x": ids.pop("<unk>")})),
    "vocab.json is not a JSON object": write("vocab.json", b"{"),
    "is not a SentencePiece model": write("source.spm", b"hello"),
    "holds no SentencePiece model": lambda folder: (folder / "target.spm").unlink(),
    "wants to load .*system": pickled(Bomb),
    "no dictionary": pickled(lambda trace: [1, 2]),
    "something else than weights": pickled(lambda trace: {"a": 1}),
    "TypeError: expected string": pickled(lambda trace: {1: torch.zeros(2)}),
    "fc1.weight holds numbers that are not finite": edit_weights(
        lambda weights: weights[LAYER].fill_(NAN)
    ),
    "is not text": edit_ids(lambda ids: ids.update({"\ud800": ids.pop("the", 7)})),
    "unk_token=.'<unk>'. cannot be imported": edit("tokenizer_config.json", unk_token=["<unk>"]),
    "ValueError: invalid literal": edit("tokenizer_config.json", added_tokens_decoder={"x": {}}),
    r"model_type=\[\[\[\[.*\.\.\..* cannot": edit("config.json", model_type=nested(200)),
}


def refuse(folder: Path, message: str, capsys: pytest.CaptureFixture[str], *settings: str) -> None:
    """Import `folder` and expect one line that matches, and nothing written."""
    output = folder.parent / "new" / "output"
    assert command("import", f"input={folder}", f"output={output}", settings) == 2, message
    lines = capsys.readouterr().err.strip().split("\n")
    assert re.search(message, lines[-1]), (message, lines)
    assert "Traceback" not in "".join(lines), message
    assert not output.parent.exists(), message
    assert not (folder.parent / "trace").exists(), message


def test_folders_of_transformers_that_do_not_fit_are_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    shape = {"d_model": 14, "d_ff": 9, "num_heads": 7, "num_decoder_layers": 1}
    model = random_model(tmp_path / "model", tokenizer, **shape)
    valid = exported(model, ExportFormat.huggingface, max_positions=64)
    imported(valid)
    names = {path.name for path in tmp_path.iterdir()}
    for i, (message, damage) in enumerate(HUGGINGFACE.items()):
        folder = tmp_path / f"damaged-{i}"
        shutil.copytree(valid, folder)
        damage(folder)
        with pytest.raises(ModelError, match=message) as error:
            imported(folder)
        assert "\n" not in str(error.value)
        names.add(folder.name)
    assert {path.name for path in tmp_path.iterdir()} == names  # nothing written, no code run


@pytest.mark.slow
def test_a_language_that_the_model_lacks_is_refused_with_similar_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_m2m100(tmp_path / "m2m", 0, M2M100["m2m"])
    refuse(folder, "tgt_lang=frr: did you mean .*fr", capsys, "tgt_lang=frr")


@pytest.mark.slow
def test_files_of_marian_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "transformer-decoder-autoreg='average-attention' cannot": {
            "transformer-decoder-autoreg": "average-attention"
        },
        "lacks decoder.layers.0.ssru": {"transformer-decoder-autoreg": "rnn"},
        "transformer-train-position-embeddings=True": {
            "transformer-train-position-embeddings": True
        },
        "transformer-ffn-activation='gelu'": {"transformer-ffn-activation": "gelu"},
        "transformer-postprocess-emb='n'": {"transformer-postprocess-emb": "n"},
        "transformer-preprocess, .* cannot": {"transformer-preprocess": "n"},
        "right-left=True cannot": {"right-left": True},
        "transformer-pool=True cannot": {"transformer-pool": True},
        "transformer-attention-mask='alibi' cannot": {"transformer-attention-mask": "alibi"},
        "transformer-alibi-shift=True cannot": {"transformer-alibi-shift": True},
        "transformer-disable-position-embeddings=True cannot": {
            "transformer-disable-position-embeddings": True
        },
        "transformer-no-bias=True cannot": {"transformer-no-bias": True},
        "lacks the matrix encoder.embed_positions.weight": {
            "type": "transformer-new",
            "transformer-train-position-embeddings": True,
        },
        "has the shape": {"transformer-dim-ffn": 25},
    }
    for i, (message, changes) in enumerate(settings.items()):
        folder = write_npz(tmp_path / f"marian-{i}", 0, settings=changes)
        refuse(folder, message, capsys)
    bomb = "a: &a [x, x]\n" + "".join(
        f"{y}: &{y} [*{x}, *{x}]\n" for x, y in pairwise(ascii_lowercase)
    )
    (folder / "decoder.yml").write_text(f"{bomb}models: *z\n")
    refuse(folder, "decoder.yml: the settings are not YAML", capsys)
    (folder / "decoder.yml").unlink()
    for old, new in (("src.vocab.yml", "vocab.en.yml"), ("tgt.vocab.yml", "vocab.de.yml")):
        (folder / old).rename(folder / new)
    refuse(folder, "to the source is unknown; .* vocabs: .vocab.de.yml, vocab.en.yml.", capsys)
    (folder / "best.npz").touch()
    refuse(folder, "holds best.npz, model.npz; give input=FILE", capsys)
    (folder / "best.npz").unlink()
    with zipfile.ZipFile(folder / "model.npz", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.npy", bytes(10_000_000))
    refuse(folder, "unpacks to 10,0.* bytes", capsys)
    (folder / "model.npz").rename(folder / "model.bin")
    refuse(folder, r"binary format", capsys)
    np.savez(folder / "model.npz", x=np.array([Bomb(tmp_path / "trace")], dtype=object))
    refuse(folder, "is not an .npz of numbers", capsys)
    with zipfile.ZipFile(folder / "model.npz", "w") as archive:
        archive.writestr("../../escaped.npy", b"x")
    refuse(folder, "is not an .npz of numbers|lacks special", capsys)
    assert not list(tmp_path.parent.glob("escaped*"))


@pytest.mark.slow
def test_files_of_opennmt_and_fairseq_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        original = path.read_bytes()
        content = torch.load(path, weights_only=False)
        content[key] = argparse.Namespace(**vars(content[key]) | changes)
        torch.save(content, path)
        refuse(folder, message, capsys)
        torch.save(content | {"extra": Bomb(tmp_path / "trace")}, path)
        refuse(folder, "wants to load .*system", capsys)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            uncompressed = zipfile.ZipFile(io.BytesIO(original))
            for name in uncompressed.namelist():
                archive.writestr(name, uncompressed.read(name))
        refuse(folder, "compressed", capsys)
        path.write_bytes(original[: len(original) // 2])
        refuse(folder, "cannot be read", capsys)
        path.write_bytes(original)


def test_models_of_nmt_and_of_ctranslate2_are_not_imported(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model(tmp_path / "run/average", tokenizer)
    for path in (model, tmp_path / "run"):
        refuse(
            path,
            f"is a model of nmt already; use it, such as in nmt-translate model_dir={path}",
            capsys,
        )
    (tmp_path / "converted").mkdir()
    for name in ("model.bin", "config.json", "shared_vocabulary.json"):
        (tmp_path / "converted" / name).write_text("{}", encoding="utf-8")
    refuse(tmp_path / "converted", "is a model of CTranslate2", capsys)


def test_a_model_that_was_trained_is_not_replaced(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model(tmp_path / "model", tokenizer)
    content = (model / "config.json").read_bytes()
    assert load_info(model).updates > 0
    assert command("import", f"input={tmp_path}", f"output={model}") == 2
    assert "holds a model that was trained for" in capsys.readouterr().err
    assert (model / "config.json").read_bytes() == content


def test_the_next_command_names_the_folder_of_an_imported_model_in_quotes(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model(tmp_path / "model", tokenizer)
    folder = exported(model, ExportFormat.huggingface)
    output = tmp_path / "my model"
    assert command("import", f"input={folder}", f"output={output}") == 0
    next_command = capsys.readouterr().err.splitlines()[-1].partition("next: ")[2]
    assert shlex.split(next_command)[-1] == f"model_dir={output}"


@pytest.mark.slow
def test_the_input_has_to_be_a_model_and_the_output_must_not_be_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(tmp_path / "absent", "does not exist", capsys)
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "holds no known model", capsys)
    folder = write_marian(tmp_path / "valid", 0, MARIAN["relu, no bias"])
    files = sorted(path.name for path in folder.iterdir())
    for toolkit in ("auto", "huggingface"):  # a file of a folder names the folder
        arguments = [f"input={folder / 'config.json'}", f"format={toolkit}"]
        assert command("import", arguments, f"output={tmp_path / toolkit}") == 0
    assert command("import", f"input={folder}", f"output={folder}") == 2
    assert "exists and has no config.json of nmt" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == files
    assert command("import") == 2
