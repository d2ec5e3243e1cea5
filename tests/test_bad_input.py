"""A mistake of the user ends a command with one line, which names the value and the remedy, with
exit status 2, and with no file left behind.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy import command, train, write_corpus

from nmt.runtime.manifest import MANIFEST

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    assert command("preprocess", write_corpus(folder), "num_threads=1") == 0
    assert train(folder / "data", folder / "run", "max_updates=4") == 0
    return folder


LOG_LINE = re.compile(r"\d\d:\d\d:\d\d ")
Refused = Callable[..., str]


@pytest.fixture
def assert_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Run a command that must fail as the user's mistake, and check its one line."""

    def check(expected: list[str], name: str, *arguments: str | list[str]) -> str:
        files = sorted(tmp_path.rglob("*"))
        capfd.readouterr()
        assert command(name, arguments) == 2, arguments
        output = capfd.readouterr()
        lines = output.err.rstrip("\n").split("\n")
        (line,) = [line for line in lines if line and not LOG_LINE.match(line)]
        assert line == lines[-1]
        assert line.startswith(f"nmt-{name}: ")
        assert output.out == ""
        for text in expected:
            assert text in line
        assert sorted(tmp_path.rglob("*")) == files
        return line

    return check


def preprocess_arguments(root: Path, folder: Path, changes: dict[str, Any]) -> list[str]:
    """Return the arguments that `changes` change; None leaves one out."""
    arguments: dict[str, Any] = dict(a.split("=", 1) for a in write_corpus(root))
    arguments["data_dir"] = folder / "deep/data"
    settings = {**arguments, "num_threads": 1, **changes}.items()
    return [f"{key}={value}" for key, value in settings if value is not None]


def test_mistakes_in_preprocessing_are_one_line(
    root: Path, tmp_path: Path, assert_refused: Refused
) -> None:
    for name, content in {
        "wide": ("ja\n" * 200).encode("utf-16"),
        "packed": gzip.compress(b"ja\n" * 200),
        "short.de": b"eins\nzwei\n",
        "empty": b"",
        "latin": b"ja\n" * 7 + "grün\n".encode("latin-1") + b"ja\n" * 192,
    }.items():
        (tmp_path / name).write_bytes(content)
    empty = tmp_path / "empty"
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear", encoding="utf-8")
    with_run = shutil.copytree(root / "data", tmp_path / "with_run")
    (with_run / "run").mkdir()
    for changes, *expected in [
        ({"data.valid.tgt": "no/such.de"}, "no/such.de does not exist", "give"),
        ({"data.train.tgt": tmp_path / "short.de"}, "200 lines", "short.de 2", "again"),
        ({"data.train.src": empty, "data.train.tgt": empty}, "empty"),
        ({"data.valid.src": empty, "data.valid.tgt": empty}, "valid", "empty"),
        ({"data.valid.src": None, "data.valid.tgt": None}, "data.valid.src=FILE"),
        ({"data.train.src": tmp_path / "latin"}, "latin:8", "byte 3", "0xfc", "iconv"),
        ({"data.train.src": tmp_path / "wide"}, "wide is UTF-16", "iconv -f utf-16"),
        ({"data.train.src": tmp_path / "packed"}, "packed is a gzip file", "packed.gz"),
        ({"max_length": 2}, "all 200", "too long", "look at the input or max_length"),
        (
            {"data.train.tgt": root / "train.src.txt", "filter.identical": True},
            "all 200",
            "or filter.identical",
        ),
        ({"data_dir": home}, "home exists", "choose another"),
        ({"data_dir": with_run}, "with_run/run would be lost", "move it"),
    ]:
        assert_refused(expected, "preprocess", preprocess_arguments(root, tmp_path, changes))
    contents = {path: path.read_bytes() for path in (root / "data").iterdir()}
    changes = {"data.train.src": "no/such", "data_dir": root / "data"}
    assert_refused(["no/such"], "preprocess", preprocess_arguments(root, root, changes))
    assert {path: path.read_bytes() for path in (root / "data").iterdir()} == contents


def test_impossible_settings_are_one_line(assert_refused: Refused) -> None:
    for name, argument, *expected in [
        ("evaluate", "references=r", "hypotheses=FILE"),
        ("evaluate", "hypotheses=h", "references"),
        ("evaluate", "hypotheses=h references=r src=s", "src=s: does nothing without model_dir"),
        ("evaluate", "hypotheses=h references=r split=valid", "split=valid: does nothing without"),
        ("evaluate", "hypotheses=h references=r src_lang=e", "src_lang=e: does nothing without"),
        ("evaluate", "model_dir=m data_dir=d references=r", "references=r: needs src=FILE"),
        ("evaluate", "model_dir=m data_dir=d src_lang=en", "src_lang=en: needs src=FILE"),
        (
            "evaluate",
            "model_dir=m src=s references=r split=valid",
            "split=valid: is a set of data_dir",
        ),
        (
            "evaluate",
            "hypotheses=- references=[r,-]",
            "only one of hypotheses, baseline, src and references can be - (stdin)",
        ),
        ("export", "model_dir=absent", "absent does not exist"),
    ]:
        assert_refused(expected, name, argument.split())
    marian = ["format=huggingface", "quantization=int8"]
    assert_refused(["quantization=int8: format=huggingface"], "export", marian)


def test_mistakes_in_training_are_one_line(
    root: Path, tmp_path: Path, assert_refused: Refused, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("text", encoding="utf-8")
    meta = json.loads((root / "data/meta.json").read_text(encoding="utf-8"))
    newer = json.dumps({**meta, "format_version": 99}).encode()
    arrow = (root / "data/train-00000.arrow").read_bytes()[:700]
    run = tmp_path / "run"
    data = root / "data"
    for data_dir, run_dir, setting, *expected in [
        (tmp_path / "none", run, "", "none does not exist", "preprocess data.train.src=FILE"),
        (tmp_path, run, "", "is not a data folder", "preprocess data.train.src=FILE"),
        (("meta.json", newer), run, "", "format_version 99", "update nmt"),
        (("meta.json", b"{"), run, "", "meta.json is damaged"),
        (("train-00000.arrow", arrow), run, "", "train-00000.arrow is damaged", "nmt-preprocess"),
        (("valid.tgt", None), run, "", "valid.tgt is missing"),
        (data, tmp_path / "text", "", str(tmp_path / "text")),
        (data, data, "", "is a data folder; choose another run_dir"),
        (data, run, "max_tokens=3", "max_tokens=3", "longest sentence"),
        (data, run, "device=cuda:77", "device=cuda:77", "device=cpu"),
        (data, root / "run", "seed=5", "seed was 1, is 5"),
        (data, run, "device=gpu", "device=gpu", "auto, cpu, cuda"),
    ]:
        if isinstance(data_dir, tuple):  # a file that has another content, or is gone
            file, content = data_dir
            data_dir = tmp_path / f"{file}-{len(content or b'')}"
            shutil.copytree(root / "data", data_dir)
            (data_dir / MANIFEST).unlink()  # damage that was there when it was made
            (data_dir / file).unlink()
            if content is not None:
                (data_dir / file).write_bytes(content)
        folders = [f"data_dir={data_dir}", f"run_dir={run_dir}", *setting.split()]
        assert_refused(expected, "train", folders)
    wild = ["optimizer.schedule=cosine", "optimizer.peak_learning_rate=1e7", "max_updates=20"]
    assert train(data, run, wild) == 2
    assert "not finite" in capfd.readouterr().err


def test_damaged_models_and_other_folders_are_one_line(
    root: Path, tmp_path: Path, assert_refused: Refused
) -> None:
    for name, argument, expected in [
        ("translate", "model_dir={}", "is not a model folder"),
        ("translate", "model_dir={}/none", "does not exist"),
        ("average", "run_dir={}", "is not a run folder"),
        ("average", "run_dir={}/none", "does not exist"),
    ]:
        assert_refused([expected], name, argument.format(tmp_path))
    source = (root / "run/checkpoints/latest").resolve()
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = (source / "model.safetensors").read_bytes()
    wide = {**content, "model": {**content["model"], "d_ff": 64}}
    newer = {**content, "format_version": 99}
    for file, new_content, *expected in [
        ("config.json", json.dumps(newer).encode(), "version 99", "update"),
        ("config.json", json.dumps(wide).encode(), "do not fit"),
        ("config.json", b"{", "config.json", "copy"),
        ("tokenizer.model", b"nonsense", "tokenizer.model"),
        ("model.safetensors", weights[:1000], "model.safetensors is damaged"),
    ]:
        model = tmp_path / f"{file}-{len(new_content)}"
        shutil.copytree(source, model)
        (model / MANIFEST).unlink()
        (model / file).write_bytes(new_content)
        assert_refused(expected, "translate", f"model_dir={model}")
    output = f"output={tmp_path / 'average'}"
    assert_refused(["is damaged"], "average", f"checkpoints=[{model}]", output)
    shutil.copytree(root / "run", tmp_path / "run", symlinks=True)
    (tmp_path / "run/config.yaml").write_text("seed: [", encoding="utf-8")
    assert_refused(
        ["config.yaml is damaged; if you changed it"], "average", f"run_dir={tmp_path / 'run'}"
    )
    (tmp_path / "run" / MANIFEST).unlink()
    assert_refused(["config.yaml is not a config"], "average", f"run_dir={tmp_path / 'run'}")


def test_mistakes_in_translation_are_one_line(
    root: Path, tmp_path: Path, assert_refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h").write_text("a\nb\n", encoding="utf-8")
    model = f"model_dir={root / 'run'}"
    out = f"output={tmp_path / 'out'}"
    lines = f"input={tmp_path / 'h'}"
    for arguments, *expected in [
        (["n_best=9", "format=json"], "n_best=9", "beam_size=4"),
        ([lines, f"output={tmp_path / 'no/out.de'}"], "does not exist"),
        ([lines, f"output={tmp_path}"], "is a folder"),
        (["input=nothing.en", out], "nothing.en does not exist"),
        (["device=cuda:77"], "device=cuda:77"),
    ]:
        assert_refused(expected, "translate", model, arguments)
    monkeypatch.setattr("sys.stdin", None)
    assert_refused(["stdin is closed"], "translate", model)
    assert_refused(["stdin is closed"], "visualize", model, "what=attention")


def test_an_average_replaces_neither_foreign_folders_nor_checkpoints(
    root: Path, tmp_path: Path, assert_refused: Refused
) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}', encoding="utf-8")
    (tmp_path / "precious.txt").write_text("keep", encoding="utf-8")
    folders = [f"run_dir={root / 'run'}", f"output={tmp_path}"]
    assert_refused(["choose another folder"], "average", folders)
    folder = (root / "run/checkpoints/latest").resolve()
    arguments = [f"checkpoints=[{folder}]", f"output={folder}"]
    assert_refused(["is a checkpoint of a run"], "average", arguments)
