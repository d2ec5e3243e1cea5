"""Corpora of text and its translations: kept pairs, kills, and training on them."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
from tiny import sentences
from toy import command, train
from translating import (
    assert_bounded_memory,
    fork,
    run_and_die,
    run_in_child,
    status,
    translate,
    write_lines,
    write_model,
)

from nmt.cli import synthesis
from nmt.config import BacktranslateConfig, DistillConfig, Engine, TooLong
from nmt.data.binary import ParallelData
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.errors import DataError, NmtError
from nmt.translate.job import JobState
from nmt.translate.loops import count_repeats, is_looping
from nmt.translate.results import LineResult, Translation
from nmt.translate.synthesis import (
    SynthesisCounts,
    select_pairs,
    write_corpus,
)
from nmt.translate.windows import Window

LINES = [line if i % 17 else "" for i, line in enumerate(sentences(120, seed=5))]
DRAWS = {"sampling": True, "temperature": 1.5, "seed": 1, "max_length_a": 2.0, "window_lines": 15}
OPTIONS = {**DRAWS, "max_ratio": 2.0, "max_repeats": 1, "device": "cpu", "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a text in two files, and the corpora made of them in one go."""
    folder = tmp_path_factory.mktemp("synthesis")
    write_model(folder / "model", seed=3, eos_scale=4.0)
    write_lines(folder / "in", LINES)
    write_lines(folder / "in-1", LINES[:50])
    (folder / "in-2.gz").write_bytes(
        gzip.compress("".join(f"{line}\n" for line in LINES[50:]).encode())
    )
    for name, run in (("distill", distill), ("backtranslate", backtranslate)):
        run(folder, folder / name)
    return folder


def settings(folder: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings that translate both files."""
    inputs = {"model_dir": [str(folder / "model")], "input": [str(folder / "in-*")]}
    return {**inputs, **OPTIONS, "output": str(output), **changes}


def distill(folder: Path, output: Path, **changes: Any) -> int:
    synthesis.distill(DistillConfig(**settings(folder, output, **changes)))
    return 0


def backtranslate(folder: Path, output: Path, **changes: Any) -> int:
    synthesis.backtranslate(BacktranslateConfig(**settings(folder, output, **changes)))
    return 0


def corpus(folder: Path) -> dict[str, bytes]:
    """Return all files by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def test_the_files_of_a_corpus_have_one_side_each(tmp_path: Path) -> None:
    write_lines(tmp_path / "pairs", ["a", "A", "b", "B"])
    state = JobState(counts=SynthesisCounts(pairs=2))
    write_corpus(tmp_path, tmp_path / "pairs", state, {"of": 1})
    assert read_lines(tmp_path / "src.txt") == ["a", "b"]
    assert read_lines(tmp_path / "tgt.txt") == ["A", "B"]


# --- which pairs are kept


def naive_repeats(tokens: list[Any]) -> int:
    """Count by trying every place and period."""
    max_repeats = min(len(tokens), 1)
    for start in range(len(tokens)):
        for period in range(1, len(tokens) - start + 1):
            times = 1
            while tokens[start + times * period :][:period] == tokens[start : start + period]:
                times += 1
            max_repeats = max(max_repeats, times)
    return max_repeats


def test_repeats_are_those_that_every_place_and_period_has() -> None:
    draw = random.Random(1)
    cases: list[list[Any]] = [[], ["a"], list("xababab"), list("aabaabaab"), list("abcabcab")]
    cases += [draw.choices("ab", k=draw.randint(1, 14)) for _ in range(300)]
    for tokens in cases:
        assert count_repeats(tokens) == naive_repeats(tokens), tokens
        num_repeats = naive_repeats(tokens)
        for max_repeats in (0, 1, 2, 3):
            assert is_looping([], tokens, max_repeats) == (num_repeats > max_repeats), tokens
            assert not is_looping(tokens, tokens, max_repeats)


def test_each_line_is_a_pair_or_counted_under_the_reason_for_its_removal(
    tokenizer: Tokenizer,
) -> None:
    line = "the small house"
    num_tokens = len(tokenizer.encode(line))

    def result(text: str, num: int, *, finished: bool = True, **more: Any) -> LineResult:
        tokens = ["x"] * num if text == "loop" else [f"{i}" for i in range(num)]
        return LineResult([Translation(text, 0.0, 0.0, tokens, finished)], **more)

    cases = {
        "blank": [("", result("", 0)), (" ", result("a", 1))],
        "failed": [(line, LineResult([], "RuntimeError"))],
        "truncated": [(line, result("a", 3, num_truncated=1))],
        "empty": [(line, result(" ", 1)), (line, result("", 0))],
        "met_limit": [(line, result("a", 3, finished=False))],
        "looping": [(line, result("loop", 5))],
        "ratio": [(line, result("a", 2 * num_tokens + 2)), (line * 9, result("b", 3))],
        "pairs": [(line, result("loop", 4)), (line, result("c", 2 * num_tokens + 1))],
    }
    lines = []
    results = []
    for case in cases.values():
        lines += [line for line, _ in case]
        results += [result for _, result in case]
    config = DistillConfig(input=["x"], max_ratio=2, max_repeats=4)
    window = Window(7, lines, None)
    heard = BufferingHandler(100)
    logging.getLogger("nmt.translate.synthesis").addHandler(heard)
    for is_reversed, expected in ((False, b"%s\nloop\n%s\nc\n"), (True, b"loop\n%s\nc\n%s\n")):
        options = {"config": config, "tokenizer": tokenizer, "is_reversed": is_reversed}
        data, counts = select_pairs(window, results, **options)
        assert data == expected % (line.encode(), line.encode())
        assert counts.lines == len(lines)
        for reason, case in cases.items():
            assert getattr(counts, reason) == len(case), reason
    warning = "line 10 could not be translated; dropped it: RuntimeError"
    assert [record.getMessage() for record in heard.buffer] == 2 * [warning]
    config = DistillConfig(input=["x"], max_ratio=0, max_repeats=0)
    _, counts = select_pairs(window, results, **{**options, "config": config})
    assert (counts.looping, counts.ratio, counts.pairs) == (0, 0, 5)


@pytest.mark.slow
def test_a_corpus_holds_the_lines_with_the_translations_of_nmt_translate(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"model_dir={folder / 'model'}", f"input={folder / 'in'}"]
    arguments += [f"{key}={value}" for key, value in DRAWS.items()]
    assert translate(*arguments, f"output={tmp_path / 'out'}") == 0
    answers = dict(zip(LINES, read_lines(tmp_path / "out"), strict=True))
    arguments = settings(folder, tmp_path / "place")
    arguments["model_dir"] = folder / "model"
    arguments["input"] = folder / "in-*"
    for name, sides in (("distill", ("src", "tgt")), ("backtranslate", ("tgt", "src"))):
        lines = read_lines(folder / name / f"{sides[0]}.txt")
        targets = read_lines(folder / name / f"{sides[1]}.txt")
        summary = json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))
        counts = summary["counts"]
        assert targets == [answers[line] for line in lines], name
        assert [line for line in LINES if line in set(lines)] == lines
        assert len(lines) == counts["pairs"]
        assert counts["lines"] == len(LINES)
        assert 0 < counts["pairs"] < counts["lines"]
        assert counts["blank"] == LINES.count("")
        reasons = ("blank", "failed", "truncated", "empty", "met_limit", "looping", "ratio")
        assert all(counts[reason] for reason in reasons[-4:])
        num_dropped = sum(counts[reason] for reason in reasons)
        assert num_dropped + counts["pairs"] == len(LINES)
        arguments["output"] = tmp_path / name
        assert command(name, *(f"{key}={value}" for key, value in arguments.items())) == 0
        out, err = capfd.readouterr()
        assert f"{counts['pairs']:>12,} pairs written\n" in out
        assert f"{len(LINES):>12,} lines read\n" in out
        assert corpus(tmp_path / name) == corpus(folder / name)
    assert "data.corpora.bt.src_tag=<bt>" in err


@pytest.mark.slow
def test_a_corpus_is_mixed_by_weight_and_its_tag_is_for_training_alone(
    folder: Path, tmp_path: Path, toy_data: Path
) -> None:
    corpus_dir = folder / "backtranslate"
    settings = [f"data_dir={tmp_path / 'data'}", "tokenizer.vocab_size=330"]
    for side in ("src", "tgt"):
        settings.append(f"data.corpora.parallel.{side}={toy_data.parent / f'train.{side}.txt'}")
        settings.append(f"data.corpora.bt.{side}={corpus_dir / f'{side}.txt'}")
        settings.append(f"data.valid.{side}={toy_data.parent / f'valid.{side}.txt'}")
    settings += ["data.corpora.bt.src_tag=<bt>", "data.corpora.bt.weight=0.5", "max_length=1000"]
    assert command("preprocess", *settings) == 0
    tokenizer = load_tokenizers(tmp_path / "data").src
    data = ParallelData(tmp_path / "data", "train")
    tag = tokenizer.all_pieces().index("<bt>")
    is_tagged = [tag in data[row][0] for row in range(len(data))]
    # a model of few updates makes bytes that normalization takes away
    num_pairs = sum(bool(tokenizer.encode(line)) for line in read_lines(corpus_dir / "src.txt"))
    assert is_tagged == [True] * num_pairs + [False] * (len(data) - num_pairs)
    run = [
        "max_updates=2",
        "max_tokens=1000",
        "valid_bleu=false",
        "stages.end.start=1",
        "stages.end.mix.bt=0",
    ]
    assert train(tmp_path / "data", tmp_path / "run", *run) == 0
    search = [f"model_dir={tmp_path / 'run'}", f"input={folder / 'in-1'}", "beam_size=1"]
    search += ["max_length_a=0", "max_length_b=5"]
    for options, name in (([], "plain"), (["src_tag=<bt>"], "tagged")):
        assert translate(*search, f"output={tmp_path / name}", *options) == 0
    assert (tmp_path / "plain").read_bytes() != (tmp_path / "tagged").read_bytes()


@pytest.mark.slow
def test_too_long_lines_are_translated_in_parts_or_left_out(folder: Path, tmp_path: Path) -> None:
    input_file = write_lines(tmp_path / "in", ["the house sees a tree " * 20, *LINES[1:9]])
    options = {
        "input": [str(input_file)],
        "max_ratio": 0.0,
        "max_repeats": 0,
        "max_source_length": 60,
    }
    for way, num_truncated in ((TooLong.split, 0), (TooLong.truncate, 1)):
        out = tmp_path / way.value
        distill(folder, out, **options, too_long=way)
        counts = json.loads((out / "summary.json").read_text(encoding="utf-8"))["counts"]
        counted = [counts[name] for name in ("truncated", "too_long", "lines")]
        assert counted == [num_truncated, 1, 9]
        assert len(read_lines(out / "src.txt")) == counts["pairs"]


# --- kills and other ends


@pytest.mark.slow
def test_a_command_killed_again_and_again_ends_with_the_same_bytes(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    log = tmp_path / "log"
    state = out / "pairs.partial.json"
    lines = []
    for call, number in (("append", 2), ("_save", 2), ("sync", 2), ("write_json", 1)):
        assert (
            run_in_child(log, run_and_die, call, number, backtranslate, folder, out)
            == -signal.SIGKILL
        )
        lines.append(json.loads(state.read_text(encoding="utf-8"))["lines"])
        assert not (out / "src.txt").exists()
    assert lines == [15, 30, 45, 45]
    assert run_in_child(log, backtranslate, folder, out) == 0
    assert corpus(out) == corpus(folder / "backtranslate")


@pytest.mark.long
def test_a_kill_at_any_call_that_changes_a_name_at_the_end_loses_nothing(
    folder: Path, tmp_path: Path
) -> None:
    expected_corpus = corpus(folder / "distill")
    log = tmp_path / "log"
    calls = itertools.count()

    def dying(call: int, out: Path) -> int:
        def counted(change: Callable[..., Any]) -> Callable[..., Any]:
            def replacement(*arguments: Any, **options: Any) -> Any:
                if next(calls) == call:
                    os._exit(9)
                return change(*arguments, **options)

            return replacement

        os.replace, Path.unlink = counted(os.replace), counted(Path.unlink)  # type: ignore[assignment, method-assign]
        return distill(folder, out)

    def early(*_: Any) -> None:
        os._exit(9)

    def translated() -> int:
        synthesis.write_corpus = early
        return distill(folder, tmp_path / "translated")

    assert status(fork(translated, log)) == 9
    assert {*corpus(tmp_path / "translated")} == {"pairs.partial", "pairs.partial.json"}
    for call in itertools.count():
        out = tmp_path / str(call)
        shutil.copytree(tmp_path / "translated", out)
        code = status(fork(partial(dying, call, out), log))
        assert code == 9 or (code, corpus(out)) == (0, expected_corpus)
        assert status(fork(partial(distill, folder, out), log)) == 0
        assert corpus(out) == expected_corpus, call
        if code == 0:
            break
    assert call >= 10


@pytest.mark.slow
def test_a_whole_corpus_is_left_as_it_is_until_another_job_or_input_is_to_replace_it(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(folder / "distill", out)
    written_at = (out / "src.txt").stat().st_mtime_ns
    changes: list[tuple[dict[str, Any], bool]] = [
        ({"max_tokens": 300, "num_threads": 2}, True),
        ({"max_ratio": 3.0}, False),
        ({"input": [str(folder / "in-1")]}, False),
        ({}, False),
    ]
    for options, is_same in changes:
        capfd.readouterr()
        if not is_same:
            old_corpus = corpus(out)
            with pytest.raises(DataError, match=r"out holds \d+ pairs of another .*overwrite=true"):
                distill(folder, out, **options)
            assert corpus(out) == old_corpus, options
        distill(folder, out, **options, overwrite=True)
        assert (written_at == (out / "src.txt").stat().st_mtime_ns) == is_same, options
        written_at = (out / "src.txt").stat().st_mtime_ns
    assert corpus(out) == corpus(folder / "distill")
    (out / "tgt.txt").write_bytes(b"")  # a user's mistake
    distill(folder, out, overwrite=True)
    assert corpus(out) == corpus(folder / "distill")


def test_a_text_in_another_language_than_the_model_reads_is_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    german = ["Das Wetter ist heute schön in den Bergen.", "Sie liest ein Buch über alte Schiffe."]
    write_lines(tmp_path / "german", german)
    for src_lang, warnings in (("en", 1), ("de", 0)):
        caplog.clear()
        languages = {"src_lang": src_lang, "tgt_lang": "fr"}
        path = tmp_path / "model/config.json"
        shutil.copytree(folder / "model", tmp_path / "model", dirs_exist_ok=True)
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(content | languages), encoding="utf-8")
        (tmp_path / "model/manifest.json").unlink()
        options = {"model_dir": [str(path.parent)], "input": [str(tmp_path / "german")]}
        backtranslate(folder, tmp_path / src_lang, max_repeats=0, max_ratio=0.0, **options)
        messages = [r.getMessage() for r in caplog.records if "most lines" in r.getMessage()]
        assert len(messages) == warnings, src_lang
        assert all("not in the language 'en'" in message for message in messages)


@pytest.mark.slow
def test_impossible_jobs_are_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "blank", ["", " "])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": [str(tmp_path / "nothing-*")]}, "matches no file"),
        ({"input": [str(tmp_path / "nothing")]}, "does not exist"),
        ({"max_ratio": 0.5}, "max_ratio=0.5: must be 0 or at least 1"),
        ({"input": None}, "give input=FILE"),
        ({"backend": Engine.ctranslate2}, "backend=ctranslate2: cannot draw the same"),
        ({"model_dir": [str(tmp_path / "absent")]}, "absent does not exist"),
    ]
    for options, text in cases:
        with pytest.raises(NmtError, match=text):
            distill(folder, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists(), text  # no empty folder of a mistake
    with pytest.raises(NmtError, match="no pair is left"):
        distill(folder, tmp_path / "out", input=[str(tmp_path / "blank")])
    distill(folder, tmp_path / "out")  # other text may replace a corpus without pairs
    of_user = tmp_path / "of-user"
    corpus_dir = tmp_path / "corpus"
    for out in (of_user, corpus_dir):
        shutil.copytree(folder / "distill", out)
    (of_user / "summary.json").unlink()
    with pytest.raises(DataError, match="src.txt was not written by this command; give output=FOL"):
        distill(folder, of_user, input=[str(folder / "in-1")])
    with pytest.raises(DataError, match="tgt.txt is the input; give output=FOLDER"):
        distill(folder, corpus_dir, input=[str(corpus_dir / "tgt.txt")])
    for out, name in itertools.product((of_user, corpus_dir), ("src.txt", "tgt.txt")):
        assert (out / name).read_bytes() == (folder / "distill" / name).read_bytes()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "distill", tmp_path / "data/distilled")
    with pytest.raises(DataError, match="data/distilled holds .* give another output"):
        distill(folder, Path("data/distilled"), max_ratio=3.0)


def test_a_corpus_with_pairs_is_replaced_only_if_the_settings_say_so(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    config = DistillConfig(model_dir=["model"], input=["text"], output=str(tmp_path))
    synthesis._check_replacement(config)  # there is no corpus
    summary.write_text('{"counts": {"pairs": 0}}', encoding="utf-8")
    synthesis._check_replacement(config)
    for content, problem in (
        ('{"counts": {"pairs": 1234}}', "holds 1,234 pairs of another model"),
        ('{"counts": 3}', "holds pairs of another model"),
        ("{", "holds pairs of another model"),
    ):
        summary.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=problem):
            synthesis._check_replacement(config)
        synthesis._check_replacement(replace(config, overwrite=True))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_lines(folder: Path, tmp_path: Path) -> None:
    lines = [line[:40] for line in sentences(500, seed=3)]
    short_text = write_lines(tmp_path / "short", lines)
    long_text = tmp_path / "long"
    long_text.write_bytes(short_text.read_bytes() * 8 + b"\n" * 60_000)
    assert_bounded_memory(partial(distill_text, folder), [short_text, long_text])


def distill_text(folder: Path, text: Path) -> None:
    options = {"max_length_a": 0.0, "max_length_b": 2, "window_lines": 500}
    distill(folder, text.with_name(f"of-{text.stem}"), input=[str(text)], **options)
