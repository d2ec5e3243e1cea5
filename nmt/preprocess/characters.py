"""The characters of many lines as arrays: their counts, words, scripts, and which of them look out
of place; and signatures of lines that case, punctuation and spaces do not change.

No loop here goes over the characters of a text; some go over the different characters in it.
"""

# N lines, C characters of all lines, line ends counted, K different keys

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import regex  # type: ignore[import-untyped]
import xxhash

from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError

Ints = np.ndarray[Any, np.dtype[np.int64]]
Signatures = np.ndarray[Any, np.dtype[np.uint64]]
Shares = np.ndarray[Any, np.dtype[np.float64]]

_LINE_END = 10
_IGNORED = ("P", "Z", "C", "Sk")  # categories: punctuation, spaces, control, accents as quotes
_IS_SPACE = np.zeros(0x110000, dtype=bool)
_IS_SPACE[[code for code in range(0x3001) if chr(code).isspace()]] = True  # the last is U+3000


class CodePoints:
    """The code points of lines without line ends."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._codes, self._starts = _code_points(texts)
        self._counts: Ints = np.bincount(self._codes)  # (largest code point + 1,)
        self._present: Ints = np.flatnonzero(self._counts)

    def tally(self) -> Counter[int]:
        """Count each character, by code point; line ends are none."""
        both = zip(self._present.tolist(), self._counts[self._present].tolist(), strict=True)
        return Counter({code: count for code, count in both if code != _LINE_END})

    def num_words(self) -> int:
        """Count what stands between spaces of any kind."""
        is_space = np.zeros(len(self._codes), dtype=bool)  # (C,)
        for code in self._present[_IS_SPACE[self._present]].tolist():  # two or three as a rule
            is_space |= self._codes == code
        starts = np.count_nonzero(is_space[:-1] & ~is_space[1:])
        return int(starts) + int(len(is_space) > 0 and not is_space[0])

    def signatures(self) -> Signatures:
        """Return a number for each line (N,), the same for lines of the same `normal_form`."""
        weights = np.zeros(len(self._counts), np.uint64)
        weights[self._present] = [_weight(code) for code in self._present.tolist()]
        # a sum, which the order of characters does not change: whoever finds two lines of one
        # signature has to compare their normal forms
        return np.add.reduceat(weights.take(self._codes), self._starts)


def _code_points(texts: Sequence[str]) -> tuple[Ints, Ints]:
    """Return the code points (C,) of lines, each with a line end, and where each starts (N,)."""
    joined = "\n".join([*texts, ""])
    codes = np.frombuffer(joined.encode("utf-32-le"), np.uint32).astype(np.int64)
    return codes, np.concatenate([[0], np.flatnonzero(codes == _LINE_END) + 1])[:-1]


def normal_form(text: str) -> str:
    """Drop punctuation and spaces, ignore case and how a character is composed."""
    return text.translate(_FOLDS)


def is_among(known: Signatures, signatures: Signatures) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which of N signatures are known, (N,); `known` ones are sorted."""
    places = np.searchsorted(known[:-1], signatures)
    return known[places] == signatures if len(known) else np.zeros(len(signatures), bool)


class LineSet:
    """Lines that others are compared with, by `normal_form`; one without letters is like none."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._forms = {normal_form(line) for line in lines} - {""}
        self._signatures = np.unique(CodePoints(lines).signatures())

    def mask(self, lines: Sequence[str]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which of N lines are like one of these, (N,)."""
        found = np.zeros(len(lines), dtype=bool)
        if lines:
            may_match = is_among(self._signatures, CodePoints(lines).signatures())
            for row in np.flatnonzero(may_match).tolist():
                found[row] = normal_form(lines[row]) in self._forms
        return found


class _Folds(dict[int, str]):
    """What `normal_form` makes of each character, found out when it first comes."""

    def __missing__(self, code: int) -> str:
        folded = unicodedata.normalize("NFKD", chr(code)).casefold()
        kept = (c for c in folded if not unicodedata.category(c).startswith(_IGNORED))
        self[code] = "".join(kept)
        return self[code]


_FOLDS = _Folds()


@functools.cache
def _weight(code: int) -> int:
    """Return the sum, modulo 2^64, of a hash of each character of the normal form."""
    hashes = (xxhash.xxh3_64_intdigest(c.encode()) for c in normal_form(chr(code)))
    return sum(hashes) % (1 << 64)


# Scripts of languages with a written press and their codes; languages by the scripts they use
_ISO_15924 = """
Latin Latn, Greek Grek, Cyrillic Cyrl, Armenian Armn, Georgian Geor, Hebrew Hebr, Arabic Arab,
Syriac Syrc, Thaana Thaa, Devanagari Deva, Bengali Beng, Gurmukhi Guru, Gujarati Gujr, Oriya Orya,
Tamil Taml, Telugu Telu, Kannada Knda, Malayalam Mlym, Sinhala Sinh, Thai Thai, Lao Laoo,
Tibetan Tibt, Myanmar Mymr, Khmer Khmr, Ethiopic Ethi, Mongolian Mong, Hangul Hang, Hiragana Hira,
Katakana Kana, Bopomofo Bopo, Han Hani, Tifinagh Tfng, Cherokee Cher"""
_CODES = dict(item.split() for item in _ISO_15924.split(","))
_OTHER = "Other"  # every other script
SCRIPTS = (*_CODES, _OTHER)
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
_BY_LANGUAGE = {
    language: tuple(scripts.split())
    for scripts, languages in (item.split(":") for item in _LANGUAGES.split(";"))
    for language in languages.split()
}
_JOINED = {"Hans": "zh", "Hant": "zh", "Jpan": "ja", "Kore": "ko"}  # codes of several scripts
_BY_CODE = {code: _BY_LANGUAGE[language] for code, language in _JOINED.items()}
_BY_CODE |= {code: (name,) for name, code in _CODES.items()} | {"Zyyy": (_OTHER,)}


def scripts_of(language: str, key: str) -> tuple[str, ...]:
    """Return the scripts of a language code, such as de, pt_BR, zh-Hant or eng_Latn.

    Raises a `ConfigError` that names `key` for one that is not known.
    """
    first, *rest = re.split("[-_]", language)
    for part in rest:
        if part.title() in _BY_CODE:
            return _BY_CODE[part.title()]
    if first.lower() not in _BY_LANGUAGE:
        raise ConfigError(
            f"the scripts of the language {language} are not known; name them: {key}=[Latin]"
        )
    return _BY_LANGUAGE[first.lower()]


@functools.cache
def script_table() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return, for each code point, the place of its script in `SCRIPTS` from 1, or 0 for none.

    Only letters have a script: not marks, digits, signs, raised letters such as the ordinal ª, and
    letters that all scripts share.
    """
    every = np.r_[0:0xD800, 0xE000:0x40000].astype("<u4")  # there are no letters above
    shared = r"[\p{Decomposition_Type=Super}\p{Script=Common}\p{Script=Inherited}]"
    runs = regex.findall(rf"(?V1)[\p{{L}}--{shared}]+", every.tobytes().decode("utf-32-le"))
    letters = "".join(runs)
    table = np.zeros(0x110000, np.uint8)
    table[[*map(ord, letters)]] = len(SCRIPTS)  # the last, other scripts
    for number, name in enumerate(_CODES, start=1):
        table[[*map(ord, "".join(regex.findall(rf"\p{{Script={name}}}+", letters)))]] = number
    return table


def foreign_shares(texts: Sequence[str], scripts: Sequence[str]) -> Shares:
    """Return the share of letters outside `scripts` in each line (N,); 0 without letters."""
    codes, starts = _code_points(texts)
    numbers = script_table().take(codes)  # (C,)
    is_native = np.zeros(len(SCRIPTS) + 1, bool)
    is_native[[0, *(SCRIPTS.index(name) + 1 for name in scripts)]] = True
    num_foreign = np.add.reduceat(~is_native.take(numbers), starts, dtype=np.int64)
    num_letters = np.add.reduceat(numbers > 0, starts, dtype=np.int64)
    return num_foreign / np.maximum(num_letters, 1)


_NUM_SHOWN = 20
_MAIN_SHARE = 0.05  # of the letters: a script with more belongs to the text
_BY_CATEGORY = {"Cc": "control", "Cf": "invisible", "Co": "private use", "Cn": "unassigned"}


def describe_characters(counts: Counter[int], tokenizer: Tokenizer) -> dict[str, Any]:
    """Sum up the characters of one side, counted by code point, for the report.

    `covered_share` counts those that the tokenizer writes without bytes and <unk>.
    """
    table = script_table()
    names = {code: SCRIPTS[table[code] - 1] if table[code] else None for code in counts}
    letters = Counter[str]()
    for code, name in names.items():
        letters[name or ""] += counts[code]
    del letters[""]
    largest = sorted(letters.items(), key=lambda item: (-item[1], item[0]))
    scripts = {name: count / letters.total() for name, count in largest}
    odd = {}
    for code, name in names.items():
        if code == 0xFFFD:
            odd[code] = "replacement"
        elif name is not None and scripts[name] < _MAIN_SHARE:
            odd[code] = "other script"
        elif name is None and (kind := _BY_CATEGORY.get(unicodedata.category(chr(code)))):
            odd[code] = kind
    missing = {tokenizer.unk_id, *tokenizer.byte_ids}
    encoded = zip(counts, tokenizer.encode_batch([chr(code) for code in counts], 1), strict=True)
    # a character that is normalized away has no ids, and lacks no piece
    uncovered = {code: "" for code, ids in encoded if not missing.isdisjoint(ids)}
    total, num_uncovered = counts.total(), sum(counts[code] for code in uncovered)
    return {
        "characters": total,
        "distinct_characters": len(counts),
        "scripts": scripts,
        "covered_share": (total - num_uncovered) / total if total else 1.0,
        "uncovered": _most_frequent(counts, uncovered),
        "odd_characters": sum(counts[code] for code in odd),
        "odd": _most_frequent(counts, odd),
    }


def _most_frequent(counts: dict[int, int], reasons: dict[int, str]) -> list[dict[str, Any]]:
    """Describe the characters that have a reason, with it; the most frequent first."""
    shown = []
    for code in sorted(reasons, key=lambda code: (-counts[code], code))[:_NUM_SHOWN]:
        nameless = _BY_CATEGORY.get(unicodedata.category(chr(code)), "no name")
        name = unicodedata.name(chr(code), "TAB" if code == 9 else nameless)
        shown.append({"code": f"U+{code:04X}", "name": name, "count": counts[code]})
        if reasons[code]:
            shown[-1]["why"] = reasons[code]
    return shown
