"""Texts, HTML and files as the server cuts and joins them; nothing is translated here."""

from __future__ import annotations

import contextlib
import functools
import random
import re
import shutil
from collections.abc import Callable

import pytest
from growth import assert_linear_time

from nmt.documents.document import ReadOptions
from nmt.documents.formats import read_document
from nmt.documents.html_tokens import extract_visible_text
from nmt.documents.inline_tags import align_words
from nmt.documents.markup import parse_html
from nmt.documents.texts import find_token_spans, is_symbols_only, parse_plain_text
from nmt.errors import DataError
from nmt.serve.downloads import Downloads
from nmt.translate.results import LineResult, Translation


def translated(sentence: str, *, backwards: bool = False) -> LineResult:
    """Translate to capitals, in the order of the words or from the last to the first."""
    words = sentence.split()
    order = list(range(len(words)))[:: -1 if backwards else 1]
    target = [words[i].upper() for i in order]
    tokens = [f"▁{word}" for word in target]
    translation = Translation(" ".join(target), 0, 0, tokens, True, [], order)
    return LineResult([translation], source_tokens=[*(f"▁{word}" for word in words), "</s>"])


def line_result(text: str) -> LineResult:
    """Return a result whose translation is `text`."""
    return LineResult([Translation(text, 0, 0, [], True)])


def html(text: str, *, backwards: bool = False) -> str:
    source_text = parse_html(text)
    translate = functools.partial(translated, backwards=backwards)
    return source_text.render(list(map(translate, source_text.sentences)))


def test_a_text_keeps_its_own_spaces_and_line_ends() -> None:
    draw = random.Random(1)
    for _ in range(300):
        text = "".join(
            draw.choices(["a b", "C.", "?", " ", "  ", "\n", "\r\n", "\t", "\u3000"], k=12)
        )
        for split in (True, False):
            source_text = parse_plain_text(text, split_sentences=split)
            sentences = source_text.sentences
            assert source_text.render(list(map(line_result, sentences))) == text, repr(text)
            for sentence in sentences:
                assert sentence == sentence.strip() != ""
                assert "\n" not in sentence


def test_a_text_is_cut_at_the_ends_of_sentences_and_lines() -> None:
    text = "One two. Three?\nFour e.g. five.  Six"
    assert parse_plain_text(text).sentences == ["One two.", "Three?", "Four e.g. five.", "Six"]
    assert parse_plain_text(text, split_sentences=False).sentences == text.split("\n")


def test_sentences_of_a_script_without_spaces_get_one_in_another_script() -> None:
    source_text = parse_plain_text("你好。再见。")
    assert len(source_text.sentences) == 2
    english = list(map(line_result, ["Hello.", "Bye."]))
    assert source_text.render(english) == "Hello. Bye."
    chinese = list(map(line_result, source_text.sentences))
    assert source_text.render(chinese) == "你好。再见。"


def test_only_symbols_are_emoji() -> None:
    assert all(map(is_symbols_only, ["😀", " 🎉 🎉\n", "👩\u200d💻", "❤️"]))
    assert not any(map(is_symbols_only, ["", " ", "a", "😀 a", "5 €", "..."]))


def test_token_spans_cover_the_words_of_a_text() -> None:
    text = "Das  Haus"
    assert find_token_spans(["▁Das", "▁Ha", "us", "</s>"], text) == [(0, 3), (5, 7), (7, 9), (9, 9)]
    unknown = find_token_spans(["▁the", "▁", "<unk>", "▁red", "</s>"], "the 😀 red")
    assert unknown == [(0, 3), (9, 9), (4, 5), (6, 9), (9, 9)]
    emoji = find_token_spans(["▁a", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁b"], "a 😀 b")
    assert [emoji[0], emoji[2], emoji[6]] == [(0, 1), (2, 3), (4, 5)]


def test_an_ideographic_space_is_not_a_word() -> None:
    tokens = ["▁", "世", "界", "▁b"]
    translation = Translation("\u3000世界 b", 0, 0, tokens, True, [], alignment=[0, 1, 2, 3])
    result = LineResult([translation], source_tokens=["▁a", "▁b", "▁c", "▁d"])
    words = align_words(result, 0, sentence="a b c d", prefix="", source_start=0, target_start=0)
    assert [(word.start, word.source_position) for word in words] == [(1, 2), (2, 4), (4, 6)]


def test_inline_tags_follow_their_words() -> None:
    cases = {
        "<p>a <b>c d</b> e</p>": ("<p>A <b>C D</b> E</p>", "<p>E <b>D C</b> A</p>"),
        "a <a href='x'>b <i>c</i></a> d": (
            "A <a href='x'>B <i>C</i></a> D",
            "D <a href='x'><i>C</i> B</a> A",
        ),
        "<b>a b</b>": ("<b>A B</b>", "<b>B A</b>"),
        "a <code>x &lt; y</code> b": ("A <code>x &lt; y</code> B", None),
        "a<br />b": ("A<br />B", "A<br />B"),
    }
    for text, (forwards, backwards) in cases.items():
        assert html(text) == forwards
        assert backwards is None or html(text, backwards=True) == backwards


def test_elements_within_a_word_keep_their_text() -> None:
    for text, backwards in (
        ("H<sub>2</sub>O IN CO<sub>2</sub>", "CO<sub>2</sub> IN H<sub>2</sub>O"),
        ("<b>CO<sub>2</sub></b>-A B", "B <b>CO<sub>2</sub></b>-A"),
        (
            "A B<sup><a>[1]</a></sup><sup>[2]</sup>. <i>C</i>",
            "<i>C</i> B<sup><a>[1]</a></sup><sup>[2]</sup>. A",
        ),
        ("10 M<sup>2</sup> A", "A M<sup>2</sup> 10"),
        ("A <b>B</b>. C", "C <b>B</b>. A"),
        ("IN 2021<sup>1</sup> IT", "IT 2021<sup>1</sup> IN"),
        ("10<sup>10</sup> A", "A 10<sup>10</sup>"),
        ("A 11<sup>1</sup>", "11<sup>1</sup> A"),
        ("A 1<i>1</i>1", "1<i>1</i>1 A"),
    ):
        sentence = parse_html(text, split_sentences=False)
        [words] = sentence.sentences
        assert sentence.render([translated(words)]) == text
        assert sentence.render([translated(words, backwards=True)]) == backwards
    assert html("a<sup>1</sup> b") == "A<sup>1</sup> B"


def test_a_text_within_another_word_is_not_the_text_of_an_element() -> None:
    for text, target, expected in (
        ("it is <b>so</b>, yes", "Es ist sogar, ja", "Es ist <b>sogar,</b> ja"),
        ("it is <b>so</b>, yes", "Es ist so, ja", "Es ist <b>so</b>, ja"),
        ("<b>an</b>. b", "anders. b", "<b>anders.</b> b"),
        ("a<sup>[1]</sup> b", "A.[1] b", "A.<sup>[1]</sup> b"),
    ):
        source_text = parse_html(text)
        source_tokens = [f"▁{word}" for word in source_text.sentences[0].split()]
        tokens = [f"▁{word}" for word in target.split()]
        order = list(range(len(tokens)))
        translation = Translation(target, 0, 0, tokens, True, [], alignment=order)
        result = LineResult([translation], source_tokens=source_tokens)
        assert source_text.render([result]) == expected


def test_each_character_of_a_script_without_spaces_is_a_word() -> None:
    for text, target, expected in (
        ("人人都爱<b>人</b>", "人人都愛人", "人人都愛<b>人</b>"),
        ("<b>人</b>人都爱人", "人人都愛人", "<b>人</b>人都愛人"),
        ("他人都爱<b>人</b>人", "他人都愛人人", "他人都愛<b>人</b>人"),
        ("水H<sub>2</sub>O水", "水H2O水", "水H<sub>2</sub>O水"),
    ):
        source_text = parse_html(text)
        order = list(range(len(target)))
        translation = Translation(target, 0, 0, list(target), True, [], alignment=order)
        result = LineResult([translation], source_tokens=list(source_text.sentences[0]))
        assert source_text.render([result]) == expected


def test_elements_without_text_stay_next_to_each_other() -> None:
    assert html("a <br-x/><img> b") == "A <br-x/><img> B"
    assert html("a <img><img> b <img>") == "A <img><img> B <img>"
    assert html("a <img> <img> b") == "A <img> <img> B"


def test_tokens_without_visible_characters_move_no_tag() -> None:
    source_text = parse_html("a <b>5</b> c")
    tokens = ["▁A", "▁", "5", "▁C"]
    translation = Translation("A 5 C", 0, 0, tokens, True, [], alignment=[0, 1, 2, 3])
    result = LineResult([translation], source_tokens=["▁a", "▁", "5", "▁c", "</s>"])
    assert source_text.render([result]) == "A <b>5</b> C"


def test_markup_that_is_no_text_stays() -> None:
    for text in (
        "<script>if (a < b) {'<p>x</p>'}</script>",
        "<style>p > a {}</style><!-- a b -->",
        "<span translate='no'>a <span>b</span> c</span>",
        "<!doctype html>\n<hr>\n",
        "<div class='x notranslate'>a <div>b</div></div>",
        "<script>document.write('<script src=\"j.js\"><\\/script>')</script>",
        "<SCRIPT>x</Script><img src='data:image/png;base64," + "iVBOR" * 2000 + "'>",
    ):
        assert html(text) == text
        assert (
            html(f"<p>İİ a</p>{text}<p class='k'>b</p>") == f"<p>İİ A</p>{text}<p class='k'>B</p>"
        )
        assert (
            extract_visible_text(f"<p>one</p>{text}<b>two</b>", 99) == "one two"
            or "translate" in text
        )


def test_html_keeps_entities_and_line_ends_inside_a_sentence_do_not_cut_it() -> None:
    assert html("a &amp; b &lt; c") == "A &amp; B &lt; C"
    assert html("<p>&nbsp;</p><p>a</p>&#32;") == "<p>&nbsp;</p><p>A</p>&#32;"
    assert html("<p>a</p><p><![CDATA[b > <c>]]></p>") == "<p>A</p><p><![CDATA[b > <c>]]></p>"
    assert html("<p>a <![CDATA[b> c</p>") == "<p>A <![CDATA[b> C</p>"
    assert html("</>a <b></>b</b>") == "&lt;/&gt;A <b></>B</b>"
    assert parse_html("one\n  <b>two</b>\n three.").sentences == ["one two three."]
    for layout in ("a\n  b", "a    b", " a b \n\n\tc  d\r\n", "<b>a   b</b> c"):
        for stray_tag in ("", "</pre>"):
            expected = re.sub(r"\b[a-d](?!>)", lambda letter: letter[0].upper(), layout)
            assert html(f"{stray_tag}<pre>{layout}</pre>") == f"{stray_tag}<pre>{expected}</pre>"
    assert parse_html("<pre translate=no>x</pre><p>a\nb").sentences == ["a b"]
    for space in (" ", "\u3000\u3000", "\xa0"):
        assert html(f"\n <p>{space}a{space}</p>\n") == f"\n <p>{space}A{space}</p>\n"


def test_no_tag_is_lost_doubled_or_badly_nested_whatever_the_markup() -> None:
    tags = [
        "<b>",
        "</b>",
        "<i>",
        "</i>",
        "<a href='x > y'>",
        "</a>",
        "<p>",
        "</p>",
        "<br>",
        "<img>",
    ]
    words = ["one", " two", ". ", " ", "\n", "three ", "<", "&amp;", "</", "<!-- c -->", "<b"]
    draw = random.Random(2)
    for _ in range(800):
        text = "".join(draw.choices(tags + words, k=14))
        for backwards in (False, True):
            result = html(text, backwards=backwards)
            kinds = "</?[bipa][^>]*>|<br>|<img>|<!-- c -->"
            clean = re.sub(r"<(?!/?[bipa][ >]|br>|img>|a href|!--)", "", text)
            if clean == text:  # otherwise tags are ambiguous
                assert sorted(re.findall(kinds, result)) == sorted(re.findall(kinds, text)), text


def draw_translation(draw: random.Random, sentence: str) -> LineResult:
    """Return a translation of up to 6 words, which attend to any tokens of the sentence."""
    num_source = len(sentence.split())
    target = [f"W{i}" for i in range(draw.randint(0, 6))]
    alignment = [draw.randint(0, num_source) for _ in target]  # the last token is EOS
    translation = Translation(" ".join(target), 0, 0, target, True, [], alignment)
    return LineResult([translation], source_tokens=[*sentence.split(), "</s>"])


def draw_elements(draw: random.Random, depth: int) -> str:
    """Return words, images and empty or nested elements; each element has a number of its own."""
    content = []
    for _ in range(draw.randint(0 if depth else 1, 3)):
        inner = "" if depth == 3 or draw.random() < 0.4 else draw_elements(draw, depth + 1)
        content.append(draw.choice(["a", "b c", "<img>", f"<i>{inner}</i>", f"<b>{inner}</b>"]))
    return " ".join(content)


def test_elements_with_text_are_never_empty_whatever_words_attend_to() -> None:
    draw = random.Random(3)
    empty = re.compile(r"<(\w+)></\1>")
    num_placed = 0
    for _ in range(2000):
        text = draw_elements(draw, 0)
        source_text = parse_html(text)
        results = [draw_translation(draw, sentence) for sentence in source_text.sentences]
        result = source_text.render(results)
        if "W" in result:  # elements around a text stay, also if its translation is empty
            assert len(empty.findall(result)) <= len(empty.findall(text)), (text, result)
        assert result.count("<img>") == text.count("<img>"), (text, result)
        open_tags: list[str] = []
        for closing, name in re.findall(r"<(/?)([bi])>", result):
            if closing:
                assert open_tags.pop() == name, (text, result)
            else:
                open_tags.append(name)
        assert not open_tags, (text, result)
        translation = "".join(source.translations[0].text for source in results)
        if results:
            words = re.sub("<[^>]+>", "", result).split()
            assert words == translation.split(), (text, result)
        num_placed += bool(empty.sub("", text).count("<b>") and "<b>W" in result)
    assert num_placed > 100


def test_an_element_that_no_word_attends_to_gets_the_closest_free_word() -> None:
    sentence = "a b c d"
    for page, alignment, expected in (
        ("a <b>b</b> c d", [0, 2, 3], "X <b>Y</b> Z"),
        ("a <b>b</b> <i>c</i> d", [0, 2, 3], "<b>X</b> <i>Y</i> Z"),
        ("<b>a</b> <i>b</i> c d", [0], "<b>X</b>"),
        ("a <b><i>b</i></b> c d", [0, 3], "<b><i>X</i></b> Y"),
        ("a <b>b<img></b> c d", [], "<b><img></b>"),
    ):
        source_text = parse_html(page)
        assert source_text.sentences == [sentence]
        target = list("XYZ"[: len(alignment)])
        translation = Translation(" ".join(target), 0, 0, target, True, [], alignment)
        result = LineResult([translation], source_tokens=[*sentence.split(), "</s>"])
        assert source_text.render([result]) == expected, page


BOLD = "<b>x</b> "


@pytest.mark.slow
def test_hostile_markup_takes_linear_time() -> None:
    for unit, count in (
        ("x<b>x</b>", 20_000),
        ("a<b>b</b><i>c</i> ", 20_000),
        ("<![CDATA[", 50_000),
        ("<", 9000),
        ("<a ", 50_000),
        ("<a x='>'", 9000),
        ("<![x]>", 9000),
        ("<b>", 3000),
        ("<code>", 3000),
        ("<!--", 5000),
        ("class=", 4000),
        (BOLD, 4000),
    ):
        template = "<p {}>" if unit == "class=" else "{}"

        def parse(times: int) -> None:
            assert html(template.format(unit * times))  # noqa: B023

        assert_linear_time(parse, count, unit)


MARKUP = [
    "<",
    ">",
    "/",
    "<a ",
    "<b>",
    "</b>",
    "<p ",
    "<td",
    "<!--",
    "-->",
    "<![",
    "]]>",
    "<script>",
]
MARKUP += [
    "<pre>",
    "&",
    "&#",
    "&amp",
    ";",
    "=",
    "'",
    '"',
    " ",
    "\n",
    "\t",
    ",",
    "a",
    "x. ",
    "\u0301",
]
MARKUP += ["1\n", "00:00:01,000 --> 00:00:02,000\n", "{\\an8}", "\ufeff", "<br/>", "<?", "é", "字"]


@pytest.mark.slow
def test_repeated_markup_takes_linear_time_in_every_format() -> None:
    draw = random.Random(4)
    for case in range(100):
        name = ("a.html", "a.srt", "a.tsv", "a.csv", "a.txt")[case % 5]
        unit = "".join(draw.choices(MARKUP, k=draw.randint(1, 5)))

        def parse(num_bytes: int) -> None:
            content = unit * (num_bytes // len(unit.encode()))  # noqa: B023
            with contextlib.suppress(DataError):
                render(name, content)  # noqa: B023

        assert_linear_time(parse, 40_000, (name, unit), slack_seconds=0.2)


@pytest.mark.slow
def test_many_line_ends_or_nested_tags_take_linear_time() -> None:
    cue = "1\n00:00:01,000 --> 00:00:02,000\n"
    for work, count in (
        (lambda n: parse_plain_text("\n" * n), 240_000),
        (lambda n: render("a.srt", cue + "a\n" * n), 8000),
        (lambda n: html("<b>" * n + "a" + "</b>" * n), 8000),
    ):
        assert_linear_time(work, count)


SUBTITLES = (
    "1\r\n00:00:01,000 --> 00:00:02,000\r\nfirst half\r\nsecond half\r\n\r\n"
    "2\r\n00:00:03,000 --> 00:00:04,000 X1:0\r\n- one\r\n- <i>two</i> three\r\n"
)


def render(name: str, content: str, **settings: object) -> str:
    document = read_document(name, content.encode(), ReadOptions(**settings))  # type: ignore[arg-type]
    texts = [text.render(list(map(translated, text.sentences))) for text in document.texts]
    return document.assemble(texts).decode()


def test_subtitles_keep_numbers_times_line_ends_and_the_number_of_lines() -> None:
    assert render("a.SRT", SUBTITLES) == SUBTITLES.replace("first half", "FIRST HALF").replace(
        "second half", "SECOND HALF"
    ).replace("- one", "- ONE").replace("two", "TWO").replace("three", "THREE")


def test_subtitles_without_empty_lines_between_them_or_entities() -> None:
    cues = "1\n00:00:01,000 --> 00:00:02,000\n<i>a & b</i> <3 c\n"
    cues += "2\n00:00:03,000 --> 00:00:04,000\nd &amp; <b>e</b>\n00:05,000 --> 00:06,000\n7\n"
    expected = re.sub(r"(?<![</&])\b[a-e]\b", lambda letter: letter[0].upper(), cues)
    assert render("a.srt", cues) == expected
    sentences = []
    for text in read_document("a.srt", cues.encode(), ReadOptions()).texts:
        sentences += text.sentences
    assert sentences == ["a & b <3 c", "d & e", "7"]


def test_subtitles_that_are_all_empty_stay_as_they_are() -> None:
    for cues in (
        "1\n00:00:01,000 --> 00:00:02,000\n\n2\n00:00:03,000 --> 00:00:04,000\n",
        "1\r\n00:00:01,000 --> 00:00:02,000\r\n\r\n",
        "00:00:01,000 --> 00:00:02,000",
    ):
        assert render("a.srt", cues) == cues


def test_lines_of_subtitles_are_joined_as_the_language_is_written() -> None:
    cues = "1\n00:01,000 --> 00:02,000\n我今天\n很高兴。\n2\n00:02,000 --> 00:03,000\nI am\nglad.\n"
    texts = read_document("a.srt", cues.encode(), ReadOptions()).texts
    assert [text.sentences for text in texts if text.sentences] == [
        ["我今天很高兴。"],
        ["I am glad."],
    ]
    joined = {
        "<i>你好</i>\n<i>世界</i>": "你好世界",
        "他说：\n“你好”": "他说：“你好”",
        "<i>Hello</i>\n“you”": "Hello “you”",
        "他说：\n“Hello”": "他说： “Hello”",
    }
    for lines, sentence in joined.items():
        cue = f"1\n00:01,000 --> 00:02,000\n{lines}\n"
        texts = read_document("a.srt", cue.encode(), ReadOptions()).texts
        assert [text.sentences for text in texts if text.sentences] == [[sentence]]


def test_subtitles_keep_tags_whole_and_the_place_where_they_are_shown() -> None:
    time_line = "1\n00:00:01,000 --> 00:00:02,000\n"
    color = '<font color="red">'
    cue = time_line + f"{{\\an8}}{{\\b1}} {color}a</font>\n{color}b b b b b b</font>\n"
    result = render("a.srt", cue)
    assert result.startswith(time_line + "{\\an8}{\\b1} " + color)
    assert result.count(color) == 2
    assert result.count("\n") == cue.count("\n")


def test_a_file_of_html_is_many_source_texts() -> None:
    page = "<h1>a</h1>\n<p>b <i>c</i></p> d<hr>"
    assert render("a.html", page) == html(page) == "<h1>A</h1>\n<p>B <i>C</i></p> D<hr>"
    document = read_document("a.html", page.encode(), ReadOptions())
    assert max(len(source_text.sentences) for source_text in document.texts) == 1


def test_tables_translate_the_columns_asked_for() -> None:
    table = 'id;text;note\n1;"a; b";x\n2;c;y\n'
    assert render("t.csv", table) == 'ID;TEXT;NOTE\n1;"A; B";X\n2;C;Y\n'
    assert render("t.csv", table, columns=["text"]) == 'id;text;note\n1;"A; B";x\n2;C;y\n'
    # a separator is not counted in a quoted cell
    marked = '\ufeff"name, of; it","text"\r\n1,"a; b"\r\n'  # a byte order mark before a quoted cell
    assert render("t.csv", marked, columns=["text"]) == '\ufeff"name, of; it",text\r\n1,A; B\r\n'
    assert render("t.csv", '1,"a; b; c; d",x\n2,"e,\nf",y\n') == '1,A; B; C; D,X\n2,"E,\nF",Y\n'
    inches = 'a;b;27"\n"c, d, e, f";g;24"\n'
    assert render("t.csv", inches) == 'A;B;"27"""\nC, D, E, F;G;"24"""\n'
    assert render("t.tsv", "a\tb\n1\t2\n", columns=["2"]) == "a\tB\n1\t2\n"
    with pytest.raises(DataError, match="the first row has no txt; did you mean text"):
        read_document("t.csv", table.encode(), ReadOptions(columns=["txt"]))


def test_quotes_in_tsv_are_signs_unless_they_quote() -> None:
    for table in ('a "b" c\td\n', '"a" b\tc\n', '"a ""b"""\tc\n', '"a\nb"\tc\n', "a\n\nb\n"):
        assert render("t.tsv", table) == table.upper()


def test_a_byte_order_mark_stays() -> None:
    for name in ("a.txt", "a.csv", "a.html"):
        assert render(name, "\ufeffa\n") == "\ufeffA\n"
        assert render(name, "\ufeff" * 2000 + "a\n").endswith("A\n")


def test_files_of_too_many_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.documents.document.MAX_TEXTS", 9)
    for name, content in (("a.txt", "a\n" * 10), ("a.csv", "a,a\n" * 5), ("a.html", "<p>a" * 19)):
        with pytest.raises(DataError, match="more than .* cut it into several"):
            read_document(name, content.encode(), ReadOptions())
    assert render("a.txt", "a\n" * 9) == "A\n" * 9


def test_files_that_cannot_be_read_are_refused() -> None:
    for name, content in (("a.doc", b"x"), ("a.txt", b"\xff\xfe"), ("a.csv", b'"a')):
        with pytest.raises(DataError):
            read_document(name, content, ReadOptions())


def test_downloads_expire_and_have_names_that_nobody_guesses() -> None:
    valid = Downloads(60, 9)
    expired = Downloads(0, 9)
    key = valid.add("../../etc/a b.txt", b"x")
    assert re.fullmatch(r"[\w-]{30,}/a b\.txt", key)
    path = valid.find(key)
    assert path is not None
    assert path.read_text() == "x"
    assert valid.find("../" + key) is None
    assert valid.find(key[1:]) is None
    assert expired.find(expired.add("a.txt", b"x")) is None
    shutil.rmtree(valid.folder)
    assert valid.find(valid.add("a.txt", b"x"))
    assert not list(expired.folder.iterdir())
    for downloads in (valid, expired):
        downloads.close()
        assert not downloads.folder.exists()


def test_a_download_without_room_leaves_no_file(limit_files: Callable[[int], None]) -> None:
    downloads = Downloads(60, max_bytes=1000)
    limit_files(10)
    with pytest.raises(OSError, match="large"):
        downloads.add("a.txt", b"x" * 100)
    assert not list(downloads.folder.iterdir())
    key = downloads.add("a.txt", b"x")
    shutil.rmtree(downloads.folder)
    assert downloads.find(key) is None
    downloads.close()


def test_the_oldest_downloads_make_room() -> None:
    downloads = Downloads(60, max_bytes=10)
    keys = [downloads.add("a.txt", content) for content in (b"first", b"second", b"\xc3\xa4")]
    assert downloads.find(keys[0]) is None
    assert downloads.find(keys[1])
    assert downloads.find(keys[2])
    assert len(list(downloads.folder.iterdir())) == 2
    downloads.close()
