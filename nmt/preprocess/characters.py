"""What the characters of a text tell: their scripts, which of them the tokenizer has no piece for,
and which look out of place.
"""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np

from nmt.data.tokenizer import Tokenizer
from nmt.preprocess.scripts import NAMES, script_table
from nmt.preprocess.tally import Tally

_NUM_SHOWN = 20
_MAIN_SHARE = 0.05  # of the letters: a script with more belongs to the text
_BY_CATEGORY = {
    "Cc": "control",
    "Cf": "invisible",
    "Co": "private use",
    "Cn": "unassigned",
    "Cs": "half of a pair",
}
_REPLACEMENT = 0xFFFD
_OTHER = "other script"


def describe_characters(characters: Tally, tokenizer: Tokenizer) -> dict[str, Any]:
    """Sum up the characters of one side for the report.

    `covered_share` counts those that the tokenizer writes without bytes and <unk>.
    """
    numbers = script_table().take(characters.keys).tolist()
    names = [NAMES[number - 1] if number else None for number in numbers]
    scripts = _scripts(characters, names)
    main = {name for name, share in scripts.items() if share >= _MAIN_SHARE}
    codes = characters.keys.tolist()
    kinds = {code: _oddity(code, name, main) for code, name in zip(codes, names, strict=True)}
    odd = {code: kind for code, kind in kinds.items() if kind is not None}
    is_odd = np.isin(characters.keys, list(odd))
    is_covered = _covered(characters, tokenizer)
    total = characters.total
    return {
        "characters": total,
        "distinct_characters": len(characters.keys),
        "scripts": scripts,
        "covered_share": float(characters.counts[is_covered].sum() / total) if total else 1.0,
        "uncovered": _most_frequent(
            characters, dict.fromkeys(characters.keys[~is_covered].tolist(), "")
        ),
        "odd_characters": int(characters.counts[is_odd].sum()),
        "odd": _most_frequent(characters, odd),
    }


def _scripts(characters: Tally, names: list[str | None]) -> dict[str, float]:
    """Return the share of each script among the letters, the largest first."""
    counts: dict[str, int] = {}
    for name, count in zip(names, characters.counts.tolist(), strict=True):
        if name is not None:
            counts[name] = counts.get(name, 0) + count
    total = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {name: count / total for name, count in ordered}


def _oddity(code: int, script: str | None, main: set[str]) -> str | None:
    if code == _REPLACEMENT:
        return "replacement"
    if script is not None:
        return None if script in main else _OTHER
    return _BY_CATEGORY.get(unicodedata.category(chr(code)))


def _covered(characters: Tally, tokenizer: Tokenizer) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Say of every character whether its ids are pieces; one that is normalised away has none."""
    missing = {tokenizer.unk_id, *tokenizer.byte_ids}
    encoded = tokenizer.encode_batch([chr(code) for code in characters.keys.tolist()], 1)
    return np.array([missing.isdisjoint(ids) for ids in encoded], dtype=bool)


def _most_frequent(characters: Tally, reasons: dict[int, str]) -> list[dict[str, Any]]:
    """Describe the characters that have a reason, with it; the most frequent first."""
    counts = dict(zip(characters.keys.tolist(), characters.counts.tolist(), strict=True))
    codes = sorted(reasons, key=lambda code: (-counts[code], code))[:_NUM_SHOWN]
    return [
        {
            "code": f"U+{code:04X}",
            "name": unicodedata.name(chr(code), _nameless(code)),
            "count": counts[code],
            **({"why": reasons[code]} if reasons[code] else {}),
        }
        for code in codes
    ]


def _nameless(code: int) -> str:
    return "TAB" if code == 9 else _BY_CATEGORY.get(unicodedata.category(chr(code)), "no name")
