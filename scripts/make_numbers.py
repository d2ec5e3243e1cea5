"""Make the bundled corpus of numbers: English and German numbers, clock times, dates and amounts.

    python scripts/make_numbers.py     writes nmt/data/numbers.tsv.bz2, the same bytes every time

Each English sentence has exactly one correct German translation. num2words names the numbers, babel
the months and weekdays (both are in the extra "dev").
"""

from __future__ import annotations

import bz2
import random
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from babel.dates import get_day_names, get_month_names
from num2words import num2words


class Pair(NamedTuple):
    """An English and a German text, or two templates with {} for a text."""

    en: str
    de: str

    def fill(self, text: Pair) -> Pair:
        """Insert a text into the templates."""
        return Pair(self.en.format(text.en), self.de.format(text.de))


OUTPUT = Path(__file__).parents[1] / "nmt/data/numbers.tsv.bz2"
NUM_PAIRS = 10_800  # nmt takes 10,000 for training, 300 for validation and 500 as a test set
MAX_CARDINAL = 9_999
MAX_ORDINAL = 999
FIRST_YEAR = 1900
LAST_YEAR = 2099

_DAYS_OF_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_EN_MONTHS = get_month_names(locale="en")  # by number, from 1
_DE_MONTHS = get_month_names(locale="de")


def _for_each_weekday(english: str, german: str) -> list[Pair]:
    """Return the templates for each weekday, which replaces DAY."""
    en_names = get_day_names(locale="en")
    de_names = get_day_names(locale="de")
    templates = []
    for day in range(7):
        en_template = english.replace("DAY", en_names[day])
        templates.append(Pair(en_template, german.replace("DAY", de_names[day])))
    return templates


_TIME_TEMPLATES = [
    Pair("{}", "{}"),
    Pair("it is {}", "es ist {}"),
    Pair("at {}", "um {}"),
    Pair("the train leaves at {}", "der Zug fährt um {} ab"),
    Pair("she arrives at {}", "sie kommt um {} an"),
    Pair("today we eat at {}", "heute essen wir um {}"),
    *_for_each_weekday("on DAY at {}", "am DAY um {}"),
]
# templates and the ending of the German ordinal: "der dritte", but "am dritten"
_DATE_TEMPLATES = [
    (Pair("the {}", "der {}"), ""),
    (Pair("on the {}", "am {}"), "n"),
    (Pair("until the {}", "bis zum {}"), "n"),
    (Pair("since the {}", "seit dem {}"), "n"),
    (Pair("today is the {}", "heute ist der {}"), ""),
    (Pair("we will come on the {}", "wir werden am {} kommen"), "n"),
    *((template, "") for template in _for_each_weekday("DAY, the {}", "DAY, der {}")),
    *((template, "n") for template in _for_each_weekday("on DAY, the {}", "am DAY, dem {}")),
]
_ORDINAL_TEMPLATES = [
    Pair("the {} day", "der {} Tag"),
    Pair("the {} week", "die {} Woche"),
    Pair("the {} year", "das {} Jahr"),
    Pair("the {} house", "das {} Haus"),
]


class Unit(NamedTuple):
    """A unit of amounts; `gender` is the German one: m, f or n."""

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
_INDEFINITE_ARTICLES = {
    "nominative": {"m": "ein", "f": "eine", "n": "ein"},
    "accusative": {"m": "einen", "f": "eine", "n": "ein"},
    "dative": {"m": "einem", "f": "einer", "n": "einem"},
}
# templates and the German case of the amount
_MONEY_TEMPLATES = [
    (Pair("{}", "{}"), "nominative"),
    (Pair("it costs {}", "es kostet {}"), "accusative"),
    (Pair("she has paid {}", "sie hat {} bezahlt"), "accusative"),
    (Pair("I still have to pay {}", "ich muss noch {} bezahlen"), "accusative"),
]
_DURATION_TEMPLATES = [
    (Pair("{}", "{}"), "nominative"),
    (Pair("in {}", "in {}"), "dative"),
    (Pair("{} ago", "vor {}"), "dative"),
    (Pair("we have waited {}", "wir haben {} gewartet"), "accusative"),
]
# no "one metre": too few would remain for training after some are held out
_MEASURE_TEMPLATES = [
    Pair("the wall is {} metres high", "die Mauer ist {} Meter hoch"),
    Pair("the road is {} kilometres long", "die Straße ist {} Kilometer lang"),
    Pair("the box weighs {} kilograms", "die Kiste wiegt {} Kilogramm"),
    Pair("they have drunk {} litres", "sie haben {} Liter getrunken"),
]


def main() -> None:
    """Write the corpus, one pair per line, with a tab between the sides."""
    text = "".join(f"{pair.en}\t{pair.de}\n" for pair in generate())
    OUTPUT.write_bytes(bz2.compress(text.encode()))


def generate(seed: int = 0) -> list[Pair]:
    """Draw pairs; no sentence occurs twice, on either side."""
    rng = random.Random(seed)
    pairs: list[Pair] = []
    sentences: set[str] = set()
    functions = list(_DRAW_WEIGHTS)
    weights = list(_DRAW_WEIGHTS.values())
    while len(pairs) < NUM_PAIRS:
        draw = rng.choices(functions, weights)[0]
        pair = draw(rng)
        if sentences.isdisjoint(pair):
            pairs.append(pair)
            sentences.update(pair)
    # Small numbers are soon used up. Without shuffling, few of them would be in the test set.
    rng.shuffle(pairs)
    return pairs


@lru_cache(None)
def cardinal(n: int) -> Pair:
    """Name a number, in British English without commas: "one hundred and one"."""
    return Pair(num2words(n).replace(",", ""), num2words(n, lang="de"))


@lru_cache(None)
def ordinal(n: int) -> Pair:
    """Name an ordinal number, in German in the weak nominative: "der dritte", "die dritte"."""
    # num2words says "hundertste" for 100, although its cardinal is "einhundert"
    german = "einhundertste" if n == 100 else num2words(n, lang="de", to="ordinal")
    return Pair(num2words(n, to="ordinal"), german)


@lru_cache(None)
def year(n: int) -> Pair:
    """Name a year: "nineteen oh-five", "twenty ten"."""
    return Pair(num2words(n, to="year"), num2words(n, lang="de", to="year"))


def clock_time(hour: int, minute: int) -> Pair:
    """Name a time on a clock face with the hours 1 to 12, in idiomatic English and German."""
    this_hour = cardinal(hour)
    next_hour = cardinal(hour % 12 + 1)
    if minute == 0:
        return Pair(f"{this_hour.en} o'clock", f"{'ein' if hour == 1 else this_hour.de} Uhr")
    if minute == 30:
        return Pair(f"half past {this_hour.en}", f"halb {next_hour.de}")
    if minute < 30:
        minutes = _minutes(minute)
        english = f"{minutes.en} past {this_hour.en}"
        german = f"{minutes.de} nach {this_hour.de}"
    else:
        minutes = _minutes(60 - minute)
        english = f"{minutes.en} to {next_hour.en}"
        german = f"{minutes.de} vor {next_hour.de}"
    # German counts from the half hour if it is five minutes away: 3:25 is "fünf vor halb vier"
    if minute == 25:
        german = f"fünf vor halb {next_hour.de}"
    if minute == 35:
        german = f"fünf nach halb {next_hour.de}"
    return Pair(english, german)


def _minutes(count: int) -> Pair:
    """Name the minutes before or after a full hour; multiples of five omit the word "minutes"."""
    if count == 15:
        return Pair("a quarter", "Viertel")
    if count == 1:
        return Pair("one minute", "eine Minute")
    number = cardinal(count)
    return number if count % 5 == 0 else Pair(f"{number.en} minutes", f"{number.de} Minuten")


def amount(n: int, unit: Unit, case: str) -> Pair:
    """Name an amount, 1 <= n <= 999; `case` is nominative, accusative or dative.

    Callers avoid numbers such as 101: German usage of "hunderteins Meter" is not uniform.
    """
    if n == 1:
        return Pair(f"one {unit.en}", f"{_INDEFINITE_ARTICLES[case][unit.gender]} {unit.de}")
    german_unit = unit.de_dative_plural if case == "dative" else unit.de_plural
    return Pair(f"{{}} {unit.en_plural}", f"{{}} {german_unit}").fill(cardinal(n))


# --- random pairs


def _draw_number(rng: random.Random, limit: int) -> int:
    """Draw 1 <= n <= limit; each number of digits is equally likely, so that small n occur."""
    num_digits = rng.randint(1, len(str(limit)))
    return rng.randint(10 ** (num_digits - 1), min(limit, 10**num_digits - 1))


def _draw_count(rng: random.Random, limit: int) -> int:
    """Draw a number for `amount`: not 101, 201, ..."""
    n = _draw_number(rng, limit)
    return n + 1 if n > 1 and n % 100 == 1 else n


def _draw_cardinal(rng: random.Random) -> Pair:
    return cardinal(_draw_number(rng, MAX_CARDINAL))


def _draw_decimal(rng: random.Random) -> Pair:
    """Draw a number with one decimal, such as 3.5."""
    integer = cardinal(rng.randrange(100))
    tenths = cardinal(rng.randrange(10))
    return Pair(f"{integer.en} point {tenths.en}", f"{integer.de} Komma {tenths.de}")


def _draw_ordinal(rng: random.Random) -> Pair:
    number = ordinal(_draw_number(rng, MAX_ORDINAL))
    return rng.choice(_ORDINAL_TEMPLATES).fill(number)


def _draw_time(rng: random.Random) -> Pair:
    # multiples of five in more than half of the cases: "halb" and "Viertel" take longer to learn
    minute = 5 * rng.randrange(12) if rng.random() < 0.5 else rng.randrange(60)
    time = clock_time(rng.randint(1, 12), minute)
    return rng.choice(_TIME_TEMPLATES).fill(time)


def _draw_date(rng: random.Random) -> Pair:
    """Draw a day of a month, in half of the cases with a year."""
    month = rng.randrange(12)
    day = ordinal(rng.randint(1, _DAYS_OF_MONTH[month]))
    template, ending = rng.choice(_DATE_TEMPLATES)
    english = f"{day.en} of {_EN_MONTHS[month + 1]}"
    german = f"{day.de}{ending} {_DE_MONTHS[month + 1]}"
    if rng.random() < 0.5:
        year_name = year(rng.randint(FIRST_YEAR, LAST_YEAR))
        english += f" {year_name.en}"
        german += f" {year_name.de}"
    return template.fill(Pair(english, german))


def _draw_money(rng: random.Random) -> Pair:
    return _draw_amount(rng, 999, rng.choice(_CURRENCIES), rng.choice(_MONEY_TEMPLATES))


def _draw_duration(rng: random.Random) -> Pair:
    units = rng.choice(list(pairwise(_DURATIONS)))
    return _draw_amount(rng, 99, units, rng.choice(_DURATION_TEMPLATES))


def _draw_amount(
    rng: random.Random, limit: int, units: tuple[Unit, Unit], template_and_case: tuple[Pair, str]
) -> Pair:
    """Draw an amount of the first unit, in half of the cases with one of the smaller second."""
    template, case = template_and_case
    total = amount(_draw_count(rng, limit), units[0], case)
    if rng.random() < 0.5:
        small_amount = amount(_draw_count(rng, 99), units[1], case)
        total = Pair(f"{total.en} and {small_amount.en}", f"{total.de} und {small_amount.de}")
    return template.fill(total)


def _draw_measure(rng: random.Random) -> Pair:
    template = rng.choice(_MEASURE_TEMPLATES)
    return template.fill(cardinal(max(2, _draw_count(rng, 999))))


_DRAW_WEIGHTS: dict[Callable[[random.Random], Pair], float] = {
    _draw_cardinal: 0.25,
    _draw_decimal: 0.05,
    _draw_ordinal: 0.12,
    _draw_time: 0.20,
    _draw_date: 0.17,
    _draw_money: 0.08,
    _draw_duration: 0.07,
    _draw_measure: 0.06,
}


if __name__ == "__main__":
    main()
