"""Long lines: where they are cut, and how the parts are joined."""

from __future__ import annotations

import random
from collections.abc import Sequence

from growth import assert_linear_time
from tiny import sentences, tokenizer_config

from nmt.data.hints import DONE, SOURCE, TARGET
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.search.glossary import load_glossary
from nmt.search.protect import protected_spans
from nmt.translate.long_lines import join_parts, split_line
from nmt.translate.options import LineOptions
from nmt.translate.windows import Window, encode_window


def parts(tokenizer: Tokenizer, text: str, max_tokens: int) -> list[str]:
    return [tokenizer.decode(p) for p in split_line(text, max_tokens, tokenizer.encode_batch)]


def test_a_long_line_is_cut_at_sentence_ends(tokenizer: Tokenizer) -> None:
    for text, expected in (
        ("The tree. A house! Really? Yes.", ["The tree.", "A house!", "Really?", "Yes."]),
        ('He sees "a tree." She goes.', ['He sees "a tree."', "She goes."]),
        ("Trees, e.g. the green ones.", ["Trees, e.g. the green ones."]),
        ("3.5 trees a.b. Über!", ["3.5 trees a.b.", "Über!"]),
        ("今天很好。我们走吧!好的。", ["今天很好。", "我们走吧!好的。"]),
        ("今天很好。」我们走吧!」。", ["今天很好。」", "我们走吧!」。"]),
        ("هل هذا؟ نعم۔ لا", ["هل هذا؟", "نعم۔", "لا"]),
        ("यह है। वह है। हाँ", ["यह है।", "वह है।", "हाँ"]),
    ):
        assert parts(tokenizer, text, 60) == expected


def test_a_long_sentence_is_cut_at_clauses_and_then_at_spaces(tokenizer: Tokenizer) -> None:
    text = "the small house, the green tree; a tree sees the house and the house the tree"
    segments = parts(tokenizer, text, 10)
    assert segments[0] == "the small house, the green tree;"  # both clauses fit
    assert len(segments) == 3
    assert " ".join(segments) == text
    assert all(word in text.split() for segment in segments for word in segment.split())


def test_text_without_spaces_is_cut_between_characters(tokenizer: Tokenizer) -> None:
    family = "👩\u200d👩\u200d👧"
    segments = parts(tokenizer, family * 9, 50)
    assert "".join(segments) == family * 9
    assert all(segment.replace(family, "") == "" for segment in segments)
    assert "".join(parts(tokenizer, "x\u0301" * 90, 50)) == "x\u0301" * 90


def test_spaces_at_the_ends_of_a_long_word_cost_no_text(tokenizer: Tokenizer) -> None:
    for text in (" " * 9000 + "x" * 50, "x" * 50 + " " * 9):
        assert "".join(parts(tokenizer, text, 40)) == "x" * 50


def test_nothing_of_any_text_is_lost_and_every_part_fits(tokenizer: Tokenizer) -> None:
    alphabet = "aé漢。.,!? \u0301\u200d👩\u3000ไ\"'"
    for seed in range(20):
        draw = random.Random(seed)
        text = "".join(draw.choice(alphabet) for _ in range(draw.randint(1, 400)))
        max_tokens = draw.randint(8, 40)
        segments = split_line(text, max_tokens, tokenizer.encode_batch)
        assert all(1 <= len(ids) <= max_tokens for ids in segments), seed
        letters = "".join(tokenizer.decode(tokenizer.encode(text)).split())
        assert "".join("".join(map(tokenizer.decode, segments)).split()) == letters, seed


def test_no_term_is_cut_that_fits() -> None:
    config = tokenizer_config(byte_fallback=True)
    tokenizer = train_tokenizer(sentences(50), config, [SOURCE, TARGET, DONE])
    terms = ("the house", "漢字語", "{{ name }}", "Yes! No", "x, y")
    alphabet = [*terms, "a", "é", ".", "。", " ", ","]
    glossary = ("the house\tHaus", "漢字語\tWort", "Yes! No\tJa", "x, y\tz")
    for seed in range(8):
        draw = random.Random(seed)
        text = "".join(draw.choice(alphabet) + draw.choice(" ,") for _ in range(100))
        for lines in ({"hints": glossary}, {"required_terms": glossary}):
            options = LineOptions(max_source_length=draw.randint(30, 60), protect=True, **lines)
            [segments] = encode_window(Window(0, [text]), tokenizer, options).segments
            texts = [tokenizer.decode(segment.ids) for segment in segments]
            assert len(texts) > 5
            assert all(segment.num_tokens <= options.max_source_length for segment in segments)
            for term in terms:
                assert sum(segment_text.count(term) for segment_text in texts) == text.count(
                    term
                ), (seed, term)


def test_no_term_is_cut_whose_text_is_not_normalized() -> None:
    config = tokenizer_config(byte_fallback=True)
    tokenizer = train_tokenizer(sentences(50), config)
    glossary = ("café table\tKaffeetisch", "fire exit\tNotausgang")
    text = "cafe\u0301 table ｆire exit a " * 10
    assert [text[span.start : span.stop] for span in load_glossary(glossary).find_spans(text)] == [
        "cafe\u0301 table",
        "ｆire exit",
    ] * 10
    for max_source_length in range(24, 48):
        options = LineOptions(max_source_length=max_source_length, required_terms=glossary)
        [segments] = encode_window(Window(0, [text]), tokenizer, options).segments
        texts = [tokenizer.decode(segment.ids) for segment in segments]
        assert len(texts) > 4
        for term in ("café table", "fire exit"):
            assert sum(text.count(term) for text in texts) == 10


def test_a_term_that_is_too_long_is_cut(tokenizer: Tokenizer) -> None:
    term = "the house " * 20 + "漢字" * 20
    options = LineOptions(max_source_length=20, required_terms=(f"{term}\tHaus",))
    [segments] = encode_window(Window(0, [term]), tokenizer, options).segments
    decoded = " ".join(tokenizer.decode(segment.ids) for segment in segments)
    assert decoded.replace(" ", "") == term.replace(" ", "")
    assert max(segment.num_tokens for segment in segments) <= 20


def test_the_time_for_a_line_grows_with_its_length_and_not_faster(tokenizer: Tokenizer) -> None:
    for unit, size in (("x", 300_000), (".", 300_000), ('." ', 100_000), ("\u0301", 100_000)):

        def split(size: int) -> None:
            split_line(unit * size, 255, tokenizer.encode_batch)  # noqa: B023

        assert_linear_time(split, size, unit)


def test_a_long_span_is_divided_in_linear_time() -> None:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [[1] * ((len(text) + 2) // 3) for text in texts]

    def split(size: int) -> None:
        tag = '<img src="data:image/png;base64,' + "Ab3" * size + '">'
        segments = split_line(f"Look here: {tag} and more text.", 255, encode, protected_spans)
        assert len(segments) > size // 334

    assert_linear_time(split, 100_000)


def test_parts_are_joined_as_the_language_is_written(tokenizer: Tokenizer) -> None:
    for texts, line in (
        (["Ein Haus.", "Ein Baum."], "Ein Haus. Ein Baum."),
        (["今天很好。", "我们走吧。"], "今天很好。我们走吧。"),
        (["ด", "ี"], "ด ี"),
        (["한국어.", "좋다"], "한국어. 좋다"),
        (["Das ist 好", "Ein Baum"], "Das ist 好 Ein Baum"),
        (["", "a", "", "b"], "a b"),
        ([], ""),
    ):
        assert join_parts(texts) == line
    text = ". ".join(line.capitalize() for line in sentences(8, seed=2)) + "."
    assert join_parts(parts(tokenizer, text, 60)) == text
