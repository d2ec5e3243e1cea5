"""Files that someone else wrote, replaced or broke are refused: quickly, in one line, by name."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from exporting import exported, random_model
from importing import imported
from test_import_toolkits import write_marian, write_opennmt
from toy import write_data

from nmt.average import average, last_checkpoints
from nmt.checkpoint import find_model, load_info, load_tokenizer, load_weights
from nmt.config import DType, ExportFormat
from nmt.data.binary import ParallelData
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.errors import NmtError
from nmt.runtime.manifest import read_config, render_manifest, verify, write_manifest
from nmt.runtime.metrics_log import read_metrics_log
from nmt.runtime.reading import read_regular
from nmt.training.checkpoints import Saver, TrainerState, load_checkpoint
from nmt.translate.engines.ctranslate2 import load_ctranslate2

MAX_SECONDS = 2.0
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
def limited() -> Iterator[None]:
    """Let the block fail if it takes more than two seconds or 300 MB more memory."""
    status = Path("/proc/self/status").read_text()
    num_bytes = 1024 * int(status.split("VmData:")[1].split()[0])
    limits = resource.getrlimit(resource.RLIMIT_DATA)

    def expire(*_: object) -> None:
        raise AssertionError("it does not end")

    handler = signal.signal(signal.SIGALRM, expire)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes + MAX_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        signal.signal(signal.SIGALRM, handler)


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
    load_tokenizer(folder, info)


def read_data(folder: Path) -> None:
    for split in ("train", "valid"):
        pairs = ParallelData(folder, split)
        pairs[len(pairs) - 1]
        pairs.lengths.sum()
    load_tokenizers(folder)
    verify(folder)


def read_run(run_dir: Path) -> None:
    read_config(run_dir)
    read_metrics_log(run_dir / "metrics.jsonl")
    folders = last_checkpoints(run_dir, 2)
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
        saver.save(load_weights(model), info, tokenizer, training=training, best=[])
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
    assert read_regular(path, max_bytes=4) == b"1234"
    assert "4 bytes, more than the 3" in refusal(lambda path: read_regular(path, max_bytes=3), path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_regular(path)
    for name, replace in list(REPLACEMENTS.items())[:-1]:
        replaced = tmp_path / name
        replace(replaced)
        assert name in refusal(read_regular, replaced), name


@pytest.mark.slow
def test_what_is_no_regular_file_in_the_place_of_one_is_refused(
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
