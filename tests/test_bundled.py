"""The bundled corpora: the numbers, compared with num2words, babel and a parser of German clock
times, and the copy task.
"""

from __future__ import annotations

import itertools
import re
import runpy
from pathlib import Path

import pytest
from babel.dates import get_day_names, get_month_names
from num2words import num2words

from nmt.config import Corpus
from nmt.data.text import load_bundled_corpus

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts/make_numbers.py"))
NUMBERS = load_bundled_corpus(Corpus.numbers, seed=0)
COPY = load_bundled_corpus(Corpus.copy, seed=0)
PAIRS = NUMBERS["train"] + NUMBERS["valid"] + NUMBERS["test"]
DE_VALUES = {num2words(n, lang="de"): n for n in range(60)}


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@pytest.mark.slow
def test_the_script_makes_the_packaged_text() -> None:
    assert [(pair.en, pair.de) for pair in SCRIPT["generate"]()] == PAIRS


@pytest.mark.slow
def test_the_alignment_of_the_numbers_links_every_word_but_of() -> None:
    alignments = {}
    for pair in SCRIPT["generate"]():
        links = [tuple(map(int, link.split("-"))) for link in pair.alignment.split()]
        src_words = pair.en.split()
        linked = {src_words[i] for i, _ in links}
        assert set(src_words) - linked <= {"of"}
        assert {j for _, j in links} == set(range(len(pair.de.split())))
        alignments[pair.en] = pair.alignment
    assert alignments["we will come on the twenty-fifth of June"] == "0-0 1-1 2-5 3-2 4-2 5-3 7-4"


def test_month_and_weekday_names_agree_with_babel() -> None:
    oracle: dict[str, str] = {}
    for names in (get_month_names, get_day_names):
        german = names(locale="de")
        for key, english in names(locale="en").items():
            oracle[english] = german[key]
    seen = set()
    for src, tgt in PAIRS:
        english_names = [word for word in words(src) if word in oracle]
        german_names = [word for word in words(tgt) if word in oracle.values()]
        assert german_names == [oracle[name] for name in english_names]
        seen.update(english_names)
    assert seen == set(oracle)


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


def test_clock_times_are_idiomatic_and_keep_their_meaning() -> None:
    clock_time = SCRIPT["clock_time"]
    for hour, minute in itertools.product(range(1, 13), range(60)):
        german = clock_time(hour, minute)[1]
        assert _read_german_time(german) == (hour * 60 + minute) % 720, german
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
        pair = clock_time(hour, minute)
        assert (pair.en, pair.de) == (english, german)


def test_amounts_take_the_ending_of_their_case() -> None:
    day = SCRIPT["Unit"]("day", "days", "Tag", "Tage", "Tagen", "m")
    for n, case, english, german in [
        (1, "nominative", "one day", "ein Tag"),
        (1, "accusative", "one day", "einen Tag"),
        (1, "dative", "one day", "einem Tag"),
        (3, "dative", "three days", "drei Tagen"),
        (21, "accusative", "twenty-one days", "einundzwanzig Tage"),
    ]:
        amount = SCRIPT["amount"](n, day, case)
        assert (amount.en, amount.de) == (english, german)


def test_sentences_are_plain_words_and_train_has_all_words() -> None:
    """Hyphenated words count as several words."""
    vocabulary: dict[str, set[str]] = {}
    for split, pairs in NUMBERS.items():
        vocabulary[split] = set(words(" ".join(src for src, _ in pairs)))
    assert vocabulary["valid"] | vocabulary["test"] <= vocabulary["train"]
    for text in itertools.chain.from_iterable(PAIRS):
        assert re.fullmatch(r"[\wäöüß',-]+( [\wäöüß',-]+){0,12}", text)


def test_sizes_are_known_and_no_sentence_occurs_twice() -> None:
    for splits, sizes in ((NUMBERS, (10_000, 300, 500)), (COPY, (5000, 200, 500))):
        assert (len(splits["train"]), len(splits["valid"]), len(splits["test"])) == sizes
        for side in zip(*itertools.chain.from_iterable(splits.values()), strict=True):
            assert len(set(side)) == sum(sizes)


def test_the_copy_corpus_is_short_rows_of_numbers_drawn_by_the_seed() -> None:
    assert load_bundled_corpus(Corpus.copy, seed=0) == COPY
    assert load_bundled_corpus(Corpus.copy, seed=8) != COPY
    for src, tgt in COPY["train"]:
        assert src == tgt
        assert re.fullmatch("([1-9]|10)( ([1-9]|10)){7,11}", src)
