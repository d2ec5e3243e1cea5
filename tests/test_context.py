"""Documents: pairs with the lines before them, and lines translated with those before them."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from serving import change_config, eventually, loaded, running
from tiny import sentences
from toy import command
from translating import translate, write_lines, write_model

from nmt.config import DataConfig, HeldOutConfig
from nmt.data.binary import ParallelData
from nmt.data.hints import DONE, SOURCE, TARGET
from nmt.data.languages import Tags
from nmt.data.perturb import to_title
from nmt.data.tokenizer import load_tokenizers
from nmt.errors import ConfigError
from nmt.preprocess import chunks
from nmt.translate.context import add_context, select_last_lines
from nmt.translate.options import LineOptions
from nmt.translate.results import LineResult, Translation
from nmt.translate.translator import Translator
from nmt.translate.windows import Window, WindowReader

SYMBOLS = [SOURCE, TARGET, DONE]

# --- pairs


def write_documents(folder: Path, num_lines: int) -> list[list[str]]:
    """Write documents of some lines with empty ones between them; return both sides."""
    draw = random.Random(3)
    words = ["the", "a", "small", "green", "house", "tree", "sees", "river"]
    sides = []
    for side in ("src", "tgt"):
        lines = [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(num_lines)]
        lines[7] = lines[8] = lines[num_lines // 2] = ""
        if side == "tgt":
            lines[20] = ""
        lines[30] = " ".join(["house"] * 60)  # too long
        write_lines(folder / side, lines)
        sides.append(lines)
    return sides


def expected_texts(sides: list[list[str]], context: int, size: int) -> list[list[str]]:
    """Return the texts of both sides with their contexts, line by line of chunks of `size`."""
    documents: list[list[str]] = [[], []]
    is_kept = [all(side[i] for side in sides) and i != 30 for i in range(len(sides[0]))]
    for i in range(len(is_kept)):
        if not is_kept[i]:
            continue
        chunk_start = i // size * size
        earliest = max(i - (i + 1) % (context + 1), chunk_start)
        start = i
        while start > earliest and is_kept[start - 1]:
            start -= 1
        for texts, side in zip(documents, sides, strict=True):
            texts.append(" <sep> ".join(side[start : i + 1]))
    return documents


def test_pairs_get_the_lines_before_them_up_to_a_gap_a_chunk_and_the_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "PAIRS_PER_CHUNK", 40)
    sides = write_documents(tmp_path, 100)
    names = [f"{split}{side}" for split in ("", "valid.") for side in ("src", "tgt")]
    input_arguments = [f"data.corpora.x.{name}={tmp_path / name[-3:]}" for name in names]
    options = ["data.corpora.x.src_tag=<doc>", "tokenizer.vocab_size=330", "keep_text=true"]
    for context, longest in ((3, 50), (3, 24)):
        data_dir = tmp_path / f"{context}-{longest}"
        limits = [f"data.context={context}", f"max_length={longest}", "num_threads=1"]
        limits.append(f"data_dir={data_dir}")
        assert command("preprocess", input_arguments, options, limits) == 0
        data = ParallelData(data_dir, "train")
        tokenizer = load_tokenizers(data_dir).src
        texts = [data.texts(row) for row in range(len(data))]
        for row, (src, tgt) in enumerate(texts):
            src_ids, tgt_ids = data[row]
            assert src_ids.tolist() == tokenizer.encode(src)
            assert tgt_ids.tolist() == tokenizer.encode(tgt)
        assert all(src.startswith("<doc> ") and src.count("<doc>") == 1 for src, _ in texts)
        counts = {src.count("<sep>") for src, _ in texts}
        assert counts == set(range(context + 1))
        assert data.lengths[: len(data)].max() <= longest
        if longest == 50:  # all contexts fit
            src_texts = [src.removeprefix("<doc> ") for src, _ in texts]
            tgt_texts = [tgt for _, tgt in texts]
            assert [src_texts, tgt_texts] == expected_texts(sides, context, 40)
        valid = ParallelData(data_dir, "valid")
        assert any("<sep>" in tokenizer.decode(valid[row][0].tolist()) for row in range(len(valid)))


def test_the_separator_of_mozilla(tmp_path: Path) -> None:
    write_documents(tmp_path, 100)
    names = [f"data.{split}.{side}" for split in ("train", "valid") for side in ("src", "tgt")]
    files = [f"{name}={tmp_path / name[-3:]}" for name in names]
    options = ["tokenizer.vocab_size=330", "keep_text=true", "data.context=1"]
    texts = []
    for separator in ("<sep>", "__sep__"):
        data_dir = tmp_path / separator
        arguments = [*files, *options, f"data.separator={separator}", f"data_dir={data_dir}"]
        assert command("preprocess", *arguments) == 0
        data = ParallelData(data_dir, "train")
        texts.append([data.texts(row)[0].replace(separator, "|") for row in range(len(data))])
        assert separator in load_tokenizers(data_dir).tgt.all_pieces()
    assert texts[0] == texts[1]
    assert any("|" in text for text in texts[0])
    assert command("preprocess", *files, *options, "data.separator=|") == 2


def test_drawn_pairs_are_no_documents() -> None:
    for split in ("valid", "test"):
        with pytest.raises(ConfigError, match="context=1: does not work with num_pairs, .*; give"):
            DataConfig(context=1, **{split: HeldOutConfig(num_pairs=20)})


# --- translations


def test_a_line_has_the_lines_before_it_up_to_an_empty_one() -> None:
    window = Window(3, ["a", "", "b", "c", " ", "d"], context=("x", "", "y"))
    groups = add_context(window, LineOptions(context=2))
    assert groups == [["y", "a"], [""], ["b"], ["b", "c"], [" "], ["d"]]
    assert add_context(Window(0, list("abcd"), None), LineOptions(context=2)) == [
        ["a"],
        ["a", "b"],
        ["a", "b", "c"],
        ["b", "c", "d"],
    ]
    window = Window(0, ["a", "{x}", "..."])
    assert add_context(window, LineOptions(context=1)) == [["a"], ["a", "{x}"], ["..."]]
    assert add_context(window, LineOptions(context=1, protect=True)) == [["a"], ["{x}"], ["..."]]
    groups = add_context(window, LineOptions(context=1, copy_symbols=False, protect=True))
    assert groups == [["a"], ["a", "{x}"], ["{x}", "..."]]


def test_a_job_that_goes_on_has_the_lines_before_it() -> None:
    reader = WindowReader("abcdefg", window_lines=2, context=2)
    reader.skip(3)
    windows = [(window.context, window.lines) for window in reader]
    assert windows == [(("b", "c"), ["d"]), (("c", "d"), ["e", "f"]), (("e", "f"), ["g"])]


def test_the_translation_of_the_last_line_is_cut_out_at_separators() -> None:
    cases: list[tuple[str, int, str | None]] = [
        ("a <sep> b", 2, "b"),
        ("a <sep> b <sep> c", 3, "c"),
        ("a", 2, None),
        ("a <sep> b <sep> c", 2, None),
        ("a <sep> ", 2, None),
        ("a <sep> b", 1, "a b"),
    ]
    for text, num_lines, expected_text in cases:
        for finished in (True, False):
            result = LineResult([Translation(text, 0.0, 0.0, [], finished)])
            groups = [["x"] * num_lines]
            [translation] = select_last_lines([result], groups, "<sep>")
            is_taken = expected_text is not None and (finished or num_lines == 1)
            expected = expected_text if is_taken else None
            assert (translation and translation.text) == expected, (text, num_lines)


DRAWS: dict[str, Any] = {"sampling": True, "temperature": 1.5, "seed": 1, "max_length_a": 2.0}
# each once: samples of one that comes again differ
LINES = [line if i % 9 else "" for i, line in enumerate(dict.fromkeys(sentences(120, seed=5)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that writes separators, and a text."""
    folder = tmp_path_factory.mktemp("context")
    write_model(folder / "model", seed=5, eos_scale=4.0, sep_scale=3.0)
    write_lines(folder / "in", LINES)
    return folder


def run(folder: Path, output: Path, *options: str) -> int:
    """Translate with one line before each."""
    arguments = [f"model_dir={folder / 'model'}", f"input={folder / 'in'}", f"output={output}"]
    search = ["context=1", "window_lines=10", *(f"{k}={v}" for k, v in DRAWS.items())]
    return translate(*arguments, *search, *options)


def without_separators(text: str) -> str:
    return " ".join(segment.strip() for segment in text.split("<sep>") if segment.strip())


@pytest.mark.slow
def test_a_translation_is_the_part_after_the_separator_or_is_made_without_context(
    folder: Path, tmp_path: Path
) -> None:
    translator = Translator.load(folder / "model", device="cpu", backend="native")
    has_context = [False]
    joined = [LINES[0]]
    for previous, line in itertools.pairwise(LINES):
        has_context.append(bool(previous and line))
        joined.append(f"{previous} <sep> {line}" if has_context[-1] else line)
    for options in ([], ["max_source_length=30"]):
        limit = {"max_source_length": 30} if options else {}
        alone = translator.translate(LINES, **DRAWS, **limit)
        joined_results = translator.n_best(joined, beam_size=1, **DRAWS, **limit)
        expected = []
        num_cut_out = 0
        for i, (text, (best,)) in enumerate(zip(alone, joined_results, strict=True)):
            segments = best.text.split("<sep>")
            fits = not options or len(translator.tokenizer.encode(joined[i])) < 30
            is_whole = best.finished and len(segments) == 2 and segments[1].strip() != ""
            if has_context[i] and fits and is_whole:
                num_cut_out += 1
                expected.append(segments[1].strip())
            else:
                expected.append(without_separators(text))
        assert run(folder, tmp_path / "out", *options) == 0
        assert (tmp_path / "out").read_text(encoding="utf-8").split("\n")[:-1] == expected
        assert 2 <= num_cut_out < len(LINES) - 10


def test_context_needs_the_direction_of_a_model_with_several() -> None:
    with pytest.raises(ConfigError, match=r"^context=1: needs one direction .* give tgt_lang="):
        LineOptions(context=1, tags=Tags(src_choices=("<2de>", "<2fr>")))
    assert LineOptions(context=1, tags=Tags("<2de>")).context == 1


def test_each_line_has_its_own_case_and_symbols_are_copied(folder: Path) -> None:
    translator = Translator.load(folder / "model", device="cpu", backend="native")
    lines = ["Green.", "A house.", "Trees.", "THE SMALL HOUSE", "The Green Tree", "...", "a tree"]
    ordinary = [
        "Green.",
        "A house.",
        "Trees.",
        "The small house",
        "The green tree",
        "...",
        "a tree",
    ]
    cases = [str, str, str, str.upper, to_title, str, str]
    joined = [f"{a} <sep> {b}" for a, b in itertools.pairwise(ordinary)]
    together = translator.n_best([ordinary[0], *joined], beam_size=1, recase=False, **DRAWS)
    alone = translator.translate(ordinary, recase=False, **DRAWS)
    expected = []
    for single, change_case, [best] in zip(alone, cases, together, strict=True):
        segments = best.text.split("<sep>")
        is_divided = len(segments) == 2 and segments[1].strip() and best.finished
        text = segments[1].strip() if is_divided else without_separators(single)
        expected.append(change_case(text))
    expected[5] = "..."
    assert translator.translate(lines, context=1, **DRAWS) == expected


def test_ends_of_lines_are_copied_in_context_too(folder: Path) -> None:
    translator = Translator.load(folder / "model", device="cpu", backend="native")
    plain = ["A house", "The tree", "The {name} house"]
    [house, tree, name] = translator.translate(plain, context=1, **DRAWS)
    lines = ["A house 👍", "👉 The tree www.example.org", "THE {NAME} HOUSE 🎉"]
    translations = translator.translate(lines, context=1, **DRAWS)
    assert translations[0] == f"{house} 👍"
    assert translations[1] == f"👉 {tree.removesuffix('.')} www.example.org"
    assert translations[2].endswith(" 🎉")
    assert translations[2].lower() == f"{name} 🎉".lower()


@pytest.mark.slow
def test_a_line_of_placeholders_is_copied_in_context_too(folder: Path) -> None:
    translator = Translator.load(folder / "model", device="cpu", backend="native")
    lines = [line for line in LINES[:40] if line]
    with_placeholders = [text for line in lines for text in (line, "{name}:")]
    translations = translator.translate(with_placeholders, context=1, protect=True)
    assert translations[1::2] == ["{name}:"] * len(lines)


@pytest.mark.slow
def test_lines_that_are_a_title_only_together_keep_their_case(folder: Path) -> None:
    translator = Translator.load(folder / "model", device="cpu", backend="native")
    words = ["House", "Tree", "River", "Red", "Green", "Small", "Big"]
    lines = [" ".join(pair) for pair in itertools.permutations(words, 2)]
    expected = translator.translate(lines, context=1, recase=False, **DRAWS)
    assert translator.translate(lines, context=1, **DRAWS) == expected


def test_context_that_is_too_long_with_hints_is_dropped(tmp_path: Path) -> None:
    write_model(tmp_path / "model", sep_scale=1.0, symbols=SYMBOLS)
    translator = Translator.load(tmp_path / "model", device="cpu", backend="native")
    lines = ["the small house", "a green tree"]
    soft = {"glossary": ["house\tHaus", "tree\tBaum"], "glossary_mode": "soft"}
    without_hints = len(translator.tokenizer.encode(" <sep> ".join(lines))) + 1  # 1: EOS
    limits = {"context": 1, "max_source_length": without_hints + 3, "too_long": "error"}
    assert translator.translate(lines, **limits, **soft) == translator.translate(lines, **soft)


@pytest.mark.slow
def test_a_job_that_goes_on_knows_the_lines_before(folder: Path, tmp_path: Path) -> None:
    outputs = []
    for number in range(2):
        assert run(folder, tmp_path / "out", f"context={number}") == 0
        lines = (tmp_path / "out").read_text(encoding="utf-8").split("\n")
        outputs.append([*map(without_separators, lines)])
    is_equal = [alone == joined for alone, joined in zip(outputs[0], outputs[1], strict=True)]
    line_index = is_equal.index(False)
    text = tmp_path / "in"
    job = [f"input={text}", "window_lines=1", "too_long=error"]
    write_lines(text, LINES[line_index - 2 : line_index + 1])
    assert run(folder, tmp_path / "whole", *job) == 0
    write_lines(text, [*LINES[line_index - 2 : line_index], "the " * 300])
    assert run(folder, tmp_path / "out", *job) == 2
    write_lines(text, LINES[line_index - 2 : line_index + 1])
    assert run(folder, tmp_path / "out", *job) == 0
    translations = (tmp_path / "out").read_text(encoding="utf-8").split("\n")
    assert translations == (tmp_path / "whole").read_text(encoding="utf-8").split("\n")
    assert translations[2] == outputs[1][line_index]


@pytest.mark.slow
def test_impossible_contexts_are_one_line(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model")
    write_lines(tmp_path / "in", LINES)
    assert run(tmp_path, tmp_path / "out") == 2
    assert "context=1: the model has no <sep>; train it on data" in capfd.readouterr().err
    for option in ("format=json", "n_best=2", f"prefixes={tmp_path / 'in'}"):
        assert run(folder, tmp_path / "out", option) == 2
        assert "context=1: only works with format=text, n_best=1" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("separator", ["<sep>", "__sep__"])
def test_the_translator_and_the_server_translate_as_the_command(
    separator: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "model", seed=5, eos_scale=4.0, sep_scale=3.0, separator=separator)
    lines = [line.rstrip(".") for line in LINES if line][:60]
    write_lines(tmp_path / "in", lines)
    arguments = [f"model_dir={tmp_path / 'model'}", "backend=native", "context=2", "beam_size=3"]
    files = [f"input={tmp_path / 'in'}", f"output={tmp_path / 'out'}"]
    assert translate(*arguments, *files) == 0
    expected = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    translator = Translator.load(tmp_path / "model", device="cpu", backend="native")
    assert translator.translate(lines, context=2, beam_size=3) == expected
    assert list(translator.translate_stream(iter(lines), context=2, beam_size=3)) == expected
    assert translator.translate(lines, beam_size=3) != expected
    for options in ({"prefixes": lines}, {"context": 101}):
        with pytest.raises(ConfigError, match="context="):
            translator.translate(lines, **{"context": 2, **options})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not work with prefixes and n_best"):
        translator.n_best(lines, context=2)
    models = loaded(tmp_path / "model")
    with running(models, context=2, split_sentences=False) as server:
        languages = {"source": "en", "target": "de"}
        text = "\n".join(lines[:30])
        expected = translator.translate(lines[:30], context=2)
        path = "/v1/translate?source=en&target=de"
        kind = "text/plain; charset=utf-8"
        stream = server.send("POST", path, text.encode(), Content_Type=kind)
        assert stream.body.decode().splitlines() == expected
        assert server.translate(text, **languages).split("\n") == expected
        alone = server.translate(lines[:30], **languages)
        texts = [text.replace(separator, "<sep>") for text in translator.translate(lines[:30])]
        assert alone == [without_separators(text) for text in texts]


@pytest.mark.slow
def test_the_server_drops_long_context_as_the_translator_does_and_counts_sentences_once(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    write_model(model, seed=5, eos_scale=4.0, sep_scale=3.0, symbols=SYMBOLS)
    search = json.loads((model / "config.json").read_text(encoding="utf-8"))["search"]
    soft = {"glossary": ["house\tHaus"], "glossary_mode": "soft"}
    change_config(model, search=search | DRAWS | soft)
    translator = Translator.load(model, device="cpu", backend="native")
    lines = [line for line in LINES if line]
    expected = translator.translate(lines, context=1, max_source_length=13)
    assert expected != translator.translate(lines, context=1)
    options = {"context": 1, "max_source_length": 13, "split_sentences": False}
    entries: list[dict[str, Any]] = []
    with (
        patch("nmt.serve.middleware.log_access", entries.append),
        running(loaded(model), access_log=True, **options) as server,
    ):
        text = server.translate("\n".join(lines), source="en", target="de")
        eventually(lambda: bool(entries))
    assert text.split("\n") == expected
    assert [entry["sentences"] for entry in entries] == [len(lines)]  # some are searched twice
