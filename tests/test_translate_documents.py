"""nmt-translate and the server with documents."""

from __future__ import annotations

import io
import signal
import urllib.parse
from dataclasses import replace
from pathlib import Path

import docx
import pytest
from exporting import random_model
from serving import GOOD, loaded, running, tiny_folder
from test_extension import languages_model
from tiny import sentences
from toy import command
from translating import run_and_die, run_in_child, translate, write_lines, write_model

from nmt import Translator
from nmt.config import Norm
from nmt.data.tokenizer import Tokenizer
from nmt.documents.markup import parse_html
from nmt.translate.results import LineResult


def make_document(lines: list[str]) -> bytes:
    """Return a DOCX file with a paragraph for each line; the last word of each is bold."""
    document = docx.Document()
    for line in lines:
        first_words, _, last_word = line.rpartition(" ")
        paragraph = document.add_paragraph(f"{first_words} ")
        paragraph.add_run(last_word).bold = True
    stream = io.BytesIO()
    document.save(stream)
    return stream.getvalue()


def read_paragraphs(content: bytes) -> list[str]:
    return [paragraph.text for paragraph in docx.Document(io.BytesIO(content)).paragraphs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("documents") / "model")


def test_paragraphs_are_translated_as_lines_are(model: Path, tmp_path: Path) -> None:
    lines = [line.rstrip(".") for line in sentences(20)]
    write_lines(tmp_path / "in", lines)
    (tmp_path / "in.docx").write_bytes(make_document(lines))
    shared = [f"model_dir={model}", "backend=native"]
    assert translate(*shared, f"input={tmp_path / 'in'}", f"output={tmp_path / 'out'}") == 0
    names = [f"input={tmp_path / 'in.docx'}", f"output={tmp_path / 'out.docx'}"]
    assert translate(*shared, *names) == 0
    expected = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    paragraphs = read_paragraphs((tmp_path / "out.docx").read_bytes())
    assert [text.strip() for text in paragraphs] == [text.strip() for text in expected]
    assert not list(tmp_path.glob("*.partial*"))
    bold = [run for run in docx.Document(str(tmp_path / "out.docx")).paragraphs[0].runs if run.bold]
    assert bold


def test_tags_are_placed_without_the_language_before_each_translation(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", languages_model(), norm=Norm.pre)
    lines = [line.split() for line in sentences(20) if line.count(" ") > 4]
    page = "".join(f"<p>{a} <b>{b}</b> <i>{c}</i> {' '.join(d)}</p>" for a, b, c, *d in lines)
    (tmp_path / "in.html").write_text(page, encoding="utf-8")
    search = {"max_length_a": 0.0, "max_length_b": 9, "no_repeat_ngram": 1}
    languages = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}
    arguments = [f"{key}={value}" for key, value in {**search, **languages}.items()]
    arguments += [f"model_dir={folder}", "backend=native", f"input={tmp_path / 'in.html'}"]
    assert translate(*arguments, f"output={tmp_path / 'out.html'}") == 0
    translator = Translator.load(folder, device="cpu", backend="native")
    text = parse_html(page)
    results = []
    results_with_tag = []
    for candidates in translator.n_best(text.sentences, alignment=True, **search, **languages):
        best = candidates[0]
        assert best.tokens[0] == "deu_Latn"
        assert best.alignment is not None
        without_tag = replace(best, tokens=best.tokens[1:], alignment=best.alignment[1:])
        source_tokens = list(candidates.source_tokens)
        results.append(LineResult([without_tag], source_tokens=source_tokens))
        results_with_tag.append(LineResult([best], source_tokens=source_tokens))
    expected = text.render(results, prefix="eng_Latn ")
    assert text.render(results_with_tag, prefix="eng_Latn ") != expected
    assert (tmp_path / "out.html").read_text(encoding="utf-8") == expected


@pytest.mark.slow
def test_a_killed_job_resumes_and_writes_the_same_document(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.docx").write_bytes(make_document(sentences(200)))
    shared = [f"model_dir={model}", f"input={tmp_path / 'in.docx'}", "window_lines=20"]
    shared.append("backend=native")
    assert translate(*shared, f"output={tmp_path / 'whole.docx'}") == 0
    output = f"output={tmp_path / 'out.docx'}"
    log = tmp_path / "log"
    assert (
        run_in_child(log, run_and_die, "append", 3, translate, *shared, output) == -signal.SIGKILL
    )
    assert translate(*shared, output) == 0
    assert "resuming after line 40" in capfd.readouterr().err
    assert (tmp_path / "out.docx").read_bytes() == (tmp_path / "whole.docx").read_bytes()


def test_text_in_a_document_format_is_lines_for_another_output(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<p>the <b>tree</b></p>\n", encoding="utf-8")
    shared = [f"model_dir={model}", f"input={tmp_path / 'a.html'}"]
    assert translate(*shared, f"output={tmp_path / 'lines.txt'}") == 0
    assert translate(*shared, f"output={tmp_path / 'b.html'}") == 0
    page = (tmp_path / "b.html").read_text(encoding="utf-8")
    assert page.startswith("<p>")
    assert page.endswith("</p>\n")
    assert page != (tmp_path / "lines.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["input={}/a.docx"], "output=-: give the path of a file that ends in .docx"),
        (["input={}/a.docx", "output={}/b.txt"], "b.txt: give the path of a file that ends in"),
        (["input={}/a.docx", "output={}/b.docx", "n_best=2"], "n_best=2: does not work with doc"),
        (["input={}/bad.docx", "output={}/b.docx"], "bad.docx: the file is not a DOCX document"),
    ],
)
def test_mistakes_are_one_line(
    settings: list[str],
    message: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.docx").write_bytes(make_document(["the tree"]))
    (tmp_path / "bad.docx").write_bytes(b"x")
    arguments = [setting.format(tmp_path) for setting in settings]
    assert command("translate", [f"model_dir={model}"], arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


@pytest.mark.slow
def test_the_server_translates_documents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = make_document(["the house", "a green tree"])
    with running(loaded(tiny_folder(tmp_path / "model", tokenizer))) as server:
        answer = server.upload("my letter.docx", content, **GOOD)
        assert answer.status == 200, answer
        path = urllib.parse.urlsplit(answer.json["translatedFileUrl"]).path
        assert path.endswith("my%20letter_yy.docx")
        paragraphs = read_paragraphs(server.get(path).body)
        expected = [server.translate("the house"), server.translate("a green tree")]
        assert paragraphs == expected
        formats = server.get("/frontend/settings").json["supportedFilesFormat"]
        assert ".docx" in formats
        assert ".xliff" in formats
        answer = server.upload("a.docx", b"x", **GOOD)
        assert answer.status == 400
        assert "is not a DOCX document" in answer.json["error"]
