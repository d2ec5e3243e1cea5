"""nmt-export: what it reads, writes and refuses, and what is known before training."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import resource
import sys
from enum import Enum
from pathlib import Path

import pytest
from exporting import exported, random_model
from test_backend_ctranslate2 import load, log_probs
from tiny import sentences, tiny_config
from toy import command, train
from variants import MODERN, OWN, VARIANTS

from nmt.average import average
from nmt.checkpoint import load_export_info, load_info
from nmt.config import (
    ExportConfig,
    ExportFormat,
    ModelConfig,
    Norm,
    Positions,
    Quantization,
    option,
)
from nmt.data.tokenizer import MappedTokenizer, SeparateTokenizers, Tokenizer, Vocabulary
from nmt.errors import ConfigError, ModelError, NmtError
from nmt.export.folder import SUPPORTED, announce, check_exportable, export
from nmt.runtime.manifest import write_manifest


@pytest.fixture
def model(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return random_model(tmp_path / "model", tokenizer)


@pytest.mark.slow
def test_what_check_exportable_returns_is_what_export_does(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    settings = {field.name for field in dataclasses.fields(ModelConfig)}
    for table in SUPPORTED.values():
        assert {s for s in settings - set(table) if "dropout" not in s} <= {"source_eos"}
    layouts = [{"norm": norm, "positions": p} for norm in Norm for p in Positions if p.is_added]
    for i, changes in enumerate([*layouts, *OWN.values()]):
        place = tmp_path / str(i)
        folder = random_model(place / "model", tokenizer, **changes)
        reasons = check_exportable(dataclasses.replace(load_info(folder).model, dropout=0.3))
        assert not reasons[ExportFormat.ctranslate2], changes
        for name in ExportFormat:
            if why := reasons[name]:
                with pytest.raises(ConfigError, match=re.escape(" and ".join(why))):
                    export(folder, place / name.value, ExportConfig(format=name))
                assert not (place / name.value).exists()
            else:
                export(folder, place / name.value, ExportConfig(format=name))
                assert load_export_info(place / name.value)[1].format is name
    refused = check_exportable(tiny_config(**MODERN))[ExportFormat.huggingface]
    assert refused == [
        "model.num_kv_heads=2 (only null)",
        "model.qk_norm=true (only false)",
        "model.norm_layer=rms (only layer)",
        "model.positions=rotary (only sinusoidal, sinusoidal_concat, sinusoidal_halves, learned)",
        "model.activation=swiglu (only relu, gelu, silu)",
    ]


def test_models_and_vocabularies_of_their_own_kind_score_alike_in_ctranslate2(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """All are compared in tests/test_exported.py."""
    pieces = tokenizer.all_pieces()
    control = [pieces[i] for i in tokenizer.control_ids]
    sides = SeparateTokenizers(
        *(
            MappedTokenizer(tokenizer.model, Vocabulary(names, *map(names.index, control)), ())
            for names in (pieces, pieces[::-1])
        )
    )
    rows = [[7, *ids] for ids in tokenizer.encode_batch(sentences(4))]
    cases = {"separate": {}, "learned": VARIANTS["learned"], "alibi": VARIANTS["alibi"]}
    for name, shape in cases.items():
        model = random_model(tmp_path / name, sides if name == "separate" else tokenizer, **shape)
        native, other, _ = load(model)
        found = [log_probs(engine, rows, rows[::-1]) for engine in (native, other)]
        for ours, theirs in zip(*found, strict=True):
            assert theirs == pytest.approx(ours, abs=1e-4), name
    with pytest.raises(ModelError, match="use format=ctranslate2"):  # control symbols elsewhere
        exported(tmp_path / "separate", ExportFormat.huggingface)


class _Gate(str, Enum):
    none = "none"
    swiglu = "swiglu"


@dataclasses.dataclass(kw_only=True)
class _Future(ModelConfig):
    """A later architecture, with settings that no table knows."""

    gate: _Gate = option(_Gate.none, "of the feed-forward layers")
    relu_dropout: float = option(0.0, "inside the feed-forward layers")


def test_training_logs_what_can_be_exported_and_refuses_what_ctranslate2_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert not any(check_exportable(_Future(relu_dropout=0.1)).values())
    config = _Future(gate=_Gate.swiglu)
    with pytest.raises(ConfigError, match=r"^model\.gate=swiglu .* set exportable=false"):
        announce(config, required=True)
    with caplog.at_level(logging.INFO, logger="nmt"):
        announce(config, required=False)
        announce(tiny_config(norm=Norm.pre), required=True)
    assert caplog.messages == [
        "export to ctranslate2: no, model.gate=swiglu (only none)",
        "export to huggingface: no, model.gate=swiglu (only none)",
        "export to argos: no, model.gate=swiglu (only none)",
        "export to ctranslate2: yes",
        "export to huggingface: yes",
        "export to argos: yes",
    ]
    assert train(tmp_path / "absent", tmp_path / "run", "model.norm=pre") == 2
    assert "export to huggingface: yes" in capsys.readouterr().err


def test_the_folder_describes_itself_and_is_no_model_folder(model: Path, tmp_path: Path) -> None:
    for name in ExportFormat:
        output = exported(model, name, quantization=Quantization.float16, max_positions=100)
        info, made = load_export_info(output)
        assert info == load_info(model)
        assert (made.format, made.quantization, made.max_positions) == (name, "float16", 100)
        assert (output / "tokenizer.model").read_bytes() == (model / "tokenizer.model").read_bytes()
        assert name.value in (output / "README.md").read_text("utf-8")
        what = r"is an export \(nmt-export\); give the model .* use nmt-translate"
        with pytest.raises(ModelError, match=what):
            load_info(output)
    with pytest.raises(ModelError, match="make one with nmt-export"):
        load_export_info(model)
    with pytest.raises(ModelError, match="does not exist"):
        load_export_info(tmp_path / "absent")
    marker = json.loads((output / "nmt.json").read_text("utf-8"))
    (output / "nmt.json").write_text(json.dumps(marker | {"format_version": 99}), encoding="utf-8")
    write_manifest(output)
    with pytest.raises(ModelError, match="format_version 99"):
        load_export_info(output)


def test_an_export_may_replace_an_export_and_nothing_else_and_leaves_nothing_when_it_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = exported(model, ExportFormat.ctranslate2)
    export(model, output, ExportConfig(format=ExportFormat.huggingface))
    assert not (output / "model.bin").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear", encoding="utf-8")
    for folder in (tmp_path / "mine", model):
        before = sorted(folder.iterdir())
        with pytest.raises(NmtError, match=r"exists and holds no nmt\.json of nmt"):
            export(model, folder, ExportConfig())
        assert sorted(folder.iterdir()) == before
    monkeypatch.setitem(sys.modules, "ctranslate2.specs", None)  # importing it is an error
    with pytest.raises(NmtError, match=r"needs CTranslate2; pip install nmt\[export\]$"):
        export(model, tmp_path / "new" / "exported", ExportConfig())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ExportFormat)
def test_a_disk_without_room_for_the_weights_is_one_line(
    name: ExportFormat, model: Path, tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(NmtError, match=r"out cannot be written: .*; nothing was changed$"):
            export(model, tmp_path / "out", ExportConfig(format=name))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob("*out*"))


def test_the_command_exports_an_average_as_well_as_a_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    average([model, model], run / "average")
    arguments = [f"model_dir={run}", f"output={tmp_path / 'out'}", "quantization=int8"]
    arguments.append("max_positions=64")
    assert command("export", *arguments) == 0
    assert "ctranslate2, int8" in capsys.readouterr().err
    whole = exported(run / "average", ExportFormat.ctranslate2, max_positions=64)
    sizes = [(folder / "model.bin").stat().st_size for folder in (tmp_path / "out", whole)]
    assert sizes[0] < 0.6 * sizes[1]
    monkeypatch.chdir(run / "average")
    assert command("export", "model_dir=.") == 0
    assert (run / "average-ctranslate2-float32/model.bin").is_file()
