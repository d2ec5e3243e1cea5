"""Attributes of HTML that people read, such as `alt`, are translated like text."""

from __future__ import annotations

import io
import random
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from growth import assert_linear_time
from translating import translate, write_model

from nmt import Translator
from nmt.documents.document import ReadOptions
from nmt.documents.formats import read_document
from nmt.documents.markup import parse_html
from nmt.translate.results import LineResult, Translation


def translate_words(sentence: str, *, backwards: bool = False) -> LineResult:
    """Translate to capitals, in the order of the words or from the last to the first."""
    words = sentence.split()
    order = list(range(len(words)))
    if backwards:
        order.reverse()
    target = [words[i].upper() for i in order]
    tokens = [f"▁{word}" for word in target]
    translation = Translation(" ".join(target), 0, 0, tokens, True, [], order)
    return LineResult([translation], source_tokens=[f"▁{word}" for word in words])


def keep(sentence: str) -> LineResult:
    """Return the sentence as its translation."""
    words = sentence.split()
    tokens = [f"▁{word}" for word in words]
    translation = Translation(sentence, 0, 0, tokens, True, [], list(range(len(words))))
    return LineResult([translation], source_tokens=tokens)


def to_capitals(page: str, *, backwards: bool = False) -> str:
    text = parse_html(page)
    results = [translate_words(sentence, backwards=backwards) for sentence in text.sentences]
    return text.render(results)


class _AttributeReader(HTMLParser):
    """Collects the attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<img src=a.png alt='a b'>", "<img src=a.png alt='A B'>"),
        ('<p title="a"   data-title="b" >c</p>', '<p title="A"   data-title="b" >C</p>'),
        ("<input placeholder=name>", '<input placeholder="NAME">'),
        ("<INPUT\n PlaceHolder = name\n value=b>", '<INPUT\n PlaceHolder = "NAME"\n value=b>'),
        ("<button aria-label='a'>&times;</button>", "<button aria-label='A'>×</button>"),
        ("<img alt=a title='b' />", "<img alt=\"A\" title='B' />"),
        ("<img alt='a' alt='b'>", "<img alt='A' alt='b'>"),  # browsers ignore the second one
        ('<img x="<p title=\'y\'>" alt="a">', '<img x="<p title=\'y\'>" alt="A">'),
        ("<img\u00a0title='x' alt='a'>", "<img\u00a0title='x' alt='A'>"),
        ('<meta name="Description" content="a b.">', '<meta name="Description" content="A B.">'),
        ("<meta content=a name=description>", '<meta content="A" name=description>'),
        ("<iframe title=a src=b>c</iframe>", '<iframe title="A" src=b>c</iframe>'),
        ('<pre title="a">b</pre>', '<pre title="A">B</pre>'),
    ],
)
def test_attributes_that_people_read_are_translated(page: str, expected: str) -> None:
    assert to_capitals(page) == expected


@pytest.mark.parametrize(
    "page",
    [
        "<img alt>",
        "<img alt=''>",
        '<img alt="" title=" &nbsp;\n">',
        "<a href='a b' class='title' data-alt='a'></a>",
        '<meta name="viewport" content="a b">',
        '<meta property="og:type" content="a">',
        '<link rel="alternate stylesheet" title="a"><style title="a"></style>',
        '<img translate="no" alt="a">',
        '<img class="x notranslate" alt="a"/>',
        '<div translate=no><p title="a"><img alt="b">c</p></div>',
        '<code><span title="a">b</span></code><!-- <img alt="a"> -->',
        "<script>x = \"<img alt='a'>\"</script>",
    ],
)
def test_other_attributes_and_excluded_elements_stay(page: str) -> None:
    assert to_capitals(page) == page
    assert parse_html(page).sentences == []


def test_the_language_of_an_ancestor_treats_attributes_as_text() -> None:
    page = '<html lang="en"><p lang="fr" title="a">b <i title="c">d</i></p></html>'
    expected = '<html lang="en"><p lang="fr" title="A">B <i title="C">D</i></p></html>'
    assert to_capitals(page) == expected


@pytest.mark.parametrize(
    ("source", "translation", "expected"),
    [
        ('"a"', """"b" & 'c' < d""", """"&quot;b&quot; &amp; 'c' &lt; d\""""),
        ("'a'", """"b" & 'c' < d""", """'"b" &amp; &#39;c&#39; &lt; d'"""),
        ("a", """b "c\"""", '"b &quot;c&quot;"'),
        ('"&quot;a&quot; &amp; b"', '"c" & b', '"&quot;c&quot; &amp; b"'),
    ],
)
def test_a_translation_is_escaped_for_its_quotation_marks(
    source: str, translation: str, expected: str
) -> None:
    text = parse_html(f"<img alt={source} src=x>")
    result = LineResult([Translation(translation, 0, 0, [], True, [])])
    rendered = text.render([result])
    assert rendered == f"<img alt={expected} src=x>"
    assert _AttributeReader(rendered).attributes == [("alt", translation), ("src", "x")]


def test_line_ends_are_spaces_except_in_titles() -> None:
    page = '<img alt="a\n  b&#10;c" title="d\ne">'
    assert parse_html(page).sentences == ["a b", "c", "d", "e"]
    assert to_capitals(page) == '<img alt="A B\nC" title="D\nE">'


def test_attributes_of_inline_tags_stay_in_their_tags() -> None:
    page = 'a <a title="x y" href=z>b<img alt="v"></a> c <i title="x y">d</i>'
    text = parse_html(page)
    assert text.sentences == ["a b c d", "x y", "v", "x y"]
    assert to_capitals(page) == (
        'A <a title="X Y" href=z>B<img alt="V"></a> C <i title="X Y">D</i>'
    )
    assert to_capitals(page, backwards=True) == (
        '<i title="Y X">D</i> C <a title="Y X" href=z>B<img alt="V"></a> A'
    )
    # tags around all text and at its ends
    page = '<b title="x"><img alt="y">a <i>b</i></b><img alt="z">'
    assert to_capitals(page) == '<b title="X"><img alt="Y">A <i>B</i></b><img alt="Z">'


def test_equal_translations_change_no_byte_of_a_tag() -> None:
    draw = random.Random(1)
    names = ["alt", "TITLE", "placeholder", "aria-label", "content", "href"]
    words = ["a", "b.", "A", "&eacute;", "&amp", "&nbsp;", "&#x27;", "&lt;b&gt;", "\n", "  ", ""]
    num_texts = 0
    for _ in range(500):
        tags = []
        for _ in range(3):
            attributes = ""
            for _ in range(draw.randint(1, 4)):
                quote = draw.choice(["'", '"'])
                value = " ".join(draw.choices(words, k=3))
                other_quote = "'" if quote == '"' else '"'
                value += draw.choice(["", other_quote])
                value = draw.choice([f"={quote}{value}{quote}", "=a&amp;b", "", " = ''"])
                attributes += draw.choice([" ", "\n"]) + draw.choice(names) + value
            name = draw.choice(["img", "a", "p", "meta name=description", "iframe", "my-x"])
            tags.append(f"<{name}{attributes}{draw.choice(['', ' ', ' /'])}>")
        page = f"{tags[0]}<p>w {tags[1]}x</p>{tags[2]}"
        text = parse_html(page)
        num_texts += len(text.sentences)
        assert text.render([keep(sentence) for sentence in text.sentences]) == page
    assert num_texts > 1000


def test_html_files_and_epub_pages_are_translated_with_attributes() -> None:
    page = '<p title="a &amp; b">c <img alt="d"/></p>'
    expected = '<p title="A &amp; B">C <img alt="D"/></p>'
    options = ReadOptions()
    document = read_document("a.html", page.encode(), options)
    translations = []
    for text in document.texts:
        translations.append(text.render([translate_words(line) for line in text.sentences]))
    assert document.assemble(translations).decode() == expected
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr("page.xhtml", page)
    document = read_document("a.epub", stream.getvalue(), options)
    translations = []
    for text in document.texts:
        translations.append(text.render([translate_words(line) for line in text.sentences]))
    with zipfile.ZipFile(io.BytesIO(document.assemble(translations))) as archive:
        assert archive.read("page.xhtml").decode() == expected


def test_an_attribute_is_translated_as_a_line_is(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    lines = ["the small house sees a tree", "a green tree", "the house"]
    page = f'<p title="{lines[0]}">{lines[1]}</p>\n<img alt="{lines[2]}">\n'
    (tmp_path / "in.html").write_text(page, encoding="utf-8")
    arguments = [f"model_dir={model}", "backend=native", f"input={tmp_path / 'in.html'}"]
    assert translate(*arguments, f"output={tmp_path / 'out.html'}") == 0
    translator = Translator.load(model, device="cpu", backend="native")
    first, second, third = translator.translate(lines)
    expected = f'<p title="{first}">{second}</p>\n<img alt="{third}">\n'
    assert (tmp_path / "out.html").read_text(encoding="utf-8") == expected


@pytest.mark.parametrize(
    "unit", ["alt=a ", "alt='a' ", 'title="', "alt  ", "=", "/", "alt = ", "<img alt=a>"]
)
def test_hostile_attributes_take_linear_time(unit: str) -> None:
    def parse(size: int) -> None:
        parse_html(f"<p title=a {unit * size}>b")

    assert_linear_time(parse, 2_000)


def test_a_parameter_of_an_address_is_no_reference() -> None:
    value = "?a=1&copy=2&ampx &copy; &copy &#39;&#x27 &notit; &unknown;"
    [sentence] = parse_html(f'<img alt="{value}">').sentences
    assert sentence == "?a=1&copy=2&ampx © © '' &notit; &unknown;"
