"""Codes of languages: which mean the same, what clients know them by, and their English names.

The data are those of the Unicode CLDR, from babel: aliases ("eng" is "en"), the script and the
territory that a language most likely has ("zh" is "zh-Hans-CN"), and names.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from babel import Locale
from babel.core import get_global, parse_locale

_OWN = {"no": "nb", "pb": "pt_BR", "zt": "zh_Hant"}  # LibreTranslate's, and one that CLDR has not
_WITH_SCRIPT = re.compile("[a-z]{3}_[A-Z][a-z]{3}")  # as NLLB and FLORES write codes


class Code(NamedTuple):
    """The parts of a code as CLDR writes them; None for what it does not say."""

    language: str
    script: str | None = None
    territory: str | None = None


@functools.cache
def read(code: str) -> Code:
    """Return the parts that a code names; one that is none is all language."""
    try:
        name = _OWN.get(code.lower(), code.replace("-", "_"))
        language, territory, script = parse_locale(name)[:3]
        alias = parse_locale(get_global("language_aliases").get(language, language))
    except ValueError:
        return Code(code.lower())
    return Code(alias[0], script or alias[2], territory or alias[1])


@functools.cache
def maximize(code: str) -> Code:
    """Return all parts of a code, those that it does not name as they most likely are."""
    language, script, territory = read(code)
    likely, parts = get_global("likely_subtags"), (language, script or territory)
    found = likely.get("_".join(filter(None, parts))) or likely.get(language)
    _, most_territory, most_script = parse_locale(found)[:3] if found else (None, None, None)
    return Code(language, script or most_script, territory or most_territory)


def shorten(codes: AbstractSet[str]) -> dict[str, str]:
    """Return, for the codes of models that name a script ("eng_Latn"), what clients call them
    ("en"); the script stays where there are several of a language ("zh-Hans"). What several codes
    would be called is left out.
    """
    parts = {code: read(code) for code in codes if _WITH_SCRIPT.fullmatch(code)}
    counts = Counter((language, territory) for language, _, territory in parts.values())
    found = {}
    for code, (language, script, territory) in parts.items():
        shown = script if counts[language, territory] > 1 else None
        found[code] = "-".join(filter(None, (language, shown, territory)))
    return {code: short for code, short in found.items() if [*found.values()].count(short) == 1}


def name_of(code: str) -> str:
    """Return the English name of a language, such as "Portuguese (Brazil)"; its code where there is
    none.
    """
    english, (language, script, territory) = Locale("en"), read(code)
    more = [english.scripts.get(script or ""), english.territories.get(territory or "")]
    inside = ", ".join(filter(None, more))
    name = english.languages.get(code) or english.languages.get(language, code)
    return f"{name} ({inside})" if inside and name != code else name
