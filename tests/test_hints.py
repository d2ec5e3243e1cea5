"""Every hint that a command prints is typed unchanged: "did you mean", "next", "make it with",
and advice for the settings of other toolkits. Each function that prints one is reached.
"""

from __future__ import annotations

import ast
import importlib
import logging
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, loaded, running, tiny_folder
from test_first_hour import HINT, follow
from test_import_huggingface import M2M100, write_m2m100
from test_wrong_turns import ADVICE, COMPLETIONS, PLACEHOLDERS, type_words
from toy import TINY, command, write_corpus

import nmt
from nmt import errors
from nmt.cli.arguments import parse_argument
from nmt.cli.commands import COMMANDS
from nmt.config import ServeConfig
from nmt.config.words import ADVICE_FOR_KEY
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.serve.server import listen
from nmt.translate.translator import Translator

PACKAGE = Path(nmt.__file__).parent
FunctionName = tuple[str, str]  # of a module and of one of its functions

PROPOSALS = re.compile(r"did you mean (.*?)\?")
DRY_RUN = ["data_dir=data", *TINY, "max_updates=4", "dry_run=true"]
TUNE = [*[option for option in TINY if "model." not in option], "init_from=run", "max_updates=1"]
PREPROCESS = ["preprocess", "overwrite=true", "data_dir=new"]

# A command, and the part of it that is misspelled. `write_files` writes the files.
MISSPELLED: list[tuple[list[str], str]] = [
    (["trian", "--help"], "trian"),
    (["train", *DRY_RUN, "max_updte=3"], "max_updte"),
    (["train", *DRY_RUN, "model.d_modle=16"], "model.d_modle"),
    (["train", *DRY_RUN, "mxi.news=2"], "mxi.news"),
    (["train", *DRY_RUN, "mix.nwes=2"], "nwes"),
    (["train", *DRY_RUN, "model.norm=Pree"], "Pree"),
    (["train", *DRY_RUN, "tracker=[tensorbord]"], "tensorbord"),
    (["train", *DRY_RUN, "model=Tiny"], "Tiny"),
    (["train", *DRY_RUN, "experiment=mine"], "mine"),
    (["train", *DRY_RUN, "stages.a.start=2", "stages.a.augment.upprr=0.1"], "upprr"),
    (["train", *TUNE, "data_dir=grown", "run_dir=tuned", "init_rows={xyz:e}"], "xyz"),
    (["evaluate", "hypotheses=in.en", "references=in.en", "tokenize=carh", "force=true"], "carh"),
    (["translate", "model_dir=run", "input=in.en", "output=out.de", "beamsiz=2"], "beamsiz"),
    (["translate", "model_dir=run", "input=in.en", "output=out.de", "too_long=spli"], "spli"),
    (["import", "input=m2m", "output=imported", "src_lang=de", "tgt_lang=frr"], "frr"),
    ([*PREPROCESS, "CORPUS", "filter.max_foreign=0.5", "filter.tgt_scripts=[Latn]"], "Latn"),
    ([*PREPROCESS, "CORPUS", "filter.language=true", "data.src_lang=eng"], "eng"),
    ([*PREPROCESS, "CORPUS", "data.tgt_lan=de"], "data.tgt_lan"),
    (
        [
            *PREPROCESS,
            "data.train.dataset=saved",
            "data.train.dataset_split=trian",
            "data.src_lang=en",
            "data.tgt_lang=de",
            "data.valid.num_pairs=5",
        ],
        "trian",
    ),
]
# settings in a YAML file, and the misspelled one
MISSPELLED_YAML = {"max_update: 3": "max_update", "optimizer: {nmae: adam}": "nmae"}


def find_functions(text: str, pattern: str = "") -> set[FunctionName]:
    """Return the functions of nmt whose statements contain `text` and match `pattern`."""
    functions = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        code = path.read_text(encoding="utf-8")
        if text not in code:  # parsing every file takes seconds
            continue
        tree = ast.parse(code)
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = 0 if ast.get_docstring(node) is None else 1
                body = "\n".join(ast.unparse(statement) for statement in node.body[first:])
                if text in body and re.search(pattern, body):
                    functions.add((module, node.name))
    return functions


@pytest.fixture
def proposing(monkeypatch: pytest.MonkeyPatch) -> set[FunctionName]:
    """The functions that have proposed names with "did you mean" since the test began."""
    functions: set[FunctionName] = set()
    propose = errors.suggest_names

    def note(name: str, *arguments: Any) -> str:
        frame = sys._getframe(1)
        functions.add((frame.f_globals["__name__"], frame.f_code.co_name))
        return propose(name, *arguments)

    for module, _ in find_functions("suggest_names("):
        monkeypatch.setattr(importlib.import_module(module), "suggest_names", note)
    return functions


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with text, a data folder, a run, a foreign model and settings."""
    monkeypatch.chdir(tmp_path)
    Path("in.en").write_text("red house\nbig tree\n", encoding="utf-8")
    Path("mine.yaml").write_text("max_updates: 4\n", encoding="utf-8")
    arguments = [word for word in write_corpus(tmp_path) if not word.startswith("data_dir=")]
    arguments.append("data.src_lang=en")
    (tmp_path / "corpus.txt").write_text(shlex.join(arguments), encoding="utf-8")
    corpora = [word.replace("data.train", "data.corpora.news") for word in arguments]
    assert command("preprocess", corpora, "data_dir=data") == 0
    run = ["data_dir=data", "run_dir=run", "max_updates=4", "valid_bleu=false"]
    assert command("train", run, TINY) == 0
    grown = ["tokenizer.model=run", "tokenizer.extend=0", "tokenizer.symbols=[xyzw]"]
    assert command("preprocess", arguments, "data_dir=grown", grown) == 0
    return tmp_path


def read_corpus_arguments() -> list[str]:
    """Return the arguments of nmt-preprocess that name the text of the workspace."""
    return shlex.split(Path("corpus.txt").read_text(encoding="utf-8"))


def read_proposals(answer: str) -> list[str]:
    """Return the names in "did you mean a or b?"."""
    match = PROPOSALS.search(answer)
    assert match is not None, answer
    return match[1].split(" or ")


def type_corrected_words(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> list[tuple[str, str, str]]:
    """Type commands with the proposed names, and return the names that fail and why."""
    failures = []
    for command_words, misspelled in MISSPELLED:
        words = []
        for word in command_words:
            words += read_corpus_arguments() if word == "CORPUS" else [word]
        capfd.readouterr()
        assert type_words(monkeypatch, words) == 2, words
        for position, name in enumerate(read_proposals(capfd.readouterr().err)):
            corrected = [re.sub(rf"{re.escape(misspelled)}(?!g)", name, word) for word in words]
            status = type_words(monkeypatch, corrected)
            error_text = capfd.readouterr().err
            # the value may be of another type than the second name takes
            if status != 0 and (position == 0 or "did you mean" in error_text):
                failures.append((misspelled, name, error_text))
    for text, misspelled in MISSPELLED_YAML.items():
        Path("own.yaml").write_text(f"{text}\n", encoding="utf-8")
        words = ["train", *DRY_RUN, "experiment=own.yaml"]
        assert type_words(monkeypatch, words) == 2, text
        for name in read_proposals(capfd.readouterr().err)[:1]:
            corrected_text = text.replace(misspelled, name.rpartition(".")[2])
            Path("own.yaml").write_text(f"{corrected_text}\n", encoding="utf-8")
            if type_words(monkeypatch, words) != 0:
                failures.append((misspelled, name, capfd.readouterr().err))
    return failures


def translate_with_proposed_names(translator: Translator) -> None:
    """Misspell an argument and a piece, and translate with each proposed name."""
    with pytest.raises(ConfigError) as error:
        translator.translate(["red"], max_token=30)  # type: ignore[call-arg]
    for name in read_proposals(str(error.value)):
        translator.translate(["red"], **{name: 30})
    longest_piece = max(translator.tokenizer.tgt.all_pieces(), key=len)
    with pytest.raises(ConfigError) as error:
        translator.translate(["red"], suppress=[f"{longest_piece}x"])
    for name in read_proposals(str(error.value)):
        translator.translate(["red"], suppress=[name])


def request_with_proposed_names(server: Server) -> None:
    """Misspell a field, a glossary and a column, and request with each proposed name."""
    languages = {"source": "xx", "target": "yy"}
    answer = server.post("/v1/translate", text="a", n_bset=2, **languages)
    for name in read_proposals(answer.json["error"]):
        assert server.post("/v1/translate", text="a", **languages, **{name: 2}).status == 200
    answer = server.post("/v1/translate", text="a", glossary="our", **languages)
    for name in read_proposals(answer.json["error"]):
        answer = server.post("/v1/translate", text="a", glossary=name, **languages)
        assert answer.status == 200
    table = b"id;text\n1;red\n"
    answer = server.upload("t.csv", table, columns="txt", **languages)
    for name in read_proposals(answer.json["error"]):
        assert server.upload("t.csv", table, columns=name, **languages).status == 200


def test_names_are_proposed_that_are_almost_as_similar_as_the_most_similar_one() -> None:
    names = ["max_tokens", "max_updates", "max_updaters", "optimizer.warmup_steps"]
    for name, expected in (
        ("max_updte", "did you mean max_updates or max_updaters?"),  # not max_tokens
        ("max_toens", "did you mean max_tokens?"),
        ("warmup_steps", "did you mean optimizer.warmup_steps?"),
        ("zzz", "valid: max_tokens, max_updaters, max_updates, optimizer.warmup_steps"),
    ):
        assert errors.suggest_names(name, names) == expected
    assert errors.suggest_names("zzz", names, "see docs/settings.md") == "see docs/settings.md"


@pytest.mark.slow
def test_each_proposed_name_works_in_place_of_the_misspelled_one(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tokenizer: Tokenizer,
    proposing: set[FunctionName],
) -> None:
    import datasets  # takes a second

    write_m2m100(workspace / "m2m", 0, M2M100["m2m"])
    records = [{"translation": {"en": f"red {i}", "de": f"rot {i}"}} for i in range(40)]
    splits = {"train": datasets.Dataset.from_list(records)}
    datasets.DatasetDict(splits).save_to_disk("saved")
    failures = type_corrected_words(monkeypatch, capfd)
    assert not failures, "\n".join(map(str, failures))
    translate_with_proposed_names(Translator.load("run"))
    Path("glossaries").mkdir()
    Path("glossaries/ours.tsv").write_text("red\trot\n", encoding="utf-8")
    models = loaded(tiny_folder(workspace / "model", tokenizer))
    with running(models, glossaries=str(workspace / "glossaries")) as server:
        request_with_proposed_names(server)
    proposing.add(("nmt.documents.tables", "_find_column"))  # the upload ran it in another process
    assert proposing == find_functions("suggest_names(")


@pytest.fixture
def logging_hints() -> Iterator[set[FunctionName]]:
    """The functions that have logged a hint since the test began."""
    functions: set[FunctionName] = set()
    make_record = logging.getLogRecordFactory()

    def note(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make_record(*arguments, **named)
        if HINT.search(record.getMessage()):
            functions.add((record.name, record.funcName))
        return record

    logging.setLogRecordFactory(note)
    yield functions
    logging.setLogRecordFactory(make_record)


@pytest.mark.long
def test_each_next_command_works_as_it_stands(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    logging_hints: set[FunctionName],
) -> None:
    paths = {"TRAIN.src": "train.src.txt", "TRAIN.tgt": "train.tgt.txt"}
    paths |= {"VALID.src": "valid.src.txt", "VALID.tgt": "valid.tgt.txt"}
    write_m2m100(workspace / "m2m", 0, M2M100["m2m"])

    def follow_hint(*more_words: str) -> None:
        hint = HINT.findall(capfd.readouterr().err)[-1]
        for name, path in paths.items():
            hint = hint.replace(name, path)
        if "argospm" in hint:
            assert Path(shlex.split(hint)[-1]).is_file()
            return
        with open("in.en", encoding="utf-8") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert follow(shlex.join([*shlex.split(hint), *more_words])) == 0, hint

    for name in ("distill", "backtranslate"):
        text = ["input=train.src.txt", "model_dir=run", f"output=my {name}"]
        assert command(name, text, "max_ratio=0", "max_repeats=0") == 0
        follow_hint()  # nmt-preprocess
        follow_hint(*TINY, "max_updates=1", "valid_bleu=false")  # nmt-train
        follow_hint("last=1")  # nmt-average
        follow_hint()  # nmt-translate
    assert command("import", "input=m2m", "output=my model", "src_lang=de", "tgt_lang=fr") == 0
    follow_hint()
    for format_name in ("ctranslate2", "argos"):
        assert command("export", "model_dir=run", f"format={format_name}") == 0
        follow_hint()
    assert logging_hints == find_functions("next: ", r"log\.info\([^\n]*\bnext: ")


@pytest.mark.slow
def test_each_command_that_makes_missing_files_makes_them(
    workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = read_corpus_arguments()
    lines = ["from pathlib import Path"]
    for side in ("src", "tgt"):
        lines.append(f"Path('made.{side}').write_text(Path('train.{side}.txt').read_text())")
    Path("make it.py").write_text("\n".join(lines), encoding="utf-8")
    train = ["data.train.src=made.src", "data.train.tgt=made.tgt"]
    other_arguments = [word for word in arguments if not word.startswith("data.train")]
    words = [*train, *other_arguments, "data_dir=made", "data.made_by='python \"make it.py\"'"]
    assert command("preprocess", words) == 2
    hint = shlex.split(HINT.findall(capfd.readouterr().err)[-1])
    assert subprocess.run(hint).returncode == 0
    assert command("preprocess", words) == 0
    for data_dir, settings in (("with text", arguments), ("without text", [])):
        assert command("train", settings, f"data_dir={data_dir}", "dry_run=true") == 2
        hint = HINT.findall(capfd.readouterr().err)[-1]
        for word in arguments:
            key, _, value = word.partition("=")
            hint = hint.replace(f"{key}=FILE", shlex.quote(word))
        assert follow(f"{hint} overwrite=true") == 0
        assert Path(data_dir, "meta.json").is_file()
    assert command("train", "dry_run=true") == 2
    assert follow(HINT.findall(capfd.readouterr().err)[-1]) == 0
    assert Path("data/prepared/meta.json").is_file()
    assert find_functions("make it with: ") == {
        ("nmt.cli.data_folder", "ensure_data"),
        ("nmt.preprocess.sources", "_check_files"),
    }


@pytest.mark.slow
def test_the_number_that_an_error_names_is_accepted(
    workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [word for word in read_corpus_arguments() if "vocab_size" not in word]
    assert command("preprocess", arguments, "data_dir=new", "tokenizer.vocab_size=9000") == 2
    (setting,) = re.findall(r"set (tokenizer\.vocab_size=\d+)", capfd.readouterr().err)
    assert command("preprocess", arguments, "data_dir=new", setting) == 0
    assert command("train", DRY_RUN, "max_tokens=4") == 2
    (setting,) = re.findall(r"set (max_tokens=\d+) or more", capfd.readouterr().err)
    assert command("train", DRY_RUN, setting) == 0
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        config = ServeConfig(model_dir=["run"], port=occupied.getsockname()[1])
        with pytest.raises(ConfigError) as error:
            listen(config)
        (port,) = re.findall(r"such as port=(\d+)", str(error.value))
        listen(ServeConfig(model_dir=["run"], port=int(port))).close()


@pytest.mark.long
def test_advice_for_each_setting_of_another_toolkit_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answers: dict[tuple[str, str], str] = {}  # settings by the command and its answer
    for name, typed_command in COMMANDS.items():
        for key in ADVICE_FOR_KEY:
            try:
                parse_argument(f"{key}=7", typed_command)
            except ConfigError as error:
                advice = ADVICE.search(str(error))
                if advice is not None:
                    answers[name, str(error).partition("; ")[2]] = advice[1]
    failures = []
    for (name, answer), settings in answers.items():
        words = settings
        for placeholder, value in PLACEHOLDERS.items():
            words = words.replace(placeholder, value)
        completions = COMPLETIONS.get(name, [])
        if name == "evaluate" and "hypotheses=" not in words:
            completions = ["model_dir=run", "src=a.en", "references=a.de"]
        if name == "preprocess" and "data.valid." in words:
            completions = completions[:2]  # the third is data.valid.num_pairs
        words = [*completions, *shlex.split(words.rstrip(",; "))]
        status = type_words(monkeypatch, [name, "-c", "job", *words])
        error_text = capfd.readouterr().err
        if status != 0:
            failures.append((name, answer, error_text))
    assert not failures, "\n".join(map(str, failures))
    assert len(answers) > 60
