"""nmt-export: the files that it reads and writes, and the settings that it refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exporting import exported, random_model
from safetensors.torch import load_file
from serving import change_config
from tiny import sentences, tiny_config, tokenizer_config
from toy import command
from variants import MODERN, OWN

from nmt.average import average
from nmt.checkpoint import ExportInfo, load_export_info, load_info
from nmt.config import (
    ExportConfig,
    ExportFormat,
    ModelConfig,
    Norm,
    Positions,
    Quantization,
    option,
)
from nmt.data.tokenizer import Tokenizer, TokenizerPair
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ConfigError, ModelError, NmtError
from nmt.export.ctranslate2 import build_spec
from nmt.export.export_model import (
    SUPPORTED,
    describe_exports,
    export_model,
    find_unsupported,
)
from nmt.runtime.manifest import write_manifest

LIBRARIES = [ExportFormat.ctranslate2, ExportFormat.huggingface, ExportFormat.argos]
"""The formats that limit the architecture and take float16; tests/test_onnx.py is about ONNX."""


@dataclasses.dataclass(kw_only=True)
class LaterConfig(ModelConfig):
    """A later architecture, with settings that no table of a format has."""

    gate: bool = option(False, "of the feed-forward layers")
    relu_dropout: float = option(0.0, "inside the feed-forward layers")


@pytest.fixture
def model(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return random_model(tmp_path / "model", tokenizer)


@pytest.mark.slow
def test_an_export_refuses_exactly_the_settings_that_the_table_of_its_format_lacks(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    settings = {field.name for field in dataclasses.fields(ModelConfig)}
    for table in SUPPORTED.values():
        missing = {name for name in settings - set(table) if "dropout" not in name}
        assert missing <= {"source_eos", "head_size"}
    layouts = [
        {"norm": norm, "positions": p}
        for norm in Norm
        for p in Positions
        if p.is_added_to_embeddings
    ]
    for i, changes in enumerate([*layouts, *OWN.values()]):
        model_dir = random_model(tmp_path / str(i) / "model", tokenizer, **changes)
        model = dataclasses.replace(load_info(model_dir).model, dropout=0.3)
        assert not find_unsupported(model, ExportFormat.ctranslate2), changes
        for export_format in LIBRARIES:
            output = tmp_path / str(i) / export_format.value
            config = ExportConfig(format=export_format)
            unsupported = find_unsupported(model, export_format)
            if unsupported:
                with pytest.raises(ConfigError, match=re.escape(" and ".join(unsupported))):
                    export_model(model_dir, output, config)
                assert not output.exists()
            else:
                export_model(model_dir, output, config)
                assert load_export_info(output)[1].format is export_format


def test_a_setting_that_a_format_cannot_hold_is_named_with_the_valid_values() -> None:
    assert find_unsupported(tiny_config(**MODERN), ExportFormat.huggingface) == [
        "model.num_kv_heads=2 (only null)",
        "model.qk_norm=true (only false)",
        "model.norm_layer=rms (only layer)",
        "model.positions=rotary (only sinusoidal, sinusoidal_concat, sinusoidal_halves, learned)",
        "model.activation=swiglu (only relu, gelu, silu)",
    ]
    for export_format in LIBRARIES:
        [unsupported] = find_unsupported(tiny_config(head_size=6), export_format)
        assert unsupported == "model.head_size=6 (only null)"
        assert not find_unsupported(tiny_config(head_size=4), export_format)
    later = LaterConfig(relu_dropout=0.1)
    assert describe_exports(later).count("yes") == len(ExportFormat)
    later.gate = True
    for export_format in ExportFormat:
        assert find_unsupported(later, export_format) == ["model.gate=true (only false)"]
    assert describe_exports(tiny_config(qk_norm=True)).splitlines() == [
        "export to ctranslate2: yes",
        "export to huggingface: no, model.qk_norm=true (only false)",
        "export to argos: yes",
        "export to onnx: yes",
        "export to marian: no, model.qk_norm=true (only false)",
        "export to web: yes",
        "export to bergamot: no, model.qk_norm=true (only false)",
    ]


def test_separate_vocabularies_of_one_size_keep_their_embeddings_in_ctranslate2(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    pytest.importorskip("ctranslate2")
    other = train_tokenizer(sentences(200, seed=1), tokenizer_config())
    assert other.vocab_size == tokenizer.vocab_size
    pair = TokenizerPair(other, tokenizer)
    folder = random_model(tmp_path / "separate", pair)
    weights = load_file(folder / "model.safetensors")
    spec = build_spec(load_info(folder), weights, pair, max_positions=20)
    source_embedding = spec.encoder.embeddings[0].weight.numpy()
    assert np.array_equal(source_embedding, weights["src_embedding.weight"])
    assert np.array_equal(spec.decoder.embeddings.weight.numpy(), weights["embedding.weight"])


def test_a_package_of_argos_has_the_names_of_its_languages(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = random_model(tmp_path / "model", tokenizer)
    change_config(folder, src_lang="en", tgt_lang="pt-BR")
    [package] = exported(folder, ExportFormat.argos).glob("*.argosmodel")
    with zipfile.ZipFile(package) as archive:
        metadata = json.loads(archive.read(f"{package.stem}/metadata.json"))
    assert (metadata["from_code"], metadata["from_name"]) == ("en", "English")
    assert (metadata["to_code"], metadata["to_name"]) == ("pt-BR", "Portuguese (Brazil)")


def test_the_folder_describes_itself_and_is_no_model_folder(model: Path, tmp_path: Path) -> None:
    for name in LIBRARIES:
        output = exported(model, name, quantization=Quantization.float16, max_positions=100)
        info, export_info = load_export_info(output)
        assert info == load_info(model)
        assert export_info == ExportInfo(name, Quantization.float16, max_positions=100)
        assert (output / "tokenizer.model").read_bytes() == (model / "tokenizer.model").read_bytes()
        assert name.value in (output / "README.md").read_text("utf-8")
        with pytest.raises(ModelError, match=r"is an export .*; give the model .* nmt-translate"):
            load_info(output)
    marker = json.loads((output / "nmt.json").read_text("utf-8"))
    (output / "nmt.json").write_text(json.dumps(marker | {"format_version": 99}), encoding="utf-8")
    write_manifest(output)
    with pytest.raises(ModelError, match="format_version 99"):
        load_export_info(output)


def test_an_export_may_replace_an_export_and_nothing_else_and_leaves_nothing_when_it_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = exported(model, ExportFormat.ctranslate2)
    export_model(model, output, ExportConfig(format=ExportFormat.huggingface))
    assert not (output / "model.bin").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear", encoding="utf-8")
    for folder in (tmp_path / "mine", model):
        files = sorted(folder.iterdir())
        with pytest.raises(NmtError, match=r"exists and has no nmt\.json of nmt"):
            export_model(model, folder, ExportConfig())
        assert sorted(folder.iterdir()) == files
    monkeypatch.setitem(sys.modules, "ctranslate2.specs", None)  # importing it is an error
    with pytest.raises(NmtError, match=r"needs CTranslate2; pip install nmt\[export\]$"):
        export_model(model, tmp_path / "new" / "exported", ExportConfig())
    assert not (tmp_path / "new").exists()


has_onnx = importlib.util.find_spec("onnxruntime") is not None
needs_onnx = pytest.mark.skipif(not has_onnx, reason="needs nmt[onnx]")


@pytest.mark.parametrize("name", [*LIBRARIES, pytest.param(ExportFormat.onnx, marks=needs_onnx)])
def test_a_disk_without_room_for_the_weights_is_one_line(
    name: ExportFormat, model: Path, tmp_path: Path, limit_files: Callable[[int], None]
) -> None:
    limit_files(10_000)
    with pytest.raises(NmtError, match=r"out cannot be written: .*; nothing was changed$"):
        export_model(model, tmp_path / "out", ExportConfig(format=name))
    assert not list(tmp_path.glob("*out*"))


def test_the_command_exports_an_average_as_well_as_a_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    average([model, model], run / "average")
    output = tmp_path / "out"
    settings = [f"output={output}", "quantization=int8", "max_positions=64"]
    assert command("export", f"model_dir={run}", settings) == 0
    assert "ctranslate2, int8" in capsys.readouterr().err
    float32 = exported(run / "average", ExportFormat.ctranslate2, max_positions=64)
    size = (output / "model.bin").stat().st_size
    assert size < 0.6 * (float32 / "model.bin").stat().st_size
    monkeypatch.chdir(run / "average")
    assert command("export", "model_dir=.") == 0
    assert (run / "average-ctranslate2-float32/model.bin").is_file()
