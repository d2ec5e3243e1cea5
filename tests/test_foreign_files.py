"""Files that someone else wrote, replaced or broke are refused: quickly, in one line, by name."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from exporting import exported, random_model
from importing import imported
from test_import_toolkits import write_marian, write_opennmt
from toy import command, make_run, write_data

from nmt.average import average, find_newest_checkpoints
from nmt.checkpoint import find_model, load_info, load_model_tokenizers, load_tensors, load_weights
from nmt.config import DType, ExportFormat, TrackerName
from nmt.data.binary import ParallelData
from nmt.data.text import MAX_LINE_BYTES, read_lines
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.errors import DamagedError, ModelError, NmtError, escape_controls
from nmt.importing.marian import _parse_settings as parse_settings
from nmt.importing.weights import load_pickle
from nmt.runtime.manifest import read_run_config, render_manifest, verify_checksums, write_manifest
from nmt.runtime.metadata import to_dataclass
from nmt.runtime.metrics_log import read_metrics_log
from nmt.runtime.reading import check_tree, read_regular_file
from nmt.training.checkpoints import Saver, TrainerState, load_checkpoint
from nmt.training.start import log_plan
from nmt.training.trackers import TrackerThread, close_trackers
from nmt.translate.engines.ctranslate2 import load_ctranslate2

MAX_SECONDS = 10.0  # of processor time; about 0.1 is needed
MAX_WAIT_SECONDS = 120.0
MAX_BYTES = 300 << 20  # beyond the size of the file
Reader = Callable[[Path], object]


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(40 << 30)


REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "sparse file": make_sparse,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "memory of the process": lambda path: path.symlink_to("/proc/self/mem"),
    "empty file": Path.touch,
}
UNUSED = {"huggingface": {"README.md", "manifest.json", "nmt.json", "tokenizer.model"}}
"""Files that a reader ignores."""


@contextlib.contextmanager
def limited(max_seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Let the block fail if it takes too long or 300 MB more memory.

    `max_seconds` limits the processor time, since other tests may run at the same time.
    """
    status = Path("/proc/self/status").read_text()
    num_bytes = 1024 * int(status.split("VmData:")[1].split()[0])
    limits = resource.getrlimit(resource.RLIMIT_DATA)

    def expire(*_: object) -> None:
        raise AssertionError("it does not end")

    timers = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    handlers = {number: signal.signal(number, expire) for number in timers}
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes + MAX_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, max_seconds)
    signal.setitimer(signal.ITIMER_REAL, MAX_WAIT_SECONDS)
    try:
        yield
    finally:
        for timer in timers.values():
            signal.setitimer(timer, 0)
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def refusal(read: Reader, folder: Path) -> str:
    """Return the message with which `read` refuses a folder; "" if it accepts it."""
    message = ""
    try:
        with limited():
            read(folder)
    except NmtError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1000
    return message


def read_model(folder: Path) -> None:
    info = load_info(find_model(folder))
    load_weights(folder)
    load_model_tokenizers(folder, info)


def read_data(folder: Path) -> None:
    for split in ("train", "valid"):
        pairs = ParallelData(folder, split)
        pairs[len(pairs) - 1]
        pairs.lengths.sum()
    load_tokenizers(folder)
    verify_checksums(folder)


def read_run(run_dir: Path) -> None:
    read_run_config(run_dir)
    read_metrics_log(run_dir / "metrics.jsonl")
    folders = find_newest_checkpoints(run_dir, 2)
    average(folders, run_dir.with_name("average"))
    for folder in folders:
        load_checkpoint(folder)
        read_model(folder)


def read_export(folder: Path) -> None:
    load_ctranslate2(folder, device="cpu", dtype=DType.float32, num_threads=1)


def write_run(run_dir: Path, tokenizer: Tokenizer) -> None:
    """Write a run folder with two checkpoints."""
    model = random_model(run_dir.with_name("model-of-run"), tokenizer)
    info = load_info(model)
    saver = Saver(run_dir, update=0, keep_last=5)
    for info.updates in (1, 2):
        training = {"state": asdict(TrainerState()), "learner": {}, "fingerprint": {}}
        training |= {"world_size": 1, "num_threads": 1}
        saver.save(load_weights(model), info, tokenizer, trainer_content=training, best_updates=[])
    saver.finish()
    (run_dir / "config.yaml").write_text("seed: 1\n")
    (run_dir / "manifest.json").write_bytes(render_manifest(run_dir, [run_dir / "config.yaml"]))
    (run_dir / "metrics.jsonl").write_text('{"update": 1, "nll": 0.5}\n')


def replaced_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Replace each file of a folder by each replacement in turn, with manifests and without."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    manifests = [path for path in paths if path.name == "manifest.json"]
    for has_manifest in (True, False):
        for path in paths:
            if path in manifests and not has_manifest:
                path.unlink()
                continue
            backup = path.rename(folder.with_name("backup"))
            for name, replace in REPLACEMENTS.items():
                replace(path)
                yield name, path
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()
            backup.rename(path)


def test_only_regular_files_of_plausible_size_are_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert read_regular_file(path, max_bytes=4) == b"1234"
    assert "4 bytes, more than the 3" in refusal(
        lambda path: read_regular_file(path, max_bytes=3), path
    )
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_regular_file(path)
    for name, replace in list(REPLACEMENTS.items())[:-1]:
        replaced = tmp_path / name
        replace(replaced)
        assert name in refusal(read_regular_file, replaced), name


def test_a_tree_holds_only_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "records/scan").mkdir(parents=True)
    path = tmp_path / "records/scan/0.json"
    for name, is_refused in (("pipe", True), ("endless device", True), ("empty file", False)):
        REPLACEMENTS[name](path)
        assert ("0.json" in refusal(check_tree, tmp_path)) is is_refused, name
        path.unlink()


def test_a_file_that_another_process_removes_is_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()

    def stat_and_remove(path: Path, **options: bool) -> os.stat_result:
        result = stat(path, **options)
        if path.name == "file":
            path.unlink()
        return result

    stat = Path.stat
    monkeypatch.setattr(Path, "stat", stat_and_remove)
    check_tree(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_pipes_folders_and_devices_in_place_of_files_are_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in ("model", "data", "run", "marian", "opennmt")}
    folders["data"].mkdir()
    random_model(folders["model"], tokenizer)
    write_data(folders["data"], tokenizer, [(3, 4), (5, 2)] * 4)
    write_manifest(folders["data"])
    write_run(folders["run"], tokenizer)
    write_marian(folders["marian"], 0)
    write_opennmt(folders["opennmt"], 0, version=3, is_shared=True)
    folders["export"] = exported(folders["model"], ExportFormat.ctranslate2)
    folders["huggingface"] = exported(folders["model"], ExportFormat.huggingface)
    readers: dict[str, Reader] = {
        "model": read_model,
        "data": read_data,
        "run": read_run,
        "export": read_export,
        "huggingface": imported,
        "marian": imported,
        "opennmt": imported,
    }
    num_cases = 0
    for name, read in readers.items():
        assert refusal(read, folders[name]) == "", name
        for replacement, path in replaced_files(folders[name]):
            message = refusal(read, folders[name])
            num_cases += 1
            is_named = path.name in message or "by CTranslate2" in message
            may_be_accepted = replacement == "empty file" or path.name in UNUSED.get(name, ())
            assert is_named or may_be_accepted, (name, replacement, path, message)
    assert num_cases >= 200


# --- data folders and checkpoints with valid checksums and impossible content


class HandmadeData:
    """A data folder of eight pairs whose files are replaced, with valid sizes and checksums."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: Any = json.loads((folder / "meta.json").read_text())
        self.corpus = self.meta["splits"]["train"][0]
        self.shard = self.corpus["shards"][0]
        self.shard_path = folder / self.shard["file"]

    def save(self) -> None:
        (self.folder / "meta.json").write_text(json.dumps(self.meta))
        write_manifest(self.folder)

    def write_lengths(self, lengths: Any) -> None:
        np.save(self.folder / "train.lengths.npy", lengths, allow_pickle=True)
        self.save()

    def write_ids(self, ids: list[Any], id_type: pa.DataType, texts: list[Any]) -> None:
        """Write a shard with the same `ids` on both sides, and with bytes as its text if any."""
        columns = {side: pa.array(ids, id_type) for side in ("src", "tgt")}
        if texts:
            mask, offsets, content = pa.array(texts, pa.binary()).buffers()
            text = pa.StringArray.from_buffers(len(texts), offsets, content, mask)
            columns |= {"src_text": text, "tgt_text": text}
        table = pa.table(columns)
        with pa.ipc.new_stream(self.shard_path, table.schema) as writer:
            writer.write_table(table)
        self.shard["bytes"] = self.shard_path.stat().st_size
        lengths = np.array([[len(row or ()) + 1] * 2 for row in ids], dtype=np.int32)
        self.write_lengths(lengths)


ID_LIST = pa.list_(pa.int32())


def test_ids_lengths_and_texts_of_handmade_shards_are_checked(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_data(tmp_path, tokenizer, [(3, 4), (5, 2)] * 4)
    data = HandmadeData(tmp_path)
    lengths = np.load(tmp_path / "train.lengths.npy")
    for dtype, value in (("f8", "nan"), ("i8", -1), ("i8", 0), ("i8", 9), ("U3", "x"), ("O", "x")):
        changed = lengths.astype(dtype)
        changed[3, 1] = value
        data.write_lengths(changed)
        problem = "does not fit" if value == 9 else "not positive integers"
        message = refusal(lambda folder: ParallelData(folder, "train")[0], tmp_path)
        assert problem in message or dtype == "O", (dtype, value, message)
    valid = [[4, 5]] * 8
    data.write_ids(valid, ID_LIST, [b"a"] * 8)
    assert refusal(read_data, tmp_path) == ""
    cases = {
        f"the token id {tokenizer.vocab_size},": ([[4, tokenizer.vocab_size]] * 8, ID_LIST, []),
        "the token id 4294967295,": ([[4, -1]] * 8, ID_LIST, []),
        "list<item: double>": (valid, pa.list_(pa.float64()), []),
        "a value is missing": ([None, *valid[1:]], ID_LIST, []),
        "UTF8": (valid, ID_LIST, [b"\xff"] * 8),
    }
    for message, (ids, id_type, texts) in cases.items():
        data.write_ids(ids, id_type, texts)
        assert message in refusal(read_data, tmp_path), message


def damage_at_random(data: HandmadeData, draw: random.Random) -> str:
    """Change one file of a data folder; return a description of the change."""
    change = draw.choice(["lengths", "ids", "bytes", "meta"])
    if change == "lengths":
        lengths = np.load(data.folder / "train.lengths.npy")
        lengths = lengths.astype(draw.choice(["f8", "i8", "U3", "i2", "c8"]))
        lengths[draw.randrange(8), draw.randrange(2)] = draw.choice([-1, 0, 999, -9, 1000])
        data.write_lengths(lengths)
    elif change == "ids":
        rows = [[draw.choice([4, 5, -1, 1 << 30])] * draw.randint(0, 4) for _ in range(8)]
        texts = [draw.choice([b"a", b"\xff\xfe", None]) for _ in rows]
        types = [ID_LIST, pa.list_(pa.int64()), pa.list_(pa.float64()), pa.large_list(pa.int32())]
        data.write_ids(rows, draw.choice(types), draw.choice([texts, []]))
    elif change == "bytes":
        content = bytearray(data.shard_path.read_bytes())
        for _ in range(draw.choice([1, 4, 30])):
            content[draw.randrange(len(content))] = draw.choice([0, 255, draw.randrange(256)])
        data.shard_path.write_bytes(content)
        data.save()
    else:
        entry = draw.choice([data.meta, data.corpus, data.shard])
        key = draw.choice(sorted(entry))
        entry[key] = draw.choice([-1, 0, 1 << 62, 1e300, -1e300, "x", None, [], {}, 3])
        change = f"{key}={entry[key]}"
        data.save()
    return change


@pytest.mark.slow
def test_handmade_data_folders_are_trained_on_or_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def train(data_dir: Path) -> None:
        run = make_run(data_dir, tmp_path / "run")
        for update in run.sampler_at(0).plan_epoch(0):
            for batches in run.learner.batch_maker.make_batches(update, 0):
                for batch in batches:
                    run.learner.compute_loss(batch)

    original = tmp_path / "original"
    original.mkdir()
    write_data(original, tokenizer, [(3, 4), (5, 2)] * 4)
    train(original)  # without a limit of memory, for the first use of libraries
    draw = random.Random(5)
    num_refused = 0
    for case in range(220):
        data_dir = tmp_path / f"data-{case}"
        shutil.copytree(original, data_dir)
        change = damage_at_random(HandmadeData(data_dir), draw)
        print(case, change)  # shown if an exception follows
        num_refused += refusal(train, data_dir) != ""
    assert 160 <= num_refused < 220


def test_counters_of_a_checkpoint_are_checked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "trainer.pt"
    valid = asdict(TrainerState(num_updates=3, epoch=1))
    to_dataclass(TrainerState, valid, path)
    for name, value in valid.items():
        if isinstance(value, int | float):
            for changed in (-5, 1 << 62) if isinstance(value, int) else (-1.0,):
                with pytest.raises(DamagedError, match=f"{path} does not fit .*{name}="):
                    to_dataclass(TrainerState, valid | {name: changed}, path)
    write_data(tmp_path, tokenizer, [(3, 4), (5, 2)] * 4)
    run = make_run(tmp_path, tmp_path / "run")
    num_updates = len(run.sampler_at(0).plan_epoch(0))
    log_plan(run, TrainerState(epoch_position=num_updates - 1))
    with pytest.raises(ModelError, match=f"after update {num_updates} of an epoch"):
        log_plan(run, TrainerState(epoch_position=num_updates))


def test_a_run_of_many_epochs_hears_of_patience(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_data(tmp_path, tokenizer, [(3, 4), (5, 2)] * 4)
    caplog.set_level("INFO")
    advice = "max_updates=500 is 500 epochs; with patience=5, the run ends"
    for number, changes in enumerate([{"max_updates": 200}, {"max_updates": 500, "patience": 3}]):
        log_plan(make_run(tmp_path, tmp_path / str(number), **changes), TrainerState())
        assert "with patience=5" not in caplog.text
    log_plan(make_run(tmp_path, tmp_path / "long", max_updates=500), TrainerState())
    assert advice in caplog.text


def test_invalid_fields_of_a_checkpoint_are_refused_by_name(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_run(tmp_path / "run", tokenizer)
    folder = tmp_path / "run/checkpoints/step-00000002"
    content = torch.load(folder / "trainer.pt")
    load_checkpoint(folder)
    changes: list[dict[str, Any]] = [{"state": []}, {"world_size": "2"}, {"num_threads": 1.5}]
    changes += [{"learner": 3}, {"fingerprint": None}, {"extra": 1}]
    for change in changes:
        torch.save(content | change, folder / "trainer.pt")
        write_manifest(folder)
        assert f"trainer.pt does not fit this nmt: {next(iter(change))}" in refusal(
            load_checkpoint, folder
        )


# --- messages, long lines and syncing


def test_control_characters_are_escaped_in_messages_and_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    controls = "\x1b]0;x\x07\x9b31m\u2028\u202e\r\0"
    (tmp_path / "experiment.yaml").write_bytes(json.dumps({f"key{controls}": 1}).encode())
    assert command("train", f"run_dir=nowhere{controls[:5]}", "colour\x1b[31m=1") == 2
    assert command("train", f"experiment={tmp_path / 'experiment.yaml'}") == 2
    logging.getLogger("nmt").warning("%s", controls)
    errors = capsys.readouterr().err
    assert not any(character in errors for character in controls if character not in "]0;x31m")
    assert r"\x1b]0;x\x07\x9b31m\u2028\u202e\r\x00" in errors
    assert escape_controls("a\tb\n ä 漢 😀") == "a\tb\n ä 漢 😀"


@pytest.mark.parametrize("character", ["\0", "a "])
def test_a_line_that_is_too_long_to_be_a_sentence_is_refused(
    tmp_path: Path, character: str
) -> None:
    path = tmp_path / "text"
    path.write_text("short\n" + character * (MAX_LINE_BYTES + 1))

    def read(path: Path) -> None:
        for _ in read_lines(path):
            pass

    assert f"{path}:2: the line has" in refusal(read, path)


def test_files_are_synced_before_they_are_renamed_into_place(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync
    rename = os.rename

    def record_sync(descriptor: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def check_synced(old: Any, new: Any, **_: Any) -> None:
        paths = [Path(old), *Path(old).rglob("*")]
        missing = [p for p in paths if not p.is_symlink() and str(p) not in synced]
        if not Path(old).is_symlink():
            assert not missing, (old, missing)
        rename(old, new)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", check_synced)
    monkeypatch.setattr(os, "replace", check_synced)
    write_run(tmp_path / "run", tokenizer)
    feed = TrackerThread(TrackerName.tensorboard, tmp_path / "run")
    close_trackers([feed])
    assert any(name.endswith("model.safetensors") for name in synced)
    assert any("tensorboard.json" in name for name in synced)


# --- models of others


def test_random_and_damaged_sentencepiece_models_are_loaded_or_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def use(path: Path) -> None:
        loaded = Tokenizer.load(path)
        loaded.decode(loaded.encode("the house über"))
        loaded.all_pieces()

    draw = random.Random(3)
    path = tmp_path / "tokenizer.model"
    num_refused = 0
    for case in range(300):
        content = bytearray(tokenizer.model)
        for _ in range(draw.choice([1, 3, 20])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        if case % 3 == 0:
            content = bytearray(draw.randbytes(draw.randint(1, 400)))
        elif case % 3 == 1:
            content = content[: draw.randrange(1, len(content))]
        path.write_bytes(content)
        message = refusal(use, path)
        num_refused += str(path) in message
        assert str(path) in message or not message, case
    assert 200 < num_refused < 300


def test_nested_aliases_and_long_settings_of_marian_are_refused(tmp_path: Path) -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    lines = ["a: &a {x: 1, y: 2}"]
    for alias, name in itertools.pairwise(names):
        lines.append(f"{name}: &{name} {{<<: [*{alias}, *{alias}], {name}: *{alias}}}")
    for text in ("\n".join(lines), "a: [" * 20_000, "a: 1\n" * 100_000, "a: &a [*a]"):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        assert "config.yaml" in refusal(read_run_config, tmp_path), text[:40]
        assert "the settings are not YAML" in refusal(
            lambda path: parse_settings(path, path.read_text()), path
        )


@pytest.mark.long
def test_a_million_tensors_are_refused_at_once(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"tensor{i}": entry for i in range(100_000)}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "has a header of" in refusal(load_tensors, path)
    path = tmp_path / "model.pt"
    torch.save(dict.fromkeys(range(3), torch.zeros(2)), path)
    assert refusal(load_pickle, path) == ""
    with zipfile.ZipFile(path, "a") as archive:
        for i in range(70_000):
            archive.writestr(f"model/data/x{i}", b"")
    assert "tensors, more than any model has" in refusal(load_pickle, path)
    torch.save({"x" * (17 << 20): torch.zeros(2)}, path)
    assert "a pickle of" in refusal(load_pickle, path)
