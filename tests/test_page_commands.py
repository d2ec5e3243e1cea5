"""The commands, Python and YAML of every page run without changes, on tiny text and models.

Settings that make a command small are added at its end. test_readme.py lists the commands that are
run by other tests.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import docx
import pytest
from pages import (
    PAGES,
    PAGES_WITH_PYTHON,
    ROOT,
    TABLES_OF_COMMANDS,
    ShellCommand,
    fenced_blocks,
    parse_command,
    shell_lines,
    table_lines,
)
from test_config import composed
from test_import_huggingface import MARIAN, write_nllb
from test_import_huggingface import write_marian as write_opus
from test_import_toolkits import write_fairseq, write_marian
from test_readme import ELSEWHERE
from toy import TINY, command, train, write_corpus

from nmt.cli.commands import COMMANDS

PAGES_IN_CI = ("README.md", "docs/translate.md")
SIZES = ["num_encoder_layers=2", "num_decoder_layers=2", "d_model=32", "d_ff=32", "num_heads=4"]
SMALL_MODEL = [f"model.{size}" for size in SIZES]
SHORT_RUN = [setting for setting in TINY if not setting.startswith("model.")]
SHORT_RUN += ["max_updates=6", "checkpoint_every_updates=1", "keep_last=6", "average_last=2"]
SHORT_RUN += ["valid_bleu=false", "tracker=[]"]
OUTPUT_KEYS = {"preprocess": "data_dir", "train": "run_dir"}
OUTPUT_KEYS |= dict.fromkeys(["distill", "backtranslate", "export", "import"], "output")
# pairs of the toy corpus, by the names of the files that the pages give them
TRAIN_FILES = ["a", "web", "train", "news", "news-1", "mono", "mono-1"]
HELD_OUT_FILES = ["v", "val", "valid", "in", "out", "ref", "old", "test", "test_2016_flickr"]
TSV_FILES = ["web.tsv", "few.tsv", "all.tsv", "corpus.tsv", "valid.tsv", "v.tsv"]
RAW_TEXT = {  # as scripts/fetch_homeassistant.py and scripts/parsing.py write it
    "homeassistant/en-de": ("en", "de"),
    "homeassistant/en-fr": ("en", "fr"),
    "homeassistant/en-fi": ("en", "fi"),
    "parsing": ("src", "tgt"),
}


def write_text(home: Path) -> None:
    """Write the toy corpus under all names that the pages give to files."""
    texts = {
        (split, side): (home / f"toy/{split}.{side}.txt").read_bytes()
        for split in ("train", "valid", "test")
        for side in ("src", "tgt")
    }
    for names, split in ((TRAIN_FILES, "train"), (HELD_OUT_FILES, "valid")):
        for name in names:
            for suffix, side in ((".en", "src"), (".de", "tgt")):
                (home / f"{name}{suffix}").write_bytes(texts[split, side])
                (home / f"{name}{suffix}.gz").write_bytes(gzip.compress(texts[split, side]))
    for name in TSV_FILES:
        split = "valid" if name.startswith("v") else "train"
        sides = (texts[split, side].splitlines() for side in ("src", "tgt"))
        rows = [src + b"\t" + tgt + b"\n" for src, tgt in zip(*sides, strict=True)]
        (home / name).write_bytes(b"".join(rows))
        (home / f"{name}.gz").write_bytes(gzip.compress(b"".join(rows)))
        (home / f"{name}.xz").write_bytes(lzma.compress(b"".join(rows)))
    shutil.copy(home / "all.tsv.gz", home / "a.gz")
    letter = docx.Document()
    for line in texts["valid", "src"].decode().splitlines()[:4]:
        letter.add_paragraph(line)
    letter.save(str(home / "letter.docx"))
    [terms, *_] = fenced_blocks((ROOT / "docs/how-to/glossary.md").read_text("utf-8"), "")
    (home / "terms.tsv").write_text(terms, encoding="utf-8")
    (home / "lemmas.tsv").write_text("Hunde\tHund\nHunden\tHund\n", encoding="utf-8")
    sides = [texts["train", side].decode().splitlines() for side in ("src", "tgt")]
    units = list(zip(*sides, strict=True))
    write_tmx(home / "memory.tmx", units, "de")
    write_tmx(home / "low-german.tmx", [(src, f"{tgt} snackt") for src, tgt in units], "nds")
    for language, side in (("en", "src"), ("de", "tgt")):
        with zipfile.ZipFile(home / "de-en.txt.zip", "a") as moses:
            moses.write(home / f"toy/train.{side}.txt", f"OPUS.de-en.{language}")
        (home / f"toy/train.{language}").write_bytes(texts["train", side])
        (home / f"toy/dev.{language}").write_bytes(texts["valid", side])
    (home / "data/raw/tatoeba").mkdir(parents=True)
    with zipfile.ZipFile(home / "data/raw/tatoeba/deu-eng.zip", "w") as tatoeba:
        tatoeba.write(home / "all.tsv", "deu.txt")
    with tarfile.open(home / "corpus.tar.gz", "w:gz") as tar:
        for name in ("train.en", "train.de", "dev.en", "dev.de"):
            tar.add(home / "toy" / name, name)
    for folder, suffixes in RAW_TEXT.items():
        (home / "data/raw" / folder).mkdir(parents=True)
        for split in ("train", "valid", "test"):
            for suffix, side in zip(suffixes, ("src", "tgt"), strict=True):
                path = home / "data/raw" / folder / f"{split}.{suffix}"
                path.write_bytes(texts[split, side])


def write_tmx(path: Path, pairs: list[tuple[str, str]], tgt_lang: str) -> None:
    """Write a translation memory of English and another language."""
    units = []
    for src, tgt in pairs:
        variants = f'<tuv xml:lang="en"><seg>{src}</seg></tuv>'
        variants += f'<tuv xml:lang="{tgt_lang}"><seg>{tgt}</seg></tuv>'
        units.append(f"<tu>{variants}</tu>")
    body = "".join(units)
    path.write_text(f'<tmx version="1.4"><header srclang="en"/><body>{body}</body></tmx>', "utf-8")


def write_yaml(home: Path) -> None:
    """Write the experiment of docs/commands.md under its two names, and the model of that page."""
    page = (ROOT / "docs/commands.md").read_text("utf-8")
    experiment, model = fenced_blocks(page, "yaml")
    for path in (home / "path/to/mine.yaml", home / "my/experiment/mine.yaml"):
        path.parent.mkdir(parents=True)
        path.write_text(experiment, encoding="utf-8")
    (home / "path/to/wide.yaml").write_text(model, encoding="utf-8")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text, data folders and models that the pages take for granted."""
    home = tmp_path_factory.mktemp("home")
    (home / "toy").mkdir()
    assert command("preprocess", write_corpus(home / "toy"), "num_threads=1") == 0
    write_text(home)
    write_yaml(home)
    (home / "toy/data").rename(home / "data/prepared")
    tokenizer = f"tokenizer.model={home}/data/prepared/tokenizer.model"
    corpora = [f"data.corpora.{name}.tsv={home}/all.tsv" for name in ("news", "web", "crawl", "bt")]
    mine = [*corpora, f"data.valid.tsv={home}/v.tsv", f"data.test.tsv={home}/v.tsv", tokenizer]
    assert command("preprocess", mine, f"data_dir={home}/data/mine", "num_threads=1") == 0
    run_dir = home / "runs/default"
    settings = ["max_updates=200", *SMALL_MODEL, "model.norm=pre", "valid_bleu=false"]
    settings += [
        "optimizer.schedule=cosine",
        "optimizer.peak_learning_rate=0.005",
        "tokens_per_update=600",
        "max_tokens=600",
        "checkpoint_every_updates=40",
        "validate_every_updates=100",
    ]
    assert train(home / "data/prepared", run_dir, settings) == 0
    for seed in (1, 2):
        shutil.copytree(run_dir, home / f"runs/sweep/model.dropout=0,seed={seed}", symlinks=True)
    for name in ("mine", "a", "b", "de-en", "en-de", "teacher", "multi30k"):
        shutil.copytree(run_dir, home / "runs" / name, symlinks=True)
        assert command("average", f"run_dir={home}/runs/{name}") == 0
    shutil.copytree(home / "runs/mine/average", home / "imported")
    export = [f"model_dir={home}/runs/mine", f"output={home}/exported"]
    assert command("export", export) == 0
    write_opus(home / "opus-mt-en-de", 0, MARIAN["swish, bias"])
    write_nllb(home / "nllb-distilled", 0)
    write_marian(home / "marian", 0)
    write_fairseq(home / "fairseq", 0, is_pre_norm=False, is_tied=True)
    for path in (home / "fairseq").iterdir():
        path.rename(home / path.name)
    shutil.copy(home / "source.spm", home / "bpe.model")
    for name in ("other", "source", "target"):
        shutil.copy(home / "data/prepared/tokenizer.model", home / f"{name}.model")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(home)
        for name in ("preprocess", "train"):
            arguments = ["experiment=multilingual"]
            assert command(name, arguments, small_settings(name, arguments)) == 0
    return home


def small_settings(name: str, arguments: list[str]) -> list[str]:
    """Return the settings that make a command small."""
    line = " ".join(arguments)
    if name not in ("preprocess", "train"):
        return []
    settings: list[str] = []
    is_generated = not re.search(r"data[.=]|experiment=(?!copy)", line)
    if not is_generated and "tokenizer.model" not in line:
        # an untrained model back-translates to rare characters, and each needs a piece
        vocab_size = 400 if "backtranslated" in line else 310
        settings.append(f"tokenizer.vocab_size={vocab_size}")
    if name == "preprocess":
        if any(text in line for text in ("num_pairs", "multilingual", "tatoeba")):
            settings += ["data.valid.num_pairs=20", "data.test.num_pairs=20"]
        elif "data.valid" in line and "data.test" not in line:
            settings.append("data.test.tsv=v.tsv")
        return [*settings, "num_threads=1"]
    if "experiment=finetune" not in line:  # which has the architecture of the imported model
        settings += [size for size in SMALL_MODEL if size.partition("=")[0] not in line]
    return [*settings, *SHORT_RUN]


def remove_output(name: str, arguments: list[str]) -> None:
    """Remove the folder of the template that a command is to write."""
    if name in OUTPUT_KEYS:
        output = getattr(composed(name, arguments), OUTPUT_KEYS[name])
        if output and Path(output).is_dir():
            shutil.rmtree(output)


def run(shell: ShellCommand, more_settings: list[str] | None = None) -> int:
    """Run a command in this process, with its pipe and files; return the exit status.

    `more_settings` come last, after those that make the command small.
    """
    for name, inner in shell.substituted.items():
        Path(name).write_bytes(subprocess.check_output(["bash", "-c", inner]))
    stdin = shell.stdin or "in.en"
    if shell.piped_from:
        stdin = "piped"
        Path(stdin).write_bytes(subprocess.check_output(["bash", "-c", shell.piped_from]))
    with ExitStack() as stack:
        file = stack.enter_context(Path(stdin).open(encoding="utf-8"))
        stack.enter_context(patch.object(sys, "stdin", file))
        if shell.stdout:
            file = stack.enter_context(Path(shell.stdout).open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(file))
        settings = small_settings(shell.name, shell.arguments)
        return command(shell.name, shell.arguments, settings, more_settings or [])


def assert_pictures_are_whole(arguments: list[str]) -> None:
    """Check that the output of nmt-visualize, if any, has the format of its suffix."""
    starts = {".png": b"\x89png", ".svg": b"<?xml", ".html": b"<!doc"}
    for argument in arguments:
        if argument.startswith("output="):
            path = Path(argument.removeprefix("output="))
            assert path.read_bytes().lstrip().lower().startswith(starts[path.suffix]), path


def run_lines(lines: list[str]) -> int:
    """Run the commands of nmt among lines of shell; return how many there were."""
    num_commands = 0
    for line in lines:
        shell = parse_command(line)
        if shell is None or any(fragment in line for fragment in ELSEWHERE):
            continue
        if "--multirun" not in shell.arguments:
            remove_output(shell.name, shell.arguments)
        assert run(shell) == 0, line
        if shell.name == "visualize":
            assert_pictures_are_whole(shell.arguments)
        num_commands += 1
    return num_commands


@pytest.fixture
def home(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the template as the current folder."""
    folder = shutil.copytree(template, tmp_path / "home", symlinks=True)
    (folder / "docs").mkdir()
    (folder / "docs/pictures").mkdir()
    monkeypatch.chdir(folder)
    return folder


def mark_page(page: Path) -> Any:
    """Return the parameter of a page: CI runs the commands of some pages only."""
    is_in_ci = page.relative_to(ROOT).as_posix() in PAGES_IN_CI
    return pytest.param(page, marks=pytest.mark.slow if is_in_ci else pytest.mark.long)


WITH_COMMANDS = [page for page in PAGES if any(map(parse_command, shell_lines(page)))]


@pytest.mark.parametrize("page", [*map(mark_page, WITH_COMMANDS)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page: Path, home: Path) -> None:
    run_lines(shell_lines(page))


@pytest.mark.long
@pytest.mark.parametrize("page", TABLES_OF_COMMANDS, ids=lambda page: page.stem)
def test_every_figure_and_symptom_has_a_command_that_runs(page: Path, home: Path) -> None:
    """The figures and listings of the tutorials, and the symptoms of a run that does not learn."""
    lines = list(dict.fromkeys(table_lines(page)))
    assert run_lines(lines) == len(lines)
    assert len(lines) > (50 if page.stem == "paper" else 5)


@pytest.mark.slow
def test_the_examples_of_help_run(home: Path) -> None:
    examples = [line for command in COMMANDS.values() for line in command.examples]
    assert run_lines(examples) > 15


@pytest.mark.slow
def test_the_python_of_the_pages_runs(home: Path) -> None:
    lines = (home / "in.en").read_text(encoding="utf-8").splitlines()
    for name in PAGES_WITH_PYTHON:
        for block in fenced_blocks((ROOT / name).read_text(encoding="utf-8"), "python"):
            exec(block, {"lines": lines, "starts": [""] * len(lines)})  # noqa: S102
