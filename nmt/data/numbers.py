"""The numbers corpus: English and German names of numbers, clock times, dates and amounts.

Generated, so it costs nothing and each source has exactly one right answer, yet it holds real
translation: "twenty-one" turns round into "einundzwanzig", "half past three" is "halb vier", verbs
move to the end and "one" takes gender and case. Knows nothing of files and tokenizers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, pairwise

Pair = tuple[str, str]

SIZES = {"train": 10_000, "valid": 300, "test": 500}
MAX_CARDINAL = 9_999
MAX_ORDINAL = 999
FIRST_YEAR, LAST_YEAR = 1900, 2099


def _words(text: str) -> list[str]:
    return text.split()


_EN_SMALL = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_EN_TENS = _words("- - twenty thirty forty fifty sixty seventy eighty ninety")
_EN_ORDINALS = {"one": "first", "two": "second", "three": "third"}
_EN_ORDINALS |= {"five": "fifth", "eight": "eighth", "nine": "ninth", "twelve": "twelfth"}
_DE_SMALL = _words(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
    "fünfzehn sechzehn siebzehn achtzehn neunzehn"
)
_DE_TENS = _words("- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
_DE_ORDINALS = {1: "erste", 3: "dritte", 7: "siebte", 8: "achte"}

_DAYS_OF_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_EN_MONTHS = _words(
    "January February March April May June July August September October November December"
)
_DE_MONTHS = _words(
    "Januar Februar März April Mai Juni Juli August September Oktober November Dezember"
)
_EN_WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_DE_WEEKDAYS = _words("Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag")
_WEEKDAYS = list(zip(_EN_WEEKDAYS, _DE_WEEKDAYS, strict=True))

_TIME_FRAMES: list[Pair] = [
    ("{}", "{}"),
    ("it is {}", "es ist {}"),
    ("at {}", "um {}"),
    ("the train leaves at {}", "der Zug fährt um {} ab"),
    ("she arrives at {}", "sie kommt um {} an"),
    ("today we eat at {}", "heute essen wir um {}"),
    *((f"on {en} at {{}}", f"am {de} um {{}}") for en, de in _WEEKDAYS),
]
# The article stands in the frame, the ending in the second field: "der dritte", but "am dritten".
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
# No "one metre" here: a phrase too rare to be learned from what is left after holding some out.
_MEASURE_FRAMES: list[Pair] = [
    ("the wall is {} metres high", "die Mauer ist {} Meter hoch"),
    ("the road is {} kilometres long", "die Straße ist {} Kilometer lang"),
    ("the box weighs {} kilograms", "die Kiste wiegt {} Kilogramm"),
    ("they have drunk {} litres", "sie haben {} Liter getrunken"),
]


def generate(seed: int = 0) -> dict[str, list[Pair]]:
    """Return train, valid and test pairs; no sentence stands twice, on either side."""
    rng = random.Random(seed)
    pairs: list[Pair] = []
    seen: set[str] = set()
    while len(pairs) < sum(SIZES.values()):
        (draw,) = rng.choices(list(_KINDS), weights=list(_KINDS.values()))
        src, tgt = draw(rng)
        if seen.isdisjoint((src, tgt)):
            pairs.append((src, tgt))
            seen |= {src, tgt}
    # Small numbers use themselves up first: without this the test set would hold most of them.
    rng.shuffle(pairs)
    rest = iter(pairs)
    return {name: list(islice(rest, size)) for name, size in SIZES.items()}


def english_cardinal(n: int) -> str:
    """Name 0 <= n <= 9,999, the British way: "one hundred and one", without commas."""
    if n < 20:
        return _EN_SMALL[n]
    if n < 100:
        tens, ones = divmod(n, 10)
        return _EN_TENS[tens] + (f"-{_EN_SMALL[ones]}" if ones else "")
    size, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    count, rest = divmod(n, size)
    head = f"{_EN_SMALL[count]} {name}"
    if not rest:
        return head
    return f"{head} {'and ' if rest < 100 else ''}{english_cardinal(rest)}"


def german_cardinal(n: int) -> str:
    """Name 0 <= n <= 9,999 in one word, ones before tens: 21 is "einundzwanzig"."""
    if n < 20:
        return _DE_SMALL[n]
    if n < 100:
        tens, ones = divmod(n, 10)
        return (f"{_german_prefix(ones)}und" if ones else "") + _DE_TENS[tens]
    size, name = (1000, "tausend") if n >= 1000 else (100, "hundert")
    count, rest = divmod(n, size)
    return f"{_german_prefix(count)}{name}" + (german_cardinal(rest) if rest else "")


def _german_prefix(digit: int) -> str:
    return "ein" if digit == 1 else _DE_SMALL[digit]


def english_ordinal(n: int) -> str:
    """Name the rank of 1 <= n <= 9,999: only the last word changes."""
    cardinal = english_cardinal(n)
    cut = max(cardinal.rfind(" "), cardinal.rfind("-")) + 1
    last = cardinal[cut:]
    regular = f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th"
    return cardinal[:cut] + _EN_ORDINALS.get(last, regular)


def german_ordinal(n: int) -> str:
    """Name the rank of 1 <= n <= 9,999 in the weak nominative: "der dritte", "die dritte"."""
    rest = n % 100
    if rest in _DE_ORDINALS:
        return (german_cardinal(n - rest) if n > rest else "") + _DE_ORDINALS[rest]
    return german_cardinal(n) + ("te" if 0 < rest < 20 else "ste")


def english_year(year: int) -> str:
    """Name a year from 1900 to 2099 as it is read aloud: "nineteen oh-five", "twenty ten"."""
    century, rest = divmod(year, 100)
    if century == 20 and rest < 10:
        return english_cardinal(year)
    if rest == 0:
        return f"{english_cardinal(century)} hundred"
    tail = f"oh-{_EN_SMALL[rest]}" if rest < 10 else english_cardinal(rest)
    return f"{english_cardinal(century)} {tail}"


def german_year(year: int) -> str:
    """Name a year from 1900 to 2099: counted in hundreds before 2000 only."""
    century, rest = divmod(year, 100)
    if century == 20:
        return german_cardinal(year)
    return f"{german_cardinal(century)}hundert" + (german_cardinal(rest) if rest else "")


def clock_time(hour: int, minute: int) -> Pair:
    """Name a time on the twelve-hour dial, 1 <= hour <= 12, in both languages."""
    after = hour % 12 + 1
    if minute == 0:
        return f"{_EN_SMALL[hour]} o'clock", f"{_german_prefix(hour)} Uhr"
    if minute == 30:
        return f"half past {_EN_SMALL[hour]}", f"halb {_DE_SMALL[after]}"
    past = minute < 30
    named = hour if past else after
    en, de = _minutes(minute if past else 60 - minute)
    # Five minutes round the half, German reckons from the half: 3:25 is "fünf vor halb vier".
    if minute in (25, 35):
        german = f"fünf {'vor' if past else 'nach'} halb {_DE_SMALL[after]}"
    else:
        german = f"{de} {'nach' if past else 'vor'} {_DE_SMALL[named]}"
    return f"{en} {'past' if past else 'to'} {_EN_SMALL[named]}", german


def _minutes(minutes: int) -> Pair:
    """Name how far the big hand is from the full hour; fives go without the word "minutes"."""
    if minutes == 15:
        return "a quarter", "Viertel"
    if minutes == 1:
        return "one minute", "eine Minute"
    en, de = english_cardinal(minutes), german_cardinal(minutes)
    return (en, de) if minutes % 5 == 0 else (f"{en} minutes", f"{de} Minuten")


def amount(n: int, unit: Unit, case: str) -> Pair:
    """Count `unit`, 1 <= n <= 999; `case` is nominative, accusative or dative.

    The caller avoids numbers such as 101: Germans disagree over "hunderteins Meter".
    """
    if n == 1:
        return f"one {unit.en}", f"{_EIN[case][unit.gender]} {unit.de}"
    german_unit = unit.de_dative_plural if case == "dative" else unit.de_plural
    return (
        f"{english_cardinal(n)} {unit.en_plural}",
        f"{german_cardinal(n)} {german_unit}",
    )


def _draw_number(rng: random.Random, limit: int) -> int:
    """Draw 1 <= n <= limit with each number of digits equally likely, so that small ones occur."""
    num_digits = rng.randint(1, len(str(limit)))
    return rng.randint(10 ** (num_digits - 1), min(limit, 10**num_digits - 1))


def _draw_count(rng: random.Random, limit: int) -> int:
    """Draw a number that German agrees on how to put before a noun (see `amount`)."""
    n = _draw_number(rng, limit)
    return n + 1 if n > 1 and n % 100 == 1 else n


def _draw_cardinal(rng: random.Random) -> Pair:
    n = _draw_number(rng, MAX_CARDINAL)
    return english_cardinal(n), german_cardinal(n)


def _draw_decimal(rng: random.Random) -> Pair:
    """Draw a number with one decimal, such as 3.5."""
    whole, tenths = rng.randrange(100), rng.randrange(10)
    en = f"{english_cardinal(whole)} point {_EN_SMALL[tenths]}"
    return en, f"{german_cardinal(whole)} Komma {_DE_SMALL[tenths]}"


def _draw_ordinal(rng: random.Random) -> Pair:
    n = _draw_number(rng, MAX_ORDINAL)
    en_frame, de_frame = rng.choice(_COUNTED)
    return en_frame.format(english_ordinal(n)), de_frame.format(german_ordinal(n))


def _draw_time(rng: random.Random) -> Pair:
    # Fives drawn as often as the rest: "halb" and "Viertel" take more learning than "17 minutes".
    minute = 5 * rng.randrange(12) if rng.random() < 0.5 else rng.randrange(60)
    en, de = clock_time(rng.randint(1, 12), minute)
    en_frame, de_frame = rng.choice(_TIME_FRAMES)
    return en_frame.format(en), de_frame.format(de)


def _draw_date(rng: random.Random) -> Pair:
    """Draw a day of a month, in half of the cases with a year."""
    month = rng.randrange(12)
    day = rng.randint(1, _DAYS_OF_MONTH[month])
    en_frame, ending, de_frame = rng.choice(_DATE_FRAMES)
    en = f"{english_ordinal(day)} of {_EN_MONTHS[month]}"
    de = f"{german_ordinal(day)}{ending} {_DE_MONTHS[month]}"
    if rng.random() < 0.5:
        year = rng.randint(FIRST_YEAR, LAST_YEAR)
        en, de = f"{en} {english_year(year)}", f"{de} {german_year(year)}"
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
    n = max(2, _draw_count(rng, 999))
    return en_frame.format(english_cardinal(n)), de_frame.format(german_cardinal(n))


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
