"""Make the bundled corpus of numbers: English and German numbers, clock times, dates and amounts.

    python scripts/make_numbers.py                         writes nmt/data/numbers.tsv.bz2
    python scripts/make_numbers.py --align a.en a.de       prints the true word alignment of lines

The corpus has the same bytes every time. An alignment is a list of pairs of words, counted from 0:
"half past one" and "halb zwei" have 0-0 1-0 2-1.

Each English sentence has exactly one correct German translation. num2words names the numbers, babel
the months and weekdays (both are in the extra "dev").
"""

from __future__ import annotations

import bz2
import itertools
import random
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from babel.dates import get_day_names, get_month_names
from num2words import num2words

Link = tuple[int, int]
"""The numbers of an English word and of a German word that translate each other, from 0."""


class Pair(NamedTuple):
    """An English and a German text, or two templates with {} for a text."""

    en: str
    de: str
    alignment: str = ""
    """Links such as "0-0 1-2". Without it, words are linked in their order if both texts have the
    same number of words, and each word with each word otherwise.
    """

    @property
    def links(self) -> list[Link]:
        """The links of the alignment."""
        if self.alignment:
            pairs = [link.split("-") for link in self.alignment.split()]
            return [(int(en), int(de)) for en, de in pairs]
        num_en = len(self.en.split())
        num_de = len(self.de.split())
        if num_en == num_de:
            return [(i, i) for i in range(num_en)]
        return list(itertools.product(range(num_en), range(num_de)))

    def fill(self, text: Pair) -> Pair:
        """Insert a text into the templates."""
        en_slot = _find_slot(self.en)
        de_slot = _find_slot(self.de)
        num_en = len(text.en.split())
        num_de = len(text.de.split())
        links = []
        for en, de in self.links:
            if (en, de) == (en_slot, de_slot):
                links += [(en_slot + i, de_slot + j) for i, j in text.links]
            elif en != en_slot and de != de_slot:
                # the text replaces one word, so the words after it move by its length - 1
                if en > en_slot:
                    en += num_en - 1
                if de > de_slot:
                    de += num_de - 1
                links.append((en, de))
        return Pair(self.en.format(text.en), self.de.format(text.de), write_links(links))


def _find_slot(template: str) -> int:
    """Return the number of the word {} in a template."""
    return template.split().index("{}")


def write_links(links: Iterable[Link]) -> str:
    """Return links as text: "0-0 1-2"."""
    return " ".join(f"{en}-{de}" for en, de in sorted(links))


def join_pairs(*pairs: Pair) -> Pair:
    """Return pairs one after the other, with spaces between them."""
    links = []
    num_en = 0
    num_de = 0
    for pair in pairs:
        links += [(num_en + en, num_de + de) for en, de in pair.links]
        num_en += len(pair.en.split())
        num_de += len(pair.de.split())
    english = " ".join(pair.en for pair in pairs)
    german = " ".join(pair.de for pair in pairs if pair.de)
    return Pair(english, german, write_links(links))


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
    Pair("the train leaves at {}", "der Zug fährt um {} ab", "0-0 1-1 2-2 2-5 3-3 4-4"),
    Pair("she arrives at {}", "sie kommt um {} an", "0-0 1-1 1-4 2-2 3-3"),
    Pair("today we eat at {}", "heute essen wir um {}", "0-0 1-2 2-1 3-3 4-4"),
    *_for_each_weekday("on DAY at {}", "am DAY um {}"),
]
# templates and the ending of the German ordinal: "der dritte", but "am dritten"
_DATE_TEMPLATES = [
    (Pair("the {}", "der {}"), ""),
    (Pair("on the {}", "am {}", "0-0 1-0 2-1"), "n"),
    (Pair("until the {}", "bis zum {}"), "n"),
    (Pair("since the {}", "seit dem {}"), "n"),
    (Pair("today is the {}", "heute ist der {}"), ""),
    (Pair("we will come on the {}", "wir werden am {} kommen", "0-0 1-1 2-4 3-2 4-2 5-3"), "n"),
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
    (Pair("she has paid {}", "sie hat {} bezahlt", "0-0 1-1 2-3 3-2"), "accusative"),
    (
        Pair("I still have to pay {}", "ich muss noch {} bezahlen", "0-0 1-2 2-1 3-1 4-4 5-3"),
        "accusative",
    ),
]
_DURATION_TEMPLATES = [
    (Pair("{}", "{}"), "nominative"),
    (Pair("in {}", "in {}"), "dative"),
    (Pair("{} ago", "vor {}", "0-1 1-0"), "dative"),
    (Pair("we have waited {}", "wir haben {} gewartet", "0-0 1-1 2-3 3-2"), "accusative"),
]
# no "one metre": too few would remain for training after some are held out
_MEASURE_TEMPLATES = [
    Pair("the wall is {} metres high", "die Mauer ist {} Meter hoch"),
    Pair("the road is {} kilometres long", "die Straße ist {} Kilometer lang"),
    Pair("the box weighs {} kilograms", "die Kiste wiegt {} Kilogramm"),
    Pair("they have drunk {} litres", "sie haben {} Liter getrunken", "0-0 1-1 2-4 3-2 4-3"),
]


def main() -> None:
    """Write the corpus, one pair per line, with a tab between the sides; or print alignments."""
    if sys.argv[1:2] == ["--align"]:
        print_alignments(*map(Path, sys.argv[2:]))
        return
    text = "".join(f"{pair.en}\t{pair.de}\n" for pair in generate())
    OUTPUT.write_bytes(bz2.compress(text.encode()))


def print_alignments(en_file: Path, de_file: Path) -> None:
    """Print the true word alignment of each line of the corpus."""
    alignments = {(pair.en, pair.de): pair.alignment for pair in generate()}
    en_lines = en_file.read_text(encoding="utf-8").splitlines()
    de_lines = de_file.read_text(encoding="utf-8").splitlines()
    for pair in zip(en_lines, de_lines, strict=True):
        print(alignments[pair])


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
        if sentences.isdisjoint([pair.en, pair.de]):
            pairs.append(pair._replace(alignment=write_links(pair.links)))
            sentences.update([pair.en, pair.de])
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


_HALF = "0-0 0-2 1-1 2-3"  # "twenty-five past three" and "fünf vor halb vier"


def clock_time(hour: int, minute: int) -> Pair:
    """Name a time on a clock face with the hours 1 to 12, in idiomatic English and German."""
    this_hour = cardinal(hour)
    next_hour = cardinal(hour % 12 + 1)
    if minute == 0:
        german_hour = "ein" if hour == 1 else this_hour.de  # "ein Uhr", not "eins Uhr"
        return Pair(f"{this_hour.en} o'clock", f"{german_hour} Uhr")
    if minute == 30:
        return Pair(f"half past {this_hour.en}", f"halb {next_hour.de}", "0-0 1-0 2-1")
    # German counts from the half hour if it is five minutes away: 3:25 is "fünf vor halb vier"
    if minute == 25:
        return Pair(f"twenty-five past {this_hour.en}", f"fünf vor halb {next_hour.de}", _HALF)
    if minute == 35:
        return Pair(f"twenty-five to {next_hour.en}", f"fünf nach halb {next_hour.de}", _HALF)
    if minute < 30:
        return join_pairs(_minutes(minute), Pair("past", "nach"), this_hour)
    return join_pairs(_minutes(60 - minute), Pair("to", "vor"), next_hour)


def _minutes(count: int) -> Pair:
    """Name the minutes before or after a full hour; multiples of five omit the word "minutes"."""
    if count == 15:
        return Pair("a quarter", "Viertel")
    if count == 1:
        return Pair("one minute", "eine Minute")
    number = cardinal(count)
    if count % 5 == 0:
        return number
    return join_pairs(number, Pair("minutes", "Minuten"))


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
    """Draw n from 1 to `limit`. Each number of digits is equally likely, so that small n occur."""
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
    return join_pairs(integer, Pair("point", "Komma"), tenths)


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
    day = Pair(day.en, f"{day.de}{ending}")
    date = join_pairs(day, Pair("of", ""), Pair(_EN_MONTHS[month + 1], _DE_MONTHS[month + 1]))
    if rng.random() < 0.5:
        date = join_pairs(date, year(rng.randint(FIRST_YEAR, LAST_YEAR)))
    return template.fill(date)


def _draw_money(rng: random.Random) -> Pair:
    return _draw_amount(rng, 999, rng.choice(_CURRENCIES), rng.choice(_MONEY_TEMPLATES))


def _draw_duration(rng: random.Random) -> Pair:
    units = rng.choice(list(pairwise(_DURATIONS)))
    return _draw_amount(rng, 99, units, rng.choice(_DURATION_TEMPLATES))


def _draw_amount(
    rng: random.Random, limit: int, units: tuple[Unit, Unit], template_and_case: tuple[Pair, str]
) -> Pair:
    """Draw an amount of `units[0]`, in half of the cases followed by an amount of `units[1]`.

    The second unit is smaller, as in "two hours and five minutes".
    """
    template, case = template_and_case
    total = amount(_draw_count(rng, limit), units[0], case)
    if rng.random() < 0.5:
        small_amount = amount(_draw_count(rng, 99), units[1], case)
        total = join_pairs(total, Pair("and", "und"), small_amount)
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
