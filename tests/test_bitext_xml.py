"""Sentence pairs from TMX and XLIFF, as several tools write them."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.parsers import expat
from xml.sax.saxutils import escape

import pytest
from tiny import sentences
from toy import command

from nmt.errors import DataError
from nmt.preprocess.bitext_xml import _MAX_DEPTH, _MAX_MARKUP_BYTES, MAX_TEXT_LENGTH, read_pairs

FOLDER = Path(__file__).with_name("bitext")
OMEGAT = (FOLDER / "omegat.tmx").read_text(encoding="utf-8")
TRADOS = (FOLDER / "trados.tmx").read_text(encoding="utf-8")
XLIFF_1 = (FOLDER / "xliff-1.2.xlf").read_text(encoding="utf-8")
XLIFF_2 = (FOLDER / "xliff-2.0.xlf").read_text(encoding="utf-8")
EN_DE = ("en", "de")
create_parser = expat.ParserCreate


def pairs(text: str | bytes, languages: tuple[str, str] = EN_DE, **options: bool) -> list[Any]:
    """Return the pairs of a file, read in blocks of 7 bytes."""
    content = text if isinstance(text, bytes) else text.encode()
    blocks = (content[start : start + 7] for start in range(0, len(content), 7))
    return list(read_pairs(blocks, "a.tmx", languages, **{"keep_markup": False, **options}))


def test_variants_of_a_language_are_found_and_a_named_variant_only_itself() -> None:
    two_lines = ("Two lines", "Zwei Zeilen")
    assert pairs(OMEGAT) == [("The colour", "Die Farbe"), two_lines]
    assert pairs(OMEGAT, ("en-US", "de")) == [("The color", "Die Farbe"), two_lines]
    assert pairs(OMEGAT, ("EN_gb", "de-de")) == [("The colour", "Die Farbe")]
    assert pairs(OMEGAT, ("fr", "en")) == [("Français", "French only")]


def test_codes_are_dropped_or_kept() -> None:
    assert pairs(OMEGAT, keep_markup=True)[0] == ("The colour", "Die <b>Farbe</b>")
    trados = TRADOS.replace("UTF-8", "UTF-16").encode("utf-16")
    assert pairs(trados) == [("Press Enter", "Drücken Sie Enter")]
    assert pairs(trados, keep_markup=True)[0][0] == "Press {\\b Enter}"


@pytest.mark.parametrize("languages", [EN_DE, ("", "")])
def test_xliff_of_both_versions(languages: tuple[str, str]) -> None:
    expected = [("Hello world", "Hallo Welt"), ("One file", "Eine Datei")]
    assert pairs(XLIFF_1, languages) == expected
    assert pairs(XLIFF_1, languages, keep_markup=True)[1] == ("One {0} file", "Eine {0} Datei")
    expected = [("A small house", "Ein kleines Haus"), ("Second sentence", "Zweiter Satz")]
    assert pairs(XLIFF_2, languages) == expected


def test_a_file_of_xliff_does_not_inherit_the_languages_of_the_file_before_it() -> None:
    unit = "<trans-unit><source>{}</source><target>x</target></trans-unit>"
    french = f"<file source-language='en' target-language='fr'>{unit.format('one')}</file>"
    unknown = f"<file source-language='en'>{unit.format('two')}</file>"
    text = f"<xliff>{french}{unknown}</xliff>"
    assert pairs(text, ("en", "de")) == [("two", "x")]  # taken for German, since nothing is stated
    assert pairs(text, ("en", "fr")) == [("one", "x"), ("two", "x")]


def test_deleted_text_and_copies_that_are_marked_as_new_are_skipped() -> None:
    head = "<file source-language='en' target-language='de'>"
    unit = "<trans-unit><source>one</source><target{}>{}</target></trans-unit>".format
    for state, expected in (
        ("", [("one", "one")]),
        (" state='translated'", [("one", "one")]),
        (" state='new'", []),
        (" state='needs-translation'", []),
    ):
        units = unit(state, "one") + unit(" state='new'", "eins")
        assert pairs(f"<xliff>{head}{units}</file></xliff>") == [*expected, ("one", "eins")]
    segment = "<segment{}><source>one</source><target>{}</target></segment>".format
    root = "<xliff srcLang='en' trgLang='de'>"
    for state, expected in (
        ("", []),  # by default, a segment has the state "initial"
        (" state='initial'", []),
        (" state='final'", [("one", "one")]),
    ):
        segments = segment(state, "one") + segment("", "eins")
        assert pairs(f"{root}<file>{segments}</file></xliff>") == [*expected, ("one", "eins")]
    mark = "<mrk mtype='x-sdl-{}'>{}</mrk>".format
    target = mark("deleted", f"ei<g id='1'>ns</g>{mark('x', 'a')}") + mark("added", "ein") + "s"
    for keep_markup in (False, True):
        reviewed = pairs(f"<xliff>{head}{unit('', target)}</file></xliff>", keep_markup=keep_markup)
        assert reviewed == [("one", "eins")]


def test_xliff_is_read_in_the_other_direction_too() -> None:
    for text in (XLIFF_2, XLIFF_2.replace(' trgLang="de"', "")):
        for languages in (("de", "en"), ("de", "en-US")):
            text = text.replace('"en"', f'"{languages[1]}"')
            assert pairs(text, languages)[0] == ("Ein kleines Haus", "A small house"), text
        assert pairs(text, ("en", "de"))[0] == ("A small house", "Ein kleines Haus")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OMEGAT[:-20], "a.tmx is not valid XML"),
        ("no xml", "a.tmx is not valid XML"),
        (b"\xff\xfe\x00", "a.tmx is not valid XML"),
        ("<?xml version='1.0' encoding='nonsense'?><tmx/>", "a.tmx is not valid XML"),
        (
            "<tmx/>",
            "a.tmx has no pair of en and de; set data.src_lang and data.tgt_lang to two",
        ),
        (OMEGAT.replace("de-DE", "nl"), "of its languages: en-GB, en-US, enm, fr, nl"),
        (
            '<!DOCTYPE t [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><tmx>&b;</tmx>',
            "declares the entity a",
        ),
        (
            '<!DOCTYPE t [<!ENTITY a SYSTEM "file:///etc/passwd">]><tmx>&a;</tmx>',
            "declares the entity a",
        ),
        (
            '<!DOCTYPE tmx SYSTEM "tmx14.dtd"><tmx><seg>a&nbsp;b</seg></tmx>',
            "a.tmx is not valid XML: undefined entity nbsp at line ",
        ),
        ("<tmx>" + "<a>" * 2000, "a.tmx has more than 1,000 nested elements"),
    ],
)
def test_damaged_files_are_one_line(text: str | bytes, message: str) -> None:
    with pytest.raises(DataError) as error:
        pairs(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_page_states_the_limits() -> None:
    page = (Path(__file__).parents[1] / "docs" / "sources.md").read_text(encoding="utf-8")
    assert f"a text of more than {MAX_TEXT_LENGTH:,} characters" in page
    assert f"a tag or comment of more than {_MAX_MARKUP_BYTES >> 20} MiB" in page
    assert f"more than {_MAX_DEPTH:,} nested elements" in page


@pytest.mark.slow
def test_memory_is_flat_and_a_single_text_is_bounded() -> None:
    unit = b'<tu><tuv xml:lang="en"><seg>a</seg></tuv><tuv xml:lang="de"><seg>b</seg></tuv></tu>'

    def blocks(num_blocks: int, block: bytes) -> Iterator[bytes]:
        yield b"<tmx><body>"
        for _ in range(num_blocks):
            yield block
        yield b"</body></tmx>"

    start_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_pairs = 0
    for _ in read_pairs(blocks(20, unit * 5_000), "a.tmx", EN_DE, keep_markup=False):
        num_pairs += 1
    assert num_pairs == 100_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_kilobytes < 50_000  # KB
    endless = blocks(3, b"<tu><tuv xml:lang='en'><seg>" + b"a" * MAX_TEXT_LENGTH + b"a")
    with pytest.raises(DataError, match=f"more than {MAX_TEXT_LENGTH:,} characters"):
        list(read_pairs(endless, "a.tmx", EN_DE, keep_markup=False))
    for start in (b"<!-- ", b"<tu a='", b"<?a ", b"<"):
        endless = itertools.chain([b"<tmx>\n", start], itertools.repeat(b"a" * (1 << 20), 1000))
        with pytest.raises(DataError, match=r"a tag or comment .* without an end, at line 2"):
            list(read_pairs(endless, "a.tmx", EN_DE, keep_markup=False))
        assert next(endless, None) is not None  # it was not read to its end


class PostponingParser:
    """An XML parser that postpones unfinished tags and comments, as expat does from version 2.6.

    It parses again when it has twice as many bytes of them, or the last block of the file.
    """

    def __init__(self) -> None:
        self.parser = create_parser()
        self.postponed = b""
        self.num_unfinished = 0  # bytes of the unfinished tag or comment at the last parsing
        self.num_parsed = 0  # bytes
        self.CurrentByteIndex = -1
        self.CurrentLineNumber = 1

    def Parse(self, block: bytes, is_final: bool) -> None:
        self.postponed += block
        if len(self.postponed) < self.num_unfinished and not is_final:
            self.CurrentByteIndex = -1
            return
        for name, value in vars(self).items():
            if name.endswith("Handler"):
                setattr(self.parser, name, value)
        self.parser.Parse(self.postponed, is_final)
        self.num_parsed += len(self.postponed)
        self.postponed = b""
        self.CurrentByteIndex = self.parser.CurrentByteIndex
        self.CurrentLineNumber = self.parser.CurrentLineNumber
        self.num_unfinished = self.num_parsed - self.CurrentByteIndex


@pytest.mark.slow
def test_long_comments_that_the_parser_postpones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expat, "ParserCreate", PostponingParser)
    unit = '<tu><tuv xml:lang="en"><seg>a</seg></tuv><tuv xml:lang="de"><seg>b</seg></tuv></tu>'
    long_unit = unit.replace(">a<", f">{'a' * 500_000}<")
    comment = f"<!--{' ' * 5_000_000}-->"
    content = f"<tmx><body>{unit}{comment}{long_unit * 10}</body></tmx>".encode()
    blocks = [content[start : start + 65_536] for start in range(0, len(content), 65_536)]
    assert len(list(read_pairs(blocks, "a.tmx", EN_DE, keep_markup=False))) == 11
    endless = itertools.chain([b"<tmx>\n<!-- "], itertools.repeat(b" " * 65_536, 1000))
    with pytest.raises(DataError, match=r"a tag or comment .* without an end, at line 2"):
        list(read_pairs(endless, "a.tmx", EN_DE, keep_markup=False))
    assert next(endless, None) is not None  # it was not read to its end


def test_pairs_that_the_parser_postpones_until_the_end_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expat, "ParserCreate", PostponingParser)
    unit = b'<tu><tuv xml:lang="en"><seg>a</seg></tuv><tuv xml:lang="de"><seg>b</seg></tuv></tu>'
    blocks = [b"<tmx><body><!--" + b" " * 1000, b"-->" + unit + b"</body></tmx>"]
    assert list(read_pairs(blocks, "a.tmx", EN_DE, keep_markup=False)) == [("a", "b")]


def test_preprocess_reads_tmx_as_the_same_text(tmp_path: Path) -> None:
    lines = sentences(60)
    units = []
    for line in lines:
        segment = escape(line)
        units.append(
            f'<tu><tuv xml:lang="en-US"><seg>{segment}</seg></tuv>'
            f'<tuv xml:lang="de"><seg>{segment.upper()}</seg></tuv></tu>'
        )
    (tmp_path / "m.tmx").write_text(f"<tmx><body>{''.join(units)}</body></tmx>", encoding="utf-8")
    (tmp_path / "m.en").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (tmp_path / "m.de").write_text("".join(f"{line.upper()}\n" for line in lines), encoding="utf-8")
    shared = ["data.src_lang=en", "data.tgt_lang=de", "data.valid.num_pairs=5"]
    shared += ["tokenizer.vocab_size=330"]
    text = [f"data.train.src={tmp_path / 'm.en'}", f"data.train.tgt={tmp_path / 'm.de'}"]
    assert command("preprocess", text, shared, f"data_dir={tmp_path / 'text'}") == 0
    tmx = f"data.train.tmx={tmp_path / 'm.tmx'}"
    assert command("preprocess", tmx, shared, f"data_dir={tmp_path / 'tmx'}") == 0
    names = sorted(path.name for path in (tmp_path / "text").glob("*.arrow"))
    assert names
    for name in [*names, "tokenizer.model"]:
        assert (tmp_path / "tmx" / name).read_bytes() == (tmp_path / "text" / name).read_bytes()


def test_a_translation_memory_without_languages_is_refused() -> None:
    with pytest.raises(DataError, match="does not say which language is the source; set data.src_"):
        pairs(OMEGAT, ("", ""))
