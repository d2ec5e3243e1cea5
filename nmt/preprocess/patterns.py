"""File names with * and ? become the files they stand for, those of two sides in the same order.

Knows names alone; what is in the files is for others.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence

from nmt.errors import DataError

STDIN = "-"
Parts = tuple[str, ...]  # what the wildcards of a pattern stand for in one name


def expand(names: Sequence[str]) -> list[str]:
    """List the files that names and patterns stand for; a pattern that matches none is a
    `DataError`.
    """
    return [file for name in names for file in _find(name).values()]


def pair_up(src: Sequence[str], tgt: Sequence[str], key: str) -> list[tuple[str, str]]:
    """Pair the files of two sides, one after the other.

    Of two patterns, files belong together where the wildcards stand for the same text, as in
    `news-*.en` and `news-*.de`. Raises `DataError` for files without a counterpart; `key` names the
    setting.
    """
    if len(src) == len(tgt):
        pairs = [_match(_find(one), _find(other)) for one, other in zip(src, tgt, strict=True)]
        return [pair for some in pairs for pair in some]
    return _in_order(expand(src), expand(tgt), key)


def _match(src: dict[Parts, str], tgt: dict[Parts, str]) -> list[tuple[str, str]]:
    if src.keys() == tgt.keys():
        return [(name, tgt[parts]) for parts, name in src.items()]
    if src.keys() & tgt.keys():
        alone = min([*(src[p] for p in src.keys() - tgt), *(tgt[p] for p in tgt.keys() - src)])
        raise DataError(f"{alone} has no counterpart on the other side; add it or name the files")
    return _in_order(list(src.values()), list(tgt.values()), "src and tgt")


def _in_order(src: list[str], tgt: list[str], key: str) -> list[tuple[str, str]]:
    if len(src) != len(tgt):
        raise DataError(
            f"{key}: {len(src)} source files ({src[0]} ...), {len(tgt)} target files "
            f"({tgt[0]} ...); name as many on both sides"
        )
    return list(zip(src, tgt, strict=True))


def _find(name: str) -> dict[Parts, str]:
    """Return the files that a name or pattern stands for, in the order of their names."""
    path = os.path.expanduser(name)
    if name == STDIN or not re.search(r"[*?]", name) or os.path.exists(path):
        return {(): name}
    found = sorted(p for p in glob.glob(path.replace("[", "[[]")) if not os.path.isdir(p))
    if not found:
        raise DataError(f"{name} matches no file; check the pattern")
    wild = re.compile(re.escape(path).replace(r"\*", "([^/]*)").replace(r"\?", "([^/])"))
    return {_parts(wild, file): file for file in found}


def _parts(wild: re.Pattern[str], file: str) -> Parts:
    match = wild.fullmatch(file)
    assert match is not None
    return match.groups()
