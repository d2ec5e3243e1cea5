"""The corpora that come along: the packaged numbers against num2words, babel and a reader of German
clock times, and the copy task.
"""

from __future__ import annotations

import itertools
import re
import runpy
from pathlib import Path

from babel.dates import get_day_names, get_month_names
from num2words import num2words

from nmt.config import Corpus
from nmt.data.text import bundled_corpus

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts/make_numbers.py"))
SPLITS, COPY = bundled_corpus(Corpus.numbers, seed=0), bundled_corpus(Corpus.copy, seed=0)
PAIRS = [pair for pairs in SPLITS.values() for pair in pairs]
DE_VALUES = {num2words(n, lang="de"): n for n in range(60)}


def test_the_packaged_text_is_what_the_script_makes_with_num2words() -> None:
    assert SCRIPT["generate"]() == PAIRS


def test_month_and_weekday_names_agree_with_babel() -> None:
    oracle: dict[str, str] = {}
    for names in (get_month_names, get_day_names):
        en, de = names(locale="en"), names(locale="de")
        oracle |= {en[key]: de[key] for key in en}
    for src, tgt in PAIRS:
        expected = [oracle[word] for word in re.findall(r"\w+", src) if word in oracle]
        assert [word for word in re.findall(r"\w+", tgt) if word in oracle.values()] == expected
    assert set(oracle) <= {word for src, _ in PAIRS for word in re.findall(r"\w+", src)}


def _read_german_time(text: str) -> int:
    """Read a German clock time as minutes after twelve: "fünf vor halb vier" is 205."""
    if text.endswith(" Uhr"):
        word = text.removesuffix(" Uhr")
        return (1 if word == "ein" else DE_VALUES[word] % 12) * 60
    distance, sign, reference = re.fullmatch(r"(?:(.+) (vor|nach) )?(.+)", text).groups()  # type: ignore[union-attr]
    half = reference.startswith("halb ")
    minutes = DE_VALUES[reference.removeprefix("halb ")] * 60 - 30 * half
    if distance:
        word = re.sub(" Minuten?$", "", distance)
        count = {"Viertel": 15, "eine": 1}.get(word) or DE_VALUES[word]
        minutes += count if sign == "nach" else -count
    return minutes % 720


def test_clock_times_are_said_as_people_say_them_and_mean_what_they_were_made_from() -> None:
    clock_time = SCRIPT["clock_time"]
    for hour, minute in itertools.product(range(1, 13), range(60)):
        found = _read_german_time(clock_time(hour, minute)[1])
        assert found == (hour * 60 + minute) % 720, (hour, minute)
    for hour, minute, english, german in [
        (1, 0, "one o'clock", "ein Uhr"),
        (3, 1, "one minute past three", "eine Minute nach drei"),
        (3, 17, "seventeen minutes past three", "siebzehn Minuten nach drei"),
        (3, 15, "a quarter past three", "Viertel nach drei"),
        (3, 25, "twenty-five past three", "fünf vor halb vier"),
        (12, 30, "half past twelve", "halb eins"),
        (3, 35, "twenty-five to four", "fünf nach halb vier"),
        (12, 45, "a quarter to one", "Viertel vor eins"),
    ]:
        assert clock_time(hour, minute) == (english, german)


def test_amounts_take_the_ending_of_their_case() -> None:
    day = SCRIPT["Unit"]("day", "days", "Tag", "Tage", "Tagen", "m")
    for n, case, english, german in [
        (1, "nominative", "one day", "ein Tag"),
        (1, "accusative", "one day", "einen Tag"),
        (1, "dative", "one day", "einem Tag"),
        (3, "dative", "three days", "drei Tagen"),
        (21, "accusative", "twenty-one days", "einundzwanzig Tage"),
    ]:
        assert SCRIPT["amount"](n, day, case) == (english, german)


def test_sentences_are_plain_words_and_every_one_held_out_occurs_in_train() -> None:
    """Words and the parts of hyphenated ones: what is left to learn is how they combine."""
    parts = {name: set(re.findall(r"\w+", " ".join(s for s, _ in SPLITS[name]))) for name in SPLITS}
    assert parts["valid"] | parts["test"] <= parts["train"]
    for text in (side for pair in PAIRS for side in pair):
        assert re.fullmatch(r"[\wäöüß',-]+( [\wäöüß',-]+){0,12}", text)


def test_no_sentence_stands_twice_in_a_corpus_of_known_size() -> None:
    for splits, sizes in (SPLITS, [10_000, 300, 500]), (COPY, [5000, 200, 500]):
        assert [len(splits[name]) for name in ("train", "valid", "test")] == sizes
        pairs = [pair for part in splits.values() for pair in part]
        assert all(len(set(side)) == len(pairs) for side in zip(*pairs, strict=True))


def test_the_copy_corpus_is_short_rows_of_symbols_drawn_by_the_seed() -> None:
    again, other = (bundled_corpus(Corpus.copy, seed) for seed in (0, 8))
    assert again == COPY != other
    for src, tgt in COPY["train"]:
        assert src == tgt
        assert re.fullmatch("[a-j]( [a-j]){7,11}", src)
