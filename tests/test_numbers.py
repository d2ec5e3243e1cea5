"""The numbers corpus, against num2words, babel and a reader of German clock times as oracles."""

from __future__ import annotations

import re

import pytest
from babel.dates import get_day_names, get_month_names
from num2words import num2words

from nmt.data import numbers

SPLITS = numbers.generate()
ALL_PAIRS = [pair for pairs in SPLITS.values() for pair in pairs]
DE_VALUES = {num2words(n, lang="de"): n for n in range(60)}


def test_cardinals_agree_with_num2words() -> None:
    for n in range(numbers.MAX_CARDINAL + 1):
        assert numbers.english_cardinal(n) == num2words(n).replace(",", "")
        assert numbers.german_cardinal(n) == num2words(n, lang="de")


def test_ordinals_agree_with_num2words() -> None:
    for n in range(1, numbers.MAX_ORDINAL + 1):
        assert numbers.english_ordinal(n) == num2words(n, to="ordinal")
        # For 100 alone the oracle says "hundertste", against its own "einhundert".
        expected = "einhundertste" if n == 100 else num2words(n, lang="de", to="ordinal")
        assert numbers.german_ordinal(n) == expected


def test_years_agree_with_num2words() -> None:
    for year in range(numbers.FIRST_YEAR, numbers.LAST_YEAR + 1):
        assert numbers.english_year(year) == num2words(year, to="year")
        assert numbers.german_year(year) == num2words(year, lang="de", to="year")


def test_month_and_weekday_names_agree_with_babel() -> None:
    en_months, de_months = (get_month_names(locale=lang) for lang in ("en", "de"))
    oracle = {en_months[month]: de_months[month] for month in range(1, 13)}
    en_days, de_days = (get_day_names(locale=lang) for lang in ("en", "de"))
    oracle |= {en_days[day]: de_days[day] for day in range(7)}
    for src, tgt in ALL_PAIRS:
        names = [oracle[word] for word in re.findall(r"\w+", src) if word in oracle]
        assert [word for word in re.findall(r"\w+", tgt) if word in oracle.values()] == names
    assert set(oracle) <= {word for src, _ in ALL_PAIRS for word in re.findall(r"\w+", src)}


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


@pytest.mark.parametrize("hour", range(1, 13))
def test_german_clock_times_mean_the_time_they_were_made_from(hour: int) -> None:
    for minute in range(60):
        _, german = numbers.clock_time(hour, minute)
        assert _read_german_time(german) == (hour * 60 + minute) % 720


@pytest.mark.parametrize(
    ("hour", "minute", "english", "german"),
    [
        (1, 0, "one o'clock", "ein Uhr"),
        (12, 0, "twelve o'clock", "zwölf Uhr"),
        (3, 1, "one minute past three", "eine Minute nach drei"),
        (3, 17, "seventeen minutes past three", "siebzehn Minuten nach drei"),
        (3, 15, "a quarter past three", "Viertel nach drei"),
        (3, 25, "twenty-five past three", "fünf vor halb vier"),
        (12, 30, "half past twelve", "halb eins"),
        (3, 35, "twenty-five to four", "fünf nach halb vier"),
        (12, 45, "a quarter to one", "Viertel vor eins"),
        (11, 59, "one minute to twelve", "eine Minute vor zwölf"),
    ],
)
def test_clock_times_are_said_as_people_say_them(
    hour: int, minute: int, english: str, german: str
) -> None:
    assert numbers.clock_time(hour, minute) == (english, german)


@pytest.mark.parametrize(
    ("n", "case", "english", "german"),
    [
        (1, "nominative", "one day", "ein Tag"),
        (1, "accusative", "one day", "einen Tag"),
        (1, "dative", "one day", "einem Tag"),
        (3, "dative", "three days", "drei Tagen"),
        (21, "accusative", "twenty-one days", "einundzwanzig Tage"),
    ],
)
def test_amounts_take_the_ending_of_their_case(
    n: int, case: str, english: str, german: str
) -> None:
    day = numbers.Unit("day", "days", "Tag", "Tage", "Tagen", "m")
    assert numbers.amount(n, day, case) == (english, german)


def test_splits_have_their_sizes() -> None:
    assert {name: len(pairs) for name, pairs in SPLITS.items()} == numbers.SIZES


def test_no_sentence_stands_twice_on_either_side() -> None:
    for side in (0, 1):
        assert len({pair[side] for pair in ALL_PAIRS}) == len(ALL_PAIRS)


@pytest.mark.parametrize("seed", [1, 2])
def test_german_is_a_function_of_english_whatever_the_seed(seed: int) -> None:
    translations = dict(ALL_PAIRS)
    for pairs in numbers.generate(seed).values():
        for src, tgt in pairs:
            assert translations.setdefault(src, tgt) == tgt


def test_corpus_is_a_function_of_the_seed() -> None:
    assert numbers.generate(3) == numbers.generate(3)
    assert numbers.generate(3) != numbers.generate(4)


def test_every_word_held_out_occurs_in_train() -> None:
    """Words and the parts of hyphenated ones: what is left to learn is how they combine."""
    parts = {name: set(re.findall(r"\w+", " ".join(s for s, _ in SPLITS[name]))) for name in SPLITS}
    assert parts["valid"] | parts["test"] <= parts["train"]


def test_sentences_are_one_short_line_of_plain_words() -> None:
    for pair in ALL_PAIRS:
        for text in pair:
            assert re.fullmatch(r"[\wäöüß',-]+( [\wäöüß',-]+)*", text)
            assert len(text.split()) <= 13
