"""Commands refuse pipes, folders, devices and endless files in place of the files that they read.

`test_foreign_files` does the same for the functions that read models and runs.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import lzma
import shutil
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_foreign_files import MAX_SECONDS, REPLACEMENTS, limited
from toy import TINY, command, train, write_corpus


@dataclass
class Case:
    """A command, and the files that it reads."""

    name: str
    arguments: list[str]
    files: list[Path]
    outputs: list[Path] = field(default_factory=list)  # removed before each run
    is_text: bool = False  # a pipe is an input like another


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, its data folder, and a run on it."""
    folder = tmp_path_factory.mktemp("foreign")
    assert command("preprocess", write_corpus(folder)) == 0
    assert train(folder / "data", folder / "run", "max_updates=8") == 0
    return folder


def files_in(folder: Path, *patterns: str) -> list[Path]:
    """Return the files of a folder that match any of the patterns."""
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def list_cases(folder: Path) -> Iterator[Case]:
    """Yield commands with the files that they read."""
    yield from list_data_and_run_cases(folder)
    yield from list_translation_cases(folder)
    yield from list_corpus_cases(folder)
    yield from list_text_cases(folder, arguments_without_training_text(folder))
    yield from list_settings_cases(folder)


def list_data_and_run_cases(folder: Path) -> Iterator[Case]:
    """Yield commands that read data folders and runs."""
    data = folder / "data"
    run = folder / "run"
    new = folder / "new"
    data_dir = f"data_dir={data}"
    run_dir = f"run_dir={run}"
    common = files_in(data, "meta.json", "manifest.json")
    training = common + files_in(data, "train*", "valid*", "tokenizer.model")
    train = [data_dir, *new_run(folder), "valid_bleu=true"]
    yield Case("train", train, training, [new])
    test = common + files_in(data, "test.*")
    yield Case("evaluate", [data_dir, f"model_dir={run}", "beam_size=1"], test)
    report = files_in(data, "manifest.json", "report.json")
    drawing = f"output={folder / 'new.html'}"
    yield Case("visualize", ["what=data", data_dir, drawing], report)
    metrics = [run / "metrics.jsonl"]
    files_of_report = [*metrics, run / "config.yaml", *report]
    yield Case("visualize", ["what=report", run_dir, data_dir, drawing], files_of_report)
    yield Case("visualize", ["what=run", run_dir, f"output={folder / 'new.svg'}"], metrics)
    yield Case("average", [run_dir, "best=1", f"output={new}"], metrics, [new])


def new_run(folder: Path) -> list[str]:
    """Return the arguments of nmt-train for a short run in the folder `new`."""
    return ["max_updates=1", f"run_dir={folder / 'new'}", *TINY]


def list_translation_cases(folder: Path) -> Iterator[Case]:
    """Yield commands that translate, score or draw text, some of it compressed."""
    model = f"model_dir={folder / 'run'}"
    output = f"output={folder / 'new.txt'}"
    text = folder / "test.src.txt"
    reference = folder / "test.tgt.txt"
    packed = folder / "packed.txt.gz"
    packed.write_bytes(gzip.compress(text.read_bytes()))
    packed_by_xz = folder / "packed.txt.xz"
    packed_by_xz.write_bytes(lzma.compress(text.read_bytes()))
    for path in (text, packed, packed_by_xz):
        arguments = [model, f"input={path}", output, "beam_size=1"]
        yield Case("translate", arguments, [path], is_text=True)
    arguments = [model, f"input={text}", f"prefixes={reference}", output]
    yield Case("translate", arguments, [text, reference], is_text=True)
    arguments = [model, f"src={text}", f"tgt={reference}"]
    yield Case("score", arguments, [text, reference], is_text=True)
    arguments = [f"hypotheses={text}", f"references={reference}", f"baseline={text}"]
    yield Case("evaluate", arguments, [text, reference], is_text=True)
    arguments = [model, f"src={text}", f"references={reference}", "beam_size=1"]
    yield Case("evaluate", arguments, [text, reference], is_text=True)
    arguments = ["what=attention", model, f"src={text}", f"output={folder / 'new.html'}"]
    yield Case("visualize", arguments, [text], is_text=True)
    new = folder / "new"
    arguments = [model, f"input={text}", f"output={new}", "beam_size=1"]
    yield Case("distill", arguments, [text], [new], is_text=True)


def list_corpus_cases(folder: Path) -> Iterator[Case]:
    """Yield commands that read a corpus as text, tables, JSON lines or a dataset."""
    outputs = [folder / "new"]
    corpus = write_corpus(folder)
    corpus[1] = f"data_dir={folder / 'new'}"
    files_of_corpus = [Path(word.partition("=")[2]) for word in corpus[3:]]
    yield Case("preprocess", corpus, files_of_corpus, outputs, is_text=True)
    packed = folder / "packed.txt.gz"
    arguments = [*corpus, f"data.test.src={packed}"]
    yield Case("preprocess", arguments, [packed], outputs, is_text=True)
    sides = [(folder / f"train.{side}.txt").read_text().splitlines() for side in ("src", "tgt")]
    tsv = folder / "train.tsv"
    tsv.write_text("".join(f"{src}\t{tgt}\n" for src, tgt in zip(*sides, strict=True)))
    jsonl = folder / "train.jsonl"
    records = [{"src": src, "de": tgt} for src, tgt in zip(*sides, strict=True)]
    jsonl.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    dataset = folder / "dataset"
    dataset.mkdir(exist_ok=True)
    table = pa.Table.from_pylist([{"translation": record} for record in records])
    parquet = dataset / "train-00000-of-00001.parquet"
    pq.write_table(table, parquet)
    other_arguments = arguments_without_training_text(folder)
    for key, path in (("tsv", tsv), ("jsonl", jsonl)):
        arguments = [*other_arguments, f"data.train.{key}={path}"]
        yield Case("preprocess", arguments, [path], outputs, is_text=True)
    for path in (dataset, parquet):
        arguments = [*other_arguments, f"data.train.dataset={path}"]
        yield Case("preprocess", arguments, [parquet], outputs)


def arguments_without_training_text(folder: Path) -> list[str]:
    """Return arguments of nmt-preprocess that do not name the training text."""
    corpus = [word for word in write_corpus(folder) if not word.startswith("data.train")]
    corpus[1] = f"data_dir={folder / 'new'}"
    return corpus


def list_settings_cases(folder: Path) -> Iterator[Case]:
    """Yield commands that read YAML files."""
    outputs = [folder / "new"]
    settings = folder / "settings"
    (settings / "model").mkdir(parents=True, exist_ok=True)
    experiment = settings / "mine.yaml"
    experiment.write_text("seed: 3\n")
    architecture = settings / "model/small.yaml"
    architecture.write_text("model: {d_model: 16}\n")
    start = [f"data_dir={folder / 'data'}", *new_run(folder)]
    yield Case("train", [*start, f"experiment={experiment}"], [experiment], outputs)
    yield Case("train", [*start, f"model={architecture}"], [architecture], outputs)
    folders = [*start, f"--config-dir={settings}", "experiment=mine", "model=small"]
    yield Case("train", folders, [architecture], outputs)


def list_text_cases(folder: Path, other_arguments: list[str]) -> Iterator[Case]:
    """Yield commands that read terms, scores, alignments, XML, archives or the web runtime.

    `other_arguments` are arguments of nmt-preprocess that do not name the training text.
    """
    new = folder / "new"
    model = f"model_dir={folder / 'run'}"
    text = folder / "test.src.txt"
    terms = folder / "terms.tsv"
    terms.write_text("red\trot\n")
    translate = [model, f"input={text}", f"output={folder / 'new.txt'}", "beam_size=2"]
    yield Case("translate", [*translate, f"glossary={terms}"], [terms])
    files = [f"src={text}", f"references={folder / 'test.tgt.txt'}", f"glossary={terms}"]
    yield Case("evaluate", [model, "beam_size=2", *files], [terms])
    pieces = folder / "pieces.txt"
    pieces.write_text("a\n")
    yield Case("translate", [*translate, f"suppress={pieces}"], [pieces])

    sides = {side: folder / f"train.{side}.txt" for side in ("src", "tgt")}
    corpus = [*other_arguments, *[f"data.train.{side}={path}" for side, path in sides.items()]]
    lines = {side: path.read_text().splitlines() for side, path in sides.items()}
    scores = folder / "scores.txt"
    scores.write_text("0.5\n" * len(lines["src"]))
    arguments = [*corpus, f"data.train.scores={scores}"]
    yield Case("preprocess", arguments, [scores], [new], is_text=True)
    links = folder / "links.txt"
    links.write_text("0-0\n" * len(lines["src"]))
    arguments = [*corpus, f"data.train.alignments={links}"]
    yield Case("preprocess", arguments, [links], [new], is_text=True)
    archive = folder / "train.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(sides["src"], "train.src.txt")
    yield Case("preprocess", [*corpus, f"data.train.src={archive}"], [archive], [new])
    bitext = folder / "train.tmx"
    unit = '<tu><tuv xml:lang="en"><seg>{}</seg></tuv><tuv xml:lang="de"><seg>{}</seg></tuv></tu>'
    units = [unit.format(*pair) for pair in zip(lines["src"], lines["tgt"], strict=True)]
    bitext.write_text(f"<tmx version='1.4'><header/><body>{''.join(units)}</body></tmx>")
    arguments = [f"data.train.tmx={bitext}", "data.src_lang=en"]
    yield Case("preprocess", [*other_arguments, *arguments], [bitext], [new], is_text=True)

    dist = folder / "onnxruntime-web/dist"
    dist.mkdir(parents=True, exist_ok=True)
    for name in ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"):
        (dist / name).write_text("")
    arguments = [model, "format=web", f"runtime={dist.parent}", f"output={new}"]
    yield Case("export", arguments, files_in(dist, "*"), [new])


def run(case: Case) -> int:
    for output in case.outputs:
        shutil.rmtree(output, ignore_errors=True)
    return command(case.name, case.arguments)


@contextlib.contextmanager
def replaced(path: Path, replacement: str) -> Iterator[None]:
    """Replace a file during the block."""
    backup = path.rename(path.with_name("backup-of-file"))
    REPLACEMENTS[replacement](path)
    yield
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()
    backup.rename(path)


@pytest.mark.slow
def test_commands_refuse_pipes_folders_and_devices_in_place_of_files(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    num_cases = 0
    for case in list_cases(folder):
        start = time.process_time()
        assert run(case) == 0 or case.name == "distill", capfd.readouterr().err
        seconds = time.process_time() - start
        capfd.readouterr()
        for path, replacement in itertools.product(case.files, REPLACEMENTS):
            if replacement == "empty file" or (case.is_text and replacement == "pipe"):
                continue
            with replaced(path, replacement), limited(seconds + MAX_SECONDS):
                status = run(case)
            errors = capfd.readouterr().err
            last_line = errors.splitlines()[-1]
            assert status == 2, (case, path.name, replacement, errors)
            name = "dataset" if path.parent.name == "dataset" else path.name
            assert name in last_line, (case, path.name, replacement, errors)
            assert f"nmt-{case.name}: " in last_line, (case, path.name, replacement, errors)
            assert "Traceback" not in errors, (case, path.name, replacement, errors)
            num_cases += 1
    assert num_cases >= 200
