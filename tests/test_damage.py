"""Damaged files are noticed, and replacing a folder never loses data."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import yaml
from exporting import random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_foreign_files import read_model
from toy import command

from nmt.checkpoint import ModelInfo, load_info, load_weights
from nmt.data.binary import DataInfo
from nmt.data.tokenizer import Tokenizer
from nmt.errors import DamagedError, ModelError
from nmt.runtime import files
from nmt.runtime.files import replace_folder
from nmt.runtime.manifest import (
    MANIFEST,
    read_run_config,
    render_manifest,
    set_verify,
    verify_checksums,
    write_manifest,
)
from nmt.runtime.metadata import read_json, to_dataclass
from nmt.runtime.metrics_log import read_metrics_log
from nmt.training.checkpoints import TrainerState


def assert_noticed(path: Path, offsets: Iterable[int], read: Callable[[], Any]) -> None:
    """Flip one bit of the byte at each offset; each is refused in one line with the file name."""
    draw = random.Random(1)
    content = path.read_bytes()
    for offset in offsets:
        damaged = bytearray(content)
        damaged[offset] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=path.name) as caught:
            read()
        assert "\n" not in str(caught.value), offset
    path.write_bytes(content)


@contextlib.contextmanager
def without_verification() -> Iterator[None]:
    set_verify(False)
    try:
        yield
    finally:
        set_verify(True)


def test_flipped_bits_and_swapped_files_of_a_model_are_noticed(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    random_model(tmp_path / "model", tokenizer, seed=1)
    random_model(tmp_path / "other", tokenizer, seed=2)
    read_model(tmp_path / "model")
    draw = random.Random(1)
    for path in sorted((tmp_path / "model").iterdir()):
        offsets = draw.choices(range(path.stat().st_size), k=12)
        assert_noticed(path, offsets, lambda: read_model(tmp_path / "model"))
    weights = "model.safetensors"
    shutil.copy(tmp_path / "other" / weights, tmp_path / "model" / weights)
    with pytest.raises(DamagedError, match=weights):
        read_model(tmp_path / "model")
    with without_verification():
        read_model(tmp_path / "model")


def test_every_flipped_bit_of_a_config_is_noticed(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    settings_of_run = {"run_dir": "r", "model": {"dropout": 0.1}, "names": ["ä"], "tracker": None}
    config.write_bytes(yaml.safe_dump(settings_of_run, sort_keys=False).encode())
    (tmp_path / MANIFEST).write_bytes(render_manifest(tmp_path, [config]))
    assert read_run_config(tmp_path) == settings_of_run
    assert_noticed(config, range(config.stat().st_size), lambda: read_run_config(tmp_path))
    config.write_text("seed: 2\n")
    with without_verification():
        assert read_run_config(tmp_path) == {"seed": 2}
    (tmp_path / MANIFEST).unlink()
    assert read_run_config(tmp_path) == {"seed": 2}


def test_damaged_lines_of_metrics_are_skipped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    first = {"update": 1, "event": "spike", "batch": '"1" {2}'}
    second = {"update": 2, "valid_loss": math.inf}
    numbers = ["-1", "1e12", "true", "9223372036854775808", '1, "valid_bleu": "x"', '1, "nll": [0]']
    damaged_lines = ["[" * 100_000, "[1]", "{}", "\0", "", '{"upd']
    for damaged in damaged_lines + [f'{{"update": {number}}}' for number in numbers]:
        lines = [json.dumps(first), damaged, damaged, json.dumps(second)]
        metrics.write_text("".join(f"{line}\n" for line in lines))
        caplog.clear()
        assert read_metrics_log(metrics) == [first, second], damaged
        (message,) = caplog.messages
        assert "skipped 2 damaged lines, first line 2" in message


def test_a_line_of_metrics_that_is_being_written_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    for partial in ("", '{"update": 4, "nll', '{"update": 4, "nll": 2.0}'):
        metrics.write_text('{"update": 3, "nll": 0.5}\n' + partial)
        assert read_metrics_log(metrics) == [{"update": 3, "nll": 0.5}], partial
    assert not caplog.messages


def test_hostile_configs_and_logs_are_refused(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    config = tmp_path / "config.yaml"
    long = "a: " + "x" * 100_000
    for text in ("a: " + "[" * 30_000, "a: b: c", "a: 2026-99-99", "- a", long):
        config.write_text(text)
        start_seconds = time.process_time()
        with pytest.raises(DamagedError, match=r"config\.yaml (is not a config|has 100,003 bytes)"):
            read_run_config(tmp_path)
        assert time.process_time() - start_seconds < 1
    for path in (metrics, config):
        with path.open("ab") as file:
            file.truncate(1 << 40)
    with pytest.raises(DamagedError, match="more than the 1,073,741,824"):
        read_metrics_log(metrics)
    with pytest.raises(DamagedError, match=r"config\.yaml"):
        read_run_config(tmp_path)


def test_a_folder_without_a_manifest_opens_with_a_note(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random_model(tmp_path, tokenizer)
    (tmp_path / MANIFEST).unlink()
    with caplog.at_level("INFO"):
        read_model(tmp_path)
    assert "has no manifest.json" in caplog.text


def test_a_whole_folder_is_compared_by_names_sizes_and_content(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a").write_text("a")
    (tmp_path / "b").write_text("b")
    write_manifest(tmp_path)
    verify_checksums(tmp_path)
    (tmp_path / "new").write_text("not listed")
    verify_checksums(tmp_path)
    (tmp_path / "deep/a").unlink()
    with pytest.raises(DamagedError, match="deep/a is missing"):
        verify_checksums(tmp_path)
    verify_checksums(tmp_path, "b")


# --- replacing, with a kill at every call


def fill(data_dir: Path, text: str) -> None:
    with replace_folder(data_dir, marker="meta.json") as folder:
        (folder / "text").write_text(text)
        (folder / "meta.json").write_text('{"format_version": 1}')


def fill_and_die(data_dir: Path, number: int) -> bool:
    """Replace the folder in a process that is killed at its call `number` of the file system.

    Returns whether the process ended before that call.
    """
    process = os.fork()
    if not process:
        calls = itertools.count(1)

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                if next(calls) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **named)

            return call

        for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "chmod"):
            setattr(os, name, counted(getattr(os, name)))
        files._exchange = counted(files._exchange)
        fill(data_dir, "new")
        os._exit(0)
    return os.waitpid(process, 0)[1] == 0


@pytest.mark.slow
def test_a_kill_at_any_call_leaves_the_old_or_the_new_folder_under_the_name(tmp_path: Path) -> None:
    seen = set()
    number = 0
    is_done = False
    while not is_done:
        number += 1
        data_dir = tmp_path / str(number) / "data"
        fill(data_dir, "old")
        is_done = fill_and_die(data_dir, number)
        verify_checksums(data_dir)
        seen.add((data_dir / "text").read_text())
        fill(data_dir, "last")
        assert list(data_dir.parent.iterdir()) == [data_dir]  # no leftover
    assert seen == {"old", "new"}
    assert number > 10


def test_a_replaced_folder_is_never_where_the_next_command_looks_for_its_own_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that continues with the work folder would mix both."""
    fill(tmp_path / "data", "old")
    fill(tmp_path / "work/data", "new")

    def die(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            files.publish_folder(tmp_path / "work/data", tmp_path / "data")
    assert (tmp_path / "data/text").read_text() == "new"
    assert not (tmp_path / "work/data").exists()
    files.remove_abandoned(tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "work"]


def test_folders_of_a_living_process_are_not_removed(tmp_path: Path) -> None:
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        theirs = tmp_path / f".data.{files._HOST}.{alive.pid}.tmp"
        elsewhere = tmp_path / f".data.elsewhere.{alive.pid}.tmp"
        for folder in (theirs, elsewhere):
            folder.mkdir()
        fill(tmp_path / "data", "text")
        assert theirs.exists()
        alive.communicate(b"\n")
        fill(tmp_path / "data", "text")
        assert not theirs.exists()
        assert elsewhere.exists()
    finally:
        alive.kill()


def test_where_names_cannot_be_exchanged_two_renames_do_and_a_kill_between_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    for text in ("old", "new"):
        fill(tmp_path / "data", text)
        assert (tmp_path / "data/text").read_text() == text
    (tmp_path / "data").rename(tmp_path / f".data.{files._HOST}.{os.getpid()}.old")
    files.remove_abandoned(tmp_path / "data")
    assert (tmp_path / "data/text").read_text() == "new"


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_changes_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    steps = [random_model(tmp_path / f"run/{seed}", tokenizer, seed=seed) for seed in (1, 2)]
    output = tmp_path / "model"
    assert command("average", f"checkpoints=[{steps[0]}]", f"output={output}") == 0
    expected = (output / "model.safetensors").read_bytes()
    for name, arguments in (
        ("average", [f"checkpoints=[{steps[1]}]", f"output={output}"]),
        ("export", [f"model_dir={output}", f"output={tmp_path / 'export'}"]),
    ):
        errors = tmp_path / "errors"
        process = os.fork()
        if not process:
            sys.stderr = errors.open("w")
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
            status = command(name, arguments)
            sys.stderr.flush()
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 2, name
        assert errors.read_text().splitlines()[-1].endswith("; nothing was changed"), name
        assert sorted(path.name for path in tmp_path.iterdir()) == ["errors", "model", "run"]
        assert (output / "model.safetensors").read_bytes() == expected


def test_a_closed_stderr_keeps_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert command("average", "run_dir=nowhere") == 2
    assert sys.stderr is not None


def test_weights_that_are_not_finite_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = random_model(tmp_path, tokenizer)
    weights = load_weights(folder)
    weights["embedding.weight"][3, 1] = math.nan
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    write_manifest(folder)
    with pytest.raises(ModelError, match=r"embedding\.weight holds numbers that are not finite"):
        load_weights(folder)


# --- hostile metadata

HOSTILE: list[Callable[[dict[str, Any]], Any]] = [
    lambda c: c["model"].update(num_encoder_layers=10**9),
    lambda c: c["model"].update(d_model=10**7),
    lambda c: c["model"].update(d_ff="2048"),
    lambda c: c["model"].update(num_heads=0),
    lambda c: c["model"].update(norm=["post"]),
    lambda c: c["model"].pop("d_ff") and c["model"].update(d_fff=1),
    lambda c: c.update(vocab_size=10**12),
    lambda c: c.update(vocab_size=True),
    lambda c: c.update(updates=-1),
    lambda c: c.update(model=[]),
    lambda c: c.update(search={"beam_size": 1e300}),
    lambda c: c.update(src_lang=None),
    lambda c: c.update(format_version="1"),
    lambda c: c.update(format_version=2),
    lambda c: c.pop("tokenizer_sha256"),
]


def test_metadata_that_does_not_fit_is_one_line_that_names_file_and_field(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    random_model(tmp_path, tokenizer)
    config = (tmp_path / "config.json").read_text()
    texts = ["[" * 100_000, '{"a":' * 100_000, "\xff", "[]", "null", "", "{", '{"model": NaN}']
    for change in HOSTILE:
        content = json.loads(config)
        change(content)
        texts.append(json.dumps(content))
    for text in texts:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        write_manifest(tmp_path)
        with pytest.raises(ModelError, match=r"config\.json|format_version 2") as caught:
            load_info(tmp_path)
        assert "\n" not in str(caught.value), text
        assert len(str(caught.value)) < 400, text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


MODEL = {"model": {}, "search": {}, "vocab_size": 9, "src_lang": "a", "tgt_lang": "b"}
SHARDS = [{"file": "a", "pairs": 1}]
METADATA = [
    (ModelInfo, {**MODEL, "tokenizer_sha256": "0", "updates": 1}),
    (
        DataInfo,
        {
            "format_version": 2,
            "splits": {"train": [{"corpus": "", "weight": 1, "shards": SHARDS}]},
        },
    ),
    (TrainerState, {"num_updates": 3, "best": [{"badness": 1.0, "update": 3}]}),
]


def replace_value(content: Any, data: st.DataObject) -> None:
    """Replace a value somewhere in nested dictionaries and lists, which are not empty."""
    while True:
        keys = range(len(content)) if isinstance(content, list) else sorted(content)
        key = data.draw(st.sampled_from(keys))
        child = content[key]
        if not isinstance(child, (dict, list)) or not child or not data.draw(st.booleans()):
            content[key] = data.draw(VALUES)
            return
        content = child


@settings(max_examples=25, deadline=None, database=None)
@given(st.data())
def test_any_metadata_is_read_or_refused(data: st.DataObject) -> None:
    for metadata_class, valid_content in METADATA:
        content = json.loads(json.dumps(valid_content))
        to_dataclass(metadata_class, content, Path("x"))
        replace_value(content, data)
        refusal = ""
        try:
            to_dataclass(metadata_class, content, Path("x"))
        except DamagedError as error:
            refusal = str(error)
        assert refusal.startswith("x does not fit this nmt: ") or not refusal


def test_json_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "meta.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DamagedError, match="more than the 268,435,456"):
        read_json(tmp_path / "meta.json")
