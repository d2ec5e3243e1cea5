"""One model for several directions, from text to translations.

A request chooses the direction by languages or tags. No tag occurs in a translation.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from pages import fenced_blocks
from serving import loaded, running
from toy import TINY, command, read_records
from translating import translate, write_lines

from nmt import Translator
from nmt.data.binary import read_held_out
from nmt.data.language_codes import language_name
from nmt.data.languages import LanguagePair, Tags, encode_sources
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError, DataError
from nmt.translate.options import LineOptions
from nmt.translate.windows import Window, encode_window
from nmt.visualize.search_tree import record_search

WORDS = {
    "en": ["red", "green", "big", "house", "tree", "sees"],
    "de": ["rot", "grün", "groß", "Haus", "Baum", "sieht"],
    "fr": ["rouge", "vert", "grand", "maison", "arbre", "voit"],
}
DIRECTIONS = ("de-en", "en-de", "en-fr", "fr-en")


def spell(language: str, rows: list[list[int]]) -> list[str]:
    words = np.array(WORDS[language])
    return [" ".join(words[row]) for row in rows]


def rows(name: str, size: int) -> list[list[int]]:
    draw = random.Random(name)
    return [draw.choices(range(6), k=draw.randint(1, 4)) for _ in range(size)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder for four directions; a tag of the target chooses one of them."""
    folder = tmp_path_factory.mktemp("languages")
    arguments = [f"data_dir={folder / 'data'}", "tokenizer.vocab_size=85", "num_threads=1"]
    arguments += ["tokenizer.byte_fallback=false"]
    for name in DIRECTIONS:
        key = f"data.corpora.{name}"
        languages = name.split("-")
        arguments += [f"{key}.src_lang={languages[0]}", f"{key}.tgt_lang={languages[1]}"]
        if name == "en-fr":
            arguments.append(f"{key}.tgt_tag=<French>")
        for split, size in (("", 300), ("valid.", 20), ("test.", 20)):
            indices = rows(split + name, size)
            for side, language in zip(("src", "tgt"), languages, strict=True):
                path = write_lines(folder / f"{split}{name}.{language}", spell(language, indices))
                arguments.append(f"{key}.{split}{side}={path}")
    assert command("preprocess", arguments) == 0
    return folder


@pytest.fixture(scope="module")
def new_root(data: Path) -> Path:
    """A folder with the data and a run that has learned nothing."""
    limits = ["max_updates=1", "validate_every_updates=1", "search.max_length_a=0"]
    limits += ["search.max_length_b=8"]
    assert (
        command("train", f"data_dir={data / 'data'}", f"run_dir={data / 'run'}", TINY, limits) == 0
    )
    return data


@pytest.fixture(scope="module")
def root(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and a run that translates."""
    folder = Path(shutil.copytree(data, tmp_path_factory.mktemp("languages") / "trained"))
    shutil.rmtree(folder / "run", ignore_errors=True)
    sizes = ["model.d_model=32", "model.d_ff=64", "tokens_per_update=300", "max_tokens=300"]
    pace = ["max_updates=150", "validate_every_updates=150", "checkpoint_every_updates=50"]
    pace += ["label_smoothing=0", "model.dropout=0"]
    rate = ["optimizer.name=muon", "optimizer.schedule=cosine", "optimizer.peak_learning_rate=0.02"]
    folders = [f"data_dir={folder / 'data'}", f"run_dir={folder / 'run'}"]
    assert command("train", folders, TINY, sizes, pace, rate) == 0
    return folder


def share(language: str, lines: list[str]) -> float:
    """Return the share of the words of lines that are of a language."""
    words = " ".join(lines).split()
    return sum(map(words.count, WORDS[language])) / max(len(words), 1)


def output(root: Path, name: str, arguments: str | list[str]) -> list[str]:
    """Translate the test sources of a direction with nmt-translate."""
    path = root / "out"
    path.unlink(missing_ok=True)
    source = root / f"test.{name}.{name[:2]}"
    assert (
        translate(f"model_dir={root / 'run'}", f"input={source}", f"output={path}", arguments) == 0
    )
    return path.read_text(encoding="utf-8").split("\n")[:-1]


@pytest.mark.slow
def test_languages_and_tags_choose_the_direction_in_the_command_and_in_python(root: Path) -> None:
    translator = Translator.load(root / "run", device="cpu", backend="native")
    tags_by_direction = {
        "de-en": ["src_tag=<2en>"],
        "en-de": ["src_tag=<2de>"],
        "en-fr": ["tgt_tag=<French>"],
        "fr-en": ["src_tag=<2en>"],
    }
    for name, tags in tags_by_direction.items():
        src, tgt = name.split("-")
        translations = output(root, name, f"tgt_lang={tgt}")
        assert share(tgt, translations) > 0.9, (name, translations)
        assert output(root, name, tags) == translations, name
        sources = spell(src, rows(f"test.{name}", 20))
        assert translator.translate(sources, tgt_lang=tgt) == translations, name
        assert "<" not in "".join(translations), name
        best = translator.n_best(sources[:1], tgt_lang=tgt)[0][0]
        assert "<" not in best.text, name
    mixed = ["<2de> red tree", "<2en> rot Baum", ""]  # sources may bring their tags
    german, english, empty = translator.translate(mixed)
    assert (share("de", [german]), share("en", [english]), empty) == (1, 1, "")
    for lines in (["red", ""], ["", "red"]):
        assert translator.translate(lines, tgt_lang="fr").count("") == 1, lines  # a tag is not text


def test_long_lines_keep_their_tag_in_every_part(new_root: Path) -> None:
    translator = Translator.load(new_root / "run", device="cpu", backend="native")
    line = " ".join(["red house sees green tree"] * 6)
    for language, tag in (("de", "<2de>"), ("fr", "<French>")):
        tags = translator.choose_tags(tgt_lang=language)
        options = LineOptions(tags=tags, max_source_length=24)
        (segments,) = encode_window(
            Window(0, [line], ["rot"]), translator.tokenizer, options
        ).segments
        assert len(segments) > 1, language
        text = ""
        for segment in segments:
            pieces = translator.tokenizer.pieces(segment.ids)
            assert (tag in pieces) == (language == "de"), pieces
            assert len(pieces) < 24, pieces
            text += "".join(pieces)
            prefix = translator.tokenizer.pieces(segment.prefix_ids)
            assert (tag in prefix) == (language == "fr"), prefix
            if segment is not segments[0]:
                assert segment.prefix_ids == segments[1].prefix_ids, prefix
        assert text.count("red") == 6, text
    options = LineOptions(tags=translator.choose_tags(), max_source_length=24)
    window = Window(0, [f"<2de> {line}"], [""])  # a line that brings its tag
    (segments,) = encode_window(window, translator.tokenizer, options).segments
    assert len(segments) > 1
    for segment in segments:
        assert "<2de>" in translator.tokenizer.pieces(segment.ids)


@pytest.mark.slow
def test_exports_without_nmt_go_in_the_direction_of_their_tags(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("ctranslate2", "huggingface"):
        folder = root / library
        options = [f"model_dir={root / 'run'}", f"output={folder}", f"format={library}"]
        assert command("export", options) == 0
        text = (folder / "README.md").read_text(encoding="utf-8")
        code = fenced_blocks(text, "python")[0]
        assert 'source_tag, target_tag = "<2en>", ""  # de to en' in code, library
        assert "en to fr, `<French>` before the target" in text, library
        monkeypatch.chdir(folder)
        for language, tags in {"de": ("<2de>", ""), "fr": ("", "<French>")}.items():
            printed = io.StringIO()
            changed_code = re.sub("target_tag = .*", f"target_tag = {tags}", code)
            with contextlib.redirect_stdout(printed):
                exec(changed_code.replace("A sentence.", "green tree sees red house"), {})
            assert share(language, [printed.getvalue()]) > 0.8, (library, printed.getvalue())
    assert command("export", f"model_dir={root / 'run'}", "format=argos") == 2
    assert "a language or tag before each text" in capsys.readouterr().err
    exported = Translator.load(root / "ctranslate2", backend="ctranslate2", device="cpu")
    native = Translator.load(root / "run", device="cpu", backend="native")
    for language in ("de", "fr"):
        lines = spell("en", rows("test.en-de", 20))
        translations = exported.translate(lines, tgt_lang=language, length_penalty=0.0)
        expected = native.translate(lines, tgt_lang=language, length_penalty=0.0)
        num_equal = (np.array(translations) == np.array(expected)).sum()
        assert num_equal >= 18, (translations, expected)


@pytest.mark.slow
def test_pictures_are_of_what_the_model_reads(root: Path) -> None:
    translator = Translator.load(root / "run", device="cpu", backend="native")
    [mixed] = translator.attention(["<2de> red tree"])
    translator.directions = [LanguagePair("en", "de", "<2de>")]  # of one direction
    [pair] = translator.attention(["red tree"])
    assert "<2de>" in pair.src
    assert (pair.src, pair.predicted) == (mixed.src, mixed.predicted)
    record, hypotheses = record_search(translator, "red tree", 4)
    assert record.num_steps > 1
    assert translator.tokenizer.tgt.pieces(hypotheses[0].tokens) == pair.predicted
    translator.directions = [LanguagePair("en", "fr", "", "<French>")]
    [pair] = translator.attention(["red tree"])
    assert "<French>" in pair.tgt
    arguments = ["what=report", f"run_dir=[{root / 'run'}]", f"output={root / 'r.html'}"]
    assert command("visualize", arguments) == 0


@pytest.mark.slow
def test_server_translates_in_every_direction_and_shows_no_tag(root: Path) -> None:
    translator = Translator.load(root / "run", device="cpu", backend="native")
    with running(loaded(root / "run")) as server, ThreadPoolExecutor(4) as clients:
        targets = {item["code"]: item["targets"] for item in server.get("/languages").json}
        assert targets == {"de": ["de", "en"], "en": ["de", "en", "fr"], "fr": ["en", "fr"]}
        answers = {}
        for name in DIRECTIONS:
            src, tgt = name.split("-")
            lines = spell(src, rows(name, 20))
            answers[name] = clients.submit(server.translate, lines, src, tgt)
        for name, answer in answers.items():
            src, tgt = name.split("-")
            lines = spell(src, rows(name, 20))
            expected = translator.translate(lines, src_lang=src, tgt_lang=tgt)
            assert answer.result() == expected, name
        refused = server.post("/translate", q="rot", source="de", target="fr")
        assert refused.status == 400
        assert "this server does not translate de to fr" in refused.json["error"]
        pair = {"source": "en", "target": "fr"}
        response = server.post(
            "/v1/translate", text="red tree", alignment=True, scores=True, **pair
        )
        (sentence,) = response.json["translations"][0]["sentences"]
        (hypothesis,) = sentence["hypotheses"]
        assert "French" not in response.body.decode()
        assert len(hypothesis["tokens"]) == len(hypothesis["spans"]) == len(hypothesis["alignment"])
        assert len(hypothesis["token_log_probs"]) == len(hypothesis["tokens"]) + 1
        assert share("fr", [server.translate("<b>red</b> tree", **pair, format="html")[3:8]]) == 1
        attended = server.post("/v1/attention", text="red", translation="rouge", **pair).json
        assert "<French>" in attended["rows"]


def test_languages_that_a_model_lacks_are_refused_with_a_list_of_its_own(
    new_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    translator = Translator.load(new_root / "run", device="cpu", backend="native")
    for options, message in (
        ({"tgt_lang": "es"}, "tgt_lang=es: the model translates de to en, en to de, en to fr, fr"),
        ({"src_lang": "de", "tgt_lang": "fr"}, "src_lang=de tgt_lang=fr: the model translates de"),
        ({"src_lang": "en"}, "src_lang=en: .*; give tgt_lang=... or its tags"),
        ({"src_tag": "<2es>"}, "src_tag=<2es>: the model has no such symbol"),
    ):
        with pytest.raises(ConfigError, match=message):
            translator.translate(["red"], **options)
    with pytest.raises(DataError, match=r"line 2 names no direction; give tgt_lang=.* <2de> <2en>"):
        translator.translate(["<2de> red", "red"])
    assert translate(f"model_dir={new_root / 'run'}", f"input={new_root / 'test.en-de.en'}") == 2
    assert "line 1 names no direction; give tgt_lang=" in capfd.readouterr().err
    path = write_lines(tmp_path / "lines", ["<2de> red", "<2de> red", "red"])
    files = [f"src={path}", f"tgt={path}"]
    assert command("score", f"model_dir={new_root / 'run'}", files, "window_lines=2") == 2
    assert "line 3 names no direction" in capfd.readouterr().err


@pytest.mark.slow
def test_scores_are_higher_in_the_direction_of_the_text(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = [f"src={root / 'test.en-de.en'}", f"tgt={root / 'test.en-de.de'}", "device=cpu"]
    sums = {}
    for language in ("de", "fr"):
        capfd.readouterr()
        assert command("score", f"model_dir={root / 'run'}", files, f"tgt_lang={language}") == 0
        sums[language] = sum(map(float, capfd.readouterr().out.split()))
    assert sums["de"] > sums["fr"] + 20, sums
    translator = Translator.load(root / "run", device="cpu", backend="native")
    for language in ("de", "fr"):  # what search reports, a tag of the target included
        best = translator.n_best(["red tree"], tgt_lang=language)[0][0]
        (scored,) = translator.score(["red tree"], [best.text], tgt_lang=language)
        assert scored.log_prob == pytest.approx(best.log_prob, abs=1e-4), language
        assert scored.tokens == best.tokens, language
        assert translator.score([""], [""], tgt_lang=language)[0].log_prob == 0


def test_held_out_sets_are_scored_by_direction(
    new_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = read_held_out(new_root / "data", "test")
    assert [text.corpus for text in texts] == list(DIRECTIONS)
    assert texts[1].sources == spell("en", rows("test.en-de", 20))
    options = [f"model_dir={new_root / 'run'}", "metrics=chrf", "format=json", "device=cpu"]
    assert command("evaluate", options, f"data_dir={new_root / 'data'}") == 0
    scores = {s["name"]: s["value"] for s in json.loads(capfd.readouterr().out)["scores"]}
    assert list(scores) == [f"{name} chrF2" for name in DIRECTIONS]
    for name in DIRECTIONS:
        src, tgt = name.split("-")
        files = [
            f"src={new_root / f'test.{name}.{src}'}",
            f"references={new_root / f'test.{name}.{tgt}'}",
        ]
        assert command("evaluate", options, files, f"tgt_lang={tgt}") == 0
        (score,) = json.loads(capfd.readouterr().out)["scores"]
        assert score["value"] == scores[f"{name} chrF2"], name
    (record,) = read_records(new_root / "run", "valid_bleu")
    scores_by_direction = [record[f"valid_bleu_{name}"] for name in DIRECTIONS]
    assert record["valid_bleu"] == pytest.approx(sum(scores_by_direction) / 4)


def test_held_out_pairs_of_tagged_corpora_need_a_corpus(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pairs = write_lines(tmp_path / "a.tsv", ["red\trot"])
    arguments = [f"data.corpora.a.tsv={pairs}", "data.corpora.a.tgt_lang=de"]
    assert (
        command("preprocess", arguments, f"data.valid.tsv={pairs}", f"data_dir={tmp_path / 'd'}")
        == 2
    )
    expected = "data.valid has no tag, but every corpus in data.corpora has one"
    assert expected in capfd.readouterr().err


def test_a_line_without_tokens_gets_no_tag_either(tokenizer: Tokenizer) -> None:
    tag_ids = tokenizer.encode("red")
    rows = encode_sources(tokenizer, ["big house", "", "  "], Tags(src="red"))
    assert rows == [tag_ids + tokenizer.encode("big house"), [], []]


def test_a_code_with_a_script_or_territory_is_named_once_with_each() -> None:
    for code in ("pt_BR", "pt-BR", "por-BR"):
        assert language_name(code) == "Portuguese (Brazil)"
    assert language_name("zh_Hant") == language_name("zt") == "Chinese (Traditional)"
    assert (language_name("de"), language_name("no"), language_name("xx")) == (
        "German",
        "Norwegian",
        "xx",
    )
    # the default of a model without languages, and the code of Sardinian in ISO 639-3
    assert language_name("src") == "src"
