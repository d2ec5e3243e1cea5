"""Documents of other programs: texts found, everything else unchanged, and refusals."""

from __future__ import annotations

import io
import random
import re
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import docx
import polib
import pptx
import pytest
from ebooklib import epub
from growth import assert_linear_time
from odf import opendocument, teletype
from odf import text as odf_text
from test_serve_text import draw_translation
from test_serve_text import translated as upper
from tiny import sentences

from nmt.documents import formats
from nmt.documents.document import ReadOptions
from nmt.documents.formats import read_document
from nmt.documents.suffixes import FORMATS, PACKAGES
from nmt.errors import DataError
from nmt.preprocess.bitext_xml import read_pairs
from nmt.translate.results import LineResult

FOLDER = Path(__file__).with_name("documents")
CONTENT_TYPES = b'<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>'
Translate = Callable[[str], LineResult]


def upper_backwards(sentence: str) -> LineResult:
    return upper(sentence, backwards=True)


def translate(
    name: str, content: bytes, translate_sentence: Translate = upper, **options: Any
) -> bytes:
    document = read_document(name, content, ReadOptions(**options))
    texts = []
    for text in document.texts:
        texts.append(text.render([translate_sentence(s) for s in text.sentences]))
    return document.assemble(texts)


def find_sentences(name: str, content: bytes) -> list[str]:
    texts = read_document(name, content, ReadOptions()).texts
    return [sentence for text in texts for sentence in text.sentences]


def make_package(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def test_the_suffixes_of_documents_are_those_of_the_readers() -> None:
    assert sorted(FORMATS) == sorted([*formats._TEXT_READERS, *formats._READERS])
    for suffix in PACKAGES:
        with pytest.raises(DataError, match="not a zip file"):
            read_document(f"a{suffix}", b"a", ReadOptions())


def read_file(package: bytes, name: str) -> str:
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        return archive.read(name).decode()


def assert_other_files_are_unchanged(package: bytes, result: bytes, translated: set[str]) -> None:
    with (
        zipfile.ZipFile(io.BytesIO(package)) as old,
        zipfile.ZipFile(io.BytesIO(result)) as new,
    ):
        assert new.testzip() is None
        assert new.namelist() == old.namelist()
        for old_entry, new_entry in zip(old.infolist(), new.infolist(), strict=True):
            assert new_entry.date_time == old_entry.date_time
            assert new_entry.compress_type == old_entry.compress_type
            is_equal = new.read(new_entry) == old.read(old_entry)
            assert is_equal == (old_entry.filename not in translated), old_entry.filename


WORD = make_package(
    {
        "[Content_Types].xml": CONTENT_TYPES,
        "word/document.xml": (FOLDER / "word.xml").read_bytes(),
        "word/media/image.png": bytes(range(256)),
    }
)


def test_runs_of_word_that_differ_in_revisions_or_spelling_are_one_text() -> None:
    assert find_sentences("a.docx", WORD) == [
        "the title",
        "a mispeled word, bold added and a link on page  of it",
        "after <tab>",
        "next line",
        "linked text outside control",
        "around the box",
        "in a box",
    ]
    result = translate("a.docx", WORD)
    assert_other_files_are_unchanged(WORD, result, {"word/document.xml"})
    xml = read_file(result, "word/document.xml")
    run = '<w:r><w:t xml:space="preserve">{}</w:t></w:r>'.format
    assert run("THE TITLE") in xml
    bold = '<w:r><w:rPr><w:b/></w:rPr><w:t xml:space="preserve">BOLD</w:t></w:r>'
    assert run("A MISPELED WORD, ") + bold in xml
    assert '<w:delText xml:space="preserve"> deleted</w:delText>' in xml
    link = '<w:rStyle w:val="Hyperlink"/></w:rPr><w:t xml:space="preserve">A LINK</w:t>'
    assert f'<w:hyperlink r:id="rId9"><w:r><w:rPr>{link}</w:r></w:hyperlink>' in xml
    assert '<w:fldChar w:fldCharType="separate"/></w:r><w:r><w:t xml:space="preserve">7<' in xml
    assert "<w:r><w:tab/></w:r>" + run("AFTER &lt;TAB&gt;") + "<w:r><w:br/></w:r>" in xml
    assert f"<w:sdtContent>{run('CONTROL')}</w:sdtContent>" in xml
    assert f"<w:txbxContent><w:p>{run('IN A BOX')}</w:p></w:txbxContent>" in xml
    assert "<w:t></w:t>" not in xml
    assert 'xml:space="preserve"></w:t>' not in xml


def test_a_field_of_one_element_is_translated_if_it_is_a_link() -> None:
    head = (FOLDER / "word.xml").read_text().partition("<w:body>")[0]
    run = "<w:r><w:t xml:space='preserve'>{}</w:t></w:r>".format
    for code, is_link in ((" HYPERLINK x", True), ("PAGE", False)):
        field = f'<w:fldSimple w:instr="{code}">{run("page")}</w:fldSimple>'
        paragraph = f"<w:p>{run('a ')}{field}{run(' b')}</w:p>"
        xml = f"{head}<w:body>{paragraph}</w:body></w:document>".encode()
        result = translate("a.docx", make_package({"word/document.xml": xml}))
        translated_xml = read_file(result, "word/document.xml")
        assert ("PAGE</w:t></w:r></w:fldSimple>" in translated_xml) == is_link
        assert ("page</w:t></w:r></w:fldSimple>" in translated_xml) != is_link
        assert re.sub("<[^>]+>", "", translated_xml.partition("<w:body>")[2]).upper() == "A PAGE B"


@pytest.mark.parametrize("name", ["a.docx", "a.pptx"])
def test_the_text_and_the_picture_of_a_diagram_are_translated(name: str) -> None:
    namespace = "http://schemas.openxmlformats.org/drawingml/2006/main"
    xml = f'<x xmlns:a="{namespace}"><a:p><a:r><a:t>step one</a:t></a:r></a:p></x>'.encode()
    folder = "word" if name == "a.docx" else "ppt"
    files = [f"{folder}/diagrams/data1.xml", f"{folder}/diagrams/drawing1.xml"]
    result = translate(name, make_package(dict.fromkeys(files, xml)))
    for file in files:
        assert "<a:t>STEP ONE</a:t>" in read_file(result, file)


@pytest.mark.parametrize("translate_sentence", [upper, upper_backwards])
def test_formatting_of_word_follows_its_words(translate_sentence: Translate) -> None:
    document = docx.Document()
    paragraph = document.add_paragraph("one two ")
    paragraph.add_run("bold three").bold = True
    paragraph.add_run(" four ")
    paragraph.add_run("itali").italic = True
    paragraph.add_run("c").italic = True
    document.add_table(1, 2).cell(0, 1).text = "in a table"
    document.sections[0].header.paragraphs[0].text = "the header"
    stream = io.BytesIO()
    document.save(stream)
    result = docx.Document(io.BytesIO(translate("a.docx", stream.getvalue(), translate_sentence)))
    runs = [run for run in result.paragraphs[0].runs if run.text.strip()]
    bold = [run.text.strip() for run in runs if run.bold]
    assert bold == [translate_sentence("bold three").text]
    assert [run.text.strip() for run in runs if run.italic] == ["ITALIC"]
    text = "one two bold three four italic"
    assert result.paragraphs[0].text == translate_sentence(text).text
    assert result.tables[0].cell(0, 1).text == translate_sentence("in a table").text
    header = result.sections[0].header.paragraphs[0].text
    assert header == translate_sentence("the header").text


@pytest.mark.parametrize("control", ["<w:sdt/>", "<w:sdt><w:sdtPr/><w:sdtContent/></w:sdt>"])
def test_an_empty_content_control_does_not_hide_the_text_after_it(control: str) -> None:
    head = (FOLDER / "word.xml").read_text().partition("<w:body>")[0]
    runs = [f"<w:r><w:t>{text}</w:t></w:r>" for text in ("a red ", "apple")]
    document = f"{head}<w:body><w:p>{control.join(runs)}</w:p></w:body></w:document>"
    package = make_package({"word/document.xml": document.encode()})
    assert find_sentences("a.docx", package) == ["a red apple"]
    result = read_file(translate("a.docx", package), "word/document.xml")
    assert control in result
    ElementTree.fromstring(result)


def test_slides_and_their_notes() -> None:
    presentation = pptx.Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.shapes.title.text = "the title"
    frame = slide.placeholders[1].text_frame
    frame.text = "one "
    run = frame.paragraphs[0].add_run()
    run.text = "bold two"
    run.font.bold = True
    frame.add_paragraph().text = "three\vfour"
    table = slide.shapes.add_table(1, 1, 0, 0, 10, 10).table
    table.cell(0, 0).text = "a cell"
    slide.notes_slide.notes_text_frame.text = "a note"
    stream = io.BytesIO()
    presentation.save(stream)
    content = translate("a.pptx", stream.getvalue())
    changed = {"ppt/slides/slide1.xml", "ppt/notesSlides/notesSlide1.xml"}
    assert_other_files_are_unchanged(stream.getvalue(), content, changed)
    result = pptx.Presentation(io.BytesIO(content)).slides[0]
    assert result.shapes.title.text == "THE TITLE"
    paragraphs = result.placeholders[1].text_frame.paragraphs
    assert [run.text.strip() for run in paragraphs[0].runs if run.font.bold] == ["BOLD TWO"]
    assert [paragraph.text for paragraph in paragraphs] == ["ONE BOLD TWO", "THREE\vFOUR"]
    assert result.shapes[2].table.cell(0, 0).text == "A CELL"
    assert result.notes_slide.notes_text_frame.text == "A NOTE"


def test_a_text_document_of_libreoffice() -> None:
    package = make_package(
        {
            "mimetype": b"application/vnd.oasis.opendocument.text",
            "content.xml": (FOLDER / "libreoffice.xml").read_bytes(),
            "META-INF/manifest.xml": b"<manifest/>",
        }
    )
    assert find_sentences("a.odt", package) == [
        "the title",
        "a bold word and a link, then more",
        "next line",
        "after & tab",
        "with a mark",
        "the note",
        "in a box",
    ]
    result = translate("a.odt", package)
    assert_other_files_are_unchanged(package, result, {"content.xml"})
    xml = read_file(result, "content.xml")
    assert "<text:p>deleted text</text:p>" in xml
    assert "<text:p>a remark</text:p>" in xml
    assert 'A <text:span text:style-name="T1">BOLD WORD</text:span> AND <text:a' in xml
    assert "<text:note-body><text:p>THE NOTE</text:p></text:note-body>" in xml
    assert "NEXT LINE<text:tab/>AFTER &amp; TAB" in xml
    assert 'WITH A <text:bookmark text:name="b"/>MARK' in xml
    assert "<draw:text-box><text:p>IN A BOX</text:p></draw:text-box>" in xml


def test_a_page_break_with_an_end_tag_is_dropped_with_it() -> None:
    page_break = "<text:soft-page-break></text:soft-page-break>"
    paragraph = f"<text:p>one {page_break}two <text:span>three</text:span></text:p>"
    namespace = "urn:oasis:names:tc:opendocument:xmlns:text:1.0"
    content = f'<body xmlns:text="{namespace}">{paragraph}</body>'
    package = make_package(
        {
            "mimetype": b"application/vnd.oasis.opendocument.text",
            "content.xml": content.encode(),
            "META-INF/manifest.xml": b"<manifest/>",
        }
    )
    result = read_file(translate("a.odt", package), "content.xml")
    assert "<text:p>ONE TWO <text:span>THREE</text:span></text:p>" in result


def test_a_text_document_of_odfpy_opens_again() -> None:
    document = opendocument.OpenDocumentText()
    paragraph = odf_text.P(text="one ")
    paragraph.addElement(odf_text.Span(text="two"))
    document.text.addElement(paragraph)
    stream = io.BytesIO()
    document.save(stream)
    result = opendocument.load(io.BytesIO(translate("a.odt", stream.getvalue())))
    paragraphs = result.getElementsByType(odf_text.P)
    assert [teletype.extractText(element) for element in paragraphs] == ["ONE TWO"]


def test_a_book(tmp_path: Path) -> None:
    book = epub.EpubBook()
    book.set_identifier("id1")
    book.set_title("the title")
    book.set_language("en")
    chapter = epub.EpubHtml(title="chapter one", file_name="one.xhtml", lang="en")
    chapter.content = "<h1>chapter one</h1><p>a <em>short</em> text &amp; more</p>"
    book.add_item(chapter)
    book.toc = (epub.Link("one.xhtml", "chapter one", "one"),)
    book.add_item(epub.EpubNcx())
    book.add_item(epub.EpubNav())
    book.spine = ["nav", chapter]
    epub.write_epub(str(tmp_path / "a.epub"), book)
    content = (tmp_path / "a.epub").read_bytes()
    result = translate("a.epub", content)
    with zipfile.ZipFile(io.BytesIO(result)) as archive:
        assert archive.infolist()[0].filename == "mimetype"
        assert archive.infolist()[0].compress_type == zipfile.ZIP_STORED
    (tmp_path / "b.epub").write_bytes(result)
    translated = epub.read_epub(str(tmp_path / "b.epub"))
    assert translated.get_metadata("DC", "title")[0][0] == "THE TITLE"
    page = translated.get_item_with_href("one.xhtml").get_content().decode()
    assert "<p>A <em>SHORT</em> TEXT &amp; MORE</p>" in page
    assert "<text>CHAPTER ONE</text>" in read_file(result, "EPUB/toc.ncx")


def test_the_title_and_the_description_of_a_book() -> None:
    texts = {
        "salt &amp; sugar": "SALT &amp; SUGAR",
        "<![CDATA[salt & <b>sugar</b>]]>": "SALT &amp;amp; &lt;b&gt;SUGAR&lt;/b&gt;",
        "&lt;p&gt;one &lt;i&gt;book&lt;/i&gt;&lt;/p&gt;": (
            "&lt;p&gt;ONE &lt;i&gt;BOOK&lt;/i&gt;&lt;/p&gt;"
        ),
        "3 &lt; 4": "3 &lt; 4",
        "\n": "\n",
    }
    for text, expected in texts.items():
        part = "<package><title>{}</title><creator>a &amp; b</creator></package>"
        book = make_package({"a.opf": part.format(text).encode()})
        assert len(find_sentences("a.epub", book)) <= 1
        assert read_file(translate("a.epub", book), "a.opf") == part.format(expected)


XLIFF_FILES = ("okapi.xlf", "trados.sdlxliff", "memoq.mqxliff", "version-2.xlf")


@pytest.mark.parametrize("name", XLIFF_FILES)
@pytest.mark.parametrize("translate_sentence", [upper, upper_backwards])
def test_xliff_gets_targets_and_stays_as_it_is_elsewhere(
    name: str, translate_sentence: Translate
) -> None:
    content = (FOLDER / name).read_bytes()
    result = translate(name, content, translate_sentence).decode()
    added = re.compile(r"\s*<target(?:\s[^>]*)?>(?!fertig).*?</target>|\s*<target/>")
    assert added.sub("", result) == added.sub("", content.decode())
    for unit in re.findall(r"(?s)<(?:trans-unit|segment).*?</(?:trans-unit|segment)>", result):
        source = re.findall(r"(?s)<(?:seg-)?source.*?>(.*)</(?:seg-)?source>", unit)[-1]
        source = source.rpartition("<seg-source>")[2]
        target = re.findall(r"(?s)<target.*?>(.*?)</target>", unit)
        if not target or "fertig" in target:
            continue
        tags = r"<(?!/?source)[^>]+>"
        assert sorted(re.findall(tags, target[0])) == sorted(re.findall(tags, source))
    ElementTree.fromstring(result)


def test_xliff_units_are_found() -> None:
    def read(name: str) -> list[tuple[str, str]]:
        content = translate(name, (FOLDER / name).read_bytes())
        return list(read_pairs([content], name, ("en", "de"), keep_markup=False))

    expected = ("press the red button now & then", "PRESS THE RED BUTTON NOW & THEN")
    assert read("okapi.xlf") == [expected, ("done", "fertig")]
    sentences = "the first one. the second one"
    assert read("trados.sdlxliff") == [(sentences, sentences.upper())]
    assert read("memoq.mqxliff")[0] == ("bold text with a code", "BOLD TEXT WITH A CODE")
    assert read("version-2.xlf") == [
        ("open the main window again", "OPEN THE MAIN WINDOW AGAIN"),
        ("half done", "HALF DONE"),
    ]
    result = translate("trados.sdlxliff", (FOLDER / "trados.sdlxliff").read_bytes()).decode()
    segment = '<mrk mtype="seg" mid="2">THE <x id="2"/><g id="3">SECOND</g> ONE</mrk>'
    assert f'<mrk mtype="seg" mid="1">THE FIRST ONE.</mrk> {segment}</g></target>' in result


def test_a_copy_of_the_source_is_translated_if_it_is_marked_as_new() -> None:
    unit = "<trans-unit><source>the <g id='1'>tree</g></source><target{}>{}</target></trans-unit>"
    copy = "the <g id='1'>tree</g>"
    expected = "THE <g id='1'>TREE</g>"
    for state, target, result in (
        (' state="new"', copy, expected),
        (' state="needs-translation"', copy, expected),
        ("", copy, copy),  # perhaps a name, which is the same in both languages
        (' state="translated"', copy, copy),
        (' state="new"', "der Baum", "der Baum"),
    ):
        content = f"<xliff>{unit.format(state, target)}</xliff>"
        expected_content = f"<xliff>{unit.format(state, result)}</xliff>"
        assert translate("a.xlf", content.encode()).decode() == expected_content
    segment = "<segment{}><source>a tree</source><target>{}</target></segment>"
    for state, result in (
        ("", "A TREE"),  # by default, a segment has the state "initial"
        (" state='initial'", "A TREE"),
        (" state='final'", "a tree"),
    ):
        content = f"<xliff>{segment.format(state, 'a tree')}</xliff>"
        expected_content = f"<xliff>{segment.format(state, result)}</xliff>"
        assert translate("a.xlf", content.encode()).decode() == expected_content


def test_marked_text_of_xliff_is_not_translated() -> None:
    for mark in ('mtype="protected"', 'id="m1" translate="no"'):
        source = f"press <mrk {mark}>the button</mrk> now"
        unit = f"<xliff><trans-unit><source>{source}</source></trans-unit></xliff>"
        result = translate("a.xlf", unit.encode()).decode()
        assert f"<target>PRESS <mrk {mark}>the button</mrk> NOW</target>" in result


def test_xliff_2_without_a_target_language_gets_it() -> None:
    content = (FOLDER / "version-2.xlf").read_text()
    unknown = content.replace(' trgLang="de"', "")
    for original, tgt_lang, expected in (
        (unknown, "de_AT", ' srcLang="en" trgLang="de-AT">'),
        (unknown, "", ' srcLang="en">'),
        (content, "fr", ' srcLang="en" trgLang="de">'),
        (content.replace(' srcLang="en" trgLang="de"', ""), "fr", ' version="2.0">'),  # as 1.2
    ):
        result = translate("a.xlf", original.encode(), tgt_lang=tgt_lang).decode()
        assert result.split("\n")[0].endswith(expected), (tgt_lang, result[:200])
        assert "MAIN WINDOW" in result


def draw_codes(draw: random.Random, depth: int = 0) -> str:
    """Return words, and codes that may be nested, or not."""
    content = []
    for _ in range(draw.randint(1, 4)):
        number = draw.randint(1, 3)
        codes = [f'<bpt id="{number}">x</bpt>', f'<ept id="{number}">x</ept>', '<x id="9"/>']
        codes += ["<bpt>x</bpt>", "<ex/>"]  # without the number that they should have
        inner = "" if depth == 3 else draw_codes(draw, depth + 1)
        content.append(draw.choice(["a", "b c", " ", f'<g id="{number}">{inner}</g>', *codes]))
    return draw.choice(["", " "]).join(content)


def test_any_alignment_keeps_every_code_of_xliff_and_valid_xml() -> None:
    draw = random.Random(1)

    for _ in range(500):
        source = draw_codes(draw)
        unit = f"<xliff><trans-unit><source>{source}</source></trans-unit></xliff>"
        result = translate("a.xlf", unit.encode(), partial(draw_translation, draw)).decode()
        ElementTree.fromstring(result)
        target = re.findall(r"(?s)<target>(.*)</target>", result)
        if target:
            assert sorted(re.findall("<[^>]+>", target[0])) == sorted(re.findall("<[^>]+>", source))


def test_other_encodings_of_xml_stay() -> None:
    unit = "<xliff><trans-unit><source>the café</source></trans-unit></xliff>"
    for encoding in ("utf-16", "iso-8859-1", "utf-8-sig"):
        declared = encoding.removesuffix("-sig")
        content = f'<?xml version="1.0" encoding="{declared}"?>{unit}'.encode(encoding)
        result = translate("a.xlf", content, lambda _: upper("caf€")).decode(encoding)
        sign = "&#8364;" if encoding == "iso-8859-1" else "€"
        assert f"<source>the café</source><target>CAF{sign}</target>" in result
    declared_unit = f'<?xml version="1.0" encoding="UTF-16"?>{unit}'
    for encoding in ("utf-16-le", "utf-16-be"):
        for mark in ("", "\ufeff"):
            content = (mark + declared_unit).encode(encoding)
            result = translate("a.xlf", content).decode(encoding)
            expected = "<source>the café</source><target>THE CAFÉ</target>"
            assert result == mark + declared_unit.replace("<source>the café</source>", expected)
    with pytest.raises(DataError, match="is not in its encoding UTF-16; correct its first line"):
        translate("a.xlf", declared_unit.encode())
    with pytest.raises(DataError, match="the encoding zip is not supported"):
        translate("a.xlf", b'<?xml version="1.0" encoding="zip"?><a/>')


def test_messages_of_poedit() -> None:
    content = (FOLDER / "poedit.po").read_bytes()
    result = translate("a.po", content).decode()
    messages = polib.pofile(result)
    plural, fuzzy, edit, lines, braces = [message for message in messages if not message.obsolete]
    assert plural.msgstr_plural == {0: '%d FILE IN "%s"\n', 1: '%d FILES IN "%s"\n'}
    assert (fuzzy.fuzzy, fuzzy.msgctxt, fuzzy.msgstr) == (True, "menu|File", "Öffnen")
    assert (edit.msgctxt, edit.msgstr) == ("menu|Edit", "OPEN A FILE")
    assert lines.msgstr == "THE FIRST LINE\nTHE <b>SECOND</b> LINE\tAND 100% OF IT"
    assert braces.msgstr == "{count} WORDS OF {name}"
    percentage = b'#, c-format\nmsgid "about %d%% of it"\nmsgstr ""\n'
    assert b'"ABOUT %d%% OF IT"' in translate("a.po", percentage)
    assert polib.pofile(content.decode()).metadata == messages.metadata
    translations = re.compile(r'(?m)^msgstr.*\n(?:".*\n)*')
    assert translations.sub("", result) == translations.sub("", content.decode())
    assert translate("a.po", result.encode()).decode() == result  # nothing is left to translate


def test_a_message_catalog_may_begin_with_a_byte_order_mark_and_a_comment() -> None:
    start = '\ufeff# a comment\nmsgid "an apple"\n'
    result = translate("a.po", f'{start}msgstr ""\n'.encode()).decode()
    assert result == f'{start}msgstr "AN APPLE"\n'


@pytest.mark.parametrize("line", ["\n", "# a comment\n"])
def test_a_message_may_contain_empty_lines_and_comments(line: str) -> None:
    start = f'msgctxt "fruit"\n{line}msgid "an apple"\n{line}'
    result = translate("a.po", f'{start}msgstr ""\n\n{start}msgstr "x"\n'.encode()).decode()
    assert result == f'{start}msgstr "AN APPLE"\n\n{start}msgstr "x"\n'


def test_the_forms_of_a_plural() -> None:
    for num_forms, expected in ((1, ["ITEMS"]), (3, ["ITEM", "ITEMS", "ITEMS"])):
        message = 'msgid "item"\nmsgid_plural "items"\n'
        message += "".join(f'msgstr[{form}] ""\n' for form in range(num_forms))
        [entry] = polib.pofile(translate("a.po", message.encode()).decode())
        assert list(entry.msgstr_plural.values()) == expected


def make_bomb() -> bytes:
    """Return a package whose document is 1 GB of spaces."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = compressor.compress(b" " * (1 << 20)) + compressor.flush(zlib.Z_FULL_FLUSH)
    data = block * 1024 + compressor.flush()
    size = 1 << 30
    crc = 0  # wrong, which only a reader of the whole file notices
    name = b"word/document.xml"
    fields = (20, 0, 8, 0, 33, crc, len(data), size, len(name), 0)
    local = b"PK\x03\x04" + struct.pack("<HHHHHIIIHH", *fields) + name + data
    central = b"PK\x01\x02" + struct.pack("<HHHHHHIIIHHHHHII", 20, *fields, 0, 0, 0, 0, 0) + name
    counts = (0, 0, 1, 1, len(central), len(local), 0)
    return local + central + b"PK\x05\x06" + struct.pack("<HHHHIIH", *counts)


ENTITIES = b'<!DOCTYPE a [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]>'
MACROS = {"word/document.xml": b"<a/>", "word/vbaProject.bin": b"x"}
PASSWORD = {"content.xml": b"x", "META-INF/manifest.xml": b"<m:encryption-data/>"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.docx", b"x", "the file is not a DOCX document, or is damaged or has a password"),
        ("a.docx", WORD[: len(WORD) // 2], "the file is not a DOCX document"),
        ("a.docx", make_package({"a": b"b"}), "the file is not a DOCX document: it has no text"),
        ("a.docx", make_bomb(), "the file has over 67108864 bytes of text"),
        ("a.docx", make_package({"word/document.xml": ENTITIES + b"<a>&b;</a>"}), "entity a"),
        ("a.docx", make_package({"word/document.xml": b"<a>"}), "word/document.xml in the file: "),
        ("a.docx", make_package(MACROS), "has macros (word/vbaProject.bin); save it without them"),
        ("a.docm", WORD, ".docm: no such file format"),
        ("a.odt", make_package(PASSWORD), "the file has a password; save it without one"),
        ("a.pptx", WORD, "the file is not a PPTX document: it has no text"),
        ("a.xlf", ENTITIES + b"<xliff/>", "declares the entity a"),
        ("a.xlf", b"<xliff>", "the file is not valid XML: no element found"),
        ("a.xlf", b'<?xml version="1.0" encoding="utf-8"?>\xff', "the file is not in its encoding"),
        ("a.srt", b"1\na", "each needs a line such as 00:00:01,000 --> 00:00:02,500"),
        ("a.srt", b"00:00:01,000 --> 00:00:02,000\ra", "line ends \\n or \\r\\n"),
        ("a.po", b'msgid "a\n', "line 1 is not valid in a PO file"),
        ("a.po", b'"charset=x\\n"', "line 1 is not valid in a PO file"),
        ("a.po", b"\xff", "the file is not in its encoding utf-8"),
    ],
)
def test_files_that_cannot_be_read_are_one_line(name: str, content: bytes, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as error:
            read_document(name, content, ReadOptions())
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_package_that_unpacks_to_200_times_its_size_is_refused() -> None:
    package = make_package({"word/document.xml": b"<a/>", "word/media/a.png": bytes(80 << 20)})
    with pytest.raises(DataError, match="over 200 times its size, which no document needs"):
        read_document("a.docx", package, ReadOptions())


def test_translations_with_characters_that_xml_lacks_stay_valid() -> None:
    result = translate("a.docx", WORD, lambda _: upper("a\x01b\ufffe<&"))
    assert "AB&lt;&amp;" in read_file(result, "word/document.xml")
    ElementTree.fromstring(read_file(result, "word/document.xml"))


@pytest.mark.slow
def test_damaged_packages_are_read_or_refused() -> None:
    draw = random.Random(1)
    num_refused = 0
    for _ in range(300):
        content = bytearray(WORD)
        for _ in range(draw.randint(1, 8)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        message = find_refusal(bytes(content))
        assert "\n" not in message
        num_refused += bool(message)
    assert num_refused > 100


def find_refusal(content: bytes) -> str:
    """Return the message with which a DOCX file is refused, or an empty text."""
    try:
        translate("a.docx", content)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_time_is_linear_in_the_size_of_a_document() -> None:
    paragraph = re.findall(r"<w:p>.*?</w:p>", (FOLDER / "word.xml").read_text())[1]
    head = (FOLDER / "word.xml").read_text().partition("<w:body>")[0]
    memoq = (FOLDER / "memoq.mqxliff").read_text()
    unit = re.findall(r"(?s)<trans-unit.*?</trans-unit>", memoq.replace("mq:", ""))[0]
    message = 'msgid "a %s"\nmsgstr ""\n'
    nested = "<w:p><w:r><w:pict>" * 1000 + "</w:pict></w:r></w:p>" * 1000
    for name, make in (
        ("a.docx", lambda n: f"{head}<w:body>{paragraph * n}</w:body></w:document>"),
        ("a.docx", lambda n: f"{head}<w:body>{nested * (n // 50)}</w:body></w:document>"),
        ("a.xlf", lambda n: f"<xliff>{unit * n}</xliff>"),
        ("a.xlf", lambda n: f"<xliff><!--{'x' * (n << 15)}--></xliff>"),
        ("a.po", lambda n: message * n),
    ):
        contents = {}
        for count in (100, 800):
            contents[count] = make(count).encode()
            if name == "a.docx":
                contents[count] = make_package({"word/document.xml": contents[count]})

        def translate_copies(count: int) -> None:
            translate(name, contents[count])  # noqa: B023

        assert_linear_time(translate_copies, 800, name, slack_seconds=0.2)


def test_a_long_document_keeps_the_order_of_its_paragraphs() -> None:
    document = docx.Document()
    lines = sentences(300)
    for line in lines:
        document.add_paragraph(line)
    stream = io.BytesIO()
    document.save(stream)
    result = docx.Document(io.BytesIO(translate("a.docx", stream.getvalue())))
    expected = [" ".join(line.split()).upper() for line in lines]
    assert [" ".join(paragraph.text.split()) for paragraph in result.paragraphs] == expected
