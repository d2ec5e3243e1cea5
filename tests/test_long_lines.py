"""Long lines: where they are cut, and how the parts are joined."""

from __future__ import annotations

import random
import time

from tiny import sentences

from nmt.data.tokenizer import Tokenizer
from nmt.translate.long_lines import join_parts, split_line


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


def test_what_has_no_space_is_cut_between_characters(tokenizer: Tokenizer) -> None:
    family = "👩\u200d👩\u200d👧"
    segments = parts(tokenizer, family * 9, 50)
    assert "".join(segments) == family * 9
    assert all(segment.replace(family, "") == "" for segment in segments)
    assert "".join(parts(tokenizer, "x\u0301" * 90, 50)) == "x\u0301" * 90


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


def test_the_time_for_a_line_grows_with_its_length_and_not_faster(tokenizer: Tokenizer) -> None:
    for text in ("x" * 300_000, "." * 300_000, '." ' * 100_000, "\u0301" * 100_000):
        start_seconds = time.process_time()
        split_line(text, 255, tokenizer.encode_batch)
        assert time.process_time() - start_seconds < 5, text[:9]  # the square would take minutes


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
