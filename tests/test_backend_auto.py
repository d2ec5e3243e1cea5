"""backend=auto: which engine it takes, and the conversions for CTranslate2 that it keeps."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exporting import random_model
from serving import GOOD, loaded, running, tiny_folder
from tiny import sentences
from toy import command
from translating import run_in_child

from nmt import Translator
from nmt.config import Engine, Quantization, ServeConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError, DamagedError, ModelError, NmtError
from nmt.export.conversion import convert_once
from nmt.serve.models import choose_serve_engine
from nmt.translate.engines.auto_backend import AutoBackend
from nmt.translate.engines.ctranslate2 import CTranslate2Backend, has_vnni
from nmt.translate.engines.native import NativeBackend

LINES = sentences(20)
ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep conversions out of the cache of the user who runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return tiny_folder(tmp_path / "model", tokenizer)


def load(folder: Path, **settings: Any) -> Translator:
    return Translator.load(folder, **{"device": "cpu", "num_threads": 1} | settings)


def conversions(folder: Path) -> list[str]:
    """Return the names in a folder of conversions, without its lock."""
    return sorted(path.name for path in folder.glob("*") if path.name != ".lock")


def test_auto_writes_the_bytes_of_ctranslate2_or_else_of_the_native_engine(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    auto = load(folder)
    fast = load(folder, backend="ctranslate2")
    native = load(folder, backend="native")
    assert isinstance(auto.backend, AutoBackend)
    assert isinstance(fast.backend, CTranslate2Backend)
    for options in ({}, {"beam_size": 1}, {"min_length": 3}, {"alignment": True}):
        assert auto.n_best(LINES, **options) == fast.n_best(LINES, **options)  # type: ignore[arg-type]
    assert "native, since" not in caplog.text
    for options in ({"coverage_penalty": 0.2}, {"word_reward": 0.5}, {"sampling": True}):
        assert auto.n_best(LINES, **options) == native.n_best(LINES, **options)  # type: ignore[arg-type]
    assert caplog.text.count("native, since coverage_penalty=0.2") == 1
    assert auto.score(LINES, LINES) == native.score(LINES, LINES)
    [pair] = auto.attention(LINES[:1], LINES[:1])
    assert pair.cross.equal(native.attention(LINES[:1], LINES[:1])[0].cross)


@pytest.mark.slow
def test_a_sentence_beyond_the_positions_of_a_conversion_is_translated_natively(
    folder: Path,
) -> None:
    long_line = " ".join(["house"] * 3000)
    options: Any = {"max_source_length": 10_000, "beam_size": 1}
    native = load(folder, backend="native")
    assert load(folder).translate([long_line], **options) == native.translate(
        [long_line], **options
    )


def test_auto_is_native_where_ctranslate2_cannot_run_the_model(
    folder: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    caplog.set_level(logging.INFO)
    second_model = random_model(folder.with_name("other"), tokenizer, seed=4)
    unsupported = random_model(folder.with_name("head"), tokenizer, head_size=16)
    assert isinstance(Translator.load([folder, second_model], device="cpu").backend, NativeBackend)
    assert "backend=auto: native, since CTranslate2 has no ensembles" in caplog.text
    assert isinstance(load(unsupported).backend, NativeBackend)
    assert "native, since backend=ctranslate2 does not support model.head_size=16" in caplog.text
    with pytest.raises(ConfigError, match=r"model.head_size=16 .*; use backend=native"):
        load(unsupported, backend="ctranslate2")
    assert isinstance(load(folder, dtype="bfloat16").backend, NativeBackend | AutoBackend)
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert isinstance(load(folder).backend, NativeBackend)
    assert "native, since backend=ctranslate2 needs CTranslate2" in caplog.text
    with pytest.raises(ConfigError, match=r"pip install nmt\[fast\]"):
        load(folder, backend="ctranslate2")


def test_a_conversion_is_made_once_and_again_for_a_changed_model(
    folder: Path, tokenizer: Tokenizer
) -> None:
    for quantization in ("int8", "float32"):
        load(folder, quantization=quantization)
    cache = folder / "ctranslate2"
    names = conversions(cache)
    assert [name.split("-")[0] for name in names] == ["float32", "int8"]
    times = [(cache / name / "model.bin").stat().st_mtime_ns for name in names]
    translator = load(folder, quantization="float32")
    expected = translator.translate(LINES)
    assert times == [(cache / name / "model.bin").stat().st_mtime_ns for name in names]

    changed = tiny_folder(folder.with_name("changed"), tokenizer, seed=5)
    for name in ("model.safetensors", "manifest.json"):
        (folder / name).write_bytes((changed / name).read_bytes())
    # the second search of lines that loop differs in the engines
    retranslated = load(folder, quantization="float32").translate(LINES, loop_guard=False)
    assert (
        retranslated
        == load(changed, backend="native").translate(LINES, loop_guard=False)
        != expected
    )
    assert len(conversions(cache)) == 2  # the old one of float32 is gone
    assert conversions(cache)[0] != names[0]
    assert translator.translate(LINES) == expected
    with pytest.raises(ModelError, match="has changed since it was loaded"):
        translator.score(LINES, LINES)

    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedError, match=r"model\.safetensors is damaged"):
        load(folder)


def test_a_damaged_conversion_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = load(folder).translate(LINES)
    [model] = (folder / "ctranslate2").glob("*/model.bin")
    model.write_bytes(model.read_bytes()[:-100])
    assert load(folder).translate(LINES) == expected
    assert "converting the model again" in caplog.text


def test_a_damaged_conversion_that_cannot_be_removed_is_named(folder: Path) -> None:
    load(folder)
    [model] = (folder / "ctranslate2").glob("*/model.bin")
    model.write_bytes(model.read_bytes()[:-100])
    lock = folder / "ctranslate2" / ".lock"
    lock.unlink(missing_ok=True)
    lock.mkdir()  # so that no process can take the lock, as in a folder that is read-only
    with pytest.raises(NmtError, match=r"is damaged and cannot be removed .*; remove it, or use"):
        load(folder)


def test_conversions_are_in_the_cache_of_the_user_if_the_model_cannot_be_written(
    folder: Path, user_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (folder / "ctranslate2").touch()  # so that no folder can have this name
    assert isinstance(load(folder).backend, AutoBackend)
    assert len(list(user_cache.glob("nmt/ctranslate2/*/*/model.bin"))) == 1
    user_cache.rename(user_cache.with_name("gone"))
    user_cache.touch()
    assert isinstance(load(folder).backend, NativeBackend)
    assert "backend=auto: native, since neither" in caplog.text
    with pytest.raises(NmtError, match="set XDG_CACHE_HOME"):
        load(folder, backend="ctranslate2")


def test_an_exported_folder_needs_no_conversion_and_refuses_another_format(
    folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "exported"
    command("export", f"model_dir={folder}", f"output={output}", "quantization=int8")
    assert load(output).translate(LINES) == load(folder, quantization="int8").translate(LINES)
    assert not (output / "ctranslate2").exists()
    with pytest.raises(ConfigError, match="quantization=int8: .* is converted already"):
        load(output, quantization="int8")
    with pytest.raises(ConfigError, match="only works with backend=auto or ctranslate2"):
        load(folder, quantization="int8", backend="native")


def test_int8_is_the_default_on_processors_with_vnni() -> None:
    assert has_vnni("processor: 0\nflags\t\t: fpu avx512f avx512_vnni\n")
    assert has_vnni("flags\t: avx2 avx_vnni")
    assert not has_vnni("flags\t: avx2 avx512f")
    assert not has_vnni("model name\t: avx512_vnni\n")


@pytest.mark.parametrize(
    ("arguments", "engine"),
    [
        ([], "ctranslate2"),
        (["coverage_penalty=0.2"], "native"),
        (["sampling=true"], "native"),
        (["max_source_length=3000"], "native"),
    ],
)
def test_a_command_takes_one_engine_for_all_that_it_is_asked(
    folder: Path, tmp_path: Path, arguments: list[str], engine: str
) -> None:
    source = tmp_path / "in"
    source.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    for backend in ("auto", engine):
        output = f"output={tmp_path / backend}"
        options = [f"model_dir={folder}", f"backend={backend}", "num_threads=1", "format=json"]
        command("translate", f"input={source}", output, "device=cpu", *options, *arguments)
    assert (tmp_path / "auto").read_bytes() == (tmp_path / engine).read_bytes()


def test_the_server_answers_as_auto_does_and_shows_attention(folder: Path) -> None:
    translator = load(folder)
    with running(loaded(folder, backend=Engine.auto), backend=Engine.auto) as server:
        assert [server.translate(line) for line in LINES] == translator.translate(LINES)
        [group] = server.get("/v1/models").json["groups"]
        assert group["attention"] is not None
        pair = {"text": LINES[0], "translation": "the house", "kind": "cross"}
        answer = server.post("/v1/attention", **pair, layer=0, head=0, **GOOD)
        assert answer.status == 200, answer
        search = {"coverage_penalty": 0.2}
        answer = server.post("/v1/translate", text=LINES[0], search=search, **GOOD)
        texts = [translation["text"] for translation in answer.json["translations"]]
        assert texts == translator.translate(LINES[:1], coverage_penalty=0.2)


def test_a_server_is_native_if_ctranslate2_cannot_run_one_of_its_models(
    folder: Path, tokenizer: Tokenizer
) -> None:
    unsupported = random_model(folder.with_name("head"), tokenizer, head_size=16)
    config = ServeConfig(model_dir=[str(folder)], device="cpu")
    assert config.backend is Engine.auto
    assert choose_serve_engine(config).backend is Engine.auto
    two_models = replace(config, model_dir=[str(folder), str(unsupported)])
    assert choose_serve_engine(two_models).backend is Engine.native


CONVERT = """
import os, sys
from pathlib import Path
from nmt.config import Quantization
from nmt.export.conversion import convert_once
# fork
folder = convert_once(Path(sys.argv[1]), Quantization.int8)
os.write(1, f"{folder}\\n".encode())  # at once, so that lines of several processes do not mix
"""
FORK = """
import ctranslate2  # once for all processes
for _ in range(15):
    if os.fork() == 0:
        break
"""
WAIT = """
while True:
    try:
        assert os.wait()[1] == 0
    except ChildProcessError:
        os._exit(0)  # without the cleanup of each interpreter
"""
CONVERT_AT_ONCE = CONVERT.replace("# fork\n", FORK) + WAIT


def convert_and_die(folder: Path, call: str, number: int) -> None:
    """Convert a model; this process is killed at call `number` of a function of `os`."""
    original = getattr(os, call)
    calls = itertools.count(1)

    def call_or_die(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(os, call, call_or_die)
    convert_once(folder, Quantization.int8)


@pytest.mark.slow
def test_sixteen_processes_that_start_at_once_share_one_whole_conversion(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", CONVERT_AT_ONCE, str(folder)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    [name] = conversions(folder / "ctranslate2")
    assert result.stdout == f"{folder / 'ctranslate2' / name}\n" * 16
    assert isinstance(load(folder, quantization="int8").backend, AutoBackend)


@pytest.mark.slow
def test_an_unfinished_conversion_is_never_used(folder: Path, tmp_path: Path) -> None:
    cache = folder / "ctranslate2"
    # after model.bin is written, between other files, and before the folder gets its name
    for call, number in (("chmod", 1), ("fsync", 3), ("rename", 1)):
        status = run_in_child(tmp_path / "log", convert_and_die, folder, call, number)
        assert status == -signal.SIGKILL
        [leftover] = conversions(cache)
        assert leftover.endswith(".tmp")
    converted = convert_once(folder, Quantization.int8)
    assert conversions(cache) == [converted.name]
    manifest = json.loads((converted / "manifest.json").read_text(encoding="utf-8"))
    assert set(manifest["files"]) | {"manifest.json"} == set(os.listdir(converted))
