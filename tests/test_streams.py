"""Input and output other than plain files: named pipes, descriptors, devices, compressed files."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import sentences
from toy import command
from translating import fork, status, translate, write_lines, write_model

from nmt.cli import translate as cli
from nmt.config import TranslateConfig
from nmt.data.text import compress, read_lines
from nmt.runtime import progress

LINES = [*sentences(5, seed=4), "", "the last"]
TEXT = "".join(f"{line}\n" for line in LINES).encode()


def test_the_size_is_known_of_text_in_a_plain_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []
    monkeypatch.setattr(cli, "Progress", lambda *_, total_bytes, **__: seen.append(total_bytes))
    for name in ("in.txt", "in.gz", "in.xz", "in.zst"):
        (tmp_path / name).write_bytes(TEXT)
        config = TranslateConfig(model_dir=["x"], input=str(tmp_path / name), output="x")
        cli._open_progress(config, None, 0, is_interactive=False)
    os.mkfifo(tmp_path / "pipe")
    cli._open_progress(replace(config, input=str(tmp_path / "pipe")), None, 0, is_interactive=False)
    assert seen == [len(TEXT), None, None, None, None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("streams") / "model")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    work_dir = tmp_path_factory.mktemp("expected")
    source = write_lines(work_dir / "in", LINES)
    assert translate(f"model_dir={model}", f"input={source}", f"output={work_dir / 'out'}") == 0
    return (work_dir / "out").read_bytes()


def pipe(data: bytes) -> int:
    """Return the end of a pipe that holds `data`."""
    end, start = os.pipe()
    os.write(start, data)
    os.close(start)
    return end


def named_pipe(path: Path, data: bytes) -> Path:
    """Make a named pipe; a thread writes `data` when a reader opens it."""
    os.mkfifo(path)
    threading.Thread(target=path.write_bytes, args=[data], daemon=True).start()
    return path


@pytest.mark.slow
def test_input_may_be_whatever_can_be_read_once(
    model: Path, expected: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for name, source, output_lines in (
        ("descriptor", f"/dev/fd/{pipe(TEXT)}", expected),  # what <(command) becomes
        ("named pipe", str(named_pipe(tmp_path / "fifo", TEXT)), expected),
        ("nothing", "/dev/null", b""),
    ):
        assert translate(f"model_dir={model}", f"input={source}", f"output={out}") == 0, name
        assert out.read_bytes() == output_lines, name
    files = [f"src=/dev/fd/{pipe(TEXT)}", f"tgt=/dev/fd/{pipe(TEXT)}"]
    assert command("score", f"model_dir={model}", files, f"output={out}", "device=cpu") == 0
    assert len(out.read_text().split()) == len(LINES)
    texts = [f"hypotheses=/dev/fd/{pipe(TEXT)}", f"references=/dev/fd/{pipe(TEXT)}"]
    assert command("evaluate", texts, "metrics=chrf") == 0


@pytest.mark.slow
def test_stdin_and_stdout_have_their_unix_names(
    model: Path, expected: bytes, tmp_path: Path
) -> None:
    for source, target in (("/dev/stdin", "/dev/stdout"), ("-", "/dev/fd/1"), ("/dev/fd/0", "-")):
        end, start = os.pipe()
        arguments = [f"model_dir={model}", f"input={source}", f"output={target}"]
        log = tmp_path / "log"
        stdin = pipe(TEXT)
        pid = fork(lambda p=arguments: translate(p), log, stdin=stdin, stdout=start, close=[end])
        os.close(start)
        os.close(stdin)
        with os.fdopen(end, "rb") as stream:
            assert stream.read() == expected, (source, log.read_text())
        assert status(pid) == 0, source


@pytest.mark.slow
def test_output_is_packed_as_its_name_says_with_the_same_bytes_each_time(
    model: Path, expected: bytes, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in", LINES)
    for suffix in (".gz", ".bz2", ".xz", ".zst"):
        out = tmp_path / f"out{suffix}"
        packed = []
        for _ in range(2):
            assert translate(f"model_dir={model}", f"input={source}", f"output={out}") == 0
            packed.append(out.read_bytes())
            assert b"".join(f"{line}\n".encode() for line in read_lines(out)) == expected, suffix
        assert packed[0] == packed[1] != expected, suffix
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in", out.name], suffix
        out.unlink()
    scores = tmp_path / "scores.gz"
    files = [f"src={source}", f"tgt={source}", f"output={scores}", "device=cpu"]
    assert command("score", f"model_dir={model}", files) == 0
    assert len([float(line) for line in read_lines(scores)]) == len(LINES)


@pytest.mark.slow
def test_n_best_lists_as_text_say_what_json_says(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", LINES)
    out = tmp_path / "out"
    options = [f"model_dir={model}", f"input={source}", f"output={out}", "n_best=2", "beam_size=2"]
    assert translate(options) == 0
    rows = [line.split(" ||| ") for line in out.read_text("utf-8").split("\n")[:-1]]
    assert translate(options, "format=json") == 0
    expected = []
    for line in out.read_text("utf-8").split("\n")[:-1]:
        record = json.loads(line)
        for h in record["hypotheses"]:
            log_prob = f"log_prob={h['log_prob']}"
            expected.append([str(record["index"]), h["text"], log_prob, str(h["score"])])
    assert rows == expected
    assert [row[0] for row in rows].count("5") == 1  # the empty line


@pytest.mark.slow
def test_remaining_time_compares_no_packed_bytes_with_text(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_SECONDS", 0.0)
    for suffix, is_known in (
        (".txt", True),
        (".gz", False),
        (".bz2", False),
        (".xz", False),
        (".zst", False),
    ):
        source = tmp_path / f"in{suffix}"
        with source.open("wb") as file, compress(file, suffix) as stream:
            stream.write(TEXT * 4)
        arguments = [f"input={source}", f"output={tmp_path / 'out'}", "window_lines=8"]
        assert translate(f"model_dir={model}", arguments) == 0
        lines = [line for line in capfd.readouterr().err.split("\n") if "8 " in line]
        assert any(" left" in line for line in lines) == is_known, (suffix, lines)
