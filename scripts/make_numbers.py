"""Make the numbers corpus that nmt brings along: English and German names of numbers, clock times,
dates and amounts, each with exactly one right answer.

    python scripts/make_numbers.py     writes nmt/data/numbers.tsv.bz2, the same bytes every time

num2words names numbers; babel names months and weekdays (both are in the extra "dev").
"""

from __future__ import annotations

import bz2
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from babel.dates import get_day_names, get_month_names
from num2words import num2words

Pair = tuple[str, str]

OUTPUT = Path(__file__).parents[1] / "nmt/data/numbers.tsv.bz2"
NUM_PAIRS = 10_800  # nmt takes 10,000 for training, 300 for validation and 500 as a test set
MAX_CARDINAL = 9_999
MAX_ORDINAL = 999
FIRST_YEAR, LAST_YEAR = 1900, 2099

_DAYS_OF_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_EN_MONTHS, _DE_MONTHS = (get_month_names(locale=lang) for lang in ("en", "de"))  # from 1
_WEEKDAYS = [(get_day_names(locale="en")[i], get_day_names(locale="de")[i]) for i in range(7)]

_TIME_FRAMES: list[Pair] = [
    ("{}", "{}"),
    ("it is {}", "es ist {}"),
    ("at {}", "um {}"),
    ("the train leaves at {}", "der Zug fährt um {} ab"),
    ("she arrives at {}", "sie kommt um {} an"),
    ("today we eat at {}", "heute essen wir um {}"),
    *((f"on {en} at {{}}", f"am {de} um {{}}") for en, de in _WEEKDAYS),
]
# The article is in the frame, the ending in the second field: "der dritte", but "am dritten".
_DATE_FRAMES = [
    ("the {}", "", "der {}"),
    ("on the {}", "n", "am {}"),
    ("until the {}", "n", "bis zum {}"),
    ("since the {}", "n", "seit dem {}"),
    ("today is the {}", "", "heute ist der {}"),
    ("we will come on the {}", "n", "wir werden am {} kommen"),
    *((f"{en}, the {{}}", "", f"{de}, der {{}}") for en, de in _WEEKDAYS),
    *((f"on {en}, the {{}}", "n", f"am {de}, dem {{}}") for en, de in _WEEKDAYS),
]
_COUNTED: list[Pair] = [
    ("the {} day", "der {} Tag"),
    ("the {} week", "die {} Woche"),
    ("the {} year", "das {} Jahr"),
    ("the {} house", "das {} Haus"),
]


@dataclass(frozen=True)
class Unit:
    """What amounts are counted in; `gender` is the German one: m, f or n."""

    en: str
    en_plural: str
    de: str
    de_plural: str
    de_dative_plural: str
    gender: str


_CENT = Unit("cent", "cents", "Cent", "Cent", "Cent", "m")
_RAPPEN = Unit("rappen", "rappen", "Rappen", "Rappen", "Rappen", "m")
_CURRENCIES = [
    (Unit("euro", "euros", "Euro", "Euro", "Euro", "m"), _CENT),
    (Unit("dollar", "dollars", "Dollar", "Dollar", "Dollar", "m"), _CENT),
    (Unit("franc", "francs", "Franken", "Franken", "Franken", "m"), _RAPPEN),
]
_DURATIONS = [
    Unit("year", "years", "Jahr", "Jahre", "Jahren", "n"),
    Unit("month", "months", "Monat", "Monate", "Monaten", "m"),
    Unit("week", "weeks", "Woche", "Wochen", "Wochen", "f"),
    Unit("day", "days", "Tag", "Tage", "Tagen", "m"),
    Unit("hour", "hours", "Stunde", "Stunden", "Stunden", "f"),
    Unit("minute", "minutes", "Minute", "Minuten", "Minuten", "f"),
    Unit("second", "seconds", "Sekunde", "Sekunden", "Sekunden", "f"),
]
_EIN = {
    "nominative": {"m": "ein", "f": "eine", "n": "ein"},
    "accusative": {"m": "einen", "f": "eine", "n": "ein"},
    "dative": {"m": "einem", "f": "einer", "n": "einem"},
}
_MONEY_FRAMES = [
    ("{}", "nominative", "{}"),
    ("it costs {}", "accusative", "es kostet {}"),
    ("she has paid {}", "accusative", "sie hat {} bezahlt"),
    ("I still have to pay {}", "accusative", "ich muss noch {} bezahlen"),
]
_DURATION_FRAMES = [
    ("{}", "nominative", "{}"),
    ("in {}", "dative", "in {}"),
    ("{} ago", "dative", "vor {}"),
    ("we have waited {}", "accusative", "wir haben {} gewartet"),
]
# No "one metre" here: too few would remain for training after some are held out.
_MEASURE_FRAMES: list[Pair] = [
    ("the wall is {} metres high", "die Mauer ist {} Meter hoch"),
    ("the road is {} kilometres long", "die Straße ist {} Kilometer lang"),
    ("the box weighs {} kilograms", "die Kiste wiegt {} Kilogramm"),
    ("they have drunk {} litres", "sie haben {} Liter getrunken"),
]


def main() -> None:
    """Write the corpus, one pair a line with a tab between the sides."""
    OUTPUT.write_bytes(bz2.compress("".join(f"{en}\t{de}\n" for en, de in generate()).encode()))


def generate(seed: int = 0) -> list[Pair]:
    """Draw pairs; no sentence occurs twice, on either side."""
    rng = random.Random(seed)
    pairs: list[Pair] = []
    seen: set[str] = set()
    while len(pairs) < NUM_PAIRS:
        (draw,) = rng.choices(list(_KINDS), weights=list(_KINDS.values()))
        src, tgt = draw(rng)
        if seen.isdisjoint((src, tgt)):
            pairs.append((src, tgt))
            seen |= {src, tgt}
    # Small numbers use themselves up first: without this the test set would hold most of them.
    rng.shuffle(pairs)
    return pairs


@lru_cache(None)
def cardinal(n: int) -> Pair:
    """Name a number, in English the British way: "one hundred and one", without commas."""
    return num2words(n).replace(",", ""), num2words(n, lang="de")


@lru_cache(None)
def ordinal(n: int) -> Pair:
    """Name a rank, in German in the weak nominative: "der dritte", "die dritte"."""
    # For 100 only, num2words says "hundertste", against its own "einhundert".
    german = "einhundertste" if n == 100 else num2words(n, lang="de", to="ordinal")
    return num2words(n, to="ordinal"), german


@lru_cache(None)
def year(n: int) -> Pair:
    """Name a year in words: "nineteen oh-five", "twenty ten"."""
    return num2words(n, to="year"), num2words(n, lang="de", to="year")


def clock_time(hour: int, minute: int) -> Pair:
    """Name a time on the twelve-hour dial, 1 <= hour <= 12, in both languages."""
    (en_hour, de_hour), (en_next, de_next) = cardinal(hour), cardinal(hour % 12 + 1)
    if minute == 0:
        return f"{en_hour} o'clock", f"{'ein' if hour == 1 else de_hour} Uhr"
    if minute == 30:
        return f"half past {en_hour}", f"halb {de_next}"
    past = minute < 30
    en, de = _minutes(minute if past else 60 - minute)
    english = f"{en} past {en_hour}" if past else f"{en} to {en_next}"
    # Five minutes round the half, German reckons from the half: 3:25 is "fünf vor halb vier".
    if minute in (25, 35):
        return english, f"fünf {'vor' if past else 'nach'} halb {de_next}"
    return english, f"{de} nach {de_hour}" if past else f"{de} vor {de_next}"


def _minutes(minutes: int) -> Pair:
    """Name how far the big hand is from the full hour; fives go without the word "minutes"."""
    if minutes == 15:
        return "a quarter", "Viertel"
    if minutes == 1:
        return "one minute", "eine Minute"
    en, de = cardinal(minutes)
    return (en, de) if minutes % 5 == 0 else (f"{en} minutes", f"{de} Minuten")


def amount(n: int, unit: Unit, case: str) -> Pair:
    """Count `unit`, 1 <= n <= 999; `case` is nominative, accusative or dative.

    The caller avoids numbers such as 101: Germans disagree over "hunderteins Meter".
    """
    if n == 1:
        return f"one {unit.en}", f"{_EIN[case][unit.gender]} {unit.de}"
    en, de = cardinal(n)
    german_unit = unit.de_dative_plural if case == "dative" else unit.de_plural
    return f"{en} {unit.en_plural}", f"{de} {german_unit}"


def _draw_number(rng: random.Random, limit: int) -> int:
    """Draw 1 <= n <= limit with each number of digits equally likely, so that small ones occur."""
    num_digits = rng.randint(1, len(str(limit)))
    return rng.randint(10 ** (num_digits - 1), min(limit, 10**num_digits - 1))


def _draw_count(rng: random.Random, limit: int) -> int:
    """Draw a number that German agrees on how to put before a noun (see `amount`)."""
    n = _draw_number(rng, limit)
    return n + 1 if n > 1 and n % 100 == 1 else n


def _draw_cardinal(rng: random.Random) -> Pair:
    return cardinal(_draw_number(rng, MAX_CARDINAL))


def _draw_decimal(rng: random.Random) -> Pair:
    """Draw a number with one decimal, such as 3.5."""
    (en, de), (en_tenths, de_tenths) = cardinal(rng.randrange(100)), cardinal(rng.randrange(10))
    return f"{en} point {en_tenths}", f"{de} Komma {de_tenths}"


def _draw_ordinal(rng: random.Random) -> Pair:
    en, de = ordinal(_draw_number(rng, MAX_ORDINAL))
    en_frame, de_frame = rng.choice(_COUNTED)
    return en_frame.format(en), de_frame.format(de)


def _draw_time(rng: random.Random) -> Pair:
    # Fives drawn as often as the rest: "halb" and "Viertel" take more learning than "17 minutes".
    minute = 5 * rng.randrange(12) if rng.random() < 0.5 else rng.randrange(60)
    en, de = clock_time(rng.randint(1, 12), minute)
    en_frame, de_frame = rng.choice(_TIME_FRAMES)
    return en_frame.format(en), de_frame.format(de)


def _draw_date(rng: random.Random) -> Pair:
    """Draw a day of a month, in half of the cases with a year."""
    month = rng.randrange(12)
    en_day, de_day = ordinal(rng.randint(1, _DAYS_OF_MONTH[month]))
    en_frame, ending, de_frame = rng.choice(_DATE_FRAMES)
    en, de = f"{en_day} of {_EN_MONTHS[month + 1]}", f"{de_day}{ending} {_DE_MONTHS[month + 1]}"
    if rng.random() < 0.5:
        en_year, de_year = year(rng.randint(FIRST_YEAR, LAST_YEAR))
        en, de = f"{en} {en_year}", f"{de} {de_year}"
    return en_frame.format(en), de_frame.format(de)


def _draw_money(rng: random.Random) -> Pair:
    return _draw_amount(rng, 999, rng.choice(_CURRENCIES), rng.choice(_MONEY_FRAMES))


def _draw_duration(rng: random.Random) -> Pair:
    units = rng.choice(list(pairwise(_DURATIONS)))
    return _draw_amount(rng, 99, units, rng.choice(_DURATION_FRAMES))


def _draw_amount(
    rng: random.Random, limit: int, units: tuple[Unit, Unit], frame: tuple[str, str, str]
) -> Pair:
    """Draw an amount of the first unit, in half of the cases with some of the smaller second."""
    en_frame, case, de_frame = frame
    en, de = amount(_draw_count(rng, limit), units[0], case)
    if rng.random() < 0.5:
        en_part, de_part = amount(_draw_count(rng, 99), units[1], case)
        en, de = f"{en} and {en_part}", f"{de} und {de_part}"
    return en_frame.format(en), de_frame.format(de)


def _draw_measure(rng: random.Random) -> Pair:
    en_frame, de_frame = rng.choice(_MEASURE_FRAMES)
    en, de = cardinal(max(2, _draw_count(rng, 999)))
    return en_frame.format(en), de_frame.format(de)


_KINDS: dict[Callable[[random.Random], Pair], float] = {
    _draw_cardinal: 0.25,
    _draw_decimal: 0.05,
    _draw_ordinal: 0.12,
    _draw_time: 0.20,
    _draw_date: 0.17,
    _draw_money: 0.08,
    _draw_duration: 0.07,
    _draw_measure: 0.06,
}
"""How to draw each kind of pair, and its share of the draws."""


if __name__ == "__main__":
    main()
