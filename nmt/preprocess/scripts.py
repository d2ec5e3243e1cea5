"""Scripts (writing systems) of letters and of languages."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import regex  # type: ignore[import-untyped]

from nmt.errors import ConfigError

# the names of common scripts, with their codes in ISO 15924
_ISO_15924 = """
Latin Latn, Greek Grek, Cyrillic Cyrl, Armenian Armn, Georgian Geor, Hebrew Hebr, Arabic Arab,
Syriac Syrc, Thaana Thaa, Devanagari Deva, Bengali Beng, Gurmukhi Guru, Gujarati Gujr, Oriya Orya,
Tamil Taml, Telugu Telu, Kannada Knda, Malayalam Mlym, Sinhala Sinh, Thai Thai, Lao Laoo,
Tibetan Tibt, Myanmar Mymr, Khmer Khmr, Ethiopic Ethi, Mongolian Mong, Hangul Hang, Hiragana Hira,
Katakana Kana, Bopomofo Bopo, Han Hani, Tifinagh Tfng, Cherokee Cher"""
_ISO_CODES = dict(script_and_code.split() for script_and_code in _ISO_15924.split(","))
_OTHER = "Other"  # any script that is not in the list
SCRIPTS = (*_ISO_CODES, _OTHER)
SCRIPT_BY_NUMBER = ("", *SCRIPTS)  # characters without a script have the number 0

# the languages that are written in these scripts
_LANGUAGES = """
Latin: aa af ak an ast ay bi bm br ca ceb ch co crh cs cy da de dsb ee en eo es et eu ff fi fil fj
fo fr fur fy ga gd gl gn gv ha haw hil hr hsb ht hu ia id ie ig ilo io is it jv kg ki kl kw la lb
lg li lmo ln lt lv mg mh mi ms mt na nap nb nd nds nl nn no nr nso nv ny oc om pap pl pms pt qu rm
rn ro rw sc scn sco se sg sh sk sl sm sn so sq ss st su sv sw sz szl tk tl tn to tpi tr ts tum tw
ty ve vec vi vo wa war wo xh yo za zu; Greek: el grc; Cyrillic: ab av ba be bg ce cu cv ky mk os ru
sah tg tt udm uk; Armenian: hy; Georgian: ka xmf; Hebrew: he iw yi; Arabic: ar arz azb ckb fa ps ug
ur; Syriac: syr; Thaana: dv; Devanagari: awa bh bho hi hne mai mr ne sa; Bengali: as bn bpy;
Gujarati: gu; Oriya: or; Tamil: ta; Telugu: te; Kannada: kn; Malayalam: ml; Sinhala: si; Thai: th;
Lao: lo; Tibetan: bo dz; Myanmar: my shn; Khmer: km; Ethiopic: am ti; Tifinagh: zgh; Cherokee: chr;
Han Hiragana Katakana: ja; Hangul Han: ko; Han Bopomofo: zh yue; Latin Cyrillic: bs uz az; Cyrillic
Latin: sr kk; Latin Arabic: ku; Cyrillic Mongolian: mn; Gurmukhi Arabic: pa; Arabic Devanagari: sd
ks"""
_SCRIPTS_BY_LANGUAGE: dict[str, tuple[str, ...]] = {}
for _scripts_and_languages in _LANGUAGES.split(";"):
    _scripts, _languages = _scripts_and_languages.split(":")
    for _language in _languages.split():
        _SCRIPTS_BY_LANGUAGE[_language] = tuple(_scripts.split())

_SCRIPTS_BY_CODE = {
    **{code: (script,) for script, code in _ISO_CODES.items()},
    "Zyyy": (_OTHER,),  # the code of an undetermined script
    # codes of several scripts
    "Hans": _SCRIPTS_BY_LANGUAGE["zh"],
    "Hant": _SCRIPTS_BY_LANGUAGE["zh"],
    "Jpan": _SCRIPTS_BY_LANGUAGE["ja"],
    "Kore": _SCRIPTS_BY_LANGUAGE["ko"],
}


def scripts_of(language: str, key: str) -> tuple[str, ...]:
    """Return the scripts of a language with a code such as de, pt_BR, zh-Hant or eng_Latn.

    Raises `ConfigError` for unknown languages, with advice to set the option `key`.
    """
    code, *subtags = re.split("[-_]", language)
    for subtag in subtags:  # a script such as Hant has priority over the language
        if subtag.title() in _SCRIPTS_BY_CODE:
            return _SCRIPTS_BY_CODE[subtag.title()]
    if code.lower() not in _SCRIPTS_BY_LANGUAGE:
        raise ConfigError(
            f"the scripts of the language {language} are not known; name them: {key}=[Latin]"
        )
    return _SCRIPTS_BY_LANGUAGE[code.lower()]


@functools.cache
def script_numbers() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the number of the script of each code point: an index into `SCRIPT_BY_NUMBER`.

    Only letters have a script. Superscript letters such as the ordinal ª, and letters that several
    scripts share, have none.
    """
    # without the surrogates, which cannot be decoded; there are no letters from 0x40000 on
    code_points = [*range(0xD800), *range(0xE000, 0x40000)]
    all_characters = "".join(map(chr, code_points))
    excluded = r"[\p{Decomposition_Type=Super}\p{Script=Common}\p{Script=Inherited}]"
    letters = "".join(regex.findall(rf"(?V1)[\p{{L}}--{excluded}]+", all_characters))
    numbers = np.zeros(0x110000, np.uint8)
    numbers[list(map(ord, letters))] = SCRIPT_BY_NUMBER.index(_OTHER)
    for name in _ISO_CODES:
        script_letters = "".join(regex.findall(rf"\p{{Script={name}}}+", letters))
        numbers[list(map(ord, script_letters))] = SCRIPT_BY_NUMBER.index(name)
    return numbers
