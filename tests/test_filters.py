"""Filters drop the right pairs, in a fixed order, and agree with slow implementations."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import numpy as np
import pytest
import regex
from dirt import clean_and_filter, make_chunk

from nmt.config import DataConfig, FilterConfig, PreprocessConfig
from nmt.errors import ConfigError
from nmt.preprocess import filters
from nmt.preprocess.characters import foreign_shares
from nmt.preprocess.chunks import Format
from nmt.preprocess.clean_chunk import CleanChunk, PairCounts
from nmt.preprocess.filters import are_in_other_language, check_filters, drop_by_tokens
from nmt.preprocess.scripts import SCRIPTS, script_numbers, scripts_of


def settings(src_lang: str = "en", tgt_lang: str = "de", **filters: Any) -> PreprocessConfig:
    data = DataConfig(src_lang=src_lang, tgt_lang=tgt_lang)
    max_length = filters.pop("max_length", 256)
    return PreprocessConfig(data=data, filter=FilterConfig(**filters), max_length=max_length)


def run(pairs: list[tuple[str, str]], config: PreprocessConfig, **options: Any) -> CleanChunk:
    lines = [list(map(str.encode, side)) for side in zip(*pairs, strict=True)]
    return clean_and_filter(make_chunk(lines, Format.pair), config, **options)


def test_each_filter_drops_its_pairs_and_the_first_counts() -> None:
    pairs = [
        ("A house.", "Ein Haus."),
        ("\0", "\0"),
        ("\u3000", ""),
        (" Berlin", "Berlin "),
        ("Это дом.", "Ein Haus."),
        ("The parliament is in the city.", "This sentence is not German at all."),
    ]
    reasons = ["NUL character", "empty side", "identical sides", "foreign script", "wrong language"]
    every = {"identical": True, "max_foreign": 0.4, "language": True}
    for changes, expected in [
        ({}, reasons[:2]),
        ({"identical": True}, reasons[:3]),
        ({"max_foreign": 0.4}, [*reasons[:2], reasons[3]]),
        (every, reasons),
    ]:
        counts = run(pairs, settings(**changes)).counts
        assert sorted(counts.dropped.elements()) == sorted(expected), changes
        assert counts.kept == len(pairs) - len(expected)
        assert len(run(pairs, settings(**changes), held_out=True).src) == len(pairs)
    pairs = [
        ("Mr Smith", "Herr Smith"),
        ("42", "42"),
        ("12:30 (A5-0012/2000)", "12:30"),
        (".", "?"),
    ]
    assert run(pairs, settings(language=True)).counts.dropped == {}  # of any language
    pairs = [("x", " "), (" ", "y"), ("x", "слово"), ("слово", "y")]
    assert run(pairs, settings(max_foreign=0.5)).counts.examples == {
        "empty side": [("b.tgt", 1, None), ("a.src", 2, None)],
        "foreign script": [("b.tgt", 3, None), ("a.src", 4, None)],
    }


def slow_reason(
    row: tuple[int, int, int, int], tags: tuple[int, int], config: PreprocessConfig
) -> str | None:
    src, tgt, src_unknown, tgt_unknown = row
    filters = config.filter
    if src == tags[0] or tgt == tags[1]:
        return "empty side"
    if max(src, tgt) + 1 > config.max_length:
        return "too long"
    if filters.max_ratio and max(src / tgt, tgt / src) > filters.max_ratio:
        return "length ratio"
    if max(src_unknown / src, tgt_unknown / tgt) > filters.max_unknown:
        return "unknown tokens"
    return None


def test_token_filters_agree_with_one_pair_at_a_time() -> None:
    draw = random.Random(0)
    rows = []
    tags = (2, 0)
    for _ in range(500):
        src = draw.randint(2, 11)
        tgt = draw.randint(0, 11)
        rows.append((src, tgt, draw.randint(0, src) // 2, draw.randint(0, tgt) // 2))
    src, tgt, src_unknown, tgt_unknown = np.array(rows).T
    texts = [str(number) for number in range(500)]
    chunk = make_chunk([list(map(str.encode, texts))] * 2, Format.pair)
    for config in (settings(), settings(max_ratio=2.0, max_unknown=0.25, max_length=9)):
        expected = [slow_reason(row, tags, config) for row in rows]
        cleaned = CleanChunk(chunk, texts, texts, np.arange(500), PairCounts(500, 500))
        keep = drop_by_tokens(cleaned, (src, tgt), tags, (src_unknown, tgt_unknown), config)
        assert keep.tolist() == [reason is None for reason in expected]
        assert cleaned.src == cleaned.tgt == [texts[i] for i in np.flatnonzero(keep)]
        assert cleaned.counts.kept == keep.sum() > 0
        for reason in set(expected) - {None}:
            assert cleaned.counts.dropped[reason] == expected.count(reason)
            row = -1
            for location in cleaned.counts.examples[reason]:  # the first lines with this reason
                row = expected.index(reason, row + 1)
                assert location.line == row + 1
            assert len(cleaned.counts.examples[reason]) == min(5, expected.count(reason))


def test_letters_have_the_script_of_the_unicode_standard() -> None:
    """Except letters that all scripts share, and superscript letters."""
    table = script_numbers()
    shared = regex.compile(r"[\p{Script=Common}\p{Script=Inherited}\p{Decomposition_Type=Super}]")
    patterns = {name: regex.compile(rf"\p{{Script={name}}}") for name in SCRIPTS[:-1]}
    codes = [*range(0x3400), *range(0x3401, 0xD800, 17), *range(0xE001, 0x20000, 17)]
    for code in [*codes, 0x20000, 0x323AF, 0x10FFFF]:
        letter = chr(code)
        if not regex.match(r"\p{L}", letter) or shared.match(letter):
            assert table[code] == 0, hex(code)
        else:
            scripts = [script for script, pattern in patterns.items() if pattern.match(letter)]
            assert [SCRIPTS[table[code] - 1]] == (scripts or ["Other"]), hex(code)
    assert not any(table[ord(sign)] for sign in "0 .,-'’ʼ\u0301🙂№µªº\n")
    named = {"Latin": "aßＡﬁI", "Greek": "Ωά", "Cyrillic": "ё", "Han": "漢々", "Katakana": "ｶ"}
    for name, letters in named.items():
        assert {SCRIPTS[table[ord(letter)] - 1] for letter in letters} == {name}


def test_shares_agree_with_one_letter_at_a_time() -> None:
    draw = random.Random(1)
    table = script_numbers()
    alphabet = "abcßабвгд漢字ひカαβ한 .1\u0301😀"
    texts = ["".join(draw.choices(alphabet, k=draw.randint(0, 9))) for _ in range(300)] + ["", " "]
    for names in (("Latin",), ("Han", "Hiragana", "Katakana"), ("Cyrillic",)):
        for text, share in zip(texts, foreign_shares(texts, names), strict=True):
            letters = [SCRIPTS[table[ord(c)] - 1] for c in text if table[ord(c)]]
            foreign = sum(letter not in names for letter in letters)
            assert share == (foreign / len(letters) if letters else 0)
        assert foreign_shares([], names).tolist() == []


def test_languages_have_their_scripts_unless_others_are_given() -> None:
    codes = {"de": "Latin", "pt_BR": "Latin", "ru-RU": "Cyrillic", "eng_Latn": "Latin"}
    codes |= {"sr-Latn": "Latin", "zh_Hant": "Han", "EL": "Greek", "pan_Guru": "Gurmukhi"}
    for code, name in codes.items():
        assert scripts_of(code, "filter.src_scripts")[0] == name
    assert scripts_of("ja", "filter.src_scripts") == ("Han", "Hiragana", "Katakana")
    config = settings("xx", max_foreign=0.0, src_scripts=["Cyrillic"])
    check_filters(config)
    assert run([("дом", "Haus"), ("house", "Haus")], config).src == ["дом"]


def test_unknown_scripts_and_languages_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = settings(max_foreign=0.5, tgt_scripts=["Latn"])
    for config, message in [
        (settings("xx", max_foreign=0.5), r"language xx are not known; .*filter\.src_scripts="),
        (unknown, r"tgt_scripts=Latn: .*did you mean Latin"),
        (settings("deu", language=True), r"data\.src_lang=deu: .*did you mean .*\bde\?"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_filters(config)
    with pytest.raises(ConfigError, match=r"filter\.max_ratio=0\.5: must be 0 or at least 1"):
        FilterConfig(max_ratio=0.5)
    filters._detector.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install it with: pip install nmt\[langid\]"):
        check_filters(settings(language=True))


def test_lines_too_short_to_tell_their_language_stay() -> None:
    right = [("five days ago", "vor fünf Tagen"), ("Pardon?", "Wie bitte?"), ("no", "猫です")]
    long = "Es este un rând în limba română, lung de tot."
    for pairs, dropped in (
        (right, {}),
        ([("Das ist gut", "Das ist gut"), ("да, конечно", "ja")], {}),
        ([(long, "ja"), ("yes", long)], {"wrong language": 2}),
    ):
        assert run(pairs, settings(language=True)).counts.dropped == dropped, pairs


def test_a_text_in_another_language_is_told_from_one_with_a_few_such_lines() -> None:
    english = ["The weather is fine today in the mountains.", "She reads a book about old ships."]
    german = ["Das Wetter ist heute schön in den Bergen.", "Sie liest ein Buch über alte Schiffe."]
    assert are_in_other_language(german, "en")
    assert are_in_other_language([*german, "ja"], "en_GB")
    assert not are_in_other_language(english, "en")
    assert not are_in_other_language([*english, german[0]], "en")
    assert not are_in_other_language([], "en")
    assert not are_in_other_language(german, "")  # the model does not say
    assert not are_in_other_language(german, "digits")
