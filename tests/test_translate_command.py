"""nmt-translate as a command: odd lines, slow streams, memory, failures, settings, JSON."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny import sentences
from translating import (
    assert_bounded_memory,
    fork,
    kill,
    status,
    translate,
    write_lines,
    write_model,
)

from nmt import Translator
from nmt.data.text import read_stream
from nmt.runtime import progress
from nmt.search.request import SearchRequest
from nmt.translate.engines.native import NativeBackend

HOSTILE = [
    b"the house",
    b"a\xe2\x80\xa8tree",  # U+2028
    b"a\xe2\x80\xa9tree",  # U+2029
    b"a\xc2\x85tree",  # NEL
    b"a\x0btree\x0c",
    b"a\rtree",
    b"",
    b"\xef\xbb\xbfgreen",  # BOM
    b"nul\x00nul",
    b"   ",
    b"</s>",
    b"the </s> house",
    b"<s> </s> <pad> <unk> \xe2\x96\x81",
    b"<0x0A> <0x41>",
    b"\x1c\x1d\x1e",
    "😀 👩\u200d👩\u200d👧 ﬁ Ａ \u202e".encode(),
    b"carriage\r",
    b"the " * 300,
    b"x" * 500,
    b"\xef\xbf\xbf\xf4\x8f\xbf\xbf",  # no characters, yet UTF-8
    b"the last, without an end",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("command") / "model")


def output_of(model: Path, *arguments: str, folder: Path) -> list[str]:
    path = folder / "out"
    assert translate(f"model_dir={model}", f"output={path}", *arguments) == 0
    lines = path.read_bytes().decode("utf-8").split("\n")
    assert lines.pop() == ""
    return lines


@pytest.mark.slow
def test_line_i_answers_line_i_whatever_is_in_the_text(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"\n".join(HOSTILE))
    translator = Translator.load(model, device="cpu", backend="native")
    alone = [
        translator.translate([*read_stream(io.BytesIO(raw + b"\n"), "here")])[0] for raw in HOSTILE
    ]
    assert all(len(text.splitlines()) <= 1 for text in alone)  # for all other tools, too
    assert output_of(model, f"input={tmp_path / 'in'}", folder=tmp_path) == alone
    options = ["format=json", "window_lines=3", "max_tokens=1"]
    output_lines = output_of(model, f"input={tmp_path / 'in'}", *options, folder=tmp_path)
    records = [json.loads(line) for line in output_lines]
    assert [record["index"] for record in records] == list(range(len(HOSTILE)))
    assert [record["hypotheses"][0]["text"] for record in records] == alone


def test_text_that_is_read_as_lines_needs_no_readers_of_documents(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nmt.cli.translate_document", None)  # its import fails
    source = write_lines(tmp_path / "in.txt", ["the house"])
    output = tmp_path / "out.txt"
    assert translate([f"model_dir={model}", f"input={source}", f"output={output}"]) == 0
    assert output.read_text(encoding="utf-8").count("\n") == 1
    document = write_lines(tmp_path / "in.html", ["<p>the house</p>"])
    with pytest.raises(ImportError):
        translate([f"model_dir={model}", f"input={document}", f"output={output}"])


def test_a_line_that_is_not_utf8_is_named_and_the_windows_before_it_are_written(
    model: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(b"the house\n" * 70 + b"caf\xe9\n")
    assert translate(f"model_dir={model}", f"input={tmp_path / 'in'}") == 2
    out, err = capfdbinary.readouterr()
    assert b"in:71: byte 4 (0xe9) is not UTF-8" in err
    assert out.count(b"\n") == 64


def read_line(descriptor: int) -> bytes:
    """Read a line that must come soon; b"" at the end."""
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([descriptor], [], [], 60)[0]
        byte = os.read(descriptor, 1)
        if not byte:
            return line
        line += byte
    return line


def serve(model: Path, folder: Path, stdin: int, *close: int) -> tuple[int, int]:
    """Start a translation in a child that reads `stdin`; return its id and its output."""
    reader, writer = os.pipe()
    pid = fork(
        lambda: translate(f"model_dir={model}"),
        folder / "log",
        stdin=stdin,
        stdout=writer,
        close=(reader, *close),
    )
    os.close(writer)
    os.close(stdin)
    return pid, reader


def test_an_answer_does_not_wait_for_the_next_line(model: Path, tmp_path: Path) -> None:
    stdin, writer = os.pipe()
    pid, reader = serve(model, tmp_path, stdin, writer)
    for lines in (1, 3, 1):
        os.write(writer, b"the house\n" * lines)
        assert all(read_line(reader).endswith(b"\n") for _ in range(lines))
    os.write(writer, b"no end")
    os.close(writer)
    assert read_line(reader).endswith(b"\n")
    assert read_line(reader) == b""
    assert status(pid) == 0
    master, slave = pty.openpty()  # a person who types, and sees no bar
    pid, reader = serve(model, tmp_path, slave, master)
    for _ in range(2):
        os.write(master, b"the house\n")
        assert read_line(reader).endswith(b"\n")
    os.write(master, b"\x04")  # Ctrl-D
    assert read_line(reader) == b""
    assert status(pid) == 0
    assert "lines/s" not in (tmp_path / "log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_reader_that_has_enough_ends_the_work(model: Path, tmp_path: Path) -> None:
    stdin, writer = os.pipe()
    feeder = fork(
        lambda: os.write(writer, b"the house\n" * 100_000), tmp_path / "feeder", close=(stdin,)
    )  # more than a pipe holds, and then no end
    pid, reader = serve(model, tmp_path, stdin, writer)
    assert read_line(reader).endswith(b"\n")
    os.close(reader)
    assert status(pid) == 0
    kill(feeder)
    os.close(writer)
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")


def test_without_a_terminal_progress_is_lines_of_log(
    model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_SECONDS", 0.0)
    arguments = [f"input={write_lines(tmp_path / 'in', ['the house'] * 200)}", "window_lines=50"]
    output_of(model, *arguments, folder=tmp_path)
    err = capfd.readouterr().err
    for done in (50, 100, 150):
        assert re.search(rf"{done} of about 200 lines, [\d,.]+ lines/s, 0:00:\d\d left\n", err)
    assert re.search(r"200 lines in 0:00:\d\d, [\d,.]+ lines/s\n", err)
    assert "\r" not in err


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_lines(model: Path, tmp_path: Path) -> None:
    lines = [line[:40] for line in sentences(500, seed=3)]
    short_text = write_lines(tmp_path / "short", lines)
    long_text = tmp_path / "long"
    long_text.write_bytes(short_text.read_bytes() * 10 + b"\n" * 45_000)
    assert_bounded_memory(partial(translate_text, model), [short_text, long_text])


def translate_text(model: Path, text: Path) -> None:
    options = ["beam_size=1", "max_length_a=0", "max_length_b=1", "window_lines=500"]
    output_of(model, f"input={text}", *options, folder=text.parent)


@pytest.mark.slow
def test_a_sentence_that_fails_is_named_and_the_rest_is_written(
    model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = sentences(90, seed=6)
    native_search = NativeBackend.search
    input_arguments = [f"input={write_lines(tmp_path / 'in', lines)}"]
    expected = output_of(model, *input_arguments, folder=tmp_path)

    def search(self: NativeBackend, request: SearchRequest) -> Any:
        if max(map(len, request.sources)) > 60:  # as a graphics card fails for long sentences
            raise RuntimeError("no memory")
        return native_search(self, request)

    monkeypatch.setattr(NativeBackend, "search", search)
    lines[7] = lines[80] = "the " * 70
    expected[7] = expected[80] = ""
    write_lines(tmp_path / "in", lines)
    for options in ([], ["format=json"]):
        arguments = [f"model_dir={model}", *input_arguments, f"output={tmp_path / 'out'}", *options]
        assert translate(*arguments) == 2
        err = capfd.readouterr().err
        assert "line 8 could not be translated; wrote an empty line: RuntimeError: no memory" in err
        assert "line 81 could not" in err
        assert err.split("\n")[-2].startswith("nmt-translate: 2 lines could not be translated")
        output_lines = (tmp_path / "out").read_text(encoding="utf-8").split("\n")[:-1]
        if not options:
            assert output_lines == expected
            continue
        for i, record in enumerate(map(json.loads, output_lines)):
            if i in (7, 80):
                failed = {"error": "RuntimeError: no memory", "hypotheses": []}
                assert record == {"index": i} | failed
            else:
                assert record["hypotheses"][0]["text"] == expected[i]


def test_json_tells_all_of_every_hypothesis(model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in", [*sentences(9, seed=2), "", "The tree. A house sees the tree."])
    options = ["format=json", "n_best=2", "alignment=true", "max_source_length=10"]
    output_lines = output_of(model, f"input={tmp_path / 'in'}", *options, folder=tmp_path)
    records = [json.loads(line) for line in output_lines]
    assert [record["index"] for record in records] == list(range(11))
    assert records[10]["num_parts"] > 1
    for record in records:
        for h in record["hypotheses"]:
            assert sum(h["token_log_probs"]) == pytest.approx(h["log_prob"], abs=1e-5)
            assert len(h["token_log_probs"]) >= len(h["tokens"])
            if record["index"] != 9:
                assert len(h["alignment"]) == len(h["tokens"])
                assert max(h["alignment"]) < len(record["source_tokens"])
    empty = {"text": "", "score": 0, "log_prob": 0, "tokens": [], "token_log_probs": []}
    assert records[9]["hypotheses"] == [empty | {"finished": True}]


@pytest.mark.slow
def test_prefixes_start_the_translations_and_must_be_as_many(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"input={write_lines(tmp_path / 'in', sentences(5, seed=2))}"]
    prefixes = ["the", "", "größer Haus", "", ""]
    arguments.append(f"prefixes={write_lines(tmp_path / 'prefixes', prefixes)}")
    translations = output_of(model, *arguments, "window_lines=2", folder=tmp_path)
    free = output_of(model, arguments[0], folder=tmp_path)
    for text, plain, prefix in zip(translations, free, prefixes, strict=True):
        assert text.startswith(prefix) if prefix else text == plain
    write_lines(tmp_path / "prefixes", prefixes[:4])
    assert translate(f"model_dir={model}", *arguments) == 2
    err = capfd.readouterr().err
    assert f"{tmp_path}/in has 5 lines, {tmp_path}/prefixes 4; " in err


@pytest.mark.slow
def test_several_model_folders_are_an_ensemble(model: Path, tmp_path: Path) -> None:
    second_model = write_model(tmp_path / "other", seed=3)
    arguments = [f"input={write_lines(tmp_path / 'in', sentences(20, seed=2))}"]
    folders = (model, f"[{model},{model}]", f"[{model},{second_model}]", second_model)
    single, twice, ensemble, second = (
        output_of(tmp_path, *arguments, f"model_dir={folder}", folder=tmp_path)
        for folder in folders
    )
    assert single == twice
    assert ensemble not in (single, second)
    lines = sentences(20, seed=2)
    assert (
        Translator.load([model, second_model], device="cpu", backend="native").translate(lines)
        == ensemble
    )


@pytest.mark.slow
def test_a_wrong_setting_is_one_line(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "in", ["the house"])
    write_lines(tmp_path / "in.de", ["the"])
    for arguments, named in (
        (["too_long=cut"], "too_long"),
        (["prefixes=-"], "prefixes=-"),
        ([f"output={path}"], "is the input"),
        ([f"output={path}.de", f"prefixes={path}.de"], "is the input"),
        (["model_dir=[]"], "model_dir=[]: name at least one"),
        (["temperature=0.5"], "temperature=0.5: only works with sampling=true"),
        (["backend=ctranslate3"], "backend"),
        ([f"model_dir=[{model},{model}]", "backend=ctranslate2"], "has no ensembles"),
    ):
        model_arguments = [] if "model_dir" in arguments[0] else [f"model_dir={model}"]
        assert translate(*model_arguments, f"input={path}", *arguments) == 2
        out, err = capfd.readouterr()
        assert named in err.split("\n")[-2]
        assert out == ""
