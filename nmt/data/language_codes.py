"""Language codes: parse and compare them, shorten them for clients, and name them in English.

The data is from the Unicode CLDR, through babel: aliases ("eng" is "en"), likely subtags ("zh" is
most likely "zh-Hans-CN") and names.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from babel import Locale
from babel.core import get_global, parse_locale

from nmt.data.languages import DEFAULT_LANGUAGES

# codes that CLDR has no alias for; LibreTranslate uses "pb" and "zt"
_ALIASES = {"no": "nb", "pb": "pt_BR", "zt": "zh_Hant"}
_CODE_WITH_SCRIPT = re.compile("[a-z]{3}_[A-Z][a-z]{3}")  # codes of NLLB and FLORES


class Code(NamedTuple):
    """The subtags of a code, as CLDR writes them; None for a missing subtag."""

    language: str
    script: str | None = None
    territory: str | None = None


@functools.cache
def parse_code(code: str) -> Code:
    """Split a code into language, script and territory. An invalid code is a language."""
    try:
        name = _ALIASES.get(code.lower(), code.replace("-", "_"))
        language, territory, script = parse_locale(name)[:3]
        alias = get_global("language_aliases").get(language, language)
        alias_language, alias_territory, alias_script = parse_locale(alias)[:3]
    except ValueError:
        return Code(code.lower())
    return Code(alias_language, script or alias_script, territory or alias_territory)


@functools.cache
def add_likely_subtags(code: str) -> Code:
    """Add the likely script and territory to a code if it lacks them."""
    language, script, territory = parse_code(code)
    likely_subtags = get_global("likely_subtags")  # such as "zh_Hant": "zh_Hant_TW"
    subtag = script or territory
    key = f"{language}_{subtag}" if subtag else language
    likely = likely_subtags.get(key) or likely_subtags.get(language)
    if likely is None:
        return Code(language, script, territory)
    _, likely_territory, likely_script = parse_locale(likely)[:3]
    return Code(language, script or likely_script, territory or likely_territory)


def shorten_codes(codes: AbstractSet[str]) -> dict[str, str]:
    """Map each code with a script to its usual short code: "eng_Latn" to "en".

    If `codes` has a language with several scripts, the short code has the script: "zh-Hans". Codes
    with the same short code are left out.
    """
    parsed = {code: parse_code(code) for code in codes if _CODE_WITH_SCRIPT.fullmatch(code)}
    # number of scripts of each language in `codes`
    num_scripts = Counter((language, territory) for language, _, territory in parsed.values())
    short_codes = {}
    for code, (language, script, territory) in parsed.items():
        if num_scripts[language, territory] == 1:
            script = None
        short_codes[code] = "-".join(filter(None, [language, script, territory]))
    num_uses = Counter(short_codes.values())
    return {code: short for code, short in short_codes.items() if num_uses[short] == 1}


def language_name(code: str) -> str:
    """Return the English name of a language, such as "Portuguese (Brazil)", or else its code."""
    if code in DEFAULT_LANGUAGES:  # no language is set; CLDR has the name Sardinian for src
        return code
    english = Locale("en")
    language, script, territory = parse_code(code)
    name = english.languages.get(language, code)
    script_name = english.scripts.get(script or "")
    territory_name = english.territories.get(territory or "")
    detail = ", ".join(filter(None, [script_name, territory_name]))
    if not detail:
        # CLDR names "no" Norwegian, but `parse_code` replaces it by "nb", Norwegian Bokmål
        return str(english.languages.get(code, name))
    if name == code:  # CLDR has no name
        return code
    return f"{name} ({detail})"
