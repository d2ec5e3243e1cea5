"""Glossaries over HTTP: of a request, and of the server by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from exporting import short_sentences
from serving import Running, loaded, running, tiny_folder
from test_foreign_files import REPLACEMENTS, limited
from tiny import sentences, tokenizer_config

from nmt.config import Engine, ServeConfig
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ConfigError
from nmt.serve.access import read_keys
from nmt.serve.models import choose_serve_engine
from nmt.serve.service import load_glossaries
from nmt.translate.translator import Translator

LINES = short_sentences(8)
WORD = LINES[0].split()[0]
BEAM = {"beam_size": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("glossary") / "model", tokenizer)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    glossaries = folder.parent / "glossaries"
    glossaries.mkdir()
    lines = f"# our words\n{WORD}\tHaus|Tür\nabsent\tnever\n"
    (glossaries / "ours.tsv").write_text(lines, encoding="utf-8")
    with running(loaded(folder), glossaries=str(glossaries)) as server:
        yield server


def translate(server: Running, glossary: object, **params: object) -> list[str]:
    body = {"text": LINES, "source": "xx", "target": "yy", "search": BEAM, **params}
    answer = server.post("/v1/translate", **body, glossary=glossary)
    assert answer.status == 200, answer
    return [translation["text"] for translation in answer.json["translations"]]


@pytest.mark.slow
def test_requests_contain_or_name_a_glossary(server: Running, folder: Path) -> None:
    translator = Translator.load(folder, device="cpu", backend="native")
    plain = translator.translate(LINES, **BEAM)
    expected = translator.translate(LINES, **BEAM, glossary=[f"{WORD}\tHaus|Tür"])
    assert expected[0] != plain[0]
    assert translate(server, [[WORD, "Haus|Tür"], ["absent", "never"]]) == expected
    assert translate(server, "ours") == expected
    assert translate(server, None) == plain
    assert translate(server, []) == plain
    assert server.get("/v1/models").json["glossaries"] == ["ours"]
    [marked] = translate(server, "ours", text=[f"<p>{LINES[0]}</p>"], format="html")
    assert marked == f"<p>{expected[0]}</p>"
    query = "/v1/translate?source=xx&target=yy&glossary=ours"
    streamed = server.send("POST", query, "\n".join(LINES).encode(), Content_Type="text/plain")
    for line, text in zip(LINES, streamed.body.decode().splitlines(), strict=True):
        if WORD in line.split():
            assert "Haus" in text or "Tür" in text


def test_soft_glossaries_add_hints(tmp_path: Path) -> None:
    symbols = ["__source__", "__target__", "__done__"]
    hint_tokenizer = train_tokenizer(sentences(200), tokenizer_config(), symbols)
    folder = tiny_folder(tmp_path / "model", hint_tokenizer)
    translator = Translator.load(folder, device="cpu", backend="native")
    soft = {"beam_size": 1, "glossary_mode": "soft"}
    expected = translator.translate(LINES, **soft, glossary=[f"{WORD}\tHaus"])
    assert expected != translator.translate(LINES, beam_size=1)
    with running(loaded(folder)) as server:
        assert translate(server, [[WORD, "Haus"]], search=soft) == expected
        text = f"<p>{LINES[0]}</p>"
        [marked] = translate(server, [[WORD, "Haus"]], search=soft, text=[text], format="html")
        assert marked == f"<p>{expected[0]}</p>"


def test_wrong_glossaries_are_refused_in_one_line(server: Running) -> None:
    body = {"text": "a", "source": "xx", "target": "yy"}
    for glossary, status, message in (
        ("our", 404, "no glossary 'our'; did you mean ours"),
        ({"a": "b"}, 400, "glossary is not a name or list of at most 10000 pairs"),
        ([["a", "b"]] * 10_001, 400, "glossary is not a name or list"),
        ([["a"]], 400, "a pair of glossary is not [source, target]"),
        ([["a", 1]], 400, "a pair of glossary is not"),
        ([["a", "b\tbold"]], 409, "no flag 'bold'"),
        ([["a", "\ud800"]], 409, "write one pair per line"),
        ([["", "b"]], 400, "a pair of glossary is not"),
    ):
        answer = server.post("/v1/translate", **body, search=BEAM, glossary=glossary)
        assert (answer.status, "\n" in answer.json["error"]) == (status, False), glossary
        assert message in answer.json["error"], answer.json
    answer = server.post("/v1/translate", **body, search={"beam_size": 1}, glossary=[["a", "b"]])
    assert answer.status == 409
    assert "needs beam_size=2" in answer.json["error"]


def test_an_invalid_folder_of_glossaries_is_an_error(tmp_path: Path) -> None:
    assert load_glossaries(None) == {}
    with pytest.raises(ConfigError, match=r"^glossaries=.*: no such folder"):
        load_glossaries(str(tmp_path / "none"))
    (tmp_path / "a.tsv").write_text("no tab\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a\.tsv: glossary: 'no tab' is not"):
        load_glossaries(str(tmp_path))
    (tmp_path / "a.tsv").write_bytes(b"\xff\tx\n")
    with pytest.raises(ConfigError, match=r"a\.tsv: is not UTF-8 \(byte 1\)"):
        load_glossaries(str(tmp_path))


@pytest.mark.parametrize("replacement", [name for name in REPLACEMENTS if name != "empty file"])
def test_what_is_no_file_of_plausible_size_is_no_glossary_and_no_list_of_keys(
    tmp_path: Path, replacement: str
) -> None:
    path = tmp_path / "a.tsv"
    REPLACEMENTS[replacement](path)
    with limited(), pytest.raises(ConfigError, match=r"a\.tsv"):
        load_glossaries(str(tmp_path))
    if replacement != "pipe":  # from a program that keeps secrets
        with limited(), pytest.raises(ConfigError, match=r"^api_keys=.*a\.tsv: (cannot|has more)"):
            read_keys(str(path))


def test_a_server_with_glossaries_takes_the_native_engine(tmp_path: Path) -> None:
    config = ServeConfig(backend=Engine.auto, glossaries=str(tmp_path))
    assert choose_serve_engine(config).backend is Engine.native
