"""Says which script each character belongs to, and which scripts a language is written in.

Whole chunks are looked up in one table. It knows nothing of pairs.
"""

# N lines, C characters of all lines, line ends counted

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

from nmt.errors import ConfigError, nearest

Shares = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

# Scripts of languages with a written press: the code of ISO 15924, and the words that names of
# their letters begin with, where these are not the script's own name. "Other" is every other one.
_CODES = {
    "Latin": "Latn",
    "Greek": "Grek",
    "Cyrillic": "Cyrl",
    "Armenian": "Armn",
    "Georgian": "Geor",
    "Hebrew": "Hebr",
    "Arabic": "Arab",
    "Syriac": "Syrc",
    "Thaana": "Thaa",
    "Devanagari": "Deva",
    "Bengali": "Beng",
    "Gurmukhi": "Guru",
    "Gujarati": "Gujr",
    "Oriya": "Orya",
    "Tamil": "Taml",
    "Telugu": "Telu",
    "Kannada": "Knda",
    "Malayalam": "Mlym",
    "Sinhala": "Sinh",
    "Thai": "Thai",
    "Lao": "Laoo",
    "Tibetan": "Tibt",
    "Myanmar": "Mymr",
    "Khmer": "Khmr",
    "Ethiopic": "Ethi",
    "Mongolian": "Mong",
    "Hangul": "Hang",
    "Hiragana": "Hira",
    "Katakana": "Kana",
    "Bopomofo": "Bopo",
    "Han": "Hani",
    "Tifinagh": "Tfng",
    "Cherokee": "Cher",
    "Other": "Zyyy",
}
NAMES = tuple(_CODES)
_JAPANESE = ("Han", "Hiragana", "Katakana")
_KOREAN = ("Hangul", "Han")
_CHINESE = ("Han", "Bopomofo")
_SEVERAL = {
    "Hans": _CHINESE,
    "Hant": _CHINESE,
    "Jpan": _JAPANESE,
    "Kore": _KOREAN,
    "ja": _JAPANESE,
    "ko": _KOREAN,
    "zh": _CHINESE,
    "yue": _CHINESE,
    "sr": ("Cyrillic", "Latin"),
    "bs": ("Latin", "Cyrillic"),
    "uz": ("Latin", "Cyrillic"),
    "az": ("Latin", "Cyrillic"),
    "kk": ("Cyrillic", "Latin"),
    "ku": ("Latin", "Arabic"),
    "mn": ("Cyrillic", "Mongolian"),
    "pa": ("Gurmukhi", "Arabic"),
    "sd": ("Arabic", "Devanagari"),
    "ks": ("Arabic", "Devanagari"),
}
_BY_SCRIPT = {
    "Latin": (
        "aa af ak an ast ay bi bm br ca ceb ch co crh cs cy da de dsb ee en eo es et eu ff fi fil "
        "fj fo fr fur fy ga gd gl gn gv ha haw hil hr hsb ht hu ia id ie ig ilo io is it jv kg ki "
        "kl kw la lb lg li lmo ln lt lv mg mh mi ms mt na nap nb nd nds nl nn no nr nso nv ny oc "
        "om pap pl pms pt qu rm rn ro rw sc scn sco se sg sh sk sl sm sn so sq ss st su sv sw "
        "sz szl tk tl tn to tpi tr ts tum tw ty ve vec vi vo wa war wo xh yo za zu"
    ),
    "Greek": "el grc",
    "Cyrillic": "ab av ba be bg ce cu cv ky mk os ru sah tg tt udm uk",
    "Armenian": "hy",
    "Georgian": "ka xmf",
    "Hebrew": "he iw yi",
    "Arabic": "ar arz azb ckb fa ps ug ur",
    "Syriac": "syr",
    "Thaana": "dv",
    "Devanagari": "awa bh bho hi hne mai mr ne sa",
    "Bengali": "as bn bpy",
    "Gujarati": "gu",
    "Oriya": "or",
    "Tamil": "ta",
    "Telugu": "te",
    "Kannada": "kn",
    "Malayalam": "ml",
    "Sinhala": "si",
    "Thai": "th",
    "Lao": "lo",
    "Tibetan": "bo dz",
    "Myanmar": "my shn",
    "Khmer": "km",
    "Ethiopic": "am ti",
    "Tifinagh": "zgh",
    "Cherokee": "chr",
}
_BY_LANGUAGE = {code: (name,) for name, codes in _BY_SCRIPT.items() for code in codes.split()}
_WORDS = {name.upper(): name for name in NAMES} | {
    "CJK": "Han",
    "IDEOGRAPHIC": "Han",
    "HENTAIGANA": "Hiragana",
}
_RANGES = (  # of letters that are one like the other, too many to look at one by one
    (0x3400, 0x4DC0, "Han"),
    (0x4E00, 0xA000, "Han"),
    (0xAC00, 0xD7A4, "Hangul"),
    (0x20000, 0x323B0, "Han"),
)
_LAST_LISTED = 0x20000  # what comes above is Han, or no letter


def scripts_of(language: str, key: str) -> tuple[str, ...]:
    """Return the scripts of a language code, such as de, pt_BR, zh-Hant or eng_Latn.

    Raises a `ConfigError` that names `key` for one that is not known.
    """
    first, *rest = re.split("[-_]", language)
    by_code = {code: (name,) for name, code in _CODES.items()} | _SEVERAL
    for part in rest:
        if part.title() in by_code:
            return by_code[part.title()]
    scripts = _SEVERAL.get(first.lower()) or _BY_LANGUAGE.get(first.lower())
    if scripts is None:
        raise ConfigError(
            f"the scripts of the language {language} are not known; name them: {key}=[Latin]"
        )
    return scripts


def check_scripts(names: Sequence[str], key: str) -> None:
    """Raise a `ConfigError` for a script that is not known."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"{key}={name}: no such script; {nearest(name, NAMES)}")


def foreign_shares(texts: Sequence[str], scripts: Sequence[str]) -> Shares:
    """Return the share of letters outside `scripts` in each line (N,); 0 without letters.

    Marks, digits, signs and letters of no script in particular are not counted.
    """
    shares = np.zeros(len(texts))
    joined = "\n".join([*texts, ""])
    codes = np.frombuffer(joined.encode("utf-32-le"), np.uint32)  # (C,)
    is_foreign = _foreign_table(tuple(scripts)).take(codes)
    if not is_foreign.any():
        return shares
    ends = np.flatnonzero(codes == ord("\n"))  # (N,)
    starts = np.concatenate([[0], ends[:-1] + 1])
    num_foreign = np.add.reduceat(is_foreign, starts, dtype=np.int64)
    num_letters = np.add.reduceat(script_table().take(codes) > 0, starts, dtype=np.int64)
    return np.divide(num_foreign, num_letters, out=shares, where=num_letters > 0)


@functools.cache
def script_table() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return, for each code point, the place of its script in `NAMES` from 1, or 0 for none."""
    table = np.zeros(0x110000, np.uint8)
    numbers = {name: number for number, name in enumerate(NAMES, start=1)}
    for start, stop, name in _RANGES:
        table[start:stop] = numbers[name]
    for code in np.flatnonzero(table[:_LAST_LISTED] == 0).tolist():
        table[code] = numbers.get(_script(chr(code)), 0)
    return table


@functools.cache
def _foreign_table(scripts: tuple[str, ...]) -> Flags:
    table = script_table()
    native = [0, *(NAMES.index(name) + 1 for name in scripts)]
    return ~np.isin(table, native)


def _script(letter: str) -> str:
    """Tell the script of a letter by its name in Unicode; "" for what has none."""
    letter = unicodedata.normalize("NFD", letter)[0]  # the sign of kelvin is a K
    category = unicodedata.category(letter)
    if not category.startswith("L"):
        return ""
    word = re.sub("^(FULL|HALF)WIDTH ", "", unicodedata.name(letter, "")).split(" ", 1)[0]
    is_sign = category == "Lm" or unicodedata.decomposition(letter) != ""  # such as that of micro
    return _WORDS.get(word, "" if is_sign else "Other")
