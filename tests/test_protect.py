"""`protect`: placeholders, tags and addresses that translations keep."""

from __future__ import annotations

import logging
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exporting import short_sentences
from growth import assert_linear_time
from searching import ToyStepper
from serving import GOOD, Running, loaded, running
from tiny import tokenizer_config
from translating import translate, write_lines

from nmt import Translator
from nmt.config import Engine, SearchConfig, ServeConfig
from nmt.data.tokenizer import Tokenizer, TokenizerPair
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ConfigError
from nmt.search.hypotheses import Hypothesis
from nmt.search.protect import (
    ProtectedText,
    encode_protected,
    find_protected,
    has_only_protected,
    lacks_protected,
)
from nmt.search.request import SearchRequest
from nmt.search.search import search as search_batch
from nmt.search.term_search import find_terms
from nmt.serve.models import Models
from nmt.translate.copied import has_no_words

ITEMS = [
    "{name}",
    "{0}",
    "${user}",
    "{{ count }}",
    "%s",
    "%d",
    "%(count)d",
    "%1$s",
    "<b>",
    "</b>",
    "<br/>",
    '<a href="x">',
    "https://example.org/a?b=1",
    "www.example.org",
    "me@example.org",
    "&nbsp;",
    "🎉",
    "👩\u200d💻❤\ufe0f🇩🇪",
]
OPTIONS: dict[str, Any] = {"protect": True, "max_length_b": 20}


@pytest.fixture(scope="module")
def folder(trained_model_dir: Path) -> Path:
    return trained_model_dir


@pytest.fixture(scope="module")
def translator(folder: Path) -> Translator:
    return Translator.load(folder, device="cpu", backend="native")


def lines_with_items(count: int, *, seed: int = 40) -> list[str]:
    """Draw sentences of one or two words with one or two items between them."""
    draw = random.Random(seed)
    lines = []
    for sentence in short_sentences(count):
        words = sentence.split()[:2]
        for _ in range(draw.randint(1, 2)):
            words.insert(draw.randint(0, len(words)), draw.choice(ITEMS))
        lines.append(" ".join(words))
    return lines


# --- which texts


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Hello {name}, %d new (%s).", "{name} %d %s"),
        ("%(n)d in <b>bold</b> <a>a</a><br/>", "%(n)d <b> </b> <a> </a> <br/>"),
        (
            "At https://x.org/a?b=1. Or www.x.de, a.b@d.org!",
            "https://x.org/a?b=1 www.x.de a.b@d.org",
        ),
        ("${x} {{y}} %{z} %1$s %.2f %% %NAME $name", "${x} {{y}} %{z} %1$s %.2f %% %NAME $name"),
        ("Nice 🎉👍🏽! ☀\ufe0f, 好👩\u200d💻好 → 5 € © ½ ™", "🎉👍🏽 ☀\ufe0f 👩\u200d💻"),
        ("1\ufe0f\u20e3 2\u20e3, *\ufe0f\u20e3", "1\ufe0f\u20e3 2\u20e3 *\ufe0f\u20e3"),
        ("a▶\ufe0f🙂\u200d↔\ufe0f ™\ufe0f ㊗\ufe0f", "▶\ufe0f🙂\u200d↔\ufe0f ™\ufe0f ㊗\ufe0f"),
        ("ℹ\ufe0f ⤴\ufe0f Ⓜ\ufe0f ➡ ⬅ ★ ✓ ❤", "ℹ\ufe0f ⤴\ufe0f Ⓜ\ufe0f ➡ ⬅ ★ ✓ ❤"),
        ("❝A❞ ❮b❯ ❶ ➓ ➔ ⬈ ⭢ 🠒 ▶ ‼ 1 # *", ""),
        ("50% of it, 50%ige, 5 % and $5, R&D; a < b", ""),
        ("x&nbsp;y &#160; <0>z</0>", "&nbsp; &#160; <0> </0>"),
        ("请看https://x.cn/a。或联系a@b.cn谢谢", "https://x.cn/a a@b.cn"),
        ("欢迎$name先生，%s的%NAME%さん", "$name %s %NAME%"),
        (
            "https://zh.wikipedia.org/wiki/维基百科:首页 https://x.com/?q=a+学习&b=1，谢谢",
            "https://zh.wikipedia.org/wiki/维基百科:首页 https://x.com/?q=a+学习&b=1",
        ),
        (
            "看https://ja.wikipedia.org/wiki/C言語/版 www.x.cn谢谢",
            "https://ja.wikipedia.org/wiki/C言語/版 www.x.cn",
        ),
        (
            "Siehe https://ja.wikipedia.org/wiki/C言語. (www.x.jp/wiki/TV방송) https://x.jp/C言語",
            "https://ja.wikipedia.org/wiki/C言語 www.x.jp/wiki/TV방송 https://x.jp/C言語",
        ),
        ("见https://x.cn/a下载，或 https://x.cn/b下载，谢谢", "https://x.cn/a https://x.cn/b"),
        ("https://ja.wikipedia.org/wiki/日本, $größe", "https://ja.wikipedia.org/wiki/日本 $größe"),
    ],
)
def test_placeholders_tags_and_addresses_are_found(sentence: str, expected: str) -> None:
    assert [protected.text for protected in find_protected(sentence)] == expected.split()


def test_every_item_is_found_alone_and_in_a_sentence() -> None:
    for item in ITEMS:
        assert find_protected(item) == [ProtectedText(item, False)]
        assert find_protected(f"A ({item}) b") == [ProtectedText(item, True)]
        assert has_only_protected(f"{item} - {item}!")
        assert not has_only_protected(f"{item} a")
        assert lacks_protected(f"a {item} b {item}", f"c {item}")
        assert not lacks_protected(f"a {item} b {item}", f"{item} {item}.")
    assert lacks_protected("%s of %d", "%d der %sorte")
    assert not lacks_protected("Hello $name", "你好$name先生")


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "<a ",
        "{",
        "%",
        "%a",
        "a@",
        "a.",
        "&a",
        "www.,",
        "a://",
        "漢",
        "a://漢",
        "a://x漢",
        "(a://a/漢!",
        "(a://a/漢。",
        "漢/.",
        "1\ufe0f",
        "🎉™",
    ],
)
def test_long_lines_take_linear_time(text: str) -> None:
    assert_linear_time(lambda size: find_protected(text * size), 100_000)


def test_long_words_take_little_memory() -> None:
    word = "a" * 500_000
    tracemalloc.start()
    for text in (word, f"a@{word}", f"a@b.{word}"):
        find_protected(text)
        has_no_words(text)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10 << 20  # before the limits of the pattern, more than 50 MiB


def test_texts_are_spelled_as_they_are_decoded(tokenizer: Tokenizer) -> None:
    for item in ITEMS:
        after_space = encode_protected(ProtectedText(item, False), tokenizer)
        assert [tokenizer.decode(list(ids)) for ids in after_space] == [item]
        after_text = encode_protected(ProtectedText(item, True), tokenizer)
        assert [tokenizer.decode([*tokenizer.encode("the"), *ids]) for ids in after_text[1:]] == [
            f"the{item}" for _ in after_text[1:]
        ]
    assert encode_protected(ProtectedText("{a\u00a0\u00a0b}", False), tokenizer) == ()


def test_a_text_also_ends_before_a_korean_or_thai_letter() -> None:
    lines = ["%s님 안녕", "%s ครับ", "%sa %s님", "the house"]
    model = train_tokenizer(lines * 9, tokenizer_config(vocab_size=32, byte_fallback=False))
    pieces = model.all_pieces()
    request = SearchRequest([model.encode("%s")], SearchConfig(protect=True, max_length_b=9))
    [terms] = find_terms(request, model)
    assert terms is not None
    ids = tuple(model.encode("%s"))
    assert model.decode(list(ids)) == "%s"
    assert not terms.is_complete(terms.progress(ids))
    for piece, is_end in (("님", True), ("▁", True), ("a", False)):
        progress = terms.progress((*ids, pieces.index(piece)))
        assert terms.is_complete(progress) == is_end, piece
        assert lacks_protected("%s", f"%s{piece.replace('▁', ' ')}") != is_end


def test_a_text_that_cannot_be_encoded_is_not_searched_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["%s a", "a %s"]
    tgt = train_tokenizer(lines * 9, tokenizer_config(vocab_size=10, byte_fallback=False))
    num_sentences = []  # of each search

    def search_with_beam(
        _stepper: object, request: SearchRequest, _tokenizers: object
    ) -> list[list[Hypothesis]]:
        num_sentences.append(len(request.sources))
        hypothesis = Hypothesis(tgt.encode("a"), 0.0, 0.0, finished=True, token_log_probs=[])
        return [[hypothesis] for _ in request.sources]

    monkeypatch.setattr("nmt.search.search._search_with_beam", search_with_beam)
    sources = [tokenizer.encode(line) for line in ("a 🎉", "a %s 🎉", "a")]
    request = SearchRequest(sources, SearchConfig(protect=True, max_length_b=9))
    search_batch(ToyStepper(), request, TokenizerPair(tokenizer, tgt))
    assert num_sentences == [3, 1]


# --- translations


@pytest.mark.slow
def test_200_lines_keep_their_placeholders_and_other_lines_are_unchanged(
    translator: Translator,
) -> None:
    lines = lines_with_items(200)
    plain_lines = short_sentences(80)
    without = translator.translate(lines, max_length_b=20, copy_symbols=False)
    num_kept = sum(not lacks_protected(*pair) for pair in zip(lines, without, strict=True))
    assert num_kept < 20  # the model does not know them
    translations = translator.translate([*lines, *plain_lines], **OPTIONS)
    lost = [pair for pair in zip(lines, translations, strict=False) if lacks_protected(*pair)]
    assert lost == []
    assert translations[200:] == translator.translate(plain_lines, max_length_b=20)


@pytest.mark.slow
def test_a_translation_depends_on_its_own_line_and_prefix_only(translator: Translator) -> None:
    lines = [*lines_with_items(6), *short_sentences(6)]
    prefixes = ["", "Haus", "{0}"] * 4
    together = translator.n_best(lines, prefixes=prefixes, **OPTIONS)
    for i, translations in enumerate(together):
        [alone] = translator.n_best([lines[i]], prefixes=[prefixes[i]], **OPTIONS)
        assert [t.text for t in alone] == [t.text for t in translations]
        assert translations[0].text.startswith(prefixes[i])
    best = translator.translate(lines, prefixes=prefixes, max_tokens=40, **OPTIONS)
    assert list(translator.translate_stream(lines, prefixes=prefixes, **OPTIONS)) == best


@pytest.mark.slow
def test_ensembles_and_alternatives_keep_placeholders(folder: Path, translator: Translator) -> None:
    lines = lines_with_items(8)
    ensemble = Translator.load([folder, folder], device="cpu")
    assert ensemble.translate(lines, **OPTIONS) == translator.translate(lines, **OPTIONS)
    for i, translations in enumerate(translator.n_best(lines, alternatives=3, **OPTIONS)):
        assert len(translations) == 3
        for translation in translations:
            assert not lacks_protected(lines[i], translation.text)


def test_protection_is_refused_where_it_does_not_work(folder: Path) -> None:
    for changes, name in (
        ({"beam_size": 1}, "protect"),
        ({"beam_groups": 2}, "beam_groups"),
    ):
        with pytest.raises(ConfigError, match=rf"^{name}=.*: (needs|does not work with) "):
            SearchConfig(protect=True, **changes)


@pytest.mark.slow
def test_auto_protects_with_the_native_engine(
    folder: Path, translator: Translator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    auto = Translator.load(folder, device="cpu", backend="auto")
    lines = lines_with_items(8)
    assert auto.translate(lines, **OPTIONS) == translator.translate(lines, **OPTIONS)
    assert "native, since protect=true" in caplog.text


@pytest.mark.slow
def test_files_keep_their_placeholders(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [*lines_with_items(40), "{name}: <b>", "THE HOUSE {name}", "the house"]
    source = write_lines(tmp_path / "in", lines)
    out = tmp_path / "out"
    arguments = [f"model_dir={folder}", f"input={source}", f"output={out}", "max_length_b=20"]
    assert translate(*arguments, "protect=true") == 0
    translations = out.read_text(encoding="utf-8").splitlines()
    assert not any(map(lacks_protected, lines, translations))
    assert translations[40] == "{name}: <b>"  # copied
    assert "lack a placeholder" not in capfd.readouterr().err
    assert translate(*arguments, "protect=true", "max_length_a=0", "max_length_b=1") == 0
    assert "lack a placeholder, tag or address of their line" in capfd.readouterr().err


# --- the server


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(loaded(folder), protect=True) as server:
        yield server


@pytest.mark.slow
def test_the_server_protects_where_a_request_or_its_setting_says_so(
    folder: Path, translator: Translator, server: Running
) -> None:
    lines = [*lines_with_items(6), *short_sentences(3)]
    expected = translator.translate(lines, protect=True)
    assert server.translate(lines) == expected
    uploaded = server.upload("a.txt", "\n".join(lines).encode(), **GOOD)
    translated = server.get(uploaded.json["translatedFileUrl"].split("/", 3)[3].join(["/", ""]))
    assert translated.body.decode().split("\n") == expected
    plain = translator.translate(lines)
    unprotected = server.post("/v1/translate", text=lines, search={"protect": False}, **GOOD)
    assert [t["text"] for t in unprotected.json["translations"]] == plain
    with running(loaded(folder)) as plain_server:
        assert plain_server.translate(lines) == plain
        answer = plain_server.post("/v1/translate", text=lines, search={"protect": True}, **GOOD)
        assert [t["text"] for t in answer.json["translations"]] == expected


@pytest.mark.slow
def test_a_request_that_cannot_be_protected_is_refused(server: Running) -> None:
    for search in ({"beam_size": 1}, {"sampling": True}):
        answer = server.post("/v1/translate", text="the {name}", search=search, **GOOD)
        assert answer.status == 409, answer
        assert "protect=true: needs beam_size=2 or more" in answer.json["error"]
        answer = server.post("/v1/translate", text="the house", search=search, **GOOD)
        assert answer.status == 200, answer


@pytest.mark.slow
def test_a_server_that_cannot_protect_does_not_start(folder: Path) -> None:
    config = ServeConfig(model_dir=[str(folder)], protect=True, backend=Engine.ctranslate2)
    with pytest.raises(ConfigError, match=r"^protect=true: .*; use backend=native$"):
        Models.load(config)


def test_lines_in_capitals_are_recased_around_their_placeholders(folder: Path) -> None:
    translator = Translator.load(folder, device="cpu", backend="native")
    for text in ("{name}", "me@example.org", "%s"):
        [translation] = translator.translate([f"THE HOUSE SEES {text} TREE"], **OPTIONS)
        assert text in translation
        assert translation.replace(text, "").isupper()
    tag = '<a href="X Y">'
    [translation] = translator.translate([f"THE HOUSE {tag}SEES</a> TREE"], **OPTIONS)
    assert tag in translation
    assert translation.replace(tag, "").replace("</a>", "").isupper()
