"""Lines in capitals, in title case and without words: which they are, and their translations."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from growth import assert_linear_time
from npm import needs_node, run_script
from tiny import sentences, tokenizer_config, train_sentencepiece
from translating import translate, write_lines, write_model

from nmt import Translator
from nmt.config import OutputFormat
from nmt.data.languages import Tags
from nmt.data.perturb import to_title
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.documents.markup import parse_html
from nmt.export.web import read_vocabulary
from nmt.translate.context import prepare_groups
from nmt.translate.copied import has_no_words
from nmt.translate.options import LineOptions
from nmt.translate.recasing import (
    apply_case,
    find_case,
    lower_placeholders,
    restore_placeholders,
    to_sentence_case,
)
from nmt.translate.restoring import restore_lines
from nmt.translate.results import EMPTY, LineResult, render
from nmt.translate.windows import Window, encode_window

SENTENCE_CASES = {
    "SIGN IN NOW": "Sign in now",
    "SETTINGS": "Settings",
    "HELLO! WHERE ARE YOU? 3 HOUSES.": "Hello! Where are you? 3 houses.",
    "«ÜBER ALLES»": "«Über alles»",
    "ПРИВЕТ, МИР": "Привет, мир",
    "OʻZBEKISTON": "Oʻzbekiston",
    "The Big House Is Red": "The big house is red",
    "A Photo By NASA And McDonald Today": "A photo by NASA and McDonald today",
    "The Year 2024 - Was Very Good": "The year 2024 - was very good",
    "The ʻOkina Is Red": "The ʻOkina is red",
    "Terms Of Service": "Terms of service",
    "Do You Have Any Children?": "Do you have any children?",
    "It Isn't An (optional) E-Mail": "It isn't an (optional) E-Mail",
}
MARKUP_CASES = {  # line: its case, and the sentence
    "<b>SETTINGS</b>": ("upper", "<b>Settings</b>"),
    "SETTINGS{n}": ("upper", "Settings{n}"),
    "<b>The</b> Big <i>House</i>": ("title", "<b>The</b> big <i>house</i>"),
    '<a class="A B">The</a> {{ Big_one }} House Is Red': (
        "title",
        '<a class="A B">The</a> {{ Big_one }} house is red',
    ),
    "{n}x House Is Red": ("title", "{n}x house is red"),  # the x is the end of a word
    "<b>T</b>he Big House Is Red": ("title", "<b>T</b>he big house is red"),
}
OTHER_LINES = [
    "",
    "OK",
    "NATO",  # an abbreviation
    "A house is red.",
    "GET the red house NOW",
    "Angela Merkel",  # may be a name
    "The Lord of the Rings Today",
    "Haben Sie Kinder?",  # short sentences with names or German nouns
    "Kennen Sie Toms Eltern?",
    'Happy New Year!"',
    "I'm Tom Jackson. ",
    "NASA ESA JAXA Roscosmos Cnsa",  # two words in title case
    "1234 5678 - 90",
    "你好世界",
    "https://example.org/A",
    "%S {Name} %D",
    "这是HTTPS协议",  # letters without case around acronyms and names
    "私はNHKを見ます",
    "שלום USA",
    "Samsung 과 Apple 은 Google 을 이겼다",
    "شركة Google و Apple و Microsoft",
    "<b>the</b> Big House Is Red",
    "HELLO<br/>World",
    "<b>Haben Sie Kinder?</b>",
    "https://example.org/{ID}/SETTINGS",
]


def test_lines_in_capitals_and_in_title_case_become_sentences() -> None:
    texts = [*SENTENCE_CASES.values()] * 20
    tokenizer = train_tokenizer(texts, tokenizer_config(vocab_size=450))
    for line, sentence in SENTENCE_CASES.items():
        assert find_case(line) == ("upper" if line.isupper() else "title"), line
        assert to_sentence_case(line, tokenizer) == sentence
    for line in OTHER_LINES:
        assert find_case(line) == "", line


def test_words_that_touch_tags_and_placeholders_are_recased() -> None:
    texts = [*SENTENCE_CASES.values()] * 20
    tokenizer = train_tokenizer(texts, tokenizer_config(vocab_size=450))
    for line, (case, sentence) in MARKUP_CASES.items():
        assert find_case(line) == case, line
        assert to_sentence_case(line, tokenizer) == sentence


def test_a_line_with_tags_is_recased_as_the_sentence_of_the_same_html() -> None:
    tokenizer = train_tokenizer(TEXTS_WITH_NAMES * 50, tokenizer_config(vocab_size=450))
    for line in (
        "<b>ANNA</b> FLIES TO <i>BERLIN</i>",
        '<a class="x" href="Y">The Pilot</a> Knows <i>Anna</i>',
        "ANNA KNOWS <b>OTTO. THE</b> PILOT",
        "<b>the</b> Pilot Knows Anna",
        "<b>Do You Know Anna?</b>",
    ):
        recased = to_sentence_case(line, tokenizer) if find_case(line) else line
        [text] = parse_html(line, split_sentences=False).sentences
        recased_text = to_sentence_case(text, tokenizer) if find_case(text) else text
        assert parse_html(recased, split_sentences=False).sentences == [recased_text]


RECASED_NAMES = {
    "TODAY ANNA MÜLLER FLIES TO BERLIN.": "Today Anna Müller flies to Berlin.",
    "— NASA KNOWS OTTO. • THE PILOT": "— NASA knows Otto. • The pilot",
    "😀 The People Of Berlin": "😀 The people of Berlin",
    "Today Anna Flies To “Berlin”.": "Today Anna flies to “Berlin”.",
    "THE PILOT OF NASA KNOWS ANNA'S ROUTE": "The pilot of NASA knows Anna's route",
    "OTTO KNOWS XAVER QUENTIN": "Otto knows xaver quentin",  # in no training text
    "{name} Knows Anna Today. (Anna Flies)": "{name} knows Anna today. (Anna flies)",
    "ANNA FLIES TO {city}. https://x.org/A?b=1 KNOWS %s.": (
        "Anna flies to {city}. https://x.org/A?b=1 knows %s."
    ),
    "<b>THE</b> PILOT &nbsp; OF 5% WWW.NASA.ORG": "<b>The</b> pilot &nbsp; of 5% WWW.NASA.ORG",
    "<b>ANNA</b> FLIES TO <I>BERLIN</I>.<br/>THE PILOT{n} KNOWS IT": (
        "<b>Anna</b> flies to <I>Berlin</I>.<br/>The pilot{n} knows it"
    ),
    '<a class="X" href="Y Z">ANNA FLIES.</a> &quot;THE PILOT %d{N}: <0>{{ X }}</0>. & HE 5%': (
        '<a class="X" href="Y Z">Anna flies.</a> &quot;THE pilot %d{N}: <0>{{ X }}</0>. & He 5%'
    ),
    "HTTPS://{HOST}/<ID>/ANNA {A, THE {#}} X<Y": "HTTPS://{HOST}/<ID>/ANNA {A, the {#}} X<Y",
    "ANNA KNOWS WWW.X.ORG/<ID>/THE-PILOT NOW": "Anna knows WWW.X.ORG/<ID>/THE-PILOT now",
    "anna@x.org Knows The Pilot Today": "anna@x.org knows the pilot today",
    "ANNA FLIES. anna@x.org KNOWS. www.x.org": "Anna flies. anna@x.org knows. www.x.org",
    "ANNA FLIES. . (a@x.org KNOWS! ?. %s. - ANNA": "Anna flies. . (a@x.org knows! ?. %s. - Anna",
}


TEXTS_WITH_NAMES = [
    "Today the pilot Anna Müller flies to Berlin with the new plane of NASA.",
    "The people of Berlin and Anna know the pilot, and Anna's route today.",
    "Otto knows a pilot of NASA, and flies to Anna.",
    "She knows that “Anna” flies from “Berlin” to Müller and {name}.",
]


def test_names_and_acronyms_keep_the_capitals_of_the_training_text() -> None:
    texts = TEXTS_WITH_NAMES * 50 + [*SENTENCE_CASES.values()] * 5
    tokenizer = train_tokenizer(texts, tokenizer_config(vocab_size=450))
    for line, sentence in RECASED_NAMES.items():
        assert to_sentence_case(line, tokenizer) == sentence


def test_placeholders_and_addresses_do_not_count_and_keep_their_case() -> None:
    for line, case in (
        ("ENTER {name} NOW", "upper"),
        ("SEE https://example.org/a NOW", "upper"),
        ("SAVE 5% AT www.example.org, &nbsp; $user", "upper"),
        ("https://example.org/a OK", ""),
        ("See Me@Example.org For The Prize", "title"),
        ("see https://Example.org NOW", ""),
    ):
        assert find_case(line) == case, line
    translation = (
        '<b>siehe <a href="b c">{count}x häuser</a></b> auf https://a.org/b, %s von $name, 5% &amp;'
    )
    assert apply_case(translation, "upper") == (
        '<b>SIEHE <a href="b c">{count}X HÄUSER</a></b> AUF https://a.org/b, %s VON $name, 5% &amp;'
    )
    assert apply_case(translation, "title") == (
        '<b>Siehe <a href="b c">{count}x Häuser</a></b> Auf https://a.org/b, %s Von $name, 5% &amp;'
    )


def test_placeholders_in_capitals_are_translated_in_lower_case(model: Path) -> None:
    for line, lowered in (
        ("The {NAME} of ${A_B} and {{ X }}", "The {name} of ${a_b} and {{ x }}"),
        ("The {Name} of {0} and %S", "The {Name} of {0} and %S"),
        ("The {N} of {n}", "The {N} of {n}"),  # two placeholders
    ):
        assert lower_placeholders(line) == lowered
        assert restore_placeholders(lowered, line) == line
    translator = Translator.load(model, device="cpu", backend="native")
    results = []
    for line in ("THE HOUSE {NAME} TREE", "THE HOUSE {name} TREE"):
        options = LineOptions()
        encoded = encode_window(Window(0, [line]), translator.tokenizer, options)
        assert encoded.lines[0].text == "The house {name} tree"
        translation = replace(EMPTY, text="haus {name}")
        [result] = restore_lines([LineResult([translation])], encoded)
        results.append(result.text)
    assert results == ["HAUS {NAME}", "HAUS {name}"]


RECASE = """
import fs from "node:fs";
import {
  applyCase, findCase, lowerPlaceholders, restorePlaceholders, toSentenceCase
} from "./recasing.js";
import { Tokenizer } from "./tokenizer.js";
const { vocabulary, lines } = JSON.parse(fs.readFileSync(0));
const tokenizer = new Tokenizer(vocabulary);
const recase = (line) => [
  findCase(line),
  toSentenceCase(line, tokenizer),
  applyCase(line, "upper"),
  applyCase(line, "title"),
  lowerPlaceholders(line),
  restorePlaceholders(lowerPlaceholders(line), line),
];
console.log(JSON.stringify(lines.map(recase)));
"""


@needs_node
def test_the_web_page_recases_as_the_other_engines_do(tmp_path: Path) -> None:
    lines = [*RECASED_NAMES, *SENTENCE_CASES, *MARKUP_CASES, *OTHER_LINES]
    byte_fallback = train_tokenizer(TEXTS_WITH_NAMES * 50, tokenizer_config(vocab_size=300))
    with_unknown = Tokenizer(train_sentencepiece(TEXTS_WITH_NAMES, hard_vocab_limit=False))
    for tokenizer in (byte_fallback, with_unknown):
        expected = []
        for line in lines:
            recased = [find_case(line), to_sentence_case(line, tokenizer)]
            recased += [apply_case(line, "upper"), apply_case(line, "title")]
            lowered = lower_placeholders(line)
            recased += [lowered, restore_placeholders(lowered, line)]
            expected.append(recased)
        data = {"vocabulary": read_vocabulary(tokenizer), "lines": lines}
        assert run_script(tmp_path, RECASE, data) == expected


def test_a_word_in_a_case_that_the_vocabulary_lacks_has_another_case() -> None:
    model = train_sentencepiece(TEXTS_WITH_NAMES, model_type="word", hard_vocab_limit=False)
    recased = to_sentence_case("TODAY ANNA KNOWS OF BERLIN", Tokenizer(model))
    assert recased == "Today Anna knows of Berlin"


@pytest.mark.parametrize("unit", ["<a", "<a ", "<", "{", "{{ ", ".<b>", "$", "{n}", ".<b "])
def test_lines_with_much_markup_take_linear_time(unit: str) -> None:
    tokenizer = train_tokenizer(TEXTS_WITH_NAMES * 50, tokenizer_config(vocab_size=300))

    def recase(size: int) -> None:
        find_case("HELLO " + unit * size)
        to_sentence_case("HELLO " + unit * size, tokenizer)

    assert_linear_time(recase, 4_000)


@pytest.mark.parametrize("end", ["a@b", "{name}", ""])
def test_lines_with_many_full_stops_take_linear_time(end: str) -> None:
    tokenizer = train_tokenizer(TEXTS_WITH_NAMES * 50, tokenizer_config(vocab_size=300))

    def recase(size: int) -> None:
        to_sentence_case("HELLO " + ". " * size + end, tokenizer)

    assert_linear_time(recase, 4_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("recasing") / "model")


def test_a_translation_gets_the_case_of_its_line(model: Path, tmp_path: Path) -> None:
    translator = Translator.load(model, device="cpu", backend="native")
    ordinary = ["The small house sees a tree", "A green tree", "The house"]
    lines = [ordinary[0].upper(), to_title(ordinary[0]), ordinary[1].upper(), *ordinary]
    expected = translator.translate(ordinary)
    first, second = expected[:2]
    recased = translator.translate(lines)
    assert recased == [first.upper(), to_title(first), second.upper(), *expected]
    assert recased[0] != recased[1] != recased[3]
    n_best = translator.n_best(lines[:1], beam_size=3)[0]
    plain = translator.n_best(ordinary[:1], beam_size=3)[0]
    assert [item.text for item in n_best] == [item.text.upper() for item in plain]
    assert [item.log_prob for item in n_best] == pytest.approx([item.log_prob for item in plain])
    # unchanged, also with prefixes
    as_they_are = translator.translate(lines, recase=False)
    assert as_they_are[3:] == expected
    assert as_they_are[:3] != recased[:3]
    assert translator.translate(lines, prefixes=["x"] * len(lines)) == translator.translate(
        lines, prefixes=["x"] * len(lines), recase=False
    )
    source = write_lines(tmp_path / "in", lines)
    output = tmp_path / "out"
    for options, translations in (([], recased), (["recase=false"], as_they_are)):
        arguments = [f"model_dir={model}", f"input={source}", f"output={output}", *options]
        assert translate(arguments) == 0
        assert output.read_text(encoding="utf-8").split("\n")[:-1] == translations
        output.unlink()


def test_a_translation_of_a_line_with_tags_gets_its_case_too(model: Path) -> None:
    translator = Translator.load(model, device="cpu", backend="native")
    ordinary = ['<b>The</b> small <a class="x y">house</a> sees a tree']
    [expected] = translator.translate(ordinary)
    lines = ['<b>THE</b> SMALL <a class="x y">HOUSE</a> SEES A TREE']
    lines.append('<b>The</b> Small <a class="x y">House</a> Sees A Tree')
    assert translator.translate(lines) == [
        apply_case(expected, "upper"),
        apply_case(expected, "title"),
    ]


def test_a_long_line_in_capitals_is_split_at_its_sentences(model: Path) -> None:
    translator = Translator.load(model, device="cpu", backend="native")
    line = "The house. A tree sees the house. A small green tree."
    expected = translator.translate([line], max_source_length=12)[0].upper()
    assert translator.translate([line.upper()], max_source_length=12) == [expected]


LINES_WITHOUT_WORDS = [
    "🎉👍🔥",
    "👩\u200d💻 ❤️",
    "...",
    "1\ufe0f\u20e3 2\ufe0f\u20e3 ℹ\ufe0f",
    "Https://example.org WWW.example.org",
    "https://example.org/3264/a?b=50",
    "www.example.org/x — jane.doe+x@mail.example.org",
    "  ->  ",
]


def test_terms_of_a_glossary_keep_a_case_that_counts() -> None:
    tokenizer = train_tokenizer(sentences(200), tokenizer_config())
    lines = ["NASA SEES A HOUSE", "The Green Apple Store", "the Apple House"]
    lines.append("The Green Cafe\u0301 Red")  # not in normal form
    terms = ("NASA\tNASA\tcase", "Apple\tApple\tcase", "house\tHaus", "Café\tCafé\tcase")
    for glossary in ({"hints": terms}, {"required_terms": terms}):
        encoded = encode_window(Window(0, lines), tokenizer, LineOptions(**glossary))
        expected = ["NASA sees a house", "The green Apple store", lines[2]]
        texts = [line.text for line in encoded.lines]
        assert texts == [*expected, "The green Cafe\u0301 red"]
        assert [line.case for line in encoded.lines] == ["upper", "title", "", "title"]
    options = LineOptions(required_terms=terms)
    groups, [last_line] = prepare_groups([lines[:2]], tokenizer, options)
    assert groups == [["NASA sees a house", "The green Apple store"]]
    assert last_line.case == "title"


def test_a_line_with_a_separator_is_recased_without_context() -> None:
    tokenizer = train_tokenizer(sentences(200), tokenizer_config(), ["<sep>"])
    encoded = encode_window(Window(0, ["The House <sep> The Tree"]), tokenizer, LineOptions())
    assert encoded.lines[0].text == "The house <sep> the tree"
    assert encoded.lines[0].case == "title"


def test_lines_that_begin_with_a_tag_are_recased_and_copied_without_it() -> None:
    tags = Tags(src_choices=("<2de>", "<2fr>"))
    tokenizer = train_tokenizer(sentences(200), tokenizer_config(), tags.src_choices)
    lines = ["<2de> THE SMALL HOUSE", "<2fr>The Green Tree", "<2de> www.example.com", "<2de> {x}"]
    lines += ["<2de>", "<2fr> ", ""]
    options = LineOptions(tags=tags, protect=True)
    encoded = encode_window(Window(0, lines), tokenizer, options)
    texts = [line.text for line in encoded.lines]
    assert texts == ["<2de> The small house", "<2fr> The green tree", "", "", "", "", ""]
    assert [line.case for line in encoded.lines[:2]] == ["upper", "title"]
    copied = [line.ends.start for line in encoded.lines]
    assert copied == ["", "", "www.example.com", "{x}", "", "", ""]
    assert not any(encoded.segments[2:])
    texts = ("a", "b", "www.example.com", "", "", "", "")
    results = [LineResult([replace(EMPTY, text=text)]) for text in texts]
    settings = {"output_format": OutputFormat.text, "n_best": 1, "protect": True, "tags": tags}
    output, counts = render(Window(0, lines), results, **settings)
    assert output == b"a\nb\nwww.example.com\n\n\n\n\n"
    assert counts.lost_protected == 1


ADDRESSES = [
    "https://ja.wikipedia.org/wiki/日本",
    "größe@straße.de",
    "https://ja.wikipedia.org/wiki/C言語",
    "https://ko.wikipedia.org/wiki/TV방송",
    "https://ja.wikipedia.org/wiki/佐々木",
    "https://x.com/?q=a+学习",
    "https://x.com/a-深度",
    'https://x.com/a"b',
    "https://x.com/<id>",
    "https://www.例子.cn/?a",
    "file:///home",
]
TEXT_AFTER_ADDRESSES = [
    "https://x.cn是我们的网站。",
    "https://x.cn/a。谢谢",
    "a@b.cn是我的",
    "www.x.krから",
    "發到a@b.cn",
    "https://",
    "www.",
]


def test_an_address_ends_before_letters_that_need_no_space() -> None:
    for line in ADDRESSES:
        assert has_no_words(line), line
    for line in TEXT_AFTER_ADDRESSES:
        assert not has_no_words(line), line


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_web_page_copies_the_same_addresses(tmp_path: Path) -> None:
    code = resources.files("nmt.export").joinpath("web_static/copied.js").read_text("utf-8")
    assert "(?<" not in code  # a syntax error in Safari before 16.4
    lines = json.dumps([*ADDRESSES, *TEXT_AFTER_ADDRESSES])
    script = tmp_path / "copied.mjs"
    script.write_text(f"{code}\nconsole.log(JSON.stringify({lines}.map(hasNoWords)));\n", "utf-8")
    output = subprocess.run(["node", script], check=True, capture_output=True).stdout
    assert json.loads(output) == [True] * len(ADDRESSES) + [False] * len(TEXT_AFTER_ADDRESSES)


@pytest.mark.slow
def test_lines_without_words_are_copied(model: Path, tmp_path: Path) -> None:
    assert all(map(has_no_words, LINES_WITHOUT_WORDS))
    for line in ("", " ", "a", "🎉 yes", "3.5", "50 €", "see https://example.org", "@ home", "x@y"):
        assert not has_no_words(line), line
    translator = Translator.load(model, device="cpu", backend="native")
    lines = [*LINES_WITHOUT_WORDS, "The house", *LINES_WITHOUT_WORDS[:1]]
    expected = [*LINES_WITHOUT_WORDS, *translator.translate(["The house"]), LINES_WITHOUT_WORDS[0]]
    assert translator.translate(lines) == expected
    assert translator.translate(lines, copy_symbols=False) != expected
    assert translator.translate(lines[:1], max_source_length=8) == lines[:1]  # has more tokens
    prefixed = translator.translate(lines[:1], prefixes=["The house"])
    assert prefixed[0].startswith("The house")
    [[translation]] = translator.n_best(lines[:1], beam_size=1)
    assert (translation.text, translation.tokens, translation.finished) == (lines[0], [], True)
